//! Whether the disk answers. One that missed a deadline is left alone for a while, so that not each read waits for it.
//!
//! Reads of it that hang hold their places until they end, so that their number is bounded; the first of them that does
//! end, or one that is tried now and then, shows that the disk answers again. One that was under way and was not slow shows
//! nothing: the kernel may have had its bytes. Writes are followed apart, in the same way.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

/// How long a disk that did not answer is left alone: one deadline of one reader in half a minute costs little.
const REST: Duration = Duration::from_secs(30);

/// What is known of the disk's answers.
#[derive(Debug)]
pub(crate) struct Stalls {
    deadline: Duration,
    state: Mutex<State>,
    answers: AtomicU64,
    count: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// `None` while it answers.
    rest: Option<Rest>,
    /// When a slow answer came last.
    slow: Option<Instant>,
}

/// A time in which the disk is left alone.
#[derive(Debug, Clone, Copy)]
struct Rest {
    /// When an answer was missed last.
    missed: Instant,
    /// Until when nobody asks.
    until: Instant,
}

impl Stalls {
    pub(crate) fn new(deadline: Duration) -> Self {
        let [answers, count] = Default::default();
        Self { deadline, state: Mutex::default(), answers, count }
    }

    /// Whether the disk is not known to hang.
    pub(crate) fn answers(&self) -> bool {
        self.state.lock().rest.is_none()
    }

    /// Whether it is left alone now.
    pub(crate) fn rests(&self) -> bool {
        self.state.lock().rest.is_some_and(|rest| Instant::now() < rest.until)
    }

    /// Whether a reader with a deadline may ask. After a rest one does, and the others go on as if it still lasted.
    pub(crate) fn may_ask(&self) -> bool {
        let (mut state, now) = (self.state.lock(), Instant::now());
        match &mut state.rest {
            None => true,
            Some(rest) if now < rest.until => false,
            Some(rest) => {
                rest.until = now + REST;
                true
            }
        }
    }

    /// What was `asked` then, by whoever waits for it, has ended, however. Returns whether that ends a rest.
    ///
    /// Slow is what took half of the deadline: who waited for all of it may have begun to wait a little earlier.
    pub(crate) fn answered(&self, asked: Instant) -> bool {
        let (mut state, now) = (self.state.lock(), Instant::now());
        self.answers.fetch_add(1, Relaxed);
        let is_slow = now - asked >= self.deadline / 2;
        if is_slow {
            state.slow = Some(now);
        }
        state.rest.take_if(|rest| is_slow || asked > rest.missed).is_some()
    }

    /// Waits for `turn` for as long as others are answered, and the deadline longer; `None` then.
    pub(crate) async fn turn<T>(&self, turn: impl Future<Output = T>) -> Option<T> {
        let mut turn = std::pin::pin!(turn);
        loop {
            let before = self.answers.load(Relaxed);
            if let Ok(turn) = timeout(self.deadline, &mut turn).await {
                return Some(turn);
            }
            if self.answers.load(Relaxed) == before {
                return None;
            }
        }
    }

    /// Waits for `answer` until the deadline.
    pub(crate) async fn answer<T>(&self, answer: impl Future<Output = T>) -> Option<T> {
        timeout(self.deadline, answer).await.ok()
    }

    /// Whoever waited until the deadline had no answer. Returns whether that begins a rest: not where another slow answer came
    /// meanwhile, or this one just now.
    pub(crate) fn missed(&self) -> bool {
        let (mut state, now) = (self.state.lock(), Instant::now());
        if state.slow.is_some_and(|slow| now - slow < self.deadline) {
            return false;
        }
        let before = state.rest.replace(Rest { missed: now, until: now + REST });
        self.count.fetch_add(u64::from(before.is_none()), Relaxed);
        before.is_none()
    }

    /// How often it was found to hang.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_reader_asks_after_each_rest_until_one_is_answered() {
        let stalls = Stalls::new(Duration::from_secs(5));
        assert!(stalls.answers() && stalls.may_ask() && stalls.may_ask());
        assert_eq!(stalls.answer(std::future::pending::<()>()).await, None);
        assert_eq!([stalls.missed(), stalls.missed()], [true, false], "told once");
        let under_way = Instant::now();
        for _ in 0..3 {
            assert!(!stalls.answered(Instant::now()) && !stalls.may_ask() && !stalls.answers());
            tokio::time::advance(REST).await;
            assert_eq!([stalls.may_ask(), stalls.may_ask()], [true, false], "one asks");
            stalls.missed();
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!([stalls.answered(Instant::now()), stalls.answered(Instant::now())], [true, false]);
        assert!(stalls.may_ask() && stalls.may_ask());
        // One that was late, and comes.
        assert!(stalls.missed() && stalls.answered(under_way));
        assert_eq!(stalls.count(), 2);
    }

    /// The disk was left alone for half a minute, with nothing under way that could have shown that it answers.
    #[tokio::test(start_paused = true)]
    async fn what_is_missed_and_comes_ends_the_rest_however_near_the_deadline() {
        let deadline = Duration::from_secs(5);
        for took in [4_999, 5_000, 5_001].map(Duration::from_millis) {
            for comes_first in [true, false] {
                let stalls = Stalls::new(deadline);
                let asked = Instant::now();
                tokio::time::advance(took).await;
                if comes_first {
                    assert!(!stalls.answered(asked) && !stalls.missed());
                } else {
                    assert!(stalls.missed() && stalls.answered(asked));
                }
                assert!(stalls.answers() && stalls.may_ask(), "{took:?} {comes_first}");
                // What hangs from now on is found.
                tokio::time::advance(deadline).await;
                assert!(stalls.missed() && !stalls.may_ask());
            }
        }
    }

    /// A busy disk is no disk that hangs, however long the queue.
    #[tokio::test(start_paused = true)]
    async fn a_queue_that_moves_is_waited_in() {
        let stalls = Stalls::new(Duration::from_secs(5));
        let others = async {
            for _ in 0..100 {
                tokio::time::sleep(Duration::from_secs(4)).await;
                stalls.answered(Instant::now());
            }
            std::future::pending::<()>().await;
        };
        let begun = Instant::now();
        let turn = stalls.turn(std::future::pending::<()>());
        let turn = tokio::select! { turn = turn => turn, () = others => None };
        assert_eq!(turn, None);
        let waited = begun.elapsed();
        assert!(waited > Duration::from_secs(400) && waited < Duration::from_secs(411), "{waited:?}");
    }
}
