//! What is deleted can be brought back until its time is over, whatever takes its place, also over power cuts; then
//! nothing of it is left.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_core::{Blob, ErrorKind, FileKind, FileLayout, InodeId};
use forebay_io::object::{Condition, FaultMode, Faults, OperationKind};

use super::sharing::{no_loans, share};
use super::world::*;
use crate::records::{Change, Records};
use crate::schema::Orphan;
use crate::testing::{Chance, rounds};
use crate::tree::{Existing, LocalTree, Placement, RenameMode, TrashId, Trashed, Tree, resolve};

const ROOT: InodeId = InodeId::ROOT;
const KEPT: Duration = Duration::from_secs(60);

async fn world(kind: Kind) -> World {
    let mut world = World::new(kind).await;
    world.settings.trash_ms = KEPT.as_millis() as u64;
    world
}

async fn trash(tree: &LocalTree) -> Vec<Trashed> {
    let mut found: Vec<Trashed> = Vec::new();
    loop {
        // A small page, so that pages are turned.
        let page = tree.trash(found.last().map(|last| last.id), 3).await.expect("the trash");
        if page.is_empty() {
            return found;
        }
        found.extend(page);
    }
}

/// The paths in the trash, in order.
async fn deleted(tree: &LocalTree) -> Vec<String> {
    let found = trash(tree).await;
    let mut paths: Vec<String> =
        found.into_iter().map(|one| String::from_utf8_lossy(&one.path).into_owned()).collect();
    paths.sort();
    paths
}

/// What was deleted last at `path`.
pub(super) async fn newest(tree: &LocalTree, path: &str) -> TrashId {
    let found = trash(tree).await.into_iter().filter(|one| one.path == path);
    found.max_by_key(|one| (one.deleted, one.id)).unwrap_or_else(|| panic!("{path} is not in the trash")).id
}

/// Time for everything in the trash is over.
async fn pass_time(world: &World, tree: &LocalTree) {
    world.clock.advance(KEPT);
    for _ in 0..2 {
        tree.drain().await.expect("drained");
    }
    assert!(trash(tree).await.is_empty());
}

async fn sound(tree: &LocalTree) {
    let found = tree.fsck(false).await.expect("checked");
    assert!(found.is_clean(), "{:?}", found.findings);
}

/// Promise S43: What is deleted or replaced through a mount with a trash can be brought back for as long as the trash keeps
/// it, with its bytes, owner, mode, times and extended attributes.
#[tokio::test]
async fn what_was_deleted_comes_back() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let world = world(kind).await;
        world.put("a", b"first").await;
        let tree = world.open().await;
        let before = resolve(&tree, "a").await.expect("found");
        unlink(&tree, "a").await.expect("unlinked");
        sound(&tree).await;
        tree.drain().await.expect("drained");
        world.check_objects(&[("*", "first")]).await;
        assert_eq!(deleted(&tree).await, ["a"]);

        let placed = world.write_path(&tree, "a", "second").await.expect("written");
        assert!(matches!(placed, Placement::Own { .. }), "the path is free: {placed:?}");
        let refused = tree.restore(newest(&tree, "a").await, ROOT, b"a").await;
        assert_eq!(kind_of(refused), ErrorKind::Exists);
        let back = tree.restore(newest(&tree, "a").await, ROOT, b"b").await.expect("restored");
        assert_eq!((back.mtime, back.mode, back.ino), (before.mtime, before.mode, before.ino));
        for drained in [false, true] {
            if drained {
                tree.drain().await.expect("drained");
            }
            assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "first");
            assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "second");
            sound(&tree).await;
        }
        world.check_objects(&[("a", "second"), ("b", "first")]).await;
        no_loans(&tree).await;
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn what_comes_back_at_once_is_an_object_again() {
    let world = world(Kind::Memory).await;
    world.put("a", b"bytes").await;
    let tree = world.open().await;
    unlink(&tree, "a").await.expect("unlinked");
    tree.restore(newest(&tree, "a").await, ROOT, b"a").await.expect("restored");
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "bytes");
    for _ in 0..2 {
        tree.drain().await.expect("drained");
    }
    world.check_objects(&[("a", "bytes")]).await;
    sound(&tree).await;
    no_loans(&tree).await;
}

