//! Saves that take longer than garbage may be old: they are left alone, and waited for.

use std::collections::HashSet;
use std::path::Path;

use forebay_core::ObjectKey;
use forebay_io::object::{Condition, Faults, OperationKind, Upload, UploadOptions};

use super::super::copy::{Health, copy};
use super::super::sweep::{MOST, Sweeper};
use super::rounds_tests::part;
use super::tests::{change, flusher, sealed, start, trainer};
use super::*;
use crate::agent::Member;
use crate::catalog::{
    EVERY, Garbage, LEAST_AGE, Note, RankKey, Start, collect_garbage, list_ranks, list_steps, put_alive,
};
use crate::manifest::ShardKey;
use crate::verify::verify;

/// Requests of one save at which it is held back: more than it makes.
const MOMENTS: u64 = 14;

/// Has everything below a directory be two hours old.
pub(super) fn age(directory: &Path) {
    let past = std::time::SystemTime::now() - Duration::from_secs(7200);
    for entry in std::fs::read_dir(directory).into_iter().flatten() {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            age(&path);
        }
        std::fs::File::open(&path).and_then(|file| file.set_modified(past)).expect("age");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_that_takes_hours_is_no_garbage() {
    let directory = tempfile::tempdir().expect("directory");
    let url: BucketUrl = format!("file://{}", directory.path().display()).parse().expect("url");
    let plain = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
    let run = begin_run(&plain, start()).await.expect("run");
    let (faults, clock) = (Faults::new(), Clock::manual());
    let mut agent = flusher(&plain.with_faults(&faults), &run, trainer().0);
    agent.clock = clock.clone();
    let mut caught = 0;
    for moment in 1..=MOMENTS {
        let step = moment;
        let gate = faults.gate(moment);
        let save = sealed(step, 9 << 20);
        let flush = agent.flush(&save);
        tokio::pin!(flush);
        let done = tokio::select! { done = &mut flush => Some(done), () = gate.reached() => None };
        if let Some(done) = done {
            done.expect("durable");
            break;
        }
        let uploads = plain.list_uploads("shards").await.expect("list");
        if !uploads.is_empty() {
            let alive =
                directory.path().join(format!("ranks/{step:020}/0000000001-{}/000000.alive", run.attempt()));
            age(directory.path());
            clock.advance(EVERY);
            let told = async {
                while !alive.exists() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::select! { _ = &mut flush => panic!("it is held back"), () = told => {} }
            let found = collect_garbage(&plain, LEAST_AGE, false).await.expect("gc");
            assert_eq!(found, Garbage::default(), "moment {moment}: it goes on");
            age(directory.path());
            let found = collect_garbage(&plain, LEAST_AGE, true).await.expect("gc");
            assert_eq!(
                (found.uploads.len(), found.indexes.len()),
                (1, 1),
                "moment {moment}: it went on no more"
            );
            caught += 1;
        }
        gate.open();
        flush.await.expect("durable");
        assert_eq!(list_ranks(&plain).await.expect("list"), [], "moment {moment}: no note is left");
    }
    assert!(caught >= 2, "{caught}");
    assert_eq!(verify(&plain, None, &|_| {}).await.expect("verify"), []);
}

#[tokio::test]
async fn old_uploads_of_dead_saves_are_aborted_and_young_ones_go_on() {
    let directory = tempfile::tempdir().expect("directory");
    let url: BucketUrl = format!("file://{}", directory.path().display()).parse().expect("url");
    let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
    let run = begin_run(&bucket, start()).await.expect("run");
    let key = |step| {
        let (attempt, layout) = (run.attempt().to_owned(), "00000000".to_owned());
        ShardKey { step, incarnation: run.incarnation, attempt, rank: 0, save: 1, layout }.object()
    };
    let begin = async |key: &ObjectKey| {
        let options = UploadOptions { part_bytes: Some(5 << 20), ..UploadOptions::default() };
        let mut upload = bucket.upload_with(key, options).expect("upload");
        upload.write(vec![7; (5 << 20) + 1].into()).await.expect("write");
        upload
    };
    let keys = async || {
        let found = bucket.list_uploads("").await.expect("list").into_iter();
        found.map(|upload| upload.key).collect::<HashSet<_>>()
    };
    // Two of steps, and one that is no checkpoint's.
    let other = ObjectKey::new("data/file");
    let (dead, foreign) = (begin(&key(1)).await, begin(&other).await);
    age(directory.path());
    let young = begin(&key(2)).await;
    let found = collect_garbage(&bucket, LEAST_AGE, true).await.expect("gc");
    assert_eq!(found.uploads.iter().map(|(key, _)| key).collect::<Vec<_>>(), [&key(1)]);
    assert_eq!(keys().await, HashSet::from([key(1), key(2), other.clone()]), "only looked for");
    assert_eq!(collect_garbage(&bucket, LEAST_AGE, false).await.expect("gc"), found);
    assert_eq!(keys().await, HashSet::from([key(2), other]));
    assert_eq!(collect_garbage(&bucket, LEAST_AGE, false).await.expect("gc"), Garbage::default());
    dead.complete(Condition::Always).await.expect_err("its parts are gone");
    assert_eq!(bucket.head(&key(1)).await.expect("head"), None);
    for upload in [young, foreign] {
        upload.complete(Condition::Always).await.expect("it went on");
    }
    assert_eq!(bucket.head(&key(2)).await.expect("head").map(|info| info.size), Some((5 << 20) + 1));
}

/// A start's shard in parts, of which one was sent.
async fn begin_upload(bucket: &Bucket, key: &ObjectKey) -> Upload {
    let options = UploadOptions { part_bytes: Some(5 << 20), ..UploadOptions::default() };
    let mut upload = bucket.upload_with(key, options).expect("upload");
    upload.write(vec![7; (5 << 20) + 1].into()).await.expect("write");
    upload
}

async fn uploads(bucket: &Bucket) -> HashSet<ObjectKey> {
    let found = bucket.list_uploads("").await.expect("list").into_iter();
    found.map(|upload| upload.key).collect()
}

fn shard(run: &Run, step: u64, rank: u32) -> ObjectKey {
    let (attempt, layout) = (run.attempt().to_owned(), "00000000".to_owned());
    ShardKey { step, incarnation: run.incarnation, attempt, rank, save: 1, layout }.object()
}

async fn two_starts(directory: &Path) -> (Bucket, Run, Run) {
    let url: BucketUrl = format!("file://{}", directory.display()).parse().expect("url");
    let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
    let earlier = begin_run(&bucket, start()).await.expect("run");
    let later = Start { nonce: "fedcba9876543210".repeat(2), ..start() };
    let later = begin_run(&bucket, later).await.expect("run");
    (bucket, earlier, later)
}

/// Does it while time passes, far less than an hour.
pub(super) async fn while_time_passes<T>(clock: &Clock, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            () = tokio::time::sleep(Duration::from_millis(1)) => clock.advance(Duration::from_secs(1)),
        }
    }
}

