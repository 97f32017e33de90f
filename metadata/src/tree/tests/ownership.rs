//! Who holds which key: each scenario asserts the bucket's keys and bytes after the mover is through.

use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, FileKind, FileLayout, InodeId, ObjectKey};
use forebay_io::object::{Bucket, Condition, FaultMode, Faults, OperationKind};
use futures::FutureExt;

use super::world::*;
use crate::records::Change;
use crate::schema::{Claim, HolderState};
use crate::tree::{
    Existing, LocalTree, Lookup, Placement, RenameMode, Tree, resolve, unlink as unlink_entry,
};

use RenameMode::{Exchange, Replace};

fn is_own(placement: &Placement, key: &str) -> bool {
    matches!(placement, Placement::Own { key: own, .. } if own.as_str() == key)
}

#[tokio::test]
async fn a_new_file_is_an_object_at_its_path() {
    for kind in [Kind::Memory, Kind::Lmdb] {
        let world = World::new(kind).await;
        let tree = world.open().await;
        make_directory(&tree, "d").await.expect("made");
        assert!(is_own(&world.write_path(&tree, "d/a", "one").await.expect("written"), "d/a"));
        let ino = resolve(&tree, "d/a").await.expect("found").ino;
        let again = world.write_path(&tree, "d/a", "two").await.expect("written");
        assert!(matches!(&again, Placement::Own { replaces: Some(_), .. }));
        world.write_path(&tree, "d/empty", "").await.expect("written");
        tree.drain().await.expect("drained");
        world.check_objects(&[("d/a", "two"), ("d/empty", "")]).await;
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["d/", "d/a", "d/empty"]);
        assert_eq!(resolve(&tree, "d/a").await.expect("found").ino, ino, "our own change keeps the inode");
        unlink(&tree, "d/a").await.expect("unlinked");
        unlink(&tree, "d/empty").await.expect("unlinked");
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["d/"], "a listing does not bring back what is about to be deleted");
        tree.drain().await.expect("drained");
        world.check_objects(&[]).await;
    }
}

#[tokio::test]
async fn names_that_are_no_keys_go_to_owned_blobs() {
    let world = World::memory().await;
    let tree = world.open().await;
    let (file, _) =
        tree.create(InodeId::ROOT, b"\xff", new_file(), crate::tree::Existing::Refuse).await.expect("made");
    let placed = world.write(&tree, file.ino, b"bytes").await.expect("written");
    assert!(matches!(placed, Placement::Owned { .. }));
    tree.drain().await.expect("drained");
    world.check_objects(&[("*", "bytes")]).await;
    world.write(&tree, file.ino, b"more").await.expect("written");
    tree.drain().await.expect("drained");
    world.check_objects(&[("*", "more")]).await;
    tree.unlink(InodeId::ROOT, b"\xff").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
}

/// Stores count the prefix of the bucket's URL into a key, and refused such a one at each close, or copy.
#[tokio::test]
async fn paths_that_are_too_long_below_the_prefix_go_to_owned_blobs() {
    const ROOM: usize = 1024 - 101;
    let mut world = World::memory().await;
    world.bucket = Some(Bucket::in_memory_below(&"p".repeat(100)));
    let tree = world.open().await;
    let above = ["a", "b", "c"].map(|name| name.repeat(250)).join("/");
    for length in [250, 501, 752] {
        make_directory(&tree, &above[..length]).await.expect("made");
    }
    let path = |name: &str, length: usize| format!("{above}/{}", name.repeat(length - above.len() - 1));
    for (length, is_owned) in [(ROOM, false), (ROOM + 1, true)] {
        let placed = world.write_path(&tree, &path("f", length), "bytes").await.expect("written");
        assert_eq!(matches!(placed, Placement::Owned { .. }), is_owned, "{length} bytes: {placed:?}");
    }
    // No copy is made there either.
    world.write_path(&tree, "short", "bytes").await.expect("written");
    rename(&tree, "short", &path("g", ROOM + 1), Replace).await.expect("renamed");
    tree.drain().await.expect("drained");
    let keys: Vec<_> = world.objects().await.into_keys().map(|key| key.len()).collect();
    assert!(keys.len() == 3 && keys.iter().all(|length| *length <= ROOM), "{keys:?}");
}

