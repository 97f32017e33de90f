//! Parts of tensors: boxes and flat ranges, what two of them share, and the grid that large ones are cut by.
//!
//! A region's elements lie dense and in row-major order wherever they are stored or wanted. Seen from the whole
//! tensor they are *runs*: ranges of elements that are together in row-major order. Everything here is arithmetic.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::dtype::elements;
use crate::manifest::{Slice, SliceKind};

/// Pieces that a whole tensor is cut into at most: a multiple of the usual numbers of ranks, so that their bounds are
/// bounds of pieces.
const GRID: u64 = 64;
/// Bytes below which a piece is not worth a checksum of its own.
const LEAST_PIECE: u64 = 256 << 10;

/// A part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

    /// A range of elements in row-major order.
    pub fn flat(range: Range<u64>) -> Self {
        let (offsets, lengths) = (vec![range.start], vec![range.end - range.start]);
        Self { kind: SliceKind::Flat, offsets, lengths }
    }

    /// What a slice holds.
    pub fn of(slice: &Slice) -> Self {
        Self { kind: slice.kind, offsets: slice.offsets.clone(), lengths: slice.lengths.clone() }
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
    pub fn runs(&self, shape: &[u64]) -> impl Iterator<Item = Range<u64>> + '_ {
        let flat = [elements(shape).unwrap_or(0)];
        let shape = if self.kind == SliceKind::Box { shape } else { &flat };
        // What lies behind the last dimension that is not whole is one run with it.
        let mut split = shape.len().saturating_sub(1);
        while split > 0 && self.lengths[split] == shape[split] {
            split -= 1;
        }
        let below: u64 = shape.iter().skip(split + 1).product();
        let length = self.lengths.get(split).map_or(1, |length| length * below);
        let first = self.offsets.get(split).map_or(0, |offset| offset * below);
        // Elements from one entry of each outer dimension to the next.
        let mut strides = vec![0; split];
        let mut stride = below * shape.get(split).copied().unwrap_or(1);
        for dimension in (0..split).rev() {
            strides[dimension] = stride;
            stride *= shape[dimension];
        }
        let outer: u64 = self.lengths[..split].iter().product();
        let count = if length == 0 { 0 } else { outer };
        (0..count).map(move |number| {
            let (mut rest, mut start) = (number, first);
            for dimension in (0..split).rev() {
                start += (self.offsets[dimension] + rest % self.lengths[dimension]) * strides[dimension];
                rest /= self.lengths[dimension];
            }
            start..start + length
        })
    }

    /// Calls `each` for every run that both regions hold: first element in this one, in the other, and elements.
    pub fn shared_with(&self, other: &Self, shape: &[u64], mut each: impl FnMut(u64, u64, u64)) {
        let (mut left, mut right) = (self.runs(shape), other.runs(shape));
        let (mut a, mut b) = (left.next(), right.next());
        // Where the present runs begin in their regions.
        let (mut a_at, mut b_at) = (0, 0);
        while let (Some(one), Some(two)) = (&a, &b) {
            let (start, end) = (one.start.max(two.start), one.end.min(two.end));
            if start < end {
                each(a_at + start - one.start, b_at + start - two.start, end - start);
            }
            if one.end <= two.end {
                a_at += one.end - one.start;
                a = left.next();
            } else {
                b_at += two.end - two.start;
                b = right.next();
            }
        }
    }

    /// Cuts it where the grid of a tensor of `shape` has its lines, along the first dimension (for flat ranges:
    /// along the elements), in its own order. A reader that wants a part then reads little more than that.
    pub fn pieces(&self, shape: &[u64], element_bytes: u64) -> Vec<Self> {
        let all = elements(shape).unwrap_or(0);
        let extent = if self.kind == SliceKind::Box { shape.first().copied() } else { Some(all) };
        let Some(extent) = extent.filter(|_| self.elements() > 0) else { return vec![self.clone()] };
        let unit_bytes = (all / extent).max(1).saturating_mul(element_bytes);
        let step = extent.div_ceil(GRID).max(LEAST_PIECE.div_ceil(unit_bytes));
        let (mut at, end) = (self.offsets[0], self.offsets[0] + self.lengths[0]);
        let mut pieces = Vec::new();
        while at < end {
            let until = end.min((at / step + 1) * step);
            let mut piece = self.clone();
            (piece.offsets[0], piece.lengths[0]) = (at, until - at);
            pieces.push(piece);
            at = until;
        }
        pieces
    }
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
        ];
        for one in &regions {
            for other in &regions {
                let ours: Vec<u64> = one.runs(&shape).flatten().collect();
                let theirs: Vec<u64> = other.runs(&shape).flatten().collect();
                let mut found = 0;
                one.shared_with(other, &shape, |from, to, count| {
                    let (from, to) = (from as usize, to as usize);
                    assert_eq!(ours[from..from + count as usize], theirs[to..to + count as usize]);
                    found += count;
                });
                let both = ours.iter().filter(|element| theirs.contains(element)).count();
                assert_eq!(found, both as u64, "{one:?} and {other:?}");
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
    }
}
