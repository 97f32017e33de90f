//! What dead sessions leave in the bucket goes, to the byte, and nothing else does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Extent, FileLayout, InodeId, Source};
use forebay_io::object::Condition;
use forebay_io::task::TaskGroup;

use super::world::*;
use crate::gc::GcReport;
use crate::testing::{Chance, rounds};
use crate::tree::{Existing, LocalTree, RenameMode, Tree, resolve};

/// Puts an owned blob as a writer does before it commits: no record knows of it.
async fn pack(world: &World, tree: &LocalTree, bytes: &[u8]) -> forebay_core::Blob {
    let (key, bytes) = (tree.fresh_blob(), Bytes::copy_from_slice(bytes));
    world.bucket().put(&key, bytes, Condition::IfAbsent).await.expect("put").blob()
}

/// Lays `bytes`, packed into an owned blob, over a file at `offset`.
async fn write_over(world: &World, tree: &LocalTree, path: &str, offset: u64, bytes: &[u8]) {
    let blob = pack(world, tree, bytes).await;
    let ino = resolve(tree, path).await.expect("found").ino;
    let (mut layout, generation) = tree.layout(ino).await.expect("a layout");
    layout.write(Extent { offset, length: blob.size, source: Source::Blob { blob, offset: 0 } });
    tree.commit_layout(ino, generation, layout, world.clock.wall()).await.expect("committed");
}

async fn create(tree: &LocalTree, name: &str) -> InodeId {
    let made = tree.create(InodeId::ROOT, name.as_bytes(), new_file(), Existing::Refuse).await;
    made.expect("made").0.ino
}

async fn collect(tree: &LocalTree, dry_run: bool) -> GcReport {
    tree.collect_garbage(dry_run).await.expect("collected")
}

/// Who put it says that he is not going to commit it. What was committed all the same stays, and goes in its own time.
#[tokio::test]
async fn what_a_living_session_discards_goes_once_nothing_can_come_any_more() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let mut world = World::new(kind).await;
        // Who reads by an older layout has that long.
        world.settings.delete_delay_ms = 60 * 60 * 1000;
        let tree = world.open().await;
        let file = create(&tree, "f").await;
        let (used, was_used) = (pack(&world, &tree, b"used").await, pack(&world, &tree, b"was used").await);
        for (generation, blob) in [&was_used, &used].into_iter().enumerate() {
            let layout = FileLayout::of_blob(blob.clone());
            let committed = tree.commit_layout(file, generation as u64, layout, world.clock.wall()).await;
            committed.expect("committed");
        }
        let (gone, late) = (pack(&world, &tree, b"gone").await, tree.fresh_blob());
        let keys = [&used.key, &was_used.key, &gone.key, &late].map(Clone::clone).to_vec();
        tree.discard(keys).await.expect("discarded");
        assert!(tree.fsck(false).await.expect("checked").is_clean());
        tree.drain().await.expect("drained");
        world.check_objects(&[("*", "gone"), ("*", "used"), ("*", "was used")]).await;
        world.bucket().put(&late, "late".into(), Condition::IfAbsent).await.expect("put");
        tree.sync().await.expect("durable");
        let tree = match kind {
            Kind::Memory => {
                world.crash(tree, false).await;
                world.open().await
            }
            _ => tree,
        };
        world.clock.advance(LATER);
        tree.drain().await.expect("drained");
        world.check_objects(&[("*", "used"), ("*", "was used")]).await;
        world.clock.advance(Duration::from_secs(60 * 60));
        tree.drain().await.expect("drained");
        world.check_objects(&[("*", "used")]).await;
        assert!(tree.fsck(false).await.expect("checked").is_clean());
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn what_a_killed_session_packed_and_did_not_commit_is_freed_to_the_byte() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        let tree = world.open().await;
        world.write_path(&tree, "plain", "plain").await.expect("written");
        create(&tree, "packed").await;
        write_over(&world, &tree, "packed", 3, b"kept").await;
        tree.sync().await.expect("durable");
        for leaked in [&b"12345"[..], b"1234567", b""] {
            pack(&world, &tree, leaked).await;
        }
        world.put(".forebayx/blobs/0000000000000001/theirs", b"x").await;
        let alive = collect(&tree, false).await;
        assert_eq!((alive.listed, alive.blobs), (4, 0), "what a living session puts is on its way");
        match kind {
            Kind::Memory => world.crash(tree, false).await,
            _ => tree.close().await.expect("closed"),
        }

        let tree = world.open().await;
        let found = collect(&tree, true).await;
        let expected = GcReport { listed: 4, blobs: 3, blob_bytes: 12, dry_run: true, ..GcReport::default() };
        assert_eq!(found, expected, "{kind:?}");
        assert_eq!(world.objects().await.keys().filter(|key| key.starts_with(".forebay/blobs/")).count(), 4);
        let freed = collect(&tree, false).await;
        assert_eq!(freed, GcReport { dry_run: false, ..expected }, "{kind:?}");
        let kept = [("*", "kept"), (".forebayx/blobs/0000000000000001/theirs", "x"), ("plain", "plain")];
        world.check_objects(&kept).await;
        assert!(collect(&tree, true).await.is_clean());
        assert_eq!(world.read_path(&tree, "packed").await.expect("bytes"), "\0\0\0kept");
        tree.close().await.expect("closed");
    }
}