/// A person need not run gc for that: parts that nobody will finish cost money.
#[tokio::test]
async fn the_next_start_aborts_old_uploads_of_the_dead_and_no_others() {
    let directory = tempfile::tempdir().expect("directory");
    let (bucket, earlier, later) = two_starts(directory.path()).await;
    let (dead, live, young, late) =
        (shard(&earlier, 1, 0), shard(&earlier, 2, 0), shard(&earlier, 3, 0), shard(&earlier, 4, 0));
    let (own, foreign, other) =
        (shard(&later, 1, 0), ObjectKey::new("shards/notes.bin"), ObjectKey::new("data/file"));
    let gone = begin_upload(&bucket, &dead).await;
    let mut go_on = Vec::new();
    for key in [&live, &own, &foreign, &other, &late] {
        go_on.push(begin_upload(&bucket, key).await);
    }
    age(directory.path());
    put_alive(&bucket, earlier.save(2), 0).await.expect("put");
    go_on.push(begin_upload(&bucket, &young).await);
    let stay = HashSet::from([live, young.clone(), own, foreign, other, late.clone()]);

    let clock = Clock::manual();
    let mut sweeper = Sweeper::new(clock.clone(), trainer().0);
    // One that a store says to be old, and that told nothing yet, has told before the second look.
    let tells = async {
        while clock.now().since_boot() < EVERY {
            tokio::task::yield_now().await;
        }
        put_alive(&bucket, earlier.save(4), 0).await.expect("put");
    };
    let look = sweeper.look(&bucket, &later, MOST);
    while_time_passes(&clock, async { tokio::join!(look, tells) }).await;
    assert_eq!(uploads(&bucket).await, stay, "the dead one's is gone, and nobody else's");
    gone.complete(Condition::Always).await.expect_err("its parts are gone");
    // Seldom: what was young the first time is old enough an hour later.
    let asked = async |sweeper: &mut Sweeper| {
        let before = bucket.counters();
        while_time_passes(&clock, sweeper.look(&bucket, &later, MOST)).await;
        bucket.counters().since(&before).of(OperationKind::ListUploads).requests
    };
    assert_eq!(asked(&mut sweeper).await, 0);
    clock.advance(LEAST_AGE);
    age(directory.path());
    for step in [2, 4] {
        put_alive(&bucket, earlier.save(step), 0).await.expect("put");
    }
    assert!(asked(&mut sweeper).await > 0);
    assert_eq!(uploads(&bucket).await, stay.into_iter().filter(|key| *key != young).collect::<HashSet<_>>());
    drop(go_on.pop());
    for upload in go_on {
        upload.complete(Condition::Always).await.expect("it went on");
    }
    // A start that was superseded leaves it to its successor.
    let mut agent = flusher(&bucket, &later, trainer().0);
    assert!(agent.clean_up().await);
    begin_run(&bucket, Start { nonce: "00".repeat(16), ..start() }).await.expect("run");
    assert!(!agent.clean_up().await);
}

