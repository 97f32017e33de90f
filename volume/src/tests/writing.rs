//! How bytes reach the store, and what happens when it fails.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::{KIB, MIB};
use forebay_core::{ErrorKind, FileLayout, ObjectKey, Timestamp};
use forebay_io::mem::Class;
use forebay_io::object::{Bucket, Condition, FaultMode, Faults, OperationKind};
use forebay_metadata::tree::resolve;

use super::support::{Fixture, READ, READ_WRITE, create, object, open, pattern, run, until};
use crate::content::Content;
use crate::settings::WriteSettings;
use crate::staging::WritebackSettings;
use crate::volume::local;
use crate::{Access, File};

/// Promise: a file written front to back is one upload to its own path, however it is cut into writes.
#[test]
fn a_sequential_write_is_one_upload_and_no_other_request() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "big").await;
        let before = fixture.bucket.counters();
        for at in 0..40 {
            let part = pattern(1, at * MIB..(at + 1) * MIB);
            file.write(at * MIB, part).await.expect("write");
        }
        file.fsync().await.expect("fsync");
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(asked.of(OperationKind::Part).requests, 5, "40 MiB in parts of 8 MiB");
        assert_eq!(asked.of(OperationKind::Complete).requests, 1);
        assert_eq!(asked.of(OperationKind::Put).requests, 0);
        assert_eq!(asked.of(OperationKind::Get).requests, 0);
        assert!(object(&fixture.bucket, "big").await == pattern(1, 0..40 * MIB));
        file.release().await.expect("release");
    });
}

/// An upload of parts that were sent early, as memory was short, came to the 10,000 that a store takes at some 50 GiB, and all of it was
/// lost.
#[test]
fn a_file_goes_on_where_its_upload_has_as_many_parts_as_it_may() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        (fixture.write.buffer_bytes, fixture.write.stream_parts) = (8 * MIB, 2);
        let volume = fixture.open().await;
        let file = create(&volume, "big").await;
        let before = fixture.bucket.counters();
        for at in 0..60 {
            file.write(at * MIB, pattern(1, at * MIB..(at + 1) * MIB)).await.expect("write");
        }
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(asked.of(OperationKind::Complete).requests, 1, "the rest lies in blobs");
        file.fsync().await.expect("fsync");
        let written = file.read(0, 60 << 20).await.expect("read");
        assert!(written == pattern(1, 0..60 * MIB));
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert!(
            object(&fixture.bucket, "big").await == pattern(1, 0..60 * MIB),
            "it is one object in the end"
        );
    });
}

/// Promise S5: an object shows what is written front to back once somebody syncs, reads or renames the file, where more files
/// are written at once than `--memory` has room for, or once somebody writes elsewhere in it: then as it was before that write.
#[test]
fn no_object_shows_a_file_in_the_middle_of_a_write() {
    run(async {
        let little = WritebackSettings { enabled: true, bytes: 64 * KIB, ..WritebackSettings::default() };
        for writeback in [None, Some(little)] {
            let fixture = Fixture::new(Bucket::in_memory());
            let fixture = match writeback {
                Some(settings) => fixture.writing_back(settings),
                None => fixture,
            };
            let volume = fixture.open().await;
            let file = create(&volume, "big").await;
            file.write(0, pattern(1, 0..10 * KIB)).await.expect("write");
            if fixture.writeback.is_some() {
                // Staged, which fills most of the room.
                file.fsync().await.expect("fsync");
            }
            file.write(10 * KIB, pattern(1, 10 * KIB..MIB - 1)).await.expect("write");
            // The pieces of one write, of which the first is one too many for memory.
            for at in (5 * KIB..100 * KIB).step_by(19 * KIB as usize) {
                file.write(at, pattern(2, at..at + 19 * KIB)).await.expect("write");
                let found = fixture.bucket.head(&ObjectKey::new("big")).await.expect("head");
                assert_eq!(found, None, "at {at}");
            }
            file.flush().await.expect("close");
            file.release().await.expect("release");
            volume.drain(|_| {}).await.expect("drain");
            volume.close().await.expect("close");
            let whole =
                [pattern(1, 0..5 * KIB), pattern(2, 5 * KIB..100 * KIB), pattern(1, 100 * KIB..MIB - 1)];
            assert!(object(&fixture.bucket, "big").await == whole.concat());
        }
    });
}

