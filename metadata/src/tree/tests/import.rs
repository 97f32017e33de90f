//! A bucket that others write to.

use std::pin::pin;
use std::time::Duration;

use forebay_core::{ErrorKind, FileKind, FileLayout, InodeId, UNSET_ID, UNSET_MODE};
use forebay_io::object::{Delay, Faults, OperationKind};
use futures::{FutureExt, poll};

use super::world::*;
use crate::tree::{Existing, Lookup, NewInode, OutsideChange, RenameMode, SetAttributes, Tree, resolve};

const ROOT: InodeId = InodeId::ROOT;
/// A deadline under which no request that is held back is given up.
const HOUR_MS: u64 = 3_600_000;

#[tokio::test]
async fn objects_appear_as_files_and_prefixes_as_directories() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        for key in ["a", "d/b", "d/e/c", "über/größe", "100%", ".forebay/volume.json"] {
            world.put(key, key.as_bytes()).await;
        }
        let tree = world.open().await;
        let expected = ["100%", "a", "d/", "d/b", "d/e/", "d/e/c", "über/", "über/größe"];
        assert_eq!(paths(&tree).await, expected);
        assert_eq!(world.read_path(&tree, "d/e/c").await.expect("bytes"), "d/e/c");
        let file = resolve(&tree, "d/b").await.expect("found");
        assert_eq!((file.size, file.nlink, file.kind), (3, 1, FileKind::File));
        assert!(file.mtime.seconds > 1_700_000_000, "the object's own time");
        assert_eq!(resolve(&tree, "d").await.expect("found").nlink, 3);
        assert_eq!(tree.statistics().await.expect("statistics").inodes, 9);
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn outsiders_changes_show_after_the_ttl() {
    let world = World::memory().await;
    world.put("kept", b"1").await;
    world.put("replaced", b"1").await;
    world.put("gone", b"1").await;
    world.put("d/gone", b"1").await;
    let tree = world.open().await;
    assert_eq!(paths(&tree).await, ["d/", "d/gone", "gone", "kept", "replaced"]);
    let (kept, replaced) =
        (resolve(&tree, "kept").await.expect("found"), resolve(&tree, "replaced").await.expect("found"));
    world.put("replaced", b"22").await;
    world.put("new", b"3").await;
    world.delete("gone").await;
    world.delete("d/gone").await;
    assert_eq!(resolve(&tree, "replaced").await.expect("still fresh"), replaced);
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["kept", "new", "replaced"]);
    assert_eq!(resolve(&tree, "kept").await.expect("found"), kept);
    let now = resolve(&tree, "replaced").await.expect("found");
    assert_ne!(now.ino, replaced.ino, "an outsider's object is another file");
    assert_eq!(world.read(&tree, now.ino).await.expect("bytes"), b"22");
    assert_eq!(kind_of(tree.attributes(replaced.ino).await), ErrorKind::NotFound);
    world.delete("new").await;
    tree.refresh(ROOT).await.expect("refreshed");
    assert_eq!(paths(&tree).await, ["kept", "replaced"]);
    assert_eq!(tree.statistics().await.expect("statistics").inodes, 3);
    tree.drain().await.expect("drained");
    world.check_objects(&[("kept", "1"), ("replaced", "22")]).await;
}

