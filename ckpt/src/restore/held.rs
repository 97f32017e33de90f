//! A step out of memory: the parts that the ranks' agents hold, put together as their agents would have in the store.

use bytes::Bytes;
use forebay_core::{Error, Result};

use crate::arena::manifest_of;
use crate::manifest::Manifest;
use crate::session::Part;

/// What a manifest of the step would say, and the bytes of its shards, as far as they are in this host's memory. `parts` are
/// those of all ranks, in their order.
///
/// # Errors
/// `Corrupt` when the parts are not those of one save, or together are no checkpoint, or a header is damaged.
pub fn assemble(parts: Vec<Part>) -> Result<(Manifest, Vec<Option<Bytes>>)> {
    let is_damaged =
        |part: &&Part| part.bytes.as_ref().is_some_and(|bytes| !part.held.seal.has_header(bytes));
    let damaged = parts.iter().find(is_damaged);
    if let Some(Part { held, .. }) = damaged {
        let fact = format!("the header of what the agent of rank {} holds is damaged", held.rank);
        return Err(Error::corrupt(format!("step {}: {fact}", held.seal.step)));
    }
    let (held, shards) = parts.into_iter().map(|part| (part.held, part.bytes)).unzip();
    Ok((manifest_of(held)?, shards))
}
