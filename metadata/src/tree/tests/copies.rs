//! Copies that take long, or are not answered: nothing is lost to one that comes late, and nobody waits for one.

use std::time::Duration;

use forebay_core::{InodeId, ObjectKey};
use forebay_io::object::{Condition, FaultMode, Faults, OperationKind};
use futures::future::FutureExt;

use super::sharing::{no_loans, share};
use super::world::*;
use crate::records::Records;
use crate::schema::Tag;
use crate::tree::{LocalTree, Placement, RenameMode, SetAttributes, Tree, resolve};

/// A file `a` that was renamed to `b`, of whose copy it is not known whether it was made.
async fn unanswered(world: &World) -> (LocalTree, InodeId) {
    let tree = world.open().await;
    world.write_path(&tree, "a", "old").await.expect("written");
    tree.close().await.expect("closed");
    unanswered_over(world).await
}

/// The same of what lies at `a`.
async fn unanswered_over(world: &World) -> (LocalTree, InodeId) {
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(30))).await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    let private = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
    tree.set_attributes(ino, private).await.expect("changed");
    rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed");
    for nth in 1..40 {
        faults.script(OperationKind::Copy, nth, FaultMode::Before);
    }
    tree.drain().await.expect("drained");
    assert!(faults.injected() > 0, "the copy failed");
    faults.clear();
    (tree, ino)
}

/// The copy comes after all.
async fn come(world: &World) {
    let (from, to) = (ObjectKey::new("a"), ObjectKey::new("b"));
    world.bucket().copy(&from, &to, 3, &Condition::IfAbsent).await.expect("nothing else is there");
}

/// A copy went on in the store after it was given up, or its process had died. The file was written again and synced, and then the
/// copy came over it.
#[tokio::test]
async fn a_copy_that_comes_late_takes_nothing_that_was_written_meanwhile() {
    for (drains, dies) in [(false, false), (true, false), (false, true), (true, true)] {
        let world = World::memory().await;
        let (mut tree, _) = unanswered(&world).await;
        if dies {
            world.crash(tree, true).await;
            tree = world.open().await;
        }
        let placed = world.write_path(&tree, "b", "new").await.expect("written");
        assert!(matches!(placed, Placement::Owned { .. }), "not where the copy may come: {placed:?}");
        if drains {
            tree.drain().await.expect("drained");
        }
        come(&world).await;
        world.pass_ttl();
        assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "new");
        world.end_doubts(&tree).await;
        world.check_objects(&[("b", "new")]).await;
        assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "new");
    }
}

/// A folder whose file system keeps no attributes says of no file who wrote it. A copy that was made, and not noted before its
/// process died, was taken for somebody's new file then: in place of what had come to its path meanwhile.
#[tokio::test]
async fn a_copy_of_which_a_folder_keeps_no_token_is_known_by_its_bytes() {
    for (bytes, content) in [("old", "new"), ("els", "els")] {
        let world = World::new(Kind::Lmdb).await;
        let (tree, _) = unanswered(&world).await;
        rename(&tree, "b", "c", RenameMode::Replace).await.expect("renamed");
        let placed = world.write_path(&tree, "b", "new").await.expect("written");
        assert!(matches!(placed, Placement::Owned { .. }), "not where the copy may come: {placed:?}");
        std::fs::write(world.scratch("objects").join("b"), bytes).expect("it is there");
        world.pass_ttl();
        tree.close().await.expect("closed");
        let tree = world.open().await;
        for advance in [Duration::ZERO, LATER, LATER] {
            world.clock.advance(advance);
            tree.drain().await.expect("drained");
            world.pass_ttl();
            assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), content, "{bytes}");
            assert_eq!(world.read_path(&tree, "c").await.expect("bytes"), "old");
        }
        world.check_objects(&[("b", content), ("c", "old")]).await;
    }
}