/// Who made a file at a path has said whose it is; who truncated one has said that it is empty.
#[tokio::test]
async fn an_outsiders_object_is_the_first_content_of_a_file_that_never_had_any() {
    let world = World::memory().await;
    let tree = world.open().await;
    let mut made = Vec::new();
    for name in ["new", "emptied", "open", "first"] {
        let new = NewInode { mode: 0o600, ..new_file() };
        let (file, _) = tree.create(ROOT, name.as_bytes(), new, Existing::Refuse).await.expect("made");
        made.push(file.ino);
    }
    let [new, emptied, open, first] = made[..] else { panic!("four files") };
    let layout = FileLayout::default();
    tree.commit_layout(emptied, 0, layout, world.clock.wall()).await.expect("committed");
    tree.opened(open).await.expect("opened");
    tree.link(first, ROOT, b"second").await.expect("linked");
    for key in ["new", "emptied", "open", "second"] {
        world.put(key, b"outsider").await;
    }
    let mut told = tree.outside().listen();
    world.pass_ttl();
    paths(&tree).await;
    let (file, generation) =
        (resolve(&tree, "new").await.expect("found"), tree.layout(new).await.expect("known").1);
    assert_eq!((file.ino, file.mode, file.size, generation), (new, 0o600, 8, 1));
    assert_eq!(world.read(&tree, new).await.expect("bytes"), b"outsider");
    for (path, other) in [("emptied", emptied), ("second", first)] {
        let file = resolve(&tree, path).await.expect("found");
        assert!(file.ino != other && file.mode == UNSET_MODE, "{path} is another file: {file:?}");
    }
    assert_eq!(resolve(&tree, "open").await.expect("found").size, 0, "its writer will learn of it");
    assert_eq!(resolve(&tree, "first").await.expect("found").size, 0);
    let mut names = Vec::new();
    while let Some(Ok(change)) = told.next().now_or_never() {
        if let OutsideChange::Name { name, .. } = change {
            names.push(name);
        }
    }
    assert!(names.iter().any(|name| name == "new"), "the kernel is told: {names:?}");
    assert_eq!(tree.statistics().await.expect("statistics").bytes, 24);
    assert!(tree.fsck(false).await.expect("checked").is_clean());
    unlink(&tree, "new").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.check_objects(&[("emptied", "outsider"), ("open", "outsider"), ("second", "outsider")]).await;
}

#[tokio::test]
async fn what_only_the_tree_has_survives_listings() {
    let world = World::memory().await;
    world.put("d/a", b"1").await;
    let tree = world.open().await;
    make_directory(&tree, "empty").await.expect("made");
    make_directory(&tree, "d/empty").await.expect("made");
    let d = resolve(&tree, "d").await.expect("found").ino;
    tree.create(d, b"l", new_inode(FileKind::Symlink), Existing::Refuse).await.expect("made");
    tree.create(d, b"unwritten", new_file(), Existing::Refuse).await.expect("made");
    world.delete("d/a").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["d/", "d/empty/", "d/l", "d/unwritten", "empty/"]);
    tree.close().await.expect("closed");
    let tree = world.open().await;
    assert_eq!(paths(&tree).await, ["d/", "d/empty/", "d/l", "d/unwritten", "empty/"]);
}

#[tokio::test]
async fn a_directory_emptied_through_forebay_stays() {
    let world = World::memory().await;
    world.put("d/a", b"1").await;
    let tree = world.open().await;
    unlink(&tree, "d/a").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["d/"]);
}

#[tokio::test]
async fn an_object_beside_keys_below_it_shows_as_object() {
    let world = World::memory().await;
    world.put("a", b"object").await;
    let tree = world.open().await;
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "object");
    world.put("a/b", b"below").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a.object", "a/", "a/b"]);
    assert_eq!(world.read_path(&tree, "a.object").await.expect("bytes"), "object");
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a.object", "a/", "a/b"], "listed again, nothing changes");
    world.delete("a/b").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a.object"], "the directory is gone");
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a"], "and its name free");
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "object");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "object")]).await;
    make_directory(&tree, "m").await.expect("made");
    world.put("m", b"object").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a", "m.object", "m/"]);
    world.delete("m").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a", "m/"], "it goes with its object");
    world.put("m", b"object").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a", "m.object", "m/"]);
    unlink(&tree, "m.object").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "object")]).await;
}

