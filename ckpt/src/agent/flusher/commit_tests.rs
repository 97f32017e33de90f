//! The moment of the commit: what is told of a step is what the bucket has, whatever else fails there.

use forebay_io::net::FdStream;
use forebay_io::object::{Condition, FaultMode, Faults, OperationKind};

use super::alive_tests::{age, while_time_passes};
use super::delta_tests::{expect_whole, objects, state};
use super::rounds_tests::part;
use super::tests::{flusher, naming, sealed, start, trainer};
use super::*;
use crate::agent::Member;
use crate::catalog::{LEAST_AGE, Start, collect_garbage, list_ranks, list_steps};

/// Who saves: one alone, or the agent of one of two ranks.
fn agent(bucket: &Bucket, run: &Run, rank: Option<u32>, clock: &Clock) -> (Flusher, FdStream) {
    let (trainer, hears) = trainer();
    let mut agent = flusher(bucket, run, trainer);
    (agent.clock, agent.hello.start) = (clock.clone(), run.start.clone());
    agent.hello.member = rank.map(|rank| Member { run: run.clone(), rank, world_size: 2 });
    (agent, hears)
}

/// What the trainer was warned of since it last looked.
pub(super) fn warnings(hears: &mut FdStream) -> Vec<String> {
    let mut warnings = Vec::new();
    while hears.readable(Duration::ZERO).expect("readable") {
        let (frame, _) = hears.receive().expect("receive").expect("a frame");
        if let Ok(Reply::Warning { message }) = serde_json::from_slice(&frame) {
            warnings.push(message);
        }
    }
    warnings
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

/// A store that lets nothing be deleted, or fails then: the step was committed, and told as failed.
#[tokio::test]
async fn a_committed_step_whose_notes_stay_is_durable() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let (mut alone, mut hears) = agent(&plain.with_faults(&faults), &run, None, &clock);
    let mut fills = [1; 100];
    for step in 1..=5 {
        fills[step as usize] = 2;
        if (2..=4).contains(&step) {
            faults.script(OperationKind::Delete, 1, FaultMode::Deny);
        }
        alone.flush(&state(step, &fills)).await.unwrap_or_else(|error| panic!("step {step}: {error}"));
        let warnings = warnings(&mut hears);
        assert_eq!(warnings.len(), usize::from(step == 2), "once: {warnings:?}");
        assert!(warnings.iter().all(|told| told.contains("step 2 is saved")), "{warnings:?}");
        let left = list_ranks(&plain).await.expect("list").len() as u64;
        assert_eq!(left, if step < 5 { step - 1 } else { 0 }, "the next deletion takes what was left");
    }
    assert_eq!(faults.injected(), 3);
    expect_whole(&plain).await;
}

/// The rank that had committed it raised, and the others went on.
#[tokio::test]
async fn a_step_of_two_ranks_whose_notes_stay_is_durable() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let bucket = plain.with_faults(&faults);
    let mut ranks = [0, 1].map(|rank| agent(&bucket, &run, Some(rank), &clock));
    for step in 1..=2 {
        if step == 1 {
            faults.script(OperationKind::Delete, 1, FaultMode::Deny);
        }
        let parts = [part(0, step, 1000), part(1, step, 2000)];
        let [(first, _), (second, _)] = &mut ranks;
        let both = async { tokio::join!(first.flush(&parts[0]), second.flush(&parts[1])) };
        let (one, other) = while_time_passes(&clock, both).await;
        one.and(other).unwrap_or_else(|error| panic!("step {step}: {error}"));
        let left = list_ranks(&plain).await.expect("list").len();
        assert_eq!(left, if step == 1 { 2 } else { 0 });
    }
    let told: Vec<_> = ranks.iter_mut().flat_map(|(_, hears)| warnings(hears)).collect();
    assert!(told.len() == 1 && told[0].contains("step 1 is saved"), "{told:?}");
    expect_whole(&plain).await;
}

fn later() -> Start {
    Start { nonce: "fedcba9876543210".repeat(2), ..start() }
}

