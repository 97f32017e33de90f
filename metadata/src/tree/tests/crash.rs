//! Power cuts: at every request of the mover, between every step of a write, and at random.

use std::collections::BTreeMap;

use forebay_core::{ErrorKind, FileLayout, InodeId};
use forebay_io::object::{Condition, OperationKind};

use super::world::*;
use crate::fsck::Repair;
use crate::records::Records;
use crate::schema::{Deletion, Inode, Tag};
use crate::testing::{Chance, rounds};
use crate::tree::{Existing, LocalTree, Placement, RenameMode, Tree, resolve};

/// Asserts that the tree holds just these files with these bytes, and, once the mover is through, the bucket too.
pub(super) async fn check_files(world: &World, tree: &LocalTree, expected: &BTreeMap<String, String>) {
    for drained in [false, true] {
        if drained {
            world.end_doubts(tree).await;
        }
        let files: Vec<String> = paths(tree).await.into_iter().filter(|path| !path.ends_with('/')).collect();
        assert_eq!(files, expected.keys().cloned().collect::<Vec<_>>(), "drained: {drained}");
        for (path, text) in expected {
            assert_eq!(
                &world.read_path(tree, path).await.expect("bytes"),
                text,
                "{path}, drained: {drained}"
            );
        }
    }
    let objects: BTreeMap<String, String> = world
        .objects()
        .await
        .into_iter()
        .map(|(key, bytes)| (key, String::from_utf8_lossy(&bytes).into_owned()))
        .collect();
    assert_eq!(&objects, expected, "every file an object at its path, and nothing else");
}

pub(super) fn files(files: &[(&str, &str)]) -> BTreeMap<String, String> {
    files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
}

#[tokio::test]
async fn the_mover_can_be_cut_off_at_any_request() {
    for cut in Cut::each(&[OperationKind::Head, OperationKind::Copy, OperationKind::Delete], 6) {
        cut_off(cut).await;
    }
}

async fn cut_off(cut: Cut) {
    let world = World::memory().await;
    for key in ["a", "b", "d/e", "gone", "x", "y"] {
        world.put(key, key.as_bytes()).await;
    }
    let (tree, faults) = cut.open(&world).await;
    rename(&tree, "a", "moved", RenameMode::Replace).await.expect("renamed");
    rename(&tree, "b", "y", RenameMode::Replace).await.expect("renamed");
    rename(&tree, "d", "f", RenameMode::Replace).await.expect("renamed");
    rename(&tree, "x", "y", RenameMode::Exchange).await.expect("exchanged");
    unlink(&tree, "gone").await.expect("unlinked");
    paths(&tree).await;
    tree.sync().await.expect("synced");
    cut.strike(&faults);
    let tree = cut.reopen(&world, tree).await;
    check_files(&world, &tree, &files(&[("f/e", "d/e"), ("moved", "a"), ("x", "b"), ("y", "x")])).await;
}

/// The steps of writing a file, cut off after each.
#[tokio::test]
async fn a_write_can_be_cut_off_at_any_step() {
    for replaces in [false, true] {
        for step in 0..4 {
            for keeps_cache in [false, true] {
                println!("replaces {replaces}, step {step}, cache {keeps_cache}");
                cut_off_write(replaces, step, keeps_cache).await;
            }
        }
    }
}

async fn cut_off_write(replaces: bool, steps: u32, keeps_cache: bool) {
    let world = World::memory().await;
    let tree = world.open().await;
    if replaces {
        world.write_path(&tree, "a", "old").await.expect("written");
    } else {
        let root = forebay_core::InodeId::ROOT;
        tree.create(root, b"a", new_file(), crate::tree::Existing::Refuse).await.expect("made");
    }
    tree.sync().await.expect("synced");
    let before = resolve(&tree, "a").await.expect("found");
    let mut is_new = false;
    let mut put = None;
    let mut placement = None;
    for step in 0..steps {
        match step {
            0 => placement = Some(tree.place(before.ino, false).await.expect("placed")),
            1 => {
                let placement = placement.as_ref().expect("placed");
                put = Some(world.put_at(placement, b"new").await.expect("put"));
                is_new = true;
            }
            _ => {
                let layout = FileLayout::of_blob(put.take().expect("put").blob());
                tree.commit_layout(before.ino, before.generation, layout, time(1)).await.expect("committed");
                break;
            }
        }
    }
    if steps == 4 {
        tree.sync().await.expect("synced");
    }
    world.crash(tree, keeps_cache).await;
    let tree = world.open().await;
    let expected = match (is_new, replaces) {
        (true, _) => "new",
        (false, true) => "old",
        (false, false) => "",
    };
    let after = resolve(&tree, "a").await.expect("found");
    assert_eq!(world.read(&tree, after.ino).await.expect("bytes"), expected.as_bytes());
    assert_eq!((after.ino, after.mode, after.uid), (before.ino, before.mode, before.uid));
    let inos = resolve(&tree, "a").await.expect("found");
    assert_eq!(inos, after);
    tree.drain().await.expect("drained");
    let objects = if expected.is_empty() { vec![] } else { vec![("a", expected)] };
    world.check_objects(&objects).await;
}

