//! Bytes that are staged on the local disk: what they cost, where they are read, how they get to the store.

mod away;
mod dumping;
mod lost;
mod torn;
mod copied;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::{KIB, MIB};
use forebay_core::{ErrorKind, InodeId, ObjectKey};
use forebay_io::clock::Clock;
use forebay_io::mem::{Budget, Class};
use forebay_io::object::{Bucket, Counters, FaultMode, Faults, OperationKind};
use forebay_metadata::tree::{RenameMode, resolve};

use super::REFUSES_SYNC;
use super::support::{Fixture, READ, READ_WRITE, create, object, open, pattern, run, until};
use crate::packed::{Policy, policy};
use crate::settings::VolumeSettings;
use crate::staging::{Staged, WritebackSettings};
use crate::upkeep::{Report, Request, upkeep};
use crate::{File, Volume};

/// Nothing is uploaded before someone waits for it.
const LATER: WritebackSettings =
    WritebackSettings { enabled: true, bytes: 1 << 40, delay_ms: 3_600_000, open_ms: 3_600_000 };
/// Everything is, at once.
const AT_ONCE: WritebackSettings = WritebackSettings { delay_ms: 0, open_ms: 0, ..LATER };

fn fixture(settings: WritebackSettings) -> Fixture {
    Fixture::new(Bucket::in_memory()).writing_back(settings)
}

async fn write(volume: &Arc<Volume>, name: &str, data: Bytes) {
    let file = create(volume, name).await;
    file.write(0, data).await.expect("write");
    file.flush().await.expect("close");
    file.release().await.expect("release");
}

async fn read(volume: &Arc<Volume>, name: &str) -> Bytes {
    let file = open(volume, name, READ).await;
    let bytes = file.read(0, u32::MAX).await.expect("read");
    file.release().await.expect("release");
    bytes
}

fn puts(counters: &Counters) -> (u64, u64) {
    let put = counters.of(OperationKind::Put);
    (put.requests, put.bytes + counters.of(OperationKind::Part).bytes)
}

/// How many objects Forebay has of its own.
async fn owned(bucket: &Bucket) -> usize {
    use futures::TryStreamExt;
    let all: Vec<_> = bucket.list(".forebay/blobs/").try_collect().await.expect("a listing");
    all.len()
}

async fn drain(volume: &Volume) {
    volume.drain(|_| {}).await.expect("drain");
    assert_eq!(volume.staged(), Staged::default());
}

/// Promise S60: With `--writeback`, closing a file asks nothing of the store; it becomes a plain object by one PUT of its
/// bytes later.
#[test]
fn a_closed_file_is_one_put_later() {
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        // Lists the directory.
        volume.lookup(InodeId::ROOT, b"f").await.expect("lookup");
        let before = fixture.bucket.counters();
        for number in 0..20 {
            write(&volume, &format!("f{number}"), pattern(number, 0..10 * KIB)).await;
        }
        let file = open(&volume, "f3", READ_WRITE).await;
        file.write(0, Bytes::from_static(b"synced")).await.expect("write");
        file.fsync().await.expect("fsync");
        file.release().await.expect("release");
        assert_eq!(fixture.bucket.counters().since(&before).requests(), 0, "nothing was asked of the store");
        let staged = volume.staged();
        assert_eq!((staged.files, staged.last_error), (20, None));
        assert!(read(&volume, "f7").await == pattern(7, 0..10 * KIB), "it is read from the disk");
        drain(&volume).await;
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(puts(&asked), (20, 200 * KIB), "{asked:?}");
        assert_eq!(asked.of(OperationKind::Get).requests, 0, "{asked:?}");
        assert!(object(&fixture.bucket, "f7").await == pattern(7, 0..10 * KIB));
        assert!(object(&fixture.bucket, "f3").await.starts_with(b"synced"));
        assert!(read(&volume, "f7").await == pattern(7, 0..10 * KIB));
        assert_eq!(owned(&fixture.bucket).await, 0);
        volume.close().await.expect("close");
    });
}

