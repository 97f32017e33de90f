//! The cache of this process: composes tiers and origin behind [`Blocks`].

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{BlockKey, Error, ErrorKind, Result};
use forebay_io::object::Bucket;
use tokio_util::task::TaskTracker;

use crate::block::{Block, BlockId, check_within};
use crate::flight::{Flights, Role};
use crate::get::{Sources, get};
use crate::origin::Origin;
use crate::tier::memory::MemoryTier;
use crate::{Blocks, CacheSettings, Counters, Filled, Residency};

/// A cache in this process, over one bucket.
#[derive(Debug)]
pub struct Node {
    sources: Arc<Sources>,
    memory_hits: AtomicU64,
    joined: AtomicU64,
}

impl Node {
    /// Opens a cache of blobs of `bucket`; must be called in an async runtime, whose tasks then do its work.
    ///
    /// # Errors
    /// `Invalid` when the settings contradict themselves.
    pub async fn open(bucket: Bucket, settings: CacheSettings) -> Result<Arc<Self>> {
        settings.validate()?;
        let sources = Arc::new(Sources {
            memory: MemoryTier::new(settings.memory_bytes),
            origin: Origin::new(bucket, &settings),
            flights: Flights::default(),
            tasks: TaskTracker::new(),
        });
        Ok(Arc::new(Self { sources, memory_hits: AtomicU64::new(0), joined: AtomicU64::new(0) }))
    }

    /// Waits until nothing is under way any more. Reads still work afterwards, but nobody waits for them.
    pub async fn close(&self) {
        self.sources.tasks.close();
        self.sources.tasks.wait().await;
    }

    /// Fetches under way.
    #[cfg(test)]
    pub(crate) fn flights(&self) -> usize {
        self.sources.flights.len()
    }

    /// A block and where it came from, counted.
    async fn block(&self, key: &BlockKey) -> Result<(Block, Filled)> {
        let (block, filled, role) = get(&self.sources, key).await?;
        match (filled, role) {
            (_, Role::Joined) => self.joined.fetch_add(1, Relaxed),
            (Filled::Memory, Role::Led) => self.memory_hits.fetch_add(1, Relaxed),
            _ => 0,
        };
        Ok((block, if role == Role::Joined { Filled::Memory } else { filled }))
    }
}

#[async_trait]
impl Blocks for Node {
    async fn get(&self, key: &BlockKey, within: Range<u64>) -> Result<Bytes> {
        check_within(key, &within)?;
        if within.is_empty() {
            return Ok(Bytes::new());
        }
        let (block, _) = self.block(key).await?;
        block.slice(key, within)
    }

    fn get_now(&self, key: &BlockKey, within: Range<u64>) -> Option<Bytes> {
        let block = self.sources.memory.get(&BlockId::of(key))?;
        let bytes = block.slice(key, within).ok()?;
        self.memory_hits.fetch_add(1, Relaxed);
        Some(bytes)
    }

    async fn fill(&self, key: &BlockKey, pin: bool) -> Result<Filled> {
        if key.is_empty() {
            return Err(Error::invalid(format!("{key} lies past its end")));
        }
        if pin {
            let hint = "give the cache a directory";
            return Err(
                Error::new(ErrorKind::Unsupported, "a cache in memory only cannot pin").with_hint(hint)
            );
        }
        self.block(key).await.map(|(_, filled)| filled)
    }

    async fn stat(&self, keys: &[BlockKey], _verify: bool) -> Result<Vec<Residency>> {
        let stat = |key| match self.sources.memory.contains(&BlockId::of(key)) {
            true => Residency::Memory,
            false => Residency::Absent,
        };
        Ok(keys.iter().map(stat).collect())
    }

    fn insert(&self, key: &BlockKey, bytes: Bytes) {
        if bytes.len() as u64 != key.len() || bytes.is_empty() {
            tracing::error!(%key, got = bytes.len(), "bytes of another length were offered for a block");
            return;
        }
        self.sources.memory.insert(BlockId::of(key), Block::new(bytes));
    }

    fn counters(&self) -> Counters {
        let origin = self.sources.origin.counts();
        Counters {
            memory_hits: self.memory_hits.load(Relaxed),
            joined: self.joined.load(Relaxed),
            origin_requests: origin.requests,
            origin_bytes: origin.bytes,
            origin_failures: origin.failures,
            memory_evictions: self.sources.memory.evictions(),
            memory_bytes: self.sources.memory.bytes(),
            ..Counters::default()
        }
    }
}
