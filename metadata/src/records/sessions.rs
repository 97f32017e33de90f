//! Other mounts that write to this tree through this process, and who is at which file's own path.
//!
//! Each has a session of its own: the keys of what it writes name that, and what it left goes when it ends. A request is answered
//! in the scope of the session that asks.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::future::Future;

use forebay_core::InodeId;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

tokio::task_local! {
    static ASKING: u64;
}

/// The session that asks for what is being done, `own` where that is this process.
pub(crate) fn asking_session(own: u64) -> u64 {
    ASKING.try_with(|session| *session).unwrap_or(own)
}

/// Does `work` for another session.
pub(crate) fn asking_as<F: Future>(session: u64, work: F) -> impl Future<Output = F::Output> {
    ASKING.scope(session, work)
}

/// How a guest stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It is served.
    Here,
    /// The process that served it before is gone: it has a while to come here.
    Expected,
}

/// The sessions of other mounts. What they wrote and did not commit is kept.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    standing: Mutex<HashMap<u64, Standing>>,
    /// Those among them that have not said what they had locked when the process before served them.
    untold: Mutex<HashSet<u64>>,
    /// How often each session, this process's own among them, has an inode open.
    openers: Mutex<HashMap<(u64, InodeId), u32>>,
}

impl Guests {
    /// Notes one that is to come.
    pub(crate) fn expect(&self, session: u64) {
        self.untold.lock().insert(session);
        self.standing.lock().insert(session, Standing::Expected);
    }

    /// Notes that one is here. Returns whether it was expected.
    pub(crate) fn welcome(&self, session: u64) -> bool {
        self.standing.lock().insert(session, Standing::Here) == Some(Standing::Expected)
    }

    /// Forgets one.
    pub(crate) fn forget(&self, session: u64) {
        self.standing.lock().remove(&session);
        self.untold.lock().remove(&session);
    }

    /// One has said what it had locked.
    pub(crate) fn told(&self, session: u64) {
        self.untold.lock().remove(&session);
    }

    /// Whether one has still to say what it had locked.
    pub(crate) fn are_untold(&self) -> bool {
        !self.untold.lock().is_empty()
    }

    /// Forgets those that have not come, and says which.
    pub(crate) fn forget_missing(&self) -> Vec<u64> {
        let is_missing = |standing: &Standing| *standing == Standing::Expected;
        let missing: Vec<u64> = {
            let mut guests = self.standing.lock();
            guests.extract_if(|_, standing| is_missing(standing)).map(|(session, _)| session).collect()
        };
        self.untold.lock().retain(|session| !missing.contains(session));
        missing
    }

    pub(crate) fn has(&self, session: u64) -> bool {
        self.standing.lock().contains_key(&session)
    }

    /// Those that have not come.
    pub(crate) fn expected(&self) -> Vec<u64> {
        let guests = self.standing.lock();
        guests
            .iter()
            .filter(|(_, standing)| **standing == Standing::Expected)
            .map(|(session, _)| *session)
            .collect()
    }

    /// Counts a session's opener.
    pub(crate) fn opened(&self, session: u64, ino: InodeId) {
        *self.openers.lock().entry((session, ino)).or_default() += 1;
    }

    /// Takes one back. Returns whether it was the session's last; `None` where it had none.
    pub(crate) fn closed(&self, session: u64, ino: InodeId) -> Option<bool> {
        let mut openers = self.openers.lock();
        let Entry::Occupied(mut entry) = openers.entry((session, ino)) else { return None };
        *entry.get_mut() -= 1;
        let is_last = *entry.get() == 0;
        if is_last {
            entry.remove();
        }
        Some(is_last)
    }

    /// Whether a session has an inode open.
    pub(crate) fn has_open(&self, session: u64, ino: InodeId) -> bool {
        self.openers.lock().contains_key(&(session, ino))
    }

    /// What a session has open, as often as it does.
    pub(crate) fn opened_by(&self, session: u64) -> Vec<InodeId> {
        let openers = self.openers.lock();
        let own = openers.iter().filter(|((opener, _), _)| *opener == session);
        own.flat_map(|((_, ino), count)| std::iter::repeat_n(*ino, *count as usize)).collect()
    }
}

