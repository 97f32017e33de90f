//! A local disk that hangs: the store goes on, what the disk still writes is nothing, and it is used again. What only a disk
//! has is brought to the store a piece at a time.

use bytes::Bytes;
use forebay_io::net::FdStream;
use forebay_io::object::{Condition, FaultMode, Faults, OperationKind};
use futures::TryStreamExt;

use super::tests::{flusher, hello, sealed, start, trainer};
use super::*;
use crate::agent::copy::{Health, copy};
use crate::agent::disk::Disk;
use crate::agent::pace::Pace;
use crate::agent::source;
use crate::arena::Held;
use crate::catalog::{Start, list_steps};
use crate::local::{PATIENCE, patience};
use crate::verify::verify;

/// The memory that a save lies in.
fn slot_of(save: &Save) -> Bytes {
    match &save.source {
        Source::Slot(slot) => slot.clone(),
        Source::Disk(_) => panic!("it lies on the disk"),
    }
}

/// A save that lies on a disk alone, left by an earlier start.
pub(super) async fn left_on(disk: &Bucket, save: &Save) -> Save {
    let (local, Held { rank, world_size, .. }) = (Local::of_test(disk.clone()), &*save.held);
    assert!(local.put(&save.held, &slot_of(save), || true).await.expect("put"));
    let (held, shard) = local.part(&save.held.name(), *rank, *world_size).await.expect("a part");
    let source = Source::Disk(source::Disk::new(shard, Clock::system()));
    Save::new(Arc::new(held), source, Given::Left)
}

/// What the trainer heard: saves with a copy, saves without, warnings.
fn heard(listener: &mut FdStream) -> (Vec<u64>, Vec<u64>, Vec<String>) {
    let (mut with, mut without, mut warnings) = (Vec::new(), Vec::new(), Vec::new());
    while listener.readable(Duration::ZERO).expect("look") {
        let (frame, _) = listener.receive().expect("receive").expect("a reply");
        match serde_json::from_slice(&frame).expect("parse") {
            Reply::Local { save, .. } => with.push(save),
            Reply::NoCopy { save } => without.push(save),
            Reply::Warning { message } => warnings.push(message),
            _ => {}
        }
    }
    (with, without, warnings)
}

/// Saves steps while the disk hangs at a request of the second copy; gives the copies that are there afterwards.
async fn hang_at(request: u64) -> Vec<u64> {
    let bucket = Bucket::in_memory();
    let run = begin_run(&bucket, start()).await.expect("run");
    let (faults, clock) = (Faults::new(), Clock::manual());
    let local = Local::of_test(Bucket::in_memory().with_faults(&faults));
    let (trainer, mut listener) = trainer();
    let starts = vec![start().nonce];
    local.begin(&starts, 0).await.expect("begin");
    let tier =
        LocalTier { directory: "/unused".into(), keep: 9, ceiling: None, starts, seen: 0, resumes: None };
    let hello = Hello { local: Some(tier), ..hello() };
    let (copies, work) = Copies::new(8);
    let mut disk = Disk::new(&hello, &trainer, &copies).expect("a tier");
    disk.local = Some(local.clone());
    let disk = tokio::spawn(disk.do_all(copy(copies.health(), 0).1, work));
    let mut agent = flusher(&bucket, &run, trainer);
    (agent.clock, agent.copies) = (clock.clone(), Some(copies.clone()));
    let save = |step| {
        let mut save = sealed(step, 1000);
        save.local = copies.save(save.held.clone(), slot_of(&save));
        save
    };
    agent.settle(save(1)).await;
    while local.look().await.expect("look").steps.iter().all(|step| !step.is_durable) {
        tokio::task::yield_now().await;
    }
    let gate = faults.gate(request);
    let (second, third) = (save(2), save(3));
    gate.reached().await;
    let patience = async {
        tokio::task::yield_now().await;
        clock.advance(PATIENCE);
    };
    tokio::join!(agent.settle(second), patience);
    assert!(copies.health().hangs());
    // What is known is not waited for again.
    agent.settle(third).await;
    assert!(save(4).local.is_none());
    assert_eq!(list_steps(&bucket).await.expect("list").len(), 3);
    gate.open();
    while copies.health().hangs() {
        tokio::task::yield_now().await;
    }
    agent.settle(save(5)).await;
    let (with, without, warnings) = heard(&mut listener);
    assert!(with.ends_with(&[5]) && without == [2, 3], "{with:?} {without:?}");
    assert!(matches!(&warnings[..], [one] if one.contains("did not answer for 60 s")), "{warnings:?}");
    drop((agent, copies));
    disk.await.expect("the disk's task");
    local.look().await.expect("look").steps.into_iter().map(|step| step.name.step).collect()
}

