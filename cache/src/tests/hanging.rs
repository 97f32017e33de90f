//! A disk under the cache that hangs: reads and writes that never come back.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::units::{KIB, MIB};
use forebay_core::{BlockKey, Error, ErrorKind};
use forebay_io::task::Stop;
use futures::stream;

use super::disk::{files, fill_all, settings, temporary, wait_until_all_is_done};
use super::support::World;
use crate::{Blocks, CacheSettings, Fill, Node, Residency, fill_many};

/// Puts pipes in place of block files, whose other ends are open, so that who reads from one hangs, until these are dropped.
fn hang(directory: &Path) -> Vec<File> {
    let files = files(directory);
    for file in &files {
        std::fs::remove_file(file).expect("remove");
    }
    assert!(Command::new("mkfifo").args(&files).status().is_ok_and(|status| status.success()));
    let open = |file| File::options().read(true).write(true).open(file).expect("a pipe");
    files.iter().map(open).collect()
}

/// Lets go of who hangs: what is read ends at once, and who tries once more finds no file.
fn go_on(directory: &Path, pipes: &mut Vec<File>) {
    files(directory).iter().for_each(|pipe| std::fs::remove_file(pipe).expect("remove"));
    pipes.clear();
}

/// A cache on a disk, or a server, that hangs hung every read of what it held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_costs_copies_and_no_reads() {
    for io_uring in [true, false] {
        let (world, directory) = (World::new(), temporary());
        let mut blobs = Vec::new();
        for index in 0..40 {
            blobs.push(world.put(&format!("blob-{index}"), 100 * KIB).await);
        }
        let settings = CacheSettings { memory_bytes: 0, ..settings(directory.path(), 64 * MIB) };
        let settings = CacheSettings { disk_deadline_ms: 2_000, io_uring, ..settings };
        let node = world.open(settings).await;
        for blob in &blobs {
            fill_all(&node, blob, false).await;
        }
        blobs[0].check_all(&*node).await;
        assert_eq!((world.gets(), node.counters().disk_hits), (40, 1));
        let mut pipes = hang(directory.path());
        // More than may wait for the disk at once.
        let reads = futures::future::join_all(blobs.iter().map(|blob| blob.check_all(&*node)));
        let read = tokio::time::timeout(Duration::from_secs(30), reads).await;
        if read.is_err() {
            go_on(directory.path(), &mut pipes);
        }
        read.expect("none waits for the disk");
        assert_eq!((world.gets(), node.counters().disk_stalls), (80, 1));
        // It is left alone now, also by threads that may wait.
        assert_eq!(node.get_near(&blobs[0].name.block(0), 0..9), None);
        let again = node.stat(&blobs[0].keys(), true).await.expect("stat");
        assert_eq!(again, [Residency::Absent]);
        for blob in &blobs {
            blob.check_all(&*node).await;
        }
        assert_eq!((world.gets(), node.counters().disk_stalls), (120, 1));
        let after = world.put("after", 100 * KIB).await;
        let pin = node.fill(&after.name.block(0), true).await.expect_err("pins tell");
        assert_eq!(pin.kind(), ErrorKind::Unavailable, "{pin}");
        let pin = node.fill(&blobs[0].name.block(0), true).await.expect_err("also of what lies there");
        assert_eq!(pin.kind(), ErrorKind::Unavailable, "{pin}");
        // What answers is asked again.
        go_on(directory.path(), &mut pipes);
        let hits = node.counters().disk_hits;
        for _ in 0..1000 {
            let _ = node.fill(&after.name.block(0), false).await;
            after.check_all(&*node).await;
            if node.counters().disk_hits > hits {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(node.counters().disk_hits, hits + 1);
    }
}

/// What `checks` comes to while the disk of `node` takes no blocks; it must come to its end without it.
fn while_no_block_is_taken<T>(node: &Node, checks: impl Future<Output = T>) -> T {
    let (locked, is_locked) = std::sync::mpsc::channel();
    let (held, let_go) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _held = node.disk_writes().lock();
            locked.send(()).expect("the test waits");
            // Until the other end is dropped.
            let _ = let_go.recv();
        });
        let _held = held;
        is_locked.recv().expect("it hangs");
        let limited = tokio::time::timeout(Duration::from_secs(30), checks);
        let ended = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(limited));
        ended.expect("nobody waits for the disk")
    })
}

