//! A store that fails: what is told as durable is, what is committed is whole, and nothing else is listed.

use forebay_io::net::FdStream;
use forebay_io::object::{FaultMode, Faults, OperationKind};
use futures::TryStreamExt;

use super::super::pace::Pace;
use super::super::patience::LONGEST_PAUSE;
use super::*;
use crate::agent::Seal;
use crate::arena::Held;
use crate::catalog::{Keep, Start, list_steps};
use crate::manifest::{Checksum, Encoding, Extra, Identity, Slice, SliceKind, Tensor};
use crate::verify::verify;

/// Milliseconds until the store's own retries give a request up.
const DEADLINE_MS: u64 = 300;

pub(super) fn start() -> Start {
    Start { nonce: "0123456789abcdef".repeat(2), host: "host".into(), pid: 1, started_ms: 0 }
}

pub(super) fn hello() -> Hello {
    Hello::new("s3://unused".into(), start(), Keep::default())
}

/// A trainer who listens at the other end of the stream.
pub(super) fn trainer() -> (Trainer, FdStream) {
    let (near, far) = FdStream::pair().expect("pair");
    (Trainer::new(near, Arc::new(Pace::new(None))), far)
}

/// A sealed save of one tensor.
pub(super) fn sealed(step: u64, length: usize) -> Save {
    let header = 4096;
    let mut slot = vec![b' '; header];
    slot.resize(header + length, 0);
    blake3::Hasher::new().update(&step.to_le_bytes()).finalize_xof().fill(&mut slot[header..]);
    let slice = Slice {
        kind: SliceKind::Box,
        offsets: vec![0],
        lengths: vec![length as u64],
        shard: 0,
        start: header as u64,
        end: slot.len() as u64,
        crc32c: Checksum(forebay_core::crc32c(&slot[header..])),
        blake3: Identity::UNKNOWN,
    };
    let (dtype, shape) = ("uint8".to_owned(), vec![length as u64]);
    let tensors = vec![Tensor { name: "t".into(), dtype, shape, slices: vec![slice] }];
    let seal = Seal::of_test(step, step, &slot, header, tensors);
    let held = Arc::new(Held::new(start().nonce, 0, 1, seal));
    Save::new(held, Source::Slot(slot.into()), Given::First)
}

/// Has a save be one of another seal.
pub(super) fn change(save: &mut Save, change: impl FnOnce(&mut Seal)) {
    let mut held = (*save.held).clone();
    change(&mut held.seal);
    save.held = Arc::new(held.sealed_again());
}

/// Has a save's tree name a tensor.
pub(super) fn naming(mut save: Save, tree: &str, tensor: &str) -> Save {
    let data = format!("[null, {{\"t\": \"tensor\", \"n\": \"{tensor}\"}}]");
    let extra = Extra { name: tree.into(), encoding: Encoding::Json, data };
    change(&mut save, |seal| seal.extras.push(extra));
    save
}

/// What flushes into `bucket`, as the start that `run` records.
pub(super) fn flusher(bucket: &Bucket, run: &Run, trainer: Trainer) -> Flusher {
    let mut flusher = Flusher::new(hello(), trainer, None);
    flusher.target = Some((bucket.clone(), run.clone()));
    flusher
}

/// Has a new agent flush one save.
async fn settle(bucket: &Bucket, run: &Run, save: &Save) -> Result<u64> {
    let (trainer, _listener) = trainer();
    flusher(bucket, run, trainer).flush(save).await
}

#[tokio::test]
async fn lost_replies_and_broken_requests_are_made_up_for() {
    use OperationKind::{Get, Head, List, Put};
    for kind in [Put, Head, Get, List] {
        for (nth, mode) in [(1, FaultMode::Before), (1, FaultMode::LoseReply), (2, FaultMode::LoseReply)] {
            let (plain, faults) = (Bucket::in_memory(), Faults::new());
            let bucket = plain.with_faults(&faults).with_deadline_ms(DEADLINE_MS);
            let run = begin_run(&bucket, start()).await.expect("run");
            faults.script(kind, nth, mode);
            settle(&bucket, &run, &sealed(1, 1000)).await.expect("durable");
            assert_eq!(list_steps(&plain).await.expect("list").len(), 1, "{kind:?} {nth} {mode:?}");
            assert_eq!(verify(&plain, None, &|_| {}).await.expect("verify"), []);
        }
    }
}

