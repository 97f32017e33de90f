//! Warmup: what it fetches, what it proves.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_cache::{Blocks, Ceiling, Counters, Filled, Node, Residency, Unpinned};
use forebay_core::units::MIB;
use forebay_core::{BlockKey, ErrorKind, InodeId, ObjectKey, Result};
use forebay_io::object::{Bucket, Condition, OperationKind};
use forebay_metadata::tree::resolve;
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
        fixture.cache.memory_bytes = 10 * MIB;
        let volume = fixture.open().await;
        let outcome = warm_while(&volume, async || {
            let file = create(&volume, "larger").await;
            file.write(0, pattern(98, 0..8 * MIB)).await.expect("write");
            file.release().await.expect("release");
        });
        let outcome = outcome.await;
        assert!(!outcome.is_complete());
        assert!(outcome.missing.iter().any(|name| name.starts_with("large")), "{:?}", outcome.missing);
        assert_eq!(outcome.proved + outcome.missing_blocks, outcome.blocks);
    });
}

/// Why `request` is refused, of which nothing may be fetched then.
async fn refusal(fixture: &Fixture, volume: &crate::Volume, request: &Request) -> String {
    let before = fixture.bucket.counters().of(OperationKind::Get).requests;
    let refused = warmup(volume, request, |_| {}, &CancellationToken::new()).await.expect_err("too much");
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    assert_eq!(fixture.bucket.counters().of(OperationKind::Get).requests, before, "nothing was fetched");
    refused.to_string()
}

/// Promise: what the cache cannot hold is refused before any of it is fetched. All of it was, in vain, and evicted what others read.
#[test]
fn what_the_cache_cannot_hold_is_refused_before_it_is_fetched() {
    run(async {
        let (mut fixture, folder) = (filled().await, tempfile::tempdir().expect("scratch"));
        fixture.cache.directory = Some(folder.path().to_owned());
        (fixture.cache.disk_bytes, fixture.cache.pin_bytes) = (Some(16 * MIB), Some(8 * MIB));
        let volume = fixture.open().await;
        let pin = Request { pin: true, ..all() };
        let told = refusal(&fixture, &volume, &pin).await;
        assert!(told.starts_with("9.") && told.contains("the cache may pin 8.00 MiB"), "{told}");
        // Each of its blocks counts once.
        let twice = Request { paths: vec![String::new(), "large".to_owned()], ..all() };
        assert!(warm(&volume, &twice).await.is_complete());
        let huge = pattern(97, 0..8 * MIB);
        fixture.bucket.put(&ObjectKey::new("d0/huge"), huge, Condition::Always).await.expect("put");
        let directory = resolve(&**volume.tree(), "d0").await.expect("found").ino;
        volume.tree().refresh(directory).await.expect("a listing");
        let told = refusal(&fixture, &volume, &all()).await;
        assert!(told.starts_with("17.") && told.contains("the cache holds 16.0 MiB"), "{told}");
        let dry = Request { dry_run: true, ..all() };
        assert_eq!(warm(&volume, &dry).await.missing_blocks, 2, "a plan is none the less made");
    });
}