/// A write that was begun and not committed holds no path after its file was deleted; what it brought is kept.
#[tokio::test]
async fn an_uncommitted_write_of_a_deleted_file_leaves_the_path() {
    for is_put in [false, true] {
        let world = world(Kind::Memory).await;
        let tree = world.open().await;
        let (file, _) = tree.create(ROOT, b"a", new_file(), Existing::Refuse).await.expect("made");
        let placement = tree.place(file.ino, false).await.expect("placed");
        if is_put {
            world.put_at(&placement, b"late").await.expect("put");
        } else {
            tree.settle(file.ino).await.expect("given up");
        }
        unlink(&tree, "a").await.expect("unlinked");
        for _ in 0..2 {
            tree.drain().await.expect("drained");
        }
        let placed = world.write_path(&tree, "a", "new").await.expect("written");
        assert!(matches!(placed, Placement::Own { .. }), "{placed:?}");
        let kept = world.read(&tree, newest(&tree, "a").await.ino).await.expect("bytes");
        assert_eq!(kept, if is_put { &b"late"[..] } else { b"" });
        pass_time(&world, &tree).await;
        world.check_objects(&[("a", "new")]).await;
        sound(&tree).await;
    }
}

/// A writer does not wait for the copy of something large: its bytes come to the path afterwards.
#[tokio::test]
async fn a_new_file_does_not_wait_for_a_large_one_to_be_copied_away() {
    let world = world(Kind::Memory).await;
    let large = vec![7; (64 << 20) + 1];
    world.put("a", &large).await;
    let tree = world.open().await;
    unlink(&tree, "a").await.expect("unlinked");
    let placed = world.write_path(&tree, "a", "small").await.expect("written");
    assert!(matches!(placed, Placement::Owned { .. }), "{placed:?}");
    let deleted = newest(&tree, "a").await;
    for drained in [false, true] {
        if drained {
            tree.drain().await.expect("drained");
            assert_eq!(world.objects().await["a"], b"small");
        }
        assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "small");
        assert!(world.read(&tree, deleted.ino).await.expect("bytes") == large);
        sound(&tree).await;
    }
}

/// A whole tree is deleted, as `rm -r` does, and what a rename replaces is deleted, too.
#[tokio::test]
async fn directories_remember_the_way() {
    let world = world(Kind::Lmdb).await;
    let tree = world.open().await;
    make_directory(&tree, "d").await.expect("made");
    make_directory(&tree, "d/e").await.expect("made");
    world.write_path(&tree, "d/e/f", "deep").await.expect("written");
    world.write_path(&tree, "d/x", "replaced").await.expect("written");
    world.write_path(&tree, "y", "new").await.expect("written");
    rename(&tree, "y", "d/x", RenameMode::Replace).await.expect("renamed");
    world.clock.advance(Duration::from_millis(1));
    unlink(&tree, "d/x").await.expect("unlinked");
    unlink(&tree, "d/e/f").await.expect("unlinked");
    let directory = resolve(&tree, "d").await.expect("found").ino;
    tree.remove_directory(directory, b"e").await.expect("removed");
    tree.remove_directory(ROOT, b"d").await.expect("removed");
    assert_eq!(deleted(&tree).await, ["d", "d/e", "d/e/f", "d/x", "d/x"]);
    sound(&tree).await;
    tree.drain().await.expect("drained");
    sound(&tree).await;

    let gone = tree.restore(newest(&tree, "d/e/f").await, directory, b"f").await;
    assert_eq!(kind_of(gone), ErrorKind::NotFound);
    let d = tree.restore(newest(&tree, "d").await, ROOT, b"d").await.expect("restored").ino;
    rename(&tree, "d", "moved", RenameMode::Replace).await.expect("renamed");
    assert_eq!(deleted(&tree).await, ["moved/e", "moved/e/f", "moved/x", "moved/x"]);
    let e = tree.restore(newest(&tree, "moved/e").await, d, b"e").await.expect("restored").ino;
    tree.restore(newest(&tree, "moved/e/f").await, e, b"f").await.expect("restored");
    tree.restore(newest(&tree, "moved/x").await, d, b"x").await.expect("restored");
    for _ in 0..2 {
        tree.drain().await.expect("drained");
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["moved/", "moved/e/", "moved/e/f", "moved/x"]);
        sound(&tree).await;
    }
    pass_time(&world, &tree).await;
    world.check_objects(&[("moved/e/f", "deep"), ("moved/x", "new")]).await;
    sound(&tree).await;
    tree.close().await.expect("closed");
}

