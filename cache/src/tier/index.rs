//! What is on disk: which block lies in which file, who goes next, and how much room is taken. Pure bookkeeping.
//!
//! Eviction is FIFO with a second chance: a block read since it was last considered goes to the back. Pinned blocks
//! stand outside the queue. Room is taken when a write is planned, not when it is done, so that writes under way
//! together stay under the ceiling. Takes 80 to 160 bytes of memory a block, as the tables grow in doubles.
//!
//! What one write evicts, and passes over, is bounded: readers wait for it.

use std::collections::{HashMap, VecDeque};

use crate::block::{BlockId, BuildUniform};

/// File systems give files whole pages of this size.
const PAGE: u64 = 4096;

/// Blocks that are passed over at once, as they were read, before such ones are evicted, too: a tenth of a millisecond or so.
const CHANCES: usize = 1024;
/// Blocks that give way to others on the disk at once.
const EVICTIONS: usize = 256;

/// After a full disk lowered the ceiling, every write, and every refusal of one, raises it by this part of its size: one in
/// 64 at most finds out that the disk is still full.
const RECOVERY: u64 = 64;

/// A block's file. The serial is new for every write, so that a file is never confused with its successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) id: BlockId,
    pub(crate) serial: u64,
    /// Bytes in the file.
    pub(crate) size: u32,
    pub(crate) pinned: bool,
}

impl Slot {
    /// Bytes that the file takes on disk.
    pub(crate) fn cost(&self) -> u64 {
        cost(self.size)
    }

    /// Those of them that may be had by evicting it.
    fn evictable(&self) -> u64 {
        if self.pinned { 0 } else { self.cost() }
    }
}

/// Bytes that a file of `size` bytes takes on disk.
pub(crate) fn cost(size: u32) -> u64 {
    u64::from(size).next_multiple_of(PAGE)
}

/// Why there is no room for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Full {
    #[error("pinned blocks have reached their ceiling of {ceiling} bytes")]
    Pins { ceiling: u64 },
    #[error("the disk cache has no room under its ceiling of {ceiling} bytes that pinned blocks leave")]
    Disk { ceiling: u64 },
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    serial: u64,
    size: u32,
    pinned: bool,
    /// Whether it was since it was last considered.
    read: bool,
    /// Whether the queue has it, as it may while it is pinned.
    queued: bool,
}

impl Entry {
    fn slot(&self, id: BlockId) -> Slot {
        Slot { id, serial: self.serial, size: self.size, pinned: self.pinned }
    }
}

/// The books of a disk tier.
#[derive(Debug)]
pub(crate) struct Index {
    entries: HashMap<BlockId, Entry, BuildUniform>,
    /// Unpinned blocks by age, with the serial they were queued under: others than the entry's are leftovers.
    queue: VecDeque<(BlockId, u64)>,
    used: u64,
    pinned: u64,
    /// What the listed blocks take that are not pinned.
    evictable: u64,
    /// What was set; `ceiling` is less after the disk turned out fuller than that.
    limit: u64,
    ceiling: u64,
    /// What leaves others on the file system their part of it, when that was looked at last.
    shared: u64,
    pin_ceiling: u64,
    next_serial: u64,
    closed: bool,
}

impl Index {
    pub(crate) fn new(limit: u64, pin_ceiling: u64) -> Self {
        let (entries, queue) = (HashMap::default(), VecDeque::new());
        let [used, pinned, evictable, next_serial] = [0; 4];
        let (ceiling, shared, closed) = (limit, u64::MAX, false);
        Self {
            entries,
            queue,
            used,
            pinned,
            evictable,
            limit,
            ceiling,
            shared,
            pin_ceiling,
            next_serial,
            closed,
        }
    }

    /// Takes over a file found on disk; returns the older copy of its block, if there is one, which must go. Once all were
    /// found they are to be [settled](Self::settle).
    pub(crate) fn adopt(&mut self, slot: Slot) -> Option<Slot> {
        self.next_serial = self.next_serial.max(slot.serial.saturating_add(1));
        // A crash while pinning leaves a file under both names, of which the pinned one is kept.
        let age = |slot: &Slot| (slot.serial, slot.pinned);
        if self.peek(&slot.id).is_some_and(|listed| age(&listed) > age(&slot)) {
            return Some(slot);
        }
        self.count(&slot, true);
        self.list(slot)
    }