/// Which session is at a write to a file's own path, from when it was given the place until it has said what came of it. Others
/// write that file's content elsewhere meanwhile, and nobody finds out in its stead what came of it.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    holders: Mutex<HashMap<InodeId, u64>>,
    released: Notify,
}

impl Holds {
    /// Notes that `session` is at it, unless another one is.
    pub(crate) fn take(&self, ino: InodeId, session: u64) {
        self.holders.lock().entry(ino).or_insert(session);
    }

    /// Whether another than `session` is at it.
    pub(crate) fn is_others(&self, ino: InodeId, session: u64) -> bool {
        self.holders.lock().get(&ino).is_some_and(|holder| *holder != session)
    }

    /// Whether anybody is.
    pub(crate) fn is_held(&self, ino: InodeId) -> bool {
        self.holders.lock().contains_key(&ino)
    }

    /// Notes that `session` is not at it any more. Returns whether it was.
    pub(crate) fn release(&self, ino: InodeId, session: u64) -> bool {
        let mut holders = self.holders.lock();
        let Entry::Occupied(entry) = holders.entry(ino) else { return false };
        if *entry.get() != session {
            return false;
        }
        entry.remove();
        self.released.notify_waiters();
        true
    }

    /// What a session is at.
    pub(crate) fn of(&self, session: u64) -> Vec<InodeId> {
        let holders = self.holders.lock();
        holders.iter().filter(|(_, holder)| **holder == session).map(|(ino, _)| *ino).collect()
    }

    /// Waits until no other session is at it; false where one still is then.
    pub(crate) async fn free(&self, ino: InodeId, session: u64, until: Instant) -> bool {
        loop {
            let released = self.released.notified();
            let mut released = std::pin::pin!(released);
            released.as_mut().enable();
            if !self.is_others(ino, session) {
                return true;
            }
            if timeout_at(until, released).await.is_err() {
                return !self.is_others(ino, session);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_session_at_a_time_is_at_a_file() {
        let (holds, ino) = (Holds::default(), InodeId(7));
        let soon = || Instant::now() + Duration::from_secs(1);
        holds.take(ino, 1);
        holds.take(ino, 2);
        assert_eq!((holds.of(1), holds.of(2)), (vec![ino], vec![]));
        assert!(holds.free(ino, 1, soon()).await, "its own");
        assert!(!holds.free(ino, 2, soon()).await, "another's");
        assert!(!holds.release(ino, 2), "it is not its own");
        let (freed, released) = tokio::join!(holds.free(ino, 2, soon()), async {
            tokio::task::yield_now().await;
            holds.release(ino, 1)
        });
        assert!(freed && released && !holds.is_held(ino));
    }

    #[tokio::test]
    async fn who_asks_is_known_in_the_scope_of_its_request() {
        assert_eq!(asking_session(1), 1);
        assert_eq!(asking_as(2, async { asking_session(1) }).await, 2);
    }

    #[test]
    fn a_guest_is_expected_until_it_comes() {
        let guests = Guests::default();
        guests.expect(5);
        assert_eq!((guests.has(5), guests.has(6), guests.expected()), (true, false, vec![5]));
        assert!(guests.welcome(5) && !guests.welcome(5) && !guests.welcome(6));
        assert_eq!(guests.expected(), Vec::<u64>::new());
        guests.expect(7);
        assert!(guests.are_untold());
        guests.told(5);
        assert!(guests.are_untold(), "it has not come");
        assert_eq!(guests.forget_missing(), [7]);
        assert!(!guests.are_untold());
        assert!(!guests.has(7) && guests.has(6));
        guests.forget(5);
        assert!(!guests.has(5));
    }

    #[test]
    fn openers_are_counted_by_session() {
        let guests = Guests::default();
        let (file, other) = (InodeId(3), InodeId(4));
        (0..2).for_each(|_| guests.opened(1, file));
        guests.opened(2, file);
        assert_eq!((guests.opened_by(1), guests.opened_by(2)), (vec![file, file], vec![file]));
        assert_eq!(
            (guests.closed(1, file), guests.closed(1, file), guests.closed(1, file)),
            (Some(false), Some(true), None)
        );
        assert_eq!((guests.closed(2, other), guests.closed(2, file)), (None, Some(true)));
    }
}