#[tokio::test]
async fn time_frees_what_nobody_reads() {
    let world = world(Kind::Memory).await;
    let tree = world.open().await;
    for name in ["a", "b", "c"] {
        world.write_path(&tree, name, name).await.expect("written");
    }
    let b = resolve(&tree, "b").await.expect("found").ino;
    tree.opened(b).await.expect("opened");
    unlink(&tree, "a").await.expect("unlinked");
    unlink(&tree, "b").await.expect("unlinked");
    assert_eq!(deleted(&tree).await, ["a"], "an open file is in use, not in the trash");
    tree.closed(b).await.expect("closed");
    assert_eq!(deleted(&tree).await, ["a", "b"]);
    tree.opened(b).await.expect("opened");
    world.clock.advance(KEPT);
    tree.drain().await.expect("drained");
    assert_eq!(deleted(&tree).await, ["b"]);
    assert!(!tree.purge(newest(&tree, "b").await).await.expect("looked at"), "somebody reads it");
    assert_eq!(world.read(&tree, b).await.expect("bytes"), b"b");
    tree.closed(b).await.expect("closed");
    unlink(&tree, "c").await.expect("unlinked");
    assert!(tree.purge(newest(&tree, "c").await).await.expect("purged"));
    let report = tree.collect_garbage(true).await.expect("looked at");
    assert_eq!((report.trash, report.trash_waiting), (1, 0));
    tree.collect_garbage(false).await.expect("collected");
    assert!(trash(&tree).await.is_empty());
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
    sound(&tree).await;
}

/// What an outsider deletes is gone from the bucket: there is nothing to be kept. Nor is there without a trash.
#[tokio::test]
async fn what_is_gone_already_is_not_kept() {
    let mut world = world(Kind::Memory).await;
    world.put("a", b"theirs").await;
    world.put("d/b", b"theirs").await;
    let tree = world.open().await;
    paths(&tree).await;
    let open = resolve(&tree, "a").await.expect("found").ino;
    tree.opened(open).await.expect("opened");
    world.delete("a").await;
    world.delete("d/b").await;
    world.pass_ttl();
    assert!(paths(&tree).await.is_empty());
    tree.closed(open).await.expect("closed");
    assert!(trash(&tree).await.is_empty());
    tree.close().await.expect("closed");
    world.settings.trash_ms = 0;
    let tree = world.open().await;
    world.write_path(&tree, "b", "ours").await.expect("written");
    unlink(&tree, "b").await.expect("unlinked");
    assert!(trash(&tree).await.is_empty());
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
}

/// A trash that a mount filled outlives it, and the next one that has none keeps it for its time.
#[tokio::test]
async fn the_time_is_that_of_the_mount_that_deleted() {
    let mut world = world(Kind::Memory).await;
    let tree = world.open().await;
    world.write_path(&tree, "a", "kept").await.expect("written");
    unlink(&tree, "a").await.expect("unlinked");
    tree.close().await.expect("closed");
    world.settings.trash_ms = 0;
    let tree = world.open().await;
    tree.drain().await.expect("drained");
    tree.restore(newest(&tree, "a").await, ROOT, b"a").await.expect("restored");
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "kept");
}