    /// Puts what was adopted in the order of its age; returns what is over the ceilings, which may be lower than they were,
    /// and must go.
    pub(crate) fn settle(&mut self) -> Vec<Slot> {
        let mut leave = Vec::new();
        // By age, pinned ones as well: of these the oldest stay.
        self.queue.extend(self.entries.iter().map(|(id, entry)| (*id, entry.serial)));
        self.queue.make_contiguous().sort_unstable_by_key(|(_, serial)| *serial);
        let (entries, mut pins) = (&self.entries, 0);
        self.queue.retain(|(id, _)| {
            let slot = entries[id].slot(*id);
            match slot.pinned {
                true if pins + slot.cost() > self.pin_ceiling => leave.push(slot),
                true => pins += slot.cost(),
                false => {}
            }
            !slot.pinned
        });
        leave.iter().for_each(|slot| _ = self.remove(slot));
        leave.extend(self.evict(self.limit, usize::MAX));
        leave
    }

    /// Finds a block for reading it.
    pub(crate) fn find(&mut self, id: &BlockId) -> Option<Slot> {
        let entry = self.entries.get_mut(id)?;
        entry.read = true;
        Some(entry.slot(*id))
    }

    /// Finds a block without touching the order of eviction.
    pub(crate) fn peek(&self, id: &BlockId) -> Option<Slot> {
        self.entries.get(id).map(|entry| entry.slot(*id))
    }

    /// Takes room for a file; returns its slot and the files that must be gone before it is written.
    pub(crate) fn reserve(
        &mut self,
        id: BlockId,
        size: u32,
        pinned: bool,
    ) -> Result<(Slot, Vec<Slot>), Full> {
        let slot = Slot { id, serial: self.next_serial, size, pinned };
        if pinned {
            self.check_pin(&slot)?;
        }
        let ceiling = self.ceiling_for(slot.cost());
        if self.used - self.evictable + slot.cost() > ceiling {
            // Where nothing may be evicted, refusals are all that can tell that time went by.
            self.recover(slot.cost());
            return Err(Full::Disk { ceiling });
        }
        // No more than its own place, where it takes less than was taken before.
        let leave = self.evict(ceiling.max(self.used) - slot.cost(), usize::MAX);
        self.next_serial += 1;
        self.count(&slot, true);
        Ok((slot, leave))
    }

    /// Whether one more pinned file of `slot`'s size fits.
    fn check_pin(&self, slot: &Slot) -> Result<(), Full> {
        match self.pinned + slot.cost() <= self.pin_ceiling {
            true => Ok(()),
            false => Err(Full::Pins { ceiling: self.pin_ceiling }),
        }
    }

    /// Whether a pinned file of `size` bytes would fit now, were all others to go.
    pub(crate) fn may_pin(&mut self, id: BlockId, size: u32) -> Result<(), Full> {
        let slot = Slot { id, serial: 0, size, pinned: true };
        self.check_pin(&slot)?;
        let ceiling = self.ceiling_for(slot.cost());
        match self.pinned + slot.cost() <= ceiling {
            true => Ok(()),
            false => {
                self.recover(slot.cost());
                Err(Full::Disk { ceiling })
            }
        }
    }

    /// Lists a reserved file as written; returns the one that it replaces. That is itself when the books were closed.
    pub(crate) fn commit(&mut self, slot: Slot) -> Option<Slot> {
        if self.closed {
            self.count(&slot, false);
            return Some(slot);
        }
        self.recover(slot.cost());
        if !slot.pinned {
            self.queue.push_back((slot.id, slot.serial));
        }
        self.list(slot)
    }

    /// Lists a file whose room is taken; gives back that of the one that it replaces, and returns it.
    fn list(&mut self, slot: Slot) -> Option<Slot> {
        let Slot { serial, size, pinned, .. } = slot;
        let entry = Entry { serial, size, pinned, read: false, queued: !pinned };
        let replaced = self.entries.insert(slot.id, entry).map(|old| old.slot(slot.id));
        self.evictable += slot.evictable();
        if let Some(old) = &replaced {
            self.strike(old);
        }
        replaced
    }

    /// Gives back the room of a file that is listed no more.
    fn strike(&mut self, slot: &Slot) {
        self.evictable -= slot.evictable();
        self.count(slot, false);
    }

    /// Gives the room of a reserved file back.
    pub(crate) fn release(&mut self, slot: &Slot) {
        self.count(slot, false);
    }

    /// Strikes a file off, unless the block has another one by now.
    pub(crate) fn remove(&mut self, slot: &Slot) -> bool {
        if self.peek(&slot.id) != Some(*slot) {
            return false;
        }
        self.entries.remove(&slot.id);
        self.strike(slot);
        true
    }

