//! The trainer's side of saving: slots, the agent's connection, and what became of each save.
//!
//! Calls block, and only as long as they were given patience for. An agent
//! that died is told as [`Lost`]; a new connection takes the unsettled saves over, once each: whatever killed two
//! agents over the same save is not tried a third time. What the agent of a killed trainer holds is adopted: its memory
//! becomes this session's, its sealed steps stay until newer ones took their place.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::device::Device;
use forebay_io::mem::SharedMemory;
use forebay_io::net::FdStream;
use parking_lot::Mutex;

use crate::agent::{Hello, KeptStep, Linger, LostRanks, Member, Origin, Replication, Reply, Request, Told};
use crate::arena::{Arena, Cut, Held, HeldStep, SLOTS, Seal, Slot, Snapshot, attempt_of};
use crate::catalog::Round;
use crate::local::LocalTier;
use crate::manifest::{Extra, TextLength};
use crate::restore::Address;
use crate::shard::{ShardLayout, TensorSpec};

mod adopt;
mod anew;
mod crowd;
mod open_memory;
mod pending;
mod predecessor;
mod replicas;
mod slots;

use adopt::Inherited;
pub use crowd::PLACES;
pub use open_memory::OpenMemory;
pub use pending::Lost;
use pending::Pending;
pub use predecessor::{Part, Predecessor};
use replicas::Elsewhere;

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
    times: Mutex<Times>,
}

/// When the agent got somewhere with a save, in microseconds since this machine started.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// It was sealed.
    pub sealed: Option<u64>,
    /// This rank's part was on this host's disk.
    pub local: Option<u64>,
    /// This rank's part was in another host's memory.
    pub replicated: Option<u64>,
    /// This rank's part was in the bucket.
    pub stored: Option<u64>,
    /// It was committed.
    pub durable: Option<u64>,
}

impl Save {
    /// What became of it so far.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    /// When it got how far.
    pub fn times(&self) -> Times {
        *self.times.lock()
    }

    fn set(&self, progress: Progress) {
        *self.progress.lock() = progress;
    }
}

/// Ranks whose killed processes left no agent anywhere.
#[derive(Debug, Default)]
struct Missing {
    /// Of as many ranks as there are now.
    own: Vec<u32>,
    /// Of the start whose step was restored.
    followed: Vec<u32>,
    /// Parts of both that agents keep, which store them.
    kept: Vec<KeptStep>,
}

impl Missing {
    /// What is told of some of them.
    fn told(&self, ranks: &[u32]) -> LostRanks {
        let of_these = |kept: &&KeptStep| ranks.contains(&kept.rank);
        LostRanks { ranks: ranks.to_vec(), kept: self.kept.iter().filter(of_these).cloned().collect() }
    }
}

/// A trainer's connection to its agent.
#[derive(Debug)]
pub struct Session {
    hello: Hello,
    stream: Option<FdStream>,
    arena: Option<Arena>,
    /// The memory that the agent was told of last.
    announced: Option<Arc<SharedMemory>>,
    arenas_sent: u64,
    last_save: u64,
    /// The save that the agent was told is waited for, last.
    awaited: u64,
    pending: VecDeque<Pending>,
    /// Slots that are written: both, or the first alone.
    slots: usize,
    /// The newest step that all ranks hold, which no save takes the slot of.
    kept: Option<HeldStep>,
    /// Slots of former arenas that hold a step.
    former: Vec<Slot>,
    /// Those of the steps in memory that are committed.
    durable: Vec<HeldStep>,
    /// Slots that a predecessor may still be reading, or one before it.
    inherited: Vec<Inherited>,
    /// Steps that the predecessor has said neither of that they are committed nor that they will not be: save and step.
    unsaved: Vec<(u64, u64)>,
    /// The newest save of the predecessor that is committed.
    last_durable: u64,
    predecessor: Option<FdStream>,
    has_succeeded: bool,
    lost: Missing,
    /// The step that the next one goes on from, as far as is known.
    origin: Option<Origin>,
    /// Whether the predecessor's steps are this start's as well.
    goes_on: bool,
    /// The device that slots are locked for.
    device: Option<Arc<Device>>,
    copies_missed: u64,
    /// What hosts hold for each other.
    elsewhere: Elsewhere,
    warnings: Vec<String>,
    /// The longest manifest, in bytes.
    most_text: u64,
}

