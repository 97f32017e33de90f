//! Writes to a file's own path that are not answered, or come to nothing: nothing is lost to one that comes late, and an
//! outsider's object is nobody's content.

use std::time::Duration;

use forebay_core::{FileLayout, InodeId};
use forebay_io::object::Condition;

use super::crash::make_owned;
use super::world::*;
use crate::tree::{Existing, LocalTree, Placement, RenameMode, Tree, resolve};

/// Asserts what the tree shows, at once and when all is done, and that the bucket holds the same then.
async fn check(world: &World, tree: &LocalTree, expected: &[(&str, &str)]) {
    for advance in [Duration::ZERO, LATER, LATER] {
        world.clock.advance(advance);
        world.pass_ttl();
        let names: Vec<&str> = expected.iter().map(|(name, _)| *name).collect();
        assert_eq!(paths(tree).await, names);
        for (name, text) in expected {
            assert_eq!(world.read_path(tree, name).await.expect("bytes"), *text, "{name}");
        }
        tree.drain().await.expect("drained");
    }
    world.check_objects(expected).await;
}

/// A file that was to be sealed was renamed first: what an outsider puts at the path of before is not its content. Its synced
/// bytes went for it.
#[tokio::test]
async fn an_outsiders_object_at_a_path_of_before_is_not_the_files() {
    for is_ahead in [false, true] {
        for (crashes, is_directory) in [(false, false), (true, false), (false, true), (true, true)] {
            println!("ahead {is_ahead}, crashes {crashes}, directory {is_directory}");
            let world = World::memory().await;
            if is_ahead {
                world.be_ahead();
            }
            let tree = world.open().await;
            make_directory(&tree, "d").await.expect("made");
            let ino = make_owned(&world, &tree, "d/a", "newer", 1).await;
            let placement = tree.place(ino, true).await.expect("placed");
            assert!(matches!(placement, Placement::Own { .. }), "{placement:?}");
            let to = if is_directory { ("d", "e") } else { ("d/a", "d/b") };
            rename(&tree, to.0, to.1, RenameMode::Replace).await.expect("renamed");
            if is_directory {
                // Until the mover has been there, what is found below the prefix of before is the renamed directory's.
                tree.mover.as_ref().expect("a mover").walk_subtrees().await.expect("walked");
            }
            tree.sync().await.expect("synced");
            world.put("d/a", b"theirs").await;
            let tree = if crashes {
                world.crash(tree, true).await;
                world.open().await
            } else {
                tree.settle(ino).await.expect("settled");
                tree
            };
            let names: &[&str] =
                if is_directory { &["d/", "d/a", "e/", "e/a"] } else { &["d/", "d/a", "d/b"] };
            world.pass_ttl();
            for _ in 0..2 {
                assert_eq!(paths(&tree).await, names);
                let own = if is_directory { "e/a" } else { "d/b" };
                assert_eq!(world.read_path(&tree, own).await.expect("bytes"), "newer");
                assert_eq!(world.read_path(&tree, "d/a").await.expect("bytes"), "theirs");
                tree.drain().await.expect("drained");
                world.pass_ttl();
            }
        }
    }
}

/// A file that was removed while a write of it was not answered came back with that, or the next file at its path was lost
/// to it.
#[tokio::test]
async fn a_write_that_comes_after_its_file_was_removed_goes() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        for (replaces, is_made_anew) in [(false, false), (false, true), (true, false), (true, true)] {
            println!("{kind:?}, replaces {replaces}, made anew {is_made_anew}");
            let world = World::new(kind).await;
            let tree = world.open().await;
            let file =
                tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made").0.ino;
            if replaces {
                world.write(&tree, file, b"old").await.expect("written");
            }
            let placement = tree.place(file, false).await.expect("placed");
            tree.doubt(file).await.expect("noted");
            unlink(&tree, "a").await.expect("unlinked");
            tree.drain().await.expect("drained");
            let mut expected: &[(&str, &str)] = &[];
            if is_made_anew {
                world.write_path(&tree, "a", "new").await.expect("written");
                expected = &[("a", "new")];
            }
            // The store refuses what is to replace an object that is gone.
            if !replaces {
                world.put_at(&placement, b"late").await.expect("nothing else is there");
            }
            check(&world, &tree, expected).await;
            tree.close().await.expect("closed");
        }
    }
}

