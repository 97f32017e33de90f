//! The engine inside the bucket: SlateDB, an LSM tree of immutable objects under `.forebay/tree/`.
//!
//! Its log is in the bucket too, so the bucket alone holds the tree. Opening fences the writer before: that
//! one's next log object finds its name taken, and all its calls fail with `Conflict` from then on. Passing
//! store errors are retried for as long as they last; callers set their own deadlines. Does not use SlateDB's
//! transactions (the committer orders writes) and keeps no log outside the bucket (another host would open
//! without it and lose data silently).

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::Bucket;
use forebay_io::task::TaskGroup;
use slatedb::config::{
    CompactorOptions, GarbageCollectorOptions, ObjectStoreCacheOptions, PutOptions, ScanOptions, Settings,
    SstBlockSize,
};
use slatedb::db_cache::foyer::{FoyerCache, FoyerCacheOptions};
use slatedb::db_cache::{DbCache, SplitCache};
use slatedb::object_store::ObjectStore;
use slatedb::{CloseReason, Db, DbIterator, DbSnapshot, WriteBatch};

use super::slate_warm::warm;
use super::{Batch, Durability, Engine, Limits, Pair, Snapshot};

/// What is fetched for a record: the store answers as late for 64 KiB as for the default, 4 KiB, and the records of a
/// directory lie together.
const BLOCK: SstBlockSize = SstBlockSize::Block64Kib;

/// How SlateDB uses memory.
#[derive(Debug, Clone)]
pub struct SlateSettings {
    /// Bytes of decoded blocks kept in memory. Default 32 MiB: a map of hot entries stands in front.
    pub block_cache_bytes: u64,
    /// Bytes of indexes and filters kept in memory. Default 32 MiB, some 50 M keys' worth of filters.
    pub index_cache_bytes: u64,
    /// Bytes of changes held in memory before they leave as a sorted table. Default 16 MiB, which also bounds
    /// what an opening replays from the log.
    pub table_bytes: usize,
    /// How long opening may take. Default 2 minutes: SlateDB would retry for ever, and a replay of 64 MiB of log
    /// takes seconds.
    pub open_deadline: Duration,
}

impl Default for SlateSettings {
    fn default() -> Self {
        Self {
            block_cache_bytes: 32 << 20,
            index_cache_bytes: 32 << 20,
            table_bytes: 16 << 20,
            open_deadline: Duration::from_secs(120),
        }
    }
}

/// The engine inside the bucket.
pub struct SlateEngine {
    db: Db,
    epoch: u64,
    tasks: TaskGroup,
}

/// How long a close waits for what is fetched ahead.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

impl SlateEngine {
    /// Where the tree lies below the bucket's prefix.
    pub const PATH: &'static str = ".forebay/tree";
    const LIMITS: Limits = Limits { max_key_bytes: 60 << 10, max_value_bytes: 64 << 20 };

