//! The task that writes sealed shards to this host's disk, one after another, however the store does.
//!
//! The disk is a help and no promise: what fails there is told once, and saves go on without it. One that hangs gets
//! nothing to do until it answers.

use std::sync::Arc;

use bytes::Bytes;
use forebay_core::units::format_bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::copy::{Copy, Health, Ticket, copy};
use super::protocol::now_us;
use super::trainer::Trainer;
use super::{Hello, Reply};
use crate::arena::{Held, HeldStep};
use crate::local::{Local, LocalTier};

/// What the disk is to do, in order.
pub(super) enum Work {
    /// Write a shard, and let go of its slot.
    Save { held: Arc<Held>, slot: Bytes, ticket: Ticket },
    /// Note that a step is in the store.
    Durable(HeldStep),
    /// What is there is another start's now.
    Begin(Ticket),
    /// The step that was to be brought to the store is there, or never will be: it is a copy like any other.
    Resumed,
}

/// The way to a host's disk.
#[derive(Clone)]
pub(super) struct Copies {
    queue: mpsc::Sender<Work>,
    health: Health,
    /// Of another start of the same trainer, which the disk does not know of yet.
    next: Arc<Mutex<Option<LocalTier>>>,
}

impl Copies {
    /// Of so many pieces of work at most; the disk's end is the receiver.
    pub(super) fn new(most: usize) -> (Self, mpsc::Receiver<Work>) {
        let (queue, work) = mpsc::channel(most);
        (Self { queue, health: Health::default(), next: Arc::default() }, work)
    }

    /// Has a shard copied; nothing where the disk hangs.
    pub(super) fn save(&self, held: Arc<Held>, slot: Bytes) -> Option<Copy> {
        let (copy, ticket) = copy(&self.health, held.seal.size);
        let is_sent = !self.health.hangs() && self.queue.try_send(Work::Save { held, slot, ticket }).is_ok();
        is_sent.then_some(copy)
    }

    /// Makes what is there another start's, before anything else is done; nothing is to be waited for where the disk hangs.
    pub(super) fn begin(&self, tier: LocalTier) -> Option<Copy> {
        *self.next.lock() = Some(tier);
        let (begun, ticket) = copy(&self.health, 0);
        let is_sent = !self.health.hangs() && self.queue.try_send(Work::Begin(ticket)).is_ok();
        is_sent.then_some(begun)
    }

    /// Notes that a step is in the store; where the disk hangs, it is asked for again by who needs to know.
    pub(super) fn mark(&self, step: HeldStep) {
        self.queue.try_send(Work::Durable(step)).ok();
    }

    /// Lets go of the step that was brought to the store; where the disk hangs, it stays there for longer.
    pub(super) fn resumed(&self) {
        self.queue.try_send(Work::Resumed).ok();
    }

    pub(super) fn health(&self) -> &Health {
        &self.health
    }
}

/// A host's disk, as one agent writes it.
pub(super) struct Disk {
    tier: LocalTier,
    rank: u32,
    world_size: u32,
    trainer: Trainer,
    health: Health,
    next: Arc<Mutex<Option<LocalTier>>>,
    pub(super) local: Option<Local>,
    is_told: bool,
}

impl Disk {
    /// The disk that `hello` names, if it does.
    pub(super) fn new(hello: &Hello, trainer: &Trainer, copies: &Copies) -> Option<Self> {
        let tier = hello.local.clone()?;
        let (rank, world_size) = hello.place();
        let (trainer, health, next) = (trainer.clone(), copies.health.clone(), copies.next.clone());
        Some(Self { tier, rank, world_size, trainer, health, next, local: None, is_told: false })
    }

    /// Makes the copies there those of this start, and then does all work that arrives.
    pub(super) async fn do_all(mut self, begun: Ticket, mut queue: mpsc::Receiver<Work>) {
        let outcome = self.local().await.map(drop);
        self.tell(outcome);
        drop(begun);
        self.answers();
        while let Some(work) = queue.recv().await {
            let next = self.next.lock().take();
            if let Some(tier) = next {
                (self.tier, self.local) = (tier, None);
            }
            let outcome = match work {
                Work::Save { held, slot, ticket } if ticket.is_wanted() => {
                    self.save(&held, &slot, ticket).await
                }
                Work::Save { .. } => Ok(()),
                Work::Durable(step) => self.mark(&step).await,
                Work::Begin(_ticket) => self.local().await.map(drop),
                Work::Resumed => {
                    self.tier.resumes = None;
                    Ok(())
                }
            };
            self.tell(outcome);
            self.answers();
        }
    }

    /// It did something: if it hung, it is used again.
    fn answers(&self) {
        if self.health.set(false) {
            tracing::info!(directory = self.tier.directory, "the local disk answers again");
        }
    }

    /// Copies a shard and says so, and then deletes what nobody needs, for which nobody waits.
    async fn save(&mut self, held: &Held, slot: &Bytes, ticket: Ticket) -> Result<()> {
        let (copied, save) = (self.copy(held, slot, &ticket).await, held.seal.save);
        if ticket.settle() {
            self.trainer.tell(&match copied {
                Ok(true) => Reply::Local { save, at_us: now_us(&Clock::system()) },
                _ => Reply::NoCopy { save },
            });
        }
        drop(ticket);
        // Where there was no room there may be some for the next one.
        let LocalTier { starts, keep, resumes, .. } = &self.tier;
        let pruned = match &self.local {
            Some(local) => local.prune(starts, *keep, resumes.as_ref()).await,
            None => Ok(()),
        };
        copied.map(drop).and(pruned)
    }

    async fn copy(&mut self, held: &Held, slot: &Bytes, ticket: &Ticket) -> Result<bool> {
        let local = self.local().await?;
        if let Some(ceiling) = self.tier.ceiling
            && !local.make_room(held, &self.tier.starts, ceiling, self.tier.resumes.as_ref()).await?
        {
            return Err(no_room(held, ceiling));
        }
        local.put(held, slot, || ticket.is_wanted()).await
    }

    async fn mark(&mut self, step: &HeldStep) -> Result<()> {
        self.local().await?.mark_durable(step, self.rank, self.world_size).await
    }

    async fn local(&mut self) -> Result<Local> {
        if let Some(local) = &self.local {
            return Ok(local.clone());
        }
        let local = Local::open(&self.tier.directory).await?;
        local.begin(&self.tier.starts, self.tier.seen).await?;
        Ok(self.local.insert(local).clone())
    }

    /// A failure of the tier is told once.
    fn tell(&mut self, outcome: Result<()>) {
        let Err(error) = outcome else { return };
        tracing::warn!(%error, directory = self.tier.directory, "no copy on the local disk");
        if !std::mem::replace(&mut self.is_told, true) {
            let directory = &self.tier.directory;
            let message = format!("saves go on without copies on the local disk ({directory}): {error}");
            self.trainer.tell(&Reply::Warning { message });
        }
    }
}

/// Why a copy would go past the ceiling.
fn no_room(held: &Held, ceiling: u64) -> Error {
    let (step, bytes, ranks) = (held.seal.step, format_bytes(held.seal.size), held.world_size);
    let fact = format!("step {step} has {bytes} of rank {} of {ranks}, which do not fit", held.rank);
    Error::new(ErrorKind::NoSpace, format!("{fact} below local_bytes ({})", format_bytes(ceiling)))
}
