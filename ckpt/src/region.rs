//! Parts of tensors: boxes and flat ranges, what two of them share, and the grid that large ones are cut by.
//!
//! A region's elements lie dense and in row-major order wherever they are stored or wanted. Seen from the whole
//! tensor they are *runs*: ranges of elements that are together in row-major order. Everything here is arithmetic.

use std::ops::Range;

use crate::dtype::elements;
use crate::manifest::{MAX_SLICES, Slice, SliceKind, TextLength};

/// Pieces that a whole tensor is cut into at most, unless they would be large: a multiple of the usual numbers of ranks,
/// so that their bounds are bounds of pieces.
const GRID: u64 = 64;
/// Bytes above which pieces are large.
const LARGE_PIECE: u64 = 16 << 20;
/// Pieces of the largest tensors: each is an entry of the manifest.
const MAX_GRID: u64 = 1024;
/// Bytes below which a piece is not worth a checksum of its own.
const LEAST_PIECE: u64 = 256 << 10;

/// A part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Region {
    /// What the next two fields count.
    pub kind: SliceKind,
    /// First element.
    pub offsets: Vec<u64>,
    /// Elements.
    pub lengths: Vec<u64>,
}

impl Region {
    /// The box of all elements.
    pub fn whole(shape: &[u64]) -> Self {
        Self { kind: SliceKind::Box, offsets: vec![0; shape.len()], lengths: shape.to_vec() }
    }

    /// The box of these offsets and, behind them, as many lengths.
    pub(crate) fn boxed(place: &[u64]) -> Self {
        let (offsets, lengths) = place.split_at(place.len() / 2);
        Self { kind: SliceKind::Box, offsets: offsets.into(), lengths: lengths.into() }
    }

    /// A range of elements in row-major order.
    pub fn flat(range: Range<u64>) -> Self {
        let (offsets, lengths) = (vec![range.start], vec![range.end - range.start]);
        Self { kind: SliceKind::Flat, offsets, lengths }
    }

    /// What a slice holds.
    pub fn of(slice: &Slice) -> Self {
        Self { kind: slice.kind, offsets: slice.offsets.clone(), lengths: slice.lengths.clone() }
    }

    /// What a manifest says of it as a slice.
    pub(crate) fn text(&self) -> TextLength {
        TextLength::of_slice(self.kind, &self.offsets, &self.lengths)
    }

    /// Whether it is a part of a tensor of `shape`.
    pub fn fits(&self, shape: &[u64]) -> bool {
        let flat = [elements(shape).unwrap_or(0)];
        let bounds = if self.kind == SliceKind::Box { shape } else { &flat };
        let inside =
            |i: usize| self.offsets[i].checked_add(self.lengths[i]).is_some_and(|end| end <= bounds[i]);
        self.offsets.len() == bounds.len()
            && self.lengths.len() == bounds.len()
            && (0..bounds.len()).all(inside)
    }

    /// Whether it is all of a tensor of `shape`, in its own dimensions.
    pub fn is_whole(&self, shape: &[u64]) -> bool {
        self.kind == SliceKind::Box && self.lengths == shape
    }

    /// Elements.
    pub fn elements(&self) -> u64 {
        elements(&self.lengths).unwrap_or(0)
    }

    /// The runs of a tensor of `shape` that it consists of, ascending.
    pub fn runs(&self, shape: &[u64]) -> impl Iterator<Item = Range<u64>> + use<> {
        let runs = Runs::of(self, shape);
        (0..runs.count).map(move |number| runs.get(number))
    }

    /// Its first element in row-major order, and the one behind its last.
    pub(crate) fn bounds(&self, shape: &[u64]) -> (u64, u64) {
        let runs = Runs::of(self, shape);
        let end = runs.count.checked_sub(1).map_or(runs.first, |last| runs.get(last).end);
        (runs.get(0).start.min(end), end)
    }