/// Promise: a small file is one PUT.
#[test]
fn a_small_file_is_one_put() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let before = fixture.bucket.counters();
        let file = create(&volume, "small").await;
        file.write(0, Bytes::from_static(b"hello")).await.expect("write");
        file.flush().await.expect("close");
        file.flush().await.expect("a second close has nothing to do");
        file.release().await.expect("release");
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(asked.of(OperationKind::Put).requests, 1, "{asked:?}");
        assert_eq!(object(&fixture.bucket, "small").await, "hello");
    });
}

/// Promise: an error of the store comes out of fsync or close; bytes still in memory are tried again.
#[test]
fn a_failed_put_is_told_and_the_next_fsync_succeeds() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(200).with_faults(&faults);
        let fixture = Fixture::new(bucket);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"kept")).await.expect("write");
        faults.set_down(true);
        let told = file.fsync().await.expect_err("the store is down");
        assert_eq!(told.kind(), ErrorKind::Unavailable);
        faults.set_down(false);
        file.fsync().await.expect("the bytes were still there");
        assert_eq!(object(&fixture.bucket, "f").await, "kept");
        file.release().await.expect("release");
    });
}

/// Promise: an upload that is lost is told once, and the file keeps what was committed before.
#[test]
fn a_lost_upload_is_told_once_and_leaves_the_last_commit() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(200).with_faults(&faults);
        let fixture = Fixture::new(bucket);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"old")).await.expect("write");
        file.fsync().await.expect("fsync");
        file.release().await.expect("release");
        let file = open(&volume, "f", Access { truncate: true, ..READ_WRITE }).await;
        faults.set_down(true);
        let mut told = None;
        for at in 0..64 {
            if let Err(error) = file.write(at * MIB, pattern(2, 0..MIB)).await {
                told = Some(error);
                break;
            }
        }
        told.expect("a write fails once the parts in flight have");
        faults.set_down(false);
        file.flush().await.expect_err("the loss is told at close");
        file.flush().await.expect("and only once");
        assert_eq!(file.read(0, 10).await.expect("read"), "old");
        file.release().await.expect("release");
        assert_eq!(object(&fixture.bucket, "f").await, "old");
    });
}

/// As on other file systems: room that is reserved past the end left the times as they were.
#[test]
fn reserving_room_changes_the_times() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"bytes")).await.expect("write");
        file.fsync().await.expect("fsync");
        let modified = || volume.open_inodes()[0].look(Content::modified);
        assert_eq!(modified(), None, "all is committed");
        const KEEP_SIZE: i32 = 1;
        file.allocate(KEEP_SIZE, 100, 50).await.expect("allocate");
        assert!(modified().is_some());
        file.release().await.expect("release");
        assert_eq!(object(&fixture.bucket, "f").await, "bytes");
    });
}

/// Promise: bytes being written stay under the ceiling; at the ceiling work slows and does not fail.
#[test]
fn many_writers_stay_under_the_ceiling() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.budget = forebay_io::mem::Budget::new(16 * MIB);
        let volume = fixture.open().await;
        let mut files = Vec::new();
        for number in 0..24 {
            files.push(create(&volume, &format!("f{number}")).await);
        }
        // Each leaves bytes behind that only the others' need brings out of memory.
        for at in 0..6_u64 {
            for (number, file) in files.iter().enumerate() {
                let data = pattern(number as u64, at * MIB / 2..(at + 1) * MIB / 2);
                file.write(at * MIB / 2, data).await.expect("write");
            }
        }
        for (number, file) in files.iter().enumerate() {
            assert!(file.read(0, 8 << 20).await.expect("read") == pattern(number as u64, 0..3 * MIB));
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
        assert!(fixture.budget.peak() <= 16 * MIB, "{}", fixture.budget.peak());
        assert_eq!(fixture.budget.used(Class::Write), 0);
    });
}