#[tokio::test]
async fn one_look_aborts_no_more_than_so_many_and_the_next_goes_on() {
    let directory = tempfile::tempdir().expect("directory");
    let (bucket, earlier, later) = two_starts(directory.path()).await;
    let mut begun = Vec::new();
    for step in 1..=5 {
        begun.push(begin_upload(&bucket, &shard(&earlier, step, 0)).await);
    }
    age(directory.path());
    let clock = Clock::manual();
    let mut sweeper = Sweeper::new(clock.clone(), trainer().0);
    for left in [3, 1, 0, 0] {
        while_time_passes(&clock, sweeper.look(&bucket, &later, 2)).await;
        assert_eq!(uploads(&bucket).await.len(), left);
    }
}

/// The store's refusal costs space: the training hears of it once, and what to do.
#[tokio::test]
async fn a_store_that_refuses_to_list_uploads_is_told_once() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let (trainer, mut hears) = trainer();
    let mut warnings = || {
        let mut warnings = Vec::new();
        while hears.readable(Duration::ZERO).expect("readable") {
            let (frame, _) = hears.receive().expect("receive").expect("a frame");
            let Ok(Reply::Warning { message }) = serde_json::from_slice(&frame) else { panic!("a warning") };
            warnings.push(message);
        }
        warnings
    };
    let bucket = plain.with_faults(&faults).with_deadline_ms(100);
    let mut sweeper = Sweeper::new(clock.clone(), trainer.clone());
    for expected in [1, 0] {
        faults.set_down(true);
        sweeper.look(&bucket, &run, MOST).await;
        clock.advance(LEAST_AGE);
        assert_eq!(warnings().len(), expected);
    }
    faults.set_down(false);
    let mut sweeper = Sweeper::new(clock.clone(), trainer);
    for expected in [1, 0] {
        sweeper.tell(Error::new(ErrorKind::Denied, "the store refuses access"));
        let told = warnings();
        assert_eq!(told.len(), expected);
        assert!(told.iter().all(|told| told.contains("s3:ListBucketMultipartUploads")), "{told:?}");
    }
    let before = bucket.counters();
    sweeper.look(&bucket, &run, MOST).await;
    assert_eq!(bucket.counters().since(&before).of(OperationKind::ListUploads).requests, 0, "not again");
}