/// Whether it may was asked when an upload began: hours later, a job that was thought dead committed its step over those of
/// the start that had taken over.
#[tokio::test]
async fn a_start_that_is_superseded_while_it_uploads_commits_nothing() {
    for is_gone in [false, true] {
        let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
        let run = begin_run(&plain, start()).await.expect("run");
        let bucket = plain.with_faults(&faults);
        let (mut alone, _hears) = agent(&bucket, &run, None, &clock);
        // Two requests ask, one begins the upload, three send it, and this one has it be there.
        let (save, gate, trainer) = (sealed(1, 20 << 20), faults.gate(7), alone.trainer.clone());
        let takes_over = async {
            gate.reached().await;
            let sent = bucket.counters().of(OperationKind::Part).requests;
            assert_eq!((sent, objects(&plain, "shards").await.len()), (3, 0));
            begin_run(&plain, later()).await.expect("another");
            clock.advance(Duration::from_secs(3600));
            if is_gone {
                trainer.set_gone();
            }
            gate.open();
        };
        let (flushed, ()) = tokio::join!(alone.flush(&save), takes_over);
        // What a dead trainer sealed was promised.
        assert_eq!(list_steps(&plain).await.expect("list").len(), usize::from(is_gone));
        assert_eq!(objects(&plain, "shards").await.len(), usize::from(is_gone), "nor is its shard left");
        match flushed {
            Ok(_) => assert!(is_gone),
            Err(error) => assert!(!is_gone && error.kind() == ErrorKind::Stale, "{error}"),
        }
    }
}

/// Ranks may wait for one another for hours.
#[tokio::test]
async fn ranks_that_are_superseded_while_they_wait_commit_nothing() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let (mut first, _hears) = agent(&plain, &run, Some(0), &clock);
    let (save, other) = (part(0, 1, 1000), part(1, 1, 2000));
    {
        let waits = first.flush(&save);
        let told = async {
            while objects(&plain, "ranks").await.is_empty() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! { done = waits => panic!("{done:?}"), () = told => {} }
    }
    // Two requests ask, one stores the shard, one looks for the step, and this one tells of the part.
    let (mut second, _hears) = agent(&plain.with_faults(&faults), &run, Some(1), &clock);
    let gate = faults.gate(5);
    let takes_over = async {
        gate.reached().await;
        assert_eq!((objects(&plain, "shards").await.len(), objects(&plain, "ranks").await.len()), (2, 1));
        begin_run(&plain, later()).await.expect("another");
        clock.advance(Duration::from_secs(3600));
        gate.open();
    };
    let (flushed, ()) = tokio::join!(second.flush(&other), takes_over);
    assert_eq!(list_steps(&plain).await.expect("list"), []);
    assert_eq!(flushed.expect_err("superseded").kind(), ErrorKind::Stale);
}

/// Over a link each request takes as long as the answer to it is away.
#[tokio::test]
async fn a_save_that_takes_seconds_asks_once_whether_it_may() {
    let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
    let run = begin_run(&bucket, start()).await.expect("run");
    let before = bucket.counters();
    agent(&bucket, &run, None, &clock).0.flush(&sealed(1, 1000)).await.expect("durable");
    let made = bucket.counters().since(&before);
    let requests = [OperationKind::List, OperationKind::Get, OperationKind::Head, OperationKind::Put]
        .map(|kind| made.of(kind).requests);
    assert_eq!(requests, [1, 1, 0, 2], "whether it may, the shard, and the manifest");
}

async fn folder(directory: &std::path::Path) -> Bucket {
    let url = format!("file://{}", directory.display()).parse().expect("url");
    Bucket::open(&url, &StoreSettings::default()).await.expect("bucket")
}

/// As a host does that is suspended: whatever it held back for hours is garbage to others.
async fn hours_pass(bucket: &Bucket, directory: &std::path::Path, clock: &Clock) {
    age(directory);
    let found = collect_garbage(bucket, LEAST_AGE, false).await.expect("gc");
    assert!(!found.shards.is_empty());
    clock.advance(Duration::from_secs(7200));
}

