//! Parts of ranks that are gone, of which other hosts keep copies.

use forebay_io::object::{FaultMode, Faults, OperationKind};
use futures::TryStreamExt;

use super::super::replicas::Shelf;
use super::rounds_tests::{agent, in_round, in_time, part, pass, stored};
use super::tests::{start, trainer};
use super::*;
use crate::agent::{KeptStep, LostRanks};
use crate::catalog::{Start, list_ranks, list_steps, put_alive};
use crate::manifest::ShardKey;
use crate::verify::verify;

fn shelf(kept: &[(u32, Save)]) -> Shelf {
    Shelf::of(kept.iter().map(|(rank, save)| {
        let Source::Slot(shard) = &save.source else { unreachable!("it is in memory") };
        (*rank, &*save.held, &shard[..])
    }))
}

/// With another last byte.
fn flipped(mut save: Save) -> Save {
    let Source::Slot(shard) = &save.source else { unreachable!("it is in memory") };
    let mut shard = shard.to_vec();
    *shard.last_mut().expect("bytes") ^= 1;
    save.source = Source::Slot(shard.into());
    save
}

async fn shards(bucket: &Bucket) -> usize {
    bucket.list("shards").try_collect::<Vec<_>>().await.expect("list").len()
}

/// A job of four ranks, of which ranks 2 and 3 were on a host that is lost.
struct Job {
    bucket: Bucket,
    clock: Clock,
    run: Run,
}

impl Job {
    async fn new() -> Self {
        Self::of(Bucket::in_memory()).await
    }

    async fn of(bucket: Bucket) -> Self {
        let run = begin_run(&bucket, start()).await.expect("run");
        Self { bucket, clock: Clock::manual(), run }
    }

    /// What a lost rank sealed of step 1, as the other host keeps it.
    fn copy(rank: u32) -> Save {
        in_round(part(rank, 1, 1000 * (rank as usize + 1)), 7)
    }

    /// The agent of rank 0 or 1, and what it keeps; its trainer is dead.
    fn agent(&self, rank: u32, kept: &[(u32, Save)]) -> Flusher {
        let mut agent = agent(&self.bucket, &self.run, rank, &self.clock);
        agent.hello.member.iter_mut().for_each(|member| member.world_size = 4);
        agent.with_shelf(Some(shelf(kept)))
    }

    /// That of rank 0, which keeps these parts of all the others, where all of them are lost.
    fn only_agent(&self, copies: [Save; 3]) -> Flusher {
        let [one, two, three] = copies;
        let agent = self.agent(0, &[(1, one), (2, two), (3, three)]);
        agent.trainer.set_lost(LostRanks { ranks: vec![1, 2, 3], ..self.lost(&[1, 2, 3]) });
        agent
    }

    fn lost(&self, kept: &[u32]) -> LostRanks {
        let step = HeldStep { start: self.run.start.nonce.clone(), step: 1 };
        let kept = kept.iter().map(|rank| KeptStep { rank: *rank, step: step.clone() });
        LostRanks { ranks: vec![2, 3], kept: kept.collect() }
    }

    /// What becomes of a step of which both agents have their own parts, and so many are stored.
    async fn flush(&self, agents: &mut [Flusher; 2], shards: usize) -> [Result<u64>; 2] {
        let [first, second] = agents;
        let parts = [0, 1].map(Self::copy);
        let both = async { tokio::join!(first.flush(&parts[0]), second.flush(&parts[1])) };
        let (one, other) = in_time((&self.bucket, &self.clock), shards, both).await;
        [one, other]
    }

    async fn steps(&self) -> usize {
        assert_eq!(verify(&self.bucket, None, &|_| {}).await.expect("verify"), []);
        list_steps(&self.bucket).await.expect("list").len()
    }
}

/// Such a step was refused: what its ranks had sealed was in memory alone until the next save.
#[tokio::test]
async fn a_step_of_lost_ranks_comes_to_the_store_out_of_their_copies() {
    let job = Job::new().await;
    let mut agents = [job.agent(0, &[(2, Job::copy(2)), (3, Job::copy(3))]), job.agent(1, &[])];
    for agent in &agents {
        agent.trainer.set_lost(job.lost(&[2, 3]));
    }
    for flushed in job.flush(&mut agents, 4).await {
        flushed.expect("durable");
    }
    assert_eq!(job.steps().await, 1);
    assert_eq!(list_ranks(&job.bucket).await.expect("list"), [], "nor is a note left");
}

