//! The committer over an engine that answers at once and over its twin whose reads wait.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use futures::future::{BoxFuture, FutureExt};
use parking_lot::Mutex;

use super::twin::Twin;
use super::{Committer, CommitterSettings, Guard, Reads, Txn};
use crate::kv::{Durability, Engine, LmdbEngine, LmdbSettings};
use crate::testing::{Chance, rounds};

mod room;

fn start(twin: &Arc<Twin>) -> Committer {
    Committer::start(twin.clone(), CommitterSettings::default())
}

fn number(value: Option<Bytes>) -> u64 {
    value.map_or(0, |value| std::str::from_utf8(&value).expect("text").parse().expect("number"))
}

/// Adds one to a counter and returns what it was.
fn count(txn: &mut Txn<'_>, key: &'static [u8]) -> Result<u64> {
    let was = number(txn.get(key)?);
    txn.put(key, (was + 1).to_string())?;
    Ok(was)
}

async fn both(test: impl AsyncFn(Arc<Twin>)) {
    test(Twin::new(true)).await;
    test(Twin::new(false)).await;
}

#[tokio::test]
async fn a_transaction_sees_its_own_changes_and_later_ones_see_all_of_them() {
    both(async |twin| {
        let committer = start(&twin);
        let write = |txn: &mut Txn<'_>| {
            txn.put("a/1", "1")?;
            txn.put("a/2", "2")?;
            txn.put("b", "3")?;
            txn.delete("a/1")?;
            assert_eq!(txn.get(b"a/1")?, None);
            assert_eq!(txn.scan_prefix(b"a/", 10)?.len(), 1);
            Ok(())
        };
        committer.transact(Durability::Buffered, write).await.expect("transaction");
        let found = committer.read(|view| view.scan(b"", b"", 10)).await.expect("read");
        assert_eq!(found.len(), 2);
        committer.sync().await.expect("sync");
        assert_eq!(committer.overlaid(), 0, "everything is in the engine");
        let many = committer.read(|view| view.get_many(&[b"a/2", b"b", b"c"])).await.expect("read");
        assert_eq!(many, [Some("2".into()), Some("3".into()), None]);
        committer.close().await.expect("close");
    })
    .await;
}

#[tokio::test]
async fn an_error_or_a_panic_undoes_only_its_own_changes() {
    both(async |twin| {
        let committer = start(&twin);
        committer.transact(Durability::Durable, |txn| txn.put("kept", "1")).await.expect("transaction");
        let refuse = |txn: &mut Txn<'_>| -> Result<()> {
            txn.put("kept", "2")?;
            Err(Error::invalid("no"))
        };
        let error = committer.transact(Durability::Durable, refuse).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let panic = |txn: &mut Txn<'_>| -> Result<()> {
            txn.put("kept", "3")?;
            panic!("on purpose")
        };
        let error = committer.transact(Durability::Durable, panic).await.expect_err("panicked");
        assert_eq!(error.kind(), ErrorKind::Bug);
        assert!(error.message().contains("on purpose"), "{error}");
        let too_large = |txn: &mut Txn<'_>| txn.put("kept", vec![0; 2000]);
        let error = committer.transact(Durability::Durable, too_large).await.expect_err("too large");
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        let kept = committer.read(|view| view.get(b"kept")).await.expect("read");
        assert_eq!(kept.as_deref(), Some(&b"1"[..]));
        committer.sync().await.expect("the committer goes on");
    })
    .await;
}

#[tokio::test]
async fn waiting_transactions_share_engine_writes() {
    let twin = Twin::held(true);
    let committer = start(&twin);
    let callers: Vec<_> = (0..64)
        .map(|_| {
            let committer = committer.clone();
            tokio::spawn(async move { committer.transact(Durability::Durable, |txn| count(txn, b"n")).await })
        })
        .collect();
    // All 64 have run once the newest state says so, while the first write is still held back.
    while committer.read_now(|view| view.get(b"n")).expect("now").map(number).expect("read") < 64 {
        tokio::task::yield_now().await;
    }
    assert!(callers.iter().all(|caller| !caller.is_finished()), "nothing is durable yet");
    twin.permits.add_permits(64);
    let mut counts = Vec::new();
    for caller in callers {
        counts.push(caller.await.expect("caller").expect("transaction"));
    }
    counts.sort_unstable();
    assert_eq!(counts, (0..64).collect::<Vec<_>>(), "each saw a state of its own");
    let batches = twin.batches.lock();
    assert!(batches.len() <= 2, "{} writes for 64 transactions", batches.len());
    assert!(batches.iter().all(|batch| batch.len() == 1), "a key is written once a batch");
}

