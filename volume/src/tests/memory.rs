//! Writers at the ceiling of memory: each gets its turn, whatever others do or leave undone.

use std::pin::pin;

use forebay_core::InodeId;
use forebay_core::units::MIB;
use forebay_io::mem::{Budget, Class};
use forebay_io::object::{Bucket, FaultMode, Faults, OperationKind};
use futures::FutureExt;

use super::support::{Fixture, READ, create, object, open, pattern, run};
use crate::inode::{OpenInode, Position};

/// Room for 12 MiB that are being written, and files that keep 8 MiB of them in memory.
fn narrow(faults: &Faults) -> Fixture {
    let mut fixture = Fixture::new(Bucket::in_memory().with_faults(faults));
    fixture.write.buffer_bytes = 8 * MIB;
    fixture.budget = Budget::new(16 * MIB);
    fixture
}

/// A file that was looked at, and filled after that by one who then writes no more, held what a writer waited for, for ever.
#[test]
fn a_writer_without_room_comes_back_to_files_that_were_filled_meanwhile() {
    run(async {
        let faults = Faults::new();
        let fixture = narrow(&faults);
        let volume = fixture.open().await;
        let mut files = Vec::new();
        for name in ["a", "b", "c"] {
            files.push(create(&volume, name).await);
        }
        // In the order in which they are looked at.
        let open = volume.open_inodes();
        let permit = volume.charge_write(6 * MIB).await.expect("room");
        let full = volume.charge_write(6 * MIB).await.expect("room");
        open[1]
            .write(&open[1].begin_telling(), Position::At(0), pattern(1, 0..6 * MIB), full)
            .await
            .expect("write");
        let gate = faults.gate(1);
        let (own, waiting) = (volume.clone(), open[2].clone());
        let writer = tokio::spawn(async move {
            let permit = own.charge_write(12 * MIB).await.expect("room");
            waiting.write(&waiting.begin_telling(), Position::At(0), pattern(2, 0..12 * MIB), permit).await
        });
        gate.reached().await;
        open[0]
            .write(&open[0].begin_telling(), Position::At(0), pattern(0, 0..6 * MIB), permit)
            .await
            .expect("write");
        gate.open();
        assert_eq!(writer.await.expect("it ends").expect("write"), 12 << 20);
        for file in files {
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
        assert_eq!(fixture.budget.used(Class::Write), 0);
        assert!(fixture.budget.peak() <= 16 * MIB);
    });
}

/// Promise: files written side by side stay one upload each at the ceiling. One that was begun while others' parts filled
/// memory lost its beginning to a blob of its own, and was copied when it was sealed.
#[test]
fn a_beginning_stays_in_memory_while_more_is_on_its_way() {
    run(async {
        let faults = Faults::new();
        let mut fixture = narrow(&faults);
        fixture.budget = Budget::new(32 * MIB);
        let volume = fixture.open().await;
        let (big, begun) = (create(&volume, "big").await, create(&volume, "begun").await);
        // The request that begins the upload, and its first part.
        let gate = faults.gate(2);
        big.write(0, pattern(1, 0..9 * MIB)).await.expect("write");
        gate.reached().await;
        let about_to_be_written = volume.charge_write(8 * MIB).await.expect("room");
        begun.write(0, pattern(2, 0..3 * MIB)).await.expect("write");
        let mut next = pin!(begun.write(3 * MIB, pattern(2, 3 * MIB..9 * MIB)));
        assert!(futures::poll!(next.as_mut()).is_pending());
        gate.open();
        next.await.expect("write");
        drop(about_to_be_written);
        for file in [&big, &begun] {
            file.release().await.expect("release");
        }
        for (name, seed) in [("big", 1), ("begun", 2)] {
            assert!(object(&fixture.bucket, name).await == pattern(seed, 0..9 * MIB), "{name}");
        }
        assert_eq!(fixture.bucket.counters().of(OperationKind::CopyPart).requests, 0);
        volume.close().await.expect("close");
    });
}

/// Who waits for memory sorted all open files, again and again, however few of them held any.
#[test]
fn a_writer_without_room_looks_at_files_that_hold_something() {
    run(async {
        let fixture = narrow(&Faults::new());
        let volume = fixture.open().await;
        let mut files = Vec::new();
        for number in 0..50 {
            files.push(create(&volume, &format!("f{number}")).await);
        }
        let holders =
            || volume.open_inodes_that(OpenInode::holds_memory).iter().map(|inode| inode.ino()).collect();
        assert_eq!(holders(), Vec::new());
        // One in memory, and one that is on its way.
        files[7].write(0, pattern(7, 0..MIB)).await.expect("write");
        files[9].write(0, pattern(9, 0..9 * MIB)).await.expect("write");
        let mut held: Vec<InodeId> = holders();
        held.sort();
        assert_eq!(held, [files[7].ino(), files[9].ino()]);
        for file in files {
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
    });
}

/// A file that is being copied inside the store holds nothing in memory: writers of others waited for that copy.
#[test]
fn a_writer_without_room_does_not_wait_for_a_file_that_is_being_sealed() {
    run(async {
        let faults = Faults::new();
        let fixture = narrow(&faults);
        let volume = fixture.open().await;
        let sealed = create(&volume, "sealed").await;
        for at in [0, MIB] {
            sealed.write(at, pattern(0, at..at + MIB)).await.expect("write");
            sealed.fsync().await.expect("fsync");
        }
        let ino = sealed.ino();
        let gate = faults.gate(1);
        sealed.release().await.expect("release");
        gate.reached().await;
        let files = [create(&volume, "a").await, create(&volume, "b").await, create(&volume, "c").await];
        for file in &files[..2] {
            file.write(0, pattern(1, 0..6 * MIB)).await.expect("write");
        }
        let being_sealed = volume.open_inodes().into_iter().find(|inode| inode.ino() == ino);
        let relieved = being_sealed.expect("it is being sealed").relieve(false).now_or_never();
        relieved.expect("nobody waits").expect("it holds nothing");
        files[2].write(0, pattern(2, 0..12 * MIB)).await.expect("write");
        gate.open();
        for file in &files {
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
    });
}

/// Whoever has a file's turn may wait for the store for long: what others need is found in other files meanwhile.
#[test]
fn a_writer_without_room_does_not_wait_for_a_file_that_is_being_committed() {
    run(async {
        let faults = Faults::new();
        let fixture = narrow(&faults);
        let volume = fixture.open().await;
        let files = [create(&volume, "a").await, create(&volume, "b").await];
        for file in &files {
            file.write(0, pattern(1, 0..6 * MIB)).await.expect("write");
        }
        let gate = faults.gate(1);
        let committed = files[0].clone();
        let flush = tokio::spawn(async move { committed.flush().await });
        gate.reached().await;
        for inode in volume.open_inodes().iter().filter(|inode| inode.ino() == files[0].ino()) {
            inode.relieve(true).now_or_never().expect("nobody waits").expect("others see to it");
        }
        files[1].write(6 * MIB, pattern(1, 6 * MIB..7 * MIB)).await.expect("write");
        gate.open();
        flush.await.expect("it ends").expect("flush");
        for file in &files {
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
    });
}

/// A writer without room was given the error of another file, which the store denied, while enough was on its way to make room.
#[test]
fn a_writer_without_room_is_not_given_the_error_of_another_file() {
    run(async {
        let faults = Faults::new();
        let mut fixture = narrow(&faults);
        fixture.budget = Budget::new(32 * MIB);
        let volume = fixture.open().await;
        let files =
            [create(&volume, "big").await, create(&volume, "denied").await, create(&volume, "c").await];
        // The request that begins the upload, and its first part.
        let gate = faults.gate(2);
        files[0].write(0, pattern(1, 0..9 * MIB)).await.expect("write");
        gate.reached().await;
        files[1].write(0, pattern(2, 0..3 * MIB)).await.expect("write");
        faults.of_keys_with(".forebay/blobs");
        for nth in 1..100 {
            faults.script(OperationKind::Put, nth, FaultMode::Deny);
        }
        let about_to_be_written = volume.charge_write(8 * MIB).await.expect("room");
        let (writer, ()) = tokio::join!(files[2].write(0, pattern(3, 0..7 * MIB)), async {
            while faults.injected() == 0 {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            gate.open();
        });
        writer.expect("it waits for what is on its way");
        drop(about_to_be_written);
        faults.clear();
        for file in &files {
            file.release().await.expect("release");
        }
        for (name, seed, end) in [("big", 1, 9), ("denied", 2, 3), ("c", 3, 7)] {
            assert!(object(&fixture.bucket, name).await == pattern(seed, 0..end * MIB), "{name}");
        }
        volume.close().await.expect("close");
    });
}

/// A program that wrote a few bytes at a time took a hundred times as much memory as it was charged for.
#[test]
fn short_writes_are_charged_for_what_they_take() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.write.buffer_bytes = 32 * MIB;
        let volume = fixture.open().await;
        let (one_after_another, apart) = (create(&volume, "a").await, create(&volume, "b").await);
        let content = pattern(3, 0..200_000);
        for at in 0..200_000usize {
            one_after_another.write(Position::End, content.slice(at..at + 1)).await.expect("write");
        }
        let charged = fixture.budget.used(Class::Write);
        assert!((200_000..210_000).contains(&charged), "{charged} bytes: they are a few extents");
        for at in 0..2000 {
            apart.write(at * 64, pattern(4, at * 64..at * 64 + 16)).await.expect("write");
        }
        let charged = fixture.budget.used(Class::Write) - charged;
        assert_eq!(charged, 2000 * (16 + 192), "each is an extent");
        for file in [&one_after_another, &apart] {
            file.fsync().await.expect("fsync");
            file.release().await.expect("release");
        }
        assert_eq!(fixture.budget.used(Class::Write), 0);
        assert!(object(&fixture.bucket, "a").await == content);
        let file = open(&volume, "b", READ).await;
        for at in [0, 64, 1999 * 64] {
            assert!(file.read(at, 16).await.expect("read") == pattern(4, at..at + 16));
        }
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// So did one whose file is an upload already: each write was a piece of it.
#[test]
fn short_writes_to_a_running_upload_are_put_together() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "a").await;
        file.write(0, pattern(3, 0..3 * MIB)).await.expect("write");
        let before = fixture.budget.used(Class::Write);
        let content = pattern(5, 0..100_000);
        for at in 0..50_000usize {
            file.write(Position::End, content.slice(2 * at..2 * at + 2)).await.expect("write");
        }
        let charged = fixture.budget.used(Class::Write) - before;
        assert!((100_000..110_000).contains(&charged), "{charged} bytes");
        file.release().await.expect("release");
        let whole = object(&fixture.bucket, "a").await;
        assert!(whole[..3 << 20] == pattern(3, 0..3 * MIB) && whole[3 << 20..] == content);
        volume.close().await.expect("close");
    });
}
