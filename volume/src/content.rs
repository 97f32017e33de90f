//! What an open file holds right now: the committed layout with uncommitted writes laid over it. No I/O.

use bytes::{Bytes, BytesMut};
use forebay_core::units::KIB;
use forebay_core::{Blob, Extent, FileLayout, Source, Timestamp};

/// What the record of a write takes in memory beside its bytes, about.
const BESIDE: u64 = 192;
/// Writes of fewer bytes are charged for that as well, and put together with those before them.
const SMALL: u64 = 4 * KIB;
/// Bytes up to which they are: a million writes of a few bytes would take a hundred times as much memory.
const GATHERED: u64 = 64 * KIB;

/// Bytes that a write of `length` takes in memory beside its own.
pub(crate) fn beside(length: u64) -> u64 {
    if length < SMALL { BESIDE } else { 0 }
}

/// The bytes of an open inode as its readers see them.
#[derive(Debug, Clone)]
pub(crate) struct Content {
    /// Committed extents; bytes written since lie inline over them.
    layout: FileLayout,
    /// The layout of the last commit.
    base: FileLayout,
    /// Generation of the last commit.
    generation: u64,
    /// What the tree had counted of relocations when the base was looked at there, and committed over since.
    relocations: Option<u64>,
    /// Bytes that were written and that no blob holds yet, those that were written over among them, and what they take in memory
    /// besides: see [`beside`].
    dirty: u64,
    /// Bytes from 0 on that were handed to a running upload: part of the file, but not readable before it completes.
    streamed: u64,
    /// The mtime to commit, once anything changed.
    modified: Option<Timestamp>,
    /// When it changed last: the ctime to show.
    changed: Timestamp,
}

impl Content {
    /// A file as committed.
    pub(crate) fn committed(layout: FileLayout, generation: u64) -> Self {
        Self {
            base: layout.clone(),
            layout,
            generation,
            relocations: None,
            dirty: 0,
            streamed: 0,
            modified: None,
            changed: Timestamp::default(),
        }
    }

    /// Goes on from a commit of what was made of this.
    pub(crate) fn commit(&mut self, layout: FileLayout, generation: u64) {
        *self = Self { relocations: self.relocations, ..Self::committed(layout, generation) };
    }

    /// Notes what the tree had counted of relocations before it was asked where the base lies.
    pub(crate) fn note_relocations(&mut self, relocations: Option<u64>) {
        self.relocations = relocations;
    }

    pub(crate) fn relocations(&self) -> Option<u64> {
        self.relocations
    }

    /// What was committed last now lies where `now` has it; what was written since stays over it.
    pub(crate) fn follow(&mut self, now: FileLayout) {
        if now == self.base {
            return;
        }
        self.layout = match self.modified {
            Some(_) => self.layout.moved_into(&self.base, &now),
            None => now.clone(),
        };
        self.base = now;
    }

    pub(crate) fn layout(&self) -> &FileLayout {
        &self.layout
    }