#[tokio::test]
async fn a_copy_that_comes_late_is_still_the_files() {
    let world = World::memory().await;
    let (tree, ino) = unanswered(&world).await;
    for late in [false, true] {
        if late {
            world.clock.advance(LATER);
            tree.drain().await.expect("drained");
        } else {
            come(&world).await;
            world.pass_ttl();
        }
        let found = resolve(&tree, "b").await.expect("found");
        assert_eq!((found.ino, found.mode & 0o777), (ino, 0o600), "it is the same file");
        assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "old");
    }
    world.check_objects(&[("b", "old")]).await;
}

/// It was taken for new content: the file's mtime went for that of the copy, and who was writing it lost what he had written.
#[tokio::test]
async fn a_copy_that_comes_late_is_no_new_content() {
    for is_large in [false, true] {
        let world = World::memory().await;
        let faults = Faults::new();
        let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(30))).await;
        let content = if is_large { "7".repeat((64 << 20) + 1) } else { "7".to_owned() };
        world.write_path(&tree, "a", &content).await.expect("written");
        let before = resolve(&tree, "a").await.expect("found");
        rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed");
        let kind = if is_large { OperationKind::Complete } else { OperationKind::Copy };
        faults.script(kind, 1, FaultMode::LoseReplyThenDown);
        tree.drain().await.expect("drained");
        faults.set_down(false);
        world.check_objects(&[("a", &content), ("b", &content)]).await;
        assert_eq!(
            tree.layout(before.ino).await.expect("a layout").0.blobs().next().expect("a blob").key.as_str(),
            "a"
        );
        world.clock.advance(LATER);
        tree.drain().await.expect("drained");
        world.check_objects(&[("b", &content)]).await;
        let after = resolve(&tree, "b").await.expect("found");
        assert_eq!((after.ino, after.generation, after.mtime), (before.ino, before.generation, before.mtime));
    }
}

#[tokio::test]
async fn a_copy_that_comes_after_its_file_was_removed_is_removed() {
    for comes in [false, true] {
        let world = World::memory().await;
        let (tree, _) = unanswered(&world).await;
        unlink(&tree, "b").await.expect("unlinked");
        tree.drain().await.expect("drained");
        if comes {
            come(&world).await;
        }
        world.pass_ttl();
        assert_eq!(paths(&tree).await, [""; 0]);
        world.clock.advance(LATER);
        tree.drain().await.expect("drained");
        world.check_objects(&[]).await;
        world.pass_ttl();
        assert_eq!(paths(&tree).await, [""; 0]);
    }
}

/// What another tool put where a copy was to come, of the size of that, was deleted once the file was elsewhere.
#[tokio::test]
async fn what_is_put_where_a_copy_was_to_come_is_nobody_elses() {
    // In a folder, all that others wrote has the same token: an empty one.
    for kind in [Kind::Memory, Kind::Lmdb] {
        for (is_removed, is_imported) in [(false, false), (false, true), (true, false), (true, true)] {
            println!("{kind:?}, removed: {is_removed}, imported: {is_imported}");
            let world = World::new(kind).await;
            check_outsiders_object(&world, is_removed, is_imported).await;
        }
    }
}

async fn check_outsiders_object(world: &World, is_removed: bool, is_imported: bool) {
    let tree = if is_imported {
        world.put("a", b"old").await;
        unanswered_over(world).await.0
    } else {
        unanswered(world).await.0
    };
    match is_removed {
        true => unlink(&tree, "b").await.expect("unlinked"),
        false => rename(&tree, "b", "c", RenameMode::Replace).await.expect("renamed"),
    }
    world.put("b", b"new").await;
    for advance in [Duration::ZERO, LATER, LATER] {
        world.clock.advance(advance);
        world.pass_ttl();
        tree.drain().await.expect("drained");
        assert_eq!(world.objects().await["b"], b"new");
    }
    world.pass_ttl();
    assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "new");
    match is_removed {
        true => world.check_objects(&[("b", "new")]).await,
        false => world.check_objects(&[("b", "new"), ("c", "old")]).await,
    }
}