#[tokio::test]
async fn one_listing_serves_all_who_wait() {
    let world = World::memory().await;
    for n in 0..300 {
        world.put(&format!("d/{n:03}"), b"1").await;
    }
    let slow = Delay { request_us: 20_000, mib_us: 0 };
    let bucket = world.bucket().with_delay(slow);
    let tree = world.open_over(Some(bucket.clone())).await;
    let before = bucket.counters();
    let lookups = (0..50).map(|n| {
        let tree = &tree;
        async move { resolve(tree, &format!("d/{n:03}")).await.expect("found") }
    });
    futures::future::join_all(lookups).await;
    let listings = bucket.counters().since(&before).of(OperationKind::List).requests;
    assert_eq!(listings, 2, "one of the root, one of the directory");
    assert_eq!(paths(&tree).await.len(), 301);
    assert_eq!(bucket.counters().since(&before).of(OperationKind::List).requests, 2);
    assert!(tree.lookup_now(ROOT, b"d").is_some());
    world.pass_ttl();
    assert!(tree.lookup_now(ROOT, b"d").is_none(), "stale");
}

/// Each look at a large directory waited anew for the listing that was on its way: two seconds for each name, as long as it took.
#[tokio::test]
async fn a_listing_that_takes_long_is_waited_for_once() {
    let world = World::memory().await;
    world.put("a", b"1").await;
    let faults = Faults::new();
    let bucket = world.bucket().with_faults(&faults).with_deadline_ms(HOUR_MS);
    let tree = world.open_over(Some(bucket.clone())).await;
    assert_eq!(paths(&tree).await, ["a"]);
    world.put("new", b"2").await;
    world.pass_ttl();
    let gate = faults.gate(1);
    let (mut first, mut second) = (pin!(tree.lookup(ROOT, b"a")), pin!(tree.lookup(ROOT, b"a")));
    assert!(poll!(&mut first).is_pending());
    gate.reached().await;
    let most = Duration::from_millis(world.settings.import.relist_wait_ms);
    world.clock.advance(most - Duration::from_millis(1));
    assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
    assert!(tree.lookup_now(ROOT, b"a").is_none(), "who comes now waits for the rest of it");
    world.clock.advance(Duration::from_millis(1));
    first.await.expect("known");
    second.await.expect("known");
    for _ in 0..3 {
        let looked = tree.lookup(ROOT, b"a").now_or_never().expect("nothing is waited for").expect("known");
        assert!(matches!(looked, Lookup::Found(_)));
        let looked = tree.lookup_now(ROOT, b"new").expect("nothing is waited for").expect("known");
        assert_eq!(looked, Lookup::Miss, "what is known is of the listing before");
    }
    assert_eq!(bucket.counters().of(OperationKind::List).requests, 2, "one is under way");
    gate.open();
    while tree.lookup(ROOT, b"new").await.expect("known") == Lookup::Miss {
        tokio::task::yield_now().await;
    }
    assert_eq!(bucket.counters().of(OperationKind::List).requests, 2);
}

