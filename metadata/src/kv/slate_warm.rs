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
    use std::time::Duration;

    use forebay_core::{Error, ErrorKind};
    use forebay_io::object::{Bucket, Condition, FaultMode, Faults, OperationKind};
    use futures::stream::TryStreamExt as _;

    use super::*;
    use crate::kv::{Batch, Durability, Engine as _, SlateEngine};

    const RECORDS: u64 = 2000;
    const BYTES: usize = 200;
    /// Where tables lie. A manifest may be read at any time.
    const TABLES: &str = ".forebay/tree/compacted";

    fn key(number: u64) -> String {
        format!("record/{number:08}")
    }

    /// A bucket with a tree of some 400 KB, in tables and not in the log.
    async fn grown() -> (Bucket, SlateSettings) {
        let bucket = Bucket::in_memory();
        let settings = SlateSettings { table_bytes: 256 << 10, ..SlateSettings::default() };
        let engine = SlateEngine::open(&bucket, &settings).await.expect("open");
        for first in (0..RECORDS).step_by(100) {
            let mut batch = Batch::default();
            (first..first + 100).for_each(|number| batch.put(key(number), vec![number as u8; BYTES]));
            engine.write(batch, Durability::Buffered).await.expect("write");
        }
        engine.close().await.expect("close");
        (bucket, settings)
    }

    async fn read_all(engine: &SlateEngine) -> Vec<Error> {
        let mut errors = Vec::new();
        for number in 0..RECORDS {
            match engine.get(key(number).as_bytes()).await {
                Ok(found) => assert!(found.is_some_and(|found| *found == [number as u8; BYTES]), "{number}"),
                Err(error) => errors.push(error),
            }
        }
        errors
    }

    /// Bytes of objects that are read for all records, one after another, once the tree was opened again and nothing is fetched
    /// ahead any more. A manifest, which may be read meanwhile, has less than a tenth of a block.
    async fn bytes_read(block_cache_bytes: u64) -> u64 {
        let (bucket, settings) = grown().await;
        let bytes = || bucket.counters().of(OperationKind::Get).bytes;
        let settings = SlateSettings { block_cache_bytes, ..settings };
        let engine = SlateEngine::open(&bucket, &settings).await.expect("reopen");
        engine.warmed().await;
        let before = bytes();
        assert_eq!(read_all(&engine).await.len(), 0);
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

    /// A record is one request then: of its block. It was three, of filters and index as well.
    #[tokio::test]
    async fn of_a_tree_larger_than_memory_indexes_and_filters_are_there() {
        let (bucket, settings) = grown().await;
        let settings = SlateSettings { block_cache_bytes: 64 << 10, ..settings };
        let faults = Faults::new();
        let bucket = bucket.with_faults(faults.of_keys_with(TABLES));
        let read = || bucket.counters().of(OperationKind::Get).bytes;
        let engine = SlateEngine::open(&bucket, &settings).await.expect("reopen");
        let before = read();
        engine.warmed().await;
        let ahead = read() - before;
        assert!(ahead < 64 << 10, "{ahead} bytes");
        let before = faults.seen(OperationKind::Get);
        assert!(engine.get(key(RECORDS / 2).as_bytes()).await.expect("get").is_some());
        assert_eq!(faults.seen(OperationKind::Get) - before, 1);
        engine.close().await.expect("close");
    }

    /// Fetching goes on once it is back.
    #[tokio::test]
    async fn a_store_that_goes_away_while_a_tree_is_fetched_is_waited_for() {
        let (bucket, settings) = grown().await;
        let faults = Faults::new();
        let bucket = bucket.with_deadline_ms(200).with_faults(&faults);
        let engine = SlateEngine::open(&bucket, &settings).await.expect("reopen");
        // Nothing else ran since: what is fetched behind an open has not begun.
        faults.set_down(true);
        while faults.injected() == 0 {
            tokio::task::yield_now().await;
        }
        assert!(!engine.is_warmed());
        faults.set_down(false);
        engine.warmed().await;
        let before = bucket.counters().of(OperationKind::Get).bytes;
        assert_eq!(read_all(&engine).await.len(), 0);
        let read = bucket.counters().of(OperationKind::Get).bytes - before;
        assert!(read < 64 << 10, "{read} bytes");
        engine.close().await.expect("close");
    }

    /// Those for its oldest table, of which who reads the newest record needs nothing.
    #[tokio::test]
    async fn a_tree_is_read_and_closed_while_requests_for_it_hang() {
        let (bucket, settings) = grown().await;
        let tables: Vec<_> = bucket.list(TABLES).try_collect().await.expect("list");
        let oldest = tables.iter().map(|table| table.key.as_str()).min().expect("a table");
        assert!(tables.len() > 1, "{oldest} has all");
        let faults = Faults::new();
        let bucket = bucket.with_faults(&faults);
        let engine = SlateEngine::open(&bucket, &settings).await.expect("reopen");
        faults.of_keys_with(oldest);
        faults.script(OperationKind::Get, 1, FaultMode::Hang).script(OperationKind::Get, 2, FaultMode::Hang);
        while faults.injected() < 2 {
            tokio::task::yield_now().await;
        }
        let work = async {
            assert!(engine.get(key(RECORDS - 1).as_bytes()).await.expect("get").is_some());
            assert!(!engine.is_warmed(), "they hang");
            engine.close().await.expect("close");
        };
        tokio::time::timeout(Duration::from_secs(60), work).await.expect("nobody waits for them");
    }

    #[tokio::test]
    async fn a_damaged_table_of_a_tree_that_is_fetched_is_told_to_who_reads_it() {
        let (bucket, settings) = grown().await;
        let tables: Vec<_> = bucket.list(TABLES).try_collect().await.expect("list");
        let largest = tables.iter().max_by_key(|table| table.size).expect("a table");
        let mut bytes = bucket.get_whole(&largest.key).await.expect("get").0.to_vec();
        // In its first block.
        bytes[1000] ^= 1;
        bucket.put(&largest.key, bytes.into(), Condition::Always).await.expect("put");
        let engine = SlateEngine::open(&bucket, &settings).await.expect("reopen");
        engine.warmed().await;
        let errors = read_all(&engine).await;
        assert!((1..RECORDS as usize / 2).contains(&errors.len()), "{} records", errors.len());
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::Corrupt), "{:?}", errors[0]);
        engine.close().await.expect("close");
    }
}