    /// Opens or creates the tree in `bucket`, and fences whoever wrote to it before. Of what is in it, the memory for blocks is
    /// filled behind this.
    pub async fn open(bucket: &Bucket, settings: &SlateSettings) -> Result<Self> {
        // A sync does not wait behind the bytes of files.
        let db = build(bucket.apart().store(), slate_settings(settings), settings).await?;
        let engine = Self::of(db);
        let (db, settings, stop) = (engine.db.clone(), settings.clone(), engine.tasks.stop());
        engine.tasks.spawn("warm", async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = warm(&db, &settings) => {}
            }
        });
        Ok(engine)
    }

    fn of(db: Db) -> Self {
        let epoch = db.manifest().writer_epoch();
        Self { db, epoch, tasks: TaskGroup::new("tree") }
    }

    /// Opens the tree in `bucket` as it is at this moment, whoever writes to it: what this one writes stays in this process, and
    /// nobody is fenced. To be read within minutes, and closed: the writer deletes objects that it needs no more.
    pub async fn open_aside(bucket: &Bucket, settings: &SlateSettings) -> Result<Self> {
        let alone = Settings {
            compactor_options: None,
            garbage_collector_options: None,
            // The bucket tries again by itself, for as long as it may; its error is to be heard then.
            object_store_max_retries: Some(0),
            ..slate_settings(settings)
        };
        Ok(Self::of(build(bucket.apart().store_aside(), alone, settings).await?))
    }

    /// Returns when nothing is fetched ahead any more.
    #[cfg(test)]
    pub(super) async fn warmed(&self) {
        while !self.is_warmed() {
            tokio::task::yield_now().await;
        }
    }

    #[cfg(test)]
    pub(super) fn is_warmed(&self) -> bool {
        self.tasks.running().is_empty()
    }

    /// As [`Engine::snapshot`], with the number of the last change that it shows.
    pub fn numbered_snapshot(&self) -> Result<(Box<dyn Snapshot>, u64)> {
        let snapshot = self.db.snapshot().map_err(convert)?;
        let last = snapshot.seq();
        Ok((Box::new(SlateSnapshot(snapshot)), last))
    }
}

async fn build(store: Arc<dyn ObjectStore>, own: Settings, settings: &SlateSettings) -> Result<Db> {
    let cache = block_cache(settings);
    let opening = Db::builder(SlateEngine::PATH, store)
        .with_settings(own)
        .with_db_cache(cache, 0)
        .with_sst_block_size(BLOCK)
        .build();
    let late = |_| Error::new(ErrorKind::Unavailable, "the tree in the bucket could not be opened in time");
    let opened = tokio::time::timeout(settings.open_deadline, opening).await.map_err(late)?;
    opened.map_err(|error| convert(error).context("the tree in the bucket"))
}

fn slate_settings(settings: &SlateSettings) -> Settings {
    Settings {
        // The committer says when to flush: one log object a durable batch and none in between.
        flush_interval: None,
        // The lowest that SlateDB accepts; together with `table_bytes` it bounds the replay.
        max_wal_flushes_before_l0_flush: 4096,
        l0_sst_size_bytes: settings.table_bytes,
        max_unflushed_bytes: settings.table_bytes * 4,
        // A fenced writer learns it at its next write in any case; polling only tells it sooner.
        manifest_poll_interval: Duration::from_secs(5),
        compactor_options: Some(CompactorOptions::default()),
        garbage_collector_options: Some(GarbageCollectorOptions {
            // A writer that sleeps past the age of its fence would find the name free and acknowledge.
            wal_fence_options: None,
            ..GarbageCollectorOptions::default()
        }),
        object_store_cache_options: ObjectStoreCacheOptions::default(),
        ..Settings::default()
    }
}

fn block_cache(settings: &SlateSettings) -> Arc<dyn DbCache> {
    let cache = |max_capacity| -> Option<Arc<dyn DbCache>> {
        Some(Arc::new(FoyerCache::new_with_opts(FoyerCacheOptions { max_capacity, shards: 4 })))
    };
    let blocks = cache(settings.block_cache_bytes);
    Arc::new(SplitCache::new().with_block_cache(blocks).with_meta_cache(cache(settings.index_cache_bytes)))
}

impl Drop for SlateEngine {
    fn drop(&mut self) {
        self.tasks.stop().cancel();
    }
}

