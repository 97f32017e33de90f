//! Files that share bytes: whatever becomes of one, the others keep theirs, also over power cuts, and nothing is left
//! behind when all are gone.

use std::collections::BTreeMap;

use forebay_core::{ErrorKind, InodeId, Result};
use forebay_io::object::OperationKind;

use super::world::*;
use crate::records::Records;
use crate::schema::Tag;
use crate::testing::{Chance, rounds};
use crate::tree::{Existing, LocalTree, Placement, RenameMode, Tree, resolve};

/// Makes `to` a file of the same bytes as `from`.
pub(super) async fn share(world: &World, tree: &LocalTree, from: &str, to: &str) -> Result<()> {
    let lender = resolve(tree, from).await?.ino;
    let (directory, name) = split(tree, to).await?;
    let (file, _) = tree.create(directory, name.as_bytes(), new_file(), Existing::Accept).await?;
    let (layout, _) = tree.layout(lender).await?;
    let (_, generation) = tree.layout(file.ino).await?;
    tree.commit_shared(file.ino, generation, layout, world.clock.wall(), lender).await.map(drop)
}

async fn check(world: &World, tree: &LocalTree, expected: &[(&str, &str)]) {
    for (path, text) in expected {
        assert_eq!(world.read_path(tree, path).await.expect("bytes"), *text, "{path}");
    }
}

/// A file `a` and a copy `b` of it that share the object at `a`.
async fn pair(world: &World) -> LocalTree {
    world.put("a", b"shared").await;
    let tree = world.open().await;
    share(world, &tree, "a", "b").await.expect("shared");
    world.check_objects(&[("a", "shared")]).await;
    tree
}

#[tokio::test]
async fn what_becomes_of_the_lender_leaves_the_copy_alone() {
    for kind in [Kind::Memory, Kind::Lmdb] {
        let world = World::new(kind).await;
        let tree = pair(&world).await;
        let placed = world.write_path(&tree, "a", "new").await.expect("written");
        assert!(matches!(placed, Placement::Own { .. }), "the path gets the new bytes: {placed:?}");
        check(&world, &tree, &[("a", "new"), ("b", "shared")]).await;
        tree.drain().await.expect("drained");
        world.check_objects(&[("*", "shared"), ("a", "new")]).await;

        let world = World::new(kind).await;
        let tree = pair(&world).await;
        unlink(&tree, "a").await.expect("unlinked");
        tree.drain().await.expect("drained");
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["b"]);
        check(&world, &tree, &[("b", "shared")]).await;
        world.check_objects(&[("*", "shared")]).await;

        let world = World::new(kind).await;
        let tree = pair(&world).await;
        rename(&tree, "a", "c", RenameMode::Replace).await.expect("renamed");
        tree.drain().await.expect("drained");
        check(&world, &tree, &[("b", "shared"), ("c", "shared")]).await;
        world.write_path(&tree, "a", "another").await.expect("written");
        check(&world, &tree, &[("a", "another"), ("b", "shared"), ("c", "shared")]).await;
    }
}

#[tokio::test]
async fn what_becomes_of_the_copy_leaves_the_lender_alone() {
    let world = World::memory().await;
    let tree = pair(&world).await;
    share(&world, &tree, "b", "c").await.expect("a copy can lend on");
    rename(&tree, "b", "d", RenameMode::Replace).await.expect("renamed");
    world.write_path(&tree, "c", "own").await.expect("written");
    tree.drain().await.expect("drained");
    check(&world, &tree, &[("a", "shared"), ("c", "own"), ("d", "shared")]).await;
    unlink(&tree, "d").await.expect("unlinked");
    tree.drain().await.expect("drained");
    check(&world, &tree, &[("a", "shared"), ("c", "own")]).await;
    no_loans(&tree).await;
    unlink(&tree, "a").await.expect("unlinked");
    unlink(&tree, "c").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
}

#[tokio::test]
async fn an_object_that_is_about_to_be_replaced_is_not_lent() {
    let world = World::memory().await;
    world.put("a", b"old").await;
    let tree = world.open().await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    tree.place(ino, false).await.expect("placed");
    assert_eq!(kind_of(share(&world, &tree, "a", "b").await), ErrorKind::Conflict);
}

