//! Files whose bytes are gone from the bucket: found whoever shares them, given up only when asked for and only when it
//! is certain, and never taken for whole files afterwards.

use forebay_core::{Blob, FileKind, InodeId, Result};
use forebay_io::object::{FaultMode, Faults, OperationKind};

use super::fsck::{fsck, kinds, write_over};
use super::segments::write_packed;
use super::sharing::share;
use super::world::*;
use crate::fsck::{Finding, FsckReport, Repair};
use crate::tree::{LocalTree, QuotaLimits, Tree, resolve};

const ROOT: InodeId = InodeId::ROOT;
const KINDS: [Kind; 2] = [Kind::Lmdb, Kind::Slate];

/// A tree with one of everything, and one more object where owned blobs are: where none is seen, nothing is given up.
async fn sample(world: &World) -> LocalTree {
    let tree = super::fsck::sample(world).await;
    world.write_path(&tree, "witness", "here").await.expect("written");
    write_over(world, &tree, "witness", 6, b"tail").await;
    tree.drain().await.expect("drained");
    tree
}

async fn ino(tree: &LocalTree, path: &str) -> InodeId {
    resolve(tree, path).await.expect("found").ino
}

/// The owned blob of a file.
async fn owned(tree: &LocalTree, path: &str) -> Blob {
    let (layout, _) = tree.layout(ino(tree, path).await).await.expect("a layout");
    layout.blobs().find(|blob| blob.is_owned()).cloned().expect("an owned blob")
}

/// Takes the owned blob of a file away. Returns its key.
async fn lose(world: &World, tree: &LocalTree, path: &str) -> String {
    let blob = owned(tree, path).await;
    world.delete(blob.key.as_str()).await;
    blob.key.as_str().to_owned()
}

async fn attribute(tree: &LocalTree, path: &str, name: &str) -> Result<String> {
    let value = tree.xattr(ino(tree, path).await, name.as_bytes()).await?;
    Ok(String::from_utf8_lossy(&value).into_owned())
}

#[track_caller]
fn only(report: &FsckReport) -> &Finding {
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
    &report.findings[0]
}

/// Asserts that nothing is wrong, now and after all that moves has moved and was listed.
async fn sound(world: &World, tree: &LocalTree) {
    for _ in 0..2 {
        let found = fsck(tree, false).await;
        assert!(found.findings.is_empty(), "{:?}", found.findings);
        tree.drain().await.expect("drained");
        world.pass_ttl();
        paths(tree).await;
    }
}

