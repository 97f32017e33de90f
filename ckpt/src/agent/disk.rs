//! The task that writes sealed shards to this host's disk, one after another, however the store does.
//!
//! The disk is a help and no promise: what fails there is told once, and saves go on without it.

use bytes::Bytes;
use forebay_core::units::format_bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use tokio::sync::{mpsc, oneshot};

use super::protocol::now_us;
use super::trainer::Trainer;
use super::{Hello, Reply};
use crate::arena::{Held, HeldStep};
use crate::local::{Local, LocalTier};

/// What the disk is to do, in order.
pub(super) enum Work {
    /// Write a shard, and let go of its slot.
    Save { held: Box<Held>, slot: Bytes, _done: oneshot::Sender<()> },
    /// Note that a step is in the store.
    Durable(HeldStep),
}

/// A host's disk, as one agent writes it.
pub(super) struct Disk {
    tier: LocalTier,
    rank: u32,
    world_size: u32,
    trainer: Trainer,
    local: Option<Local>,
    is_told: bool,
}

impl Disk {
    /// The disk that `hello` names, if it does. From now on the copies there are those of this start.
    pub(super) async fn begin(hello: &Hello, trainer: &Trainer) -> Option<Self> {
        let tier = hello.local.clone()?;
        let (rank, world_size) = hello.place();
        let trainer = trainer.clone();
        let mut disk = Self { tier, rank, world_size, trainer, local: None, is_told: false };
        let begun = disk.local().await.map(drop);
        disk.tell(begun);
        Some(disk)
    }

    /// Does all work that arrives.
    pub(super) async fn do_all(mut self, mut queue: mpsc::Receiver<Work>) {
        while let Some(work) = queue.recv().await {
            let outcome = match work {
                Work::Save { held, slot, _done } => self.save(&held, &slot).await,
                Work::Durable(step) => self.mark(&step).await,
            };
            self.tell(outcome);
        }
    }

    async fn save(&mut self, held: &Held, slot: &Bytes) -> Result<()> {
        let (LocalTier { starts, keep, ceiling, .. }, local) = (self.tier.clone(), self.local().await?);
        if let Some(ceiling) = ceiling
            && !local.make_room(held, &starts, ceiling).await?
        {
            return Err(no_room(held, ceiling));
        }
        let written = local.put(held, slot).await;
        if written.is_ok() {
            let at_us = now_us(&Clock::system());
            self.trainer.tell(&Reply::Local { save: held.seal.save, at_us });
        }
        // Where there was no room there may be some for the next one.
        written.and(local.prune(&starts, keep).await)
    }

    async fn mark(&mut self, step: &HeldStep) -> Result<()> {
        self.local().await?.mark_durable(step, self.rank, self.world_size).await
    }

    async fn local(&mut self) -> Result<Local> {
        if let Some(local) = &self.local {
            return Ok(local.clone());
        }
        let local = Local::open(&self.tier.directory).await?;
        local.begin(&self.tier.starts).await?;
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
