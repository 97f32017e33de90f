//! Read-only mounts that show the tree of a mount for writing: copied when they begin, and followed from then on.
//!
//! Owns how another mount's tree is looked at through its bucket, and what becomes of its changes here. Promises that what is
//! shown is that tree as it was at one moment, but for what listings found that it does not know, and that whole transactions
//! are taken over at once, [`MOST_EDITS`] records at most. What is at work in the other mount (its sessions, intents, open files
//! without names) is left out.
//!
//! A tree in a bucket is followed in its log, object after object; one in a directory, and one whose log is gone, is compared.
//! Inode numbers of what listings find are from a range of their own ([`crate::schema::OWN_NUMBERS`]). Where a listing changes a record of
//! the other tree, what that has there is kept beneath (`y`), and comes back when it has changed.

mod apply;
mod copy;
mod difference;
mod leader;

use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::task::TaskGroup;
use tokio::sync::Mutex;
use tracing::{info, warn};

use apply::apply;
pub(crate) use apply::take_back_name;
pub use copy::{copy, forget};
use difference::Difference;
pub use leader::{Follower, Leader};
use leader::{News, View, check_whole};

use crate::commit::{Committer, Txn};
use crate::import::Importer;
use crate::kv::{Durability, Edit, Snapshot};
use crate::records::{Change, Shared};
use crate::schema::{Inode, Keys, Tag};

/// Records of a comparison that are taken over in one transaction.
pub(crate) const MOST_EDITS: usize = if cfg!(test) { 1 << 8 } else { 1 << 16 };
/// Changes that are told at once: whoever listens may be behind by four times as many.
const MOST_TOLD: usize = 1 << 12;
/// A tree that was compared is looked at again after this many times the time that it took.
const SHARE_OF_TIME: u32 = 10;
/// Objects of a log that are taken over in one look; those that are left in the next one, at once.
const MOST_OBJECTS: usize = 64;

/// How far the tree that is shown is behind the one that it follows.
#[derive(Debug, Clone)]
pub struct Lag {
    /// How long ago it was the same; nothing where it never was.
    pub behind: Option<Duration>,
    /// Why it could not be looked at since.
    pub error: Option<String>,
}

/// A tree that follows another mount's.
pub(crate) struct Following {
    follower: Mutex<Follower>,
    committer: Committer,
    shared: Arc<Shared>,
    importer: Option<Importer>,
    shown: parking_lot::Mutex<Shown>,
}

struct Shown {
    as_of: Option<Moment>,
    error: Option<String>,
}

/// How far a look came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// To the end.
    Whole,
    /// There is more.
    Part,
    /// To the end, by comparing all of it.
    Compared { has_log: bool },
}

impl Following {
    pub(crate) fn new(
        follower: Follower,
        committer: Committer,
        shared: Arc<Shared>,
        importer: Option<Importer>,
    ) -> Self {
        let as_of = follower.is_somewhere().then(|| shared.clock.now());
        let shown = parking_lot::Mutex::new(Shown { as_of, error: None });
        Self { follower: Mutex::new(follower), committer, shared, importer, shown }
    }

    /// Looks again and again, `every` so often, until `tasks` end.
    pub(crate) fn start(self: Arc<Self>, every: Duration, tasks: &TaskGroup) {
        let stop = tasks.stop();
        tasks.spawn("follow", async move {
            let (mut pause, mut was_compared) = (every, false);
            while stop.run_until_cancelled(self.clock().sleep(pause)).await.is_some() {
                let began = self.clock().now();
                let Some(looked) = stop.run_until_cancelled(self.look()).await else { return };
                let took = self.clock().now().since(began);
                pause = match &looked {
                    Ok(Look::Part) => Duration::ZERO,
                    // From there on its log is read.
                    Ok(Look::Compared { has_log: true }) if !was_compared => every,
                    Ok(Look::Compared { .. }) => every.max(took * SHARE_OF_TIME),
                    Ok(Look::Whole) => every,
                    // It is told by `look`.
                    Err(_) => every.max(took),
                };
                was_compared = matches!(looked, Ok(Look::Compared { .. }));
            }
        });
    }

    fn clock(&self) -> &Clock {
        &self.shared.clock
    }

    pub(crate) fn lag(&self) -> Lag {
        let shown = self.shown.lock();
        let behind = shown.as_of.map(|as_of| self.clock().now().since(as_of));
        Lag { behind, error: shown.error.clone() }
    }

    /// Returns when everything is shown that the other tree had durably when this was called.
    ///
    /// # Errors
    /// Those of a tree that cannot be looked at: what is shown stays as it is.
    pub(crate) async fn catch_up(&self) -> Result<()> {
        let asked = self.clock().now();
        let mut follower = self.follower.lock().await;
        if self.shown.lock().as_of.is_some_and(|as_of| as_of > asked) {
            // Somebody else asked, too.
            return Ok(());
        }
        let outcome = self.catch_up_with(&mut follower).await;
        self.note(&outcome);
        outcome
    }

    async fn catch_up_with(&self, follower: &mut Follower) -> Result<()> {
        let (began, end) = (self.clock().now(), follower.end().await?);
        loop {
            let look = self.look_with(follower).await?;
            match &end {
                Some(end) if follower.has_passed(end) => {
                    self.shown.lock().as_of = Some(began);
                    return Ok(());
                }
                // It was told that there is more, and finds nothing.
                Some(_) if look == Look::Whole => follower.go_on_at(None),
                _ if look == Look::Part => {}
                _ => return Ok(()),
            }
        }
    }

