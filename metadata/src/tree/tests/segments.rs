//! Segments under random histories: no byte is lost, what nobody refers to goes, and who refers to what is known.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use forebay_core::{Blob, ErrorKind, Extent, FileLayout, InodeId, Source};
use forebay_io::object::Condition;

use super::world::*;
use crate::records::Records;
use crate::schema::{Loose, Member, Tag};
use crate::testing::{Chance, rounds};
use crate::tree::{Existing, LocalTree, QuotaLimits, RenameMode, SegmentPin, Tree, resolve};

const ROOT: InodeId = InodeId::ROOT;

async fn create(tree: &LocalTree, name: &str) -> InodeId {
    tree.create(ROOT, name.as_bytes(), new_file(), Existing::Accept).await.expect("made").0.ino
}

/// Puts a segment of `contents`, and says where each lies.
async fn put_segment(world: &World, pin: &SegmentPin, contents: &[&[u8]]) -> Vec<FileLayout> {
    let whole = Bytes::from(contents.concat());
    let blob = world.bucket().put(pin.key(), whole, Condition::IfAbsent).await.expect("put").blob();
    let mut at = 0;
    let place = |content: &&[u8]| {
        let mut layout = FileLayout::empty();
        let (length, source) = (content.len() as u64, Source::Blob { blob: blob.clone(), offset: at });
        layout.write(Extent { offset: 0, length, source });
        at += length;
        layout
    };
    contents.iter().map(place).collect()
}

async fn commit(world: &World, tree: &LocalTree, ino: InodeId, layout: FileLayout) -> ErrorKind {
    let (_, generation) = tree.layout(ino).await.expect("a layout");
    let committed = tree.commit_layout(ino, generation, layout, world.clock.wall()).await;
    committed.map_or_else(|error| error.kind(), |_| ErrorKind::Exists)
}

/// Writes files into one segment, as a volume does for those that are closed at the same time.
pub(super) async fn write_packed(world: &World, tree: &LocalTree, files: &[(&str, &[u8])]) {
    let pin = tree.fresh_segment();
    let contents: Vec<&[u8]> = files.iter().map(|(_, bytes)| *bytes).collect();
    for ((name, _), layout) in files.iter().zip(put_segment(world, &pin, &contents).await) {
        let ino = create(tree, name).await;
        assert_eq!(commit(world, tree, ino, layout).await, ErrorKind::Exists, "{name}");
    }
}

/// Rewrites every segment of which less than half is live, and `also` those that `chance` picks. Returns how many.
pub(super) async fn compact(world: &World, tree: &LocalTree, mut also: impl FnMut() -> bool) -> usize {
    let (mut rewritten, mut last) = (0, None);
    loop {
        let (found, next) = tree.loose_segments(last.as_ref(), 2).await.expect("segments");
        for loose in found {
            let (ranges, first) = tree.live_ranges(&loose.blob).await.expect("ranges");
            assert!(first.is_some(), "{loose:?} is looked at though nobody refers to it");
            let live: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            if live * 2 >= loose.blob.size && !also() {
                tree.settle_segment(loose).await.expect("settled");
                continue;
            }
            let (old, _) = world.bucket().get_whole(&loose.blob.key).await.expect("the segment");
            let contents: Vec<&[u8]> =
                ranges.iter().map(|range| &old[range.start as usize..range.end as usize]).collect();
            let pin = tree.fresh_segment();
            let mut to = FileLayout::empty();
            for (range, layout) in ranges.iter().zip(put_segment(world, &pin, &contents).await) {
                to.copy(&layout, 0..layout.size(), range.start);
            }
            assert!(tree.move_segment(&loose.blob, &to).await.expect("moved") > 0);
            rewritten += 1;
        }
        match next {
            Some(_) => last = next,
            None => return rewritten,
        }
    }
}

async fn content(tree: &LocalTree, world: &World, name: &str) -> Vec<u8> {
    let ino = resolve(tree, name).await.expect("found").ino;
    world.read(tree, ino).await.expect("bytes")
}

async fn segments(world: &World) -> usize {
    let objects = world.objects().await;
    objects.keys().filter(|key| key.contains(Blob::SEGMENT_MARK)).count()
}

async fn is_clean(tree: &LocalTree) {
    let report = tree.fsck(false).await.expect("checked");
    assert!(report.is_clean(), "{:?}", report.findings);
}

