//! Memory for saves where agents of killed trainers, of other jobs or of this one at another number of ranks, still hold theirs.

use std::time::Duration;

use forebay_core::{ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::mem;
use forebay_io::net::{FdStream, meet, places};

use super::predecessor::{PATIENCE, say};
use crate::agent::{MADE_WAY, MAKES_WAY_LATER, Visit};
use crate::arena::{LEFT, Slot};

/// What the names of the places begin with at which agents of killed trainers are found.
pub const PLACES: &str = "forebay-arena-";

/// How long those are waited for that still bring steps to the store, and the pause between two looks.
const WAIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(500);

/// What became of the agents that were asked.
#[derive(Debug, Default, PartialEq, Eq)]
struct Asked {
    /// Whether one let go of its memory.
    some_did: bool,
    /// How many will, once what they hold is in the store.
    later: usize,
}

/// Makes sure that `bytes` of a slot can be copied into without a fault. Where the host lacks the memory, agents of killed
/// trainers are asked for theirs, by these `words`.
pub(super) fn fault_in(slot: &mut Slot, bytes: u64, threads: usize, words: &Visit) -> Result<()> {
    let lacks = || mem::available().is_some_and(|left| left < bytes.saturating_add(LEFT));
    let clock = Clock::system();
    let deadline = clock.now() + WAIT;
    loop {
        let error = match slot.populate(bytes as usize, threads) {
            Err(error) if error.kind() == ErrorKind::NoSpace => error,
            populated => return populated,
        };
        match make_way(PLACES, words, lacks) {
            Asked { some_did: true, .. } => {}
            Asked { later: 0, .. } => return Err(error),
            Asked { later, .. } if clock.now() < deadline => {
                tracing::info!(
                    later,
                    "waits for the memory of killed trainers' steps that are on their way to the store"
                );
                FdStream::readable_among(&[], PAUSE)?;
            }
            Asked { later, .. } => {
                return Err(error.context(format!(
                    "agents of {later} killed trainers on this host hold steps that are not in the store yet, and let go of \
                     their memory once they are"
                )));
            }
        }
    }
}

/// Has agents whose places begin with `prefix` let go of what they hold, one after another, while this process `lacks` memory.
/// Those keep it that have a trainer, a visitor, or a step that is nowhere else, and those whose memory is under other limits.
fn make_way(prefix: &str, words: &Visit, lacks: impl Fn() -> bool) -> Asked {
    let places = places(prefix).unwrap_or_else(|error| {
        tracing::warn!(%error, "who holds memory on this host cannot be told");
        Vec::new()
    });
    let mut asked = Asked::default();
    for place in places {
        if !lacks() {
            break;
        }
        match ask(&place, words) {
            Ok(Some(answer)) if answer == MADE_WAY => {
                tracing::info!(
                    place,
                    "the agent of a killed trainer let go of its memory for this job's saves"
                );
                asked.some_did = true;
            }
            Ok(Some(answer)) if answer == MAKES_WAY_LATER => asked.later += 1,
            Ok(_) => {}
            // Another user's, or one that ends just now.
            Err(error) => tracing::debug!(place, %error, "an agent was not asked for its memory"),
        }
    }
    asked
}

/// What the agent at `place` says; one that keeps its memory says nothing.
fn ask(place: &str, words: &Visit) -> Result<Option<Vec<u8>>> {
    let Some(mut stream) = meet(place, Duration::ZERO)? else { return Ok(None) };
    if !mem::counts_here(stream.peer_process()?) {
        return Ok(None);
    }
    stream.set_patience(PATIENCE)?;
    say(&mut stream, words, None)?;
    Ok(stream.receive()?.map(|(frame, _)| frame))
}
