//! What closing one handle of a file commits while others write: nothing that is half-written.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{ErrorKind, InodeId, Timestamp};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, FaultMode, Faults, OperationKind};
use forebay_metadata::tree::{Lookup, SetAttributes};
use futures::future::FutureExt;

use super::support::*;
use crate::{File, Volume};

/// Processes, by their descriptors.
const WRITER: u64 = 1;
const CHILD: u64 = 2;

async fn committed(volume: &Volume, file: &File) -> u64 {
    volume.tree().layout(file.ino()).await.expect("a layout").0.size()
}

/// Writes through a handle as its process does.
async fn write(file: &File, offset: u64, text: &'static str) {
    file.note_writer(Some(WRITER));
    file.write(offset, Bytes::from_static(text.as_bytes())).await.expect("write");
}

/// A handle whose file was written and closed, and of whose end nobody has heard yet.
async fn closed(volume: &Arc<Volume>) -> Arc<File> {
    let file = create(volume, "f").await;
    write(&file, 0, "old").await;
    file.close(WRITER).await.expect("close");
    assert_eq!(committed(volume, &file).await, 3);
    file
}

/// The kernel tells late that the last descriptor of a handle is gone. What the next one had written by then was committed,
/// and a mount that was killed in that moment left half a file.
#[test]
fn a_handle_that_goes_late_commits_nothing_of_the_next_one() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let late = closed(&volume).await;
        let file = open(&volume, "f", READ_WRITE).await;
        write(&file, 3, " and half").await;
        late.release().await.expect("release");
        assert_eq!(committed(&volume, &file).await, 3);
        write(&file, 12, " and whole").await;
        file.close(WRITER).await.expect("close");
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "old and half and whole");
    });
}

/// A mapping is written back after its descriptor was closed; the file may be open elsewhere for long.
#[test]
fn a_handle_that_goes_commits_what_its_mapping_wrote() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let mapped = closed(&volume).await;
        let other = open(&volume, "f", READ_WRITE).await;
        // Through whichever handle the kernel finds.
        other.write(3, Bytes::from_static(b" page")).await.expect("write");
        other.note_page();
        mapped.release().await.expect("release");
        assert_eq!(committed(&volume, &other).await, 8);
        other.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "old page");
    });
}

/// A child closes its copy of a descriptor, and its parent begins to write before that is seen to.
#[test]
fn a_copy_that_is_closed_while_a_write_begins_commits_nothing_of_it() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        closed(&volume).await.release().await.expect("release");
        let file = open(&volume, "f", READ_WRITE).await;
        // As the first piece is taken in.
        file.write(3, Bytes::from_static(b" and half")).await.expect("write");
        let inode = volume.open_inodes().pop().expect("it is open");
        let writing = inode.turn().await;
        let mut closing = pin!(file.close(CHILD));
        assert!(closing.as_mut().now_or_never().is_none(), "it waits for the write");
        file.note_writer(Some(WRITER));
        drop(writing);
        closing.await.expect("close");
        assert_eq!(committed(&volume, &file).await, 3);
        write(&file, 12, " and whole").await;
        file.close(WRITER).await.expect("close");
        file.release().await.expect("release");
        drop(inode);
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "old and half and whole");
    });
}

/// A child has copies of its parent's descriptors until its program begins. Where the parent closed one of them and began to
/// write through the next handle by then, the mount that was killed in that moment left half a file.
#[test]
fn a_copy_that_is_closed_late_commits_nothing_of_the_next_handle() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        for is_synced in [false, true] {
            let name = if is_synced { "synced" } else { "f" };
            let copied = create(&volume, name).await;
            write(&copied, 0, "old").await;
            if is_synced {
                copied.fsync().await.expect("fsync");
            } else {
                copied.close(WRITER).await.expect("close");
            }
            let file = open(&volume, name, READ_WRITE).await;
            volume.set_attributes(file.ino(), SetAttributes::default(), Some(0)).await.expect("truncated");
            write(&file, 0, "half").await;
            copied.close(if is_synced { WRITER } else { CHILD }).await.expect("close");
            assert_eq!(committed(&volume, &file).await, 3, "{name}: the bytes of before");
            copied.release().await.expect("release");
            assert_eq!(committed(&volume, &file).await, 3, "{name}: the bytes of before");
            write(&file, 4, " and whole").await;
            file.close(WRITER).await.expect("close");
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "half and whole");
    });
}

