//! How the bytes of a file get into a new object: which the store copies by itself, and which pass through this host. Pure:
//! a layout in, a plan out.

use std::ops::Range;

use forebay_core::{Blob, FileLayout, Source};
use forebay_io::object::{COPY_PART_BYTES, MAX_PARTS, MIN_PART_BYTES, even_part_size};

/// The least part of carried bytes. Cut evenly into parts of no more than this, no part of more bytes is too small.
const CARRIED_PART_BYTES: u64 = 2 * MIN_PART_BYTES;

/// Parts that copies may take, with what is carried before each. The rest is for what is carried in several parts.
const PLANNED_PARTS: u64 = 9_000;

/// A stretch of a file as it gets into a new object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Run {
    /// Bytes of a blob that the store copies by itself.
    Copied(Blob, Range<u64>),
    /// Bytes of the file that pass through this host.
    Carried(Range<u64>),
}

/// A file cut into runs, none of which but the last is too small for a part.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    runs: Vec<Run>,
    carried: u64,
    /// The least parts that it takes.
    parts: u64,
    /// Bytes of each part, where all but the last have to be alike.
    even: Option<u64>,
}

impl Plan {
    /// Has what one blob holds in a row, and is long enough for a part of its own, `copied` as far as parts go.
    pub(crate) fn of(layout: &FileLayout, copied: bool) -> Self {
        let mut plan = Self::default();
        let mut planned = 0;
        for piece in layout.pieces(0..layout.size()) {
            let length = piece.range.end - piece.range.start;
            // Staged bytes may not be in the store, which anyway has given them no version.
            let Some(Source::Blob { blob, offset }) = piece.source else { continue };
            if !copied || blob.staged_on().is_some() {
                continue;
            }
            // A part before another must not be too small: the first bytes of the run fill it up.
            let before = piece.range.start - planned;
            let filling = if before == 0 { 0 } else { MIN_PART_BYTES.saturating_sub(before) };
            let rest = length.saturating_sub(filling);
            let is_enough = rest >= MIN_PART_BYTES || length == layout.size();
            if !is_enough || plan.parts + 1 + rest.div_ceil(COPY_PART_BYTES) > PLANNED_PARTS {
                continue;
            }
            plan.carry(planned..piece.range.start + filling);
            plan.parts += rest.div_ceil(COPY_PART_BYTES);
            plan.runs.push(Run::Copied(blob, offset + filling..offset + length));
            planned = piece.range.end;
        }
        plan.carry(planned..layout.size());
        plan
    }

    /// The same where all parts but the last have to be alike: what fills one out of one blob is copied. Of two sizes, that of
    /// blobs as writing makes them and the least one, the one that carries less.
    pub(crate) fn even(layout: &FileLayout, copied: bool) -> Self {
        let least = layout.size().div_ceil(PLANNED_PARTS);
        let [usual, small] = [even_part_size(None), MIN_PART_BYTES]
            .map(|part| Self::cut_evenly(layout, copied, part.max(least)));
        if small.carried < usual.carried { small } else { usual }
    }

    fn cut_evenly(layout: &FileLayout, copied: bool, part: u64) -> Self {
        let mut plan = Self { even: Some(part), ..Self::default() };
        let (mut planned, size) = (0, layout.size());
        for piece in layout.pieces(0..size) {
            let Some(Source::Blob { blob, offset }) = piece.source else { continue };
            if !copied || blob.staged_on().is_some() {
                continue;
            }
            let start = piece.range.start.next_multiple_of(part);
            let end = if piece.range.end == size { size } else { piece.range.end / part * part };
            if start >= end {
                continue;
            }
            plan.carry(planned..start);
            plan.parts += (end - start).div_ceil(part);
            let within = |at: u64| offset + at - piece.range.start;
            plan.runs.push(Run::Copied(blob, within(start)..within(end)));
            planned = end;
        }
        plan.carry(planned..size);
        plan
    }

