//! What is found at a path after a kill, or by who opens a file: whose content it is, and whether it is newer.

use forebay_core::{ErrorKind, InodeId};
use forebay_io::object::{FaultMode, Faults, OperationKind};
use futures::FutureExt;

use super::clone::clone;
use super::crash::{check_files, files, make_owned};
use super::segments::write_packed;
use super::world::*;
use crate::records::OutsideChange;
use crate::tree::{Existing, Placement, RenameMode, SetAttributes, Tree, XattrMode, resolve};

/// What was set and synced of a file before its first content came went, and everybody could read it: the object was taken
/// for an outsider's.
#[tokio::test]
async fn first_content_finds_the_owner_and_mode_that_were_synced() {
    for kind in [Kind::Memory, Kind::Lmdb] {
        let world = World::new(kind).await;
        let tree = world.open().await;
        let (file, _) = tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made");
        let wanted = SetAttributes { mode: Some(0o4710), uid: Some(7), gid: Some(8), ..Default::default() };
        tree.set_attributes(file.ino, wanted).await.expect("set");
        for name in [&b"user.kept"[..], b"security.capability"] {
            tree.set_xattr(file.ino, name, "value".into(), XattrMode::Set).await.expect("set");
        }
        tree.sync().await.expect("synced");
        // The store has it, and the tree does not know.
        world.put("a", b"first").await;
        tree.close().await.expect("closed");
        let tree = world.open().await;
        for _ in 0..2 {
            let found = resolve(&tree, "a").await.expect("found");
            assert_eq!((found.ino, found.uid, found.gid, found.size), (file.ino, 7, 8, 5));
            assert_eq!(found.mode, 0o710, "nobody knows who wrote it");
            assert!(found.mtime.seconds > 1_700_000_000, "the object's own time");
            assert_eq!(tree.xattr(file.ino, b"user.kept").await.expect("kept"), &b"value"[..]);
            tree.xattr(file.ino, b"security.capability").await.expect_err("it went with the write");
            assert_eq!(world.read(&tree, file.ino).await.expect("bytes"), b"first");
            tree.drain().await.expect("drained");
            world.pass_ttl();
        }
        assert!(tree.fsck(false).await.expect("checked").is_clean());
        tree.close().await.expect("closed");
    }
}

/// A key was freed and written again, and only the first half of that was noted: what is there now is the file's, and at once.
#[tokio::test]
async fn first_content_at_a_freed_key_is_found_after_a_crash() {
    let world = World::memory().await;
    world.put("a", b"old").await;
    let tree = world.open().await;
    unlink(&tree, "a").await.expect("unlinked");
    tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made");
    tree.sync().await.expect("synced");
    let placed = world.write_path(&tree, "a", "new").await.expect("written");
    assert!(matches!(placed, Placement::Own { .. }), "{placed:?}");
    world.crash(tree, false).await;
    let tree = world.open().await;
    check_files(&world, &tree, &files(&[("a", "new")])).await;
}

/// What another tool had put, and a rename brought elsewhere, had content: its next one was taken for its first, and what was known of
/// the file went.
#[tokio::test]
async fn a_file_that_was_imported_and_renamed_is_known_after_a_crash() {
    let world = World::memory().await;
    world.put("a", b"old").await;
    let tree = world.open().await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    let wanted = SetAttributes { mode: Some(0o640), uid: Some(7), ..Default::default() };
    tree.set_attributes(ino, wanted).await.expect("set");
    rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed");
    tree.sync().await.expect("synced");
    world.write_path(&tree, "b", "new").await.expect("written");
    world.crash(tree, false).await;
    let tree = world.open().await;
    let found = resolve(&tree, "b").await.expect("found");
    assert_eq!((found.ino, found.mode, found.uid, found.size), (ino, 0o640, 7, 3));
    check_files(&world, &tree, &files(&[("b", "new")])).await;
}

