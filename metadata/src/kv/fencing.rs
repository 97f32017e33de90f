//! Two writers and failing stores: whoever is fenced acknowledges nothing, and nothing acknowledged is lost.

use std::sync::Arc;

use forebay_core::ErrorKind;
use forebay_io::object::{Bucket, Faults};
use futures::TryStreamExt;

use super::{Batch, Durability, Engine, SlateEngine, SlateSettings};
use crate::testing::{Chance, fill, rounds};

fn numbered(number: u64) -> Batch {
    let mut batch = Batch::default();
    batch.put(format!("left/{number:08}"), number.to_string());
    batch.put(format!("right/{number:08}"), number.to_string());
    batch
}

async fn holds(engine: &dyn Engine, number: u64) -> (bool, bool) {
    let left = engine.get(format!("left/{number:08}").as_bytes()).await.expect("get").is_some();
    (left, engine.get(format!("right/{number:08}").as_bytes()).await.expect("get").is_some())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fenced_writer_acknowledges_nothing_and_loses_nothing() {
    let mut chance = Chance::fresh();
    for _ in 0..rounds(5) {
        let bucket = Bucket::in_memory();
        let first = Arc::new(SlateEngine::open(&bucket, &SlateSettings::default()).await.expect("first"));
        let writer = tokio::spawn({
            let first = first.clone();
            async move {
                for number in 0.. {
                    if let Err(error) = first.write(numbered(number), Durability::Durable).await {
                        return (number, error);
                    }
                }
                unreachable!("it is fenced long before")
            }
        });
        tokio::time::sleep(std::time::Duration::from_micros(chance.below(20_000))).await;
        let second = SlateEngine::open(&bucket, &SlateSettings::default()).await.expect("second");
        assert!(second.epoch() > first.epoch());
        let (refused, error) = writer.await.expect("writer");
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        assert!(error.hint().is_some());
        for number in 0..refused {
            assert_eq!(holds(&second, number).await, (true, true), "acknowledged {number} of {refused}");
        }
        assert_ne!(holds(&second, refused).await, (true, false), "half of a batch");
        for number in refused + 1..refused + 4 {
            first.write(numbered(number), Durability::Durable).await.expect_err("fenced");
            assert_eq!(holds(&second, number).await, (false, false));
        }
        first.sync().await.expect_err("fenced");
        second.write(numbered(1_000_000), Durability::Durable).await.expect("the second goes on");
        second.close().await.expect("close");
    }
}

#[tokio::test(start_paused = true)]
async fn failing_puts_lose_no_acknowledged_batch() {
    for _ in 0..rounds(3) {
        let memory = Bucket::in_memory();
        // Faults outlast the bucket's own patience now and then, and SlateDB's retries have to settle them.
        let faults = Faults::random(Chance::fresh().next(), 0.25);
        let bucket = memory.with_faults(&faults).with_deadline_ms(300);
        let engine = SlateEngine::open(&bucket, &SlateSettings::default()).await.expect("open");
        for number in 0..60 {
            engine.write(numbered(number), Durability::Durable).await.expect("it is retried");
        }
        // No close: as after a crash.
        drop(engine);
        let reopened = SlateEngine::open(&memory, &SlateSettings::default()).await.expect("reopen");
        for number in 0..60 {
            assert_eq!(holds(&reopened, number).await, (true, true), "{number}");
        }
    }
}

/// A sync stood behind all parts of files that waited for the store.
#[tokio::test(start_paused = true)]
async fn a_batch_does_not_wait_behind_the_bytes_of_files() {
    let bucket = Bucket::in_memory();
    let engine = SlateEngine::open(&bucket, &SlateSettings::default()).await.expect("open");
    let _busy = fill(&bucket).await;
    let written = engine.write(numbered(0), Durability::Durable);
    let written = tokio::time::timeout(std::time::Duration::from_secs(60), written).await;
    written.expect("it has a place of its own").expect("write");
    assert_eq!(holds(&engine, 0).await, (true, true));
}

#[tokio::test]
async fn a_durable_batch_takes_one_put() {
    let bucket = Bucket::in_memory();
    let engine = SlateEngine::open(&bucket, &SlateSettings::default()).await.expect("open");
    let objects = async || {
        use futures::StreamExt;
        bucket.list(".forebay/tree/wal").count().await
    };
    let before = objects().await;
    for number in 0..10 {
        engine.write(numbered(100 + number), Durability::Buffered).await.expect("write");
    }
    assert_eq!(objects().await, before, "buffered batches send nothing");
    engine.write(numbered(0), Durability::Durable).await.expect("write");
    assert_eq!(objects().await, before + 1);
    engine.sync().await.expect("sync");
    assert_eq!(objects().await, before + 1, "nothing is new");
}

/// Who only looks sees what was synced, fences nobody, and leaves the bucket as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_looks_at_a_tree_in_a_bucket_changes_nothing() {
    let bucket = Bucket::in_memory();
    let put = |key: &'static [u8]| {
        let mut batch = Batch::default();
        batch.put(key, &b"v"[..]);
        batch
    };
    let objects = async || {
        let found: Vec<_> = bucket.list("").try_collect().await.expect("listed");
        found.into_iter().map(|info| (info.key, info.version)).collect::<Vec<_>>()
    };
    let writer = SlateEngine::open(&bucket, &SlateSettings::default()).await.expect("open");
    writer.write(put(b"a"), Durability::Durable).await.expect("written");
    let before = objects().await;
    let reader = bucket.read_only();
    for _ in 0..2 {
        let view = SlateEngine::open_aside(&reader, &SlateSettings::default()).await.expect("open");
        view.write(put(b"own"), Durability::Durable).await.expect("written aside");
        let seen = view.snapshot().expect("snapshot").scan(&[], &[], 9).await.expect("scan");
        assert_eq!(seen.iter().map(|(key, _)| &key[..]).collect::<Vec<_>>(), [&b"a"[..], b"own"]);
        view.close().await.expect("closed");
    }
    assert_eq!(objects().await, before);
    writer.write(put(b"b"), Durability::Durable).await.expect("nobody fenced it");
    let view = SlateEngine::open_aside(&reader, &SlateSettings::default()).await.expect("open");
    let seen = view.scan(&[], &[], 9).await.expect("scan");
    assert_eq!(seen.iter().map(|(key, _)| &key[..]).collect::<Vec<_>>(), [&b"a"[..], b"b"]);
    view.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// It followed the writer's later manifests, which know nothing of its own, and ended in a panic.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_looks_at_a_tree_is_not_disturbed_by_its_writer() {
    let bucket = Bucket::in_memory();
    // Each batch leaves as a table of its own, which a manifest names.
    let small = SlateSettings { table_bytes: 4096, ..SlateSettings::default() };
    let writer = SlateEngine::open(&bucket, &small).await.expect("open");
    let fill = async |from: u32| {
        for number in from..from + 12 {
            let mut batch = Batch::default();
            batch.put(format!("{number:08}").into_bytes(), vec![b'v'; 1000]);
            writer.write(batch, Durability::Durable).await.expect("written");
        }
    };
    let manifests = async || {
        use futures::StreamExt;
        bucket.list(".forebay/tree/manifest").count().await
    };
    fill(0).await;
    let reader = bucket.read_only();
    let view = SlateEngine::open_aside(&reader, &SlateSettings::default()).await.expect("open");
    let snapshot = view.snapshot().expect("snapshot");
    let before = manifests().await;
    fill(40).await;
    for _ in 0..1000 {
        if manifests().await >= before + 2 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(manifests().await >= before + 2, "the writer went on");
    // What this one has in memory leaves, to its own memory, at the latest as it is closed.
    view.write(numbered(1_000_000), Durability::Durable).await.expect("written aside");
    assert_eq!(snapshot.scan(&[], &[], 1000).await.expect("scan").len(), 12, "of one moment");
    view.close().await.expect("closed");
    writer.close().await.expect("closed");
}
