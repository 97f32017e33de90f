//! What a slot holds once it is sealed, and whose it is.

use forebay_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::checksum::checksum;
use crate::catalog::{Round, merge};
use crate::manifest::{Checksum, Extra, Manifest, Shard, ShardKey, Tensor};

/// A snapshot that is whole in its slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// The trainer's number for it, ascending.
    pub save: u64,
    /// Which try of it, where several ranks save together; seals of former versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<Round>,
    /// Which slot of its arena.
    pub slot: usize,
    /// Bytes of the shard.
    pub size: u64,
    /// Bytes of it before the first tensor.
    pub header: u64,
    /// CRC-32C of those.
    pub header_crc32c: Checksum,
    /// The step.
    pub step: u64,
    /// Milliseconds since 1970 by the trainer's clock.
    pub created_ms: u64,
    /// The tensors, all in shard 0.
    pub tensors: Vec<Tensor>,
    /// Everything else.
    pub extras: Vec<Extra>,
}

#[cfg(test)]
impl Seal {
    /// That of a shard with a header of so many bytes, in the first slot of the first arena.
    pub(crate) fn of_test(save: u64, step: u64, shard: &[u8], header: usize, tensors: Vec<Tensor>) -> Self {
        let header_crc32c = Checksum(forebay_core::crc32c(&shard[..header]));
        let (size, header, extras) = (shard.len() as u64, header as u64, Vec::new());
        let (round, slot, created_ms) = (None, 0, 0);
        Self { save, round, slot, size, header, header_crc32c, step, created_ms, tensors, extras }
    }
}

impl Seal {
    /// Whether a shard, or more than its header, begins with the header that was sealed.
    pub(crate) fn has_header(&self, shard: &[u8]) -> bool {
        let header = usize::try_from(self.header).ok().and_then(|header| shard.get(..header));
        header.is_some_and(|header| forebay_core::crc32c(header) == self.header_crc32c.0)
    }
}

/// What a start is called in names, by its nonce.
pub(crate) fn attempt_of(start: &str) -> &str {
    start.get(..8).unwrap_or_default()
}

/// Names a sealed step: a step of one start of the run.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeldStep {
    /// The start's nonce.
    pub start: String,
    /// The step.
    pub step: u64,
}

/// A sealed snapshot and whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The nonce of the start that saved it.
    pub start: String,
    /// Which rank's part of the step it is.
    pub rank: u32,
    /// Ranks that saved together.
    pub world_size: u32,
    /// The snapshot.
    pub seal: Seal,
    /// CRC-32C of all that, taken by the trainer as it sealed, and never again; seals of former versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32c: Option<Checksum>,
}

impl Held {
    /// What was sealed just now: from here on a change is found.
    pub(crate) fn new(start: String, rank: u32, world_size: u32, seal: Seal) -> Self {
        let mut held = Self { start, rank, world_size, seal, crc32c: None };
        held.crc32c = Some(checksum(&held));
        held
    }

    /// As if it had been sealed as it is now.
    pub(crate) fn sealed_again(self) -> Self {
        Self::new(self.start, self.rank, self.world_size, self.seal)
    }

    /// That it is what was sealed.
    ///
    /// # Errors
    /// `Corrupt` when it is not, or nobody can tell.
    pub(crate) fn expect_sound(&self) -> Result<()> {
        let (step, rank) = (self.seal.step, self.rank);
        let fact = match self.crc32c {
            Some(sealed) if sealed == checksum(self) => return Ok(()),
            Some(_) => "changed after it was sealed",
            None => "has no checksum: another version of Forebay sealed it",
        };
        Err(Error::corrupt(format!("step {step}: what is said of rank {rank}'s part {fact}")))
    }

    /// What it is called.
    pub fn name(&self) -> HeldStep {
        HeldStep { start: self.start.clone(), step: self.seal.step }
    }

    /// What the shard is called where only this host knows it: which number the start has in the bucket is not said.
    pub(crate) fn key(&self) -> ShardKey {
        let (attempt, layout) = (attempt_of(&self.start).to_owned(), "0".repeat(8));
        let Seal { step, save, .. } = self.seal;
        ShardKey { step, incarnation: 1, attempt, rank: self.rank, save, layout }
    }

    /// As its index in the bucket would be.
    fn into_index(self) -> Manifest {
        let key = self.key().object().as_str().to_owned();
        let Held { start, rank, world_size, seal, crc32c: _ } = self;
        let Seal { step, size, header, created_ms, tensors, extras, .. } = seal;
        let shard = Shard { key, size, header, crc32c: Checksum(0), rank, step };
        Manifest {
            commit: start.clone(),
            run: start,
            incarnation: 1,
            step,
            created_ms,
            world_size,
            parents: Vec::new(),
            shards: vec![shard],
            tensors,
            extras,
        }
    }
}

/// What a manifest of a step would say of the `parts` that its ranks sealed, given in their order. Of slices only the
/// checksums are known, and every byte that is read has one.
///
/// # Errors
/// `Corrupt` when the parts are not those of one save, or together are no checkpoint.
pub fn manifest_of(parts: Vec<Held>) -> Result<Manifest> {
    let Some(first) = parts.first() else { return Err(Error::bug("a step of no rank")) };
    let save = |part: &Held| (part.name(), part.seal.round, part.world_size);
    let (of_first, step) = (save(first), first.seal.step);
    let belongs = |(rank, part): (u32, &Held)| save(part) == of_first && part.rank == rank;
    if parts.len() != first.world_size as usize || !(0..).zip(&parts).all(belongs) {
        return Err(Error::corrupt(format!("step {step}: what is held is not one save's")));
    }
    let indexes = parts.into_iter().map(Held::into_index).collect();
    merge(indexes).map_err(|error| Error::corrupt(error.to_string()))
}