/// Nobody waits for what nobody keeps.
#[tokio::test]
async fn a_step_of_which_one_part_is_kept_nowhere_is_refused() {
    let job = Job::new().await;
    let mut agents = [job.agent(0, &[(2, Job::copy(2))]), job.agent(1, &[])];
    for agent in &agents {
        agent.trainer.set_lost(job.lost(&[2]));
    }
    for flushed in job.flush(&mut agents, 2).await {
        let error = flushed.expect_err("refused");
        assert!(error.message().contains("rank 3 is gone, and left nobody"), "{error}");
    }
    assert_eq!((job.steps().await, shards(&job.bucket).await), (0, 2), "nor is what is kept stored in vain");
}

/// No start comes that would tell who is lost.
#[tokio::test]
async fn who_keeps_copies_of_ranks_that_tell_nothing_stores_them_at_last() {
    let job = Job::new().await;
    let mut agents = [job.agent(0, &[(2, Job::copy(2))]), job.agent(1, &[(3, Job::copy(3))])];
    let [first, second] = &mut agents;
    let parts = [0, 1].map(Job::copy);
    let flushes = async { tokio::join!(first.flush(&parts[0]), second.flush(&parts[1])) };
    tokio::pin!(flushes);
    let later = async {
        stored(&job.bucket, 2).await;
        // Rank 3 tells that it is at work for a while.
        for expected in [2, 2, 2, 3] {
            put_alive(&job.bucket, job.run.save(1), 3).await.expect("put");
            pass(&job.clock, 100).await;
            assert_eq!(shards(&job.bucket).await, expected, "of rank 2 nothing was heard");
        }
        pass(&job.clock, 1000).await;
    };
    let (one, other) = tokio::select! {
        done = &mut flushes => done,
        () = later => panic!("it waits for ever"),
    };
    one.and(other).expect("durable");
    assert_eq!(job.steps().await, 1);
}

/// Its job goes on, and has another agent store what that of a rank did not.
#[tokio::test]
async fn while_its_trainer_lives_an_agent_stores_nobody_elses_part() {
    let job = Job::new().await;
    let (trainer, _listener) = trainer();
    let mut agent = Flusher { trainer, ..agent(&job.bucket, &job.run, 0, &job.clock) };
    agent.hello.member.iter_mut().for_each(|member| member.world_size = 2);
    let mut agent = agent.with_shelf(Some(shelf(&[(1, Job::copy(1))])));
    let own = Job::copy(0);
    let error =
        in_time((&job.bucket, &job.clock), 1, agent.flush(&own)).await.expect_err("it waited in vain");
    assert!(error.message().contains("ranks [1] did not store their parts in time"), "{error}");
    assert_eq!(shards(&job.bucket).await, 1);
}

/// A damaged copy, and one of another try of the step, make no step; all ranks are told at once.
#[tokio::test]
async fn what_is_wrong_with_a_copy_is_told_to_all() {
    for (copy, expected) in [
        (flipped(Job::copy(2)), "rank 2: step 1: tensor `t@2` "),
        (in_round(part(2, 1, 3000), 6), "rank 2: the copy that is left of its part is of another try"),
    ] {
        let job = Job::new().await;
        let mut agents = [job.agent(0, &[(2, copy), (3, Job::copy(3))]), job.agent(1, &[])];
        for agent in &agents {
            agent.trainer.set_lost(job.lost(&[2, 3]));
        }
        for flushed in job.flush(&mut agents, 2).await {
            let error = flushed.expect_err("refused");
            assert!(error.message().contains(expected), "{error}");
        }
        assert_eq!((job.steps().await, shards(&job.bucket).await), (0, 2), "nor is it stored");
    }
}

/// The store goes away amid it: it is tried again, and comes to one step.
#[tokio::test]
async fn a_store_that_fails_has_parts_of_others_stored_again() {
    for nth in 2..=5 {
        for mode in [FaultMode::Before, FaultMode::LoseReply] {
            let (job, faults) = (Job::new().await, Faults::new());
            let mut agents = [job.agent(0, &[(2, Job::copy(2)), (3, Job::copy(3))]), job.agent(1, &[])];
            for agent in &mut agents {
                agent.trainer.set_lost(job.lost(&[2, 3]));
            }
            agents[0].target = Some((job.bucket.with_faults(&faults).with_deadline_ms(300), job.run.clone()));
            faults.script(OperationKind::Put, nth, mode);
            for flushed in job.flush(&mut agents, 4).await {
                flushed.unwrap_or_else(|error| panic!("{nth} {mode:?}: {error}"));
            }
            assert_eq!(job.steps().await, 1, "{nth} {mode:?}");
        }
    }
}