#[tokio::test(start_paused = true)]
async fn buffered_changes_are_answered_at_once_and_follow_within_the_interval() {
    let twin = Twin::new(true);
    let committer = start(&twin);
    for _ in 0..10 {
        committer.transact(Durability::Buffered, |txn| count(txn, b"n")).await.expect("transaction");
    }
    assert_eq!(twin.batches.lock().len(), 0, "nothing is written yet");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(twin.batches.lock().len(), 1, "one batch for all");
    assert_eq!(number(twin.memory.get(b"n").await.expect("get")), 10);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(twin.batches.lock().len(), 1, "nothing new, nothing written");
}

#[tokio::test]
async fn a_durable_answer_covers_every_answer_before_it() {
    both(async |twin| {
        let committer = start(&twin);
        for round in 0..20u64 {
            committer
                .transact(Durability::Buffered, |txn| count(txn, b"buffered"))
                .await
                .expect("transaction");
            match round % 3 {
                0 => committer
                    .transact(Durability::Durable, |txn| txn.put("x", "y"))
                    .await
                    .expect("transaction"),
                1 => committer.sync().await.expect("sync"),
                // What a durable transaction read is durable too when it is answered.
                _ => {
                    let read = |txn: &mut Txn<'_>| txn.get(b"buffered").map(number);
                    let read = committer.transact(Durability::Durable, read).await.expect("transaction");
                    assert_eq!(read, round + 1);
                }
            }
            assert_eq!(number(twin.memory.get(b"buffered").await.expect("get")), round + 1);
        }
    })
    .await;
}

#[tokio::test]
async fn a_refused_batch_poisons_everything_after_it() {
    let twin = Twin::held(true);
    let committer = start(&twin);
    twin.permits.add_permits(1);
    committer.transact(Durability::Durable, |txn| txn.put("a", "1")).await.expect("one write may pass");
    committer.transact(Durability::Buffered, |txn| txn.put("a", "2")).await.expect("answered, not durable");
    twin.permits.close();
    let message = "the write failed";
    let check = |result: Result<()>| assert_eq!(result.expect_err("poisoned").message(), message);
    check(committer.sync().await);
    check(committer.transact(Durability::Buffered, |txn| txn.put("a", "3")).await);
    check(committer.transact(Durability::Durable, |txn| txn.put("a", "3")).await);
    check(committer.read(|view| view.get(b"a").map(drop)).await);
    check(committer.close().await);
    assert_eq!(twin.batches.lock().len(), 1, "nothing more reached the engine");
}

/// The tree took no more changes after one moment without room, until it was mounted again.
#[tokio::test(start_paused = true)]
async fn a_batch_that_found_no_room_is_written_once_there_is_some() {
    let twin = Twin::new(true);
    let committer = start(&twin);
    twin.is_full.store(true, Ordering::SeqCst);
    committer.transact(Durability::Buffered, |txn| txn.put("a", "1")).await.expect("it is not waited for");
    let told = |result: Result<()>| assert_eq!(result.expect_err("no room").kind(), ErrorKind::NoSpace);
    told(committer.sync().await);
    for value in ["2", "3"] {
        told(committer.transact(Durability::Durable, move |txn| txn.put("b", value)).await);
    }
    assert!(twin.batches.lock().is_empty());
    // What changed stands.
    let value = committer.read(|view| view.get(b"b")).await.expect("read");
    assert_eq!(value.as_deref(), Some(&b"3"[..]));
    twin.is_full.store(false, Ordering::SeqCst);
    committer.sync().await.expect("there is room");
    committer.transact(Durability::Durable, |txn| txn.put("c", "4")).await.expect("as ever");
    for (key, value) in [("a", "1"), ("b", "3"), ("c", "4")] {
        let found = twin.memory.get(key.as_bytes()).await.expect("get");
        assert_eq!(found.as_deref(), Some(value.as_bytes()), "{key}");
    }
    // A tree that is closed does not wait for room.
    twin.is_full.store(true, Ordering::SeqCst);
    committer.transact(Durability::Buffered, |txn| txn.put("a", "5")).await.expect("it is not waited for");
    told(committer.close().await);
}