#[async_trait]
impl Engine for SlateEngine {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.db.get(key).await.map_err(convert).map(|value| value.map(detach))
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        let Some(range) = range(start, end, limit) else { return Ok(Vec::new()) };
        collect(self.db.scan_with_options(range, &scan_options()).await.map_err(convert)?, limit).await
    }

    fn get_now(&self, _key: &[u8]) -> Option<Result<Option<Bytes>>> {
        None
    }

    fn scan_now(&self, _start: &[u8], _end: &[u8], _limit: usize) -> Option<Result<Vec<Pair>>> {
        None
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        Ok(self.numbered_snapshot()?.0)
    }

    async fn write(&self, batch: Batch, durability: Durability) -> Result<()> {
        batch.check(&Self::LIMITS)?;
        if !batch.is_empty() {
            let mut changes = WriteBatch::new();
            for (key, value) in batch.changes() {
                match value {
                    Some(value) => {
                        changes.put_bytes_with_options(key.clone(), value.clone(), &PutOptions::default())
                    }
                    None => changes.delete(key),
                }
            }
            self.db.write(changes).await.map_err(convert)?;
        }
        match durability {
            Durability::Buffered => Ok(()),
            Durability::Durable => self.sync().await,
        }
    }

    async fn sync(&self) -> Result<()> {
        self.db.flush().await.map_err(convert)
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn limits(&self) -> Limits {
        Self::LIMITS
    }

    async fn close(&self) -> Result<()> {
        self.tasks.shutdown(CLOSE_DEADLINE).await;
        match self.db.status().close_reason {
            Some(CloseReason::Clean) => Ok(()),
            _ => self.db.close().await.map_err(convert),
        }
    }
}

struct SlateSnapshot(Arc<DbSnapshot>);

#[async_trait]
impl Snapshot for SlateSnapshot {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.0.get(key).await.map_err(convert).map(|value| value.map(detach))
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        let Some(range) = range(start, end, limit) else { return Ok(Vec::new()) };
        collect(self.0.scan_with_options(range, &scan_options()).await.map_err(convert)?, limit).await
    }
}

/// The range to scan, or `None` when nothing can be in it.
fn range(start: &[u8], end: &[u8], limit: usize) -> Option<(Bound<Bytes>, Bound<Bytes>)> {
    let start_bound = match start {
        [] => Bound::Unbounded,
        _ => Bound::Included(Bytes::copy_from_slice(start)),
    };
    match end {
        _ if limit == 0 => None,
        [] => Some((start_bound, Bound::Unbounded)),
        _ if start >= end => None,
        _ => Some((start_bound, Bound::Excluded(Bytes::copy_from_slice(end)))),
    }
}

/// Directory listings read long runs once: fetch them in large steps, and keep blocks for the next listing.
fn scan_options() -> ScanOptions {
    ScanOptions {
        read_ahead_bytes: 256 << 10,
        cache_blocks: true,
        max_fetch_tasks: 2,
        ..ScanOptions::default()
    }
}

async fn collect(mut pairs: DbIterator, limit: usize) -> Result<Vec<Pair>> {
    let mut found = Vec::new();
    while found.len() < limit {
        match pairs.next().await.map_err(convert)? {
            Some(pair) => found.push((detach(pair.key), detach(pair.value))),
            None => break,
        }
    }
    Ok(found)
}

/// Copies bytes out of the block they were read from, which they would otherwise keep in memory whole.
pub(super) fn detach(bytes: Bytes) -> Bytes {
    Bytes::copy_from_slice(&bytes)
}

pub(super) fn convert(error: slatedb::Error) -> Error {
    use slatedb::ErrorKind as Slate;
    let (kind, hint) = match error.kind() {
        Slate::Closed(CloseReason::Fenced) => {
            (ErrorKind::Conflict, Some("another mount took this volume over; unmount this one"))
        }
        Slate::Closed(CloseReason::Clean) => (ErrorKind::Conflict, None),
        Slate::Data => (
            ErrorKind::Corrupt,
            Some("the tree under .forebay/tree is damaged or was written by another version of Forebay"),
        ),
        Slate::Unavailable => (ErrorKind::Unavailable, None),
        Slate::Invalid => (ErrorKind::Invalid, None),
        _ => (ErrorKind::Bug, None),
    };
    let converted = Error::new(kind, error.to_string());
    match hint {
        Some(hint) => converted.with_hint(hint),
        None => converted,
    }
}