#[tokio::test]
async fn the_mover_follows_a_renamed_file() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        world.put("a", b"imported").await;
        let tree = world.open().await;
        let before = resolve(&tree, "a").await.expect("found");
        rename(&tree, "a", "b", Replace).await.expect("renamed");
        world.check_objects(&[("a", "imported")]).await;
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["b"], "the old key is not listed");
        let (_, generation) = tree.layout(before.ino).await.expect("layout");
        tree.drain().await.expect("drained");
        world.check_objects(&[("b", "imported")]).await;
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["b"]);
        assert_eq!(resolve(&tree, "b").await.expect("found").ino, before.ino);
        assert_eq!(tree.layout(before.ino).await.expect("layout").1, generation, "a move is no new content");
        assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "imported");
    }
}

#[tokio::test]
async fn a_file_made_where_another_was_does_not_touch_its_bytes() {
    let world = World::memory().await;
    world.put("a", b"old").await;
    let tree = world.open().await;
    rename(&tree, "a", "b", Replace).await.expect("renamed");
    let placed = world.write_path(&tree, "a", "new").await.expect("written");
    assert!(matches!(placed, Placement::Owned { .. }));
    assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "old");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "new"), ("b", "old")]).await;
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "new");
}

#[tokio::test]
async fn write_aside_and_rename_over_ends_as_one_object() {
    let world = World::memory().await;
    world.put("f", b"old").await;
    let tree = world.open().await;
    world.write_path(&tree, "f.tmp", "new").await.expect("written");
    rename(&tree, "f.tmp", "f", Replace).await.expect("renamed");
    assert_eq!(world.read_path(&tree, "f").await.expect("bytes"), "new");
    tree.drain().await.expect("drained");
    world.check_objects(&[("f", "new")]).await;
    unlink(&tree, "f").await.expect("unlinked");
    let placed = world.write_path(&tree, "f", "third").await.expect("written");
    assert!(is_own(&placed, "f"), "the doomed object goes first");
    tree.drain().await.expect("drained");
    world.check_objects(&[("f", "third")]).await;
}

#[tokio::test]
async fn exchanged_files_change_keys() {
    let world = World::memory().await;
    for name in ["a", "b", "c"] {
        world.put(name, name.as_bytes()).await;
    }
    let tree = world.open().await;
    rename(&tree, "a", "b", Exchange).await.expect("exchanged");
    rename(&tree, "b", "c", Exchange).await.expect("exchanged");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "b"), ("b", "c"), ("c", "a")]).await;
    assert_eq!(paths(&tree).await, ["a", "b", "c"]);
    assert_eq!(world.read_path(&tree, "c").await.expect("bytes"), "a");
}

#[tokio::test]
async fn exchanged_files_whose_bytes_are_in_owned_blobs_change_keys() {
    let world = World::memory().await;
    for name in ["a", "b"] {
        world.put(name, name.as_bytes()).await;
    }
    let tree = world.open().await;
    for (path, text) in [("a", "new a"), ("b", "new b")] {
        let file = resolve(&tree, path).await.expect("found");
        let put = world.bucket().put(&tree.fresh_blob(), text.into(), Condition::IfAbsent).await;
        let layout = FileLayout::of_blob(put.expect("put").blob());
        tree.commit_layout(file.ino, file.generation, layout, time(1)).await.expect("committed");
    }
    rename(&tree, "a", "b", Exchange).await.expect("exchanged");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "new b"), ("b", "new a")]).await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a", "b"]);
}

#[tokio::test]
async fn hard_links_keep_the_bytes() {
    let world = World::memory().await;
    world.put("a", b"bytes").await;
    let tree = world.open().await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    tree.link(ino, InodeId::ROOT, b"b").await.expect("linked");
    unlink(&tree, "a").await.expect("unlinked");
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["b"]);
    tree.drain().await.expect("drained");
    world.check_objects(&[("b", "bytes")]).await;
    assert_eq!(world.read_path(&tree, "b").await.expect("bytes"), "bytes");
    unlink(&tree, "b").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
}

/// Whoever closed it found that it had a name, and who took that away found it open: it stayed until the tree's next start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_loses_its_name_in_the_moment_in_which_it_is_closed_is_gone() {
    let world = World::memory().await;
    let tree = Arc::new(world.open().await);
    for round in 0..3000 {
        let made = tree.create_opened(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made");
        let (closing, file) = (tree.clone(), made.attributes.ino);
        let closing = tokio::spawn(async move { closing.closed(file).await });
        tree.unlink(InodeId::ROOT, b"a").await.expect("unlinked");
        closing.await.expect("no panic").expect("closed");
        assert_eq!(kind_of(tree.attributes(file).await), ErrorKind::NotFound, "round {round}");
    }
}

