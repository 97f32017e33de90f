//! Reading small files one after another, and what readers leave behind.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use forebay_cache::Residency;
use forebay_core::{ErrorKind, InodeId, ObjectKey, Timestamp};
use forebay_io::object::{Bucket, Condition, FaultMode, Faults, OperationKind};

use super::support::{Fixture, READ, create, open, pattern, run};
use crate::Volume;

const FILES: u64 = 400;

async fn filled() -> Fixture {
    let fixture = Fixture::new(Bucket::in_memory());
    for number in 0..FILES {
        let key = ObjectKey::new(format!("d/{number:04}"));
        fixture.bucket.put(&key, pattern(number, 0..5000), Condition::Always).await.expect("put");
    }
    fixture
}

async fn read(volume: &Arc<Volume>, number: u64) {
    let file = open(volume, &format!("d/{number:04}"), READ).await;
    let bytes = match file.read_now(0, 1 << 20, false) {
        Some(bytes) => bytes,
        None => file.read(0, 1 << 20).await.expect("read"),
    };
    assert!(bytes == pattern(number, 0..5000), "file {number}");
    file.release().await.expect("release");
}

/// The files of which the cache holds bytes.
async fn cached(volume: &Arc<Volume>) -> Vec<u64> {
    let directory = forebay_metadata::tree::resolve(&**volume.tree(), "d").await.expect("the directory").ino;
    let mut found = Vec::new();
    for number in 0..FILES {
        let name = format!("{number:04}");
        let forebay_metadata::tree::Lookup::Found(file) =
            volume.lookup(directory, name.as_bytes()).await.expect("a lookup")
        else {
            panic!("{name} is gone")
        };
        let keys = volume.block_keys(InodeId(file.ino.0)).await.expect("keys");
        let residency = volume.blocks().stat(&keys, false).await.expect("stat");
        if residency.iter().all(|residency| *residency != Residency::Absent) {
            found.push(number);
        }
    }
    found
}

async fn gets(fixture: &Fixture, expected: u64) {
    // What is read ahead comes by itself.
    while fixture.bucket.counters().of(OperationKind::Get).requests < expected {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(fixture.bucket.counters().of(OperationKind::Get).requests, expected);
}

/// Waits until the cache holds these files: no others, and each by one GET.
async fn fetched_once(fixture: &Fixture, volume: &Arc<Volume>, files: Range<u64>) {
    // A GET is counted before its bytes are here.
    while cached(volume).await.len() < files.clone().count() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(cached(volume).await, files.clone().collect::<Vec<_>>());
    gets(fixture, files.count() as u64).await;
}

/// Promise: who reads the files of a directory in order is served ahead, and each file is fetched once.
#[test]
fn files_in_order_are_served_ahead_and_fetched_once() {
    run(async {
        let fixture = filled().await;
        let volume = fixture.open().await;
        for number in 10..14 {
            read(&volume, number).await;
        }
        fetched_once(&fixture, &volume, 10..22).await;
        for number in 14..FILES {
            read(&volume, number).await;
        }
        fetched_once(&fixture, &volume, 10..FILES).await;
    });
}

/// Promise: so much is read ahead of all who read files in order as memory holds until they come. Workers of a loader had sixty-four
/// files each brought in, which evicted each other, and were fetched again.
#[test]
fn files_of_many_readers_are_fetched_once_with_little_memory() {
    const WORKERS: u64 = 8;
    const EACH: u64 = 30;
    const SIZE: u64 = 512 << 10;
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.cache.memory_bytes = 32 << 20;
        fixture.prefetch.shared_bytes = fixture.cache.memory_bytes / 2;
        for (worker, number) in (0..WORKERS).flat_map(|worker| (0..EACH).map(move |number| (worker, number)))
        {
            let key = ObjectKey::new(format!("d{worker}/{number:02}"));
            fixture.bucket.put(&key, pattern(number, 0..SIZE), Condition::Always).await.expect("put");
        }
        let volume = fixture.open().await;
        for (number, worker) in (0..EACH).flat_map(|number| (0..WORKERS).map(move |worker| (number, worker)))
        {
            let file = open(&volume, &format!("d{worker}/{number:02}"), READ).await;
            assert!(file.read(0, 1 << 20).await.expect("read") == pattern(number, 0..SIZE));
            file.release().await.expect("release");
            // As what is read ahead comes while a worker decodes.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        gets(&fixture, WORKERS * EACH).await;
    });
}

/// Promise: files that are read in no order are fetched when they are read, and no others.
#[test]
fn files_in_no_order_bring_no_others() {
    run(async {
        let fixture = filled().await;
        let volume = fixture.open().await;
        let mut numbers: Vec<u64> = (0..20).map(|at| at * 173 % FILES).collect();
        for number in &numbers {
            read(&volume, *number).await;
        }
        numbers.sort_unstable();
        assert_eq!(cached(&volume).await, numbers);
        assert_eq!(fixture.bucket.counters().of(OperationKind::Get).requests, 20);
    });
}

/// A reader who came on while nothing came of what was asked for ahead of it had ever more of that under way.
#[test]
fn so_many_windows_are_asked_for_ahead_at_once() {
    run(async {
        let (mut fixture, faults) = (filled().await, Faults::new());
        for number in FILES..3000 {
            let key = ObjectKey::new(format!("d/{number:04}"));
            fixture.bucket.put(&key, pattern(number, 0..9), Condition::Always).await.expect("put");
        }
        fixture.bucket = fixture.bucket.with_faults(&faults);
        let volume = fixture.open().await;
        let first = forebay_metadata::tree::resolve(&**volume.tree(), "d/0000").await.expect("found").ino;
        for nth in 1..1000 {
            faults.script(OperationKind::Get, nth, FaultMode::Hang);
        }
        for number in 0..3000 {
            volume.walk_on(InodeId(first.0 + number));
            if number % 8 == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let running = volume.tasks().running();
        let windows = running.iter().filter(|name| name.contains("files-ahead")).count();
        assert!((32..=64).contains(&windows), "{windows}");
    });
}

/// A reader that left while its access time could not be noted kept the file open until the end of the mount.
#[test]
fn a_reader_leaves_whatever_becomes_of_its_access_time() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.release().await.expect("release");
        let file = open(&volume, "f", READ).await;
        file.note_access(Timestamp { seconds: volume.clock().wall().seconds + 1_000_000, nanos: 0 });
        fixture.lapsed.store(true, SeqCst);
        assert_eq!(file.release().await.expect_err("it is told").kind(), ErrorKind::Unavailable);
        fixture.lapsed.store(false, SeqCst);
        assert!(volume.open_inodes().is_empty());
        volume.close().await.expect("close");
    });
}
