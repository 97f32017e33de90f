//! Steps that go on from what earlier starts, dead agents and other numbers of ranks stored: only what changed goes up.

use forebay_io::object::OperationKind;

use super::delta_tests::{
    HEADER, SLICE, agent, expect_content, expect_whole, manifest, objects, part_of, state,
};
use super::disk_tests::left_on;
use super::tests::{flusher, start, trainer};
use super::*;
use crate::agent::Member;
use crate::catalog::{Keep, KnownShards, Start, StepName, find_step, remove_steps};
use crate::manifest::Manifest;

/// Slices of the states here, of which nine in ten never change.
const SLICES: usize = 200;
const FROZEN: usize = 180;
const WHOLE: u64 = (HEADER + SLICES * SLICE) as u64;
const CHANGED: u64 = (HEADER + (SLICES - FROZEN) * SLICE) as u64;

/// What a state holds at a step.
fn fills_at(step: u64) -> Vec<u8> {
    (0..SLICES).map(|index| if index < FROZEN { index as u8 } else { 100 + step as u8 }).collect()
}

fn origin(run: &Run, step: u64) -> Option<Origin> {
    Some(Origin { attempt: run.attempt().to_owned(), step })
}

/// An agent of the next start, which went on from a step.
async fn restart(bucket: &Bucket, origin: Option<Origin>) -> (Run, Flusher) {
    let number = objects(bucket, "runs").await.len();
    let nonce = format!("{number:08x}").repeat(4);
    let run = begin_run(bucket, Start { nonce, ..start() }).await.expect("run");
    let mut agent = flusher(bucket, &run, trainer().0);
    agent.origin = origin;
    (run, agent)
}

async fn save(agent: &mut Flusher, step: u64) -> u64 {
    agent.flush(&state(step, &fills_at(step))).await.expect("durable")
}

#[tokio::test]
async fn a_run_that_is_restarted_stores_what_changed_alone() {
    let (bucket, mut run, mut agent) = agent().await;
    assert_eq!(save(&mut agent, 1).await, WHOLE);
    assert_eq!(save(&mut agent, 2).await, CHANGED);
    for step in 3..20 {
        // Every other step has a start of its own.
        let before = bucket.counters();
        if step % 2 == 1 {
            (run, agent) = restart(&bucket, origin(&run, step - 1)).await;
        }
        assert_eq!(save(&mut agent, step).await, CHANGED);
        let sent = bucket.counters().since(&before).of(OperationKind::Put).bytes;
        assert!(sent < CHANGED + (160 << 10), "{sent} bytes, with intent and manifest");
        retain(&bucket, Keep { newest: Some(2), every: None }, &mut KnownShards::default())
            .await
            .expect("retain");
        expect_content(&bucket, step, &fills_at(step)).await;
        expect_whole(&bucket).await;
    }
    assert_eq!(manifest(&bucket, 19).await.parents, [1]);
    assert_eq!(objects(&bucket, "ranks").await, []);
    // The frozen part, and of the rest what two steps hold and the last whole one held.
    let kept: u64 = objects(&bucket, "shards").await.iter().map(|shard| shard.size).sum();
    assert!(kept <= WHOLE + 2 * CHANGED, "{kept}");
    remove_steps(&bucket, &[18, 19]).await.expect("remove");
    assert_eq!(objects(&bucket, "shards").await, []);
}

#[tokio::test]
async fn a_start_refers_to_no_step_but_the_one_it_went_on_from_and_those_before() {
    let (bucket, run, mut agent) = agent().await;
    for step in 1..=3 {
        save(&mut agent, step).await;
    }
    // Of a step that never was committed, the one before it; of a step that is damaged, or gone with all before, none.
    let cases = [(9, vec![1, 3]), (2, vec![1, 2]), (0, vec![])];
    let mut last = 4;
    for (step, parents) in cases {
        let expected = if parents.is_empty() { WHOLE } else { CHANGED - SLICE as u64 };
        let (_, mut agent) = restart(&bucket, origin(&run, step)).await;
        // One of the trained slices stayed as it was at that step.
        let mut fills = fills_at(last);
        fills[SLICES - 1] = fills_at(step.min(3))[SLICES - 1];
        let uploaded = agent.flush(&state(last, &fills)).await.expect("durable");
        assert_eq!((uploaded, manifest(&bucket, last).await.parents), (expected, parents), "from {step}");
        last += 1;
    }
    let (_, mut other) = restart(&bucket, Some(Origin { attempt: "f".repeat(8), step: 3 })).await;
    assert_eq!(save(&mut other, last).await, WHOLE);
    let key = find_step(&bucket, StepName::from(3)).await.expect("step").key.object();
    bucket.put(&key, "damaged".into(), forebay_io::object::Condition::Always).await.expect("put");
    let (_, mut other) = restart(&bucket, origin(&run, 3)).await;
    assert_eq!(save(&mut other, last + 1).await, WHOLE);
}

