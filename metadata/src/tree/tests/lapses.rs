//! Deletions that the store keeps waiting: what came to their keys meanwhile stays.

use std::time::Duration;

use forebay_io::object::{FaultMode, Faults, OperationKind};

use super::world::*;
use crate::tree::{LocalTree, Tree};

/// A volume whose files of these names are removed and are to be deleted.
async fn removed(names: &[&str]) -> (World, LocalTree, Faults) {
    let (world, faults) = (World::memory().await, Faults::new());
    for name in names {
        world.put(name, b"old").await;
    }
    let tree = world.open_over(Some(world.bucket().with_faults(&faults).with_deadline_ms(3000))).await;
    for name in names {
        unlink(&tree, name).await.expect("removed");
    }
    tree.sync().await.expect("durable");
    (world, tree, faults)
}

/// A host that was cut off looked at the object before its lease lapsed, and deleted what the next one had synced there.
#[tokio::test]
async fn what_was_to_be_deleted_is_not_once_another_may_have_the_volume() {
    let (world, tree, faults) = removed(&["a"]).await;
    let look = faults.gate(1);
    let meanwhile = async {
        look.reached().await;
        world.lease.lapse(1, u64::MAX);
        look.open();
    };
    let _ = tokio::join!(tree.drain(), meanwhile);
    world.check_objects(&[("a", "old")]).await;
    world.lease.renew();
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
}

/// The same of the deletion itself, which was sent again for half a minute.
#[tokio::test]
async fn a_deletion_is_not_sent_again_once_another_may_have_the_volume() {
    let (world, tree, faults) = removed(&["a"]).await;
    for nth in 1..=4 {
        faults.script(OperationKind::Delete, nth, FaultMode::Before);
    }
    let before = faults.injected();
    let meanwhile = async {
        while faults.injected() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        world.lease.lapse(1, u64::MAX);
    };
    let _ = tokio::join!(tree.drain(), meanwhile);
    world.check_objects(&[("a", "old")]).await;
    faults.clear();
    world.lease.renew();
    tree.drain().await.expect("drained");
    world.check_objects(&[]).await;
}

/// One that took long to look at made all of its page wait, and what others put in place of these by then was deleted.
#[tokio::test]
async fn what_was_looked_at_long_ago_is_looked_at_again() {
    let (world, tree, faults) = removed(&["a", "b"]).await;
    let look = faults.gate(1);
    let meanwhile = async {
        look.reached().await;
        // The other one is looked at by then.
        tokio::time::sleep(Duration::from_millis(100)).await;
        world.put("a", b"theirs").await;
        world.put("b", b"theirs").await;
        world.clock.advance(Duration::from_secs(6));
        look.open();
    };
    let (drained, ()) = tokio::join!(tree.drain(), meanwhile);
    drained.expect("drained");
    world.check_objects(&[("a", "theirs"), ("b", "theirs")]).await;
}