    /// What was committed last.
    pub(crate) fn base(&self) -> &FileLayout {
        &self.base
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn size(&self) -> u64 {
        self.layout.size()
    }

    /// Bytes that are not holes; what went to a running upload has none.
    pub(crate) fn allocated(&self) -> u64 {
        if self.readable() { self.layout.allocated() } else { self.streamed }
    }

    pub(crate) fn dirty(&self) -> u64 {
        self.dirty
    }

    pub(crate) fn modified(&self) -> Option<Timestamp> {
        self.modified
    }

    pub(crate) fn changed(&self) -> Timestamp {
        self.changed
    }

    /// Whether the file is one plain object, or lies in segments and in nothing else. A packed one without bytes lies
    /// nowhere, which is not to be mistaken for one that never had a content.
    pub(crate) fn is_whole(&self) -> bool {
        let layout = &self.layout;
        let is_nothing = layout.size() == 0 && layout.extents().is_empty();
        layout.is_plain() || layout.is_packed() || is_nothing && self.generation > 0
    }

    /// Whether every byte below the size can be read now.
    pub(crate) fn readable(&self) -> bool {
        self.streamed == 0
    }

    /// Notes a change of content at `now`.
    pub(crate) fn touch(&mut self, now: Timestamp) {
        self.modified = Some(now);
        self.changed = now;
    }

    /// Commits `mtime` instead of the time of the last change.
    pub(crate) fn set_mtime(&mut self, mtime: Timestamp) {
        self.modified = Some(mtime);
    }

    /// Lays `data` over the file. Returns what it, and what it was put together with, takes less in memory than was charged for
    /// them.
    pub(crate) fn write(&mut self, offset: u64, data: Bytes, now: Timestamp) -> u64 {
        let length = data.len() as u64;
        self.layout.write(Extent { offset, length, source: Source::Inline(data) });
        let is_small = beside(length) > 0;
        let gathered = if is_small { self.layout.gather_inline(offset, GATHERED) as u64 } else { 0 };
        let spare = (gathered * BESIDE).min(self.dirty);
        self.dirty = self.dirty - spare + length + beside(length);
        self.touch(now);
        spare
    }

    /// Sets the size.
    pub(crate) fn truncate(&mut self, size: u64, now: Timestamp) {
        self.layout.truncate(size);
        self.dirty = self.dirty.min(size);
        self.touch(now);
    }

    /// Makes a range read as zeros.
    pub(crate) fn punch(&mut self, range: std::ops::Range<u64>, now: Timestamp) {
        self.layout.punch(range);
        self.touch(now);
    }

    /// The whole file, in order, when all of it is inline: it can be written as one object.
    pub(crate) fn whole_inline(&self) -> Option<Vec<Bytes>> {
        if self.layout.inline_bytes() < self.size() {
            return None;
        }
        let mut at = 0;
        let mut parts = Vec::with_capacity(self.layout.extents().len());
        for extent in self.layout.extents().iter() {
            match &extent.source {
                Source::Inline(bytes) if extent.offset == at => parts.push(bytes.clone()),
                _ => return None,
            }
            at = extent.end();
        }
        (at == self.size()).then_some(parts)
    }

    /// Hands the inline bytes of the whole file over to an upload.
    pub(crate) fn start_stream(&mut self) {
        self.streamed = self.size();
        self.layout.punch(0..self.streamed);
        self.dirty = 0;
    }

    /// `length` more bytes went to the running upload.
    pub(crate) fn extend_stream(&mut self, length: u64, now: Timestamp) {
        self.streamed += length;
        self.layout.truncate(self.streamed);
        self.touch(now);
    }

    /// Inline bytes of the file: what is left of those that are dirty.
    pub(crate) fn inline(&self) -> u64 {
        self.layout.inline_bytes()
    }

    /// All inline bytes one after the other, as they go into one blob.
    pub(crate) fn pack(&self) -> Bytes {
        let mut packed = BytesMut::with_capacity(self.inline() as usize);
        for extent in self.layout.extents().inline() {
            if let Source::Inline(bytes) = &extent.source {
                packed.extend_from_slice(bytes);
            }
        }
        packed.freeze()
    }

    /// The inline bytes now lie in `blob`, in the order of [`Self::pack`].
    pub(crate) fn packed_into(&mut self, blob: &Blob) {
        self.layout.place_inline(|at, _| Source::Blob { blob: blob.clone(), offset: at });
        self.dirty = 0;
    }

    /// The inline bytes now lie in `packed`, which is what [`Self::pack`] made: what was written over takes no memory any
    /// more.
    pub(crate) fn condense(&mut self, packed: &Bytes) {
        self.layout
            .place_inline(|at, length| Source::Inline(packed.slice(at as usize..(at + length) as usize)));
        self.dirty = packed.len() as u64;
    }
}
