//! Steps that refer to what earlier ones stored: few bytes go up, and nothing that is named is ever deleted.

use std::collections::HashMap;
use std::ops::Range;

use forebay_core::ObjectKey;
use forebay_io::object::{Condition, FaultMode, Faults, ObjectInfo, OperationKind};
use forebay_io::rng::Rng;
use futures::TryStreamExt;

use super::tests::{flusher, start, trainer};
use super::*;
use crate::agent::{Member, Seal};
use crate::arena::Held;
use crate::catalog::{Keep, KnownShards, Start, find_step, list_steps, load_manifest, remove_steps};
use crate::manifest::{Checksum, Identity, Slice, SliceKind, Tensor};
use crate::testing::{chance, rounds};
use crate::verify::verify;

/// Bytes of a slice.
pub(super) const SLICE: usize = 8000;
pub(super) const HEADER: usize = 4096;

/// The bytes of a slice that is filled with a number.
fn filled(fill: u8) -> Vec<u8> {
    let mut bytes = vec![0; SLICE];
    blake3::Hasher::new().update(&[fill]).finalize_xof().fill(&mut bytes);
    bytes
}

/// A sealed save of a tensor, each of whose slices is filled with a number.
fn state_of(name: &str, save: u64, step: u64, fills: &[u8]) -> Save {
    part_of(name, (save, step), fills, 0..fills.len())
}

/// The same, of some of the tensor's slices.
pub(super) fn part_of(name: &str, (save, step): (u64, u64), fills: &[u8], own: Range<usize>) -> Save {
    let mut slot = vec![b' '; HEADER];
    let slice = |index: usize| {
        let bytes = filled(fills[index]);
        let start = slot.len() as u64;
        slot.extend_from_slice(&bytes);
        let (offsets, lengths) = (vec![(index * SLICE) as u64], vec![SLICE as u64]);
        let (crc32c, blake3) = (Checksum(forebay_core::crc32c(&bytes)), Identity::UNKNOWN);
        let (kind, end) = (SliceKind::Box, start + SLICE as u64);
        Slice { kind, offsets, lengths, shard: 0, start, end, crc32c, blake3 }
    };
    let slices = own.map(slice).collect();
    let shape = vec![(fills.len() * SLICE) as u64];
    let tensors = vec![Tensor { name: name.into(), dtype: "uint8".into(), shape, slices }];
    let seal = Seal::of_test(save, step, &slot, HEADER, tensors);
    let held = Arc::new(Held::new(start().nonce, 0, 1, seal));
    Save::new(held, Source::Slot(slot.into()), Given::First)
}

pub(super) fn state(step: u64, fills: &[u8]) -> Save {
    state_of("t", step, step, fills)
}

pub(super) async fn manifest(bucket: &Bucket, step: u64) -> Manifest {
    let key = find_step(bucket, step.into()).await.expect("the step").key;
    load_manifest(bucket, &key).await.expect("its manifest")
}

/// What the slices of a step's tensor hold.
async fn content(bucket: &Bucket, step: u64, tensor: usize) -> Vec<Vec<u8>> {
    let manifest = manifest(bucket, step).await;
    let mut slices = manifest.tensors[tensor].slices.clone();
    slices.sort_by_key(|slice| slice.offsets[0]);
    let mut found = Vec::new();
    for slice in slices {
        let key = manifest.shards[slice.shard as usize].object();
        found.push(bucket.get(&key, None, slice.start..slice.end).await.expect("a slice").to_vec());
    }
    found
}

pub(super) async fn expect_content(bucket: &Bucket, step: u64, fills: &[u8]) {
    let expected: Vec<_> = fills.iter().map(|fill| filled(*fill)).collect();
    assert!(content(bucket, step, 0).await == expected, "step {step} holds something else");
}

pub(super) async fn objects(bucket: &Bucket, prefix: &str) -> Vec<ObjectInfo> {
    bucket.list(prefix).try_collect().await.expect("list")
}

