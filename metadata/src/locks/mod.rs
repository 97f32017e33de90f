//! Advisory locks on byte ranges of files, of all mounts that write to one tree.
//!
//! `ranges` is what one owner has of one file, `table` all of it and who waits, as data; here is who is told. In memory alone: locks
//! live as long as the sessions that set them. Knows nothing of names, files or mounts.

mod ranges;
mod table;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_core::InodeId;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

pub(crate) use ranges::{Held, Ranges};
pub use ranges::{LockKind, LockRange};
pub(crate) use table::Asking;
pub use table::{Blocker, Lock, LockAnswer};
use table::{Offer, Table};

/// How often who waits for a lock asks again, should it not have been told that it is free.
pub(crate) const RENEW: Duration = Duration::from_secs(2);
/// The same while it is not known yet what others have locked.
pub(crate) const PAUSE: Duration = Duration::from_millis(250);
/// Locks told to one mount as free that it has not heard of yet: of more it finds out when it asks again.
const MOST_TOLD: usize = 1024;

/// The locks of one tree, and who hears that one is free.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    table: Mutex<Table>,
    /// Of other mounts, by their sessions.
    guests: Mutex<HashMap<u64, mpsc::Sender<u64>>>,
    own: Waiters,
}

impl Locks {
    /// What comes of a session's asking for a lock.
    pub(crate) fn ask(&self, session: u64, ino: InodeId, lock: Lock, asking: Asking) -> LockAnswer {
        let (answer, offers) = self.table.lock().ask(session, ino, lock, asking, Instant::now());
        self.tell(offers);
        answer
    }

    /// Takes a session's locks of one owner away.
    pub(crate) fn unlock(&self, session: u64, ino: InodeId, owner: u64, range: LockRange) {
        let offers = self.table.lock().unlock(session, ino, owner, range);
        self.tell(offers);
    }

    /// A session waits no more.
    pub(crate) fn leave(&self, session: u64, ino: InodeId, ticket: u64) {
        let offers = self.table.lock().leave(session, ino, ticket);
        self.tell(offers);
    }

    /// Sets all that a session had before, whoever served the tree then, and nothing else. Returns the files, and the owners, of which
    /// another one has something by now.
    pub(crate) fn relock(&self, session: u64, locks: Vec<(InodeId, Lock)>) -> Vec<(InodeId, u64)> {
        let (lost, offers) = self.table.lock().relock(session, locks);
        self.tell(offers);
        lost
    }

    /// A session has ended.
    pub(crate) fn end(&self, session: u64) {
        let offers = self.table.lock().end(session);
        self.guests.lock().remove(&session);
        self.tell(offers);
    }

    /// By which another mount hears which of its waits may end, in the place of what it heard that by before.
    pub(crate) fn listen(&self, session: u64) -> mpsc::Receiver<u64> {
        let (tell, told) = mpsc::channel(MOST_TOLD);
        self.guests.lock().insert(session, tell);
        told
    }

    /// Those of this process's own mount that wait.
    pub(crate) fn own(&self) -> &Waiters {
        &self.own
    }

    fn tell(&self, offers: Vec<Offer>) {
        for Offer { session, ticket } in offers {
            match self.guests.lock().get(&session) {
                // One that is too far behind asks again.
                Some(tell) => drop(tell.try_send(ticket)),
                None => self.own.tell(ticket),
            }
        }
    }
}

/// Who waits for a lock in this process.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    next: AtomicU64,
    waiting: Mutex<HashMap<u64, Arc<Notify>>>,
}

impl Waiters {
    /// A number that nobody here has, and what is raised when it may go on.
    pub(crate) fn enter(&self) -> (u64, Arc<Notify>) {
        let (ticket, told) = (self.next.fetch_add(1, Ordering::Relaxed), Arc::new(Notify::new()));
        self.waiting.lock().insert(ticket, told.clone());
        (ticket, told)
    }

    /// It waits no more.
    pub(crate) fn leave(&self, ticket: u64) {
        self.waiting.lock().remove(&ticket);
    }

    /// It may go on.
    pub(crate) fn tell(&self, ticket: u64) {
        if let Some(told) = self.waiting.lock().get(&ticket) {
            told.notify_one();
        }
    }

    /// All of them may: who serves the tree is another one, which does not know them.
    pub(crate) fn tell_all(&self) {
        self.waiting.lock().values().for_each(|told| told.notify_one());
    }
}