/// A lost rank's part of a try before was put over again and again, and the step never came about.
#[tokio::test]
async fn what_a_lost_rank_stored_of_another_try_is_put_over_once() {
    let job = Job::new().await;
    let mut earlier = job.agent(2, &[]);
    let save = in_round(part(2, 1, 500), 6);
    let told = async {
        while list_ranks(&job.bucket).await.expect("list").is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! { done = earlier.flush(&save) => panic!("{done:?}"), () = told => {} }
    let mut agent = job.only_agent([1, 2, 3].map(Job::copy));
    let own = Job::copy(0);
    in_time((&job.bucket, &job.clock), 4, agent.flush(&own)).await.expect("durable");
    assert_eq!((job.steps().await, shards(&job.bucket).await), (1, 5));
}

/// As by the rank's own agent, which lives after all, or by a start that took it for a dead one's: the step was refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_whose_upload_is_aborted_is_begun_anew() {
    for aborts in [1, MOST_BEGUN_ANEW, MOST_BEGUN_ANEW + 1] {
        let directory = tempfile::tempdir().expect("directory");
        let url: BucketUrl = format!("file://{}", directory.path().display()).parse().expect("url");
        let job = Job::of(Bucket::open(&url, &StoreSettings::default()).await.expect("bucket")).await;
        let large = in_round(part(2, 1, 20 << 20), 7);
        let (faults, mut agent) = (Faults::new(), job.only_agent([Job::copy(1), large, Job::copy(3)]));
        agent.target = Some((job.bucket.with_faults(&faults), job.run.clone()));
        let (own, mut left) = (Job::copy(0), aborts);
        let flush = agent.flush(&own);
        tokio::pin!(flush);
        let flushed = loop {
            let gate = faults.gate(1);
            tokio::select! { done = &mut flush => break done, () = gate.reached() => {} }
            let found = job.bucket.list_uploads("shards").await.expect("list");
            if let Some(upload) = found.first().filter(|_| left > 0) {
                job.bucket.abort_upload(&upload.key, &upload.id).await.expect("abort");
                left -= 1;
            }
            gate.open();
        };
        assert_eq!((left, flushed.is_ok()), (0, aborts <= MOST_BEGUN_ANEW), "{flushed:?}");
        assert_eq!(job.steps().await, usize::from(flushed.is_ok()));
    }
}

/// The lost rank's own agent may live after all, and goes on with what it has begun.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_of_a_rank_that_is_thought_lost_goes_on() {
    let directory = tempfile::tempdir().expect("directory");
    let url: BucketUrl = format!("file://{}", directory.path().display()).parse().expect("url");
    let job = Job::of(Bucket::open(&url, &StoreSettings::default()).await.expect("bucket")).await;
    let large = || in_round(part(2, 1, 20 << 20), 7);
    let (faults, mut lives) = (Faults::new(), job.agent(2, &[]));
    lives.target = Some((job.bucket.with_faults(&faults), job.run.clone()));
    let part = large();
    let flush = lives.flush(&part);
    tokio::pin!(flush);
    let begun = loop {
        let gate = faults.gate(1);
        tokio::select! { done = &mut flush => panic!("{done:?}"), () = gate.reached() => {} }
        match job.bucket.list_uploads("shards").await.expect("list").pop() {
            Some(upload) => break (upload, gate),
            None => gate.open(),
        }
    };
    let (upload, gate) = begun;
    assert_eq!(ShardKey::parse(upload.key.as_str()).expect("a shard").rank, 2);
    let own = Job::copy(0);
    job.only_agent([Job::copy(1), large(), Job::copy(3)]).flush(&own).await.expect("durable");
    let left = job.bucket.list_uploads("shards").await.expect("list");
    assert!(left.iter().any(|other| other.id == upload.id), "it was aborted");
    gate.open();
    flush.await.expect("durable");
    assert_eq!((job.steps().await, shards(&job.bucket).await), (1, 4));
}

