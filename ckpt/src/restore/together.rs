//! What several ranks of a job want of a step is read once between them.
//!
//! Each rank says what it wants, and computes the same plan from what all said (`shares`). A slice that one rank wants is read
//! by that rank into place. A slice that several want, be it the same elements or other columns of the same rows, is read and
//! checked by one of them, into memory that it lends to the others of its host, and goes from there to one rank of each other
//! host (`relay`), which checks it and lends it as well; in rounds: in each, every rank fills one half of its memory, all hear
//! that all did, and each copies what it wants out of the halves of its host. Halves take turns, so that one meeting a round is
//! enough: a half is filled again only after a meeting before which all had copied it.
//!
//! So it goes with what lies in the memory of hosts, too, but that a host's own ranks read what is there by themselves.
//!
//! Who meets whom, and how memory is lent, is the caller's.

use std::collections::{BTreeSet, HashSet};

use forebay_core::{Error, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::source::{Source, request_bytes};
use super::through::{self, Give, Through};
use super::{
    Part, Segment, Shards, SliceId, Target, bytes_of, check_slices, differing, plan, read_all, read_from,
    scatter,
};
use crate::manifest::{Manifest, Slice, Tensor};
use crate::region::Region;

mod relay;
mod shares;

pub use relay::{Address, Links, Peers};
use relay::{Held, Read, pass};
pub use shares::Origin;
use shares::{Placed, Shares};

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

/// A slice, by its number in its tensor, and its bytes in a rank's half.
type Lent<'a> = (usize, &'a [u8]);

/// A rank among those of its job, and whence they have the step.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    /// This rank.
    pub rank: usize,
    /// The host that each rank is on, by a number.
    pub hosts: &'a [usize],
    /// Where the bytes are.
    pub origin: Origin,
}

/// Who reads what, as one of the ranks sees it.
#[derive(Debug)]
pub struct Together {
    /// Which of `near` this one is.
    own: usize,
    /// The ranks of this host, ascending.
    near: Vec<usize>,
    /// Of each of them, of each round: what is in its half.
    placed: Vec<Vec<Vec<Placed>>>,
    rounds: usize,
    half: u64,
    /// What this rank takes out of lent memory.
    shared: HashSet<SliceId>,
    peers: Peers,
    /// Whether each rank can read what another one does.
    is_in_store: bool,
}

impl Together {
    /// The plan, from what each rank wants.
    ///
    /// # Errors
    /// `Invalid` when a wish is no part of a tensor of the step.
    pub fn new(manifest: &Manifest, wishes: &[Vec<Wish>], reader: Reader<'_>) -> Result<Self> {
        Self::in_halves_of(HALF, manifest, wishes, reader)
    }

    /// As [`Self::new`], with that many bytes of a round in place of [`HALF`].
    pub(super) fn in_halves_of(
        half: u64,
        manifest: &Manifest,
        wishes: &[Vec<Wish>],
        Reader { rank, hosts, origin }: Reader<'_>,
    ) -> Result<Self> {
        if rank >= wishes.len() || wishes.len() != hosts.len() {
            return Err(Error::invalid(format!("rank {rank} of {}, on {} hosts", wishes.len(), hosts.len())));
        }
        let Shares { mut placed, rounds, half, shared } =
            Shares::new(manifest, wishes, hosts, &origin, half)?;
        let host = hosts[rank];
        let near: Vec<usize> = (0..hosts.len()).filter(|rank| hosts[*rank] == host).collect();
        let own = near.iter().position(|other| *other == rank).unwrap_or(0);
        let placed: Vec<_> = near.iter().map(|rank| std::mem::take(&mut placed[*rank])).collect();
        let all = placed[own].iter().flatten();
        let peers = Peers {
            from: all.clone().filter_map(|placed| placed.from).collect(),
            to: all.filter_map(|placed| placed.to).collect(),
        };
        let is_elsewhere =
            |(slice, source): (SliceId, Option<usize>)| (source != Some(host)).then_some(slice);
        let shared = shared.into_iter().filter_map(is_elsewhere).collect();
        let is_in_store = origin == Origin::Store;
        Ok(Self { own, near, placed, rounds, half, shared, peers, is_in_store })
    }

    /// How often the ranks meet.
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Whose plan it is.
    pub fn rank(&self) -> usize {
        self.near[self.own]
    }

    /// The ranks of other hosts that this one has bytes from, and those that it sends bytes to.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Bytes of each of the two halves that a rank lends.
    pub fn half_bytes(&self) -> usize {
        self.half.next_multiple_of(ALIGNMENT) as usize
    }

