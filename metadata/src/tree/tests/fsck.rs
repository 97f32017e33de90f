//! Each kind of damage, put into the engine or the bucket, is found, named, and mended where it can be.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use forebay_core::{Blob, Extent, FileKind, InodeId, ObjectKey, Result, Source};
use forebay_io::object::Condition;

use super::sharing::share;
use super::world::*;
use crate::fsck::FsckReport;
use crate::records::{Change, Records};
use crate::schema::{
    Claim, Dentry, HolderState, ImportState, Inode, Loan, Quota, QuotaLimits, Tag, Usage, encode_plain,
};
use crate::testing::{Chance, rounds};
use crate::tree::{Existing, LocalTree, RenameMode, Tree, resolve};

const ROOT: InodeId = InodeId::ROOT;

/// A tree with one of everything.
pub(super) async fn sample(world: &World) -> LocalTree {
    for key in ["listed/a", "listed/deep/b", "top"] {
        world.put(key, key.as_bytes()).await;
    }
    let tree = world.open().await;
    paths(&tree).await;
    make_directory(&tree, "d").await.expect("made");
    make_directory(&tree, "d/e").await.expect("made");
    world.write_path(&tree, "d/plain", "plain").await.expect("written");
    world.write_path(&tree, "d/linked", "linked").await.expect("written");
    let linked = resolve(&tree, "d/linked").await.expect("found").ino;
    tree.link(linked, ROOT, b"again").await.expect("linked");
    world.write_path(&tree, "packed", "head").await.expect("written");
    write_over(world, &tree, "packed", 6, b"tail").await;
    tree.create(ROOT, b"link", new_inode(FileKind::Symlink), Existing::Refuse).await.expect("made");
    rename(&tree, "listed/deep", "moved", RenameMode::Replace).await.expect("renamed");
    tree.drain().await.expect("drained");
    tree
}

pub(super) async fn write_over(world: &World, tree: &LocalTree, path: &str, offset: u64, bytes: &[u8]) {
    let (key, bytes) = (tree.fresh_blob(), Bytes::copy_from_slice(bytes));
    let blob = world.bucket().put(&key, bytes, Condition::IfAbsent).await.expect("put").blob();
    let ino = resolve(tree, path).await.expect("found").ino;
    let (mut layout, generation) = tree.layout(ino).await.expect("a layout");
    layout.write(Extent { offset, length: blob.size, source: Source::Blob { blob, offset: 0 } });
    tree.commit_layout(ino, generation, layout, world.clock.wall()).await.expect("committed");
}

