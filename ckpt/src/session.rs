//! The trainer's side of saving: slots, the agent's connection, and what became of each save.
//!
//! Calls block, and only as long as they were given patience for. An agent
//! that died is told as [`Lost`]; a new connection takes the unsettled saves over, once each: whatever killed two
//! agents over the same save is not tried a third time.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::mem::SharedMemory;
use forebay_io::net::FdStream;
use parking_lot::Mutex;

use crate::agent::{Hello, Member, Reply, Request, Seal};
use crate::arena::{Arena, SLOTS, Slot, Snapshot};
use crate::manifest::Extra;
use crate::shard::{ShardLayout, TensorSpec};

/// Warnings kept for the caller at most; later ones are dropped.
const MAX_WARNINGS: usize = 16;

/// What became of a save.
#[derive(Debug, Clone)]
pub enum Progress {
    /// Sent to the agent.
    Sent,
    /// The agent brings it to the bucket, whatever becomes of this process.
    Sealed,
    /// Committed in the bucket.
    Durable,
    /// It will not be committed.
    Failed(Arc<Error>),
}

impl Progress {
    /// Whether nothing more will happen.
    pub fn is_settled(&self) -> bool {
        matches!(self, Self::Durable | Self::Failed(_))
    }
}

/// One save, as its caller sees it.
#[derive(Debug)]
pub struct Save {
    /// The step.
    pub step: u64,
    number: u64,
    progress: Mutex<Progress>,
}

impl Save {
    /// What became of it so far.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    fn set(&self, progress: Progress) {
        *self.progress.lock() = progress;
    }
}

/// A save on its way, with all that is needed to send it again.
#[derive(Debug)]
struct Pending {
    save: Arc<Save>,
    slot: Slot,
    seal: Seal,
    was_resent: bool,
}

/// The agent's process ended with saves unsettled.
#[derive(Debug)]
pub struct Lost {
    /// Steps that were not committed yet as far as is known.
    pub steps: Vec<u64>,
}

/// A trainer's connection to its agent.
#[derive(Debug)]
pub struct Session {
    hello: Hello,
    stream: Option<FdStream>,
    arena: Option<Arena>,
    arenas_sent: u64,
    next_save: u64,
    pending: VecDeque<Pending>,
    warnings: Vec<String>,
}

impl Session {
    /// A session without an agent yet.
    pub fn new(hello: Hello) -> Self {
        let (pending, warnings) = (VecDeque::new(), Vec::new());
        Self { hello, stream: None, arena: None, arenas_sent: 0, next_save: 0, pending, warnings }
    }

