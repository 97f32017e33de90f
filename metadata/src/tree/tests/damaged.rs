//! Records that cannot be read keep nothing else from its work: neither a mount nor a check, nor the mover.

use bytes::Bytes;
use forebay_core::{InodeId, ObjectKey, Result};

use super::fsck::{kinds, write_over};
use super::sharing::share;
use super::world::*;
use crate::records::{Change, Records};
use crate::schema::{HolderState, Inode, Keys, Tag};
use crate::tree::{Existing, LocalTree, Placement, RenameMode, Tree, resolve};

const SPOILED: &[u8] = b"?";

/// The sort of record that is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spoiled {
    Orphan,
    Inode,
    Part,
    MissingPart,
    References,
    Loan,
    Counters,
    Upload,
    Intent,
    IntentOf,
}

impl Spoiled {
    const ALL: [Self; 10] = [
        Self::Orphan,
        Self::Inode,
        Self::Part,
        Self::MissingPart,
        Self::References,
        Self::Loan,
        Self::Counters,
        Self::Upload,
        Self::Intent,
        Self::IntentOf,
    ];

    /// Damages it, where `ino` is a file that is open and has no name, and `written` one that is being written. Returns its
    /// key.
    fn spoil(self, change: &mut Change<'_, '_>, ino: InodeId, written: InodeId) -> Result<Bytes> {
        let (keys, session) = (change.keys(), change.shared.session);
        let layout = change.layout(ino, &change.inode(ino)?)?;
        let blob = |is_owned: bool| layout.blobs().find(|blob| blob.is_owned() == is_owned).expect("a blob");
        let key = match self {
            Self::Orphan => keys.orphan(session, ino),
            Self::Inode => keys.inode(ino),
            Self::Part | Self::MissingPart => {
                let inode = Inode { further: 1, ..change.inode(ino)? };
                change.put_inode(ino, &inode)?;
                keys.extents(ino, 0)
            }
            Self::References => keys.references(blob(true).key.as_str()),
            Self::Loan => keys.loan(blob(false)),
            Self::Counters => keys.counters(),
            Self::Upload => keys.upload(session, "id"),
            Self::Intent => keys.intent(written),
            Self::IntentOf => keys.inode(written),
        };
        if self != Self::MissingPart {
            change.put(key.clone(), Bytes::from_static(SPOILED))?;
        }
        Ok(key)
    }
}

async fn record(tree: &LocalTree, key: &Bytes) -> Option<Bytes> {
    tree.look(|look| look.reads().get(key)).await.expect("a look")
}

