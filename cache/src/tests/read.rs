//! Reads: how often the origin is asked, and what is returned when it fails.

use forebay_core::units::{KIB, MIB};
use forebay_core::{BLOCK_SIZE, ErrorKind};
use forebay_io::object::{FaultMode, OperationKind};
use forebay_io::rng::Rng;
use futures::future::join_all;

use super::support::{World, between, pick, rounds};
use crate::{Blocks, CacheSettings, Node, Residency};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_thousand_reads_of_one_block_are_one_request() {
    let world = World::new();
    let blob = world.put("k", 100 * KIB).await;
    let node = world.open_memory(64 * MIB).await;
    let reads: Vec<_> = (0..1000)
        .map(|_| {
            let (node, blob) = (node.clone(), blob.clone());
            tokio::spawn(async move { blob.check_all(&*node).await })
        })
        .collect();
    for read in reads {
        read.await.expect("read");
    }
    assert_eq!(world.gets(), 1);
    let counters = node.counters();
    assert_eq!((counters.origin_requests, counters.origin_bytes), (1, 100 * KIB));
    assert_eq!(counters.joined + counters.memory_hits, 999);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn random_reads_of_a_large_blob_fetch_each_block_once() {
    for seed in 0..rounds(3) {
        let world = World::new();
        let blob = world.put("large", 3 * BLOCK_SIZE + 1 + seed).await;
        let node = world.open_memory(256 * MIB).await;
        let tasks = (0..16).map(|task| {
            let (node, blob) = (node.clone(), blob.clone());
            tokio::spawn(async move {
                let random = Rng::seeded(seed * 1000 + task);
                for _ in 0..20 {
                    let range = blob.random_range(&random);
                    blob.check(&*node, range).await.expect("read");
                }
                blob.check_all(&*node).await;
            })
        });
        for task in join_all(tasks).await {
            task.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
        assert_eq!(world.gets(), 4, "seed {seed}");
    }
}

/// Of a full cache, a tenth took what was fetched ahead: it left before it was read, and was fetched again.
#[tokio::test]
async fn what_is_fetched_ahead_into_a_full_cache_is_there_when_it_is_read() {
    let world = World::new();
    let (hot, ahead) = (world.put("hot", 15 * BLOCK_SIZE).await, world.put("ahead", 32 * BLOCK_SIZE).await);
    let node = world.open_memory(16 * (BLOCK_SIZE + 256)).await;
    for _ in 0..2 {
        hot.check_all(&*node).await;
    }
    assert_eq!(node.counters().origin_requests, 15);
    for window in ahead.keys().chunks(8) {
        for key in window {
            node.fetch_ahead(key).await.expect("fetched");
        }
        for key in window {
            node.get(key, 0..key.len()).await.expect("read");
            node.spend(key);
        }
    }
    assert_eq!(node.counters().origin_requests, 15 + 32);
}

#[tokio::test]
async fn a_failure_reaches_all_who_waited_and_none_who_come_later() {
    let world = World::new();
    let blob = world.put("k", 10).await;
    let node = world.open_memory(MIB).await;
    let key = blob.name.block(0);
    world.faults.set_down(true);
    for read in join_all((0..10).map(|_| node.get(&key, 0..10))).await {
        assert_eq!(read.expect_err("fails").kind(), ErrorKind::Unavailable);
    }
    let counters = node.counters();
    assert_eq!((counters.origin_requests, counters.origin_failures), (1, 1));
    world.faults.set_down(false);
    blob.check_all(&*node).await;
    assert_eq!(node.counters().origin_requests, 2);
}

#[tokio::test]
async fn a_replaced_object_is_stale_and_never_mixed() {
    let world = World::new();
    let old = world.put("k", 2 * BLOCK_SIZE).await;
    let node = world.open_memory(64 * MIB).await;
    old.check(&*node, 0..10).await.expect("read");
    let new = world.put("k", 2 * BLOCK_SIZE).await;
    let error = node.get(&old.name.block(1), 0..1).await.expect_err("replaced");
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    old.check(&*node, 0..BLOCK_SIZE).await.expect("the cached block of the old version is still right");
    new.check_all(&*node).await;
    world.bucket.delete(&new.name.blob().key).await.expect("delete");
    new.check_all(&*node).await;
    let error = node.get(&old.name.block(1), 0..1).await.expect_err("gone");
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
}

#[tokio::test]
async fn cached_blocks_are_served_while_the_origin_is_down() {
    let world = World::new();
    let (warm, cold) = (world.put("warm", 10).await, world.put("cold", 10).await);
    let node = world.open_memory(64 * MIB).await;
    warm.check_all(&*node).await;
    world.faults.set_down(true);
    warm.check_all(&*node).await;
    let error = node.get(&cold.name.block(0), 0..1).await.expect_err("down");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("cold"), "{error}");
    // Even while a fetch hangs at the origin; its repetition gets through.
    world.faults.clear();
    world.faults.script(OperationKind::Get, 1, FaultMode::Hang);
    let slow = tokio::spawn({
        let (node, key) = (node.clone(), cold.name.block(0));
        async move { node.get(&key, 0..1).await }
    });
    warm.check_all(&*node).await;
    slow.await.expect("task").expect("read");
}

#[tokio::test]
async fn what_is_not_in_the_block_is_refused() {
    let world = World::new();
    let blob = world.put("k", 10).await;
    let node = world.open_memory(64 * MIB).await;
    let key = blob.name.block(0);
    for range in [0..11, 11..12] {
        let error = node.get(&key, range).await.expect_err("outside");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    assert_eq!(node.fill(&blob.name.block(1), false).await.expect_err("past").kind(), ErrorKind::Invalid);
    assert_eq!(node.get(&key, 10..10).await.expect("empty").len(), 0);
    assert_eq!(world.gets(), 0);
    assert!(node.get_now(&key, 0..1).is_none());
    node.insert(&key, blob.bytes.slice(..5));
    assert!(node.get_now(&key, 0..1).is_none(), "a short block is not taken");
    node.insert(&key, blob.bytes.clone());
    assert_eq!(node.get_now(&key, 2..4).expect("here"), blob.bytes.slice(2..4));
    assert!(node.get_now(&key, 2..11).is_none());
    assert_eq!(world.gets(), 0);
}

#[tokio::test]
async fn memory_stays_under_its_ceiling() {
    let mut evictions = 0;
    for seed in 0..rounds(3) {
        let random = Rng::seeded(seed);
        let world = World::new();
        let ceiling = between(&random, 5 * MIB..20 * MIB);
        let node = world.open_memory(ceiling).await;
        let mut blobs = Vec::new();
        for index in 0..30 {
            let largest = if random.chance(0.2) { 3 * BLOCK_SIZE } else { 300 * KIB };
            blobs.push(world.put(&format!("blob-{index}"), between(&random, 1..largest)).await);
        }
        for _ in 0..100 {
            let blob = pick(&random, &blobs);
            blob.check(&*node, blob.random_range(&random)).await.expect("read");
            let held = node.counters().memory_bytes;
            assert!(held <= ceiling, "seed {seed}: {held} bytes over {ceiling}");
        }
        evictions += node.counters().memory_evictions;
    }
    assert!(evictions > 0, "no ceiling was reached");
}

#[tokio::test]
async fn a_cache_without_memory_still_reads() {
    let world = World::new();
    let blob = world.put("k", BLOCK_SIZE + 1).await;
    let node = world.open_memory(0).await;
    blob.check_all(&*node).await;
    blob.check_all(&*node).await;
    assert_eq!((world.gets(), node.counters().memory_bytes), (4, 0));
    assert_eq!(node.stat(&blob.keys(), true).await.expect("stat"), [Residency::Absent; 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cancelled_readers_leave_nothing_behind() {
    for seed in 0..rounds(10) {
        let random = Rng::seeded(seed);
        let world = World::slow();
        let blob = world.put("k", 3 * BLOCK_SIZE).await;
        let settings = CacheSettings {
            memory_bytes: 64 * MIB,
            fetches: 1,
            fetch_bytes: 2 * BLOCK_SIZE,
            ..CacheSettings::default()
        };
        let node = world.open(settings).await;
        let mut readers = Vec::new();
        for _ in 0..60 {
            let (node, key) = (node.clone(), blob.name.block(between(&random, 0..3)));
            readers.push(tokio::spawn(async move { node.get(&key, 0..9).await }));
            if random.chance(0.3) {
                tokio::task::yield_now().await;
            }
            if random.chance(0.5) {
                readers.swap_remove(between(&random, 0..readers.len() as u64) as usize).abort();
            }
        }
        if random.chance(0.5) {
            readers.drain(..).for_each(|reader| reader.abort());
        }
        for reader in readers {
            reader.await.expect("not aborted").unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
        assert!(world.gets() <= 3, "seed {seed}");
        blob.check_all(&*node).await;
        assert_eq!(world.gets(), 3, "seed {seed}");
        node.close().await;
        assert_eq!(node.flights(), 0, "seed {seed}");
    }
}

/// With one place at the origin and its holder stuck, waiters that leave free their places in the queue.
#[tokio::test]
async fn fetches_that_nobody_waits_for_are_not_sent() {
    let world = World::new();
    let blob = world.put("k", 3 * BLOCK_SIZE).await;
    let settings = CacheSettings { fetches: 1, fetch_bytes: 2 * BLOCK_SIZE, ..CacheSettings::default() };
    // Far longer than this test: the fetch is cut off with the runtime.
    let node = Node::open(world.bucket.with_deadline_ms(3_600_000), settings).await.expect("open");
    world.faults.script(OperationKind::Get, 1, FaultMode::Hang);
    let spawn = |index| {
        let (node, key) = (node.clone(), blob.name.block(index));
        tokio::spawn(async move { node.get(&key, 0..1).await })
    };
    let _stuck = spawn(0);
    while world.gets() == 0 {
        tokio::task::yield_now().await;
    }
    let waiting = spawn(1);
    while node.flights() < 2 {
        tokio::task::yield_now().await;
    }
    waiting.abort();
    while node.flights() > 1 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.gets(), 1);
}

#[test]
fn settings_that_cannot_work_are_refused() {
    CacheSettings::default().validate().expect("valid");
    let bad = [
        CacheSettings { fetches: 0, ..CacheSettings::default() },
        CacheSettings { disk_deadline_ms: 0, ..CacheSettings::default() },
        CacheSettings { fetch_bytes: 2 * BLOCK_SIZE - 1, ..CacheSettings::default() },
        CacheSettings { directory: Some("/d".into()), disk_bytes: Some(MIB), ..CacheSettings::default() },
        CacheSettings { directory: Some("/d".into()), pin_bytes: Some(1 << 50), ..CacheSettings::default() },
    ];
    for settings in bad {
        let error = settings.validate().expect_err("refused");
        assert!(error.kind() == ErrorKind::Invalid && error.hint().is_some(), "{settings:?}: {error}");
    }
}

/// What readers have come past gives its memory to what is fetched next: a stream of any length runs through 32 MiB.
#[tokio::test]
async fn a_stream_runs_through_little_memory_and_fetches_each_block_once() {
    let world = World::new();
    let blob = world.put("large", 20 * BLOCK_SIZE).await;
    let node = world.open_memory(256 * MIB).await;
    for key in blob.keys() {
        blob.check(&*node, key.offset()..key.offset() + key.len()).await.expect("read");
        node.spend(&key);
        assert!(node.counters().memory_bytes <= 33 * MIB, "after {key}");
    }
    assert_eq!(world.gets(), 20);
    blob.check(&*node, 13 * BLOCK_SIZE..20 * BLOCK_SIZE).await.expect("a reader that comes a little late");
    assert_eq!(world.gets(), 20);
    assert_eq!(node.counters().memory_evictions, 0);
}

/// A second pass shows that the first reader kept nothing; its blocks stay.
#[tokio::test]
async fn what_is_read_again_stays_in_memory() {
    let world = World::new();
    let blob = world.put("large", 16 * BLOCK_SIZE).await;
    let node = world.open_memory(256 * MIB).await;
    for pass in 0..4 {
        for key in blob.keys() {
            blob.check(&*node, key.offset()..key.offset() + key.len()).await.expect("read");
            node.spend(&key);
        }
        // 7 of 16 blocks are still there when the second pass begins, and it wants the others first.
        assert!(world.gets() <= 32 && (pass > 0 || world.gets() == 16), "pass {pass}: {}", world.gets());
    }
    let gets = world.gets();
    blob.check_all(&*node).await;
    assert_eq!(world.gets(), gets, "everything is in memory");
}