/// A newer content on its way to the path where an older one lies: what is written there after the file was removed is
/// somebody else's, whatever its size.
#[tokio::test]
async fn a_copy_in_doubt_takes_nothing_of_who_comes_after() {
    let world = World::memory().await;
    world.put("a", &vec![7; (64 << 20) + 1]).await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(30))).await;
    share(&world, &tree, "a", "b").await.expect("shared");
    let placed = world.write_path(&tree, "a", "newer").await.expect("written");
    assert!(matches!(placed, Placement::Owned { .. }), "{placed:?}");
    for nth in 1..40 {
        faults.script(OperationKind::Copy, nth, FaultMode::Before);
    }
    tree.drain().await.expect("drained");
    assert!(faults.injected() > 0, "the copy failed");
    faults.clear();
    unlink(&tree, "a").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.write_path(&tree, "a", "other").await.expect("written");
    for advance in [Duration::ZERO, LATER, LATER] {
        world.clock.advance(advance);
        tree.drain().await.expect("drained");
        world.pass_ttl();
        assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "other");
    }
    assert_eq!(world.objects().await["a"], b"other", "and it is at its path in the end");
}

/// A copy that was never made is made again when that is certain.
#[tokio::test]
async fn a_copy_that_never_came_is_made_later() {
    let world = World::memory().await;
    let (tree, _) = unanswered(&world).await;
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "old")]).await;
    world.clock.advance(LATER);
    tree.drain().await.expect("drained");
    world.check_objects(&[("b", "old")]).await;
}

/// Overwriting a large file that a copy shares waited for that to be copied away, and failed when it took 30 s.
#[tokio::test]
async fn writing_over_a_large_lent_file_waits_for_no_copy() {
    let world = World::memory().await;
    let big = vec![7; (64 << 20) + 1];
    world.put("a", &big).await;
    let tree = world.open().await;
    share(&world, &tree, "a", "b").await.expect("shared");
    let before = world.bucket().counters();
    let sent = || {
        let sent = world.bucket().counters().since(&before);
        [OperationKind::Copy, OperationKind::CopyPart].map(|kind| sent.of(kind).requests)
    };
    let ino = resolve(&tree, "a").await.expect("found").ino;
    let placement = tree.place(ino, false).await.expect("placed");
    assert!(matches!(placement, Placement::Owned { .. }), "{placement:?}");
    assert_eq!(sent(), [0, 0]);
    // The mover, which is faster than the writer, finds nothing to move yet, but makes room.
    tree.drain().await.expect("drained");
    assert_eq!(sent(), [0, 1]);
    let blob = world.put_at(&placement, b"new").await.expect("put").blob();
    let (_, generation) = tree.layout(ino).await.expect("a layout");
    let layout = forebay_core::FileLayout::of_blob(blob);
    tree.commit_layout(ino, generation, layout, world.clock.wall()).await.expect("committed");
    tree.drain().await.expect("drained");
    assert_eq!(sent(), [1, 1], "the large one in parts, and the new content");
    let objects = world.objects().await;
    let (_, others): (Vec<_>, Vec<_>) = objects.iter().partition(|(key, _)| *key == "a");
    assert_eq!(objects["a"], b"new");
    assert!(others.len() == 1 && *others[0].1 == big, "the copy has its own object");
    unlink(&tree, "a").await.expect("unlinked");
    unlink(&tree, "b").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
    no_loans(&tree).await;
}

/// What is brought together in the background gets its own path when it asks again.
#[tokio::test]
async fn room_is_made_for_who_comes_back() {
    let world = World::memory().await;
    world.put("a", &vec![7; (64 << 20) + 1]).await;
    let tree = world.open().await;
    share(&world, &tree, "a", "b").await.expect("shared");
    let ino = resolve(&tree, "a").await.expect("found").ino;
    let placement = tree.place(ino, false).await.expect("placed");
    assert!(matches!(placement, Placement::Owned { comes_free: true, .. }), "{placement:?}");
    tree.drain().await.expect("drained");
    let placement = tree.place(ino, false).await.expect("placed");
    assert!(matches!(placement, Placement::Own { .. }), "{placement:?}");
}