/// One moment without the store had who keeps copies count from its end, and the others gave up before.
#[tokio::test]
async fn who_keeps_copies_goes_on_counting_after_the_store_was_away() {
    let (job, faults) = (Job::new().await, Faults::new());
    let kept = [(2, Job::copy(2)), (3, Job::copy(3))];
    let [mut first, mut second] = [job.agent(0, &kept), job.agent(1, &[])];
    first.target = Some((job.bucket.with_faults(&faults).with_deadline_ms(20), job.run.clone()));
    let parts = [0, 1].map(Job::copy);
    let flushes = async { tokio::join!(first.flush(&parts[0]), second.flush(&parts[1])) };
    tokio::pin!(flushes);
    let later = async {
        stored(&job.bucket, 2).await;
        pass(&job.clock, 300).await;
        faults.set_down(true);
        pass(&job.clock, 2).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        faults.set_down(false);
        pass(&job.clock, 1000).await;
    };
    let (one, other) = tokio::select! {
        done = &mut flushes => done,
        () = later => panic!("it waits for ever"),
    };
    assert!(faults.injected() > 0);
    one.and(other).expect("durable");
    assert_eq!(job.steps().await, 1);
}

/// A part of another rank's that came to the store was no sign that the store had been back.
#[tokio::test]
async fn a_store_that_is_away_between_two_parts_of_others_is_waited_for_anew() {
    let (job, faults) = (Job::new().await, Faults::new());
    let mut agent = job.only_agent([1, 2, 3].map(Job::copy));
    agent.target = Some((job.bucket.with_faults(&faults).with_deadline_ms(20), job.run.clone()));
    let own = Job::copy(0);
    let flush = agent.flush(&own);
    tokio::pin!(flush);
    let time = async {
        for away in 1..=4 {
            // As many requests as one more part takes, and no two.
            faults.cut_off(8);
            let before = faults.injected();
            while faults.injected() == before {
                pass(&job.clock, 1).await;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            pass(&job.clock, 200).await;
            assert!(shards(&job.bucket).await <= 1 + away);
            faults.set_down(false);
        }
        pass(&job.clock, 1000).await;
    };
    let flushed = tokio::select! {
        done = &mut flush => done,
        () = time => panic!("it waits for ever"),
    };
    flushed.expect("durable");
    assert_eq!((job.steps().await, shards(&job.bucket).await), (1, 4));
}

/// A rank of a lost host may live on, and learn that its job began anew: what all had stored was refused then.
#[tokio::test]
async fn a_rank_that_is_superseded_once_its_part_is_stored_leaves_the_step_to_the_others() {
    let (job, faults) = (Job::new().await, Faults::new());
    let mut waits = agent(&job.bucket, &job.run, 0, &job.clock);
    let (trainer, _hears) = trainer();
    let target = Some((job.bucket.with_faults(&faults), job.run.clone()));
    let mut lives = Flusher { trainer, target, ..agent(&job.bucket, &job.run, 1, &job.clock) };
    let own = Job::copy(0);
    let both = async { tokio::join!(waits.flush(&own), lives.settle(Job::copy(1))).0 };
    tokio::pin!(both);
    loop {
        let gate = faults.gate(1);
        tokio::select! { done = &mut both => panic!("{done:?}"), () = gate.reached() => {} }
        if shards(&job.bucket).await == 2 {
            let later = Start { nonce: "1".repeat(32), ..start() };
            begin_run(&job.bucket, later).await.expect("a later start");
            job.clock.advance(Duration::from_secs(60));
            gate.open();
            break;
        }
        gate.open();
    }
    in_time((&job.bucket, &job.clock), 2, both).await.expect("durable");
    assert_eq!(job.steps().await, 1);
}

/// Of a rank that told nothing for long it is not known that it is gone: a copy of another try, or a damaged one, had the step
/// refused.
#[tokio::test]
async fn a_rank_that_tells_nothing_for_long_is_waited_for_where_what_is_kept_is_of_no_use() {
    for copy in [in_round(part(2, 1, 3000), 6), flipped(Job::copy(2))] {
        let job = Job::new().await;
        let kept = [(2, copy), (3, Job::copy(3))];
        let [mut first, mut second, mut late] = [job.agent(0, &kept), job.agent(1, &[]), job.agent(2, &[])];
        let parts = [0, 1, 2].map(Job::copy);
        let flushes = async { tokio::join!(first.flush(&parts[0]), second.flush(&parts[1])) };
        tokio::pin!(flushes);
        let later = async {
            stored(&job.bucket, 2).await;
            pass(&job.clock, 500).await;
            tokio::join!(late.flush(&parts[2]), pass(&job.clock, 1000)).0
        };
        let (one, other) = tokio::select! {
            done = &mut flushes => done,
            done = later => panic!("it waits for ever: {done:?}"),
        };
        one.and(other).expect("durable");
        assert_eq!((job.steps().await, shards(&job.bucket).await), (1, 4));
    }
}