/// What a program cut off, or made, and closed is in the bucket, also where others have the file open for long.
#[test]
fn a_handle_that_wrote_nothing_commits_what_was_truncated_before() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let log = closed(&volume).await;
        let file = open(&volume, "f", READ_WRITE).await;
        volume.set_attributes(file.ino(), SetAttributes::default(), Some(1)).await.expect("truncated");
        assert_eq!(committed(&volume, &log).await, 3);
        file.close(CHILD).await.expect("close");
        assert_eq!(committed(&volume, &log).await, 1);
        for handle in [file, log] {
            handle.release().await.expect("release");
        }
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "o");
    });
}

/// A truncation in the midst of a write had the next close of another handle commit what was half-written.
#[test]
fn a_truncation_of_what_is_half_written_is_committed_with_it() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let log = closed(&volume).await;
        let file = open(&volume, "f", READ_WRITE).await;
        write(&file, 3, " and half").await;
        volume.set_attributes(file.ino(), SetAttributes::default(), Some(7)).await.expect("truncated");
        log.close(CHILD).await.expect("close");
        assert_eq!(committed(&volume, &file).await, 3);
        file.close(WRITER).await.expect("close");
        assert_eq!(committed(&volume, &file).await, 7);
        for handle in [file, log] {
            handle.release().await.expect("release");
        }
        volume.close().await.expect("close");
    });
}

/// A write that was refused had the truncation before it wait for the end of whoever had tried.
#[test]
fn a_truncation_before_a_write_that_is_refused_is_committed() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let log = closed(&volume).await;
        let file = open(&volume, "f", READ_WRITE).await;
        volume.set_attributes(file.ino(), SetAttributes::default(), Some(1)).await.expect("truncated");
        file.write(u64::MAX / 2, Bytes::from_static(b"far")).await.expect_err("no file is so large");
        log.close(CHILD).await.expect("close");
        assert_eq!(committed(&volume, &file).await, 1);
        for handle in [file, log] {
            handle.release().await.expect("release");
        }
        volume.close().await.expect("close");
    });
}

/// What is truncated through a handle, or made empty, is in the bucket when that is closed, also while somebody else writes.
#[test]
fn a_truncation_is_committed_by_the_close_of_who_made_it() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let writer = closed(&volume).await;
        for size in [2, 0] {
            write(&writer, 3, " and more").await;
            let file = open(&volume, "f", READ_WRITE).await;
            volume.set_attributes(file.ino(), SetAttributes::default(), Some(size)).await.expect("truncated");
            if size > 0 {
                file.close(CHILD).await.expect("close");
                assert_ne!(
                    committed(&volume, &file).await,
                    size,
                    "by whichever handle, it is with what is half-written"
                );
                file.note_truncated();
            }
            file.close(CHILD).await.expect("close");
            assert_eq!(committed(&volume, &file).await, size);
            file.release().await.expect("release");
        }
        writer.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// A file that is open elsewhere for long kept what could not be brought to the store at a close in memory until then.
#[test]
fn a_handle_whose_close_failed_commits_at_its_end() {
    run(async {
        let faults = Faults::new();
        let fixture = Fixture::new(Bucket::in_memory().with_deadline_ms(50).with_faults(&faults));
        let volume = fixture.open().await;
        closed(&volume).await.release().await.expect("release");
        let (file, other) = (open(&volume, "f", READ_WRITE).await, open(&volume, "f", READ_WRITE).await);
        write(&file, 3, " and more").await;
        faults.set_down(true);
        file.close(WRITER).await.expect_err("the store is away");
        faults.set_down(false);
        file.release().await.expect("release");
        assert_eq!(committed(&volume, &other).await, 12);
        other.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "f").await, "old and more");
    });
}

/// A file of which the last handle is gone, and whose mapping had written a page that the store did not take.
struct LeftWithAPage {
    faults: Faults,
    fixture: Fixture,
    volume: Arc<Volume>,
}

impl LeftWithAPage {
    /// The store is away still.
    async fn new() -> Self {
        let faults = Faults::new();
        let bucket = Bucket::in_memory().with_deadline_ms(50).with_faults(&faults);
        let fixture = Fixture { clock: Clock::manual(), ..Fixture::new(bucket) };
        let volume = fixture.open().await;
        let mapped = closed(&volume).await;
        mapped.write(3, Bytes::from_static(b" page")).await.expect("write");
        mapped.note_page();
        faults.set_down(true);
        mapped.release().await.expect_err("the store is away, and nobody is told");
        Self { faults, fixture, volume }
    }

