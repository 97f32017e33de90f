//! Moves of which a step fails: they are made later, and keep up no others.

use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Blob, FileLayout, InodeId};
use forebay_io::object::{FaultMode, Faults, OperationKind};

use super::world::*;
use crate::records::{Change, Records};
use crate::tree::{Existing, Placement, RenameMode, Tree, resolve};

/// Files that were renamed and exchanged, of which the first goes aside: the store refuses its copy. Returns how often the
/// lease was asked for until all were at their keys; it lapses at the `nth` question, for `times` of them.
async fn moves_beside_a_lapse(is_unsure: bool, nth: u64, times: u64) -> u64 {
    let mut world = World::memory().await;
    world.committing.changes_while_unsure = is_unsure;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    faults.script(OperationKind::Copy, 1, FaultMode::Refuse);
    for key in ["a", "c", "e", "f"] {
        world.put(key, key.as_bytes()).await;
    }
    rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed");
    rename(&tree, "c", "d", RenameMode::Replace).await.expect("renamed");
    rename(&tree, "e", "f", RenameMode::Exchange).await.expect("exchanged");
    let before = world.lease.asked();
    world.lease.lapse(nth, times);
    // It comes as far as it can.
    let _ = tree.drain().await;
    let asked = world.lease.asked() - before;
    world.lease.renew();
    tree.drain().await.expect("drained");
    let objects = world.objects().await;
    let plain: Vec<_> = objects.keys().filter(|key| !key.starts_with(".forebay/")).collect();
    assert_eq!(plain, ["b", "d", "e", "f"], "the {nth}th question, {times} times");
    tree.close().await.expect("closed");
    let tree = world.open().await;
    tree.drain().await.expect("drained");
    world.check_objects(&[("b", "a"), ("d", "c"), ("e", "f"), ("f", "e")]).await;
    for (path, text) in [("b", "a"), ("d", "c"), ("e", "f"), ("f", "e")] {
        assert_eq!(world.read_path(&tree, path).await.expect("bytes"), text);
    }
    asked
}

/// What a move was planned for and one step failed, for a disk that was full or a lease that lapsed for a moment, stayed
/// where it was until the volume was mounted again.
#[tokio::test]
async fn a_step_that_fails_stops_no_move_for_good() {
    for is_unsure in [false, true] {
        let questions = moves_beside_a_lapse(is_unsure, 1, 0).await;
        assert!(questions > 10, "{questions} questions");
        for nth in 1..=questions {
            for times in [1, u64::MAX] {
                moves_beside_a_lapse(is_unsure, nth, times).await;
            }
        }
    }
}

/// One directory that the store did not list kept all that was renamed where it was, in the whole volume.
#[tokio::test]
async fn a_directory_that_cannot_be_listed_keeps_up_no_other() {
    let world = World::memory().await;
    for key in ["file", "one/d/x", "one/e/y", "one/w", "two/d/z"] {
        world.put(key, key.as_bytes()).await;
    }
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    // All are known but what is in one/d.
    for path in ["one/e/y", "one/w", "two/d/z"] {
        resolve(&tree, path).await.expect("found");
    }
    for (from, to) in [("one", "three"), ("two", "four"), ("file", "moved")] {
        rename(&tree, from, to, RenameMode::Replace).await.expect("renamed");
    }
    for nth in 1..200 {
        faults.script(OperationKind::List, nth, FaultMode::Deny);
    }
    tree.drain().await.expect("drained");
    assert!(faults.injected() > 0, "a listing was denied");
    let rest = [("moved", "file"), ("three/e/y", "one/e/y"), ("three/w", "one/w")];
    let all = |x| [&[("four/d/z", "two/d/z"), x][..], &rest].concat();
    let mut now = all(("one/d/x", "one/d/x"));
    now.sort_unstable();
    world.check_objects(&now).await;
    faults.clear();
    make_directory(&tree, "one").await.expect("made");
    let placed = world.write_path(&tree, "one/new", "new").await.expect("written");
    assert!(matches!(placed, Placement::Owned { .. }), "the old path is claimed: {placed:?}");
    tree.drain().await.expect("drained");
    let mut then = all(("three/d/x", "one/d/x"));
    then.push(("one/new", "new"));
    then.sort_unstable();
    world.check_objects(&then).await;
    let placed = world.write_path(&tree, "one/newer", "newer").await.expect("written");
    assert!(matches!(placed, Placement::Own { .. }), "and is not any more: {placed:?}");
}

