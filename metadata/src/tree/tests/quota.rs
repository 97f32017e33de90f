//! Quotas count exactly what is there, whatever happens, and refuse what does not fit.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{ErrorKind, FileKind, FileLayout, InodeId, Result};
use forebay_io::object::{Bucket, Faults};

use super::sharing::share;
use super::world::*;
use crate::records::Records;
use crate::schema::Tag;
use crate::testing::{Chance, rounds};
use crate::tree::{
    DirectoryQuota, Existing, LocalTree, Quota, QuotaLimits, RenameMode, Tree, Usage, resolve,
};

const ROOT: InodeId = InodeId::ROOT;

fn limits(inodes: u64, bytes: u64) -> QuotaLimits {
    QuotaLimits { bytes: Some(bytes), inodes: Some(inodes) }
}

/// More than any test has.
const WIDE: QuotaLimits = QuotaLimits { bytes: Some(1 << 40), inodes: Some(1 << 20) };

async fn set(tree: &LocalTree, path: &str, limits: QuotaLimits) -> Option<Quota> {
    let directory = resolve(tree, path).await.expect("found").ino;
    tree.set_quota(directory, limits).await.expect("set")
}

/// Inodes and bytes below a directory, as counted.
async fn used(tree: &LocalTree, path: &str) -> (i64, i64) {
    let directory = resolve(tree, path).await.expect("found").ino;
    let quota = tree.quota(directory).await.expect("looked at").expect("a quota");
    assert!(quota.is_counted);
    (quota.usage.inodes, quota.usage.bytes)
}

/// fsck counts by other means.
async fn sound(tree: &LocalTree) {
    let found = tree.fsck(false).await.expect("checked");
    assert!(found.is_clean(), "{:?}", found.findings);
}

fn is_over<T: std::fmt::Debug>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::OverQuota)
}