#[tokio::test]
async fn waiters_of_a_refused_batch_and_of_the_next_all_learn_of_it() {
    let twin = Twin::held(true);
    let committer = start(&twin);
    let callers: Vec<_> = (0..20)
        .map(|_| {
            let committer = committer.clone();
            tokio::spawn(async move { committer.transact(Durability::Durable, |txn| count(txn, b"n")).await })
        })
        .collect();
    while committer.read_now(|view| view.get(b"n")).expect("now").map(number).expect("read") < 20 {
        tokio::task::yield_now().await;
    }
    twin.permits.close();
    for caller in callers {
        caller.await.expect("caller").expect_err("nothing was written");
    }
}

#[tokio::test]
async fn a_closure_set_aside_does_not_hold_up_others_and_sees_the_newest_state() {
    let twin = Twin::new(false);
    let committer = start(&twin);
    committer.transact(Durability::Durable, |txn| txn.put("a", "1")).await.expect("transaction");
    let runs = Arc::new(AtomicU32::new(0));
    let closed = twin.gate.write().await;
    let slow = tokio::spawn({
        let (committer, runs) = (committer.clone(), runs.clone());
        let work = move |txn: &mut Txn<'_>| {
            runs.fetch_add(1, Ordering::SeqCst);
            let other = txn.get(b"not in memory")?;
            assert_eq!(other, None);
            txn.get(b"a").map(number)
        };
        async move { committer.transact(Durability::Buffered, work).await }
    });
    while runs.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    // This one reads nothing: it passes the one that waits, which then sees what it wrote.
    committer.transact(Durability::Buffered, |txn| txn.put("a", "2")).await.expect("transaction");
    assert!(!slow.is_finished());
    drop(closed);
    assert_eq!(slow.await.expect("slow").expect("transaction"), 2);
    assert_eq!(runs.load(Ordering::SeqCst), 2, "once to ask, once to run");
    // What was read once is in memory now.
    let fetches = twin.fetches.load(Ordering::SeqCst);
    committer.transact(Durability::Buffered, |txn| txn.get(b"not in memory")).await.expect("transaction");
    assert_eq!(twin.fetches.load(Ordering::SeqCst), fetches);
}

/// Whoever passes over the error of a read that waits can still learn of it: that run is not the one that counts.
#[tokio::test]
async fn a_run_that_misses_something_knows() {
    let twin = Twin::new(false);
    let committer = start(&twin);
    let runs = Arc::new(Mutex::new(Vec::new()));
    let noted = runs.clone();
    let work = move |txn: &mut Txn<'_>| {
        let passed_over = txn.get(b"not in memory").is_err();
        noted.lock().push((passed_over, txn.has_missed()));
        Ok(())
    };
    committer.transact(Durability::Buffered, work).await.expect("transaction");
    assert_eq!(*runs.lock(), [(true, true), (false, false)]);
}

