//! The disk tier: restarts, damage, full disks, pins. One that hangs has its tests in `hanging`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::units::{KIB, MIB};
use forebay_core::{BLOCK_SIZE, ErrorKind};
use forebay_io::disk::{Ring, open_direct};
use forebay_io::rng::Rng;
use forebay_io::task::Stop;
use futures::stream;
use tempfile::TempDir;

use super::support::{TestBlob, World, between, pick, rounds};
use crate::{Blocks, CacheSettings, Fill, Filled, Node, Residency, Unpinned, fill_many, prove};

pub(super) fn temporary() -> TempDir {
    tempfile::tempdir().expect("directory")
}

/// Room for 4 blocks in memory.
pub(super) fn settings(directory: &Path, disk_bytes: u64) -> CacheSettings {
    let disk_bytes = Some(disk_bytes);
    let directory = Some(directory.to_owned());
    // What is kept is not to depend on how full the disk of this machine is.
    let free_bytes = Some(0);
    CacheSettings { memory_bytes: 17 * MIB, directory, disk_bytes, free_bytes, ..CacheSettings::default() }
}

/// Block files, without the lock.
pub(super) fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in std::fs::read_dir(directory.join("v1")).expect("read").flatten() {
        files.extend(std::fs::read_dir(folder.path()).expect("read").flatten().map(|file| file.path()));
    }
    files
}

fn bytes_in(directory: &Path) -> u64 {
    // A file may be evicted between its listing and its measuring.
    files(directory).iter().filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum()
}

pub(super) async fn wait_until_all_is_done(node: &Node) {
    while !node.running().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(super) async fn fill_all(node: &Node, blob: &TestBlob, pin: bool) -> Vec<Filled> {
    let mut filled = Vec::new();
    for key in blob.keys() {
        filled.push(node.fill(&key, pin).await.expect("fill"));
    }
    filled
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocks_evicted_from_memory_come_back_from_disk() {
    for io_uring in [true, false] {
        let (world, directory) = (World::new(), temporary());
        let blob = world.put("k", 10 * BLOCK_SIZE).await;
        let node = world.open(CacheSettings { io_uring, ..settings(directory.path(), 256 * MIB) }).await;
        assert!(
            fill_all(&node, &blob, false).await.iter().all(|filled| matches!(filled, Filled::Origin { .. }))
        );
        assert!(fill_all(&node, &blob, false).await.iter().all(|filled| *filled == Filled::Disk));
        world.faults.set_down(true);
        for _ in 0..2 {
            blob.check_all(&*node).await;
        }
        let counters = node.counters();
        assert_eq!((world.gets(), counters.disk_writes), (10, 10));
        assert!(counters.disk_hits >= 12, "{counters:?}");
        assert!(counters.memory_evictions >= 6 && counters.memory_bytes <= 17 * MIB, "{counters:?}");
        assert_eq!(counters.disk_bytes, files(directory.path()).len() as u64 * (BLOCK_SIZE + 4 * KIB));
    }
}

#[tokio::test]
async fn a_restart_finds_what_was_read_and_inserted() {
    let (world, directory) = (World::new(), temporary());
    let (read, written) = (world.put("read", BLOCK_SIZE + 9).await, world.put("written", 100).await);
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    read.check_all(&*node).await;
    node.insert(&written.name.block(0), written.bytes.clone());
    node.close().await;
    blob_reads_go_on_after_closing(&node, &read).await;

    world.faults.set_down(true);
    let again = world.open(settings(directory.path(), 64 * MIB)).await;
    read.check_all(&*again).await;
    written.check_all(&*again).await;
    assert_eq!((world.gets(), again.counters().disk_hits), (2, 3));
}

/// What a reader was given is in memory twice already: here, and in the kernel for the file that was read. A third copy in
/// the page cache took more processor time than fetching the block.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_blocks_that_were_read_are_written_past_the_page_cache() {
    // On a disk, which the other directory may not be.
    let (world, directory) = (World::new(), tempfile::tempdir_in("/var/tmp").expect("directory"));
    let probe = directory.path().join("probe");
    std::fs::write(&probe, "").expect("writable");
    if open_direct(&probe).is_none() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: /var/tmp is on a file system that has no O_DIRECT");
        return;
    }
    let (read, warmed) = (world.put("read", 2 * BLOCK_SIZE).await, world.put("warmed", BLOCK_SIZE).await);
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    read.check_all(&*node).await;
    node.close().await;
    assert_eq!(files(directory.path()).len(), 2);
    // That with the names behind the bytes.
    assert!(pages_in_memory(directory.path()) <= 2);
    drop(node);

    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    fill_all(&node, &warmed, false).await;
    node.close().await;
    // A kernel that is short of memory takes some of it back.
    let pages = pages_in_memory(directory.path());
    assert!((4..=2 + BLOCK_SIZE / (4 * KIB) + 1).contains(&pages), "what is to be read yet stays: {pages}");
    drop(node);
    world.faults.set_down(true);
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    let before = pages_in_memory(directory.path());
    for blob in [&read, &warmed] {
        blob.check_all(&*node).await;
    }
    assert_eq!((world.gets(), node.counters().disk_hits), (3, 3));
    if Ring::of_process().is_ok() {
        assert!(pages_in_memory(directory.path()) <= before, "and are read past it");
    }
}