/// Promise S44: A directory's quota limits the inodes below it and the sum of the sizes of files below it; the quota of
/// the root is the volume's. What would go past it fails with EDQUOT: making a name at once, growing a file at the write.
#[tokio::test]
async fn what_does_not_fit_is_refused() {
    for kind in Kind::ALL {
        let world = World::new(kind).await;
        let tree = world.open().await;
        let d = make_directory(&tree, "d").await.expect("made").ino;
        make_directory(&tree, "d/e").await.expect("made");
        let quota = set(&tree, "d", limits(3, 100)).await.expect("a quota");
        assert_eq!(quota.usage, Usage { inodes: 1, bytes: 0 });
        let (file, _) = tree.create(d, b"a", new_file(), Existing::Refuse).await.expect("made");
        tree.create(d, b"b", new_file(), Existing::Refuse).await.expect("made");
        assert!(is_over(tree.create(d, b"c", new_file(), Existing::Refuse).await));
        assert!(is_over(make_directory(&tree, "d/e/f").await));
        assert!(tree.create(d, b"b", new_file(), Existing::Accept).await.is_ok(), "it is there already");
        tree.link(file.ino, d, b"link").await.expect("a further name is no inode");

        tree.reserve(file.ino, 60).await.expect("it fits");
        tree.reserve(file.ino, 60).await.expect("that was let in already");
        let b = resolve(&tree, "d/b").await.expect("found").ino;
        assert!(is_over(tree.reserve(b, 41).await), "not beside what another file is about to take");
        tree.reserve(b, 40).await.expect("it fits");
        assert!(is_over(tree.reserve(file.ino, 61).await));
        tree.opened(b).await.expect("opened");
        tree.closed(b).await.expect("closed");
        tree.reserve(file.ino, 100).await.expect("what was not written is free again");
        assert!(is_over(tree.reserve(file.ino, 101).await));
        assert!(
            tree.create(ROOT, b"free", new_file(), Existing::Refuse).await.is_ok(),
            "elsewhere there is none"
        );
        assert!(is_over(rename(&tree, "free", "d/free", RenameMode::Replace).await));
        rename(&tree, "free", "d/b", RenameMode::Replace).await.expect("one comes, one goes");
        set(&tree, "", limits(5, 1000)).await;
        let statistics = tree.statistics().await.expect("counted");
        assert_eq!(statistics.quota.map(|quota| quota.usage.inodes), Some(4));
        make_directory(&tree, "g").await.expect("made");
        assert!(is_over(make_directory(&tree, "h").await));
        assert_eq!(set(&tree, "", QuotaLimits::default()).await, None);
        make_directory(&tree, "h").await.expect("made");
        assert_eq!(used(&tree, "d").await, (3, 0));
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn bytes_count_where_the_first_name_is() {
    let mut world = World::memory().await;
    world.settings.trash_ms = 1000;
    world.put("listed/a", b"12345").await;
    let tree = world.open().await;
    for directory in ["d", "e", "listed"] {
        let _ = make_directory(&tree, directory).await;
        set(&tree, directory, WIDE).await;
    }
    set(&tree, "", WIDE).await;
    assert_eq!(used(&tree, "listed").await, (0, 0), "nobody has looked there");
    paths(&tree).await;
    assert_eq!(used(&tree, "listed").await, (1, 5));
    world.write_path(&tree, "d/f", "1234567").await.expect("written");
    let (d, e) =
        (resolve(&tree, "d").await.expect("found").ino, resolve(&tree, "e").await.expect("found").ino);
    let file = resolve(&tree, "d/f").await.expect("found").ino;
    tree.link(file, e, b"f").await.expect("linked");
    assert_eq!((used(&tree, "d").await, used(&tree, "e").await), ((1, 7), (0, 0)));
    unlink(&tree, "d/f").await.expect("unlinked");
    assert_eq!((used(&tree, "d").await, used(&tree, "e").await), ((0, 0), (1, 7)));
    rename(&tree, "e/f", "d/f", RenameMode::Replace).await.expect("renamed");
    share(&world, &tree, "d/f", "e/copy").await.expect("shared");
    assert_eq!((used(&tree, "d").await, used(&tree, "e").await), ((1, 7), (1, 7)));
    assert_eq!(used(&tree, "").await, (6, 19));
    world.write_path(&tree, "d/f", "12").await.expect("written");
    assert_eq!(used(&tree, "d").await, (1, 2));
    tree.opened(file).await.expect("opened");
    unlink(&tree, "d/f").await.expect("unlinked");
    assert_eq!((used(&tree, "d").await, used(&tree, "").await), ((0, 0), (5, 12)));
    tree.closed(file).await.expect("closed");
    sound(&tree).await;
    let id = tree.trash(None, 1).await.expect("the trash")[0].id;
    set(&tree, "d", limits(1, 1)).await;
    assert!(is_over(tree.restore(id, d, b"back").await), "what comes back has to fit");
    tree.restore(id, e, b"back").await.expect("restored");
    assert_eq!(used(&tree, "e").await, (2, 9));
    sound(&tree).await;
    set(&tree, "d", limits(9, 5)).await;
    assert!(is_over(share(&world, &tree, "e/copy", "d/copy").await), "shared bytes count, too");
    sound(&tree).await;
}

/// Promise S45: Counts are exact at every moment, also after a crash: they are changed by the same commit as what they
/// count. A file counts once, however many names it has.
#[tokio::test]
async fn directories_move_between_quotas_with_all_below_them() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        let tree = world.open().await;
        for directory in ["one", "two", "one/d", "one/d/e", "two/x"] {
            make_directory(&tree, directory).await.expect("made");
        }
        world.write_path(&tree, "one/d/e/f", "1234").await.expect("written");
        world.write_path(&tree, "two/x/f", "12").await.expect("written");
        set(&tree, "one", WIDE).await;
        set(&tree, "two", limits(4, 9)).await;
        assert_eq!((used(&tree, "one").await, used(&tree, "two").await), ((3, 4), (2, 2)));
        assert!(is_over(rename(&tree, "one/d", "two/d", RenameMode::Replace).await));
        assert_eq!((used(&tree, "one").await, used(&tree, "two").await), ((3, 4), (2, 2)));
        sound(&tree).await;
        rename(&tree, "one/d", "two/x", RenameMode::Exchange)
            .await
            .expect("what fits is what is left after both");
        assert_eq!((used(&tree, "one").await, used(&tree, "two").await), ((2, 2), (3, 4)));
        sound(&tree).await;
        rename(&tree, "two/x", "d", RenameMode::Replace).await.expect("out of both");
        assert_eq!((used(&tree, "one").await, used(&tree, "two").await), ((2, 2), (0, 0)));
        sound(&tree).await;
        let all = tree.quotas(None, 8).await.expect("a list");
        let paths: Vec<_> = all.iter().map(|one| one.path.clone()).collect();
        assert_eq!(paths, ["one", "two"], "what was counted for a move only is counted no more");
        tree.close().await.expect("closed");
    }
}

