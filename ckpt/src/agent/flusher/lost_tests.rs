//! Shards that steps refer to and that somebody deleted, as a rule of the bucket by age does: the next save misses them.

use std::collections::HashMap;

use forebay_core::ObjectKey;
use forebay_io::net::FdStream;
use forebay_io::object::{Condition, Counters, FaultMode, Faults, OperationKind};
use futures::future::join_all;

use super::alive_tests::while_time_passes;
use super::commit_tests::warnings;
use super::delta_tests::{HEADER, SLICE, expect_content, expect_whole, manifest, objects, part_of, state};
use super::tests::{flusher, start, trainer};
use super::*;
use crate::agent::Member;
use crate::catalog::remove_steps;

const SLICES: usize = 40;
const WHOLE: u64 = (HEADER + SLICES * SLICE) as u64;

/// What a state holds at a step: each step changes one slice, and keeps what those before changed.
fn fills_at(step: u64) -> Vec<u8> {
    (0..SLICES as u64).map(|slice| if (2..=step).contains(&slice) { 100 + slice as u8 } else { 1 }).collect()
}

async fn save(agent: &mut Flusher, step: u64) -> u64 {
    agent.flush(&state(step, &fills_at(step))).await.expect("durable")
}

/// Whose clock stands still.
fn agent(bucket: &Bucket, run: &Run, clock: &Clock) -> (Flusher, FdStream) {
    let (trainer, hears) = trainer();
    let mut agent = flusher(bucket, run, trainer);
    agent.clock = clock.clone();
    (agent, hears)
}

async fn shard_of(bucket: &Bucket, step: u64) -> ObjectKey {
    manifest(bucket, step).await.shards[0].object()
}

/// Deletes what a step stored, or cuts it off.
async fn lose(bucket: &Bucket, step: u64, is_cut: bool) {
    let shard = shard_of(bucket, step).await;
    bucket.delete(&shard).await.expect("delete");
    if is_cut {
        bucket.put(&shard, "cut off".into(), Condition::Always).await.expect("put");
    }
}

/// Requests by kind: LIST, GET, HEAD, PUT.
fn requests(made: &Counters) -> [u64; 4] {
    use OperationKind::{Get, Head, List, Put};
    [List, Get, Head, Put].map(|kind| made.of(kind).requests)
}

/// That a warning names the shard, and what may have deleted it.
fn expect_told(warnings: &[String], shard: &ObjectKey, step: u64) {
    let [told] = warnings else { panic!("{warnings:?}") };
    let facts = [shard.as_str(), &format!("step {step} is stored whole"), "lifecycle rule"];
    assert!(facts.iter().all(|fact| told.contains(fact)) && !told.contains('\n'), "{told}");
}

/// Days of saves referred to a shard that was gone, and each was told to be durable.
#[tokio::test]
async fn a_shard_that_somebody_deleted_is_missed_by_the_next_save() {
    for is_cut in [false, true] {
        let bucket = Bucket::in_memory();
        let run = begin_run(&bucket, start()).await.expect("run");
        let (mut agent, mut hears) = agent(&bucket, &run, &Clock::manual());
        let (mut lost, mut shards) = (1, HashMap::new());
        for step in 1..=6 {
            let is_lost = step == 3 || step == 5;
            if is_lost {
                lose(&bucket, lost, is_cut).await;
            }
            let before = bucket.counters();
            let uploaded = save(&mut agent, step).await;
            let made = requests(&bucket.counters().since(&before));
            let told = warnings(&mut hears);
            if is_lost {
                assert_eq!(uploaded, WHOLE, "step {step}");
                expect_told(&told, &shards[&lost], step);
                assert_eq!(made[3], 4, "intent, what changed, all of it, and the manifest");
                lost = step;
            } else if step > 1 {
                assert_eq!((uploaded, told), ((HEADER + SLICE) as u64, vec![]), "step {step}");
            }
            shards.insert(step, shard_of(&bucket, step).await);
            expect_content(&bucket, step, &fills_at(step)).await;
        }
        remove_steps(&bucket, &[1, 2, 3, 4]).await.expect("remove");
        expect_whole(&bucket).await;
        assert_eq!(objects(&bucket, "shards").await.len(), 2, "nor is there more than the steps name");
        assert_eq!(objects(&bucket, "ranks").await, []);
    }
}

/// Once a shard, however many slices lie in it; what is not referred to costs nothing.
#[tokio::test]
async fn a_save_looks_once_for_each_shard_that_it_refers_to() {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    let (mut agent, _hears) = agent(&bucket, &run, &Clock::manual());
    let mut flush = async |step: u64, fills: &[u8]| {
        let before = bucket.counters();
        let uploaded = agent.flush(&state(step, fills)).await.expect("durable");
        (uploaded, requests(&bucket.counters().since(&before)))
    };
    assert_eq!(flush(1, &fills_at(1)).await, (WHOLE, [1, 1, 0, 2]), "a whole one refers to nothing");
    for step in 2..=20 {
        // Whether it may takes two requests; the base's manifest is looked for, and a shard of each step before.
        let expected = [1, 1, 1 + (step - 1), 3];
        assert_eq!(flush(step, &fills_at(step)).await, ((HEADER + SLICE) as u64, expected), "step {step}");
    }
    // What is frozen costs no bytes, and no more looks however many steps there are.
    assert_eq!(flush(21, &[7; SLICES]).await, (WHOLE, [1, 1, 0, 2]), "all of it changed");
    for step in 22..=40 {
        assert_eq!(flush(step, &[7; SLICES]).await, (HEADER as u64, [1, 1, 2, 3]), "step {step}");
    }
    expect_whole(&bucket).await;
}

