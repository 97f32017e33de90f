//! The moment of the commit: what is told of a step is what the bucket has, whatever else fails there.

use forebay_io::net::FdStream;
use forebay_io::object::{Condition, FaultMode, Faults, OperationKind};

use super::alive_tests::while_time_passes;
use super::delta_tests::expect_whole;
use super::tests::{flusher, sealed, start, trainer};
use super::*;
use crate::agent::Member;

/// Who saves: one alone, or the agent of one of two ranks.
fn agent(bucket: &Bucket, run: &Run, rank: Option<u32>, clock: &Clock) -> (Flusher, FdStream) {
    let (trainer, hears) = trainer();
    let mut agent = flusher(bucket, run, trainer);
    (agent.clock, agent.hello.start) = (clock.clone(), run.start.clone());
    agent.hello.member = rank.map(|rank| Member { run: run.clone(), rank, world_size: 2 });
    (agent, hears)
}

/// A commit was refused, what is there could not be read, and so its shard was deleted: that of the step which another
/// agent of the same save had committed.
#[tokio::test]
async fn a_refusal_that_cannot_be_looked_into_deletes_nothing() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    agent(&plain, &run, None, &clock).0.flush(&sealed(1, 1000)).await.expect("durable");
    let (mut again, _hears) = agent(&plain.with_faults(&faults), &run, None, &clock);
    // The first is whether another start took over.
    faults.script(OperationKind::Get, 2, FaultMode::Deny);
    let save = sealed(1, 1000);
    let flushed = while_time_passes(&clock, again.flush(&save)).await;
    assert_eq!(faults.injected(), 1);
    expect_whole(&plain).await;
    flushed.expect("it is what the bucket has");
}

/// What cannot be read tells nothing of whose it is.
#[tokio::test]
async fn a_damaged_manifest_in_a_steps_place_deletes_nothing() {
    let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
    let run = begin_run(&bucket, start()).await.expect("run");
    let (mut alone, _hears) = agent(&bucket, &run, None, &clock);
    alone.flush(&sealed(1, 1000)).await.expect("durable");
    let key = run.save(1).object();
    let whole = bucket.get_whole(&key).await.expect("the manifest").0;
    bucket.put(&key, whole.slice(..whole.len() / 2), Condition::Always).await.expect("put");
    let error = alone.flush(&sealed(1, 1000)).await.expect_err("damaged");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    bucket.put(&key, whole, Condition::Always).await.expect("put");
    expect_whole(&bucket).await;
}
