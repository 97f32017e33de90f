//! What writing asks of the store, in requests and bytes, the tree's own included.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::units::{KIB, MIB};
use forebay_core::{Blob, Extent, InodeId, ObjectKey, Source, Version};
use forebay_io::mem::Class;
use forebay_io::object::{Bucket, Counters, Faults, OperationKind};
use forebay_io::rng::Rng;
use forebay_metadata::tree::SetAttributes;

use super::support::{Fixture, READ_WRITE, create, object, open, pattern, run, until};
use crate::{Access, File, Volume};

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
        let (before, begun) = (fixture.bucket.counters(), std::time::Instant::now());
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
        // The tree writes by itself each second what nobody waits for.
        let most = 216 + 2 * begun.elapsed().as_secs();
        assert!((201..=most).contains(&puts), "200 files and a few batches of the tree: {asked:?}");
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

/// Promise: pages that are written again and again go to the store once, with the commit, take no more memory than
/// `write.buffer_bytes`, and leave no blob behind that nothing refers to.
#[test]
fn what_is_written_over_in_memory_is_never_sent() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        let (before, rng) = (fixture.bucket.counters(), Rng::seeded(11));
        let (mut expected, mut most) = (vec![0; 64 * KIB as usize], 0);
        for number in 0..2000 {
            // Pages, and now and then some bytes anywhere.
            let (at, length) = match number % 8 {
                0 => (rng.below(60 * KIB), rng.below(4 * KIB) + 1),
                _ => (rng.below(4) * 16 * KIB, 16 * KIB),
            };
            let data = pattern(number, 0..length);
            expected[at as usize..(at + length) as usize].copy_from_slice(&data);
            file.write(at, data).await.expect("write");
            most = most.max(fixture.budget.used(Class::Write));
            if number % 100 == 0 {
                let read = file.read(0, 64 << 10).await.expect("read");
                assert!(read == expected[..file.size() as usize]);
            }
        }
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!(sent(&asked), 0, "{asked:?}");
        assert!(most <= MIB + 16 * KIB, "{most} bytes are charged");
        file.flush().await.expect("close");
        file.release().await.expect("release");
        let asked = fixture.bucket.counters().since(&before);
        assert_eq!((asked.of(OperationKind::Put).requests, sent(&asked)), (1, 64 * KIB), "{asked:?}");
        assert!(object(&fixture.bucket, "f").await == expected);
        let tree = volume.tree().local().expect("a tree of this process");
        let report = tree.fsck(false).await.expect("checked");
        assert!(report.is_clean(), "{:?}", report.findings);
        volume.close().await.expect("close");
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

/// On a store that wants parts of one size, as Cloudflare R2, a file that was rewritten could never be sealed: all of its bytes were
/// sent, and refused, again and again.
#[test]
fn sealing_sends_parts_of_one_size_to_a_store_that_wants_them() {
    run(async {
        for is_known in [true, false] {
            let fixture = Fixture::new(Bucket::in_memory_of_even_parts());
            if is_known {
                fixture.bucket.want_even_parts();
            }
            let volume = fixture.open().await;
            let file = create(&volume, "f").await;
            let mut expected = pattern(1, 0..30 * MIB).to_vec();
            fill(&file, 0..30 * MIB).await;
            file.fsync().await.expect("fsync");
            let changed = pattern(2, 0..4 * KIB);
            expected[17 << 20..(17 << 20) + changed.len()].copy_from_slice(&changed);
            let before = fixture.bucket.counters();
            file.write(17 * MIB, changed).await.expect("write");
            file.fsync().await.expect("fsync");
            file.release().await.expect("release");
            until("it is sealed", async || object(&fixture.bucket, "f").await == expected).await;
            volume.close().await.expect("close");
            let asked = fixture.bucket.counters().since(&before);
            assert!(fixture.bucket.wants_even_parts());
            let completed = asked.of(OperationKind::Complete).requests;
            assert_eq!(completed, if is_known { 1 } else { 2 }, "one refusal says it");
            assert!(sent(&asked) < 30 * MIB, "{} bytes: most are copied", sent(&asked));
        }
    });
}

/// Writes `range` of file 1 in pieces of a MiB, as programs do.
async fn fill(file: &File, range: Range<u64>) {
    for at in range.step_by(MIB as usize) {
        file.write(at, pattern(1, at..at + MIB)).await.expect("write");
    }
}