#[tokio::test]
async fn an_owned_blob_that_was_never_committed_goes_with_its_session() {
    let world = World::memory().await;
    world.put("a", b"old").await;
    let tree = world.open().await;
    rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed");
    let root = forebay_core::InodeId::ROOT;
    let (file, _) = tree.create(root, b"a", new_file(), crate::tree::Existing::Refuse).await.expect("made");
    let placement = tree.place(file.ino, false).await.expect("placed");
    world.put_at(&placement, b"new").await.expect("put");
    tree.drain().await.expect("drained");
    world.check_objects(&[("*", "new"), ("b", "old")]).await;
    world.crash(tree, true).await;
    let tree = world.open().await;
    tree.drain().await.expect("drained");
    world.check_objects(&[("b", "old")]).await;
}

/// The same with outsiders writing and deleting, and with what was not synced lost. Whatever is there in the end can be
/// read, and is what the bucket shows, once what outsiders took from renamed files was given up.
#[tokio::test]
async fn random_histories_with_outsiders_stay_whole() {
    for _ in 0..rounds(6) {
        let mut chance = Chance::fresh();
        let world = World::memory().await;
        for directory in ["d", "d/f", "e", "e/f"] {
            world.put(&format!("{directory}/z"), directory.as_bytes()).await;
        }
        let mut tree = world.open().await;
        for step in 0..120 {
            disturbed_step(&world, &tree, &mut chance, step).await;
            check_queue(&tree).await;
            match chance.below(10) {
                0 => tree.drain().await.expect("drained"),
                1 => world.pass_ttl(),
                2 => {
                    world.crash(tree, chance.below(2) == 0).await;
                    tree = world.open().await;
                }
                _ => {}
            }
        }
        tree.close().await.expect("closed");
        let tree = world.open().await;
        for _ in 0..3 {
            world.end_doubts(&tree).await;
            paths(&tree).await;
        }
        let mut found = tree.fsck(true).await.expect("checked");
        // Outsiders took all that was in some directory: a careful repair asks whether it is the right bucket.
        if found.refused.is_some() {
            found = tree.fsck(Repair::AcceptLoss).await.expect("checked");
        }
        assert!(found.is_clean(), "{found:?}");
        tree.drain().await.expect("drained");
        let mut shown = BTreeMap::new();
        let is_whole = |path: &String| !path.ends_with('/') && !path.starts_with("lost+found/damaged-");
        for path in paths(&tree).await.into_iter().filter(is_whole) {
            let text = world.read_path(&tree, &path).await.expect("every file can be read");
            // Files that were made and never written have no object.
            if !text.is_empty() {
                shown.insert(path, text.into_bytes());
            }
        }
        assert_eq!(world.objects().await, shown);
    }
}

/// One step of somebody; what comes of it depends on who was first.
pub(super) async fn disturbed_step(world: &World, tree: &LocalTree, chance: &mut Chance, step: u32) {
    let mut path = || {
        let place = ["", "d/", "e/", "d/f/", "e/f/"][chance.below(5) as usize];
        format!("{place}{}", ["a", "b", "z"][chance.below(3) as usize])
    };
    let (from, to, text) = (path(), path(), format!("step {step}"));
    match chance.below(9) {
        0 => world.put(&from, text.as_bytes()).await,
        1 => world.delete(&from).await,
        2 | 3 => drop(world.write_path(tree, &from, &text).await),
        4 => drop(unlink(tree, &from).await),
        5 | 6 => drop(rename(tree, &from, &to, RenameMode::Replace).await),
        7 => drop(rename(tree, &from, &to, RenameMode::Exchange).await),
        _ => drop(rename(tree, "d", "e", RenameMode::Exchange).await),
    }
}

/// Random files, moves and cuts. Everything synced is there afterwards, as objects at their paths.
#[tokio::test]
async fn random_histories_lose_nothing() {
    for _ in 0..rounds(6) {
        let mut chance = Chance::fresh();
        let world = World::memory().await;
        let mut tree = world.open().await;
        let mut expected: BTreeMap<String, String> = BTreeMap::new();
        for directory in ["d", "e", "d/f", "e/f"] {
            make_directory(&tree, directory).await.expect("made");
        }
        for step in 0..120 {
            random_step(&world, &tree, &mut chance, &mut expected, step).await;
            check_queue(&tree).await;
            match chance.below(12) {
                0 => tree.drain().await.expect("drained"),
                1 => world.pass_ttl(),
                2 => {
                    tree.sync().await.expect("synced");
                    world.crash(tree, chance.below(2) == 0).await;
                    tree = world.open().await;
                }
                _ => {}
            }
        }
        tree.sync().await.expect("synced");
        // What was placed and not committed goes with the session.
        world.crash(tree, false).await;
        let tree = world.open().await;
        check_files(&world, &tree, &expected).await;
    }
}

