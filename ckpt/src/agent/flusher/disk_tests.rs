//! A local disk that hangs: the store goes on, what the disk still writes is nothing, and it is used again.

use forebay_io::net::FdStream;
use forebay_io::object::{FaultMode, Faults, OperationKind};

use super::tests::{flusher, hello, sealed, start, trainer};
use super::*;
use crate::agent::copy::{Health, copy};
use crate::agent::disk::Disk;
use crate::catalog::list_steps;
use crate::local::PATIENCE;

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
    local.begin(&starts).await.expect("begin");
    let tier = LocalTier { directory: "/unused".into(), keep: 9, ceiling: None, starts, resumes: None };
    let hello = Hello { local: Some(tier), ..hello() };
    let (copies, work) = Copies::new(8);
    let mut disk = Disk::new(&hello, &trainer, copies.health()).expect("a tier");
    disk.local = Some(local.clone());
    let disk = tokio::spawn(disk.do_all(copy(copies.health(), 0).1, work));
    let mut agent = flusher(&bucket, &run, trainer);
    (agent.clock, agent.copies) = (clock.clone(), Some(copies.clone()));
    let save = |step| {
        let mut save = sealed(step, 1000);
        save.local = copies.save(save.held.clone(), save.slot.clone());
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
    local.begin(&starts).await.expect("begin");
    let tier = LocalTier { directory: "/unused".into(), keep: 9, ceiling: None, starts, resumes: None };
    let hello = Hello { local: Some(tier), ..hello() };
    let (copies, work) = Copies::new(8);
    let mut disk = Disk::new(&hello, &trainer, copies.health()).expect("a tier");
    disk.local = Some(local.clone());
    faults.script(OperationKind::List, 1, FaultMode::Before);
    let save = sealed(1, 1000);
    assert!(copies.save(save.held.clone(), save.slot.clone()).is_some());
    drop(copies);
    disk.do_all(copy(&Health::default(), 0).1, work).await;
    assert_eq!(faults.injected(), 1);
    let (with, without, warnings) = heard(&mut listener);
    assert_eq!((with, without, warnings.len()), (vec![1], vec![], 1), "the failure itself is told");
    assert_eq!(local.look().await.expect("look").steps.len(), 1);
}
