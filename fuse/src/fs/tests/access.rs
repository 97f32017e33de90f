//! Access times as relatime has them.

use super::*;

async fn stored(fs: &FileSystem, ino: InodeId) -> forebay_core::Timestamp {
    fs.volume.tree().attributes(ino).await.expect("attributes").atime
}

#[tokio::test]
async fn a_thousand_reads_are_one_change_of_the_tree() {
    let policy = Policy { relatime: true, ..policy(false) };
    let fs = FileSystem::new(volume(&Bucket::in_memory(), false).await, policy, Clock::system());
    let ino = put(&fs, ROOT, "f", "bytes").await;
    let before = stored(&fs, ino).await;
    let handle = open(&fs, ino, libc::O_RDONLY).await.expect("open");
    for _ in 0..1000 {
        fs.read(ino, handle, 0, 5).await.expect("read");
    }
    assert_eq!(stored(&fs, ino).await, before, "reading alone changes nothing");
    let shown = fs.attributes(ino).await.expect("stat");
    assert!(shown.atime > shown.mtime, "{shown:?}");
    fs.release(handle).await.expect("release");
    let noted = stored(&fs, ino).await;
    assert_eq!(noted, shown.atime);
    content(&fs, ino).await;
    assert_eq!(stored(&fs, ino).await, noted, "it was read since the last change");
    assert_eq!(fs.attributes(ino).await.expect("stat").ctime, shown.ctime, "reading is no change");
}

#[tokio::test]
async fn without_relatime_reading_leaves_no_trace() {
    let fs = writable().await;
    let ino = put(&fs, ROOT, "f", "bytes").await;
    let before = fs.attributes(ino).await.expect("stat");
    content(&fs, ino).await;
    assert_eq!(fs.attributes(ino).await.expect("stat"), before);
}
