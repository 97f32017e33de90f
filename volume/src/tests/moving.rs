//! Files that are written while objects move: theirs, or those in their way.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::MIB;
use forebay_core::{FileKind, InodeId};
use forebay_io::object::{Bucket, BucketUrl, Faults, Gate, StoreSettings};
use forebay_metadata::tree::{Existing, NewInode, RenameMode};

use super::support::{Fixture, READ_WRITE, create, object, open, pattern, run};
use crate::volume::local;
use crate::{File, Volume};

const ROOT: InodeId = InodeId::ROOT;

fn new(kind: FileKind) -> NewInode {
    NewInode { kind, mode: 0o755, umask: 0, uid: 0, gid: 0, rdev: 0, target: Bytes::new() }
}

async fn create_in(volume: &Arc<Volume>, directory: InodeId, name: &str) -> Arc<File> {
    let new = new(FileKind::File);
    let made = volume.create(directory, name.as_bytes(), new, Existing::Refuse, READ_WRITE).await;
    made.expect("a new file").1
}

async fn make_directory(volume: &Volume, name: &str) -> InodeId {
    let new = new(FileKind::Directory);
    let made = volume.tree().create(ROOT, name.as_bytes(), new, Existing::Refuse).await;
    made.expect("a directory").0.ino
}

async fn rename(volume: &Volume, from: &str, to: &str) {
    let (from, to) = ((ROOT, from.as_bytes()), (ROOT, to.as_bytes()));
    volume.rename(from, to, RenameMode::Replace).await.expect("renamed");
}

async fn drain(volume: &Volume) {
    local(volume).expect("a tree of this process").drain().await.expect("drained");
}

/// As much as goes into an upload of its own before the file is closed.
fn large(number: u64) -> Bytes {
    pattern(number, 0..3 * MIB)
}

/// A bucket in which no name is both an object and a directory.
async fn folder(scratch: &tempfile::TempDir) -> Bucket {
    let url: BucketUrl = format!("file://{}", scratch.path().display()).parse().expect("a URL");
    Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket")
}

/// An empty object has no bytes that tell where it went.
#[test]
fn an_empty_file_is_moved_while_it_is_open() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        create(&volume, "a").await.release().await.expect("release");
        let file = open(&volume, "a", READ_WRITE).await;
        volume.set_attributes(file.ino(), Default::default(), Some(0)).await.expect("truncated");
        rename(&volume, "a", "b").await;
        drain(&volume).await;
        file.flush().await.expect("nobody else wrote");
        file.release().await.expect("release");
        drain(&volume).await;
        assert_eq!(object(&fixture.bucket, "b").await, "");
        volume.close().await.expect("close");
    });
}

/// What a removed file that is still open holds lies below a directory that is gone, too.
#[test]
fn a_large_file_is_written_where_a_directory_was() {
    run(async {
        let scratch = tempfile::tempdir().expect("scratch");
        let fixture = Fixture::new(folder(&scratch).await);
        let volume = fixture.open().await;
        let directory = make_directory(&volume, "a").await;
        let held = create_in(&volume, directory, "x").await;
        held.write(0, pattern(1, 0..100)).await.expect("write");
        held.flush().await.expect("flush");
        volume.unlink(directory, b"x").await.expect("unlinked");
        volume.tree().remove_directory(ROOT, b"a").await.expect("removed");
        drain(&volume).await;
        let file = create(&volume, "a").await;
        file.write(0, large(2)).await.expect("write");
        file.flush().await.expect("nobody else wrote");
        assert!(held.read(0, 1000).await.expect("read") == pattern(1, 0..100));
        held.release().await.expect("release");
        file.release().await.expect("release");
        volume.close().await.expect("close");
        let volume = fixture.open().await;
        drain(&volume).await;
        assert!(object(&fixture.bucket, "a").await == large(2));
        volume.close().await.expect("close");
    });
}

