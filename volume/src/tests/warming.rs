//! Warmup: what it fetches, what it proves.

use forebay_core::units::MIB;
use forebay_core::{InodeId, ObjectKey};
use forebay_io::object::{Bucket, Condition};
use tokio_util::sync::CancellationToken;

use super::support::{Fixture, READ, create, open, pattern, run};
use crate::warmup::{Outcome, Progress, Request, warmup};

async fn filled() -> Fixture {
    let fixture = Fixture::new(Bucket::in_memory());
    for number in 0..20_u64 {
        let key = ObjectKey::new(format!("d{}/f{number}", number % 3));
        fixture.bucket.put(&key, pattern(number, 0..10_000), Condition::Always).await.expect("put");
    }
    let large = pattern(99, 0..9 * MIB);
    fixture.bucket.put(&ObjectKey::new("large"), large, Condition::Always).await.expect("put");
    fixture
}

fn all() -> Request {
    Request { paths: vec![String::new()], pin: false, dry_run: false, concurrency: 8 }
}

async fn warm(volume: &crate::Volume, request: &Request) -> Outcome {
    warmup(volume, request, |_| {}, &CancellationToken::new()).await.expect("warmup")
}

/// Promise: a warmup fetches each block once, proves that it is there, and fetches nothing when run again.
#[test]
fn a_warmup_fetches_once_and_proves() {
    run(async {
        let fixture = filled().await;
        let volume = fixture.open().await;
        let first = warm(&volume, &all()).await;
        assert!(first.is_complete(), "{first:?}");
        assert_eq!((first.progress.files, first.blocks, first.fetched), (21, 23, 23));
        assert_eq!(first.progress.origin_bytes, 20 * 10_000 + 9 * MIB);
        let second = warm(&volume, &all()).await;
        assert!(second.is_complete());
        assert_eq!((second.fetched, second.already), (0, 23));
        let before = fixture.bucket.counters().requests();
        let file = open(&volume, "large", READ).await;
        assert!(file.read(5 * MIB, 4096).await.expect("read") == pattern(99, 5 * MIB..5 * MIB + 4096));
        assert_eq!(fixture.bucket.counters().requests(), before, "a warm read asks the store nothing");
        file.release().await.expect("release");
    });
}

/// Promise: what is not in the cache at the end is named.
#[test]
fn a_cache_too_small_is_reported_with_what_is_missing() {
    run(async {
        let mut fixture = filled().await;
        fixture.cache.memory_bytes = 2 * MIB;
        let volume = fixture.open().await;
        let outcome = warm(&volume, &all()).await;
        assert!(!outcome.is_complete());
        assert!(outcome.missing.iter().any(|name| name.starts_with("large bytes ")), "{:?}", outcome.missing);
        assert_eq!(outcome.proved + outcome.missing_blocks, outcome.blocks);
    });
}

/// Warms everything, and does `change` as soon as the last byte is there and nothing is proved yet.
async fn warm_while(volume: &crate::Volume, change: impl AsyncFn() + Send + Sync) -> Outcome {
    let mut is_done = false;
    let progress = |at: &Progress| {
        if !std::mem::replace(&mut is_done, at.done_bytes == at.bytes) && at.done_bytes == at.bytes {
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(change()));
        }
    };
    warmup(volume, &all(), progress, &CancellationToken::new()).await.expect("warmup")
}

/// A file that came during a warmup was told as "0 of 23 blocks are not in the cache", one that went as "1 of 23".
#[test]
fn what_comes_and_goes_during_a_warmup_is_no_block_that_is_missing() {
    run(async {
        let fixture = filled().await;
        let volume = fixture.open().await;
        let came = warm_while(&volume, async || {
            let file = create(&volume, "a").await;
            file.write(0, pattern(1, 0..1_000)).await.expect("write");
            file.release().await.expect("release");
        });
        let came = came.await;
        assert!(came.is_complete() && came.blocks == 24 && came.proved == 24, "{came:?}");
        let went = warm_while(&volume, async || {
            volume.unlink(InodeId::ROOT, b"large").await.expect("unlink");
        });
        let went = went.await;
        assert!(went.is_complete() && went.blocks == 21 && went.proved == 21, "{went:?}");
    });
}

#[test]
fn a_dry_run_fetches_nothing() {
    run(async {
        let fixture = filled().await;
        let volume = fixture.open().await;
        let outcome = warm(&volume, &Request { dry_run: true, ..all() }).await;
        assert_eq!((outcome.blocks, outcome.already, outcome.missing_blocks), (23, 0, 23));
        assert_eq!(volume.blocks().counters().origin_requests, 0);
    });
}

/// A file of any length is read front to back with one GET a block and 32 MiB of memory.
#[test]
fn a_long_file_is_read_once_through_little_memory() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.cache.memory_bytes = 256 * MIB;
        let key = ObjectKey::new("long");
        let data = bytes::Bytes::from(vec![7; 80 << 20]);
        fixture.bucket.put(&key, data, Condition::Always).await.expect("put");
        let volume = fixture.open().await;
        let file = open(&volume, "long", READ).await;
        for at in 0..80 {
            assert_eq!(file.read(at * MIB, MIB as u32).await.expect("read").len() as u64, MIB);
        }
        let counters = volume.blocks().counters();
        assert_eq!((counters.origin_requests, counters.memory_evictions), (20, 0));
        assert!(counters.memory_bytes <= 33 * MIB, "{counters:?}");
        file.release().await.expect("release");
    });
}