/// A host that was suspended between the tries of a commit made a step of what had been collected meanwhile.
#[tokio::test]
async fn a_step_whose_shard_was_collected_before_its_commit_is_refused() {
    let (directory, faults, clock) =
        (tempfile::tempdir().expect("directory"), Faults::new(), Clock::manual());
    let plain = folder(directory.path()).await;
    let run = begin_run(&plain, start()).await.expect("run");
    let bucket = plain.with_faults(&faults).with_deadline_ms(20);
    let (mut alone, mut hears) = agent(&bucket, &run, None, &clock);
    for is_collected in [false, true] {
        let step = 1 + u64::from(is_collected);
        // The shard's is the first. Its commit fails for longer than a request is tried again.
        for nth in 2..=30 {
            faults.script(OperationKind::Put, nth, FaultMode::Before);
        }
        let save = sealed(step, 1000);
        let flush = alone.flush(&save);
        tokio::pin!(flush);
        let failed = async {
            while !warnings(&mut hears).iter().any(|told| told.contains("trying again")) {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! { done = &mut flush => panic!("{done:?}"), () = failed => {} }
        faults.clear();
        match is_collected {
            true => hours_pass(&plain, directory.path(), &clock).await,
            false => clock.advance(Duration::from_secs(7200)),
        }
        let flushed = while_time_passes(&clock, flush).await;
        expect_whole(&plain).await;
        match flushed {
            Ok(_) => assert!(!is_collected),
            Err(error) => assert!(is_collected && error.message().contains("was deleted before"), "{error}"),
        }
        assert_eq!(list_steps(&plain).await.expect("list").len(), 1);
    }
}

/// A rank told the others of a part that had been collected since, and the step was committed without it.
#[tokio::test]
async fn a_part_that_was_collected_before_it_was_told_is_stored_again() {
    let (directory, faults, clock) =
        (tempfile::tempdir().expect("directory"), Faults::new(), Clock::manual());
    let plain = folder(directory.path()).await;
    let run = begin_run(&plain, start()).await.expect("run");
    let bucket = plain.with_faults(&faults).with_deadline_ms(20);
    let (mut first, mut hears) = agent(&bucket, &run, Some(0), &clock);
    let (mut second, _hears) = agent(&plain, &run, Some(1), &clock);
    // Whether the step is there is looked for before the part is told.
    for nth in 1..=30 {
        faults.script(OperationKind::Head, nth, FaultMode::Before);
    }
    let (save, other) = (part(0, 1, 1000), part(1, 1, 2000));
    let flush = first.flush(&save);
    tokio::pin!(flush);
    let failed = async {
        while !warnings(&mut hears).iter().any(|told| told.contains("trying again")) {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! { done = &mut flush => panic!("{done:?}"), () = failed => {} }
    faults.clear();
    hours_pass(&plain, directory.path(), &clock).await;
    let both = async { tokio::join!(flush, second.flush(&other)) };
    let (one, other) = while_time_passes(&clock, both).await;
    expect_whole(&plain).await;
    one.and(other).expect("durable");
    assert_eq!(objects(&plain, "shards").await.len(), 2);
}

/// All of it was uploaded first, at every save, and stayed there.
#[tokio::test]
async fn a_step_that_is_refused_for_its_trees_leaves_nothing() {
    let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
    let run = begin_run(&bucket, start()).await.expect("run");
    let (mut alone, _hears) = agent(&bucket, &run, None, &clock);
    alone.flush(&state(1, &[1; 20])).await.expect("durable");
    let before = objects(&bucket, "").await;
    for step in 2..=3 {
        let error = alone.flush(&naming(state(step, &[1; 20]), "state", "lost")).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert_eq!(objects(&bucket, "").await, before);
    }
    alone.flush(&state(4, &[1; 20])).await.expect("durable");
    expect_whole(&bucket).await;
}

/// So did one of several ranks, of indexes that it had read before.
#[tokio::test]
async fn a_step_whose_indexes_were_collected_before_its_commit_is_refused() {
    let (directory, faults, clock) =
        (tempfile::tempdir().expect("directory"), Faults::new(), Clock::manual());
    let plain = folder(directory.path()).await;
    let run = begin_run(&plain, start()).await.expect("run");
    let (mut first, _hears) = agent(&plain, &run, Some(0), &clock);
    let (save, other) = (part(0, 1, 1000), part(1, 1, 2000));
    {
        let waits = first.flush(&save);
        let told = async {
            while list_ranks(&plain).await.expect("list").is_empty() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! { done = waits => panic!("{done:?}"), () = told => {} }
    }
    let bucket = plain.with_faults(&faults);
    let (mut second, _hears) = agent(&bucket, &run, Some(1), &clock);
    // Whether it may, its shard, a look for the step, its index, two looks, both indexes; and all notes.
    let gate = faults.gate(10);
    let flush = second.flush(&other);
    tokio::pin!(flush);
    tokio::select! { done = &mut flush => panic!("{done:?}"), () = gate.reached() => {} }
    assert_eq!(list_ranks(&plain).await.expect("list").len(), 2);
    // The first one asked whether it may, and so did this one.
    assert_eq!(bucket.counters().of(OperationKind::Get).requests, 4, "both indexes were read");
    hours_pass(&plain, directory.path(), &clock).await;
    gate.open();
    let flushed = while_time_passes(&clock, flush).await;
    expect_whole(&plain).await;
    assert_eq!(list_steps(&plain).await.expect("list"), []);
    assert!(flushed.expect_err("refused").message().contains("ranks [0, 1] did not store"));
}
