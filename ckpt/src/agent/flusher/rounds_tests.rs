//! Tries of a save that come after another one of the same step: what the earlier one left is not taken for theirs.

use forebay_core::ObjectKey;
use forebay_io::object::{Condition, ObjectInfo};
use futures::TryStreamExt;

use super::alive_tests::age;
use super::tests::{change, flusher, sealed, start, trainer};
use super::*;
use crate::agent::Member;
use crate::catalog::{
    Garbage, Keep, KnownShards, LEAST_AGE, Round, Start, collect_garbage, list_ranks, list_steps,
    load_manifest, retain,
};
use crate::verify::verify;

/// More than any rank waits for another one.
const LONG: Duration = Duration::from_secs(1000);

/// The agent of a rank of two, of the start that `run` records.
pub(super) fn agent(bucket: &Bucket, run: &Run, rank: u32, clock: &Clock) -> Flusher {
    let mut agent = flusher(bucket, run, trainer().0);
    agent.clock = clock.clone();
    agent.hello.start = run.start.clone();
    agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
    agent
}

/// A rank's part of a step: a tensor of its own, of so many bytes.
pub(super) fn part(rank: u32, step: u64, length: usize) -> Save {
    let mut save = sealed(step, length);
    change(&mut save, |seal| seal.tensors[0].name = format!("t@{rank}"));
    save
}