    /// As where the log is gone.
    #[cfg(test)]
    pub(crate) async fn lose(&self) {
        self.follower.lock().await.lose();
    }

    /// Looks once.
    pub(crate) async fn look(&self) -> Result<Look> {
        let mut follower = self.follower.lock().await;
        let outcome = self.look_with(&mut follower).await;
        self.note(&outcome);
        outcome
    }

    fn note<T>(&self, outcome: &Result<T>) {
        let mut shown = self.shown.lock();
        let error = outcome.as_ref().err().map(Error::to_string);
        match (&error, &shown.error) {
            (Some(error), None) => warn!(
                %error,
                "the tree of the mount for writing cannot be followed: it is shown as it was, and objects as they are listed"
            ),
            (None, Some(_)) => info!("the tree of the mount for writing is followed again"),
            _ => {}
        }
        shown.error = error;
    }

    async fn look_with(&self, follower: &mut Follower) -> Result<Look> {
        for _ in 0..MOST_OBJECTS {
            let began = self.clock().now();
            match follower.news(began).await? {
                News::Nothing => {
                    self.shown.lock().as_of = Some(began);
                    return Ok(Look::Whole);
                }
                // It is whole once it is compared.
                News::Edits(edits) if edits.iter().any(|(key, _)| *key == follower.keys.loading()) => {
                    follower.go_on_at(None);
                }
                News::Edits(edits) => {
                    follower.has_begun |= edits.iter().any(|(key, _)| *key == follower.keys.counters());
                    self.take_over(edits).await?;
                    follower.pass();
                }
                News::View(view) => {
                    let compared = self.compare(follower, &view).await;
                    let place = view.end().await;
                    let has_log = place.is_in_a_log();
                    follower.go_on_at(compared.is_ok().then_some(place));
                    compared?;
                    self.shown.lock().as_of = Some(began);
                    return Ok(Look::Compared { has_log });
                }
            }
        }
        Ok(Look::Part)
    }

    async fn compare(&self, follower: &mut Follower, view: &View) -> Result<()> {
        let (keys, theirs) = (follower.keys, &*view.snapshot);
        check_whole(theirs, keys).await?;
        let counters = theirs.get(&keys.counters()).await?;
        match (counters.is_some(), follower.has_begun) {
            (true, _) => follower.has_begun = true,
            // It is about to begin, and has no root yet.
            (false, false) => return Ok(()),
            (false, true) => {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    "the volume was removed, or another one is in its place",
                )
                .with_hint("mount it again"));
            }
        }
        // A snapshot holds what was synced.
        self.committer.sync().await?;
        let own = self.committer.engine().snapshot()?;
        let mut difference = Difference::new(keys, theirs, &*own);
        let first = difference.next(MOST_EDITS).await?;
        if first.len() == MOST_EDITS {
            // In parts: no name comes before what it names.
            let mut difference = Difference::new(keys, theirs, &*own);
            loop {
                let edits = difference.next(MOST_EDITS).await?;
                if edits.is_empty() {
                    break;
                }
                self.take_over(with_layouts(edits, theirs, keys).await?).await?;
            }
        }
        let mut edits = first;
        while !edits.is_empty() {
            self.take_over(edits).await?;
            edits = difference.next(MOST_EDITS).await?;
        }
        self.take_over(vec![(keys.counters(), counters)]).await
    }

    async fn take_over(&self, edits: Vec<Edit>) -> Result<()> {
        let keys = self.shared.keys;
        let (first, end) = keys.all();
        let edits: Arc<[Edit]> = edits.into_iter().filter(|(key, _)| (&first..&end).contains(&key)).collect();
        let shared = self.shared.clone();
        let closure = move |txn: &mut Txn<'_>| apply(&mut Change::new(txn, &shared), &edits);
        let applied = self.committer.transact(Durability::Buffered, closure).await?;
        if let Some(importer) = &self.importer {
            importer.forget(&applied.moved);
        }
        for told in applied.told.chunks(MOST_TOLD) {
            told.iter().for_each(|change| self.shared.outside.tell(change.clone()));
            if applied.told.len() > MOST_TOLD {
                self.shared.outside.heard().await;
            }
        }
        Ok(())
    }
}

/// Of these changes the records that are put, but for names; inodes with all of their layouts.
async fn with_layouts(edits: Vec<Edit>, theirs: &dyn Snapshot, keys: Keys) -> Result<Vec<Edit>> {
    let mut whole = Vec::with_capacity(edits.len());
    for (key, value) in edits {
        let Some(value) = value else { continue };
        match keys.tag_in(&key)? {
            Tag::Dentry | Tag::Extents => continue,
            Tag::Inode if Inode::decode(value.clone())?.further > 0 => {
                let (start, end) = keys.below(Tag::Extents, keys.number_in(&key)?);
                let further = theirs.scan(&start, &end, usize::MAX).await?;
                whole.extend(further.into_iter().map(|(key, value)| (key, Some(value))));
            }
            _ => {}
        }
        whole.push((key, Some(value)));
    }
    Ok(whole)
}
