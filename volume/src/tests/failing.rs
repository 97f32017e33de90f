//! Who is told of bytes that did not reach the store, and what becomes of them.

use std::sync::Arc;

use bytes::Bytes;
use forebay_core::units::MIB;
use forebay_core::{ErrorKind, FileLayout, ObjectKey, Timestamp};
use forebay_io::object::{Bucket, Condition, Faults};
use forebay_metadata::tree::SetAttributes;

use super::support::{Fixture, READ, READ_WRITE, create, object, open, pattern, run};
use crate::{Access, File, Position, Volume};

/// Processes, by their descriptors.
const WRITER: u64 = 1;
const OTHER: u64 = 2;
const CHILD: u64 = 3;

/// A volume over a store that can be taken away.
fn failing() -> (Fixture, Faults) {
    let faults = Faults::new();
    (Fixture::new(Bucket::in_memory().with_deadline_ms(200).with_faults(&faults)), faults)
}

/// Promise S36: So it is for each descriptor that was open for writing when they were lost.
///
/// Whoever closed first was told, or a command that asked for the commit: the fsync of who wrote returned 0.
#[test]
fn a_lost_upload_is_told_to_each_handle_once() {
    for is_synced in [false, true] {
        run(async move {
            let (fixture, faults) = failing();
            let volume = fixture.open().await;
            let (writer, other) = (create(&volume, "f").await, open(&volume, "f", READ_WRITE).await);
            writer.write(0, pattern(1, 0..4 * MIB)).await.expect("an upload begins");
            faults.set_down(true);
            if is_synced {
                volume.sync().await.expect_err("the store is away");
                other.close(OTHER).await.expect_err("the loss is told to who closes first");
            } else {
                other.flush().await.expect_err("the loss is told to who closes first");
            }
            faults.set_down(false);
            writer.fsync().await.expect_err("and to who wrote");
            for file in [&writer, &other, &open(&volume, "f", READ_WRITE).await] {
                file.fsync().await.expect("told once, and to nobody who came later");
                file.release().await.expect("release");
            }
        });
    }
}

/// Promise S36: A loss that none was told of yet is told to one that is opened later, as Linux does.
#[test]
fn a_loss_that_nobody_knows_of_is_told_to_the_next_handle() {
    run(async {
        let (fixture, faults) = failing();
        let volume = fixture.open().await;
        let (writer, reader) = (create(&volume, "f").await, open(&volume, "f", READ).await);
        writer.write(0, pattern(1, 0..4 * MIB)).await.expect("an upload begins");
        faults.set_down(true);
        volume.sync().await.expect_err("the store is away");
        faults.set_down(false);
        writer.release().await.expect_err("no program hears this");
        let next = open(&volume, "f", READ_WRITE).await;
        next.flush().await.expect_err("it is told");
        next.flush().await.expect("once");
        for file in [next, reader] {
            file.release().await.expect("release");
        }
    });
}

/// A file as it was committed, and one who writes it anew.
async fn begun(volume: &Arc<Volume>) -> (Bytes, Arc<File>) {
    let before = pattern(0, 0..MIB);
    let file = create(volume, "f").await;
    file.write(0, before.clone()).await.expect("write");
    file.fsync().await.expect("fsync");
    file.release().await.expect("release");
    let writer = open(volume, "f", Access { truncate: true, ..READ_WRITE }).await;
    writer.note_writer(Some(WRITER));
    writer.write(0, pattern(1, 0..4 * MIB)).await.expect("an upload begins");
    (before, writer)
}

/// The same, whose bytes were lost, which somebody else has found out.
async fn lost(volume: &Arc<Volume>, faults: &Faults) -> (Bytes, Arc<File>) {
    let begun = begun(volume).await;
    faults.set_down(true);
    volume.sync().await.expect_err("the store is away");
    faults.set_down(false);
    begun
}

/// What the tree has of a file, which others see once this mount is gone.
async fn committed(volume: &Volume, file: &File) -> Bytes {
    let (layout, _) = volume.tree().layout(file.ino()).await.expect("a layout");
    volume.store().fetch.bytes(layout.pieces(0..8 * MIB)).await.expect("read")
}

