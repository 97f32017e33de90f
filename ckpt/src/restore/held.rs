//! A step out of memory: the parts that the ranks' agents hold, put together as their agents would have in the store.

use bytes::Bytes;
use forebay_core::{Error, Result};

use crate::arena::{Held, Seal};
use crate::catalog::merge;
use crate::manifest::{Checksum, Manifest, Shard, ShardKey};
use crate::session::Part;

/// What a manifest of the step would say, and the bytes of its shards. `parts` are those of all ranks, in their order.
/// Of slices only the checksums are known, and every byte that is read has one.
///
/// # Errors
/// `Corrupt` when the parts are not those of one save, or together are no checkpoint.
pub fn assemble(parts: Vec<Part>) -> Result<(Manifest, Vec<Bytes>)> {
    let Some(first) = parts.first().map(|part| part.held.clone()) else {
        return Err(Error::bug("a step of no rank"));
    };
    let belongs = |(rank, part): (u32, &Part)| {
        let Held { start, rank: told, world_size, seal } = &part.held;
        (start, seal.step, *world_size) == (&first.start, first.seal.step, first.world_size) && *told == rank
    };
    let is_whole = parts.len() == first.world_size as usize;
    if !is_whole || !(0..).zip(&parts).all(belongs) {
        return Err(Error::corrupt(format!("step {}: what is held is not one save's", first.seal.step)));
    }
    let (indexes, shards): (Vec<_>, Vec<_>) =
        parts.into_iter().map(|part| (index_of(part.held), part.bytes)).unzip();
    let manifest = merge(indexes).map_err(|error| Error::corrupt(error.to_string()))?;
    Ok((manifest, shards))
}

/// A rank's part as its index in the store would be.
fn index_of(held: Held) -> Manifest {
    let Held { start, rank, world_size, seal } = held;
    let Seal { save, step, size, header, created_ms, tensors, extras, .. } = seal;
    let (attempt, layout) = (start.get(..8).unwrap_or_default().to_owned(), "0".repeat(8));
    let key = ShardKey { step, incarnation: 1, attempt, rank, save, layout }.object().as_str().to_owned();
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
