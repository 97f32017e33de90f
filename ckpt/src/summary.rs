//! Where a step's bytes lie, by rank and by step: data in, data out.
//!
//! The manifest says of each slice which shard holds it, and of each shard which rank wrote it, and when. Who had a tensor
//! without writing any of it (the other ranks of a replicated one) is in no manifest.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::manifest::{Manifest, Shard, Slice, SliceKind, Tensor};

/// Where everything lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// What each rank stored, in the order of ranks; those that stored no file are left out.
    pub ranks: Vec<RankBytes>,
    /// Where each tensor lies, in the order of the manifest.
    pub tensors: Vec<Place>,
}

/// What a rank stored of a step. The bytes of all ranks together are those of all tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankBytes {
    /// The rank. One that is not below the world size is of an earlier step, which more ranks saved.
    pub rank: u32,
    /// Bytes of tensors that it wrote in this step.
    pub stored: u64,
    /// Bytes of tensors that this step has from it out of earlier steps.
    pub earlier: u64,
}

/// Where a tensor lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// Ranks whose shards hold it, ascending.
    pub ranks: Vec<u32>,
    /// `Flat`: several ranks held all of it alike, and each of `ranks` wrote a range of it. `Box`: the ranks' parts are boxes;
    /// `None` where it has no slices.
    pub kind: Option<SliceKind>,
    /// Dimensions along which the boxes of several ranks divide it, ascending.
    pub dimensions: Vec<usize>,
    /// Earlier steps whose shards hold some of it, ascending.
    pub earlier: Vec<Earlier>,
}

/// What of a tensor lies in an earlier step's shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Earlier {
    /// The step.
    pub step: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Tells it of a manifest, which was checked when it was read.
pub fn summary(manifest: &Manifest) -> Summary {
    let empty = |rank| RankBytes { rank, stored: 0, earlier: 0 };
    // Not from the world size, which a manifest may give as any number.
    let own = manifest.shards.iter().filter(|shard| shard.step == manifest.step);
    let mut ranks: BTreeMap<u32, RankBytes> = own.map(|shard| (shard.rank, empty(shard.rank))).collect();
    for (slice, shard) in manifest.tensors.iter().flat_map(|tensor| located(manifest, tensor)) {
        let entry = ranks.entry(shard.rank).or_insert_with(|| empty(shard.rank));
        match shard.step == manifest.step {
            true => entry.stored = entry.stored.saturating_add(slice.len()),
            false => entry.earlier = entry.earlier.saturating_add(slice.len()),
        }
    }
    let tensors = manifest.tensors.iter().map(|tensor| place(manifest, tensor)).collect();
    Summary { ranks: ranks.into_values().collect(), tensors }
}

/// A tensor's slices, each with the file that it lies in.
fn located<'a>(manifest: &'a Manifest, tensor: &'a Tensor) -> impl Iterator<Item = (&'a Slice, &'a Shard)> {
    tensor.slices.iter().map(|slice| (slice, &manifest.shards[slice.shard as usize]))
}

fn place(manifest: &Manifest, tensor: &Tensor) -> Place {
    let mut parts: BTreeMap<u32, Vec<&Slice>> = BTreeMap::new();
    let mut earlier: BTreeMap<u64, u64> = BTreeMap::new();
    for (slice, shard) in located(manifest, tensor) {
        parts.entry(shard.rank).or_default().push(slice);
        if shard.step != manifest.step {
            let bytes: &mut u64 = earlier.entry(shard.step).or_default();
            *bytes = bytes.saturating_add(slice.len());
        }
    }
    let kind = tensor.slices.first().map(|slice| slice.kind);
    Place {
        name: tensor.name.clone(),
        bytes: tensor.slices.iter().map(Slice::len).fold(0, u64::saturating_add),
        dimensions: match kind {
            Some(SliceKind::Box) if parts.len() > 1 => divided(&tensor.shape, &parts),
            _ => Vec::new(),
        },
        ranks: parts.into_keys().collect(),
        kind,
        earlier: earlier.into_iter().map(|(step, bytes)| Earlier { step, bytes }).collect(),
    }
}