/// A volume whose files keep 8 MiB in memory and whose seals move 16 MiB.
fn narrow() -> Fixture {
    let mut fixture = Fixture::new(Bucket::in_memory());
    (fixture.write.buffer_bytes, fixture.write.seal_max_bytes) = (8 * MIB, 16 * MIB);
    fixture
}

/// What lies in blobs of the size that writing makes them was carried through the host, all of it: a file that was synced
/// while it was written kept a shorter object at its path for good.
#[test]
fn blobs_as_writing_makes_them_are_copied_inside_the_store() {
    run(async {
        let fixture = narrow();
        let volume = fixture.open().await;
        let (synced, backwards) = (create(&volume, "synced").await, create(&volume, "backwards").await);
        fill(&synced, 0..10 * MIB).await;
        synced.fsync().await.expect("fsync");
        fill(&synced, 10 * MIB..40 * MIB).await;
        for at in (0..5).rev() {
            backwards.write(8 * at * MIB, pattern(1, 8 * at * MIB..8 * (at + 1) * MIB)).await.expect("write");
        }
        for file in [&synced, &backwards] {
            file.fsync().await.expect("fsync");
        }
        let before = fixture.bucket.counters();
        for file in [synced, backwards] {
            file.release().await.expect("release");
        }
        volume.close().await.expect("close");
        let asked = fixture.bucket.counters().since(&before);
        for name in ["synced", "backwards"] {
            assert!(object(&fixture.bucket, name).await == pattern(1, 0..40 * MIB), "{name}");
        }
        let (copies, sent) = (asked.of(OperationKind::CopyPart).requests, sent(&asked));
        assert!(copies == 10 && sent == 0, "{copies} copies, {sent} bytes sent");
    });
}

/// The same where the store copies nothing, and most bytes that may pass through the host are so many.
fn carrying(seal_max_bytes: u64, faults: &Faults) -> Fixture {
    let mut fixture = Fixture::new(Bucket::in_memory().with_faults(faults));
    (fixture.write.buffer_bytes, fixture.write.seal_max_bytes) = (8 * MIB, seal_max_bytes);
    Fixture { part_copy: false, ..fixture }
}

/// Makes a file of 10 MiB that is an object, and 30 MiB that are not.
async fn synced_while_written(volume: &Arc<Volume>, name: &str) {
    let file = create(volume, name).await;
    fill(&file, 0..10 * MIB).await;
    file.fsync().await.expect("fsync");
    fill(&file, 10 * MIB..40 * MIB).await;
    file.fsync().await.expect("fsync");
    file.release().await.expect("release");
}

/// A file's older object is what other tools read: to replace it, 64 times as much passes through the host as to make a first
/// one.
#[test]
fn an_older_object_is_replaced_through_the_host() {
    run(async {
        let fixture = carrying(MIB, &Faults::new());
        let volume = fixture.open().await;
        synced_while_written(&volume, "f").await;
        assert_eq!(volume.unsealed(), 0);
        volume.close().await.expect("close");
        assert!(object(&fixture.bucket, "f").await == pattern(1, 0..40 * MIB));
    });
}

/// What the tree's engine does for an fsync of each of a few pages of a file of so many extents, most of them written before it
/// was mounted: what is read, and the records written.
async fn synced_pages(extents: u64) -> Vec<(u64, u64)> {
    let mut fixture = Fixture::new(Bucket::in_memory());
    fixture.write.gather_extents = usize::MAX;
    let volume = fixture.open().await;
    let file = create(&volume, "f").await;
    file.release().await.expect("release");
    let (mut layout, generation) = volume.tree().layout(file.ino()).await.expect("a layout");
    for number in 0..extents {
        let key = volume.tree().fresh_blob();
        let blob = Blob { key, version: Version::new("v"), size: KIB };
        layout.write(Extent {
            offset: 4 * KIB * number,
            length: KIB,
            source: Source::Blob { blob, offset: 0 },
        });
    }
    let now = fixture.clock.wall();
    volume.tree().commit_layout(file.ino(), generation, layout, now).await.expect("committed");
    volume.close().await.expect("close");
    let volume = fixture.open().await;
    let (file, other) = (open(&volume, "f", READ_WRITE).await, create(&volume, "other").await);
    let mut done = Vec::new();
    for number in 0..4 {
        if number == 2 {
            // Bytes of another file are moved: who syncs asks where those that he writes over lie.
            other.write(0, pattern(0, 0..KIB)).await.expect("write");
            other.fsync().await.expect("fsync");
            let (layout, generation) = volume.tree().layout(other.ino()).await.expect("a layout");
            volume.tree().relocate(other.ino(), generation, layout).await.expect("moved");
        }
        volume.sync().await.expect("sync");
        let before = (fixture.store.reads(), fixture.store.records_written());
        file.write(4 * KIB * (extents / 2 + number), pattern(number, 0..KIB)).await.expect("write");
        file.fsync().await.expect("fsync");
        done.push((fixture.store.reads() - before.0, fixture.store.records_written() - before.1));
    }
    done
}