/// A tree that is begun over the bucket of another one, as where its own is elsewhere or was lost, knows nothing of what that one
/// refers to: all of it was taken for garbage, and freed within minutes.
#[tokio::test]
async fn what_another_tree_put_is_told_and_left() {
    let world = World::memory().await;
    let tree = world.open().await;
    create(&tree, "packed").await;
    write_over(&world, &tree, "packed", 0, b"bytes").await;
    pack(&world, &tree, b"leaked").await;
    let mut upload = world.bucket().upload(&tree.fresh_blob()).await.expect("an upload");
    upload.write(Bytes::from(vec![1; 9 << 20])).await.expect("a part");
    std::mem::forget(upload);
    let dump = super::dump::dumped(&tree).await;
    tree.close().await.expect("closed");

    let mut anew = World::memory().await;
    anew.bucket.clone_from(&world.bucket);
    // Numbers of sessions are drawn by chance.
    anew.sessions.store(100, Ordering::SeqCst);
    for _ in 0..2 {
        let tree = anew.open().await;
        let found = collect(&tree, false).await;
        assert_eq!((found.listed, found.blobs, found.uploads), (2, 0, 0), "{found:?}");
        assert_eq!((found.foreign, found.foreign_bytes), (2, 11), "{found:?}");
        assert!(found.is_clean());
        tree.close().await.expect("closed");
    }

    // A dump brings the sessions with the names.
    super::dump::load_into(&anew, &dump, true).await.expect("loaded");
    let tree = anew.open().await;
    let found = collect(&tree, false).await;
    assert_eq!((found.blobs, found.blob_bytes, found.uploads, found.foreign), (1, 6, 1, 0), "{found:?}");
    assert_eq!(anew.read_path(&tree, "packed").await.expect("bytes"), "bytes");
    tree.close().await.expect("closed");
}

#[tokio::test]
async fn uploads_of_dead_sessions_are_aborted_and_those_of_others_go_on() {
    let world = World::memory().await;
    let tree = world.open().await;
    let begin = async |key| {
        let mut upload = world.bucket().upload(&key).await.expect("upload");
        upload.write(Bytes::from(vec![1; 9 << 20])).await.expect("a part");
        std::mem::forget(upload);
    };
    begin(tree.fresh_blob()).await;
    begin(forebay_core::ObjectKey::new("theirs")).await;
    assert_eq!(collect(&tree, false).await.uploads, 0);
    tree.sync().await.expect("durable");
    world.crash(tree, true).await;
    let tree = world.open().await;
    begin(tree.fresh_blob()).await;
    let staged = world.bucket().list_uploads("").await;
    assert_eq!(staged.expect("uploads").len(), 3);
    assert_eq!(collect(&tree, true).await.uploads, 1);
    assert_eq!(collect(&tree, false).await.uploads, 1);
    assert_eq!(world.bucket().list_uploads("").await.expect("uploads").len(), 2);
}

#[tokio::test]
async fn noted_uploads_of_a_dead_session_are_ended_by_the_next() {
    let world = World::memory().await;
    let tree = world.open().await;
    let begin = async |key: &str, noted: bool| {
        let key = forebay_core::ObjectKey::new(key);
        let mut upload = world.bucket().upload(&key).await.expect("upload");
        upload.write(Bytes::from(vec![1; 9 << 20])).await.expect("a part");
        std::mem::forget(upload);
        let found = world.bucket().list_uploads("").await.expect("uploads");
        let id = &found.iter().find(|found| found.key == key).expect("the upload").id;
        if noted {
            tree.upload_started(&key, id).await.expect("noted");
        }
        id.clone()
    };
    begin("ours", true).await;
    let ended = begin("ended", true).await;
    begin("theirs", false).await;
    tree.upload_ended(&ended).await.expect("noted");
    tree.sync().await.expect("durable");
    world.crash(tree, false).await;
    let tree = world.open().await;
    let left = world.bucket().list_uploads("").await.expect("uploads");
    let mut left: Vec<_> = left.iter().map(|left| left.key.as_str()).collect();
    left.sort_unstable();
    assert_eq!(left, ["ended", "theirs"]);
    tree.close().await.expect("closed");
}

#[tokio::test]
async fn nothing_is_freed_when_a_record_cannot_be_read_or_the_tree_is_not_the_only_one() {
    let mut world = World::memory().await;
    let tree = world.open().await;
    pack(&world, &tree, b"leaked").await;
    let ino = create(&tree, "f").await;
    tree.sync().await.expect("durable");
    world.crash(tree, true).await;
    let tree = world.open().await;
    tree.change(move |change| change.put(change.shared.keys.inode(ino), Bytes::from_static(b"?")))
        .await
        .expect("damaged");
    assert_eq!(kind_of(tree.collect_garbage(false).await), forebay_core::ErrorKind::Corrupt);
    world.crash(tree, true).await;
    world.settings.gc.is_only_tree = false;
    let tree = world.open().await;
    assert_eq!(kind_of(tree.collect_garbage(false).await), forebay_core::ErrorKind::Unsupported);
    world.check_objects(&[("*", "leaked")]).await;
}