/// What is cut off again is in memory no more. A file that was written and emptied, and never closed, took all memory for
/// writes, and nothing was written on the mount any more.
#[test]
fn a_file_that_is_written_and_emptied_again_and_again_takes_no_memory() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.write.buffer_bytes = 8 * MIB;
        fixture.budget = forebay_io::mem::Budget::new(16 * MIB);
        let volume = fixture.open().await;
        let (status, other) = (create(&volume, "status").await, create(&volume, "other").await);
        for kept in [0, 1] {
            for number in 0..40 {
                status.write(0, pattern(number, 0..MIB)).await.expect("write");
                let set = volume.set_attributes(status.ino(), Default::default(), Some(kept)).await;
                set.expect("truncate");
            }
            other.write(0, pattern(9, 0..MIB)).await.expect("write");
        }
        assert!(fixture.budget.used(Class::Write) <= 16 * MIB);
        for file in [status, other] {
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
        assert_eq!(
            (fixture.budget.used(Class::Write), object(&fixture.bucket, "status").await.len()),
            (0, 1)
        );
    });
}

/// Promise: bytes being written stay under the ceiling, also of files that are being uploaded. The first 8 MiB of each were
/// charged to nobody, so that many files took any memory.
#[test]
fn the_beginnings_of_many_large_files_stay_under_the_ceiling() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.write.buffer_bytes = 8 * MIB;
        fixture.budget = forebay_io::mem::Budget::new(64 * MIB);
        let volume = fixture.open().await;
        let before = fixture.bucket.counters();
        let sent = || {
            let since = fixture.bucket.counters().since(&before);
            since.of(OperationKind::Put).bytes + since.of(OperationKind::Part).bytes
        };
        let mut files = Vec::new();
        for number in 0..12_u64 {
            let file = create(&volume, &format!("f{number}")).await;
            for at in 0..8 {
                file.write(at * MIB, pattern(number, at * MIB..(at + 1) * MIB)).await.expect("write");
            }
            files.push(file);
            let held = (number + 1) * 8 * MIB - sent().min((number + 1) * 8 * MIB);
            assert!(held <= 64 * MIB, "{} MiB of {} files are in memory", held / MIB, number + 1);
        }
        for file in &files {
            file.release().await.expect("release");
        }
        // One that waited long for memory lies in blobs until it is sealed.
        volume.close().await.expect("close");
        for number in 0..12 {
            assert!(object(&fixture.bucket, &format!("f{number}")).await == pattern(number, 0..8 * MIB));
        }
        assert!(fixture.budget.peak() <= 64 * MIB, "{}", fixture.budget.peak());
        assert_eq!(fixture.budget.used(Class::Write), 0);
    });
}

/// A write for which there is no room waits for a store that is away once, not for each file that is open.
#[test]
fn a_write_without_room_asks_a_store_that_is_away_for_one_file() {
    run(async {
        let faults = Faults::new();
        let mut fixture = Fixture::new(Bucket::in_memory().with_deadline_ms(50).with_faults(&faults));
        fixture.write.buffer_bytes = 8 * MIB;
        fixture.budget = forebay_io::mem::Budget::new(16 * MIB);
        let volume = fixture.open().await;
        let mut files = Vec::new();
        for number in 0..32 {
            files.push(create(&volume, &format!("f{number}")).await);
        }
        faults.set_down(true);
        let mut written = 0;
        let (told, asked) = loop {
            let before = faults.injected();
            match files[written].write(0, pattern(1, 0..MIB)).await {
                Ok(_) => written += 1,
                Err(error) => break (error, faults.injected() - before),
            }
        };
        assert_eq!(told.kind(), ErrorKind::Unavailable, "{told}");
        assert!(written >= 8 && asked < 8, "{asked} requests for {written} files");
        faults.set_down(false);
        files[written].write(0, pattern(1, 0..MIB)).await.expect("write");
        for file in files {
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
    });
}

/// Promise: files written side by side stay one upload each at the ceiling.
#[test]
fn uploads_wait_for_memory_and_stay_whole() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.budget = forebay_io::mem::Budget::new(48 * MIB);
        let volume = fixture.open().await;
        let before = fixture.bucket.counters();
        let writers = (0..4_u64).map(|number| {
            let volume = volume.clone();
            async move {
                let file = create(&volume, &format!("f{number}")).await;
                for at in 0..40 {
                    let part = pattern(number, at * MIB..(at + 1) * MIB);
                    file.write(at * MIB, part).await.expect("write");
                }
                file.release().await.expect("release");
            }
        });
        futures::future::join_all(writers).await;
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(asked.of(OperationKind::Complete).requests, 4);
        assert_eq!(asked.of(OperationKind::Put).requests, 0);
        assert!(fixture.budget.peak() <= 48 * MIB, "{}", fixture.budget.peak());
        for number in 0..4 {
            assert!(object(&fixture.bucket, &format!("f{number}")).await == pattern(number, 0..40 * MIB));
        }
    });
}

