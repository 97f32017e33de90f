//! Writing back to a store that goes away with the tree in it, for longer than the lease lasts.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::{KIB, MIB};
use forebay_core::{ErrorKind, InodeId, ObjectKey};
use forebay_io::object::{Bucket, Faults};
use forebay_metadata::tree::resolve;

use super::super::support::{Fixture, READ_WRITE, create, object, open, pattern, run};
use super::{AT_ONCE, LATER, drain, owned, read, write};
use crate::Volume;
use crate::staging::WritebackSettings;

/// A volume whose tree lies in a bucket that goes away, and whose directory was looked at before that.
async fn over_a_store_that_goes_away(settings: WritebackSettings) -> (Fixture, Faults, Arc<Volume>) {
    let faults = Faults::new();
    let bucket = Bucket::in_memory().with_deadline_ms(50).with_faults(&faults);
    let mut fixture = Fixture::new(bucket).writing_back(settings);
    fixture.write.deadline_ms = 3000;
    fixture.tree_in_bucket = true;
    let volume = fixture.open().await;
    volume.lookup(InodeId::ROOT, b"f").await.expect("lookup");
    write(&volume, "before", pattern(99, 0..100 * KIB)).await;
    volume.sync_names().await.expect("the store is there");
    faults.set_down(true);
    fixture.lapsed.store(true, SeqCst);
    (fixture, faults, volume)
}

/// The store is there again, and the tree has found out, which tries again at its own pace.
async fn comes_back(fixture: &Fixture, faults: &Faults, volume: &Volume) {
    faults.set_down(false);
    fixture.lapsed.store(false, SeqCst);
    while volume.sync_names().await.is_err() {}
}

/// Promise S62: So they are when the lease of a volume in a store has run out (15 s).
#[test]
fn files_are_written_and_closed_after_the_lease_ran_out() {
    run(async {
        let (fixture, faults, volume) = over_a_store_that_goes_away(AT_ONCE).await;
        for number in 0..30 {
            write(&volume, &format!("f{number}"), pattern(number, 0..number * 100 * KIB)).await;
        }
        volume.unlink(InodeId::ROOT, b"f6").await.expect("unlink");
        let file = open(&volume, "f5", READ_WRITE).await;
        file.write(0, Bytes::from_static(b"more")).await.expect("write");
        let told = file.fsync().await.expect_err("nothing is durable without the store");
        assert_eq!(told.kind(), ErrorKind::Unavailable);
        file.release().await.expect("release");
        assert!(read(&volume, "f29").await == pattern(29, 0..2900 * KIB));
        assert!(volume.staged().files >= 28, "{:?}", volume.staged());
        comes_back(&fixture, &faults, &volume).await;
        drain(&volume).await;
        for number in (0..30).filter(|number| ![5, 6].contains(number)) {
            let found = object(&fixture.bucket, &format!("f{number}")).await;
            assert!(found == pattern(number, 0..number * 100 * KIB), "f{number}");
        }
        assert!(object(&fixture.bucket, "f5").await.starts_with(b"more"));
        assert!(resolve(&**volume.tree(), "f6").await.is_err());
        volume.close().await.expect("close");
    });
}

/// An unmount whose beginning the store missed had all in the bucket in the end, and failed for what was so at first.
#[test]
fn a_volume_that_is_closed_while_the_store_is_away_ends_well_when_it_is_back() {
    run(async {
        let (fixture, faults, volume) = over_a_store_that_goes_away(AT_ONCE).await;
        write(&volume, "f", pattern(1, 0..100 * KIB)).await;
        let refused = faults.injected();
        let (drained, ()) = tokio::join!(volume.drain(|_| {}), async {
            // The tree is waited for, so long, and then what is staged.
            tokio::time::sleep(Duration::from_millis(fixture.write.deadline_ms + 1000)).await;
            assert!(faults.injected() > refused, "it was tried");
            faults.set_down(false);
            fixture.lapsed.store(false, SeqCst);
        });
        drained.expect("all is in the bucket");
        assert!(object(&fixture.bucket, "f").await == pattern(1, 0..100 * KIB));
        assert_eq!(volume.staged().files, 0);
        volume.close().await.expect("close");
    });
}

