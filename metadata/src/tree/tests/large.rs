//! Directories and layouts of any size.

use forebay_core::{Blob, Extent, InodeId, ObjectKey, Source, Version};

use super::world::*;
use crate::testing::rounds;
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
