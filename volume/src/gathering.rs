//! Which short extents of an open file are put together. Pure: a layout in, a plan out.
//!
//! Without this their number would grow with every fsync until the last close, when the file is sealed: who reads the file asks for
//! each of them, and who opens it reads all their records.

use std::ops::Range;

use forebay_core::units::KIB;
use forebay_core::{BLOCK_SIZE, Blob, Extent, FileLayout, Piece, Source};

/// Extents of fewer bytes are put together. Where pages of 4 KiB are written all over a file of 100 MB, one after another, and all
/// of them are put together however dear that is, it has up to 3,800 extents so, and 7 bytes are sent for each that is written; at
/// half as much 6,700 and 4, at twice as much 2,300 and 12.
const SHORT_BYTES: u64 = 32 * KIB;
/// Bytes that are sent again for each extent that goes, at most: pages are put together where little else lies between them, and
/// those that are written here and there in a large file are sent once.
const CHEAP_BYTES: u64 = 4 * KIB + KIB / 2;
/// Times the extents after which it is looked for short ones: a file that has more has them put together at any price.
const MANY: usize = 32;
/// Most bytes that are put together at once: one block of the cache, so that one request brings all of them.
const BATCH_BYTES: u64 = BLOCK_SIZE;

/// Short extents that go into one blob.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Where they are now.
    from: FileLayout,
    /// The stretches of the file that they cover, without gaps.
    runs: Vec<Range<u64>>,
}

impl Batch {
    /// The first short extents of a file, from `offset` on, that lie side by side and are cheap to put together; at any price in a
    /// file of [`MANY`] times `each` extents.
    pub(crate) fn next(layout: &FileLayout, offset: u64, each: usize) -> Self {
        let price =
            if layout.extents().len() > MANY.saturating_mul(each) { SHORT_BYTES } else { CHEAP_BYTES };
        let is_short = |extent: &Extent| extent.length < SHORT_BYTES;
        let continues = |run: &[&Extent], next: &Extent| {
            run.last().is_some_and(|last| is_short(last) && is_short(next) && last.end() == next.offset)
        };
        let mut batch = Self::default();
        let mut extents = layout.extents().iter_from(offset).peekable();
        let mut run: Vec<&Extent> = Vec::new();
        while let Some(first) = extents.next() {
            run.clear();
            run.push(first);
            while let Some(next) = extents.next_if(|next| continues(&run, next)) {
                run.push(next);
            }
            if run.len() < 2 {
                continue;
            }
            let most = run[0].offset + BATCH_BYTES - batch.bytes();
            let fits = &run[..run.partition_point(|extent| extent.end() <= most)];
            if let [one, .., last] = fits
                && last.end() - one.offset <= price * (fits.len() as u64 - 1)
            {
                fits.iter().for_each(|extent| batch.from.write((*extent).clone()));
                batch.runs.push(one.offset..last.end());
            }
            if fits.len() < run.len() {
                break;
            }
        }
        batch
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// Where the file goes on after it; `None` of an empty one.
    pub(crate) fn end(&self) -> Option<u64> {
        self.runs.last().map(|run| run.end)
    }

    /// How its bytes are read.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        self.runs.iter().flat_map(|run| self.from.pieces(run.clone())).collect()
    }