/// Promise: a transaction whose reads are in memory is answered where it is asked, without a switch of threads.
#[tokio::test]
async fn what_is_in_memory_is_answered_at_once() {
    both(async |twin| {
        let committer = start(&twin);
        let fetches = || twin.fetches.load(Ordering::SeqCst);
        committer.transact(Durability::Buffered, |txn| count(txn, b"n")).await.expect("transaction");
        let before = fetches();
        for _ in 0..100 {
            let transaction = committer.transact(Durability::Buffered, |txn| count(txn, b"n"));
            futures::FutureExt::now_or_never(transaction).expect("no wait").expect("transaction");
        }
        assert_eq!(fetches(), before);
        // What a transaction says is absent is not looked for, and what comes there later is seen.
        let made = |txn: &mut Txn<'_>| {
            txn.know_absent("new");
            txn.put("made", "1")
        };
        committer.transact(Durability::Buffered, made).await.expect("transaction");
        let transaction = committer.transact(Durability::Buffered, |txn| count(txn, b"new"));
        assert_eq!(futures::FutureExt::now_or_never(transaction).expect("no wait").expect("transaction"), 0);
        assert_eq!(fetches(), before);
        // Nor what is not in a range that one has seen whole, or says is empty, before or after batches were written.
        let seen = |txn: &mut Txn<'_>| txn.know_whole("s".into(), "t".into(), 10);
        committer.transact(Durability::Buffered, |txn| txn.put("s1", "1")).await.expect("transaction");
        committer.transact(Durability::Buffered, seen).await.expect("transaction");
        let empty = |txn: &mut Txn<'_>| {
            txn.know_empty("e", "f");
            txn.put("e1", "5")
        };
        committer.transact(Durability::Buffered, empty).await.expect("transaction");
        committer.transact(Durability::Buffered, |txn| txn.delete("s1")).await.expect("transaction");
        for _ in 0..2 {
            let before = fetches();
            for (key, expected) in [(&b"s2"[..], None), (b"s1", None), (b"e", None), (b"e1", Some("5"))] {
                let value = committer.read_now(|view| view.get(key)).expect("no wait").expect("read");
                assert_eq!(value.as_deref(), expected.map(str::as_bytes), "{key:?}");
            }
            let none = committer.read_now(|view| view.scan(b"e2", b"f", 10)).expect("no wait").expect("read");
            assert_eq!((none.len(), fetches()), (0, before));
            committer.sync().await.expect("sync");
        }
        assert_eq!(number(committer.read(|view| view.get(b"new")).await.expect("read")), 1);
        committer.close().await.expect("close");
    })
    .await;
}

/// Promise: a record that comes and goes within a batch, such as the intent of a small write, costs the engine nothing.
#[tokio::test]
async fn what_comes_and_goes_within_a_batch_is_not_written() {
    let twin = Twin::new(false);
    let committer = start(&twin);
    let change = async |work: fn(&mut Txn<'_>) -> Result<()>| {
        committer.transact(Durability::Buffered, work).await.expect("transaction");
    };
    change(|txn| {
        txn.know_absent("passing");
        txn.put("passing", "1")
    })
    .await;
    change(|txn| txn.put("kept", "1")).await;
    change(|txn| txn.delete("passing")).await;
    committer.sync().await.expect("sync");
    assert_eq!(twin.batches.lock().last().expect("a batch").len(), 1);
    // Once the engine holds it, its end is written.
    change(|txn| txn.put("passing", "2")).await;
    committer.sync().await.expect("sync");
    change(|txn| txn.delete("passing")).await;
    committer.sync().await.expect("sync");
    assert_eq!(twin.memory.get(b"passing").await.expect("get"), None);
}

#[tokio::test]
async fn reads_that_fail_or_never_settle_end_the_transaction() {
    let twin = Twin::new(false);
    let committer = Committer::start(twin.clone(), CommitterSettings { max_runs: 5, ..Default::default() });
    let mut next = 0u32;
    let restless = move |txn: &mut Txn<'_>| {
        next += 1;
        txn.get(&next.to_be_bytes())
    };
    let error = committer.transact(Durability::Buffered, restless).await.expect_err("it never settles");
    assert_eq!(error.kind(), ErrorKind::Bug);
    twin.reads_fail.store(true, Ordering::SeqCst);
    let error =
        committer.transact(Durability::Buffered, |txn| txn.get(b"x")).await.expect_err("a failed read");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let error = committer.read(|view| view.get(b"x")).await.expect_err("a failed read");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    twin.reads_fail.store(false, Ordering::SeqCst);
    committer.transact(Durability::Buffered, |txn| txn.get(b"x")).await.expect("it goes on");
}