/// What was open when its mount died went to the trash of the next mount: where that had none, it was gone for good.
#[tokio::test]
async fn the_time_of_what_was_open_is_that_of_the_mount_that_deleted() {
    let kept_ms = KEPT.as_millis() as u64;
    for (deletes, is_of_before, next, kept) in
        [(kept_ms, false, 0, kept_ms), (0, false, kept_ms, 0), (kept_ms, false, 7, kept_ms), (0, true, 7, 7)]
    {
        println!("{deletes}, then {next}; a record of before this was kept: {is_of_before}");
        let mut world = World::memory().await;
        world.settings.trash_ms = deletes;
        let tree = world.open().await;
        world.write_path(&tree, "a", "bytes").await.expect("written");
        let ino = resolve(&tree, "a").await.expect("found").ino;
        tree.opened(ino).await.expect("opened");
        unlink(&tree, "a").await.expect("unlinked");
        if is_of_before {
            let old = move |change: &mut Change<'_, '_>| {
                let key = change.keys().orphan(change.shared.session, ino);
                change.put(key, Orphan::Open { kept_ms: None }.encode())
            };
            tree.change(old).await.expect("written");
        }
        tree.sync().await.expect("synced");
        world.crash(tree, false).await;
        world.settings.trash_ms = next;
        let tree = world.open().await;
        tree.drain().await.expect("drained");
        let due_ms = tree.shared.now_ms() + kept;
        let found: Vec<TrashId> = trash(&tree).await.into_iter().map(|one| one.id).collect();
        if kept == 0 {
            assert_eq!(found, []);
            world.check_objects(&[]).await;
            continue;
        }
        assert_eq!(found, [TrashId { due_ms, ino }]);
        tree.restore(found[0], ROOT, b"b").await.expect("restored");
        assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "bytes");
    }
}

#[tokio::test]
async fn keeping_what_is_deleted_can_be_cut_off_at_any_request() {
    let kinds = [OperationKind::Head, OperationKind::Copy, OperationKind::Put, OperationKind::Delete];
    for cut in Cut::each(&kinds, 4) {
        let world = world(Kind::Memory).await;
        for key in ["gone", "over", "again", "back"] {
            world.put(key, key.as_bytes()).await;
        }
        let (tree, faults) = cut.open(&world).await;
        paths(&tree).await;
        for key in ["gone", "again", "back"] {
            unlink(&tree, key).await.expect("unlinked");
        }
        rename(&tree, "over", "there", RenameMode::Replace).await.expect("renamed");
        world.write_path(&tree, "new", "new").await.expect("written");
        rename(&tree, "new", "there", RenameMode::Replace).await.expect("renamed");
        tree.restore(newest(&tree, "back").await, ROOT, b"back").await.expect("restored");
        tree.sync().await.expect("synced");
        cut.strike(&faults);
        let written = world.write_path(&tree, "again", "second").await.is_ok();
        tree.sync().await.expect("synced");
        let tree = cut.reopen(&world, tree).await;
        for drained in [false, true] {
            if drained {
                for _ in 0..2 {
                    tree.drain().await.expect("drained");
                }
            }
            assert_eq!(deleted(&tree).await, ["again", "gone", "there"]);
            for (path, text) in [("gone", "gone"), ("there", "over"), ("again", "again")] {
                let kept = world.read(&tree, newest(&tree, path).await.ino).await.expect("bytes");
                assert_eq!(kept, text.as_bytes(), "{path}, drained: {drained}");
            }
            assert_eq!(world.read_path(&tree, "there").await.expect("bytes"), "new");
            assert_eq!(world.read_path(&tree, "back").await.expect("bytes"), "back");
            let again = world.read_path(&tree, "again").await.expect("bytes");
            assert!(again == "second" || (again.is_empty() && !written), "{again}");
            sound(&tree).await;
        }
        pass_time(&world, &tree).await;
        world.end_doubts(&tree).await;
        let mut left = vec![("back", "back"), ("there", "new")];
        if !world.read_path(&tree, "again").await.expect("bytes").is_empty() {
            left.insert(0, ("again", "second"));
        }
        world.check_objects(&left).await;
        no_loans(&tree).await;
        sound(&tree).await;
    }
}

