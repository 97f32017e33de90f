//! What several ranks of a job want of a step is read once between them.
//!
//! Each rank says what it wants, and computes the same plan from what all said. A slice that one rank wants is read by
//! that rank into place. A slice that several want, be it the same elements or other columns of the same rows, is read
//! and checked by one of them, into memory that it lends to the others, in rounds: in each, every rank fills one half of
//! its memory, all hear that all did, and each copies what it wants out of everyone's half. Halves take turns, so that
//! one meeting a round is enough: a half is filled again only after a meeting before which all had copied it.
//!
//! Who meets whom, and how memory is lent, is the caller's.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use forebay_core::{Error, Result};
use forebay_io::object::Bucket;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::source::{Source, request_bytes};
use super::through::{self, Give, Through};
use super::{Segment, SliceId, Target, bytes_of, check_slices, plan, read_all, read_from, scatter};
use crate::manifest::{Manifest, Tensor};
use crate::region::Region;

/// Bytes that a rank reads in a round at most, unless a single slice has more.
const HALF: u64 = 32 << 20;
/// What the lent memory's halves are multiples of, so that each can be mapped by itself.
const ALIGNMENT: u64 = 64 << 10;

/// A part of a tensor that a rank wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// Which tensor of the manifest, from 0.
    pub tensor: usize,
    /// Which part of it.
    pub region: Region,
}

/// A slice and where it lies in its reader's half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Placed {
    /// Tensor and slice.
    slice: SliceId,
    at: usize,
}

/// A slice, by its number in its tensor, and its bytes in a rank's half.
type Lent<'a> = (usize, &'a [u8]);

/// Who reads what, as one of the ranks sees it.
#[derive(Debug)]
pub struct Together {
    rank: usize,
    /// Of each rank, of each of its rounds: what it reads.
    readers: Vec<Vec<Vec<Placed>>>,
    shared: HashSet<SliceId>,
    half: u64,
}

impl Together {
    /// The plan, from what each rank wants.
    ///
    /// # Errors
    /// `Invalid` when a wish is no part of a tensor of the step.
    pub fn new(manifest: &Manifest, wishes: &[Vec<Wish>], rank: usize) -> Result<Self> {
        Self::in_halves_of(HALF, manifest, wishes, rank)
    }

    /// As [`Self::new`], with that many bytes of a round in place of [`HALF`].
    pub(super) fn in_halves_of(
        half: u64,
        manifest: &Manifest,
        wishes: &[Vec<Wish>],
        rank: usize,
    ) -> Result<Self> {
        if rank >= wishes.len() {
            return Err(Error::invalid(format!("rank {rank} of {}", wishes.len())));
        }
        let mut of_tensors: Vec<Vec<(usize, &Region)>> = vec![Vec::new(); manifest.tensors.len()];
        for (rank, wishes) in wishes.iter().enumerate() {
            for Wish { tensor, region } in wishes {
                let fits = manifest.tensors.get(*tensor).is_some_and(|tensor| region.fits(&tensor.shape));
                if !fits {
                    return Err(Error::invalid(format!("rank {rank} wants what no tensor of the step has")));
                }
                of_tensors[*tensor].push((rank, region));
            }
        }
        let shared = wanted(manifest, &of_tensors);
        let readers = share_out(manifest, &shared, wishes.len());
        let bytes = |slice: &SliceId| manifest.tensors[slice.0].slices[slice.1].len();
        let largest = shared.values().flatten().map(bytes).max().unwrap_or(0);
        let most = readers.iter().map(|slices| slices.iter().map(bytes).sum()).max().unwrap_or(0);
        let half = largest.max(half.min(most));
        let readers = readers.iter().map(|slices| in_rounds(manifest, slices, half)).collect();
        Ok(Self { rank, readers, shared: shared.into_values().flatten().collect(), half })
    }

