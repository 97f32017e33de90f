//! What a mount that joined has locked, and asks to lock.
//!
//! It knows that itself, so that it can say it to whoever takes the tree over, and a file that is closed without locks asks nothing. To know
//! it for certain, the locks of each file are changed one after another, and what comes of a request that was sent is waited
//! for, also where who wanted it does not: what is granted then is taken back.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, InodeId, Result};
use forebay_io::task::TaskGroup;
use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use parking_lot::Mutex;
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::task::unconstrained;
use tokio::time::{sleep, timeout};

use super::link::closed;
use super::state::{Shared, unexpected};
use super::wire::{Answer, Request};
use crate::locks::{Asking, Held, LockKind, LockRange, PAUSE, RENEW, Ranges, Waiters};
use crate::tree::{Blocker, Lock, LockAnswer};

/// What a mount has locked.
#[derive(Debug, Default)]
pub(super) struct GuestLocks {
    files: Mutex<HashMap<InodeId, Arc<LockedFile>>>,
    /// Files, and owners of locks on them, which they lost and were not told of yet.
    lost: Mutex<HashSet<(InodeId, u64)>>,
    pub(super) waiters: Waiters,
}

/// A file on which something is locked, or is being.
#[derive(Debug, Default)]
struct LockedFile {
    /// Whoever changes that has this until what comes of it is known.
    turn: Arc<tokio::sync::Mutex<()>>,
    owners: Mutex<HashMap<u64, Ranges>>,
}

impl LockedFile {
    fn set(&self, owner: u64, range: LockRange, kind: Option<LockKind>, pid: u32) {
        let mut owners = self.owners.lock();
        let ranges = owners.entry(owner).or_default();
        ranges.set(range, kind, pid);
        if ranges.is_empty() {
            owners.remove(&owner);
        }
    }

    fn has(&self, owner: u64, range: LockRange) -> bool {
        self.owners.lock().get(&owner).is_some_and(|ranges| ranges.meets(range))
    }

    fn pieces(&self, owner: u64, range: LockRange) -> Vec<(LockRange, Option<LockKind>)> {
        self.owners.lock().get(&owner).map_or_else(|| vec![(range, None)], |ranges| ranges.pieces(range))
    }
}

impl GuestLocks {
    /// Notes what was granted, in the order of answers: whoever takes the tree over is told.
    pub(super) fn granted(&self, ino: InodeId, lock: &Lock) {
        let file = self.file(ino);
        file.set(lock.owner, lock.range, Some(lock.kind), lock.pid);
    }

    /// All of it.
    pub(super) fn all(&self) -> Vec<(InodeId, Lock)> {
        let mut all = Vec::new();
        for (ino, file) in &*self.files.lock() {
            for (owner, ranges) in &*file.owners.lock() {
                let lock =
                    |held: &Held| Lock { owner: *owner, pid: held.pid, range: held.range, kind: held.kind };
                all.extend(ranges.iter().map(|held| (*ino, lock(held))));
            }
        }
        all
    }

    /// Notes what others have by now.
    pub(super) fn lose(&self, lost: Vec<(InodeId, u64)>) {
        for (ino, owner) in lost {
            tracing::warn!(%ino, "what a program had locked of a file is another host's now");
            if let Some(file) = self.files.lock().get(&ino) {
                file.owners.lock().remove(&owner);
            }
            self.lost.lock().insert((ino, owner));
        }
    }

    /// Notes that others may have all of it.
    pub(super) fn lose_all(&self) {
        let lost: HashSet<(InodeId, u64)> =
            self.all().into_iter().map(|(ino, lock)| (ino, lock.owner)).collect();
        self.lose(lost.into_iter().collect());
    }

    pub(super) fn is_lost(&self, ino: InodeId, owner: u64) -> bool {
        self.lost.lock().contains(&(ino, owner))
    }

    fn file(&self, ino: InodeId) -> Arc<LockedFile> {
        self.files.lock().entry(ino).or_default().clone()
    }

    /// Keeps nothing of a file that has no locks, once nobody is at it.
    fn leave(&self, ino: InodeId, file: Arc<LockedFile>) {
        let mut files = self.files.lock();
        drop(file);
        if let Entry::Occupied(entry) = files.entry(ino)
            && Arc::strong_count(entry.get()) == 1
            && entry.get().owners.lock().is_empty()
        {
            entry.remove();
        }
    }
}