    /// Whether the two hold an element in common.
    pub fn touches(&self, other: &Self, shape: &[u64]) -> bool {
        if self.kind != SliceKind::Box || other.kind != SliceKind::Box {
            return self.shared_with(other, shape).next().is_some();
        }
        (0..self.offsets.len()).all(|i| {
            let ends = (self.offsets[i] + self.lengths[i]).min(other.offsets[i] + other.lengths[i]);
            self.offsets[i].max(other.offsets[i]) < ends
        })
    }

    /// Every run that both regions hold, ascending: first element in this one, in the other, and elements.
    pub fn shared_with(&self, other: &Self, shape: &[u64]) -> Box<dyn Iterator<Item = Shared>> {
        match (self.kind, other.kind) {
            (SliceKind::Box, SliceKind::Box) => Box::new(shared_box(self, other).into_iter().flatten()),
            (SliceKind::Box, SliceKind::Flat) => Box::new(shared_range(self, other, shape)),
            (SliceKind::Flat, SliceKind::Box) => {
                Box::new(shared_range(other, self, shape).map(|(to, from, count)| (from, to, count)))
            }
            (SliceKind::Flat, SliceKind::Flat) => {
                let (one, two) = (self.offsets[0], other.offsets[0]);
                let (start, end) = (one.max(two), (one + self.lengths[0]).min(two + other.lengths[0]));
                Box::new((start < end).then(|| (start - one, start - two, end - start)).into_iter())
            }
        }
    }

    /// Cuts it where the grid of a tensor of `shape` has its lines, in its own order: along the first dimension (for
    /// flat ranges: along the elements), and where that has fewer entries than the grid has lines, each of them along
    /// the next. Every piece is one run of it. A reader that wants a part then reads little more than that.
    ///
    /// A part of columns has a piece for each line, as each other one has: where that would be more of the slices that a
    /// tensor may have than the part has of its elements, it is cut at every other line, or every fourth, and so on.
    pub fn pieces(&self, shape: &[u64], element_bytes: u64) -> Vec<Self> {
        let flat = [elements(shape).unwrap_or(0)];
        let shape = if self.kind == SliceKind::Box { shape } else { &flat };
        if shape.is_empty() || self.elements() == 0 {
            return vec![self.clone()];
        }
        let most = match self.kind == SliceKind::Box && self.lengths[1..] != shape[1..] {
            true => (MAX_SLICES as u128 * u128::from(self.elements()) / u128::from(flat[0].max(1))).max(1),
            // Whole rows and ranges have one more a part than the tensor has lines.
            false => u128::MAX,
        };
        let mut lines = lines(flat[0].saturating_mul(element_bytes));
        loop {
            let mut pieces = Vec::new();
            self.cut(shape, element_bytes, (0, lines), &mut pieces);
            if pieces.len() as u128 <= most || lines == 1 {
                return pieces;
            }
            lines /= 2;
        }
    }

    /// Cuts it along one dimension, which has a part of the grid's lines.
    fn cut(&self, shape: &[u64], element_bytes: u64, (axis, lines): (usize, u64), pieces: &mut Vec<Self>) {
        let (extent, below) = (shape[axis], &shape[axis + 1..]);
        let row_bytes = elements(below).unwrap_or(u64::MAX).saturating_mul(element_bytes);
        let step = extent.div_ceil(lines).max(LEAST_PIECE.div_ceil(row_bytes));
        // A power of two each, so that the usual numbers of ranks divide it.
        let inner = (lines / extent + 1).next_power_of_two() / 2;
        let is_cut_further = step == 1 && inner > 1 && !below.is_empty();
        let (mut at, end) = (self.offsets[axis], self.offsets[axis] + self.lengths[axis]);
        while at < end {
            let until = end.min((at / step + 1) * step);
            let mut piece = self.clone();
            (piece.offsets[axis], piece.lengths[axis]) = (at, until - at);
            match is_cut_further {
                true => piece.cut(shape, element_bytes, (axis + 1, inner), pieces),
                false => pieces.push(piece),
            }
            at = until;
        }
    }
}

