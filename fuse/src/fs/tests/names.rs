//! mkdir, mknod, symlink, link, unlink, rmdir, rename, lookup counts and attributes.

use bytes::Bytes;
use forebay_core::{Appearance, FileKind, Timestamp};
use futures::FutureExt;

use super::*;
use crate::fs::{Change, TimeChange, Write, XattrReply};

#[tokio::test]
async fn every_reference_is_counted_and_forgotten() {
    let fs = writable().await;
    let directory = fs.make_directory(CALLER, ROOT, b"d", 0o755).await.expect("mkdir").ino;
    assert_eq!(fs.lookups(directory), 1, "mkdir hands one out");
    find(&fs, ROOT, "d").await;
    assert_eq!(fs.lookup(ROOT, b"none").await, Ok(None));
    assert_eq!(fs.lookups(directory), 2);
    let file = put(&fs, directory, "f", "x").await;
    fs.link(file, ROOT, b"g").await.expect("link");
    assert_eq!(fs.lookups(file), 2, "create and link hand one out each");
    fails(fs.make_directory(CALLER, ROOT, b"d", 0o755).await, libc::EEXIST);
    assert_eq!(fs.lookups(directory), 2, "a refused mkdir hands out none");
    assert!(fs.forget(file, 2).is_none());
    assert_eq!(fs.lookups(file), 0);
}

#[tokio::test]
async fn new_inodes_have_kind_mode_and_owner() {
    let fs = writable().await;
    let made = [
        (fs.make_directory(CALLER, ROOT, b"dir", 0o1750).await, FileKind::Directory, 0o1750, 0),
        (fs.make_node(CALLER, ROOT, b"fifo", FileKind::Fifo, 0o600, 9).await, FileKind::Fifo, 0o600, 0),
        (
            fs.make_node(CALLER, ROOT, b"null", FileKind::CharDevice, 0o666, 259).await,
            FileKind::CharDevice,
            0o666,
            259,
        ),
        (fs.make_symlink(CALLER, ROOT, b"link", "there".into()).await, FileKind::Symlink, 0o777, 0),
    ];
    for (attributes, kind, mode, rdev) in made {
        let found = attributes.expect("made");
        assert_eq!((found.kind, found.mode, found.rdev), (kind, mode, rdev));
        assert_eq!((found.uid, found.gid), (CALLER.uid, CALLER.gid));
    }
    let link = find(&fs, ROOT, "link").await.ino;
    assert_eq!(fs.read_link(link).await, Ok(Bytes::from("there")));
    fails(fs.make_symlink(CALLER, ROOT, b"empty", Bytes::new()).await, libc::ENOENT);
    fails(fs.make_symlink(CALLER, ROOT, b"long", vec![b'x'; 4096].into()).await, libc::ENAMETOOLONG);
    fails(fs.make_directory(CALLER, ROOT, &[b'n'; 256], 0o755).await, libc::ENAMETOOLONG);
    fails(fs.make_node(CALLER, ROOT, b"odd", FileKind::Directory, 0, 0).await, libc::EINVAL);
}

#[tokio::test]
async fn renames_replace_refuse_and_exchange() {
    let fs = writable().await;
    let (a, b) = (put(&fs, ROOT, "a", "A").await, put(&fs, ROOT, "b", "B").await);
    fails(fs.rename(CALLER, (ROOT, b"a"), (ROOT, b"b"), libc::RENAME_NOREPLACE).await, libc::EEXIST);
    let both = libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE;
    fails(fs.rename(CALLER, (ROOT, b"a"), (ROOT, b"b"), both).await, libc::EINVAL);
    fails(fs.rename(CALLER, (ROOT, b"none"), (ROOT, b"b"), 0).await, libc::ENOENT);
    fs.rename(CALLER, (ROOT, b"a"), (ROOT, b"b"), libc::RENAME_EXCHANGE).await.expect("exchange");
    assert_eq!((find(&fs, ROOT, "a").await.ino, find(&fs, ROOT, "b").await.ino), (b, a));
    fs.rename(CALLER, (ROOT, b"a"), (ROOT, b"b"), 0).await.expect("replace");
    assert_eq!(find(&fs, ROOT, "b").await.ino, b);
    assert_eq!(fs.lookup(ROOT, b"a").await, Ok(None));
    assert_eq!(content(&fs, b).await, "B");
    fs.rename(CALLER, (ROOT, b"b"), (ROOT, b"c"), libc::RENAME_WHITEOUT).await.expect("leaves a whiteout");
    let left = find(&fs, ROOT, "b").await;
    assert_eq!((left.kind, left.mode, left.rdev), (FileKind::CharDevice, 0, 0));
    assert_eq!((left.uid, left.gid, left.nlink), (CALLER.uid, CALLER.gid, 1));
    assert_eq!(find(&fs, ROOT, "c").await.ino, b);
    let refuses = libc::RENAME_WHITEOUT | libc::RENAME_NOREPLACE;
    fails(fs.rename(CALLER, (ROOT, b"c"), (ROOT, b"b"), refuses).await, libc::EEXIST);
    let both = libc::RENAME_WHITEOUT | libc::RENAME_EXCHANGE;
    fails(fs.rename(CALLER, (ROOT, b"c"), (ROOT, b"b"), both).await, libc::EINVAL);
    fs.rename(CALLER, (ROOT, b"c"), (ROOT, b"b"), libc::RENAME_WHITEOUT).await.expect("takes its place");
    assert_eq!((find(&fs, ROOT, "b").await.ino, content(&fs, b).await), (b, "B".into()));
    assert_eq!(find(&fs, ROOT, "c").await.kind, FileKind::CharDevice);
}

