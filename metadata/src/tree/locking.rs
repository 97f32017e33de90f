//! Advisory locks where the tree is: those of this process's own mount, and of others in whose names it asks.

use forebay_core::{InodeId, Result};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::local::LocalTree;
use super::{Blocker, Lock, LockAnswer};
use crate::locks::{Asking, PAUSE, RENEW, Waiters};

/// A wait of this process's own mount, which ends with this.
struct Waiting<'a> {
    tree: &'a LocalTree,
    ino: InodeId,
    ticket: u64,
}

impl Waiting<'_> {
    fn own(&self) -> &Waiters {
        self.tree.shared.locks.own()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.own().leave(self.ticket);
        self.tree.shared.locks.leave(self.tree.shared.session, self.ino, self.ticket);
    }
}

impl LocalTree {
    /// What comes of asking for a lock once, in the name of whoever asks.
    pub(crate) fn ask_lock(&self, ino: InodeId, lock: Lock, asking: Asking) -> LockAnswer {
        match self.shared.guests.are_untold() {
            // Another mount may have it, and say so yet.
            true => LockAnswer::Unsure,
            false => self.shared.locks.ask(self.asking(), ino, lock, asking),
        }
    }

    pub(super) async fn set_lock(&self, ino: InodeId, lock: Lock, waits: bool) -> Result<LockAnswer> {
        let (ticket, told) = self.shared.locks.own().enter();
        let _waiting = Waiting { tree: self, ino, ticket };
        let asking = if waits { Asking::Wait(ticket) } else { Asking::Try };
        loop {
            // Another process may have the tree, and give it to somebody else.
            self.regain().await?;
            match self.ask_lock(ino, lock, asking) {
                LockAnswer::Waits => drop(timeout(RENEW, told.notified()).await),
                LockAnswer::Unsure => sleep(PAUSE).await,
                answer => return Ok(answer),
            }
        }
    }

    pub(super) async fn find_blocker(&self, ino: InodeId, lock: Lock) -> Result<Option<Blocker>> {
        loop {
            match self.ask_lock(ino, lock, Asking::Look) {
                LockAnswer::Held(blocker) => return Ok(Some(blocker)),
                LockAnswer::Unsure => sleep(PAUSE).await,
                _ => return Ok(None),
            }
        }
    }

    /// A session of another mount gives up waiting.
    pub(crate) fn leave_lock(&self, ino: InodeId, ticket: u64) {
        self.shared.locks.leave(self.asking(), ino, ticket);
    }

    /// Sets what a session had locked when the process before served it. Returns the files, and the owners, of which it lost that.
    pub(crate) fn relock(&self, session: u64, locks: Vec<(InodeId, Lock)>) -> Vec<(InodeId, u64)> {
        let lost = self.shared.locks.relock(session, locks);
        self.shared.guests.told(session);
        lost
    }

    /// Which waits of a session may be over.
    pub(crate) fn listen_for_locks(&self, session: u64) -> mpsc::Receiver<u64> {
        self.shared.locks.listen(session)
    }
}