async fn check_content(volume: &Arc<Volume>, expected: &[u8]) {
    let reader = open(volume, "f", READ).await;
    assert!(reader.read(0, 8 << 20).await.expect("read") == expected, "other bytes");
    reader.release().await.expect("release");
}

/// Who wrote on was told by its close, and the file was left as it wrote it from there, over zeros.
///
/// Promise S36: Until then nothing more is taken through that descriptor: writes to it fail the same way.
#[test]
fn nothing_is_written_after_bytes_that_were_lost() {
    run(async {
        let (fixture, faults) = failing();
        let volume = fixture.open().await;
        let (before, writer) = lost(&volume, &faults).await;
        for _ in 0..2 {
            writer
                .write(4 * MIB, pattern(1, 4 * MIB..5 * MIB))
                .await
                .expect_err("it would follow on nothing");
        }
        writer.allocate(0, 4 * MIB, MIB).await.expect_err("nor is there room to make");
        let other = create(&volume, "other").await;
        writer.share(&other, 0..MIB, 4 * MIB).await.expect_err("nor to be shared");
        writer.close(WRITER).await.expect_err("it is told");
        writer.write(0, before.slice(..100)).await.expect("who knows of it writes again");
        writer.close(WRITER).await.expect("once");
        for file in [writer, other] {
            file.release().await.expect("release");
        }
        check_content(&volume, &before).await;
    });
}

/// The end of a handle whose bytes were lost published what another one had half-written by then.
#[test]
fn what_follows_a_loss_is_for_those_who_came_later() {
    run(async {
        let (fixture, faults) = failing();
        let volume = fixture.open().await;
        let (before, writer) = lost(&volume, &faults).await;
        let next = open(&volume, "f", READ_WRITE).await;
        next.note_writer(Some(OTHER));
        next.write(0, Bytes::from_static(b"half")).await.expect("it has lost nothing");
        next.fsync().await.expect_err("and is told, as it came before anybody was");
        writer.write(4 * MIB, pattern(1, 4 * MIB..5 * MIB)).await.expect_err("it would follow on nothing");
        writer.close(WRITER).await.expect_err("it is told");
        writer.release().await.expect("release");
        assert!(committed(&volume, &next).await == before, "half of it is published");
        next.write(4, Bytes::from_static(b" and whole")).await.expect("write");
        next.close(OTHER).await.expect("close");
        next.release().await.expect("release");
        check_content(&volume, &[b"half and whole", &before[14..]].concat()).await;
    });
}

/// The close that found out about the loss left its handle as one that has something to commit: what a forked child closed late
/// published what another handle had half-written.
#[test]
fn a_copy_that_is_closed_after_a_loss_commits_nothing_of_the_next_handle() {
    run(async {
        let (fixture, faults) = failing();
        let volume = fixture.open().await;
        let (before, writer) = begun(&volume).await;
        faults.set_down(true);
        writer.close(WRITER).await.expect_err("it is told");
        faults.set_down(false);
        let next = open(&volume, "f", READ_WRITE).await;
        next.note_writer(Some(OTHER));
        next.write(0, Bytes::from_static(b"half")).await.expect("write");
        writer.close(CHILD).await.expect("it has nothing to tell");
        assert!(committed(&volume, &next).await == before, "half of it is published");
        next.close(OTHER).await.expect("close");
        for file in [writer, next] {
            file.release().await.expect("release");
        }
    });
}