    fn carry(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.carried += range.end - range.start;
            self.parts += 1;
            self.runs.push(Run::Carried(range));
        }
    }

    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Bytes that pass through this host.
    pub(crate) fn carried(&self) -> u64 {
        self.carried
    }

    /// Bytes of each part, where all but the last have to be alike.
    pub(crate) fn even_part(&self) -> Option<u64> {
        self.even
    }

    /// The largest part of carried bytes: no larger than it takes to have enough of them.
    pub(crate) fn part_bytes(&self) -> u64 {
        if let Some(part) = self.even {
            return part;
        }
        let left = (MAX_PARTS as u64).saturating_sub(self.parts).max(1);
        self.carried.div_ceil(left).max(CARRIED_PART_BYTES)
    }

    /// Bytes of each part of so many carried ones.
    pub(crate) fn cut(&self, length: u64) -> u64 {
        if let Some(part) = self.even {
            return part;
        }
        length.div_ceil(length.div_ceil(self.part_bytes()).max(1))
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::units::{GIB, KIB, MIB};
    use forebay_core::{Extent, ObjectKey, Version};

    use super::*;

    /// A file of these lengths in a row, each a blob of its own, or a hole.
    fn layout(lengths: impl IntoIterator<Item = (u64, bool)>) -> FileLayout {
        let (mut extents, mut offset) = (Vec::new(), 0);
        for (number, (length, is_blob)) in lengths.into_iter().enumerate() {
            let key = ObjectKey::new(format!("blob-{number}"));
            let blob = Blob { key, version: Version::new("v"), size: length };
            if is_blob {
                extents.push(Extent { offset, length, source: Source::Blob { blob, offset: 0 } });
            }
            offset += length;
        }
        FileLayout::from_parts(offset, extents).expect("a layout")
    }

    /// The runs as lengths, copied or not, of a plan that fits into an upload.
    fn check(layout: &FileLayout, copied: bool) -> Vec<(u64, bool)> {
        let plan = Plan::of(layout, copied);
        let lengths: Vec<(u64, bool)> = plan
            .runs()
            .iter()
            .map(|run| match run {
                Run::Copied(_, range) => (range.end - range.start, true),
                Run::Carried(range) => (range.end - range.start, false),
            })
            .collect();
        assert_eq!(lengths.iter().map(|(length, _)| length).sum::<u64>(), layout.size());
        let mut parts = 0;
        for (number, &(length, is_copied)) in lengths.iter().enumerate() {
            let (count, part) = match is_copied {
                true => (length.div_ceil(COPY_PART_BYTES), length),
                false => (length.div_ceil(plan.cut(length)), (length - 1) % plan.cut(length) + 1),
            };
            parts += count;
            assert!(part >= MIN_PART_BYTES || number + 1 == lengths.len(), "run {number}: {part} bytes");
        }
        assert!(parts <= MAX_PARTS as u64, "{parts} parts");
        assert_eq!(plan.carried(), lengths.iter().filter(|run| !run.1).map(|run| run.0).sum::<u64>());
        lengths
    }

    #[test]
    fn what_is_long_enough_for_a_part_is_copied() {
        let blobs = |lengths: &[u64]| layout(lengths.iter().map(|length| (*length, true)));
        let eight = [8 * MIB; 4];
        assert_eq!(check(&blobs(&eight), true), eight.map(|length| (length, true)));
        assert_eq!(check(&blobs(&eight), false), [(32 * MIB, false)]);
        // A small run takes what it lacks of the next one, if that can spare it.
        let changed = blobs(&[12 * MIB, 4 * KIB, 12 * MIB, MIB]);
        let filled = 7 * MIB + 4 * KIB;
        assert_eq!(check(&changed, true), [(12 * MIB, true), (5 * MIB, false), (filled, true), (MIB, false)]);
        let carried = [(8 * MIB, true), (9 * MIB, false), (8 * MIB, true)];
        assert_eq!(check(&blobs(&[8 * MIB, MIB, 8 * MIB, 8 * MIB]), true), carried);
        // A file in one blob, however small, is one request.
        assert_eq!(check(&blobs(&[KIB]), true), [(KIB, true)]);
        assert_eq!(check(&blobs(&[]), true), []);
        assert_eq!(check(&layout([(6 * MIB, true), (MIB, false)]), true), [(6 * MIB, true), (MIB, false)]);
    }

    /// The runs as lengths, copied or not, of an even plan, whose parts but the last are alike and few enough.
    fn check_even(layout: &FileLayout) -> Vec<(u64, bool)> {
        let plan = Plan::even(layout, true);
        let (part, mut at) = (plan.part_bytes(), 0);
        assert!(part >= MIN_PART_BYTES && layout.size().div_ceil(part) <= MAX_PARTS as u64, "{part}");
        let mut lengths = Vec::new();
        for run in plan.runs() {
            let (length, is_copied) = match run {
                Run::Copied(_, range) => (range.end - range.start, true),
                Run::Carried(range) => (range.end - range.start, false),
            };
            assert_eq!(at % part, 0, "runs begin where parts do");
            assert_eq!(plan.cut(length), part);
            at += length;
            lengths.push((length, is_copied));
        }
        assert_eq!(at, layout.size());
        assert_eq!(plan.carried(), lengths.iter().filter(|run| !run.1).map(|run| run.0).sum::<u64>());
        lengths
    }

    #[test]
    fn an_even_plan_copies_what_fills_parts_of_one_size() {
        let blobs = |lengths: &[u64]| layout(lengths.iter().map(|length| (*length, true)));
        assert_eq!(check_even(&blobs(&[8 * MIB; 4])), [(8 * MIB, true); 4]);
        assert_eq!(check_even(&blobs(&[3 * GIB])), [(3 * GIB, true)], "a whole blob, with its end");
        // What was written over does not move what lies behind it.
        let changed = blobs(&[12 * MIB, 4 * KIB, 12 * MIB - 4 * KIB, MIB]);
        assert_eq!(check_even(&changed), [(8 * MIB, true), (8 * MIB, false), (8 * MIB, true), (MIB, true)]);
        assert_eq!(check_even(&blobs(&[MIB, 8 * MIB, MIB])), [(10 * MIB, false)]);
        assert_eq!(check_even(&layout([(16 * MIB, true), (MIB, false)])), [(16 * MIB, true), (MIB, false)]);
        assert_eq!(check_even(&blobs(&[])), []);
        let long = check_even(&layout([(70 * GIB, true), (30 * GIB, true)]));
        assert!(long.iter().filter(|run| !run.1).map(|run| run.0).sum::<u64>() < 16 * MIB, "{long:?}");
        check_even(&layout(vec![(8 * MIB, true); 30_000]));
    }

    #[test]
    fn a_plan_fits_into_an_upload() {
        for (count, length) in [(30_000, 8 * MIB), (30_000, MIB), (12, 900 * GIB), (20_000, 5 * MIB - 1)] {
            check(&layout(vec![(length, true); count]), true);
        }
        // Each run between has to be carried.
        check(&layout((0..20_000).map(|number| (6 * MIB, number % 2 == 0))), true);
        let carried = check(&layout(vec![(8 * MIB, true); 12_000]), true);
        assert_eq!(carried.last(), Some(&(3_001 * 8 * MIB, false)), "what no parts are left for");
    }
}
