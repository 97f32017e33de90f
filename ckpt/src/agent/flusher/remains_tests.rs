//! What a rank stored and noted of a step that came to nothing: it goes once nobody can make a step of it any more.

use forebay_core::ObjectKey;
use forebay_io::net::FdStream;
use forebay_io::object::{FaultMode, Faults, OperationKind};

use super::super::patience::GIVE_UP_AFTER;
use super::alive_tests::while_time_passes;
use super::commit_tests::warnings;
use super::delta_tests::{expect_whole, objects, state};
use super::rounds_tests::part;
use super::tests::{flusher, start, trainer};
use super::*;
use crate::agent::Member;
use crate::catalog::{Keep, Start, list_steps};

/// A rank's agent at work, and what its trainer hears.
struct Rank {
    queue: mpsc::UnboundedSender<Work>,
    hears: FdStream,
    agent: tokio::task::JoinHandle<()>,
}

impl Rank {
    fn new(bucket: &Bucket, run: &Run, rank: u32, clock: &Clock) -> Self {
        let (trainer, hears) = trainer();
        // Else it would open another bucket.
        trainer.set_gone();
        let mut agent = flusher(bucket, run, trainer);
        agent.clock = clock.clone();
        agent.hello.url = bucket.url().to_string();
        agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
        let (queue, work) = mpsc::unbounded_channel();
        Self { queue, hears, agent: tokio::spawn(agent.settle_all(work)) }
    }

    async fn take(&self, work: Work) {
        self.queue.send(work).expect("it takes work");
    }

    /// What becomes of its next save.
    async fn settled(&mut self) -> bool {
        loop {
            while !self.hears.readable(Duration::ZERO).expect("readable") {
                tokio::task::yield_now().await;
            }
            let (frame, _) = self.hears.receive().expect("receive").expect("a frame");
            match serde_json::from_slice(&frame).expect("parses") {
                Reply::Durable { .. } => return true,
                Reply::Failed { .. } => return false,
                _ => {}
            }
        }
    }
}

async fn keys(bucket: &Bucket, prefix: &str) -> Vec<ObjectKey> {
    objects(bucket, prefix).await.into_iter().map(|object| object.key).collect()
}

/// A step whose first rank stores its part, and of which the second one says that it will not be, or comes too late; and
/// what is left once the next steps are saved.
async fn given_up(comes_late: bool) {
    let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
    let run = begin_run(&bucket, start()).await.expect("run");
    let [mut first, mut second] = [0, 1].map(|rank| Rank::new(&bucket, &run, rank, &clock));
    first.take(Work::Save(part(0, 1, 1000))).await;
    if !comes_late {
        second.take(Work::GiveUp { step: 1, round: None, reason: "no memory".to_owned() }).await;
    }
    assert!(!while_time_passes(&clock, first.settled()).await, "it is given up");
    let failed = keys(&bucket, "ranks").await.into_iter().filter(|key| key.as_str().ends_with(".failed"));
    for failed in failed.collect::<Vec<_>>() {
        // As if it could not be told.
        bucket.delete(&failed).await.expect("delete");
    }
    if comes_late {
        second.take(Work::Save(part(1, 1, 2000))).await;
        assert!(while_time_passes(&clock, second.settled()).await, "it has all parts");
    }
    let shards = keys(&bucket, "shards").await;
    assert_eq!(shards.len(), 1 + usize::from(comes_late));
    for step in 2..=3 {
        for (rank, agent) in [&first, &second].into_iter().enumerate() {
            agent.take(Work::Save(part(rank as u32, step, 1000))).await;
        }
        let both = async { (first.settled().await, second.settled().await) };
        assert_eq!(while_time_passes(&clock, both).await, (true, true));
        // No request of those that tried is under way for so long.
        let there = keys(&bucket, "shards").await;
        assert!(step == 3 || shards.iter().all(|shard| there.contains(shard)), "not yet");
        clock.advance(GIVE_UP_AFTER);
    }
    for (rank, agent) in [&first, &second].into_iter().enumerate() {
        agent.take(Work::Save(part(rank as u32, 4, 1000))).await;
    }
    for Rank { queue, agent, hears } in [first, second] {
        drop(queue);
        while_time_passes(&clock, agent).await.expect("it ends");
        drop(hears);
    }
    let steps: Vec<_> = list_steps(&bucket).await.expect("list").iter().map(|info| info.key.step).collect();
    assert_eq!(steps, [if comes_late { vec![1] } else { vec![] }, vec![2, 3, 4]].concat());
    assert_eq!(keys(&bucket, "shards").await.len(), 2 * steps.len(), "what steps name, and nothing else");
    assert_eq!(keys(&bucket, "ranks").await, []);
    expect_whole(&bucket).await;
}

#[tokio::test]
async fn what_was_stored_of_a_step_that_was_given_up_goes_with_a_later_save() {
    given_up(false).await;
}

#[tokio::test]
async fn a_step_that_came_about_after_all_stays_whole() {
    given_up(true).await;
}

