//! A tree goes through a dump to another engine and back unchanged; what is damaged is refused and changes nothing.

use std::io::{Cursor, Read, Write};
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{ErrorKind, FileKind, InodeId, Result, Timestamp, VolumeId};
use forebay_io::codec::{Compressor, Decompressor};
use parking_lot::Mutex;

use super::world::*;
use crate::commit::{Committer, CommitterSettings};
use crate::dump::{LoadOptions, LoadReport, dump, load};
use crate::kv::Durability;
use crate::schema::{Keys, encode_plain};
use crate::testing::Chance;
use crate::tree::{Existing, LocalTree, QuotaLimits, RenameMode, Tree, XattrMode, resolve};

const KEYS: Keys = Keys(VolumeId(7));

/// A place to write to that can be looked at afterwards.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Shared {
    fn taken(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.lock())
    }
}

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub(super) async fn sample(world: &World) -> LocalTree {
    for key in ["listed/a", "listed/deep/b", "top"] {
        world.put(key, key.as_bytes()).await;
    }
    let tree = world.open().await;
    paths(&tree).await;
    make_directory(&tree, "d").await.expect("made");
    world.write_path(&tree, "d/f", "bytes").await.expect("written");
    let ino = resolve(&tree, "d/f").await.expect("found").ino;
    tree.link(ino, InodeId::ROOT, b"\xff\xfe").await.expect("linked");
    tree.set_xattr(ino, b"user.x", Bytes::from_static(b"\0\xff"), XattrMode::Set).await.expect("set");
    tree.create(InodeId::ROOT, b"\xfd", new_inode(FileKind::Fifo), Existing::Refuse).await.expect("made");
    let (owned, _) = tree.create(InodeId::ROOT, b"\xfc", new_file(), Existing::Refuse).await.expect("made");
    world.write(&tree, owned.ino, b"owned").await.expect("written");
    rename(&tree, "listed/deep", "moved", RenameMode::Replace).await.expect("renamed");
    for (from, to) in [("top", "lent"), ("listed/a", "moved/lent")] {
        super::sharing::share(world, &tree, from, to).await.expect("shared");
    }
    world.write_path(&tree, "top", "another").await.expect("written");
    let packed = make_directory(&tree, "packed").await.expect("made").ino;
    tree.set_packed(packed, true).await.expect("set");
    super::segments::write_packed(world, &tree, &[("one", b"1"), ("two", b"22")]).await;
    world.write_path(&tree, "deleted", "deleted").await.expect("written");
    unlink(&tree, "deleted").await.expect("unlinked");
    let limits = QuotaLimits { bytes: Some(1 << 40), inodes: None };
    tree.set_quota(InodeId::ROOT, limits).await.expect("set");
    tree.drain().await.expect("drained");
    tree
}

pub(super) async fn dumped(tree: &LocalTree) -> Vec<u8> {
    let out = Shared::default();
    tree.dump(out.clone()).await.expect("dumped");
    out.taken()
}

/// The records of a world without a tree over them.
async fn records(world: &World) -> Committer {
    Committer::start(world.engine().await.expect("an engine"), CommitterSettings::default())
}

async fn records_dumped(world: &World, taken: Timestamp) -> Vec<u8> {
    let (committer, out) = (records(world).await, Shared::default());
    dump(&committer, KEYS, taken, out.clone()).await.expect("dumped");
    committer.close().await.expect("closed");
    out.taken()
}

pub(super) async fn load_into(world: &World, stream: &[u8], force: bool) -> Result<LoadReport> {
    let committer = records(world).await;
    let options = LoadOptions { force, ..LoadOptions::default() };
    let loaded = load(&committer, KEYS, Cursor::new(stream.to_vec()), options).await;
    committer.close().await.expect("closed");
    loaded
}

fn text(stream: &[u8]) -> String {
    let mut text = String::new();
    Decompressor::new(stream).expect("a stream").read_to_string(&mut text).expect("text");
    text
}

/// The text with the end that belongs to it: what is wrong with it, no checksum tells.
fn sealed(text: &str) -> String {
    let kept: Vec<&str> = text.lines().filter(|line| !line.starts_with("{\"end\"")).collect();
    let body = format!("{}\n", kept.join("\n"));
    let end = serde_json::json!({
        "records": kept.len() - 1,
        "blake3": blake3::hash(body.as_bytes()).to_hex().to_string(),
    });
    format!("{body}{}\n", serde_json::json!({ "end": end }))
}