pub(super) async fn expect_whole(bucket: &Bucket) {
    assert_eq!(verify(bucket, None, &|_| {}).await.expect("verify"), []);
}

/// An agent of a new run, over a bucket in memory.
pub(super) async fn agent() -> (Bucket, Run, Flusher) {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    let flusher = flusher(&bucket, &run, trainer().0);
    (bucket, run, flusher)
}

#[tokio::test]
async fn what_did_not_change_is_not_uploaded() {
    let (bucket, _, mut agent) = agent().await;
    let mut fills: Vec<u8> = (0..200).map(|i| i as u8).collect();
    assert_eq!(agent.flush(&state(1, &fills)).await.expect("durable"), (HEADER + 200 * SLICE) as u64);
    for step in 2..=4 {
        // One in a hundred.
        fills[step as usize] = 201;
        fills[100 + step as usize] = 202;
        let before = bucket.counters();
        let uploaded = agent.flush(&state(step, &fills)).await.expect("durable");
        assert_eq!(uploaded, (HEADER + 2 * SLICE) as u64);
        // The intent, the shard and the manifest.
        assert_eq!(bucket.counters().since(&before).of(OperationKind::Put).requests, 3);
    }
    // Nothing at all.
    assert_eq!(agent.flush(&state(5, &fills)).await.expect("durable"), HEADER as u64);
    expect_content(&bucket, 5, &fills).await;
    let last = manifest(&bucket, 5).await;
    assert_eq!((last.parents, last.shards.len()), (vec![1, 2, 3, 4], 5));
    assert_eq!(objects(&bucket, "ranks").await, [], "what was noted is taken back");
    expect_whole(&bucket).await;
    // The first step's manifest goes, and what later steps need of it stays.
    let removed = remove_steps(&bucket, &[1, 2, 3, 4]).await.expect("remove");
    assert_eq!((removed.manifests, removed.shards), (4, 0));
    expect_content(&bucket, 5, &fills).await;
    expect_whole(&bucket).await;
    let removed = remove_steps(&bucket, &[5]).await.expect("remove");
    assert_eq!((removed.manifests, removed.shards), (1, 5));
    assert_eq!(objects(&bucket, "shards").await, []);
}

#[tokio::test]
async fn a_delta_is_a_valid_file_of_the_changed_slices() {
    let (bucket, _, mut agent) = agent().await;
    agent.flush(&state(1, &[1; 40])).await.expect("durable");
    let mut fills = [1; 40];
    (fills[3], fills[4], fills[20]) = (2, 3, 4);
    agent.flush(&state(2, &fills)).await.expect("durable");
    let shard = &manifest(&bucket, 2).await.shards[0];
    let (data, _) = bucket.get_whole(&shard.object()).await.expect("the shard");
    let length = u64::from_le_bytes(data[..8].try_into().expect("8 bytes"));
    assert_eq!((shard.header, shard.size), (8 + length, data.len() as u64));
    let head: serde_json::Value = serde_json::from_slice(&data[8..8 + length as usize]).expect("JSON");
    let names: Vec<_> = head.as_object().expect("an object").keys().cloned().collect();
    assert_eq!(names, ["__metadata__", "t#160000", "t#24000", "t#32000"]);
    for (name, fill) in [("t#24000", 2), ("t#32000", 3), ("t#160000", 4)] {
        let range: [usize; 2] = serde_json::from_value(head[name]["data_offsets"].clone()).expect("a range");
        assert_eq!(data[8 + length as usize..][range[0]..range[1]], filled(fill), "{name}");
    }
}

