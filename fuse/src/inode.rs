//! The inodes that the kernel holds, and what is remembered of each until it forgets them.
//!
//! One small record per inode in the kernel's cache: its size is bounded by the kernel's, whose own record of an
//! inode is some twenty times larger. Knows nothing of names or content.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use forebay_core::{Attributes, InodeId};
use forebay_metadata::tree::Removed;
use parking_lot::Mutex;

/// Independent maps, so that worker threads rarely meet: more than any machine runs workers.
const SHARDS: usize = 16;

#[derive(Debug, Default)]
struct Record {
    /// Names and handles that the kernel was given and has not forgotten.
    lookups: u64,
    /// Content generation that the kernel's cached pages belong to.
    cached: Option<u64>,
    /// The generation that all pages in the kernel's cache are of, or of later ones, as it was told to drop others.
    dropped_before: Option<u64>,
    /// The size that the kernel takes the file to have. It is told of no loss, and of no outsider's change, until it asks.
    size: u64,
    /// What it was when its last name was taken away here: the tree may know it no more.
    removed: Option<Box<Removed>>,
}

/// Lookup counts of all inodes that the kernel holds.
#[derive(Debug, Default)]
pub(crate) struct InodeTable {
    shards: [Mutex<HashMap<InodeId, Record>>; SHARDS],
}

impl InodeTable {
    /// Counts one more reference handed to the kernel, with the file's size.
    pub(crate) fn looked_up(&self, ino: InodeId, size: u64) {
        if ino != InodeId::ROOT {
            let mut shard = self.shard(ino).lock();
            let record = shard.entry(ino).or_default();
            record.lookups += 1;
            record.size = size;
        }
    }

    /// Notes that the kernel is told the file's size.
    pub(crate) fn shown(&self, ino: InodeId, size: u64) {
        self.change(ino, |record| record.size = size);
    }

    /// Notes that the kernel takes the file to reach `end` at least, after a change of its own.
    pub(crate) fn reaches(&self, ino: InodeId, end: u64) {
        self.change(ino, |record| record.size = record.size.max(end));
    }

    /// The size that the kernel takes the file to have.
    pub(crate) fn size(&self, ino: InodeId) -> u64 {
        self.shard(ino).lock().get(&ino).map_or(0, |record| record.size)
    }

    /// Takes `count` references back; true when the kernel holds none any more.
    pub(crate) fn forget(&self, ino: InodeId, count: u64) -> bool {
        match self.shard(ino).lock().entry(ino) {
            Entry::Occupied(mut record) if record.get().lookups > count => {
                record.get_mut().lookups -= count;
                false
            }
            Entry::Occupied(record) => {
                record.remove();
                true
            }
            Entry::Vacant(_) => false,
        }
    }

    /// Notes that pages of `generation` enter the kernel's cache; true when those that lie there are of it too.
    pub(crate) fn keeps_cache(&self, ino: InodeId, generation: u64) -> bool {
        match self.shard(ino).lock().get_mut(&ino) {
            Some(record) => record.cached.replace(generation) == Some(generation),
            None => false,
        }
    }

    /// Whether the kernel may have pages of a generation before `generation`.
    pub(crate) fn may_have_older(&self, ino: InodeId, generation: u64) -> bool {
        let shard = self.shard(ino).lock();
        shard.get(&ino).is_none_or(|record| record.dropped_before != Some(generation))
    }

    /// Notes that the kernel has dropped all pages since the file has been of `generation`.
    pub(crate) fn dropped(&self, ino: InodeId, generation: u64) {
        self.change(ino, |record| record.dropped_before = Some(generation));
    }

    /// Notes that bytes that were not committed enter the kernel's cache: whether they will be, nobody knows.
    pub(crate) fn doubt_cache(&self, ino: InodeId) {
        self.change(ino, |record| record.cached = None);
    }

    /// Notes that the last name of an inode was taken away here.
    pub(crate) fn removed(&self, removed: Removed) {
        self.change(removed.attributes.ino, |record| record.removed = Some(removed.into()));
    }

    /// What an inode without names was, as long as the kernel holds it.
    pub(crate) fn left(&self, ino: InodeId) -> Option<Removed> {
        let shard = self.shard(ino).lock();
        let record = shard.get(&ino)?;
        let mut removed = Removed::clone(record.removed.as_ref()?);
        // It may have been open, and written to.
        removed.attributes.size = record.size;
        Some(removed)
    }

    /// Notes what became of an inode that may have no name.
    pub(crate) fn changed(&self, attributes: &Attributes) {
        self.change(attributes.ino, |record| {
            if let Some(removed) = &mut record.removed {
                removed.attributes = attributes.clone();
            }
        });
    }

    /// References to `ino` that the kernel holds.
    pub(crate) fn lookups(&self, ino: InodeId) -> u64 {
        self.shard(ino).lock().get(&ino).map_or(0, |record| record.lookups)
    }

    fn change(&self, ino: InodeId, change: impl FnOnce(&mut Record)) {
        if let Some(record) = self.shard(ino).lock().get_mut(&ino) {
            change(record);
        }
    }

    fn shard(&self, ino: InodeId) -> &Mutex<HashMap<InodeId, Record>> {
        &self.shards[ino.0 as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_gone_when_every_lookup_was_forgotten() {
        let table = InodeTable::default();
        let ino = InodeId(7);
        for _ in 0..3 {
            table.looked_up(ino, 0);
        }
        assert!(!table.forget(ino, 2));
        assert_eq!(table.lookups(ino), 1);
        assert!(table.forget(ino, 1));
        assert_eq!(table.lookups(ino), 0);
        assert!(!table.forget(ino, 1), "a second forget finds nothing");
    }

    #[test]
    fn the_root_is_never_counted() {
        let table = InodeTable::default();
        table.looked_up(InodeId::ROOT, 0);
        assert!(!table.forget(InodeId::ROOT, 1));
    }

    #[test]
    fn pages_are_kept_only_under_the_generation_they_came_with() {
        let table = InodeTable::default();
        let ino = InodeId(9);
        assert!(!table.keeps_cache(ino, 1), "the kernel does not hold it");
        table.looked_up(ino, 0);
        assert!(!table.keeps_cache(ino, 1), "never opened before");
        assert!(table.keeps_cache(ino, 1));
        assert!(!table.keeps_cache(ino, 2), "the content changed");
        table.forget(ino, 1);
        table.looked_up(ino, 0);
        assert!(!table.keeps_cache(ino, 2), "forgotten, so the pages are gone");
        // One that is being opened has not dropped them yet.
        assert!(table.may_have_older(ino, 2));
        table.dropped(ino, 2);
        assert!(!table.may_have_older(ino, 2) && table.may_have_older(ino, 3));
    }
}
