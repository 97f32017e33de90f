//! Memory for saves where agents of killed trainers, of other jobs or of this one at another number of ranks, still hold theirs.

use std::time::Duration;

use forebay_core::{ErrorKind, Result};
use forebay_io::mem;
use forebay_io::net::{meet, places};

use super::predecessor::{PATIENCE, say};
use crate::agent::Visit;
use crate::arena::{LEFT, Slot};

/// What the names of the places begin with at which agents of killed trainers are found.
pub const PLACES: &str = "forebay-arena-";

/// Makes sure that `bytes` of a slot can be copied into without a fault. Where the host lacks the memory, agents of killed
/// trainers are asked for theirs.
pub(super) fn fault_in(slot: &mut Slot, bytes: u64, threads: usize) -> Result<()> {
    match slot.populate(bytes as usize, threads) {
        Err(error) if error.kind() == ErrorKind::NoSpace => {
            let lacks = || mem::available().is_some_and(|left| left < bytes.saturating_add(LEFT));
            if make_way(PLACES, lacks) { slot.populate(bytes as usize, threads) } else { Err(error) }
        }
        populated => populated,
    }
}

/// Has agents whose places begin with `prefix` let go of what they hold, one after another, while `lacks` memory; whether any
/// did. Those keep it that have a trainer, a visitor, or a step that is not in the bucket.
fn make_way(prefix: &str, lacks: impl Fn() -> bool) -> bool {
    let places = places(prefix).unwrap_or_else(|error| {
        tracing::warn!(%error, "who holds memory on this host cannot be told");
        Vec::new()
    });
    let mut some_did = false;
    for place in places {
        if !lacks() {
            break;
        }
        match makes_way(&place) {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!(
                    place,
                    "the agent of a killed trainer let go of its memory for this job's saves"
                );
                some_did = true;
            }
            // Another user's, or one that ends just now.
            Err(error) => tracing::debug!(place, %error, "an agent was not asked for its memory"),
        }
    }
    some_did
}

fn makes_way(place: &str) -> Result<bool> {
    let Some(mut stream) = meet(place, Duration::ZERO)? else { return Ok(false) };
    stream.set_patience(PATIENCE)?;
    say(&mut stream, &Visit::MakeWay)?;
    // One that keeps it says nothing.
    Ok(stream.receive()?.is_some())
}
