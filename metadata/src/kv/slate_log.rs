//! The log of the tree in a bucket, read object after object behind whoever writes it.
//!
//! A log object holds whole batches, in the order in which they were written. The writer deletes those that its tables hold,
//! [`LEAST_AGE`] after they were put at the earliest: who comes later than that compares the tree instead.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Moment;
use forebay_io::object::Bucket;
use slatedb::object_store::Error as StoreError;
use slatedb::{ValueDeletable, WalReader};

use super::Edit;
use super::slate::{SlateEngine, convert, detach};

/// For how long a log object is there at least: four fifths of what SlateDB's garbage collection leaves them, five minutes.
const LEAST_AGE: Duration = Duration::from_secs(240);
/// Looks that find nothing until the log is listed in any case: somebody may have emptied the bucket.
const LIST_EVERY: u32 = 256;

/// What comes next in a log.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing yet.
    Nothing,
    /// The changes of one object, by key.
    Edits(Vec<Edit>),
    /// It is gone: what was changed is in the tree alone.
    Gone,
}

/// A place in a log. [`Self::next`] reads on from there, and stays there until [`Self::pass`].
pub struct SlateLog {
    reader: WalReader,
    /// The object to be read.
    id: u64,
    /// Up to which change its writer's changes are known.
    known: u64,
    /// Up to which they are in the object that was read last.
    read: u64,
    /// Looks that found nothing in a row.
    idle: u32,
    /// When its end was seen last: what has come since is younger than that.
    looked: Option<Moment>,
}

impl SlateLog {
    /// Its end at this moment. To be taken before the tree is looked at, and told up to where that was.
    pub async fn end(bucket: &Bucket) -> Result<Self> {
        let reader = WalReader::new(SlateEngine::PATH, bucket.apart().store());
        let last = reader.list(..).await.map_err(convert)?.last().map_or(0, |file| file.id);
        Ok(Self { reader, id: last + 1, known: 0, read: 0, idle: 0, looked: None })
    }

    /// Says that all changes up to `sequence` are known.
    pub fn know(&mut self, sequence: u64) {
        self.known = self.known.max(sequence);
    }

    /// Whether all is read that was there at `end`.
    pub fn has_passed(&self, end: &Self) -> bool {
        self.id >= end.id
    }

    /// What the next object holds that is not known yet.
    pub async fn next(&mut self, now: Moment) -> Result<Next> {
        let mut rows = match self.reader.get(self.id).iterator().await {
            Ok(rows) => rows,
            Err(error) if is_missing(&error) => return self.missing(now).await,
            Err(error) => return Err(convert(error)),
        };
        let mut edits = BTreeMap::new();
        self.read = self.known;
        while let Some(row) = rows.next().await.map_err(convert)? {
            if row.seq <= self.known {
                continue;
            }
            let value = match row.value {
                ValueDeletable::Value(value) => Some(detach(value)),
                ValueDeletable::Tombstone => None,
                ValueDeletable::Merge(_) => {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        "the tree's log has records to be merged",
                    )
                    .with_hint("use a newer Forebay"));
                }
            };
            self.read = self.read.max(row.seq);
            let newer = |(seq, _): &(u64, _)| *seq <= row.seq;
            if edits.get(&row.key).is_none_or(newer) {
                edits.insert(row.key, (row.seq, value));
            }
        }
        self.idle = 0;
        Ok(Next::Edits(edits.into_iter().map(|(key, (_, value))| (detach(key), value)).collect()))
    }

    /// Goes on behind the object that was read last.
    pub fn pass(&mut self) {
        self.id += 1;
        self.known = self.read;
    }

    /// Whether what comes next is yet to come, or was there and is gone.
    async fn missing(&mut self, now: Moment) -> Result<Next> {
        self.idle += 1;
        let is_recent = self.looked.is_some_and(|looked| now.since(looked) < LEAST_AGE);
        if !is_recent || self.idle.is_multiple_of(LIST_EVERY) {
            let there = self.reader.list(..).await.map_err(convert)?;
            let is_next = |id: u64| id + 1 == self.id || id == self.id;
            if !there.last().is_some_and(|last| is_next(last.id)) {
                return Ok(Next::Gone);
            }
        }
        self.looked = Some(now);
        Ok(Next::Nothing)
    }
}

fn is_missing(error: &slatedb::Error) -> bool {
    let mut source = error.source();
    while let Some(error) = source {
        let store = error.downcast_ref::<StoreError>();
        let store = store.or_else(|| error.downcast_ref::<Arc<StoreError>>().map(Arc::as_ref));
        if let Some(store) = store {
            return matches!(store, StoreError::NotFound { .. });
        }
        source = error.source();
    }
    false
}