/// The dimensions that not every rank has from end to end. Where each has both ends of all of them, as in a chequered
/// pattern, those that not every slice has.
fn divided(shape: &[u64], parts: &BTreeMap<u32, Vec<&Slice>>) -> Vec<usize> {
    let reach = |slices: &[&Slice], d: usize| {
        let first = slices.iter().map(|slice| slice.offsets[d]).min();
        let last = slices.iter().map(|slice| slice.offsets[d] + slice.lengths[d]).max();
        (first, last) == (Some(0), Some(shape[d]))
    };
    let of_ranks = (0..shape.len()).filter(|d| !parts.values().all(|slices| reach(slices, *d)));
    let dimensions: Vec<usize> = of_ranks.collect();
    if !dimensions.is_empty() {
        return dimensions;
    }
    let each = |d: usize| parts.values().flatten().all(|slice| reach(&[slice], d));
    (0..shape.len()).filter(|d| !each(*d)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Checksum, Identity};

    /// Step 30 of four ranks, with the shards of these ranks and steps.
    fn manifest(shards: &[(u32, u64)], tensors: Vec<Tensor>) -> Manifest {
        let shards = shards.iter().map(|(rank, step)| Shard {
            key: String::new(),
            size: 1 << 20,
            header: 4096,
            crc32c: Checksum(0),
            rank: *rank,
            step: *step,
        });
        Manifest {
            commit: String::new(),
            run: String::new(),
            incarnation: 1,
            step: 30,
            created_ms: 0,
            world_size: 4,
            parents: vec![10, 20],
            shards: shards.collect(),
            tensors,
            extras: Vec::new(),
        }
    }

    /// Of bytes; slices by shard, offsets and lengths.
    fn tensor(kind: SliceKind, shape: &[u64], slices: &[(u32, &[u64], &[u64])]) -> Tensor {
        let slices = slices.iter().map(|(shard, offsets, lengths)| Slice {
            kind,
            offsets: offsets.to_vec(),
            lengths: lengths.to_vec(),
            shard: *shard,
            start: 4096,
            end: 4096 + lengths.iter().product::<u64>(),
            crc32c: Checksum(0),
            blake3: Identity::of(b""),
        });
        Tensor { name: "t".into(), dtype: "uint8".into(), shape: shape.to_vec(), slices: slices.collect() }
    }

    #[track_caller]
    fn check(shards: &[(u32, u64)], tensor: Tensor, ranks: &[u32], dimensions: &[usize]) -> Place {
        let found = summary(&manifest(shards, vec![tensor])).tensors.remove(0);
        assert_eq!((found.ranks.as_slice(), found.dimensions.as_slice()), (ranks, dimensions));
        found
    }

    #[test]
    fn what_divides_a_tensor_is_told_from_what_ranks_hold_of_it() {
        let four = [(0, 30), (1, 30), (2, 30), (3, 30)];
        let boxes = |shape: &[u64], slices: &[(u32, &[u64], &[u64])]| tensor(SliceKind::Box, shape, slices);
        // One rank's slices are no cut.
        check(&four, boxes(&[4, 2], &[(2, &[0, 0], &[3, 2]), (2, &[3, 0], &[1, 2])]), &[2], &[]);
        check(&four, boxes(&[], &[(1, &[], &[])]), &[1], &[]);
        check(&four, boxes(&[0, 3], &[]), &[], &[]);
        let rows: [(u32, &[u64], &[u64]); 3] =
            [(3, &[2, 0], &[2, 2]), (0, &[0, 0], &[1, 2]), (0, &[1, 0], &[1, 2])];
        assert_eq!(check(&four, boxes(&[4, 2], &rows), &[0, 3], &[0]).bytes, 8);
        check(&four, boxes(&[4, 2], &[(0, &[0, 0], &[4, 1]), (1, &[0, 1], &[4, 1])]), &[0, 1], &[1]);
        let corner = |shard, at: &'static [u64]| (shard, at, [1u64, 1].as_slice());
        let quarters = [corner(0, &[0, 0]), corner(1, &[0, 1]), corner(2, &[1, 0]), corner(3, &[1, 1])];
        check(&four, boxes(&[2, 2], &quarters), &[0, 1, 2, 3], &[0, 1]);
        let chequered = [corner(0, &[0, 0]), corner(1, &[0, 1]), corner(1, &[1, 0]), corner(0, &[1, 1])];
        check(&four, boxes(&[2, 2], &chequered), &[0, 1], &[0, 1]);
        let flat = tensor(SliceKind::Flat, &[4, 2], &[(0, &[0], &[3]), (1, &[3], &[5])]);
        assert_eq!(check(&four, flat, &[0, 1], &[]).kind, Some(SliceKind::Flat));
    }

    #[test]
    fn bytes_are_counted_by_rank_and_step() {
        let shards = [(0, 30), (1, 30), (1, 20), (5, 10), (2, 30)];
        let slices: [(u32, &[u64], &[u64]); 4] =
            [(0, &[0], &[10]), (1, &[10], &[20]), (2, &[30], &[3]), (3, &[33], &[7])];
        let delta = tensor(SliceKind::Flat, &[40], &slices);
        let own = tensor(SliceKind::Flat, &[5], &[(0, &[0], &[5])]);
        let found = summary(&manifest(&shards, vec![delta, own]));
        let earlier = |step, bytes| Earlier { step, bytes };
        assert_eq!(found.tensors[0].earlier, [earlier(10, 7), earlier(20, 3)]);
        assert_eq!((found.tensors[1].earlier.len(), found.tensors[1].bytes), (0, 5));
        let bytes = |rank, stored, earlier| RankBytes { rank, stored, earlier };
        let expected = [bytes(0, 15, 0), bytes(1, 20, 3), bytes(2, 0, 0), bytes(5, 0, 7)];
        assert_eq!(found.ranks, expected);
    }
}