#[tokio::test]
async fn a_disk_that_hangs_is_not_waited_for_and_used_again_once_it_answers() {
    // While it writes a shard: the slot may hold something else before all of it is read.
    assert_eq!(hang_at(1).await, [5, 1]);
    // While it writes the seal: what was read before is sound.
    assert_eq!(hang_at(2).await, [5, 2, 1]);
}

/// A save with a copy was counted as one without where what nobody needs could not be deleted afterwards.
#[tokio::test]
async fn a_copy_that_is_there_is_not_missed() {
    let (faults, (trainer, mut listener)) = (Faults::new(), trainer());
    let local = Local::of_test(Bucket::in_memory().with_deadline_ms(0).with_faults(&faults));
    let starts = vec![start().nonce];
    local.begin(&starts, 0).await.expect("begin");
    let tier =
        LocalTier { directory: "/unused".into(), keep: 9, ceiling: None, starts, seen: 0, resumes: None };
    let hello = Hello { local: Some(tier), ..hello() };
    let (copies, work) = Copies::new(8);
    let mut disk = Disk::new(&hello, &trainer, &copies).expect("a tier");
    disk.local = Some(local.clone());
    faults.script(OperationKind::List, 1, FaultMode::Before);
    let save = sealed(1, 1000);
    let _copy = copies.save(save.held.clone(), slot_of(&save)).expect("it is wanted");
    drop(copies);
    disk.do_all(copy(&Health::default(), 0).1, work).await;
    assert_eq!(faults.injected(), 1);
    let (with, without, warnings) = heard(&mut listener);
    assert_eq!((with, without, warnings.len()), (vec![1], vec![], 1), "the failure itself is told");
    assert_eq!(local.look().await.expect("look").steps.len(), 1);
}

/// An agent that brings home what the start of `run` left.
fn heir(bucket: &Bucket, run: &Run) -> Flusher {
    let mut heir = flusher(bucket, run, trainer().0);
    heir.heir_of = Some(run.start.nonce.clone());
    heir
}

