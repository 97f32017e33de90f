//! Opening, reading, writing and closing.

use bytes::Bytes;

use super::*;

#[tokio::test]
async fn what_is_written_is_read_back() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "hello").await;
    assert_eq!(content(&fs, ino).await, "hello");
    let handle = open(&fs, ino, libc::O_RDWR).await.expect("open");
    fs.write(ino, handle, 10, "world".into()).await.expect("write");
    assert_eq!(fs.read(ino, handle, 3, 100).await, Ok(Bytes::from("lo\0\0\0\0\0world")));
    assert_eq!(fs.read(ino, handle, 15, 100).await, Ok(Bytes::new()), "at the end there is nothing");
    assert_eq!(fs.attributes(ino).await.expect("stat").size, 15, "before anything was flushed");
    fs.sync_file(handle).await.expect("fsync");
    fs.release(handle).await.expect("release");
    assert_eq!(fs.open_handles(), 0);
}

#[tokio::test]
async fn open_flags_mean_what_open_says() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "0123").await;
    let create =
        |flags| fs.create(CALLER, ROOT, b"f", 0o600, OpenFlags(libc::O_RDWR | libc::O_CREAT | flags));
    fails(create(libc::O_EXCL).await, libc::EEXIST);
    let (found, opened) = create(0).await.expect("the one there");
    assert_eq!(
        (found.ino, found.mode, found.size),
        (ino, 0o644, 4),
        "an existing file keeps mode and content"
    );
    fs.release(opened.handle).await.expect("release");
    let append = open(&fs, ino, libc::O_WRONLY | libc::O_APPEND).await.expect("append");
    let write = |flags, at, text: &'static str| {
        let position = OpenFlags(libc::O_WRONLY | flags).position(at);
        fs.write(ino, append, position, text.into())
    };
    write(libc::O_APPEND, 0, "45").await.expect("append");
    write(0, 0, "0").await.expect("the flag was taken away since");
    let pieces = libc::O_APPEND | libc::O_DIRECT;
    for (at, text) in [(10, "AB"), (8, "89"), (12, "C"), (6, "6"), (7, "7")] {
        write(pieces, at, text).await.expect("a piece of one long append");
    }
    assert_eq!(content(&fs, ino).await, "0123456789ABC");
    write(pieces, 6, "DE").await.expect("by somebody who does not know of those");
    assert_eq!(content(&fs, ino).await, "0123456789ABCDE");
    fs.release(append).await.expect("release");
    assert_eq!(content(&fs, ino).await, "0123456789ABCDE");
    for access in [libc::O_WRONLY, libc::O_RDONLY] {
        let handle = open(&fs, ino, access).await.expect("open");
        let empty = crate::fs::Change { size: Some(0), ..Default::default() };
        assert_eq!(fs.set_attributes(ino, empty, true).await.expect("truncate").size, 0);
        assert_eq!(fs.attributes(ino).await.expect("stat").size, 0);
        fs.release(handle).await.expect("release");
        put_content(&fs, ino, "again").await;
    }
    let (found, opened) = create(libc::O_TRUNC).await.expect("truncate");
    assert_eq!(found.size, 0);
    fs.release(opened.handle).await.expect("release");
    fails(open(&fs, ino, libc::O_ACCMODE).await, libc::EINVAL);
    fails(fs.create(CALLER, ROOT, b"f/g", 0o600, OpenFlags(libc::O_CREAT)).await, libc::EINVAL);
}

/// What is only written does not fill the kernel's page cache; what it would have done there is done here.
#[tokio::test]
async fn handles_that_only_write_are_direct_and_clear_capabilities() {
    let fs = writable().await;
    let create = OpenFlags(libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL);
    let (made, opened) = fs.create(CALLER, ROOT, b"f", 0o755, create).await.expect("create");
    assert!(opened.direct);
    fs.release(opened.handle).await.expect("release");
    for (access, direct) in [(libc::O_RDONLY, false), (libc::O_RDWR, false), (libc::O_WRONLY, true)] {
        fs.set_xattr(made.ino, b"security.capability", "all".into(), 0, None).await.expect("setcap");
        let opened = fs.open(made.ino, OpenFlags(access)).await.expect("open");
        assert_eq!(opened.direct, direct);
        if direct {
            fs.write(made.ino, opened.handle, 0, "x".into()).await.expect("write");
            fails(fs.xattr(made.ino, b"security.capability", 0).await, libc::ENODATA);
            fs.write(made.ino, opened.handle, 1, "y".into()).await.expect("write again");
        }
        fs.release(opened.handle).await.expect("release");
    }
}

async fn put_content(fs: &FileSystem, ino: InodeId, content: &str) {
    let handle = open(fs, ino, libc::O_WRONLY).await.expect("open");
    fs.write(ino, handle, 0, Bytes::copy_from_slice(content.as_bytes())).await.expect("write");
    fs.close(handle, 0).await.expect("flush");
    fs.release(handle).await.expect("release");
}