pub(super) fn kinds(report: &FsckReport) -> Vec<&str> {
    let mut kinds: Vec<&str> = report.findings.iter().map(|found| found.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

pub(super) async fn fsck(tree: &LocalTree, repair: bool) -> FsckReport {
    tree.fsck(repair).await.expect("checked")
}

/// Puts damage into a fresh sample and asserts what is found; where it can be mended, that it is, and that all bytes
/// are still there.
async fn check(
    expected: &[&str],
    mends: bool,
    damage: impl Fn(&mut Change<'_, '_>) -> Result<()> + Clone + Send + 'static,
) {
    for kind in [Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        let tree = sample(&world).await;
        let clean = fsck(&tree, false).await;
        assert_eq!(kinds(&clean), [] as [&str; 0], "{:?}", clean.findings);
        let damage = damage.clone();
        tree.change(move |change| damage(change)).await.expect("damaged");
        let found = fsck(&tree, false).await;
        assert_eq!(kinds(&found), expected, "{kind:?}: {:?}", found.findings);
        assert!(!found.is_clean() && found.findings.iter().all(|found| !found.mended));
        let mended = fsck(&tree, true).await;
        assert_eq!(mended.is_clean(), mends, "{kind:?}: {:?}", mended.findings);
        let left = fsck(&tree, false).await;
        assert_eq!(left.findings.is_empty(), mends, "{kind:?}: {:?}", left.findings);
        assert!(
            mends || kinds(&left) == expected,
            "what cannot be mended is left alone: {:?}",
            left.findings
        );
        if mends {
            tree.drain().await.expect("drained");
            let again = fsck(&tree, false).await;
            assert!(again.is_clean(), "{kind:?} after moves: {:?}", again.findings);
            let read = world.read_path(&tree, "packed").await.expect("bytes");
            assert_eq!(read, "head\0\0tail");
        }
        tree.close().await.expect("closed");
    }
}

/// The inode that a path leads to, inside a transaction.
fn at(change: &Change<'_, '_>, path: &str) -> Result<InodeId> {
    path.split('/').try_fold(ROOT, |ino, name| Ok(change.entry(ino, name.as_bytes())?.ino))
}

fn edit(change: &mut Change<'_, '_>, path: &str, edit: impl Fn(&mut Inode)) -> Result<()> {
    let ino = at(change, path)?;
    let mut inode = change.inode(ino)?;
    edit(&mut inode);
    change.put_inode(ino, &inode)
}

#[tokio::test]
async fn entries_and_inodes_that_lost_one_another() {
    check(&["dangling-entry"], true, |change| {
        change.put_dentry(ROOT, b"nowhere", Dentry { ino: InodeId(1 << 40), kind: FileKind::File })
    })
    .await;
    check(&["lost-inode"], true, |change| {
        let directory = at(change, "d")?;
        change.delete_dentry(directory, b"plain")
    })
    .await;
    check(&["wrong-type"], true, |change| {
        let ino = at(change, "packed")?;
        change.put_dentry(ROOT, b"packed", Dentry { ino, kind: FileKind::Fifo })
    })
    .await;
    check(&["wrong-names"], true, |change| edit(change, "d/linked", |inode| inode.name = "other".into()))
        .await;
    check(&["wrong-link-count"], true, |change| edit(change, "d/plain", |inode| inode.nlink = 7)).await;
    check(&["wrong-link-count"], true, |change| edit(change, "d", |inode| inode.nlink = 2)).await;
}

#[tokio::test]
async fn a_lost_directory_comes_back_with_all_below_it() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    let lost = resolve(&tree, "d").await.expect("found").ino;
    tree.change(|change| change.delete_dentry(ROOT, b"d")).await.expect("damaged");
    let found = fsck(&tree, true).await;
    assert!(found.is_clean(), "{:?}", found.findings);
    assert_eq!(kinds(&found), ["lost-inode", "wrong-link-count"]);
    for _ in 0..2 {
        let plain = format!("lost+found/inode-{lost}/plain");
        assert_eq!(world.read_path(&tree, &plain).await.expect("bytes"), "plain");
        assert_eq!(world.read_path(&tree, "again").await.expect("bytes"), "linked");
        tree.drain().await.expect("drained");
        world.pass_ttl();
    }
    assert!(fsck(&tree, false).await.is_clean());
}

#[tokio::test]
async fn layouts_that_cannot_be() {
    check(&["bad-layout", "wrong-counters"], false, |change| edit(change, "packed", |inode| inode.size = 7))
        .await;
    check(&["bad-layout"], false, |change| edit(change, "d/plain", |inode| inode.further = 3)).await;
    check(&["unreadable-record", "wrong-counters"], false, |change| {
        let ino = at(change, "link")?;
        change.put(change.shared.keys.inode(ino), Bytes::from_static(b"?"))
    })
    .await;
}

/// A repair moved what lies in such a directory to `/lost+found`, and their objects with it. The record may come back:
/// nothing is to be different then.
#[tokio::test]
async fn what_a_record_that_cannot_be_read_leads_to_is_not_lost() {
    for kind in [Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        let tree = sample(&world).await;
        let (all, objects) = (paths(&tree).await, named_objects(&world).await);
        let keys = tree.look(|look| {
            let d = look.entry(ROOT, b"d")?.ino;
            let (keys, e) = (look.keys(), look.entry(d, b"e")?.ino);
            let names = [(ROOT, &b"d"[..]), (ROOT, b"again"), (d, b"linked"), (d, b"plain"), (d, b"e")];
            let entries = names.map(|(parent, name)| keys.dentry(parent, name));
            Ok(entries.into_iter().chain([keys.inode(d), keys.inode(e)]).collect::<Vec<_>>())
        });
        for key in keys.await.expect("keys") {
            let record = key.clone();
            let spoil = move |change: &mut Change<'_, '_>| {
                let before = change.reads().get(&record)?;
                change.put(record.clone(), Bytes::from_static(b"?")).map(|()| before)
            };
            let before = tree.change(spoil).await.expect("damaged").expect("a record");
            let found = fsck(&tree, true).await;
            assert!(
                !found.is_clean() && kinds(&found).contains(&"unreadable-record"),
                "{:?}",
                found.findings
            );
            assert!(found.findings.iter().all(|found| !found.mended), "{key:?}: {:?}", found.findings);
            tree.drain().await.expect("drained");
            tree.change(move |change| change.put(key.clone(), before.clone())).await.expect("put back");
            let found = fsck(&tree, false).await;
            assert!(found.findings.is_empty(), "{:?}", found.findings);
            assert_eq!((paths(&tree).await, named_objects(&world).await), (all.clone(), objects.clone()));
        }
        tree.close().await.expect("closed");
    }
}

/// A directory of many files is one finding where its record cannot be read.
#[tokio::test]
async fn what_a_record_that_cannot_be_read_leads_to_is_no_damage() {
    check(&["unreadable-record", "wrong-counters", "wrong-import-state"], false, |change| {
        let ino = at(change, "d")?;
        change.put(change.keys().inode(ino), Bytes::from_static(b"?"))
    })
    .await;
}

/// One such key kept the volume from being mounted, or from being checked.
#[tokio::test]
async fn keys_that_are_cut_short_are_told_and_refuse_nothing() {
    let tags = [
        Tag::Dentry,
        Tag::Inode,
        Tag::Link,
        Tag::Xattr,
        Tag::References,
        Tag::Member,
        Tag::Loan,
        Tag::Orphan,
        Tag::Session,
        Tag::Quota,
        Tag::Trash,
        Tag::Deletion,
        Tag::Move,
        Tag::Import,
        Tag::Claim,
    ];
    for tag in tags {
        let world = World::new(Kind::Lmdb).await;
        let tree = sample(&world).await;
        let key = move |change: &Change<'_, '_>| [&change.keys().family(tag).0[..], b"cut"].concat();
        let spoil = move |change: &mut Change<'_, '_>| change.put(key(change).into(), encode_plain(b""));
        tree.change(spoil).await.expect("damaged");
        tree.close().await.expect("closed");
        let tree = world.try_open(world.bucket.clone()).await;
        let tree = tree.unwrap_or_else(|error| panic!("{tag:?}: {error:?}"));
        for repair in [false, true] {
            let found = tree.fsck(repair).await.unwrap_or_else(|error| panic!("{tag:?}: {error:?}"));
            assert_eq!(kinds(&found), ["unreadable-record"], "{tag:?}: {:?}", found.findings);
        }
        tree.close().await.expect("closed");
    }
    check(&["unreadable-record", "wrong-names"], false, |change| {
        edit(change, "d/linked", |inode| inode.name = "other".into())?;
        let entry = change.entry(at(change, "d")?, b"linked")?;
        let nameless = change.keys().dentry(ROOT, b"");
        change.put(nameless, entry.encode())
    })
    .await;
}

/// The objects that are not Forebay's own.
async fn named_objects(world: &World) -> std::collections::BTreeMap<String, Vec<u8>> {
    let mut objects = world.objects().await;
    objects.retain(|key, _| !key.starts_with(".forebay/"));
    objects
}

#[tokio::test]
async fn counts_claims_and_places_that_are_wrong() {
    check(&["wrong-references"], true, |change| {
        let ino = at(change, "packed")?;
        let layout = change.layout(ino, &change.inode(ino)?)?;
        let blob = layout.blobs().find(|blob| blob.is_owned()).cloned().expect("an owned blob");
        change.put_references(&blob, 9)
    })
    .await;
    check(&["wrong-counters"], true, |change| change.count(5, 1000)).await;
    check(&["wrong-quota"], true, |change| {
        let (directory, usage) = (at(change, "d")?, Usage { inodes: 7, bytes: -7 });
        let limits = QuotaLimits { bytes: Some(1), inodes: None };
        change.put_quota(directory, &Quota { limits, is_counted: true, usage })
    })
    .await;
    check(&["wrong-quota"], true, |change| change.put_quota(at(change, "d/plain")?, &Quota::default())).await;
    check(&["stray-trash"], true, |change| {
        let ino = at(change, "d/plain")?;
        change.put(change.shared.keys.trash(7, ino), encode_plain(b""))
    })
    .await;
    check(&["empty-claim"], true, |change| {
        let state = HolderState::Held(InodeId(1 << 40));
        change.put_claim(&Claim { key: ObjectKey::new("listed/a"), state })
    })
    .await;
    check(&["wrong-import-state"], true, |change| {
        let ino = at(change, "d/e")?;
        change.put_import_state(ino, &ImportState { prefix: Some("listed".into()), listed: None })
    })
    .await;
    check(&["wrong-import-state"], true, |change| {
        let ino = at(change, "d/plain")?;
        change.put_import_state(ino, &ImportState::default())
    })
    .await;
}

/// Directories have numbers set aside that no inode shows yet, and mending itself may take more of them.
#[tokio::test]
async fn no_number_is_given_twice_after_counters_were_mended() {
    for kind in [Kind::Lmdb, Kind::Slate] {
        for are_gone in [false, true] {
            let world = World::new(kind).await;
            let tree = sample(&world).await;
            let spoil = move |change: &mut Change<'_, '_>| {
                // The next thing made in the root is given numbers anew.
                let mut root = change.directory(ROOT)?;
                root.run.next = root.run.end;
                change.put_inode(ROOT, &root)?;
                let directory = at(change, "d")?;
                change.delete_dentry(directory, b"plain")?;
                let counters = change.keys().counters();
                if are_gone { change.delete(counters) } else { change.count(5, 1000) }
            };
            tree.change(spoil).await.expect("damaged");
            let found = fsck(&tree, true).await;
            assert!(found.is_clean(), "{:?}", found.findings);
            assert_eq!(kinds(&found), ["lost-inode", "wrong-counters"], "{:?}", found.findings);
            make_directory(&tree, "new").await.expect("made");
            for path in ["d/1", "1", "d/e/1", "lost+found/1", "new/1", "d/2", "2", "new/2"] {
                world.write_path(&tree, path, path).await.expect("written");
            }
            let mut given = std::collections::HashMap::new();
            for path in paths(&tree).await.into_iter().filter(|path| !["again", "link"].contains(&&**path)) {
                let ino = resolve(&tree, path.trim_end_matches('/')).await.expect("found").ino;
                let before = given.insert(ino, path.clone());
                assert!(before.is_none(), "{kind:?}: {ino} is {path} and {before:?}");
            }
            for path in ["d/1", "1", "d/e/1", "lost+found/1", "new/1"] {
                assert_eq!(world.read_path(&tree, path).await.expect("bytes"), path);
            }
            let left = fsck(&tree, false).await;
            assert!(left.findings.is_empty(), "{kind:?}: {:?}", left.findings);
            tree.close().await.expect("closed");
        }
    }
}

#[tokio::test]
async fn bytes_that_are_not_in_the_bucket_as_the_layout_says() {
    for kind in [Kind::Lmdb, Kind::Slate] {
        for (change, why) in [("ta1l", "of another version"), ("t", "of another size")] {
            let world = World::new(kind).await;
            let tree = sample(&world).await;
            let ino = resolve(&tree, "packed").await.expect("found").ino;
            let (layout, _) = tree.layout(ino).await.expect("a layout");
            let blob = layout.blobs().find(|blob| blob.is_owned()).cloned().expect("an owned blob");
            world.put(blob.key.as_str(), change.as_bytes()).await;
            // What is there may be a copy of what is missed: neither it nor what refers to it is touched.
            for _ in 0..2 {
                drop(fsck(&tree, true).await);
                tree.drain().await.expect("drained");
            }
            assert_eq!(world.objects().await[blob.key.as_str()], change.as_bytes());
            let found = fsck(&tree, true).await;
            assert_eq!(kinds(&found), ["dangling-extent"], "{:?}", found.findings);
            assert!(found.findings[0].detail.contains(why), "{:?}", found.findings);
            assert!(!found.is_clean() && paths(&tree).await.contains(&"packed".to_owned()));
            tree.close().await.expect("closed");
        }
        let world = World::new(kind).await;
        let tree = sample(&world).await;
        world.put("listed/a", b"an outsider's").await;
        world.delete("top").await;
        let found = fsck(&tree, false).await;
        assert!(found.is_clean(), "{:?}", found.findings);
        assert_eq!(found.changed_outside, 2, "the next listing takes that over");
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn what_leaked_is_found_and_freed() {
    let mut world = World::new(Kind::Lmdb).await;
    world.settings.gc.staging_ms = 0;
    let tree = sample(&world).await;
    world
        .bucket()
        .put(&tree.fresh_blob(), Bytes::from_static(b"leak"), Condition::IfAbsent)
        .await
        .expect("put");
    assert!(fsck(&tree, false).await.is_clean(), "it is on its way while its session lives");
    tree.close().await.expect("closed");
    let staging = world.bucket().url().directory().expect("a folder").join(".forebay/staging");
    std::fs::write(staging.join("left"), "left").expect("staged");
    let tree = world.open().await;
    let found = fsck(&tree, false).await;
    assert_eq!(kinds(&found), ["leaked-blob", "leaked-uploads"], "{:?}", found.findings);
    let mended = fsck(&tree, true).await;
    assert!(mended.is_clean() && mended.findings.len() == 2, "{:?}", mended.findings);
    assert!(!staging.join("left").exists());
    assert!(fsck(&tree, false).await.findings.is_empty());
}

/// A tree that is begun anew over the bucket of a lost one called all that this one had put leaked, for good: whoever
/// removed it by hand, as the hint told, destroyed what the dump names.
#[tokio::test]
async fn what_another_tree_put_is_told_and_no_damage() {
    let world = World::memory().await;
    let tree = sample(&world).await;
    let dump = super::dump::dumped(&tree).await;
    let leak = async |key: &ObjectKey| {
        world.bucket().put(key, Bytes::from_static(b"leak"), Condition::IfAbsent).await.expect("put");
    };
    leak(&tree.fresh_blob()).await;
    let owned = world.objects().await.into_iter().filter(|(key, _)| key.starts_with(Blob::OWNED_PREFIX));
    let owned: Vec<_> = owned.collect();
    let foreign = (owned.len() as u64, owned.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>());
    assert!(foreign.0 > 1, "{owned:?}");
    tree.close().await.expect("closed");

    let mut anew = World::memory().await;
    anew.bucket.clone_from(&world.bucket);
    // Numbers of sessions are drawn by chance.
    anew.sessions.store(100, Ordering::SeqCst);
    let tree = anew.open().await;
    leak(&tree.fresh_blob()).await;
    tree.close().await.expect("closed");
    let tree = anew.open().await;
    for (repair, expected) in [(false, &["leaked-blob"][..]), (true, &["leaked-blob"]), (false, &[])] {
        let found = fsck(&tree, repair).await;
        assert_eq!((kinds(&found), found.is_clean()), (expected.to_vec(), repair || expected.is_empty()));
        assert_eq!((found.foreign, found.foreign_bytes), foreign, "{found:?}");
    }
    // No session of any tree gives such a name.
    leak(&ObjectKey::new(".forebay/blobs/nobodys")).await;
    let found = fsck(&tree, true).await;
    assert_eq!((kinds(&found), found.is_clean()), (vec!["leaked-blob"], false), "{:?}", found.findings);
    world.delete(".forebay/blobs/nobodys").await;
    tree.close().await.expect("closed");

    super::dump::load_into(&anew, &dump, true).await.expect("loaded");
    let tree = anew.open().await;
    let found = fsck(&tree, true).await;
    assert_eq!((kinds(&found), found.foreign), (vec!["leaked-blob"], 0), "{:?}", found.findings);
    assert!(found.is_clean());
    assert_eq!(anew.read_path(&tree, "packed").await.expect("bytes"), "head\0\0tail");
    tree.close().await.expect("closed");
}

#[tokio::test]
async fn random_operations_leave_a_clean_tree_at_every_moment() {
    for _ in 0..rounds(4) {
        let (mut world, mut chance) = (World::new(Kind::Lmdb).await, Chance::fresh());
        world.settings.trash_ms = chance.below(2) * 1000;
        let tree = sample(&world).await;
        for _ in 0..60 {
            let places = ["a", "b", "d/a", "d/b", "d/e/a", "moved/a", "listed/b"];
            let (one, other) = (places[chance.below(7) as usize], places[chance.below(7) as usize]);
            // Most of these fail for good reasons; none may leave anything wrong.
            match chance.below(9) {
                0 | 1 => drop(world.write_path(&tree, one, other).await),
                2 => drop(make_directory(&tree, one).await),
                3 => drop(unlink(&tree, one).await),
                4 => drop(rename(&tree, one, other, RenameMode::Replace).await),
                5 => drop(rename(&tree, one, other, RenameMode::Exchange).await),
                6 => drop(rename(&tree, "d", "listed/d", RenameMode::Exchange).await),
                7 if resolve(&tree, one).await.is_ok_and(|found| found.kind == FileKind::File) => {
                    write_over(&world, &tree, one, chance.below(9), b"over").await;
                }
                _ => {
                    world.clock.advance(std::time::Duration::from_millis(700));
                    tree.drain().await.expect("drained");
                }
            }
            if chance.below(6) == 0 {
                let found = fsck(&tree, false).await;
                assert!(found.is_clean(), "{:?}", found.findings);
            }
        }
        tree.drain().await.expect("drained");
        let found = fsck(&tree, false).await;
        assert!(found.is_clean(), "{:?}", found.findings);
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn files_that_share_bytes_are_sound_whatever_becomes_of_the_lender() {
    for kind in [Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        let tree = sample(&world).await;
        let sound = async |tree: &LocalTree| {
            for drained in [false, true] {
                if drained {
                    tree.drain().await.expect("drained");
                }
                let found = fsck(tree, false).await;
                assert!(found.is_clean(), "{kind:?}: {:?}", found.findings);
                assert_eq!(tree.collect_garbage(false).await.expect("collected").blobs, 0);
            }
        };
        for (from, to) in [("top", "one"), ("packed", "two"), ("top", "d/three")] {
            share(&world, &tree, from, to).await.expect("shared");
            sound(&tree).await;
        }
        world.write_path(&tree, "top", "replaced").await.expect("written");
        sound(&tree).await;
        unlink(&tree, "one").await.expect("unlinked");
        unlink(&tree, "packed").await.expect("unlinked");
        sound(&tree).await;
        tree.close().await.expect("closed");
        // The copy of a lent object is named by its loan alone, and its session is dead.
        let tree = world.open().await;
        sound(&tree).await;
        for (path, text) in [("d/three", "top"), ("two", "head\0\0tail"), ("top", "replaced")] {
            assert_eq!(world.read_path(&tree, path).await.expect("bytes"), text);
        }
        tree.close().await.expect("closed");
    }
    check(&["wrong-loan"], true, |change| {
        let home = change.inode(at(change, "top")?)?.home.expect("a plain object");
        change.put_loan(&Loan { blob: home, count: 3, moved: None })
    })
    .await;
}