/// The agents of two ranks, each of which has half of the tensor.
async fn save_both(agents: &mut [(Flusher, FdStream)], step: u64) -> Vec<u64> {
    let half = |rank: usize| rank * SLICES / 2..(rank + 1) * SLICES / 2;
    let parts: Vec<_> = (0..2).map(|rank| part_of("t", (step, step), &fills_at(step), half(rank))).collect();
    let flushes = agents.iter_mut().zip(&parts).map(|((agent, _), part)| agent.flush(part));
    join_all(flushes).await.into_iter().map(|flushed| flushed.expect("durable")).collect()
}

#[tokio::test]
async fn each_rank_looks_for_what_it_refers_to_and_stores_that_again() {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    let rank = |rank| {
        let (mut agent, hears) = agent(&bucket, &run, &Clock::system());
        agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
        (agent, hears)
    };
    let mut agents = [rank(0), rank(1)];
    let half = (HEADER + SLICES / 2 * SLICE) as u64;
    assert_eq!(save_both(&mut agents, 1).await, [half; 2]);
    assert_eq!(save_both(&mut agents, 2).await, [(HEADER + SLICE) as u64, HEADER as u64]);
    let lost = manifest(&bucket, 1).await.shards[1].object();
    bucket.delete(&lost).await.expect("delete");
    let before = bucket.counters();
    assert_eq!(save_both(&mut agents, 3).await, [(HEADER + SLICE) as u64, half]);
    let puts = bucket.counters().since(&before).of(OperationKind::Put).requests;
    assert_eq!(
        puts, 8,
        "an intent, what changed and an index of each, all of one rank's part, and the manifest"
    );
    assert_eq!(warnings(&mut agents[0].1), [""; 0], "nothing of its own is gone");
    expect_told(&warnings(&mut agents[1].1), &lost, 3);
    assert_eq!(save_both(&mut agents, 4).await, [(HEADER + SLICE) as u64, HEADER as u64]);
    expect_content(&bucket, 4, &fills_at(4)).await;
    remove_steps(&bucket, &[1, 2, 3]).await.expect("remove");
    expect_whole(&bucket).await;
    remove_steps(&bucket, &[4]).await.expect("remove");
    assert_eq!(objects(&bucket, "shards").await, [], "what was stored in vain went at once");
}

#[tokio::test]
async fn a_store_that_does_not_say_what_is_there_is_waited_for() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let (mut agent, mut hears) = agent(&plain.with_faults(&faults).with_deadline_ms(20), &run, &clock);
    save(&mut agent, 1).await;
    // The base's manifest is the first that is looked for.
    for nth in 2..=30 {
        faults.script(OperationKind::Head, nth, FaultMode::Before);
    }
    let before = plain.counters();
    let told = {
        let flush = save(&mut agent, 2);
        tokio::pin!(flush);
        let told = async {
            loop {
                match warnings(&mut hears) {
                    told if told.is_empty() => tokio::task::yield_now().await,
                    told => break told,
                }
            }
        };
        let told = tokio::select! { done = &mut flush => panic!("{done:?}"), told = told => told };
        faults.clear();
        assert_eq!(while_time_passes(&clock, flush).await, (HEADER + SLICE) as u64);
        told
    };
    assert!(told.iter().all(|told| told.contains("trying again")), "{told:?}");
    assert_eq!(plain.counters().since(&before).of(OperationKind::Put).requests, 3, "nor is it stored twice");
    expect_content(&plain, 2, &fills_at(2)).await;
    expect_whole(&plain).await;
}

/// The trainer was told that it may write over the slot: nothing is left to be stored again.
#[tokio::test]
async fn a_save_that_refers_to_what_is_gone_since_it_was_stored_is_refused() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let (mut agent, mut hears) = agent(&plain.with_faults(&faults).with_deadline_ms(20), &run, &clock);
    save(&mut agent, 1).await;
    let shard = shard_of(&plain, 1).await;
    // The intent and the shard come first.
    for nth in 3..=30 {
        faults.script(OperationKind::Put, nth, FaultMode::Before);
    }
    let second = state(2, &fills_at(2));
    let error = {
        let flush = agent.flush(&second);
        tokio::pin!(flush);
        let failed = async {
            while warnings(&mut hears).is_empty() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! { done = &mut flush => panic!("{done:?}"), () = failed => {} }
        faults.clear();
        lose(&plain, 1, false).await;
        clock.advance(Duration::from_secs(31 * 60));
        while_time_passes(&clock, flush).await.expect_err("refused")
    };
    assert!(
        error.message().contains("step 2 was not saved") && error.message().contains(shard.as_str()),
        "{error}"
    );
    assert!(error.hint().expect("a hint").contains("lifecycle rule"), "{error}");
    assert_eq!(save(&mut agent, 3).await, WHOLE);
    expect_content(&plain, 3, &fills_at(3)).await;
}