/// Renaming a directory of many gigabytes made the closing of unrelated files fail: each waited for its turn.
#[tokio::test]
async fn writers_do_not_wait_for_copies_of_others() {
    let world = World::memory().await;
    for key in ["a", "d", "x"] {
        world.put(key, key.as_bytes()).await;
    }
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    share(&world, &tree, "a", "b").await.expect("shared");
    rename(&tree, "x", "y", RenameMode::Replace).await.expect("renamed");
    let gate = faults.gate(1);
    let write = async {
        gate.reached().await;
        unlink(&tree, "d").await.expect("unlinked");
        let mut placed = Vec::new();
        // Lent, doomed, and being copied itself.
        for path in ["a", "d", "y"] {
            placed.push(world.write_path(&tree, path, "new").await.expect("written"));
        }
        gate.open();
        placed
    };
    let both = async { tokio::join!(tree.drain(), write) };
    let (drained, placed) = tokio::time::timeout(Duration::from_secs(60), both).await.expect("nobody waits");
    drained.expect("drained");
    assert!(placed.iter().all(|placed| matches!(placed, Placement::Owned { .. })), "{placed:?}");
    tree.drain().await.expect("drained");
    world.check_objects(&[("*", "a"), ("a", "new"), ("d", "new"), ("y", "new")]).await;
    assert_eq!(world.bucket().head(&ObjectKey::new("x")).await.expect("an answer"), None);
    for (path, text) in [("a", "new"), ("b", "a"), ("d", "new"), ("y", "new")] {
        assert_eq!(world.read_path(&tree, path).await.expect("bytes"), text);
    }
}

/// Nor for deletions: a writer who did not know what had come of the last try waited until these were done.
#[tokio::test]
async fn writers_who_tried_before_do_not_wait_for_deletions() {
    let world = World::memory().await;
    world.put("d", b"d").await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    world.write_path(&tree, "w", "old").await.expect("written");
    let ino = resolve(&tree, "w").await.expect("found").ino;
    resolve(&tree, "d").await.expect("found");
    tree.place(ino, false).await.expect("placed");
    unlink(&tree, "d").await.expect("unlinked");
    let gate = faults.gate(1);
    let write = async {
        gate.reached().await;
        let placed = world.write(&tree, ino, b"new").await.expect("written");
        gate.open();
        placed
    };
    let both = async { tokio::join!(tree.drain(), write) };
    let (drained, placed) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("nobody waits");
    drained.expect("drained");
    assert!(matches!(placed, Placement::Owned { comes_free: true, .. }), "{placed:?}");
    for advance in [Duration::ZERO, LATER, LATER] {
        world.clock.advance(advance);
        tree.drain().await.expect("drained");
        assert_eq!(world.read_path(&tree, "w").await.expect("bytes"), "new");
    }
    world.check_objects(&[("w", "new")]).await;
}

/// A store said that it had copied newer content over older, and had not: the older object became the file's content, and
/// the newer one was deleted.
#[tokio::test]
async fn a_copy_that_only_seems_to_be_made_is_not_the_content() {
    let world = World::memory().await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(30))).await;
    world.write_path(&tree, "a", "old").await.expect("written");
    tree.drain().await.expect("drained");
    let ino = resolve(&tree, "a").await.expect("found").ino;
    let blob =
        world.bucket().put(&tree.fresh_blob(), "new".into(), Condition::IfAbsent).await.expect("put").blob();
    let (_, generation) = tree.layout(ino).await.expect("a layout");
    let layout = forebay_core::FileLayout::of_blob(blob);
    tree.commit_layout(ino, generation, layout, world.clock.wall()).await.expect("committed");
    tree.change(move |change| change.queue_move(ino)).await.expect("queued");
    faults.script(OperationKind::Copy, 1, FaultMode::Skip);
    tree.drain().await.expect("drained");
    assert_eq!(faults.injected(), 1, "the copy was asked for");
    world.check_objects(&[("*", "new"), ("a", "old")]).await;
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "new");
    world.clock.advance(LATER);
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "new")]).await;
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "new");
}

