//! Copies of sealed parts in other hosts' memory: a job that lost a host goes on from them.
//!
//! For each copy an agent comes to that of another host, with an [`Offer`] of what was sealed. Once there is room the bytes follow
//! as bulk, at a port of their own, by network cards where both hosts have them. Who keeps a copy checks all of it before it says
//! so. It is in memory of its own: one that others may be reading is never written again.

mod keeper;
mod sender;
#[cfg(test)]
mod tests;

use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_io::net::FdStream;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Reply;
use crate::arena::Held;

pub(super) use keeper::Keeper;
pub(crate) use keeper::{Replica, Shelf};
pub(super) use sender::{Outbox, Sender};

/// Raised with each change of what agents say to each other: both are of one job, and mostly of one build.
const VERSION: u32 = 1;
/// How long the other agent may take to be reached, and to greet.
const PATIENCE: Duration = Duration::from_secs(10);

/// From who wants a copy kept.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    version: u32,
    /// Steps of a rank that are kept at most.
    steps: usize,
    held: Held,
}

/// From who keeps it.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// There is room: the bytes are to come to this port of the same host, to who says the secret.
    Ready { port: u16, secret: String },
    /// The copy is whole, and kept.
    Kept,
    /// It is not kept.
    Refused { reason: String },
    /// This agent ends, as its part of the job is done.
    Over,
}

/// What is told where there are no copies.
pub(super) fn without_copies(error: &Error) -> Reply {
    let message = format!("saves go on without copies in another host's memory (replicas): {error}");
    Reply::Warning { message }
}

fn say(stream: &mut FdStream, words: &impl Serialize) -> Result<()> {
    let frame = serde_json::to_vec(words).map_err(|error| Error::bug(format!("encode words: {error}")))?;
    stream.send(&frame, None)
}

fn parse<T: DeserializeOwned>(frame: &[u8]) -> Result<T> {
    serde_json::from_slice(frame)
        .map_err(|error| Error::invalid(format!("what another host's agent says does not parse: {error}")))
}