#[tokio::test]
async fn open_files_keep_their_bytes() {
    let world = World::memory().await;
    world.put("a", b"bytes").await;
    let tree = world.open().await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    tree.opened(ino).await.expect("opened");
    unlink(&tree, "a").await.expect("unlinked");
    tree.drain().await.expect("drained");
    assert_eq!(world.read(&tree, ino).await.expect("bytes"), b"bytes");
    let placed = world.write_path(&tree, "a", "new").await.expect("written");
    assert!(matches!(placed, Placement::Owned { .. }));
    tree.drain().await.expect("drained");
    assert_eq!(world.read(&tree, ino).await.expect("bytes"), b"bytes");
    tree.closed(ino).await.expect("closed");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "new")]).await;
}

#[tokio::test]
async fn a_renamed_directory_takes_its_objects_along() {
    for kind in [Kind::Memory, Kind::Lmdb] {
        let world = World::new(kind).await;
        for key in ["a/f", "a/d/g", "a/d/h"] {
            world.put(key, key.as_bytes()).await;
        }
        let tree = world.open().await;
        rename(&tree, "a", "x", Replace).await.expect("renamed");
        make_directory(&tree, "a").await.expect("made");
        world.write_path(&tree, "a/f", "new").await.expect("written");
        world.pass_ttl();
        let expected = ["a/", "a/f", "x/", "x/d/", "x/d/g", "x/d/h", "x/f"];
        assert_eq!(paths(&tree).await, expected);
        rename(&tree, "x/d", "y", Replace).await.expect("renamed on");
        let expected = ["a/", "a/f", "x/", "x/f", "y/", "y/g", "y/h"];
        assert_eq!(paths(&tree).await, expected);
        assert_eq!(world.read_path(&tree, "y/g").await.expect("bytes"), "a/d/g");
        tree.drain().await.expect("drained");
        world.check_objects(&[("a/f", "new"), ("x/f", "a/f"), ("y/g", "a/d/g"), ("y/h", "a/d/h")]).await;
        world.pass_ttl();
        assert_eq!(paths(&tree).await, expected);
        world.put("x/outsider", b"1").await;
        world.put("a/outsider", b"1").await;
        world.pass_ttl();
        assert_eq!(paths(&tree).await.len(), expected.len() + 2, "both are listed from their paths again");
    }
}

#[tokio::test]
async fn a_renamed_directory_shows_what_it_held_unseen() {
    let world = World::memory().await;
    world.put("a/d/f", b"1").await;
    let tree = world.open().await;
    rename(&tree, "a", "x", Replace).await.expect("renamed before anybody looked inside");
    assert_eq!(paths(&tree).await, ["x/", "x/d/", "x/d/f"]);
    tree.drain().await.expect("drained");
    world.check_objects(&[("x/d/f", "1")]).await;
}

#[tokio::test]
async fn exchanged_directories_change_keys() {
    let world = World::memory().await;
    world.put("a/f", b"a").await;
    world.put("b/f", b"b").await;
    world.put("b/g", b"g").await;
    let tree = world.open().await;
    rename(&tree, "a", "b", Exchange).await.expect("exchanged");
    assert_eq!(world.read_path(&tree, "a/f").await.expect("bytes"), "b");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a/f", "b"), ("a/g", "g"), ("b/f", "a")]).await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a/", "a/f", "a/g", "b/", "b/f"]);
}

#[tokio::test]
async fn a_rename_and_back_moves_nothing() {
    let world = World::memory().await;
    world.put("a/f", b"1").await;
    world.put("g", b"2").await;
    let tree = world.open().await;
    let before = world.bucket().counters();
    for (from, to) in [("a", "x"), ("x", "a"), ("g", "h"), ("h", "g")] {
        rename(&tree, from, to, Replace).await.expect("renamed");
    }
    tree.drain().await.expect("drained");
    world.check_objects(&[("a/f", "1"), ("g", "2")]).await;
    let copies = world.bucket().counters().since(&before).of(forebay_io::object::OperationKind::Copy);
    assert_eq!(copies.requests, 0);
    assert_eq!(paths(&tree).await, ["a/", "a/f", "g"]);
}

#[tokio::test]
async fn a_file_written_through_a_stale_layout_conflicts() {
    let world = World::memory().await;
    world.put("a", b"bytes").await;
    let tree = world.open().await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    let (stale, generation) = tree.layout(ino).await.expect("layout");
    rename(&tree, "a", "b", Replace).await.expect("renamed");
    tree.drain().await.expect("drained");
    let refused = tree.commit_layout(ino, generation, stale, time(1)).await;
    assert_eq!(kind_of(refused), ErrorKind::Conflict);
    let (layout, _) = tree.layout(ino).await.expect("layout");
    tree.commit_layout(ino, generation, layout, time(1)).await.expect("with the layout that is");
    tree.commit_layout(ino, generation + 1, FileLayout::empty(), time(1)).await.expect("truncated");
    tree.drain().await.expect("drained");
    world.check_objects(&[("b", "bytes")]).await;
    world.write(&tree, ino, b"x").await.expect("written");
    tree.drain().await.expect("drained");
    world.check_objects(&[("b", "x")]).await;
}