/// The same of one that came back from the trash, whose object is not its own any more.
#[tokio::test]
async fn a_file_that_was_imported_and_brought_back_is_known_after_a_crash() {
    let mut world = World::memory().await;
    world.settings.trash_ms = 3_600_000;
    world.put("a", b"old").await;
    let tree = world.open().await;
    let ino = resolve(&tree, "a").await.expect("found").ino;
    let wanted = SetAttributes { mode: Some(0o640), uid: Some(7), ..Default::default() };
    tree.set_attributes(ino, wanted).await.expect("set");
    unlink(&tree, "a").await.expect("unlinked");
    tree.drain().await.expect("drained");
    let id = tree.trash(None, 1).await.expect("the trash")[0].id;
    tree.restore(id, InodeId::ROOT, b"a").await.expect("restored");
    tree.sync().await.expect("synced");
    let placed = world.write_path(&tree, "a", "new").await.expect("written");
    assert!(matches!(placed, Placement::Own { .. }), "{placed:?}");
    world.crash(tree, false).await;
    let tree = world.open().await;
    let found = resolve(&tree, "a").await.expect("found");
    assert_eq!((found.ino, found.mode, found.uid, found.size), (ino, 0o640, 7, 3));
    check_files(&world, &tree, &files(&[("a", "new")])).await;
}

/// So does who opens the file by a name elsewhere, and writes on.
#[tokio::test]
async fn first_content_at_a_freed_key_is_found_by_who_opens_the_file_elsewhere() {
    let world = World::memory().await;
    world.put("d/f", b"old").await;
    let tree = world.open().await;
    let directory = resolve(&tree, "d").await.expect("found").ino;
    unlink(&tree, "d/f").await.expect("unlinked");
    let (file, _) = tree.create(directory, b"f", new_file(), Existing::Refuse).await.expect("made");
    tree.link(file.ino, InodeId::ROOT, b"g").await.expect("linked");
    tree.sync().await.expect("synced");
    world.write_path(&tree, "d/f", "new").await.expect("written");
    world.crash(tree, false).await;
    let tree = world.open().await;
    let ino = resolve(&tree, "g").await.expect("found").ino;
    tree.opened(ino).await.expect("opened");
    assert_eq!(world.read(&tree, ino).await.expect("bytes"), b"new");
    tree.closed(ino).await.expect("closed");
    tree.drain().await.expect("drained");
    assert_eq!(world.read_path(&tree, "d/f").await.expect("bytes"), "new");
    world.check_objects(&[("d/f", "new")]).await;
}

/// Of two who open the file at once, the second waits for what the first looks for, and looks itself where that failed.
#[tokio::test]
async fn first_content_is_found_by_all_who_open_the_file_at_once() {
    let world = World::memory().await;
    let tree = world.open().await;
    let directory = make_directory(&tree, "d").await.expect("made").ino;
    let (file, _) = tree.create(directory, b"f", new_file(), Existing::Refuse).await.expect("made");
    tree.sync().await.expect("synced");
    world.put("d/f", b"first").await;
    world.crash(tree, false).await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    let look = faults.gate(1);
    let both = async { tokio::join!(tree.opened(file.ino), tree.opened(file.ino)) };
    let (opened, ()) = tokio::join!(both, async {
        look.reached().await;
        tokio::task::yield_now().await;
        look.open();
    });
    for opened in [opened.0, opened.1] {
        assert_eq!(opened.expect("opened").0.size(), 5);
    }
}

/// What was removed while an open of it looked for its first content stayed without a name where that failed.
#[tokio::test]
async fn what_was_removed_before_an_open_of_it_failed_is_gone() {
    let world = World::memory().await;
    let tree = world.open().await;
    let (file, _) = tree.create(InodeId::ROOT, b"f", new_file(), Existing::Refuse).await.expect("made");
    tree.sync().await.expect("synced");
    world.put("f", b"first").await;
    world.crash(tree, false).await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    // Whatever else the store is asked meanwhile is a listing.
    let look = faults.script(OperationKind::Head, 1, FaultMode::Deny).gate(1);
    let (opened, ()) = tokio::join!(tree.opened(file.ino), async {
        look.reached().await;
        tree.unlink(InodeId::ROOT, b"f").await.expect("removed");
        look.open();
    });
    assert_eq!(opened.expect_err("refused").kind(), ErrorKind::Denied);
    assert_eq!(tree.attributes(file.ino).await.expect_err("gone").kind(), ErrorKind::NotFound);
}

/// What a writer brought is newer than what the file had, whatever time somebody gave that: other tools see it already.
#[tokio::test]
async fn new_content_is_found_after_a_crash_whatever_the_time_of_the_file() {
    let world = World::memory().await;
    world.be_ahead();
    let tree = world.open().await;
    let ino = make_owned(&world, &tree, "a", "old", 1).await;
    tree.sync().await.expect("synced");
    world.write(&tree, ino, b"new").await.expect("written");
    world.crash(tree, false).await;
    let tree = world.open().await;
    check_files(&world, &tree, &files(&[("a", "new")])).await;
}

