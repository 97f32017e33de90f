//! Small files of packed directories: in requests, against arrays, through compaction, and back as plain objects.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::KIB;
use forebay_core::{Blob, ErrorKind, InodeId, ObjectKey};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition, Delay, FaultMode, Faults, OperationKind};
use forebay_io::rng::Rng;
use forebay_metadata::tree::resolve;
use futures::StreamExt;
use tokio_util::sync::CancellationToken;

use super::support::{Fixture, Model, READ, READ_WRITE, create, object, open, pattern, run, with_seeds};
use crate::compact::{self, Compacted, compact};
use crate::packed::{Exported, Policy, export, policy};
use crate::warmup::{Request, warmup};
use crate::{File, Volume};

async fn open_packed(fixture: &Fixture) -> Arc<Volume> {
    let volume = fixture.open().await;
    assert_eq!(policy(&volume, "", Some(Policy::Packed)).await.expect("set"), Policy::Packed);
    volume
}

async fn close(file: &File) {
    file.flush().await.expect("close");
    file.release().await.expect("release");
}

async fn write(volume: &Arc<Volume>, name: &str, content: Bytes) {
    let file = create(volume, name).await;
    file.write(0, content).await.expect("write");
    close(&file).await;
}

async fn read(volume: &Arc<Volume>, name: &str) -> Bytes {
    let file = open(volume, name, READ).await;
    let bytes = file.read(0, 1 << 20).await.expect("read");
    file.release().await.expect("release");
    bytes
}

/// Keys of the bucket, the tree's own left out: of segments, and of everything else.
async fn keys(bucket: &Bucket) -> (BTreeSet<String>, BTreeSet<String>) {
    let found: Vec<_> = bucket.list("").collect().await;
    let keys = found.into_iter().map(|info| info.expect("a listing").key.as_str().to_owned());
    keys.filter(|key| !key.starts_with(".forebay/tree")).partition(|key| key.contains(Blob::SEGMENT_MARK))
}

async fn compact_now(volume: &Volume) -> Compacted {
    compact(volume, Duration::ZERO, false).await.expect("compacted")
}

async fn drain(volume: &Volume) {
    let tree = volume.tree().local().expect("a tree of this process");
    tree.drain().await.expect("drained");
}

async fn check_clean(volume: &Volume) {
    let tree = volume.tree().local().expect("a tree of this process");
    // What a session put for a content that was given up again goes after it ended.
    tree.collect_garbage(false).await.expect("collected");
    let report = tree.fsck(false).await.expect("checked");
    assert!(report.is_clean(), "{:?}", report.findings);
}

async fn export_all(volume: &Arc<Volume>, plain: bool) -> Exported {
    export(volume, ("", plain), |_| {}, &CancellationToken::new()).await.expect("exported")
}

/// Promise S54: In a packed directory small files share objects: those that are closed at the same time go to the store in
/// one, and after a round of gc a reader who has nothing in the cache gets all of them with a request for each 4 MiB.
// A request takes its time once everybody waits, however slow the machine.
#[tokio::test(start_paused = true)]
async fn files_that_are_closed_together_share_requests() {
    let delay = Delay { request_us: 2_000, mib_us: 0 };
    let fixture = Fixture::new(Bucket::in_memory().with_delay(delay));
    let volume = open_packed(&fixture).await;
    let before = fixture.bucket.counters();
    let writers = (0..8_u64).map(|writer| {
        let volume = volume.clone();
        async move {
            for number in 0..125 {
                let content = pattern(writer, number..number + 4 * KIB);
                write(&volume, &format!("f{writer}-{number}"), content).await;
            }
        }
    });
    futures::future::join_all(writers).await;
    let asked = fixture.bucket.counters().since(&before);
    let puts = asked.of(OperationKind::Put).requests;
    assert!(puts <= 500, "at least two files share each: {asked:?}");
    assert_eq!(keys(&fixture.bucket).await.1.len(), 0, "nothing lies at a path of its own");
    volume.close().await.expect("close");

    let mut gets = Vec::new();
    for _ in 0..2 {
        // A new volume has an empty cache.
        let volume = fixture.open().await;
        let before = fixture.bucket.counters();
        for writer in 0..8 {
            for number in 0..125 {
                let expected = pattern(writer, number..number + 4 * KIB);
                assert!(read(&volume, &format!("f{writer}-{number}")).await == expected);
            }
        }
        gets.push(fixture.bucket.counters().since(&before).of(OperationKind::Get).requests);
        let compacted = compact_now(&volume).await;
        assert!(compacted.live_bytes == compacted.bytes, "{compacted:?}");
        check_clean(&volume).await;
        volume.close().await.expect("close");
    }
    assert!(gets[0] <= puts && gets[1] == 1, "{gets:?} GETs for 1,000 files, {puts} PUTs");
    assert_eq!(keys(&fixture.bucket).await.0.len(), 1, "one segment of 4,000 KiB");
}

