//! What was moved while a file was open, and writes of which the answer was lost.

use std::time::Duration;

use bytes::Bytes;
use forebay_core::{ErrorKind, FileLayout, InodeId, ObjectKey};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition, FaultMode, Faults, OperationKind};
use forebay_metadata::tree::RenameMode;
use tokio_util::sync::CancellationToken;

use super::support::*;
use crate::packed::{Policy, export, policy};
use crate::staging::WritebackSettings;
use crate::{Access, File, Volume};

async fn layout_of(volume: &Volume, file: &File) -> FileLayout {
    volume.store().tree.layout(file.ino()).await.expect("a layout").0
}

/// A blob of its own, which the mover had brought to the file's path and which was deleted since, was committed anew: bytes
/// that had been synced were gone.
#[test]
fn what_was_moved_while_a_file_is_open_is_not_committed_from_where_it_was() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let old = create(&volume, "log").await;
        old.write(0, Bytes::from_static(b"old")).await.expect("write");
        old.release().await.expect("release");
        let root = InodeId::ROOT;
        volume.rename((root, b"log"), (root, b"log.1"), RenameMode::Replace).await.expect("rename");
        let log = create(&volume, "log").await;
        log.write(0, Bytes::from_static(b"header\n")).await.expect("write");
        log.fsync().await.expect("fsync");
        until("it is moved", async || layout_of(&volume, &log).await.is_plain()).await;
        log.write(7, Bytes::from_static(b"more\n")).await.expect("write");
        log.fsync().await.expect("fsync");
        let named = layout_of(&volume, &log).await;
        let home: Vec<_> =
            named.blobs().filter(|blob| !blob.is_owned()).map(|blob| blob.key.as_str().to_owned()).collect();
        assert_eq!(home, ["log"], "{named:?}");
        log.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "log").await, "header\nmore\n");
    });
}

/// A file of which a part was written anew, and what it holds.
async fn in_parts(volume: &std::sync::Arc<Volume>) -> std::sync::Arc<File> {
    let file = create(volume, "f").await;
    file.write(0, Bytes::from_static(b"hello")).await.expect("write");
    file.fsync().await.expect("fsync");
    file.write(1, Bytes::from_static(b"E")).await.expect("write");
    file.fsync().await.expect("fsync");
    file
}

/// A file that holds `text` by its last close, and was opened again and written anew, whole: one upload, not yet completed.
async fn written_anew(volume: &std::sync::Arc<Volume>, text: &'static str) -> std::sync::Arc<File> {
    let file = create(volume, "f").await;
    file.write(0, Bytes::from_static(text.as_bytes())).await.expect("write");
    file.fsync().await.expect("fsync");
    file.release().await.expect("release");
    let file = open(volume, "f", Access { truncate: true, ..READ_WRITE }).await;
    for at in 0..4 * forebay_core::units::MIB / 65536 {
        file.write(at * 65536, pattern(2, at * 65536..(at + 1) * 65536)).await.expect("write");
    }
    file
}

/// The next try put the same bytes there again, which the tree did not name: the file could not be read, and what was synced to
/// it later was lost.
#[test]
fn a_file_whose_seal_was_not_answered_is_whole_and_goes_on() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(100).with_faults(&faults);
        let fixture = Fixture::new(bucket);
        let volume = fixture.open().await;
        let file = in_parts(&volume).await;
        let written = volume.attributes(file.ino()).await.expect("it is there").mtime;
        faults.script(OperationKind::Put, 1, FaultMode::LoseReplyThenDown);
        file.release().await.expect("release");
        until("a try is given up", async || faults.injected() > 4).await;
        faults.set_down(false);
        let file = open(&volume, "f", READ_WRITE).await;
        until("it is sealed", async || layout_of(&volume, &file).await.is_plain()).await;
        assert_eq!(volume.attributes(file.ino()).await.expect("it is there").mtime, written);
        file.write(5, Bytes::from_static(b" more")).await.expect("write");
        file.fsync().await.expect("fsync");
        assert_eq!(file.read(0, 100).await.expect("read"), "hEllo more");
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "hEllo more");
    });
}

