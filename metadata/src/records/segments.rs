//! Segments: owned blobs that many small files share. Who refers to each is kept beside the counts of blobs, so that
//! compaction reads the layouts of these files alone; which of them it is to look at is kept, too.

use std::collections::HashSet;
use std::sync::Arc;

use forebay_core::{Blob, InodeId, ObjectKey, Result};
use parking_lot::Mutex;

use super::{Change, Records, owned_key};
use crate::schema::{Loose, Member};

/// The segments that this session is writing, or has written and not committed to all of its files.
#[derive(Debug, Default)]
pub(crate) struct Pins(Mutex<HashSet<ObjectKey>>);

impl Pins {
    /// Whether files may still be committed to a segment though none refers to it now.
    pub(crate) fn holds(&self, key: &ObjectKey) -> bool {
        self.0.lock().contains(key)
    }
}

/// The key of a new segment. While this lives, what lies there is not freed, whichever of its files come and go.
#[derive(Debug)]
pub struct SegmentPin {
    key: ObjectKey,
    pins: Arc<Pins>,
}

impl SegmentPin {
    pub(crate) fn new(pins: &Arc<Pins>, session: u64, name: &str) -> Self {
        let key = owned_key(session, &format!("{}{name}", Blob::SEGMENT_MARK));
        pins.0.lock().insert(key.clone());
        Self { key, pins: pins.clone() }
    }

    /// Where the segment is to be put.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }
}

impl Drop for SegmentPin {
    fn drop(&mut self) {
        self.pins.0.lock().remove(&self.key);
    }
}

impl Change<'_, '_> {
    /// Notes that a file refers to a segment from now on; `is_first` when none did before.
    pub(super) fn join_segment(&mut self, segment: &Blob, ino: InodeId, is_first: bool) -> Result<()> {
        let key = segment.key.as_str();
        if is_first {
            let loose = Loose { blob: segment.clone(), changes: 0 };
            self.put(self.keys().loose(key), loose.encode())?;
        }
        self.put_member(&segment.key, ino)
    }

    /// Notes that a file refers to a segment no more; `is_last` when it was the only one.
    pub(super) fn leave_segment(&mut self, segment: &Blob, ino: InodeId, is_last: bool) -> Result<()> {
        let key = segment.key.as_str();
        self.delete(self.keys().member(key, ino))?;
        if is_last { self.delete(self.keys().loose(key)) } else { self.loosen(segment) }
    }

    /// Notes that a file gave up bytes of a segment.
    pub(super) fn loosen(&mut self, segment: &Blob) -> Result<()> {
        let record = self.keys().loose(segment.key.as_str());
        let known = self.reads().get(&record)?.map(Loose::decode).transpose()?;
        let changes = known.map_or(0, |known| known.changes) + 1;
        self.put(record, Loose { blob: segment.clone(), changes }.encode())
    }

    /// Notes that an inode refers to a segment.
    pub(crate) fn put_member(&mut self, segment: &ObjectKey, ino: InodeId) -> Result<()> {
        let record = Member { key: segment.clone() };
        self.put(self.keys().member(segment.as_str(), ino), record.encode())
    }

    /// Whether the segments among some blobs are there: one that was compacted since the caller read of it may be gone.
    pub(crate) fn has_segments<'a>(
        &self,
        blobs: impl Iterator<Item = &'a Blob>,
        is_known: impl Fn(&Blob) -> bool,
    ) -> bool {
        blobs
            .filter(|blob| blob.is_segment())
            .all(|blob| is_known(blob) || self.shared.segments.holds(&blob.key))
    }
}