/// Whoever changes the locks of a file.
struct Turn {
    shared: Arc<Shared>,
    ino: InodeId,
    file: Option<Arc<LockedFile>>,
    turn: Option<OwnedMutexGuard<()>>,
}

impl Turn {
    async fn take(shared: Arc<Shared>, ino: InodeId) -> Self {
        let file = shared.locks.file(ino);
        let waiting = file.turn.clone().lock_owned();
        let mut own = Self { shared, ino, file: Some(file), turn: None };
        own.turn = Some(waiting.await);
        own
    }

    /// The same with a place in the line from now on, whenever it is waited for.
    fn enter(shared: Arc<Shared>, ino: InodeId) -> BoxFuture<'static, Self> {
        let mut turn = unconstrained(Self::take(shared, ino)).boxed();
        match turn.as_mut().now_or_never() {
            Some(turn) => ready(turn).boxed(),
            None => turn,
        }
    }

    fn file(&self) -> &LockedFile {
        self.file.as_ref().expect("it is there until this is dropped")
    }

    /// Takes an owner's locks away, wherever the tree is served by then. What is let go here is told to nobody as locked.
    async fn unlock(&self, owner: u64, range: LockRange) -> Result<()> {
        if !self.file().has(owner, range) {
            return Ok(());
        }
        self.file().set(owner, range, None, 0);
        let request = Request::Unlock(self.ino, owner, range);
        match self.shared.link.call_surely(request, std::future::pending()).await? {
            Answer::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }

    /// Has an owner's locks be what they were before one was granted.
    async fn undo(&self, lock: Lock, before: Vec<(LockRange, Option<LockKind>)>) -> Result<()> {
        for (range, kind) in before {
            match kind {
                None => self.unlock(lock.owner, range).await?,
                Some(kind) if kind == lock.kind => {}
                // Less than it has. Where it was more, others may have come in: it stays less.
                Some(LockKind::Write) => {}
                Some(kind) => {
                    let request = Request::Lock(self.ino, Lock { range, kind, ..lock }, Asking::Try);
                    self.shared.link.call_surely(request, std::future::pending()).await?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            self.shared.locks.leave(self.ino, file);
        }
    }
}

/// A lock that was granted: taken back where nobody takes it.
struct Grant {
    turn: Option<Turn>,
    lock: Lock,
    before: Vec<(LockRange, Option<LockKind>)>,
    tasks: TaskGroup,
}

impl Grant {
    fn take(mut self) {
        self.turn = None;
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let Some(turn) = self.turn.take() else { return };
        let (lock, before) = (self.lock, std::mem::take(&mut self.before));
        self.tasks.spawn("unlock", async move {
            if let Err(error) = turn.undo(lock, before).await {
                tracing::debug!(ino = %turn.ino, %error, "a lock that nobody waited for stays until its file is closed");
            }
        });
    }
}

/// A wait, which ends with this.
struct Waiting<'a> {
    shared: &'a Shared,
    ino: InodeId,
    ticket: u64,
    /// Whether who serves the tree may know of it.
    is_known: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.locks.waiters.leave(self.ticket);
        if self.is_known {
            // Where it is not heard it lapses.
            let _ = self.shared.link.tell_while(|| true, Request::Leave(self.ino, self.ticket));
        }
    }
}

impl Shared {
    /// As [`crate::tree::Tree::lock`].
    pub(super) async fn set_lock(
        self: &Arc<Self>,
        tasks: &TaskGroup,
        ino: InodeId,
        lock: Lock,
        waits: bool,
    ) -> Result<LockAnswer> {
        let (ticket, told) = self.locks.waiters.enter();
        let mut waiting = Waiting { shared: self, ino, ticket, is_known: false };
        let asking = if waits { Asking::Wait(ticket) } else { Asking::Try };
        loop {
            waiting.is_known = waits;
            match self.ask_lock(tasks, ino, lock, asking).await? {
                LockAnswer::Waits => drop(timeout(RENEW, told.notified()).await),
                LockAnswer::Unsure => sleep(PAUSE).await,
                answer => {
                    waiting.is_known = false;
                    return Ok(answer);
                }
            }
        }
    }

    /// As [`crate::tree::Tree::blocker`].
    pub(super) async fn blocker(&self, ino: InodeId, lock: Lock) -> Result<Option<Blocker>> {
        loop {
            match self.link.call(Request::Lock(ino, lock, Asking::Look)).await? {
                Answer::Lock(LockAnswer::Held(blocker)) => return Ok(Some(blocker)),
                Answer::Lock(LockAnswer::Unsure) => sleep(PAUSE).await,
                Answer::Lock(_) => return Ok(None),
                _ => return Err(unexpected()),
            }
        }
    }