/// A file in pieces, of which the store is making one object, and does not get on with it.
async fn sealing(volume: &Arc<Volume>, faults: &Faults) -> Gate {
    let file = create(volume, "f").await;
    for at in [0, MIB] {
        file.write(at, pattern(0, at..at + MIB)).await.expect("write");
        file.fsync().await.expect("fsync");
    }
    let gate = faults.gate(1);
    file.release().await.expect("release");
    gate.reached().await;
    gate
}

/// Names were changed, and everything was committed, once the copies of large files were made: minutes, for which the kernel
/// keeps others from the directory.
#[test]
fn names_change_while_a_file_is_being_sealed() {
    run(async {
        for change in ["moved", "removed", "replaced"] {
            let faults = Faults::new();
            let fixture = Fixture::new(Bucket::in_memory().with_faults(&faults));
            let volume = fixture.open().await;
            if change == "replaced" {
                create(&volume, "g").await.release().await.expect("release");
            }
            let gate = sealing(&volume, &faults).await;
            let at_once = async {
                match change {
                    "moved" => rename(&volume, "f", "g").await,
                    "removed" => drop(volume.unlink(ROOT, b"f").await.expect("unlinked")),
                    _ => rename(&volume, "g", "f").await,
                }
                volume.sync().await.expect("all is committed");
            };
            tokio::time::timeout(Duration::from_secs(10), at_once).await.expect("it waits for no copy");
            let next = if change == "replaced" { "" } else { "next" };
            if change != "replaced" {
                let file = create(&volume, "f").await;
                file.write(0, Bytes::from_static(next.as_bytes())).await.expect("write");
                file.flush().await.expect("nobody else wrote");
                file.release().await.expect("release");
            }
            gate.open();
            if change == "moved" {
                let moved = open(&volume, "g", READ_WRITE).await;
                assert!(moved.read(0, 3 << 20).await.expect("read") == pattern(0, 0..2 * MIB));
                moved.release().await.expect("release");
            }
            volume.close().await.expect("close");
            let volume = fixture.open().await;
            drain(&volume).await;
            assert_eq!(object(&fixture.bucket, "f").await, next, "{change}");
            if change == "moved" {
                assert!(object(&fixture.bucket, "g").await == pattern(0, 0..2 * MIB));
            }
            volume.close().await.expect("close");
        }
    });
}

/// Once its directory is renamed, another file may be where the way to its old path was.
#[test]
fn a_directory_is_renamed_while_a_large_file_in_it_is_written() {
    run(async {
        let scratch = tempfile::tempdir().expect("scratch");
        let fixture = Fixture::new(folder(&scratch).await);
        let volume = fixture.open().await;
        let directory = make_directory(&volume, "d").await;
        let (inside, beside) = (create_in(&volume, directory, "f").await, create(&volume, "g").await);
        let gone = make_directory(&volume, "gone").await;
        let removed = create_in(&volume, gone, "h").await;
        volume.unlink(gone, b"h").await.expect("unlinked");
        volume.tree().remove_directory(ROOT, b"gone").await.expect("removed");
        removed.write(0, large(4)).await.expect("write");
        inside.write(0, large(1)).await.expect("write");
        beside.write(0, large(2)).await.expect("write");
        rename(&volume, "d", "e").await;
        drain(&volume).await;
        let other = create(&volume, "d").await;
        other.write(0, pattern(3, 0..100)).await.expect("write");
        other.release().await.expect("release");
        drain(&volume).await;
        for file in [inside, beside, removed] {
            file.flush().await.expect("nobody else wrote");
            file.release().await.expect("release");
        }
        drain(&volume).await;
        assert!(object(&fixture.bucket, "e/f").await == large(1));
        assert!(object(&fixture.bucket, "g").await == large(2));
        assert!(object(&fixture.bucket, "d").await == pattern(3, 0..100));
        volume.close().await.expect("close");
    });
}
