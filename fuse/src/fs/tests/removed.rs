//! What has no name any more and is held by the kernel without being open: directories, pipes, and descriptors that open nothing.

use bytes::Bytes;
use forebay_core::{FileKind, Timestamp};

use super::*;
use crate::fs::{Change, TimeChange, XattrReply};

const LIST: &[u8] = b"system.posix_acl_access";

/// An access control list with a named user, as Linux encodes it.
fn list() -> Bytes {
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, u32::MAX), (2, 5, 1234), (4, 0, u32::MAX), (16, 5, u32::MAX), (32, 0, u32::MAX)];
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(permissions.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value.into()
}

/// One of each kind, by the way that its last name goes.
async fn remove(fs: &FileSystem, kind: FileKind, by_rename: bool) -> Attributes {
    let made = match kind {
        FileKind::Directory => fs.make_directory(CALLER, ROOT, b"a", 0o751).await,
        FileKind::Symlink => fs.make_symlink(CALLER, ROOT, b"a", "there".into()).await,
        FileKind::File => {
            put(fs, ROOT, "a", "bytes").await;
            fs.lookup(ROOT, b"a").await.map(|found| found.expect("it was made"))
        }
        kind => fs.make_node(CALLER, ROOT, b"a", kind, 0o751, 259).await,
    };
    let made = made.expect("made");
    let removed = match (by_rename, kind) {
        (true, FileKind::Directory) => {
            fs.make_directory(CALLER, ROOT, b"b", 0o700).await.expect("mkdir");
            fs.rename(CALLER, (ROOT, b"b"), (ROOT, b"a"), 0).await
        }
        (true, _) => {
            put(fs, ROOT, "b", "").await;
            fs.rename(CALLER, (ROOT, b"b"), (ROOT, b"a"), 0).await
        }
        (false, FileKind::Directory) => fs.remove_directory(ROOT, b"a").await,
        (false, _) => fs.unlink(ROOT, b"a").await,
    };
    removed.expect("removed");
    made
}

/// They were ESTALE: `cat` of a pipe whose name is gone, and fstat(2) of a directory that a program is in.
#[tokio::test]
async fn what_lost_its_name_is_known_until_it_is_forgotten() {
    for kind in [
        FileKind::File,
        FileKind::Directory,
        FileKind::Symlink,
        FileKind::Fifo,
        FileKind::Socket,
        FileKind::CharDevice,
        FileKind::BlockDevice,
    ] {
        for by_rename in [false, true] {
            let fs = writable().await;
            let made = remove(&fs, kind, by_rename).await;
            let left = fs.attributes(made.ino).await.expect("known");
            assert!(left.ctime >= made.ctime);
            let wanted = Attributes { nlink: 0, ctime: left.ctime, ..made };
            assert_eq!(left, wanted, "{kind:?}, {by_rename}");
            fails(fs.xattr(left.ino, b"user.a", 10).await, libc::ENODATA);
            assert_eq!(fs.xattrs(left.ino, 0).await, Ok(XattrReply::Size(0)));
            assert!(fs.forget(left.ino, fs.lookups(left.ino)).is_none());
            fails(fs.attributes(left.ino).await, libc::ENOENT);
            fails(fs.xattr(left.ino, LIST, 10).await, libc::ENOENT);
        }
    }
}

#[tokio::test]
async fn one_of_two_names_takes_nothing_away() {
    let fs = writable().await;
    let made = fs.make_node(CALLER, ROOT, b"a", FileKind::Fifo, 0o600, 0).await.expect("mknod");
    fs.link(made.ino, ROOT, b"b").await.expect("link");
    fs.unlink(ROOT, b"a").await.expect("unlink");
    assert_eq!(fs.attributes(made.ino).await.expect("it is there").nlink, 1);
    fs.unlink(ROOT, b"b").await.expect("unlink");
    assert_eq!(fs.attributes(made.ino).await.expect("known").nlink, 0);
}

/// A descriptor that was opened by O_PATH outlives one that wrote.
#[tokio::test]
async fn a_file_that_was_open_is_known_as_it_was_last() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "x").await;
    let handle = open(&fs, ino, libc::O_RDWR).await.expect("open");
    fs.unlink(ROOT, b"f").await.expect("unlink");
    fs.write(ino, handle, 0, "longer".into()).await.expect("write");
    let mode = Change { mode: Some(0o600), ..Change::default() };
    fs.set_attributes(ino, mode, true).await.expect("fchmod");
    fs.release(handle).await.expect("release");
    let left = fs.attributes(ino).await.expect("known");
    assert_eq!((left.size, left.mode, left.nlink), (6, 0o600, 0));
    fails(fs.open(ino, OpenFlags(libc::O_RDONLY)).await, libc::ENOENT);
    fails(fs.set_attributes(ino, Change { size: Some(0), ..Change::default() }, true).await, libc::ENOENT);
}

#[tokio::test]
async fn what_lost_its_name_keeps_its_access_list_and_takes_changes() {
    let fs = writable().await;
    let ino = fs.make_directory(CALLER, ROOT, b"d", 0o750).await.expect("mkdir").ino;
    fs.set_xattr(ino, LIST, list(), 0, None).await.expect("a list");
    fs.remove_directory(ROOT, b"d").await.expect("rmdir");
    assert_eq!(fs.xattr(ino, LIST, 100).await, Ok(XattrReply::Value(list())));
    assert_eq!(fs.xattrs(ino, 0).await, Ok(XattrReply::Size(LIST.len() as u32 + 1)));
    let mode = |mode| Change { mode: Some(mode), ..Change::default() };
    // The list would have to follow.
    fails(fs.set_attributes(ino, mode(0o777), true).await, libc::ENOENT);

    let pipe = remove(&fs, FileKind::Fifo, false).await.ino;
    let time = Timestamp { seconds: 5, nanos: 6 };
    let change = Change { mtime: Some(TimeChange::At(time)), ..mode(0o6755) };
    fs.set_attributes(pipe, change, true).await.expect("fchmod and futimens");
    let owner = Change { uid: Some(3), ..Change::default() };
    let changed = fs.set_attributes(pipe, owner, true).await.expect("fchown");
    assert_eq!((changed.mode, changed.mtime, changed.uid), (0o755, time, 3));
    assert_eq!(fs.attributes(pipe).await, Ok(changed));
}