#[tokio::test]
async fn a_caller_that_goes_away_tears_nothing() {
    both(async |twin| {
        let committer = start(&twin);
        for _ in 0..200 {
            let work = |txn: &mut Txn<'_>| {
                let left = count(txn, b"left")?;
                let right = count(txn, b"right")?;
                assert_eq!(left, right);
                Ok(())
            };
            let transaction = committer.transact(Durability::Durable, work);
            tokio::select! {
                biased;
                _ = transaction => {}
                () = tokio::task::yield_now() => {}
            }
        }
        committer.sync().await.expect("sync");
        let counts = committer.read(|view| view.get_many(&[b"left", b"right"])).await.expect("read");
        assert_eq!(counts[0], counts[1]);
        assert!(number(counts[0].clone()) > 0);
    })
    .await;
}

#[tokio::test]
async fn closing_makes_everything_durable_and_dropping_does_too() {
    both(async |twin| {
        let committer = start(&twin);
        committer.transact(Durability::Buffered, |txn| txn.put("a", "1")).await.expect("transaction");
        committer.clone().close().await.expect("close");
        committer.close().await.expect("closing again");
        assert_eq!(twin.batches.lock().len(), 1);
        let error =
            committer.transact(Durability::Buffered, |txn| txn.put("a", "2")).await.expect_err("closed");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    })
    .await;
    let twin = Twin::new(true);
    let committer = start(&twin);
    committer.transact(Durability::Buffered, |txn| txn.put("a", "1")).await.expect("transaction");
    drop(committer);
    while twin.batches.lock().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_guard_that_refuses_stops_acknowledgements_until_it_allows_them() {
    let twin = Twin::held(true);
    let refusal: Arc<Mutex<Option<ErrorKind>>> = Arc::default();
    let guard = {
        let refusal = refusal.clone();
        move || refusal.lock().map_or(Ok(()), |kind| Err(Error::new(kind, "the lease")))
    };
    let committer = Committer::start_guarded(twin.clone(), CommitterSettings::default(), guard);
    let durable = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.transact(Durability::Durable, |txn| count(txn, b"n")).await })
    };
    while committer.read_now(|view| view.get(b"n")).expect("now").map(number).expect("read") < 1 {
        tokio::task::yield_now().await;
    }
    *refusal.lock() = Some(ErrorKind::Unavailable);
    twin.permits.add_permits(10);
    let error = durable.await.expect("caller").expect_err("written, and not acknowledged");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let change = async || committer.transact(Durability::Buffered, |txn| count(txn, b"n")).await;
    assert_eq!(change().await.expect_err("refused").kind(), ErrorKind::Unavailable);
    assert_eq!(committer.read(|view| view.get(b"n")).await.map(number).expect("reads go on"), 1);
    *refusal.lock() = None;
    assert_eq!(change().await.expect("allowed again"), 1);
    *refusal.lock() = Some(ErrorKind::Conflict);
    assert_eq!(committer.read(|view| view.get(b"n")).await.expect_err("lost").kind(), ErrorKind::Conflict);
}

/// Says whether the volume is held, and gets it back as often as it may.
#[derive(Clone)]
struct Lease {
    is_held: Arc<AtomicBool>,
    regains: Arc<AtomicUsize>,
}

impl Guard for Lease {
    fn check(&self) -> Result<()> {
        let lapsed = || Error::new(ErrorKind::Unavailable, "the lease");
        self.is_held.load(Ordering::SeqCst).then_some(()).ok_or_else(lapsed)
    }

    fn regain(&self) -> BoxFuture<'static, Result<()>> {
        let left = |left: usize| left.checked_sub(1);
        let regained = self.regains.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).is_ok();
        self.is_held.fetch_or(regained, Ordering::SeqCst);
        std::future::ready(self.check()).boxed()
    }
}

