//! Directories and layouts of any size.

use forebay_core::{Blob, ErrorKind, Extent, FileLayout, InodeId, ObjectKey, Source, Version};

use super::clone::clone;
use super::world::*;
use crate::testing::{Chance, rounds};
use crate::tree::{Existing, LocalTree, RenameMode, Tree, resolve};

/// Entries of a large directory: a million in a long run.
fn many() -> usize {
    match rounds(1) {
        1 => 4_000,
        scale => 50_000 * scale as usize,
    }
}

/// A tree with a directory `d` of `count` objects, which it has listed, and an empty directory `e`.
async fn listed(world: &World, count: usize) -> LocalTree {
    for number in 0..count {
        world.put(&format!("d/entry-{number:07}"), b"x").await;
    }
    let tree = world.open().await;
    make_directory(&tree, "e").await.expect("made");
    let d = resolve(&tree, "d").await.expect("found").ino;
    assert_eq!(entries(&tree, d).await, count);
    tree
}

async fn entries(tree: &LocalTree, directory: InodeId) -> usize {
    let (mut count, mut after) = (0, None);
    loop {
        let page = tree.read_directory(directory, after.as_deref(), 1000).await.expect("a page");
        count += page.entries.len();
        after = page.entries.last().map(|entry| entry.name.clone());
        if page.complete || after.is_none() {
            return count;
        }
    }
}

/// What is written for the rename of a directory of so many entries: the records of each batch.
async fn written_for_rename(count: usize) -> Vec<usize> {
    let world = World::memory().await;
    let tree = listed(&world, count).await;
    let d = resolve(&tree, "d").await.expect("found").ino;
    tree.sync().await.expect("synced");
    world.disk.batches();
    rename(&tree, "d", "e/renamed", RenameMode::Replace).await.expect("renamed");
    tree.sync().await.expect("synced");
    let batches = world.disk.batches();
    assert_eq!(resolve(&tree, "e/renamed").await.expect("found").ino, d);
    assert!(resolve(&tree, "d").await.is_err());
    world.crash(tree, false).await;
    let tree = world.open().await;
    assert_eq!(entries(&tree, resolve(&tree, "e/renamed").await.expect("found").ino).await, count);
    batches
}

/// The rename is one write, of as many records however many entries there are, and all of them survive a power cut after
/// it. Their objects move later.
#[tokio::test]
async fn a_directory_of_any_size_is_renamed_by_one_commit() {
    let few = written_for_rename(3).await;
    assert_eq!(few.len(), 1, "{few:?}");
    assert_eq!(written_for_rename(many()).await, few);
}

/// Extent `number` of a file, at `offset`, which some commit wrote to a blob of its own.
fn written(number: u64, offset: u64) -> Extent {
    let key = ObjectKey::new(format!(".forebay/blobs/{:016x}/{number:032x}", 7));
    let blob = Blob { key, version: Version::new("v"), size: 10 };
    Extent { offset, length: 10, source: Source::Blob { blob, offset: 0 } }
}

/// Records that a commit of one more extent writes for a file of so many.
async fn written_for_an_extent(count: u64) -> Vec<usize> {
    let world = World::memory().await;
    let tree = world.open().await;
    let file = tree.create(InodeId::ROOT, b"f", new_file(), Existing::Refuse).await.expect("made").0.ino;
    let (mut layout, generation) = tree.layout(file).await.expect("a layout");
    (0..count).for_each(|number| layout.write(written(number, number * 100)));
    tree.commit_layout(file, generation, layout.clone(), world.clock.wall()).await.expect("committed");
    tree.sync().await.expect("synced");
    world.disk.batches();
    layout.write(written(count, count / 2 * 100 + 50));
    tree.commit_layout(file, generation + 1, layout.clone(), world.clock.wall()).await.expect("committed");
    tree.sync().await.expect("synced");
    let batches = world.disk.batches();
    world.crash(tree, false).await;
    let tree = world.open().await;
    assert!(tree.layout(file).await.expect("a layout") == (layout, generation + 2));
    batches
}

/// As many records however many extents there are, and all of them survive a power cut.
#[tokio::test]
async fn a_change_of_a_layout_of_any_length_writes_as_many_records() {
    let few = written_for_an_extent(300).await;
    assert_eq!(few.len(), 1, "{few:?}");
    assert_eq!(written_for_an_extent(many() as u64).await, few);
}

