//! What must hold of every manifest, checked before one is written and after one is read.
//!
//! Shards are named as their step, start and rank have it and in no other way; slices lie inside their shard and do not share bytes; the
//! shards that a step wrote have no byte that belongs to nothing; every element of every tensor lies in exactly one
//! slice. A reader that passed these checks needs none of its own.

use std::collections::HashSet;

use forebay_core::Error;

use super::model::is_lower_hex;
use super::{Identity, Manifest, Shard, ShardKey, Slice, SliceKind, Tensor};
use crate::dtype::{Dtype, elements};

/// Dimensions of a tensor at most, as in torch.
const MAX_DIMENSIONS: usize = 64;
/// Slices of one tensor at most: twice the ranks of the largest jobs; bounds the check for overlaps.
pub(crate) const MAX_SLICES: usize = 16_384;

/// Ranks of one job at most: several times the largest. A reader goes over all of them, whoever says how many they are.
pub(crate) const MAX_RANKS: u32 = 65_536;

/// What is wrong with a manifest.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Longer than any manifest is.
    #[error("it has {bytes} bytes of text or more, which is more than a manifest may have")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Not the fixed head and tail: cut short, damaged, or another file.
    #[error("it does not begin and end as a manifest does")]
    Framing,
    /// Written by a later version.
    #[error("it has format version {0}, and this program reads versions 1 and 2")]
    Version(String),
    /// Damaged.
    #[error("its body hashes to {got}, but its head says {expected}")]
    Hash {
        /// What the head says.
        expected: String,
        /// What the body gives.
        got: Identity,
    },
    /// The hash is right, the JSON is not.
    #[error("its body is not as the format has it: {0}")]
    Body(serde_json::Error),
    /// A field of the manifest itself.
    #[error("{0}")]
    Field(String),
    /// A shard.
    #[error("shard `{key}`: {fact}")]
    Shard {
        /// Its key.
        key: String,
        /// What is wrong with it.
        fact: String,
    },
    /// A tensor.
    #[error("tensor `{name}`: {fact}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong with it.
        fact: String,
    },
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Error::corrupt(format!("the manifest is damaged: {fault}"))
    }
}

/// A check's outcome: the fact, if it fails.
type Checked = Result<(), String>;

fn require(holds: bool, fact: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(fact()) }
}

impl Manifest {
    /// Checks everything that this file's head promises.
    pub fn check(&self) -> Result<(), Fault> {
        self.check_all(true)
    }

    /// Checks that every slice was hashed, as it is in all that lies in a bucket.
    pub(super) fn check_identities(&self) -> Result<(), Fault> {
        let unknown = |tensor: &&Tensor| tensor.slices.iter().any(|slice| slice.blake3 == Identity::UNKNOWN);
        match self.tensors.iter().find(unknown) {
            None => Ok(()),
            Some(Tensor { name, .. }) => {
                Err(Fault::Tensor { name: name.clone(), fact: "a slice without an identity".into() })
            }
        }
    }

    /// Checks all but that every element is there: of one rank's part of a step.
    pub fn check_part(&self) -> Result<(), Fault> {
        self.check_all(false)
    }

    fn check_all(&self, is_whole: bool) -> Result<(), Fault> {
        self.check_fields().map_err(Fault::Field)?;
        for shard in &self.shards {
            let fault = |fact| Fault::Shard { key: shard.key.clone(), fact };
            self.check_shard(shard).map_err(fault)?;
        }
        for tensor in &self.tensors {
            let fault = |fact| Fault::Tensor { name: tensor.name.clone(), fact };
            self.check_tensor(tensor, is_whole).map_err(fault)?;
        }
        self.check_bytes()
    }

    fn check_fields(&self) -> Checked {
        for (field, value) in [("commit", &self.commit), ("run", &self.run)] {
            let fits = value.len() == 32 && is_lower_hex(value);
            require(fits, || format!("its {field} `{value}` is not 32 hex digits"))?;
        }
        require(self.incarnation > 0, || "its incarnation is 0".into())?;
        let world = self.world_size;
        require(world > 0, || "its world size is 0".into())?;
        require(world <= MAX_RANKS, || format!("its world size is {world}, more than {MAX_RANKS}"))?;
        let ascending = self.parents.is_sorted_by(|a, b| a < b) && !self.parents.contains(&self.step);
        require(ascending, || format!("its parents {:?} are not ascending other steps", self.parents))?;
        unique("shard", self.shards.iter().map(|shard| &shard.key))?;
        unique("tensor", self.tensors.iter().map(|tensor| &tensor.name))?;
        unique("extra", self.extras.iter().map(|extra| &extra.name))
    }

    fn check_shard(&self, shard: &Shard) -> Checked {
        let key = ShardKey::parse(&shard.key).ok_or("no shard has such a key")?;
        let is_own = shard.step == self.step;
        // Earlier starts may have had more ranks.
        let is_ours =
            if is_own { key.incarnation == self.incarnation } else { key.incarnation <= self.incarnation };
        require((key.step, key.rank) == (shard.step, shard.rank) && is_ours, || {
            "its key is another step's, start's or rank's".into()
        })?;
        let (rank, world) = (shard.rank, self.world_size);
        require(!is_own || rank < world, || format!("written by rank {rank} of {world}"))?;
        let (header, size) = (shard.header, shard.size);
        require(header >= 8 && header <= size, || format!("a header of {header} bytes in {size}"))?;
        let known = is_own || self.parents.contains(&shard.step);
        require(known, || format!("written by step {}, which is no parent", shard.step))
    }