    /// How often the ranks meet.
    pub fn rounds(&self) -> usize {
        self.readers.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Bytes of each of the two halves that a rank lends.
    pub fn half_bytes(&self) -> usize {
        self.half.next_multiple_of(ALIGNMENT) as usize
    }

    /// Reads this rank's slices of a round into its half, each checked.
    ///
    /// # Errors
    /// As [`super::read_tensors`].
    pub fn read(
        &self,
        (runtime, bucket, manifest): (&Handle, &Bucket, &Manifest),
        round: usize,
        half: &mut [u8],
        threads: usize,
    ) -> Result<()> {
        let source = Source::Store(runtime, bucket);
        let tensors: Vec<&Tensor> = manifest.tensors.iter().collect();
        let slice_of = |placed: &Placed| &tensors[placed.slice.0].slices[placed.slice.1];
        if round == 0 {
            let all = self.readers[self.rank].iter().flatten();
            source.check(manifest, all.map(|placed| slice_of(placed).shard).collect())?;
        }
        let mut segments = Vec::new();
        let (mut rest, mut at) = (half, 0);
        for placed in self.placed(round, self.rank) {
            let slice = slice_of(placed);
            let (_, after) = rest.split_at_mut(placed.at - at);
            let (target, after) = after.split_at_mut(slice.len() as usize);
            at = placed.at + target.len();
            segments.push(Segment { shard: slice.shard, start: slice.start, slice: placed.slice, target });
            rest = after;
        }
        let named: BTreeSet<SliceId> = segments.iter().map(|segment| segment.slice).collect();
        let at_once = source.at_once();
        let most = request_bytes(bytes_of(&segments), at_once);
        let parts = read_all(&source, manifest, plan(segments, most), (threads, at_once))?;
        check_slices(&source, manifest, &tensors, named, parts)
    }

    /// Copies what the targets want of a round out of all ranks' halves.
    ///
    /// # Errors
    /// `Bug` when a half is too short.
    pub fn copy(
        &self,
        manifest: &Manifest,
        round: usize,
        halves: &[&[u8]],
        targets: Vec<Target<'_>>,
        threads: usize,
    ) -> Result<()> {
        let of_tensors = self.lent(manifest, round, halves)?;
        let queue = Mutex::new(targets.into_iter());
        let work = || {
            loop {
                let next = queue.lock().next();
                let Some(mut target) = next else { return Ok(()) };
                let tensor = &manifest.tensors[target.tensor];
                for (slice, bytes) in &of_tensors[target.tensor] {
                    scatter(tensor, &tensor.slices[*slice], bytes, &mut target)?;
                }
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads.max(1)).map(|_| scope.spawn(work)).collect();
            let own = work();
            let bug = |_| Err(Error::bug("a copying thread panicked"));
            others.into_iter().map(|thread| thread.join().unwrap_or_else(bug)).fold(own, Result::and)
        })
    }

    /// Gives away what the wishes take of a round out of all ranks' halves.
    ///
    /// # Errors
    /// `Bug` when a half is too short, and the first that giving away had.
    pub fn give(
        &self,
        manifest: &Manifest,
        round: usize,
        halves: &[&[u8]],
        wishes: &[Wish],
        give: &mut Give<'_>,
    ) -> Result<()> {
        let of_tensors = self.lent(manifest, round, halves)?;
        for (number, Wish { tensor, region }) in wishes.iter().enumerate() {
            let (found, tensor) = (&of_tensors[*tensor], &manifest.tensors[*tensor]);
            for (slice, bytes) in found {
                through::give_slice(tensor, &tensor.slices[*slice], (number, region), bytes, give)?;
            }
        }
        Ok(())
    }

    /// Reads what only this rank wants into place.
    ///
    /// # Errors
    /// As [`super::read_tensors`].
    pub fn read_rest(
        &self,
        (runtime, bucket, manifest): (&Handle, &Bucket, &Manifest),
        targets: Vec<Target<'_>>,
        threads: usize,
    ) -> Result<()> {
        read_from(&Source::Store(runtime, bucket), manifest, targets, &self.shared, threads)
    }

    /// As [`super::read_through`], what only this rank wants.
    ///
    /// # Errors
    /// As [`super::read_through`].
    pub fn read_rest_through(
        &self,
        (runtime, bucket, manifest): (&Handle, &Bucket, &Manifest),
        wishes: &[Wish],
        through: Through<'_>,
        threads: usize,
    ) -> Result<()> {
        let source = Source::Store(runtime, bucket);
        through::read(&source, manifest, (wishes, &self.shared), through, threads)
    }