/// Promise S36: So it is for each descriptor that was open for writing when they were lost.
#[test]
fn bytes_over_a_replaced_object_are_told_to_who_wrote_them() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let put = async |key: &ObjectKey| {
            let put = fixture.bucket.put(key, "before".into(), Condition::IfAbsent).await;
            FileLayout::of_blob(put.expect("put").blob())
        };
        put(&ObjectKey::new("f")).await;
        let volume = fixture.open().await;
        let writer = open(&volume, "f", READ_WRITE).await;
        writer.write(2, Bytes::from_static(b"ours")).await.expect("write");
        writer
            .write(Position::PieceAt(10), Bytes::from_static(b"early"))
            .await
            .expect("a piece before its time");
        let (tree, ino) = (volume.tree(), writer.ino());
        let (theirs, (_, generation)) =
            (put(&tree.fresh_blob()).await, tree.layout(ino).await.expect("a layout"));
        tree.commit_layout(ino, generation, theirs, Timestamp::default()).await.expect("a commit");
        let told = volume.sync().await.expect_err("what it was written over is gone");
        assert_eq!(told.kind(), ErrorKind::Stale);
        assert_eq!(writer.fsync().await.expect_err("its writer is told").kind(), ErrorKind::Stale);
        writer.fsync().await.expect("once");
        writer.write(Position::End, Bytes::from_static(b" and after")).await.expect("write");
        writer.write(Position::PieceAt(7), Bytes::from_static(b"!")).await.expect("nothing is missing there");
        assert_eq!(writer.read(0, 20).await.expect("read"), "before and after!");
        writer.release().await.expect("release");
    });
}

/// A commit that comes late, as `forebay sync` takes up one open file after another, put the old bytes over newer ones.
#[test]
fn what_was_given_up_is_not_committed_over_newer_bytes() {
    run(async {
        let (fixture, faults) = failing();
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"old")).await.expect("write");
        let given_up = volume.open_inodes().pop().expect("it is open");
        faults.set_down(true);
        file.flush().await.expect_err("the store is away");
        file.release().await.expect_err("the store is away");
        faults.set_down(false);
        let again = open(&volume, "f", READ_WRITE).await;
        again.write(0, Bytes::from_static(b"new")).await.expect("write");
        again.fsync().await.expect("fsync");
        given_up.commit_now().await.expect("there is nothing to do");
        assert_eq!(again.read(0, 10).await.expect("read"), "new");
        assert_eq!(object(&fixture.bucket, "f").await, "new");
        again.release().await.expect("release");
    });
}

/// What truncate(2) fails with is not done: it was shown to who had the file open, and came with the next commit.
#[test]
fn a_truncation_that_fails_leaves_the_file_as_it_was() {
    run(async {
        let (fixture, faults) = failing();
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"before")).await.expect("write");
        file.release().await.expect("release");
        let reader = open(&volume, "f", READ).await;
        faults.set_down(true);
        let truncated = volume.set_attributes(reader.ino(), SetAttributes::default(), Some(0)).await;
        assert_eq!(truncated.expect_err("the store is away").kind(), ErrorKind::Unavailable);
        faults.set_down(false);
        for _ in 0..2 {
            assert_eq!(reader.read(0, 10).await.expect("read"), "before");
            assert_eq!(volume.attributes(reader.ino()).await.expect("a file").size, 6);
            volume.sync().await.expect("sync");
            open(&volume, "f", READ_WRITE).await.release().await.expect("release");
        }
        assert_eq!(object(&fixture.bucket, "f").await, "before");
        volume.set_attributes(reader.ino(), SetAttributes::default(), Some(3)).await.expect("truncated");
        assert_eq!(reader.read(0, 10).await.expect("read"), "bef");
        reader.release().await.expect("release");
    });
}

/// What write(2) fails with is not in the file: a program that appends it again has it once.
#[test]
fn a_write_that_fails_leaves_nothing_to_append_twice() {
    run(async {
        let (fixture, faults) = failing();
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"before")).await.expect("write");
        file.fsync().await.expect("fsync");
        let (mut all, mut failures) = (b"before".to_vec(), 0);
        for number in 0..5 {
            let record = pattern(number, 0..MIB / 2);
            all.extend(&record);
            // The second one fills the buffer.
            faults.set_down(number > 0 && failures == 0);
            while let Err(error) = file.write(Position::End, record.clone()).await {
                assert_eq!(error.kind(), ErrorKind::Unavailable);
                faults.set_down(false);
                failures += 1;
            }
        }
        assert_eq!(failures, 1);
        file.fsync().await.expect("fsync");
        assert!(file.read(0, 4 << 20).await.expect("read") == all);
        file.release().await.expect("release");
    });
}