#[tokio::test]
async fn an_outsiders_object_where_a_file_is_written_is_replaced_knowingly() {
    let world = World::memory().await;
    let tree = world.open().await;
    assert_eq!(paths(&tree).await, Vec::<String>::new());
    world.put("a", b"theirs").await;
    world.write_path(&tree, "a", "ours").await.expect("written, after a refusal");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "ours")]).await;
    world.put("a", b"theirs again").await;
    unlink(&tree, "a").await.expect("unlinked");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "theirs again")]).await;
    world.pass_ttl();
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "theirs again", "what was not ours stays");
}

/// Nothing wakes the mover a second time: what it is woken for must be there when it looks, however long the change that
/// woke it takes to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mover_misses_nothing_that_it_was_woken_for() {
    let world = World::memory().await;
    let tree = world.open().await;
    tree.mover.as_ref().expect("a mover").start();
    for round in 0..20 {
        world.write_path(&tree, "file", "bytes").await.expect("written");
        let remove = |change: &mut Change<'_, '_>| {
            unlink_entry::unlink(change, InodeId::ROOT, b"file")?;
            (0..2000).for_each(|_| std::thread::yield_now());
            Ok(())
        };
        tree.change(remove).await.expect("removed");
        let gone = async {
            while world.bucket().head(&ObjectKey::new("file")).await.expect("a look").is_some() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), gone).await.unwrap_or_else(|_| panic!("round {round}"));
    }
    tree.close().await.expect("closed");
}

/// Objects that wait to be moved or deleted lie where a directory was: a listing shows their prefix, and no directory is
/// made of it, least of all in the place of a file.
#[tokio::test]
async fn a_prefix_of_claimed_keys_is_no_directory() {
    let world = World::memory().await;
    let tree = world.open().await;
    make_directory(&tree, "a").await.expect("made");
    make_directory(&tree, "c").await.expect("made");
    world.write_path(&tree, "a/x", "moves").await.expect("written");
    world.write_path(&tree, "c/x", "moves, too").await.expect("written");
    rename(&tree, "a/x", "b", Replace).await.expect("renamed");
    rename(&tree, "c/x", "d", Replace).await.expect("renamed");
    for gone in [b"a", b"c"] {
        tree.remove_directory(InodeId::ROOT, gone).await.expect("removed");
    }
    // The removed directories are done with before what lay below is moved.
    tree.mover.as_ref().expect("a mover").delete_due().await.expect("deleted");
    world.write_path(&tree, "a", "a file").await.expect("written");
    world.check_objects(&[("a", "a file"), ("a/x", "moves"), ("c/x", "moves, too")]).await;
    let seen = ["a", "b", "d"];
    world.pass_ttl();
    assert_eq!(paths(&tree).await, seen);
    tree.close().await.expect("closed");
    let tree = world.open().await;
    assert_eq!(paths(&tree).await, seen, "nor on the next mount");
    world.put("c/new", b"an outsider's").await;
    world.pass_ttl();
    assert_eq!(paths(&tree).await, ["a", "b", "c/", "c/new", "d"], "a key of nobody's is one");
    tree.drain().await.expect("drained");
    world
        .check_objects(&[("a", "a file"), ("b", "moves"), ("c/new", "an outsider's"), ("d", "moves, too")])
        .await;
}