/// What comes and goes while a directory is counted for the first time is counted once.
#[tokio::test]
async fn counting_goes_on_beside_changes() {
    for kind in [Kind::Lmdb, Kind::Slate] {
        let (world, mut chance) = (World::new(kind).await, Chance::fresh());
        let tree = world.open().await;
        for directory in ["d", "d/e", "away"] {
            make_directory(&tree, directory).await.expect("made");
        }
        let place = |n: u64| format!("{}{}", ["d/", "d/e/", "away/"][n as usize % 3], n / 3 % 20);
        for n in 0..60 {
            world.write_path(&tree, &place(n), "text").await.expect("written");
        }
        for path in ["d", "d/e", ""] {
            let changes = async {
                for _ in 0..40 {
                    let (from, to) = (place(chance.below(60)), place(chance.below(60)));
                    match chance.below(4) {
                        0 => drop(unlink(&tree, &from).await),
                        1 => drop(rename(&tree, &from, &to, RenameMode::Replace).await),
                        2 => drop(world.write_path(&tree, &from, &to).await),
                        _ => drop(rename(&tree, "d/e", "away", RenameMode::Exchange).await),
                    }
                    tokio::task::yield_now().await;
                }
            };
            tokio::join!(set(&tree, path, WIDE), changes);
            sound(&tree).await;
        }
        tree.close().await.expect("closed");
    }
}

/// While the store was away, a rename that counts first hung until it was back, and so did setting a quota.
#[tokio::test]
async fn what_cannot_be_counted_while_the_store_is_away_fails_in_time() {
    let faults = Faults::new();
    let mut world = World::new(Kind::Slate).await;
    world.bucket = Some(Bucket::in_memory().with_deadline_ms(50).with_faults(&faults));
    world.committing.fetch_deadline = Duration::from_millis(300);
    let tree = world.open().await;
    for path in ["one", "two", "three", "one/d", "one/d/e"] {
        make_directory(&tree, path).await.expect("made");
    }
    set(&tree, "one", WIDE).await;
    set(&tree, "two", WIDE).await;
    let three = resolve(&tree, "three").await.expect("found").ino;
    let later = make_directory(&tree, "one/later").await.expect("made").ino;
    faults.set_down(true);
    let told = async |work: &mut (dyn Future<Output = Result<()>> + Unpin)| {
        let limited = tokio::time::timeout(Duration::from_secs(60), work).await;
        assert_eq!(limited.expect("no hang").expect_err("not counted").kind(), ErrorKind::Unavailable);
    };
    told(&mut Box::pin(rename(&tree, "one/d", "two/d", RenameMode::Replace))).await;
    told(&mut Box::pin(async { tree.set_quota(three, WIDE).await.map(drop) })).await;
    let one = resolve(&tree, "one").await.expect("found").ino;
    let before = tree.quota(one).await.expect("looked at");
    for other in [limits(1, 10), QuotaLimits::default()] {
        told(&mut Box::pin(async { tree.set_quota(one, other).await.map(drop) })).await;
        assert_eq!(tree.quota(one).await.expect("looked at"), before, "what fails changes nothing");
    }
    faults.set_down(false);
    tree.sync().await.expect("what was made before is kept");
    assert_eq!(resolve(&tree, "one/later").await.expect("found").ino, later);
    let quotas = tree.quotas(None, 10).await.expect("looked at");
    let paths: Vec<_> = quotas.iter().map(|quota| &quota.path[..]).collect();
    assert_eq!(paths, [b"one", b"two"], "nothing limits what was not counted");
    rename(&tree, "one/d", "two/d", RenameMode::Replace).await.expect("renamed");
    set(&tree, "three", WIDE).await.expect("a quota");
    assert_eq!((used(&tree, "one").await, used(&tree, "two").await), ((1, 0), (2, 0)));
    sound(&tree).await;
}

