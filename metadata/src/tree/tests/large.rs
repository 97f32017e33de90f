//! Directories of any size.

use forebay_core::InodeId;

use super::world::*;
use crate::testing::rounds;
use crate::tree::{LocalTree, RenameMode, Tree, resolve};

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
