//! A bucket that was copied object by object is the same volume once it is adopted.

use std::collections::BTreeMap;
use std::io::Cursor;

use forebay_core::{Attributes, Blob, ErrorKind, FileKind, FileLayout, InodeId, ObjectKey, Result, VolumeId};
use futures::stream::{StreamExt, TryStreamExt};

use super::dump::{dumped, sample};
use super::segments::write_packed;
use super::sharing::share;
use super::world::*;
use crate::adopt::{Adopted, Why, adopt};
use crate::commit::{Committer, CommitterSettings};
use crate::dump::{LoadOptions, load_moved};
use crate::schema::Keys;
use crate::tree::{Existing, LocalTree, RenameMode, Tree, resolve, walk};

const KEYS: Keys = Keys(VolumeId(7));

/// The objects of a world in another one, where each has a version that none had before.
async fn copy_objects(from: &World, to: &World) {
    // Stores in memory count writes.
    for _ in 0..500 {
        to.put("counted", b"").await;
    }
    to.delete("counted").await;
    let keys: Vec<ObjectKey> =
        from.bucket().list("").map_ok(|info| info.key).try_collect().await.expect("a listing");
    for key in keys {
        let (bytes, _) = from.bucket().get_whole(&key).await.expect("an object");
        to.put(key.as_str(), &bytes).await;
    }
}

/// A copy of all that a world's bucket holds, its tree included.
async fn copied(world: &World) -> World {
    let mut other = World::new(world.kind).await;
    other.settings = world.settings.clone();
    copy_objects(world, &other).await;
    match world.kind {
        Kind::Memory => other.disk = world.disk.clone(),
        Kind::Lmdb => {
            std::fs::create_dir(other.scratch("tree")).expect("a folder");
            let data = "tree/data.mdb";
            std::fs::copy(world.scratch(data), other.scratch(data)).expect("copied");
        }
        Kind::Slate | Kind::Alone => {}
    }
    other
}

async fn adopted(world: &World) -> Result<Adopted> {
    let lease = world.lease.clone();
    let engine = world.engine().await.expect("an engine");
    let committer = Committer::start_guarded(engine, CommitterSettings::default(), move || lease.check());
    let adopted = adopt(&committer, KEYS, world.bucket()).await;
    // What was cut off loses what was not durable.
    let _ = committer.close().await;
    adopted
}

/// What files are, by path, with their bytes.
async fn content(world: &World, tree: &LocalTree) -> BTreeMap<Vec<u8>, (Attributes, Option<Vec<u8>>)> {
    let mut content = BTreeMap::new();
    let mut walked = walk(tree, InodeId::ROOT);
    while let Some(found) = walked.next().await {
        let found = found.expect("a walk");
        let is_file = found.attributes.kind == FileKind::File;
        let bytes = match is_file {
            true => Some(world.read(tree, found.attributes.ino).await.expect("bytes")),
            false => None,
        };
        content.insert(found.path.to_vec(), (found.attributes, bytes));
    }
    content
}

async fn is_clean(tree: &LocalTree) {
    let checked = tree.fsck(false).await.expect("checked");
    assert!(checked.is_clean(), "{:?}", checked.findings);
}

#[tokio::test]
async fn a_copied_bucket_is_the_same_volume_once_it_is_adopted() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let mut world = World::new(kind).await;
        world.settings.trash_ms = 1000;
        let tree = sample(&world).await;
        let expected = content(&world, &tree).await;
        tree.close().await.expect("closed");
        let other = copied(&world).await;
        let report = adopted(&other).await.expect("adopted");
        assert!(report.objects > 5 && report.changed == report.objects, "{report:?}");
        assert_eq!((report.lacking, report.files, report.named), (0, 0, Vec::new()));
        let again = adopted(&other).await.expect("adopted");
        assert_eq!((again.objects, again.changed), (report.objects, 0));

        let tree = other.open().await;
        // What a listing finds is what is known.
        other.pass_ttl();
        assert_eq!(content(&other, &tree).await, expected, "{kind:?}");
        let deleted = tree.trash(None, 8).await.expect("the trash");
        tree.restore(deleted[0].id, InodeId::ROOT, b"back").await.expect("restored");
        tree.drain().await.expect("drained");
        assert_eq!(other.read_path(&tree, "back").await.expect("bytes"), "deleted");
        is_clean(&tree).await;
        tree.close().await.expect("closed");
    }
}