/// What an upload that was lost may have replaced was committed with newer bytes over it: the file could not be read, and
/// either went with the next settlement.
#[test]
fn nothing_is_committed_over_what_a_lost_upload_may_have_replaced() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(100).with_faults(&faults);
        let fixture = Fixture::new(bucket);
        let volume = fixture.open().await;
        let file = written_anew(&volume, "old").await;
        faults.script(OperationKind::Put, 1, FaultMode::LoseReplyThenDown);
        file.fsync().await.expect_err("nobody knows what became of it");
        faults.set_down(false);
        file.write(3, Bytes::from_static(b" more")).await.expect("write");
        let told = file.fsync().await;
        let whole = pattern(2, 0..4 * forebay_core::units::MIB);
        file.release().await.expect("release");
        volume.close().await.expect("close");
        let there = object(&fixture.bucket, "f").await;
        match told {
            // What was written is over bytes that are gone; what was lost is there after all.
            Err(error) => assert_eq!((error.kind(), there == whole), (ErrorKind::Stale, true), "{error}"),
            Ok(()) => assert!(there == "old more", "{} bytes", there.len()),
        }
    });
}

/// An upload that was not answered, and may still replace what the file had: bytes that are written over a part of that, and
/// synced, were lost with it if it did.
#[test]
fn what_an_upload_may_still_replace_is_nothing_to_build_on() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(100).with_faults(&faults);
        let fixture = Fixture::new(bucket);
        let volume = fixture.open().await;
        let file = written_anew(&volume, "old and long").await;
        for nth in 1..200 {
            faults.script(OperationKind::Put, nth, FaultMode::Before);
        }
        file.fsync().await.expect_err("nobody knows what became of it");
        faults.clear();
        file.write(0, Bytes::from_static(b"new")).await.expect("write");
        file.fsync().await.expect("fsync");
        let named = layout_of(&volume, &file).await;
        assert!(named.blobs().all(|blob| blob.is_owned()), "{named:?}");
        assert!(volume.tree().is_in_doubt(file.ino()).await.expect("known"));
        // Whatever comes there now.
        let put =
            fixture.bucket.put(&ObjectKey::new("f"), Bytes::from_static(b"late"), Condition::Always).await;
        put.expect("put");
        assert_eq!(file.read(0, 100).await.expect("read"), "new and long");
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// A place that was asked for in vain, as it was not on disk in time, was kept for the file for as long as the volume was
/// mounted.
#[test]
fn a_place_that_was_not_recorded_in_time_is_free_again() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(100).with_faults(&faults);
        let fixture = Fixture { clock: Clock::manual(), tree_in_bucket: true, ..Fixture::new(bucket) };
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"old")).await.expect("write");
        file.fsync().await.expect("fsync");
        faults.set_down(true);
        let asked =
            tokio::time::timeout(Duration::from_millis(300), volume.tree().place(file.ino(), false)).await;
        assert!(!asked.is_ok_and(|placed| placed.is_ok()), "the tree is not there");
        faults.set_down(false);
        until("it is recorded", async || volume.tree().is_in_doubt(file.ino()).await.is_ok_and(|is| is))
            .await;
        in_time(&fixture, "it is settled", async || {
            !volume.tree().is_in_doubt(file.ino()).await.expect("known")
        })
        .await;
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// A volume whose closed files are uploaded at once, to a store that may go away.
fn written_back_at_close() -> (Faults, Fixture) {
    let faults = Faults::new();
    let bucket = Bucket::in_memory().with_deadline_ms(100).with_faults(&faults);
    let at_once = WritebackSettings { enabled: true, bytes: 1 << 40, delay_ms: 0, open_ms: 3_600_000 };
    (faults, Fixture::new(bucket).writing_back(at_once))
}