/// While a large directory was moved, for hours in a far store, nothing was deleted that was removed meanwhile.
#[tokio::test]
async fn what_is_removed_while_a_large_directory_moves_goes_meanwhile() {
    let world = World::memory().await;
    for number in 0..1_100 {
        world.put(&format!("one/{number:04}"), b"x").await;
    }
    world.put("gone", b"x").await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    paths(&tree).await;
    rename(&tree, "one", "two", RenameMode::Replace).await.expect("renamed");
    // Behind the first turn.
    faults.script(OperationKind::Copy, 1_025, FaultMode::Hang);
    let gate = faults.gate(1);
    let removed = async {
        gate.reached().await;
        unlink(&tree, "gone").await.expect("unlinked");
        gate.open();
        while faults.injected() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        drained = tree.drain() => panic!("all was moved: {drained:?}"),
        () = removed => {}
    }
    let left = world.objects().await;
    assert!(left.contains_key("one/1099"), "it is being moved");
    assert!(!left.contains_key("gone") && !left.contains_key("one/0000"), "and what is gone was deleted");
}

/// Files of many GiB are few to a turn.
#[tokio::test]
async fn large_files_are_moved_a_few_in_a_turn() {
    let world = World::memory().await;
    let tree = world.open().await;
    for (name, size) in [("a", 6 << 30), ("b", 10 << 30), ("c", 1), ("d", 17 << 30), ("e", 1)] {
        let file =
            tree.create(InodeId::ROOT, name.as_bytes(), new_file(), Existing::Refuse).await.expect("made").0;
        // Nobody has brought the bytes in.
        let layout = FileLayout::of_blob(Blob::staged(tree.fresh_blob(), size, "host"));
        tree.commit_layout(file.ino, 0, layout, time(7)).await.expect("committed");
        tree.change(move |change| change.queue_move(file.ino)).await.expect("queued");
    }
    let mover = tree.mover.as_ref().expect("a mover");
    let (mut next, mut turns) = (None, 0);
    loop {
        next = mover.move_files(next).await.expect("looked at").1;
        turns += 1;
        if next.is_none() {
            break;
        }
    }
    assert_eq!(turns, 3, "a and b, c and d, e");
}

/// A directory that left a renamed one, in the moment in which the mover began to walk that, was missed by the walk, and what lay
/// in it by the claims that went then: the old path showed it once more.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_rename_beside_the_beginning_of_a_walk_is_not_missed() {
    let world = World::memory().await;
    world.put("one/d/x", b"x").await;
    let tree = Arc::new(world.open().await);
    paths(&*tree).await;
    rename(&tree, "one", "three", RenameMode::Replace).await.expect("renamed");
    let three = resolve(&*tree, "three").await.expect("found").ino;
    let (begun, has_begun) = std::sync::mpsc::channel();
    let (second, leave) = (tree.clone(), move |change: &mut Change<'_, '_>| {
        let (from, to) = ((three, &b"d"[..]), (InodeId::ROOT, &b"e"[..]));
        let renamed = crate::tree::rename::rename(change, from, to, RenameMode::Replace)?;
        // It is not applied before it returns: time enough for the mover to begin.
        begun.send(()).ok();
        std::thread::sleep(Duration::from_millis(300));
        Ok(renamed)
    });
    let leaving = tokio::spawn(async move { second.change(leave).await });
    tokio::task::block_in_place(|| has_begun.recv().expect("begun"));
    tree.mover.as_ref().expect("a mover").walk_subtrees().await.expect("walked");
    leaving.await.expect("a task").expect("renamed");
    let is_claimed = tree.look(|look| Ok(look.claim("one/")?.or(look.claim("one/d/x")?).is_some()));
    assert!(is_claimed.await.expect("a look"), "what lies at the old path is the renamed file's");
    tree.drain().await.expect("drained");
    world.check_objects(&[("e/x", "x")]).await;
    assert_eq!(paths(&*tree).await, ["e/", "e/x", "three/"]);
}
