//! What a closure sees: the engine, over it what is not committed yet, over that its own changes.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};

use super::gather::{Gathered, Range, Want};
use super::known::Whole;
use super::overlay::Overlay;
use crate::kv::{Engine, Limits, Pair};

/// Extra pairs to ask for, so that a few deletions until the closure runs again do not cost another fetch.
const SPARE_PAIRS: usize = 16;

/// The newest state, read-only.
///
/// On an engine whose reads may wait, a read of something that is not in memory returns an error, and the
/// closure runs again once it is there, whatever it returned. So a closure passes errors on with `?`, and does
/// nothing besides reading and changing. It must not call the committer: that waits for itself.
pub trait Reads {
    /// The value of `key`.
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>>;

    /// Up to `limit` pairs with `start <= key < end`, in key order. An empty `end` means no upper bound.
    fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>>;

    /// The values of many keys. What is missing is fetched together, so prefer this to `get` in a row.
    fn get_many(&self, keys: &[&[u8]]) -> Result<Vec<Option<Bytes>>> {
        // All are tried before the first error counts.
        let values: Vec<_> = keys.iter().map(|key| self.get(key)).collect();
        values.into_iter().collect()
    }

    /// Up to `limit` pairs whose key starts with `prefix`, in key order.
    fn scan_prefix(&self, prefix: &[u8], limit: usize) -> Result<Vec<Pair>> {
        self.scan(prefix, &after_prefix(prefix), limit)
    }
}

/// The smallest key above all that start with `prefix`; empty, which means no bound, when there is none.
pub(super) fn after_prefix(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            break;
        }
    }
    end
}

/// A read-only closure's view.
pub struct View<'a> {
    engine: &'a dyn Engine,
    overlay: &'a Overlay,
    gathered: Option<&'a Gathered>,
    missed: RefCell<HashSet<Want>>,
}

impl<'a> View<'a> {
    pub(super) fn new(engine: &'a dyn Engine, overlay: &'a Overlay, gathered: Option<&'a Gathered>) -> Self {
        Self { engine, overlay, gathered, missed: RefCell::default() }
    }

    /// What has to be fetched before the closure can run.
    pub(super) fn into_missed(self) -> Vec<Want> {
        self.missed.into_inner().into_iter().collect()
    }

    fn has_missed(&self) -> bool {
        !self.missed.borrow().is_empty()
    }

    fn miss(&self, want: Want) -> Error {
        self.missed.borrow_mut().insert(want);
        Error::new(ErrorKind::Unavailable, "this part of the tree is still being read")
    }

    fn base_scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        if let Some(pairs) = self.gathered.and_then(|gathered| gathered.scan(start, end, limit)) {
            return Ok(pairs.to_vec());
        }
        match self.engine.scan_now(start, end, limit) {
            Some(pairs) => pairs,
            None => {
                let (start, end) = (Bytes::copy_from_slice(start), Bytes::copy_from_slice(end));
                let limit = limit.saturating_add(SPARE_PAIRS);
                Err(self.miss(Want::Range(Range { start, end, limit })))
            }
        }
    }
}

impl Reads for View<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        if let Some(value) = self.overlay.get(key) {
            return Ok(value);
        }
        if let Some(value) = self.gathered.and_then(|gathered| gathered.get(key)) {
            return Ok(value);
        }
        match self.engine.get_now(key) {
            Some(value) => value,
            None => Err(self.miss(Want::Key(Bytes::copy_from_slice(key)))),
        }
    }

    fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        if is_empty_range(start, end, limit) {
            return Ok(Vec::new());
        }
        if self.overlay.is_empty(start, end) {
            return Ok(Vec::new());
        }
        let changes = || self.overlay.range(start, end);
        let deleted = changes().filter(|(_, value)| value.is_none()).count();
        let below = self.base_scan(start, end, limit.saturating_add(deleted))?;
        Ok(lay_over(below, changes(), limit))
    }
}

/// What a transaction leaves behind.
#[derive(Default)]
pub(super) struct Changes {
    pub(super) changed: BTreeMap<Bytes, Option<Bytes>>,
    /// Keys that the engine cannot hold.
    pub(super) absent: Vec<Bytes>,
    /// Ranges that were seen whole, before the changes.
    pub(super) wholes: Vec<Whole>,
}

/// A transaction: the newest state, and changes of its own that only it sees until it ends well.
pub struct Txn<'a> {
    view: View<'a>,
    limits: Limits,
    changes: BTreeMap<Bytes, Option<Bytes>>,
    absent: Vec<Bytes>,
    wholes: Vec<Whole>,
}