/// In a folder no file is put where something of others still lies below its path. While the mover is at a large directory that
/// was renamed, each file that was written anywhere looked through all that was claimed, or went beside its path.
#[tokio::test]
async fn in_a_folder_many_claims_are_in_the_way_of_what_is_above_them_alone() {
    const MANY: usize = 5_000;
    let world = World::new(Kind::Lmdb).await;
    let mut tree = world.open().await;
    let key = |number| ObjectKey::new(format!("moved/below/{number}"));
    let held = HolderState::Held(InodeId(1 << 40));
    let claim = move |change: &mut Change<'_, '_>| {
        (0..MANY).try_for_each(|number| change.put_claim(&Claim { key: key(number), state: held.clone() }))
    };
    tree.change(claim).await.expect("claimed");
    for path in ["beside", "moved-too", "moved"] {
        for is_anew in [false, true] {
            if is_anew {
                tree.close().await.expect("closed");
                tree = world.open().await;
            }
            let placed = world.write_path(&tree, path, "bytes").await.expect("written");
            assert_eq!(is_own(&placed, path), path != "moved", "{path}: {placed:?}");
        }
    }
    let go = move |change: &mut Change<'_, '_>, most| {
        (0..most).try_for_each(|number| change.delete_claim(key(number).as_str()))
    };
    let refuse = move |change: &mut Change<'_, '_>| {
        go(change, MANY)?;
        Err::<(), _>(Error::bug("it comes to nothing"))
    };
    tree.change(refuse).await.expect_err("refused");
    for most in [0, MANY - 1] {
        tree.change(move |change| go(change, most)).await.expect("gone");
        let placed = world.write_path(&tree, "moved", "bytes").await.expect("written");
        assert!(!is_own(&placed, "moved"), "{placed:?}");
    }
    tree.change(move |change| go(change, MANY)).await.expect("gone");
    let placed = world.write_path(&tree, "moved", "bytes").await.expect("written");
    assert!(is_own(&placed, "moved"), "{placed:?}");
    tree.close().await.expect("closed");
}

/// A file in a directory that this session made is looked for, made, placed and committed without asking the engine, whose
/// reads cost more than all the rest: which names there are is known, and which keys are claimed or lent.
#[tokio::test]
async fn files_in_a_new_directory_are_made_without_asking_the_engine() {
    let world = World::new(Kind::Slate).await;
    let tree = world.open().await;
    let made = tree.create(InodeId::ROOT, b"d", new_inode(FileKind::Directory), Existing::Refuse).await;
    let directory = made.expect("made").0.ino;
    world.write_path(&tree, "d/first", "bytes").await.expect("written");
    for number in 0..20 {
        let name = format!("f{number}");
        let found = tree.lookup(directory, name.as_bytes()).now_or_never().expect("at once");
        assert_eq!(found.expect("looked up"), Lookup::Miss);
        let made = tree.create(directory, name.as_bytes(), new_file(), Existing::Refuse).now_or_never();
        let (file, _) = made.expect("at once").expect("made");
        let placement = tree.place(file.ino, false).now_or_never().expect("at once").expect("placed");
        assert!(is_own(&placement, &format!("d/{name}")), "{placement:?}");
        let blob = world.put_at(&placement, b"bytes").await.expect("put").blob();
        let commit = tree.commit_layout(file.ino, 0, FileLayout::of_blob(blob), time(1)).now_or_never();
        commit.expect("at once").expect("committed");
        if number % 8 == 7 {
            tree.sync().await.expect("synced");
        }
    }
    tree.close().await.expect("closed");
    // What an earlier session made is looked for.
    let tree = world.open().await;
    for number in 0..20 {
        assert_eq!(world.read_path(&tree, &format!("d/f{number}")).await.expect("bytes"), "bytes");
    }
    tree.close().await.expect("closed");
}

/// A file `a` that was removed, and whose object is to be deleted by a request that loses its reply.
async fn removed(world: &World) -> (LocalTree, Faults) {
    world.put("a", b"old").await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    unlink(&tree, "a").await.expect("unlinked");
    faults.script(OperationKind::Delete, 1, FaultMode::LoseReply);
    (tree, faults)
}

/// The reply to a deletion was lost, somebody put an object there, and the deletion was sent again: it took that one.
#[tokio::test]
async fn a_deletion_that_is_not_answered_takes_nothing_that_came_after_it() {
    let world = World::memory().await;
    let (tree, faults) = removed(&world).await;
    let put = async {
        while faults.injected() == 0 {
            tokio::task::yield_now().await;
        }
        world.put("a", b"theirs").await;
    };
    let (drained, ()) = tokio::join!(tree.drain(), put);
    drained.expect("drained");
    for _ in 0..2 {
        world.check_objects(&[("a", "theirs")]).await;
        tree.drain().await.expect("drained");
        world.pass_ttl();
    }
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "theirs");
}

/// Who waits for that deletion, to write there, hears nothing of it.
#[tokio::test]
async fn a_deletion_that_is_not_answered_fails_no_writer() {
    let world = World::memory().await;
    let (tree, faults) = removed(&world).await;
    let placed = world.write_path(&tree, "a", "new").await.expect("written");
    assert!(is_own(&placed, "a") && faults.injected() == 1, "{placed:?}");
    tree.drain().await.expect("drained");
    world.check_objects(&[("a", "new")]).await;
}
