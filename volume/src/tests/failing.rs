//! Who is told of bytes that did not reach the store, and what becomes of them.

use bytes::Bytes;
use forebay_core::units::MIB;
use forebay_core::{ErrorKind, FileLayout, ObjectKey, Timestamp};
use forebay_io::object::{Bucket, Condition, Faults};

use super::support::{Fixture, READ, READ_WRITE, create, object, open, pattern, run};
use crate::Position;

/// A process, by its descriptors.
const OTHER: u64 = 2;

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
        let (tree, ino) = (volume.tree(), writer.ino());
        let (theirs, (_, generation)) =
            (put(&tree.fresh_blob()).await, tree.layout(ino).await.expect("a layout"));
        tree.commit_layout(ino, generation, theirs, Timestamp::default()).await.expect("a commit");
        let told = volume.sync().await.expect_err("what it was written over is gone");
        assert_eq!(told.kind(), ErrorKind::Stale);
        assert_eq!(writer.fsync().await.expect_err("its writer is told").kind(), ErrorKind::Stale);
        writer.fsync().await.expect("once");
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