    fn check_tensor(&self, tensor: &Tensor, is_whole: bool) -> Checked {
        let dtype = Dtype::named(&tensor.dtype).map_err(|error| error.to_string())?;
        let shape = &tensor.shape;
        require(shape.len() <= MAX_DIMENSIONS, || format!("{} dimensions", shape.len()))?;
        let all = dtype.bytes_of(shape).and_then(|_| elements(shape));
        let all = all.ok_or_else(|| format!("its shape {shape:?} does not fit 64 bits"))?;
        let count = tensor.slices.len();
        require(count <= MAX_SLICES, || format!("{count} slices, more than {MAX_SLICES}"))?;
        let mut covered = 0u64;
        for slice in &tensor.slices {
            covered = covered.saturating_add(self.check_slice(slice, shape, all, dtype)?);
        }
        let kinds_agree = tensor.slices.windows(2).all(|pair| pair[0].kind == pair[1].kind);
        require(kinds_agree, || "its slices are of two kinds".into())?;
        require(!is_whole || covered == all, || format!("its slices hold {covered} elements of {all}"))?;
        check_disjoint(&tensor.slices)
    }

    /// Checks one slice of a tensor with `all` elements; gives the elements it holds.
    fn check_slice(&self, slice: &Slice, shape: &[u64], all: u64, dtype: Dtype) -> Result<u64, String> {
        let Slice { offsets, lengths, start, end, .. } = slice;
        let flat_shape = [all];
        let bounds = if slice.kind == SliceKind::Box { shape } else { &flat_shape };
        let fits = offsets.len() == bounds.len()
            && lengths.len() == bounds.len()
            && (0..bounds.len())
                .all(|i| offsets[i].checked_add(lengths[i]).is_some_and(|end| end <= bounds[i]));
        require(fits, || format!("a slice at {offsets:?} of {lengths:?} lies outside {bounds:?}"))?;
        let shard = self.shards.get(slice.shard as usize);
        let shard =
            shard.ok_or_else(|| format!("a slice in shard {} of {}", slice.shard, self.shards.len()))?;
        let inside = shard.header <= *start && start <= end && *end <= shard.size;
        require(inside, || {
            format!("bytes {start}..{end} lie outside the shard's {}..{}", shard.header, shard.size)
        })?;
        let (bytes, held) = (dtype.bytes_of(lengths).unwrap_or(u64::MAX), slice.len());
        require(bytes == held, || format!("a slice of {lengths:?} has {held} bytes, not {bytes}"))?;
        Ok(elements(lengths).unwrap_or(u64::MAX))
    }

    /// No byte of a shard belongs to two slices, and none that this step wrote belongs to no slice.
    fn check_bytes(&self) -> Result<(), Fault> {
        let mut ranges: Vec<(u32, u64, u64)> = self
            .tensors
            .iter()
            .flat_map(|tensor| &tensor.slices)
            .filter(|slice| !slice.is_empty())
            .map(|slice| (slice.shard, slice.start, slice.end))
            .collect();
        ranges.sort_unstable();
        let mut ranges = ranges.into_iter().peekable();
        for (index, shard) in (0u32..).zip(&self.shards) {
            let fault = |fact| Fault::Shard { key: shard.key.clone(), fact };
            let own = shard.step == self.step;
            let mut at = shard.header;
            while let Some((_, start, end)) = ranges.next_if(|range| range.0 == index) {
                require(start >= at, || format!("two slices share byte {start}")).map_err(fault)?;
                require(!own || start == at, || format!("bytes {at}..{start} belong to nothing"))
                    .map_err(fault)?;
                at = end;
            }
            require(!own || at == shard.size, || format!("bytes {at}..{} belong to nothing", shard.size))
                .map_err(fault)?;
        }
        Ok(())
    }
}

fn unique<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> Checked {
    let mut seen = HashSet::new();
    for name in names {
        require(seen.insert(name), || format!("it names {what} `{name}` twice"))?;
    }
    Ok(())
}

/// Checks that no two slices share an element, by sweeping along the dimension that separates most of them.
fn check_disjoint(slices: &[Slice]) -> Checked {
    let mut slices: Vec<&Slice> = slices.iter().filter(|slice| !slice.is_empty()).collect();
    let dimensions = slices.first().map_or(0, |slice| slice.offsets.len());
    if slices.len() < 2 {
        return Ok(());
    }
    let starts =
        |dimension: usize| slices.iter().map(|slice| slice.offsets[dimension]).collect::<HashSet<_>>().len();
    let Some(axis) = (0..dimensions).max_by_key(|dimension| starts(*dimension)) else {
        return Err("a scalar has more than one slice".into());
    };
    slices.sort_by_key(|slice| slice.offsets[axis]);
    for (index, slice) in slices.iter().enumerate() {
        let end = slice.offsets[axis] + slice.lengths[axis];
        for other in slices[index + 1..].iter().take_while(|other| other.offsets[axis] < end) {
            let apart = (0..dimensions).any(|i| {
                slice.offsets[i] + slice.lengths[i] <= other.offsets[i]
                    || other.offsets[i] + other.lengths[i] <= slice.offsets[i]
            });
            require(apart, || format!("the slices at {:?} and {:?} overlap", slice.offsets, other.offsets))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
