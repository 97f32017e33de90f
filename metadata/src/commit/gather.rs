//! What a closure asked for and was not in memory, and what was then fetched for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, StreamExt, TryStreamExt};
use parking_lot::RwLock;

use super::overlay::{BatchNumber, Overlay};
use crate::kv::{Durability, Engine, Pair};

/// Reads of one closure that go to the engine at once.
const FETCHES_AT_ONCE: usize = 16;

/// Says whether this process may still act for the volume.
pub trait Guard: Send + Sync + 'static {
    /// Whether it may at this moment.
    ///
    /// # Errors
    /// `Unavailable` while nobody knows; any other for good.
    fn check(&self) -> Result<()>;

    /// Waits a while for it to be known; gives what [`Self::check`] says then.
    fn regain(&self) -> BoxFuture<'static, Result<()>> {
        std::future::ready(self.check()).boxed()
    }
}

impl<F: Fn() -> Result<()> + Send + Sync + 'static> Guard for F {
    fn check(&self) -> Result<()> {
        self()
    }
}

/// A committer's engine and what is laid over it.
pub(super) struct State {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) guard: Box<dyn Guard>,
    pub(super) overlay: RwLock<Overlay>,
    /// How long a fetch may take.
    pub(super) fetch_deadline: Duration,
    /// How often a closure runs before its reads count as never settling.
    pub(super) most_runs: u32,
    /// See [`super::CommitterSettings::changes_while_unsure`].
    pub(super) changes_while_unsure: bool,
}

impl State {
    /// Whether reads may be served: also while it is unknown whether another has the volume.
    pub(super) fn may_read(&self) -> Result<()> {
        match self.guard.check() {
            Err(error) if error.kind() != ErrorKind::Unavailable => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether a change may be made.
    pub(super) fn may_change(&self, durability: Durability) -> Result<()> {
        match durability {
            Durability::Buffered if self.changes_while_unsure => self.may_read(),
            _ => self.may_acknowledge(),
        }
    }

    /// Whether changes may be acknowledged as durable.
    pub(super) fn may_acknowledge(&self) -> Result<()> {
        self.guard.check()
    }
}

/// A read that has to wait.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Want {
    Key(Bytes),
    Range(Range),
}

/// Up to `limit` pairs of `start..end`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Range {
    pub(super) start: Bytes,
    pub(super) end: Bytes,
    pub(super) limit: usize,
}

/// What was fetched for one closure. Everything that changed since is held in the overlay meanwhile.
pub(super) struct Gathered {
    state: Arc<State>,
    began: Option<BatchNumber>,
    keys: HashMap<Bytes, Option<Bytes>>,
    /// By start and end: up to which limit they were asked for, and what there is.
    ranges: HashMap<(Bytes, Bytes), (usize, Vec<Pair>)>,
    runs: u32,
}

impl Gathered {
    pub(super) fn new(state: Arc<State>) -> Self {
        Self { state, began: None, keys: HashMap::new(), ranges: HashMap::new(), runs: 0 }
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<Option<Bytes>> {
        self.keys.get(key).cloned()
    }

    pub(super) fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Option<&[Pair]> {
        let range = (Bytes::copy_from_slice(start), Bytes::copy_from_slice(end));
        let (most, pairs) = self.ranges.get(&range)?;
        (*most >= limit || pairs.len() < *most).then_some(&pairs[..])
    }

    /// Counts a run of the closure. Call it with the overlay locked that the run is going to read: what was
    /// gathered is forgotten when that overlay does not complete it any more.
    ///
    /// # Errors
    /// `Bug` when the closure ran too often.
    pub(super) fn begin_run(&mut self, overlay: &Overlay) -> Result<()> {
        if self.began.is_some_and(|began| !overlay.is_current(began)) {
            self.keys.clear();
            self.ranges.clear();
        }
        self.runs += 1;
        match self.runs <= self.state.most_runs {
            true => Ok(()),
            false => Err(Error::bug(format!(
                "a transaction ran {} times and still reads what it did not read before",
                self.state.most_runs
            ))),
        }
    }

    /// Brings what a run missed.
    pub(super) async fn fetch(&mut self, wants: Vec<Want>) -> Result<()> {
        let began = self.begin();
        let engine = &self.state.engine;
        let fetches = stream::iter(wants).map(|want| fetch(engine.as_ref(), want));
        let fetching = fetches.buffer_unordered(FETCHES_AT_ONCE).try_collect::<Vec<_>>();
        let late = |_| Error::new(ErrorKind::Unavailable, "the store of the tree did not answer in time");
        let fetched = tokio::time::timeout(self.state.fetch_deadline, fetching).await.map_err(late)??;
        let mut overlay = self.state.overlay.write();
        for found in fetched {
            match found {
                Found::Key(key, value) => {
                    overlay.remember(began, &key, value.as_ref());
                    self.keys.insert(key, value);
                }
                Found::Range(range, pairs) => {
                    self.ranges.insert((range.start, range.end), (range.limit, pairs));
                }
            }
        }
        Ok(())
    }

    /// The batch that everything gathered includes: that of the first fetch, unless it is out of date.
    fn begin(&mut self) -> BatchNumber {
        let mut overlay = self.state.overlay.write();
        match self.began {
            Some(began) if overlay.is_current(began) => began,
            stale => {
                if let Some(stale) = stale {
                    overlay.end_fetch(stale);
                    self.keys.clear();
                    self.ranges.clear();
                }
                *self.began.insert(overlay.begin_fetch())
            }
        }
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        if let Some(began) = self.began {
            self.state.overlay.write().end_fetch(began);
        }
    }
}

enum Found {
    Key(Bytes, Option<Bytes>),
    Range(Range, Vec<Pair>),
}

async fn fetch(engine: &dyn Engine, want: Want) -> Result<Found> {
    match want {
        Want::Key(key) => {
            let value = engine.get(&key).await?;
            Ok(Found::Key(key, value))
        }
        Want::Range(range) => {
            let pairs = engine.scan(&range.start, &range.end, range.limit).await?;
            Ok(Found::Range(range, pairs))
        }
    }
}