    /// Fills this rank's half with its slices of a round, each checked: it reads them, or has them from another host's rank by
    /// `links`, and passes them on.
    ///
    /// # Errors
    /// As [`super::read_tensors`], of what it is to read.
    pub fn read(
        &self,
        (shards, manifest): (&Shards<'_>, &Manifest),
        round: usize,
        half: &mut [u8],
        threads: usize,
        links: &Links,
    ) -> Result<Filled> {
        let reading = Reading::new(shards, manifest, threads)?;
        let (own, coming) = self.parts_of(&reading, round, half);
        let ids: BTreeSet<SliceId> = coming.iter().map(|held| held.placed.slice).collect();
        let read = |segments: Vec<Segment<'_>>| reading.read(segments);
        let passed = pass(
            links,
            round,
            (own, coming),
            |segments| {
                if round == 0 {
                    self.check_shards(&reading)?;
                }
                reading.read_checked(segments)
            },
            self.is_in_store.then_some(&read as Read<'_>),
        )?;
        let mut filled = Filled { is_whole: passed.is_whole, lost: passed.lost };
        if filled.is_whole {
            let damaged: HashSet<SliceId> = differing(&reading.tensors, ids, passed.parts).collect();
            let (_, coming) = self.parts_of(&reading, round, half);
            let mut again: Vec<_> =
                coming.into_iter().filter(|held| damaged.contains(&held.placed.slice)).collect();
            filled.lost.extend(again.iter().filter_map(|held| held.placed.from));
            if self.is_in_store {
                reading.read_checked(again.iter_mut().map(Held::segment).collect())?;
            } else {
                filled.is_whole = again.is_empty();
            }
        }
        Ok(filled)
    }

    /// That the shards are there, and whole, of which this rank reads.
    fn check_shards(&self, reading: &Reading<'_>) -> Result<()> {
        let all = self.placed[self.own].iter().flatten().filter(|placed| placed.from.is_none());
        let shards = all.map(|placed| reading.slice(placed.slice).shard).collect();
        reading.source.check(reading.manifest, shards)
    }

    /// A half as slices: those that this rank reads, and those that come from others.
    fn parts_of<'a>(
        &self,
        reading: &Reading<'a>,
        round: usize,
        half: &'a mut [u8],
    ) -> (Vec<Held<'a>>, Vec<Held<'a>>) {
        let (mut rest, mut at) = (half, 0);
        let held = self.placed(round, self.own).iter().map(|placed| {
            let slice = reading.slice(placed.slice);
            let (_, after) = std::mem::take(&mut rest).split_at_mut(placed.at - at);
            let (memory, after) = after.split_at_mut(slice.len() as usize);
            (rest, at) = (after, placed.at + memory.len());
            Held { placed: *placed, slice, memory }
        });
        held.partition(|held| held.placed.from.is_none())
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

    /// Reads what no other rank wants, or is in this host's memory, into place.
    ///
    /// # Errors
    /// As [`super::read_tensors`].
    pub fn read_rest(
        &self,
        (shards, manifest): (&Shards<'_>, &Manifest),
        targets: Vec<Target<'_>>,
        threads: usize,
    ) -> Result<()> {
        read_from(&source_of(shards)?, manifest, targets, &self.shared, threads)
    }

    /// The same, as [`super::read_through`].
    ///
    /// # Errors
    /// As [`super::read_through`].
    pub fn read_rest_through(
        &self,
        (shards, manifest): (&Shards<'_>, &Manifest),
        wishes: &[Wish],
        through: Through<'_>,
        threads: usize,
    ) -> Result<()> {
        through::read(&source_of(shards)?, manifest, (wishes, &self.shared), through, threads)
    }

    /// What this rank may take out of its host's halves of each tensor: slices and their bytes.
    fn lent<'a>(&self, manifest: &Manifest, round: usize, halves: &[&'a [u8]]) -> Result<Vec<Vec<Lent<'a>>>> {
        let mut of_tensors: Vec<Vec<Lent<'a>>> = vec![Vec::new(); manifest.tensors.len()];
        for (near, half) in halves.iter().enumerate().take(self.near.len()) {
            let taken = self.placed(round, near).iter().filter(|placed| self.shared.contains(&placed.slice));
            for Placed { slice, at, .. } in taken {
                let length = manifest.tensors[slice.0].slices[slice.1].len() as usize;
                let bytes = half.get(*at..at + length);
                let short = || Error::bug("lent memory that is shorter than what is in it");
                of_tensors[slice.0].push((slice.1, bytes.ok_or_else(short)?));
            }
        }
        Ok(of_tensors)
    }

    /// What is in the half of one of this host's ranks.
    fn placed(&self, round: usize, near: usize) -> &[Placed] {
        self.placed[near].get(round).map_or(&[], Vec::as_slice)
    }
}

/// What came of filling a half.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filled {
    /// Whether all is in it. Else another rank tells why, or it was in another host's memory alone and did not come from there.
    pub is_whole: bool,
    /// The ranks of other hosts of which something did not come, or came damaged.
    pub lost: BTreeSet<usize>,
}

/// What is read of.
struct Reading<'a> {
    source: Source<'a>,
    manifest: &'a Manifest,
    tensors: Vec<&'a Tensor>,
    threads: usize,
}

impl<'a> Reading<'a> {
    fn new(shards: &'a Shards<'_>, manifest: &'a Manifest, threads: usize) -> Result<Self> {
        let tensors = manifest.tensors.iter().collect();
        Ok(Self { source: source_of(shards)?, manifest, tensors, threads })
    }

    fn slice(&self, (tensor, slice): SliceId) -> &'a Slice {
        &self.tensors[tensor].slices[slice]
    }

    fn read(&self, segments: Vec<Segment<'_>>) -> Result<Vec<Part>> {
        let at_once = self.source.at_once();
        let most = request_bytes(bytes_of(&segments), at_once);
        read_all(&self.source, self.manifest, plan(segments, most), (self.threads, at_once))
    }

    fn read_checked(&self, segments: Vec<Segment<'_>>) -> Result<()> {
        let named = segments.iter().map(|segment| segment.slice).collect();
        let parts = self.read(segments)?;
        check_slices(&self.source, self.manifest, &self.tensors, named, parts)
    }
}

fn source_of<'a>(shards: &'a Shards<'_>) -> Result<Source<'a>> {
    match shards {
        Shards::Store(runtime, bucket) => Ok(Source::Store(runtime, bucket)),
        Shards::Held(shards) => Ok(Source::Held(shards)),
        Shards::Local(..) => Err(Error::bug("ranks read together what lies on a host's disk")),
    }
}

#[cfg(test)]
mod tests;
