//! A disk that the cache has not for itself.

use std::fs::File;
use std::io::Write;

use forebay_core::BLOCK_SIZE;
use forebay_core::units::MIB;
use forebay_io::disk::space;

use super::disk::{SmallDisk, files, fill_all, settings, wait_until_all_is_done};
use super::support::World;
use crate::{Blocks, CacheSettings};

/// The cache took all of the disk up to its own ceiling, and whoever else wrote there met a full disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_on_the_disk_always_have_room_to_write() {
    for free_bytes in [None, Some(12 * MIB)] {
        let Some(disk) = SmallDisk::mount("64m") else {
            let _ = writeln!(std::io::stderr(), "SKIPPED: a disk of 64 MiB needs the right to mount a tmpfs");
            return;
        };
        let (world, total) = (World::new(), 64 * MIB);
        let node = world.open(CacheSettings { free_bytes, ..settings(disk.0.path(), 256 * MIB) }).await;
        let mut others = File::create(disk.0.path().join("log")).expect("create");
        for round in 0..15 {
            let blob = world.put(&format!("blob-{round}"), 3 * BLOCK_SIZE).await;
            fill_all(&node, &blob, false).await;
            let free = space(disk.0.path()).expect("space").free;
            assert!(free >= free_bytes.unwrap_or(total / 20), "{free} bytes are free in round {round}");
            others.write_all(&vec![1; 3 << 20]).unwrap_or_else(|error| panic!("round {round}: {error}"));
            blob.check_all(&*node).await;
            wait_until_all_is_done(&node).await;
        }
        let (counters, blocks) = (node.counters(), files(disk.0.path()).len() as u64);
        // Blocks that were read while much was on its way to the disk may have been left out.
        assert_eq!(counters.disk_failures, 0, "{counters:?}");
        assert!(counters.disk_bytes <= 19 * MIB && blocks >= 1, "{counters:?}");
        // They have gone, and the cache has the disk again.
        drop(others);
        std::fs::remove_file(disk.0.path().join("log")).expect("remove");
        let blob = world.put("after", 12 * BLOCK_SIZE).await;
        fill_all(&node, &blob, false).await;
        assert!(node.counters().disk_bytes >= 12 * BLOCK_SIZE, "{:?}", node.counters());
    }
}
