//! Two jobs that were started on one bucket and save one step: one of them counts, and the other one is told.

use std::cell::Cell;

use forebay_io::net::FdStream;
use forebay_io::object::Faults;
use futures::future::join3;

use super::tests::{flusher, sealed, trainer};
use super::*;
use crate::catalog::{Start, StepName, find_step, list_steps, load_manifest};
use crate::testing::{chance, rounds};
use crate::verify::verify;

/// Requests after which a job may be held back: more than one save makes.
const MOMENTS: u64 = 14;

/// What one of two jobs did, and when, counted in what any of both did.
struct Job {
    run: Run,
    agent: Flusher,
    saved: Result<u64>,
    begun: u32,
    ended: u32,
    hears: FdStream,
}

impl Job {
    /// Whether its shard was in the store before it heard of the other one.
    fn was_told_at_the_commit(&mut self) -> bool {
        let mut is_stored = false;
        while self.hears.readable(Duration::ZERO).expect("readable") {
            let (frame, _) = self.hears.receive().expect("receive").expect("a frame");
            let reply = serde_json::from_slice(&frame);
            is_stored |= matches!(reply, Ok(Reply::Stored { .. }));
        }
        is_stored && self.saved.is_err()
    }
}

/// Of so many races: those in which both jobs saved at one time, and those whose loser learned of it at its commit.
#[derive(Default)]
struct Races {
    overlapped: u32,
    told_at_the_commit: u32,
}

/// One of two jobs: it takes its incarnation and saves step 5.
async fn job(bucket: &Bucket, number: u8, size: usize, clock: &Clock, events: &Cell<u32>) -> Job {
    let next = || events.replace(events.get() + 1);
    let nonce = format!("{number:02x}").repeat(16);
    let start = Start { nonce, host: "host".into(), pid: u32::from(number), started_ms: 0 };
    let run = begin_run(bucket, start).await.expect("an incarnation");
    let begun = next();
    let (trainer, hears) = trainer();
    let mut agent = flusher(bucket, &run, trainer);
    agent.clock = clock.clone();
    let saved = agent.flush(&sealed(5, size)).await;
    Job { run, agent, saved, begun, ended: next(), hears }
}

async fn race(seed: u64, races: &mut Races) {
    let (rng, clock, events) = (chance(seed), Clock::manual(), Cell::new(0));
    let bucket = Bucket::in_memory();
    let faults = [Faults::new(), Faults::new()];
    let gates = faults.each_ref().map(|faults| faults.gate(1 + rng.below(MOMENTS)));
    let buckets = faults.each_ref().map(|faults| bucket.with_faults(faults));
    let opener = async {
        let first = rng.below(2) as usize;
        for index in [first, 1 - first] {
            for _ in 0..rng.below(60) {
                tokio::task::yield_now().await;
            }
            // A job that was held back for long asks again before it commits.
            clock.advance(Duration::from_secs(10 * rng.below(2)));
            gates[index].open();
        }
    };
    let one = job(&buckets[0], 1, 1000, &clock, &events);
    let other = job(&buckets[1], 2, 2000, &clock, &events);
    let (one, other, ()) = join3(one, other, opener).await;
    races.overlapped += u32::from(one.begun.max(other.begun) < one.ended.min(other.ended));
    let found = find_step(&bucket, StepName::from(5)).await.expect("one of them saved it");
    let commit = load_manifest(&bucket, &found.key).await.expect("its manifest").commit;
    let again = load_manifest(&bucket, &find_step(&bucket, StepName::from(5)).await.expect("still").key)
        .await
        .expect("again");
    assert_eq!(commit, again.commit);
    let steps = list_steps(&bucket).await.expect("list");
    assert_eq!(steps.iter().filter(|info| !info.superseded).count(), 1);
    for mut job in [one, other] {
        races.told_at_the_commit += u32::from(job.was_told_at_the_commit());
        let Job { run, mut agent, saved, hears: _hears, .. } = job;
        let counts = run.attempt() == found.key.attempt;
        match saved {
            Ok(_) if counts => continue,
            // Nobody had started after it yet.
            Ok(_) => assert!(run.incarnation < found.key.incarnation, "a later start was not told"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Stale, "{error}"),
        }
        assert!(!counts, "it was told that it did not save what counts");
        let error = agent.flush(&sealed(6, 10)).await.expect_err("superseded");
        assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
        assert!(error.message().contains("took over"), "{error}");
    }
    assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
}

#[tokio::test]
async fn of_two_jobs_that_save_one_step_one_counts_and_the_other_is_told() {
    let (seeds, mut races) = (rounds(100), Races::default());
    for seed in &seeds {
        race(*seed, &mut races).await;
    }
    // One that is repeated alone is what it is.
    let Races { overlapped, told_at_the_commit } = races;
    let some = seeds.len() as u32 / 100;
    assert!(overlapped >= 10 * some, "both saved at one time in {overlapped} of {} races", seeds.len());
    assert!(told_at_the_commit >= some, "{told_at_the_commit} of {} were told at their commit", seeds.len());
}