/// The first open of a file among millions waited until all of them were listed.
#[tokio::test]
async fn one_name_of_a_directory_that_takes_long_to_list_is_looked_for_alone() {
    for kind in [Kind::Memory, Kind::Slate] {
        let world = World::new(kind).await;
        for key in ["a", "a-", "both", "both/below", "d-1", "d/below", "d0", "replaced"] {
            world.put(key, key.as_bytes()).await;
        }
        let tree = world.open().await;
        paths(&tree).await;
        make_directory(&tree, "made").await.expect("made");
        tree.close().await.expect("closed");
        for key in ["new", "n/below", "replaced"] {
            world.put(key, b"of others").await;
        }
        world.delete("d0").await;
        let faults = Faults::new();
        let bucket = world.bucket().with_faults(&faults).with_deadline_ms(HOUR_MS);
        let tree = world.open_over(Some(bucket)).await;
        let gate = faults.gate(1);
        let mut first = pin!(tree.lookup(ROOT, b"a"));
        assert!(poll!(&mut first).is_pending());
        gate.reached().await;
        world.clock.advance(Duration::from_millis(world.settings.import.relist_wait_ms));
        assert!(matches!(first.await.expect("found"), Lookup::Found(_)));
        let mut inodes = Vec::new();
        for (name, kind) in [
            ("a-", FileKind::File),
            ("both", FileKind::Directory),
            ("d", FileKind::Directory),
            ("made", FileKind::Directory),
            ("n", FileKind::Directory),
            ("new", FileKind::File),
        ] {
            let found = found(&tree, ROOT, name.as_bytes()).await;
            assert_eq!(found.kind, kind, "{name}");
            inodes.push((name, found.ino));
        }
        assert_eq!(world.read_path(&tree, "new").await.expect("bytes"), "of others");
        for name in ["bot", "a-1", "none", "b"] {
            assert_eq!(tree.lookup(ROOT, name.as_bytes()).await.expect("looked"), Lookup::Miss, "{name}");
        }
        // Without what an engine asks of its own.
        let asked = || faults.seen(OperationKind::Head) + faults.seen(OperationKind::List);
        let before = asked();
        assert_eq!(found(&tree, ROOT, b"new").await.ino, inodes[5].1);
        assert_eq!(asked(), before, "what was found is not asked for again");
        // Whatever replaced or removed what is known waits for the listing, and so does who wants all of it.
        let (mut changed, mut gone) = (pin!(tree.lookup(ROOT, b"replaced")), pin!(tree.lookup(ROOT, b"d0")));
        let mut whole = pin!(tree.read_directory(ROOT, None, 10));
        for _ in 0..100 {
            assert!(poll!(&mut changed).is_pending() && poll!(&mut gone).is_pending());
            assert!(poll!(&mut whole).is_pending());
            tokio::task::yield_now().await;
        }
        gate.open();
        assert!(matches!(changed.await.expect("found"), Lookup::Found(_)));
        assert_eq!(gone.await.expect("looked"), Lookup::Miss);
        assert_eq!(whole.await.expect("listed").entries.len(), 10);
        assert_eq!(world.read_path(&tree, "replaced").await.expect("bytes"), "of others");
        for (name, ino) in inodes {
            assert_eq!(found(&tree, ROOT, name.as_bytes()).await.ino, ino, "{name}");
        }
        let expected = ["a", "a-", "both.object", "both/", "both/below", "d-1", "d/", "d/below", "made/"];
        assert_eq!(paths(&tree).await, [&expected[..], &["n/", "n/below", "new", "replaced"]].concat());
        assert!(tree.fsck(false).await.expect("checked").is_clean());
        tree.close().await.expect("closed");
    }
}

/// A listing is of the moment when the store answered. What came after that is found alone, and does not go when the listing ends.
#[tokio::test]
async fn what_is_found_alone_stays_when_an_older_listing_ends() {
    let world = World::memory().await;
    world.put("x/f", b"moved").await;
    world.put("k", b"renamed").await;
    let tree = world.open().await;
    paths(&tree).await;
    rename(&tree, "x", "y", RenameMode::Replace).await.expect("renamed");
    rename(&tree, "k", "l", RenameMode::Replace).await.expect("renamed");
    tree.sync().await.expect("synced");
    world.crash(tree, true).await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(HOUR_MS))).await;
    // Below a prefix that is no directory any more it is looked for what nobody claims, once the root is listed.
    let look = faults.gate(2);
    let mut whole = pin!(tree.read_directory(ROOT, None, 10));
    assert!(poll!(&mut whole).is_pending());
    look.reached().await;
    world.clock.advance(Duration::from_millis(world.settings.import.relist_wait_ms));
    for key in ["late", "later/f"] {
        world.put(key, b"1").await;
    }
    let (late, later) = (found(&tree, ROOT, b"late").await, found(&tree, ROOT, b"later").await);
    for name in ["k", "x"] {
        let looked = tree.lookup(ROOT, name.as_bytes()).await.expect("looked");
        assert_eq!(looked, Lookup::Miss, "`{name}` lies there for what has another name");
    }
    look.open();
    let names: Vec<_> = whole.await.expect("listed").entries.into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["l", "late", "later", "y"]);
    assert_eq!(found(&tree, ROOT, b"late").await.ino, late.ino);
    assert_eq!(found(&tree, ROOT, b"later").await.ino, later.ino);
    assert_eq!(paths(&tree).await, ["l", "late", "later/", "later/f", "y/", "y/f"]);
    tree.drain().await.expect("drained");
    world.check_objects(&[("l", "renamed"), ("late", "1"), ("later/f", "1"), ("y/f", "moved")]).await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["l", "late", "later/", "later/f", "y/", "y/f"]);
    assert!(tree.fsck(false).await.expect("checked").is_clean());
}

