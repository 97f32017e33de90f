//! Bytes that left for the store before they were committed, and that nobody names any more.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::{KIB, MIB};
use forebay_core::{Blob, InodeId, ObjectKey};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition, FaultMode, Faults, OperationKind};
use forebay_io::rng::Rng;
use futures::stream::TryStreamExt;

use super::support::{Fixture, Model, READ_WRITE, create, open, pattern, run, until, with_seeds};
use crate::{File, Volume};

/// When nothing comes any more of what was not answered.
const LATER: Duration = Duration::from_secs(6 * 60);

fn fixture(bucket: Bucket) -> Fixture {
    Fixture { clock: Clock::manual(), ..Fixture::new(bucket) }
}

/// The owned blobs in the bucket.
async fn blobs(bucket: &Bucket) -> Vec<ObjectKey> {
    let prefix = Blob::OWNED_PREFIX.trim_end_matches('/');
    bucket.list(prefix).map_ok(|info| info.key).try_collect().await.expect("a listing")
}

/// Writes beyond the end, so that no upload of the whole file begins, until the bytes leave for a blob.
async fn send_early(file: &File, number: u64, at: u64) {
    file.write(at, pattern(number, at..at + MIB)).await.expect("write");
}

/// What the tree has of what is to be deleted is as it should be: nothing leaked.
async fn check_clean(volume: &Arc<Volume>) {
    let tree = volume.tree().local().expect("a tree of this process");
    let report = tree.fsck(false).await.expect("checked");
    assert!(report.is_clean(), "{:?}", report.findings);
}

/// Has the tree know of what is to be deleted, and deletes it when its time has come.
async fn delete_later(fixture: &Fixture, volume: &Arc<Volume>) {
    let before = blobs(&fixture.bucket).await;
    delete_all(volume).await;
    assert_eq!(blobs(&fixture.bucket).await, before, "it may come still");
    fixture.clock.advance(LATER);
    delete_all(volume).await;
}

/// Has the tree know of what is to be deleted, and deletes that whose time has come.
async fn delete_all(volume: &Arc<Volume>) {
    volume.tell_of_discards().await;
    check_clean(volume).await;
    volume.tree().local().expect("a tree of this process").drain().await.expect("drained");
    check_clean(volume).await;
}

/// A load of stress-ng left blobs to gc, and fsck called them leaked until then: they had left memory and were written over before
/// the file was synced.
#[test]
fn what_is_written_over_before_it_is_committed_is_deleted() {
    run(async {
        let fixture = fixture(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        for number in 0..3 {
            send_early(&file, number, MIB).await;
        }
        assert_eq!(blobs(&fixture.bucket).await.len(), 3);
        delete_later(&fixture, &volume).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 1, "that which the file is to have is kept");
        file.fsync().await.expect("fsync");
        assert!(file.read(MIB, MIB as u32).await.expect("read") == pattern(2, MIB..2 * MIB));
        delete_later(&fixture, &volume).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 1);
        // In part only.
        send_early(&file, 3, 4 * MIB).await;
        file.write(4 * MIB, pattern(4, 0..KIB)).await.expect("write");
        file.fsync().await.expect("fsync");
        delete_later(&fixture, &volume).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 3);
        volume.close().await.expect("close");
    });
}

#[test]
fn what_is_cut_off_before_it_is_committed_is_deleted() {
    run(async {
        let fixture = fixture(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        send_early(&file, 0, MIB).await;
        send_early(&file, 1, 4 * MIB).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 2);
        volume.set_attributes(file.ino(), Default::default(), Some(3 * MIB)).await.expect("truncated");
        delete_later(&fixture, &volume).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 1);
        file.allocate(0x03, 0, 3 * MIB).await.expect("a hole");
        delete_later(&fixture, &volume).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 0);
        file.fsync().await.expect("fsync");
        assert!(file.read(0, 4 * MIB as u32).await.expect("read") == vec![0; 3 * MIB as usize]);
        file.release().await.expect("release");
        volume.close().await.expect("close");
    });
}

#[test]
fn what_is_removed_before_it_is_committed_is_deleted() {
    run(async {
        let fixture = fixture(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        send_early(&file, 0, MIB).await;
        volume.unlink(InodeId::ROOT, b"f").await.expect("removed");
        send_early(&file, 1, 4 * MIB).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 2);
        file.flush().await.expect("close");
        file.release().await.expect("release");
        until("it is closed", async || volume.open_inodes().is_empty()).await;
        delete_later(&fixture, &volume).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 0);
        volume.close().await.expect("close");
    });
}