    /// As [`crate::tree::Tree::unlock`].
    pub(super) async fn unlock(
        self: &Arc<Self>,
        tasks: &TaskGroup,
        ino: InodeId,
        owner: u64,
        range: LockRange,
    ) -> Result<()> {
        let is_all = range.first == 0 && range.last >= i64::MAX as u64;
        let is_lost = match is_all {
            true => self.locks.lost.lock().remove(&(ino, owner)),
            false => self.locks.is_lost(ino, owner),
        };
        if !self.locks.files.lock().contains_key(&ino) {
            return if is_lost { Err(lost()) } else { Ok(()) };
        }
        let (tell, told) = oneshot::channel();
        // What its owner locks next comes after this.
        let turn = Turn::enter(self.clone(), ino);
        tasks.spawn("unlock", async move {
            let turn = turn.await;
            let unlocked = turn.unlock(owner, range).await;
            drop(turn);
            // Nobody waits for it where nobody serves the tree.
            let _ = tell.send(unlocked);
        });
        if self.link.reached().is_some() {
            // Later, but in any case.
            let _ = timeout(self.link.deadline(), told).await;
        }
        if is_lost { Err(lost()) } else { Ok(()) }
    }

    /// Asks for a lock once.
    async fn ask_lock(
        self: &Arc<Self>,
        tasks: &TaskGroup,
        ino: InodeId,
        lock: Lock,
        asking: Asking,
    ) -> Result<LockAnswer> {
        let (tell, told) = oneshot::channel();
        tasks.spawn("lock", ask_in_turn(self.clone(), tasks.clone(), ino, (lock, asking), tell));
        match timeout(self.link.deadline(), told).await {
            Ok(Ok(outcome)) => {
                let (answer, grant) = outcome?;
                grant.into_iter().for_each(Grant::take);
                Ok(answer)
            }
            Ok(Err(_)) => Err(closed()),
            Err(_) => Err(self.link.away()),
        }
    }
}

/// What comes of asking for a lock.
type Asked = Result<(LockAnswer, Option<Grant>)>;

async fn ask_in_turn(
    shared: Arc<Shared>,
    tasks: TaskGroup,
    ino: InodeId,
    (lock, asking): (Lock, Asking),
    mut tell: oneshot::Sender<Asked>,
) {
    let turn = tokio::select! {
        biased;
        // What is let go meanwhile is not to be locked after that.
        () = tell.closed() => return,
        turn = Turn::take(shared.clone(), ino) => turn,
    };
    if shared.locks.is_lost(ino, lock.owner) {
        return drop(tell.send(Err(lost())));
    }
    let before = turn.file().pieces(lock.owner, lock.range);
    let answer = shared.link.call_surely(Request::Lock(ino, lock, asking), tell.closed()).await;
    let outcome = match answer {
        Ok(Answer::Lock(LockAnswer::Granted)) => {
            Ok((LockAnswer::Granted, Some(Grant { turn: Some(turn), lock, before, tasks })))
        }
        Ok(Answer::Lock(answer)) => Ok((answer, None)),
        Ok(_) => Err(unexpected()),
        Err(error) => Err(error),
    };
    // What nobody hears is dropped, and undone.
    if let (Err(Ok((LockAnswer::Waits, _))), Asking::Wait(ticket)) = (tell.send(outcome), asking) {
        // Who gave up may have left before this was asked.
        let _ = shared.link.tell_while(|| true, Request::Leave(ino, ticket));
    }
}

fn lost() -> Error {
    let fact = "this mount was cut off from who serves the tree for so long that what was locked is another host's, or may be";
    Error::new(ErrorKind::Unavailable, fact).with_hint("close the file, and lock it anew")
}

/// How tests come between what is done here.
#[cfg(test)]
impl super::RemoteTree {
    /// Whether somebody changes the locks of a file.
    pub(crate) fn is_at_locks(&self, ino: InodeId) -> bool {
        self.shared.locks.files.lock().get(&ino).is_some_and(|file| file.turn.try_lock().is_err())
    }

    /// Has whoever asks for a lock stop in its turn, before it asks, until this is dropped.
    pub(crate) fn hold_up_locks(&self) -> impl Drop {
        self.shared.locks.lost.lock()
    }
}