#[tokio::test]
async fn the_kernel_keeps_its_pages_while_the_content_stays() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "one").await;
    let keeps = async || {
        let opened = fs.open(ino, OpenFlags(libc::O_RDONLY)).await.expect("open");
        fs.release(opened.handle).await.expect("release");
        assert!(!opened.flushes, "nothing to flush after reading");
        opened.keep_cache
    };
    keeps().await;
    assert!(keeps().await, "nothing has changed since the last open");
    put_content(&fs, ino, "two").await;
    keeps().await;
    assert!(keeps().await);
    let handle = open(&fs, ino, libc::O_RDWR).await.expect("open");
    assert!(keeps().await);
    fs.write(ino, handle, 0, Bytes::from_static(b"2")).await.expect("write");
    assert!(!keeps().await, "what was written is in the pages, and may be given up");
    fs.release(handle).await.expect("release");
    keeps().await;
    assert!(keeps().await);
    let change = crate::fs::Change { size: Some(1), ..Default::default() };
    fs.set_attributes(ino, change, true).await.expect("truncate");
    assert!(!keeps().await, "another content");
}

#[tokio::test]
async fn a_removed_file_lives_until_its_last_close() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "kept").await;
    let handle = open(&fs, ino, libc::O_RDWR).await.expect("open");
    fs.unlink(ROOT, b"f").await.expect("unlink");
    assert_eq!(fs.lookup(ROOT, b"f").await, Ok(None));
    fs.write(ino, handle, 4, " on".into()).await.expect("write");
    assert_eq!(fs.read(ino, handle, 0, 100).await, Ok(Bytes::from("kept on")));
    assert_eq!(fs.attributes(ino).await.expect("fstat").nlink, 0);
    fs.close(handle, 0).await.expect("flush");
    fs.release(handle).await.expect("release");
    assert!(fs.forget(ino, fs.lookups(ino)).is_none());
    // A file that was rewritten is settled behind its last close.
    for _ in 0..1000 {
        if fs.attributes(ino).await.is_err() {
            break;
        }
        Clock::system().sleep(Duration::from_millis(5)).await;
    }
    fails(fs.attributes(ino).await, libc::ENOENT);
}

/// `open(O_RDONLY | O_CREAT)`, as `flock` and `touch` of some systems do it.
#[tokio::test]
async fn a_file_made_for_reading_is_made_and_keeps_its_times() {
    let bucket = Bucket::in_memory();
    let fs = FileSystem::new(volume(&bucket, false).await, policy(false), Clock::system());
    let flags = OpenFlags(libc::O_RDONLY | libc::O_CREAT);
    let (attributes, opened) = fs.create(CALLER, ROOT, b"f", 0o644, flags).await.expect("create");
    assert!(opened.flushes, "the kernel must say when it is closed");
    let before = fs.attributes(attributes.ino).await.expect("stat").mtime;
    fs.close(opened.handle, 0).await.expect("flush");
    fs.release(opened.handle).await.expect("release");
    assert_eq!(fs.attributes(attributes.ino).await.expect("stat").mtime, before);
    let object = bucket.head(&forebay_core::ObjectKey::new("f")).await.expect("head");
    assert_eq!(object.expect("an object").size, 0);
}

#[tokio::test]
async fn pending_changes_show_their_times() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "x").await;
    let handle = open(&fs, ino, libc::O_RDWR).await.expect("open");
    let before = fs.attributes(ino).await.expect("stat");
    fs.allocate(ino, handle, 0, 0, 100).await.expect("extend");
    let after = fs.attributes(ino).await.expect("stat");
    assert!(after.mtime > before.mtime && after.ctime > before.ctime, "{before:?} {after:?}");
    fs.release(handle).await.expect("release");
}

#[tokio::test]
async fn a_new_name_does_not_hide_what_was_not_committed_yet() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "").await;
    let handle = open(&fs, ino, libc::O_WRONLY).await.expect("open");
    fs.write(ino, handle, 0, "pending".into()).await.expect("write");
    assert_eq!(fs.link(ino, ROOT, b"g").await.expect("link").size, 7);
    assert_eq!(find(&fs, ROOT, "g").await.size, 7);
    fs.release(handle).await.expect("release");
}