/// What was told before a volume is closed is deleted by the next mount.
#[test]
fn the_next_mount_deletes_what_this_one_had_no_time_for() {
    run(async {
        let fixture = fixture(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        send_early(&file, 0, MIB).await;
        send_early(&file, 1, MIB).await;
        file.fsync().await.expect("fsync");
        // Whose place the next one takes: nothing is sealed.
        volume.close().await.expect("close");
        let volume = fixture.open().await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 2);
        delete_later(&fixture, &volume).await;
        assert_eq!(blobs(&fixture.bucket).await.len(), 1);
        let file = open(&volume, "f", READ_WRITE).await;
        assert!(file.read(MIB, MIB as u32).await.expect("read") == pattern(1, MIB..2 * MIB));
        volume.close().await.expect("close");
    });
}

/// The process dies with what it had not committed: nobody knows of that, and gc finds it.
#[test]
fn gc_finds_what_a_dead_process_had_not_committed() {
    run(async {
        let fixture = fixture(Bucket::in_memory());
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.fsync().await.expect("fsync");
        send_early(&file, 0, MIB).await;
        let next = fixture.open().await;
        send_early(&file, 1, MIB).await;
        drop((file, volume));
        let tree = next.tree().local().expect("a tree of this process");
        let report = tree.fsck(false).await.expect("checked");
        assert!(!report.is_clean(), "they leaked");
        tree.collect_garbage(false).await.expect("collected");
        assert_eq!(blobs(&fixture.bucket).await.len(), 0);
        check_clean(&next).await;
        next.close().await.expect("close");
    });
}

/// The store takes a blob and its answer is lost, or takes it minutes later: its bytes go to another one.
#[test]
fn what_the_store_did_not_answer_is_deleted_though_it_comes_later() {
    run(async {
        let (bucket, faults) = (Bucket::in_memory(), Faults::new());
        let faulty = bucket.with_faults(&faults).with_deadline_ms(50);
        let fixture = fixture(faulty);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(MIB, pattern(0, 0..KIB)).await.expect("write");
        for nth in 1..=100 {
            faults.script(OperationKind::Put, nth, FaultMode::LoseReply);
        }
        file.fsync().await.expect_err("nobody knows");
        faults.clear();
        let unanswered = blobs(&fixture.bucket).await;
        assert_eq!(unanswered.len(), 1);
        // As if it had come to nothing so far.
        let late = bucket.get_whole(&unanswered[0]).await.expect("its bytes").0;
        bucket.delete(&unanswered[0]).await.expect("delete");
        file.fsync().await.expect("fsync");
        assert_eq!(blobs(&fixture.bucket).await.len(), 1);
        bucket.put(&unanswered[0], late, Condition::IfAbsent).await.expect("it comes");
        delete_later(&fixture, &volume).await;
        let left = blobs(&fixture.bucket).await;
        assert!(left.len() == 1 && left != unanswered, "{left:?}");
        assert!(file.read(MIB, KIB as u32).await.expect("read") == pattern(0, 0..KIB));
        volume.close().await.expect("close");
    });
}

/// Writes, cuts, syncs and closes of files whose bytes leave early, over a store that loses answers, while what nobody names is
/// deleted all the time: nothing that is named goes, and in the end nothing else is left.
#[test]
fn random_edits_lose_nothing_and_leave_nothing() {
    with_seeds(4, async |seed| {
        let rng = Rng::seeded(seed);
        let bucket = Bucket::in_memory();
        let fixture = fixture(bucket.with_faults(&Faults::random(seed, 0.02)));
        let mut volume = fixture.open().await;
        let mut models = Model::files(&volume, 3).await;
        for number in 0..150 {
            let model = &mut models[rng.below(3) as usize];
            let at = rng.below(3 * MIB);
            match rng.below(12) {
                0..6 => model.write(at, pattern(number, 0..rng.below(MIB + 1))).await,
                6 => {
                    volume.set_attributes(model.file.ino(), Default::default(), Some(at)).await.expect("cut");
                    model.bytes.resize(at as usize, 0);
                }
                7 => model.file.fsync().await.expect("fsync"),
                8 => model.reopen(&volume).await,
                9 => {
                    fixture.clock.advance(LATER);
                    delete_all(&volume).await;
                }
                10 if rng.below(3) == 0 => Model::remount(&mut models, &fixture, &mut volume).await,
                _ => {
                    let read = model.file.read(0, 8 * MIB as u32).await.expect("read");
                    assert!(read == model.bytes, "step {number}");
                }
            }
        }
        for model in &models {
            model.file.fsync().await.expect("fsync");
        }
        fixture.clock.advance(LATER);
        delete_all(&volume).await;
        for model in &models {
            let read = model.file.read(0, 8 * MIB as u32).await.expect("read");
            assert!(read == Bytes::copy_from_slice(&model.bytes), "{}", model.name);
            model.release().await;
        }
        volume.close().await.expect("close");
        let volume = fixture.open().await;
        check_clean(&volume).await;
        let tree = volume.tree().local().expect("a tree of this process");
        let left = tree.collect_garbage(true).await.expect("looked for");
        assert_eq!(left.blobs, 0, "{left:?}");
        volume.close().await.expect("close");
    });
}