/// `forebay sync` and an unmount looked at all that was left after each file that came in.
#[test]
fn bringing_in_many_files_looks_at_each_a_few_times() {
    const FILES: u64 = 200;
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        for number in 0..FILES {
            write(&volume, &format!("f{number}"), pattern(number, 0..KIB)).await;
        }
        let staging = volume.staging().expect("it writes back");
        let before = staging.looks();
        volume.bring_all_in().await.expect("it is uploaded");
        let looks = staging.looks() - before;
        assert_eq!(volume.staged(), Staged::default());
        assert!(looks < 30 * FILES, "{looks}");
        volume.close().await.expect("close");
    });
}

/// Promise S60: What is deleted or overwritten before its turn is never uploaded.
#[test]
fn what_is_gone_before_its_turn_is_not_uploaded() {
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        let before = fixture.bucket.counters();
        for number in 0..10 {
            write(&volume, "temporary", pattern(number, 0..300 * KIB)).await;
            write(&volume, "kept", pattern(number, 0..2 * KIB)).await;
        }
        volume.unlink(InodeId::ROOT, b"temporary").await.expect("unlink");
        drain(&volume).await;
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(puts(&asked), (1, 2 * KIB), "{asked:?}");
        assert!(object(&fixture.bucket, "kept").await == pattern(9, 0..2 * KIB));
        volume.close().await.expect("close");
    });
}

/// A store that says again and again that a blob is there, and it is not: what was staged of it is kept, which was deleted.
#[test]
fn what_the_store_says_it_has_and_has_not_stays_staged() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(500).with_faults(&faults);
        let soon = WritebackSettings { open_ms: 1, ..AT_ONCE };
        let fixture = Fixture::new(bucket).writing_back(soon);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        for nth in 1..=40 {
            faults.script(OperationKind::Put, nth, FaultMode::Refuse);
        }
        file.write(0, Bytes::from_static(b"synced")).await.expect("write");
        file.fsync().await.expect("fsync");
        while faults.injected() < 20 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(volume.staged().files, 1, "{:?}", volume.staged());
        faults.clear();
        file.release().await.expect("release");
        drain(&volume).await;
        assert_eq!(read(&volume, "f").await, "synced");
        volume.close().await.expect("close");
    });
}

/// Promise S62: With `--writeback`, files are written, closed and read as ever while the store is away, and become plain
/// objects when it is back.
#[test]
fn a_store_that_is_away_is_not_missed() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(50).with_faults(&faults);
        let fixture = Fixture::new(bucket).writing_back(AT_ONCE);
        let volume = fixture.open().await;
        // The directory was looked at while the store was there.
        volume.lookup(InodeId::ROOT, b"f").await.expect("lookup");
        faults.set_down(true);
        for number in 0..30 {
            write(&volume, &format!("f{number}"), pattern(number, 0..number * 100 * KIB)).await;
        }
        let file = open(&volume, "f5", READ_WRITE).await;
        file.write(KIB, Bytes::from_static(b"more")).await.expect("write");
        file.fsync().await.expect("fsync");
        assert_eq!(file.read(KIB, 4).await.expect("read"), "more");
        let mut expected = pattern(5, 0..500 * KIB).to_vec();
        expected[KIB as usize..][..4].copy_from_slice(b"more");
        file.release().await.expect("release");
        assert!(read(&volume, "f29").await == pattern(29, 0..2900 * KIB));
        let told = volume.bring_all_in().await.expect_err("the store is away");
        assert!(
            told.kind() == ErrorKind::Unavailable && told.to_string().contains("30 staged files"),
            "{told}"
        );
        assert!(volume.staged().last_error.is_some());
        faults.set_down(false);
        drain(&volume).await;
        for number in (0..30).filter(|number| *number != 5) {
            let found = object(&fixture.bucket, &format!("f{number}")).await;
            assert!(found == pattern(number, 0..number * 100 * KIB), "f{number}");
        }
        assert!(object(&fixture.bucket, "f5").await == expected);
        assert_eq!(owned(&fixture.bucket).await, 0);
        volume.close().await.expect("close");
    });
}