    /// The store is back, and refuses what it is given, if it `refuses`. Returns when the file has but `handles` left.
    async fn until_handles(&self, handles: usize, refuses: bool) {
        let inode = self.volume.open_inodes().pop().expect("it is kept open");
        if refuses {
            for nth in 1..=100 {
                self.faults.script(OperationKind::Put, nth, FaultMode::Deny);
            }
        }
        self.faults.set_down(false);
        while self.volume.handles(inode.ino()) > handles {
            self.fixture.clock.advance(Duration::from_secs(60));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.faults.clear();
    }
}

/// The program has closed its descriptor and unmapped the file: what the kernel wrote of it while the store was away was
/// dropped, and no program heard of it.
///
/// Promise S36: What a mapping wrote after the last descriptor was closed is tried until the store takes it.
#[test]
fn what_a_mapping_wrote_outlives_its_file_and_a_store_that_is_away() {
    run(async {
        let left = LeftWithAPage::new().await;
        let volume = &left.volume;
        let reader = open(volume, "f", READ).await;
        assert_eq!(reader.read(0, 100).await.expect("read"), "old page", "who opens it meanwhile sees it");
        reader.release().await.expect("release");
        left.until_handles(0, false).await;
        assert_eq!(object(&left.fixture.bucket, "f").await, "old page");
        volume.close().await.expect("close");
    });
}

/// So it is where the store refuses: who opens the file next is told, once.
///
/// Promise S36: A loss that none was told of yet is told to one that is opened later, as Linux does.
#[test]
fn what_a_mapping_wrote_and_the_store_refused_is_told_to_the_next_one() {
    run(async {
        let left = LeftWithAPage::new().await;
        let volume = &left.volume;
        left.until_handles(0, true).await;
        // One that reads asks nothing.
        open(volume, "f", READ).await.release().await.expect("release");
        let file = open(volume, "f", READ_WRITE).await;
        assert_eq!(file.read(0, 100).await.expect("read"), "old", "the content that was committed before");
        let told = file.fsync().await.expect_err("it is told");
        assert_eq!(told.kind(), ErrorKind::Denied, "{told}");
        file.fsync().await.expect("once");
        file.release().await.expect("release");
        open(volume, "f", READ_WRITE).await.fsync().await.expect("and to nobody else");
        volume.close().await.expect("close");
    });
}

/// What the next one to open the file has half-written was published with the page that was tried again.
#[test]
fn what_a_mapping_wrote_is_not_tried_again_in_the_midst_of_a_write() {
    run(async {
        let left = LeftWithAPage::new().await;
        let volume = &left.volume;
        let file = open(volume, "f", READ_WRITE).await;
        write(&file, 8, " and half").await;
        left.until_handles(1, false).await;
        assert_eq!(committed(volume, &file).await, 3, "nothing of it");
        write(&file, 17, " and whole").await;
        file.close(WRITER).await.expect("close");
        assert_eq!(committed(volume, &file).await, 27);
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// Who has the file open brings it in: the bytes were told as lost, and came with its next fsync.
#[test]
fn what_a_mapping_wrote_is_left_to_who_has_the_file_open() {
    run(async {
        let left = LeftWithAPage::new().await;
        let volume = &left.volume;
        let file = open(volume, "f", READ_WRITE).await;
        left.until_handles(1, true).await;
        file.fsync().await.expect("nothing was lost");
        let ino = file.ino();
        file.release().await.expect("release");
        // Aside from its own path, if the store left open what became of the first put.
        assert_eq!(volume.tree().layout(ino).await.expect("a layout").0.size(), 8);
        let reader = open(volume, "f", READ).await;
        assert_eq!(reader.read(0, 100).await.expect("read"), "old page");
        reader.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// What the tree answered before the last commit of a file came to the kernel after the file's close, which cut what it held
/// of the file.
#[test]
fn an_answer_from_before_a_files_end_does_not_come_after_it() {
    run(async {
        for asked in ["attributes", "lookup", "a listing", "a change"] {
            let fixture = Fixture { is_unlucky: true, ..Fixture::new(Bucket::in_memory()) };
            let volume = fixture.open().await;
            let file = create(&volume, "f").await;
            write(&file, 0, "old").await;
            fixture.held_up.set();
            let ino = file.ino();
            let ask = async {
                match asked {
                    "attributes" => volume.attributes(ino).await.expect("a file"),
                    "lookup" => match volume.lookup(InodeId::ROOT, b"f").await.expect("a directory") {
                        Lookup::Found(attributes) => attributes,
                        Lookup::Miss => panic!("it is there"),
                    },
                    "a listing" => {
                        let page = volume.read_directory(InodeId::ROOT, None, 10).await;
                        page.expect("a directory").entries.remove(0).attributes
                    }
                    _ => {
                        let changes = SetAttributes { uid: Some(7), ..SetAttributes::default() };
                        volume.set_attributes(ino, changes, None).await.expect("changed")
                    }
                }
            };
            let end = async {
                fixture.held_up.reached().await;
                file.close(WRITER).await.expect("close");
                file.release().await.expect("release");
                assert!(volume.open_inodes().is_empty(), "it is closed");
                fixture.held_up.go_on();
            };
            let (told, ()) = tokio::join!(ask, end);
            assert_eq!((told.ino, told.size), (ino, 3), "{asked}");
            volume.close().await.expect("close");
        }
    });
}

/// utimes that came while a commit was on its way to the tree was undone by it: the file had the time of its last write.
#[test]
fn a_time_that_is_set_while_a_file_is_committed_stays() {
    run(async {
        for is_shared in [false, true] {
            let fixture = Fixture { is_unlucky: true, ..Fixture::new(Bucket::in_memory()) };
            let volume = fixture.open().await;
            let (file, other) = (create(&volume, "f").await, create(&volume, "other").await);
            write(&other, 0, "bytes").await;
            other.fsync().await.expect("fsync");
            write(&file, 0, "written").await;
            fixture.held_up.set_for_commit();
            let (ino, mtime) = (file.ino(), Timestamp { seconds: 1_000, nanos: 7 });
            let commit = async {
                match is_shared {
                    true => file.share(&other, 0..5, 0).await.map(drop),
                    false => file.close(WRITER).await,
                }
            };
            let set = async {
                fixture.held_up.reached().await;
                let changes = SetAttributes { mtime: Some(mtime), ..SetAttributes::default() };
                // It may come before the commit goes on, where it does not wait for that.
                let go_on = async { fixture.held_up.go_on() };
                tokio::join!(biased; volume.set_attributes(ino, changes, None), go_on).0
            };
            let (committed, set) = tokio::join!(commit, set);
            committed.expect("committed");
            assert_eq!(set.expect("set").mtime, mtime);
            assert_eq!(volume.attributes(ino).await.expect("a file").mtime, mtime);
            for file in [file, other] {
                file.release().await.expect("release");
            }
            volume.close().await.expect("close");
            let volume = fixture.open().await;
            assert_eq!(volume.attributes(ino).await.expect("a file").mtime, mtime);
            volume.close().await.expect("close");
        }
    });
}

/// Open files are committed side by side: a thousand of them waited for a thousand round trips.
#[test]
fn open_files_are_committed_side_by_side() {
    run(async {
        let faults = Faults::new();
        let fixture = Fixture::new(Bucket::in_memory().with_faults(&faults));
        let volume = fixture.open().await;
        let mut files = Vec::new();
        for number in 0..40 {
            let file = create(&volume, &format!("f{number}")).await;
            file.write(0, Bytes::from(number.to_string())).await.expect("write");
            files.push(file);
        }
        let first = faults.gate(1);
        let syncing = tokio::spawn({
            let volume = volume.clone();
            async move { volume.sync().await }
        });
        first.reached().await;
        let puts = || fixture.bucket.counters().of(OperationKind::Put).requests;
        until("others come to pass meanwhile", async || puts() >= 10).await;
        first.open();
        syncing.await.expect("no panic").expect("synced");
        for (number, file) in files.iter().enumerate() {
            assert_eq!(object(&fixture.bucket, &format!("f{number}")).await, number.to_string());
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
    });
}

/// Who reads that a file could not be written knows it by its path.
#[test]
fn a_file_that_cannot_be_written_is_named_by_its_path() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.write.deadline_ms = 300;
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"content")).await.expect("write");
        fixture.lapsed.store(true, std::sync::atomic::Ordering::SeqCst);
        let told = volume.sync().await.expect_err("nothing may be changed");
        assert!(told.to_string().contains("`f` could not be written"), "{told}");
        fixture.lapsed.store(false, std::sync::atomic::Ordering::SeqCst);
        file.fsync().await.expect("fsync");
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}
