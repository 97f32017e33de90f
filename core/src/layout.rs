//! A file is a list of extents over immutable blobs.
//!
//! A layout maps file offsets to bytes of blobs, inline bytes, or zeros. Everything that changes which bytes a
//! file has is an edit of this list; everything that reads a file cuts it into pieces.

use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Blob, Error, Result};

/// Where the bytes of an extent come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Bytes of a blob from `offset` on.
    Blob {
        /// The blob that holds them.
        blob: Blob,
        /// First byte in the blob.
        offset: u64,
    },
    /// The bytes themselves, as long as the extent.
    Inline(Bytes),
}

/// A run of file bytes that come from one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes covered; 0 only for the one extent of a file that is an empty object.
    pub length: u64,
    /// Where they come from.
    pub source: Source,
}

impl Extent {
    /// First file byte past the extent.
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// The part of this extent inside `range`, which must overlap it.
    fn cut(&self, range: &Range<u64>) -> Self {
        let start = self.offset.max(range.start);
        let end = self.end().min(range.end);
        let skip = start - self.offset;
        let source = match &self.source {
            Source::Blob { blob, offset } => Source::Blob { blob: blob.clone(), offset: offset + skip },
            Source::Inline(bytes) => {
                Source::Inline(bytes.slice(skip as usize..(skip + end - start) as usize))
            }
        };
        Self { offset: start, length: end - start, source }
    }

    /// Whether `next` continues this extent in the same blob, so that both are one.
    fn continues_into(&self, next: &Self) -> bool {
        match (&self.source, &next.source) {
            (Source::Blob { blob: a, offset: at }, Source::Blob { blob: b, offset: then }) => {
                self.end() == next.offset && at + self.length == *then && a == b
            }
            _ => false,
        }
    }
}

/// One step of reading a range: bytes from somewhere, or zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The file bytes meant.
    pub range: Range<u64>,
    /// Where they come from; `None` is a hole, read as zeros.
    pub source: Option<Source>,
}

/// The size of a file and where each of its bytes is.
///
/// Extents are sorted, do not overlap, are not empty, and end at or before `size`; what they leave out is a hole.
/// One exception: a file that is an empty object keeps that blob as its only extent, so that its key is not forgotten.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FileLayout {
    size: u64,
    extents: Vec<Extent>,
}

impl FileLayout {
    /// The empty file.
    pub fn empty() -> Self {
        Self::default()
    }

    /// A file that is one whole blob.
    pub fn of_blob(blob: Blob) -> Self {
        let size = blob.size;
        let whole = Extent { offset: 0, length: size, source: Source::Blob { blob, offset: 0 } };
        Self { size, extents: vec![whole] }
    }

    /// Checks and wraps an extent list, as read from disk or the wire.
    ///
    /// # Errors
    /// `Corrupt` when extents are empty, unsorted, overlapping, past `size`, or past the end of their source.
    pub fn from_parts(size: u64, extents: Vec<Extent>) -> Result<Self> {
        let mut last_end = 0;
        let empty_object = size == 0 && extents.len() == 1;
        for extent in &extents {
            let end = extent.offset.checked_add(extent.length);
            let fits = match &extent.source {
                Source::Inline(bytes) => bytes.len() as u64 == extent.length,
                Source::Blob { blob, offset } => {
                    offset.checked_add(extent.length).is_some_and(|end| end <= blob.size)
                }
            };
            match end {
                Some(end)
                    if (extent.length > 0 || empty_object)
                        && extent.offset >= last_end
                        && end <= size
                        && fits =>
                {
                    last_end = end
                }
                _ => {
                    let (offset, length) = (extent.offset, extent.length);
                    return Err(Error::corrupt(format!(
                        "layout of {size} bytes has a bad extent of {length} bytes at {offset} after {last_end}"
                    )));
                }
            }
        }
        Ok(Self { size, extents })
    }

    /// Bytes in the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The extents, sorted by offset.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The blob that alone is the whole file, if it is just that: such a file is a plain object.
    pub fn single_blob(&self) -> Option<&Blob> {
        match self.extents.as_slice() {
            [Extent { offset: 0, length, source: Source::Blob { blob, offset: 0 } }]
                if *length == self.size && blob.size == self.size =>
            {
                Some(blob)
            }
            _ => None,
        }
    }

    /// Whether it is one object of the user's key space.
    pub fn is_plain(&self) -> bool {
        self.single_blob().is_some_and(|blob| !blob.is_owned())
    }

    /// Whether all its bytes lie in segments. Of a file without bytes nothing lies anywhere.
    pub fn is_packed(&self) -> bool {
        let in_segment = |extent: &Extent| match &extent.source {
            Source::Blob { blob, .. } => blob.is_segment(),
            Source::Inline(_) => false,
        };
        !self.extents.is_empty() && self.extents.iter().all(in_segment)
    }

    /// Every blob that some extent lies in, in file order, repeats included.
    pub fn blobs(&self) -> impl Iterator<Item = &Blob> {
        self.extents.iter().filter_map(|extent| match &extent.source {
            Source::Blob { blob, .. } => Some(blob),
            Source::Inline(_) => None,
        })
    }

    /// The same bytes from other blobs: each blob for which `other` names one, of the same size, is replaced.
    #[must_use]
    pub fn with_blobs(mut self, other: impl Fn(&Blob) -> Option<Blob>) -> Self {
        for extent in &mut self.extents {
            if let Source::Blob { blob, .. } = &mut extent.source
                && let Some(new) = other(blob)
            {
                debug_assert_eq!(blob.size, new.size, "a copy has the size of what was copied");
                *blob = new;
            }
        }
        self
    }

