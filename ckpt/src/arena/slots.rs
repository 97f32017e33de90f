//! The arena: one piece of shared memory with two slots, reused from save to save.
//!
//! Two, so that the newest step that all ranks sealed stays whole while the next one is filled. Where the host has memory for
//! one snapshot only, the second slot is never written, and takes none. Pages are faulted in once, before the first copy, and
//! kept: copying into fresh pages costs several times as much.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use forebay_core::{ErrorKind, Result};
use forebay_io::device::{Device, Pinned};
use forebay_io::mem::{self, SharedMemory, WriteMapping, populate};

use super::{Held, HeldStep};

/// Slots are a multiple of this: a huge page.
const SLOT_ALIGNMENT: usize = 2 << 20;
/// What a thread faults in at once, and what has to be left of the host's memory before that, where as much is still to come:
/// more than as many threads as copy take meanwhile.
const PIECE: usize = 64 << 20;
pub(crate) const LEFT: u64 = 512 << 20;
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
    /// The bytes that a device's driver holds in place; let go of before they are unmapped.
    pinned: Option<(usize, Pinned)>,
    mapping: WriteMapping,
    populated: usize,
    held: Option<Box<Held>>,
}

#[cfg(test)]
thread_local! {
    /// Whether the host lacks the memory that this thread has faulted in next.
    pub(crate) static LACKS_MEMORY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

fn no_memory(bytes: usize, error: &forebay_core::Error) -> forebay_core::Error {
    let message = format!("no memory for a snapshot of {bytes} bytes: {error}");
    forebay_core::Error::new(ErrorKind::NoSpace, message).with_hint(
        "a checkpointer keeps two copies of the state in host memory, or one with snapshots=1: have less beside them, or \
         fewer ranks on a host",
    )
}

/// Faults `pages` in, of so many bytes that are `missing` still, of all threads. Those of memory that another process had are
/// there.
///
/// # Errors
/// `NoSpace` before the kernel would end a process for it.
fn take(pages: &mut [u8], missing: &AtomicUsize) -> Result<()> {
    for piece in pages.chunks_mut(PIECE) {
        let absent = mem::absent_bytes(piece);
        if absent > 0
            && let Some(left) = mem::available()
            && left < LEFT.min(missing.load(Relaxed) as u64)
        {
            let message =
                format!("{left} bytes of memory are left on this host, or of what its limits allow");
            return Err(forebay_core::Error::new(ErrorKind::NoSpace, message));
        }
        populate(piece)?;
        missing.fetch_sub(absent, Relaxed);
    }
    Ok(())
}

/// Faults in memory for a copy of what another process sealed.
///
/// # Errors
/// `NoSpace` when the host lacks it.
pub(crate) fn populate_copy(memory: &mut [u8]) -> Result<()> {
    let missing = AtomicUsize::new(memory.chunks(PIECE).map(mem::absent_bytes).sum());
    take(memory, &missing).map_err(|error| {
        let message = format!("no memory for a copy of {} bytes: {error}", memory.len());
        forebay_core::Error::new(ErrorKind::NoSpace, message)
    })
}

/// Where slot `index` of an arena's memory lies.
pub(crate) fn slot_range(memory: &SharedMemory, index: usize) -> Range<usize> {
    let bytes = memory.len() / SLOTS;
    index * bytes..(index + 1) * bytes
}

impl Arena {
    /// An arena whose slots hold `bytes` each and a quarter more, for a state that grows; the memory that is not
    /// written is not taken.
    ///
    /// # Errors
    /// `NoSpace` when the process may not have so much.
    pub fn create(bytes: usize) -> Result<Self> {
        let slot_bytes = (bytes + bytes / 4).next_multiple_of(SLOT_ALIGNMENT).max(SLOT_ALIGNMENT);
        let made = SharedMemory::create("forebay-checkpoint", SLOTS * slot_bytes);
        let (mut arena, slots) = made
            .and_then(|memory| Self::adopt(Arc::new(memory)))
            .map_err(|error| no_memory(bytes, &error))?;
        slots.into_iter().for_each(|slot| drop(arena.give_back(slot)));
        Ok(arena)
    }

    /// The arena that another process made, and its slots, which that one may still be using.
    pub fn adopt(memory: Arc<SharedMemory>) -> Result<(Self, Vec<Slot>)> {
        let slots = (0..SLOTS).map(|index| Slot::map(&memory, index)).collect::<Result<_>>()?;
        let slot_bytes = memory.len() / SLOTS;
        Ok((Self { memory, slot_bytes, free: [None, None] }, slots))
    }

    /// The memory, to be sent to another process.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Bytes in each slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// As [`Arena::free_slots`], to be looked at.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.free.iter().flatten()
    }

    /// Slots that nobody uses.
    pub fn free_slots(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.free.iter_mut().flatten()
    }

    /// Its free slots, which may outlive it.
    pub fn into_slots(self) -> impl Iterator<Item = Slot> {
        self.free.into_iter().flatten()
    }

    /// A free slot, if there is one other than that which holds `kept`: one that holds nothing, else the older step.
    pub fn take(&mut self, kept: Option<&HeldStep>) -> Option<Slot> {
        let may_go = |slot: &&mut Option<Slot>| {
            slot.as_ref().is_some_and(|slot| kept.is_none() || slot.held().map(Held::name).as_ref() != kept)
        };
        let age = |slot: &&mut Option<Slot>| slot.as_ref().and_then(Slot::held).map(|held| held.seal.save);
        self.free.iter_mut().filter(may_go).min_by_key(age)?.take()
    }

    /// As [`Arena::take`], where one snapshot is all that there is memory for: the first slot, if neither is in use. The other
    /// one, which a process that had two may have filled, gives its memory back.
    pub fn take_only(&mut self) -> Option<Slot> {
        let [first, others @ ..] = &mut self.free;
        if others.iter().any(Option::is_none) {
            return None;
        }
        others.iter_mut().flatten().for_each(Slot::give_up);
        first.take()
    }

    /// Gives a slot back; one of another arena is returned.
    pub fn give_back(&mut self, slot: Slot) -> Option<Slot> {
        if !Arc::ptr_eq(&slot.memory, &self.memory) {
            return Some(slot);
        }
        let place = &mut self.free[slot.index];
        debug_assert!(place.is_none(), "a slot has one holder");
        *place = Some(slot);
        None
    }
}