/// Promise S62: Where another host takes the volume over meanwhile, it is lost, too, every further call fails with EBUSY,
/// and what the other host has stays as it is.
#[test]
fn a_host_that_lost_the_volume_while_the_store_was_away_is_told() {
    run(async {
        let (fixture, faults, volume) = over_a_store_that_goes_away(LATER).await;
        write(&volume, "unsynced", pattern(1, 0..100 * KIB)).await;
        let open = create(&volume, "open").await;
        open.write(0, pattern(3, 0..100 * KIB)).await.expect("write");
        // Both hosts reach the store again, and the other one has the volume by now.
        faults.set_down(false);
        let other = Fixture { tree_in_bucket: true, ..Fixture::new(fixture.bucket.clone()) };
        let theirs = other.open().await;
        write(&theirs, "theirs", pattern(2, 0..100 * KIB)).await;
        theirs.sync_names().await.expect("synced");
        fixture.lapsed.store(false, SeqCst);
        let told = volume.sync_names().await.expect_err("it is another host's");
        assert_eq!(told.kind(), ErrorKind::Conflict, "{told}");
        let told = volume.lookup(InodeId::ROOT, b"unsynced").await.expect_err("it is another host's");
        assert_eq!(told.kind(), ErrorKind::Conflict, "{told}");
        assert!(volume.staged().bytes >= 100 * KIB, "the bytes stay on the disk: {:?}", volume.staged());
        open.flush().await.expect_err("it is another host's");
        open.release().await.expect_err("it is another host's");
        let ended = tokio::time::timeout(Duration::from_secs(30), volume.drain(|_| {})).await;
        assert_eq!(ended.expect("it ends by itself").expect_err("lost").kind(), ErrorKind::Conflict);
        assert!(volume.close().await.is_err());
        assert!(resolve(&**theirs.tree(), "unsynced").await.is_err());
        assert!(resolve(&**theirs.tree(), "before").await.is_ok());
        assert!(read(&theirs, "theirs").await == pattern(2, 0..100 * KIB));
        theirs.close().await.expect("close");
    });
}

/// Promise S62: What was closed and not synced is lost where the mount dies before the store is back.
///
/// What was synced is all there, and no file is there in part.
#[test]
fn a_host_that_dies_while_the_store_is_away_keeps_what_was_synced() {
    let first = tokio::runtime::Runtime::new().expect("a runtime");
    let (fixture, faults, volume) = first.block_on(async {
        let (fixture, faults, volume) = over_a_store_that_goes_away(LATER).await;
        for number in 0..5 {
            write(&volume, &format!("f{number}"), pattern(number, 0..100 * KIB)).await;
        }
        (fixture, faults, volume)
    });
    // As kill -9: no task goes on, nothing is closed, and the folder's lock goes with the process.
    first.shutdown_background();
    volume.staging().expect("it writes back").close();
    run(async {
        faults.set_down(false);
        fixture.lapsed.store(false, SeqCst);
        let next = fixture.open().await;
        assert!(read(&next, "before").await == pattern(99, 0..100 * KIB));
        for number in 0..5 {
            let found = resolve(&**next.tree(), &format!("f{number}")).await;
            assert_eq!(found.expect_err("it never was durable").kind(), ErrorKind::NotFound);
        }
        drain(&next).await;
        assert!(object(&fixture.bucket, "before").await == pattern(99, 0..100 * KIB));
        assert_eq!(owned(&fixture.bucket).await, 0);
        next.close().await.expect("close");
    });
}

/// What is written through while another host may have the volume is not put at a path that is that host's by now.
#[test]
fn a_host_that_may_have_lost_the_volume_puts_nothing_at_a_path() {
    run(async {
        let settings = WritebackSettings { bytes: KIB, ..LATER };
        let (fixture, faults, volume) = over_a_store_that_goes_away(settings).await;
        faults.set_down(false);
        let other = Fixture { tree_in_bucket: true, ..Fixture::new(fixture.bucket.clone()) };
        let theirs = other.open().await;
        let file = create(&volume, "through").await;
        file.write(0, pattern(1, 0..100 * KIB)).await.expect("it is in memory");
        file.flush().await.expect_err("it may be another host's");
        let found = fixture.bucket.head(&ObjectKey::new("through")).await.expect("the store is there");
        assert!(found.is_none(), "{found:?}");
        drop(file.release().await);
        drop(volume.close().await);
        theirs.close().await.expect("close");
    });
}

/// Past the ceiling what cannot be brought into the bucket is told while the store is away; what was taken before stays
/// taken.
#[test]
fn past_the_ceiling_a_store_that_is_away_is_told() {
    run(async {
        let settings = WritebackSettings { bytes: MIB, ..LATER };
        let (fixture, faults, volume) = over_a_store_that_goes_away(settings).await;
        for number in 0..4 {
            write(&volume, &format!("f{number}"), pattern(number, 0..200 * KIB)).await;
        }
        let file = create(&volume, "large").await;
        file.write(0, pattern(9, 0..900 * KIB)).await.expect("it is in memory");
        let told = file.flush().await.expect_err("there is no room, and no store");
        assert_eq!(told.kind(), ErrorKind::Unavailable, "{told}");
        assert_eq!(file.release().await.expect_err("as long as it is away").kind(), ErrorKind::Unavailable);
        assert!(read(&volume, "f3").await == pattern(3, 0..200 * KIB));
        comes_back(&fixture, &faults, &volume).await;
        drain(&volume).await;
        for number in 0..4 {
            let found = object(&fixture.bucket, &format!("f{number}")).await;
            assert!(found == pattern(number, 0..200 * KIB), "f{number}");
        }
        write(&volume, "large", pattern(9, 0..900 * KIB)).await;
        drain(&volume).await;
        assert!(object(&fixture.bucket, "large").await == pattern(9, 0..900 * KIB));
        volume.close().await.expect("close");
    });
}
