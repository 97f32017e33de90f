//! What trainer and agent say to each other: JSON frames over one unix socket.
//!
//! Both ends come from one build, so that the frames carry no version. A slot belongs to the agent from `Seal` to
//! the `Durable` or `Failed` of that save, and to the trainer otherwise.

use forebay_core::{Error, ErrorKind};
use serde::{Deserialize, Serialize};

use crate::catalog::{Keep, Run, Start, StepKey};
use crate::manifest::{Extra, Tensor};

/// What the agent is told first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hello {
    /// The bucket.
    pub url: String,
    /// Who starts.
    pub start: Start,
    /// Steps to keep, of those that were not saved again by a later incarnation.
    pub keep: Keep,
    /// The job that this trainer is one rank of; none where it saves alone.
    pub member: Option<Member>,
}

/// One rank of a job that saves together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Member {
    /// The job's start, which rank 0 took for all.
    pub run: Run,
    /// This rank, from 0.
    pub rank: u32,
    /// Ranks in all.
    pub world_size: u32,
}

impl Member {
    /// What the job's save of a step is called.
    pub fn save(&self, step: u64) -> StepKey {
        StepKey { incarnation: self.run.incarnation, step, attempt: self.run.attempt().to_owned() }
    }
}

/// A snapshot that is whole in its slot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Seal {
    /// The trainer's number for it, ascending.
    pub save: u64,
    /// Which arena, as announced.
    pub arena: u64,
    /// Which slot of it.
    pub slot: usize,
    /// Bytes of the shard.
    pub size: u64,
    /// Bytes of it before the first tensor.
    pub header: u64,
    /// The step.
    pub step: u64,
    /// Milliseconds since 1970 by the trainer's clock.
    pub created_ms: u64,
    /// The tensors, all in shard 0.
    pub tensors: Vec<Tensor>,
    /// Everything else.
    pub extras: Vec<Extra>,
}

/// From the trainer.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The first frame.
    Hello(Hello),
    /// New memory; its descriptor comes with the frame. The former arena gets no more seals.
    Arena {
        /// Its number.
        arena: u64,
        /// Bytes of each slot.
        slot_bytes: usize,
    },
    /// Bring this to the bucket.
    Seal(Box<Seal>),
    /// This rank will not save a step that others save: they are to be told.
    GiveUp {
        /// The step.
        step: u64,
        /// Why.
        reason: String,
    },
}

/// From the agent.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The agent has everything that it needs to bring the save to the bucket by itself.
    Sealed {
        /// Which save.
        save: u64,
    },
    /// The save is committed.
    Durable {
        /// Which save.
        save: u64,
    },
    /// The save will not be committed.
    Failed {
        /// Which save.
        save: u64,
        /// Why.
        error: WireError,
    },
    /// Something that a person should know.
    Warning {
        /// In words.
        message: String,
    },
}

/// An error on its way between processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WireError {
    kind: String,
    message: String,
    hint: Option<String>,
}

/// The kinds that an agent's errors have; any other arrives as `Unavailable`.
const KINDS: [ErrorKind; 10] = [
    ErrorKind::NotFound,
    ErrorKind::Invalid,
    ErrorKind::Conflict,
    ErrorKind::Unavailable,
    ErrorKind::Stale,
    ErrorKind::Corrupt,
    ErrorKind::NoSpace,
    ErrorKind::Denied,
    ErrorKind::Unsupported,
    ErrorKind::Bug,
];

impl From<&Error> for WireError {
    fn from(error: &Error) -> Self {
        let hint = error.hint().map(str::to_owned);
        Self { kind: error.kind().as_str().to_owned(), message: error.to_string(), hint }
    }
}

impl From<WireError> for Error {
    fn from(wire: WireError) -> Self {
        let kind = KINDS.into_iter().find(|kind| kind.as_str() == wire.kind);
        let error = Error::new(kind.unwrap_or(ErrorKind::Unavailable), wire.message);
        match wire.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}