/// What comes to a name that another file has left, which is not on disk, does not take the place of that one after a crash: what it had
/// synced went, all of it.
#[tokio::test]
async fn a_file_that_left_its_name_outlives_what_comes_there() {
    for case in ["packed", "moved twice", "exchanged", "linked", "blank", "below", "trash"] {
        println!("{case}");
        let mut world = World::memory().await;
        world.settings.trash_ms = if case == "trash" { 3_600_000 } else { 0 };
        if case == "moved twice" {
            world.put("z", b"synced").await;
        }
        let tree = world.open().await;
        match case {
            "moved twice" => rename(&tree, "z", "a", RenameMode::Replace).await.expect("renamed"),
            "blank" => {
                tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made");
            }
            "below" => {
                let directory = make_directory(&tree, "d").await.expect("made").ino;
                tree.create(directory, b"a", new_file(), Existing::Refuse).await.expect("made");
            }
            _ => write_packed(&world, &tree, &[("a", b"synced")]).await,
        }
        let first = if case == "below" { "d/a" } else { "a" };
        let ino = resolve(&tree, first).await.expect("found").ino;
        let wanted = SetAttributes { mode: Some(0o600), uid: Some(7), ..Default::default() };
        tree.set_attributes(ino, wanted).await.expect("set");
        if case == "exchanged" {
            tree.create(InodeId::ROOT, b"b", new_file(), Existing::Refuse).await.expect("made");
        }
        tree.sync().await.expect("synced");
        let mut expected = vec![("a", "new"), ("b", "synced")];
        let mut written = "a";
        match case {
            "exchanged" => rename(&tree, "a", "b", RenameMode::Exchange).await.expect("exchanged"),
            "linked" => {
                tree.link(ino, InodeId::ROOT, b"b").await.expect("linked");
                unlink(&tree, "a").await.expect("unlinked");
            }
            "blank" => {
                rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed");
                (written, expected) = ("b", vec![("b", "new")]);
            }
            "below" => {
                rename(&tree, "d", "e", RenameMode::Replace).await.expect("renamed");
                (written, expected) = ("e/a", vec![("e/a", "new")]);
            }
            "trash" => {
                unlink(&tree, "a").await.expect("unlinked");
                expected = vec![("a", "new")];
            }
            _ => rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed"),
        }
        world.write_path(&tree, written, "new").await.expect("written");
        world.crash(tree, false).await;
        let tree = world.open().await;
        paths(&tree).await;
        if case == "trash" {
            let trash = tree.trash(None, 9).await.expect("the trash");
            assert_eq!(trash.iter().map(|one| one.id.ino).collect::<Vec<_>>(), [ino]);
        }
        for (path, text) in &expected {
            assert_eq!(world.read_path(&tree, path).await.expect("bytes"), *text, "{case}: {path}");
        }
        if case != "trash" {
            let found = resolve(&tree, expected.last().expect("one").0).await.expect("found");
            assert_eq!((found.ino, found.mode, found.uid), (ino, 0o600, 7), "{case}");
        }
        tree.drain().await.expect("drained");
        assert!(tree.fsck(false).await.expect("checked").is_clean());
    }
}

/// Nobody else tells those who have the file open: they went on with the bytes of before, as far as these were at hand.
#[tokio::test]
async fn who_has_a_file_open_hears_that_a_write_came_which_was_not_answered() {
    for serves in [false, true] {
        let mut world = World::memory().await;
        world.settings.serves = serves;
        let tree = world.open().await;
        world.write_path(&tree, "a", "old").await.expect("written");
        let ino = resolve(&tree, "a").await.expect("found").ino;
        let asked = tree.place(ino, false).await.expect("placed");
        tree.doubt(ino).await.expect("noted");
        let mut heard = tree.outside().listen();
        world.put_at(&asked, b"newer").await.expect("put");
        tree.drain().await.expect("drained");
        assert_eq!(world.read(&tree, ino).await.expect("bytes"), b"newer");
        let mut is_told = false;
        while let Some(Ok(change)) = heard.next().now_or_never() {
            is_told |= change == OutsideChange::Inode { ino, has_content: true };
        }
        assert!(is_told, "serves: {serves}");
    }
}