async fn random_step(
    world: &World,
    tree: &LocalTree,
    chance: &mut Chance,
    expected: &mut BTreeMap<String, String>,
    step: u32,
) {
    const PLACES: [&str; 5] = ["", "d/", "e/", "d/f/", "e/f/"];
    let mut path =
        || format!("{}{}", PLACES[chance.below(5) as usize], ["a", "b", "c"][chance.below(3) as usize]);
    let (from, to) = (path(), path());
    match chance.below(8) {
        0..=2 => {
            let text = format!("step {step}");
            world.write_path(tree, &from, &text).await.expect("written");
            expected.insert(from, text);
        }
        3 => {
            let outcome = unlink(tree, &from).await;
            assert_eq!(outcome.is_ok(), expected.remove(&from).is_some());
        }
        4 | 5 => {
            let outcome = rename(tree, &from, &to, RenameMode::Replace).await;
            assert_eq!(outcome.is_ok(), expected.contains_key(&from), "{outcome:?}");
            if let Some(text) = expected.remove(&from) {
                expected.insert(to, text);
            }
        }
        6 => {
            let both = expected.contains_key(&from) && expected.contains_key(&to);
            assert_eq!(rename(tree, &from, &to, RenameMode::Exchange).await.is_ok(), both);
            if let (true, Some(a), Some(b)) =
                (from != to, expected.get(&from).cloned(), expected.get(&to).cloned())
            {
                expected.insert(from, b);
                expected.insert(to, a);
            }
        }
        _ => {
            let pair = [("d", "e"), ("e/f", "d/f"), ("d", "d/f")][chance.below(3) as usize];
            let outcome = rename(tree, pair.0, pair.1, RenameMode::Exchange).await;
            match outcome {
                Ok(()) => exchange_prefixes(expected, pair.0, pair.1),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid),
            }
        }
    }
}

fn exchange_prefixes(files: &mut BTreeMap<String, String>, a: &str, b: &str) {
    let moved = |path: &str| {
        let below = |prefix: &str| path.strip_prefix(prefix).filter(|rest| rest.starts_with('/'));
        match (below(a), below(b)) {
            (_, Some(rest)) => format!("{a}{rest}"),
            (Some(rest), None) => format!("{b}{rest}"),
            _ => path.to_owned(),
        }
    };
    *files = files.iter().map(|(path, text)| (moved(path), text.clone())).collect();
}

/// Nothing that is a file's own object is queued for deletion.
async fn check_queue(tree: &LocalTree) {
    let keys = tree.shared.keys;
    let (start, end) = keys.family(Tag::Deletion);
    let queued = tree.look(|look| look.reads().scan(&start, &end, usize::MAX)).await.expect("queue");
    let (start, end) = keys.family(Tag::Inode);
    let inodes = tree.look(|look| look.reads().scan(&start, &end, usize::MAX)).await.expect("inodes");
    let homes: Vec<_> =
        inodes.into_iter().filter_map(|(_, value)| Inode::decode(value).expect("inode").home).collect();
    for (_, value) in queued {
        let blob = Deletion::decode(value).expect("deletion").blob;
        assert!(!homes.contains(&blob), "{blob:?}");
    }
}

/// Makes a file of content that lies in an owned blob.
pub(super) async fn make_owned(
    world: &World,
    tree: &LocalTree,
    path: &str,
    text: &'static str,
    mtime: i64,
) -> InodeId {
    let (directory, name) = split(tree, path).await.expect("a directory");
    let made = tree.create(directory, name.as_bytes(), new_file(), Existing::Refuse).await;
    let (file, _) = made.expect("made");
    let put = world.bucket().put(&tree.fresh_blob(), text.into(), Condition::IfAbsent).await;
    let layout = FileLayout::of_blob(put.expect("put").blob());
    tree.commit_layout(file.ino, file.generation, layout, time(mtime)).await.expect("committed");
    file.ino
}