/// A cache that gives its disk 400 ms, 2.4 s for what is written, and blocks, the first of which is pinned.
async fn impatient(world: &World, directory: &Path) -> (Arc<Node>, Vec<BlockKey>) {
    let mut keys = Vec::new();
    for index in 0..100 {
        keys.push(world.put(&format!("blob-{index}"), 100 * KIB).await.name.block(0));
    }
    let node = world.open(CacheSettings { disk_deadline_ms: 400, ..settings(directory, 64 * MIB) }).await;
    node.fill(&keys[0], true).await.expect("it works");
    (node, keys)
}

fn assert_hangs(error: &Error, directory: &Path) {
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains(&directory.display().to_string()), "{error}");
}

/// What was read ahead waited for the disk, with all its blocks in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_fetched_ahead_waits_for_no_disk() {
    let (world, directory) = (World::new(), temporary());
    let (node, keys) = impatient(&world, directory.path()).await;
    while_no_block_is_taken(&node, async {
        for key in &keys[1..41] {
            node.fetch_ahead(key).await.expect("fetched");
        }
        assert_eq!((node.running().len(), node.counters().disk_skips), (32, 8));
    });
    wait_until_all_is_done(&node).await;
    let found = node.stat(&keys[..41], true).await.expect("stat");
    let counts =
        [Residency::Disk, Residency::Memory].map(|at| found.iter().filter(|found| **found == at).count());
    assert_eq!((counts, world.gets()), ([33, 8], 41));
}

/// It never ended, and could not be cancelled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_takes_no_blocks_ends_a_warmup() {
    for pin in [true, false] {
        let (world, directory) = (World::new(), temporary());
        let (node, keys) = impatient(&world, directory.path()).await;
        while_no_block_is_taken(&node, async {
            let (keys, warm) = (stream::iter(keys.clone()), Fill { concurrency: 8, pin });
            let report = fill_many(&*node, keys, warm, |_| (), &Stop::new()).await;
            // What was there may be seen before it is known that the disk hangs.
            assert_eq!((report.total.blocks, report.total.failed), (100, 99), "{:?}", report.failures);
            report.failures.iter().for_each(|(_, error)| assert_hangs(error, directory.path()));
            // Those that were on their way, and none since.
            assert_eq!((world.gets(), node.counters().disk_stalls), (9, 1));
        });
        wait_until_all_is_done(&node).await;
        node.fill(&keys[50], pin).await.expect("it works again");
        assert_eq!(node.stat(&keys[50..51], true).await.expect("stat"), [Residency::Disk]);
    }
}

/// The same of pins that are taken back, and of blocks that are there and are to be pinned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_ends_a_change_of_pins() {
    for pin in [true, false] {
        let (world, directory) = (World::new(), temporary());
        let (node, keys) = impatient(&world, directory.path()).await;
        node.fill(&keys[1], false).await.expect("filled");
        while_no_block_is_taken(&node, async {
            let changed = if pin {
                node.fill(&keys[1], true).await.map(drop)
            } else {
                node.unpin_all().await.map(drop)
            };
            assert_hangs(&changed.expect_err("it hangs"), directory.path());
        });
        let again = async {
            while node.fill(&keys[1], true).await.is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), again).await.expect("it works again");
    }
}

/// Blocks that a warmup had fetched waited for a slow disk outside of all ceilings, as many as `--jobs` said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_warmup_fetched_keeps_its_place_until_it_is_written() {
    let (world, directory) = (World::new(), temporary());
    let (huge, other) = (world.put("huge", 160 * MIB).await, world.put("other", 4 * MIB).await);
    let node = world.open(CacheSettings { memory_bytes: 0, ..settings(directory.path(), 256 * MIB) }).await;
    let (cancel, warm) = (Stop::new(), Fill { concurrency: 40, pin: false });
    let mut filling = Box::pin(fill_many(&*node, stream::iter(huge.keys()), warm, |_| (), &cancel));
    while_no_block_is_taken(&node, async {
        while world.gets() < 9 {
            let early = tokio::time::timeout(Duration::from_millis(10), &mut filling).await;
            assert!(early.is_err(), "nothing is written");
        }
        let late = tokio::time::timeout(Duration::from_millis(500), &mut filling).await;
        assert!(late.is_err(), "nothing is written");
        // Of 48 MiB for blocks on their way from the origin three quarters.
        assert_eq!(world.gets(), 9);
        // Readers have the rest.
        other.check_all(&*node).await;
    });
    let report = filling.await;
    assert_eq!((report.total.from_origin, report.total.failed, world.gets()), (40, 0, 41), "{report:?}");
    wait_until_all_is_done(&node).await;
    assert_eq!(node.counters().disk_writes, 41);
}