impl<'a> Txn<'a> {
    pub(super) fn new(view: View<'a>, limits: Limits) -> Self {
        Self { view, limits, changes: BTreeMap::new(), absent: Vec::new(), wholes: Vec::new() }
    }

    pub(super) fn into_parts(self) -> (Vec<Want>, Changes) {
        let Self { view, changes: changed, absent, wholes, .. } = self;
        (view.into_missed(), Changes { changed, absent, wholes })
    }

    /// Whether something was asked for that has to be fetched: this run ends without effect then, whatever it returns.
    pub fn has_missed(&self) -> bool {
        self.view.has_missed()
    }

    /// Says that neither the engine nor any transaction before holds `key`, as for a number that nothing ever had: it
    /// need not be looked for there.
    pub fn know_absent(&mut self, key: impl Into<Bytes>) {
        self.absent.push(key.into());
    }

    /// Says that neither the engine nor any transaction before holds a key with `start <= key < end`: which keys come there
    /// is known from then on, and what does not is not looked for.
    pub fn know_empty(&mut self, start: impl Into<Bytes>, end: impl Into<Bytes>) {
        self.wholes.push(Whole { start: start.into(), end: end.into(), keys: Vec::new() });
    }

    /// Looks which keys there are with `start <= key < end`, so that from then on what is not there is not looked for;
    /// leaves it where there are more than `most`.
    ///
    /// # Errors
    /// As for any read.
    pub fn know_whole(&mut self, start: Bytes, end: Bytes, most: usize) -> Result<()> {
        let found = self.view.scan(&start, &end, most + 1)?;
        if found.len() <= most {
            let keys = found.into_iter().map(|(key, _)| key).collect();
            self.wholes.push(Whole { start, end, keys });
        }
        Ok(())
    }

    /// Sets `key` to `value`, which may be empty.
    ///
    /// # Errors
    /// `Invalid` for an empty key, `TooLarge` for what the engine cannot hold.
    pub fn put(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Result<()> {
        let (key, value) = (key.into(), value.into());
        self.limits.check(&key, Some(&value))?;
        self.changes.insert(key, Some(value));
        Ok(())
    }

    /// Removes `key`; one that is absent is no error.
    ///
    /// # Errors
    /// As for `put`.
    pub fn delete(&mut self, key: impl Into<Bytes>) -> Result<()> {
        let key = key.into();
        self.limits.check(&key, None)?;
        self.changes.insert(key, None);
        Ok(())
    }
}

impl Reads for Txn<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        match self.changes.get(key) {
            Some(value) => Ok(value.clone()),
            None => self.view.get(key),
        }
    }

    fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        if is_empty_range(start, end, limit) {
            return Ok(Vec::new());
        }
        let upper = if end.is_empty() { Bound::Unbounded } else { Bound::Excluded(end) };
        let changes = || {
            let own = self.changes.range::<[u8], _>((Bound::Included(start), upper));
            own.map(|(key, value)| (key, value.as_ref()))
        };
        let deleted = changes().filter(|(_, value)| value.is_none()).count();
        let below = self.view.scan(start, end, limit.saturating_add(deleted))?;
        Ok(lay_over(below, changes(), limit))
    }
}

fn is_empty_range(start: &[u8], end: &[u8], limit: usize) -> bool {
    limit == 0 || (!end.is_empty() && start >= end)
}

/// The first `limit` pairs of `below` with `changes` laid over them. `below` must hold, or be all there is of,
/// `limit` pairs more than `changes` deletes.
fn lay_over<'a>(
    below: Vec<Pair>,
    changes: impl Iterator<Item = (&'a Bytes, Option<&'a Bytes>)>,
    limit: usize,
) -> Vec<Pair> {
    let mut changes = changes.peekable();
    let mut below = below.into_iter().peekable();
    let mut merged = Vec::new();
    while merged.len() < limit {
        let change_first = match (changes.peek(), below.peek()) {
            (None, None) => break,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (Some((changed, _)), Some((key, _))) => *changed <= key,
        };
        if !change_first {
            merged.extend(below.next());
            continue;
        }
        let Some((key, value)) = changes.next() else { break };
        below.next_if(|(covered, _)| covered == key);
        merged.extend(value.map(|value| (key.clone(), value.clone())));
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_after_a_prefix() {
        let check = |prefix: &[u8], expected: &[u8]| assert_eq!(after_prefix(prefix), expected);
        check(b"ab", b"ac");
        check(b"a\xff", b"b");
        check(b"\xff\xff", b"");
        check(b"", b"");
    }
}