/// A count that was cut off is made at the next start; one that only a rename needed ends.
#[tokio::test]
async fn what_was_not_counted_to_the_end_is() {
    let world = World::memory().await;
    let tree = world.open().await;
    for directory in ["d", "e"] {
        make_directory(&tree, directory).await.expect("made");
    }
    world.write_path(&tree, "d/f", "1234").await.expect("written");
    let d = resolve(&tree, "d").await.expect("found").ino;
    let e = resolve(&tree, "e").await.expect("found").ino;
    tree.change(move |change| change.begin_count(d, Some(WIDE)).map(drop)).await.expect("begun");
    tree.change(move |change| change.begin_count(e, None).map(drop)).await.expect("begun");
    unlink(&tree, "d/f").await.expect("unlinked");
    world.write_path(&tree, "d/g", "12").await.expect("written");
    sound(&tree).await;
    tree.sync().await.expect("synced");
    world.crash(tree, false).await;
    let tree = world.open().await;
    assert_eq!(used(&tree, "d").await, (1, 2));
    assert_eq!(tree.quota(e).await.expect("looked at"), None);
    sound(&tree).await;
}

/// Such a directory kept the volume from being mounted, and from being checked, while it was in the trash.
#[tokio::test]
async fn a_removed_directory_that_was_not_counted_to_the_end_refuses_no_mount() {
    let mut world = World::memory().await;
    world.settings.trash_ms = 3_600_000;
    let tree = world.open().await;
    for directory in ["kept", "too", "back"] {
        let ino = make_directory(&tree, directory).await.expect("made").ino;
        let file = format!("{directory}/f");
        world.write_path(&tree, &file, "1234").await.expect("written");
        tree.change(move |change| change.begin_count(ino, Some(limits(1, 5))).map(drop))
            .await
            .expect("begun");
        unlink(&tree, &file).await.expect("unlinked");
    }
    for directory in ["kept", "too", "back"] {
        tree.remove_directory(ROOT, directory.as_bytes()).await.expect("removed");
    }
    bring_back(&tree, b"back").await;
    assert_eq!(used(&tree, "back").await, (0, 0), "it came back empty");
    let back = resolve(&tree, "back").await.expect("found").ino;
    let late = Usage { inodes: 1, bytes: 4 };
    tree.change(move |change| change.finish_count(back, late)).await.expect("a count that began before");
    assert_eq!(used(&tree, "back").await, (0, 0));
    assert_eq!(tree.quotas(None, 8).await.expect("a list").len(), 1, "those that are removed are not listed");
    tree.sync().await.expect("synced");
    world.crash(tree, false).await;

    let tree = world.open().await;
    sound(&tree).await;
    for name in ["kept", "too"] {
        bring_back(&tree, name.as_bytes()).await;
        let directory = resolve(&tree, name).await.expect("found").ino;
        tree.create(directory, b"f", new_file(), Existing::Refuse).await.expect("it fits");
        assert!(is_over(tree.create(directory, b"g", new_file(), Existing::Refuse).await));
        assert_eq!(used(&tree, name).await, (1, 0));
    }
    assert_eq!(tree.quotas(None, 1).await.expect("a list").len(), 1);
    assert_eq!(tree.quotas(None, 8).await.expect("a list").len(), 3);
    sound(&tree).await;
}

/// Brings the directory of that name back from the trash.
async fn bring_back(tree: &LocalTree, name: &[u8]) {
    let trash = tree.trash(None, 16).await.expect("the trash");
    let found = trash.iter().find(|one| one.path == name).expect("in the trash");
    tree.restore(found.id, ROOT, name).await.expect("restored");
}