impl Session {
    /// A session without an agent yet.
    pub fn new(hello: Hello) -> Self {
        Self {
            hello,
            stream: None,
            arena: None,
            announced: None,
            arenas_sent: 0,
            last_save: 0,
            awaited: 0,
            pending: VecDeque::new(),
            slots: SLOTS,
            kept: None,
            former: Vec::new(),
            durable: Vec::new(),
            inherited: Vec::new(),
            unsaved: Vec::new(),
            last_durable: 0,
            predecessor: None,
            has_succeeded: false,
            lost: Missing::default(),
            origin: None,
            goes_on: false,
            device: None,
            copies_missed: 0,
            elsewhere: Elsewhere::default(),
            warnings: Vec::new(),
            most_text: TextLength::MOST,
        }
    }

    /// Whether an agent is connected, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.stream.is_some()
    }

    /// Has the agent hold sealed steps for so long after this process was killed; said before it is greeted.
    pub fn set_linger(&mut self, linger: Option<Linger>) {
        self.hello.linger = linger;
    }

    /// Has the agent send no more than so many bytes a second; said before it is greeted.
    pub fn set_flush_rate(&mut self, bytes_per_second: NonZeroU64) {
        self.hello.flush_rate = Some(bytes_per_second);
    }

    /// Has the agent keep copies on this host's disk; said before it is greeted.
    pub fn set_local(&mut self, local: LocalTier) {
        self.hello.local = Some(local);
    }

    /// What is saved next goes on from a step that was restored: what did not change since is not stored again.
    pub fn go_on_from(&mut self, origin: Origin) {
        self.hello.comes_after(&origin.attempt);
        // Known already, or older than what this start saved since: an agent that waits for the store has room for few words.
        if self.origin.as_ref() == Some(&origin) {
            return;
        }
        // A failure here is the agent's death, and the next one is told.
        self.send(&Request::GoOn(origin.clone()), None).ok();
        self.origin = Some(origin);
    }

    /// Notes the highest number of a start that this one saw in the store; said before the first agent is greeted.
    pub fn set_seen(&mut self, number: u64) {
        self.hello.seen = Some(number);
    }

    /// From now on slots are locked in memory before they are filled, for `device` to copy into.
    pub fn pin_for(&mut self, device: Arc<Device>) {
        self.device.get_or_insert(device);
    }

    /// Greets an agent and hands it the saves that an earlier one left unsettled, and what it is to hold.
    ///
    /// # Errors
    /// `Unavailable` when that agent died as well.
    pub fn connect(&mut self, stream: FdStream) -> Result<()> {
        self.stream = Some(stream);
        self.announced = None;
        self.awaited = 0;
        self.elsewhere.address = None;
        self.send(&Request::Hello(Box::new(self.hello.clone())), None)?;
        if let Some(origin) = self.origin.clone() {
            self.send(&Request::GoOn(origin), None)?;
        }
        self.give_up_former();
        self.give_up_what_kills()?;
        for (held, memory) in self.settled_steps() {
            let step = held.name();
            self.send_held(held, &memory, Request::Hold)?;
            if self.durable.contains(&step) {
                self.send(&Request::Durable(step), None)?;
            }
        }
        self.tell_elsewhere()?;
        for index in 0..self.pending.len() {
            let pending = &mut self.pending[index];
            (pending.is_given, pending.is_replicated) = (true, self.elsewhere.to.is_none());
            let (held, memory) = (pending.slot.held().cloned(), pending.slot.memory().clone());
            if let Some(held) = held {
                self.send_held(held, &memory, Request::SealAgain)?;
            }
        }
        self.succeed()?;
        // This agent has it now.
        self.elsewhere.inherited.clear();
        Ok(())
    }

    /// Makes this the session of one rank of a job, before an agent is greeted.
    pub fn join(&mut self, member: Member) {
        self.hello.start = member.run.start.clone();
        self.hello.member = Some(member);
    }

    /// A snapshot to be filled; `None` when no slot is free, even after the agent was heard or `patience` passed. `beside` is
    /// what the manifest will say beside these tensors, as far as it is known: of other values and of other ranks.
    ///
    /// # Errors
    /// `TooLarge` when all that is too long for a manifest: on every rank, where each gave what the others have.
    pub fn begin(
        &mut self,
        tensors: Vec<TensorSpec>,
        beside: TextLength,
        threads: usize,
        patience: Duration,
    ) -> Result<Option<Snapshot>> {
        let layout = ShardLayout::of(&tensors)?;
        let cut = Cut::of(tensors);
        (cut.text() + beside).expect_within(self.most_text)?;
        self.make_room(layout.size)?;
        self.drop_former();
        self.take_replies(Duration::ZERO)?;
        let mut slot = self.take_slot();
        if slot.is_none() {
            self.take_replies(patience)?;
            slot = self.take_slot();
        }
        let Some(mut slot) = slot else { return Ok(None) };
        if let Err(error) = self.make_ready(&mut slot, layout.size, threads) {
            self.give_back(slot);
            return Err(error);
        }
        Ok(Some(Snapshot::new(slot, cut, layout)))
    }

    /// Gives a filled snapshot to the agent, as this rank's part of the try of the step that all ranks know as `round`; a
    /// job that saves each step once needs none.
    ///
    /// # Errors
    /// `TooLarge` when tensors and extras are too long for a manifest; the slot is free again then.
    pub fn seal(
        &mut self,
        snapshot: Snapshot,
        step: u64,
        round: Option<Round>,
        created_ms: u64,
        extras: Vec<Extra>,
    ) -> Result<Arc<Save>> {
        let said = extras.iter().map(|extra| TextLength::of_extra(&extra.name, &extra.data)).sum();
        if let Err(error) = (snapshot.text() + said).expect_within(self.most_text) {
            self.abandon(snapshot);
            return Err(error);
        }
        let (mut slot, shard) = snapshot.finish()?;
        self.last_save += 1;
        let number = self.last_save;
        let seal = Seal {
            save: number,
            round,
            slot: slot.index(),
            size: shard.size,
            header: shard.header,
            header_crc32c: shard.header_crc32c,
            step,
            created_ms,
            tensors: shard.tensors,
            extras,
        };
        let member = self.hello.member.as_ref();
        let (rank, world_size) = member.map_or((0, 1), |member| (member.rank, member.world_size));
        let held = Held::new(self.hello.start.nonce.clone(), rank, world_size, seal);
        *slot.held_mut() = Some(Box::new(held.clone()));
        let save =
            Arc::new(Save { step, number, progress: Mutex::new(Progress::Sent), times: Mutex::default() });
        let memory = slot.memory().clone();
        let is_replicated = self.elsewhere.to.is_none();
        self.pending.push_back(Pending {
            save: save.clone(),
            slot,
            is_given: true,
            is_replicated,
            deaths: 0,
        });
        // A failure here is the agent's death: the next connection sends the save again.
        self.send_held(held, &memory, Request::Seal).ok();
        Ok(save)
    }

    /// Gives a snapshot up.
    pub fn abandon(&mut self, snapshot: Snapshot) {
        self.give_back(snapshot.into_slot());
    }

    /// Tells the other ranks of the job that this one will not save `step` in this round. An agent that is gone cannot: then they find
    /// out by themselves, later.
    pub fn give_up(&mut self, step: u64, round: Option<Round>, reason: String) {
        self.send(&Request::GiveUp { step, round, reason }, None).ok();
    }

    /// Takes what the agent said, waiting for a first word up to `patience`.
    pub fn take_replies(&mut self, patience: Duration) -> Result<()> {
        if let Some(connection) = self.take_or_await(patience)? {
            connection.readable(patience)?;
            self.hear()?;
        }
        Ok(())
    }

    /// Takes what the agent said. Where that is nothing yet and there is `patience`, gives the connection that the next word
    /// comes from, so that others can use the session while somebody waits there. The agent hurries for whoever has patience,
    /// whatever was heard: that may be all that a short wait is for.
    pub fn take_or_await(&mut self, patience: Duration) -> Result<Option<FdStream>> {
        let has_heard = self.hear()?;
        if patience.is_zero() {
            return Ok(None);
        }
        self.await_agent();
        Ok(self.stream.as_ref().filter(|_| !has_heard).map(FdStream::share))
    }

    /// Takes what the agent said by now; whether it said anything.
    pub fn hear(&mut self) -> Result<bool> {
        self.hear_predecessor();
        let mut has_heard = false;
        while let Some(stream) = &mut self.stream
            && stream.readable(Duration::ZERO)?
        {
            has_heard = true;
            match stream.receive() {
                Ok(Some((frame, _))) => self.apply(&frame)?,
                Ok(None) | Err(_) => self.stream = None,
            }
        }
        Ok(has_heard)
    }

    /// Has the agent hurry with the oldest save that is not settled.
    fn await_agent(&mut self) {
        if let Some(save) = self.pending.front().map(|pending| pending.save.number)
            && save > self.awaited
            && self.send(&Request::Await { save }, None).is_ok()
        {
            self.awaited = save;
        }
    }

    /// Whether a save is still under way.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Saves without a copy on this host's disk, which was to have one.
    pub fn copies_missed(&self) -> u64 {
        self.copies_missed
    }

    /// What the agent wants people to know; each is given once.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Tells the agent that nobody will come for what it holds, and leaves it; it finishes what is sealed.
    pub fn dismiss(&mut self) {
        self.send(&Request::Bye, None).ok();
        self.leave();
    }

    /// Leaves the agent, which finishes what is sealed, and holds it for a successor. All memory is the agent's alone from
    /// now on; of a save that is not settled nothing more is heard.
    pub fn leave(&mut self) {
        self.disconnect();
        (self.arena, self.announced, self.kept, self.predecessor) = (None, None, None, None);
        // Their slots keep the memory mapped.
        (self.former, self.inherited) = (Vec::new(), Vec::new());
        self.pending.clear();
    }

    fn disconnect(&mut self) {
        if let Some(stream) = self.stream.take() {
            stream.shutdown();
        }
    }

    /// Forgets the connection without ending it, in a forked child that must not speak for its parent.
    pub fn forget(&mut self) {
        *self = Self::new(self.hello.clone());
    }

    fn apply(&mut self, frame: &[u8]) -> Result<()> {
        let reply: Reply = serde_json::from_slice(frame)
            .map_err(|error| Error::bug(format!("the agent's words do not parse: {error}")))?;
        match reply {
            Reply::Sealed { save, at_us } => {
                if let Some(save) = self.pending_save(save) {
                    save.times.lock().sealed = Some(at_us);
                    save.set(Progress::Sealed);
                }
            }
            Reply::Local { save, at_us } => {
                if let Some(save) = self.pending_save(save) {
                    save.times.lock().local = Some(at_us);
                }
            }
            Reply::NoCopy { .. } => self.copies_missed += 1,
            Reply::Keeps(address) => self.elsewhere.address = Some(address),
            Reply::Replicated { save, at_us } => {
                if let Some(pending) = self.pending.iter_mut().find(|pending| pending.save.number == save) {
                    pending.is_replicated = true;
                    pending.save.times.lock().replicated = Some(at_us);
                }
            }
            Reply::NotReplicated { save } => {
                self.elsewhere.missed += 1;
                let pending = self.pending.iter_mut().find(|pending| pending.save.number == save);
                pending.into_iter().for_each(|pending| pending.is_replicated = true);
            }
            // The slot stays with the agent, for one that comes after it.
            Reply::Stored { save, at_us } => {
                if let Some(save) = self.pending_save(save) {
                    save.times.lock().stored = Some(at_us);
                }
            }
            Reply::Durable { save, at_us } => {
                if let Some(pending) = self.pending.iter().find(|pending| pending.save.number == save) {
                    pending.save.times.lock().durable = Some(at_us);
                    let (own, step) = (&self.hello.start.nonce, pending.save.step);
                    if pending.slot.held().is_some_and(|held| held.start == *own) {
                        self.origin = Some(Origin { attempt: attempt_of(own).to_owned(), step });
                    }
                }
                self.settle_number(save, Ok(()));
            }
            Reply::Failed { save, error } => self.settle_number(save, Err(error.into())),
            // Another agent need not try it again.
            Reply::Resumed => self.hello.local.iter_mut().for_each(|local| local.resumes = None),
            // Only a predecessor says it, and that is heard elsewhere.
            Reply::Unsettled { .. } => {}
            Reply::Warning { message } => {
                if self.warnings.len() < MAX_WARNINGS {
                    self.warnings.push(message);
                }
            }
        }
        Ok(())
    }

    fn pending_save(&self, number: u64) -> Option<&Save> {
        self.pending.iter().map(|pending| &*pending.save).find(|save| save.number == number)
    }

    fn settle_number(&mut self, number: u64, outcome: Result<()>) {
        let position = self.pending.iter().position(|pending| pending.save.number == number);
        if let Some(pending) = position.and_then(|position| self.pending.remove(position)) {
            self.settle(pending, outcome);
        }
    }

    fn settle(&mut self, pending: Pending, outcome: Result<()>) {
        let step = pending.slot.held().filter(|_| outcome.is_ok()).map(Held::name);
        self.give_back(pending.slot);
        step.into_iter().for_each(|step| self.note_durable(step));
        pending.save.set(match outcome {
            Ok(()) => Progress::Durable,
            Err(error) => Progress::Failed(Arc::new(error)),
        });
    }

    /// Tells the agent of a sealed step, and of its memory first.
    fn send_held(
        &mut self,
        held: Held,
        memory: &Arc<SharedMemory>,
        what: fn(Box<Told>) -> Request,
    ) -> Result<()> {
        if !self.announced.as_ref().is_some_and(|announced| Arc::ptr_eq(announced, memory)) {
            self.arenas_sent += 1;
            let (arena, slot_bytes) = (self.arenas_sent, memory.len() / SLOTS);
            self.send(&Request::Arena { arena, slot_bytes }, Some(memory.as_fd()))?;
            self.announced = Some(memory.clone());
        }
        self.send(&what(Box::new(Told { arena: self.arenas_sent, held })), None)
    }

    fn send(&mut self, request: &Request, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let frame =
            serde_json::to_vec(request).map_err(|error| Error::bug(format!("encode a request: {error}")))?;
        let gone = || Error::new(ErrorKind::Unavailable, "the checkpoint agent is gone");
        let stream = self.stream.as_mut().ok_or_else(gone)?;
        let sent = stream.send(&frame, fd);
        sent.map_err(|error| {
            self.stream = None;
            gone().with_source(error)
        })
    }
}

#[cfg(test)]
mod adopt_tests;
#[cfg(test)]
mod lease_tests;
#[cfg(test)]
mod length_tests;
#[cfg(test)]
mod replica_tests;
#[cfg(test)]
mod retention_tests;
#[cfg(test)]
mod tests;