/// Owner and mode were those of the mount that listed the directory first, for good.
#[tokio::test]
async fn what_is_imported_has_no_owner_until_somebody_gives_it_one() {
    for kind in [Kind::Memory, Kind::Lmdb] {
        let world = World::new(kind).await;
        world.put("d/a", b"1").await;
        let tree = world.open().await;
        let all = async |tree: &dyn Tree, path: &str| {
            let found = resolve(tree, path).await.expect("found");
            (found.uid, found.gid, found.mode)
        };
        for path in ["", "d", "d/a"] {
            assert_eq!(all(&tree, path).await, (UNSET_ID, UNSET_ID, UNSET_MODE), "`{path}`");
        }
        let set = async |path: &str, changes: SetAttributes| {
            let ino = resolve(&tree, path).await.expect("found").ino;
            tree.set_attributes(ino, changes).await.expect("set");
        };
        set("", SetAttributes { gid: Some(7), ..SetAttributes::default() }).await;
        set("d", SetAttributes { uid: Some(0), ..SetAttributes::default() }).await;
        set("d/a", SetAttributes { mode: Some(0o4600), ..SetAttributes::default() }).await;
        let check = async |tree: &dyn Tree| {
            assert_eq!(all(tree, "").await, (UNSET_ID, 7, UNSET_MODE));
            assert_eq!(all(tree, "d").await, (0, UNSET_ID, UNSET_MODE));
            assert_eq!(all(tree, "d/a").await, (UNSET_ID, UNSET_ID, 0o4600));
        };
        check(&tree).await;
        tree.close().await.expect("closed");
        let tree = world.open().await;
        check(&tree).await;
        assert!(tree.fsck(false).await.expect("checked").is_clean());
        tree.close().await.expect("closed");
    }
}

/// Such a directory was removed, and was there again with the next listing.
#[tokio::test]
async fn a_directory_that_holds_what_no_path_spells_is_not_removed() {
    let world = World::memory().await;
    let odd = format!("d/{}", "n".repeat(256));
    for key in ["d/a", "e/b", &odd] {
        world.put(key, b"1").await;
    }
    let tree = world.open().await;
    assert_eq!(paths(&tree).await, ["d/", "d/a", "e/", "e/b"]);
    unlink(&tree, "d/a").await.expect("unlinked");
    unlink(&tree, "e/b").await.expect("unlinked");
    let refused = tree.remove_directory(ROOT, b"d").await.expect_err("it holds something");
    assert!(refused.kind() == ErrorKind::NotEmpty && refused.to_string().contains(&odd), "{refused}");
    assert_eq!(kind_of(rename(&tree, "e", "d", RenameMode::Replace).await), ErrorKind::NotEmpty);
    tree.drain().await.expect("drained");
    world.check_objects(&[(&odd, "1")]).await;
    world.delete(&odd).await;
    world.pass_ttl();
    tree.remove_directory(ROOT, b"d").await.expect("removed");
    assert_eq!(paths(&tree).await, ["e/"]);
}

