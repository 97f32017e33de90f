//! What a mount that joined knows of the tree beside it: what is open, what is durable, and what was lost.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_core::{Attributes, Error, ErrorKind, InodeId, Result};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::link::{Link, Listener};
use super::locks::GuestLocks;
use super::privileges::{Doubts, Lack, Relied, is_plain};
use super::wire::{Answer, Request};
use crate::records::Pins;
use crate::tree::{LockAnswer, OutsideChange, OutsideChanges, Statistics};

/// How often what was changed is made durable; who serves the tree does so every second as well.
const SYNC_EVERY: Duration = Duration::from_secs(2);

/// For how long a loss is told to those who sync a directory: they changed it before, and sync it at once, mostly.
const TOLD: Duration = Duration::from_secs(60);

/// That changes were lost with a process.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) at: Instant,
    pub(super) told: HashSet<InodeId>,
}

/// A file that is open here.
#[derive(Debug, Default)]
pub(super) struct Open {
    /// How often.
    pub(super) count: u32,
    /// Of set-id bits.
    pub(super) set_ids: Lack,
    /// Of a capability: the kernel asks for it before the first write to each file.
    pub(super) capability: Lack,
}

impl Open {
    fn doubt(&mut self) {
        self.set_ids.doubt();
        self.capability.doubt();
    }
}

/// What the parts of a remote tree share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) link: Link,
    pub(super) outside: OutsideChanges,
    /// What is open here.
    pub(super) open: Mutex<HashMap<InodeId, Open>>,
    /// Of what they lack.
    doubts: Doubts,
    /// At whose own paths this mount is.
    pub(super) held: Mutex<HashSet<InodeId>>,
    /// What this mount has locked.
    pub(super) locks: GuestLocks,
    /// Changes that were answered so far, and how many of them are durable.
    pub(super) changes: AtomicU64,
    pub(super) synced: AtomicU64,
    /// How often a process that served the tree was lost, and changes with it.
    pub(super) losses: AtomicU64,
    /// The last time, and who was told of it.
    pub(super) loss: Mutex<Option<Loss>>,
    /// Raised when who serves the tree is told what is open.
    pub(super) standings: AtomicU64,
    /// What others changed so far, as this mount heard of it.
    pub(super) heard: AtomicU64,
    pub(super) pins: Arc<Pins>,
    /// The root, and the counts of the volume, as they were last: who unmounts while nobody serves the tree asks for these first,
    /// and is not to wait.
    pub(super) root: Mutex<Option<Attributes>>,
    pub(super) statistics: Mutex<Option<Statistics>>,
}

impl Shared {
    pub(super) fn new(link: Link) -> Self {
        Self {
            link,
            outside: OutsideChanges::default(),
            open: Mutex::default(),
            doubts: Doubts::default(),
            held: Mutex::default(),
            locks: GuestLocks::default(),
            changes: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            loss: Mutex::default(),
            standings: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            pins: Arc::default(),
            root: Mutex::default(),
            statistics: Mutex::default(),
        }
    }

    /// As [`super::RemoteTree::tell_loss`].
    pub(super) fn tell_loss(&self, directory: InodeId) -> Result<()> {
        let mut loss = self.loss.lock();
        let is_told = |loss: &mut Loss| loss.at.elapsed() >= TOLD || !loss.told.insert(directory);
        if loss.as_mut().is_none_or(is_told) { Ok(()) } else { Err(lost()) }
    }

    /// Makes durable what this mount changed; nothing is asked where there is none.
    pub(super) async fn sync(&self) -> Result<()> {
        // First: what is lost from here on may be what this is to cover, whoever is asked.
        let losses = self.losses.load(Ordering::SeqCst);
        let changes = self.changes.load(Ordering::SeqCst);
        if self.synced.load(Ordering::SeqCst) < changes {
            match self.link.call(Request::Sync).await? {
                Answer::Done => self.synced.fetch_max(changes, Ordering::SeqCst),
                _ => return Err(unexpected()),
            };
        }
        match self.losses.load(Ordering::SeqCst) == losses {
            true => Ok(()),
            false => Err(lost()),
        }
    }