/// A file that takes the place of a deleted one, cut off after its bytes came to the path: they are its own, and go with it.
#[tokio::test]
async fn a_write_to_a_key_that_was_just_freed_can_be_cut_off() {
    let world = World::memory().await;
    let tree = world.open().await;
    world.write_path(&tree, "a", "old").await.expect("written");
    let file = make_owned(&world, &tree, "b", "new", 1).await;
    rename(&tree, "b", "a", RenameMode::Replace).await.expect("renamed");
    tree.sync().await.expect("synced");
    let placement = tree.place(file, false).await.expect("placed");
    assert!(matches!(&placement, Placement::Own { replaces: None, .. }), "{placement:?}");
    world.put_at(&placement, b"new").await.expect("put");
    world.crash(tree, false).await;
    let tree = world.open().await;
    paths(&tree).await;
    tree.drain().await.expect("drained");
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "new");
    unlink(&tree, "a").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.pass_ttl();
    assert_eq!(paths(&tree).await, Vec::<String>::new());
    world.check_objects(&[]).await;
}

/// A write whose object arrived and which was never committed, of a file that is removed then: its object goes, too. What an
/// outsider put there instead stays.
#[tokio::test]
async fn a_removed_file_does_not_come_back_by_a_write_of_unknown_outcome() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        for (replaces, is_open) in [(false, false), (false, true), (true, false), (true, true)] {
            for by in [By::Us, By::Outsider, By::OutsiderInPlace] {
                if kind == Kind::Lmdb || by != By::OutsiderInPlace {
                    println!("{kind:?}, replaces {replaces}, open {is_open}, by {by:?}");
                    remove_unsettled(kind, (replaces, is_open), by).await;
                }
            }
        }
    }
}

/// Who wrote last at a path; an outsider may do so into the file of a folder that was put there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Us,
    Outsider,
    OutsiderInPlace,
}

async fn remove_unsettled(kind: Kind, (replaces, is_open): (bool, bool), by: By) {
    let world = World::new(kind).await;
    let tree = world.open().await;
    let file = tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made").0.ino;
    if replaces {
        world.write(&tree, file, b"old").await.expect("written");
    }
    if is_open {
        tree.opened(file).await.expect("open");
    }
    let placement = tree.place(file, false).await.expect("placed");
    match by {
        By::Outsider => world.put("a", b"theirs").await,
        _ => drop(world.put_at(&placement, b"new").await.expect("put")),
    }
    if by == By::OutsiderInPlace {
        std::fs::write(world.scratch("objects/a"), "theirs").expect("written");
    }
    unlink(&tree, "a").await.expect("unlinked");
    let tree = match (kind, is_open) {
        (Kind::Memory, true) => {
            tree.sync().await.expect("synced");
            world.crash(tree, false).await;
            world.open().await
        }
        (_, true) => {
            tree.drain().await.expect("drained");
            tree.place(file, false).await.expect("settled");
            tree.closed(file).await.expect("closed");
            tree
        }
        (_, false) => tree,
    };
    tree.drain().await.expect("drained");
    world.pass_ttl();
    let (names, objects): (&[&str], &[_]) = match by {
        By::Us => (&[], &[]),
        _ => (&["a"], &[("a", "theirs")]),
    };
    assert_eq!(paths(&tree).await, names);
    world.check_objects(objects).await;
    tree.close().await.expect("closed");
}

/// The key of a file that was removed after a write of unknown outcome is written again before that was settled: what
/// arrived then is no content of the new file, and goes.
#[tokio::test]
async fn a_key_of_unknown_content_is_settled_before_it_is_written_again() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        for is_listed in [false, true] {
            println!("{kind:?}, listed {is_listed}");
            write_over_unsettled(kind, is_listed).await;
        }
    }
}

async fn write_over_unsettled(kind: Kind, is_listed: bool) {
    let world = World::new(kind).await;
    let tree = world.open().await;
    world.write_path(&tree, "a", "old").await.expect("written");
    let before = resolve(&tree, "a").await.expect("found").ino;
    let placement = tree.place(before, false).await.expect("placed");
    world.put_at(&placement, b"removed").await.expect("put");
    unlink(&tree, "a").await.expect("unlinked");
    let mover = tree.mover.as_ref().expect("a mover");
    if is_listed {
        // As the mover does it when the file goes after it looked at the intents.
        mover.delete_due().await.expect("deleted");
        world.pass_ttl();
        assert_eq!(paths(&tree).await, Vec::<String>::new());
    }
    let (file, _) = tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made");
    let placement = tree.place(file.ino, false).await.expect("placed");
    let put = world.put_at(&placement, b"new").await.expect("nothing else is there");
    let (layout, generation) = tree.layout(file.ino).await.expect("a layout");
    assert_eq!((layout.size(), generation), (0, file.generation), "it has no content yet");
    let layout = FileLayout::of_blob(put.blob());
    tree.commit_layout(file.ino, generation, layout, world.clock.wall()).await.expect("committed");
    for _ in 0..2 {
        tree.drain().await.expect("drained");
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["a"]);
        assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "new");
    }
    world.check_objects(&[("a", "new")]).await;
    tree.close().await.expect("closed");
}