    /// Whether an agent is connected, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.stream.is_some()
    }

    /// Greets an agent and hands it the memory and the saves that an earlier one left unsettled.
    ///
    /// # Errors
    /// `Unavailable` when that agent died as well.
    pub fn connect(&mut self, stream: FdStream) -> Result<()> {
        self.stream = Some(stream);
        self.send(&Request::Hello(self.hello.clone()), None)?;
        for pending in std::mem::take(&mut self.pending) {
            if !pending.was_resent {
                self.pending.push_back(pending);
                continue;
            }
            let message = format!("two agents died while they saved step {}", pending.save.step);
            let hint = "the host may be short of memory; see the agent's log (agent_log=)";
            self.settle(pending, Err(Error::new(ErrorKind::Unavailable, message).with_hint(hint)));
        }
        for index in 0..self.pending.len() {
            let memory = self.pending[index].slot.memory().clone();
            let arena = self.send_memory(&memory)?;
            let pending = &mut self.pending[index];
            pending.was_resent = true;
            pending.seal.arena = arena;
            let request = Request::Seal(Box::new(pending.seal.clone()));
            self.send(&request, None)?;
        }
        if let Some(memory) = self.arena.as_ref().map(|arena| arena.memory().clone()) {
            self.send_memory(&memory)?;
        }
        Ok(())
    }

    /// Makes sure that a state of `bytes` bytes can be copied without a page fault, on `threads` threads.
    pub fn prepare(&mut self, bytes: u64, threads: usize) -> Result<()> {
        self.make_room(bytes)?;
        if let Some(arena) = &mut self.arena {
            for slot in arena.free_slots() {
                slot.populate(bytes as usize, threads)?;
            }
        }
        Ok(())
    }

    /// Makes this the session of one rank of a job, before an agent is greeted.
    pub fn join(&mut self, member: Member) {
        self.hello.start = member.run.start.clone();
        self.hello.member = Some(member);
    }

    /// Whether a snapshot can be begun, even after the agent was heard or `patience` passed.
    pub fn has_room(&mut self, patience: Duration) -> Result<bool> {
        self.take_replies(Duration::ZERO)?;
        let has_room = |arena: &mut Option<Arena>| {
            arena.as_mut().is_none_or(|arena| arena.free_slots().next().is_some())
        };
        if !has_room(&mut self.arena) {
            self.take_replies(patience)?;
        }
        Ok(has_room(&mut self.arena))
    }

    /// A snapshot to be filled, `owner`'s alone (see [`ShardLayout::of`]); `None` when no slot is free, even after the agent was heard or `patience` passed.
    pub fn begin(
        &mut self,
        tensors: Vec<TensorSpec>,
        owner: &str,
        threads: usize,
        patience: Duration,
    ) -> Result<Option<Snapshot>> {
        let layout = ShardLayout::of(&tensors, owner)?;
        self.make_room(layout.size)?;
        self.take_replies(Duration::ZERO)?;
        let mut slot = self.arena.as_mut().and_then(Arena::take);
        if slot.is_none() {
            self.take_replies(patience)?;
            slot = self.arena.as_mut().and_then(Arena::take);
        }
        let Some(mut slot) = slot else { return Ok(None) };
        slot.populate(layout.size as usize, threads)?;
        Ok(Some(Snapshot::new(slot, tensors, layout)))
    }

    /// Gives a filled snapshot to the agent.
    pub fn seal(
        &mut self,
        snapshot: Snapshot,
        step: u64,
        created_ms: u64,
        extras: Vec<Extra>,
    ) -> Result<Arc<Save>> {
        let (slot, shard) = snapshot.finish()?;
        self.next_save += 1;
        let number = self.next_save;
        let seal = Seal {
            save: number,
            arena: self.arenas_sent,
            slot: slot.index(),
            size: shard.size,
            header: shard.header,
            step,
            created_ms,
            tensors: shard.tensors,
            extras,
        };
        let save = Arc::new(Save { step, number, progress: Mutex::new(Progress::Sent) });
        let request = Request::Seal(Box::new(seal.clone()));
        self.pending.push_back(Pending { save: save.clone(), slot, seal, was_resent: false });
        // A failure here is the agent's death: the next connection sends the save again.
        self.send(&request, None).ok();
        Ok(save)
    }

    /// Gives a snapshot up.
    pub fn abandon(&mut self, snapshot: Snapshot) {
        if let Some(arena) = &mut self.arena {
            arena.give_back(snapshot.into_slot());
        }
    }

    /// Tells the other ranks of the job that this one will not save `step`. An agent that is gone cannot: then they find
    /// out by themselves, later.
    pub fn give_up(&mut self, step: u64, reason: String) {
        self.send(&Request::GiveUp { step, reason }, None).ok();
    }

    /// Takes what the agent said, waiting for a first word up to `patience`.
    pub fn take_replies(&mut self, patience: Duration) -> Result<()> {
        let mut patience = patience;
        while let Some(stream) = &mut self.stream {
            if !stream.readable(patience)? {
                return Ok(());
            }
            match stream.receive() {
                Ok(Some((frame, _))) => self.apply(&frame)?,
                Ok(None) | Err(_) => self.stream = None,
            }
            patience = Duration::ZERO;
        }
        Ok(())
    }

    /// The saves that a dead agent left unsettled; `None` while the agent lives or nothing is unsettled.
    pub fn lost(&self) -> Option<Lost> {
        let lost = self.stream.is_none() && !self.pending.is_empty();
        lost.then(|| Lost { steps: self.pending.iter().map(|pending| pending.save.step).collect() })
    }

    /// Whether a save is still under way.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// What the agent wants people to know; each is given once.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Lets the agent go; it finishes what is sealed.
    pub fn disconnect(&mut self) {
        if let Some(stream) = self.stream.take() {
            stream.shutdown();
        }
    }

    /// Forgets the connection without ending it, in a forked child that must not speak for its parent.
    pub fn forget(&mut self) {
        self.stream = None;
        self.pending.clear();
        self.arena = None;
    }

    fn apply(&mut self, frame: &[u8]) -> Result<()> {
        let reply: Reply = serde_json::from_slice(frame)
            .map_err(|error| Error::bug(format!("the agent's words do not parse: {error}")))?;
        match reply {
            Reply::Sealed { save } => {
                if let Some(pending) = self.pending.iter().find(|pending| pending.save.number == save) {
                    pending.save.set(Progress::Sealed);
                }
            }
            Reply::Durable { save } => self.settle_number(save, Ok(())),
            Reply::Failed { save, error } => self.settle_number(save, Err(error.into())),
            Reply::Warning { message } => {
                if self.warnings.len() < MAX_WARNINGS {
                    self.warnings.push(message);
                }
            }
        }
        Ok(())
    }

    fn settle_number(&mut self, number: u64, outcome: Result<()>) {
        let position = self.pending.iter().position(|pending| pending.save.number == number);
        if let Some(pending) = position.and_then(|position| self.pending.remove(position)) {
            self.settle(pending, outcome);
        }
    }

    fn settle(&mut self, pending: Pending, outcome: Result<()>) {
        if let Some(arena) = &mut self.arena {
            arena.give_back(pending.slot);
        }
        pending.save.set(match outcome {
            Ok(()) => Progress::Durable,
            Err(error) => Progress::Failed(Arc::new(error)),
        });
    }

    /// Replaces the arena by a larger one where the present one is too small.
    fn make_room(&mut self, bytes: u64) -> Result<()> {
        let bytes = usize::try_from(bytes).map_err(|_| Error::invalid("the state is larger than memory"))?;
        if self.arena.as_ref().is_some_and(|arena| arena.slot_bytes() >= bytes) {
            return Ok(());
        }
        let arena = Arena::create(bytes)?;
        let memory = arena.memory().clone();
        self.arena = Some(arena);
        if self.stream.is_some() {
            // A failure here is the agent's death: the next connection sends the memory again.
            self.send_memory(&memory).ok();
        }
        Ok(())
    }

    fn send_memory(&mut self, memory: &SharedMemory) -> Result<u64> {
        self.arenas_sent += 1;
        let (arena, slot_bytes) = (self.arenas_sent, memory.len() / SLOTS);
        self.send(&Request::Arena { arena, slot_bytes }, Some(memory))?;
        Ok(arena)
    }

    fn send(&mut self, request: &Request, memory: Option<&SharedMemory>) -> Result<()> {
        let frame =
            serde_json::to_vec(request).map_err(|error| Error::bug(format!("encode a request: {error}")))?;
        let gone = || Error::new(ErrorKind::Unavailable, "the checkpoint agent is gone");
        let stream = self.stream.as_mut().ok_or_else(gone)?;
        let sent = stream.send(&frame, memory.map(AsFd::as_fd));
        sent.map_err(|error| {
            self.stream = None;
            gone().with_source(error)
        })
    }
}

#[cfg(test)]
mod tests;
