//! A step of many ranks: what it costs them together, and who stands in for whom.

use forebay_io::object::{Condition, Delay, ObjectInfo, OperationKind};
use futures::TryStreamExt;
use futures::future::join_all;

use super::rounds_tests::{in_time, part};
use super::tests::{flusher, naming, start, trainer};
use super::*;
use crate::agent::Member;
use crate::catalog::{Note, RankKey, list_ranks, list_steps};
use crate::verify::verify;

/// The agent of one of so many ranks.
fn agent(bucket: &Bucket, run: &Run, (rank, world_size): (u32, u32), clock: &Clock) -> Flusher {
    let mut agent = flusher(bucket, run, trainer().0);
    agent.clock = clock.clone();
    agent.hello.start = run.start.clone();
    agent.hello.member = Some(Member { run: run.clone(), rank, world_size });
    agent
}

fn requests(bucket: &Bucket, kind: OperationKind) -> u64 {
    bucket.counters().of(kind).requests
}

/// Every agent that saw all indexes read all of them, put them together, and sent the manifest: requests grew with the
/// square of the ranks.
#[tokio::test]
async fn a_step_costs_each_rank_the_same_however_many_there_are() {
    use OperationKind::{Get, Head, List, Put};
    for ranks in [2, 16] {
        // Slow, so that what agents do at the same time is not done one after another.
        let delay = Delay { request_us: 10_000, mib_us: 0 };
        let (bucket, clock) = (Bucket::in_memory().with_delay(delay), Clock::system());
        let run = begin_run(&bucket, start()).await.expect("run");
        let before = [Get, Put, Head, List].map(|kind| requests(&bucket, kind));
        let flush = async |rank| {
            let mut agent = agent(&bucket, &run, (rank, ranks), &clock);
            agent.flush(&part(rank, 1, 1000)).await
        };
        let flushed = join_all((0..ranks).map(flush)).await;
        for flushed in flushed {
            flushed.expect("durable");
        }
        let [gets, puts, heads, lists] = [(Get, 0), (Put, 1), (Head, 2), (List, 3)]
            .map(|(kind, place): (_, usize)| requests(&bucket, kind) - before[place]);
        println!("{ranks} ranks: {gets} GETs, {puts} PUTs, {heads} HEADs, {lists} LISTs");
        let ranks = u64::from(ranks);
        // Each asks whether a later start took over, and one reads what all stored.
        assert!(gets <= 3 * ranks, "{gets} GETs of {ranks} ranks");
        assert_eq!(puts, 2 * ranks + 1, "a shard and an index of each, and one manifest");
        assert!(heads <= 20 * ranks, "{heads} HEADs of {ranks} ranks");
        assert!(lists <= 20 * ranks, "{lists} LISTs of {ranks} ranks");
        assert_eq!(list_ranks(&bucket).await.expect("list"), [], "nor is a note left");
        assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
    }
}

#[tokio::test]
async fn a_rank_whose_turn_it_was_and_that_died_is_stood_in_for() {
    let (bucket, clock, ranks) = (Bucket::in_memory(), Clock::manual(), 4);
    let run = begin_run(&bucket, start()).await.expect("run");
    let key = |rank| RankKey { save: run.save(1), rank, note: Note::Index };
    // Runs an agent until it told of its part.
    let told = async |rank| {
        while !list_ranks(&bucket).await.expect("list").contains(&key(rank)) {
            tokio::task::yield_now().await;
        }
    };
    let mut indexes = Vec::new();
    for rank in 1..ranks {
        let mut dies = agent(&bucket, &run, (rank, ranks), &clock);
        let save = part(rank, 1, 1000);
        tokio::select! { done = dies.flush(&save) => panic!("{done:?}"), () = told(rank) => {} }
        let listed: Vec<ObjectInfo> = bucket.list("ranks").try_collect().await.expect("list");
        let [ObjectInfo { key: index, .. }] = &listed[..] else { panic!("{listed:?}") };
        let index = index.clone();
        let data = bucket.get_whole(&index).await.expect("the index").0;
        bucket.delete(&index).await.expect("delete");
        indexes.push((index, data));
    }
    let (mut lives, save) = (agent(&bucket, &run, (0, ranks), &clock), part(0, 1, 1000));
    let lives = lives.flush(&save);
    tokio::pin!(lives);
    tokio::select! { done = &mut lives => panic!("{done:?}"), () = told(0) => {} }
    // As if the dead had come later: each of them would be first.
    for (index, data) in indexes {
        bucket.put(&index, data, Condition::Always).await.expect("put");
    }
    let begun = clock.now();
    in_time((&bucket, &clock), ranks as usize, lives).await.expect("durable");
    let waited = clock.now().since(begun).as_secs();
    assert!((15..=20).contains(&waited), "five seconds for each of the others: {waited} s");
    assert_eq!(list_steps(&bucket).await.expect("list").len(), 1);
    assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
}

/// What one rank's state names another may have stored; what nobody did makes the step none, for all of them.
#[tokio::test]
async fn what_a_rank_names_and_nobody_stored_is_no_step() {
    let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
    let run = begin_run(&bucket, start()).await.expect("run");
    let flush = async |step, named: [&str; 2]| {
        let rank = async |rank: u32, tree| {
            let save = naming(part(rank, step, 1000), tree, named[rank as usize]);
            agent(&bucket, &run, (rank, 2), &clock).flush(&save).await
        };
        let both = async { tokio::join!(rank(0, "state"), rank(1, "state@1")) };
        in_time((&bucket, &clock), 2 * step as usize, both).await
    };
    let durable = flush(1, ["t", "t@0"]).await;
    assert!(durable.0.is_ok() && durable.1.is_ok(), "{durable:?}");
    let refused = flush(2, ["t", "u"]).await;
    for refused in [refused.0, refused.1] {
        let error = refused.expect_err("no step");
        assert!(error.message().contains("lacks tensor `u`, which the `state` of rank 1 names"), "{error}");
    }
    assert_eq!(list_steps(&bucket).await.expect("list").len(), 1);
    assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
}