/// Promise: an outsider's replacement gives holders of the old version the cached bytes or ESTALE, never mixed bytes.
#[test]
fn an_outsiders_replacement_is_stale_to_those_who_hold_the_old_one() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let key = ObjectKey::new("data");
        let old = pattern(1, 0..12 * MIB);
        fixture.bucket.put(&key, old.clone(), Condition::Always).await.expect("put");
        let volume = fixture.open().await;
        let file = open(&volume, "data", READ).await;
        assert!(file.read(0, 4096).await.expect("read") == old[..4096]);
        fixture.bucket.put(&key, pattern(2, 0..12 * MIB), Condition::Always).await.expect("replace");
        assert!(file.read(4096, 4096).await.expect("cached") == old[4096..8192]);
        let stale = file.read(9 * MIB, 4096).await.expect_err("not cached");
        assert_eq!(stale.kind(), ErrorKind::Stale);
        file.release().await.expect("release");
    });
}

/// Promise: a lost reply to the write that made the object is no error and no second object.
#[test]
fn a_lost_reply_is_settled() {
    run(async {
        let faults = Faults::new();
        let fixture = Fixture::new(Bucket::in_memory().with_faults(&faults));
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"once")).await.expect("write");
        faults.script(OperationKind::Put, 1, FaultMode::LoseReply);
        file.fsync().await.expect("fsync");
        assert_eq!(faults.injected(), 1);
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "once");
    });
}

/// A failure is told to those who wrote, once, whatever others do with the file meanwhile.
#[test]
fn a_failure_stays_for_its_writer() {
    run(async {
        let bucket = Bucket::in_memory();
        let fixture = Fixture::new(bucket.clone());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"old")).await.expect("write");
        file.fsync().await.expect("fsync");
        file.write(0, pattern(1, 0..2 * MIB)).await.expect("write");
        let other = create(&volume, "other").await;
        other.write(0, Bytes::from_static(b"fine")).await.expect("write");
        // A second whole content streams to the key that somebody else writes to at the same time.
        let stream = open(&volume, "f", Access { truncate: true, ..READ_WRITE }).await;
        for at in 0..10 {
            stream.write(at * MIB, pattern(2, at * MIB..(at + 1) * MIB)).await.expect("write");
        }
        bucket.put(&ObjectKey::new("f"), "theirs".into(), Condition::Always).await.expect("put");
        let size = forebay_metadata::tree::SetAttributes::default();
        let truncated =
            volume.set_attributes(file.ino(), size, Some(1)).await.expect_err("the upload is refused");
        assert_eq!(truncated.kind(), ErrorKind::Stale);
        volume.sync().await.expect("a sync of all leaves it to its writer");
        let untold = volume.sync_all().await.expect_err("who asks for all is told that some is lost");
        assert!(untold.kind() == ErrorKind::Stale && untold.to_string().contains("are lost"), "{untold}");
        assert_eq!(object(&bucket, "other").await, "fine");
        assert_eq!(file.fsync().await.expect_err("the loss is told").kind(), ErrorKind::Stale);
        file.fsync().await.expect("once");
        volume.sync_all().await.expect("its writer knows");
        assert_eq!(stream.flush().await.expect_err("each of them is told").kind(), ErrorKind::Stale);
        for handle in [file, stream, other] {
            handle.release().await.expect("release");
        }
        assert_eq!(object(&bucket, "f").await, "theirs");
    });
}