impl Slot {
    /// Slot `index` of an arena's memory.
    pub fn map(memory: &Arc<SharedMemory>, index: usize) -> Result<Self> {
        let mapping = memory.map_write(slot_range(memory, index))?;
        Ok(Self { index, memory: memory.clone(), pinned: None, mapping, populated: 0, held: None })
    }

    /// The sealed step in it, if it holds one whole.
    pub fn held(&self) -> Option<&Held> {
        self.held.as_deref()
    }

    /// As [`Slot::held`], to be changed.
    pub fn held_mut(&mut self) -> &mut Option<Box<Held>> {
        &mut self.held
    }

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
    /// `NoSpace` when the host lacks the memory: none is taken then.
    pub fn populate(&mut self, bytes: usize, threads: usize) -> Result<()> {
        let bytes = bytes.min(self.mapping.len());
        if bytes <= self.populated {
            return Ok(());
        }
        #[cfg(test)]
        if LACKS_MEMORY.take() {
            return Err(no_memory(bytes, &forebay_core::Error::bug("a test has it so")));
        }
        let missing = &mut self.mapping[self.populated..bytes];
        let count = &AtomicUsize::new(missing.chunks(PIECE).map(mem::absent_bytes).sum());
        let part = missing.len().div_ceil(threads.max(1)).next_multiple_of(SLOT_ALIGNMENT);
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let workers: Vec<_> =
                missing.chunks_mut(part).map(|pages| scope.spawn(move || take(pages, count))).collect();
            let bug = |_| Err(forebay_core::Error::bug("a thread that faults pages in panicked"));
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(bug)).collect()
        });
        if let Err(error) = outcomes.into_iter().collect::<Result<()>>() {
            // What another process sealed stays.
            if self.held.is_none() {
                self.pinned = None;
                mem::give_up(missing);
            }
            return Err(no_memory(bytes, &error));
        }
        self.populated = bytes;
        Ok(())
    }

    /// Locks what is populated so far, so that a device copies into it by itself.
    ///
    /// # Errors
    /// What the device's driver says: copies go on without, slower.
    pub fn pin(&mut self, device: &Arc<Device>) -> Result<()> {
        let bytes = self.populated.next_multiple_of(SLOT_ALIGNMENT).min(self.mapping.len());
        if bytes == 0 || self.pinned.as_ref().is_some_and(|(pinned, _)| *pinned == bytes) {
            return Ok(());
        }
        self.pinned = None;
        self.pinned = Some((bytes, device.pin(&mut self.mapping[..bytes])?));
        Ok(())
    }

    /// Whether an agent says that it reads the slot, be it that of a start before the last one. Where the kernel has no such
    /// locks, none does.
    pub fn is_being_read(&self) -> bool {
        self.memory.is_leased(slot_range(&self.memory, self.index)).unwrap_or(false)
    }

    /// Lets go of a slot that is not written any more, and gives its memory back, whoever else has it mapped: an agent has, until
    /// it is told of the next one. What an agent reads stays until all have let go of it.
    pub fn leave(mut self) {
        if !self.is_being_read() {
            self.give_up();
        }
    }

    /// Gives the memory back. The caller has let go of what it held.
    fn give_up(&mut self) {
        self.pinned = None;
        mem::give_up(&mut self.mapping);
        self.populated = 0;
    }

    /// The slot's bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.mapping
    }
}