#[tokio::test]
async fn an_outsider_who_replaces_what_is_lent_leaves_no_wrong_bytes() {
    let world = World::memory().await;
    let tree = pair(&world).await;
    world.put("a", b"theirs").await;
    world.pass_ttl();
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "theirs");
    assert_eq!(kind_of(world.read_path(&tree, "b").await), ErrorKind::Stale);
    world.write_path(&tree, "a", "ours").await.expect("written");
    world.write_path(&tree, "b", "again").await.expect("written");
    check(&world, &tree, &[("a", "ours"), ("b", "again")]).await;
    no_loans(&tree).await;
}

/// The writer who meets somebody else's object at his path forgets no loan of the one before: layouts name it.
#[tokio::test]
async fn a_loan_of_a_replaced_object_is_counted_until_nothing_names_it() {
    let world = World::memory().await;
    let tree = pair(&world).await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    world.put("a", b"theirs").await;
    let placement = world.write(&tree, ino, b"ours").await.expect("written");
    assert_eq!(placement.key().as_str(), "a");
    assert_eq!(kinds(&tree).await, ["dangling-extent"]);
    // Who did it, and what is to be done.
    let told = tree.fsck(false).await.expect("checked").findings.remove(0).detail;
    assert!(told.contains("`a` are of another size: another program replaced that object"), "{told}");
    assert!(told.contains("or remove the file and copy it again"), "{told}");
    unlink(&tree, "b").await.expect("unlinked");
    tree.drain().await.expect("drained");
    assert_eq!(kinds(&tree).await, [""; 0]);
    no_loans(&tree).await;
}

/// Keys below the path of a file take its name from it, and its object gets another one: what a copy shares stays shared.
#[tokio::test]
async fn a_directory_that_takes_the_name_of_a_lender_leaves_the_copy_alone() {
    for is_open in [false, true] {
        let world = World::memory().await;
        let tree = pair(&world).await;
        let ino = resolve(&tree, "a").await.expect("found").ino;
        if is_open {
            tree.opened(ino).await.expect("opened");
        }
        world.put("a/x", b"below").await;
        world.pass_ttl();
        let aside =
            paths(&tree).await.into_iter().find(|path| path.starts_with('a') && !path.starts_with("a/"));
        let aside = aside.expect("the object beside the directory");
        assert_eq!(kinds(&tree).await, [""; 0], "open: {is_open}");
        world.write_path(&tree, &aside, "new").await.expect("written");
        if is_open {
            assert_eq!(world.read(&tree, ino).await.expect("bytes"), b"shared");
            tree.closed(ino).await.expect("closed");
        }
        tree.drain().await.expect("drained");
        check(&world, &tree, &[("a/x", "below"), ("b", "shared"), (&aside, "new")]).await;
        assert_eq!(kinds(&tree).await, [""; 0], "open: {is_open}");
        unlink(&tree, "b").await.expect("unlinked");
        tree.drain().await.expect("drained");
        no_loans(&tree).await;
    }
}

/// What fsck finds wrong.
async fn kinds(tree: &LocalTree) -> Vec<String> {
    let report = tree.fsck(false).await.expect("checked");
    report.findings.into_iter().map(|finding| finding.kind).collect()
}

