//! Two who want one volume, over a bucket in memory and over a directory. Time is paused: leases run out at once.

use std::time::Duration;

use bytes::Bytes;
use forebay_core::{ErrorKind, ObjectKey, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition, Delay, Faults, StoreSettings};
use tokio::time::Instant;

use super::{Access, Claim, EngineKind, LeaseSettings, LeaseState, VolumeFile, VolumeRecord};
use crate::testing::{Chance, fill, rounds};

const LEASE: Duration = Duration::from_secs(15);

async fn open(bucket: &Bucket, clock: &Clock, take_over: bool) -> Result<Claim> {
    open_for(bucket, clock, Access::ReadWrite, take_over).await
}

async fn open_for(bucket: &Bucket, clock: &Clock, access: Access, take_over: bool) -> Result<Claim> {
    let settings = LeaseSettings { duration: LEASE, address: None };
    let file = VolumeFile::of(bucket, EngineKind::SlateDb).with_settings(settings).with_clock(clock.clone());
    file.open_or_create(access, take_over).await
}

/// A clock that follows tokio's paused one, which moves whenever everyone waits for it.
fn clock() -> Clock {
    let (clock, step) = (Clock::manual(), Duration::from_millis(50));
    tokio::spawn({
        let clock = clock.clone();
        async move {
            loop {
                tokio::time::sleep(step).await;
                clock.advance(step);
            }
        }
    });
    clock
}

async fn directory() -> (tempfile::TempDir, Bucket) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let url = format!("file://{}", directory.path().display()).parse().expect("url");
    let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
    (directory, bucket)
}

fn record(claim: &Claim) -> &VolumeRecord {
    claim.record().expect("a read-write claim has one")
}

async fn stored(bucket: &Bucket) -> VolumeRecord {
    let (text, _) = bucket.get_whole(&ObjectKey::new(VolumeRecord::KEY)).await.expect("get");
    VolumeRecord::decode(&text).expect("record")
}