/// Promise S69: No byte that is gone from the bucket is read as a zero until `forebay fsck --repair` has given it up. Its
/// file is then `/lost+found/damaged-inode-N` and has no other name; all other bytes are as they were.
#[tokio::test]
async fn a_file_that_lost_bytes_is_taken_away_under_all_its_names() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let tree = sample(&world).await;
        let wide = QuotaLimits { bytes: Some(1 << 40), inodes: None };
        for directory in [ROOT, ino(&tree, "d").await] {
            tree.set_quota(directory, wide).await.expect("a quota");
        }
        let (packed, d) = (ino(&tree, "packed").await, ino(&tree, "d").await);
        tree.link(packed, d, b"oth\ner").await.expect("linked");
        let before = tree.attributes(packed).await.expect("attributes");
        let key = lose(&world, &tree, "packed").await;

        let found = fsck(&tree, false).await;
        let finding = only(&found);
        assert_eq!((finding.kind.as_str(), finding.mended), ("dangling-extent", false));
        for fact in ["6-9", "`packed`", &key, "missing", "--repair"] {
            assert!(finding.detail.contains(fact), "{fact}: {finding:?}");
        }
        assert!(world.read_path(&tree, "packed").await.is_err(), "no zeros are read before it is asked for");

        assert_eq!(finding.lost, [format!("6-9 {key}@0+4")]);

        let mended = fsck(&tree, true).await;
        assert_eq!((found.lost, mended.lost), (0, 1));
        let (finding, refuge) = (only(&mended), format!("lost+found/damaged-inode-{packed}"));
        for fact in ["6-9", "`packed`", &key, &refuge] {
            assert!(finding.detail.contains(fact) && finding.mended, "{fact}: {finding:?}");
        }
        sound(&world, &tree).await;
        assert_eq!(world.read_path(&tree, &refuge).await.expect("bytes"), "head\0\0\0\0\0\0");
        let all = paths(&tree).await;
        assert!(!all.contains(&"packed".to_owned()) && !all.contains(&"d/oth\ner".to_owned()), "{all:?}");
        let after = tree.attributes(packed).await.expect("attributes");
        assert_eq!((after.nlink, after.size, after.mtime), (1, before.size, before.mtime));
        assert!(after.generation > before.generation, "nobody takes the old bytes for these");
        assert_eq!(attribute(&tree, &refuge, "user.forebay.lost").await.expect("a value"), "6-9");
        let names = attribute(&tree, &refuge, "user.forebay.lost-names").await.expect("a value");
        assert_eq!(names, "packed\0d/oth\ner", "a name may have any byte but NUL");

        write_over(&world, &tree, &refuge, 1, b"EA").await;
        let again = lose(&world, &tree, &refuge).await;
        assert!(fsck(&tree, true).await.is_clean());
        sound(&world, &tree).await;
        assert_eq!(world.read_path(&tree, &refuge).await.expect("bytes"), "h\0\0d\0\0\0\0\0\0");
        assert_eq!(attribute(&tree, &refuge, "user.forebay.lost").await.expect("a value"), "6-9,1-2");
        let objects = attribute(&tree, &refuge, "user.forebay.lost-objects").await.expect("a value");
        assert_eq!(objects, format!("6-9 {key}@0+4\01-2 {again}@0+2"));
        assert_eq!(attribute(&tree, &refuge, "user.forebay.lost-names").await.expect("a value"), names);
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn everybody_who_shares_lost_bytes_is_found() {
    for kind in KINDS {
        let mut world = World::new(kind).await;
        world.settings.trash_ms = 3_600_000;
        let tree = sample(&world).await;
        for to in ["two", "d/three", "deleted"] {
            share(&world, &tree, "packed", to).await.expect("shared");
        }
        for to in ["borrower", "d/replaced"] {
            share(&world, &tree, "top", to).await.expect("shared");
        }
        world.write_path(&tree, "d/replaced", "anew").await.expect("written");
        unlink(&tree, "deleted").await.expect("deleted");
        tree.drain().await.expect("drained");
        write_packed(&world, &tree, &[("small", b"12345"), ("smaller", b"678")]).await;
        lose(&world, &tree, "packed").await;
        lose(&world, &tree, "small").await;
        world.delete("top").await;

        let found = fsck(&tree, false).await;
        assert_eq!(
            (kinds(&found), found.findings.len()),
            (vec!["dangling-extent"], 7),
            "{:?}",
            found.findings
        );
        for path in ["packed", "two", "d/three", "deleted", "borrower", "small", "smaller"] {
            let has_path = |one: &Finding| one.detail.contains(&format!("`{path}`"));
            assert!(found.findings.iter().any(has_path), "{path}: {:?}", found.findings);
        }
        assert!(fsck(&tree, true).await.is_clean());
        sound(&world, &tree).await;
        let all = paths(&tree).await;
        assert_eq!(all.iter().filter(|path| path.starts_with("lost+found/damaged-")).count(), 7, "{all:?}");
        assert!(!all.contains(&"top".to_owned()), "what an outsider deleted is gone: {all:?}");
        assert_eq!(world.read_path(&tree, "d/replaced").await.expect("bytes"), "anew");
        assert!(tree.trash(None, 9).await.expect("the trash").is_empty());
        tree.close().await.expect("closed");
        let tree = world.open().await;
        sound(&world, &tree).await;
        tree.close().await.expect("closed");
    }
}

/// An object that a file left behind by its new name holds bytes that only the tree knows of.
#[tokio::test]
async fn an_object_that_is_gone_before_it_moved_is_a_loss() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    let top = ino(&tree, "top").await;
    rename(&tree, "top", "d/top", crate::tree::RenameMode::Replace).await.expect("renamed");
    world.delete("top").await;
    let found = fsck(&tree, true).await;
    assert!(only(&found).detail.contains("the bytes 0-2 of `d/top`"), "{found:?}");
    sound(&world, &tree).await;
    let refuge = format!("lost+found/damaged-inode-{top}");
    assert_eq!(world.read_path(&tree, &refuge).await.expect("bytes"), "\0\0\0");
    // The key is free again.
    world.write_path(&tree, "top", "new").await.expect("written");
    sound(&world, &tree).await;
    assert_eq!(world.objects().await["top"], b"new");
}