/// A whole new content replaces what an outsider put under the file's name meanwhile; new bytes over old ones that an
/// outsider took away are lost, which is told once.
#[test]
fn the_last_writer_of_a_whole_file_wins_and_parts_of_a_replaced_one_are_lost() {
    run(async {
        let bucket = Bucket::in_memory();
        let put = |key: &'static str, content: &'static str| {
            let bucket = bucket.clone();
            async move { bucket.put(&ObjectKey::new(key), content.into(), Condition::Always).await.expect("put") }
        };
        put("whole", "old").await;
        put("part", "old bytes").await;
        let fixture = Fixture::new(bucket.clone());
        let volume = fixture.open().await;

        let whole = open(&volume, "whole", Access { truncate: true, ..READ_WRITE }).await;
        whole.write(0, Bytes::from_static(b"new bytes")).await.expect("write");
        put("whole", "theirs").await;
        whole.fsync().await.expect("the new content is put over theirs");
        whole.fsync().await.expect("nothing is left to do");
        assert_eq!(object(&bucket, "whole").await, "new bytes");

        let part = open(&volume, "part", READ_WRITE).await;
        part.write(4, Bytes::from_static(b"BYTES")).await.expect("write");
        let tree = volume.tree();
        let (_, generation) = tree.layout(part.ino()).await.expect("a layout");
        let theirs = bucket.put(&tree.fresh_blob(), "theirs".into(), Condition::IfAbsent).await.expect("put");
        let layout = FileLayout::of_blob(theirs.blob());
        tree.commit_layout(part.ino(), generation, layout, Timestamp::default()).await.expect("a commit");
        assert_eq!(part.fsync().await.expect_err("`old ` is gone").kind(), ErrorKind::Stale);
        part.fsync().await.expect("told once");
        assert_eq!(part.read(0, 20).await.expect("read"), "theirs");
        for handle in [part, whole] {
            handle.release().await.expect("release");
        }
    });
}

/// Files that were removed while open lend their bytes on: the copy of a copy has its own, and becomes an object.
#[test]
fn a_copy_of_a_copy_whose_lenders_are_gone_is_sealed() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let content = pattern(1, 0..5000);
        let file = create(&volume, "f").await;
        file.write(0, content.clone()).await.expect("write");
        file.flush().await.expect("close");
        file.release().await.expect("release");
        volume.close().await.expect("close");
        // Nothing is in the cache.
        let volume = fixture.open().await;
        let mut file = open(&volume, "f", READ_WRITE).await;
        for _ in 0..3 {
            volume.unlink(forebay_core::InodeId::ROOT, b"f").await.expect("unlinked");
            let copy = create(&volume, "f").await;
            assert_eq!(copy.share(&file, 0..5000, 0).await.expect("shared"), 5000);
            file.release().await.expect("release");
            // The object at the path goes, and what is lent of it is kept elsewhere.
            volume.tree().local().expect("a tree of this process").drain().await.expect("drained");
            file = copy;
        }
        file.write(6000, Bytes::from_static(b"more")).await.expect("write");
        let read = file.read(0, 10_000).await.expect("read what was written over moved bytes");
        assert!(read.len() == 6004 && read[..5000] == content && read.ends_with(b"more"));
        file.flush().await.expect("close");
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, read);
    });
}