/// Promise S63: Past `--writeback-size`, and on a full local disk, writes go to the store as without `--writeback`; none
/// fails for it. Each byte is uploaded once.
#[test]
fn past_the_ceiling_writes_go_through() {
    run(async {
        let fixture = fixture(WritebackSettings { bytes: 3 * MIB, ..LATER });
        let volume = fixture.open().await;
        let before = fixture.bucket.counters();
        let file = create(&volume, "big").await;
        for at in 0..40 {
            file.write(at * MIB / 2, pattern(1, at * MIB / 2..(at + 1) * MIB / 2)).await.expect("write");
        }
        file.flush().await.expect("close");
        file.release().await.expect("release");
        write(&volume, "small", pattern(2, 0..900 * KIB)).await;
        drain(&volume).await;
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(puts(&asked).1, 20 * MIB + 900 * KIB, "{asked:?}");
        assert_eq!(asked.of(OperationKind::Complete).requests, 1);
        assert!(object(&fixture.bucket, "big").await == pattern(1, 0..20 * MIB));
        assert!(object(&fixture.bucket, "small").await == pattern(2, 0..900 * KIB));
        assert_eq!(owned(&fixture.bucket).await, 0);

        // A disk that takes nothing.
        let folder = fixture.writeback.as_ref().expect("it writes back").0.path();
        std::fs::remove_dir_all(folder.join("staging")).expect("removed");
        write(&volume, "direct", pattern(3, 0..KIB)).await;
        assert!(object(&fixture.bucket, "direct").await == pattern(3, 0..KIB), "at its close");
        write(&volume, "long", pattern(4, 0..5 * MIB)).await;
        assert!(object(&fixture.bucket, "long").await == pattern(4, 0..5 * MIB), "at its close");
        volume.close().await.expect("close");
    });
}

/// Tiny files were counted by their bytes, and filled a disk, and memory, of which they take blocks and entries.
#[test]
fn tiny_files_count_as_what_they_take_of_the_disk() {
    run(async {
        let fixture = fixture(WritebackSettings { bytes: 16 * KIB, ..LATER });
        let mut volume = fixture.open().await;
        let is_through = async |name: &str| {
            fixture.bucket.head(&ObjectKey::new(name)).await.expect("the store is there").is_some()
        };
        for (name, fits) in [("a", true), ("b", true), ("c", true), ("d", true), ("e", false)] {
            write(&volume, name, pattern(1, 0..1)).await;
            assert_eq!(is_through(name).await, !fits, "{name}");
        }
        // So they count when they are found.
        volume.close().await.expect("close");
        volume = fixture.open().await;
        write(&volume, "f", pattern(1, 0..1)).await;
        assert!(is_through("f").await);
        drain(&volume).await;
        write(&volume, "g", pattern(1, 0..1)).await;
        assert!(!is_through("g").await, "and as nothing once they are gone");
        volume.close().await.expect("close");
    });
}

/// Promise S61: the next mount with the same state directory reads and uploads them.
#[test]
fn the_next_mount_brings_in_what_one_left() {
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        for number in 0..8 {
            write(&volume, &format!("f{number}"), pattern(number, 0..300 * KIB)).await;
        }
        volume.unlink(InodeId::ROOT, b"f1").await.expect("unlink");
        let file = create(&volume, "empty").await;
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(owned(&fixture.bucket).await, 0);
        let before = fixture.bucket.counters();
        let volume = fixture.open().await;
        assert!(read(&volume, "f4").await == pattern(4, 0..300 * KIB));
        drain(&volume).await;
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(puts(&asked), (8, 7 * 300 * KIB), "{asked:?}");
        assert!(object(&fixture.bucket, "f7").await == pattern(7, 0..300 * KIB));
        assert_eq!(object(&fixture.bucket, "empty").await, "");
        volume.close().await.expect("close");
    });
}

