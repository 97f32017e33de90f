//! Read-only mounts that show the tree of a mount for writing: copied when they begin, and followed from then on.
//!
//! Owns how another mount's tree is looked at through its bucket, and what becomes of its changes here. Promises that what is
//! shown is that tree as it was at one moment, but for what listings found that it does not know, and that whole transactions
//! are taken over at once, [`MOST_EDITS`] records at most. What is at work in the other mount (its sessions, intents, open files
//! without names) is left out.
//!
//! A tree in a bucket is followed in its log, object after object; one in a directory, and one whose log is gone, is compared.
//! Inode numbers of what listings find are from a range of their own ([`copy::OWN_NUMBERS`]). Where a listing changes a record of
//! the other tree, what that has there is kept beneath (`y`), and comes back when it has changed.

mod apply;
mod copy;
mod difference;
mod leader;

use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::task::TaskGroup;
use tokio::sync::Mutex;
use tracing::{info, warn};

use apply::apply;
pub(crate) use copy::OWN_NUMBERS;
pub use copy::{copy, forget};
use difference::Difference;
pub use leader::{Follower, Leader};
use leader::{News, View, check_whole};

use crate::commit::{Committer, Txn};
use crate::import::Importer;
use crate::kv::{Durability, Edit};
use crate::records::{Change, Shared};

/// Records that are taken over in one transaction. More of them, as after a removal of a large directory that was compared and not
/// read from a log, are shown a part at a time.
const MOST_EDITS: usize = 1 << 16;
/// Changes that are told at once: whoever listens may be behind by four times as many.
const MOST_TOLD: usize = 1 << 12;
/// A tree is looked at again after this many times the time that it took, so that large ones are not compared without end.
const SHARE_OF_TIME: u32 = 10;

/// How far the tree that is shown is behind the one that it follows.
#[derive(Debug, Clone)]
pub struct Lag {
    /// How long ago it was the same.
    pub behind: Duration,
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
    as_of: Moment,
    error: Option<String>,
}

impl Following {
    pub(crate) fn new(
        follower: Follower,
        committer: Committer,
        shared: Arc<Shared>,
        importer: Option<Importer>,
    ) -> Self {
        let shown = parking_lot::Mutex::new(Shown { as_of: shared.clock.now(), error: None });
        Self { follower: Mutex::new(follower), committer, shared, importer, shown }
    }

    /// Looks again and again, `every` so often, until `tasks` end.
    pub(crate) fn start(self: Arc<Self>, every: Duration, tasks: &TaskGroup) {
        let stop = tasks.stop();
        tasks.spawn("follow", async move {
            loop {
                let began = self.clock().now();
                match stop.run_until_cancelled(self.catch_up()).await {
                    None => return,
                    Some(Ok(())) => {}
                    Some(Err(_)) => {} // It is told by `catch_up`.
                }
                let pause = every.max(self.clock().now().since(began) * SHARE_OF_TIME);
                if stop.run_until_cancelled(self.clock().sleep(pause)).await.is_none() {
                    return;
                }
            }
        });
    }

    fn clock(&self) -> &Clock {
        &self.shared.clock
    }

    pub(crate) fn lag(&self) -> Lag {
        let shown = self.shown.lock();
        Lag { behind: self.clock().now().since(shown.as_of), error: shown.error.clone() }
    }

    /// Returns when everything is shown that the other tree had durably when this was called.
    ///
    /// # Errors
    /// Those of a tree that cannot be looked at: what is shown stays as it is.
    pub(crate) async fn catch_up(&self) -> Result<()> {
        let mut follower = self.follower.lock().await;
        let outcome = self.catch_up_with(&mut follower).await;
        self.note(&outcome);
        outcome
    }

    /// As where the log is gone.
    #[cfg(test)]
    pub(crate) async fn lose(&self) {
        self.follower.lock().await.lose();
    }

    fn note(&self, outcome: &Result<()>) {
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

    async fn catch_up_with(&self, follower: &mut Follower) -> Result<()> {
        loop {
            let began = self.clock().now();
            match follower.news().await? {
                News::Nothing => {
                    self.shown.lock().as_of = began;
                    return Ok(());
                }
                // It is whole once it is compared.
                News::Edits(edits) if edits.iter().any(|(key, _)| *key == follower.keys.loading()) => {
                    follower.go_on_at(None);
                }
                News::Edits(edits) => {
                    self.take_over(edits).await?;
                    follower.pass();
                }
                News::View(view) => {
                    let compared = self.compare(follower, &view).await;
                    let place = view.end().await;
                    follower.go_on_at(compared.is_ok().then_some(place));
                    compared?;
                    self.shown.lock().as_of = began;
                }
            }
        }
    }

    async fn compare(&self, follower: &Follower, view: &View) -> Result<()> {
        let keys = follower.keys;
        check_whole(&*view.snapshot, keys).await?;
        let counters = view.snapshot.get(&keys.counters()).await?;
        if counters.is_none() {
            // It is about to begin, and has no root yet.
            return Ok(());
        }
        // A snapshot holds what was synced.
        self.committer.sync().await?;
        let own = self.committer.engine().snapshot()?;
        let mut difference = Difference::new(keys, &*view.snapshot, &*own);
        loop {
            let edits = difference.next(MOST_EDITS).await?;
            if edits.is_empty() {
                break;
            }
            self.take_over(edits).await?;
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