/// A walk over a thousand directories waited for the store at each.
#[tokio::test]
async fn directories_are_listed_ahead_of_who_walks_and_once() {
    for most in [32, 0] {
        let mut world = World::memory().await;
        world.settings.import.max_ahead = most;
        for n in 0..40 {
            world.put(&format!("d/{n:02}/f"), b"1").await;
            world.put(&format!("d/{n:02}x"), b"1").await;
        }
        let faults = Faults::new();
        let bucket = world.bucket().with_faults(&faults).with_deadline_ms(30);
        let tree = world.open_over(Some(bucket.clone())).await;
        let listings = || bucket.counters().of(OperationKind::List).requests;
        let before = listings();
        let parent = resolve(&tree, "d").await.expect("found").ino;
        let page = tree.read_directory(parent, None, 100).await.expect("a listing");
        let directories =
            page.entries.into_iter().filter(|entry| entry.attributes.kind == FileKind::Directory);
        let directories: Vec<InodeId> = directories.map(|entry| entry.attributes.ino).collect();
        for (at, directory) in directories.iter().enumerate() {
            let page = tree.read_directory(*directory, None, 100).await.expect("a listing");
            assert_eq!(page.entries.len(), 1);
            if at == 0 && most > 0 {
                while !directories[..9].iter().all(|directory| tree.is_ready(*directory)) {
                    tokio::task::yield_now().await;
                }
                assert_eq!(listings() - before, 11, "the root, `d`, and nine below");
                faults.set_down(true);
            }
            if at == 3 {
                faults.set_down(false);
            }
        }
        assert_eq!(listings() - before, 42, "at most {most} ahead");
    }
}

#[tokio::test]
async fn a_store_that_is_down_leaves_what_was_listed() {
    let world = World::memory().await;
    world.put("a", b"1").await;
    let faults = Faults::new();
    let bucket = world.bucket().with_faults(&faults).with_deadline_ms(50);
    let tree = world.open_over(Some(bucket)).await;
    faults.set_down(true);
    assert_eq!(kind_of(tree.lookup(ROOT, b"a").await), ErrorKind::Unavailable);
    faults.set_down(false);
    assert_eq!(paths(&tree).await, ["a"]);
    faults.set_down(true);
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a"], "what was known is still served");
}

#[tokio::test]
async fn a_read_only_tree_writes_nothing_to_the_bucket() {
    let mut world = World::memory().await;
    world.settings.read_only = true;
    world.put("d/a", b"1").await;
    let tree = world.open_over(Some(world.bucket().read_only())).await;
    assert_eq!(paths(&tree).await, ["d/", "d/a"]);
    let file = resolve(&tree, "d/a").await.expect("found").ino;
    assert_eq!(kind_of(tree.create(ROOT, b"x", new_file(), Existing::Refuse).await), ErrorKind::ReadOnly);
    let refused = tree.unlink(ROOT, b"d").await.expect_err("it is read-only");
    assert_eq!(refused.kind(), ErrorKind::ReadOnly);
    assert!(refused.hint().expect("a hint").contains("--read-only"), "{refused}");
    assert_eq!(kind_of(tree.place(file, false).await), ErrorKind::ReadOnly);
    assert_eq!(kind_of(rename(&tree, "d", "e", RenameMode::Replace).await), ErrorKind::ReadOnly);
    tree.opened(file).await.expect("opened");
    world.delete("d/a").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, Vec::<String>::new());
    assert_eq!(tree.attributes(file).await.expect("open").nlink, 0);
    tree.closed(file).await.expect("closed");
    tree.drain().await.expect("drained");
    tree.close().await.expect("closed");
}