#[tokio::test]
async fn little_that_stayed_is_stored_again() {
    let (bucket, _, mut agent) = agent().await;
    let whole = (HEADER + 100 * SLICE) as u64;
    agent.flush(&state(1, &[1; 100])).await.expect("durable");
    let mut fills = [2; 100];
    fills[..4].fill(1);
    assert_eq!(agent.flush(&state(2, &fills)).await.expect("durable"), whole);
    fills[5..].fill(3);
    assert_eq!(
        agent.flush(&state(3, &fills)).await.expect("durable"),
        whole + HEADER as u64 - 5 * SLICE as u64,
        "95 slices need a longer header"
    );
    // Nor are so many files kept alive that they hold more than twice the state.
    let mut saved = 0;
    for step in 4..=40 {
        fills[step as usize] = 100 + step as u8;
        fills[60..].fill(step as u8);
        saved += whole - agent.flush(&state(step, &fills)).await.expect("durable");
        let manifest = manifest(&bucket, step).await;
        let held: u64 = manifest.shards.iter().map(|shard| shard.size - shard.header).sum();
        assert!(held <= 2 * 100 * SLICE as u64, "step {step}: {held} bytes");
        expect_content(&bucket, step, &fills).await;
    }
    assert!(saved > 20 * whole / 2, "most steps are deltas: {saved}");
    expect_whole(&bucket).await;
}

#[tokio::test]
async fn equal_checksums_are_not_equal_bytes() {
    let (bucket, _, mut agent) = agent().await;
    agent.flush(&state(1, &[1; 20])).await.expect("durable");
    // As if what slice 7 held before had the checksum of what it holds now.
    let mut fills = [1; 20];
    fills[7] = 9;
    let base = agent.base.as_mut().expect("a base");
    base.manifest.tensors[0].slices[7].crc32c = Checksum(forebay_core::crc32c(&filled(9)));
    assert_eq!(agent.flush(&state(2, &fills)).await.expect("durable"), (HEADER + SLICE) as u64);
    expect_content(&bucket, 2, &fills).await;
}

#[tokio::test]
async fn a_save_of_two_agents_is_one_step_whoever_stored_what() {
    let (bucket, run, mut agent) = agent().await;
    let mut fills = [1; 20];
    agent.flush(&state(1, &fills)).await.expect("durable");
    fills[3] = 2;
    agent.flush(&state(2, &fills)).await.expect("durable");
    // It died before it could say so. The next one knows no earlier step, and has all of the save.
    let mut second = flusher(&bucket, &run, trainer().0);
    let again = Save { given: Given::Again, ..state(2, &fills) };
    second.flush(&again).await.expect("durable already");
    assert_eq!(manifest(&bucket, 2).await.shards.len(), 2, "the first one's counts");
    // What the second one stored is named by no step: the next one refers to what is.
    fills[4] = 3;
    let uploaded = second.flush(&state(3, &fills)).await.expect("durable");
    assert_eq!((uploaded, manifest(&bucket, 3).await.parents), ((HEADER + SLICE) as u64, vec![1, 2]));
    // One that died before it committed: its shard is not that of the next one.
    let faults = Faults::new();
    let mut third = flusher(&bucket.with_faults(&faults).with_deadline_ms(50), &run, trainer().0);
    third.base = second.base.take();
    let clock = Clock::manual();
    third.clock = clock.clone();
    fills[5] = 4;
    let save = state(4, &fills);
    // The intent and the shard get there, the manifest does not.
    for nth in 3..100 {
        faults.script(OperationKind::Put, nth, FaultMode::Before);
    }
    let died = third.flush(&save);
    tokio::select! {
        settled = died => panic!("there is no manifest: {settled:?}"),
        () = async { while objects(&bucket, "shards").await.len() < 5 { tokio::task::yield_now().await; } } => {}
    }
    let again = Save { given: Given::Again, ..state(4, &fills) };
    flusher(&bucket, &run, trainer().0).flush(&again).await.expect("durable");
    expect_content(&bucket, 4, &fills).await;
    expect_whole(&bucket).await;
}

/// Who goes on first, after both were stopped.
#[derive(Debug, Clone, Copy)]
enum First {
    Save,
    Deletion,
}

/// Who saves while earlier steps are deleted.
#[derive(Debug, Clone, Copy)]
enum Saver {
    /// The agent that stored them.
    Same,
    /// One of the start that restored the last of them.
    NextStart,
    /// One that took the place of one that died over the same save, when its part was stored.
    Second,
}