#[tokio::test]
async fn a_sparse_segment_is_rewritten_and_its_bytes_go() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        let tree = world.open().await;
        write_packed(&world, &tree, &[("a", b"aaaa"), ("b", b"bbbb"), ("c", b"cc"), ("d", b"d")]).await;
        let source = resolve(&tree, "b").await.expect("b").ino;
        tree.clone_tree(source, (ROOT, b"b2"), &Alone).await.expect("cloned");
        assert_eq!(compact(&world, &tree, || false).await, 0, "it is full");
        unlink(&tree, "a").await.expect("unlinked");
        assert_eq!(compact(&world, &tree, || false).await, 0, "seven of eleven bytes are in use");
        unlink(&tree, "c").await.expect("unlinked");
        write_packed(&world, &tree, &[("d", b"dd")]).await;
        assert_eq!(compact(&world, &tree, || false).await, 1, "four of eleven");
        tree.drain().await.expect("drained");
        assert_eq!(segments(&world).await, 2, "that of `b` and its clone, and that of `d`");
        for (name, bytes) in [("b", "bbbb"), ("b2", "bbbb"), ("d", "dd")] {
            assert_eq!(content(&tree, &world, name).await, bytes.as_bytes(), "{kind:?}");
        }
        let sum: usize = world.objects().await.values().map(Vec::len).sum();
        assert!(kind == Kind::Slate || sum == 6, "the clone shares its bytes still: {sum}");
        is_clean(&tree).await;
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn who_starts_from_a_layout_of_before_is_told() {
    let world = World::memory().await;
    let tree = world.open().await;
    write_packed(&world, &tree, &[("a", b"aaaa"), ("b", b"bbbb"), ("c", b"cccccccccccc")]).await;
    let (a, b) = (create(&tree, "a").await, create(&tree, "b").await);
    let (before, generation) = tree.layout(a).await.expect("a layout");
    unlink(&tree, "c").await.expect("unlinked");
    assert_eq!(compact(&world, &tree, || false).await, 1);
    tree.drain().await.expect("drained");
    let (now, same) = tree.layout(a).await.expect("a layout");
    assert!(now != before && same == generation, "the same bytes elsewhere");
    let mut edited = before.clone();
    edited.truncate(2);
    assert_eq!(commit(&world, &tree, a, edited.clone()).await, ErrorKind::Conflict);
    assert_eq!(commit(&world, &tree, a, edited.moved_into(&before, &now)).await, ErrorKind::Exists);
    let (_, generation) = tree.layout(b).await.expect("a layout");
    let shared = tree.commit_shared(b, generation, before, world.clock.wall(), a).await;
    assert_eq!(kind_of(shared), ErrorKind::Conflict, "the lender's bytes, too");
    assert_eq!(content(&tree, &world, "a").await, b"aa");
    is_clean(&tree).await;
}

#[tokio::test]
async fn a_segment_stays_while_some_of_its_files_are_on_their_way() {
    let world = World::memory().await;
    let tree = world.open().await;
    let (a, b) = (create(&tree, "a").await, create(&tree, "b").await);
    let pin = tree.fresh_segment();
    let layouts = put_segment(&world, &pin, &[b"aa", b"b"]).await;
    assert_eq!(commit(&world, &tree, a, layouts[0].clone()).await, ErrorKind::Exists);
    assert_eq!(tree.loose_segments(None, 9).await.expect("segments").0, [], "it is being written");
    unlink(&tree, "a").await.expect("unlinked");
    tree.drain().await.expect("drained");
    assert_eq!(segments(&world).await, 1, "`b` is to be committed yet");
    assert_eq!(commit(&world, &tree, b, layouts[1].clone()).await, ErrorKind::Exists);
    drop(pin);
    tree.drain().await.expect("drained");
    assert_eq!(content(&tree, &world, "b").await, b"b");
    unlink(&tree, "b").await.expect("unlinked");
    tree.drain().await.expect("drained");
    assert_eq!(segments(&world).await, 0);
    let late = create(&tree, "late").await;
    assert_eq!(commit(&world, &tree, late, layouts[1].clone()).await, ErrorKind::Conflict);
}

#[tokio::test]
async fn what_is_in_the_trash_is_compacted_and_comes_back_and_quotas_stay_exact() {
    let mut world = World::memory().await;
    world.settings.trash_ms = 1000;
    let tree = world.open().await;
    tree.set_quota(ROOT, QuotaLimits { bytes: Some(100), inodes: None }).await.expect("set");
    let files: [(&str, &[u8]); 3] = [("kept", b"kept"), ("binned", b"binned"), ("gone", &[7; 30])];
    write_packed(&world, &tree, &files).await;
    unlink(&tree, "binned").await.expect("unlinked");
    unlink(&tree, "gone").await.expect("unlinked");
    let trash = tree.trash(None, 8).await.expect("the trash");
    let of = |name: &[u8]| trash.iter().find(|one| one.path.ends_with(name)).expect("in the trash").id;
    assert!(tree.purge(of(b"gone")).await.expect("purged"));
    assert_eq!(compact(&world, &tree, || false).await, 1, "ten of forty bytes are in use");
    tree.drain().await.expect("drained");
    assert_eq!(segments(&world).await, 1);
    is_clean(&tree).await;
    tree.restore(of(b"binned"), ROOT, b"back").await.expect("restored");
    tree.drain().await.expect("drained");
    assert_eq!(content(&tree, &world, "back").await, b"binned");
    assert_eq!(content(&tree, &world, "kept").await, b"kept");
    let usage = tree.quota(ROOT).await.expect("a quota").expect("a quota").usage;
    assert_eq!((usage.bytes, usage.inodes), (10, 2));
    is_clean(&tree).await;
}