/// The mover finds that out before anybody asks for a check, and listings do.
#[tokio::test]
async fn a_file_whose_object_is_gone_before_it_moved_stays_until_it_is_given_up() {
    use futures::future::FutureExt;
    let spelled = KINDS.into_iter().flat_map(|kind| [(kind, "d/top"), (kind, "near")]);
    // No key of a folder: the object stays where it is, and no move is noted.
    for (kind, to) in spelled.chain([(Kind::Lmdb, "near#1")]) {
        let world = World::new(kind).await;
        let tree = sample(&world).await;
        let top = ino(&tree, "top").await;
        rename(&tree, "top", to, crate::tree::RenameMode::Replace).await.expect("renamed");
        world.delete("top").await;
        tree.drain().await.expect("drained");
        let _ = tree.shared.work.notified().now_or_never();
        tree.drain().await.expect("drained");
        assert_eq!(tree.shared.work.notified().now_or_never(), None, "what is missing keeps nobody busy");
        world.pass_ttl();
        paths(&tree).await;
        tree.close().await.expect("closed");

        let tree = world.open_moving().await;
        tree.drain().await.expect("drained");
        assert_eq!(ino(&tree, to).await, top);
        assert!(world.read_path(&tree, to).await.is_err(), "no zeros are read");
        assert!(!only(&fsck(&tree, false).await).mended);
        let found = fsck(&tree, true).await;
        assert!(only(&found).detail.contains(&format!("the bytes 0-2 of `{to}`")), "{found:?}");
        sound(&world, &tree).await;
        let refuge = format!("lost+found/damaged-inode-{top}");
        assert_eq!(world.read_path(&tree, &refuge).await.expect("bytes"), "\0\0\0");
        assert_eq!(attribute(&tree, &refuge, "user.forebay.lost-names").await.expect("a value"), to);
        tree.close().await.expect("closed");
    }
}

/// Nor is a file with other bytes of its own ever taken away, for which no move is noted either.
#[tokio::test]
async fn a_partly_written_file_keeps_its_bytes_when_its_object_is_gone_or_replaced() {
    for (kind, other) in KINDS.into_iter().flat_map(|kind| [(kind, None), (kind, Some(b"TOP"))]) {
        let world = World::new(kind).await;
        let tree = sample(&world).await;
        let top = ino(&tree, "top").await;
        write_over(&world, &tree, "top", 1, b"O").await;
        rename(&tree, "top", "near", crate::tree::RenameMode::Replace).await.expect("renamed");
        tree.drain().await.expect("drained");
        match other {
            None => world.delete("top").await,
            Some(other) => world.put("top", other).await,
        }
        for _ in 0..2 {
            world.pass_ttl();
            let all = paths(&tree).await;
            assert!(all.contains(&"near".to_owned()) && !all.contains(&"top".to_owned()), "{all:?}");
            tree.drain().await.expect("drained");
        }
        assert_eq!(ino(&tree, "near").await, top);
        assert!(only(&fsck(&tree, false).await).detail.contains("`near`"));
        let found = fsck(&tree, true).await;
        assert_eq!(only(&found).mended, other.is_none(), "{found:?}");
        if other.is_none() {
            let refuge = format!("lost+found/damaged-inode-{top}");
            assert_eq!(world.read_path(&tree, &refuge).await.expect("bytes"), "\0O\0");
        } else {
            // As it says, the file is removed; then the outsider's object is shown.
            unlink(&tree, "near").await.expect("unlinked");
            tree.drain().await.expect("drained");
            world.pass_ttl();
            assert_eq!(world.read_path(&tree, "top").await.expect("bytes"), "TOP");
        }
        sound(&world, &tree).await;
        tree.close().await.expect("closed");
    }
}

/// The bytes are gone for certain: they are not in that object any more, and it is shown where it is.
#[tokio::test]
async fn a_renamed_file_whose_whole_object_is_replaced_is_gone() {
    for to in ["near", "d/top", "near#1"] {
        let world = World::new(Kind::Lmdb).await;
        let tree = sample(&world).await;
        rename(&tree, "top", to, crate::tree::RenameMode::Replace).await.expect("renamed");
        world.put("top", b"other").await;
        tree.drain().await.expect("drained");
        world.pass_ttl();
        assert!(!paths(&tree).await.contains(&to.to_owned()), "{to}");
        assert_eq!(world.read_path(&tree, "top").await.expect("bytes"), "other");
        sound(&world, &tree).await;
        tree.close().await.expect("closed");
    }
}