/// What a mount had to do when it was killed is done in the copy, and nothing of what it is done to is mistaken.
#[tokio::test]
async fn what_is_pending_goes_on_in_a_copy() {
    let world = World::memory().await;
    for key in ["moved/a", "lender", "doomed", "replaced"] {
        world.put(key, key.as_bytes()).await;
    }
    let tree = world.open().await;
    paths(&tree).await;
    share(&world, &tree, "lender", "borrower").await.expect("shared");
    // Contents of the same size at the same key, one after another.
    world.write_path(&tree, "lender", "LENDER").await.expect("written");
    share(&world, &tree, "lender", "second").await.expect("shared");
    rename(&tree, "moved", "elsewhere", RenameMode::Replace).await.expect("renamed");
    // Of two writes nobody knows yet whether they happened: one did, the other did not.
    world.write_path(&tree, "arrived", "before").await.expect("written");
    world.write_path(&tree, "asked", "before").await.expect("written");
    let [arrived, asked] = ["arrived", "asked"].map(|path| resolve(&tree, path));
    let (arrived, asked) = (arrived.await.expect("found"), asked.await.expect("found"));
    tree.place(asked.ino, false).await.expect("placed");
    let placement = tree.place(arrived.ino, false).await.expect("placed");
    world.put_at(&placement, b"and after").await.expect("put");
    unlink(&tree, "doomed").await.expect("unlinked");
    unlink(&tree, "replaced").await.expect("unlinked");
    world.write_path(&tree, "replaced", "REPLACED").await.expect("written");
    tree.sync().await.expect("synced");
    world.crash(tree, true).await;

    let other = copied(&world).await;
    let report = adopted(&other).await.expect("adopted");
    // What came of the write is seen when it is mounted.
    assert_eq!((report.files, report.named[0].why), (1, Why::OtherSize));
    let tree = other.open().await;
    other.pass_ttl();
    tree.drain().await.expect("drained");
    assert_eq!(resolve(&tree, "asked").await.expect("found"), asked);
    let expected = [
        ("arrived", "and after"),
        ("asked", "before"),
        ("borrower", "lender"),
        ("elsewhere/a", "moved/a"),
        ("lender", "LENDER"),
        ("replaced", "REPLACED"),
        ("second", "LENDER"),
    ];
    assert_eq!(
        paths(&tree).await,
        ["arrived", "asked", "borrower", "elsewhere/", "elsewhere/a", "lender", "replaced", "second"]
    );
    for (path, text) in expected {
        assert_eq!(other.read_path(&tree, path).await.expect("bytes"), text, "{path}");
    }
    is_clean(&tree).await;
}

#[tokio::test]
async fn what_was_not_copied_is_named_and_is_never_other_bytes() {
    let world = World::memory().await;
    world.put("shrunk", b"12345").await;
    world.put("gone", b"12345").await;
    let tree = world.open().await;
    paths(&tree).await;
    make_directory(&tree, "d").await.expect("made");
    make_directory(&tree, "packed").await.expect("made");
    let packed = resolve(&tree, "packed").await.expect("found").ino;
    tree.set_packed(packed, true).await.expect("set");
    write_packed(&world, &tree, &[("one", b"1"), ("two", b"22")]).await;
    world.write_path(&tree, "d/kept", "kept").await.expect("written");
    // Bytes that another host has yet to upload.
    let (late, _) =
        tree.create(InodeId::ROOT, b"late\xff", new_file(), Existing::Refuse).await.expect("made");
    let placed = tree.place(late.ino, false).await.expect("placed");
    let staged = FileLayout::of_blob(Blob::staged(placed.key().clone(), 4, "elsewhere"));
    tree.commit_layout(late.ino, 0, staged, world.clock.wall()).await.expect("committed");
    tree.close().await.expect("closed");
    let other = copied(&world).await;
    other.put("shrunk", b"123").await;
    other.delete("gone").await;
    let owned = other.objects().await.into_keys().find(|key| key.starts_with(".forebay/blobs/"));
    let owned = owned.expect("a segment");
    other.delete(&owned).await;

    let report = adopted(&other).await.expect("adopted");
    let mut named: Vec<_> =
        report.named.iter().map(|file| (file.path.as_str(), file.key.as_str(), file.why)).collect();
    named.sort_by_key(|(path, ..)| *path);
    let expected = [
        ("gone", "gone", Why::Missing),
        ("late\u{fffd}", placed.key().as_str(), Why::NotUploaded),
        ("one", owned.as_str(), Why::Missing),
        ("shrunk", "shrunk", Why::OtherSize),
        ("two", owned.as_str(), Why::Missing),
    ];
    assert_eq!(named, expected);
    assert_eq!((report.objects, report.lacking, report.files), (1, 4, 5));
    let tree = other.open().await;
    assert_eq!(other.read_path(&tree, "d/kept").await.expect("bytes"), "kept");
    for path in ["one", "two", "gone"] {
        assert_eq!(kind_of(other.read_path(&tree, path).await), ErrorKind::NotFound, "{path}");
    }
    // Where a listing shows another object, that is the file, as ever.
    assert_eq!(other.read_path(&tree, "shrunk").await.expect("bytes"), "123");
    tree.close().await.expect("closed");

    // Copied at last.
    let (bytes, _) = world.bucket().get_whole(&ObjectKey::new(&*owned)).await.expect("an object");
    other.put(&owned, &bytes).await;
    other.put(placed.key().as_str(), b"late").await;
    assert_eq!(adopted(&other).await.expect("adopted").files, 0);
    let tree = other.open().await;
    assert_eq!(other.read_path(&tree, "two").await.expect("bytes"), "22");
    assert_eq!(other.read(&tree, late.ino).await.expect("bytes"), b"late");
    tree.close().await.expect("closed");
}