    /// What lies in all ranks' halves of each tensor: slices and their bytes.
    fn lent<'a>(&self, manifest: &Manifest, round: usize, halves: &[&'a [u8]]) -> Result<Vec<Vec<Lent<'a>>>> {
        let mut of_tensors: Vec<Vec<Lent<'a>>> = vec![Vec::new(); manifest.tensors.len()];
        for (rank, half) in halves.iter().enumerate() {
            for Placed { slice, at } in self.placed(round, rank) {
                let length = manifest.tensors[slice.0].slices[slice.1].len() as usize;
                let bytes = half.get(*at..at + length);
                let short = || Error::bug("lent memory that is shorter than what is in it");
                of_tensors[slice.0].push((slice.1, bytes.ok_or_else(short)?));
            }
        }
        Ok(of_tensors)
    }

    fn placed(&self, round: usize, rank: usize) -> &[Placed] {
        self.readers[rank].get(round).map_or(&[], Vec::as_slice)
    }
}

/// The slices that several ranks want, by those ranks, as they lie in the shards.
fn wanted(
    manifest: &Manifest,
    of_tensors: &[Vec<(usize, &Region)>],
) -> BTreeMap<BTreeSet<usize>, Vec<SliceId>> {
    let mut shared: BTreeMap<BTreeSet<usize>, Vec<SliceId>> = BTreeMap::new();
    for (index, (tensor, wishes)) in manifest.tensors.iter().zip(of_tensors).enumerate() {
        for (number, slice) in tensor.slices.iter().enumerate().filter(|(_, slice)| !slice.is_empty()) {
            let region = Region::of(slice);
            let touching = wishes.iter().filter(|(_, wish)| region.touches(wish, &tensor.shape));
            let who: BTreeSet<usize> = touching.map(|(rank, _)| *rank).collect();
            if who.len() > 1 {
                shared.entry(who).or_default().push((index, number));
            }
        }
    }
    shared.values_mut().for_each(|slices| sort(manifest, slices));
    shared
}

/// Puts slices into the order in which they lie in the shards.
fn sort(manifest: &Manifest, slices: &mut [SliceId]) {
    slices.sort_by_key(|(tensor, slice)| {
        let slice = &manifest.tensors[*tensor].slices[*slice];
        (slice.shard, slice.start)
    });
}

/// Which of the shared slices each rank reads: of what the same ranks want, each an equal run as it lies in the shards.
fn share_out(
    manifest: &Manifest,
    shared: &BTreeMap<BTreeSet<usize>, Vec<SliceId>>,
    ranks: usize,
) -> Vec<Vec<SliceId>> {
    let bytes = |slice: &SliceId| manifest.tensors[slice.0].slices[slice.1].len();
    let mut readers = vec![Vec::new(); ranks];
    for (who, slices) in shared {
        let who: Vec<usize> = who.iter().copied().collect();
        let total: u64 = slices.iter().map(bytes).sum();
        let mut at = 0;
        for slice in slices {
            let middle = at + bytes(slice) / 2;
            // 128 bits, for a product of two sizes.
            let share = u128::from(middle) * who.len() as u128 / u128::from(total.max(1));
            readers[who[(share as usize).min(who.len() - 1)]].push(*slice);
            at += bytes(slice);
        }
    }
    readers.iter_mut().for_each(|slices| sort(manifest, slices));
    readers
}

/// A rank's slices, as they lie in the shards, in rounds of as many bytes as a half has.
fn in_rounds(manifest: &Manifest, slices: &[SliceId], half: u64) -> Vec<Vec<Placed>> {
    let slice_of = |slice: &SliceId| &manifest.tensors[slice.0].slices[slice.1];
    let mut rounds: Vec<Vec<Placed>> = Vec::new();
    let mut at = half;
    for slice in slices {
        let length = slice_of(slice).len();
        if at + length > half {
            rounds.push(Vec::new());
            at = 0;
        }
        if let Some(round) = rounds.last_mut() {
            round.push(Placed { slice: *slice, at: at as usize });
        }
        at += length;
    }
    rounds
}
