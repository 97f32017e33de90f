//! What closing one handle of a file commits while others write: nothing that is half-written.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{ErrorKind, InodeId};
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
        other.note_writer(None);
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

/// A handle that was closed, and whose mapping then wrote a page that the store did not take.
async fn left_with_a_page(volume: &Arc<Volume>, faults: &Faults) {
    let mapped = closed(volume).await;
    mapped.note_writer(None);
    mapped.write(3, Bytes::from_static(b" page")).await.expect("write");
    mapped.note_page();
    faults.set_down(true);
    mapped.release().await.expect_err("the store is away, and nobody is told");
}

/// The program has closed its descriptor and unmapped the file: what the kernel wrote of it while the store was away was
/// dropped, and no program heard of it.
///
/// Promise S36: What a mapping wrote after the last descriptor was closed is tried until the store takes it.
#[test]
fn what_a_mapping_wrote_outlives_its_file_and_a_store_that_is_away() {
    run(async {
        let faults = Faults::new();
        let mut fixture = Fixture::new(Bucket::in_memory().with_deadline_ms(50).with_faults(&faults));
        fixture.clock = Clock::manual();
        let volume = fixture.open().await;
        left_with_a_page(&volume, &faults).await;
        let reader = open(&volume, "f", READ).await;
        assert_eq!(reader.read(0, 100).await.expect("read"), "old page", "who opens it meanwhile sees it");
        reader.release().await.expect("release");
        faults.set_down(false);
        while !volume.open_inodes().is_empty() {
            fixture.clock.advance(Duration::from_secs(60));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(object(&fixture.bucket, "f").await, "old page");
        volume.close().await.expect("close");
    });
}

/// So it is where the store refuses: who opens the file next is told, once.
///
/// Promise S36: A loss that none was told of yet is told to one that is opened later, as Linux does.
#[test]
fn what_a_mapping_wrote_and_the_store_refused_is_told_to_the_next_one() {
    run(async {
        let faults = Faults::new();
        let mut fixture = Fixture::new(Bucket::in_memory().with_deadline_ms(50).with_faults(&faults));
        fixture.clock = Clock::manual();
        let volume = fixture.open().await;
        left_with_a_page(&volume, &faults).await;
        for nth in 1..=100 {
            faults.script(OperationKind::Put, nth, FaultMode::Deny);
        }
        faults.set_down(false);
        while !volume.open_inodes().is_empty() {
            fixture.clock.advance(Duration::from_secs(60));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        faults.clear();
        // One that reads asks nothing.
        open(&volume, "f", READ).await.release().await.expect("release");
        let file = open(&volume, "f", READ_WRITE).await;
        assert_eq!(file.read(0, 100).await.expect("read"), "old", "the content that was committed before");
        let told = file.fsync().await.expect_err("it is told");
        assert_eq!(told.kind(), ErrorKind::Denied, "{told}");
        file.fsync().await.expect("once");
        file.release().await.expect("release");
        open(&volume, "f", READ_WRITE).await.fsync().await.expect("and to nobody else");
        volume.close().await.expect("close");
    });
}

/// What the next one to open the file has half-written was published with the page that was tried again.
#[test]
fn what_a_mapping_wrote_is_not_tried_again_in_the_midst_of_a_write() {
    run(async {
        let faults = Faults::new();
        let mut fixture = Fixture::new(Bucket::in_memory().with_deadline_ms(50).with_faults(&faults));
        fixture.clock = Clock::manual();
        let volume = fixture.open().await;
        left_with_a_page(&volume, &faults).await;
        let file = open(&volume, "f", READ_WRITE).await;
        write(&file, 8, " and half").await;
        faults.set_down(false);
        while volume.handles(file.ino()) > 1 {
            fixture.clock.advance(Duration::from_secs(60));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(committed(&volume, &file).await, 3, "nothing of it");
        write(&file, 17, " and whole").await;
        file.close(WRITER).await.expect("close");
        assert_eq!(committed(&volume, &file).await, 27);
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

/// Who has the file open brings it in: the bytes were told as lost, and came with its next fsync.
#[test]
fn what_a_mapping_wrote_is_left_to_who_has_the_file_open() {
    run(async {
        let faults = Faults::new();
        let mut fixture = Fixture::new(Bucket::in_memory().with_deadline_ms(50).with_faults(&faults));
        fixture.clock = Clock::manual();
        let volume = fixture.open().await;
        left_with_a_page(&volume, &faults).await;
        let file = open(&volume, "f", READ_WRITE).await;
        for nth in 1..=100 {
            faults.script(OperationKind::Put, nth, FaultMode::Deny);
        }
        faults.set_down(false);
        while volume.handles(file.ino()) > 1 {
            fixture.clock.advance(Duration::from_secs(60));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        faults.clear();
        file.fsync().await.expect("nothing was lost");
        let ino = file.ino();
        file.release().await.expect("release");
        // Aside from its own path, if the store left open what became of the first put.
        assert_eq!(volume.tree().layout(ino).await.expect("a layout").0.size(), 8);
        let reader = open(&volume, "f", READ).await;
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
