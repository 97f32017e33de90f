//! Clones in many steps: others go on meanwhile, any step may be the last one before a crash, and what is there in the end
//! is the tree at one moment or nothing.

use std::future::Future;
use std::io::Cursor;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use forebay_core::{ErrorKind, InodeId, VolumeId};
use futures::poll;

use super::clone::{remove_all, sample, shape};
use super::sharing::no_loans;
use super::trash::newest;
use super::world::*;
use crate::commit::{Committer, CommitterSettings};
use crate::dump::{LoadOptions, load};
use crate::records::{Changed, MOST_CHANGED, Records};
use crate::schema::{Keys, Orphan, QuotaLimits, Tag};
use crate::testing::rounds;
use crate::tree::{CloneGuide, Cloned, LocalTree, RenameMode, SetAttributes, Tree, resolve};

/// Waits for what is being written, and says how far the clone came at each step.
#[derive(Default)]
pub(super) struct Patient {
    steps: AtomicUsize,
    copied: AtomicU64,
    most_copied: AtomicU64,
    /// After so many it gives the clone up.
    most_steps: Option<usize>,
}

#[async_trait::async_trait]
impl CloneGuide for Patient {
    fn goes_on(&self, cloned: &Cloned) -> bool {
        let steps = self.steps.fetch_add(1, Ordering::SeqCst);
        let copied = cloned.files + cloned.directories;
        let before = self.copied.swap(copied, Ordering::SeqCst);
        self.most_copied.fetch_max(copied.saturating_sub(before), Ordering::SeqCst);
        self.most_steps.is_none_or(|most| steps < most)
    }

    async fn settle(&self, _: &[InodeId], times: u32) -> forebay_core::Result<bool> {
        tokio::task::yield_now().await;
        Ok(times < 200)
    }
}

pub(super) type Cloning<'a> = Pin<Box<dyn Future<Output = forebay_core::Result<Cloned>> + Send + 'a>>;

/// A clone that goes a step further each time it is polled.
pub(super) async fn begin<'a>(
    tree: &'a LocalTree,
    guide: &'a Patient,
    (from, to): (&str, &str),
) -> Cloning<'a> {
    let source = resolve(tree, from).await.expect("found").ino;
    let (parent, name) = split(tree, to).await.expect("a directory");
    let name = name.to_owned();
    Box::pin(async move { tree.clone_tree(source, (parent, name.as_bytes()), guide).await })
}

/// What clones left that is not freed.
pub(super) async fn unfinished(tree: &LocalTree) -> usize {
    let (start, end) = tree.shared.keys.family(Tag::Orphan);
    let found = tree.look(|look| look.reads().scan(&start, &end, usize::MAX)).await.expect("records");
    let is_unfinished = |value: &Bytes| Orphan::decode(value.clone()).expect("a record").is_unfinished();
    found.iter().filter(|(_, value)| is_unfinished(value)).count()
}

pub(super) async fn is_clean(tree: &LocalTree, when: &str) {
    tree.sync().await.expect("synced");
    let report = tree.fsck(false).await.expect("checked");
    assert!(report.is_clean(), "{when}: {:?}", report.findings);
}

/// A world whose clones copy `step` entries at a time.
pub(super) async fn world_of(kind: Kind, step: usize) -> World {
    let mut world = World::new(kind).await;
    world.settings.clone_step = step;
    world
}

/// A directory is moved that was read in part, and that has another one right where the reading stopped: the step that copies it
/// anew reads what is below it once, for the new copy.
#[tokio::test]
async fn what_lies_below_a_moved_directory_is_copied_once() {
    for polls in [1, 2] {
        let world = world_of(Kind::Memory, 20).await;
        let tree = world.open().await;
        for path in ["d", "d/p", "d/p/x"] {
            make_directory(&tree, path).await.expect("made");
        }
        for (directory, count) in [("d", 10), ("d/p", 9), ("d/p/x", 30)] {
            for number in 0..count {
                let path = format!("{directory}/f{number:02}");
                world.write_path(&tree, &path, &path).await.expect("written");
            }
        }
        let guide = Patient::default();
        let mut cloning = begin(&tree, &guide, ("d", "copy")).await;
        for _ in 0..polls {
            assert!(poll!(cloning.as_mut()).is_pending());
        }
        rename(&tree, "d/p", "d/q", RenameMode::Replace).await.expect("moved");
        let cloned = cloning.await.expect("cloned");
        assert_eq!((cloned.directories, cloned.files), (3, 49), "after {polls} steps");
        assert_eq!(
            shape(&world, &tree, "d/").await,
            shape(&world, &tree, "copy/").await,
            "after {polls} steps"
        );
        is_clean(&tree, &format!("after {polls} steps")).await;
    }
}

