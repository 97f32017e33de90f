//! What writing asks of the store, in requests and bytes, the tree's own included.

use bytes::Bytes;
use forebay_core::units::{KIB, MIB};
use forebay_io::object::{Bucket, Counters, OperationKind};
use forebay_io::rng::Rng;

use super::support::{Fixture, READ_WRITE, create, object, open, pattern, run};

/// Bytes that went to the store.
fn sent(counters: &Counters) -> u64 {
    counters.of(OperationKind::Put).bytes + counters.of(OperationKind::Part).bytes
}

/// Promise: a small new file costs one PUT; names follow together, many in one write of the tree.
#[test]
fn small_files_written_side_by_side_are_one_put_each() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.tree_in_bucket = true;
        let volume = fixture.open().await;
        let before = fixture.bucket.counters();
        let writers = (0..8_u64).map(|writer| {
            let volume = volume.clone();
            async move {
                for number in 0..25 {
                    let file = create(&volume, &format!("f{writer}-{number}")).await;
                    file.write(0, pattern(writer, 0..4 * KIB)).await.expect("write");
                    file.flush().await.expect("close");
                    file.release().await.expect("release");
                }
            }
        });
        futures::future::join_all(writers).await;
        volume.sync().await.expect("sync");
        let asked = fixture.bucket.counters().since(&before);
        let puts = asked.of(OperationKind::Put).requests;
        assert!((201..=216).contains(&puts), "200 files and a few batches of the tree: {asked:?}");
        // A batch holds an entry and an inode a file, no intents that came and went.
        let tree = sent(&asked) - 200 * 4 * KIB;
        assert!(tree < 200 * 512, "{tree} bytes for 200 names");
        volume.close().await.expect("close");
    });
}

/// Promise: random writes go to the store once, packed: at most 1.25 bytes for each byte written, before sealing.
#[test]
fn random_writes_are_uploaded_once() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.tree_in_bucket = true;
        fixture.write.buffer_bytes = 8 * MIB;
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.allocate(0, 0, 1024 * MIB).await.expect("a size");
        file.fsync().await.expect("fsync");
        let (before, rng) = (fixture.bucket.counters(), Rng::seeded(7));
        let data = pattern(1, 0..4 * KIB);
        const WRITES: u64 = 8000;
        for number in 1..=WRITES {
            file.write(rng.below(1024 * MIB / (4 * KIB)) * 4 * KIB, data.clone()).await.expect("write");
            if number % 1000 == 0 {
                file.fsync().await.expect("fsync");
            }
        }
        let asked = fixture.bucket.counters().since(&before);
        let ratio = sent(&asked) as f64 / (WRITES * 4 * KIB) as f64;
        assert!(ratio <= 1.25, "{ratio} bytes sent for each byte written: {asked:?}");
        assert_eq!(asked.of(OperationKind::Part).requests, 0);
    });
}

/// Promise: sealing moves only what changed through this host; the store copies the rest by itself.
#[test]
fn sealing_copies_inside_the_store() {
    run(async {
        for part_copy in [true, false] {
            let mut fixture = Fixture::new(Bucket::in_memory());
            fixture.part_copy = part_copy;
            let volume = fixture.open().await;
            let file = create(&volume, "f").await;
            let mut expected = pattern(1, 0..24 * MIB).to_vec();
            for at in 0..24_usize {
                let piece = Bytes::copy_from_slice(&expected[at << 20..(at + 1) << 20]);
                file.write((at as u64) << 20, piece).await.expect("write");
            }
            file.fsync().await.expect("fsync");
            file.release().await.expect("release");
            let before = fixture.bucket.counters();
            let file = open(&volume, "f", READ_WRITE).await;
            let changed = pattern(2, 0..4 * KIB);
            expected[12 << 20..(12 << 20) + changed.len()].copy_from_slice(&changed);
            file.write(12 * MIB, changed).await.expect("write");
            file.fsync().await.expect("fsync");
            file.release().await.expect("release");
            volume.close().await.expect("close");
            let asked = fixture.bucket.counters().since(&before);
            assert!(object(&fixture.bucket, "f").await == expected, "sealed, part copy {part_copy}");
            let (copies, sent) = (asked.of(OperationKind::CopyPart).requests, sent(&asked));
            match part_copy {
                true => assert!(copies == 2 && sent < 6 * MIB, "{copies} copies, {sent} bytes sent"),
                false => assert!(copies == 0 && sent > 24 * MIB, "{copies} copies, {sent} bytes sent"),
            }
        }
    });
}