/// What a mount had asked of the store when it died may still come to pass, for five minutes: what was staged is uploaded meanwhile,
/// to its path or into a segment.
#[test]
fn the_next_mount_waits_for_no_answer_that_the_one_before_did_not_get() {
    run(async {
        for next in [None, Some(Policy::Packed)] {
            println!("{next:?}");
            let fixture = fixture(LATER);
            let volume = fixture.open().await;
            write(&volume, "f", Bytes::from_static(b"staged")).await;
            // An upload begins, and is not answered.
            let (ino, tree) = (resolve(&**volume.tree(), "f").await.expect("found").ino, volume.tree());
            tree.place(ino, true).await.expect("placed");
            tree.doubt(ino).await.expect("noted");
            assert!(tree.is_in_doubt(ino).await.expect("known"), "it may still come");
            volume.close().await.expect("close");
            let volume = fixture.open().await;
            if next.is_some() {
                policy(&volume, "", next).await.expect("set");
            }
            drain(&volume).await;
            assert_eq!(volume.staged().files, 0);
            assert_eq!(read(&volume, "f").await, "staged");
            if next.is_none() {
                assert_eq!(object(&fixture.bucket, "f").await, "staged");
            }
            volume.close().await.expect("close");
        }
    });
}

/// Where a file's object was being moved to its path, and the store did not answer, a sync waited for what comes of that, for minutes,
/// and failed.
#[test]
fn a_sync_waits_for_no_copy_that_was_not_answered() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_faults(&faults).with_deadline_ms(30);
        let fixture = Fixture::new(bucket).writing_back(LATER);
        let volume = fixture.open().await;
        write(&volume, "f", Bytes::from_static(b"old")).await;
        volume.bring_all_in().await.expect("it is uploaded");
        let (from, to) = ((InodeId::ROOT, &b"f"[..]), (InodeId::ROOT, &b"g"[..]));
        volume.rename(from, to, RenameMode::Replace).await.expect("renamed");
        for nth in 1..40 {
            faults.script(OperationKind::Copy, nth, FaultMode::Before);
        }
        volume.tree().local().expect("a tree of this process").drain().await.expect("drained");
        assert!(faults.injected() > 0, "the copy failed");
        faults.clear();
        write(&volume, "g", Bytes::from_static(b"new")).await;
        volume.bring_all_in().await.expect("it waits for the bytes alone");
        assert_eq!((owned(&fixture.bucket).await, volume.staged().files), (1, 0));
        assert_eq!(read(&volume, "g").await, "new");
        volume.close().await.expect("close");
    });
}

/// A file whose bytes were brought in while its path could not be had stayed away from that for good.
#[test]
fn a_file_that_a_sync_did_not_wait_for_comes_to_its_path() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_faults(&faults).with_deadline_ms(30);
        let mut fixture = Fixture::new(bucket).writing_back(LATER);
        fixture.clock = Clock::manual();
        // The clock goes on a second for each millisecond that this takes.
        fixture.write.deadline_ms = 36_000_000;
        let volume = fixture.open().await;
        let (size, half) = (2 * fixture.write.buffer_bytes, fixture.write.buffer_bytes);
        // In two pieces.
        let file = create(&volume, "long").await;
        for range in [half..size, 0..half] {
            file.write(range.start, pattern(1, range)).await.expect("write");
            file.fsync().await.expect("fsync");
        }
        file.release().await.expect("release");
        faults.of_keys_with("long");
        for nth in 1..400 {
            faults.script(OperationKind::Create, nth, FaultMode::Before);
            faults.script(OperationKind::Put, nth, FaultMode::Before);
        }
        let passes = async {
            loop {
                fixture.clock.advance(Duration::from_secs(1));
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            synced = volume.bring_all_in() => synced.expect("it waits for the bytes alone"),
            () = passes => {}
        }
        assert!(faults.injected() >= 3, "it was tried");
        assert_eq!((owned(&fixture.bucket).await, volume.staged().files), (2, 0));
        assert!(fixture.bucket.head(&ObjectKey::new("long")).await.expect("looked for").is_none());

        faults.clear();
        let is_there = async || {
            fixture.clock.advance(Duration::from_secs(1));
            fixture.bucket.head(&ObjectKey::new("long")).await.expect("looked for").is_some()
        };
        until("it is at its path", is_there).await;
        assert!(object(&fixture.bucket, "long").await == pattern(1, 0..size));
        volume.close().await.expect("close");
    });
}