/// What the tree does for one page of a file of so many extents: the values and ranges asked for, and the records written.
type Work = (u64, Vec<usize>);

/// Writes over one page, commits that and has it made durable, as an fsync does.
async fn sync_a_page(world: &World, tree: &LocalTree, (file, number): (InodeId, u64), page: u64) -> Work {
    let (mut layout, generation) = tree.layout(file).await.expect("a layout");
    layout.write(written(number, page * 100));
    tree.sync().await.expect("synced");
    let before = world.disk.reads();
    world.disk.batches();
    tree.commit_layout(file, generation, layout, world.clock.wall()).await.expect("committed");
    tree.sync().await.expect("synced");
    (world.disk.reads() - before, world.disk.batches())
}

/// What is done for pages here and there of a file of `count` extents: as it was made, after its mount and its tree came back, with
/// the bytes of another file moved in between, and for a page at its end.
async fn done_for_pages(count: u64) -> Vec<Work> {
    let world = World::memory().await;
    let tree = world.open().await;
    let file = tree.create(InodeId::ROOT, b"f", new_file(), Existing::Refuse).await.expect("made").0.ino;
    let (mut layout, generation) = tree.opened(file).await.expect("a layout");
    (0..count).for_each(|number| layout.write(written(number, number * 100)));
    tree.commit_layout(file, generation, layout, world.clock.wall()).await.expect("committed");
    tree.sync().await.expect("synced");
    let mut done = Vec::new();
    for number in 0..3 {
        done.push(sync_a_page(&world, &tree, (file, count + number), count / 2 + number).await);
    }
    world.crash(tree, false).await;
    let tree = world.open().await;
    tree.opened(file).await.expect("a layout");
    for number in 3..6 {
        done.push(sync_a_page(&world, &tree, (file, count + number), count / 2 + number).await);
    }
    let other = tree.create(InodeId::ROOT, b"g", new_file(), Existing::Refuse).await.expect("made").0.ino;
    let mut layout = FileLayout::empty();
    layout.write(written(count + 6, 0));
    tree.commit_layout(other, 0, layout.clone(), world.clock.wall()).await.expect("committed");
    layout.write(written(count + 7, 0));
    let (before, relocations) = (world.disk.reads(), tree.relocations());
    tree.relocate(other, 1, layout).await.expect("moved");
    assert_ne!(tree.relocations(), relocations);
    tree.layout(file).await.expect("a layout");
    done.push((world.disk.reads() - before, Vec::new()));
    done.push(sync_a_page(&world, &tree, (file, count + 8), count).await);
    let known = tree.layout(file).await.expect("a layout");
    // As its records have it.
    world.crash(tree, false).await;
    let tree = world.open().await;
    assert!(tree.layout(file).await.expect("a layout") == known);
    done
}

/// Each fsync read all records of the layout once, and twice more where bytes of any file had been moved: one of a page took a second
/// in a file of 100,000 extents.
#[tokio::test]
async fn a_page_of_a_layout_of_any_length_is_synced_at_one_cost() {
    let few = done_for_pages(1_000).await;
    assert!(few.iter().all(|(reads, written)| *reads < 12 && written.iter().sum::<usize>() < 12), "{few:?}");
    assert_eq!(done_for_pages(50_000).await, few);
}

/// What is known of a file's layout, and what its records say.
async fn check_known(tree: &LocalTree, file: InodeId) {
    let known = tree.layout(file).await.expect("a layout");
    tree.shared.layouts.forget(file);
    assert!(tree.layout(file).await.expect("a layout") == known, "inode {file}");
}

/// Gives a file another layout, or others the same bytes, from what it has or from what it had before.
async fn change_anywhere(tree: &LocalTree, world: &World, file: InodeId, rng: &mut Chance) {
    let (mut layout, mut generation) = tree.layout(file).await.expect("a layout");
    for _ in 0..=rng.below(10) {
        match rng.below(20) {
            0 => layout.truncate(rng.below(40_000)),
            1..4 => layout.punch(rng.below(40_000)..40_000),
            _ => layout.write(written(rng.next(), rng.below(4_000) * 10)),
        }
    }
    // One that comes too late changes nothing.
    generation -= generation.min(u64::from(rng.below(4) == 0));
    let changed = match rng.below(3) {
        0 => tree.relocate(file, generation, layout).await,
        _ => tree.commit_layout(file, generation, layout, world.clock.wall()).await.map(drop),
    };
    assert!(changed.map_or_else(|error| error.kind() == ErrorKind::Conflict, |()| true));
}