/// A directory that was in the trash is listed again, whatever is remembered of it.
#[tokio::test]
async fn a_restored_directory_is_cloned() {
    let mut world = world_of(Kind::Memory, 2).await;
    world.settings.trash_ms = 3_600_000;
    let tree = world.open().await;
    sample(&world, &tree, 6).await;
    make_directory(&tree, "d/x").await.expect("made");
    paths(&tree).await;
    let d = resolve(&tree, "d").await.expect("found").ino;
    tree.remove_directory(d, b"x").await.expect("removed");
    tree.restore(newest(&tree, "d/x").await, d, b"x").await.expect("restored");
    let guide = Patient { most_steps: Some(1_000), ..Patient::default() };
    begin(&tree, &guide, ("d", "copy")).await.await.expect("cloned");
    assert_eq!(shape(&world, &tree, "d/").await, shape(&world, &tree, "copy/").await);
}

/// Names of files that have nothing to do with what is cloned are nothing to follow.
#[tokio::test]
async fn hard_links_elsewhere_hold_up_no_clone() {
    let world = world_of(Kind::Memory, 2).await;
    let tree = world.open().await;
    sample(&world, &tree, 6).await;
    let mut others = Vec::new();
    for name in ["o0", "o1", "o2", "o3"] {
        world.write_path(&tree, name, "x").await.expect("written");
        others.push(resolve(&tree, name).await.expect("found").ino);
    }
    let guide = Patient::default();
    let mut cloning = begin(&tree, &guide, ("d", "copy")).await;
    let (mut steps, mut count) = (0, 0);
    let outcome = loop {
        if let std::task::Poll::Ready(outcome) = poll!(cloning.as_mut()) {
            break outcome;
        }
        steps += 1;
        assert!(steps < 1_000, "it follows what others link");
        for other in &others {
            count += 1;
            tree.link(*other, InodeId::ROOT, format!("link-{count}").as_bytes()).await.expect("linked");
        }
        tokio::task::yield_now().await;
    };
    outcome.expect("cloned");
    assert_eq!(shape(&world, &tree, "d/").await, shape(&world, &tree, "copy/").await);
}

/// A directory whose copy is being read goes elsewhere, in or out of what is cloned, and what was copied of it is freed while the
/// clone goes on: nothing more is put there.
#[tokio::test]
async fn a_directory_may_move_at_any_step() {
    let targets = ["e/moved", "d/1/moved", "d/zz"];
    let cases = [2, 5, 9].into_iter().flat_map(|step| (0..20).map(move |polls| (step, polls)));
    for ((step, polls), to) in cases.flat_map(|case| targets.map(|to| (case, to))) {
        let world = world_of(Kind::Memory, step).await;
        let tree = world.open().await;
        sample(&world, &tree, 6).await;
        make_directory(&tree, "e").await.expect("made");
        let guide = Patient::default();
        let mut cloning = begin(&tree, &guide, ("d", "copy")).await;
        let mut outcome = None;
        for poll in 0.. {
            if let std::task::Poll::Ready(done) = poll!(cloning.as_mut()) {
                outcome = Some(done);
                break;
            }
            match poll {
                _ if poll == polls => rename(&tree, "d/0", to, RenameMode::Replace).await.expect("moved"),
                _ if poll > polls => tree.drain().await.expect("drained"),
                _ => {}
            }
        }
        drop(cloning);
        outcome.expect("done").expect("cloned");
        assert_eq!(
            shape(&world, &tree, "d/").await,
            shape(&world, &tree, "copy/").await,
            "{step} {polls} {to}"
        );
        is_clean(&tree, &format!("moved to {to} after {polls} steps of {step}")).await;
    }
}

/// A crash after any step: nothing of the clone is to be seen, the tree is whole, and what was made goes.
#[tokio::test]
async fn a_clone_is_cut_off_after_any_step() {
    for (polls, keeps_cache) in (0..24).flat_map(|polls| [(polls, false), (polls, true)]) {
        let world = world_of(Kind::Memory, 2).await;
        let tree = world.open().await;
        sample(&world, &tree, 6).await;
        let before = shape(&world, &tree, "").await;
        let guide = Patient::default();
        let mut cloning = begin(&tree, &guide, ("d", "copy")).await;
        let mut is_done = false;
        for _ in 0..polls {
            is_done = is_done || poll!(cloning.as_mut()).is_ready();
            if is_done {
                break;
            }
        }
        drop(cloning);
        assert!(!is_done, "the clone takes more steps than {polls}");
        tree.sync().await.expect("synced");
        world.crash(tree, keeps_cache).await;
        let tree = world.open().await;
        is_clean(&tree, "before anything is freed").await;
        assert_eq!(shape(&world, &tree, "").await, before, "after {polls} steps");
        // Freeing is cut off as well.
        let tree = match polls % 2 {
            0 => tree,
            _ => {
                let mut freeing = Box::pin(tree.drain());
                for _ in 0..2 {
                    if poll!(freeing.as_mut()).is_ready() {
                        break;
                    }
                }
                drop(freeing);
                tree.sync().await.expect("synced");
                world.crash(tree, keeps_cache).await;
                world.open().await
            }
        };
        is_clean(&tree, "while it is freed").await;
        tree.collect_garbage(false).await.expect("collected");
        assert_eq!(unfinished(&tree).await, 0);
        is_clean(&tree, "after it was freed").await;
        let walked = paths(&tree).await.len() as u64;
        // A hard link is one more name.
        assert_eq!(
            tree.statistics().await.expect("counts").inodes,
            walked,
            "names and the root, less a link"
        );
        remove_all(&tree, "d").await;
        tree.drain().await.expect("drained");
        no_loans(&tree).await;
        world.check_objects(&[]).await;
    }
}

