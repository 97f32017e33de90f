//! The arena: one piece of shared memory with two slots, reused from save to save.
//!
//! Two, so that the newest sealed step stays whole while the next one is filled. Pages are faulted in once, before
//! the first copy, and kept: copying into fresh pages costs several times as much.

use std::sync::Arc;

use forebay_core::{ErrorKind, Result};
use forebay_io::mem::{SharedMemory, WriteMapping, populate};

/// Slots are a multiple of this: a huge page.
const SLOT_ALIGNMENT: usize = 2 << 20;
/// Slots in an arena.
pub(crate) const SLOTS: usize = 2;

/// Shared memory with two slots.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<SharedMemory>,
    slot_bytes: usize,
    free: [Option<Slot>; SLOTS],
}

/// The right to write one slot of an arena. It may outlive the arena's replacement by a larger one.
#[derive(Debug)]
pub struct Slot {
    index: usize,
    memory: Arc<SharedMemory>,
    mapping: WriteMapping,
    populated: usize,
}

impl Arena {
    /// An arena whose slots hold `bytes` each and a quarter more, for a state that grows; the memory that is not
    /// written is not taken.
    pub fn create(bytes: usize) -> Result<Self> {
        let slot_bytes = (bytes + bytes / 4).next_multiple_of(SLOT_ALIGNMENT).max(SLOT_ALIGNMENT);
        let memory = Arc::new(SharedMemory::create("forebay-checkpoint", SLOTS * slot_bytes)?);
        let slot = |index: usize| -> Result<Option<Slot>> {
            let mapping = memory.map_write(index * slot_bytes..(index + 1) * slot_bytes)?;
            Ok(Some(Slot { index, memory: memory.clone(), mapping, populated: 0 }))
        };
        let free = [slot(0)?, slot(1)?];
        Ok(Self { memory, slot_bytes, free })
    }

    /// The memory, to be sent to another process.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Bytes in each slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Slots that nobody holds.
    pub fn free_slots(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.free.iter_mut().flatten()
    }

    /// A free slot, if there is one.
    pub fn take(&mut self) -> Option<Slot> {
        self.free.iter_mut().find_map(Option::take)
    }

    /// Gives a slot back; one of a former arena ends here, and its memory with it.
    pub fn give_back(&mut self, slot: Slot) {
        if !Arc::ptr_eq(&slot.memory, &self.memory) {
            return;
        }
        let place = &mut self.free[slot.index];
        debug_assert!(place.is_none(), "a slot has one holder");
        *place = Some(slot);
    }
}

impl Slot {
    /// Which slot of its arena.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The arena's memory.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Faults the first `bytes` in, with `threads` threads.
    ///
    /// # Errors
    /// `NoSpace` when the host lacks the memory.
    pub fn populate(&mut self, bytes: usize, threads: usize) -> Result<()> {
        let bytes = bytes.min(self.mapping.len());
        if bytes <= self.populated {
            return Ok(());
        }
        let missing = &mut self.mapping[self.populated..bytes];
        let part = missing.len().div_ceil(threads.max(1)).next_multiple_of(SLOT_ALIGNMENT);
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let workers: Vec<_> =
                missing.chunks_mut(part).map(|pages| scope.spawn(move || populate(pages))).collect();
            let bug = |_| Err(forebay_core::Error::bug("a thread that faults pages in panicked"));
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(bug)).collect()
        });
        outcomes.into_iter().collect::<Result<()>>().map_err(|error| {
            let message = format!("no memory for a snapshot of {bytes} bytes: {error}");
            forebay_core::Error::new(ErrorKind::NoSpace, message)
                .with_hint("a checkpointer keeps two copies of the state in host memory")
        })?;
        self.populated = bytes;
        Ok(())
    }

    /// The slot's bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.mapping
    }
}