#[tokio::test]
async fn an_adoption_that_is_cut_off_is_refused_until_it_comes_to_its_end() {
    let (mut nth, mut cuts) = (0, 0);
    loop {
        nth += 1;
        let world = World::memory().await;
        let tree = sample(&world).await;
        // Two contents of one key, only one of which is there: half of the records would not tell which.
        world.put("twice", b"old").await;
        world.pass_ttl();
        paths(&tree).await;
        share(&world, &tree, "twice", "first").await.expect("shared");
        world.write_path(&tree, "twice", "new").await.expect("written");
        share(&world, &tree, "twice", "second").await.expect("shared");
        // One that is written anew with others than its lender.
        let many = make_directory(&tree, "many").await.expect("made").ino;
        for number in 0..300 {
            let name = number.to_string();
            tree.create(many, name.as_bytes(), new_file(), Existing::Refuse).await.expect("made");
        }
        make_directory(&tree, "last").await.expect("made");
        share(&world, &tree, "twice", "last/third").await.expect("shared");
        tree.drain().await.expect("drained");
        let expected = content(&world, &tree).await;
        tree.close().await.expect("closed");
        let other = copied(&world).await;
        other.lease.lapse(nth, u64::MAX);
        let done = adopted(&other).await.is_ok();
        other.disk.fail(nth % 2 == 0);
        other.lease.renew();
        if let Err(refused) = other.try_open(None).await {
            cuts += 1;
            assert_eq!(refused.kind(), ErrorKind::Corrupt);
            assert!(refused.hint().is_some_and(|hint| hint.contains("volume adopt")), "{refused:?}");
        }
        let report = adopted(&other).await.expect("adopted");
        assert_eq!(report.files, 0, "{report:?}");
        let tree = other.open().await;
        other.pass_ttl();
        assert!(content(&other, &tree).await == expected, "{nth}");
        is_clean(&tree).await;
        tree.close().await.expect("closed");
        if done {
            break;
        }
    }
    assert!(cuts > 3, "{cuts} of {nth}");
}

#[tokio::test]
async fn a_dump_is_loaded_over_a_copy_in_another_kind_of_store() {
    for (from, to) in [(Kind::Lmdb, Kind::Slate), (Kind::Slate, Kind::Lmdb)] {
        let world = World::new(from).await;
        let tree = sample(&world).await;
        let (stream, expected) = (dumped(&tree).await, content(&world, &tree).await);
        tree.close().await.expect("closed");
        let other = World::new(to).await;
        let keys: Vec<ObjectKey> =
            world.bucket().list("").map_ok(|info| info.key).try_collect().await.expect("a listing");
        for key in keys.into_iter().filter(|key| !key.as_str().starts_with(".forebay/tree")) {
            let (bytes, _) = world.bucket().get_whole(&key).await.expect("an object");
            other.put(key.as_str(), &bytes).await;
        }
        assert_eq!(kind_of(adopted(&other).await), ErrorKind::NotFound, "it has no tree");
        let committer =
            Committer::start(other.engine().await.expect("an engine"), CommitterSettings::default());
        let (options, stream) = (LoadOptions::default(), Cursor::new(stream));
        let loaded = load_moved(&committer, KEYS, stream, options, other.bucket()).await;
        let (_, report) = loaded.expect("loaded");
        committer.close().await.expect("closed");
        assert_eq!((report.changed, report.files), (report.objects, 0), "{report:?}");
        let tree = other.open().await;
        other.pass_ttl();
        assert_eq!(content(&other, &tree).await, expected, "{from:?} {to:?}");
        is_clean(&tree).await;
        tree.close().await.expect("closed");
    }
}
