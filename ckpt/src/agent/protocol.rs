//! What trainer and agent say to each other: JSON frames over one unix socket.
//!
//! Both ends come from one build, so that the frames carry no version; only a visitor may be of another. A slot belongs
//! to the agent from `Seal` or `SealAgain` to the `Durable` or `Failed` of that save, and to the trainer otherwise; before the trainer
//! writes into it again, it has the agent forget what it held.

use std::num::NonZeroU64;

use forebay_core::{Error, ErrorKind};
use forebay_io::clock::Clock;
use serde::{Deserialize, Serialize};

use crate::arena::{Held, HeldStep};
use crate::catalog::{Keep, Round, Run, Start, StepKey};
use crate::local::LocalTier;
use crate::restore::Address;

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
    /// What becomes of the sealed steps in memory when the trainer is killed; none lets them go.
    pub linger: Option<Linger>,
    /// Bytes a second that the agent sends at most; none sends as fast as it can.
    pub flush_rate: Option<NonZeroU64>,
    /// Where copies are kept on this host's disk, if they are.
    pub local: Option<LocalTier>,
    /// How copies are kept in other hosts' memory, if they are.
    #[serde(default)]
    pub replication: Option<Replication>,
    /// The starts that this one comes after, by the beginnings of their nonces, which name attempts.
    #[serde(default)]
    pub after: Vec<String>,
    /// The highest number that a start had in the store when this one looked there for a step; none where it did not.
    #[serde(default)]
    pub seen: Option<u64>,
    /// Whether it is of a job that went back to an earlier step in one process. It takes its number when it saves, which may be
    /// long after it looked: not where another start began meanwhile.
    #[serde(default)]
    pub is_back: bool,
}

/// Starts that are remembered: an older one is nobody's newest any more.
const MOST_AFTER: usize = 64;

impl Hello {
    /// That of a trainer which saves alone, with nothing else asked for.
    pub fn new(url: String, start: Start, keep: Keep) -> Self {
        Self {
            url,
            start,
            keep,
            member: None,
            linger: None,
            flush_rate: None,
            local: None,
            replication: None,
            after: Vec::new(),
            seen: None,
            is_back: false,
        }
    }

    /// Notes that this start comes after another one.
    pub(crate) fn comes_after(&mut self, attempt: &str) {
        self.after.retain(|known| known != attempt);
        self.after.push(attempt.to_owned());
        let many = self.after.len().saturating_sub(MOST_AFTER);
        self.after.drain(..many);
    }

    /// Whether `newest` began after this start looked for what to go on from, as far as it knows: where the store told nothing
    /// then, by the clocks of their hosts.
    pub(super) fn is_outrun_by(&self, newest: &Run) -> bool {
        let is_before = self.after.iter().any(|attempt| attempt == newest.attempt());
        !is_before
            && match self.seen {
                Some(seen) => newest.incarnation > seen,
                None => newest.start.started_ms > self.start.started_ms,
            }
    }

    /// This rank, and ranks in all.
    pub(super) fn place(&self) -> (u32, u32) {
        self.member.as_ref().map_or((0, 1), |member| (member.rank, member.world_size))
    }
}

/// How an agent whose trainer was killed waits for another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Linger {
    /// The meeting place where it is found.
    pub place: String,
    /// How long it waits, in milliseconds.
    pub for_ms: u64,
}

/// How agents of different hosts hold copies for each other.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Replication {
    /// Steps of a rank that are held at most.
    pub steps: usize,
    /// The network cards that may bring them, as [`forebay_io::net::Wanted`] reads it.
    pub cards: String,
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
        self.run.save(step)
    }
}

/// A step that a start went on from, as the bucket names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The first eight digits of the nonce of the start that saved it.
    pub attempt: String,
    /// The step.
    pub step: u64,
}

/// How a job that went back to an earlier step goes on in one process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Anew {
    /// As that of a trainer that begins; where the agent is found stays as it was.
    pub hello: Hello,
    /// The step that it went back to.
    pub origin: Origin,
}