#[tokio::test]
async fn a_second_agent_of_a_save_writes_the_same_objects() {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    settle(&bucket, &run, &sealed(1, 1000)).await.expect("durable");
    let objects = async || bucket.list("").try_collect::<Vec<_>>().await.expect("list");
    let before: Vec<_> = objects().await.into_iter().map(|object| (object.key, object.size)).collect();
    settle(&bucket, &run, &sealed(1, 1000)).await.expect("durable");
    let after: Vec<_> = objects().await.into_iter().map(|object| (object.key, object.size)).collect();
    assert_eq!(before, after);
    // Another save of that step is told, and leaves nothing behind.
    let mut other = sealed(1, 999);
    change(&mut other, |seal| seal.save = 2);
    assert_eq!(settle(&bucket, &run, &other).await.expect_err("refused").kind(), ErrorKind::Conflict);
    assert_eq!(objects().await.len(), before.len());
    assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
}

/// A step that no rank could restore was committed, and older ones deleted for it.
#[tokio::test]
async fn a_step_that_lacks_what_its_state_names_is_refused() {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    settle(&bucket, &run, &naming(sealed(1, 1000), "state", "t")).await.expect("durable");
    for tree in ["state", "rng"] {
        let save = naming(sealed(2, 1000), tree, "lost");
        let error = settle(&bucket, &run, &save).await.expect_err("refused");
        let told = format!(
            "step 2: what the ranks stored is no checkpoint: it lacks tensor `lost`, which the `{tree}`"
        );
        assert!(error.kind() == ErrorKind::Invalid && error.message().contains(&told), "{error}");
    }
    let steps = list_steps(&bucket).await.expect("list");
    assert_eq!(steps.iter().map(|step| step.key.step).collect::<Vec<_>>(), [1]);
}

/// What changed in the agent's memory came into the store, under a hash of its own.
#[tokio::test]
async fn a_seal_that_changed_in_memory_is_in_no_step() {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    let changes: [fn(&mut Held); 4] = [
        |held| held.seal.tensors[0].name = "u".into(),
        |held| held.seal.created_ms ^= 1,
        |held| held.world_size ^= 2,
        |held| held.crc32c = None,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut save = sealed(1, 1000);
        change(Arc::get_mut(&mut save.held).expect("its own"));
        let error = settle(&bucket, &run, &save).await.expect_err("changed");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{number}: {error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("nothing was saved")), "{number}: {error}");
    }
    assert_eq!(list_steps(&bucket).await.expect("list"), []);
    assert_eq!(bucket.list("shards").try_collect::<Vec<_>>().await.expect("list"), []);
}

/// Whether it may is asked beside the upload.
#[tokio::test]
async fn a_start_that_another_took_over_from_leaves_nothing() {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    settle(&bucket, &run, &sealed(1, 1000)).await.expect("durable");
    begin_run(&bucket, Start { nonce: "fedcba9876543210".repeat(2), ..start() }).await.expect("another");
    let objects = async || bucket.list("").try_collect::<Vec<_>>().await.expect("list").len();
    let before = objects().await;
    for length in [1000, 20 << 20] {
        let error = settle(&bucket, &run, &sealed(2, length)).await.expect_err("superseded");
        assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
        assert_eq!(objects().await, before, "of {length} bytes");
        assert_eq!(bucket.list_uploads("").await.expect("list"), [], "of {length} bytes");
    }
}