/// A run that two regions hold: first element in the one, in the other, and elements.
pub type Shared = (u64, u64, u64);

/// The runs of a region, all of one length, by their number.
struct Runs {
    /// Of each outer dimension: the first entry, how many, and elements from one to the next.
    outer: Vec<(u64, u64, u64)>,
    /// The first element of the run at entry 0 of each outer dimension.
    first: u64,
    length: u64,
    count: u64,
}

impl Runs {
    fn of(region: &Region, shape: &[u64]) -> Self {
        let flat = [elements(shape).unwrap_or(0)];
        let shape = if region.kind == SliceKind::Box { shape } else { &flat };
        // What lies behind the last dimension that is not whole is one run with it.
        let mut split = shape.len().saturating_sub(1);
        while split > 0 && region.lengths[split] == shape[split] {
            split -= 1;
        }
        let below: u64 = shape.iter().skip(split + 1).product();
        let length = region.lengths.get(split).map_or(1, |length| length * below);
        let first = region.offsets.get(split).map_or(0, |offset| offset * below);
        let mut stride = below * shape.get(split).copied().unwrap_or(1);
        let mut outer = Vec::with_capacity(split);
        for dimension in (0..split).rev() {
            outer.push((region.offsets[dimension], region.lengths[dimension], stride));
            stride *= shape[dimension];
        }
        let count = if length == 0 { 0 } else { region.lengths[..split].iter().product() };
        Self { outer, first, length, count }
    }

    fn get(&self, number: u64) -> Range<u64> {
        let (mut rest, mut start) = (number, self.first);
        for (offset, length, stride) in &self.outer {
            start += (offset + rest % length) * stride;
            rest /= length;
        }
        start..start + self.length
    }