/// Has the kernel write out the block files, and forget what it has of them.
fn forget(directory: &Path) {
    for file in files(directory) {
        let mut command = Command::new("dd");
        command.args(["count=0", "status=none", "conv=notrunc,fdatasync", "oflag=nocache"]);
        let ended = command.arg(format!("of={}", file.display())).output().expect("dd runs");
        assert!(ended.status.success(), "{ended:?}");
    }
}

/// Pages of block files that the kernel has in memory.
fn pages_in_memory(directory: &Path) -> u64 {
    let mut command = Command::new("fincore");
    command.args(["--noheadings", "--raw", "--output", "PAGES"]).args(files(directory));
    let told =
        String::from_utf8(command.output().expect("fincore, of util-linux, runs").stdout).expect("text");
    told.lines().map(|line| line.trim().parse::<u64>().expect("a number")).sum()
}

/// Threads that may wait for a disk read small blocks without any task; damage is told there, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_small_block_is_read_from_disk_on_the_calling_thread() {
    let (world, directory) = (World::new(), temporary());
    let (small, large) = (world.put("small", 100 * KIB).await, world.put("large", BLOCK_SIZE).await);
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    for blob in [&small, &large] {
        fill_all(&node, blob, false).await;
    }
    node.close().await;
    drop(node);
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    let key = small.name.block(0);
    assert_eq!(node.get_now(&key, 5..9), None, "it is not in memory");
    assert_eq!(node.get_near(&key, 5..9), Some(small.bytes.slice(5..9)));
    assert_eq!(node.get_now(&key, 0..9), Some(small.bytes.slice(0..9)), "now it is");
    assert_eq!(node.get_near(&large.name.block(0), 5..9), None, "a large one is read elsewhere");
    assert_eq!((world.gets(), node.counters().disk_hits), (2, 1));
    node.close().await;
    drop(node);

    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    let flipped = files(directory.path()).into_iter().find(|file| {
        let mut bytes = std::fs::read(file).expect("read");
        bytes[7] ^= 1;
        bytes.len() < BLOCK_SIZE as usize && std::fs::write(file, bytes).is_ok()
    });
    assert!(flipped.is_some());
    assert_eq!(node.get_near(&key, 0..9), None);
    small.check_all(&*node).await;
    assert_eq!((world.gets(), node.counters().corruptions), (3, 1), "it was fetched again");
}

async fn blob_reads_go_on_after_closing(node: &Node, blob: &TestBlob) {
    blob.check_all(node).await;
    assert_eq!(node.counters().disk_bytes, 0);
}