/// A change, and what waits for one to be durable, is refused where the lease does not come back, and not before.
#[tokio::test]
async fn changes_wait_for_a_lease_that_comes_back() {
    let twin = Twin::held(true);
    let lease = Lease { is_held: Arc::new(true.into()), regains: Arc::new(2.into()) };
    let is_held = lease.is_held.clone();
    let committer = Committer::start_guarded(twin.clone(), CommitterSettings::default(), lease.clone());
    let durable = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.transact(Durability::Durable, |txn| count(txn, b"n")).await })
    };
    while committer.read_now(|view| view.get(b"n")).expect("now").map(number).expect("read") < 1 {
        tokio::task::yield_now().await;
    }
    is_held.store(false, Ordering::SeqCst);
    twin.permits.add_permits(10);
    assert_eq!(durable.await.expect("caller").expect("acknowledged once it is held again"), 0);
    let change = async || committer.transact(Durability::Buffered, |txn| count(txn, b"n")).await;
    is_held.store(false, Ordering::SeqCst);
    assert_eq!(change().await.expect("once it is held again"), 1);
    is_held.store(false, Ordering::SeqCst);
    assert_eq!(change().await.expect_err("it does not come back").kind(), ErrorKind::Unavailable);
    assert_eq!(lease.regains.load(Ordering::SeqCst), 0);
    assert_eq!(committer.read(|view| view.get(b"n")).await.map(number).expect("reads go on"), 2);
}

/// Where it is asked for, what nobody waits for is done while the lease has lapsed; durable it is not before it is back.
#[tokio::test]
async fn changes_that_nobody_waits_for_go_on_while_the_lease_has_lapsed() {
    let twin = Twin::held(false);
    let refusal: Arc<Mutex<Option<ErrorKind>>> = Arc::new(Mutex::new(Some(ErrorKind::Unavailable)));
    let guard = {
        let refusal = refusal.clone();
        move || refusal.lock().map_or(Ok(()), |kind| Err(Error::new(kind, "the lease")))
    };
    let settings = CommitterSettings { changes_while_unsure: true, ..CommitterSettings::default() };
    let committer = Committer::start_guarded(twin.clone(), settings, guard);
    let change = async |durability| committer.transact(durability, |txn| count(txn, b"n")).await;
    twin.permits.add_permits(10);
    for before in 0..3 {
        assert_eq!(change(Durability::Buffered).await.expect("unsure"), before);
    }
    assert_eq!(change(Durability::Durable).await.expect_err("unsure").kind(), ErrorKind::Unavailable);
    assert_eq!(committer.sync().await.expect_err("unsure").kind(), ErrorKind::Unavailable);
    *refusal.lock() = None;
    committer.sync().await.expect("it is held again");
    assert_eq!(change(Durability::Durable).await.expect("held"), 3);
    *refusal.lock() = Some(ErrorKind::Conflict);
    for durability in [Durability::Buffered, Durability::Durable] {
        assert_eq!(change(durability).await.expect_err("lost").kind(), ErrorKind::Conflict);
    }
}

/// Every transaction logs what it read and wrote under a number that the transactions themselves hand out, so
/// that the log is in commit order; replaying it on a model must give the same reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_transactions_are_linear_in_commit_order() {
    for reads_at_once in [true, false] {
        for _ in 0..rounds(3) {
            // So little memory that values leave it again, or enough to know all keys of a range.
            for hot_bytes in [2000, 1 << 20] {
                check_linear(Twin::new(reads_at_once), hot_bytes).await;
            }
        }
    }
}

type Step = (Vec<(Vec<u8>, Option<Bytes>)>, Vec<(Bytes, Bytes)>, BTreeMap<Vec<u8>, Option<Bytes>>);