/// Promise S60: Bytes of a file that stays open for `writeback.open_ms` are uploaded under a key of Forebay's own, and once
/// more when the file becomes a plain object.
#[test]
fn files_that_stay_open_and_clones_are_uploaded_under_their_own_keys() {
    run(async {
        let fixture = fixture(AT_ONCE);
        let volume = fixture.open().await;
        let file = create(&volume, "open").await;
        file.write(0, pattern(1, 0..600 * KIB)).await.expect("write");
        file.fsync().await.expect("fsync");
        volume.bring_all_in().await.expect("it is uploaded");
        assert_eq!((owned(&fixture.bucket).await, volume.staged()), (1, Staged::default()));
        assert!(file.read(0, u32::MAX).await.expect("read") == pattern(1, 0..600 * KIB));
        file.write(600 * KIB, pattern(1, 600 * KIB..700 * KIB)).await.expect("write");
        file.release().await.expect("release");
        drain(&volume).await;
        assert!(object(&fixture.bucket, "open").await == pattern(1, 0..700 * KIB));

        let (from, to) = (create(&volume, "from").await, create(&volume, "to").await);
        from.write(0, pattern(2, 0..400 * KIB)).await.expect("write");
        assert_eq!(to.share(&from, 0..400 * KIB, 0).await.expect("shared"), 400 * KIB);
        from.release().await.expect("release");
        to.release().await.expect("release");
        drain(&volume).await;
        for name in ["from", "to"] {
            assert!(read(&volume, name).await == pattern(2, 0..400 * KIB), "{name}");
        }
        volume.close().await.expect("close");
    });
}

/// What a writer has staged and not committed was deleted when another handle of the file was closed.
#[test]
fn closing_one_handle_leaves_what_another_is_writing() {
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        let other = open(&volume, "f", READ_WRITE).await;
        // More than the buffer: it is staged before it is committed.
        file.write(0, pattern(1, 0..2 * MIB)).await.expect("write");
        other.release().await.expect("release");
        file.write(4 * MIB, pattern(1, 4 * MIB..6 * MIB)).await.expect("write");
        let uploads = volume.store().uploads.clone().expect("it writes back");
        volume.bring_in(&uploads, file.ino()).await.expect("it is looked at");
        volume.forget_doomed().await.expect("swept");
        file.fsync().await.expect("fsync");
        let got = file.read(0, 6 << 20).await.expect("read");
        assert!(got[..2 << 20] == pattern(1, 0..2 * MIB) && got[4 << 20..] == pattern(1, 4 * MIB..6 * MIB));
        file.release().await.expect("release");
        drain(&volume).await;
        assert_eq!(object(&fixture.bucket, "f").await, got);
        volume.close().await.expect("close");
    });
}

/// A writer that staged bytes while others were waited for, and wrote no more, was waited for without end.
#[test]
fn a_sync_does_not_wait_for_those_who_go_on_writing() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_faults(&faults);
        let mut fixture = Fixture::new(bucket).writing_back(LATER);
        fixture.tree_in_bucket = true;
        let volume = fixture.open().await;
        write(&volume, "before", pattern(1, 0..KIB)).await;
        let gate = faults.gate(1);
        let own = volume.clone();
        let sync = tokio::spawn(async move { own.sync_all().await });
        gate.reached().await;
        let file = create(&volume, "open").await;
        // More than the buffer: it is staged before it is committed.
        file.write(0, pattern(2, 0..2 * MIB)).await.expect("write");
        gate.open();
        sync.await.expect("it ends").expect("synced");
        assert!(object(&fixture.bucket, "before").await == pattern(1, 0..KIB));
        file.release().await.expect("release");
        drain(&volume).await;
        volume.close().await.expect("close");
    });
}

