//! Changes that are not in the engine yet, or that somebody reading the engine may have missed.
//!
//! A change enters when its transaction has run and leaves once its batch is in the engine and every fetch that
//! began before that has been used. So the overlay laid over whatever a fetch brought is always the newest
//! state. A fetch that is not used in time loses this promise and is made again ([`Overlay::is_current`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use bytes::Bytes;
use forebay_core::{Error, Result};

use super::hot::Hot;
use super::known::{Known, Whole};

/// Number of a batch; the engine holds all batches up to some number, whole.
pub(super) type BatchNumber = u64;

/// Bytes of changes kept only for fetches under way. Past it they leave, and those fetches are made again.
const MOST_RETAINED_BYTES: usize = 64 << 20;

/// The changes, and who still needs them.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    changes: BTreeMap<Bytes, Change>,
    /// The last batch that the engine holds.
    committed: BatchNumber,
    /// Keys of batches in the engine that a fetch may have missed.
    retained: VecDeque<(BatchNumber, BTreeSet<Bytes>)>,
    retained_bytes: usize,
    /// How many fetches began when the engine held this batch and are still to be used.
    fetches: BTreeMap<BatchNumber, usize>,
    /// Fetches that began before this batch was in the engine are no longer covered.
    floor: BatchNumber,
    hot: Hot,
    known: Known,
    failure: Option<Error>,
}

#[derive(Debug)]
struct Change {
    value: Option<Bytes>,
    batch: BatchNumber,
    /// The engine is known to hold nothing for the key until this batch is in it.
    is_new: bool,
}

impl Overlay {
    /// An empty overlay that remembers up to `hot_bytes` of what the engine holds, and with a quarter as much what it does
    /// not hold.
    pub(super) fn new(hot_bytes: usize) -> Self {
        Self { hot: Hot::new(hot_bytes), known: Known::new(hot_bytes / 4), ..Self::default() }
    }

    /// `Some` when `key` is changed here (`Some(None)`: deleted), or it is remembered what the engine holds for it.
    pub(super) fn get(&self, key: &[u8]) -> Option<Option<Bytes>> {
        match self.changes.get(key) {
            Some(change) => Some(change.value.clone()),
            None => self.hot.get(key).or_else(|| self.known.is_absent(key).then_some(None)),
        }
    }

    /// Whether there surely is nothing with `start <= key < end`; an empty `end` means no upper bound.
    pub(super) fn is_empty(&self, start: &[u8], end: &[u8]) -> bool {
        self.known.is_empty(start, end)
    }

    /// The changes with `start <= key < end` in key order; an empty `end` means no upper bound.
    pub(super) fn range<'a>(
        &'a self,
        start: &'a [u8],
        end: &'a [u8],
    ) -> impl Iterator<Item = (&'a Bytes, Option<&'a Bytes>)> {
        let upper = if end.is_empty() { Bound::Unbounded } else { Bound::Excluded(end) };
        let range = self.changes.range::<[u8], _>((Bound::Included(start), upper));
        range.map(|(key, change)| (key, change.value.as_ref()))
    }

    /// Adds the changes of one transaction to `batch`, the newest there is.
    pub(super) fn apply(&mut self, batch: BatchNumber, changes: BTreeMap<Bytes, Option<Bytes>>) {
        for (key, value) in changes {
            let is_new = match self.changes.get(&key) {
                Some(before) => before.is_new && before.batch == batch,
                None => self.hot.get(&key) == Some(None) || self.known.is_absent(&key),
            };
            self.known.change(&key, value.is_some());
            self.changes.insert(key, Change { value, batch, is_new });
        }
    }

    /// What the engine is to be told of a key of the batch that ends now: its newest value, or nothing when it came
    /// and went within the batch.
    pub(super) fn to_write(&self, key: &Bytes) -> Option<Option<Bytes>> {
        let change = self.changes.get(key)?;
        (change.value.is_some() || !change.is_new).then(|| change.value.clone())
    }

    /// The engine holds `batch` now, which changed `keys`.
    pub(super) fn commit(&mut self, batch: BatchNumber, keys: BTreeSet<Bytes>) {
        debug_assert_eq!(batch, self.committed + 1, "batches reach the engine in order");
        self.committed = batch;
        self.retained_bytes += keys.iter().map(|key| self.bytes_of(key, batch)).sum::<usize>();
        self.retained.push_back((batch, keys));
        if self.retained_bytes > MOST_RETAINED_BYTES {
            self.floor = self.committed;
        }
        self.sweep();
    }

    /// Notes that a fetch begins; it sees at least the batch that this returns.
    pub(super) fn begin_fetch(&mut self) -> BatchNumber {
        *self.fetches.entry(self.committed).or_default() += 1;
        self.committed
    }

    /// What a fetch brought is not needed any more.
    pub(super) fn end_fetch(&mut self, began: BatchNumber) {
        if let Some(count) = self.fetches.get_mut(&began) {
            *count -= 1;
            if *count == 0 {
                self.fetches.remove(&began);
                self.sweep();
            }
        }
    }

    /// Whether this overlay over what a fetch brought is the newest state.
    pub(super) fn is_current(&self, began: BatchNumber) -> bool {
        began >= self.floor
    }

    /// Remembers what a fetch that began at `began` found, unless it may have changed since.
    pub(super) fn remember(&mut self, began: BatchNumber, key: &Bytes, value: Option<&Bytes>) {
        if self.is_current(began) && !self.changes.contains_key(key) {
            self.hot.put(key.clone(), value.cloned());
        }
    }

    /// Remembers which keys there are in a range, by the newest state.
    pub(super) fn remember_whole(&mut self, whole: Whole) {
        self.known.learn(whole);
    }

    /// Remembers that the engine does not hold `key`.
    pub(super) fn remember_absent(&mut self, key: Bytes) {
        if !self.changes.contains_key(&key) {
            self.hot.put(key, None);
        }
    }

    /// From now on nothing is served: the engine refused a batch.
    pub(super) fn fail(&mut self, error: &Error) {
        self.failure.get_or_insert_with(|| error.duplicate());
    }

    /// # Errors
    /// The engine's error, after it refused a batch.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.duplicate()))
    }

    /// Number of keys held here.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.changes.len()
    }

    fn bytes_of(&self, key: &Bytes, batch: BatchNumber) -> usize {
        match self.changes.get(key) {
            Some(change) if change.batch == batch => key.len() + change.value.as_ref().map_or(0, Bytes::len),
            _ => key.len(),
        }
    }

    /// Lets go of every change that the engine holds and no covered fetch can have missed.
    fn sweep(&mut self) {
        let oldest_fetch = self.fetches.keys().find(|began| **began >= self.floor).copied();
        let needed_after = oldest_fetch.unwrap_or(self.committed);
        while self.retained.front().is_some_and(|(batch, _)| *batch <= needed_after) {
            let Some((batch, keys)) = self.retained.pop_front() else { break };
            for key in keys {
                self.retained_bytes = self.retained_bytes.saturating_sub(self.bytes_of(&key, batch));
                if self.changes.get(&key).is_some_and(|change| change.batch == batch)
                    && let Some(change) = self.changes.remove(&key)
                {
                    // What is known to be absent needs no entry of its own, but must not keep an old one.
                    let is_known = self.known.is_absent(&key) && self.hot.get(&key).is_none();
                    if change.value.is_some() || !is_known {
                        self.hot.put(key, change.value);
                    }
                }
            }
        }
        if self.retained.is_empty() {
            self.retained_bytes = 0;
        }
    }
}