/// From the trainer.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The first frame.
    Hello(Box<Hello>),
    /// The memory that following seals mean; its descriptor comes with the frame.
    Arena {
        /// Its number.
        arena: u64,
        /// Bytes of each slot.
        slot_bytes: usize,
    },
    /// What follows goes on from this step, and what did not change since is not to be stored again.
    GoOn(Origin),
    /// The job went back: what follows is another start's. Steps after the one that it goes on from are wanted no more; each of
    /// their saves that is not settled is told to have failed, as soon as nothing reads its slot.
    BeginAnew(Box<Anew>),
    /// Bring this to the bucket, and hold it for a successor.
    Seal(Box<Told>),
    /// The same, of a save that an agent that died may have brought there, or begun to.
    SealAgain(Box<Told>),
    /// Hold this for a successor; it needs no flush.
    Hold(Box<Told>),
    /// What it was told to hold of this step is committed in the bucket.
    Durable(HeldStep),
    /// The trainer will write where this lies.
    Forget(HeldStep),
    /// This rank will not save a step that others save: they are to be told.
    GiveUp {
        /// The step.
        step: u64,
        /// Which try of it.
        round: Option<Round>,
        /// Why.
        reason: String,
    },
    /// Hold this for a rank of another host, as the agent before this one did; its memory's descriptor comes with the frame.
    Inherit(Box<Held>),
    /// The agent before this one hands the place at which it is found over to this one, at the other end of the connection whose
    /// descriptor comes with the frame.
    InheritPlace,
    /// What is sealed from now on is to be held by the agent at this address as well.
    ReplicateTo(Address),
    /// The trainer does nothing until this save is settled.
    Await {
        /// Which save.
        save: u64,
    },
    /// The trainer ends because it is done: nobody will come for what is held.
    Bye,
}

/// A sealed step, and where it lies.
#[derive(Debug, Serialize, Deserialize)]
pub struct Told {
    /// The number of its memory, which was announced last.
    pub arena: u64,
    /// The step, as it was sealed.
    pub held: Held,
}

/// The version of [`Visit`] and [`Answer`], and of what they carry.
pub const VISIT_VERSION: u32 = 4;

/// From whoever comes to an agent whose trainer was killed. An agent that has nothing to say closes the connection.
#[derive(Debug, Serialize, Deserialize)]
pub enum Visit {
    /// Show what you hold.
    Look {
        /// [`VISIT_VERSION`]; another one gets no answer.
        version: u32,
    },
    /// I hold it now: tell me, as replies, what becomes of the saves under way, and end. The place where you are found is for who is
    /// at the other end of the connection whose descriptor comes with the frame.
    Succeed(LostRanks),
    /// Saves of another job lack memory: let go of yours, if nothing is lost by that. Answered by [`MADE_WAY`], or by
    /// [`MAKES_WAY_LATER`] where it is still on its way to the store.
    MakeWay {
        /// The starts that the asker comes after, by the beginnings of their nonces: what one of these holds it has restored, or
        /// has no use for any more.
        #[serde(default)]
        after: Vec<String>,
        /// Those of the last of these, whose step the asker restored.
        #[serde(flatten)]
        lost: LostRanks,
    },
}

/// Ranks whose agents are nowhere any more.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRanks {
    /// Their numbers: what they did not store by now they never will.
    #[serde(rename = "lost", default)]
    pub ranks: Vec<u32>,
    /// Parts of theirs that other agents keep, which store them.
    #[serde(default)]
    pub kept: Vec<KeptStep>,
}

/// The answer of an agent that has let go of its memory.
pub(crate) const MADE_WAY: &[u8] = b"gone";
/// The answer of one that will be asked again.
pub(crate) const MAKES_WAY_LATER: &[u8] = b"later";

/// What an agent shows: this, and then a `Held` frame for each step, with its memory's descriptor, and for what it keeps for
/// other hosts.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The nonce of the start that it served.
    pub start: String,
    /// When that began, in milliseconds since 1970.
    #[serde(default)]
    pub started_ms: u64,
    /// The steps that it holds, oldest first: large seals are parsed where they are wanted.
    pub held: Vec<HeldStep>,
    /// Those of them that were committed in the bucket.
    #[serde(default)]
    pub durable: Vec<HeldStep>,
    /// As [`Hello::after`].
    #[serde(default)]
    pub after: Vec<String>,
    /// What it keeps for ranks of other hosts, oldest first.
    #[serde(default)]
    pub kept: Vec<KeptStep>,
}