async fn check_linear(twin: Arc<Twin>, hot_bytes: usize) {
    let mut chance = Chance::fresh();
    let settings = CommitterSettings { hot_bytes, max_batch_bytes: 500, ..Default::default() };
    let committer = Committer::start(twin.clone(), settings);
    let log: Arc<Mutex<BTreeMap<u64, Step>>> = Arc::default();
    let workers: Vec<_> = (0..8)
        .map(|_| {
            let (committer, log, mut chance) =
                (committer.clone(), log.clone(), Chance::seeded(chance.next()));
            tokio::spawn(async move {
                for _ in 0..60 {
                    let seed = chance.next();
                    let durability =
                        if seed.is_multiple_of(5) { Durability::Durable } else { Durability::Buffered };
                    let work = move |txn: &mut Txn<'_>| random_step(txn, seed);
                    let (order, step) = committer.transact(durability, work).await.expect("transaction");
                    assert!(log.lock().insert(order, step).is_none(), "two transactions at one place");
                    if seed.is_multiple_of(7) {
                        let read = |view: &super::View<'_>| {
                            let keys: [&[u8]; 2] = [b"order", b"twin of order"];
                            view.get_many(&keys)
                        };
                        let pair = committer.read(read).await.expect("read");
                        assert_eq!(pair[0], pair[1], "a torn read");
                        assert!(number(pair[0].clone()) > order, "an old read");
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.expect("worker");
    }
    let mut model: BTreeMap<Vec<u8>, Bytes> = BTreeMap::new();
    for (position, (order, (reads, scanned, writes))) in log.lock().iter().enumerate() {
        assert_eq!(position as u64, *order, "an order without a transaction");
        for (key, value) in reads {
            assert_eq!(model.get(key), value.as_ref(), "at {order}, {chance:?}");
        }
        let expected: Vec<_> = model.range(b"k".to_vec()..b"l".to_vec()).take(7).collect();
        assert!(
            scanned.len() == expected.len()
                && scanned.iter().zip(expected).all(|((k, v), (key, value))| k == key && v == value),
            "at {order}, {chance:?}"
        );
        for (key, value) in writes {
            match value {
                Some(value) => model.insert(key.clone(), value.clone()),
                None => model.remove(key),
            };
        }
    }
    committer.sync().await.expect("sync");
    assert_eq!(committer.overlaid(), 0, "what is in the engine has left the overlay");
    let stored = twin.memory.scan(b"k", b"l", usize::MAX).await.expect("scan");
    assert!(stored.iter().map(|(k, v)| (k.as_ref(), v)).eq(model.iter().map(|(k, v)| (k.as_ref(), v))));
}

/// Reads some keys and a range, writes some others, and takes the next number.
fn random_step(txn: &mut Txn<'_>, seed: u64) -> Result<(u64, Step)> {
    let mut chance = Chance::seeded(seed);
    let key = |chance: &mut Chance| format!("k{:02}", chance.below(24)).into_bytes();
    let order = count(txn, b"order")?;
    txn.put("twin of order", (order + 1).to_string())?;
    let mut reads = Vec::new();
    for _ in 0..chance.below(4) {
        let key = key(&mut chance);
        let value = txn.get(&key)?;
        reads.push((key, value));
    }
    let scanned = txn.scan_prefix(b"k", 7)?;
    if chance.below(8) == 0 {
        txn.know_whole("k".into(), "l".into(), 20)?;
    }
    let mut writes = BTreeMap::new();
    for _ in 0..chance.below(4) {
        let key = key(&mut chance);
        let value = (chance.below(3) > 0).then(|| Bytes::from(chance.next().to_string()));
        match &value {
            Some(value) => txn.put(key.clone(), value.clone())?,
            None => txn.delete(key.clone())?,
        }
        writes.insert(key, value);
    }
    Ok((order, (reads, scanned, writes)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_works_over_a_disk() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let open = async || {
        let engine = LmdbEngine::open(directory.path(), &LmdbSettings::default()).await.expect("open");
        Committer::start(Arc::new(engine), CommitterSettings::default())
    };
    let committer = open().await;
    let callers: Vec<_> = (0..64)
        .map(|_| {
            let committer = committer.clone();
            tokio::spawn(async move { committer.transact(Durability::Durable, |txn| count(txn, b"n")).await })
        })
        .collect();
    for caller in callers {
        caller.await.expect("caller").expect("transaction");
    }
    committer.close().await.expect("close");
    let committer = open().await;
    let read = committer.read_now(|view| view.get(b"n")).expect("a disk answers now").expect("read");
    assert_eq!(number(read), 64);
    assert_eq!(committer.engine().epoch(), 2);
}