/// A mount asked for a write and died, and the store went through with it when the next one had newer content elsewhere: that had been
/// synced, and went.
#[tokio::test]
async fn what_comes_after_the_death_of_who_asked_for_it_does_not_replace_newer_content() {
    for replaces in [false, true] {
        for (written_before, seals, is_packed) in
            [(true, false, false), (false, false, false), (false, true, false), (false, true, true)]
        {
            println!(
                "replaces {replaces}, written before {written_before}, seals {seals}, packed {is_packed}"
            );
            let world = World::memory().await;
            let mut tree = world.open().await;
            let file = match replaces {
                true => {
                    world.write_path(&tree, "a", "old").await.expect("written");
                    resolve(&tree, "a").await.expect("found").ino
                }
                false => make_owned(&world, &tree, "a", "old", 1).await,
            };
            let commit = async |tree: &LocalTree, text: &'static str| {
                let put = world.bucket().put(&tree.fresh_blob(), text.into(), Condition::IfAbsent).await;
                let (_, generation) = tree.layout(file).await.expect("a layout");
                let layout = FileLayout::of_blob(put.expect("put").blob());
                tree.commit_layout(file, generation, layout, world.clock.wall()).await.expect("committed");
            };
            let asked = tree.place(file, seals).await.expect("placed");
            if written_before {
                tree.doubt(file).await.expect("noted");
                commit(&tree, "newer").await;
            }
            tree.sync().await.expect("synced");
            world.crash(tree, true).await;
            tree = world.open().await;
            tree.drain().await.expect("drained");
            if is_packed {
                let (_, generation) = tree.layout(file).await.expect("a layout");
                let blob = world.bucket().put(&tree.fresh_blob(), "old".into(), Condition::IfAbsent).await;
                let layout = FileLayout::of_blob(blob.expect("put").blob());
                tree.relocate(file, generation, layout).await.expect("relocated");
            }
            if !written_before {
                commit(&tree, "newer").await;
            }
            tree.sync().await.expect("synced");
            world.put_at(&asked, b"older").await.expect("nothing else is there");
            world.pass_ttl();
            assert_eq!(paths(&tree).await, ["a"]);
            let found = resolve(&tree, "a").await.expect("found").ino;
            assert_eq!((found, world.read(&tree, found).await.expect("bytes")), (file, b"newer".to_vec()));
            check(&world, &tree, &[("a", "newer")]).await;
        }
    }
}

/// A file's write to its path was not answered, the file went elsewhere, another file was written at the path, and the first one
/// replaced that by a rename: it took the other's object, which was about to be deleted, for what it had written itself, and
/// was gone with it.
#[tokio::test]
async fn what_is_about_to_be_deleted_at_a_path_is_not_what_was_written_there_in_doubt() {
    for seals in [false, true] {
        for (crashes, is_ahead) in [(false, false), (true, false), (false, true), (true, true)] {
            println!("seals {seals}, crashes {crashes}, ahead {is_ahead}");
            let world = World::memory().await;
            if is_ahead {
                world.be_ahead();
            }
            let mut tree = world.open().await;
            let file = match seals {
                false => {
                    world.write_path(&tree, "b", "old").await.expect("written");
                    resolve(&tree, "b").await.expect("found").ino
                }
                true => make_owned(&world, &tree, "b", "old", 1).await,
            };
            tree.place(file, seals).await.expect("placed");
            tree.doubt(file).await.expect("noted");
            rename(&tree, "b", "y", RenameMode::Replace).await.expect("renamed");
            let put = world.bucket().put(&tree.fresh_blob(), "newer".into(), Condition::IfAbsent).await;
            let (_, generation) = tree.layout(file).await.expect("a layout");
            let (layout, time) = (FileLayout::of_blob(put.expect("put").blob()), time(1));
            tree.commit_layout(file, generation, layout, time).await.expect("committed");
            world.write_path(&tree, "b", "other").await.expect("written");
            rename(&tree, "y", "b", RenameMode::Replace).await.expect("renamed");
            if crashes {
                tree.sync().await.expect("synced");
                world.crash(tree, true).await;
                tree = world.open().await;
            }
            tree.drain().await.expect("drained");
            check(&world, &tree, &[("b", "newer")]).await;
        }
    }
}

/// So did the seal of a file that went into a segment meanwhile: what it brought was an object of nobody.
#[tokio::test]
async fn a_seal_that_comes_after_the_death_of_who_asked_for_it_is_the_files() {
    for (replaces, is_packed) in [(false, false), (true, false), (false, true), (true, true)] {
        println!("replaces {replaces}, packed {is_packed}");
        let world = World::memory().await;
        let tree = world.open().await;
        let file = match replaces {
            true => {
                world.write_path(&tree, "a", "before").await.expect("written");
                resolve(&tree, "a").await.expect("found").ino
            }
            false => make_owned(&world, &tree, "a", "whole", 1).await,
        };
        let put = async |tree: &LocalTree| {
            let put = world.bucket().put(&tree.fresh_blob(), "whole".into(), Condition::IfAbsent).await;
            (FileLayout::of_blob(put.expect("put").blob()), tree.layout(file).await.expect("a layout").1)
        };
        if replaces {
            let (layout, generation) = put(&tree).await;
            tree.commit_layout(file, generation, layout, time(1)).await.expect("committed");
        }
        let asked = tree.place(file, true).await.expect("placed");
        tree.sync().await.expect("synced");
        world.crash(tree, true).await;
        let tree = world.open().await;
        tree.drain().await.expect("drained");
        if is_packed {
            let (layout, generation) = put(&tree).await;
            tree.relocate(file, generation, layout).await.expect("relocated");
        }
        let known = resolve(&tree, "a").await.expect("found");
        world.put_at(&asked, b"whole").await.expect("nothing else is there");
        for _ in 0..2 {
            world.pass_ttl();
            assert_eq!(paths(&tree).await, ["a"]);
            let found = resolve(&tree, "a").await.expect("found");
            assert_eq!((found.ino, found.generation, found.mtime), (file, known.generation, known.mtime));
            assert_eq!(world.read(&tree, file).await.expect("bytes"), b"whole");
            tree.drain().await.expect("drained");
        }
        check(&world, &tree, &[("a", "whole")]).await;
    }
}