/// Random deletions, restorations, copies, moves and cuts: every file and everything in the trash keeps its bytes, and
/// when its time is over nothing is left of what was deleted.
#[tokio::test]
async fn random_histories_keep_what_was_deleted() {
    for _ in 0..rounds(8) {
        let mut chance = Chance::fresh();
        let world = world(Kind::Memory).await;
        let mut tree = world.open().await;
        make_directory(&tree, "d").await.expect("made");
        let (mut live, mut kept) = (BTreeMap::new(), BTreeMap::new());
        for step in 0..120 {
            random_step(&world, &tree, &mut chance, (&mut live, &mut kept), step).await;
            match chance.below(10) {
                0 => tree.drain().await.expect("drained"),
                1 => {
                    tree.sync().await.expect("synced");
                    world.crash(tree, chance.below(2) == 0).await;
                    tree = world.open().await;
                }
                2 => sound(&tree).await,
                _ => {}
            }
            for (path, text) in &live {
                assert_eq!(&world.read_path(&tree, path).await.expect("bytes"), text, "{path} at {step}");
            }
            for (id, text) in &kept {
                let bytes = world.read(&tree, id.ino).await.expect("bytes");
                assert_eq!(&String::from_utf8_lossy(&bytes), text, "{id} at {step}");
            }
            assert_eq!(trash(&tree).await.len(), kept.len());
        }
        tree.sync().await.expect("synced");
        // What was placed and not committed goes with the session.
        world.crash(tree, false).await;
        let tree = world.open().await;
        pass_time(&world, &tree).await;
        sound(&tree).await;
        for path in live.keys() {
            unlink(&tree, path).await.expect("unlinked");
        }
        pass_time(&world, &tree).await;
        world.check_objects(&[]).await;
        no_loans(&tree).await;
    }
}

async fn random_step(
    world: &World,
    tree: &LocalTree,
    chance: &mut Chance,
    (live, kept): (&mut BTreeMap<String, String>, &mut BTreeMap<TrashId, String>),
    step: u32,
) {
    let mut path =
        || format!("{}{}", ["", "d/"][chance.below(2) as usize], ["a", "b"][chance.below(2) as usize]);
    let (from, to) = (path(), path());
    let before = trash(tree).await;
    let mut lost = None;
    match chance.below(9) {
        0..=2 => {
            let text = format!("step {step}");
            world.write_path(tree, &from, &text).await.expect("written");
            live.insert(from, text);
        }
        3 | 4 => {
            lost = live.remove(&from);
            assert_eq!(unlink(tree, &from).await.is_ok(), lost.is_some());
        }
        5 if from != to && live.contains_key(&from) => {
            rename(tree, &from, &to, RenameMode::Replace).await.expect("renamed");
            let text = live.remove(&from).expect("it was there");
            lost = live.insert(to, text);
        }
        6 if from != to && live.contains_key(&from) => match share(world, tree, &from, &to).await {
            Ok(()) => {
                let text = live[&from].clone();
                live.insert(to, text);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Conflict);
                live.entry(to).or_default();
            }
        },
        7 | 8 if !kept.is_empty() => {
            let nth = chance.below(kept.len() as u64) as usize;
            let (id, text) = kept.iter().nth(nth).map(|(id, text)| (*id, text.clone())).expect("one");
            let (directory, name) = split(tree, &to).await.expect("found");
            match tree.restore(id, directory, name.as_bytes()).await {
                Ok(_) => {
                    assert!(kept.remove(&id).is_some() && live.insert(to, text).is_none());
                }
                Err(error) => assert!(error.kind() == ErrorKind::Exists && live.contains_key(&to)),
            }
        }
        _ => {}
    }
    if let Some(text) = lost {
        let after = trash(tree).await;
        let new = after.into_iter().find(|one| !before.contains(one)).expect("what was deleted is kept");
        kept.insert(new.id, text);
    }
}

/// Names for programs and people are read back as they are shown.
#[tokio::test]
async fn names_of_what_is_in_the_trash_are_read_back() {
    let world = world(Kind::Alone).await;
    let tree = world.open().await;
    tree.create(ROOT, b"pipe", new_inode(FileKind::Fifo), Existing::Refuse).await.expect("made");
    unlink(&tree, "pipe").await.expect("unlinked");
    let id = newest(&tree, "pipe").await;
    assert_eq!(id.to_string().parse::<TrashId>().expect("a name"), id);
    for text in ["", "7", "7-", "-7", "7-x", "x-7"] {
        assert_eq!(text.parse::<TrashId>().expect_err(text).kind(), ErrorKind::Invalid);
    }
}

