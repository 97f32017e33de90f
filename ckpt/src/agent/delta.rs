//! What of a save need not be stored again: slices that are in the bucket as they were in the step that the save goes on
//! from.
//!
//! A slice whose checksum differs has changed. Where it is equal, the identity decides. Slices are named where they lie,
//! in the shards that first had them, so that steps never hang on one another.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use bytes::Bytes;
use forebay_core::Result;
use forebay_core::checksum::combine;

use super::Seal;
use super::base::{Base, Place, place};
use super::inspect::slices_of;
use crate::dtype::Dtype;
use crate::manifest::{Checksum, Identity, MAX_FILES, Manifest, Shard, Slice, Tensor};
use crate::region::Region;
use crate::shard::{ShardLayout, TensorSpec};

/// A step of which less than this part of its bytes is spared is stored whole: a reader then has fewer files to open.
const LEAST_SAVING: u64 = 20;
/// Nor are fewer bytes than these worth another file: requests and headers cost as much.
const LEAST_BYTES: u64 = 32 << 10;

/// Of each slice of the seal where the base has one of the same place and checksum; nothing where too little would be
/// saved.
pub(super) fn candidates(base: &Base, seal: &Seal) -> Option<Vec<Option<Slice>>> {
    let mut known: HashMap<Place<'_>, (&Tensor, &Slice)> = HashMap::new();
    let Manifest { tensors, shards, .. } = &base.manifest;
    for tensor in tensors {
        // What this very step wrote is not earlier: it is being saved again.
        let earlier = tensor.slices.iter().filter(|slice| shards[slice.shard as usize].step != seal.step);
        known.extend(earlier.map(|slice| (place(&tensor.name, &tensor.shape, slice), (tensor, slice))));
    }
    let same = |tensor: &Tensor, slice: &Slice| {
        let (other, found) = known.get(&place(&tensor.name, &tensor.shape, slice))?;
        let alike =
            (&other.dtype, &other.shape, found.crc32c) == (&tensor.dtype, &tensor.shape, slice.crc32c);
        (alike && !slice.is_empty()).then(|| (*found).clone())
    };
    let sealed = seal.tensors.iter();
    let found: Vec<_> =
        sealed.flat_map(|tensor| tensor.slices.iter().map(|slice| same(tensor, slice))).collect();
    is_worth_it(base, seal, &found).then_some(found)
}

/// Whether enough is saved, in few enough files, which together hold no more than twice what the step has.
fn is_worth_it(base: &Base, seal: &Seal, found: &[Option<Slice>]) -> bool {
    let all = seal.size - seal.header;
    let saved: u64 = found.iter().flatten().map(Slice::len).sum();
    let files = named(base, found);
    let kept: u64 = files.iter().map(|shard| base.share_of(shard)).sum();
    saved >= LEAST_BYTES
        && saved.saturating_mul(LEAST_SAVING) >= all
        && files.len() < MAX_FILES
        && kept + (all - saved) <= all.saturating_mul(2)
}

/// Which of the base's shards lent slices lie in.
fn files(found: &[Option<Slice>]) -> BTreeSet<u32> {
    found.iter().flatten().map(|slice| slice.shard).collect()
}

/// The shards that lent slices lie in.
pub(super) fn named<'a>(base: &'a Base, found: &[Option<Slice>]) -> Vec<&'a Shard> {
    files(found).into_iter().map(|index| &base.manifest.shards[index as usize]).collect()
}

/// What a save refers to, and of each of its slices where it lies, if that is in an earlier shard.
pub(super) struct Lent<'a> {
    pub(super) base: &'a Base,
    pub(super) slices: Vec<Option<Slice>>,
}

/// The file that a save writes: its header, and where the slices in it lie.
pub(super) struct File {
    pub(super) header: Bytes,
    /// Where what follows lies in the shard, in order.
    pub(super) runs: Vec<Range<usize>>,
    pub(super) size: u64,
    crc32c: u32,
    /// Of each slice of the seal where it begins in the file, if it is in it.
    starts: Vec<Option<u64>>,
}