    /// This layout with every byte that it takes from where `base` has it taken from where `now` has it instead: another
    /// layout of the same bytes.
    #[must_use]
    pub fn moved_into(&self, base: &Self, now: &Self) -> Self {
        if self.size == 0 && self == base {
            // An empty object has no bytes by which it could be found.
            return now.clone();
        }
        let mut moved = self.clone();
        for extent in &self.extents {
            let Source::Blob { blob, offset } = &extent.source else { continue };
            let (start, end) = (*offset, *offset + extent.length);
            let place = base.extents.iter().find_map(|held| match &held.source {
                Source::Blob { blob: same, offset } if same == blob && *offset <= start => {
                    (end <= *offset + held.length).then(|| held.offset + (start - *offset))
                }
                _ => None,
            });
            let Some(range) = place.map(|at| at..at + extent.length) else { continue };
            // What `now` has not whole stays: a byte is never taken for a hole.
            if range.end <= now.size && now.pieces(range.clone()).iter().all(|piece| piece.source.is_some()) {
                moved.copy(now, range, extent.offset);
            }
        }
        moved
    }

    /// Puts `range` of `from` over what is at `to`, holes included, growing the file if it reaches past the end.
    pub fn copy(&mut self, from: &Self, range: Range<u64>, to: u64) {
        let length = range.end.min(from.size).saturating_sub(range.start);
        if length == 0 {
            return;
        }
        let end = to + length;
        self.punch(to..end.min(self.size));
        for piece in from.pieces(range.clone()) {
            if let Some(source) = piece.source {
                let length = piece.range.end - piece.range.start;
                self.write(Extent { offset: piece.range.start - range.start + to, length, source });
            }
        }
        if end > self.size {
            self.truncate(end);
        }
    }

    /// Cuts `range`, shortened to the file's end, into pieces without gaps.
    pub fn pieces(&self, range: Range<u64>) -> Vec<Piece> {
        let end = range.end.min(self.size);
        let mut at = range.start;
        let mut pieces = Vec::new();
        let first = self.extents.partition_point(|extent| extent.end() <= at);
        for extent in &self.extents[first..] {
            if at >= end || extent.offset >= end {
                break;
            }
            if extent.offset > at {
                pieces.push(Piece { range: at..extent.offset, source: None });
            }
            let part = extent.cut(&(at..end));
            at = part.end();
            pieces.push(Piece { range: part.offset..at, source: Some(part.source) });
        }
        if at < end {
            pieces.push(Piece { range: at..end, source: None });
        }
        pieces
    }

    /// Puts `extent` over whatever was there, growing the file if it reaches past the end.
    pub fn write(&mut self, extent: Extent) {
        if extent.length == 0 {
            return;
        }
        self.forget_empty_object();
        let position = self.clear(extent.offset..extent.end());
        self.size = self.size.max(extent.end());
        self.extents.insert(position, extent);
        self.merge_around(position);
    }

    /// Makes `range` a hole; the size stays.
    pub fn punch(&mut self, range: Range<u64>) {
        if range.start < range.end {
            self.clear(range);
        }
    }

    /// Sets the size, cutting what lies past it or adding a hole.
    pub fn truncate(&mut self, size: u64) {
        if size > 0 {
            self.forget_empty_object();
        }
        if size < self.size {
            self.clear(size..self.size);
        }
        self.size = size;
    }

    /// First byte at or after `offset` that is data, or `None`. SEEK_DATA.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        let first = self.extents.partition_point(|extent| extent.end() <= offset);
        self.extents.get(first).map(|extent| extent.offset.max(offset))
    }

    /// First byte at or after `offset` that is in a hole; the end of the file counts as one. SEEK_HOLE.
    pub fn next_hole(&self, offset: u64) -> u64 {
        let first = self.extents.partition_point(|extent| extent.end() <= offset);
        let mut at = offset;
        for extent in &self.extents[first..] {
            if extent.offset > at {
                break;
            }
            at = extent.end();
        }
        at.min(self.size)
    }

    /// Bytes that are not holes.
    pub fn allocated(&self) -> u64 {
        self.extents.iter().map(|extent| extent.length).sum()
    }

    /// Drops the empty object that the file was, before it gets bytes or a hole.
    fn forget_empty_object(&mut self) {
        if self.size == 0 {
            self.extents.clear();
        }
    }

    /// Removes `range` from the extents and returns where an extent starting at `range.start` belongs.
    fn clear(&mut self, range: Range<u64>) -> usize {
        let first = self.extents.partition_point(|extent| extent.end() <= range.start);
        let last = self.extents.partition_point(|extent| extent.offset < range.end);
        let mut kept = Vec::new();
        let mut position = first;
        for extent in &self.extents[first..last.max(first)] {
            if extent.offset < range.start {
                kept.push(extent.cut(&(extent.offset..range.start)));
                position += 1;
            }
            if extent.end() > range.end {
                kept.push(extent.cut(&(range.end..extent.end())));
            }
        }
        self.extents.splice(first..last.max(first), kept);
        position
    }

    /// Joins the extent at `position` with neighbours that continue it.
    fn merge_around(&mut self, position: usize) {
        for left in [position, position.wrapping_sub(1)] {
            let Some(right) = left.checked_add(1).filter(|right| *right < self.extents.len()) else {
                continue;
            };
            if self.extents[left].continues_into(&self.extents[right]) {
                self.extents[left].length += self.extents[right].length;
                self.extents.remove(right);
            }
        }
    }
}

#[cfg(test)]
mod tests;