/// The text with one line changed, and where that line begins.
fn edited(text: &str, of: &str, edit: impl FnOnce(&mut serde_json::Value)) -> (String, usize) {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let line = lines.iter().position(|line| line.contains(of)).unwrap_or_else(|| panic!("no {of}"));
    let mut value = serde_json::from_str(&lines[line]).expect("JSON");
    edit(&mut value);
    lines[line] = value.to_string();
    let at = lines[..line].iter().map(|line| line.len() + 1).sum();
    (sealed(&lines.join("\n")), at)
}

fn compressed(text: &str) -> Vec<u8> {
    let mut out = Compressor::new(Vec::new()).expect("a stream");
    out.write_all(text.as_bytes()).expect("written");
    out.finish().expect("finished")
}

#[tokio::test]
async fn a_tree_goes_to_another_engine_and_back_unchanged() {
    for (from, to) in [(Kind::Lmdb, Kind::Slate), (Kind::Slate, Kind::Lmdb)] {
        let mut world = World::new(from).await;
        world.settings.trash_ms = 1000;
        let tree = sample(&world).await;
        let (stream, expected) = (dumped(&tree).await, paths(&tree).await);
        tree.close().await.expect("closed");

        let (other, back) = (World::new(to).await, World::new(from).await);
        let report = load_into(&other, &stream, false).await.expect("loaded");
        assert_eq!(report.records, text(&stream).lines().count() as u64 - 2);
        for (at, next) in [(&other, Some(&back)), (&back, None)] {
            let again = records_dumped(at, report.header.taken).await;
            assert_eq!(text(&again), text(&stream), "{from:?} {to:?}");
            if let Some(next) = next {
                load_into(next, &again, false).await.expect("loaded");
            }
        }
        // Over the same objects it is the same volume.
        let tree = other.open_over(world.bucket.clone()).await;
        assert_eq!(paths(&tree).await, expected);
        assert_eq!(world.read_path(&tree, "d/f").await.expect("bytes"), "bytes");
        assert_eq!(world.read_path(&tree, "moved/b").await.expect("bytes"), "listed/deep/b");
        assert_eq!(world.read_path(&tree, "lent").await.expect("bytes"), "top");
        let ino = resolve(&tree, "d/f").await.expect("found").ino;
        assert_eq!(tree.xattr(ino, b"user.x").await.expect("value"), &b"\0\xff"[..]);
        assert_eq!(world.read_path(&tree, "two").await.expect("bytes"), "22");
        let packed = resolve(&tree, "packed").await.expect("found").ino;
        assert!(tree.is_packed(packed).await.expect("a directory"));
        assert_eq!(tree.loose_segments(None, 8).await.expect("segments").0.len(), 1);
        let deleted = tree.trash(None, 8).await.expect("the trash");
        tree.restore(deleted[0].id, InodeId::ROOT, b"back").await.expect("restored");
        assert_eq!(world.read_path(&tree, "back").await.expect("bytes"), "deleted");
        let checked = tree.fsck(false).await.expect("checked");
        assert!(checked.is_clean(), "{:?}", checked.findings);
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_tree_is_replaced_only_by_force() {
    let (world, other) = (World::new(Kind::Lmdb).await, World::new(Kind::Lmdb).await);
    let tree = sample(&world).await;
    let stream = dumped(&tree).await;
    tree.close().await.expect("closed");
    let tree = other.open().await;
    tree.close().await.expect("closed");
    load_into(&other, &stream, false).await.expect("a tree that nobody used is empty");
    let refused = load_into(&other, &stream, false).await.expect_err("refused");
    assert_eq!(refused.kind(), ErrorKind::Exists);
    assert!(refused.hint().is_some_and(|hint| hint.contains("--force")), "{refused:?}");
    let tree = other.open_over(world.bucket.clone()).await;
    make_directory(&tree, "later").await.expect("made");
    tree.close().await.expect("closed");
    load_into(&other, &stream, true).await.expect("replaced");
    let tree = other.open_over(world.bucket.clone()).await;
    assert_eq!(kind_of(resolve(&tree, "later").await), ErrorKind::NotFound);
    tree.close().await.expect("closed");
}

/// Each step looked through all that was deleted before.
#[tokio::test]
async fn a_large_tree_is_replaced_in_one_walk() {
    let world = World::memory().await;
    let tree = sample(&world).await;
    let stream = dumped(&tree).await;
    let directory = make_directory(&tree, "large").await.expect("made").ino;
    for n in 0..1500 {
        let name = format!("{n}");
        tree.create(directory, name.as_bytes(), new_file(), Existing::Refuse).await.expect("made");
    }
    tree.close().await.expect("closed");
    drop(world.disk.scans());
    load_into(&world, &stream, true).await.expect("replaced");
    let starts = world.disk.scans();
    assert!(starts.len() > 10, "{starts:?}");
    // The first look asks only whether the tree is empty.
    let steps: Vec<_> = starts.into_iter().skip_while(|start| *start != KEYS.all().0).collect();
    assert!(steps.is_sorted_by(|one, next| one < next), "{steps:?}");
    let tree = world.open().await;
    assert_eq!(kind_of(resolve(&tree, "large").await), ErrorKind::NotFound);
    assert!(tree.fsck(false).await.expect("checked").is_clean());
}

/// With a mistyped URL a tree was replaced by that of another bucket, and the next gc freed all that it had owned.
#[tokio::test]
async fn a_dump_of_another_volume_is_refused_unless_it_is_meant() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    let stream = dumped(&tree).await;
    tree.close().await.expect("closed");
    let before = text(&records_dumped(&world, Timestamp::default()).await);
    let other = Keys(VolumeId(0xb4));
    let committer = records(&world).await;
    let mut options = LoadOptions { force: true, of_another_volume: false };
    // Be it empty: what its bucket holds is another's, too.
    let refused = load(&committer, other, Cursor::new(stream.clone()), options).await.expect_err("another's");
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    for part in ["0000000000000007", "00000000000000b4"] {
        assert!(refused.message().contains(part), "{refused}");
    }
    assert!(refused.hint().is_some_and(|hint| hint.contains("--of-another-volume")), "{refused:?}");
    options.of_another_volume = true;
    load(&committer, other, Cursor::new(stream), options).await.expect("it is meant");
    let foreign = Shared::default();
    dump(&committer, other, Timestamp::default(), foreign.clone()).await.expect("dumped");
    options.of_another_volume = false;
    let refused = load(&committer, KEYS, Cursor::new(foreign.taken()), options).await.expect_err("another's");
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    committer.close().await.expect("closed");
    assert_eq!(text(&records_dumped(&world, Timestamp::default()).await), before, "nothing was changed");
}

#[tokio::test]
async fn a_tree_whose_loading_was_cut_off_is_refused_until_it_is_loaded_again() {
    let (world, other) = (World::new(Kind::Lmdb).await, World::memory().await);
    let tree = sample(&world).await;
    let stream = dumped(&tree).await;
    tree.close().await.expect("closed");
    let committer = records(&other).await;
    let mark = move |txn: &mut crate::commit::Txn<'_>| txn.put(KEYS.loading(), encode_plain(b""));
    committer.transact(Durability::Durable, mark).await.expect("marked");
    committer.close().await.expect("closed");
    let refused = other.try_open(None).await.expect_err("refused");
    assert_eq!(refused.kind(), ErrorKind::Corrupt);
    assert!(refused.hint().is_some_and(|hint| hint.contains("--force")), "{refused:?}");
    assert_eq!(kind_of(load_into(&other, &stream, false).await), ErrorKind::Exists);
    load_into(&other, &stream, true).await.expect("loaded");
    other.open_over(world.bucket.clone()).await.close().await.expect("closed");
}

/// What makes a whole dump no tree: a line that has such text, a field of it, and its value.
fn no_trees() -> Vec<(&'static str, &'static str, serde_json::Value)> {
    let extent = |offset: u64, length: u64| {
        let blob = serde_json::json!({ "key": "k", "version": "v", "size": u64::MAX });
        serde_json::json!({
            "offset": offset, "length": length, "source": { "Blob": { "blob": blob, "offset": 0 } }
        })
    };
    let inline = serde_json::json!({ "offset": 0, "length": 5, "source": { "Inline": [1] } });
    let (extents, entry) = ("/inode/inode/extents", "/entry/name");
    let (file, root) = ("\"kind\":\"File\",\"mode\"", "{\"inode\":{\"ino\":1,");
    let long = "n".repeat(256);
    vec![
        (file, extents, vec![extent(9, 1), extent(0, 1)].into()),
        (file, extents, vec![extent(0, 9), extent(8, 1)].into()),
        (file, extents, vec![extent(1, u64::MAX)].into()),
        (file, extents, vec![inline].into()),
        (file, "/inode/inode/mtime/nanos", 2_000_000_000.into()),
        (file, "/inode/inode/name", "../../evil".into()),
        (file, "/inode/inode/target", "a file leads nowhere".into()),
        (root, "/inode/inode/kind", "File".into()),
        ("{\"entry\"", entry, "".into()),
        ("{\"entry\"", entry, "../../evil".into()),
        ("{\"entry\"", entry, ".".into()),
        ("{\"entry\"", entry, "..".into()),
        ("{\"entry\"", entry, "a\0b".into()),
        ("{\"entry\"", entry, ".forebay".into()),
        ("{\"entry\"", entry, long.clone().into()),
        ("{\"link\"", "/link/name", "..".into()),
        ("{\"xattr\"", "/xattr/name", "".into()),
        ("{\"xattr\"", "/xattr/name", long.into()),
    ]
}

#[tokio::test]
async fn damaged_dumps_are_refused_where_they_are_damaged_and_change_nothing() {
    let world = World::new(Kind::Lmdb).await;
    let tree = sample(&world).await;
    tree.close().await.expect("closed");
    let stream = records_dumped(&world, Timestamp::default()).await;
    let before = text(&stream);
    let mut chance = Chance::fresh();
    let refuse = async |damaged: &[u8], at: Option<usize>| {
        let refused = load_into(&world, damaged, true).await.expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
        let place = at.map_or("at byte ".to_owned(), |at| format!("at byte {at}:"));
        assert!(refused.message().contains(&place), "{refused}, expected {place}");
    };
    for _ in 0..20 {
        let at = chance.below(stream.len() as u64) as usize;
        refuse(&stream[..at], None).await;
    }
    let lines: Vec<&str> = before.lines().collect();
    let offset = |line: usize| lines[..line].iter().map(|line| line.len() + 1).sum::<usize>();
    let last = lines.len() - 1;
    let inode = lines.iter().position(|line| line.starts_with("{\"inode\"")).expect("an inode");
    // Well-formed, and another number: only the checksum tells.
    refuse(&compressed(&before.replacen("\"mode\":420", "\"mode\":511", 1)), Some(offset(last))).await;
    let cut = format!("{}\n", lines[..last].join("\n"));
    refuse(&compressed(&cut), Some(offset(last))).await;
    refuse(&compressed(&before.replacen("\"nlink\"", "\"nlonk\"", 1)), Some(offset(inode))).await;
    let swapped = [&lines[1..2], &lines[..1], &lines[2..]].concat().join("\n");
    refuse(&compressed(&swapped), Some(0)).await;
    refuse(&compressed(&format!("{before}more\n")), Some(before.len())).await;
    refuse(b"not a dump at all", None).await;
    let newer = compressed(&before.replacen("\"forebay_dump\":1", "\"forebay_dump\":2", 1));
    assert_eq!(kind_of(load_into(&world, &newer, true).await), ErrorKind::Unsupported);

    // Whole by its checksum, and no tree.
    load_into(&world, &compressed(&sealed(&before)), true)
        .await
        .expect("the checksum is made as it should be");
    for (of, field, value) in no_trees() {
        let (text, at) = edited(&before, of, |line| *line.pointer_mut(field).expect(field) = value);
        refuse(&compressed(&text), Some(at)).await;
    }
    let (root, end) = (format!("{}\n", lines[inode]), format!("{}\n", lines[last]));
    assert!(root.starts_with("{\"inode\":{\"ino\":1,"), "{root}");
    let rootless = sealed(&before.replacen(&root, "", 1));
    refuse(&compressed(&rootless), Some(before.len() - root.len() - end.len())).await;
    // A record twice, and two that changed places.
    let twice = sealed(&before.replacen(&root, &format!("{root}{root}"), 1));
    refuse(&compressed(&twice), Some(offset(inode + 1))).await;
    let (first, second) = (lines[inode], lines[inode + 1]);
    let swapped = before.replacen(&format!("{first}\n{second}"), &format!("{second}\n{first}"), 1);
    refuse(&compressed(&sealed(&swapped)), Some(offset(inode) + second.len() + 1)).await;

    assert_eq!(text(&records_dumped(&world, Timestamp::default()).await), before, "nothing was changed");
}