    /// The layout with every byte of the batch that it still has taken from `blob`, which holds these one after another.
    pub(crate) fn moved_into(&self, blob: &Blob, layout: &FileLayout) -> FileLayout {
        let (mut to, mut at) = (FileLayout::empty(), 0);
        for Range { start, end } in &self.runs {
            let source = Source::Blob { blob: blob.clone(), offset: at };
            to.write(Extent { offset: *start, length: end - start, source });
            at += end - start;
        }
        layout.moved_into(&self.from, &to)
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::units::MIB;
    use forebay_core::{ObjectKey, Version};

    use super::*;

    /// A file of extents of these lengths in a row, each a blob of its own, or a hole.
    fn layout(lengths: impl IntoIterator<Item = (u64, bool)>) -> FileLayout {
        let (mut layout, mut offset) = (FileLayout::empty(), 0);
        for (number, (length, is_blob)) in lengths.into_iter().enumerate() {
            let key = ObjectKey::new(format!(".forebay/blobs/{number}"));
            let blob = Blob { key, version: Version::new("v"), size: length };
            if is_blob {
                layout.write(Extent { offset, length, source: Source::Blob { blob, offset: 0 } });
            }
            offset += length;
        }
        layout
    }

    /// What is left of a file's extents, as lengths, when all that can be was put together, and in how many blobs.
    #[track_caller]
    fn check(layout: FileLayout) -> (Vec<u64>, usize) {
        check_at(layout, 0)
    }

    fn check_at(mut layout: FileLayout, each: usize) -> (Vec<u64>, usize) {
        let (mut offset, mut blobs) = (0, 0);
        loop {
            let batch = Batch::next(&layout, offset, each);
            let read: u64 = batch.pieces().iter().map(|piece| piece.range.end - piece.range.start).sum();
            assert!(read == batch.bytes() && read <= BATCH_BYTES, "{read} of {} bytes", batch.bytes());
            let Some(end) = batch.end() else { break };
            let key = ObjectKey::new(format!(".forebay/blobs/gathered-{blobs}"));
            let blob = Blob { key, version: Version::new("v"), size: batch.bytes() };
            let moved = batch.moved_into(&blob, &layout);
            assert_eq!((moved.size(), moved.allocated()), (layout.size(), layout.allocated()));
            assert!(moved.extents().len() < layout.extents().len());
            (layout, offset, blobs) = (moved, end, blobs + 1);
        }
        (layout.extents().iter().map(|extent| extent.length).collect(), blobs)
    }

    #[test]
    fn short_extents_side_by_side_become_one() {
        let page = 4 * KIB;
        let all = |lengths: &[u64]| layout(lengths.iter().map(|length| (*length, true)));
        assert_eq!(check(all(&[page, page, 100])), (vec![2 * page + 100], 1));
        assert_eq!(check(all(&[])), (vec![], 0));
        // One alone is left, and so is what is long, or across a hole.
        let apart = [page, MIB, page];
        assert_eq!(check(all(&apart)), (apart.to_vec(), 0));
        assert_eq!(check(layout([(page, true), (page, false), (page, true)])), (vec![page, page], 0));
        let both = all(&[page, page, SHORT_BYTES, page, page]);
        assert_eq!(check(both), (vec![2 * page, SHORT_BYTES, 2 * page], 1));
    }

    #[test]
    fn pages_here_and_there_stay_until_there_are_too_many() {
        let page = 4 * KIB;
        let all = |lengths: &[u64]| layout(lengths.iter().map(|length| (*length, true)));
        // Each sends no more than a page for an extent that goes, but for the first of them.
        let lines = [100; 1000];
        assert_eq!(check_at(all(&lines), 1000), (vec![100_000], 1));
        assert_eq!(check_at(all(&[page; 10]), 1000), (vec![10 * page], 1));
        let apart = [page, 5 * page, page, 4 * page, page];
        assert_eq!(check_at(all(&apart), 1000), (apart.to_vec(), 0));
        let many = apart.repeat(7);
        assert_eq!(check_at(all(&many), 1).0, [12 * page * 7]);
    }

    #[test]
    fn what_is_put_together_at_once_is_a_block() {
        let page = 4 * KIB;
        let pages = |count| layout(std::iter::repeat_n((page, true), count));
        assert_eq!(check(pages(1024)), (vec![BATCH_BYTES], 1));
        assert_eq!(check(pages(1025)), (vec![BATCH_BYTES, page], 1));
        assert_eq!(check(pages(2500)), (vec![BATCH_BYTES, BATCH_BYTES, 452 * page], 3));
        // Those that are alone take no room of it.
        let mut apart = [(page, true), (page, false)].repeat(3000);
        apart.extend([(page, true); 2]);
        let (left, blobs) = check(layout(apart));
        assert_eq!((left.len(), left.last(), blobs), (3001, Some(&(2 * page)), 1));
    }
}