/// What an upload of a staged file had brought, of which the answer was lost, took the place of what was synced after it when
/// the volume was opened again.
#[test]
fn what_is_synced_after_a_seal_that_was_not_answered_is_newer_than_what_that_brought() {
    run(async {
        let (faults, fixture) = written_back_at_close();
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        faults.script(OperationKind::Put, 1, FaultMode::LoseReplyThenDown);
        file.write(0, Bytes::from_static(b"old")).await.expect("write");
        file.fsync().await.expect("it is staged");
        file.release().await.expect("release");
        until("its upload is given up", async || faults.injected() > 4).await;
        let file = open(&volume, "f", READ_WRITE).await;
        file.write(3, Bytes::from_static(b" more")).await.expect("write");
        file.fsync().await.expect("it is staged");
        let refused = faults.injected();
        file.release().await.expect("release");
        tokio::select! {
            _ = volume.drain(|_| {}) => panic!("the store is away"),
            () = until("the next one is given up", async || faults.injected() > refused + 4) => {}
        }
        // What is staged stays so: the next mount brings it in.
        volume.close().await.ok();
        faults.set_down(false);
        assert_eq!(object(&fixture.bucket, "f").await, "old", "that came");
        let volume = fixture.open().await;
        let file = open(&volume, "f", READ).await;
        assert_eq!(file.read(0, 100).await.expect("read"), "old more");
        file.release().await.expect("release");
        volume.drain(|_| {}).await.expect("drain");
        assert_eq!(object(&fixture.bucket, "f").await, "old more");
        volume.close().await.expect("close");
    });
}

/// An upload that was not answered to a path that is another file's since: that one's object was taken for the file's content,
/// and deleted.
#[test]
fn what_was_not_answered_at_a_path_that_is_another_files_takes_nothing_from_either() {
    run(async {
        let (faults, fixture) = written_back_at_close();
        let volume = fixture.open().await;
        let file = create(&volume, "log").await;
        file.write(0, Bytes::from_static(b"old")).await.expect("write");
        file.release().await.expect("release");
        volume.drain(|_| {}).await.expect("drain");
        let file = open(&volume, "log", READ_WRITE).await;
        file.write(0, Bytes::from_static(b"old and")).await.expect("write");
        file.fsync().await.expect("it is staged");
        faults.set_down(true);
        file.release().await.expect("release");
        until("its upload is given up", async || faults.injected() > 3).await;
        let (file, root) = (open(&volume, "log", READ_WRITE).await, InodeId::ROOT);
        volume.rename((root, b"log"), (root, b"log.1"), RenameMode::Replace).await.expect("rename");
        file.write(7, Bytes::from_static(b" more")).await.expect("write");
        file.fsync().await.expect("it is staged");
        let fresh = create(&volume, "log").await;
        fresh.write(0, Bytes::from_static(b"new")).await.expect("write");
        fresh.fsync().await.expect("it is staged");
        faults.set_down(false);
        fresh.release().await.expect("release");
        until("the new one is there", async || layout_of(&volume, &fresh).await.is_plain()).await;
        file.release().await.expect("release");
        volume.drain(|_| {}).await.expect("drain");
        volume.close().await.expect("close");
        let volume = fixture.open().await;
        for (name, expected) in [("log", "new"), ("log.1", "old and more")] {
            let file = open(&volume, name, READ).await;
            assert_eq!(file.read(0, 100).await.expect("read"), expected);
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "log").await, "new");
    });
}

/// Advances the clock a second at a time until it has happened.
async fn in_time(fixture: &Fixture, what: &str, mut happened: impl AsyncFnMut() -> bool) {
    until(what, async || {
        fixture.clock.advance(Duration::from_secs(1));
        happened().await
    })
    .await;
}