/// Promise: an fsync of a file that stays open costs what changed since the last one. It read all records of the layout, and twice more
/// where bytes of another file had been moved.
#[test]
fn an_fsync_of_a_page_asks_the_tree_for_as_much_in_a_file_of_any_length() {
    run(async {
        for extents in [1_000, 50_000] {
            let done = synced_pages(extents).await;
            // Some of it is what the mover does meanwhile.
            let is_little = |(reads, written): &(u64, u64)| *reads < 40 && *written < 20;
            assert!(done.iter().all(is_little), "{extents} extents: {done:?}");
        }
    });
}

/// What is not sealed was not told.
#[test]
fn closed_files_that_stay_in_pieces_are_counted() {
    run(async {
        let fixture = carrying(512 * KIB, &Faults::new());
        let volume = fixture.open().await;
        synced_while_written(&volume, "older").await;
        let file = create(&volume, "none").await;
        for at in [MIB, 0] {
            file.write(at, pattern(1, at..at + MIB)).await.expect("write");
            file.fsync().await.expect("fsync");
        }
        file.release().await.expect("release");
        // A file with holes that is synced as an empty one would take room for nothing.
        let holes = create(&volume, "holes").await;
        holes.fsync().await.expect("fsync");
        let size = volume.set_attributes(holes.ino(), SetAttributes::default(), Some(MIB)).await;
        assert_eq!(size.expect("a size").size, MIB);
        holes.release().await.expect("release");
        let sealed = async || {
            // Until nothing is being sealed any more.
            while !volume.open_inodes().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        sealed().await;
        assert_eq!(volume.unsealed(), 3);
        assert_eq!(object(&fixture.bucket, "older").await.len() as u64, 10 * MIB);
        assert!(fixture.bucket.head(&ObjectKey::new("none")).await.expect("head").is_none());

        // It is written anew, in order, and another one goes.
        let file = open(&volume, "none", Access { truncate: true, ..READ_WRITE }).await;
        fill(&file, 0..MIB).await;
        file.fsync().await.expect("fsync");
        file.release().await.expect("release");
        volume.unlink(InodeId::ROOT, b"holes").await.expect("unlink");
        sealed().await;
        assert_eq!(volume.unsealed(), 1);
        volume.close().await.expect("close");
    });
}

/// What passes through the host takes long: a writer who comes meanwhile waits for none of it, and the file is sealed after it.
#[test]
fn a_writer_does_not_wait_for_a_long_seal() {
    run(async {
        let faults = Faults::new();
        let fixture = carrying(MIB, &faults);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        fill(&file, 0..10 * MIB).await;
        file.fsync().await.expect("fsync");
        fill(&file, 10 * MIB..40 * MIB).await;
        file.fsync().await.expect("fsync");
        let gate = faults.gate(1);
        file.release().await.expect("release");
        gate.reached().await;
        let file = open(&volume, "f", READ_WRITE).await;
        file.write(40 * MIB, pattern(1, 40 * MIB..41 * MIB)).await.expect("write");
        file.fsync().await.expect("fsync");
        assert_eq!(object(&fixture.bucket, "f").await.len() as u64, 10 * MIB, "it is not sealed before that");
        gate.open();
        file.release().await.expect("release");
        volume.close().await.expect("close");
        assert!(object(&fixture.bucket, "f").await == pattern(1, 0..41 * MIB));
    });
}
