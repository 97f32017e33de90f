//! What several ranks of a job want of a step is read once between them.
//!
//! Each rank says what it wants, and computes the same plan from what all said (`shares`). A slice that one rank wants is read
//! by that rank into place. A slice that several want, be it the same elements or other columns of the same rows, is read and
//! checked by one of them, into memory that it lends to the others of its host, and goes from there to one rank of each other
//! host (`relay`), which checks it and lends it as well. That is done in rounds (`rounds`): in each, every rank fills one of its
//! buffers, the ranks of a host hear that all of them did, and each copies what it wants out of the buffers of its host.
//!
//! So it goes with what lies in the memory of hosts, too, but that a host's own ranks read what is there by themselves.
//!
//! Who meets whom, and how memory is lent, is the caller's.

use std::collections::HashSet;

use forebay_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::source::Source;
use super::through::{self, Through};
use super::{Shards, SliceId, Target, read_from};
use crate::manifest::{Manifest, SliceKind};
use crate::region::Region;

mod relay;
mod rounds;
mod shares;

pub use relay::{Address, Links, Peers};
pub use rounds::{Filled, Lent, Meet, Places};
pub use shares::Origin;
use shares::{Placed, Shares};

/// Bytes of a buffer, which a rank fills in a round, unless a single slice has more.
const BUFFER: u64 = 16 << 20;
/// How many buffers a rank has at most, which bounds how far it reads ahead; one is filled while another is copied out of, so that
/// it is two at least.
const MOST_BUFFERS: u64 = 4;
/// What a buffer's bytes are a multiple of, so that each can be mapped by itself.
const ALIGNMENT: u64 = 64 << 10;

/// A part of a tensor that a rank wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// Which tensor of the manifest, from 0.
    pub tensor: usize,
    /// Which part of it.
    pub region: Region,
}

/// What a rank wants, as it says it to the others: of each wish the number of the tensor, and of its box the offsets and the lengths. A
/// thousand ranks that want a part each of thousands of tensors are told in some megabytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wishes(Vec<u64>);

impl Wishes {
    /// Those for boxes.
    ///
    /// # Errors
    /// `Invalid` for a flat range.
    pub fn of(wishes: &[Wish]) -> Result<Self> {
        let mut numbers = Vec::new();
        for Wish { tensor, region } in wishes {
            if region.kind != SliceKind::Box {
                return Err(Error::invalid(format!("tensor {tensor} is wanted by a flat range")));
            }
            numbers.push(*tensor as u64);
            numbers.extend(region.offsets.iter().chain(&region.lengths));
        }
        Ok(Self(numbers))
    }

    /// Tensor and box of each; `None` at what is no part of a tensor of the step, and ends them.
    fn each<'a>(&'a self, manifest: &'a Manifest) -> impl Iterator<Item = Option<(usize, &'a [u64])>> {
        let mut left = &self.0[..];
        std::iter::from_fn(move || {
            let (tensor, rest) = left.split_first()?;
            let tensor = usize::try_from(*tensor).unwrap_or(usize::MAX);
            let shape = manifest.tensors.get(tensor).map(|tensor| &tensor.shape);
            let found = shape.and_then(|shape| {
                let (place, rest) = rest.split_at_checked(2 * shape.len())?;
                left = rest;
                Region::boxed(place).fits(shape).then_some((tensor, place))
            });
            if found.is_none() {
                left = &[];
            }
            Some(found)
        })
    }
}

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
    /// Of each of them, of each round: what is in the buffer that it fills.
    placed: Vec<Vec<Vec<Placed>>>,
    rounds: usize,
    /// Bytes of one.
    buffer: u64,
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
    pub fn new(manifest: &Manifest, wishes: &[Wishes], reader: Reader<'_>) -> Result<Self> {
        Self::in_buffers_of(BUFFER, manifest, wishes, reader)
    }

    /// As [`Self::new`], with that many bytes in place of [`BUFFER`].
    pub(super) fn in_buffers_of(
        buffer: u64,
        manifest: &Manifest,
        wishes: &[Wishes],
        Reader { rank, hosts, origin }: Reader<'_>,
    ) -> Result<Self> {
        if rank >= wishes.len() || wishes.len() != hosts.len() {
            return Err(Error::invalid(format!("rank {rank} of {}, on {} hosts", wishes.len(), hosts.len())));
        }
        let Shares { mut placed, rounds, buffer, shared } =
            Shares::new(manifest, wishes, hosts, &origin, buffer)?;
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
        Ok(Self { own, near, placed, rounds, buffer, shared, peers, is_in_store })
    }

    /// How often the ranks of a host meet.
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

    /// Bytes of each of the buffers that a rank lends.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer.next_multiple_of(ALIGNMENT) as usize
    }

    /// How many there are: fewer where slices are large, so that they take no more memory than two of these.
    pub fn buffers(&self) -> usize {
        let fitting = MOST_BUFFERS * BUFFER / self.buffer.max(1);
        (fitting.min(MOST_BUFFERS) as usize).min(self.rounds).max(2)
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