/// The store refused to take a file at its path, and the path was kept for it for as long as the volume was mounted: the next
/// file there was no object of its own.
#[test]
fn a_path_where_a_file_was_refused_is_free_again() {
    run(async {
        let faults = Faults::new();
        let fixture = Fixture::new(Bucket::in_memory().with_deadline_ms(100).with_faults(&faults));
        let volume = fixture.open().await;
        policy(&volume, "", Some(Policy::Packed)).await.expect("set");
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"packed")).await.expect("write");
        file.fsync().await.expect("fsync");
        file.release().await.expect("release");
        faults.script(OperationKind::Put, 1, FaultMode::Deny);
        let exported =
            export(&volume, ("", true), |_| {}, &CancellationToken::new()).await.expect("an outcome");
        assert_eq!((exported.failed, faults.injected()), (1, 1), "{exported:?}");
        let root = InodeId::ROOT;
        volume.rename((root, b"f"), (root, b"g"), RenameMode::Replace).await.expect("rename");
        let next = create(&volume, "f").await;
        next.write(0, Bytes::from_static(b"next")).await.expect("write");
        next.fsync().await.expect("fsync");
        let named = layout_of(&volume, &next).await;
        assert!(named.is_plain() && named.blobs().all(|blob| blob.key.as_str() == "f"), "{named:?}");
        next.release().await.expect("release");
        let file = open(&volume, "g", READ).await;
        assert_eq!(file.read(0, 100).await.expect("read"), "packed");
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "next");
    });
}

/// A file whose seal was not answered waited five minutes for its segment. It is known what the seal brings, if it still comes.
#[test]
fn a_file_whose_seal_may_still_come_is_packed() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(100).with_faults(&faults);
        let fixture = Fixture { clock: Clock::manual(), ..Fixture::new(bucket) };
        let volume = fixture.open().await;
        let idle = volume.seals.available_permits();
        policy(&volume, "", Some(Policy::Packed)).await.expect("set");
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"hello")).await.expect("write");
        file.fsync().await.expect("fsync");
        policy(&volume, "", Some(Policy::Plain)).await.expect("set");
        file.write(1, Bytes::from_static(b"E")).await.expect("write");
        file.fsync().await.expect("fsync");
        for nth in 1..200 {
            faults.script(OperationKind::Put, nth, FaultMode::Before);
        }
        file.release().await.expect("release");
        let tree = volume.tree();
        until("it is in doubt", async || tree.is_in_doubt(file.ino()).await.expect("known")).await;
        policy(&volume, "", Some(Policy::Packed)).await.expect("set");
        // The next try is the clock's matter, which stands.
        until("the seal is given up", async || volume.seals.available_permits() == idle).await;
        faults.clear();
        in_time(&fixture, "it is packed", async || layout_of(&volume, &file).await.is_packed()).await;
        assert!(tree.is_in_doubt(file.ino()).await.expect("known"), "it may still come");
        let is_over = async || !tree.is_in_doubt(file.ino()).await.expect("known");
        in_time(&fixture, "nothing comes any more", is_over).await;
        let file = open(&volume, "f", READ).await;
        assert_eq!(file.read(0, 100).await.expect("read"), "hEllo");
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// What an upload that was not answered had brought could not be read, nor what it had replaced, until the file was written
/// again or the volume mounted again.
#[test]
fn what_an_upload_brought_that_was_not_answered_is_found_by_itself() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(100).with_faults(&faults);
        let fixture = Fixture { clock: Clock::manual(), ..Fixture::new(bucket) };
        let volume = fixture.open().await;
        let file = written_anew(&volume, "old").await;
        let whole = pattern(2, 0..4 * forebay_core::units::MIB);
        faults.script(OperationKind::Put, 1, FaultMode::LoseReplyThenDown);
        file.fsync().await.expect_err("nobody knows what became of it");
        faults.set_down(false);
        file.release().await.expect("release");
        assert_eq!(layout_of(&volume, &file).await.size(), 3, "what is known");
        in_time(&fixture, "it is found", async || layout_of(&volume, &file).await.size() != 3).await;
        let file = open(&volume, "f", READ).await;
        assert!(file.read(0, whole.len() as u32).await.expect("read") == whole);
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert!(object(&fixture.bucket, "f").await == whole);
    });
}