/// Promise: a warmup of packed files brings in each segment once, and proves it.
#[test]
fn a_warmup_brings_in_each_segment_once() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = open_packed(&fixture).await;
        for number in 0..30 {
            write(&volume, &format!("f{number}"), pattern(number, 0..KIB)).await;
        }
        assert_eq!(compact_now(&volume).await.segments, 30);
        write(&volume, "alone", pattern(1, 0..KIB)).await;
        volume.close().await.expect("close");
        let volume = fixture.open().await;
        let request = Request { paths: vec![String::new()], pin: false, dry_run: false, concurrency: 4 };
        let warmed = warmup(&volume, &request, |_| {}, &CancellationToken::new()).await.expect("warmed");
        assert!(warmed.is_complete(), "{warmed:?}");
        assert_eq!((warmed.progress.files, warmed.blocks, warmed.fetched), (31, 2, 2), "{warmed:?}");
        assert_eq!((warmed.progress.bytes, warmed.progress.done_bytes), (31 * KIB, 31 * KIB));
        assert_eq!(warmed.progress.origin_bytes, 31 * KIB);
    });
}

/// Promise: a volume that is open compacts by itself, now and then.
#[test]
fn an_open_volume_compacts_by_itself() {
    run(async {
        let clock = Clock::manual();
        let fixture = Fixture { clock: clock.clone(), ..Fixture::new(Bucket::in_memory()) };
        let volume = open_packed(&fixture).await;
        for name in ["a", "b", "c"] {
            write(&volume, name, Bytes::from_static(b"small")).await;
        }
        compact::start(&volume, 1000);
        let is_compacted = async || keys(&fixture.bucket).await.0.len() == 1;
        // Each look gives the tasks time, and the clock a minute: the first round comes after ten.
        let mut looks = 0;
        while !is_compacted().await {
            clock.advance(Duration::from_secs(60));
            drain(&volume).await;
            tokio::task::yield_now().await;
            looks += 1;
            assert!(looks < 100_000, "it never compacts");
        }
        assert!(looks >= 10, "after {looks} minutes");
        for name in ["a", "b", "c"] {
            assert_eq!(read(&volume, name).await, "small");
        }
        volume.close().await.expect("close");
    });
}

/// Promise: a file that is closed alone waits for no company, and costs one PUT; a large one is an object at its path.
#[test]
fn a_lone_file_is_one_put_and_a_large_one_is_plain() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = open_packed(&fixture).await;
        let before = fixture.bucket.counters();
        write(&volume, "small", pattern(1, 0..256 * KIB)).await;
        write(&volume, "empty", Bytes::new()).await;
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(asked.of(OperationKind::Put).requests, 1, "an empty file needs no object: {asked:?}");
        write(&volume, "large", pattern(2, 0..256 * KIB + 1)).await;
        // It stays an object at its own path, however small it becomes.
        write(&volume, "shrunk", pattern(3, 0..300 * KIB)).await;
        let shrunk = resolve(&**volume.tree(), "shrunk").await.expect("found").ino;
        volume.set_attributes(shrunk, Default::default(), Some(7)).await.expect("truncated");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "large").await, pattern(2, 0..256 * KIB + 1));
        let (segments, others) = keys(&fixture.bucket).await;
        assert_eq!(segments.len(), 1);
        assert_eq!(others.iter().map(String::as_str).collect::<Vec<_>>(), ["large", "shrunk"]);
        assert_eq!(object(&fixture.bucket, "shrunk").await, pattern(3, 0..7));
        let volume = fixture.open().await;
        assert_eq!(read(&volume, "small").await, pattern(1, 0..256 * KIB));
        assert_eq!(read(&volume, "empty").await, "");
        check_clean(&volume).await;
    });
}