/// What becomes of the two places while a clone is made.
#[tokio::test]
async fn a_clone_gives_up_without_a_trace() {
    for what in ["taken", "source removed", "target removed", "over quota", "into itself", "dropped", "away"]
    {
        let mut world = world_of(Kind::Memory, 10).await;
        world.settings.trash_ms = 1000;
        let tree = world.open().await;
        sample(&world, &tree, 6).await;
        for path in ["to", "elsewhere"] {
            make_directory(&tree, path).await.expect("made");
        }
        let to = resolve(&tree, "to").await.expect("found").ino;
        let root = InodeId::ROOT;
        let limits = QuotaLimits { bytes: None, inodes: Some(70) };
        tree.set_quota(to, limits).await.expect("set");
        let guide = Patient::default();
        let mut cloning = begin(&tree, &guide, ("d", "to/copy")).await;
        for _ in 0..3 {
            assert!(poll!(cloning.as_mut()).is_pending(), "{what}");
        }
        let quota = tree.quota(to).await.expect("looked at").expect("a quota");
        assert_eq!(quota.usage.inodes, 0, "what is not there yet counts nowhere");
        let mut expected = ErrorKind::NotFound;
        match what {
            "taken" => {
                expected = ErrorKind::Exists;
                make_directory(&tree, "to/copy").await.expect("made");
            }
            "source removed" => remove_all(&tree, "d").await,
            "target removed" => drop(tree.remove_directory(root, b"to").await.expect("removed")),
            "over quota" => {
                expected = ErrorKind::OverQuota;
                for number in 0..10 {
                    make_directory(&tree, &format!("to/{number}")).await.expect("made");
                }
            }
            "into itself" => {
                expected = ErrorKind::Invalid;
                rename(&tree, "to", "d/to", RenameMode::Replace).await.expect("renamed");
            }
            // Neither stops it.
            "away" => {
                rename(&tree, "d", "elsewhere/d", RenameMode::Replace).await.expect("renamed");
                rename(&tree, "to", "elsewhere/to", RenameMode::Replace).await.expect("renamed");
            }
            _ => {}
        }
        match what {
            "dropped" => {
                drop(cloning);
                assert_eq!(unfinished(&tree).await, 1);
                tree.drain().await.expect("drained");
            }
            "away" => {
                cloning.await.expect("cloned");
                let copy = shape(&world, &tree, "elsewhere/to/copy/").await;
                assert_eq!(shape(&world, &tree, "elsewhere/d/").await, copy);
                let quota = tree.quota(to).await.expect("looked at").expect("a quota");
                assert_eq!(quota.usage.inodes, copy.len() as i64);
            }
            _ => assert_eq!(kind_of(cloning.await), expected, "{what}"),
        }
        assert_eq!(unfinished(&tree).await, 0, "{what}");
        is_clean(&tree, what).await;
        for trashed in tree.trash(None, 1000).await.expect("looked at") {
            let path = String::from_utf8_lossy(&trashed.path).into_owned();
            assert!(["d", "to"].iter().any(|top| path == *top || path.starts_with("d/")), "{what}: {path}");
        }
    }
}