#[tokio::test]
async fn a_tree_looks_by_itself_now_and_then() {
    let mut world = World::memory().await;
    world.settings.gc.pause_ms = 0;
    let tree = world.open().await;
    pack(&world, &tree, b"leaked").await;
    tree.sync().await.expect("durable");
    world.crash(tree, true).await;
    let tree = world.open().await;
    let tasks = TaskGroup::new("gc");
    crate::gc::start(tree.mover.as_ref().expect("a mover"), &tasks);
    // Until the task counts from here on.
    tokio::time::sleep(Duration::from_millis(50)).await;
    world.clock.advance(Duration::from_millis(world.settings.gc.first_ms - 1));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(world.objects().await.len(), 1, "mounting and reading come first");
    for _ in 0..400 {
        world.clock.advance(Duration::from_millis(1));
        tokio::time::sleep(Duration::from_millis(5)).await;
        if world.objects().await.is_empty() {
            break;
        }
    }
    world.check_objects(&[]).await;
    tasks.shutdown(Duration::ZERO).await;
    tree.close().await.expect("closed");
}

/// A volume and what its files must hold.
struct Play {
    world: World,
    chance: Chance,
    files: BTreeMap<String, Vec<u8>>,
}

impl Play {
    fn any(&mut self) -> Option<String> {
        let at = self.chance.below(self.files.len().max(1) as u64) as usize;
        self.files.keys().nth(at).cloned()
    }

    async fn step(&mut self, tree: &LocalTree) {
        let name = format!("f{}", self.chance.below(6));
        let bytes = {
            let length = 1 + self.chance.below(20) as usize;
            self.chance.bytes(length)
        };
        let Some(known) = self.any().filter(|_| self.chance.below(6) > 0) else {
            if self.files.insert(name.clone(), Vec::new()).is_none() {
                create(tree, &name).await;
            } else {
                self.files.insert(name.clone(), bytes.clone());
                let ino = resolve(tree, &name).await.expect("found").ino;
                self.world.write(tree, ino, &bytes).await.expect("written");
            }
            return;
        };
        let mut content = self.files[&known].clone();
        match self.chance.below(7) {
            0 | 1 => {
                let offset = self.chance.below(30);
                write_over(&self.world, tree, &known, offset, &bytes).await;
                let end = offset as usize + bytes.len();
                content.resize(content.len().max(end), 0);
                content[offset as usize..end].copy_from_slice(&bytes);
                self.files.insert(known, content);
            }
            2 => {
                unlink(tree, &known).await.expect("unlinked");
                self.files.remove(&known);
            }
            3 if known != name => {
                rename(tree, &known, &name, RenameMode::Replace).await.expect("renamed");
                self.files.remove(&known);
                self.files.insert(name, content);
            }
            4 => drop(pack(&self.world, tree, &bytes).await),
            5 => tree.drain().await.expect("drained"),
            _ => {
                let dry_run = self.chance.below(3) == 0;
                collect(tree, dry_run).await;
            }
        }
    }

    async fn check(&self, tree: &LocalTree) {
        for (name, bytes) in &self.files {
            let ino = resolve(tree, name).await.expect("found").ino;
            assert_eq!(&self.world.read(tree, ino).await.expect("bytes"), bytes, "{name}");
        }
    }
}

#[tokio::test]
async fn random_operations_and_rounds_free_nothing_live_and_leave_nothing() {
    for _ in 0..rounds(12) {
        let (world, chance) = (World::memory().await, Chance::fresh());
        let mut play = Play { world, chance, files: BTreeMap::new() };
        for _ in 0..4 {
            let tree = play.world.open().await;
            play.check(&tree).await;
            for _ in 0..40 {
                play.step(&tree).await;
            }
            tree.sync().await.expect("durable");
            play.check(&tree).await;
            play.world.crash(tree, false).await;
        }
        let tree = play.world.open().await;
        tree.drain().await.expect("drained");
        collect(&tree, false).await;
        tree.drain().await.expect("drained");
        play.check(&tree).await;
        let mut referred = BTreeSet::new();
        for name in play.files.keys() {
            let ino = resolve(&tree, name).await.expect("found").ino;
            let (layout, _): (FileLayout, u64) = tree.layout(ino).await.expect("a layout");
            let owned = layout.blobs().filter(|blob| blob.is_owned());
            referred.extend(owned.map(|blob| blob.key.as_str().to_owned()));
        }
        let objects = play.world.objects().await;
        let owned = objects.keys().filter(|key| key.starts_with(".forebay/blobs/")).cloned();
        assert_eq!(owned.collect::<BTreeSet<_>>(), referred);
    }
}
