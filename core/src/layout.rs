//! A file is a list of extents over immutable blobs.
//!
//! A layout maps file offsets to bytes of blobs, inline bytes, or zeros. Everything that changes which bytes a
//! file has is an edit of this list; everything that reads a file cuts it into pieces.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::{Blob, Error, Result};

mod extents;

use extents::Position;
pub use extents::{Difference, Extents};

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

    /// The blob that holds its bytes.
    pub fn blob(&self) -> Option<&Blob> {
        match &self.source {
            Source::Blob { blob, .. } => Some(blob),
            Source::Inline(_) => None,
        }
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
    extents: Extents,
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
        Self { size, extents: vec![whole].into() }
    }

    /// Checks and wraps an extent list, as read from disk or the wire.
    ///
    /// # Errors
    /// `Corrupt` when extents are empty, unsorted, overlapping, past `size`, or past the end of their source.
    pub fn from_parts(size: u64, extents: Vec<Extent>) -> Result<Self> {
        let layout = Self { size, extents: extents.into() };
        layout.check().map(|()| layout)
    }

    /// Checks one that was not made here.
    ///
    /// # Errors
    /// As [`Self::from_parts`].
    pub fn check(&self) -> Result<()> {
        let (size, mut last_end) = (self.size, 0);
        let empty_object = size == 0 && self.extents.len() == 1;
        for extent in self.extents.iter() {
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
        Ok(())
    }

    /// Bytes in the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The extents, sorted by offset.
    pub fn extents(&self) -> &Extents {
        &self.extents
    }

    /// The blob that alone is the whole file, if it is just that: such a file is a plain object.
    pub fn single_blob(&self) -> Option<&Blob> {
        match self.extents.iter().next() {
            Some(Extent { offset: 0, length, source: Source::Blob { blob, offset: 0 } })
                if self.extents.len() == 1 && *length == self.size && blob.size == self.size =>
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
        let in_segment = |extent: &Extent| extent.blob().is_some_and(Blob::is_segment);
        !self.extents.is_empty() && self.extents.iter().all(in_segment)
    }

    /// Every blob that some extent lies in, in file order, repeats included.
    pub fn blobs(&self) -> impl Iterator<Item = &Blob> {
        self.extents.iter().filter_map(Extent::blob)
    }

    /// Those of them at `keys`. Looks at those extents alone that lie beside one of these.
    pub fn blobs_at(&self, keys: &BTreeSet<&str>) -> impl Iterator<Item = &Blob> {
        self.extents.blobs_at(keys)
    }

    /// The plain objects that some extent lies in, some repeats included. Looks at extents that are new to it alone.
    pub fn plain_objects(&self) -> impl Iterator<Item = &Blob> {
        self.extents.plain_objects()
    }

    /// The same bytes from other blobs: each blob for which `other` names one, of the same size, is replaced.
    #[must_use]
    pub fn with_blobs(mut self, other: impl Fn(&Blob) -> Option<Blob>) -> Self {
        self.extents.change_blobs(other);
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
        if base == now {
            return self.clone();
        }
        let held = Places::of(base);
        let mut moved = Self { size: self.size, extents: Extents::default() };
        for chunk in self.extents.chunks() {
            if chunk.iter().all(|extent| held.place_of(extent).is_none()) {
                moved.extents.push_chunk(chunk);
                continue;
            }
            chunk.iter().for_each(|extent| moved.push_from(extent, held.place_of(extent), now));
        }
        moved
    }

    /// Puts `extent` behind all that there is, with its bytes from where `now` has them, which are at `place` of that. What it has
    /// not whole stays: a byte is never taken for a hole.
    fn push_from(&mut self, extent: &Extent, place: Option<Range<u64>>, now: &Self) {
        let place = place.filter(|range| range.end <= now.size);
        let from = place.as_ref().map_or(0, |range| range.start);
        let pieces = place.map(|range| now.pieces(range)).unwrap_or_default();
        if pieces.is_empty() || pieces.iter().any(|piece| piece.source.is_none()) {
            return self.extents.push(extent.clone());
        }
        for Piece { range, source } in pieces {
            let (offset, length) = (range.start - from + extent.offset, range.end - range.start);
            source.into_iter().for_each(|source| self.extents.push(Extent { offset, length, source }));
        }
    }

    /// Puts the inline bytes elsewhere, one after another: `place` says where those are, by their offset among them and their
    /// length, of which each run without a gap is one.
    pub fn place_inline(&mut self, mut place: impl FnMut(u64, u64) -> Source) {
        let (mut at, mut run) = (0, None::<Range<u64>>);
        let mut placed = Extents::default();
        let mut end = |placed: &mut Extents, run: Option<Range<u64>>| {
            let Some(Range { start, end }) = run else { return };
            placed.push(Extent { offset: start, length: end - start, source: place(at, end - start) });
            at += end - start;
        };
        for chunk in self.extents.chunks() {
            if !chunk.has_inline() {
                end(&mut placed, run.take());
                placed.push_chunk(chunk);
                continue;
            }
            for extent in chunk.iter() {
                match (&extent.source, &mut run) {
                    (Source::Inline(_), Some(run)) if run.end == extent.offset => run.end = extent.end(),
                    (Source::Inline(_), _) => end(&mut placed, run.replace(extent.offset..extent.end())),
                    (Source::Blob { .. }, _) => {
                        end(&mut placed, run.take());
                        placed.push(extent.clone());
                    }
                }
            }
        }
        end(&mut placed, run);
        self.extents = placed;
    }

    /// Makes the inline extent at `offset` one with those before it, as long as none of them is longer than what follows it,
    /// and all of them have at most `most` bytes: of many short ones few are left then, and each byte is copied as often as its
    /// extent can double. Returns how many there are less.
    pub fn gather_inline(&mut self, offset: u64, most: u64) -> usize {
        let last = self.extents.ending_past(offset);
        let inline = |place: Position| {
            self.extents.get(place).filter(|extent| matches!(extent.source, Source::Inline(_)))
        };
        let Some(mut next) = inline(last) else { return 0 };
        let (mut first, mut length, mut count) = (last, next.length, 0);
        while let Some(place) = self.extents.before(first)
            && let Some(extent) = inline(place)
            && extent.end() == next.offset
            && extent.length <= length
            && extent.length + length <= most
        {
            (first, next, length, count) = (place, extent, length + extent.length, count + 1);
        }
        if count > 0 {
            let mut bytes = BytesMut::with_capacity(length as usize);
            for extent in self.extents.iter_at(first).take(count + 1) {
                if let Source::Inline(part) = &extent.source {
                    bytes.extend_from_slice(part);
                }
            }
            let whole = Extent { offset: next.offset, length, source: Source::Inline(bytes.freeze()) };
            self.extents.replace(first..self.extents.after(last), vec![whole]);
        }
        count
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
        for extent in self.extents.iter_at(self.extents.ending_past(at)) {
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
        self.size = self.size.max(extent.end());
        let Cut { mut range, before, after } = self.cut(extent.offset..extent.end());
        let mut put: Vec<Extent> = Vec::with_capacity(3);
        for extent in [before, Some(extent), after].into_iter().flatten() {
            match put.last_mut().filter(|last| last.continues_into(&extent)) {
                Some(last) => last.length += extent.length,
                None => put.push(extent),
            }
        }
        if let (Some(place), Some(first)) = (self.extents.before(range.start), put.first_mut())
            && let Some(last) = self.extents.get(place).filter(|last| last.continues_into(first))
        {
            *first = Extent { length: last.length + first.length, ..last.clone() };
            range.start = place;
        }
        if let (Some(next), Some(last)) = (self.extents.get(range.end), put.last_mut())
            && last.continues_into(next)
        {
            last.length += next.length;
            range.end = self.extents.after(range.end);
        }
        self.extents.replace(range, put);
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
        self.extents.get(self.extents.ending_past(offset)).map(|extent| extent.offset.max(offset))
    }

    /// First byte at or after `offset` that is in a hole; the end of the file counts as one. SEEK_HOLE.
    pub fn next_hole(&self, offset: u64) -> u64 {
        let mut at = offset;
        for extent in self.extents.iter_at(self.extents.ending_past(offset)) {
            if extent.offset > at {
                break;
            }
            at = extent.end();
        }
        at.min(self.size)
    }

    /// Bytes that are not holes.
    pub fn allocated(&self) -> u64 {
        self.extents.bytes()
    }

    /// Bytes that lie in no blob.
    pub fn inline_bytes(&self) -> u64 {
        self.extents.inline_bytes()
    }

    /// Drops the empty object that the file was, before it gets bytes or a hole.
    fn forget_empty_object(&mut self) {
        if self.size == 0 {
            self.extents = Extents::default();
        }
    }

    /// Removes `range` from the extents.
    fn clear(&mut self, range: Range<u64>) {
        let Cut { range, before, after } = self.cut(range);
        self.extents.replace(range, before.into_iter().chain(after).collect());
    }

    /// What `range`, which is not empty, meets.
    fn cut(&self, range: Range<u64>) -> Cut {
        let (start, end) = (self.extents.ending_past(range.start), self.extents.beginning_at(range.end));
        let first = self.extents.get(start).filter(|extent| extent.offset < range.start);
        let last = self.extents.before(end).and_then(|last| self.extents.get(last));
        Cut {
            range: start..end,
            before: first.map(|extent| extent.cut(&(extent.offset..range.start))),
            after: last.filter(|last| last.end() > range.end).map(|last| last.cut(&(range.end..last.end()))),
        }
    }
}

/// Extents that a range of a file meets, and what of the first and last of them lies outside of it.
struct Cut {
    range: Range<Position>,
    before: Option<Extent>,
    after: Option<Extent>,
}

/// Where in a file the bytes of blobs are.
struct Places<'a>(HashMap<&'a Blob, Vec<Place>>);

/// One run of a blob's bytes.
struct Place {
    /// Which of the blob's bytes these are.
    range: Range<u64>,
    /// First byte in the file.
    offset: u64,
    /// The furthest that one of the runs up to this one reaches, which begin before it.
    reach: u64,
}

impl<'a> Places<'a> {
    fn of(layout: &'a FileLayout) -> Self {
        let mut places: HashMap<&Blob, Vec<Place>> = HashMap::new();
        for extent in layout.extents.iter() {
            if let Source::Blob { blob, offset } = &extent.source {
                let range = *offset..*offset + extent.length;
                places.entry(blob).or_default().push(Place { range, offset: extent.offset, reach: 0 });
            }
        }
        for runs in places.values_mut() {
            runs.sort_by_key(|place| place.range.start);
            let mut reach = 0;
            for place in runs {
                reach = place.range.end.max(reach);
                place.reach = reach;
            }
        }
        Self(places)
    }

    /// Where all bytes of `extent` are, one after another.
    fn place_of(&self, extent: &Extent) -> Option<Range<u64>> {
        let Source::Blob { blob, offset } = &extent.source else { return None };
        let (start, end) = (*offset, *offset + extent.length);
        let runs = self.0.get(blob)?;
        let before = &runs[..runs.partition_point(|place| place.range.start <= start)];
        let reaching = before.iter().rev().take_while(|place| place.reach >= end);
        let place = reaching.into_iter().find(|place| place.range.end >= end)?;
        let at = place.offset + (start - place.range.start);
        Some(at..at + extent.length)
    }
}

#[cfg(test)]
mod tests;