/// All of it was read into memory before the first byte was sent.
#[tokio::test]
async fn a_step_on_disk_is_brought_home_a_piece_at_a_time() {
    const MIB: u64 = 1 << 20;
    let (plain, disk, clock) = (Bucket::in_memory(), Bucket::in_memory(), Clock::manual());
    let run = begin_run(&plain, start()).await.expect("run");
    let save = sealed(1, 80 << 20);
    let left = left_on(&disk, &save).await;
    let (size, before) = (save.held.seal.size, disk.counters());
    // The store takes little: what is read and not sent is what is in memory.
    let slow = plain.with_rate(&Rate::new(std::num::NonZeroU64::new(MIB).expect("some"), clock.clone()));
    let mut heir = heir(&slow, &run);
    heir.clock = clock.clone();
    let read = || disk.counters().since(&before).of(OperationKind::Get);
    let mut most = 0;
    let time = async {
        let (mut last, mut looks) = (0, 0);
        loop {
            let (now, sent) = (read().bytes, plain.counters().of(OperationKind::Part).bytes);
            most = most.max(now.saturating_sub(sent));
            looks = if now == last { looks + 1 } else { 0 };
            last = now;
            // Once it reads no further.
            if looks > 5 || now == size {
                clock.advance(Duration::from_secs(1));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let uploaded = tokio::select! {
        flushed = heir.flush(&left) => flushed.expect("durable"),
        () = time => unreachable!("the clock runs for ever"),
    };
    assert_eq!((uploaded, read().bytes), (size, size), "each byte is read once");
    assert!(read().requests > size / MIB, "no read is of more than a MiB: {:?}", read());
    assert!(most <= 42 * MIB, "{most} bytes are in memory: four parts, one that fills, and a piece");
    assert_eq!(verify(&plain, None, &|_| {}).await.expect("verify"), []);
}

#[tokio::test]
async fn a_damaged_copy_is_found_before_its_step_is_there() {
    for length in [1000, 20 << 20] {
        let size = 4096 + length;
        for position in [0, 4095, 4096, size - 1] {
            let (bucket, disk) = (Bucket::in_memory(), Bucket::in_memory());
            let run = begin_run(&bucket, start()).await.expect("run");
            let save = sealed(1, length);
            let mut damaged = slot_of(&save).to_vec();
            damaged[position] ^= 1;
            let damaged = Save { source: Source::Slot(damaged.into()), ..sealed(1, length) };
            let error =
                heir(&bucket, &run).flush(&left_on(&disk, &damaged).await).await.expect_err("damaged");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.message().contains("is damaged on the local disk"), "{error}");
            // Nor is one that another file took the place of meanwhile, or that is gone.
            let left = left_on(&disk, &save).await;
            let key = save.held.key().object();
            for other in [Some(slot_of(&damaged)), None] {
                match other {
                    Some(other) => drop(disk.put(&key, other, Condition::Always).await.expect("put")),
                    None => disk.delete(&key).await.expect("delete"),
                }
                let error = heir(&bucket, &run).flush(&left).await.expect_err("another file");
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            }
            assert_eq!(list_steps(&bucket).await.expect("list"), []);
            for prefix in ["shards", "ranks"] {
                assert_eq!(bucket.list(prefix).try_collect::<Vec<_>>().await.expect("list"), [], "{prefix}");
            }
            assert_eq!(bucket.list_uploads("").await.expect("list"), []);
            // The copy itself, whole, is brought home.
            heir(&bucket, &run).flush(&left_on(&disk, &save).await).await.expect("durable");
            assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
        }
    }
}

/// Whether the next save has a copy, once that is told.
async fn is_copied(listener: &mut FdStream) -> bool {
    loop {
        let (with, without, _) = heard(listener);
        if with.len() + without.len() > 0 {
            return without.is_empty();
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Newer copies took its place while it was read: the step that only the disk had was lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_is_brought_home_is_not_deleted_meanwhile() {
    const MIB: u64 = 1 << 20;
    for ceiling in [None, Some(80 * MIB)] {
        let folders = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
        let [url, directory] = folders.each_ref().map(|folder| folder.path().display().to_string());
        let url = format!("file://{url}");
        let bucket =
            Bucket::open(&url.parse().expect("a URL"), &StoreSettings::default()).await.expect("open");
        begin_run(&bucket, start()).await.expect("run");
        let local = Local::open(&directory).await.expect("open");
        let left = sealed(1, 64 << 20);
        assert!(local.put(&left.held, &slot_of(&left), || true).await.expect("put"));
        let later = Start { nonce: "fedcba9876543210".repeat(2), ..start() };
        let starts = vec![start().nonce, later.nonce.clone()];
        local.begin(&starts, 0).await.expect("begin");
        let resumes = Some(left.held.name());
        let tier = LocalTier { directory, keep: 1, ceiling, starts, seen: 0, resumes };
        let mut hello = Hello::new(url, later.clone(), Default::default());
        (hello.local, hello.flush_rate) = (Some(tier), std::num::NonZeroU64::new(MIB));
        let (trainer, mut listener) = trainer();
        let (copies, work) = Copies::new(8);
        let disk = Disk::new(&hello, &trainer, &copies).expect("a tier");
        let disk = tokio::spawn(disk.do_all(copy(copies.health(), 0).1, work));
        let clock = Clock::manual();
        let mut agent = Flusher::new(hello, trainer, Some(copies.clone()));
        agent.clock = clock.clone();
        let (queue, work) = mpsc::unbounded_channel();
        let agent = tokio::spawn(agent.settle_all(work));
        // It is sent as fast as time passes, which it does not yet.
        while bucket.list_uploads("shards").await.expect("list").is_empty() {
            assert!(clock.now().since_boot().as_secs() < 20, "it was to take a minute");
            clock.advance(Duration::from_secs(1));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let own = |step| {
            let mut save = sealed(step, 9 << 20);
            save.held = Arc::new(Held::new(later.nonce.clone(), 0, 1, save.held.seal.clone()));
            save
        };
        for step in 2..=3 {
            let save = own(step);
            let _copy = copies.save(save.held.clone(), slot_of(&save)).expect("it is wanted");
            // The third has no room.
            assert_eq!(is_copied(&mut listener).await, step == 2 || ceiling.is_none());
        }
        let time = async {
            loop {
                clock.advance(Duration::from_secs(1));
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        drop(queue);
        tokio::select! { ended = agent => ended.expect("it ends"), () = time => unreachable!("time never ends") }
        let steps = list_steps(&bucket).await.expect("list");
        assert_eq!(steps.iter().map(|info| info.key.step).collect::<Vec<_>>(), [1], "below {ceiling:?}");
        assert_eq!(verify(&bucket, None, &|_| {}).await.expect("verify"), []);
        // From then on it is a copy like any other.
        let save = own(4);
        let _copy = copies.save(save.held.clone(), slot_of(&save)).expect("it is wanted");
        drop(copies);
        disk.await.expect("the disk's task");
        let found = local.look().await.expect("look").steps;
        assert_eq!(found.iter().map(|step| step.name.step).collect::<Vec<_>>(), [4]);
    }
}

#[tokio::test]
async fn a_disk_that_hangs_brings_nothing_home_and_is_waited_for_once() {
    let (bucket, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let run = begin_run(&bucket, start()).await.expect("run");
    let mut left = left_on(&Bucket::in_memory().with_faults(&faults), &sealed(1, 20 << 20)).await;
    let Source::Disk(disk) = &mut left.source else { panic!("it lies on the disk") };
    disk.set_clock(clock.clone());
    let gate = faults.gate(9);
    let mut heir = heir(&bucket, &run);
    let time = async {
        gate.reached().await;
        loop {
            clock.advance(PATIENCE);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let error = tokio::select! {
        flushed = heir.flush(&left) => flushed.expect_err("it hangs"),
        () = time => unreachable!("the clock runs for ever"),
    };
    assert!(error.message().contains("did not answer for 60 s"), "{error}");
    assert_eq!(list_steps(&bucket).await.expect("list"), []);
    assert_eq!(bucket.list_uploads("").await.expect("list"), []);
}

/// The slot stays the agent's for no longer than that.
#[tokio::test]
async fn a_host_that_hangs_in_a_copy_is_waited_for_once() {
    let (near, mut hears) = FdStream::pair().expect("pair");
    let trainer = Trainer::new(near, Arc::new(Pace::new(None)));
    let (clock, health) = (Clock::manual(), Health::default());
    let mut hear = || -> Reply {
        let (frame, _) = hears.receive().expect("receive").expect("a frame");
        serde_json::from_slice(&frame).expect("parses")
    };
    for is_first in [true, false] {
        let (replica, ticket) = copy(&health, 32 << 20);
        let waits = await_replica(&clock, &trainer, 7, Some(replica));
        tokio::pin!(waits);
        if is_first {
            assert!(futures::poll!(&mut waits).is_pending());
            clock.advance(patience(32 << 20));
        }
        waits.await;
        assert!(!ticket.is_wanted(), "what it takes later is no copy");
        if is_first {
            let Reply::Warning { message } = hear() else { panic!("it is told") };
            assert!(message.contains("another host did not take a copy within 61 s"), "{message}");
        }
        assert!(matches!(hear(), Reply::NotReplicated { save: 7 }));
    }
}