/// No record of a loan is left.
pub(super) async fn no_loans(tree: &LocalTree) {
    let (start, end) = tree.shared.keys.family(Tag::Loan);
    let left = tree.look(|look| look.reads().scan(&start, &end, 8)).await.expect("records");
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn copying_lent_bytes_away_can_be_cut_off_at_any_request() {
    let kinds = [OperationKind::Head, OperationKind::Copy, OperationKind::Put, OperationKind::Delete];
    for cut in Cut::each(&kinds, 4) {
        cut_off(cut).await;
    }
}

async fn cut_off(cut: Cut) {
    let world = World::memory().await;
    for key in ["over", "gone", "moved"] {
        world.put(key, key.as_bytes()).await;
    }
    let (tree, faults) = cut.open(&world).await;
    for key in ["over", "gone", "moved"] {
        share(&world, &tree, key, &format!("{key}.copy")).await.expect("shared");
    }
    tree.sync().await.expect("synced");
    cut.strike(&faults);
    let written = world.write_path(&tree, "over", "new").await.is_ok();
    unlink(&tree, "gone").await.expect("unlinked");
    rename(&tree, "moved", "there", RenameMode::Replace).await.expect("renamed");
    tree.sync().await.expect("synced");
    let tree = cut.reopen(&world, tree).await;
    for _ in 0..2 {
        check(&world, &tree, &[("over.copy", "over"), ("gone.copy", "gone"), ("moved.copy", "moved")]).await;
        check(&world, &tree, &[("there", "moved")]).await;
        let over = world.read_path(&tree, "over").await.expect("bytes");
        assert!(over == "new" || (over == "over" && !written), "{over}");
        world.end_doubts(&tree).await;
    }
    for path in paths(&tree).await {
        unlink(&tree, &path).await.expect("unlinked");
    }
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
    no_loans(&tree).await;
}

/// Random copies, writes, moves and cuts: every file has its own bytes all along, and nothing is left in the end.
#[tokio::test]
async fn random_histories_of_sharing_lose_nothing_and_leave_nothing() {
    for _ in 0..rounds(12) {
        let mut chance = Chance::fresh();
        let mut world = World::memory().await;
        world.settings.clone_step = 1 + chance.below(3) as usize;
        let mut tree = world.open().await;
        let mut expected: BTreeMap<String, String> = BTreeMap::new();
        make_directory(&tree, "d").await.expect("made");
        make_directory(&tree, "e").await.expect("made");
        for step in 0..150 {
            random_step(&world, &tree, &mut chance, &mut expected, step).await;
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
            for (path, text) in &expected {
                assert_eq!(
                    &world.read_path(&tree, path).await.expect("bytes"),
                    text,
                    "{path} in step {step}"
                );
            }
        }
        for path in expected.keys() {
            unlink(&tree, path).await.expect("unlinked");
        }
        tree.sync().await.expect("synced");
        // What was placed and not committed goes with the session.
        world.crash(tree, false).await;
        let tree = world.open().await;
        tree.drain().await.expect("drained");
        world.check_objects(&[]).await;
        no_loans(&tree).await;
    }
}

async fn random_step(
    world: &World,
    tree: &LocalTree,
    chance: &mut Chance,
    expected: &mut BTreeMap<String, String>,
    step: u32,
) {
    let mut path = || {
        format!("{}{}", ["", "d/", "e/"][chance.below(3) as usize], ["a", "b", "c"][chance.below(3) as usize])
    };
    let (from, to) = (path(), path());
    match chance.below(10) {
        0..=2 => {
            let text = format!("step {step}");
            world.write_path(tree, &from, &text).await.expect("written");
            expected.insert(from, text);
        }
        3..=5 => {
            let Some(text) = expected.get(&from).cloned().filter(|_| from != to) else { return };
            match share(world, tree, &from, &to).await {
                Ok(()) => drop(expected.insert(to, text)),
                // Its bytes are on their way out; the file was made all the same.
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Conflict);
                    expected.entry(to).or_default();
                }
            }
        }
        9 => {
            let source = resolve(tree, "d").await.expect("found").ino;
            match tree.clone_tree(source, (InodeId::ROOT, format!("clone-{step}").as_bytes()), &Alone).await {
                Ok(_) => {
                    let below = |(path, text): (&String, &String)| {
                        Some((format!("clone-{step}/{}", path.strip_prefix("d/")?), text.clone()))
                    };
                    let cloned: Vec<_> = expected.iter().filter_map(below).collect();
                    expected.extend(cloned);
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Conflict),
            }
        }
        6 => assert_eq!(unlink(tree, &from).await.is_ok(), expected.remove(&from).is_some()),
        7 => {
            let outcome = rename(tree, &from, &to, RenameMode::Replace).await;
            assert_eq!(outcome.is_ok(), expected.contains_key(&from), "{outcome:?}");
            if let Some(text) = expected.remove(&from) {
                expected.insert(to, text);
            }
        }
        _ => {
            rename(tree, "d", "e", RenameMode::Exchange).await.expect("exchanged");
            let moved = |path: &String| match path.split_once('/') {
                Some(("d", name)) => format!("e/{name}"),
                Some(("e", name)) => format!("d/{name}"),
                _ => path.clone(),
            };
            *expected = expected.iter().map(|(path, text)| (moved(path), text.clone())).collect();
        }
    }
}

/// A volume whose lent objects were copied away is whole: a check finds nothing.
#[tokio::test]
async fn fsck_knows_what_was_lent() {
    let world = World::new(Kind::Lmdb).await;
    let tree = pair(&world).await;
    world.write_path(&tree, "a", "new").await.expect("written");
    tree.drain().await.expect("drained");
    tree.sync().await.expect("synced");
    let report = tree.fsck(true).await.expect("checked");
    assert!(report.findings.is_empty(), "{report:?}");
    check(&world, &tree, &[("a", "new"), ("b", "shared")]).await;
}