/// Nothing is lost with an object of no bytes.
#[tokio::test]
async fn an_empty_object_that_is_gone_takes_nothing_away() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    world.write_path(&tree, "d/empty", "").await.expect("written");
    share(&world, &tree, "d/empty", "none").await.expect("shared");
    rename(&tree, "d/empty", "moved/empty", crate::tree::RenameMode::Replace).await.expect("renamed");
    world.delete("d/empty").await;
    assert!(fsck(&tree, true).await.is_clean());
    sound(&world, &tree).await;
    assert_eq!(world.read_path(&tree, "moved/empty").await.expect("bytes"), "");
    assert!(!paths(&tree).await.iter().any(|path| path.starts_with("lost+found")));
}

#[tokio::test]
async fn nothing_is_given_up_that_is_not_certainly_gone() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    lose(&world, &tree, "packed").await;
    let before = paths(&tree).await;
    tree.close().await.expect("closed");

    // The store does not say, at the first look, whether the object is gone; whether another is still there; whether it
    // is gone at the second look.
    for first in 1..4 {
        let faults = Faults::new();
        let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(30))).await;
        for nth in first..200 {
            faults.script(OperationKind::Head, nth, FaultMode::Before);
        }
        let found = fsck(&tree, true).await;
        assert!(!found.is_clean() && !only(&found).mended, "{first}: {:?}", found.findings);
        assert_eq!(paths(&tree).await, before);
        tree.close().await.expect("closed");
    }

    // It cannot be listed at all.
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(30))).await;
    faults.set_down(true);
    assert!(tree.fsck(true).await.is_err());
    faults.set_down(false);
    assert_eq!(only(&fsck(&tree, false).await).kind, "dangling-extent");

    // A record that cannot be read may say where the bytes are.
    let link = ino(&tree, "link").await;
    let spoil = move |change: &mut crate::records::Change<'_, '_>| {
        let key = change.shared.keys.inode(link);
        change.put(key, bytes::Bytes::from_static(b"?"))
    };
    tree.change(spoil).await.expect("damaged");
    assert!(!fsck(&tree, true).await.is_clean());
    assert!(world.read_path(&tree, "packed").await.is_err(), "no zeros are read");
}

/// A reader that has a deleted file open goes on to get an error for what is gone.
#[tokio::test]
async fn a_file_without_a_name_keeps_its_error() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    let packed = ino(&tree, "packed").await;
    tree.opened(packed).await.expect("opened");
    unlink(&tree, "packed").await.expect("unlinked");
    let (layout, _) = tree.layout(packed).await.expect("a layout");
    let blob = layout.blobs().find(|blob| blob.is_owned()).cloned().expect("an owned blob");
    world.delete(blob.key.as_str()).await;
    assert!(!fsck(&tree, true).await.is_clean());
    assert!(world.read(&tree, packed).await.is_err());
    tree.closed(packed).await.expect("closed");
    tree.drain().await.expect("drained");
    sound(&world, &tree).await;
}

/// What leads to a file is put right first, in the same repair.
#[tokio::test]
async fn a_lost_inode_that_lost_bytes_gets_one_name() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    let packed = ino(&tree, "packed").await;
    lose(&world, &tree, "packed").await;
    tree.change(|change| change.delete_dentry(ROOT, b"packed")).await.expect("damaged");
    let found = fsck(&tree, true).await;
    assert!(found.is_clean(), "{:?}", found.findings);
    assert_eq!(kinds(&found), ["dangling-extent", "lost-inode"]);
    sound(&world, &tree).await;
    let lost = tree.attributes(ino(&tree, "lost+found").await).await.expect("attributes");
    assert_eq!((lost.kind, lost.mode), (FileKind::Directory, 0o700));
    let below: Vec<_> =
        paths(&tree).await.into_iter().filter(|path| path.starts_with("lost+found/")).collect();
    assert_eq!(below, ["lost+found/".to_owned(), format!("lost+found/damaged-inode-{packed}")]);
}

