//! Changes that wait for a store which does not take them: how much of them there may be, and for how long.

use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::super::twin::Twin;
use super::super::{Committer, CommitterSettings, Reads, Txn};
use crate::kv::{Durability, Engine};

const DEADLINE: Duration = Duration::from_secs(30);
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

fn settings() -> CommitterSettings {
    CommitterSettings {
        max_waiting_bytes: 3000,
        max_batch_bytes: 1000,
        fetch_deadline: DEADLINE,
        flush_interval: FLUSH_INTERVAL,
        ..Default::default()
    }
}

async fn put(committer: &Committer, number: u32) -> Result<()> {
    let work = move |txn: &mut Txn<'_>| txn.put(number.to_be_bytes().to_vec(), vec![0; 500]);
    committer.transact_in_time(Durability::Buffered, work).await
}

/// Makes changes until one would have to wait; returns how many there are.
async fn fill(committer: &Committer) -> u32 {
    for number in 0.. {
        let Ok(done) = tokio::time::timeout(Duration::from_millis(1), put(committer, number)).await else {
            return number;
        };
        done.expect("there is room");
    }
    unreachable!("there is no bound")
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_the_engine_is_bounded() {
    let twin = Twin::held(true);
    let committer = Committer::start(twin.clone(), settings());
    let callers: Vec<_> = (0..50)
        .map(|number| {
            let committer = committer.clone();
            tokio::spawn(async move { put(&committer, number).await })
        })
        .collect();
    tokio::time::sleep(DEADLINE / 2).await;
    let answered = callers.iter().filter(|caller| caller.is_finished()).count();
    assert!((6..30).contains(&answered), "{answered} answered while the store stands still");
    twin.permits.add_permits(1000);
    for caller in callers {
        caller.await.expect("caller").expect("transaction");
    }
    committer.close().await.expect("close");
    let written: usize = twin.batches.lock().iter().map(|batch| batch.len()).sum();
    assert_eq!(written, 50);
}

/// Promise S62: past 32 MiB of changes of names that wait, the next one waits for 30 seconds, then fails with EIO and
/// changes nothing.
///
/// It waited until the store was back, however long that took.
#[tokio::test(start_paused = true)]
async fn a_change_that_finds_no_room_is_refused_after_the_deadline() {
    let twin = Twin::held(true);
    let committer = Committer::start(twin.clone(), settings());
    let made = fill(&committer).await;
    let started = Instant::now();
    let refused = put(&committer, made).await.expect_err("there is no room");
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert_eq!(started.elapsed(), DEADLINE);
    let refused = committer.sync_in_time().await.expect_err("there is no room for who waits, either");
    assert_eq!((refused.kind(), started.elapsed()), (ErrorKind::Unavailable, 2 * DEADLINE), "{refused}");
    let key = made.to_be_bytes();
    assert_eq!(committer.read(|view| view.get(&key)).await.expect("read"), None, "nothing was changed");
    twin.permits.add_permits(1000);
    put(&committer, made + 1).await.expect("the store is back");
    committer.sync().await.expect("the store is back");
    let stored = twin.memory.scan(b"", b"", usize::MAX).await.expect("scan");
    let numbers: Vec<_> = stored.iter().map(|(key, _)| key.to_vec()).collect();
    let expected: Vec<_> = (0..made).chain([made + 1]).map(|number| number.to_be_bytes().to_vec()).collect();
    assert_eq!(numbers, expected);
    committer.close().await.expect("close");
}

/// A change that waits for room while the right to the volume goes is refused then, not when the store is back.
#[tokio::test(start_paused = true)]
async fn who_waits_for_room_learns_that_the_lease_is_gone() {
    for kind in [ErrorKind::Unavailable, ErrorKind::Conflict] {
        let twin = Twin::held(true);
        let refusal: Arc<Mutex<Option<ErrorKind>>> = Arc::default();
        let guard = {
            let refusal = refusal.clone();
            move || refusal.lock().map_or(Ok(()), |kind| Err(Error::new(kind, "the lease")))
        };
        let committer = Committer::start_guarded(twin.clone(), settings(), guard);
        let made = fill(&committer).await;
        let caller = {
            let committer = committer.clone();
            tokio::spawn(async move { put(&committer, made).await })
        };
        tokio::time::sleep(2 * FLUSH_INTERVAL).await;
        assert!(!caller.is_finished(), "it waits");
        *refusal.lock() = Some(kind);
        let gone = Instant::now();
        let refused = caller.await.expect("caller").expect_err("the lease is gone");
        assert_eq!(refused.kind(), kind, "{refused}");
        assert!(gone.elapsed() <= FLUSH_INTERVAL, "{:?}", gone.elapsed());
        *refusal.lock() = None;
        twin.permits.add_permits(1000);
        committer.close().await.expect("close");
    }
}

/// An engine that another opener has fenced off refuses the batch: whoever waits for room behind it waited for ever.
#[tokio::test(start_paused = true)]
async fn who_waits_for_room_learns_that_a_batch_was_refused() {
    let twin = Twin::held(true);
    let committer = Committer::start(twin.clone(), settings());
    let made = fill(&committer).await;
    let caller = {
        let committer = committer.clone();
        tokio::spawn(async move { put(&committer, made).await })
    };
    tokio::time::sleep(FLUSH_INTERVAL / 2).await;
    assert!(!caller.is_finished(), "it waits");
    let refused_at = Instant::now();
    twin.permits.close();
    let refused = caller.await.expect("caller").expect_err("nothing is taken any more");
    assert_eq!((refused.kind(), refused_at.elapsed()), (ErrorKind::Unavailable, Duration::ZERO), "{refused}");
    committer.close().await.expect_err("the batch was refused");
}
