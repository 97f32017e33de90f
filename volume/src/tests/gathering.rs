//! Files that stay open and are synced again and again.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use forebay_core::units::KIB;
use forebay_io::object::{Bucket, Faults, OperationKind};
use forebay_io::rng::Rng;
use forebay_metadata::fsck::FsckReport;

use super::support::{Fixture, Model, READ, create, object, open, pattern, run, until};
use crate::Volume;
use crate::staging::WritebackSettings;

const PAGE: u64 = 4 * KIB;

/// A volume that puts extents together once there are 50 more.
fn fixture(bucket: Bucket) -> Fixture {
    let mut fixture = Fixture::new(bucket);
    fixture.write.gather_extents = 50;
    fixture
}

/// Returns once nothing is being put together, with how many extents the file has that is open.
async fn extents(volume: &Volume) -> usize {
    let inode = volume.open_inodes().remove(0);
    until("extents are put together", async || !inode.is_gathering()).await;
    inode.look(|content| content.layout().extents().len())
}

async fn fsck(volume: &Volume) -> FsckReport {
    volume.tree().local().expect("a tree of this process").fsck(false).await.expect("checked")
}

/// Promise: a log that stays open and is synced after each line is a few extents at any time, and each line is sent once, and
/// once more with those before it.
#[test]
fn a_log_that_is_synced_after_each_line_stays_a_few_extents() {
    run(async {
        const LINES: u64 = 500;
        let fixture = fixture(Bucket::in_memory());
        let volume = fixture.open().await;
        let mut log = Model::files(&volume, 1).await.remove(0);
        let before = fixture.bucket.counters();
        let mut most = 0;
        for line in 0..LINES {
            log.write(100 * line, pattern(line, 0..100)).await;
            log.file.fsync().await.expect("fsync");
            most = most.max(extents(&volume).await);
        }
        let asked = fixture.bucket.counters().since(&before);
        // One that is long by now, those before it, and 50 more.
        assert!(most <= 52, "{most} extents");
        let puts = asked.of(OperationKind::Put).requests;
        assert!(puts <= LINES + 10, "{puts} puts for {LINES} lines");
        assert!(log.file.read(0, 1 << 20).await.expect("read") == log.bytes);
        let report = fsck(&volume).await;
        assert!(report.is_clean(), "{:?}", report.findings);
        log.release().await;
        volume.close().await.expect("close");
        assert!(object(&fixture.bucket, "file-0").await == log.bytes);
    });
}

/// What was put together stayed in the store until the mount's end, where the tree did not take it.
#[test]
fn what_is_put_together_in_vain_is_deleted() {
    run(async {
        let mut fixture = fixture(Bucket::in_memory());
        fixture.is_unlucky = true;
        let volume = fixture.open().await;
        let mut log = Model::files(&volume, 1).await.remove(0);
        fixture.refuses.store(true, SeqCst);
        let before = fixture.bucket.counters();
        for line in 0..60 {
            log.write(100 * line, pattern(line, 0..100)).await;
            log.file.fsync().await.expect("fsync");
        }
        assert_eq!(extents(&volume).await, 60, "all are as they were written");
        let asked = fixture.bucket.counters().since(&before);
        let puts = asked.of(OperationKind::Put).requests;
        assert!(puts > 60, "they were put together");
        assert_eq!(asked.of(OperationKind::Delete).requests, puts - 60);
        fixture.refuses.store(false, SeqCst);
        assert!(log.file.read(0, 1 << 20).await.expect("read") == log.bytes);
        log.release().await;
        volume.close().await.expect("close");
    });
}

/// So is a database whose pages are written anywhere, for which some times as many bytes are sent as are written once it has more
/// than 32 times the extents after which it is looked for short ones.
#[test]
fn a_database_that_is_synced_after_each_page_stays_a_few_extents() {
    run(async {
        const PAGES: u64 = 256;
        const WRITES: u64 = 600;
        for writes_back in [false, true] {
            let mut fixture = fixture(Bucket::in_memory());
            fixture.write.gather_extents = 2;
            if writes_back {
                let settings = WritebackSettings { enabled: true, ..WritebackSettings::default() };
                fixture = fixture.writing_back(settings);
            }
            let volume = fixture.open().await;
            let mut database = Model::files(&volume, 1).await.remove(0);
            database.write(0, pattern(0, 0..PAGES * PAGE)).await;
            database.file.fsync().await.expect("fsync");
            let (before, rng) = (fixture.bucket.counters(), Rng::seeded(3));
            let mut most = 0;
            for number in 1..=WRITES {
                database.write(rng.below(PAGES) * PAGE, pattern(number, 0..PAGE)).await;
                database.file.fsync().await.expect("fsync");
                most = most.max(extents(&volume).await);
            }
            let sent = fixture.bucket.counters().since(&before).of(OperationKind::Put).bytes;
            // Each write makes two more at most; it would be 256.
            assert!(most <= 32 * 2 + 3, "{most} extents");
            assert!(sent <= 16 * WRITES * PAGE, "{sent} bytes");
            assert!(database.file.read(0, 1 << 20).await.expect("read") == database.bytes);
            database.release().await;
            volume.drain(|_| {}).await.expect("drain");
            volume.close().await.expect("close");
            assert!(object(&fixture.bucket, "file-0").await == database.bytes);
        }
    });
}

