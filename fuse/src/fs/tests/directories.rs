//! Listing directories that change while they are read.

use std::collections::BTreeSet;

use forebay_io::object::Faults;
use forebay_metadata::kv::{SlateEngine, SlateSettings};
use futures::FutureExt;

use super::*;

/// Names of one READDIR of at most `room` entries after `offset`, with the number to go on from.
async fn page(fs: &FileSystem, ino: InodeId, handle: Handle, offset: u64, room: usize) -> (Vec<String>, u64) {
    let (mut names, mut last) = (Vec::new(), offset);
    let take = |number, entry: &crate::fs::Listed| {
        if names.len() == room {
            return false;
        }
        names.push(String::from_utf8_lossy(entry.name()).into_owned());
        last = number;
        true
    };
    fs.read_directory(ino, handle, offset, false, take).await.expect("readdir");
    (names, last)
}

/// All names, `room` at a time, with `between` called after every page.
async fn list(
    fs: &FileSystem,
    ino: InodeId,
    handle: Handle,
    room: usize,
    mut between: impl AsyncFnMut(&[String]),
) -> Vec<String> {
    let (mut all, mut offset) = (Vec::new(), 0);
    loop {
        let (names, last) = page(fs, ino, handle, offset, room).await;
        if names.is_empty() {
            return all;
        }
        between(&names).await;
        all.extend(names);
        offset = last;
    }
}

async fn filled(fs: &FileSystem, count: usize) -> InodeId {
    let ino = fs.make_directory(CALLER, ROOT, b"d", 0o755).await.expect("mkdir").ino;
    for number in 0..count {
        let kind = forebay_core::FileKind::File;
        fs.make_node(CALLER, ino, name(number).as_bytes(), kind, 0o644, 0).await.expect("mknod");
    }
    ino
}

fn name(number: usize) -> String {
    format!("n{number:05}")
}

fn with_dots(numbers: impl IntoIterator<Item = usize>) -> Vec<String> {
    [".".to_owned(), "..".to_owned()].into_iter().chain(numbers.into_iter().map(name)).collect()
}

#[tokio::test]
async fn every_name_comes_once_whatever_the_room() {
    let fs = writable().await;
    let ino = filled(&fs, 300).await;
    for room in [1, 2, 3, 100, 127, 128, 129, 1000] {
        let handle = fs.open_directory().expect("opendir");
        assert_eq!(list(&fs, ino, handle, room, async |_| {}).await, with_dots(0..300), "room for {room}");
        fs.release_directory(handle).expect("releasedir");
    }
    assert_eq!(fs.open_handles(), 0);
}

#[tokio::test]
async fn the_dots_have_their_inodes() {
    let fs = writable().await;
    let ino = filled(&fs, 0).await;
    let handle = fs.open_directory().expect("opendir");
    let mut found = Vec::new();
    let take = |number, entry: &crate::fs::Listed| {
        found.push((number, entry.ino()));
        true
    };
    fs.read_directory(ino, handle, 0, false, take).await.expect("readdir");
    assert_eq!(found, [(1, ino), (2, ROOT)]);
}

/// `rm -r` and `mv` loops: names go while the directory is read.
#[tokio::test]
async fn removing_what_was_read_skips_nothing() {
    let fs = writable().await;
    let ino = filled(&fs, 500).await;
    let handle = fs.open_directory().expect("opendir");
    let all = list(&fs, ino, handle, 37, async |names| {
        for name in names.iter().filter(|name| !name.starts_with('.')) {
            fs.unlink(ino, name.as_bytes()).await.expect("unlink");
        }
    })
    .await;
    assert_eq!(all, with_dots(0..500));
    assert_eq!(page(&fs, ino, handle, 0, 10).await.0, with_dots([]), "rewound, the directory is empty");
}

#[tokio::test]
async fn what_stays_comes_once_while_others_come_and_go() {
    let fs = writable().await;
    let ino = filled(&fs, 400).await;
    let handle = fs.open_directory().expect("opendir");
    let mut turn = 0;
    let all = list(&fs, ino, handle, 50, async |_| {
        turn += 1;
        for number in (turn % 2..400).step_by(2).filter(|number| number % 10 != 0) {
            let name = format!("{}x{turn}", name(number));
            put(&fs, ino, &name, "").await;
        }
        // Every tenth name stays, others go in turns.
        for number in (0..400).filter(|number| number % 10 == turn % 10 && number % 10 != 0) {
            let _ = fs.unlink(ino, name(number).as_bytes()).await;
        }
    })
    .await;
    let distinct: BTreeSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len(), "no name comes twice");
    for number in (0..400).step_by(10) {
        assert!(distinct.contains(&name(number)), "{} was there all the time", name(number));
    }
}

#[tokio::test]
async fn seeking_back_and_rewinding_work() {
    let fs = writable().await;
    let ino = filled(&fs, 3000).await;
    let handle = fs.open_directory().expect("opendir");
    list(&fs, ino, handle, 500, async |_| {}).await;
    for offset in [2, 3, 600, 1026, 2999] {
        let (names, _) = page(&fs, ino, handle, offset, 2).await;
        let first = offset as usize - 2;
        assert_eq!(names, [name(first), name(first + 1)], "after {offset}");
    }
    put(&fs, ino, "a-new-one", "").await;
    assert_eq!(page(&fs, ino, handle, 0, 3).await.0, [".", "..", "a-new-one"], "rewinddir sees what is new");
}