impl Saver {
    /// The agent that is to save `save`.
    async fn agent(
        self,
        bucket: &Bucket,
        saver: &Bucket,
        run: Run,
        mut agent: Flusher,
        save: &mut Save,
    ) -> Flusher {
        let origin = Origin { attempt: run.attempt().to_owned(), step: 2 };
        let run = match self {
            Self::Same => return agent,
            Self::NextStart => {
                begin_run(bucket, Start { nonce: "e".repeat(32), ..start() }).await.expect("run")
            }
            Self::Second => {
                let (faults, shards) = (Faults::new(), objects(bucket, "shards").await.len());
                // The intent and the shard get there, the manifest does not.
                let gate = faults.gate(5);
                agent.target = Some((bucket.with_faults(&faults), run.clone()));
                tokio::select! {
                    settled = agent.flush(save) => panic!("it was to die first: {settled:?}"),
                    () = gate.reached() => {}
                }
                assert_eq!(objects(bucket, "shards").await.len(), shards + 1);
                save.given = Given::Again;
                run
            }
        };
        let mut next = flusher(saver, &run, trainer().0);
        next.origin = Some(origin);
        next
    }
}

/// Saves a step, and deletes all earlier ones: both are stopped at a request of theirs. Says which of them were.
async fn race(who: Saver, save_at: u64, delete_at: u64, first: First) -> (bool, bool) {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    let faults = [Faults::new(), Faults::new()];
    let [saver, deleter] = [0, 1].map(|index| bucket.with_faults(&faults[index]));
    let mut agent = flusher(&saver, &run, trainer().0);
    let mut fills = [1; 20];
    for step in 1..=2 {
        fills[step as usize] = 10 + step as u8;
        agent.flush(&state(step, &fills)).await.expect("durable");
    }
    fills[10] = 99;
    let mut save = state(3, &fills);
    let mut agent = who.agent(&bucket, &saver, run, agent, &mut save).await;
    let (save_gate, delete_gate) = (faults[0].gate(save_at), faults[1].gate(delete_at));
    let mut saving = std::pin::pin!(agent.flush(&save));
    let saved = tokio::select! { saved = &mut saving => Some(saved), () = save_gate.reached() => None };
    let mut deleting = std::pin::pin!(remove_steps(&deleter, &[1, 2]));
    let deleted = tokio::select! { done = &mut deleting => Some(done), () = delete_gate.reached() => None };
    let stopped = (saved.is_none(), deleted.is_none());
    if let First::Deletion = first {
        delete_gate.open();
    }
    save_gate.open();
    let finish_save = async {
        match saved {
            Some(saved) => saved,
            None => saving.await,
        }
    };
    let finish_deletion = async {
        delete_gate.open();
        match deleted {
            Some(deleted) => deleted,
            None => deleting.await,
        }
    };
    let (saved, deleted) = match first {
        First::Save => {
            let saved = finish_save.await;
            (saved, finish_deletion.await)
        }
        First::Deletion => {
            let deleted = finish_deletion.await;
            (finish_save.await, deleted)
        }
    };
    let what = format!("{who:?}: save stopped at {save_at}, deletion at {delete_at}, {first:?} first");
    saved.unwrap_or_else(|error| panic!("{what}: {error}"));
    deleted.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), [], "{what}");
    expect_content(&bucket, 3, &fills).await;
    // What one that died noted may stay for the collector.
    let notes = objects(&bucket, "ranks").await;
    let is_left = |note: &ObjectInfo| matches!(who, Saver::Second) && note.key.as_str().ends_with(".intent");
    assert!(notes.iter().all(is_left), "{what}: {notes:?}");
    stopped
}

#[tokio::test]
async fn what_a_save_under_way_refers_to_is_never_deleted() {
    for who in [Saver::Same, Saver::NextStart, Saver::Second] {
        for first in [First::Save, First::Deletion] {
            races(who, first).await;
        }
    }
}

