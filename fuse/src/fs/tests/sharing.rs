//! Dataset mounts: no handles, files kept open by inode until they are forgotten.

use super::*;

#[tokio::test]
async fn a_dataset_mount_answers_no_open_and_reads_by_inode() {
    let fs = dataset(&[("a/one", "1"), ("a/two", "22"), ("three", "333")]).await;
    let directory = find(&fs, ROOT, "a").await.ino;
    let file = find(&fs, directory, "two").await.ino;
    fails(fs.open(file, OpenFlags(libc::O_RDONLY)).await, libc::ENOSYS);
    fails(fs.open_directory(), libc::ENOSYS);
    fails(fs.close(Handle::NONE, 0).await, libc::ENOSYS);
    fails(fs.xattr(file, b"user.a", 0).await, libc::ENOSYS);
    for _ in 0..2 {
        assert_eq!(fs.read(file, Handle::NONE, 0, 100).await, Ok("22".into()));
    }
    let mut names = Vec::new();
    let take = |_, entry: &crate::fs::Listed| {
        names.push(String::from_utf8_lossy(entry.name()).into_owned());
        true
    };
    fs.read_directory(ROOT, Handle::NONE, 0, true, take).await.expect("readdirplus");
    assert_eq!(names, [".", "..", "a", "three"]);
}

#[tokio::test]
async fn a_dataset_mount_refuses_changes() {
    let fs = dataset(&[("one", "1")]).await;
    let ino = find(&fs, ROOT, "one").await.ino;
    fails(fs.make_directory(CALLER, ROOT, b"d", 0o755).await, libc::EROFS);
    fails(fs.unlink(ROOT, b"one").await, libc::EROFS);
    fails(fs.rename(CALLER, (ROOT, b"one"), (ROOT, b"two"), 0).await, libc::EROFS);
    let size = crate::fs::Change { size: Some(0), ..Default::default() };
    fails(fs.set_attributes(ino, size, true).await, libc::EROFS);
    assert_eq!(fs.sync_directory(ROOT).await, Ok(()), "there is nothing to sync");
    let space = fs.space().await.expect("statfs");
    assert_eq!((space.free_bytes, space.free_inodes), (0, 0));
}

#[tokio::test]
async fn forgetting_an_inode_closes_its_file() {
    let fs = dataset(&[("one", "1")]).await;
    let ino = find(&fs, ROOT, "one").await.ino;
    fs.read(ino, Handle::NONE, 0, 1).await.expect("read");
    assert!(fs.shared_files.get(ino).is_some());
    fs.forget(ino, 1).expect("a file to release").await;
    assert!(fs.shared_files.get(ino).is_none());
}

#[tokio::test]
async fn statfs_of_a_writable_mount_has_room() {
    let fs = writable().await;
    put(&fs, ROOT, "f", "12345").await;
    let space = fs.space().await.expect("statfs");
    assert!(space.free_bytes > 1 << 40 && space.free_inodes > 1 << 30, "{space:?}");
    assert_eq!((space.used_bytes, space.used_inodes), (5, 2));
}