/// Thousands of uploads take minutes to abort, and the second look comes minutes after the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saves_go_on_while_uploads_of_the_dead_are_aborted() {
    let directory = tempfile::tempdir().expect("directory");
    let (bucket, earlier, later) = two_starts(directory.path()).await;
    let dead = shard(&earlier, 1, 0);
    let _begun = begin_upload(&bucket, &dead).await;
    age(directory.path());
    let clock = Clock::manual();
    let (trainer, mut hears) = trainer();
    let mut agent = flusher(&bucket, &later, trainer);
    (agent.clock, agent.hello.url, agent.hello.start) =
        (clock.clone(), bucket.url().to_string(), later.start.clone());
    let (queue, work) = mpsc::unbounded_channel();
    let agent = tokio::spawn(agent.settle_all(work));
    for step in [11, 12, 13] {
        queue.send(Work::Save(sealed(step, 1000))).expect("send");
    }
    let durable = tokio::task::spawn_blocking(move || {
        let mut durable = Vec::new();
        while durable.len() < 3 {
            let (frame, _) = hears.receive().expect("receive").expect("a frame");
            match serde_json::from_slice(&frame).expect("parses") {
                Reply::Durable { save, .. } => durable.push(save),
                Reply::Stored { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        durable
    });
    assert_eq!(durable.await.expect("join"), [11, 12, 13]);
    assert_eq!(uploads(&bucket).await, HashSet::from([dead]), "the second look is still to come");
    let gone = async {
        while !uploads(&bucket).await.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    while_time_passes(&clock, gone).await;
    drop(queue);
    agent.await.expect("it ends");
}

/// As by a person, or by a start that took it for a dead one's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_whose_upload_is_aborted_begins_it_anew() {
    for aborts in [1, 2, MOST_BEGUN_ANEW + 1] {
        let directory = tempfile::tempdir().expect("directory");
        let (plain, _, run) = two_starts(directory.path()).await;
        let faults = Faults::new();
        let mut agent = flusher(&plain.with_faults(&faults), &run, trainer().0);
        let save = sealed(1, 20 << 20);
        let mut left = aborts;
        let flush = agent.flush(&save);
        tokio::pin!(flush);
        let flushed = loop {
            // Whatever it does next, an upload that is under way then is gone.
            let gate = faults.gate(1);
            tokio::select! { done = &mut flush => break done, () = gate.reached() => {} }
            let found = plain.list_uploads("shards").await.expect("list");
            if let Some(upload) = found.first().filter(|_| left > 0) {
                plain.abort_upload(&upload.key, &upload.id).await.expect("abort");
                left -= 1;
            }
            gate.open();
        };
        if aborts <= MOST_BEGUN_ANEW {
            flushed.expect("durable");
            assert_eq!(verify(&plain, None, &|_| {}).await.expect("verify"), []);
        } else {
            assert_eq!(flushed.expect_err("given up").kind(), ErrorKind::NotFound);
        }
        assert_eq!(left, 0);
        let steps = list_steps(&plain).await.expect("list").len();
        assert_eq!(steps, usize::from(aborts <= MOST_BEGUN_ANEW), "aborted {aborts} times");
        assert_eq!(uploads(&plain).await, HashSet::new());
    }
}

/// Nobody else of this start does, and other starts only after an hour. The agent of an earlier start may live.
#[tokio::test]
async fn an_agent_that_takes_over_ends_the_dead_ones_upload_first() {
    for given in [Given::First, Given::Again, Given::Left] {
        let directory = tempfile::tempdir().expect("directory");
        let (bucket, _, run) = two_starts(directory.path()).await;
        let mut agent = flusher(&bucket, &run, trainer().0);
        let mut save = sealed(1, 9 << 20);
        save.given = given;
        // The dead one stored other slices, in another layout; another rank, and another step's agent, go on.
        let (dead, rank, step) = (shard(&run, 1, 0), shard(&run, 1, 1), shard(&run, 2, 0));
        let mut begun = Vec::new();
        for key in [&dead, &rank, &step] {
            begun.push(begin_upload(&bucket, key).await);
        }
        agent.flush(&save).await.expect("durable");
        let mut stay = HashSet::from([rank, step]);
        stay.extend((given != Given::Again).then_some(dead));
        assert_eq!(uploads(&bucket).await, stay);
    }
}

#[tokio::test]
async fn a_rank_that_takes_long_is_waited_for_while_it_says_so() {
    for says_so in [true, false] {
        let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
        let run = begin_run(&bucket, start()).await.expect("run");
        let agents = [0, 1].map(|rank| {
            let mut agent = flusher(&bucket, &run, trainer().0);
            agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
            agent
        });
        let [mut first, mut second] = agents;
        first.clock = clock.clone();
        let (mut one, mut other) = (sealed(1, 1000), sealed(1, 2000));
        for (rank, save) in [&mut one, &mut other].into_iter().enumerate() {
            change(save, |seal| seal.tensors[0].name = format!("t@{rank}"));
        }
        let pass = async |seconds: u64| {
            for _ in 0..seconds {
                clock.advance(Duration::from_secs(1));
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
            }
        };
        let slow = async {
            for _ in 0..8 {
                if says_so {
                    put_alive(&bucket, run.save(1), 1).await.expect("put");
                }
                pass(400).await;
            }
            // Its own clock stands by: only the first one's patience is looked at.
            let stored = second.flush(&other).await;
            pass(5).await;
            stored
        };
        if says_so {
            let (waited, stored) = tokio::join!(first.flush(&one), slow);
            waited.and(stored).expect("durable");
            assert_eq!(list_steps(&bucket).await.expect("list").len(), 1);
            assert_eq!(list_ranks(&bucket).await.expect("list"), []);
        } else {
            let error = tokio::select! {
                waited = first.flush(&one) => waited.expect_err("it was waited for long enough"),
                _ = slow => panic!("the first had given up by then"),
            };
            assert!(error.message().contains("ranks [1] did not store"), "{error}");
        }
    }
}

/// A rank that first wrote to its host's disk told nothing while it did: the others had given the step up by the time that
/// it was there.
#[tokio::test]
async fn a_rank_whose_copy_on_disk_takes_long_is_waited_for() {
    let (bucket, clock) = (Bucket::in_memory(), Clock::manual());
    let run = begin_run(&bucket, start()).await.expect("run");
    let [mut first, mut second] = [0, 1].map(|rank| {
        let mut agent = flusher(&bucket, &run, trainer().0);
        agent.clock = clock.clone();
        agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
        agent
    });
    let (one, mut other) = (part(0, 1, 1000), part(1, 1, 2000));
    // 60 GB, of a disk that is given half an hour for them.
    let (local, ticket) = copy(&Health::default(), 60_000_000_000);
    other.local = Some(local);
    let disk = async {
        for _ in 0..1500 {
            clock.advance(Duration::from_secs(1));
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
        }
        drop(ticket);
    };
    let both = async { tokio::join!(first.flush(&one), second.settle(other), disk) };
    let (flushed, (), ()) = while_time_passes(&clock, both).await;
    flushed.expect("durable");
    assert_eq!(list_steps(&bucket).await.expect("list").len(), 1);
    assert_eq!(list_ranks(&bucket).await.expect("list"), []);
}

/// So was one whose agent deleted old steps for long after the save before.
#[tokio::test]
async fn a_rank_that_cleans_up_for_long_is_waited_for() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let [mut first, mut second] = [0, 1].map(|rank| {
        let (trainer, _) = trainer();
        // Else it would open another bucket.
        trainer.set_gone();
        let mut agent = flusher(&plain.with_faults(&faults), &run, trainer);
        agent.clock = clock.clone();
        agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
        agent
    });
    first.hello.url = plain.url().to_string();
    // That the first step will not be is told, and then it is asked whether another start took over.
    let (gate, (queue, work)) = (faults.gate(2), mpsc::unbounded_channel());
    let first = tokio::spawn(first.settle_all(work));
    let gives_up = Work::GiveUp { step: 1, round: None, reason: "no memory".to_owned() };
    queue.send(gives_up).expect("it takes work");
    gate.reached().await;
    queue.send(Work::Save(part(0, 2, 1000))).expect("it takes work");
    drop(queue);
    let told = RankKey { save: run.save(2), rank: 0, note: Note::Alive };
    let mut seconds = 0;
    while !list_ranks(&plain).await.expect("list").contains(&told) {
        assert!(seconds < 600, "the others give it up by now");
        seconds += 1;
        clock.advance(Duration::from_secs(1));
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
    gate.open();
    let other = part(1, 2, 2000);
    let both = async { tokio::join!(first, second.flush(&other)) };
    let (ended, flushed) = while_time_passes(&clock, both).await;
    ended.expect("it ends");
    flushed.expect("durable");
    assert_eq!(list_steps(&plain).await.expect("list").len(), 1);
    assert_eq!(list_ranks(&plain).await.expect("list"), []);
}

/// So was one whose agent still brought the step before to a store that took it slowly, though others had given that one up.
#[tokio::test]
async fn a_rank_that_is_at_an_earlier_step_is_waited_for() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let agents = [0, 1].map(|rank| {
        let (trainer, _) = trainer();
        // Else it would open another bucket.
        trainer.set_gone();
        let bucket = if rank == 0 { plain.with_faults(&faults) } else { plain.clone() };
        let mut agent = flusher(&bucket, &run, trainer);
        agent.clock = clock.clone();
        agent.hello.url = plain.url().to_string();
        agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
        let (queue, work) = mpsc::unbounded_channel();
        (queue, tokio::spawn(agent.settle_all(work)))
    });
    let [(first, one), (second, other)] = agents;
    let gate = faults.gate(1);
    first.send(Work::Save(part(0, 1, 1000))).expect("it takes work");
    gate.reached().await;
    let gives_up = Work::GiveUp { step: 1, round: None, reason: "no memory".to_owned() };
    second.send(gives_up).expect("it takes work");
    for (rank, queue) in [first, second].into_iter().enumerate() {
        queue.send(Work::Save(part(rank as u32, 2, 1000))).expect("it takes work");
    }
    for _ in 0..1200 {
        clock.advance(Duration::from_secs(1));
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
    gate.open();
    let both = async { tokio::join!(one, other) };
    let (one, other) = while_time_passes(&clock, both).await;
    one.and(other).expect("they end");
    let steps: Vec<_> = list_steps(&plain).await.expect("list").iter().map(|info| info.key.step).collect();
    assert_eq!(steps, [2]);
    assert_eq!(list_ranks(&plain).await.expect("list"), []);
}

/// `shards/` is what other programs call their folders, too.
#[tokio::test]
async fn what_others_keep_beside_checkpoints_is_no_garbage() {
    let directory = tempfile::tempdir().expect("directory");
    let url: BucketUrl = format!("file://{}", directory.path().display()).parse().expect("url");
    let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
    let others =
        ["shards/train-00000.tar", "shards/a/b.safetensors", "ranks/mine.csv", "ranks/clock-1.csv", "notes"];
    let left = [
        format!("shards/{:020}/0000000001-00000001/000000-000001-00000000.safetensors", 1),
        format!("ranks/{:020}/0000000001-00000001/000000.alive", 1),
        "ranks/clock-0a1b".to_owned(),
    ];
    for key in others.into_iter().chain(left.iter().map(String::as_str)) {
        bucket.put(&ObjectKey::new(key), "bytes".into(), Condition::Always).await.expect("put");
    }
    age(directory.path());
    let found = collect_garbage(&bucket, LEAST_AGE, false).await.expect("gc");
    assert_eq!((found.shards.len(), found.indexes.len(), found.bytes), (1, 2, 5));
    for key in others {
        assert!(bucket.head(&ObjectKey::new(key)).await.expect("head").is_some(), "{key}");
    }
    for key in &left {
        assert_eq!(bucket.head(&ObjectKey::new(key)).await.expect("head"), None, "{key}");
    }
}
