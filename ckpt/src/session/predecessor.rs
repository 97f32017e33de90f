//! What the agent of a killed trainer holds, as its successor sees it, and the other ranks of the job; or what a rank of
//! this job shows them of its own memory.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::mem::SharedMemory;
use forebay_io::net::{FdStream, meet};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::agent::{Answer, KeptStep, VISIT_VERSION, Visit};
use crate::arena::{Held, HeldStep, SLOTS};

/// How long an agent may take to answer: it does nothing else.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Steps that an agent can hold at most: two slots of the present arena, two of each of two former ones.
const MAX_HELD: usize = 3 * SLOTS;

/// Copies of other hosts' steps that an agent can keep at most.
const MAX_KEPT: usize = 256;

/// An agent that lost its trainer, which goes on holding until [`super::Session::adopt`], whoever else looks; or a rank's
/// [`super::OpenMemory`], which nobody takes over.
#[derive(Debug)]
pub struct Predecessor {
    pub(super) stream: FdStream,
    start: String,
    started_ms: u64,
    after: Vec<String>,
    /// Oldest first.
    pub(super) held: Vec<Shown>,
    /// Those that are committed.
    pub(super) durable: Vec<HeldStep>,
    /// What it keeps for ranks of other hosts, oldest first.
    pub(super) kept: Vec<Kept>,
}

/// A step of which an agent keeps the part of a rank of another host, in memory that holds nothing else.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) rank: u32,
    pub(super) shown: Shown,
}

/// A step that it holds. What it says of it is large, and parsed where the step is wanted.
#[derive(Debug)]
pub(super) struct Shown {
    step: HeldStep,
    pub(super) told: Vec<u8>,
    pub(super) memory: Arc<SharedMemory>,
}

/// One rank's part of a held step.
#[derive(Debug)]
pub struct Part {
    /// What it is.
    pub held: Held,
    /// The shard; none where it is in another host's memory.
    pub bytes: Option<Bytes>,
}

impl Part {
    /// One that a rank of another host has, from what it told of it: see [`Predecessor::told`].
    ///
    /// # Errors
    /// `Corrupt` when that is not what was sealed, or is of another step.
    pub fn elsewhere(step: &HeldStep, told: &str) -> Result<Self> {
        let held = held_of(step, told.as_bytes()).map_err(|error| Error::corrupt(error.to_string()))?;
        Ok(Self { held, bytes: None })
    }
}

