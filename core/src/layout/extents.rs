//! The extents of a layout, in chunks that copies of it share.
//!
//! A file may have millions of extents, of which a write changes a few, and each commit looks at them all. So they lie in chunks
//! of bounded length: an edit moves what is in one chunk, a copy of the list is one of handles, what two lists share is passed
//! over at once, and sums are kept as they change.

use std::collections::BTreeSet;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Extent, Source};
use crate::Blob;

/// Extents in a chunk, at most: 20 KiB of them, and a file of half a million has as many chunks as one holds extents, about.
const MOST: usize = 256;

/// Extents in the order of their offsets.
#[derive(Clone, Default)]
pub struct Extents {
    /// None is empty, and two in a row hold more than half of what one may.
    chunks: Vec<Arc<Chunk>>,
    sums: Sums,
}

/// What copies of a list share.
#[derive(Default)]
pub(super) struct Chunk {
    extents: Vec<Extent>,
    sums: Sums,
    /// Found out when somebody asks, once for all copies.
    blobs: OnceLock<Blobs>,
}

/// Which blobs the extents of a chunk lie in, so that who looks for some reads no chunk that has none of them.
struct Blobs {
    /// The hashes of their keys, in order, each once.
    keys: Box<[u64]>,
    /// The plain objects among them, each once.
    plain: Box<[Blob]>,
}

/// Sums over extents. Those of a list that was not checked yet may overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Sums {
    count: usize,
    bytes: u64,
    inline_bytes: u64,
}

/// Where in a list an extent is; one past the last is the first place of a chunk that is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Position {
    chunk: usize,
    index: usize,
}