/// A step of which an agent keeps the part of a rank of another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptStep {
    /// The rank.
    pub rank: u32,
    /// The step.
    pub step: HeldStep,
}

/// From the agent.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The agent has everything that it needs to bring the save to the bucket by itself.
    Sealed {
        /// Which save.
        save: u64,
        /// When, in microseconds since this machine started.
        at_us: u64,
    },
    /// This rank's part of the save is on this host's disk.
    Local {
        /// Which save.
        save: u64,
        /// When, as in `Sealed`.
        at_us: u64,
    },
    /// There will be no copy of it on this host's disk.
    NoCopy {
        /// Which save.
        save: u64,
    },
    /// Where agents of other hosts bring copies to, to be kept by this one: a port of this host, and what they are to say there;
    /// none where it keeps none.
    Keeps(Option<(u16, String)>),
    /// This rank's part of the save is in another host's memory as well.
    Replicated {
        /// Which save.
        save: u64,
        /// When, as in `Sealed`.
        at_us: u64,
    },
    /// There will be no copy of it in another host's memory.
    NotReplicated {
        /// Which save.
        save: u64,
    },
    /// This rank's part of the save is in the bucket, not committed yet. A successor may have the slot.
    Stored {
        /// Which save.
        save: u64,
        /// When, as in `Sealed`.
        at_us: u64,
    },
    /// The save is committed.
    Durable {
        /// Which save.
        save: u64,
        /// When, as in `Sealed`.
        at_us: u64,
    },
    /// The save will not be committed.
    Failed {
        /// Which save.
        save: u64,
        /// Why.
        error: WireError,
    },
    /// To a successor, first: the saves whose slots are still being flushed.
    Unsettled {
        /// Their numbers.
        saves: Vec<u64>,
        /// Those of all that is held that are committed.
        #[serde(default)]
        durable: Vec<u64>,
        /// Those that will not be committed, and why.
        #[serde(default)]
        failed: Vec<(u64, WireError)>,
    },
    /// The step of an earlier start that was to be brought to the bucket is there, or never will be.
    Resumed,
    /// Something that a person should know.
    Warning {
        /// In words.
        message: String,
    },
}

/// When it is, as replies have it.
pub(super) fn now_us(clock: &Clock) -> u64 {
    clock.now().since_boot().as_micros().min(u128::from(u64::MAX)) as u64
}

/// An error on its way between processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WireError {
    kind: String,
    message: String,
    hint: Option<String>,
}

/// The kinds that an agent's errors have; any other arrives as `Unavailable`.
const KINDS: [ErrorKind; 12] = [
    ErrorKind::NotFound,
    ErrorKind::Invalid,
    ErrorKind::Conflict,
    ErrorKind::Unavailable,
    ErrorKind::Stale,
    ErrorKind::Corrupt,
    ErrorKind::NoSpace,
    ErrorKind::TooLarge,
    ErrorKind::Denied,
    ErrorKind::Unsupported,
    ErrorKind::Refused,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What will not help when it is tried again is not told as if it did.
    #[test]
    fn an_agents_errors_arrive_as_they_were() {
        for kind in KINDS {
            let sent = Error::new(kind, "what").with_hint("how");
            let frame = serde_json::to_vec(&WireError::from(&sent)).expect("encode");
            let heard = Error::from(serde_json::from_slice::<WireError>(&frame).expect("decode"));
            assert_eq!(
                (heard.kind(), heard.to_string(), heard.hint()),
                (kind, sent.to_string(), sent.hint())
            );
        }
        assert!(KINDS.contains(&ErrorKind::TooLarge), "a manifest that is too long");
        let other = Error::from(WireError::from(&Error::new(ErrorKind::IsDirectory, "what")));
        assert_eq!(other.kind(), ErrorKind::Unavailable);
    }
}