/// What a host had staged, and brought to the store under its own key after its file was deleted, stayed there for good.
#[tokio::test]
async fn what_was_staged_when_it_was_deleted_is_an_object_again_once_it_is_back() {
    for (is_large, is_answered) in [(false, true), (false, false), (true, true), (true, false)] {
        println!("large: {is_large}, answered: {is_answered}");
        let world = world(Kind::Memory).await;
        let faults = Faults::new();
        let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(30))).await;
        let text = if is_large { "7".repeat((64 << 20) + 1) } else { "staged".to_owned() };
        let file = tree.create(ROOT, b"f", new_file(), Existing::Refuse).await.expect("made").0.ino;
        let staged = Blob::staged(tree.fresh_blob(), text.len() as u64, "host");
        let layout = FileLayout::of_blob(staged.clone());
        tree.commit_layout(file, 0, layout, time(7)).await.expect("committed");
        unlink(&tree, "f").await.expect("unlinked");
        let id = trash(&tree).await[0].id;
        tree.restore(id, ROOT, b"f").await.expect("it came back");
        let before = resolve(&tree, "f").await.expect("found");
        tree.drain().await.expect("nothing is there yet");
        world.check_objects(&[]).await;
        let put = world.bucket().put(&staged.key, text.clone().into(), Condition::IfAbsent);
        put.await.expect("brought in");
        if !is_answered {
            let kind = if is_large { OperationKind::Complete } else { OperationKind::Copy };
            faults.script(kind, 1, FaultMode::LoseReply);
        }
        for advance in [Duration::ZERO, Duration::from_secs(6 * 60), Duration::ZERO] {
            world.clock.advance(advance);
            tree.drain().await.expect("drained");
        }
        assert_eq!(world.objects().await.into_keys().collect::<Vec<_>>(), ["f"]);
        assert_eq!(world.read_path(&tree, "f").await.expect("bytes"), text);
        let after = resolve(&tree, "f").await.expect("found");
        assert_eq!(after.ino, before.ino);
        assert_eq!((after.mtime, after.generation), (before.mtime, before.generation));
    }
}

/// A copy that was made and not answered was known by the version of its source, which staged bytes lack: once its file was
/// deleted for good it was taken for somebody's object, and was a file again.
#[tokio::test]
async fn a_copy_of_what_was_staged_goes_with_its_file() {
    for kind in [Kind::Memory, Kind::Lmdb] {
        println!("{kind:?}");
        let world = world(kind).await;
        let faults = Faults::new();
        let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(30))).await;
        let file = tree.create(ROOT, b"f", new_file(), Existing::Refuse).await.expect("made").0.ino;
        let staged = Blob::staged(tree.fresh_blob(), 6, "host");
        let layout = FileLayout::of_blob(staged.clone());
        tree.commit_layout(file, 0, layout, time(7)).await.expect("committed");
        unlink(&tree, "f").await.expect("unlinked");
        let id = trash(&tree).await[0].id;
        tree.restore(id, ROOT, b"f").await.expect("it came back");
        let put = world.bucket().put(&staged.key, "staged".into(), Condition::IfAbsent);
        put.await.expect("brought in");
        faults.script(OperationKind::Copy, 1, FaultMode::LoseReply);
        for nth in 2..40 {
            faults.script(OperationKind::Copy, nth, FaultMode::Before);
        }
        tree.drain().await.expect("drained");
        assert!(world.objects().await.contains_key("f"), "the copy was made, and nobody told");
        faults.clear();
        unlink(&tree, "f").await.expect("unlinked");
        pass_time(&world, &tree).await;
        for _ in 0..2 {
            world.clock.advance(Duration::from_secs(6 * 60));
            tree.drain().await.expect("drained");
            world.pass_ttl();
            assert_eq!(paths(&tree).await, [""; 0]);
        }
        world.check_objects(&[]).await;
    }
}