/// What an earlier session left open, or was about to write, refused the mount where its record could not be read, and with
/// it the check that tells of that.
#[tokio::test]
async fn records_that_cannot_be_read_refuse_no_mount() {
    for spoiled in Spoiled::ALL {
        println!("{spoiled:?}");
        let world = World::memory().await;
        world.put("lender", b"lent").await;
        let tree = world.open().await;
        for (name, text) in [("other", "other"), ("written", "old")] {
            world.write_path(&tree, name, text).await.expect("written");
        }
        share(&world, &tree, "lender", "open").await.expect("shared");
        write_over(&world, &tree, "open", 6, b"tail").await;
        let written = resolve(&tree, "written").await.expect("found").ino;
        let ino = resolve(&tree, "open").await.expect("found").ino;
        tree.place(written, false).await.expect("placed");
        tree.opened(ino).await.expect("opened");
        unlink(&tree, "open").await.expect("unlinked");
        let key = tree.change(move |change| spoiled.spoil(change, ino, written)).await.expect("damaged");
        tree.sync().await.expect("synced");
        world.crash(tree, true).await;
        let tree = world.try_open(world.bucket.clone()).await.expect("it is mounted");
        let left = (spoiled != Spoiled::MissingPart).then_some(SPOILED);
        assert_eq!(record(&tree, &key).await.as_deref(), left, "it is left as it is");
        for repair in [false, true] {
            let found = tree.fsck(repair).await.expect("checked");
            let told = match spoiled {
                Spoiled::Part | Spoiled::MissingPart => "bad-layout",
                Spoiled::Counters => "wrong-counters",
                _ => "unreadable-record",
            };
            assert!(kinds(&found).contains(&told), "{:?}", found.findings);
        }
        assert_eq!(world.read_path(&tree, "other").await.expect("bytes"), "other");
        world.write_path(&tree, "other", "newer").await.expect("written");
        tree.drain().await.expect("drained");
        assert_eq!(world.objects().await["other"], b"newer");
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn nor_do_they_of_a_tree_without_a_bucket() {
    for is_unfinished in [false, true] {
        let world = World::new(Kind::Alone).await;
        let tree = world.open().await;
        let ino = make_directory(&tree, "d").await.expect("made").ino;
        let spoil = move |change: &mut Change<'_, '_>| {
            let orphan = match is_unfinished {
                // Whose inode cannot be read.
                true => crate::schema::Orphan::Unfinished.encode(),
                false => Bytes::from_static(SPOILED),
            };
            change.put(change.keys().orphan(change.shared.session, ino), orphan)?;
            change.put(change.keys().inode(ino), Bytes::from_static(SPOILED))
        };
        tree.change(spoil).await.expect("damaged");
        tree.close().await.expect("closed");
        world.try_open(None).await.expect("it is mounted");
    }
}

/// A key that is about to be written stays taken while it cannot be read what was to come there: an upload that was not
/// answered may have brought it.
#[tokio::test]
async fn the_key_of_an_intent_that_cannot_be_read_is_taken() {
    for (length, is_removed) in [(1, false), (1, true), (4, false), (4, true)] {
        println!("cut after {length} bytes, removed: {is_removed}");
        let world = World::memory().await;
        let tree = world.open().await;
        world.write_path(&tree, "a", "old").await.expect("written");
        let file = resolve(&tree, "a").await.expect("found").ino;
        let placement = tree.place(file, false).await.expect("placed");
        let cut = move |change: &mut Change<'_, '_>| {
            let key = change.keys().intent(file);
            let record = change.reads().get(&key)?.expect("an intent");
            change.put(key, record.slice(..length))
        };
        tree.change(cut).await.expect("damaged");
        tree.sync().await.expect("synced");
        world.put_at(&placement, b"late").await.expect("put");
        world.crash(tree, true).await;
        let tree = world.open().await;
        match is_removed {
            true => unlink(&tree, "a").await.expect("unlinked"),
            false => rename(&tree, "a", "b", RenameMode::Replace).await.expect("renamed"),
        }
        for _ in 0..2 {
            tree.drain().await.expect("drained");
            let placed = world.write_path(&tree, "a", "new").await.expect("written");
            assert!(matches!(placed, Placement::Owned { .. }), "{placed:?}");
            assert_eq!(world.read_path(&tree, "a").await.expect("bytes"), "new");
            assert_eq!(world.objects().await["a"], b"late", "nothing is deleted or written over");
            world.pass_ttl();
        }
        let record = record(&tree, &tree.shared.keys.intent(file)).await.expect("it stays");
        assert_eq!(record.len(), length);
    }
}

/// The mover stopped at the first such record that it met, and did nothing that came after it, for good.
#[tokio::test]
async fn one_record_that_cannot_be_read_keeps_the_mover_from_nothing_else() {
    type Spoil = fn(&mut Change<'_, '_>, InodeId) -> Result<()>;
    fn put(change: &mut Change<'_, '_>, key: Bytes) -> Result<()> {
        change.put(key, Bytes::from_static(SPOILED))
    }
    /// Puts a record whose key is cut short, before all others of its family.
    fn cut(change: &mut Change<'_, '_>, tag: Tag) -> Result<()> {
        let key = [&change.keys().family(tag).0[..], b"\0"].concat();
        change.put(key.into(), crate::schema::encode_plain(b""))
    }
    fn keys(change: &Change<'_, '_>) -> Keys {
        change.keys()
    }
    let all: [(&str, Spoil); 13] = [
        ("a move", |change, ino| put(change, keys(change).movement(ino))),
        ("the inode of one", |change, ino| put(change, keys(change).inode(ino))),
        ("a part of its layout", |change, ino| {
            let inode = Inode { further: 1, ..change.inode(ino)? };
            change.put_inode(ino, &inode)
        }),
        ("the key of a move", |change, _| cut(change, Tag::Move)),
        ("a deletion", |change, _| put(change, keys(change).deletion(1, "x"))),
        ("the key of one", |change, _| cut(change, Tag::Deletion)),
        ("the claim of a deletion", |change, _| put(change, keys(change).claim("e"))),
        ("an intent", |change, _| put(change, keys(change).intent(InodeId(1 << 40)))),
        ("the key of one", |change, _| cut(change, Tag::Intent)),
        ("something in the trash", |change, _| cut(change, Tag::Trash)),
        ("something open", |change, _| put(change, keys(change).orphan(1, InodeId(1 << 40)))),
        ("the key of one", |change, _| cut(change, Tag::Orphan)),
        ("a file of a directory", |change, _| {
            let directory = change.entry(InodeId::ROOT, b"to")?.ino;
            let ino = change.entry(directory, b"damaged")?.ino;
            put(change, keys(change).inode(ino))
        }),
    ];
    for (what, spoil) in all {
        println!("{what}");
        let world = World::memory().await;
        for key in ["a", "c", "e", "f", "from/damaged", "from/x"] {
            world.put(key, key.as_bytes()).await;
        }
        let tree = world.open().await;
        paths(&tree).await;
        let ino = resolve(&tree, "a").await.expect("found").ino;
        for (from, to) in [("a", "b"), ("c", "d"), ("from", "to")] {
            rename(&tree, from, to, RenameMode::Replace).await.expect("renamed");
        }
        for name in ["e", "f"] {
            unlink(&tree, name).await.expect("unlinked");
        }
        tree.change(move |change| spoil(change, ino)).await.expect("damaged");
        tree.drain().await.expect("drained");
        let mut objects = world.objects().await;
        objects.retain(|key, _| !["a", "b", "from/damaged", "to/damaged"].contains(&key.as_str()));
        let found: Vec<_> = objects.iter().map(|(key, bytes)| (key.as_str(), &bytes[..])).collect();
        assert_eq!(found, [("d", &b"c"[..]), ("to/x", b"from/x")], "{what}");
        let is_queued = tree.look(|look| {
            let (start, end) = look.keys().family(Tag::Deletion);
            let all = look.reads().scan(&start, &end, 100)?;
            let key = |name| crate::schema::hash_of(name);
            Ok(all.iter().any(|(record, _)| record.ends_with(&key("f")) || record.ends_with(&key("c"))))
        });
        assert!(!is_queued.await.expect("a look"), "{what}: the records of deletions that are done are gone");
        tree.close().await.expect("closed");
    }
}

/// What is to be deleted stays unseen, and so does all that comes to its key, for as long as nobody knows what that is.
/// Its directory could not be listed any more.
#[tokio::test]
async fn a_deletion_that_cannot_be_read_hides_its_object_and_nothing_else() {
    let world = World::memory().await;
    for key in ["d/a", "d/b"] {
        world.put(key, key.as_bytes()).await;
    }
    let tree = world.open().await;
    paths(&tree).await;
    unlink(&tree, "d/a").await.expect("unlinked");
    let spoil = |change: &mut Change<'_, '_>| {
        let claim = change.claim("d/a")?.expect("a claim");
        let HolderState::Doomed { due_ms } = claim.state else { panic!("{claim:?}") };
        change.put(change.keys().deletion(due_ms, "d/a"), Bytes::from_static(SPOILED))
    };
    tree.change(spoil).await.expect("damaged");
    for bytes in ["d/a", "an outsider's"] {
        world.put("d/a", bytes.as_bytes()).await;
        world.put("d/new", bytes.as_bytes()).await;
        world.pass_ttl();
        assert_eq!(paths(&tree).await, ["d/", "d/b", "d/new"]);
        assert_eq!(world.read_path(&tree, "d/new").await.expect("bytes"), bytes);
        tree.drain().await.expect("drained");
        assert_eq!(world.objects().await["d/a"], bytes.as_bytes(), "nobody knows whether it is to go");
    }
    tree.close().await.expect("closed");
}

#[tokio::test]
async fn an_intent_that_cannot_be_read_makes_its_claim_no_damage() {
    let world = World::memory().await;
    let tree = world.open().await;
    let file = tree.create(InodeId::ROOT, b"a", new_file(), Existing::Refuse).await.expect("made").0.ino;
    tree.place(file, false).await.expect("placed");
    tree.change(move |change| change.put(change.keys().intent(file), Bytes::from_static(SPOILED)))
        .await
        .expect("damaged");
    for repair in [false, true] {
        let found = tree.fsck(repair).await.expect("checked");
        assert_eq!(kinds(&found), ["unreadable-record"], "{:?}", found.findings);
    }
    let claim = tree.look(|look| look.claim(ObjectKey::new("a").as_str())).await.expect("a look");
    assert!(claim.is_some(), "it keeps others from the key");
}