#[tokio::test]
async fn a_start_refers_to_no_shard_that_somebody_deleted() {
    let (bucket, mut run, mut agent) = agent().await;
    for step in 1..=3 {
        save(&mut agent, step).await;
    }
    let (near, mut far) = trainer();
    for (step, loss) in [(4, None), (6, Some(true)), (8, Some(false))] {
        let shards = manifest(&bucket, step - 1).await.shards;
        let frozen = shards.iter().max_by_key(|shard| shard.size).expect("some").object();
        match loss {
            Some(true) => bucket.delete(&frozen).await.expect("delete"),
            Some(false) => {
                let cut = bucket.put(&frozen, "cut off".into(), forebay_io::object::Condition::Always).await;
                drop(cut.expect("put"));
            }
            None => {}
        }
        (run, agent) = restart(&bucket, origin(&run, step - 1)).await;
        agent.trainer = near.clone();
        let before = bucket.counters();
        let expected = if loss.is_some() { WHOLE } else { CHANGED };
        assert_eq!(save(&mut agent, step).await, expected, "step {step}");
        let between = bucket.counters();
        assert_eq!(
            save(&mut agent, step + 1).await,
            CHANGED,
            "the next one refers to what this agent stored"
        );
        if loss.is_none() {
            let after = bucket.counters();
            let heads = [between.since(&before), after.since(&between)]
                .map(|seen| seen.of(OperationKind::Head).requests);
            assert_eq!(heads, [2, 2], "the step that it goes on from, and the one shard that it refers to");
        }
        expect_content(&bucket, step + 1, &fills_at(step + 1)).await;
        let mut warnings = Vec::new();
        while far.readable(Duration::ZERO).expect("readable") {
            let (frame, _) = far.receive().expect("receive").expect("a reply");
            if let Reply::Warning { message } = serde_json::from_slice(&frame).expect("a reply") {
                warnings.push(message);
            }
        }
        assert_eq!(warnings.len(), usize::from(loss.is_some()), "{warnings:?}");
        assert!(warnings.iter().all(|told| told.contains(frozen.as_str())), "{warnings:?}");
    }
}

#[tokio::test]
async fn what_a_dead_agent_left_is_saved_as_it_would_have() {
    let (bucket, run, mut agent) = agent().await;
    save(&mut agent, 1).await;
    // It died, and step 2 is sent to another one, which knows what the trainer heard of last.
    let mut second = flusher(&bucket, &run, trainer().0);
    second.origin = origin(&run, 1);
    let again = Save { given: Given::Again, ..state(2, &fills_at(2)) };
    assert_eq!(second.flush(&again).await.expect("durable"), CHANGED);
    assert_eq!(save(&mut second, 3).await, CHANGED);
    expect_whole(&bucket).await;
    assert_eq!(objects(&bucket, "ranks").await, []);
    // A step that only a local disk has, of a start that ended.
    let mut heir = flusher(&bucket, &run, trainer().0);
    (heir.heir_of, heir.origin) = (Some(run.start.nonce.clone()), origin(&run, 4));
    let disk = Bucket::in_memory();
    let left = left_on(&disk, &state(4, &fills_at(4))).await;
    assert_eq!(heir.flush(&left).await.expect("durable"), CHANGED);
    expect_content(&bucket, 4, &fills_at(4)).await;
}

/// Saves a step with so many ranks, each of which has an equal run of the slices; gives what they uploaded in all.
async fn save_with(bucket: &Bucket, ranks: usize, step: u64, origin: Option<Origin>) -> (Run, u64) {
    let (run, _) = restart(bucket, None).await;
    let (fills, share) = (fills_at(step), SLICES / ranks);
    let flush = |rank: usize| {
        let mut agent = flusher(bucket, &run, trainer().0);
        agent.hello.member = Some(Member { run: run.clone(), rank: rank as u32, world_size: ranks as u32 });
        agent.origin = origin.clone();
        let part = part_of("t", (1, step), &fills, rank * share..(rank + 1) * share);
        let next = part_of("t", (2, step + 1), &fills, rank * share..(rank + 1) * share);
        async move {
            let uploaded = agent.flush(&part).await.expect("durable");
            // What it refers to does not count for more because others refer to it as well.
            assert_eq!(agent.flush(&next).await.expect("durable"), HEADER as u64, "rank {rank} of {ranks}");
            uploaded
        }
    };
    let uploaded = futures::future::join_all((0..ranks).map(flush)).await;
    expect_content(bucket, step + 1, &fills).await;
    (run, uploaded.into_iter().sum())
}

#[tokio::test]
async fn other_numbers_of_ranks_store_what_changed_alone() {
    let bucket = Bucket::in_memory();
    let (mut run, first) = save_with(&bucket, 2, 10, None).await;
    assert_eq!(first, WHOLE + HEADER as u64);
    let mut step = 20;
    for ranks in [8, 1, 4, 4, 2, 10, 5] {
        let (next, uploaded) = save_with(&bucket, ranks, step, origin(&run, step - 9)).await;
        let changed = ((SLICES - FROZEN) * SLICE) as u64;
        assert_eq!(uploaded - (ranks * HEADER) as u64, changed, "{ranks} ranks");
        retain(&bucket, Keep { newest: Some(1), every: None }, &mut KnownShards::default())
            .await
            .expect("retain");
        expect_content(&bucket, step + 1, &fills_at(step)).await;
        expect_whole(&bucket).await;
        (run, step) = (next, step + 10);
    }
    let Manifest { parents, shards, .. } = manifest(&bucket, step - 9).await;
    assert_eq!((&parents[..], shards.len()), (&[10, step - 10][..], 5 + 2 + 1), "two wrote what is frozen");
    let kept: u64 = objects(&bucket, "shards").await.iter().map(|shard| shard.size).sum();
    assert!(kept < 2 * WHOLE, "{kept}");
}
