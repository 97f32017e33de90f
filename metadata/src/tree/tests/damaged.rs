//! Records that cannot be read keep nothing else from its work: neither a mount nor a check.

use bytes::Bytes;
use forebay_core::{InodeId, ObjectKey, Result};

use super::fsck::{kinds, write_over};
use super::sharing::share;
use super::world::*;
use crate::records::{Change, Records};
use crate::schema::Inode;
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
                true => crate::schema::Orphan { is_unfinished }.encode(),
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