/// Promise S55: gc writes what is in use of a segment into another when less than half of it is, and small segments
/// together; files that are open then are read and written on.
#[test]
fn open_files_go_on_over_compaction() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = open_packed(&fixture).await;
        let first = create(&volume, "kept").await;
        first.write(0, Bytes::from_static(b"kept bytes")).await.expect("write");
        close(&first).await;
        write(&volume, "other", Bytes::from_static(b"others")).await;
        volume.close().await.expect("close");
        let volume = fixture.open().await;
        let (reader, writer) = (open(&volume, "kept", READ).await, open(&volume, "kept", READ_WRITE).await);
        let appender = open(&volume, "other", READ_WRITE).await;
        writer.write(5, Bytes::from_static(b"BYTES")).await.expect("write");
        appender.write(6, Bytes::from_static(b" and more")).await.expect("write");
        assert_eq!(compact_now(&volume).await.segments, 2, "two small ones become one");
        drain(&volume).await;
        assert_eq!(keys(&fixture.bucket).await.0.len(), 1, "the old ones are deleted");
        assert_eq!(reader.read(0, 100).await.expect("read"), "kept BYTES");
        reader.release().await.expect("release");
        close(&writer).await;
        close(&appender).await;
        volume.close().await.expect("close");
        let volume = fixture.open().await;
        assert_eq!(read(&volume, "kept").await, "kept BYTES");
        assert_eq!(read(&volume, "other").await, "others and more");
        drain(&volume).await;
        let (segments, others) = keys(&fixture.bucket).await;
        assert!(others.is_empty() && segments.len() <= 2, "packed together again: {segments:?} {others:?}");
        check_clean(&volume).await;
    });
}

/// Promise: a segment that does not reach the store is told to each of its writers, who try again.
#[test]
fn a_segment_that_fails_is_told_to_all_and_tried_again() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(50).with_faults(&faults);
        let fixture = Fixture::new(bucket);
        let volume = open_packed(&fixture).await;
        let mut files = Vec::new();
        for number in 0..4_u64 {
            let file = create(&volume, &format!("f{number}")).await;
            file.write(0, pattern(number, 0..KIB)).await.expect("write");
            files.push(file);
        }
        for nth in 1..200 {
            faults.script(OperationKind::Put, nth, FaultMode::Before);
        }
        let failed = futures::future::join_all(files.iter().map(|file| file.flush())).await;
        assert!(failed.iter().all(|flushed| flushed.is_err()), "{failed:?}");
        faults.clear();
        for file in &files {
            close(file).await;
        }
        for number in 0..4 {
            assert_eq!(read(&volume, &format!("f{number}")).await, pattern(number, 0..KIB));
        }
        volume.close().await.expect("close");
        check_clean(&*fixture.open().await).await;
    });
}

/// Promise: `forebay volume export` makes every packed file an object at its own path with the same bytes, goes on where
/// it was cut off, and leaves directories plain where asked.
#[test]
fn packed_files_become_plain_objects_again() {
    run(async {
        let faults = Faults::new();
        let fixture = Fixture::new(Bucket::in_memory().with_deadline_ms(50).with_faults(&faults));
        let volume = open_packed(&fixture).await;
        for number in 0..20_u64 {
            write(&volume, &format!("f{number:02}"), pattern(number, 0..number * 100)).await;
        }
        write(&volume, "plain", pattern(9, 0..300 * KIB)).await;
        let stop = CancellationToken::new();
        stop.cancel();
        let cancelled = export(&volume, ("", false), |_| {}, &stop).await.expect("an outcome");
        assert!(cancelled.cancelled && cancelled.exported == 0 && !cancelled.is_complete(), "{cancelled:?}");
        // The key of its path is not free: an outsider came first.
        let theirs = Bytes::from_static(b"theirs");
        let key = ObjectKey::new("f19");
        let put = fixture.bucket.put(&key, theirs, Condition::Always).await;
        put.expect("put");
        // And the store refuses the first of all, which is another one: sixteen are exported at once.
        faults.script(OperationKind::Put, 1, FaultMode::Deny);
        let exported = export_all(&volume, false).await;
        assert_eq!((exported.exported, exported.failed), (18, 2), "{exported:?}");
        assert!(!exported.is_complete(), "{exported:?}");
        assert!(exported.failures.iter().any(|failure| failure.starts_with("f19: ")), "{exported:?}");
        assert_eq!(read(&volume, "f19").await, "theirs", "it came last");
        let before = fixture.bucket.counters();
        let exported = export_all(&volume, true).await;
        assert_eq!((exported.exported, exported.directories), (1, 1), "{exported:?}");
        assert!(exported.is_complete());
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(asked.of(OperationKind::Put).requests, 1, "the others are plain already: {asked:?}");
        assert_eq!(policy(&volume, "", None).await.expect("told"), Policy::Plain);
        write(&volume, "later", pattern(1, 0..9)).await;
        volume.close().await.expect("close");
        for number in 0..19 {
            let found = object(&fixture.bucket, &format!("f{number:02}")).await;
            assert!(found == pattern(number, 0..number * 100), "object f{number:02}");
        }
        assert_eq!(object(&fixture.bucket, "f19").await, "theirs");
        assert_eq!(object(&fixture.bucket, "later").await, pattern(1, 0..9));
        let volume = fixture.open().await;
        drain(&volume).await;
        assert_eq!(keys(&fixture.bucket).await.0.len(), 0, "no segment is left");
        check_clean(&volume).await;
    });
}