#[tokio::test]
async fn wrong_records_of_who_refers_to_a_segment_are_found_and_mended() {
    let world = World::memory().await;
    let tree = world.open().await;
    write_packed(&world, &tree, &[("a", b"aaaa"), ("b", b"bbbb")]).await;
    let (a, layout) = (create(&tree, "a").await, tree.layout(create(&tree, "a").await).await.expect("a").0);
    let segment = layout.blobs().next().expect("a segment").key.clone();
    tree.change(move |change| {
        change.delete(change.keys().member(segment.as_str(), a))?;
        change.put_member(&segment, ROOT)
    })
    .await
    .expect("damaged");
    let found = tree.fsck(true).await.expect("checked");
    let kinds: Vec<_> = found.findings.iter().map(|one| (one.kind.as_str(), one.mended)).collect();
    assert_eq!(kinds, [("wrong-member", true); 2], "{:?}", found.findings);
    is_clean(&tree).await;
}

#[tokio::test]
async fn a_directory_hands_its_policy_down() {
    let world = World::memory().await;
    let tree = world.open().await;
    let of = async |tree: &LocalTree, path: &str| {
        let ino = resolve(tree, path).await.expect("found").ino;
        tree.is_packed(ino).await.expect("a directory")
    };
    let top = make_directory(&tree, "d").await.expect("made").ino;
    make_directory(&tree, "d/before").await.expect("made");
    tree.set_packed(top, true).await.expect("set");
    let below = make_directory(&tree, "d/below").await.expect("made").ino;
    make_directory(&tree, "d/below/deep").await.expect("made");
    rename(&tree, "d/below/deep", "moved", RenameMode::Replace).await.expect("renamed");
    tree.clone_tree(top, (ROOT, b"cloned"), &Alone).await.expect("cloned");
    tree.set_packed(top, false).await.expect("set");
    for (path, packed) in [
        ("", false),
        ("d", false),
        ("d/before", false),
        ("d/below", true),
        ("moved", true),
        ("cloned", true),
        ("cloned/before", false),
    ] {
        assert_eq!(of(&tree, path).await, packed, "{path}");
    }
    let file = tree.create(below, b"f", new_file(), Existing::Refuse).await.expect("made").0.ino;
    assert!(tree.packs(file).await.expect("told"));
    rename(&tree, "d/below/f", "d/f", RenameMode::Replace).await.expect("renamed");
    assert!(!tree.packs(file).await.expect("told"));
    world.write_path(&tree, "d/below/plain", "plain").await.expect("written");
    let plain = resolve(&tree, "d/below/plain").await.expect("found").ino;
    assert!(!tree.packs(plain).await.expect("told"), "an object at its own path is replaced there");
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

    fn name(&mut self) -> String {
        format!("f{}", self.chance.below(12))
    }

    fn some_bytes(&mut self) -> Vec<u8> {
        let length = 1 + self.chance.below(20) as usize;
        self.chance.bytes(length)
    }

    async fn step(&mut self, tree: &LocalTree) {
        let name = self.name();
        match self.chance.below(10) {
            0..=2 => self.write_some(tree).await,
            3 => {
                if let Some(known) = self.any() {
                    unlink(tree, &known).await.expect("unlinked");
                    self.files.remove(&known);
                }
            }
            4 => {
                if let Some(known) = self.any().filter(|known| *known != name) {
                    rename(tree, &known, &name, RenameMode::Replace).await.expect("renamed");
                    let bytes = self.files.remove(&known).expect("it is there");
                    self.files.insert(name, bytes);
                }
            }
            5 => {
                if let Some(known) = self.any().filter(|_| !self.files.contains_key(&name)) {
                    let from = resolve(tree, &known).await.expect("found").ino;
                    tree.clone_tree(from, (ROOT, name.as_bytes()), &Alone).await.expect("cloned");
                    self.files.insert(name, self.files[&known].clone());
                }
            }
            6 => self.share(tree).await,
            7 => tree.drain().await.expect("drained"),
            8 => {
                // What nobody refers to any more may be deleted by the next drain only.
                compact(&self.world, tree, || self.chance.below(3) == 0).await;
            }
            _ => drop(tree.collect_garbage(false).await.expect("collected")),
        }
    }

    /// Files that are closed at the same time, some of which go again before all are committed.
    async fn write_some(&mut self, tree: &LocalTree) {
        let count = 1 + self.chance.below(6) as usize;
        let files: Vec<(String, Vec<u8>)> = (0..count).map(|_| (self.name(), self.some_bytes())).collect();
        let pin = tree.fresh_segment();
        let contents: Vec<&[u8]> = files.iter().map(|(_, bytes)| &bytes[..]).collect();
        let layouts = put_segment(&self.world, &pin, &contents).await;
        for ((name, bytes), layout) in files.iter().zip(layouts) {
            let ino = create(tree, name).await;
            assert_eq!(commit(&self.world, tree, ino, layout).await, ErrorKind::Exists);
            self.files.insert(name.clone(), bytes.clone());
            match self.chance.below(8) {
                0 => {
                    unlink(tree, name).await.expect("unlinked");
                    self.files.remove(name);
                }
                1 => tree.drain().await.expect("drained"),
                2 => drop(compact(&self.world, tree, || true).await),
                _ => {}
            }
        }
    }

    /// A range of one file over another, as of a moment before a compaction if chance has it so.
    async fn share(&mut self, tree: &LocalTree) {
        let (Some(from), Some(to)) = (self.any(), self.any()) else { return };
        if from == to {
            return;
        }
        let (lender, ino) = (create(tree, &from).await, create(tree, &to).await);
        let of = async |ino| tree.layout(ino).await.expect("a layout");
        let ((source, _), (base, generation)) = (of(lender).await, of(ino).await);
        let start = self.chance.below(source.size() + 1);
        let (end, at) = (start + self.chance.below(source.size() - start + 1), self.chance.below(30));
        let mut layout = base.clone();
        layout.copy(&source, start..end, at);
        if self.chance.below(2) == 0 {
            compact(&self.world, tree, || true).await;
            tree.drain().await.expect("drained");
        }
        let now = self.world.clock.wall();
        match tree.commit_shared(ino, generation, layout, now, lender).await {
            Err(error) => assert_eq!(error.kind(), ErrorKind::Conflict),
            Ok(_) => {
                let shared = self.files[&from][start as usize..end as usize].to_vec();
                let bytes = self.files.get_mut(&to).expect("it is there");
                if !shared.is_empty() {
                    let at = at as usize;
                    bytes.resize(bytes.len().max(at + shared.len()), 0);
                    bytes[at..at + shared.len()].copy_from_slice(&shared);
                }
            }
        }
    }

    async fn check(&self, tree: &LocalTree) {
        for (name, bytes) in &self.files {
            assert_eq!(&content(tree, &self.world, name).await, bytes, "{name}");
        }
    }

    /// The records of segments are those that the layouts ask for.
    async fn check_records(&self, tree: &LocalTree) {
        let (mut expected, mut named) = (BTreeSet::new(), BTreeSet::new());
        for name in self.files.keys() {
            let ino = resolve(tree, name).await.expect("found").ino;
            let (layout, _) = tree.layout(ino).await.expect("a layout");
            for blob in layout.blobs().filter(|blob| blob.is_segment()) {
                expected.insert((blob.key.clone(), ino));
                named.insert(blob.key.clone());
            }
        }
        let keys = tree.shared.keys;
        let records = |tag| {
            let (start, end) = keys.family(tag);
            tree.look(move |look| look.reads().scan(&start, &end, usize::MAX))
        };
        let found = records(Tag::Member).await.expect("records").into_iter().map(|(key, value)| {
            (Member::decode(value).expect("a record").key, keys.member_in(&key).expect("a key"))
        });
        assert_eq!(found.collect::<BTreeSet<_>>(), expected);
        for (_, value) in records(Tag::Loose).await.expect("records") {
            let loose = Loose::decode(value).expect("a record").blob.key;
            assert!(named.contains(&loose), "nobody refers to {loose}");
        }
        let objects = self.world.objects().await;
        let kept: BTreeSet<_> = objects.keys().filter(|key| key.contains(Blob::SEGMENT_MARK)).collect();
        assert_eq!(
            kept,
            named.iter().map(|key| key.as_str().to_owned()).collect::<Vec<_>>().iter().collect()
        );
    }
}

/// Random writes, names, clones, shares, rounds and power cuts: every byte stays, and what nobody refers to goes.
#[tokio::test]
async fn random_histories_of_segments_lose_nothing_and_leave_nothing() {
    for _ in 0..rounds(16) {
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
            is_clean(&tree).await;
            play.world.crash(tree, false).await;
        }
        let tree = play.world.open().await;
        compact(&play.world, &tree, || false).await;
        tree.drain().await.expect("drained");
        tree.collect_garbage(false).await.expect("collected");
        tree.drain().await.expect("drained");
        play.check(&tree).await;
        is_clean(&tree).await;
        play.check_records(&tree).await;
    }
}