#[tokio::test]
async fn only_names_taken_with_their_attributes_are_references() {
    let fs = writable().await;
    let ino = filled(&fs, 3).await;
    let (handle, first) = (fs.open_directory().expect("opendir"), find(&fs, ino, &name(0)).await.ino);
    let second = find(&fs, ino, &name(1)).await.ino;
    let mut room = 3;
    let take = |_, _: &crate::fs::Listed| {
        room -= 1;
        room >= 0
    };
    fs.read_directory(ino, handle, 0, true, take).await.expect("readdirplus");
    // One for mknod, one for the lookup, and one for the listing of the first.
    assert_eq!((fs.lookups(first), fs.lookups(second), fs.lookups(ino)), (3, 2, 1));
}

#[tokio::test]
async fn a_listing_shows_writes_not_committed_yet() {
    let fs = writable().await;
    let ino = filled(&fs, 1).await;
    let file = find(&fs, ino, &name(0)).await.ino;
    let handle = open(&fs, file, libc::O_WRONLY).await.expect("open");
    fs.write(file, handle, 0, "pending".into()).await.expect("write");
    let (directory, mut sizes) = (fs.open_directory().expect("opendir"), Vec::new());
    let take = |_, entry: &crate::fs::Listed| {
        if let crate::fs::Listed::Name(_, attributes) = entry {
            sizes.push(attributes.size);
        }
        true
    };
    fs.read_directory(ino, directory, 0, true, take).await.expect("readdirplus");
    assert_eq!(sizes, [7]);
    fs.release(handle).await.expect("release");
}

/// Promise S31: A position in a directory (telldir, or where a listing goes on) leads to the same place for as long as
/// the directory is open, whatever came and went meanwhile; what was there all the time is listed exactly once.
#[tokio::test]
async fn positions_stay_while_names_come_and_go() {
    let fs = writable().await;
    let ino = filled(&fs, 500).await;
    let handle = fs.open_directory().expect("opendir");
    let (first, at_100) = page(&fs, ino, handle, 0, 102).await;
    let (_, at_400) = page(&fs, ino, handle, at_100, 300).await;
    assert_eq!(first, with_dots(0..100));
    for number in (0..500).step_by(3) {
        fs.unlink(ino, name(number).as_bytes()).await.expect("unlink");
        let extra = format!("{}x", name(number));
        let kind = forebay_core::FileKind::File;
        fs.make_node(CALLER, ino, extra.as_bytes(), kind, 0o644, 0).await.expect("mknod");
    }
    for _ in 0..2 {
        assert_eq!(page(&fs, ino, handle, at_100, 3).await.0, ["n00099x", "n00100", "n00101"]);
        assert_eq!(page(&fs, ino, handle, at_400, 3).await.0, ["n00399x", "n00400", "n00401"]);
    }
    assert_eq!(page(&fs, ino, handle, 0, 4).await.0, [".", "..", "n00000x", "n00001"]);
}

/// An error on a later page took back what was listed before it, and the kernel never gave up references that it had not
/// heard of.
#[tokio::test]
async fn what_was_taken_before_an_error_is_listed() {
    let engine: Arc<dyn Engine> = Arc::new(MemEngine::new());
    let volume = over(engine.clone(), &Bucket::in_memory(), false, WriteSettings::default()).await;
    let fs = FileSystem::new(volume, policy(false), Clock::system());
    let ino = filled(&fs, 300).await;
    fs.sync_directory(ROOT).await.expect("synced");
    let handle = fs.open_directory().expect("opendir");
    let (mut names, mut last) = (Vec::new(), 0);
    let take = |number, entry: &crate::fs::Listed| {
        if names.len() == 2 {
            // The first page is there.
            engine.close().now_or_never().expect("at once").expect("closed");
        }
        names.push(entry.name().to_vec());
        last = number;
        true
    };
    fs.read_directory(ino, handle, 0, true, take).await.expect("what was taken");
    assert!(names.len() > 2 && names.len() < 302, "{} names", names.len());
    let told = fs.read_directory(ino, handle, last, true, |_, _| true).await;
    assert!(told.is_err(), "who goes on is told");
}

/// A program that synced a directory while the store was away hung until it was back.
#[tokio::test]
async fn syncing_a_directory_ends_at_the_deadline() {
    let faults = Faults::new();
    let bucket = Bucket::in_memory().with_deadline_ms(50).with_faults(&faults);
    let engine = SlateEngine::open(&bucket, &SlateSettings::default()).await.expect("a tree in the bucket");
    let write = WriteSettings { deadline_ms: 300, ..WriteSettings::default() };
    let fs =
        FileSystem::new(over(Arc::new(engine), &bucket, false, write).await, policy(false), Clock::system());
    assert_eq!(fs.sync_directory(ROOT).await, Ok(()));
    fs.make_directory(CALLER, ROOT, b"d", 0o755).await.expect("mkdir");
    faults.set_down(true);
    let limited = tokio::time::timeout(Duration::from_secs(60), fs.sync_directory(ROOT));
    fails(limited.await.expect("no hang"), libc::EIO);
    faults.set_down(false);
    // The tree tries again at its own pace.
    while fs.sync_directory(ROOT).await.is_err() {}
}