/// An extent that only one of two lists has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference<'a> {
    /// The one that was asked.
    Old(&'a Extent),
    /// The one that it is compared with.
    New(&'a Extent),
}

impl Sums {
    fn of(extents: &[Extent]) -> Self {
        extents.iter().fold(Self::default(), |mut sums, extent| {
            let inline_bytes = if matches!(extent.source, Source::Inline(_)) { extent.length } else { 0 };
            sums.add(Self { count: 1, bytes: extent.length, inline_bytes });
            sums
        })
    }

    fn add(&mut self, more: Self) {
        self.count += more.count;
        self.bytes = self.bytes.wrapping_add(more.bytes);
        self.inline_bytes = self.inline_bytes.wrapping_add(more.inline_bytes);
    }

    fn take(&mut self, less: Self) {
        self.count -= less.count;
        self.bytes = self.bytes.wrapping_sub(less.bytes);
        self.inline_bytes = self.inline_bytes.wrapping_sub(less.inline_bytes);
    }
}

impl Blobs {
    fn of(extents: &[Extent]) -> Self {
        let (mut keys, mut plain) = (Vec::new(), Vec::<Blob>::new());
        for blob in extents.iter().filter_map(Extent::blob) {
            keys.push(hash(blob.key.as_str()));
            if !blob.is_owned() && !plain.contains(blob) {
                plain.push(blob.clone());
            }
        }
        keys.sort_unstable();
        keys.dedup();
        Self { keys: keys.into(), plain: plain.into() }
    }

    /// Whether some of these may be among `others`, which are in order as well.
    fn meet(&self, others: &[u64]) -> bool {
        let (few, many) =
            if self.keys.len() < others.len() { (&self.keys[..], others) } else { (others, &self.keys[..]) };
        few.iter().any(|key| many.binary_search(key).is_ok())
    }
}

/// The same for one key in all chunks. That two keys share one costs a look.
fn hash(key: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

impl Clone for Chunk {
    fn clone(&self) -> Self {
        // It is about to be changed.
        Self { extents: self.extents.clone(), sums: self.sums, blobs: OnceLock::new() }
    }
}

impl Chunk {
    fn new(extents: Vec<Extent>) -> Self {
        Self { sums: Sums::of(&extents), extents, blobs: OnceLock::new() }
    }

    /// The chunk for one list alone, to be changed.
    fn of_one(chunk: &mut Arc<Self>) -> &mut Self {
        let chunk = Arc::make_mut(chunk);
        chunk.blobs.take();
        chunk
    }

    fn blobs(&self) -> &Blobs {
        self.blobs.get_or_init(|| Blobs::of(&self.extents))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.extents.iter()
    }

    /// Whether some of its extents hold their bytes themselves.
    pub(super) fn has_inline(&self) -> bool {
        self.sums.inline_bytes > 0
    }
}

impl Extents {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.sums.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.sums.count == 0
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }

    /// Those that begin at or past `offset`, in order.
    pub fn iter_from(&self, offset: u64) -> impl Iterator<Item = &Extent> {
        self.iter_at(self.beginning_at(offset))
    }

    /// Those whose bytes are not in a blob, in order.
    pub fn inline(&self) -> impl Iterator<Item = &Extent> {
        let chunks = self.chunks.iter().filter(|chunk| chunk.has_inline());
        chunks.flat_map(|chunk| chunk.iter()).filter(|extent| matches!(extent.source, Source::Inline(_)))
    }

    /// The blobs at `keys` that they lie in, repeats included. Takes as long as there are chunks, and extents in those that have
    /// some of these.
    pub(super) fn blobs_at(&self, keys: &BTreeSet<&str>) -> impl Iterator<Item = &Blob> {
        let mut hashes: Vec<u64> = keys.iter().map(|key| hash(key)).collect();
        hashes.sort_unstable();
        let chunks = self.chunks.iter().filter(move |chunk| chunk.blobs().meet(&hashes));
        let blobs = chunks.flat_map(|chunk| chunk.iter()).filter_map(Extent::blob);
        blobs.filter(|blob| keys.contains(blob.key.as_str()))
    }

    /// The plain objects that they lie in, some repeats included. Takes as long as there are chunks.
    pub(super) fn plain_objects(&self) -> impl Iterator<Item = &Blob> {
        self.chunks.iter().flat_map(|chunk| &chunk.blobs().plain[..])
    }

    /// Copies of all of them.
    pub fn to_vec(&self) -> Vec<Extent> {
        self.iter().cloned().collect()
    }

    /// What of this list and `new` only one has, in order. Takes as long as they share no chunks.
    pub fn differences<'a>(&'a self, new: &'a Self) -> impl Iterator<Item = Difference<'a>> {
        let (mut at, mut at_new) = (Position::default(), Position::default());
        std::iter::from_fn(move || {
            loop {
                if at.index == 0
                    && at_new.index == 0
                    && let Some((one, other)) = self.chunks.get(at.chunk).zip(new.chunks.get(at_new.chunk))
                    && Arc::ptr_eq(one, other)
                {
                    (at.chunk, at_new.chunk) = (at.chunk + 1, at_new.chunk + 1);
                    continue;
                }
                let (one, other) = (self.get(at), new.get(at_new));
                let is_first = match (one, other) {
                    (Some(one), Some(other)) if one == other => {
                        (at, at_new) = (self.after(at), new.after(at_new));
                        continue;
                    }
                    (Some(one), Some(other)) => one.offset <= other.offset,
                    (one, _) => one.is_some(),
                };
                if is_first {
                    at = self.after(at);
                    return one.map(Difference::Old);
                }
                at_new = new.after(at_new);
                return other.map(Difference::New);
            }
        })
    }

    /// Bytes that they cover.
    pub(super) fn bytes(&self) -> u64 {
        self.sums.bytes
    }

    /// Bytes of them that are in no blob.
    pub(super) fn inline_bytes(&self) -> u64 {
        self.sums.inline_bytes
    }

    pub(super) fn chunks(&self) -> impl Iterator<Item = &Arc<Chunk>> {
        self.chunks.iter()
    }

    /// The first one that ends past `offset`.
    pub(super) fn ending_past(&self, offset: u64) -> Position {
        self.first_not(|extent| extent.end() <= offset)
    }

    /// The first one that begins at or past `offset`.
    pub(super) fn beginning_at(&self, offset: u64) -> Position {
        self.first_not(|extent| extent.offset < offset)
    }

    fn first_not(&self, is_before: impl Fn(&Extent) -> bool) -> Position {
        let chunk = self.chunks.partition_point(|chunk| chunk.extents.last().is_some_and(&is_before));
        let index = self.chunks.get(chunk).map_or(0, |chunk| chunk.extents.partition_point(&is_before));
        Position { chunk, index }
    }

    pub(super) fn get(&self, place: Position) -> Option<&Extent> {
        self.chunks.get(place.chunk)?.extents.get(place.index)
    }

    /// The place before `place`, if it is not the first.
    pub(super) fn before(&self, place: Position) -> Option<Position> {
        if let Some(index) = place.index.checked_sub(1) {
            return Some(Position { index, ..place });
        }
        let chunk = place.chunk.checked_sub(1)?;
        Some(Position { chunk, index: self.chunks.get(chunk)?.extents.len() - 1 })
    }

    /// The place after `place`, at which there is an extent.
    pub(super) fn after(&self, place: Position) -> Position {
        let index = place.index + 1;
        match self.chunks.get(place.chunk) {
            Some(chunk) if index < chunk.extents.len() => Position { index, ..place },
            _ => Position { chunk: place.chunk + 1, index: 0 },
        }
    }

    /// That at `place` and those after it.
    pub(super) fn iter_at(&self, place: Position) -> impl Iterator<Item = &Extent> {
        let chunks = self.chunks.iter().skip(place.chunk).enumerate();
        chunks.flat_map(move |(number, chunk)| {
            chunk.extents[if number == 0 { place.index } else { 0 }..].iter()
        })
    }

    /// Puts a few extents, or none, in the place of those in `range`.
    pub(super) fn replace(&mut self, range: Range<Position>, with: Vec<Extent>) {
        if self.chunks.is_empty() {
            self.chunks.push(Arc::default());
        }
        let last = self.chunks.len() - 1;
        let end_of = |chunks: &[Arc<Chunk>], chunk: usize| chunks[chunk].extents.len();
        let inside = |place: Position| match place.chunk > last {
            true => Position { chunk: last, index: end_of(&self.chunks, last) },
            false => place,
        };
        let (start, end) = (inside(range.start), inside(range.end));
        if start.chunk == end.chunk {
            self.splice(start.chunk, start.index..end.index, with);
        } else {
            self.splice(end.chunk, 0..end.index, Vec::new());
            for chunk in self.chunks.drain(start.chunk + 1..end.chunk) {
                self.sums.take(chunk.sums);
            }
            self.splice(start.chunk, start.index..end_of(&self.chunks, start.chunk), with);
            self.balance(start.chunk + 1);
        }
        self.balance(start.chunk);
    }

    fn splice(&mut self, chunk: usize, range: Range<usize>, with: Vec<Extent>) {
        if range.is_empty() && with.is_empty() {
            return;
        }
        let chunk = Chunk::of_one(&mut self.chunks[chunk]);
        let (less, more) = (Sums::of(&chunk.extents[range.clone()]), Sums::of(&with));
        chunk.extents.splice(range, with);
        for sums in [&mut chunk.sums, &mut self.sums] {
            sums.take(less);
            sums.add(more);
        }
    }

    /// Cuts a chunk that became too long, where files grow so that it stays full; joins one that became short with a neighbour.
    fn balance(&mut self, chunk: usize) {
        let Some(length) = self.chunks.get(chunk).map(|chunk| chunk.extents.len()) else { return };
        if length == 0 {
            self.chunks.remove(chunk);
            self.join_before(chunk);
        } else if length > MOST {
            let kept = if chunk + 1 == self.chunks.len() { MOST } else { length / 2 };
            let cut = Chunk::of_one(&mut self.chunks[chunk]);
            let rest = Chunk::new(cut.extents.split_off(kept));
            cut.sums.take(rest.sums);
            self.chunks.insert(chunk + 1, Arc::new(rest));
        } else {
            self.join_before(chunk + 1);
            self.join_before(chunk);
        }
    }

    /// Makes a chunk one with that before it, where both are short.
    fn join_before(&mut self, right: usize) {
        let Some(left) = right.checked_sub(1) else { return };
        let Some([one, next]) = self.chunks.get(left..=right) else { return };
        if one.extents.len() + next.extents.len() <= MOST / 2 {
            let next = self.chunks.remove(right);
            let one = Chunk::of_one(&mut self.chunks[left]);
            one.extents.extend_from_slice(&next.extents);
            one.sums.add(next.sums);
        }
    }

    /// Puts `extent` behind all others; one with the last of them where it continues that.
    pub(super) fn push(&mut self, extent: Extent) {
        let more = Sums::of(std::slice::from_ref(&extent));
        self.sums.add(more);
        let continues = |last: &Extent| last.continues_into(&extent);
        match self.chunks.last_mut() {
            Some(chunk) if chunk.extents.last().is_some_and(continues) => {
                let chunk = Chunk::of_one(chunk);
                if let Some(last) = chunk.extents.last_mut() {
                    last.length += extent.length;
                }
                chunk.sums.bytes = chunk.sums.bytes.wrapping_add(extent.length);
                self.sums.count -= 1;
            }
            Some(chunk) if chunk.extents.len() < MOST => {
                let chunk = Chunk::of_one(chunk);
                chunk.extents.push(extent);
                chunk.sums.add(more);
            }
            _ => self.chunks.push(Arc::new(Chunk::new(vec![extent]))),
        }
    }

    /// Puts those of another list's chunk behind all others, and shares it where it stays as it is.
    pub(super) fn push_chunk(&mut self, chunk: &Arc<Chunk>) {
        let fits = self.chunks.last().is_none_or(|last| {
            let both = last.extents.last().zip(chunk.extents.first());
            let continues = both.is_some_and(|(last, first)| last.continues_into(first));
            !continues && last.extents.len() + chunk.extents.len() > MOST / 2
        });
        match fits {
            true => {
                self.sums.add(chunk.sums);
                self.chunks.push(chunk.clone());
            }
            false => chunk.iter().cloned().for_each(|extent| self.push(extent)),
        }
    }

    /// Takes those that lie in a blob for which `other` names another from that.
    pub(super) fn change_blobs(&mut self, other: impl Fn(&Blob) -> Option<Blob>) {
        let in_other = |extent: &Extent| extent.blob().and_then(&other);
        for chunk in
            self.chunks.iter_mut().filter(|chunk| chunk.iter().any(|extent| in_other(extent).is_some()))
        {
            for extent in &mut Chunk::of_one(chunk).extents {
                if let Source::Blob { blob, .. } = &mut extent.source
                    && let Some(new) = other(blob)
                {
                    debug_assert_eq!(blob.size, new.size, "a copy has the size of what was copied");
                    *blob = new;
                }
            }
        }
    }

    /// How many chunks this list shares with another, and how many it has.
    #[cfg(test)]
    pub(super) fn shared_with(&self, other: &Self) -> (usize, usize) {
        let is_in_other = |chunk: &&Arc<Chunk>| other.chunks.iter().any(|other| Arc::ptr_eq(chunk, other));
        (self.chunks.iter().filter(is_in_other).count(), self.chunks.len())
    }

    /// Panics where something is not as it should be.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut sums = Sums::default();
        for chunk in &self.chunks {
            assert_eq!(chunk.sums, Sums::of(&chunk.extents));
            if let Some(known) = chunk.blobs.get() {
                let found = Blobs::of(&chunk.extents);
                assert!(known.keys == found.keys && known.plain == found.plain, "blobs of before");
            }
            assert!((1..=MOST).contains(&chunk.extents.len()), "{} extents", chunk.extents.len());
            sums.add(chunk.sums);
        }
        assert_eq!(self.sums, sums);
        for both in self.chunks.windows(2) {
            assert!(both[0].extents.len() + both[1].extents.len() > MOST / 2, "two short chunks in a row");
        }
    }
}

impl From<Vec<Extent>> for Extents {
    fn from(extents: Vec<Extent>) -> Self {
        let mut list =
            Self { chunks: Vec::with_capacity(extents.len().div_ceil(MOST)), sums: Sums::default() };
        let mut extents = extents.into_iter();
        loop {
            let chunk = Chunk::new(extents.by_ref().take(MOST).collect());
            if chunk.extents.is_empty() {
                return list;
            }
            list.sums.add(chunk.sums);
            list.chunks.push(Arc::new(chunk));
        }
    }
}

impl PartialEq for Extents {
    fn eq(&self, other: &Self) -> bool {
        self.sums == other.sums && self.differences(other).next().is_none()
    }
}

impl Eq for Extents {}

impl fmt::Debug for Extents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// As a list of extents.
impl Serialize for Extents {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.len()))?;
        self.iter().try_for_each(|extent| list.serialize_element(extent))?;
        list.end()
    }
}

impl<'de> Deserialize<'de> for Extents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self::from)
    }
}