/// All ways in which a save and a deletion can be stopped.
async fn races(who: Saver, first: First) {
    let (mut saves, mut deletions) = (0, 0);
    for save_at in 1.. {
        let mut was_stopped = false;
        for delete_at in 1.. {
            let (save, deletion) = race(who, save_at, delete_at, first).await;
            was_stopped |= save;
            saves = saves.max(if save { save_at } else { 0 });
            deletions = deletions.max(if deletion { delete_at } else { 0 });
            if !deletion {
                break;
            }
        }
        if !was_stopped {
            break;
        }
    }
    assert!(
        saves >= 5 && deletions >= 12,
        "{who:?}: stopped at {saves} requests of a save, {deletions} of a deletion"
    );
}

/// Two ranks of one job, each with a tensor of its own.
struct Pair {
    bucket: Bucket,
    run: Run,
    agents: Vec<Flusher>,
}

impl Pair {
    async fn new() -> Self {
        let bucket = Bucket::in_memory();
        let run = begin_run(&bucket, start()).await.expect("run");
        let agents = (0..2).map(|rank| Self::agent(&bucket, &run, rank)).collect();
        Self { bucket, run, agents }
    }

    fn agent(bucket: &Bucket, run: &Run, rank: u32) -> Flusher {
        let mut agent = flusher(bucket, run, trainer().0);
        agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
        agent
    }

    /// Saves a step of both; gives the bytes that each uploaded.
    async fn save(&mut self, step: u64, fills: [&[u8]; 2]) -> [u64; 2] {
        let states = [0, 1].map(|rank| state_of(&format!("own@{rank}"), step, step, fills[rank]));
        let [first, second] = self.agents.as_mut_slice() else { panic!("two ranks") };
        let (one, other) = tokio::join!(first.flush(&states[0]), second.flush(&states[1]));
        let uploaded = [one.expect("durable"), other.expect("durable")];
        for (rank, fills) in fills.into_iter().enumerate() {
            let expected: Vec<_> = fills.iter().map(|fill| filled(*fill)).collect();
            assert!(content(&self.bucket, step, rank).await == expected, "rank {rank} of step {step}");
        }
        uploaded
    }
}

#[tokio::test]
async fn each_rank_refers_to_its_own_earlier_part() {
    let mut pair = Pair::new().await;
    let (frozen, mut trained) = ([7; 30], [1; 30]);
    let whole = (HEADER + 30 * SLICE) as u64;
    assert_eq!(pair.save(1, [&frozen, &trained]).await, [whole; 2]);
    trained[..3].fill(2);
    assert_eq!(pair.save(2, [&frozen, &trained]).await, [HEADER as u64, (HEADER + 3 * SLICE) as u64]);
    trained.fill(3);
    assert_eq!(pair.save(3, [&frozen, &trained]).await, [HEADER as u64, whole]);
    remove_steps(&pair.bucket, &[1, 2]).await.expect("remove");
    expect_whole(&pair.bucket).await;
    assert_eq!(manifest(&pair.bucket, 3).await.parents, [1]);
    assert_eq!(objects(&pair.bucket, "ranks").await, []);
    // A new agent of one rank that was told of no earlier step knows none; the other goes on.
    pair.agents[0] = Pair::agent(&pair.bucket, &pair.run, 0);
    trained[9] = 4;
    assert_eq!(pair.save(4, [&frozen, &trained]).await, [whole, (HEADER + SLICE) as u64]);
    // Another structure: nothing of it is there.
    assert_eq!(pair.save(5, [&trained[..20], &frozen]).await[0], (HEADER + 20 * SLICE) as u64);
    expect_whole(&pair.bucket).await;
}

