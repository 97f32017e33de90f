//! What an outsider does to the bucket while files of it are cached, open or cloned: the bytes of the version that was
//! opened, or ESTALE, and never ENOENT, which is for names.

use std::sync::Arc;

use bytes::Bytes;
use forebay_core::units::MIB;
use forebay_core::{ErrorKind, FileKind, InodeId, ObjectKey, Result};
use forebay_io::object::{Bucket, Condition};
use forebay_metadata::tree::{Existing, NewInode, SetAttributes, resolve};
use tokio_util::sync::CancellationToken;

use super::support::{Fixture, READ, READ_WRITE, create, object, open, pattern, run};
use crate::clone::clone;
use crate::{File, Volume};

/// Two whole blocks and a part of one.
const SIZE: u64 = 9 * MIB;

/// A content that leaves in one piece.
const SMALL: u64 = 5000;

/// What the outsider does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// Puts an object beside it.
    Put,
    Delete,
    /// Puts other bytes of the same length.
    Replace,
}

/// How the file is held meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// Open, and every block in the cache.
    Cached,
    /// Open, and only its first block in the cache.
    Uncached,
    /// By a clone, none of whose blocks is in the cache.
    Cloned,
}

const CHANGES: [Change; 3] = [Change::Put, Change::Delete, Change::Replace];

async fn put(bucket: &Bucket, key: &str, content: Bytes) {
    bucket.put(&ObjectKey::new(key), content, Condition::Always).await.expect("put");
}

async fn apply(change: Change, bucket: &Bucket) {
    match change {
        Change::Put => put(bucket, "beside", pattern(3, 0..SIZE)).await,
        Change::Delete => bucket.delete(&ObjectKey::new("data")).await.expect("delete"),
        Change::Replace => put(bucket, "data", pattern(2, 0..SIZE)).await,
    }
}

async fn hold(volume: &Arc<Volume>, held: Held) -> Arc<File> {
    let file = match held {
        Held::Cloned => {
            let made = clone(volume, ("data", "copy"), |_| {}, &CancellationToken::new()).await;
            assert_eq!(made.expect("a clone").files, 1);
            open(volume, "copy", READ).await
        }
        Held::Cached | Held::Uncached => open(volume, "data", READ).await,
    };
    let read = match held {
        Held::Cached => SIZE,
        Held::Uncached => 4096,
        Held::Cloned => 0,
    };
    assert!(file.read(0, read as u32).await.expect("read") == pattern(1, 0..read));
    file
}

/// Reads at several places, once across all blocks, and says how many of them were refused.
async fn look(file: &File, told: &str) -> usize {
    let mut refused = 0;
    for (from, to) in [(0, 4096), (4 * MIB - 100, 4 * MIB + 100), (SIZE - 10, SIZE), (0, SIZE)] {
        match file.read(from, (to - from) as u32).await {
            Ok(bytes) => assert!(bytes == pattern(1, from..to), "{told}: other bytes at {from}..{to}"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Stale, "{told} at {from}..{to}: {error}");
                refused += 1;
            }
        }
    }
    refused
}

/// Promise S68: Another tool may put, replace or delete an object while its file is open, or a clone of it is there: each
/// read then gives the bytes of the version that was opened, or fails with ESTALE. ENOENT is for names: once a listing or
/// `forebay refresh` finds the object gone, there is no such file.
///
/// An object that was deleted gave ENOENT.
#[test]
fn outside_changes_leave_the_bytes_that_were_opened_or_are_stale() {
    for change in CHANGES {
        for held in [Held::Cached, Held::Uncached, Held::Cloned] {
            run(async {
                let told = format!("{change:?} while {held:?}");
                let fixture = Fixture::new(Bucket::in_memory());
                put(&fixture.bucket, "data", pattern(1, 0..SIZE)).await;
                let volume = fixture.open().await;
                let file = hold(&volume, held).await;
                apply(change, &fixture.bucket).await;
                let expected = match (change, held) {
                    (Change::Put, _) | (_, Held::Cached) => 0,
                    // The first block is here.
                    (_, Held::Uncached) => 3,
                    (_, Held::Cloned) => 4,
                };
                assert_eq!(look(&file, &told).await, expected, "{told}");
                volume.tree().refresh(InodeId::ROOT).await.expect("a refresh");
                assert_eq!(look(&file, &format!("{told}, then refreshed")).await, expected, "{told}");
                match (change, resolve(&**volume.tree(), "data").await) {
                    (Change::Delete, found) => {
                        assert_eq!(found.expect_err("it is gone").kind(), ErrorKind::NotFound, "{told}");
                        let missing = volume.open(InodeId(u64::MAX), READ).await.expect_err("no such file");
                        assert_eq!(missing.kind(), ErrorKind::NotFound, "{told}");
                    }
                    (_, found) => {
                        let (ino, number) =
                            (found.expect("it is there").ino, u64::from(change == Change::Replace));
                        let next = volume.open(ino, READ).await.expect("open");
                        let read = next.read(0, SIZE as u32).await.expect("read");
                        assert!(read == pattern(1 + number, 0..SIZE), "{told}");
                        next.release().await.expect("release");
                    }
                }
                file.release().await.expect("release");
                volume.close().await.expect("close");
            });
        }
    }
}