#[tokio::test]
async fn seeking_finds_data_and_holes() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "data").await;
    let handle = open(&fs, ino, libc::O_RDWR).await.expect("open");
    fs.write(ino, handle, 1 << 20, "more".into()).await.expect("write");
    let seek = |offset, whence| fs.seek(ino, handle, offset, whence);
    assert_eq!(seek(0, libc::SEEK_DATA).await, Ok(0));
    assert_eq!(seek(0, libc::SEEK_HOLE).await, Ok(4));
    assert_eq!(seek(4, libc::SEEK_DATA).await, Ok(1 << 20));
    assert_eq!(seek(1 << 20, libc::SEEK_HOLE).await, Ok((1 << 20) + 4));
    fails(seek((1 << 20) + 4, libc::SEEK_DATA).await, libc::ENXIO);
    fails(seek(-1, libc::SEEK_DATA).await, libc::ENXIO);
    fails(seek(0, libc::SEEK_SET).await, libc::EINVAL);
    fs.release(handle).await.expect("release");
}

#[tokio::test]
async fn allocation_extends_or_refuses() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "data").await;
    let handle = open(&fs, ino, libc::O_RDWR).await.expect("open");
    fs.allocate(ino, handle, 0, 0, 100).await.expect("extend");
    assert_eq!(fs.attributes(ino).await.expect("stat").size, 100);
    fs.allocate(ino, handle, libc::FALLOC_FL_KEEP_SIZE, 0, 1000).await.expect("keep the size");
    assert_eq!(fs.attributes(ino).await.expect("stat").size, 100);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    fs.allocate(ino, handle, punch, 1, 2).await.expect("punch");
    assert_eq!(fs.read(ino, handle, 0, 4).await, Ok(Bytes::from("d\0\0a")));
    fails(fs.allocate(ino, handle, libc::FALLOC_FL_COLLAPSE_RANGE, 0, 1).await, libc::EOPNOTSUPP);
    fs.release(handle).await.expect("release");
}

#[tokio::test]
async fn stale_handles_are_refused() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "x").await;
    let handle = open(&fs, ino, libc::O_RDONLY).await.expect("open");
    fs.release(handle).await.expect("release");
    fails(fs.read(ino, handle, 0, 1).await, libc::EBADF);
    fails(fs.read(ino, Handle::NONE, 0, 1).await, libc::EBADF);
    fails(fs.close(handle, 0).await, libc::EBADF);
    fails(fs.release(handle).await, libc::EBADF);
}

#[tokio::test]
async fn what_is_still_open_is_written_at_the_end_of_the_mount() {
    let bucket = Bucket::in_memory();
    let fs = FileSystem::new(volume(&bucket, false).await, policy(false), Clock::system());
    let flags = OpenFlags(libc::O_WRONLY | libc::O_CREAT);
    let (attributes, opened) = fs.create(CALLER, ROOT, b"f", 0o644, flags).await.expect("create");
    fs.write(attributes.ino, opened.handle, 0, "late".into()).await.expect("write");
    fs.release_all().await;
    assert_eq!(fs.open_handles(), 0);
    let object = bucket.get(&forebay_core::ObjectKey::new("f"), None, 0..4).await.expect("the object");
    assert_eq!(object, "late");
}

/// An append comes to the end that the file has, also where it is shorter than the kernel knows.
///
/// After bytes were lost, the first append through a descriptor that cannot read lay past a hole of zeros.
#[tokio::test]
async fn an_append_after_a_loss_leaves_no_hole() {
    let faults = Faults::new();
    let bucket = Bucket::in_memory().with_deadline_ms(200).with_faults(&faults);
    let settings = WriteSettings { buffer_bytes: MIB, ..WriteSettings::default() };
    let volume = over(Arc::new(MemEngine::new()), &bucket, false, settings).await;
    let fs = FileSystem::new(volume, policy(false), Clock::system());
    let ino = put(&fs, ROOT, "f", "kept").await;
    let flags = OpenFlags(libc::O_WRONLY | libc::O_APPEND);
    let append = async |handle, at, text: &'static str| {
        fs.write(ino, handle, flags.position(at), text.into()).await.expect("append");
    };
    let empty = crate::fs::Change { size: Some(0), ..Default::default() };
    let handle = open(&fs, ino, libc::O_WRONLY | libc::O_APPEND).await.expect("open");
    fs.set_attributes(ino, empty, true).await.expect("truncate");
    fs.write(ino, handle, flags.position(0), vec![1; 4 << 20].into()).await.expect("an upload begins");
    faults.set_down(true);
    fails(fs.close(handle, 0).await, libc::EIO);
    faults.set_down(false);
    append(handle, 4 << 20, " and").await;
    fs.release(handle).await.expect("release");
    let next = open(&fs, ino, libc::O_WRONLY | libc::O_APPEND).await.expect("open");
    append(next, (4 << 20) + 4, " more").await;
    assert_eq!(content(&fs, ino).await, "kept and more");
    // Who has asked knows.
    assert_eq!(fs.attributes(ino).await.expect("stat").size, 13);
    append(next, 14, "!").await;
    append(next, 13, ".").await;
    assert_eq!(content(&fs, ino).await, "kept and more.!");
    fs.release(next).await.expect("release");
}