#[tokio::test]
async fn large_directories_are_taken_over_in_windows() {
    let world = World::memory().await;
    for n in 0..1000 {
        world.put(&format!("d/{n:04}"), b"1").await;
    }
    let tree = world.open().await;
    assert_eq!(paths(&tree).await.len(), 1001);
    for n in (0..1000).step_by(3) {
        world.delete(&format!("d/{n:04}")).await;
        world.put(&format!("d/{n:04}x"), b"1").await;
    }
    world.pass_ttl();
    let mut expected: Vec<String> =
        (0..1000).map(|n| format!("d/{n:04}{}", if n % 3 == 0 { "x" } else { "" })).collect();
    expected.insert(0, "d/".into());
    assert_eq!(paths(&tree).await, expected);
}

#[tokio::test]
async fn a_removed_directory_does_not_come_back() {
    for kind in [Kind::Memory, Kind::Lmdb] {
        let world = World::new(kind).await;
        world.put("d/e/a", b"1").await;
        world.put("b", b"1").await;
        let tree = world.open().await;
        unlink(&tree, "d/e/a").await.expect("unlinked");
        let d = resolve(&tree, "d").await.expect("found").ino;
        tree.remove_directory(d, b"e").await.expect("removed");
        tree.remove_directory(ROOT, b"d").await.expect("removed");
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["b"], "before the objects are deleted");
        tree.drain().await.expect("drained");
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["b"], "and after");
    }
}

/// One look at a directory finds out, and comes upon the other names after that.
#[tokio::test]
async fn a_file_whose_object_went_goes_under_all_its_names() {
    let world = World::memory().await;
    for key in ["a", "k", "kept"] {
        world.put(key, b"1").await;
    }
    let tree = world.open().await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    tree.link(ino, ROOT, b"c").await.expect("linked");
    rename(&tree, "k", "z", RenameMode::Replace).await.expect("renamed");
    world.delete("a").await;
    world.put("k", b"theirs").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["k", "kept"]);
    assert_eq!(world.read_path(&tree, "k").await.expect("bytes"), "theirs");
    tree.drain().await.expect("drained");
    world.check_objects(&[("k", "theirs"), ("kept", "1")]).await;
}

/// An object beside a directory of its name, which somebody replaces: the directory that holds both could be listed no more.
#[tokio::test]
async fn an_object_beside_a_directory_is_replaced() {
    for kind in [Kind::Memory, Kind::Slate] {
        let world = World::new(kind).await;
        let tree = world.open().await;
        make_directory(&tree, "a").await.expect("made");
        for text in ["first", "second", "third"] {
            world.put("a", text.as_bytes()).await;
            world.pass_ttl();
            assert_eq!(paths(&tree).await, ["a.object", "a/"], "{text}");
            assert_eq!(world.read_path(&tree, "a.object").await.expect("bytes"), text);
        }
        world.delete("a").await;
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["a/"]);
        assert!(tree.fsck(false).await.expect("checked").is_clean());
        tree.close().await.expect("closed");
    }
}

/// The first content of a file, which who opened it had found at its path, came after the bucket had been listed: the file was taken for
/// one whose object is gone, and went with its name.
#[tokio::test]
async fn first_content_that_is_found_amid_a_listing_stays() {
    let world = World::memory().await;
    world.put("x/f", b"moved").await;
    let tree = world.open().await;
    let (file, _) = tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made");
    paths(&tree).await;
    rename(&tree, "x", "y", RenameMode::Replace).await.expect("renamed");
    tree.sync().await.expect("synced");
    world.crash(tree, true).await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    tree.mover.as_ref().expect("a mover").walk_subtrees().await.expect("walked");
    // Below a prefix that is no directory any more it is looked for what nobody claims, once the root is listed.
    let look = faults.gate(2);
    let listing = resolve(&tree, "a");
    let opening = async {
        look.reached().await;
        world.put("a", b"first").await;
        tree.opened(file.ino).await.expect("opened");
        look.open();
    };
    let (found, ()) = tokio::join!(listing, opening);
    found.expect("it is there");
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "first");
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a", "y/", "y/f"]);
}