/// What is done to an open file of which the object is gone either stands or is ESTALE, before a refresh and after it.
#[test]
fn what_is_done_to_an_open_file_whose_object_is_gone_stands_or_is_stale() {
    for (is_refreshed, part_copy) in [(false, true), (true, true), (false, false)] {
        for step in ["write", "grow", "cut", "share", "unpack", "replace", "stream"] {
            run(async {
                let told = format!("{step}, refreshed: {is_refreshed}, copied in the store: {part_copy}");
                let mut fixture = Fixture::new(Bucket::in_memory());
                fixture.part_copy = part_copy;
                put(&fixture.bucket, "data", pattern(1, 0..SIZE)).await;
                let volume = fixture.open().await;
                let file = open(&volume, "data", READ_WRITE).await;
                apply(Change::Delete, &fixture.bucket).await;
                if is_refreshed {
                    volume.tree().refresh(InodeId::ROOT).await.expect("a refresh");
                }
                let done = do_step(&volume, &file, step).await;
                if let Err(error) = &done {
                    assert_eq!(error.kind(), ErrorKind::Stale, "{told}: {error}");
                }
                let read = file.read(0, SIZE as u32).await;
                match (step, done) {
                    ("replace", done) => {
                        done.unwrap_or_else(|error| {
                            panic!("{told}: a whole content needs no other: {error}")
                        });
                        assert!(read.expect("read") == pattern(4, 0..SMALL), "{told}");
                    }
                    ("stream", Ok(())) => assert!(read.expect("read") == pattern(4, 0..SIZE), "{told}"),
                    _ => assert_eq!(read.expect_err("its bytes are gone").kind(), ErrorKind::Stale, "{told}"),
                }
                file.release().await.expect("release");
                volume.close().await.expect("close");
            });
        }
    }
}

async fn do_step(volume: &Arc<Volume>, file: &Arc<File>, step: &str) -> Result<()> {
    let resize = |size| volume.set_attributes(file.ino(), SetAttributes::default(), Some(size));
    match step {
        "write" => drop(file.write(MIB, pattern(4, 0..3 * MIB)).await?),
        "grow" | "cut" => {
            let size = if step == "grow" { SIZE + 1 } else { SIZE - 1 };
            resize(size).await?;
        }
        "share" => {
            let copy = create(volume, "copy").await;
            let shared = copy.share(file, 0..SIZE, 0).await;
            if shared.is_ok() {
                let read = copy.read(0, 4096).await.expect_err("shared bytes are gone as well");
                assert_eq!(read.kind(), ErrorKind::Stale);
            }
            copy.release().await?;
            shared?;
        }
        "unpack" => {
            file.write(MIB, pattern(4, 0..MIB)).await?;
            let inode = volume.acquire(file.ino()).await?;
            let unpacked = inode.unpack().await;
            volume.release(&inode, false).await?;
            unpacked?;
        }
        _ => {
            resize(0).await?;
            let (size, length) = if step == "replace" { (SMALL, SMALL) } else { (SIZE, MIB) };
            for at in (0..size).step_by(length as usize) {
                file.write(at, pattern(4, at..at + length)).await?;
            }
        }
    }
    file.fsync().await
}

/// A mount had put a file's first content and died before it had recorded that, and the next one opened the file by a name in
/// another directory: the listing of its own one came later, or met it open. It was empty, and what was written to it and synced
/// went when it was sealed, as the object at its path was taken for newer.
///
/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[test]
fn a_first_content_that_was_not_recorded_is_there_before_the_file_is_written() {
    run(async {
        for is_listed in [true, false] {
            let fixture = Fixture::new(Bucket::in_memory());
            let volume = fixture.open().await;
            let make = async |directory, name: &'static [u8], kind| {
                let new =
                    NewInode { kind, mode: 0o755, umask: 0, uid: 0, gid: 0, rdev: 0, target: Bytes::new() };
                let made = volume.tree().create(directory, name, new, Existing::Refuse).await;
                made.expect("made").0.ino
            };
            let directory = make(InodeId::ROOT, b"d", FileKind::Directory).await;
            let ino = make(directory, b"f", FileKind::File).await;
            volume.tree().link(ino, InodeId::ROOT, b"g").await.expect("a further name");
            volume.close().await.expect("close");
            put(&fixture.bucket, "d/f", Bytes::from_static(b"first")).await;

            let volume = fixture.open().await;
            let reader = open(&volume, "g", READ).await;
            if is_listed {
                volume.lookup(directory, b"f").await.expect("the directory is listed");
            }
            assert_eq!(reader.read(0, 100).await.expect("read"), &b"first"[..]);
            reader.release().await.expect("release");
            let writer = open(&volume, "g", READ_WRITE).await;
            writer.write(8, Bytes::from_static(b"newer")).await.expect("write");
            writer.fsync().await.expect("fsync");
            writer.release().await.expect("release");
            // Sealed by then.
            volume.close().await.expect("close");

            let volume = fixture.open().await;
            let reader = open(&volume, "g", READ).await;
            assert_eq!(reader.read(0, 100).await.expect("read"), &b"first\0\0\0newer"[..]);
            reader.release().await.expect("release");
            assert_eq!(object(&fixture.bucket, "d/f").await, &b"first\0\0\0newer"[..]);
            volume.close().await.expect("close");
        }
    });
}
