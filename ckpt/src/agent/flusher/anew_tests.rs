//! A job that went back while the store is away: what it left is let go of at once, what it went back to is not.

use std::collections::BTreeMap;

use forebay_io::net::FdStream;
use forebay_io::object::Faults;

use super::tests::{flusher, sealed, start, trainer};
use super::*;
use crate::catalog::{Start, list_steps};
use crate::verify::verify;

/// What becomes of so many saves, by their number: whether each is durable.
fn fates(listener: &mut FdStream, count: usize) -> BTreeMap<u64, bool> {
    let mut fates = BTreeMap::new();
    while fates.len() < count {
        let (frame, _) = listener.receive().expect("receive").expect("a reply");
        let told = match serde_json::from_slice(&frame).expect("parse") {
            Reply::Durable { save, .. } => (save, true),
            Reply::Failed { save, .. } => (save, false),
            _ => continue,
        };
        assert!(fates.insert(told.0, told.1).is_none(), "each is told once");
    }
    fates
}

/// The slot of a save, and what tells whether anybody can read it still.
fn watched(mut save: Save) -> (Save, Arc<Vec<u8>>) {
    let Source::Slot(slot) = &save.source else { panic!("in memory") };
    let bytes = Arc::new(slot.to_vec());
    struct Watched(Arc<Vec<u8>>);
    impl AsRef<[u8]> for Watched {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    save.source = Source::Slot(bytes::Bytes::from_owner(Watched(bytes.clone())));
    (save, bytes)
}

/// They were waited for until the store was back, or they were given up ten minutes later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_job_went_back_from_is_let_go_of_while_the_store_is_away() {
    // The first of them is being flushed when the job goes back: it is the step gone back to, or one that was left.
    for back in [1, 0] {
        let (plain, faults) = (Bucket::in_memory(), Faults::new());
        let bucket = plain.with_faults(&faults).with_deadline_ms(0);
        let run = begin_run(&plain, start()).await.expect("run");
        let (trainer, mut listener) = trainer();
        let agent = flusher(&bucket, &run, trainer.clone());
        let (queue, work) = mpsc::unbounded_channel();
        faults.set_down(true);
        let mut slots = Vec::new();
        for step in [1, 2] {
            let (save, slot) = watched(sealed(step, 1000));
            trainer.begin(step, &[1, 2], None);
            slots.push(slot);
            queue.send(Work::Save(save)).expect("it takes work");
        }
        let agent = tokio::spawn(agent.settle_all(work));
        let left: Vec<u64> = (back + 1..=2).collect();
        trainer.begin_anew(&left);
        let count = left.len();
        let (told, mut listener) =
            tokio::task::spawn_blocking(move || (fates(&mut listener, count), listener)).await.expect("join");
        assert_eq!(told, left.iter().map(|save| (*save, false)).collect());
        for save in &left {
            assert_eq!(Arc::strong_count(&slots[*save as usize - 1]), 1, "nothing reads the slot of {save}");
        }
        // Another start of the process, which took its number by now, is no reason to leave the step that it goes on from.
        begin_run(&plain, Start { nonce: "fedcba9876543210".repeat(2), ..start() }).await.expect("another");
        faults.set_down(false);
        drop(queue);
        if back == 1 {
            let told = tokio::task::spawn_blocking(move || fates(&mut listener, 1)).await.expect("join");
            assert_eq!(told, BTreeMap::from([(1, true)]));
        }
        agent.await.expect("it ends");
        let steps = list_steps(&plain).await.expect("list");
        assert_eq!(
            steps.iter().map(|step| step.key.step).collect::<Vec<_>>(),
            (1..=back).collect::<Vec<_>>()
        );
        assert_eq!(verify(&plain, None, &|_| {}).await.expect("verify"), []);
    }
}

/// It was told while a thread still looked at the slot, which is the trainer's from then on.
#[test]
fn who_looks_at_a_slot_is_waited_for_before_it_is_let_go_of() {
    // Whoever is to look stands in line for the one thread that there is.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
    runtime.expect("a runtime").block_on(async {
        let (plain, faults) = (Bucket::in_memory(), Faults::new());
        let bucket = plain.with_faults(&faults).with_deadline_ms(0);
        let run = begin_run(&plain, start()).await.expect("run");
        let (trainer, mut listener) = trainer();
        let mut agent = flusher(&bucket, &run, trainer.clone());
        let (save, slot) = watched(sealed(1, 1000));
        trainer.begin(1, &[1], None);
        faults.set_down(true);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let taken = tokio::task::spawn_blocking(move || released.recv());
        let going_back = async {
            while !matches!(heard(&mut listener).await, Reply::Warning { .. }) {}
            trainer.begin_anew(&[1]);
            for _ in 0..1000 {
                tokio::task::yield_now().await;
                assert!(!listener.readable(Duration::ZERO).expect("look"), "it is looked at yet");
            }
            release.send(()).expect("it waits");
            taken.await.expect("join").expect("released");
            assert!(matches!(heard(&mut listener).await, Reply::Failed { save: 1, .. }));
            assert_eq!(Arc::strong_count(&slot), 1, "nothing reads it");
        };
        tokio::join!(agent.settle(save), going_back);
    });
}

/// What a trainer hears next.
async fn heard(listener: &mut FdStream) -> Reply {
    while !listener.readable(Duration::ZERO).expect("look") {
        tokio::task::yield_now().await;
    }
    let (frame, _) = listener.receive().expect("receive").expect("a reply");
    serde_json::from_slice(&frame).expect("parse")
}
