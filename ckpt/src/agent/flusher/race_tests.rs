//! Two jobs that were started on one bucket and save one step: one of them counts, and the other one is told.

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

/// One of two jobs: it takes its incarnation and saves step 5.
async fn job(bucket: &Bucket, number: u8, size: usize) -> (Run, Flusher, Result<u64>, FdStream) {
    let nonce = format!("{number:02x}").repeat(16);
    let start = Start { nonce, host: "host".into(), pid: u32::from(number), started_ms: 0 };
    let run = begin_run(bucket, start).await.expect("an incarnation");
    let (trainer, listener) = trainer();
    let mut agent = flusher(bucket, &run, trainer);
    let saved = agent.flush(&sealed(5, size)).await;
    (run, agent, saved, listener)
}

async fn race(seed: u64) {
    let rng = chance(seed);
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
            gates[index].open();
        }
    };
    let (one, other, ()) = join3(job(&buckets[0], 1, 1000), job(&buckets[1], 2, 2000), opener).await;
    let found = find_step(&bucket, StepName::from(5)).await.expect("one of them saved it");
    let commit = load_manifest(&bucket, &found.key).await.expect("its manifest").commit;
    let again = load_manifest(&bucket, &find_step(&bucket, StepName::from(5)).await.expect("still").key)
        .await
        .expect("again");
    assert_eq!(commit, again.commit);
    let steps = list_steps(&bucket).await.expect("list");
    assert_eq!(steps.iter().filter(|info| !info.superseded).count(), 1);
    for (run, mut agent, saved, _listener) in [one, other] {
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
    for seed in rounds(100) {
        race(seed).await;
    }
}