#[tokio::test]
async fn a_quota_that_cannot_be_read_refuses_no_mount() {
    let world = World::memory().await;
    let tree = world.open().await;
    make_directory(&tree, "x").await.expect("made");
    for directory in ["d", "e", "x/f"] {
        make_directory(&tree, directory).await.expect("made");
        set(&tree, directory, limits(1, 5)).await;
    }
    let d = resolve(&tree, "d").await.expect("found").ino;
    let f = resolve(&tree, "x/f").await.expect("found").ino;
    let uncounted = Quota { limits: WIDE, ..Quota::default() };
    let spoil = move |change: &mut crate::records::Change<'_, '_>| {
        let keys = change.keys();
        change.put(keys.quota(d), Bytes::from_static(b"?"))?;
        // One that is to be counted, and whose directory cannot be read.
        change.put(keys.quota(f), uncounted.encode())?;
        change.put(keys.inode(f), Bytes::from_static(b"?"))
    };
    tree.change(spoil).await.expect("damaged");
    tree.close().await.expect("closed");

    let tree = world.open().await;
    make_directory(&tree, "d/a").await.expect("nothing is limited");
    let listed = |quotas: Vec<DirectoryQuota>| quotas.into_iter().map(|one| one.path).collect::<Vec<_>>();
    assert_eq!(listed(tree.quotas(None, 1).await.expect("a list")), ["e"]);
    assert_eq!(tree.quota(d).await.expect("looked at"), None);
    let found = tree.fsck(false).await.expect("checked");
    let unreadable = found.findings.iter().filter(|finding| finding.kind == "unreadable-record");
    assert_eq!(unreadable.count(), 2, "{:?}", found.findings);
    set(&tree, "d", limits(1, 5)).await.expect("it is made anew");
    assert_eq!(used(&tree, "d").await, (1, 0));
    assert!(is_over(make_directory(&tree, "d/b").await));
}

/// Random changes and power cuts, with quotas that come and go: the counts are right all along.
#[tokio::test]
async fn random_histories_are_counted_exactly() {
    for _ in 0..rounds(8) {
        let mut chance = Chance::fresh();
        let mut world = World::memory().await;
        world.settings.trash_ms = chance.below(2) * 1000;
        world.put("listed/a", b"listed").await;
        let mut tree = world.open().await;
        for directory in ["d", "d/e", "f"] {
            make_directory(&tree, directory).await.expect("made");
        }
        for step in 0..120 {
            random_step(&world, &tree, &mut chance, step).await;
            if chance.below(4) == 0 {
                sound(&tree).await;
            }
            match chance.below(12) {
                0 => tree.drain().await.expect("drained"),
                1 => world.pass_ttl(),
                2 => {
                    world.crash(tree, chance.below(2) == 0).await;
                    tree = world.open().await;
                    sound(&tree).await;
                }
                _ => {}
            }
        }
        for one in tree.quotas(None, 8).await.expect("a list") {
            assert_ne!(one.quota.limits, QuotaLimits::default(), "{one:?}");
        }
        sound(&tree).await;
    }
}

/// Most of these fail for good reasons; none may leave a wrong count.
async fn random_step(world: &World, tree: &LocalTree, chance: &mut Chance, step: u32) {
    const DIRECTORIES: [&str; 5] = ["", "d", "d/e", "f", "listed"];
    let mut directory = || DIRECTORIES[chance.below(5) as usize];
    let (one, other) = (directory(), directory());
    let mut name = || ["a", "b", "c"][chance.below(3) as usize];
    let (from, to) = (format!("{one}/{}", name()), format!("{other}/{}", name()));
    match chance.below(11) {
        0 | 1 => drop(world.write_path(tree, &from, &"x".repeat(step as usize)).await),
        2 => drop(make_directory(tree, &from).await),
        3 => drop(unlink(tree, &from).await),
        4 => drop(rename(tree, &from, &to, RenameMode::Replace).await),
        5 => drop(rename(tree, &from, &to, RenameMode::Exchange).await),
        6 => {
            let pairs = [("d", "f"), ("d/e", "f"), ("d/e", "listed"), ("f", "listed")];
            let (one, other) = pairs[chance.below(4) as usize];
            drop(rename(tree, one, other, RenameMode::Exchange).await);
        }
        7 => {
            if let (Ok(file), Ok((directory, name))) = (resolve(tree, &from).await, split(tree, &to).await) {
                drop(tree.link(file.ino, directory, name.as_bytes()).await);
            }
        }
        8 => {
            if let Ok((directory, name)) = split(tree, &from).await {
                drop(tree.remove_directory(directory, name.as_bytes()).await);
            }
        }
        9 => drop(share(world, tree, &from, &to).await),
        _ => {
            let all = [WIDE, limits(4, 200), limits(9, 60), QuotaLimits::default()];
            let limits = all[chance.below(4) as usize];
            if let Ok(found) = resolve(tree, one).await
                && found.kind == FileKind::Directory
            {
                tree.set_quota(found.ino, limits).await.expect("set");
            }
        }
    }
}