/// Who opened a file while it was brought to the store wrote over bytes that were deleted then: all that it had not written
/// was lost.
#[test]
fn an_open_that_meets_an_upload_is_of_what_that_made() {
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        write(&volume, "f", pattern(1, 0..300 * KIB)).await;
        let ino = resolve(&**volume.tree(), "f").await.expect("the file").ino;
        // Half of an open.
        volume.tree().opened(ino).await.expect("opened");
        let gone = volume.gone();
        let found = volume.tree().layout(ino).await.expect("a layout");
        drain(&volume).await;
        let inode = match volume.adopt(ino, found, gone) {
            Some(inode) => inode,
            None => volume.acquire(ino).await.expect("opened"),
        };
        let file = File::new(inode, volume.clone(), READ_WRITE);
        file.write(0, pattern(1, 0..KIB)).await.expect("write");
        file.fsync().await.expect("fsync");
        file.release().await.expect("release");
        drain(&volume).await;
        assert!(read(&volume, "f").await == pattern(1, 0..300 * KIB));
        volume.close().await.expect("close");
    });
}

/// An empty file of a packed directory was put under a key of its own.
#[test]
fn empty_packed_files_cost_nothing() {
    use crate::packed::{Policy, policy};
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        policy(&volume, "", Some(Policy::Packed)).await.expect("set");
        let before = fixture.bucket.counters();
        for number in 0..5 {
            write(&volume, &format!("f{number}"), Bytes::new()).await;
        }
        drain(&volume).await;
        assert_eq!(puts(&fixture.bucket.counters().since(&before)), (0, 0));
        assert_eq!((owned(&fixture.bucket).await, read(&volume, "f3").await), (0, Bytes::new()));
        volume.close().await.expect("close");
    });
}

/// With the tree in the bucket, syncing a file costs the tree's batch and nothing else.
#[test]
fn syncing_a_file_is_one_put_of_the_tree() {
    run(async {
        let mut fixture = fixture(LATER);
        fixture.tree_in_bucket = true;
        let volume = fixture.open().await;
        write(&volume, "first", pattern(1, 0..KIB)).await;
        volume.sync().await.expect("sync");
        let (before, begun) = (fixture.bucket.counters(), std::time::Instant::now());
        for number in 0..5 {
            let file = create(&volume, &format!("f{number}")).await;
            file.write(0, pattern(number, 0..100 * KIB)).await.expect("write");
            file.fsync().await.expect("fsync");
            file.release().await.expect("release");
        }
        let asked = fixture.bucket.counters().since(&before);
        let (requests, bytes) = puts(&asked);
        // The tree writes by itself each second what nobody waits for.
        let most = 6 + 2 * begun.elapsed().as_secs();
        assert!(requests <= most && bytes < 20 * KIB, "5 batches of the tree: {asked:?}");
        drain(&volume).await;
        volume.close().await.expect("close");
    });
}

/// Promise S64: Where staged bytes are on another host's disk only, reading them fails with EIO and the log names that
/// host, `forebay fsck` names the files, and nothing frees what refers to them.
#[test]
fn another_host_is_told_where_the_bytes_are() {
    run(async {
        let mut fixture = fixture(LATER);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, pattern(1, 0..300 * KIB)).await.expect("write");
        file.fsync().await.expect("fsync");
        file.release().await.expect("release");
        volume.close().await.expect("close");

        let here = fixture.writeback.take();
        let volume = fixture.open().await;
        let file = open(&volume, "f", READ).await;
        let error = file.read(0, 10).await.expect_err("the bytes are elsewhere");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("staged with --writeback on host"), "{error}");
        file.release().await.expect("release");
        for repair in [false, true] {
            let report = volume.tree().local().expect("a tree").fsck(repair).await.expect("fsck");
            let [finding] = report.findings.as_slice() else { panic!("{report:?}") };
            assert_eq!((finding.kind.as_str(), finding.mended), ("not-uploaded", false), "{finding:?}");
        }

        // As the first host does while the second has the volume.
        let (folder, settings) = here.as_ref().expect("a folder");
        let staging = crate::staging::Staging::open(
            folder.path().join("staging"),
            fixture.bucket.url(),
            settings.bytes,
            volume.clock().clone(),
        );
        let staging = staging.await.expect("it is free");
        crate::staging::upload_all(&staging, &fixture.bucket).await.expect("healed");
        assert!(read(&volume, "f").await == pattern(1, 0..300 * KIB));
        let report = volume.tree().local().expect("a tree").fsck(false).await.expect("fsck");
        assert!(report.is_clean(), "{report:?}");
        volume.close().await.expect("close");
    });
}