/// A dump that is taken while a clone is made holds the tree without it.
#[tokio::test]
async fn a_dump_beside_a_clone_loads_without_it() {
    let world = world_of(Kind::Memory, 5).await;
    let tree = world.open().await;
    sample(&world, &tree, 6).await;
    let before = shape(&world, &tree, "").await;
    let guide = Patient::default();
    let mut cloning = begin(&tree, &guide, ("d", "copy")).await;
    for _ in 0..8 {
        assert!(poll!(cloning.as_mut()).is_pending());
    }
    let file = world.scratch("dump");
    tree.dump(std::fs::File::create(&file).expect("a file")).await.expect("dumped");
    drop(cloning);
    world.crash(tree, true).await;
    let committer = Committer::start(world.engine().await.expect("an engine"), CommitterSettings::default());
    let dump = Cursor::new(std::fs::read(&file).expect("a dump"));
    load(&committer, Keys(VolumeId(7)), dump, LoadOptions { force: true, ..LoadOptions::default() })
        .await
        .expect("loaded");
    committer.close().await.expect("closed");
    let tree = world.open().await;
    is_clean(&tree, "as it was loaded").await;
    assert_eq!(unfinished(&tree).await, 1);
    tree.drain().await.expect("drained");
    assert_eq!(unfinished(&tree).await, 0);
    assert_eq!(shape(&world, &tree, "").await, before);
    is_clean(&tree, "after it was freed").await;
}

/// A large tree: no step copies more than it may, and each entry is read a bounded number of times.
#[tokio::test]
async fn a_large_clone_takes_steps_of_bounded_size() {
    const STEP: usize = 500;
    let (directories, files) = (50, rounds(60));
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let world = world_of(kind, STEP).await;
        let tree = world.open().await;
        make_directory(&tree, "d").await.expect("made");
        for directory in 0..directories {
            let parent = make_directory(&tree, &format!("d/{directory}")).await.expect("made").ino;
            for number in 0..files {
                let name = number.to_string();
                let made =
                    tree.create(parent, name.as_bytes(), new_file(), crate::tree::Existing::Refuse).await;
                made.expect("made");
            }
        }
        tree.sync().await.expect("synced");
        let guide = Patient::default();
        let before = world.disk.reads();
        let cloned = begin(&tree, &guide, ("d", "copy")).await.await.expect("cloned");
        let expected = Cloned { directories: directories + 1, files: directories * files, bytes: 0 };
        assert_eq!(cloned, expected, "{kind:?}");
        let most = guide.most_copied.load(Ordering::SeqCst);
        assert!(most <= STEP as u64 + 1, "{most} entries in one step");
        let entries = cloned.directories + cloned.files;
        let least = entries.div_ceil(STEP as u64) as usize;
        let steps = guide.steps.load(Ordering::SeqCst);
        assert!((least..least * 2 + 4).contains(&steps), "{steps} steps for {entries} entries");
        // Entry, inode and attributes.
        let reads = world.disk.reads() - before;
        assert!(reads <= entries * 5, "{reads} reads of {entries} entries");
        assert_eq!(shape(&world, &tree, "d/").await, shape(&world, &tree, "copy/").await, "{kind:?}");
        is_clean(&tree, "in the end").await;
    }
}

/// A clone that is as far behind as it may be goes on while nothing further is changed, and what was noted already is
/// nothing further. One more change, and it gives up; what it made goes, and the next one comes to its end.
#[tokio::test]
async fn a_clone_that_falls_behind_gives_up_without_a_trace() {
    for is_too_much in [false, true] {
        let world = world_of(Kind::Memory, 10).await;
        let tree = world.open().await;
        sample(&world, &tree, 6).await;
        let top = resolve(&tree, "d").await.expect("found").ino;
        let touch = async || {
            let changes = SetAttributes { mode: Some(0o711), ..SetAttributes::default() };
            tree.set_attributes(top, changes).await.expect("set");
        };
        let guide = Patient::default();
        let mut cloning = begin(&tree, &guide, ("d", "copy")).await;
        for _ in 0..3 {
            assert!(poll!(cloning.as_mut()).is_pending());
        }
        if !is_too_much {
            touch().await;
        }
        tree.shared.clones.with(0, |building| {
            assert!(building.made.contains_key(&top), "it has a copy of the topmost directory");
            let missing = MOST_CHANGED - building.changed.len();
            let names = (0..missing).map(|n| Changed::Name(top, format!("nobody-{n}").into()));
            building.changed.extend(names);
        });
        touch().await;
        if is_too_much {
            assert_eq!(kind_of(cloning.await), ErrorKind::Conflict);
            assert_eq!(unfinished(&tree).await, 0);
            assert!(resolve(&tree, "copy").await.is_err());
            is_clean(&tree, "after it gave up").await;
            cloning = begin(&tree, &guide, ("d", "copy")).await;
        } else {
            tree.shared.clones.with(0, |building| {
                assert!(!building.is_overrun, "it was noted already");
                let is_real =
                    |one: &Changed| !matches!(one, Changed::Name(_, name) if name.starts_with(b"nobody"));
                building.changed.retain(is_real);
            });
        }
        cloning.await.expect("cloned");
        assert_eq!(shape(&world, &tree, "d/").await, shape(&world, &tree, "copy/").await);
        is_clean(&tree, "in the end").await;
    }
}