/// A rank alone, which has one whole step, and a sealed next one that refers to it.
async fn alone(faults: &Faults, clock: &Clock) -> (Bucket, Run, Flusher, FdStream, Save) {
    let plain = Bucket::in_memory();
    let run = begin_run(&plain, start()).await.expect("run");
    let (trainer, hears) = trainer();
    let mut agent = flusher(&plain.with_faults(faults).with_deadline_ms(20), &run, trainer);
    agent.clock = clock.clone();
    agent.hello.keep = Keep { newest: Some(2), every: None };
    agent.flush(&state(1, &[1; 20])).await.expect("durable");
    let mut fills = [1; 20];
    fills[19] = 2;
    (plain, run, agent, hears, state(2, &fills))
}

/// Has a bit of a sealed slot flip.
fn damage(save: &mut Save) {
    let Source::Slot(slot) = &save.source else { panic!("it is in memory") };
    let mut slot = slot.to_vec();
    *slot.last_mut().expect("bytes") ^= 1;
    save.source = Source::Slot(slot.into());
}

/// Nobody took it back: when the step that it refers to was deleted, the shards of that stayed for good.
#[tokio::test]
async fn a_save_that_failed_keeps_nothing_from_retention() {
    // Which put is denied: the first one is the intent's.
    for (fails_at, denied) in [("a look at its bytes", None), ("the shard", Some(2)), ("the commit", Some(3))]
    {
        let (faults, clock) = (Faults::new(), Clock::manual());
        let (bucket, _, mut agent, _hears, mut save) = alone(&faults, &clock).await;
        match denied {
            Some(nth) => drop(faults.script(OperationKind::Put, nth, FaultMode::Deny)),
            None => damage(&mut save),
        }
        agent.flush(&save).await.expect_err(fails_at);
        assert_eq!(keys(&bucket, "ranks").await.len(), 1, "{fails_at}");
        for step in 3..=5 {
            agent.flush(&state(step, &[10 + step as u8; 20])).await.expect("durable");
            // A commit may be on its way for long.
            assert_eq!(
                keys(&bucket, "ranks").await.len(),
                usize::from(denied == Some(3) && step == 3),
                "{fails_at}"
            );
            clock.advance(GIVE_UP_AFTER);
            agent.remove_remains().await;
            assert!(agent.clean_up().await);
        }
        assert_eq!(keys(&bucket, "ranks").await, [], "{fails_at}");
        assert_eq!(keys(&bucket, "shards").await.len(), 2, "{fails_at}");
        expect_whole(&bucket).await;
    }
}

/// Another save of a step whose commit may still come about took back the note that keeps what that commit names.
#[tokio::test]
async fn a_save_that_failed_leaves_the_note_of_one_in_doubt() {
    for given in [Given::First, Given::Again] {
        let (faults, clock) = (Faults::new(), Clock::manual());
        let (bucket, _, mut agent, _hears, mut save) = alone(&faults, &clock).await;
        save.given = given;
        // Of one that another agent has stored before it died, no more is known.
        faults.script(OperationKind::Put, if given == Given::First { 3 } else { 2 }, FaultMode::Deny);
        agent.flush(&save).await.expect_err("denied");
        assert_eq!(keys(&bucket, "ranks").await.len(), 1);
        save.given = Given::First;
        damage(&mut save);
        agent.flush(&save).await.expect_err("damaged");
        let noted = keys(&bucket, "ranks").await;
        agent.flush(&state(3, &[3; 20])).await.expect("durable");
        assert_eq!(keys(&bucket, "ranks").await, noted, "{given:?}");
    }
}

/// Its successor cannot know what it noted in an earlier try.
#[tokio::test]
async fn a_save_that_is_superseded_between_its_tries_leaves_nothing() {
    let (faults, clock) = (Faults::new(), Clock::manual());
    let (bucket, _, mut agent, mut hears, save) = alone(&faults, &clock).await;
    for nth in 2..=30 {
        faults.script(OperationKind::Put, nth, FaultMode::Before);
    }
    let flush = agent.flush(&save);
    tokio::pin!(flush);
    let failed = async {
        while !warnings(&mut hears).iter().any(|told| told.contains("trying again")) {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! { done = &mut flush => panic!("{done:?}"), () = failed => {} }
    faults.clear();
    assert_eq!(keys(&bucket, "ranks").await.len(), 1);
    begin_run(&bucket, Start { nonce: "f".repeat(32), ..start() }).await.expect("another");
    let refused = while_time_passes(&clock, flush).await.expect_err("superseded");
    assert_eq!(refused.kind(), ErrorKind::Stale);
    assert_eq!(keys(&bucket, "ranks").await, []);
    assert_eq!(keys(&bucket, "shards").await.len(), 1);
}

/// What is gone was looked for where a step would have named it: that nothing was there to delete kept its notes.
#[tokio::test]
async fn a_save_whose_shard_is_gone_before_its_commit_is_answered_leaves_no_note() {
    let (faults, clock) = (Faults::new(), Clock::manual());
    let (bucket, _, mut agent, _hears, save) = alone(&faults, &clock).await;
    faults.script(OperationKind::Put, 3, FaultMode::Deny);
    let there = keys(&bucket, "shards").await;
    agent.flush(&save).await.expect_err("denied");
    for shard in keys(&bucket, "shards").await.into_iter().filter(|shard| !there.contains(shard)) {
        bucket.delete(&shard).await.expect("delete");
    }
    agent.flush(&state(3, &[3; 20])).await.expect("durable");
    clock.advance(GIVE_UP_AFTER);
    agent.remove_remains().await;
    assert_eq!(keys(&bucket, "ranks").await, []);
}
