//! What is left of a process that died is settled side by side: a mount waits for a few answers of its store, and not for one after
//! another of thousands.

use forebay_core::{InodeId, ObjectKey};
use forebay_io::object::{FaultMode, Faults, OperationKind};

use super::world::*;
use crate::records::Records;
use crate::schema::Tag;
use crate::tree::{Existing, LocalTree, Tree};

const FILES: u64 = 100;
/// Requests for what a session of before left that wait for an answer at once.
const AT_ONCE: u64 = 32;

/// A store that answers none of these requests.
fn silent(kinds: &[OperationKind]) -> Faults {
    let faults = Faults::new();
    for kind in kinds {
        for nth in 1..=FILES {
            faults.script(*kind, nth, FaultMode::Hang);
        }
    }
    faults
}

/// How many requests wait for an answer at once of what is done over such a store.
async fn waiting_at_once<T>(faults: &Faults, done: impl Future<Output = T>) -> u64 {
    let waits = async {
        for _ in 0..1_000_000 {
            if faults.injected() > 1 {
                break;
            }
            tokio::task::yield_now().await;
        }
        // Time for more.
        for _ in 0..10_000 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        _ = done => panic!("nothing was answered"),
        () = waits => {}
    }
    faults.injected()
}

/// The same of what a tree does as it is opened.
async fn asked_at_once(world: &World, kinds: &[OperationKind]) -> u64 {
    let faults = silent(kinds);
    waiting_at_once(&faults, world.try_open(Some(world.bucket().with_faults(&faults)))).await
}

/// How many records of a family there are.
async fn count(tree: &LocalTree, tag: Tag) -> usize {
    let (start, end) = tree.shared.keys.family(tag);
    tree.look(|look| look.reads().scan(&start, &end, usize::MAX)).await.expect("records").len()
}

#[tokio::test]
async fn what_was_about_to_be_written_is_looked_for_side_by_side() {
    let world = World::memory().await;
    let tree = world.open().await;
    for number in 0..FILES {
        let name = format!("{number:03}");
        let (file, _) =
            tree.create(InodeId::ROOT, name.as_bytes(), new_file(), Existing::Refuse).await.expect("made");
        let placement = tree.place(file.ino, false).await.expect("placed");
        world.put_at(&placement, name.as_bytes()).await.expect("put");
    }
    tree.sync().await.expect("synced");
    world.crash(tree, true).await;
    let asked = asked_at_once(&world, &[OperationKind::ListUploads, OperationKind::Head]).await;
    assert_eq!(asked, AT_ONCE);
    let tree = world.open().await;
    assert_eq!(count(&tree, Tag::Intent).await, 0);
    for number in 0..FILES {
        let name = format!("{number:03}");
        assert_eq!(world.read_path(&tree, &name).await.expect("bytes"), name);
    }
}

/// All else that the mover does waited for that, in each of its passes.
#[tokio::test]
async fn what_was_about_to_be_written_of_removed_files_is_looked_for_side_by_side() {
    let world = World::memory().await;
    let faults = Faults::new();
    let tree = world.open_over(Some(world.bucket().with_faults(&faults))).await;
    for number in 0..FILES {
        let name = format!("{number:03}");
        let (file, _) =
            tree.create(InodeId::ROOT, name.as_bytes(), new_file(), Existing::Refuse).await.expect("made");
        tree.place(file.ino, false).await.expect("placed");
        unlink(&tree, &name).await.expect("unlinked");
    }
    for nth in 1..=FILES {
        faults.script(OperationKind::Head, nth, FaultMode::Hang);
    }
    assert_eq!(waiting_at_once(&faults, tree.drain()).await, 16);
}

#[tokio::test]
async fn uploads_of_dead_sessions_are_ended_side_by_side() {
    let world = World::memory().await;
    let tree = world.open().await;
    for number in 0..FILES {
        let key = ObjectKey::new(format!("{number:03}"));
        tree.upload_started(&key, &number.to_string()).await.expect("noted");
    }
    tree.sync().await.expect("synced");
    world.crash(tree, true).await;
    assert_eq!(asked_at_once(&world, &[OperationKind::Abort]).await, AT_ONCE);
    let tree = world.open().await;
    assert_eq!(count(&tree, Tag::Session).await, 1, "this session alone");
}

#[tokio::test]
async fn what_dead_sessions_had_open_is_freed() {
    let world = World::memory().await;
    let tree = world.open().await;
    for number in 0..FILES {
        let name = format!("{number:03}");
        world.write_path(&tree, &name, &name).await.expect("written");
        let ino = found(&tree, InodeId::ROOT, name.as_bytes()).await.ino;
        tree.opened(ino).await.expect("opened");
        unlink(&tree, &name).await.expect("unlinked");
    }
    tree.sync().await.expect("synced");
    world.crash(tree, true).await;
    let tree = world.open().await;
    assert_eq!(count(&tree, Tag::Orphan).await, 0);
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
    assert!(tree.fsck(false).await.expect("checked").is_clean());
}