/// Promise S67: Staged bytes carry checksums: damaged ones are neither returned nor uploaded, but told.
/// Promise S67: As long as files need bytes that are lost, `forebay sync` and the process of an unmounted volume fail: removing
/// the files for good, or writing them anew, ends that.
#[test]
fn damaged_bytes_are_neither_read_nor_uploaded() {
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        write(&volume, "f", pattern(1, 0..300 * KIB)).await;
        let folder = fixture.writeback.as_ref().expect("it writes back").0.path().join("staging");
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("entry").path();
            let mut bytes = std::fs::read(&path).expect("file");
            if let Some(byte) = bytes.get_mut(70_000) {
                *byte ^= 1;
                std::fs::write(&path, bytes).expect("damaged");
            }
        }
        let file = open(&volume, "f", READ).await;
        assert_eq!(file.read(70_000, 10).await.expect_err("damaged").kind(), ErrorKind::Corrupt);
        file.release().await.expect("release");
        let before = fixture.bucket.counters();
        for told in [volume.sync_all().await, volume.drain(|_| {}).await] {
            let told = told.expect_err("its bytes are lost");
            assert!(told.kind() == ErrorKind::Corrupt && told.to_string().contains("lost"), "{told}");
        }
        assert_eq!(puts(&fixture.bucket.counters().since(&before)).0, 0);
        assert_eq!(volume.staged().damaged, 1);
        let check = Request::Fsck { repair: false, accept_loss: false };
        let Report::Fsck(report) = upkeep(&volume, &check).await.expect("fsck") else { panic!("of fsck") };
        let [finding] = report.findings.as_slice() else { panic!("{report:?}") };
        assert!(finding.kind == "not-uploaded" && finding.detail.contains("damaged"), "{finding:?}");
        volume.unlink(InodeId::ROOT, b"f").await.expect("unlink");
        drain(&volume).await;
        volume.close().await.expect("close");
    });
}

/// A disk that says only at fsync that it is full stopped the tree for good. What it does not keep goes to the store, as does
/// what is written while it is left alone; then it is tried again. While the store is away, too, nothing is given up.
#[test]
fn a_disk_that_is_full_at_fsync_stops_nothing() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(50).with_faults(&faults);
        let mut fixture = Fixture::new(bucket).writing_back(LATER);
        fixture.clock = Clock::manual();
        fixture.write.deadline_ms = 3000;
        let folder = fixture.writeback.as_ref().expect("it writes back").0.path().join("staging");
        let volume = fixture.open().await;
        volume.lookup(InodeId::ROOT, b"f").await.expect("lookup");
        let synced = async |name: &str, number| {
            let file = create(&volume, name).await;
            file.write(0, pattern(number, 0..100 * KIB)).await.expect("write");
            let synced = file.fsync().await;
            (file, synced)
        };
        let (kept, on_disk) = synced("kept", 1).await;
        on_disk.expect("the disk has it");
        assert_eq!((owned(&fixture.bucket).await, volume.staged().files), (0, 1));

        std::fs::write(folder.join(REFUSES_SYNC), "").expect("full");
        faults.set_down(true);
        let (through, refused) = synced("through", 2).await;
        assert_eq!(refused.expect_err("nobody has it").kind(), ErrorKind::Unavailable);
        faults.set_down(false);
        while through.fsync().await.is_err() {
            fixture.clock.advance(std::time::Duration::from_secs(1));
        }
        assert_eq!((owned(&fixture.bucket).await, volume.staged().files), (1, 1), "in the bucket");
        assert!(through.read(0, u32::MAX).await.expect("read") == pattern(2, 0..100 * KIB));

        std::fs::remove_file(folder.join(REFUSES_SYNC)).expect("there is room");
        let (direct, written) = synced("direct", 3).await;
        written.expect("written through");
        assert!(
            object(&fixture.bucket, "direct").await == pattern(3, 0..100 * KIB),
            "the disk is left alone"
        );
        fixture.clock.advance(std::time::Duration::from_secs(60));
        let (again, on_disk) = synced("again", 4).await;
        on_disk.expect("the disk has it");
        assert_eq!(volume.staged().files, 2);
        for file in [kept, through, direct, again] {
            file.release().await.expect("release");
        }
        drain(&volume).await;
        for (number, name) in (1..).zip(["kept", "through", "direct", "again"]) {
            assert!(object(&fixture.bucket, name).await == pattern(number, 0..100 * KIB), "{name}");
        }
        volume.tree().local().expect("a tree").drain().await.expect("what is not needed is deleted");
        assert_eq!(owned(&fixture.bucket).await, 0);
        volume.close().await.expect("close");
    });
}