/// Where a file system is not mounted, or a server is empty, all that was there seems to be gone.
#[tokio::test]
async fn nothing_is_given_up_where_no_other_object_is_seen() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let tree = super::fsck::sample(&world).await;
        lose(&world, &tree, "packed").await;
        let before = paths(&tree).await;
        let found = fsck(&tree, true).await;
        assert!(!only(&found).mended && found.lost == 0, "{found:?}");
        assert!(found.refused.expect("a reason").contains("none of the objects"));
        assert_eq!(paths(&tree).await, before);
        let found = tree.fsck(Repair::AcceptLoss).await.expect("checked");
        assert!(found.is_clean() && found.lost == 1 && found.refused.is_none(), "{found:?}");
        sound(&world, &tree).await;
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn little_is_given_up_at_once() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    for n in 0..10 {
        let path = format!("d/{n}");
        world.write_path(&tree, &path, "head").await.expect("written");
        write_over(&world, &tree, &path, 6, b"tail").await;
        lose(&world, &tree, &path).await;
    }
    let before = paths(&tree).await;
    let found = fsck(&tree, true).await;
    assert_eq!((found.findings.len(), found.lost), (10, 0));
    assert!(found.findings.iter().all(|found| !found.mended));
    assert!(found.refused.expect("a reason").contains("10 of the 12 objects"));
    assert_eq!(paths(&tree).await, before);
    let found = tree.fsck(Repair::AcceptLoss).await.expect("checked");
    assert!(found.is_clean() && found.lost == 10, "{found:?}");
    sound(&world, &tree).await;
}

/// Objects at the paths of their own files are the user's to delete, but where none of them is seen any more, or many are
/// missing, what others hold beside them may be there all the same.
#[tokio::test]
async fn plain_objects_that_are_missing_speak_against_giving_up() {
    let many: Vec<String> = (0..10).map(|n| format!("d/w{n}")).collect();
    let cases = [(vec!["listed/a".to_owned()], "none of the objects"), (many, "of the 2")];
    for (missing, why) in cases {
        let world = World::new(Kind::Lmdb).await;
        let tree = sample(&world).await;
        for n in 0..10 {
            world.write_path(&tree, &format!("d/w{n}"), "w").await.expect("written");
        }
        world.write_path(&tree, "listed/x", "lost").await.expect("written");
        rename(&tree, "listed/x", "d/x", crate::tree::RenameMode::Replace).await.expect("renamed");
        world.delete("listed/x").await;
        for key in &missing {
            world.delete(key).await;
        }
        let found = fsck(&tree, true).await;
        assert!(!only(&found).mended && found.lost == 0, "{found:?}");
        assert!(found.refused.as_ref().expect("a reason").contains(why), "{found:?}");
        let found = tree.fsck(Repair::AcceptLoss).await.expect("checked");
        assert!(found.is_clean() && found.lost == 1, "{found:?}");
        sound(&world, &tree).await;
        tree.close().await.expect("closed");
    }
}

/// The bytes may lie behind a delete marker, or on a disk that was away.
#[tokio::test]
async fn what_comes_back_after_it_was_given_up_is_not_deleted() {
    for kind in KINDS {
        let world = World::new(kind).await;
        let tree = sample(&world).await;
        let packed = ino(&tree, "packed").await;
        let key = lose(&world, &tree, "packed").await;
        assert!(fsck(&tree, true).await.is_clean());
        world.put(&key, b"tail").await;
        sound(&world, &tree).await;
        tree.close().await.expect("closed");
        let tree = world.open().await;
        assert_eq!(tree.collect_garbage(false).await.expect("collected").blobs, 0);
        assert!(fsck(&tree, true).await.findings.is_empty());
        assert_eq!(world.objects().await[&key], b"tail");
        // It goes with the file that says what it was.
        unlink(&tree, &format!("lost+found/damaged-inode-{packed}")).await.expect("unlinked");
        assert_eq!(tree.collect_garbage(false).await.expect("collected").blobs, 1);
        assert!(!world.objects().await.contains_key(&key));
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_file_in_the_trash_whose_directory_is_gone_is_given_up() {
    let mut world = World::new(Kind::Lmdb).await;
    world.settings.trash_ms = 3_600_000;
    let tree = sample(&world).await;
    make_directory(&tree, "gone").await.expect("made");
    world.write_path(&tree, "gone/file", "head").await.expect("written");
    write_over(&world, &tree, "gone/file", 6, b"tail").await;
    let file = ino(&tree, "gone/file").await;
    lose(&world, &tree, "gone/file").await;
    unlink(&tree, "gone/file").await.expect("unlinked");
    tree.remove_directory(ROOT, b"gone").await.expect("removed");
    let trash = tree.trash(None, 9).await.expect("the trash");
    let directory = trash.iter().find(|one| one.attributes.kind == FileKind::Directory);
    tree.purge(directory.expect("a directory").id).await.expect("purged");

    let found = fsck(&tree, true).await;
    assert!(only(&found).mended && only(&found).detail.contains("`?/file`"), "{found:?}");
    sound(&world, &tree).await;
    let refuge = format!("lost+found/damaged-inode-{file}");
    assert_eq!(attribute(&tree, &refuge, "user.forebay.lost-names").await.expect("a value"), "?/file");
}