/// Writes `lines` of 100 bytes to a log, each synced before the next.
async fn write_lines(log: &mut Model, lines: std::ops::Range<u64>) {
    for line in lines {
        log.write(100 * line, pattern(line, 0..100)).await;
        log.file.fsync().await.expect("fsync");
    }
}

/// Who writes waits for none of it, and what is written meanwhile, over what is being put together as well, stays.
#[test]
fn a_writer_does_not_wait_for_extents_to_be_put_together() {
    run(async {
        let faults = Faults::new();
        let fixture = fixture(Bucket::in_memory().with_faults(&faults));
        let volume = fixture.open().await;
        let mut log = Model::files(&volume, 1).await.remove(0);
        write_lines(&mut log, 0..50).await;
        let gate = faults.gate(2);
        write_lines(&mut log, 50..51).await;
        gate.reached().await;
        write_lines(&mut log, 51..60).await;
        log.write(1250, pattern(7, 0..20)).await;
        log.file.fsync().await.expect("fsync");
        volume.set_attributes(log.file.ino(), Default::default(), Some(4000)).await.expect("truncate");
        log.bytes.truncate(4000);
        log.write(300, pattern(8, 0..30)).await;
        gate.open();
        // Two that were put together and cut apart by one that was written, and what is not committed over the first.
        assert_eq!(extents(&volume).await, 5);
        assert!(log.file.read(0, 1 << 20).await.expect("read") == log.bytes);
        log.file.fsync().await.expect("fsync");
        log.release().await;
        volume.close().await.expect("close");
        assert!(object(&fixture.bucket, "file-0").await == log.bytes);
    });
}

/// What was put together in vain, as the file was written anew meanwhile, leaves nothing behind.
#[test]
fn what_is_written_anew_meanwhile_leaves_no_blob() {
    run(async {
        let faults = Faults::new();
        let fixture = fixture(Bucket::in_memory().with_faults(&faults));
        let volume = fixture.open().await;
        let mut log = Model::files(&volume, 1).await.remove(0);
        write_lines(&mut log, 0..50).await;
        let gate = faults.gate(2);
        write_lines(&mut log, 50..51).await;
        gate.reached().await;
        volume.set_attributes(log.file.ino(), Default::default(), Some(0)).await.expect("truncate");
        log.file.write(0, pattern(9, 0..70)).await.expect("write");
        log.file.fsync().await.expect("fsync");
        gate.open();
        assert_eq!(extents(&volume).await, 1);
        assert!(log.file.read(0, 1 << 20).await.expect("read") == pattern(9, 0..70));
        log.release().await;
        let report = fsck(&volume).await;
        assert!(report.is_clean(), "{:?}", report.findings);
        volume.close().await.expect("close");
    });
}

/// A mount that is killed at any request while extents are put together has lost nothing that was synced, and leaves nothing
/// that gc does not free.
#[test]
fn a_mount_that_is_killed_as_extents_are_put_together_loses_nothing() {
    let mut was_cut = true;
    let mut nth = 0;
    while was_cut {
        nth += 1;
        println!("request {nth}");
        let (bucket, faults, synced) = (Bucket::in_memory(), Faults::new(), Arc::new(AtomicU64::new(0)));
        let mut killed = fixture(bucket.with_faults(&faults).with_deadline_ms(30));
        (killed.tree_in_bucket, killed.write.deadline_ms, killed.write.gather_extents) = (true, 300, 5);
        let (cut, count) = (faults.clone(), synced.clone());
        run(async move {
            let volume = killed.open().await;
            let file = create(&volume, "log").await;
            for line in 0..14 {
                if line == 5 {
                    cut.cut_off(nth);
                }
                let written = file.write(100 * line, pattern(line, 0..100)).await;
                match written.and(file.fsync().await) {
                    Ok(()) => count.store(line + 1, SeqCst),
                    Err(_) => break,
                }
                extents(&volume).await;
            }
        });
        was_cut = faults.injected() > 0;
        run(async move {
            let next = Fixture { tree_in_bucket: true, ..Fixture::new(bucket) };
            let volume = next.open().await;
            let lines: Vec<_> = (0..14).map(|line| pattern(line, 0..100)).collect();
            let file = open(&volume, "log", READ).await;
            let read = file.read(0, 1 << 20).await.expect("read");
            let synced = 100 * synced.load(SeqCst) as usize;
            assert!(read.len() >= synced && lines.concat().starts_with(&read), "{} bytes", read.len());
            file.release().await.expect("release");
            let leaked = |report: &FsckReport| {
                report.findings.iter().all(|finding| finding.kind.starts_with("leaked"))
            };
            let report = fsck(&volume).await;
            assert!(leaked(&report), "{:?}", report.findings);
            volume
                .tree()
                .local()
                .expect("a tree of this process")
                .collect_garbage(false)
                .await
                .expect("freed");
            let report = fsck(&volume).await;
            assert!(report.is_clean(), "{:?}", report.findings);
            volume.close().await.expect("close");
        });
    }
    assert!(nth > 10, "{nth} requests");
}