/// It took more than five minutes until the store did not answer; what it does then may still come as long as of any other.
#[tokio::test]
async fn a_long_write_that_was_not_answered_may_still_come() {
    let world = World::memory().await;
    let tree = world.open().await;
    let file = make_owned(&world, &tree, "a", "old", 1).await;
    let placement = tree.place(file, true).await.expect("placed");
    world.clock.advance(LATER);
    tree.doubt(file).await.expect("noted");
    let put = world.bucket().put(&tree.fresh_blob(), "newer".into(), Condition::IfAbsent).await;
    let (_, generation) = tree.layout(file).await.expect("a layout");
    let layout = FileLayout::of_blob(put.expect("put").blob());
    tree.commit_layout(file, generation, layout, world.clock.wall()).await.expect("committed");
    tree.drain().await.expect("drained");
    world.put_at(&placement, b"old").await.expect("nothing else is there");
    check(&world, &tree, &[("a", "newer")]).await;
}

/// What comes late is the file's without anybody asking for it: nobody could read a file whose object it had replaced.
#[tokio::test]
async fn what_comes_late_is_the_files_also_when_nobody_writes_it_any_more() {
    for waits in [Duration::ZERO, Duration::from_secs(60)] {
        let world = World::memory().await;
        let tree = world.open().await;
        world.write_path(&tree, "a", "old").await.expect("written");
        let file = resolve(&tree, "a").await.expect("found").ino;
        let placement = tree.place(file, false).await.expect("placed");
        tree.doubt(file).await.expect("noted");
        tree.drain().await.expect("drained");
        assert!(tree.is_in_doubt(file).await.expect("known"));
        world.clock.advance(waits);
        world.put_at(&placement, b"late").await.expect("put");
        tree.drain().await.expect("drained");
        assert!(!tree.is_in_doubt(file).await.expect("known"));
        assert_eq!(resolve(&tree, "a").await.expect("found").ino, file);
        check(&world, &tree, &[("a", "late")]).await;
    }
}

/// A put that was not answered came when the next upload of the file had begun, which was refused for it: it was taken for
/// what somebody else wrote after what had been synced.
#[tokio::test]
async fn what_comes_behind_the_next_upload_is_older_content() {
    for (replaces, crashes, tries) in
        [(false, false, 1), (true, false, 1), (false, true, 2), (true, true, 2), (true, false, 20)]
    {
        println!("replaces {replaces}, crashes {crashes}, {tries} tries between");
        let world = World::memory().await;
        let tree = world.open().await;
        let file = tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made").0.ino;
        if replaces {
            world.write(&tree, file, b"old").await.expect("written");
        }
        let unanswered = tree.place(file, false).await.expect("placed");
        tree.doubt(file).await.expect("noted");
        let put = world.bucket().put(&tree.fresh_blob(), "newer".into(), Condition::IfAbsent).await;
        let (_, generation) = tree.layout(file).await.expect("a layout");
        let layout = FileLayout::of_blob(put.expect("put").blob());
        tree.commit_layout(file, generation, layout, world.clock.wall()).await.expect("committed");
        let mut last = None;
        for _ in 0..tries {
            // Not one second later, as the clock of the test has it: nothing but the notes tells which is newer.
            let placement = tree.place(file, true).await.expect("placed");
            assert!(matches!(placement, Placement::Own { .. }), "{placement:?}");
            if tries < 20 {
                tree.doubt(file).await.expect("noted");
            }
            last = Some(placement);
        }
        let late = if tries < 20 { unanswered } else { last.take().expect("placed") };
        world.put_at(&late, b"late").await.expect("put");
        let tree = if crashes {
            world.crash(tree, true).await;
            world.open().await
        } else {
            tree.settle(file).await.expect("settled");
            tree
        };
        let text = if tries < 20 { "newer" } else { "late" };
        assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), text);
        check(&world, &tree, &[("a", text)]).await;
    }
}