/// So it is when the mover finds that out while the directory is being listed.
#[tokio::test]
async fn first_content_at_a_freed_key_is_found_by_a_listing_under_way() {
    let world = World::memory().await;
    world.put("a", b"old").await;
    let tree = world.open().await;
    unlink(&tree, "a").await.expect("unlinked");
    tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made");
    tree.sync().await.expect("synced");
    world.write_path(&tree, "a", "new").await.expect("written");
    world.crash(tree, false).await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    let (listing, expected) = (faults.gate(1), files(&[("a", "new")]));
    tokio::join!(check_files(&world, &tree, &expected), async {
        listing.reached().await;
        tree.drain().await.expect("drained");
        listing.open();
    });
}

/// A directory moves away, whose files lie in a segment, so that no object has to follow it. What is written where it was
/// is not taken for a new content of theirs when the power goes before all of that is on disk.
#[tokio::test]
async fn what_comes_to_the_place_of_a_moved_directory_is_not_taken_for_its_files() {
    let world = World::memory().await;
    let tree = world.open().await;
    make_directory(&tree, "x").await.expect("made");
    write_packed(&world, &tree, &[("f", b"packed")]).await;
    rename(&tree, "f", "x/f", RenameMode::Replace).await.expect("renamed");
    make_directory(&tree, "y").await.expect("made");
    tree.drain().await.expect("drained");
    rename(&tree, "x", "y", RenameMode::Exchange).await.expect("renamed");
    tree.sync().await.expect("synced");
    // The mover lets go of what was below `x`, and has not gone on yet.
    tree.mover.as_ref().expect("a mover").walk_subtrees().await.expect("walked");
    world.write_path(&tree, "x/f", "new").await.expect("written");
    world.crash(tree, false).await;
    let tree = world.open().await;
    // Whatever was listed is listed again.
    world.pass_ttl();
    tree.drain().await.expect("drained");
    assert_eq!(world.read_path(&tree, "y/f").await.expect("bytes"), "packed");
}

/// Synced content stays the file's when an older object turns up at its path, by the intent to write there or in a listing:
/// content in an owned blob, or in the object of the path before, whatever time the file was given, as it was written or
/// later, and however long ago it was written where it came to the path since. The object goes, or is replaced by the next
/// content.
#[tokio::test]
async fn an_older_object_at_the_path_does_not_replace_newer_content() {
    for came in [Came::Dated, Came::WrittenAndDated, Came::Renamed, Came::Cloned] {
        for is_intended in [true, false] {
            if came == Came::Renamed && !is_intended {
                continue;
            }
            println!("{came:?}, intended {is_intended}");
            older_object(came, is_intended).await;
        }
    }
}

/// How a file of an old time came to its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Came {
    Dated,
    WrittenAndDated,
    Renamed,
    Cloned,
}

async fn older_object(came: Came, is_intended: bool) {
    let world = World::memory().await;
    world.be_ahead();
    let now = world.clock.wall().seconds;
    let tree = world.open().await;
    let date = async |file| {
        let times = SetAttributes { mtime: Some(time(1)), ..SetAttributes::default() };
        tree.set_attributes(file, times).await.expect("set");
    };
    if came == Came::Renamed {
        world.write_path(&tree, "b", "newer").await.expect("written");
        date(resolve(&tree, "b").await.expect("found").ino).await;
    }
    match came {
        Came::Dated => _ = make_owned(&world, &tree, "a", "newer", 1).await,
        Came::WrittenAndDated => date(make_owned(&world, &tree, "a", "newer", now).await).await,
        Came::Renamed => rename(&tree, "b", "a", RenameMode::Replace).await.expect("renamed"),
        Came::Cloned => {
            make_owned(&world, &tree, "b", "newer", 1).await;
            clone(&tree, "b", "a").await.map(drop).expect("cloned");
        }
    }
    let file = resolve(&tree, "a").await.expect("found").ino;
    if is_intended {
        tree.place(file, false).await.expect("placed");
    }
    tree.sync().await.expect("synced");
    world.put("a", b"older").await;
    world.crash(tree, true).await;
    let tree = world.open().await;
    paths(&tree).await;
    assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "newer");
    if came != Came::Renamed {
        world.write_path(&tree, "a", "newer").await.expect("written");
    }
    for _ in 0..3 {
        tree.drain().await.expect("drained");
    }
    // What was cloned has its bytes where they were.
    let all: &[_] = if came == Came::Cloned { &[("*", "newer"), ("a", "newer")] } else { &[("a", "newer")] };
    world.check_objects(all).await;
}