const NAMES: u64 = 5;
const SPACE: u64 = 400 * KIB;

impl Model {
    async fn edit(&mut self, volume: &Arc<Volume>, rng: &Rng, number: u64) {
        let start = rng.below(SPACE);
        let end = start + 1 + rng.below((SPACE - start).min(100 * KIB));
        match rng.below(10) {
            0 | 1 => self.write(start, pattern(number, start..end)).await,
            2..=4 => self.replace(volume, rng).await,
            5 => self.file.flush().await.expect("flush"),
            6 => self.file.fsync().await.expect("fsync"),
            _ => {
                let whole = self.file.read(0, 1 << 20).await.expect("read");
                assert!(whole == self.bytes, "bytes of {}", self.name);
            }
        }
    }

    /// Another file comes in its place, with the bytes of this one, which is removed.
    async fn become_copy(&mut self, volume: &Arc<Volume>) {
        volume.unlink(InodeId::ROOT, self.name.as_bytes()).await.expect("unlinked");
        let copy = create(volume, &self.name).await;
        let length = self.bytes.len() as u64;
        match copy.share(&self.file, 0..length, 0).await {
            Err(error) if error.kind() == ErrorKind::Conflict => {
                copy.write(0, Bytes::from(self.bytes.clone())).await.expect("write");
            }
            shared => assert_eq!(shared.expect("shared"), length),
        }
        self.file.release().await.expect("release");
        self.file = copy;
    }

    /// As a program does that opens with O_TRUNC.
    async fn replace(&mut self, volume: &Arc<Volume>, rng: &Rng) {
        let set = volume.set_attributes(self.file.ino(), Default::default(), Some(0)).await;
        assert_eq!(set.expect("truncated").size, 0);
        self.bytes.clear();
        let size = rng.below(20 * KIB);
        self.write(0, pattern(size, 0..size)).await;
    }
}

async fn check_seed(seed: u64) {
    let rng = Rng::seeded(seed);
    let mut fixture = Fixture::new(Bucket::in_memory().with_faults(&Faults::random(seed, 0.02)));
    fixture.write.buffer_bytes = 128 * KIB;
    let mut volume = open_packed(&fixture).await;
    let mut models = Model::files(&volume, NAMES).await;
    for _ in 0..80 {
        let number = rng.below(NAMES);
        let model = &mut models[number as usize];
        match rng.below(16) {
            0..=2 => model.reopen(&volume).await,
            3 => {
                compact_now(&volume).await;
                drain(&volume).await;
            }
            4 => {
                let policy_now = if rng.below(2) == 0 { Policy::Plain } else { Policy::Packed };
                policy(&volume, "", Some(policy_now)).await.expect("set");
            }
            5 => {
                // The object of a file that was removed may lie where another is to go.
                export_all(&volume, false).await;
            }
            6 => Model::remount(&mut models, &fixture, &mut volume).await,
            7 => model.become_copy(&volume).await,
            _ => model.edit(&volume, &rng, number).await,
        }
    }
    for model in &models {
        model.file.release().await.expect("release");
    }
    volume.sync().await.expect("sync");
    check_clean(&volume).await;
    volume.close().await.expect("close");
    check_end(&fixture, &models).await;
}

/// All is there, in packed files and after an export.
async fn check_end(fixture: &Fixture, models: &[Model]) {
    let volume = fixture.open().await;
    for model in models {
        assert!(read(&volume, &model.name).await == model.bytes, "{} at the end", model.name);
    }
    drain(&volume).await;
    let exported = export_all(&volume, true).await;
    assert!(exported.is_complete(), "{exported:?}");
    volume.close().await.expect("close");
    for model in models {
        assert!(object(&fixture.bucket, &model.name).await == model.bytes, "object {}", model.name);
    }
    let volume = fixture.open().await;
    drain(&volume).await;
    check_clean(&volume).await;
    assert_eq!(keys(&fixture.bucket).await.0.len(), 0, "no segment is left");
}

/// Promise: whatever is done to files of packed directories, they hold what was written, through compaction, changes of
/// policy and exports, and nothing is left over.
#[test]
fn packed_files_agree_with_arrays() {
    with_seeds(16, check_seed);
}
