//! The step that a rank's next save may refer to: the one that this agent stored last, or one that the trainer named,
//! since it restored it or an agent before this one stored it.
//!
//! A step out of the bucket was stored by whatever ranks there were: slices are taken by tensor and place, whoever wrote
//! them. Of a file that slices of several ranks lie in, each answers for its share.

use std::collections::{HashMap, HashSet};

use forebay_core::{ErrorKind, Result};
use forebay_io::object::Bucket;

use super::{Origin, Seal};
use crate::catalog::{StepKey, list_steps, load_manifest};
use crate::manifest::{Manifest, Shard, Slice, SliceKind, Tensor};

/// Which part of a tensor, by its name, a slice is.
pub(super) type Place<'a> = (&'a str, Part<'a>);

/// A part of a tensor, the same whichever kind of slice holds it: a rank alone saves boxes of what several save as ranges.
#[derive(PartialEq, Eq, Hash)]
pub(super) enum Part<'a> {
    /// Elements that follow one another: the first, and how many.
    Run(u64, u64),
    /// Any other box: offsets and lengths.
    Box(&'a [u64], &'a [u64]),
}

/// The part of a tensor, by its name and shape, that a slice is.
pub(super) fn place<'a>(name: &'a str, shape: &[u64], slice: &'a Slice) -> Place<'a> {
    let Slice { offsets, lengths, .. } = slice;
    let shape = if slice.kind == SliceKind::Box { shape } else { &[u64::MAX] };
    let (mut first, mut stride, mut is_full) = (0u64, 1u64, true);
    for ((size, offset), length) in shape.iter().zip(offsets).zip(lengths).rev() {
        if !is_full && *length != 1 {
            return (name, Part::Box(offsets, lengths));
        }
        first = offset.saturating_mul(stride).saturating_add(first);
        stride = size.saturating_mul(stride);
        is_full = is_full && length == size;
    }
    (name, Part::Run(first, lengths.iter().fold(1, |all, length| all.saturating_mul(*length))))
}

/// A step of which what did not change is not stored again.
pub(super) struct Base {
    /// Its name in the bucket.
    pub(super) key: StepKey,
    /// What a rank has of it.
    pub(super) manifest: Manifest,
    /// Bytes of a shard that this rank answers for, where others have slices in it as well.
    shares: HashMap<String, u64>,
}

impl Base {
    /// The newest step that the start of `origin` committed, up to the one named there, as far as `seal` has the same
    /// places; nothing where it is gone, or damaged.
    pub(super) async fn find(bucket: &Bucket, origin: &Origin, seal: &Seal) -> Result<Option<Self>> {
        let steps = list_steps(bucket).await?;
        let is_of = |key: &StepKey| key.attempt == origin.attempt && key.step <= origin.step;
        let Some(info) = steps.into_iter().rfind(|info| is_of(&info.key)) else { return Ok(None) };
        match load_manifest(bucket, &info.key).await {
            Ok(manifest) => Ok(Some(Self::of_rank(info.key, manifest, seal))),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                tracing::warn!(step = info.key.step, %error, "nothing of an earlier step is used again");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// What a rank that saves `seal` has of a step.
    fn of_rank(key: StepKey, mut manifest: Manifest, seal: &Seal) -> Self {
        let sealed = seal.tensors.iter();
        let places: HashSet<_> = sealed
            .flat_map(|Tensor { name, shape, slices, .. }| {
                slices.iter().map(|slice| place(name, shape, slice))
            })
            .collect();
        let mut bytes = vec![(0, 0); manifest.shards.len()];
        for Tensor { name, shape, slices, .. } in &mut manifest.tensors {
            slices.retain(|slice| {
                let is_own = places.contains(&place(name, shape, slice));
                let (own, all) = &mut bytes[slice.shard as usize];
                *own += if is_own { slice.len() } else { 0 };
                *all += slice.len();
                is_own
            });
        }
        manifest.tensors.retain(|tensor| !tensor.slices.is_empty());
        manifest.extras.clear();
        let share = |(shard, (own, all)): (&Shard, (u64, u64))| {
            let data = u128::from(shard.size - shard.header);
            (shard.key.clone(), (data * u128::from(own)).div_ceil(u128::from(all.max(1))) as u64)
        };
        let shares = manifest.shards.iter().zip(bytes).map(share).collect();
        Self { key, manifest, shares }
    }

    /// What `part`, which was stored beside this one or beside nothing, leaves to the next save.
    pub(super) fn after(earlier: Option<Self>, key: StepKey, part: Manifest) -> Self {
        let mut shares = earlier.map(|earlier| earlier.shares).unwrap_or_default();
        let shards: HashSet<_> = part.shards.iter().map(|shard| &shard.key).collect();
        shares.retain(|shard, _| shards.contains(shard));
        Self { key, manifest: Manifest { extras: Vec::new(), ..part }, shares }
    }

    /// Bytes that stay in the bucket where this rank refers to a shard.
    pub(super) fn share_of(&self, shard: &Shard) -> u64 {
        self.shares.get(&shard.key).copied().unwrap_or(shard.size - shard.header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Checksum, Identity};

    #[test]
    fn a_part_is_the_same_whichever_slice_holds_it() {
        let check = |shape: &[u64], offsets: &[u64], lengths: &[u64], expected: Option<(u64, u64)>| {
            let (crc32c, blake3) = (Checksum(0), Identity::UNKNOWN);
            let (offsets, lengths) = (offsets.to_vec(), lengths.to_vec());
            let slice = |kind, offsets, lengths| Slice {
                kind,
                offsets,
                lengths,
                shard: 0,
                start: 0,
                end: 0,
                crc32c,
                blake3,
            };
            let boxed = slice(SliceKind::Box, offsets, lengths);
            let (_, found) = place("t", shape, &boxed);
            match expected {
                None => assert!(matches!(found, Part::Box(..)), "{boxed:?}"),
                Some((first, count)) => {
                    let flat = slice(SliceKind::Flat, vec![first], vec![count]);
                    assert!(
                        found == place("t", shape, &flat).1 && matches!(found, Part::Run(..)),
                        "{boxed:?}"
                    );
                }
            }
        };
        check(&[], &[], &[], Some((0, 1)));
        check(&[7], &[2], &[3], Some((2, 3)));
        check(&[4, 5], &[1, 0], &[2, 5], Some((5, 10)));
        check(&[4, 5], &[3, 1], &[1, 3], Some((16, 3)));
        check(&[2, 3, 5], &[1, 1, 0], &[1, 2, 5], Some((20, 10)));
        check(&[2, 3, 5], &[1, 2, 1], &[1, 1, 4], Some((26, 4)));
        check(&[4, 1, 5], &[1, 0, 0], &[2, 1, 5], Some((5, 10)));
        // Columns, and planes of which only some rows are there.
        check(&[4, 5], &[0, 1], &[2, 3], None);
        check(&[2, 3, 5], &[0, 1, 0], &[2, 2, 5], None);
    }
}