#[tokio::test]
async fn directories_refuse_what_would_lose_names() {
    let fs = writable().await;
    let directory = fs.make_directory(CALLER, ROOT, b"d", 0o755).await.expect("mkdir").ino;
    put(&fs, directory, "f", "x").await;
    fs.make_directory(CALLER, ROOT, b"e", 0o755).await.expect("mkdir");
    fails(fs.remove_directory(ROOT, b"d").await, libc::ENOTEMPTY);
    fails(fs.rename(CALLER, (ROOT, b"e"), (ROOT, b"d"), 0).await, libc::ENOTEMPTY);
    fails(fs.rename(CALLER, (ROOT, b"d"), (directory, b"inside"), 0).await, libc::EINVAL);
    fails(fs.rename(CALLER, (ROOT, b"e"), (directory, b"f"), 0).await, libc::ENOTDIR);
    fails(fs.rename(CALLER, (directory, b"f"), (ROOT, b"e"), 0).await, libc::EISDIR);
    fails(fs.remove_directory(directory, b"f").await, libc::ENOTDIR);
    fails(fs.unlink(ROOT, b"none").await, libc::ENOENT);
    // As another host may have done, so that the kernel looks for the directory that is there by now.
    fs.unlink(directory, b"f").await.expect("unlink");
    fs.remove_directory(ROOT, b"d").await.expect("rmdir");
    fails(fs.unlink(directory, b"f").await, libc::ESTALE);
    fails(fs.remove_directory(directory, b"f").await, libc::ESTALE);
    fails(fs.rename(CALLER, (ROOT, b"e"), (directory, b"e"), 0).await, libc::ESTALE);
}

#[tokio::test]
async fn attributes_change_as_asked_and_only_that() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "0123456789").await;
    let before = fs.attributes(ino).await.expect("stat");
    let time = Timestamp { seconds: -5, nanos: 7 };
    let change = Change { mode: Some(0o600), mtime: Some(TimeChange::At(time)), ..Change::default() };
    let after = fs.set_attributes(ino, change, true).await.expect("chmod and utimes");
    assert_eq!((after.mode, after.mtime, after.atime, after.size), (0o600, time, before.atime, 10));
    let now = Change { atime: Some(TimeChange::Now), ..Change::default() };
    let after = fs.set_attributes(ino, now, true).await.expect("UTIME_NOW");
    assert!(after.atime >= before.mtime && after.mtime == time);
    let owner = Change { uid: Some(5), gid: Some(6), ..Change::default() };
    let after = fs.set_attributes(ino, owner, true).await.expect("chown");
    assert_eq!((after.uid, after.gid), (5, 6));
    for size in [4, 12] {
        let after = fs.set_attributes(ino, Change { size: Some(size), ..Change::default() }, true).await;
        assert_eq!(after.expect("truncate").size, size);
    }
    assert_eq!(content(&fs, ino).await, "0123\0\0\0\0\0\0\0\0");
    assert_eq!(fs.set_attributes(ino, Change::default(), true).await, fs.attributes(ino).await);
}