/// One random history: saves that change little or much, other agents, deletions; every step stays what it was.
async fn history(rng: &Rng) {
    let (bucket, mut run, mut agent) = agent().await;
    let mut fills: Vec<u8> = vec![0; 30];
    // Which start saved them, and what they hold.
    let mut steps: HashMap<u64, (u64, Vec<u8>)> = HashMap::new();
    let mut known = KnownShards::default();
    let mut step = 0;
    for _ in 0..60 {
        match rng.below(10) {
            0..=6 => {
                // Now and then the trainer went back to an earlier step.
                step = if rng.chance(0.1) { step / 2 } else { step } + 1 + rng.below(3);
                for _ in 0..rng.below(if rng.chance(0.2) { 60 } else { 4 }) {
                    let (place, fill) = (rng.below(30) as usize, rng.below(5) as u8);
                    fills[place] = fill;
                }
                let save = state_of("t", rng.below(1 << 40), step, &fills);
                match agent.flush(&save).await {
                    Ok(_) => {
                        let before = steps.insert(step, (run.incarnation, fills.clone()));
                        assert!(
                            before.is_none_or(|before| before.0 < run.incarnation),
                            "step {step} saved twice"
                        );
                    }
                    Err(error) => {
                        let is_there = steps.get(&step).is_some_and(|there| there.0 == run.incarnation);
                        assert!(error.kind() == ErrorKind::Conflict && is_there, "{error}");
                    }
                }
            }
            7 => {
                // Another agent, or another start, that was told of a step or of none.
                let origin = Origin { attempt: run.attempt().to_owned(), step: rng.below(step + 2) };
                if rng.chance(0.5) {
                    let nonce = format!("{:016x}", rng.u64()).repeat(2);
                    run = begin_run(&bucket, Start { nonce, ..start() }).await.expect("run");
                }
                agent = flusher(&bucket, &run, trainer().0);
                agent.origin = rng.chance(0.8).then_some(origin);
            }
            8 => {
                let going: Vec<u64> = steps.keys().copied().filter(|_| rng.chance(0.3)).collect();
                remove_steps(&bucket, &going).await.expect("remove");
                steps.retain(|step, _| !going.contains(step));
            }
            _ => {
                let newest = Some(1 + rng.below(4) as usize);
                retain(&bucket, Keep { newest, every: None }, &mut known).await.expect("retain");
                let left = list_steps(&bucket).await.expect("list");
                steps.retain(|step, _| left.iter().any(|info| info.key.step == *step));
            }
        }
        let listed = list_steps(&bucket).await.expect("list");
        assert_eq!(listed.iter().filter(|info| !info.superseded).count(), steps.len());
        expect_whole(&bucket).await;
    }
    retain(&bucket, Keep::default(), &mut KnownShards::default())
        .await
        .expect("what later starts saved again goes");
    for (step, (_, fills)) in &steps {
        expect_content(&bucket, *step, fills).await;
    }
    // Nothing is kept for nothing.
    let mut needed: Vec<ObjectKey> = Vec::new();
    for step in steps.keys() {
        needed.extend(manifest(&bucket, *step).await.shards.iter().map(crate::manifest::Shard::object));
    }
    assert!(objects(&bucket, "shards").await.iter().all(|object| needed.contains(&object.key)));
}

#[tokio::test]
async fn random_histories_keep_every_step_whole() {
    for seed in rounds(10) {
        history(&chance(seed)).await;
    }
}

#[tokio::test]
async fn under_random_faults_deltas_are_whole() {
    for seed in rounds(3) {
        let rng = chance(seed);
        let plain = Bucket::in_memory();
        let run = begin_run(&plain, start()).await.expect("run");
        let faults = Faults::random(rng.u64(), 0.15);
        let mut agent = flusher(&plain.with_faults(&faults).with_deadline_ms(300), &run, trainer().0);
        let mut fills = [0; 20];
        for step in 1..=8 {
            fills[rng.below(20) as usize] = step as u8;
            agent.flush(&state(step, &fills)).await.expect("durable");
            // What was noted for a save may stay for the collector, and the step's bytes are there.
            expect_content(&plain, step, &fills).await;
            expect_whole(&plain).await;
            retain(&plain, Keep { newest: Some(2), every: None }, &mut KnownShards::default())
                .await
                .expect("retain");
        }
    }
}