    /// Says that a file was closed, to who was told in that standing that it is open, and nobody after that.
    pub(super) async fn close(&self, ino: InodeId, standing: u64) -> Result<()> {
        match self.link.call_while(|| self.is_known(standing), Request::Closed(ino)).await? {
            Answer::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }

    /// Whether who was told in that standing what is open is the last who was.
    fn is_known(&self, standing: u64) -> bool {
        self.standings.load(Ordering::SeqCst) == standing
    }

    /// Has a file open once less. Returns in which standing; none where it was gone with a process that served the tree.
    pub(super) fn let_go(&self, ino: InodeId) -> Option<u64> {
        let mut open = self.open.lock();
        let known = open.get_mut(&ino)?;
        known.count -= 1;
        if known.count == 0 {
            open.remove(&ino);
            self.held.lock().remove(&ino);
        }
        Some(self.standings.load(Ordering::SeqCst))
    }

    /// What is asked from here on may be believed if [`Self::learn`] is told the same number.
    pub(super) fn doubts_of(&self, ino: InodeId) -> u64 {
        self.doubts.of(ino)
    }

    /// Notes what an open file was said to lack, set-id bits and a capability, unless there has been a doubt since.
    pub(super) fn learn(&self, ino: InodeId, doubts: u64, set_ids: bool, capability: bool) {
        let mut open = self.open.lock();
        if self.doubts_of(ino) == doubts
            && let Some(open) = open.get_mut(&ino)
        {
            open.set_ids.learn(set_ids);
            open.capability.learn(capability);
        }
    }

    /// Whether a write to an open file has no set-id bits to take away, as far as is known.
    pub(super) fn lacks_set_ids(&self, ino: InodeId) -> bool {
        self.open.lock().get_mut(&ino).is_some_and(|open| open.set_ids.rely())
    }

    /// The same of a capability.
    pub(super) fn lacks_capability(&self, ino: InodeId) -> bool {
        self.open.lock().get_mut(&ino).is_some_and(|open| open.capability.rely())
    }

    /// Others changed a file: it may have either now.
    pub(super) fn doubt(&self, ino: InodeId) {
        self.doubts.raise(ino);
        if let Some(open) = self.open.lock().get_mut(&ino) {
            open.doubt();
        }
    }

    /// The same of all files.
    pub(super) fn doubt_all(&self) {
        self.doubts.raise_all();
        self.open.lock().values_mut().for_each(Open::doubt);
    }

    /// This mount gives, or may have given, a file either, as only its owner or root may: what was written before takes nothing of
    /// that.
    pub(super) fn dress(&self, ino: InodeId) {
        self.doubts.raise(ino);
        if let Some(open) = self.open.lock().get_mut(&ino) {
            (open.set_ids, open.capability) = Default::default();
        }
    }

    /// What was written to a file because of what it lacks, until now: what is written from here on is the next commit's to see to.
    pub(super) fn relied_on(&self, ino: InodeId) -> Relied {
        let mut open = self.open.lock();
        let Some(open) = open.get_mut(&ino) else { return Relied::default() };
        Relied { set_ids: open.set_ids.commit(), capability: open.capability.commit() }
    }

    /// The commit failed that was to see to it.
    pub(super) fn rely_again(&self, ino: InodeId, relied: Relied) {
        if let Some(open) = self.open.lock().get_mut(&ino) {
            open.set_ids.rely_again(relied.set_ids);
            open.capability.rely_again(relied.capability);
        }
    }

    /// Whether a file is known to have no capability, by what others did until now, though nothing is written for that.
    pub(super) fn has_no_capability(&self, ino: InodeId) -> bool {
        self.open.lock().get(&ino).is_some_and(|open| open.capability.is_known())
    }

    /// All that was changed so far is durable, or lost.
    fn settle_changes(&self) {
        self.synced.store(self.changes.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Syncs every so often, so that little is lost with a process.
    pub(super) async fn sync_behind(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SYNC_EVERY).await;
            if let Err(error) = self.sync().await {
                tracing::debug!(%error, "what was changed last is not durable yet");
            }
        }
    }
}

impl Listener for Shared {
    fn link(&self) -> &Link {
        &self.link
    }