/// Whoever mounts has the files of a bucket by default: those of root could not be written to, and a later `--uid` changed nothing.
#[tokio::test]
async fn what_nobody_gave_an_owner_is_shown_as_each_mount_says() {
    let bucket = Bucket::in_memory();
    for path in ["a", "d/b"] {
        let path = forebay_core::ObjectKey::new(path);
        bucket.put(&path, "x".into(), forebay_io::object::Condition::Always).await.expect("put");
    }
    let volume = volume(&bucket, false).await;
    let mount = |uid, gid, file_mode, directory_mode| {
        let appearance = Appearance { uid, gid, file_mode, directory_mode };
        FileSystem::new(volume.clone(), Policy { appearance, ..policy(false) }, Clock::system())
    };
    let shown = async |fs: &FileSystem, name: &str| {
        let found = find(fs, ROOT, name).await;
        let mut listed = None;
        let handle = fs.open_directory().expect("opendir");
        let take = |_, entry: &crate::fs::Listed| {
            if let crate::fs::Listed::Name(known, attributes) = entry
                && known == name
            {
                listed = Some(attributes.clone());
            }
            true
        };
        fs.read_directory(ROOT, handle, 0, true, take).await.expect("readdirplus");
        fs.release_directory(handle).expect("released");
        assert_eq!(listed.as_ref(), Some(&found), "each way to ask tells the same");
        assert_eq!(fs.attributes(found.ino).await.as_ref(), Ok(&found));
        (found.uid, found.gid, found.mode)
    };
    let root = |fs: &FileSystem| fs.attributes(ROOT).now_or_never().expect("at once").expect("stat");
    let (first, second) = (mount(1000, 100, 0o644, 0o755), mount(7, 8, 0o600, 0o700));
    assert_eq!(
        (shown(&first, "a").await, shown(&first, "d").await),
        ((1000, 100, 0o644), (1000, 100, 0o755))
    );
    assert_eq!((shown(&second, "a").await, shown(&second, "d").await), ((7, 8, 0o600), (7, 8, 0o700)));
    assert_eq!((root(&first).uid, root(&second).uid, root(&second).mode), (1000, 7, 0o700));
    let ino = find(&first, ROOT, "a").await.ino;
    let group = Change { gid: Some(0), ..Change::default() };
    let changed = first.set_attributes(ino, group, true).await.expect("chgrp");
    assert_eq!((changed.uid, changed.gid, changed.mode), (1000, 0, 0o644));
    assert_eq!(shown(&second, "a").await, (7, 0, 0o600), "the rest is nobody's still");
    let mode = Change { mode: Some(0o2775), ..Change::default() };
    let directory = find(&first, ROOT, "d").await.ino;
    first.set_attributes(directory, mode, true).await.expect("chmod");
    assert_eq!(shown(&second, "d").await, (7, 8, 0o2775));
    let made = first.make_node(CALLER, directory, b"new", FileKind::File, 0o640, 0).await.expect("mknod");
    assert_eq!(
        (made.uid, made.gid, made.mode),
        (CALLER.uid, 100, 0o640),
        "it takes the group from the directory"
    );
    let list = Bytes::from_static(&[
        2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255,
        255, 255,
    ]);
    first.set_xattr(ino, b"system.posix_acl_access", list, 0, None).await.expect("setfacl");
    assert_eq!((shown(&first, "a").await.2, shown(&second, "a").await.2), (0o640, 0o640));
}

#[tokio::test]
async fn set_id_bits_go_when_others_change_the_content() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "x").await;
    let mode = |mode| Change { mode: Some(mode), ..Change::default() };
    let size = Change { size: Some(0), ..Change::default() };
    for (given, kept_by_root, left_by_others) in [(0o6755, 0o6755, 0o755), (0o2640, 0o2640, 0o2640)] {
        fs.set_attributes(ino, mode(given), true).await.expect("chmod");
        let by_root = fs.set_attributes(ino, size.clone(), true).await.expect("truncate");
        assert_eq!(by_root.mode, kept_by_root);
        let by_others = fs.set_attributes(ino, size.clone(), false).await.expect("truncate");
        assert_eq!(by_others.mode, left_by_others, "set-gid without group execution is no set-id bit");
    }
    fs.set_attributes(ino, mode(0o4755), true).await.expect("chmod");
    let handle = open(&fs, ino, libc::O_WRONLY).await.expect("open");
    let write = Write { clears_setid: true, ..0.into() };
    fs.write(ino, handle, write, "y".into()).await.expect("write");
    assert_eq!(fs.attributes(ino).await.expect("stat").mode, 0o755);
    fs.release(handle).await.expect("release");
}