/// Lets so many seconds pass, and whoever waits do what there is to do.
pub(super) async fn pass(clock: &Clock, seconds: u64) {
    for _ in 0..seconds {
        clock.advance(Duration::from_secs(1));
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
}

/// Returns once so many shards were stored: until then, no time passes for those who wait for others.
pub(super) async fn stored(bucket: &Bucket, shards: usize) {
    while bucket.list("shards").try_collect::<Vec<_>>().await.expect("list").len() < shards {
        tokio::task::yield_now().await;
    }
}

/// What becomes of work where time passes once so many shards were stored.
pub(super) async fn in_time<T>(
    (bucket, clock): (&Bucket, &Clock),
    shards: usize,
    work: impl Future<Output = T>,
) -> T {
    let time = async {
        stored(bucket, shards).await;
        pass(clock, LONG.as_secs()).await;
    };
    tokio::select! {
        done = work => done,
        () = time => panic!("it waits for ever"),
    }
}

/// A step that only the local disk had was never brought to the store where the agent of one rank had waited for another
/// one's part in vain.
#[tokio::test]
async fn what_an_earlier_start_gave_up_is_no_reason_for_its_heirs() {
    let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
    let place = (&bucket, &clock);
    let run = begin_run(&bucket, start()).await.expect("run");
    let saves = [part(0, 1, 1000), part(1, 1, 2000)];
    let mut waits = agent(&bucket, &run, 0, &clock);
    in_time(place, 1, waits.settle(part(0, 1, 1000))).await;
    let notes = list_ranks(&bucket).await.expect("list");
    assert_eq!(notes.len(), 2, "its part, and that the step will not be: {notes:?}");
    for (number, comes) in [(1, false), (2, true)] {
        let later = Start { nonce: format!("{number:x}").repeat(32), ..start() };
        let later = begin_run(&bucket, later).await.expect("a later start");
        let heirs = [0, 1].map(|rank| {
            let mut heir = agent(&bucket, &run, rank, &clock);
            heir.hello = Hello { start: later.start.clone(), ..heir.hello };
            heir.heir_of = Some(run.start.nonce.clone());
            heir
        });
        let [mut first, mut second] = heirs;
        if comes {
            let (one, other) =
                in_time(place, 2, async { tokio::join!(first.flush(&saves[0]), second.flush(&saves[1])) })
                    .await;
            one.and(other).expect("durable");
        } else {
            // What a rank of the same start says does count, at once.
            second.give_up(1, None, "its copy is damaged").await;
            let error = first.flush(&saves[0]).await.expect_err("refused");
            assert!(error.message().contains("rank 1: its copy is damaged"), "{error}");
        }
        assert_eq!(list_steps(&bucket).await.expect("list").len(), usize::from(comes));
    }
    assert_eq!(list_ranks(&bucket).await.expect("list"), [], "nor is a note left");
    assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
}

/// That part, in the try of that number.
pub(super) fn in_round(mut save: Save, number: u64) -> Save {
    change(&mut save, |seal| (seal.round, seal.save) = (Some(Round::new(number)), number));
    save
}

/// How long the tensors of the step are that is there.
async fn lengths(bucket: &Bucket, run: &Run) -> Vec<u64> {
    let manifest = load_manifest(bucket, &run.save(1)).await.expect("it is there");
    manifest.tensors.iter().map(|tensor| tensor.shape[0]).collect()
}

/// A job committed a step that was of one try on one rank and of another try on the other: what the first had left in the
/// store was taken for the second's.
#[tokio::test]
async fn a_step_is_of_one_try_on_all_ranks() {
    for tells in [true, false] {
        let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
        let place = (&bucket, &clock);
        let run = begin_run(&bucket, start()).await.expect("run");
        let [mut first, mut second] = [0, 1].map(|rank| agent(&bucket, &run, rank, &clock));
        // Of the first try rank 0's part alone gets to the store. That it gave up may not, where the store is away.
        if tells {
            in_time(place, 1, first.settle(in_round(part(0, 1, 1000), 1))).await;
        } else {
            in_time(place, 1, first.flush(&in_round(part(0, 1, 1000), 1)))
                .await
                .expect_err("it waited in vain");
        }
        assert_eq!(list_ranks(&bucket).await.expect("list").len(), 1 + usize::from(tells));
        let parts = [in_round(part(0, 1, 1001), 2), in_round(part(1, 1, 2001), 2)];
        let other = second.flush(&parts[1]);
        tokio::pin!(other);
        let looks = async {
            stored(&bucket, 2).await;
            pass(&clock, 60).await;
        };
        let waits = tokio::select! { _ = &mut other => false, () = looks => true };
        assert!(waits, "it has nobody to commit with yet: {:?}", list_steps(&bucket).await.expect("list"));
        let (one, other) = in_time(place, 3, async { tokio::join!(first.flush(&parts[0]), other) }).await;
        one.and(other).expect("durable");
        assert_eq!(lengths(&bucket, &run).await, [1001, 2001]);
        assert_eq!(list_ranks(&bucket).await.expect("list"), [], "nor is a note left");
        assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
    }
}

/// A rank took what another try of the step had committed meanwhile for its own.
#[tokio::test]
async fn what_another_try_committed_is_told() {
    let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
    let place = (&bucket, &clock);
    let run = begin_run(&bucket, start()).await.expect("run");
    let mut waits = agent(&bucket, &run, 1, &clock);
    let save = in_round(part(1, 1, 2001), 2);
    let waits = waits.flush(&save);
    tokio::pin!(waits);
    let looks = async {
        stored(&bucket, 1).await;
        pass(&clock, 5).await;
    };
    tokio::select! { done = &mut waits => panic!("{done:?}"), () = looks => {} }
    // Agents of the first try that were thought dead.
    let [mut first, mut second] = [0, 1].map(|rank| agent(&bucket, &run, rank, &clock));
    let parts = [in_round(part(0, 1, 1000), 1), in_round(part(1, 1, 2000), 1)];
    let all = async { tokio::join!(first.flush(&parts[0]), second.flush(&parts[1]), waits) };
    let (one, other, waited) = in_time(place, 3, all).await;
    one.and(other).expect("durable");
    let error = waited.expect_err("it is another one's");
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert_eq!(lengths(&bucket, &run).await, [1000, 2000]);
    assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
}

/// A rank's index may arrive again after another rank's agent committed the step and took the notes away: its answer was
/// lost, or its agent died and another one took its place.
#[tokio::test]
async fn an_index_that_comes_after_the_commit_goes() {
    let directory = tempfile::tempdir().expect("directory");
    let url: BucketUrl = format!("file://{}", directory.path().display()).parse().expect("url");
    let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
    let clock = Clock::system();
    let run = begin_run(&bucket, start()).await.expect("run");
    let mut agents = [0, 1].map(|rank| agent(&bucket, &run, rank, &clock));
    let keys = async |prefix| {
        let found: Vec<ObjectInfo> = bucket.list(prefix).try_collect().await.expect("list");
        found.into_iter().map(|object| object.key).collect::<Vec<_>>()
    };
    // Saves a step, and then has what rank 0 told of its part arrive once more.
    let mut save = async |step| {
        let [first, second] = &mut agents;
        let parts = [part(0, step, 1000), part(1, step, 2000)];
        let one = first.flush(&parts[0]);
        tokio::pin!(one);
        let told = async {
            loop {
                let is_its = |key: &ObjectKey| {
                    key.as_str().contains(&format!("/{step:020}/")) && key.as_str().ends_with("/000000.json")
                };
                match keys("ranks").await.into_iter().find(is_its) {
                    Some(index) => break index,
                    None => tokio::task::yield_now().await,
                }
            }
        };
        let index = tokio::select! { done = &mut one => panic!("{done:?}"), index = told => index };
        let (data, _) = bucket.get_whole(&index).await.expect("the index");
        let (one, other) = tokio::join!(one, second.flush(&parts[1]));
        one.and(other).expect("durable");
        bucket.put(&index, data, Condition::Always).await.expect("put");
        index
    };
    let first = save(1).await;
    assert_eq!(keys("ranks").await, [first]);
    // The next commit takes it.
    let second = save(2).await;
    assert_eq!(keys("ranks").await, std::slice::from_ref(&second));
    let data = bucket.get_whole(&second).await.expect("the index").0;
    // It keeps nothing that retention takes.
    let last = save(3).await;
    bucket.put(&second, data, Condition::Always).await.expect("put");
    let keep = Keep { newest: Some(1), every: None };
    let removed = retain(&bucket, keep, &mut KnownShards::default()).await.expect("retain");
    assert_eq!((removed.manifests, removed.shards, keys("shards").await.len()), (2, 4, 2));
    // Of a start that saves no more they go once they are old, whether their step is there or not.
    assert_eq!(collect_garbage(&bucket, LEAST_AGE, false).await.expect("gc"), Garbage::default());
    age(directory.path());
    let found = collect_garbage(&bucket, LEAST_AGE, false).await.expect("gc");
    assert_eq!(found, Garbage { indexes: vec![second, last], ..Garbage::default() });
    assert_eq!(keys("ranks").await, []);
    assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
}