#[tokio::test(start_paused = true)]
async fn a_released_volume_is_had_at_once_and_stays_the_same() {
    let clock = clock();
    let memory = Bucket::in_memory();
    let (_keep, on_disk) = directory().await;
    for bucket in [memory, on_disk] {
        let begun = Instant::now();
        let first = open(&bucket, &clock, false).await.expect("first");
        assert_eq!(first.access(), Access::ReadWrite);
        let (volume, epoch) = (record(&first).volume, record(&first).epoch);
        first.check().expect("held");
        first.release().await.expect("release");
        assert_eq!(stored(&bucket).await.lease, None);
        let second = open(&bucket, &clock, false).await.expect("second");
        assert_eq!(record(&second).volume, volume);
        assert_eq!(record(&second).epoch, epoch + 1);
        second.release().await.expect("release");
        assert!(begun.elapsed() < LEASE, "nobody waited");
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_writer_is_refused_and_told_who_holds_the_volume() {
    let clock = clock();
    let memory = Bucket::in_memory();
    let (_keep, on_disk) = directory().await;
    for bucket in [memory, on_disk] {
        let first = open(&bucket, &clock, false).await.expect("first");
        let error = open(&bucket, &clock, false).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Conflict);
        let holder = &record(&first).lease.as_ref().expect("a lease").holder;
        assert!(error.message().contains(holder), "{error}");
        assert!(holder.contains(&format!("-{}-", std::process::id())), "{holder}");
        assert!(error.hint().is_some());
        first.check().expect("still held");
        let reader = open_for(&bucket, &clock, Access::ReadOnly, false).await.expect("readers are welcome");
        assert_eq!(reader.record().map(|record| record.volume), Some(record(&first).volume));
        reader.check().expect("a reader needs no lease");
        first.release().await.expect("release");
    }
}

/// `umount` returns before the mount's process has closed the volume.
#[tokio::test(start_paused = true)]
async fn a_volume_that_is_being_closed_is_waited_for() {
    let clock = clock();
    let memory = Bucket::in_memory();
    let (_keep, on_disk) = directory().await;
    for bucket in [memory, on_disk] {
        let first = open(&bucket, &clock, false).await.expect("first");
        first.say_ending().await;
        let error = open(&bucket, &clock, false).await.expect_err("refused, after a minute");
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(
            error.hint().is_some_and(|hint| hint.contains("wait until its process has ended")),
            "{error:?}"
        );

        let begun = clock.now();
        let next = tokio::spawn({
            let (bucket, clock) = (bucket.clone(), clock.clone());
            async move { open(&bucket, &clock, false).await }
        });
        clock.sleep(Duration::from_secs(30)).await;
        assert!(!next.is_finished());
        let holder = record(&first).lease.as_ref().expect("a lease").holder.clone();
        first.release().await.expect("release");
        let second = next.await.expect("no panic").expect("it waited");
        assert!(clock.now() >= begun + Duration::from_secs(30));
        let lease = stored(&bucket).await.lease.expect("a lease");
        assert!(lease.holder != holder && !lease.ending, "{lease:?}");
        second.release().await.expect("release");
    }
}

/// One that died in the middle of that is waited for as any that died.
#[tokio::test(start_paused = true)]
async fn who_dies_while_it_closes_a_volume_is_waited_for_one_lease() {
    let (clock, bucket) = (clock(), Bucket::in_memory());
    let first = open(&bucket, &clock, false).await.expect("first");
    first.say_ending().await;
    tokio::time::sleep(LEASE).await;
    assert!(stored(&bucket).await.lease.is_some_and(|lease| lease.ending));
    drop(first);
    let begun = Instant::now();
    open(&bucket, &clock, false).await.expect("after the lease").check().expect("held");
    assert!(begun.elapsed() > LEASE && begun.elapsed() < LEASE * 2, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_reader_writes_nothing() {
    let clock = clock();
    let bucket = Bucket::in_memory();
    let reader = open_for(&bucket, &clock, Access::ReadOnly, false).await.expect("open");
    assert_eq!((reader.record(), reader.access()), (None, Access::ReadOnly));
    reader.release().await.expect("release");
    assert_eq!(bucket.head(&ObjectKey::new(VolumeRecord::KEY)).await.expect("head"), None);
}

#[tokio::test(start_paused = true)]
async fn a_dead_holder_is_waited_for_one_lease() {
    let clock = clock();
    let bucket = Bucket::in_memory();
    let first = open(&bucket, &clock, false).await.expect("first");
    tokio::time::sleep(LEASE * 10).await;
    first.check().expect("it renews");
    assert!(stored(&bucket).await.lease.expect("a lease").renewed >= 20);
    // As a crash does: no release.
    drop(first);
    let begun = Instant::now();
    let second = open(&bucket, &clock, false).await.expect("after the lease");
    assert!(begun.elapsed() > LEASE && begun.elapsed() < LEASE * 2, "{:?}", begun.elapsed());
    second.check().expect("held");
}

#[tokio::test(start_paused = true)]
async fn taking_over_stops_the_one_before_for_good() {
    let clock = clock();
    let bucket = Bucket::in_memory();
    let first = open(&bucket, &clock, false).await.expect("first");
    let mut watch = first.watch();
    let begun = Instant::now();
    let second = open(&bucket, &clock, true).await.expect("taken over");
    assert!(begun.elapsed() < LEASE / 10, "at once");
    watch.wait_for(|state| *state == LeaseState::Lost).await.expect("it learns of it");
    assert!(begun.elapsed() < LEASE, "by its next renewal");
    let error = first.check().expect_err("lost");
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.hint().is_some());
    tokio::time::sleep(LEASE * 3).await;
    assert_eq!(first.check().expect_err("lost").kind(), ErrorKind::Conflict);
    second.check().expect("held");
    first.release().await.expect("there is nothing to release");
    assert!(stored(&bucket).await.lease.is_some(), "the second one's lease stays");
    second.release().await.expect("release");
}

#[tokio::test(start_paused = true)]
async fn a_silent_bucket_lapses_the_lease_and_an_answering_one_restores_it() {
    let (clock, faults, memory) = (clock(), Faults::new(), Bucket::in_memory());
    let bucket = memory.with_faults(&faults);
    let claim = open(&bucket, &clock, false).await.expect("open");
    let mut watch = claim.watch();
    faults.set_down(true);
    watch.wait_for(|state| *state == LeaseState::Lapsed).await.expect("lapsed");
    let lapsed = claim.check().expect_err("lapsed");
    assert_eq!(lapsed.kind(), ErrorKind::Unavailable);
    assert!(lapsed.hint().expect("a hint").contains("can be reached"), "{lapsed}");
    faults.set_down(false);
    watch.wait_for(|state| *state == LeaseState::Held).await.expect("held again");
    claim.check().expect("nobody took it meanwhile");
    // Silent again, and this time another takes it.
    faults.set_down(true);
    let other = open(&memory, &clock, false).await.expect("the counter stood still");
    assert_eq!(claim.check().expect_err("lapsed").kind(), ErrorKind::Unavailable);
    faults.set_down(false);
    watch.wait_for(|state| *state == LeaseState::Lost).await.expect("lost");
    other.check().expect("held");
}

/// For a second after a store had come back changes were refused, with the word that it is away.
#[tokio::test(start_paused = true)]
async fn who_finds_a_lapsed_lease_waits_for_one_renewal() {
    let (clock, faults, memory) = (clock(), Faults::new(), Bucket::in_memory());
    let bucket = memory.with_faults(&faults);
    let claim = open(&bucket, &clock, false).await.expect("open");
    let mut watch = claim.watch();
    let begun = Instant::now();
    claim.regain().await.expect("held");
    assert_eq!(begun.elapsed(), Duration::ZERO, "nothing is waited for");
    faults.set_down(true);
    watch.wait_for(|state| *state == LeaseState::Lapsed).await.expect("lapsed");
    assert_eq!(claim.regain().await.expect_err("it was tried").kind(), ErrorKind::Unavailable);
    faults.set_down(false);
    let begun = Instant::now();
    let (one, other) = tokio::join!(claim.regain(), claim.regain());
    one.and(other).expect("the store is back");
    assert!(begun.elapsed() < LEASE / 20, "before the next try would have been: {:?}", begun.elapsed());
    // Who waits keeps nobody from giving it back.
    faults.set_down(true);
    watch.mark_unchanged();
    watch.wait_for(|state| *state == LeaseState::Lapsed).await.expect("lapsed");
    let waiting = claim.regain();
    drop(claim);
    assert_eq!(waiting.await.expect_err("given back").kind(), ErrorKind::Unavailable);
    // Lost for good, that is told at once.
    faults.set_down(false);
    let claim = open(&bucket, &clock, false).await.expect("open");
    let other = open(&memory, &clock, true).await.expect("taken over");
    claim.watch().wait_for(|state| *state == LeaseState::Lost).await.expect("lost");
    assert_eq!(claim.regain().await.expect_err("lost").kind(), ErrorKind::Conflict);
    other.check().expect("held");
}

/// Under load the renewals stood at the end of the queue for the store, longer than a lease, and the volume was lost while
/// the store was well.
#[tokio::test(start_paused = true)]
async fn a_full_queue_costs_no_lease() {
    let (clock, bucket) = (clock(), Bucket::in_memory());
    let claim = open(&bucket, &clock, false).await.expect("open");
    let mut watch = claim.watch();
    watch.mark_unchanged();
    let _busy = fill(&bucket).await;
    tokio::time::sleep(LEASE * 10).await;
    claim.check().expect("it renews");
    assert!(!watch.has_changed().expect("it goes on"), "it never lapsed");
    claim.release().await.expect("release");
    // Nor does it keep who mounts it again.
    open(&bucket, &clock, false).await.expect("open again").release().await.expect("release");
}

#[tokio::test(start_paused = true)]
async fn lost_answers_do_not_lose_the_lease() {
    let clock = clock();
    for _ in 0..rounds(5) {
        let faults = Faults::random(Chance::fresh().next(), 0.3);
        let bucket =
            Bucket::in_memory().with_faults(&faults).with_delay(Delay { request_us: 5_000, mib_us: 0 });
        let claim = loop {
            // A put whose answer is lost may leave a lease behind that nobody renews.
            match open(&bucket, &clock, false).await {
                Ok(claim) => break claim,
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
            }
        };
        for _ in 0..100 {
            tokio::time::sleep(LEASE / 3).await;
            assert_ne!(*claim.watch().borrow(), LeaseState::Lost);
        }
        faults.clear();
        tokio::time::sleep(LEASE).await;
        claim.check().expect("held");
        claim.release().await.expect("release");
        assert_eq!(stored(&bucket).await.lease, None);
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_that_race_one_holds_the_volume() {
    let clock = clock();
    let mut chance = Chance::fresh();
    for round in 0..rounds(100) {
        let bucket = Bucket::in_memory();
        if round % 3 == 0 {
            // A volume that a dead holder left.
            drop(open(&bucket, &clock, false).await.expect("open"));
        }
        let mut slow = || bucket.with_delay(Delay { request_us: chance.below(50_000), mib_us: 0 });
        let (one, other) = (slow(), slow());
        let (first, second) = tokio::join!(open(&one, &clock, false), open(&other, &clock, false));
        let held: Vec<_> =
            [&first, &second].into_iter().flatten().filter(|claim| claim.check().is_ok()).collect();
        assert_eq!(held.len(), 1, "round {round}: {first:?} {second:?}");
        let refused = first.as_ref().err().or(second.as_ref().err()).expect("one is refused");
        assert_eq!(refused.kind(), ErrorKind::Conflict, "round {round}: {refused}");
    }
    for round in 0..rounds(100) {
        let (_keep, bucket) = directory().await;
        let (first, second) = tokio::join!(open(&bucket, &clock, false), open(&bucket, &clock, false));
        assert_eq!([&first, &second].into_iter().flatten().count(), 1, "round {round}: {first:?} {second:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_damaged_record_is_corrupt_and_left_alone() {
    let clock = clock();
    let bucket = Bucket::in_memory();
    let key = ObjectKey::new(VolumeRecord::KEY);
    let garbage = Bytes::from_static(b"{\"format\": 1, \"volume\": ");
    bucket.put(&key, garbage.clone(), Condition::Always).await.expect("put");
    for take_over in [false, true] {
        let error = open(&bucket, &clock, take_over).await.expect_err("refused");
        assert_eq!((error.kind(), error.hint().is_some()), (ErrorKind::Corrupt, true));
    }
    assert_eq!(bucket.get_whole(&key).await.expect("get").0, garbage);

    let (scratch, bucket) = directory().await;
    let path = scratch.path().join(VolumeRecord::KEY);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    std::fs::File::create(path).and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
    let error = open(&bucket, &clock, false).await.expect_err("of no such length");
    assert_eq!((error.kind(), error.hint().is_some()), (ErrorKind::Corrupt, true), "{error}");
}