    /// The number of the first run that ends behind an element.
    fn behind(&self, element: u64) -> u64 {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            match self.get(middle).end <= element {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }
}

/// What a box and a flat range of a tensor of `shape` have in common.
fn shared_range(part: &Region, range: &Region, shape: &[u64]) -> impl Iterator<Item = Shared> + use<> {
    let (from, to) = (range.offsets[0], range.offsets[0] + range.lengths[0]);
    let runs = Runs::of(part, shape);
    let numbers = runs.behind(from)..if from < to { runs.count } else { 0 };
    let found = numbers.map(move |number| (number * runs.length, runs.get(number)));
    found.take_while(move |(_, run)| run.start < to).map(move |(at, run)| {
        let (start, end) = (run.start.max(from), run.end.min(to));
        (at + start - run.start, start - from, end - start)
    })
}

/// What two boxes have in common: dimensions that are whole in both are one run with the next outer one.
fn shared_box(one: &Region, two: &Region) -> Option<impl Iterator<Item = Shared> + use<>> {
    let dimensions = one.offsets.len();
    let start: Vec<u64> = (0..dimensions).map(|i| one.offsets[i].max(two.offsets[i])).collect();
    let mut lengths = Vec::with_capacity(dimensions);
    for (i, start) in start.iter().enumerate() {
        let end = (one.offsets[i] + one.lengths[i]).min(two.offsets[i] + two.lengths[i]);
        lengths.push(end.checked_sub(*start).filter(|length| *length > 0)?);
    }
    let mut split = dimensions.saturating_sub(1);
    while split > 0 && lengths[split] == one.lengths[split] && lengths[split] == two.lengths[split] {
        split -= 1;
    }
    let count: u64 = lengths[..split].iter().product();
    let length: u64 = lengths[split..].iter().product();
    let first = |region: &Region| {
        let place = |at: u64, i: usize| at * region.lengths[i] + start[i] - region.offsets[i];
        (0..dimensions).fold(0, place)
    };
    let (first_of_one, first_of_two) = (first(one), first(two));
    // Of each outer dimension, the innermost first: entries, and elements of either box from one to the next.
    let mut outer = Vec::with_capacity(split);
    for i in (0..split).rev() {
        let stride = |region: &Region| region.lengths[i + 1..].iter().product::<u64>();
        outer.push((lengths[i], stride(one), stride(two)));
    }
    Some((0..count).map(move |number| {
        let (mut rest, mut in_one, mut in_two) = (number, first_of_one, first_of_two);
        for (length, stride_of_one, stride_of_two) in &outer {
            in_one += rest % length * stride_of_one;
            in_two += rest % length * stride_of_two;
            rest /= length;
        }
        (in_one, in_two, length)
    }))
}

/// How many lines the grid of a tensor of so many bytes has.
fn lines(bytes: u64) -> u64 {
    (bytes / LARGE_PIECE).clamp(GRID, MAX_GRID).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boxed(offsets: &[u64], lengths: &[u64]) -> Region {
        Region { kind: SliceKind::Box, offsets: offsets.into(), lengths: lengths.into() }
    }

    fn runs(region: &Region, shape: &[u64]) -> Vec<Range<u64>> {
        region.runs(shape).collect()
    }

    #[test]
    fn regions_are_runs_of_the_tensor() {
        assert_eq!(runs(&boxed(&[], &[]), &[]), vec![0..1]);
        assert_eq!(runs(&Region::whole(&[2, 3, 4]), &[2, 3, 4]), vec![0..24]);
        assert_eq!(runs(&boxed(&[1, 0], &[2, 5]), &[4, 5]), vec![5..15]);
        assert_eq!(runs(&boxed(&[1, 2], &[2, 2]), &[4, 5]), [7..9, 12..14]);
        assert_eq!(runs(&boxed(&[0, 1, 0], &[2, 1, 4]), &[2, 3, 4]), [4..8, 16..20]);
        assert_eq!(runs(&boxed(&[0, 1], &[2, 0]), &[2, 3]), []);
        assert_eq!(runs(&Region::flat(3..9), &[5, 5]), vec![3..9]);
        assert_eq!(runs(&Region::whole(&[0, 5]), &[0, 5]), []);
    }

    #[test]
    fn what_two_regions_share_is_what_their_elements_say() {
        let shape = [4, 5, 3];
        let regions = [
            Region::whole(&shape),
            Region::flat(7..41),
            boxed(&[1, 0, 0], &[2, 5, 3]),
            boxed(&[0, 2, 0], &[4, 2, 3]),
            boxed(&[1, 1, 1], &[3, 3, 2]),
            boxed(&[3, 4, 2], &[1, 1, 1]),
            boxed(&[0, 2, 0], &[4, 0, 3]),
            Region::flat(59..60),
            Region::flat(9..9),
        ];
        for one in &regions {
            for other in &regions {
                let ours: Vec<u64> = one.runs(&shape).flatten().collect();
                let theirs: Vec<u64> = other.runs(&shape).flatten().collect();
                let mut found = 0;
                for (from, to, count) in one.shared_with(other, &shape) {
                    let (from, to) = (from as usize, to as usize);
                    assert_eq!(ours[from..from + count as usize], theirs[to..to + count as usize]);
                    found += count;
                }
                let both = ours.iter().filter(|element| theirs.contains(element)).count();
                assert_eq!(found, both as u64, "{one:?} and {other:?}");
                assert_eq!(one.touches(other, &shape), both > 0, "{one:?} and {other:?}");
            }
        }
    }

    #[test]
    fn pieces_lie_on_the_tensors_grid() {
        let shape = [128, 1 << 20];
        let upper = boxed(&[64, 0], &[64, 1 << 20]);
        let pieces = upper.pieces(&shape, 4);
        assert_eq!(pieces.len(), 32);
        assert_eq!((&pieces[0].offsets[..], &pieces[0].lengths[..]), (&[64, 0][..], &[2, 1 << 20][..]));
        let uneven = boxed(&[3, 0], &[4, 1 << 20]).pieces(&shape, 4);
        assert_eq!(uneven.iter().map(|piece| piece.offsets[0]).collect::<Vec<_>>(), [3, 4, 6]);
        assert_eq!(Region::whole(&[10, 10]).pieces(&[10, 10], 4).len(), 1, "too small to be cut");
        assert_eq!(Region::flat(0..1 << 20).pieces(&[1 << 20], 4).len(), 16);
        assert_eq!(Region::whole(&[]).pieces(&[], 8), [Region::whole(&[])]);
        assert_eq!(Region::whole(&[0, 7]).pieces(&[0, 7], 8), [Region::whole(&[0, 7])]);
        assert_eq!(Region::flat(0..1 << 34).pieces(&[1 << 34], 4).len(), 1024, "no more, however large");
    }

    #[test]
    fn few_large_rows_are_cut_along_the_next_dimension() {
        // Eight experts of 32 MiB: eight pieces each.
        let shape = [8, 1024, 8192];
        let pieces = Region::whole(&shape).pieces(&shape, 4);
        assert_eq!(pieces.len(), 64);
        assert_eq!((&pieces[9].offsets[..], &pieces[9].lengths[..]), (&[1, 128, 0][..], &[1, 128, 8192][..]));
        let columns = boxed(&[6, 100, 4096], &[2, 60, 4096]).pieces(&shape, 4);
        let places: Vec<_> = columns.iter().map(|piece| (piece.offsets[0], piece.offsets[1])).collect();
        assert_eq!(places, [(6, 100), (6, 128), (7, 100), (7, 128)]);
        let all: Vec<u64> = columns.iter().flat_map(|piece| piece.runs(&shape).flatten()).collect();
        let own: Vec<u64> = boxed(&[6, 100, 4096], &[2, 60, 4096]).runs(&shape).flatten().collect();
        assert!(all == own, "each piece is one run of the part, in its order");
        // 160 rows of 64 MiB and 1,024 lines: four pieces each.
        let many = [160, 4096, 4096];
        assert_eq!(Region::whole(&many).pieces(&many, 4).len(), 640);
        assert_eq!(Region::whole(&[3, 100]).pieces(&[3, 100], 4).len(), 1);
    }

    /// Parts of columns have a slice for each line of the grid, each of them: with many ranks no manifest took a step that was
    /// stored.
    #[test]
    fn column_parts_of_any_number_of_ranks_fit_a_manifest() {
        // Rows, columns, and ranks; Tensors of many GiB have up to 1,024 lines.
        for (rows, columns, ranks) in [
            (1024u64, 4112u64, 257u64),
            (1024, 1 << 14, 1 << 14),
            (1 << 16, 1 << 17, 64),
            (3000, 50_257, 1000),
            (1, 9999, 5000),
        ] {
            let shape = [rows, columns];
            let width = columns.div_ceil(ranks);
            let starts: Vec<u64> = (0..columns).step_by(width as usize).collect();
            let parts = starts.iter().map(|at| boxed(&[0, *at], &[rows, width.min(columns - at)]));
            let mut slices = 0;
            for part in parts {
                let pieces = part.pieces(&shape, 4);
                assert_eq!(pieces.iter().map(Region::elements).sum::<u64>(), part.elements());
                slices += pieces.len();
            }
            assert!(slices <= MAX_SLICES, "{slices} slices of {shape:?} on {ranks} ranks");
        }
        // Where all had room, they lie as they lay.
        let part = boxed(&[0, 16], &[1024, 16]).pieces(&[1024, 4096], 4);
        assert_eq!((part.len(), &part[1].offsets[..]), (64, &[16, 16][..]), "256 ranks");
        let part = boxed(&[0, 16], &[1024, 16]).pieces(&[1024, 4112], 4);
        assert_eq!((part.len(), &part[1].offsets[..]), (32, &[32, 16][..]), "257 ranks");
        // Whole rows, and ranges, have a slice more for each part at most: however small, they lie on the grid.
        assert_eq!(boxed(&[31, 0], &[2, 4112]).pieces(&[1024, 4112], 4).len(), 2);
        assert_eq!(Region::flat(65_535..65_537).pieces(&[1 << 22], 4).len(), 2);
    }
}