#[tokio::test]
async fn two_processes_never_share_a_directory() {
    let (world, directory) = (World::new(), temporary());
    let first = world.open(settings(directory.path(), 64 * MIB)).await;
    let open = || Node::open(world.bucket.clone(), settings(directory.path(), 64 * MIB));
    let error = open().await.expect_err("locked");
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.hint().is_some());
    first.close().await;
    open().await.expect("free again");
}

#[tokio::test]
async fn a_directory_that_cannot_be_made_is_a_clear_error() {
    let (world, directory) = (World::new(), temporary());
    let file = directory.path().join("file");
    std::fs::write(&file, "x").expect("write");
    let below = settings(&file.join("cache"), 64 * MIB);
    let error = Node::open(world.bucket.clone(), below).await.expect_err("below a file");
    assert_eq!(error.kind(), ErrorKind::NotDirectory);
    assert!(error.message().contains("cache directory") && error.hint().is_some(), "{error:?}");
    let tiny = Node::open(world.bucket.clone(), settings(directory.path(), MIB)).await.expect_err("tiny");
    assert_eq!(tiny.kind(), ErrorKind::Invalid);
}

/// A flipped bit, a short file, an empty one, another block's bytes, a directory in its place, and none at all.
#[tokio::test]
async fn damaged_copies_are_dropped_and_fetched_again() {
    for seed in 0..rounds(4) {
        let random = Rng::seeded(seed);
        // Read by the kernel's ring and by threads; large ones past the page cache.
        let (io_uring, most) = (seed % 2 == 0, if seed % 4 < 2 { 300 * KIB } else { 3 * MIB });
        let (world, directory) = (World::new(), tempfile::tempdir_in("/var/tmp").expect("directory"));
        let settings = || CacheSettings { io_uring, ..settings(directory.path(), 64 * MIB) };
        let mut blobs = Vec::new();
        for name in ["flip", "cut", "empty", "other", "gone"] {
            blobs.push(world.put(name, between(&random, 1..most)).await);
        }
        let node = world.open(settings()).await;
        for blob in &blobs {
            fill_all(&node, blob, false).await;
        }
        node.close().await;
        let file = |blob: &TestBlob| {
            let name = format!("{:032x}-", blob.name.digest());
            let mut files = files(directory.path()).into_iter();
            files.find(|file| file.to_string_lossy().contains(&name)).expect("file")
        };
        let mut flipped = std::fs::read(file(&blobs[0])).expect("read");
        let bit = between(&random, 0..flipped.len() as u64 * 8) as usize;
        flipped[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(file(&blobs[0]), flipped).expect("write");
        let cut = std::fs::read(file(&blobs[1])).expect("read");
        std::fs::write(file(&blobs[1]), &cut[..between(&random, 0..cut.len() as u64) as usize])
            .expect("write");
        std::fs::write(file(&blobs[2]), "").expect("write");
        std::fs::copy(file(&blobs[0]), file(&blobs[3])).expect("copy");
        forget(directory.path());

        let node = world.open(settings()).await;
        std::fs::remove_file(file(&blobs[4])).expect("remove");
        for blob in &blobs {
            blob.check_all(&*node).await;
        }
        let counters = node.counters();
        assert_eq!((world.gets(), counters.corruptions, counters.disk_failures), (10, 4, 1), "seed {seed}");
        node.close().await;
        forget(directory.path());
        let node = world.open(settings()).await;
        for blob in &blobs {
            blob.check_all(&*node).await;
        }
        assert_eq!(world.gets(), 10, "seed {seed}: the new copies are good");
    }
}

#[tokio::test]
async fn a_proof_reads_every_copy_back() {
    let (world, directory) = (World::new(), temporary());
    let blob = world.put("k", 6 * BLOCK_SIZE).await;
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    let fill = Fill { concurrency: 3, pin: false };
    let keys = || stream::iter(blob.keys());
    let report = fill_many(&*node, keys(), fill, |_| (), &Stop::new()).await;
    assert_eq!((report.total.from_origin, report.total.failed), (6, 0));
    assert_eq!(prove(&*node, keys()).await.expect("prove").present, 6);
    node.close().await;

    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    let damaged = files(directory.path()).pop().expect("a file");
    let mut bytes = std::fs::read(&damaged).expect("read");
    bytes[12345] ^= 1;
    std::fs::write(&damaged, bytes).expect("write");
    assert_eq!(node.stat(&blob.keys(), false).await.expect("stat"), [Residency::Disk; 6]);
    let proof = prove(&*node, keys()).await.expect("prove");
    assert_eq!((proof.present, proof.damaged.len(), node.counters().corruptions), (5, 1, 1));
    assert_eq!(proof.missing, []);
    let again = fill_many(&*node, keys(), fill, |_| (), &Stop::new()).await;
    assert_eq!((again.total.already, again.total.from_origin), (5, 1));
    assert_eq!(prove(&*node, keys()).await.expect("prove").missing, []);
    assert_eq!((world.gets(), node.counters().disk_hits), (7, 0));
}

#[tokio::test]
async fn a_damaged_directory_is_opened_without_what_is_no_block() {
    let (world, directory) = (World::new(), temporary());
    let blob = world.put("k", 100).await;
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    fill_all(&node, &blob, false).await;
    node.close().await;
    let folder = files(directory.path())[0].parent().expect("folder").to_owned();
    std::fs::write(folder.join("garbage"), "x").expect("write");
    std::fs::write(directory.path().join("v1/ffff-0-0-0"), "x").expect("write");
    std::fs::write(directory.path().join("mine"), "left alone: it is not below v1").expect("write");
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    blob.check_all(&*node).await;
    assert_eq!((world.gets(), files(directory.path()).len()), (1, 1));
    assert!(directory.path().join("mine").exists());
    node.close().await;

    std::fs::remove_dir_all(directory.path().join("v1")).expect("remove");
    std::fs::write(directory.path().join("v1"), "no directory").expect("write");
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    fill_all(&node, &blob, false).await;
    assert_eq!((world.gets(), node.counters().disk_writes), (2, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_disk_stays_under_its_ceiling() {
    for seed in 0..rounds(2) {
        let random = Rng::seeded(seed);
        let (world, directory) = (World::new(), temporary());
        let ceiling = between(&random, 17 * MIB..24 * MIB);
        let node = world.open(settings(directory.path(), ceiling)).await;
        let mut blobs = Vec::new();
        for index in 0..30 {
            let largest = if random.chance(0.5) { 3 * BLOCK_SIZE } else { 300 * KIB };
            blobs.push(world.put(&format!("blob-{index}"), between(&random, 1..largest)).await);
        }
        for step in 0..100 {
            let blob = pick(&random, &blobs);
            blob.check(&*node, blob.random_range(&random)).await.expect("read");
            let books = node.counters().disk_bytes;
            assert!(books <= ceiling, "seed {seed} step {step}: {books} of {ceiling}");
            if random.chance(0.3) {
                // Else one file may be measured before it goes, and another that came in its place after that.
                wait_until_all_is_done(&node).await;
                let disk = bytes_in(directory.path());
                assert!(disk <= ceiling, "seed {seed} step {step}: {disk} of {ceiling}");
            }
        }
        node.close().await;
        let counters = node.counters();
        assert!(counters.disk_evictions > 0, "seed {seed}: {counters:?}");
        assert_eq!(counters.disk_failures + counters.corruptions, 0, "seed {seed}: {counters:?}");
        let smaller = world.open(settings(directory.path(), 16 * MIB)).await;
        assert!(bytes_in(directory.path()) <= 16 * MIB, "seed {seed}");
        blobs[0].check_all(&*smaller).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pinned_blocks_stay_until_they_are_unpinned() {
    let (world, directory) = (World::new(), temporary());
    let (pinned, flood) =
        (world.put("pinned", 2 * BLOCK_SIZE).await, world.put("flood", 12 * BLOCK_SIZE).await);
    let settings =
        CacheSettings { pin_bytes: Some(3 * (BLOCK_SIZE + 4 * KIB)), ..settings(directory.path(), 30 * MIB) };
    let node = world.open(settings.clone()).await;
    // One block was there already, and is pinned where it lies.
    node.fill(&pinned.name.block(0), false).await.expect("fill");
    assert_eq!(node.fill(&pinned.name.block(0), true).await.expect("pin"), Filled::Disk);
    fill_all(&node, &pinned, true).await;
    assert_eq!(node.counters().pinned_bytes, 2 * (BLOCK_SIZE + 4 * KIB));
    for _ in 0..2 {
        flood.check_all(&*node).await;
    }
    assert_eq!(node.stat(&pinned.keys(), true).await.expect("stat"), [Residency::Disk; 2]);

    node.fill(&flood.name.block(0), true).await.expect("the third pin fits");
    let error = node.fill(&flood.name.block(1), true).await.expect_err("the fourth does not");
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.hint().is_some());
    flood.check_all(&*node).await;
    node.close().await;

    let node = world.open(settings).await;
    assert_eq!(node.counters().pinned_bytes, 3 * (BLOCK_SIZE + 4 * KIB), "pins survive a restart");
    flood.check_all(&*node).await;
    node.close().await;
    assert_eq!(pinned_files(directory.path()), 3);
}

fn pinned_files(directory: &Path) -> usize {
    files(directory).iter().filter(|file| file.to_string_lossy().ends_with("-pinned")).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn unpinned_blocks_can_be_evicted_again() {
    let (world, directory) = (World::new(), temporary());
    let (pinned, flood) = (world.put("pinned", 10).await, world.put("flood", 12 * BLOCK_SIZE).await);
    let node = world.open(settings(directory.path(), 30 * MIB)).await;
    let key = pinned.name.block(0);
    assert_eq!(node.unpin(&key).await.expect("nothing to unpin"), Unpinned::default());
    // Many at once pin, unpin and read the same block: its file is there under one name in the end.
    let tasks = (0..40).map(|task| {
        let (node, key, pinned) = (node.clone(), key.clone(), pinned.clone());
        tokio::spawn(async move {
            match task % 3 {
                0 => drop(node.fill(&key, true).await.expect("pin")),
                1 => drop(node.unpin(&key).await.expect("unpin")),
                _ => pinned.check_all(&*node).await,
            }
        })
    });
    for task in futures::future::join_all(tasks).await {
        task.expect("task");
    }
    assert_eq!((world.gets(), files(directory.path()).len()), (1, 1));
    node.fill(&key, true).await.expect("pin");
    assert_eq!((pinned_files(directory.path()), node.counters().disk_failures), (1, 0));
    let bytes = node.counters().pinned_bytes;
    assert_eq!(node.unpin(&key).await.expect("unpin"), Unpinned { blocks: 1, bytes });
    assert_eq!((pinned_files(directory.path()), node.counters().pinned_bytes), (0, 0));
    // All, whatever they are of.
    for key in [key.clone(), flood.name.block(0)] {
        node.fill(&key, true).await.expect("pin");
    }
    let bytes = node.counters().pinned_bytes;
    assert_eq!(node.unpin_all().await.expect("unpin"), Unpinned { blocks: 2, bytes });
    assert_eq!(node.unpin_all().await.expect("none"), Unpinned::default());
    assert_eq!((pinned_files(directory.path()), node.counters().pinned_bytes), (0, 0));
    for key in flood.keys() {
        node.fill(&key, false).await.expect("fill");
    }
    assert_eq!(
        files(directory.path()).iter().filter(|file| file.metadata().expect("file").len() < MIB).count(),
        0
    );
}

#[tokio::test]
async fn a_cache_in_memory_says_that_it_cannot_pin() {
    let world = World::new();
    let blob = world.put("k", 10).await;
    let node = world.open_memory(MIB).await;
    let error = node.fill(&blob.name.block(0), true).await.expect_err("no disk");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

/// A directory that was given a size keeps it for whoever gives none: nothing of it is evicted for want of an option.
#[tokio::test]
async fn a_directory_keeps_the_size_that_it_was_given() {
    let (world, directory) = (World::new(), temporary());
    let blob = world.put("blob", 12 * BLOCK_SIZE).await;
    let given = settings(directory.path(), 80 * MIB);
    let without = CacheSettings { disk_bytes: None, ..given.clone() };
    assert_eq!(without.disk_ceiling(), 16 << 30);
    let node = world.open(given.clone()).await;
    for key in blob.keys() {
        node.fill(&key, true).await.expect("pin");
    }
    node.close().await;
    drop(node);
    assert_eq!((without.disk_ceiling(), without.pin_ceiling()), (80 * MIB, 64 * MIB));
    let node = world.open(without.clone()).await;
    assert_eq!(pinned_files(directory.path()), 12);
    node.close().await;
    // Another size is another wish, noted in place of the old one: what a crash, or a full disk, cuts short leaves that.
    let (note, old) = (directory.path().join("ceiling"), directory.path().join("old"));
    std::fs::hard_link(note, &old).expect("link");
    drop(world.open(settings(directory.path(), 40 * MIB)).await);
    assert!(pinned_files(directory.path()) < 9);
    assert_eq!(without.disk_ceiling(), 40 * MIB);
    assert_eq!(std::fs::read_to_string(old).expect("read"), (80 * MIB).to_string());
}

/// A file system that is smaller than the cache thinks. Root only, since it is mounted here.
pub(super) struct SmallDisk(pub(super) TempDir);

impl SmallDisk {
    pub(super) fn mount(size: &str) -> Option<Self> {
        let directory = temporary();
        let options = format!("size={size}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(directory.path());
        let mounted = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        mounted.then(|| Self(directory))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_full_disk_costs_copies_and_no_reads() {
    // As it is looked at, and as a quota is met, which nobody sees before.
    for free_bytes in [None, Some(0)] {
        fill_a_disk(free_bytes).await;
    }
}

async fn fill_a_disk(free_bytes: Option<u64>) {
    let Some(disk) = SmallDisk::mount("24m") else {
        let _ = writeln!(std::io::stderr(), "SKIPPED: a full disk needs the right to mount a tmpfs");
        return;
    };
    let world = World::new();
    let blob = world.put("k", 12 * BLOCK_SIZE).await;
    let node = world.open(CacheSettings { free_bytes, ..settings(disk.0.path(), 256 * MIB) }).await;
    // 5 blocks fit; room for the others is made by evicting.
    fill_all(&node, &blob, false).await;
    let counters = node.counters();
    assert_eq!((world.gets(), counters.disk_writes, counters.disk_evictions), (12, 12, 7), "{counters:?}");
    blob.check_all(&*node).await;
    // What is copied to the disk beside a read takes room, too, as long as it is written: less may be left for pins.
    let mut pinned = 0;
    for key in &blob.keys() {
        match node.fill(key, true).await {
            Ok(_) => pinned += 1,
            Err(error) => assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}"),
        }
    }
    assert!((1..=5).contains(&pinned), "{pinned} pins");
    blob.check_all(&*node).await;
    node.close().await;

    let node = world.open(CacheSettings { free_bytes, ..settings(disk.0.path(), 256 * MIB) }).await;
    blob.check_all(&*node).await;
    assert_eq!(node.counters().corruptions, 0, "no half-written file is left");
}

#[tokio::test]
async fn a_disk_that_goes_away_and_comes_back_costs_no_reads() {
    let (world, directory) = (World::new(), temporary());
    let node = world.open(settings(directory.path(), 64 * MIB)).await;
    let first = world.put("first", 100).await;
    fill_all(&node, &first, false).await;
    // Somebody cleans up: the directory is made again.
    std::fs::remove_dir_all(directory.path().join("v1")).expect("remove");
    let second = world.put("second", 100).await;
    fill_all(&node, &second, false).await;
    assert_eq!(node.counters().disk_failures, 0);
    // Nothing can be written at all: no read fails, and most writes are not even tried.
    std::fs::remove_dir_all(directory.path().join("v1")).expect("remove");
    std::fs::write(directory.path().join("v1"), "in the way").expect("write");
    let mut blobs = Vec::new();
    for index in 0..100 {
        blobs.push(world.put(&format!("blob-{index}"), 100).await);
    }
    for blob in &blobs {
        blob.check_all(&*node).await;
        while !node.running().is_empty() {
            tokio::task::yield_now().await;
        }
    }
    let counters = node.counters();
    assert_eq!(
        (counters.disk_failures, counters.disk_failures + counters.disk_skips),
        (6, 100),
        "{counters:?}"
    );
    let error = node.fill(&blobs[0].name.block(0), true).await.expect_err("pins tell");
    assert!(error.message().contains("disk cache"), "{error}");
    // It works again: the next write that is tried ends the pause.
    std::fs::remove_file(directory.path().join("v1")).expect("remove");
    fill_all(&node, &blobs[0], false).await;
    let before = node.counters();
    for index in 0..10 {
        world.put(&format!("later-{index}"), 100).await.check_all(&*node).await;
    }
    node.close().await;
    let after = node.counters();
    assert_eq!((after.disk_writes - before.disk_writes, after.disk_skips), (10, before.disk_skips));
}

const CHILD_DIRECTORY: &str = "FOREBAY_TEST_CHILD_DIRECTORY";

/// The process that `a_killed_process_leaves_a_good_cache` starts and kills: fills block after block and says so.
/// Among the tests it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_that_fills_until_it_is_killed() {
    let Some(directory) = std::env::var_os(CHILD_DIRECTORY).map(PathBuf::from) else { return };
    let world = World::new();
    let node = world.open(settings(&directory, 64 * MIB)).await;
    let blobs = child_blobs(&world).await;
    for round in 0.. {
        for blob in &blobs {
            fill_all(&node, blob, round % 2 == 1).await;
            writeln!(std::io::stdout(), "filled {}", blob.name.blob().key).expect("write");
            for key in blob.keys() {
                node.unpin(&key).await.expect("unpin");
            }
        }
    }
}

async fn child_blobs(world: &World) -> Vec<TestBlob> {
    let mut blobs = Vec::new();
    for index in 0..12_u64 {
        blobs.push(world.put(&format!("child-{index}"), 300 * KIB + index * 400 * KIB).await);
    }
    blobs
}

#[tokio::test]
async fn a_killed_process_leaves_a_good_cache() {
    use std::io::BufRead;
    for seed in 0..rounds(3) {
        let lines = between(&Rng::seeded(seed), 1..40) as usize;
        let directory = temporary();
        let name = "tests::disk::child_that_fills_until_it_is_killed";
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", name, "--nocapture"])
            .env(CHILD_DIRECTORY, directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .expect("child");
        let output = std::io::BufReader::new(child.stdout.take().expect("stdout"));
        let filled = output.lines().map_while(Result::ok).filter(|line| line.contains("filled")).take(lines);
        let filled: Vec<String> = filled.collect();
        child.kill().expect("kill");
        child.wait().expect("wait");
        assert_eq!(filled.len(), lines, "seed {seed}");

        let world = World::new();
        let blobs = child_blobs(&world).await;
        let node = world.open(settings(directory.path(), 64 * MIB)).await;
        let done = &blobs[..lines.min(12)];
        for blob in done {
            let found = node.stat(&blob.keys(), true).await.expect("stat");
            assert!(
                found.iter().all(|found| *found == Residency::Disk),
                "seed {seed}: {} {found:?}",
                blob.name
            );
        }
        let expected: usize = blobs[done.len()..].iter().map(|blob| blob.keys().len()).sum();
        for blob in &blobs {
            blob.check_all(&*node).await;
        }
        assert!(world.gets() <= expected as u64, "seed {seed}: what was filled is not fetched again");
        Arc::clone(&node).close().await;
    }
}