/// A panic within one request ended the mover's task: nothing was moved, deleted or freed until the next mount.
#[tokio::test]
async fn a_panic_does_not_end_the_mover() {
    let mut world = World::memory().await;
    let faults = Faults::new();
    world.bucket = Some(world.bucket().with_faults(&faults));
    world.put("a", b"old").await;
    let tree = world.open_moving().await;
    resolve(&tree, "a").await.expect("found");
    for nth in 1..=2 {
        faults.script(OperationKind::Copy, nth, FaultMode::Panic);
    }
    rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed");
    let moved = async {
        while world.bucket().head(&ObjectKey::new("b")).await.expect("an answer").is_none() {
            world.clock.advance(Duration::from_secs(10));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), moved).await.expect("it is moved");
    assert_eq!(faults.injected(), 2);
    tree.close().await.expect("closed");
}

/// Lets the mover work until nothing can be done, then once more. Returns how many copies it asked for then, and asserts
/// that it rests after that, and that no record is left of what it tried.
async fn copies_of_a_pass(tree: &LocalTree) -> u64 {
    let records = || {
        tree.change(|change| {
            let (start, end) = change.keys().family(Tag::Deletion);
            Ok(change.reads().scan(&start, &end, 1000)?.len())
        })
    };
    tree.drain().await.expect("drained");
    let _ = tree.shared.work.notified().now_or_never();
    let (noted, before) =
        (records().await.expect("records"), tree.mover.as_ref().expect("a mover").bucket().counters());
    tree.drain().await.expect("drained");
    assert_eq!(tree.shared.work.notified().now_or_never(), None, "what fails keeps nobody busy");
    assert_eq!(records().await.expect("records"), noted, "nothing is left of what was not made");
    tree.mover.as_ref().expect("a mover").bucket().counters().since(&before).of(OperationKind::Copy).requests
}

#[tokio::test]
async fn a_copy_that_the_store_does_not_make_is_not_asked_for_again_at_once() {
    // What is refused as if something were in the way is tried aside, once.
    for (mode, copies) in [(FaultMode::Deny, 1), (FaultMode::Refuse, 2)] {
        let world = World::memory().await;
        world.put("a", b"old").await;
        let faults = Faults::new();
        let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
        rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed");
        for nth in 1..200 {
            faults.script(OperationKind::Copy, nth, mode);
        }
        assert_eq!(copies_of_a_pass(&tree).await, copies, "{mode:?}");
        faults.clear();
        tree.drain().await.expect("drained");
        world.check_objects(&[("b", "old")]).await;
    }
}

/// Nor of what another file shares, before its object goes.
#[tokio::test]
async fn a_copy_of_lent_bytes_that_is_denied_leaves_no_record_behind() {
    let world = World::memory().await;
    world.put("a", b"shared").await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    share(&world, &tree, "a", "b").await.expect("shared");
    unlink(&tree, "a").await.expect("removed");
    for nth in 1..200 {
        faults.script(OperationKind::Copy, nth, FaultMode::Deny);
    }
    // Once among others, and once more before the object would be deleted.
    assert_eq!(copies_of_a_pass(&tree).await, 2);
    faults.clear();
    tree.drain().await.expect("drained");
    assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "shared");
    world.check_objects(&[("*", "shared")]).await;
}

#[tokio::test]
async fn exchanged_files_whose_objects_are_gone_keep_nobody_busy() {
    for mode in [None, Some(FaultMode::Deny)] {
        let world = World::memory().await;
        let faults = Faults::new();
        let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
        for name in ["a", "b"] {
            world.put(name, name.as_bytes()).await;
        }
        rename(&tree, "a", "b", RenameMode::Exchange).await.expect("exchanged");
        match mode {
            None => {
                world.delete("a").await;
                world.delete("b").await;
            }
            Some(mode) => {
                for nth in 1..200 {
                    faults.script(OperationKind::Copy, nth, mode);
                }
            }
        }
        assert_eq!(copies_of_a_pass(&tree).await, if mode.is_some() { 2 } else { 0 });
    }
}