    /// Pins or unpins a listed file; returns its slot from now on, or `None` if the file is no longer listed.
    pub(crate) fn set_pinned(&mut self, slot: &Slot, pinned: bool) -> Result<Option<Slot>, Full> {
        let changed = Slot { pinned, ..*slot };
        if self.peek(&slot.id) != Some(*slot) {
            return Ok(None);
        }
        if pinned && !slot.pinned {
            self.check_pin(slot)?;
        }
        self.strike(slot);
        self.count(&changed, true);
        self.evictable += changed.evictable();
        if let Some(entry) = self.entries.get_mut(&slot.id) {
            entry.pinned = pinned;
            // One that was written before it was pinned has its place still, unless that came up meanwhile.
            if !pinned && !std::mem::replace(&mut entry.queued, true) {
                self.queue.push_back((slot.id, slot.serial));
            }
        }
        Ok(Some(changed))
    }

    /// The disk is full although the books say otherwise: what is taken now is all there is, for now.
    pub(crate) fn lower_ceiling(&mut self) {
        self.ceiling = self.used.min(self.limit);
    }

    /// The file system has `free` bytes, of which `kept` are for others: what is taken leaves them that, until it is looked at
    /// again. Returns who must leave for it, some at a time.
    pub(crate) fn give_way(&mut self, free: u64, kept: u64) -> Vec<Slot> {
        self.shared = self.used.saturating_add(free).saturating_sub(kept);
        self.evict(self.shared, EVICTIONS)
    }

    /// Lists nothing and takes nothing from now on. Room that was taken is given back as ever.
    pub(crate) fn close(&mut self) {
        (self.limit, self.ceiling, self.pin_ceiling, self.closed) = (0, 0, 0, true);
        self.queue.clear();
        for (id, entry) in std::mem::take(&mut self.entries) {
            self.strike(&entry.slot(id));
        }
    }

    /// Those that are pinned.
    pub(crate) fn pinned_slots(&self) -> Vec<Slot> {
        let pinned = self.entries.iter().filter(|(_, entry)| entry.pinned);
        pinned.map(|(id, entry)| entry.slot(*id)).collect()
    }

    /// What was set, of all blocks or of those that are pinned.
    pub(crate) fn ceiling(&self, pin: bool) -> u64 {
        if pin { self.pin_ceiling } else { self.limit }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    pub(crate) fn pinned(&self) -> u64 {
        self.pinned
    }

    /// Bytes of memory that the books take.
    pub(crate) fn bytes(&self) -> u64 {
        // The table keeps an eighth of its places free, and a byte beside each.
        let places = self.entries.capacity() * 8 / 7;
        let (entry, queued) = (size_of::<(BlockId, Entry)>() + 1, size_of::<(BlockId, u64)>());
        (places * entry + self.queue.capacity() * queued) as u64
    }

    /// Evicts until no more than `most` bytes are taken, or so many blocks are evicted; returns who must leave.
    fn evict(&mut self, most: u64, blocks: usize) -> Vec<Slot> {
        let (mut leave, mut chances) = (Vec::new(), CHANCES);
        while self.used > most && leave.len() < blocks {
            let Some((id, serial)) = self.queue.pop_front() else { break };
            match self.entries.get_mut(&id) {
                Some(entry) if entry.serial != serial => {}
                Some(entry) if entry.pinned => entry.queued = false,
                Some(entry) if entry.read && chances > 0 => {
                    chances -= 1;
                    entry.read = false;
                    self.queue.push_back((id, serial));
                }
                Some(entry) => {
                    let slot = entry.slot(id);
                    self.entries.remove(&id);
                    self.strike(&slot);
                    leave.push(slot);
                }
                None => {}
            }
        }
        leave
    }

    /// What a write of so much must keep to: a ceiling lowered to nothing still lets one try whether the disk has room again.
    fn ceiling_for(&self, cost: u64) -> u64 {
        self.ceiling.max(cost.min(self.limit)).min(self.shared)
    }

    /// Raises a ceiling that was lowered.
    fn recover(&mut self, cost: u64) {
        self.ceiling = (self.ceiling + cost / RECOVERY).min(self.limit);
    }

    fn count(&mut self, slot: &Slot, taken: bool) {
        let pinned = if slot.pinned { slot.cost() } else { 0 };
        let (used, pins) = if taken {
            (self.used.checked_add(slot.cost()), self.pinned.checked_add(pinned))
        } else {
            (self.used.checked_sub(slot.cost()), self.pinned.checked_sub(pinned))
        };
        self.used = used.expect("room is given back once, by whoever took it");
        self.pinned = pins.expect("pinned room is part of the room taken");
    }
}

#[cfg(test)]
mod tests;
