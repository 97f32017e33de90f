//! The log of the tree in a bucket, read object after object behind whoever writes it.
//!
//! A log object holds whole batches, in the order in which they were written. The writer deletes those that its tables hold,
//! a minute later at the earliest: who comes late for one compares the tree instead.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::Bucket;
use slatedb::object_store::Error as StoreError;
use slatedb::{ValueDeletable, WalReader};

use super::Edit;
use super::slate::{SlateEngine, convert, detach};

/// Looks that find nothing until the log is listed: what comes next may have been deleted.
const LIST_EVERY: u32 = 16;

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
}

impl SlateLog {
    /// Its end at this moment. To be taken before the tree is looked at, and told up to where that was.
    pub async fn end(bucket: &Bucket) -> Result<Self> {
        let reader = WalReader::new(SlateEngine::PATH, bucket.apart().store());
        let last = reader.list(..).await.map_err(convert)?.last().map_or(0, |file| file.id);
        Ok(Self { reader, id: last + 1, known: 0, read: 0, idle: 0 })
    }

    /// Says that all changes up to `sequence` are known.
    pub fn know(&mut self, sequence: u64) {
        self.known = self.known.max(sequence);
    }

    /// What the next object holds that is not known yet.
    pub async fn next(&mut self) -> Result<Next> {
        let mut rows = match self.reader.get(self.id).iterator().await {
            Ok(rows) => rows,
            Err(error) if is_missing(&error) => return self.missing().await,
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

    async fn missing(&mut self) -> Result<Next> {
        self.idle += 1;
        if !self.idle.is_multiple_of(LIST_EVERY) {
            return Ok(Next::Nothing);
        }
        // It may have been put since.
        let later = self.reader.list(self.id..).await.map_err(convert)?;
        Ok(match later.first() {
            Some(file) if file.id > self.id => Next::Gone,
            _ => Next::Nothing,
        })
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