/// As a rule of the store by age does.
async fn delete_first_shard(bucket: &Bucket) {
    let first = manifest(bucket, 1).await.shards[0].object();
    bucket.delete(&first).await.expect("delete");
}

/// What a save under way referred to was deleted: it was refused, and what came after referred to the same.
#[tokio::test]
async fn a_save_of_which_something_is_deleted_meanwhile_is_stored_whole() {
    for minutes in [0, 31] {
        deleted_meanwhile(Duration::from_secs(minutes * 60)).await;
    }
}

/// Has a save last so long of which something is deleted.
async fn deleted_meanwhile(lasts: Duration) {
    let (plain, run, _) = agent().await;
    let (faults, clock, (trainer, _hears)) = (Faults::new(), Clock::manual(), trainer());
    let mut agent = flusher(&plain.with_faults(&faults), &run, trainer);
    agent.clock = clock.clone();
    let mut fills = [1; 20];
    let whole = (HEADER + 20 * SLICE) as u64;
    for step in 1..=4 {
        fills[step as usize] = 10 + step as u8;
        let save = state(step, &fills);
        let flush = agent.flush(&save);
        tokio::pin!(flush);
        let mut noted = 0;
        let flushed = loop {
            let gate = faults.gate(1);
            tokio::select! { done = &mut flush => break done, () = gate.reached() => {} }
            noted += usize::from(!objects(&plain, "ranks").await.is_empty());
            // It noted what it refers to, looked for the base, and sends what changed.
            if (step, noted) == (3, 2) {
                delete_first_shard(&plain).await;
                clock.advance(lasts);
            }
            gate.open();
        };
        let uploaded = flushed.unwrap_or_else(|error| panic!("step {step}: {error}"));
        assert_eq!(uploaded == whole, step % 2 == 1, "step {step}: {uploaded}");
    }
    for (step, parents) in [(3, vec![]), (4, vec![3])] {
        assert_eq!(manifest(&plain, step).await.parents, parents);
        expect_content(&plain, step, &if step == 3 { fills_of(&fills, 4) } else { fills }).await;
    }
    assert_eq!(objects(&plain, "shards").await.len(), 3, "nor is there more than the steps name");
    assert_eq!(objects(&plain, "ranks").await, []);
}

/// What it held before a slice was changed.
fn fills_of(fills: &[u8; 20], changed: usize) -> [u8; 20] {
    let mut before = *fills;
    before[changed] = 1;
    before
}

/// An agent that keeps a hundred steps read them all again for each step that it deleted.
#[tokio::test]
async fn retention_reads_each_manifest_once() {
    let plain = Bucket::in_memory();
    let run = begin_run(&plain, start()).await.expect("run");
    let mut agent = flusher(&plain, &run, trainer().0);
    let (mut known, keep) = (KnownShards::default(), Keep { newest: Some(6), every: None });
    let count = || plain.counters().of(OperationKind::Get).requests;
    let mut reads = Vec::new();
    for step in 1..=12 {
        agent.flush(&state(step, &[step as u8; 20])).await.expect("durable");
        let before = count();
        retain(&plain, keep, &mut known).await.expect("retain");
        reads.push(count() - before);
    }
    assert_eq!(reads, [0, 0, 0, 0, 0, 0, 7, 1, 1, 1, 1, 1]);
    // One that was deleted and saved again is another.
    let key = find_step(&plain, 9.into()).await.expect("a step").key;
    let mut other = load_manifest(&plain, &key).await.expect("a manifest");
    other.parents = vec![8];
    let data = other.encode().expect("a manifest");
    plain.put(&key.object(), data, Condition::Always).await.expect("put");
    agent.flush(&state(13, &[13; 20])).await.expect("durable");
    let before = count();
    retain(&plain, keep, &mut known).await.expect("retain");
    assert_eq!(count() - before, 2);
    expect_whole(&plain).await;
}