impl File {
    /// All of a shard, with the header that it has.
    pub(super) fn whole(seal: &Seal, header: Bytes) -> Self {
        let starts = slices_of(seal).map(|(_, slice)| Some(slice.start)).collect();
        let run = seal.header as usize..seal.size as usize;
        Self::new(seal, header, vec![run], starts, seal.size)
    }

    /// Only the slices that are `wanted`.
    pub(super) fn of(seal: &Seal, wanted: &[bool]) -> Result<Self> {
        let mut specs = Vec::new();
        for tensor in &seal.tensors {
            let dtype = Dtype::named(&tensor.dtype)?;
            let spec = |slice| {
                let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
                TensorSpec { name, dtype, shape, region: Region::of(slice) }
            };
            specs.extend(tensor.slices.iter().map(spec));
        }
        let specs = specs.into_iter().zip(wanted).filter(|(_, wanted)| **wanted);
        let specs: Vec<_> = specs.map(|(spec, _)| spec).collect();
        let layout = ShardLayout::of(&specs)?;
        let mut ranges = layout.ranges.into_iter();
        let starts: Vec<_> = wanted
            .iter()
            .map(|wanted| wanted.then(|| ranges.next().map(|range| range.start)).flatten())
            .collect();
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (_, _, slice) in in_order(seal, &starts) {
            let (start, end) = (slice.start as usize, slice.end as usize);
            match runs.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => runs.push(start..end),
            }
        }
        Ok(Self::new(seal, layout.header.into(), runs, starts, layout.size))
    }

    fn new(seal: &Seal, header: Bytes, runs: Vec<Range<usize>>, starts: Vec<Option<u64>>, size: u64) -> Self {
        let join =
            |crc32c, (_, _, slice): &(u64, usize, &Slice)| combine(crc32c, slice.crc32c.0, slice.len());
        let crc32c = in_order(seal, &starts).iter().fold(forebay_core::crc32c(&header), join);
        Self { header, runs, size, crc32c, starts }
    }

    /// Which of the seal's slices are in it, in the order of its bytes.
    pub(super) fn slices(&self, seal: &Seal) -> Vec<usize> {
        in_order(seal, &self.starts).into_iter().map(|(_, index, _)| index).collect()
    }
}

/// The slices that are in a file, in the order of its bytes, each with where it begins and its number.
fn in_order<'a>(seal: &'a Seal, starts: &[Option<u64>]) -> Vec<(u64, usize, &'a Slice)> {
    let placed = starts.iter().zip(slices_of(seal)).enumerate();
    let mut order: Vec<_> =
        placed.filter_map(|(index, (start, (_, slice)))| Some(((*start)?, index, slice))).collect();
    order.sort_by_key(|(start, _, slice)| (*start, slice.len()));
    order
}

/// Has a part's manifest say where its slices lie: in the file that it wrote, or where they were lent from.
pub(super) fn describe(part: &mut Manifest, file: &File, identities: Vec<Identity>, lent: Option<Lent<'_>>) {
    let own = &mut part.shards[0];
    (own.size, own.header, own.crc32c) = (file.size, file.header.len() as u64, Checksum(file.crc32c));
    let slices = part.tensors.iter_mut().flat_map(|tensor| &mut tensor.slices);
    let mut slices: Vec<&mut Slice> = slices.collect();
    for ((slice, start), identity) in slices.iter_mut().zip(&file.starts).zip(identities) {
        let start = start.unwrap_or(slice.start);
        (slice.start, slice.end, slice.blake3) = (start, start + slice.len(), identity);
    }
    let Some(Lent { base, slices: lent }) = lent else { return };
    let numbers: HashMap<u32, u32> = files(&lent).into_iter().zip(1..).collect();
    for (slice, lent) in slices.into_iter().zip(&lent) {
        if let Some(lent) = lent {
            (slice.shard, slice.start, slice.end) = (numbers[&lent.shard], lent.start, lent.end);
        }
    }
    let shards = named(base, &lent);
    part.parents = shards.iter().map(|shard| shard.step).collect::<BTreeSet<u64>>().into_iter().collect();
    part.shards.extend(shards.into_iter().cloned());
}