/// Of a trainer that was killed before its agent had the store's answer: it superseded whoever came after, on another host or by
/// a clock that was set back. Nor does that of a trainer that lives, and went back to a step before that one began.
#[tokio::test]
async fn an_agent_whose_trainer_died_takes_no_number_after_its_successor() {
    let newest = |started_ms| Start {
        nonce: "fedcba9876543210".repeat(2),
        host: "other".into(),
        started_ms,
        ..start()
    };
    let own = Start { started_ms: 5, ..start() };
    let cases = [
        // The store told nothing of other starts: clocks do.
        (None, 6, false, true),
        (None, 4, false, false),
        (None, 6, true, false),
        // It was there, or was not, when this one looked.
        (Some(1), 6, false, false),
        (Some(0), 4, false, true),
        (Some(0), 4, true, false),
    ];
    for (is_back, (seen, started_ms, comes_after, is_over)) in
        [false, true].into_iter().flat_map(|is_back| cases.map(|case| (is_back, case)))
    {
        let case =
            format!("seen {seen:?}, at {started_ms} ms, comes after it: {comes_after}, back: {is_back}");
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("file://{}", folder.path().display());
        let bucket =
            Bucket::open(&url.parse().expect("a URL"), &StoreSettings::default()).await.expect("open");
        let run = begin_run(&bucket, newest(started_ms)).await.expect("the newest");
        let (trainer, listener) = trainer();
        let mut hello = Hello { seen, is_back, ..Hello::new(url, own.clone(), Keep::default()) };
        if comes_after {
            hello.comes_after(run.attempt());
        }
        // No thread was there yet to hear of its end; or it lives, and went back long ago.
        let _listener = Some(listener).filter(|_| is_back);
        let flushed = Flusher::new(hello, trainer, None).flush(&sealed(1, 1000)).await;
        let newer = superseded_by(&bucket, &run).await.expect("newest");
        assert_eq!(newer.is_none(), is_over, "{case}");
        assert_eq!(
            flushed.as_ref().err().map(Error::kind),
            is_over.then_some(ErrorKind::Stale),
            "{case}: {flushed:?}"
        );
    }
}

/// It took a second number, higher than that of its successor, whose saves were refused from then on.
#[tokio::test]
async fn the_next_agent_of_a_superseded_start_leaves_its_successor_alone() {
    for seen in [None, Some(1)] {
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("file://{}", folder.path().display());
        let bucket =
            Bucket::open(&url.parse().expect("a URL"), &StoreSettings::default()).await.expect("open");
        let [earlier, between, newest] =
            ["a", "b", "c"].map(|digit| Start { nonce: digit.repeat(32), ..start() });
        begin_run(&bucket, earlier).await.expect("the one that was there");
        let own = begin_run(&bucket, start()).await.expect("its own");
        begin_run(&bucket, between).await.expect("a successor");
        let newest = begin_run(&bucket, newest).await.expect("and its successor");

        let (trainer, _listener) = trainer();
        let hello = Hello { seen, ..Hello::new(url, own.start.clone(), Keep::default()) };
        let mut agent = Flusher::new(hello, trainer, None);
        let refused = agent.flush(&sealed(1, 1000)).await.expect_err("it was superseded");
        assert_eq!(refused.kind(), ErrorKind::Stale, "seen {seen:?}: {refused}");
        assert_eq!(agent.target.map(|(_, run)| run), Some(own), "seen {seen:?}");
        assert_eq!(superseded_by(&bucket, &newest).await.expect("look"), None, "seen {seen:?}");
        assert_eq!(list_steps(&bucket).await.expect("list"), [], "seen {seen:?}");
    }
}

#[tokio::test]
async fn under_random_faults_every_listed_step_is_whole() {
    let scale = std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    for seed in 0..3 * scale {
        let (plain, faults) = (Bucket::in_memory(), Faults::random(seed, 0.2));
        let bucket = plain.with_faults(&faults).with_deadline_ms(DEADLINE_MS);
        let run = loop {
            if let Ok(run) = begin_run(&bucket, start()).await {
                break run;
            }
        };
        for step in 1..=3 {
            let save = sealed(step, if step == 1 { 9 << 20 } else { 100 });
            settle(&bucket, &run, &save).await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let steps = list_steps(&plain).await.expect("list");
            assert_eq!(steps.len() as u64, step, "seed {seed}");
        }
        assert_eq!(verify(&plain, None, &|_| {}).await.expect("verify"), [], "seed {seed}");
        assert_eq!(list_steps(&plain).await.expect("list")[0].key.incarnation, 1, "seed {seed}");
    }
}

