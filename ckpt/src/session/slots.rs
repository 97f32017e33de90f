//! This rank's memory: which slots are written, which one is taken next, and what becomes of a former arena.

use std::time::Duration;

use forebay_core::{Error, Result};

use super::{Session, crowd};
use crate::agent::{Request, Visit};
use crate::arena::{Arena, Held, SLOTS, Slot};

impl Session {
    /// Keeps one snapshot in memory in the place of two, where the host has no more: a save waits until all before it are
    /// committed or given up, and takes their place.
    pub fn keep_one_snapshot(&mut self) {
        self.slots = 1;
    }

    /// Makes sure that a state of `bytes` bytes can be copied without a page fault, on `threads` threads.
    pub fn prepare(&mut self, bytes: u64, threads: usize) -> Result<()> {
        self.make_room(bytes)?;
        let Some(mut arena) = self.arena.take() else { return Ok(()) };
        let slots = self.slots;
        let outcome = (arena.free_slots().filter(|slot| slot.index() < slots))
            .try_for_each(|slot| self.make_ready(slot, bytes, threads));
        self.arena = Some(arena);
        outcome
    }

    /// Faults a slot in, and locks it where a device is to copy into it.
    pub(super) fn make_ready(&mut self, slot: &mut Slot, bytes: u64, threads: usize) -> Result<()> {
        let (after, lost) = (self.hello.after.clone(), self.lost.told(&self.lost.followed));
        crowd::fault_in(slot, bytes, threads, &Visit::MakeWay { after, lost })?;
        let Some(device) = &self.device else { return Ok(()) };
        if let Err(error) = slot.pin(device) {
            self.warnings.push(format!("snapshots of device memory are slow: it cannot be locked: {error}"));
            // Told once, not tried again.
            self.device = None;
        }
        Ok(())
    }

    /// Whether a snapshot can be begun, even after the agent was heard or `patience` passed.
    pub fn has_room(&mut self, patience: Duration) -> Result<bool> {
        self.take_replies(Duration::ZERO)?;
        if !self.has_free_slot() {
            self.take_replies(patience)?;
        }
        Ok(self.has_free_slot())
    }

    /// Whether one of the slots that are written is in nobody's use; of a single one, whether no save and no agent needs what
    /// lies in any memory of this rank's.
    fn has_free_slot(&self) -> bool {
        let free = self.arena.as_ref().map_or(SLOTS, |arena| arena.slots().count());
        let has_free = match self.slots {
            1 => free == SLOTS && self.pending.is_empty() && self.inherited.is_empty(),
            _ => free > 0,
        };
        has_free && self.may_write()
    }

    /// Whether the step before the newest may go: not until that one is in another host's memory, too, or will not be.
    fn may_write(&self) -> bool {
        self.pending.iter().all(|pending| pending.is_replicated)
    }

    /// Replaces the arena by a larger one where the present one is too small.
    pub(super) fn make_room(&mut self, bytes: u64) -> Result<()> {
        let bytes = usize::try_from(bytes).map_err(|_| Error::invalid("the state is larger than memory"))?;
        if self.arena.as_ref().is_some_and(|arena| arena.slot_bytes() >= bytes) {
            return Ok(());
        }
        let old = self.arena.replace(Arena::create(bytes)?);
        if let Some(old) = old {
            old.into_slots().for_each(|slot| self.give_back(slot));
        }
        Ok(())
    }

    /// A free slot that may be written; the agent holds it no longer.
    pub(super) fn take_slot(&mut self) -> Option<Slot> {
        if self.slots == 1 {
            return self.take_only_slot();
        }
        let arena = if self.may_write() { self.arena.as_mut() } else { None };
        let mut slot = arena?.take(self.kept.as_ref())?;
        self.release(&mut slot);
        Some(slot)
    }

    /// The same of a single one: what it holds, and what lies beside it, is committed or was given up.
    fn take_only_slot(&mut self) -> Option<Slot> {
        if !self.has_free_slot() {
            return None;
        }
        let mut arena = self.arena.take()?;
        arena.free_slots().for_each(|slot| self.release(slot));
        let slot = arena.take_only();
        self.arena = Some(arena);
        slot
    }

    /// Has the agent forget what a slot holds.
    pub(super) fn release(&mut self, slot: &mut Slot) {
        if let Some(held) = slot.held_mut().take() {
            // A failure here is the agent's death, and it holds nothing then.
            self.send(&Request::Forget(held.name()), None).ok();
        }
    }

    /// Puts a slot that is no longer used to where it belongs; one of a former arena stays while it holds a step.
    pub(super) fn give_back(&mut self, slot: Slot) {
        let foreign = match &mut self.arena {
            Some(arena) => arena.give_back(slot),
            None => Some(slot),
        };
        match foreign {
            Some(slot) if slot.held().is_some() => self.former.push(slot),
            Some(slot) => slot.leave(),
            None => {}
        }
    }

    /// Lets go of former arenas, but for the step that is kept.
    pub(super) fn drop_former(&mut self) {
        let is_kept = |slot: &Slot| slot.held().map(Held::name) == self.kept && self.kept.is_some();
        let (stays, goes): (Vec<_>, Vec<_>) = std::mem::take(&mut self.former).into_iter().partition(is_kept);
        self.former = stays;
        for mut slot in goes {
            self.release(&mut slot);
            slot.leave();
        }
    }
}