    fn answered(&self, request: &Request, answer: &Answer) -> Option<InodeId> {
        if let (Request::Lock(ino, lock, _), Answer::Lock(LockAnswer::Granted)) = (request, answer) {
            self.locks.granted(*ino, lock);
        }
        let (opened, made) = match (request, answer) {
            (Request::Opened(ino), Answer::Opened(..)) => (*ino, None),
            (_, Answer::Created(made)) => (made.attributes.ino, made.is_new.then_some(made.attributes.mode)),
            _ => return None,
        };
        let mut open = self.open.lock();
        let open = open.entry(opened).or_default();
        open.count += 1;
        if let Some(mode) = made {
            open.set_ids.learn(is_plain(mode));
            open.capability.learn(true);
        }
        Some(opened)
    }

    fn unwanted(&self, opened: InodeId) {
        let Some(standing) = self.let_go(opened) else { return };
        let told = self.link.tell_while(|| self.is_known(standing), Request::Closed(opened));
        if let Err(error) = told {
            tracing::debug!(ino = %opened, %error, "nobody was told that a file was closed");
        }
    }

    fn changed(&self, change: OutsideChange) {
        if let OutsideChange::Inode { ino, .. } = change {
            self.doubt(ino);
        }
        self.heard.fetch_add(1, Ordering::SeqCst);
        self.outside.tell(change);
    }

    fn missed(&self) {
        self.doubt_all();
        self.heard.fetch_add(1, Ordering::SeqCst);
        self.outside.tell(OutsideChange::Anything);
    }

    fn standing(&self) -> Request {
        let open = self.open.lock();
        // What is closed from here on is closed there, too.
        self.standings.fetch_add(1, Ordering::SeqCst);
        let open =
            open.iter().flat_map(|(ino, open)| std::iter::repeat_n(*ino, open.count as usize)).collect();
        Request::Reopen(open, self.held.lock().iter().copied().collect(), self.locks.all())
    }

    fn reopened(&self, answer: Answer) {
        if let Answer::Reopened(gone, lost) = answer {
            let mut open = self.open.lock();
            for ino in gone {
                tracing::warn!(%ino, "a file that is open here is gone with the process that served the tree");
                open.remove(&ino);
            }
            drop(open);
            self.locks.lose(lost);
            // Who serves the tree now does not know who waits.
            self.locks.waiters.tell_all();
        }
    }

    fn ending(&self, is_synced: bool) {
        if is_synced {
            self.settle_changes();
        }
    }

    fn taken_over(&self) {
        // Nothing is answered meanwhile.
        if self.synced.load(Ordering::SeqCst) < self.changes.load(Ordering::SeqCst) {
            *self.loss.lock() = Some(Loss { at: Instant::now(), told: HashSet::new() });
            // First, for who syncs in this moment.
            self.losses.fetch_add(1, Ordering::SeqCst);
            self.settle_changes();
        }
    }

    fn offered(&self, ticket: u64) {
        self.locks.waiters.tell(ticket);
    }

    fn ended(&self) {
        self.locks.lose_all();
    }
}

pub(super) fn lost() -> Error {
    let fact = "the process that served the tree was lost, and with it what was changed in its last second";
    Error::new(ErrorKind::Unavailable, fact)
        .with_hint("look at what was made or changed last: closed files that are there are whole")
}

pub(super) fn unexpected() -> Error {
    Error::bug("the process that serves the tree answered something else")
}
