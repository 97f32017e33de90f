//! What a mount that joined knows of the tree beside it: what is open, what is durable, and what was lost.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_core::{Attributes, Error, ErrorKind, InodeId, Result};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::link::{Link, Listener};
use super::wire::{Answer, Request};
use crate::records::Pins;
use crate::tree::{OutsideChange, OutsideChanges, Statistics};

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
    /// Whether it was made here, and nobody gave it an extended attribute as far as is known: the kernel asks for
    /// `security.capability` before the first write to each file.
    pub(super) is_bare: bool,
}

/// What the parts of a remote tree share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) link: Link,
    pub(super) outside: OutsideChanges,
    /// What is open here.
    pub(super) open: Mutex<HashMap<InodeId, Open>>,
    /// At whose own paths this mount is.
    pub(super) held: Mutex<HashSet<InodeId>>,
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
            held: Mutex::default(),
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
        let is_known = || self.standings.load(Ordering::SeqCst) == standing;
        match self.link.call_while(is_known, Request::Closed(ino)).await? {
            Answer::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }

    /// Whether a file has no extended attribute but its access control list, as far as is known.
    pub(super) fn is_bare(&self, ino: InodeId) -> bool {
        self.open.lock().get(&ino).is_some_and(|open| open.is_bare)
    }

    /// Notes that a file may have one.
    pub(super) fn dress(&self, ino: InodeId) {
        if let Some(open) = self.open.lock().get_mut(&ino) {
            open.is_bare = false;
        }
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

    fn answered(&self, request: &Request, answer: &Answer) {
        let (opened, is_new) = match (request, answer) {
            (Request::Opened(ino), Answer::Layout(..)) => (*ino, false),
            (_, Answer::Created(made)) => (made.attributes.ino, made.is_new),
            _ => return,
        };
        let mut open = self.open.lock();
        let open = open.entry(opened).or_default();
        open.count += 1;
        open.is_bare |= is_new;
    }

    fn changed(&self, change: OutsideChange) {
        if let OutsideChange::Inode { ino, .. } = change {
            self.dress(ino);
        }
        self.heard.fetch_add(1, Ordering::SeqCst);
        self.outside.tell(change);
    }

    fn missed(&self) {
        self.open.lock().values_mut().for_each(|open| open.is_bare = false);
        self.heard.fetch_add(1, Ordering::SeqCst);
        self.outside.tell(OutsideChange::Anything);
    }

    fn standing(&self) -> Request {
        let open = self.open.lock();
        // What is closed from here on is closed there, too.
        self.standings.fetch_add(1, Ordering::SeqCst);
        let open =
            open.iter().flat_map(|(ino, open)| std::iter::repeat_n(*ino, open.count as usize)).collect();
        Request::Reopen(open, self.held.lock().iter().copied().collect())
    }

    fn reopened(&self, answer: Answer) {
        if let Answer::Inodes(gone) = answer {
            let mut open = self.open.lock();
            for ino in gone {
                tracing::warn!(%ino, "a file that is open here is gone with the process that served the tree");
                open.remove(&ino);
            }
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
}

pub(super) fn lost() -> Error {
    let fact = "the process that served the tree was lost, and with it what was changed in its last second";
    Error::new(ErrorKind::Unavailable, fact)
        .with_hint("look at what was made or changed last: closed files that are there are whole")
}

pub(super) fn unexpected() -> Error {
    Error::bug("the process that serves the tree answered something else")
}