/// chown(2) with neither user nor group: Linux takes them from all but directories.
#[tokio::test]
async fn set_id_bits_go_when_an_owner_is_asked_for_that_is_none() {
    let fs = writable().await;
    for kind in
        [FileKind::File, FileKind::Fifo, FileKind::Socket, FileKind::CharDevice, FileKind::BlockDevice]
    {
        let name = format!("{kind:?}");
        let made = fs.make_node(CALLER, ROOT, name.as_bytes(), kind, 0o644, 0x103).await.expect("mknod");
        let mode = Change { mode: Some(0o6755), ..Change::default() };
        fs.set_attributes(made.ino, mode, true).await.expect("chmod");
        let after = fs.set_attributes(made.ino, Change::default(), true).await.expect("chown");
        assert_eq!(after.mode, 0o755, "{name}");
    }
    let directory = fs.make_directory(CALLER, ROOT, b"d", 0o2755).await.expect("mkdir").ino;
    let mode = Change { mode: Some(0o2755), ..Change::default() };
    fs.set_attributes(directory, mode, true).await.expect("chmod");
    let after = fs.set_attributes(directory, Change::default(), true).await.expect("chown");
    assert_eq!(after.mode, 0o2755);
}

#[tokio::test]
async fn extended_attributes_probe_sizes_and_keep_limits() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "x").await;
    fails(fs.xattr(ino, b"user.a", 0).await, libc::ENODATA);
    fails(fs.set_xattr(ino, b"user.a", "1".into(), libc::XATTR_REPLACE, None).await, libc::ENODATA);
    fs.set_xattr(ino, b"user.a", "12345".into(), libc::XATTR_CREATE, None).await.expect("set");
    fails(fs.set_xattr(ino, b"user.a", "1".into(), libc::XATTR_CREATE, None).await, libc::EEXIST);
    fs.set_xattr(ino, b"user.b", Bytes::new(), 0, None).await.expect("an empty value is one");
    assert_eq!(fs.xattr(ino, b"user.a", 0).await, Ok(XattrReply::Size(5)));
    fails(fs.xattr(ino, b"user.a", 4).await, libc::ERANGE);
    assert_eq!(fs.xattr(ino, b"user.a", 5).await, Ok(XattrReply::Value("12345".into())));
    assert_eq!(fs.xattrs(ino, 0).await, Ok(XattrReply::Size(14)));
    fails(fs.xattrs(ino, 13).await, libc::ERANGE);
    assert_eq!(fs.xattrs(ino, 14).await, Ok(XattrReply::Value("user.a\0user.b\0".into())));
    fails(fs.set_xattr(ino, b"user.c", vec![0; 65_537].into(), 0, None).await, libc::E2BIG);
    fails(fs.set_xattr(ino, b"user.c", "1".into(), 4, None).await, libc::EINVAL);
    // XATTR_CREATE and XATTR_REPLACE at once.
    fails(fs.set_xattr(ino, b"user.a", "1".into(), 3, None).await, libc::EEXIST);
    fails(fs.set_xattr(ino, b"user.c", "1".into(), 3, None).await, libc::ENODATA);
    fails(fs.set_xattr(ino, &[b'x'; 256], "1".into(), 0, None).await, libc::ERANGE);
    fails(fs.set_xattr(ino, b"system.posix_acl_access", "1".into(), 0, None).await, libc::EINVAL);
    fails(fs.set_xattr(ino, b"system.other", "1".into(), 0, None).await, libc::EOPNOTSUPP);
    fs.remove_xattr(ino, b"user.a").await.expect("remove");
    fails(fs.remove_xattr(ino, b"user.a").await, libc::ENODATA);
}

/// Found by the reference model (`tests/tests/model.rs`): taking away a list that was not there failed with ENODATA.
#[tokio::test]
async fn an_access_control_list_that_is_not_there_is_taken_away() {
    let fs = writable().await;
    let (file, folder) = (put(&fs, ROOT, "f", "1").await, InodeId::ROOT);
    for (ino, name) in [(file, "access"), (folder, "access"), (folder, "default")] {
        let name = format!("system.posix_acl_{name}");
        fs.remove_xattr(ino, name.as_bytes()).await.expect("nothing to take away");
        fails(fs.xattr(ino, name.as_bytes(), 100).await, libc::ENODATA);
    }
}

/// Found by the reference model (`tests/tests/model.rs`): set-id bits stayed where chown(2) names neither user nor group.
#[tokio::test]
async fn a_chown_to_nobody_takes_set_id_bits_away() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "1").await;
    let mode = crate::fs::Change { mode: Some(0o6755), ..Default::default() };
    assert_eq!(fs.set_attributes(ino, mode, true).await.expect("chmod").mode, 0o6755);
    let changed = fs.set_attributes(ino, Default::default(), true).await.expect("chown");
    assert_eq!(changed.mode, 0o755);
}