/// A file that goes to its own path in parts, by a process that is killed at any request to the store: the next one leaves
/// no part of it behind.
#[test]
fn an_upload_that_is_cut_off_at_any_request_ends_with_the_next_start() {
    let mut was_cut = true;
    let mut nth = 0;
    while was_cut {
        nth += 1;
        println!("request {nth}");
        let (bucket, faults) = (Bucket::in_memory(), Faults::new());
        let ends_cut = faults.clone();
        let killed = Fixture::new(bucket.with_faults(&faults).with_deadline_ms(30));
        let write = WriteSettings { deadline_ms: 300, ..killed.write.clone() };
        let killed = Fixture { tree_in_bucket: true, write, ..killed };
        run(async move {
            let volume = killed.open().await;
            let file = create(&volume, "streamed").await;
            faults.cut_off(nth);
            let written = file.write(0, pattern(1, 0..10 * MIB)).await;
            // Only what was told to be there has to be, and is: other tests show it.
            let _ = written.and(file.flush().await.map(|()| 0));
        });
        was_cut = ends_cut.injected() > 0;
        assert!(was_cut || nth > 4, "the start, two parts, the end");
        run(async move {
            let next = Fixture { tree_in_bucket: true, ..Fixture::new(bucket.clone()) };
            let volume = next.open().await;
            assert_eq!(bucket.list_uploads("").await.expect("uploads"), Vec::new());
            volume.close().await.expect("close");
        });
    }
}

/// A copy that shares bytes, closed while the store is away, stayed without an object of its own: it is taken up when the
/// store is back.
#[test]
fn a_copy_that_is_closed_while_the_store_is_away_is_sealed_when_it_is_back() {
    run(async {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(50).with_faults(&faults);
        let fixture = Fixture::new(bucket);
        let volume = fixture.open().await;
        let content = pattern(1, 0..5000);
        let file = create(&volume, "f").await;
        file.write(0, content.clone()).await.expect("write");
        file.flush().await.expect("close");
        let copy = create(&volume, "copy").await;
        faults.set_down(true);
        assert_eq!(copy.share(&file, 0..5000, 0).await.expect("shared"), 5000);
        for file in [file, copy] {
            file.release().await.expect("release");
        }
        // An attempt asks twice at most, so more than one has failed.
        while faults.injected() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        faults.set_down(false);
        let key = ObjectKey::new("copy");
        while fixture.bucket.head(&key).await.expect("an answer").is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(object(&fixture.bucket, "copy").await, content);
        volume.close().await.expect("close");
    });
}

/// Who closed a file that was written in pieces, or a copy that shares bytes, had only read it: the file stayed in pieces, and
/// other tools found its old bytes, or none, at its path.
#[test]
fn a_file_that_its_reader_closes_last_is_sealed() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, pattern(1, 0..3 * MIB)).await.expect("write");
        file.flush().await.expect("close");
        file.release().await.expect("release");

        let (file, copy) = (open(&volume, "f", READ_WRITE).await, create(&volume, "copy").await);
        let readers = [open(&volume, "f", READ).await, open(&volume, "copy", READ).await];
        assert_eq!(copy.share(&file, 0..3 * MIB, 0).await.expect("shared"), 3 * MIB);
        file.write(MIB, Bytes::from_static(b"over")).await.expect("write");
        for file in [file, copy] {
            file.flush().await.expect("close");
            file.release().await.expect("release");
        }
        for reader in readers {
            reader.release().await.expect("release");
        }
        // Waits for what runs behind the last close.
        volume.close().await.expect("close");
        let mut expected = pattern(1, 0..3 * MIB).to_vec();
        expected[MIB as usize..][..4].copy_from_slice(b"over");
        assert!(object(&fixture.bucket, "f").await == expected);
        assert!(object(&fixture.bucket, "copy").await == pattern(1, 0..3 * MIB));
    });
}

/// A write that was committed was told as failed when the tree could not be asked afterwards where the other bytes lie.
#[test]
fn what_was_committed_has_not_failed() {
    run(async {
        let fixture = Fixture { is_unlucky: true, ..Fixture::new(Bucket::in_memory()) };
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, pattern(1, 0..3 * MIB)).await.expect("write");
        file.fsync().await.expect("whole");
        file.write(MIB, Bytes::from_static(b"over")).await.expect("write");
        file.fsync().await.expect("committed");
        let copy = create(&volume, "copy").await;
        assert_eq!(copy.share(&file, 0..3 * MIB, 0).await.expect("committed"), 3 * MIB);
        let mut expected = pattern(1, 0..3 * MIB).to_vec();
        expected[MIB as usize..][..4].copy_from_slice(b"over");
        for file in [copy, file] {
            assert!(file.read(0, u32::MAX).await.expect("read") == expected);
            file.release().await.expect("release");
        }
    });
}