#[test]
fn small_files_are_refused_by_what_they_take_on_disk() {
    run(async {
        let (mut fixture, folder) = (many(4_200).await, tempfile::tempdir().expect("scratch"));
        fixture.cache.directory = Some(folder.path().to_owned());
        fixture.cache.disk_bytes = Some(16 * MIB);
        let volume = fixture.open().await;
        let told = refusal(&fixture, &volume, &all()).await;
        assert!(told.starts_with("16.4 MiB are to be warmed, with 4 KiB a block"), "{told}");
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

/// A cache that is stopped when copies are read back for the nth time.
#[derive(Debug)]
pub(crate) struct StopsAtProof {
    blocks: Arc<Node>,
    left: AtomicUsize,
    stop: CancellationToken,
}

impl StopsAtProof {
    pub(crate) fn new(blocks: Arc<Node>, nth: usize, stop: CancellationToken) -> Self {
        Self { blocks, left: AtomicUsize::new(nth), stop }
    }
}

#[async_trait]
impl Blocks for StopsAtProof {
    async fn stat(&self, keys: &[BlockKey], verify: bool) -> Result<Vec<Residency>> {
        if verify && self.left.fetch_sub(1, Relaxed) == 1 {
            self.stop.cancel();
        }
        self.blocks.stat(keys, verify).await
    }
    async fn get(&self, key: &BlockKey, within: Range<u64>) -> Result<Bytes> {
        self.blocks.get(key, within).await
    }
    fn get_now(&self, key: &BlockKey, within: Range<u64>) -> Option<Bytes> {
        self.blocks.get_now(key, within)
    }
    fn get_near(&self, key: &BlockKey, within: Range<u64>) -> Option<Bytes> {
        self.blocks.get_near(key, within)
    }
    async fn fill(&self, key: &BlockKey, pin: bool) -> Result<Filled> {
        self.blocks.fill(key, pin).await
    }
    async fn fetch_ahead(&self, key: &BlockKey) -> Result<()> {
        self.blocks.fetch_ahead(key).await
    }
    async fn unpin(&self, key: &BlockKey) -> Result<Unpinned> {
        self.blocks.unpin(key).await
    }
    async fn unpin_all(&self) -> Result<Unpinned> {
        self.blocks.unpin_all().await
    }
    fn insert(&self, key: &BlockKey, bytes: Bytes) {
        self.blocks.insert(key, bytes);
    }
    fn spend(&self, key: &BlockKey) {
        self.blocks.spend(key);
    }
    fn ceiling(&self, pin: bool) -> Ceiling {
        self.blocks.ceiling(pin)
    }
    fn cost(&self, key: &BlockKey) -> u64 {
        self.blocks.cost(key)
    }
    fn counters(&self) -> Counters {
        self.blocks.counters()
    }
}

/// So many small objects, a proof of which takes several rounds.
async fn many(count: u64) -> Fixture {
    let fixture = Fixture::new(Bucket::in_memory());
    for number in 0..count {
        let key = ObjectKey::new(format!("f{number:04}"));
        fixture.bucket.put(&key, pattern(number, 0..100), Condition::Always).await.expect("put");
    }
    fixture
}

/// Ctrl-C was heard by none of what goes before and after the fetching: the proof of a long warmup read terabytes on.
#[test]
fn a_warmup_is_cancelled_while_it_counts_plans_or_proves() {
    run(async {
        let mut fixture = many(600).await;
        let stop = CancellationToken::new();
        fixture.stops_at_proof = Some((1, stop.clone()));
        let volume = fixture.open().await;
        let planned = CancellationToken::new();
        let dry = Request { dry_run: true, ..all() };
        let plan = warmup(&volume, &dry, |_| planned.cancel(), &planned).await.expect("a plan");
        assert!(plan.cancelled && plan.blocks == 0, "{plan:?}");
        let counted = warmup(&volume, &all(), |_| {}, &planned).await.expect("a count");
        assert!(counted.cancelled && counted.progress.files == 0, "{counted:?}");

        let proved = warmup(&volume, &all(), |_| {}, &stop).await.expect("a proof");
        assert!(proved.cancelled && proved.fetched == 600, "{proved:?}");
        assert!(proved.proved > 0 && proved.proved < 300, "few are read back: {proved:?}");
    });
}

/// All files below `directory`.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).expect("a directory");
    let below = |path: PathBuf| if path.is_dir() { files_below(&path) } else { vec![path] };
    entries.flat_map(|entry| below(entry.expect("an entry").path())).collect()
}

/// One that is damaged on disk and named twice, far apart, was fetched again and told as missing.
#[test]
fn a_damaged_block_that_is_named_twice_is_fetched_again_and_proved() {
    run(async {
        let (mut fixture, scratch) = (many(400).await, tempfile::tempdir().expect("scratch"));
        let large = pattern(99, 0..4 * MIB);
        fixture.bucket.put(&ObjectKey::new("z"), large, Condition::Always).await.expect("put");
        fixture.cache.directory = Some(scratch.path().to_owned());
        // The only copy of the large one is that on disk.
        fixture.cache.memory_bytes = 2 * MIB;
        let volume = fixture.open().await;
        let twice = Request { paths: vec!["z".to_owned(), String::new()], ..all() };
        let first = warm(&volume, &twice).await;
        assert!(first.is_complete() && first.memory_only == 0, "{first:?}");
        let copies = files_below(scratch.path());
        let long: Vec<_> =
            copies.iter().filter(|path| path.metadata().expect("a copy").len() >= 4 * MIB).collect();
        let [copy] = long[..] else { panic!("{long:?}") };
        std::fs::OpenOptions::new()
            .write(true)
            .open(copy)
            .and_then(|file| file.set_len(10_000))
            .expect("cut");
        let again = warm(&volume, &twice).await;
        assert!(again.is_complete() && again.missing.is_empty(), "{again:?}");
        assert_eq!((again.blocks, again.proved, again.fetched, again.already), (402, 402, 1, 401));
    });
}

/// What was damaged, or missing, of millions of blocks was in memory together before any of it was fetched.
#[test]
fn damaged_blocks_are_fetched_again_before_the_rest_is_proved() {
    run(async {
        let (mut fixture, scratch) = (many(600).await, tempfile::tempdir().expect("scratch"));
        fixture.cache.directory = Some(scratch.path().to_owned());
        fixture.cache.memory_bytes = 0;
        // The three rounds of a proof, and of the next one as the first blocks were read back, fetched and read back again.
        let stop = CancellationToken::new();
        fixture.stops_at_proof = Some((3 + 3, stop.clone()));
        let volume = fixture.open().await;
        assert!(warm(&volume, &all()).await.is_complete());
        let copies = files_below(&scratch.path().join("v1"));
        assert_eq!(copies.len(), 600);
        for copy in copies {
            std::fs::write(copy, "cut short").expect("damage");
        }
        let outcome = warmup(&volume, &all(), |_| {}, &stop).await.expect("a warmup");
        assert!(outcome.cancelled, "{outcome:?}");
        assert_eq!((outcome.fetched, outcome.proved), (256, 256), "{outcome:?}");
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
