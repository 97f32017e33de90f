//! What an agent holds: the trainer's memory, and the sealed steps in it that a successor may ask for.
//!
//! As many steps as the trainer has slots: it has each forgotten before it writes there again.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{Error, Result};
use forebay_io::mem::{Lease, SharedMemory};
use forebay_io::net::FdStream;
use serde::Serialize;

use super::replicas::Replica;
use super::{Answer, KeptStep, Told};
use crate::arena::{Held, HeldStep, SLOTS, Seal, slot_range};
use crate::catalog::Start;

/// Memory and its slots, as this process sees them.
struct Arena {
    number: u64,
    memory: Arc<SharedMemory>,
    slots: Vec<Bytes>,
}

/// A sealed step and what keeps its bytes.
struct Holding {
    held: Held,
    memory: Arc<SharedMemory>,
}

/// All of it.
#[derive(Default)]
pub(crate) struct Holdings {
    /// The one that was announced last.
    arena: Option<Arena>,
    held: Vec<Holding>,
}

impl Holdings {
    /// These steps, and where they lie.
    pub(crate) fn of(steps: Vec<(Held, Arc<SharedMemory>)>) -> Self {
        let held = steps.into_iter().map(|(held, memory)| Holding { held, memory }).collect();
        Self { arena: None, held }
    }

    /// Takes the memory that following seals mean.
    pub(super) fn announce(&mut self, number: u64, slot_bytes: usize, fd: Option<OwnedFd>) -> Result<()> {
        let fd = fd.ok_or_else(|| Error::invalid("an arena came without its descriptor"))?;
        let memory = SharedMemory::from_fd(fd)?;
        let slot = |slot| -> Result<Bytes> {
            Ok(Bytes::from_owner(memory.map_read(slot * slot_bytes..(slot + 1) * slot_bytes)?))
        };
        let slots = (0..SLOTS).map(slot).collect::<Result<_>>()?;
        self.arena = Some(Arena { number, memory: Arc::new(memory), slots });
        Ok(())
    }

    /// Holds a sealed step; gives its slot.
    ///
    /// # Errors
    /// `Invalid` for a slot that does not exist or is too small.
    pub(super) fn hold(&mut self, Told { arena, held }: Told) -> Result<Bytes> {
        let Seal { slot, header, size, .. } = held.seal;
        let arena = self.arena.as_ref().filter(|known| known.number == arena);
        let found = arena.and_then(|arena| Some((arena.memory.clone(), arena.slots.get(slot)?.clone())));
        let fits = |(_, slot): &(_, Bytes)| header <= size && size <= slot.len() as u64;
        let (memory, bytes) =
            found.filter(fits).ok_or_else(|| Error::invalid("a seal of a slot that does not exist"))?;
        self.held.retain(|other| (other.memory.id(), other.held.seal.slot) != (memory.id(), slot));
        self.held.push(Holding { held, memory });
        Ok(bytes)
    }

    /// The memory that `save`, which is held, lies in.
    pub(super) fn memory(&self, save: u64) -> Option<Arc<SharedMemory>> {
        self.held.iter().find(|holding| holding.held.seal.save == save).map(|holding| holding.memory.clone())
    }

    /// Says to all that have the memory that `save`, which is held, is being read, until the lease is dropped.
    pub(super) fn lease(&self, save: u64) -> Option<Lease> {
        let Holding { held, memory } = self.held.iter().find(|holding| holding.held.seal.save == save)?;
        let lease = memory.lease(slot_range(memory, held.seal.slot));
        let note =
            |error: &Error| tracing::debug!(%error, "later starts are not told that a step is being read");
        lease.inspect_err(note).ok()
    }

    /// Lets a step go.
    pub(super) fn forget(&mut self, step: &HeldStep) {
        self.held.retain(|holding| holding.held.name() != *step);
    }

    /// Lets the steps go that come after this one; gives their saves.
    pub(super) fn forget_after(&mut self, step: u64) -> Vec<u64> {
        let goes = self.held.extract_if(.., |holding| holding.held.seal.step > step);
        goes.map(|holding| holding.held.seal.save).collect()
    }

    /// Lets everything go.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether there is nothing that a successor could ask for.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The numbers of the saves that are held.
    pub(super) fn saves(&self) -> Vec<u64> {
        self.held.iter().map(|holding| holding.held.seal.save).collect()
    }

    /// The number of the save of a step, where it is held.
    pub(super) fn save_of(&self, step: &HeldStep) -> Option<u64> {
        let mut held = self.held.iter().map(|holding| &holding.held);
        held.find(|held| held.name() == *step).map(|held| held.seal.save)
    }

    /// Shows a visitor everything: of which start it is, which ones that came after, which saves of it `is_durable` has to be
    /// committed, and what is `kept` for ranks of other hosts.
    pub(crate) fn show(
        &mut self,
        (start, after): (&Start, &[String]),
        is_durable: impl Fn(u64) -> bool,
        kept: &[Replica],
        visitor: &mut FdStream,
    ) -> Result<()> {
        self.held.sort_by_key(|holding| holding.held.seal.save);
        let all = || self.held.iter().map(|holding| &holding.held);
        let durable = all().filter(|held| is_durable(held.seal.save)).map(Held::name).collect();
        let held = all().map(Held::name).collect();
        let Start { nonce, started_ms, .. } = start.clone();
        let of_others =
            kept.iter().map(|Replica { held, .. }| KeptStep { rank: held.rank, step: held.name() });
        let (after, kept_steps) = (after.to_vec(), of_others.collect());
        let answer = Answer { start: nonce, started_ms, held, durable, after, kept: kept_steps };
        visitor.send(&frame(&answer)?, None)?;
        let own = self.held.iter().map(|Holding { held, memory }| (held, memory));
        for (held, memory) in own.chain(kept.iter().map(|Replica { held, memory, .. }| (held, memory))) {
            visitor.send(&frame(held)?, Some(memory.as_fd()))?;
        }
        Ok(())
    }
}

fn frame(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::bug(format!("encode an answer: {error}")))
}