#[tokio::test]
async fn a_store_that_stays_away_is_told_and_waited_for() {
    let (plain, faults) = (Bucket::in_memory(), Faults::new());
    let bucket = plain.with_faults(&faults).with_deadline_ms(50);
    let run = begin_run(&bucket, start()).await.expect("run");
    let (trainer, mut listener) = trainer();
    faults.set_down(true);
    let clock = Clock::manual();
    let save = sealed(1, 10);
    let mut agent = flusher(&bucket, &run, trainer);
    agent.clock = clock.clone();
    let error = tokio::select! {
        settled = agent.flush(&save) => settled.expect_err("the store never came back"),
        () = async { loop { clock.advance(LONGEST_PAUSE); tokio::time::sleep(Duration::from_millis(5)).await; } } =>
            unreachable!("the clock runs for ever"),
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let (frame, _) = listener.receive().expect("receive").expect("a warning");
    assert!(String::from_utf8_lossy(&frame).contains("trying again"));
    assert_eq!(list_steps(&plain).await.expect("list"), []);
    faults.set_down(false);
    settle(&bucket, &run, &save).await.expect("durable");
}

/// It was given up at its second short outage: the time that the store may stay away was counted from the first one on.
#[tokio::test]
async fn a_save_that_takes_hours_outlives_short_outages() {
    let (plain, faults) = (Bucket::in_memory(), Faults::new());
    let bucket = plain.with_faults(&faults).with_deadline_ms(50);
    let run = begin_run(&bucket, start()).await.expect("run");
    let (trainer, mut listener) = trainer();
    let clock = Clock::manual();
    let save = sealed(1, 9 << 20);
    let mut agent = flusher(&bucket, &run, trainer);
    agent.clock = clock.clone();
    faults.set_down(true);
    let flush = agent.flush(&save);
    tokio::pin!(flush);
    let outages = async {
        for outage in 1..=3 {
            while !listener.readable(Duration::ZERO).expect("look") {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let (frame, _) = listener.receive().expect("receive").expect("a warning");
            assert!(String::from_utf8_lossy(&frame).contains("trying again"), "outage {outage}");
            // In the midst of the upload.
            let gate = faults.gate(4);
            faults.set_down(false);
            clock.advance(LONGEST_PAUSE);
            gate.reached().await;
            clock.advance(Duration::from_secs(3600));
            faults.set_down(outage < 3);
            gate.open();
        }
    };
    tokio::select! {
        done = &mut flush => panic!("it ended early: {done:?}"),
        () = outages => {}
    }
    flush.await.expect("durable");
    assert_eq!(verify(&plain, None, &|_| {}).await.expect("verify"), []);
}

#[tokio::test]
async fn a_start_keeps_its_number_when_the_answer_is_lost() {
    for nth in 1..=2 {
        let (plain, faults) = (Bucket::in_memory(), Faults::new());
        let bucket = plain.with_faults(&faults).with_deadline_ms(DEADLINE_MS);
        faults.script(OperationKind::Put, nth, FaultMode::LoseReply);
        let run = begin_run(&bucket, start()).await.expect("run");
        assert_eq!((run.incarnation, run.conditional), (1, true));
        let other = Start { nonce: "f".repeat(32), ..start() };
        assert_eq!(begin_run(&bucket, other).await.expect("run").incarnation, 2);
        assert_eq!(superseded_by(&plain, &run).await.expect("newest").expect("newer").incarnation, 2);
    }
}

#[tokio::test]
async fn an_agent_sends_no_faster_than_it_was_told() {
    let directory = tempfile::tempdir().expect("directory");
    let (rate, clock) = (1 << 20, Clock::manual());
    let mut hello = Hello { url: format!("file://{}", directory.path().display()), ..hello() };
    hello.flush_rate = std::num::NonZeroU64::new(rate);
    let (trainer, _listener) = trainer();
    let mut agent = Flusher::new(hello, trainer, None);
    agent.clock = clock.clone();
    // Three parts, and the notes around them.
    let save = sealed(1, 20 << 20);
    let flushed = tokio::select! {
        flushed = agent.flush(&save) => flushed.expect("durable"),
        () = async { loop { clock.advance(Duration::from_secs(1)); tokio::time::sleep(Duration::from_millis(5)).await; } } =>
            unreachable!("the clock runs for ever"),
    };
    let Some((bucket, _)) = &agent.target else { panic!("it opened the bucket") };
    let counters = bucket.counters();
    let sent = counters.of(OperationKind::Part).bytes + counters.of(OperationKind::Put).bytes;
    assert!(
        flushed == save.held.seal.size && sent > flushed && counters.of(OperationKind::Part).requests == 3
    );
    let longest = 8 << 20;
    assert!(clock.now().since_boot().as_secs() >= (sent - longest) / rate, "{:?}", clock.now());
}