/// Commits, some of them in vain, beside who opens and closes the files, looks at them and clones them.
async fn layouts_are_known_as_they_are(kind: Kind, steps: u64) {
    let mut rng = Chance::fresh();
    let world = World::new(kind).await;
    let tree = world.open().await;
    let directory = make_directory(&tree, "d").await.expect("made").ino;
    let mut files = Vec::new();
    for name in [b"f", b"g"] {
        let file = tree.create(directory, name, new_file(), Existing::Refuse).await.expect("made").0.ino;
        let (mut layout, generation) = tree.opened(file).await.expect("a layout");
        (0..400).for_each(|_| layout.write(written(rng.next(), rng.below(4_000) * 10)));
        tree.commit_layout(file, generation, layout, world.clock.wall()).await.expect("committed");
        files.push(file);
    }
    for step in 0..steps {
        let file = files[rng.below(2) as usize];
        let (one, other) = (&mut Chance::seeded(rng.next()), &mut Chance::seeded(rng.next()));
        match rng.below(8) {
            0 => {
                tree.closed(file).await.expect("closed");
                tree.opened(file).await.expect("opened");
            }
            1 => {
                let (closing, opening) = (tree.closed(file), tree.opened(file));
                let (closed, opened, ()) =
                    tokio::join!(closing, opening, change_anywhere(&tree, &world, file, one));
                closed.and(opened).expect("closed and opened");
            }
            2 => {
                let cloned = tree.layout(file).await.expect("a layout").0;
                clone(&tree, "d", &format!("clone-{step}")).await.expect("cloned");
                let name = if file == files[0] { "f" } else { "g" };
                let copy = resolve(&tree, &format!("clone-{step}/{name}")).await.expect("a copy").ino;
                assert!(tree.layout(copy).await.expect("a layout").0 == cloned);
            }
            3..6 => {
                let (one, other) =
                    (change_anywhere(&tree, &world, file, one), change_anywhere(&tree, &world, file, other));
                tokio::join!(one, other, check_known(&tree, file));
            }
            _ => change_anywhere(&tree, &world, file, one).await,
        }
        for file in &files {
            check_known(&tree, *file).await;
        }
    }
    let known = [tree.layout(files[0]).await.expect("one"), tree.layout(files[1]).await.expect("another")];
    for file in &files {
        tree.closed(*file).await.expect("closed");
    }
    tree.close().await.expect("closed");
    let tree = world.open().await;
    for (file, known) in files.iter().zip(known) {
        assert!(tree.layout(*file).await.expect("a layout") == known, "inode {file}");
    }
    tree.close().await.expect("closed");
}

#[tokio::test]
async fn what_is_known_of_layouts_is_what_their_records_say() {
    for (kind, steps) in [(Kind::Memory, 150), (Kind::Lmdb, 60), (Kind::Slate, 60)] {
        layouts_are_known_as_they_are(kind, rounds(steps)).await;
    }
}

/// The counts of the blobs of a file were read one after another: where the tree lies in the bucket, one of more than a thousand
/// could not be truncated, nor freed, after a restart.
#[tokio::test]
async fn counts_of_many_blobs_are_read_at_once() {
    let mut world = World::new(Kind::Slate).await;
    world.committing.max_runs = 20;
    let tree = world.open().await;
    let file = tree.create(InodeId::ROOT, b"f", new_file(), Existing::Refuse).await.expect("made").0.ino;
    let (mut layout, generation) = tree.layout(file).await.expect("a layout");
    (0..100).for_each(|number| layout.write(written(number, number * 100)));
    tree.commit_layout(file, generation, layout.clone(), world.clock.wall()).await.expect("committed");
    tree.close().await.expect("closed");
    let tree = world.open().await;
    layout.truncate(5_000);
    tree.commit_layout(file, generation + 1, layout, world.clock.wall()).await.expect("truncated");
    tree.close().await.expect("closed");
    let tree = world.open().await;
    tree.unlink(InodeId::ROOT, b"f").await.expect("removed");
    for number in [0, 99] {
        let key = ObjectKey::new(format!(".forebay/blobs/{:016x}/{number:032x}", 7));
        assert!(!tree.is_referred(&key).await.expect("known"), "blob {number}");
    }
    tree.close().await.expect("closed");
}
