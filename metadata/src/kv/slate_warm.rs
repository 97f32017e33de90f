//! Bringing into memory what reads of a tree just opened would fetch block after block, each as late as the store answers.

use std::collections::HashSet;

use futures::stream::{self, StreamExt};
use slatedb::{CacheTarget, Db, DbCacheManagerOps as _};
use tracing::debug;

use super::slate::SlateSettings;

/// Tables that are fetched at once.
const AT_ONCE: usize = 8;
/// A table's index and filters take about this part of it.
const META_PART: u64 = 64;

/// Fetches whole tables, the newest first, while they fit into three quarters of the memory for blocks; of all others indexes and
/// filters, while these fit into that of their own. What cannot be fetched is left to who reads it.
pub(super) async fn warm(db: &Db, settings: &SlateSettings) {
    let mut blocks = settings.block_cache_bytes / 4 * 3;
    let mut indexes = settings.index_cache_bytes;
    let mut seen = HashSet::new();
    let mut chosen = Vec::new();
    for view in db.manifest().all_sst_views() {
        let (id, bytes) = (view.sst.id, view.sst.estimate_size());
        if !seen.insert(id) || bytes / META_PART > indexes {
            continue;
        }
        indexes -= bytes / META_PART;
        chosen.push((id, CacheTarget::Filters));
        if bytes <= blocks {
            blocks -= bytes;
            chosen.push((id, CacheTarget::data::<&[u8], _>(..)));
        } else {
            chosen.push((id, CacheTarget::Index));
        }
    }
    let fetch = async |(id, target)| {
        if let Err(error) = db.warm_sst(id, &[target]).await {
            debug!(%error, "a table of the tree is fetched when it is read");
        }
    };
    stream::iter(chosen).for_each_concurrent(AT_ONCE, fetch).await;
}

#[cfg(test)]
mod tests {
    use forebay_io::object::{Bucket, OperationKind};

    use super::*;
    use crate::kv::{Batch, Durability, Engine as _, SlateEngine};

    const RECORDS: u64 = 2000;
    const BYTES: usize = 200;

    fn key(number: u64) -> String {
        format!("record/{number:08}")
    }

    /// Bytes of objects that are read for all records of a tree of some 400 KB, one after another, once it was opened again and
    /// nothing is fetched ahead any more. A manifest, which may be read meanwhile, has less than a tenth of a block.
    async fn bytes_read(block_cache_bytes: u64) -> u64 {
        let bucket = Bucket::in_memory();
        let bytes = || bucket.counters().of(OperationKind::Get).bytes;
        // So that they are in tables, and not in the log.
        let settings =
            SlateSettings { table_bytes: 256 << 10, block_cache_bytes, ..SlateSettings::default() };
        let engine = SlateEngine::open(&bucket, &settings).await.expect("open");
        for first in (0..RECORDS).step_by(100) {
            let mut batch = Batch::default();
            (first..first + 100).for_each(|number| batch.put(key(number), vec![number as u8; BYTES]));
            engine.write(batch, Durability::Buffered).await.expect("write");
        }
        engine.close().await.expect("close");
        let engine = SlateEngine::open(&bucket, &settings).await.expect("reopen");
        engine.warmed().await;
        let before = bytes();
        for number in 0..RECORDS {
            assert!(engine.get(key(number).as_bytes()).await.expect("get").is_some(), "{number}");
        }
        let read = bytes() - before;
        engine.close().await.expect("close");
        read
    }

    /// A walk over the directories of a fresh mount waited for the store at each block of records.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn who_reads_a_small_tree_waits_for_no_block() {
        let read = bytes_read(32 << 20).await;
        assert!(read < 64 << 10, "{read} bytes");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_a_tree_larger_than_memory_blocks_are_fetched_when_they_are_read() {
        let read = bytes_read(128 << 10).await;
        // In blocks of 64 KiB, each once or twice, where a block for each record would be 128 MiB.
        assert!((256 << 10..4 << 20).contains(&read), "{read} bytes");
    }
}