/// Writers that hold all memory and write no more kept what is staged from the store.
#[test]
fn idle_writers_do_not_hold_up_uploads() {
    run(async {
        let mut fixture = fixture(LATER);
        fixture.budget = Budget::new(16 * MIB);
        let volume = fixture.open().await;
        write(&volume, "staged", pattern(0, 0..900 * KIB)).await;
        let mut idle = Vec::new();
        while fixture.budget.try_acquire(Class::Write, 900 * KIB).is_some() {
            let file = create(&volume, &format!("idle{}", idle.len())).await;
            file.write(0, pattern(1, 0..900 * KIB)).await.expect("write");
            idle.push(file);
        }
        let uploads = volume.store().uploads.clone().expect("it writes back");
        let staged = resolve(&**volume.tree(), "staged").await.expect("found").ino;
        volume.bring_in(&uploads, staged).await.expect("uploaded");
        assert!(object(&fixture.bucket, "staged").await == pattern(0, 0..900 * KIB));
        for file in idle {
            assert!(file.read(0, u32::MAX).await.expect("read") == pattern(1, 0..900 * KIB));
            file.release().await.expect("release");
        }
        drain(&volume).await;
        volume.close().await.expect("close");
    });
}

/// A volume that once was written back, and is not any more: files that are closed were left to a schedule that ends with
/// the process.
#[test]
fn closing_a_volume_seals_what_was_written_without_staging() {
    run(async {
        let settings = WritebackSettings { enabled: false, bytes: 0, ..LATER };
        let fixture = fixture(settings);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        for part in (0..4).rev() {
            file.write(part * MIB, pattern(1, part * MIB..(part + 1) * MIB)).await.expect("write");
        }
        file.flush().await.expect("close");
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert!(object(&fixture.bucket, "f").await == pattern(1, 0..4 * MIB));
    });
}

/// A dump belongs to the objects that are there when it is taken.
#[test]
fn a_dump_is_refused_while_bytes_are_staged() {
    run(async {
        let scratch = tempfile::tempdir().expect("scratch");
        std::fs::create_dir(scratch.path().join("bucket")).expect("a bucket");
        let source = format!("file://{}", scratch.path().join("bucket").display());
        let state_directory = scratch.path().join("state");
        let settings = VolumeSettings { state_directory, writeback: LATER, ..VolumeSettings::default() };
        let volume = crate::connect(&source, settings.clone()).await.expect("a volume");
        write(&volume, "f", pattern(1, 0..KIB)).await;
        volume.close().await.expect("close");
        let file = scratch.path().join("dump");
        let to = || crate::backup::Target::File(file.clone());
        let told = crate::backup::dump(&source, &settings, to()).await.expect_err("it is staged");
        assert!(told.to_string().contains("1 files have bytes that are staged"), "{told}");
        assert!(!file.exists());
        let volume = crate::connect(&source, settings.clone()).await.expect("a volume");
        drain(&volume).await;
        volume.close().await.expect("close");
        crate::backup::dump(&source, &settings, to()).await.expect("nothing is staged");
    });
}