impl Predecessor {
    /// Visits who is found at `place`; `None` when there is none, or it is an agent whose trainer lives.
    pub fn visit(place: &str) -> Result<Option<Self>> {
        let stream = match meet(place, Duration::ZERO) {
            Ok(Some(stream)) => stream,
            Ok(None) => return Ok(None),
            // Another user's: not ours to ask.
            Err(error) if error.kind() == ErrorKind::Denied => return Ok(None),
            Err(error) => return Err(error),
        };
        stream.set_patience(PATIENCE)?;
        match Self::look(stream) {
            Ok(found) => Ok(found),
            // It turned us away, or ends just now.
            Err(error) if error.kind() == ErrorKind::Unavailable => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn look(mut stream: FdStream) -> Result<Option<Self>> {
        say(&mut stream, &Visit::Look { version: VISIT_VERSION }, None)?;
        let Some((frame, _)) = stream.receive()? else { return Ok(None) };
        let Answer { start, started_ms, held: steps, mut durable, after, kept: of_others } = parse(&frame)?;
        if steps.len() > MAX_HELD || of_others.len() > MAX_KEPT {
            let (own, others) = (steps.len(), of_others.len());
            return Err(Error::invalid(format!("an agent that holds {own} steps, and keeps {others}")));
        }
        durable.retain(|step| steps.contains(step));
        let mut held: Vec<Shown> = Vec::with_capacity(steps.len());
        for step in steps {
            let Some((told, memory)) = take(&mut stream)? else { return Ok(None) };
            let known = held.iter().find(|known| known.memory.id() == memory.id());
            let memory = known.map_or_else(|| Arc::new(memory), |known| known.memory.clone());
            held.push(Shown { step, told, memory });
        }
        let mut kept = Vec::with_capacity(of_others.len());
        for KeptStep { rank, step } in of_others {
            let Some((told, memory)) = take(&mut stream)? else { return Ok(None) };
            kept.push(Kept { rank, shown: Shown { step, told, memory: Arc::new(memory) } });
        }
        Ok(Some(Self { stream, start, started_ms, after, held, durable, kept }))
    }

    /// The nonce of the start that the agent served.
    pub fn start(&self) -> &str {
        &self.start
    }

    /// When that start began, in milliseconds since 1970 by its own clock; 0 where the agent does not say.
    pub fn started_ms(&self) -> u64 {
        self.started_ms
    }

    /// The starts that it came after, as far as it knows, by the beginnings of their nonces.
    pub fn after(&self) -> &[String] {
        &self.after
    }

    /// The steps that it holds, newest first.
    pub fn held(&self) -> Vec<HeldStep> {
        self.held.iter().rev().map(|shown| shown.step.clone()).collect()
    }

    /// The steps that it keeps for ranks of other hosts, with each one's rank, newest first.
    pub fn kept(&self) -> Vec<(u32, HeldStep)> {
        self.kept.iter().rev().map(|kept| (kept.rank, kept.shown.step.clone())).collect()
    }

    /// Those of them that its trainer's saves brought to the bucket, all ranks' parts of them.
    pub fn durable(&self) -> &[HeldStep] {
        &self.durable
    }

    /// The part of `step` that it holds of its own rank, or keeps for `rank` of another host.
    ///
    /// # Errors
    /// `Corrupt` when it has none, or what it tells of it is not what was sealed, or does not fit its memory.
    pub fn part(&self, step: &HeldStep, rank: u32) -> Result<Part> {
        let kept = self.kept_of(step, rank);
        let shown = kept.map_or_else(|| self.own(step), Ok)?;
        let (held, memory) =
            (shown.read().map_err(|error| Error::corrupt(error.to_string()))?, &shown.memory);
        let (start, most) = match (kept, held.seal.slot, memory.len() / SLOTS) {
            (Some(_), ..) => (0, memory.len()),
            (None, slot @ 0..SLOTS, slot_bytes) => (slot * slot_bytes, slot_bytes),
            (None, ..) => (0, 0),
        };
        let size = usize::try_from(held.seal.size).unwrap_or(usize::MAX);
        if size > most || size == 0 {
            return Err(Error::corrupt(format!("step {} lies outside of its memory", step.step)));
        }
        let mapping = memory.map_read(start..start + size)?;
        Ok(Part { held, bytes: Some(Bytes::from_owner(mapping)) })
    }

    /// What it says of the part of `step` that it has of a rank, as [`Self::part`], as text for ranks of other hosts.
    ///
    /// # Errors
    /// `Corrupt` when it has none, or says no text.
    pub fn told(&self, step: &HeldStep, rank: u32) -> Result<&str> {
        let shown = self.kept_of(step, rank).map_or_else(|| self.own(step), Ok)?;
        let told = std::str::from_utf8(&shown.told);
        told.map_err(|error| Error::corrupt(format!("what an agent tells of step {}: {error}", step.step)))
    }

    fn own(&self, step: &HeldStep) -> Result<&Shown> {
        let absent = || Error::corrupt(format!("step {} is not held", step.step));
        self.held.iter().find(|shown| shown.step == *step).ok_or_else(absent)
    }

    fn kept_of(&self, step: &HeldStep, rank: u32) -> Option<&Shown> {
        self.kept.iter().find(|kept| kept.rank == rank && kept.shown.step == *step).map(|kept| &kept.shown)
    }
}

impl Shown {
    /// What the agent says of the step.
    ///
    /// # Errors
    /// `Invalid` when it does not parse, or is of another step; `Corrupt` when it is not what was sealed.
    pub(super) fn read(&self) -> Result<Held> {
        held_of(&self.step, &self.told)
    }
}

/// What an agent tells of a step, and the memory that it lies in.
fn take(stream: &mut FdStream) -> Result<Option<(Vec<u8>, SharedMemory)>> {
    let Some((told, Some(fd))) = stream.receive()? else { return Ok(None) };
    Ok(Some((told, SharedMemory::from_fd(fd)?)))
}

fn held_of(step: &HeldStep, told: &[u8]) -> Result<Held> {
    let held: Held = parse(told)?;
    held.expect_sound()?;
    if held.name() != *step {
        let (told, step) = (held.seal.step, step.step);
        return Err(Error::invalid(format!("an agent tells of step {told} where it names step {step}")));
    }
    Ok(held)
}

/// Sends a visitor's words, with a descriptor if one is given.
pub(super) fn say(stream: &mut FdStream, visit: &impl Serialize, fd: Option<BorrowedFd<'_>>) -> Result<()> {
    let frame = serde_json::to_vec(visit).map_err(|error| Error::bug(format!("encode a visit: {error}")))?;
    stream.send(&frame, fd)
}

/// Reads an agent's words.
pub(super) fn parse<T: DeserializeOwned>(frame: &[u8]) -> Result<T> {
    serde_json::from_slice(frame)
        .map_err(|error| Error::invalid(format!("an agent's answer does not parse: {error}")))
}