/// Reads of a few operations.
async fn reads(world: &World, tree: &LocalTree) -> u64 {
    let mut reads = 0;
    for step in 0..9 {
        // What is not on the disk yet would be read from memory.
        tree.sync().await.expect("synced");
        let before = world.disk.reads();
        match step {
            0 => drop(make_directory(tree, "deep").await.expect("made")),
            1 => drop(make_directory(tree, "deep/d").await.expect("made")),
            2 => drop(world.write_path(tree, "deep/d/f", "1").await.expect("written")),
            3 => drop(world.write_path(tree, "deep/d/f", "22").await.expect("written")),
            4 => rename(tree, "deep/d/f", "deep/g", RenameMode::Replace).await.expect("renamed"),
            5 => rename(tree, "deep/d", "e", RenameMode::Replace).await.expect("renamed"),
            6 => unlink(tree, "deep/g").await.expect("unlinked"),
            7 => drop(tree.remove_directory(ROOT, b"e").await.expect("removed")),
            _ => drop(tree.remove_directory(ROOT, b"deep").await.expect("removed")),
        }
        reads += world.disk.reads() - before;
    }
    reads
}

#[tokio::test]
async fn without_quotas_nothing_more_is_read() {
    let mut found = BTreeMap::new();
    for quota in ["none", "ended", "set"] {
        let world = World::memory().await;
        let tree = world.open().await;
        make_directory(&tree, "d").await.expect("made");
        if quota != "none" {
            set(&tree, "d", WIDE).await;
        }
        if quota == "ended" {
            set(&tree, "d", QuotaLimits::default()).await;
        }
        found.insert(quota, reads(&world, &tree).await);
        let (start, end) = tree.shared.keys.family(Tag::Quota);
        let records = tree.look(|look| look.reads().scan(&start, &end, 8)).await.expect("records");
        assert_eq!(records.len(), usize::from(quota == "set"));
    }
    assert_eq!(found["none"], found["ended"], "{found:?}");
    assert!(found["none"] < found["set"], "{found:?}");
}

/// A quota over files whose sizes sum up to more than a number holds is set, kept and counted anew; a panic of the count
/// kept the volume from being mounted.
#[tokio::test]
async fn sizes_that_no_sum_holds_are_counted() {
    let world = World::memory().await;
    let tree = world.open().await;
    let d = make_directory(&tree, "d").await.expect("made").ino;
    let (mut huge, mut files) = (FileLayout::default(), Vec::new());
    huge.truncate(i64::MAX as u64);
    for name in [b"a", b"b", b"c"] {
        let (file, _) = tree.create(d, name, new_file(), Existing::Refuse).await.expect("made");
        tree.commit_layout(file.ino, file.generation, huge.clone(), time(1)).await.expect("committed");
        files.push(file.ino);
    }
    set(&tree, "d", limits(10, 1 << 40)).await;
    assert_eq!(used(&tree, "d").await, (3, i64::MAX));
    assert!(is_over(tree.reserve(files[0], u64::MAX).await));
    tree.create(d, b"e", new_file(), Existing::Refuse).await.expect("an empty file fits");
    sound(&tree).await;
    let (file, _) = tree.create(ROOT, b"f", new_file(), Existing::Refuse).await.expect("made");
    tree.commit_layout(file.ino, file.generation, huge, time(1)).await.expect("committed");
    rename(&tree, "f", "d/a", RenameMode::Replace).await.expect_err("it does not fit");
    sound(&tree).await;
}