/// Each fsync asked the tree twice where all bytes of the file lie.
#[test]
fn an_fsync_asks_where_bytes_lie_when_some_may_have_been_moved() {
    run(async {
        let fixture = Fixture { is_unlucky: true, ..Fixture::new(Bucket::in_memory()) };
        fixture.held_up.be_lucky();
        let volume = fixture.open().await;
        let (file, other) = (create(&volume, "f").await, create(&volume, "other").await);
        let synced = async |file: &File, number: u64| {
            file.write(1000 * number, pattern(number, 0..100)).await.expect("write");
            file.fsync().await.expect("fsync");
        };
        for number in 0..2 {
            synced(&file, number).await;
            synced(&other, number).await;
        }
        let asked = fixture.held_up.layouts();
        for number in 2..10 {
            synced(&file, number).await;
        }
        assert_eq!(fixture.held_up.layouts(), asked, "nothing was moved");
        other.release().await.expect("release");
        let is_sealed = async || volume.tree().layout(other.ino()).await.expect("a layout").0.is_plain();
        until("another file is brought home", is_sealed).await;
        let asked = fixture.held_up.layouts();
        for number in 10..15 {
            synced(&file, number).await;
        }
        assert_eq!(fixture.held_up.layouts(), asked + 1);
        for number in 0..15 {
            let read = file.read(1000 * number, 100).await.expect("read");
            assert!(read == pattern(number, 0..100), "write {number}");
        }
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// A file that is open is opened again while the tree cannot be asked: the handle that was refused stayed, and with it the
/// file's state for as long as the volume was mounted.
#[test]
fn an_open_that_is_refused_leaves_no_handle() {
    run(async {
        let fixture = Fixture { is_unlucky: true, ..Fixture::new(Bucket::in_memory()) };
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        let ino = resolve(&**volume.tree(), "f").await.expect("the file").ino;
        fixture.refuses.store(true, SeqCst);
        let refused = volume.open(ino, READ_WRITE).await.expect_err("the tree is not there");
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        fixture.refuses.store(false, SeqCst);
        let again = volume.open(ino, READ_WRITE).await.expect("an open file");
        for file in [file, again] {
            file.release().await.expect("release");
        }
        assert_eq!(volume.open_inodes().len(), 0, "nothing is open");
    });
}

/// The store begins an upload and its answer is lost: it is asked again, and begins a second one. No part of either stays in
/// the store of a mount that goes on, nor when none of the answers arrives.
#[test]
fn uploads_whose_beginning_was_not_answered_end_while_the_mount_goes_on() {
    run(async {
        let (bucket, faults) = (Bucket::in_memory(), Faults::new());
        let fixture = Fixture::new(bucket.with_faults(&faults).with_deadline_ms(150));
        let volume = fixture.open().await;
        let (content, lose) = (pattern(1, 0..10 * MIB), FaultMode::LoseReply);
        let file = create(&volume, "f").await;
        faults.script(OperationKind::Create, 1, lose);
        file.write(0, content.clone()).await.expect("write");
        file.flush().await.expect("close");
        file.release().await.expect("release");
        assert_eq!(faults.injected(), 1);
        assert_eq!(bucket.list_uploads("").await.expect("uploads"), Vec::new());
        assert!(object(&bucket, "f").await == content);
        let file = create(&volume, "g").await;
        for nth in 1..20 {
            faults.script(OperationKind::Create, nth, lose);
        }
        file.write(0, content.clone()).await.expect("it stays in memory");
        faults.clear();
        assert!(faults.injected() > 2, "it was tried again");
        file.flush().await.expect("it goes in one piece");
        file.release().await.expect("release");
        local(&volume).expect("a tree").drain().await.expect("drained");
        assert_eq!(bucket.list_uploads("").await.expect("uploads"), Vec::new());
        volume.close().await.expect("close");
    });
}
