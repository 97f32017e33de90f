//! The inodes that are open, and those that were lately.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use forebay_core::{Error, InodeId};

use crate::inode::OpenInode;

/// Inodes that are known by their numbers after they were closed. Who was held up for longer than these took asks again.
const REMEMBERED: usize = 1024;

/// Closed files of which a loss is still to be told: some may be removed, and opened by nobody any more. Where there are more,
/// of some only the log tells.
const MOST_UNTOLD: usize = 1024;

/// An inode that is open here and how many handles it has.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) inode: Arc<OpenInode>,
    pub(super) handles: usize,
}

/// The inodes that are open here.
#[derive(Debug, Default)]
pub(super) struct OpenTable {
    inodes: HashMap<InodeId, Opened>,
    /// How many were taken off, and the last of them, the newest one in front.
    gone: u64,
    last_gone: VecDeque<InodeId>,
    /// Bytes of closed files that were lost, as whoever opens them next is told.
    untold: HashMap<InodeId, Error>,
}

impl OpenTable {
    pub(super) fn is_empty(&self) -> bool {
        self.inodes.is_empty()
    }

    /// Whether nothing is open, nor was since `gone` were taken off.
    pub(super) fn is_unchanged(&self, gone: u64) -> bool {
        self.inodes.is_empty() && self.gone == gone
    }

    pub(super) fn get(&self, ino: InodeId) -> Option<&Arc<OpenInode>> {
        self.inodes.get(&ino).map(|opened| &opened.inode)
    }

    pub(super) fn get_mut(&mut self, ino: InodeId) -> Option<&mut Opened> {
        self.inodes.get_mut(&ino)
    }

    /// How many handles an inode has.
    pub(super) fn handles(&self, ino: InodeId) -> usize {
        self.inodes.get(&ino).map_or(0, |opened| opened.handles)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<OpenInode>> {
        self.inodes.values().map(|opened| &opened.inode)
    }

    /// Counts one more handle on an open inode, which `fresh` makes if there is none.
    pub(super) fn add_handle(
        &mut self,
        ino: InodeId,
        fresh: impl FnOnce() -> Option<Arc<OpenInode>>,
    ) -> Option<Arc<OpenInode>> {
        let opened = match self.inodes.entry(ino) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let inode = fresh()?;
                self.untold.remove(&ino).into_iter().for_each(|error| inode.record_failure(error));
                entry.insert(Opened { inode, handles: 0 })
            }
        };
        opened.handles += 1;
        Some(opened.inode.clone())
    }

    /// Takes off an inode whose last handle is gone.
    pub(super) fn remove(&mut self, ino: InodeId) {
        if let Some(removed) = self.inodes.remove(&ino) {
            if let Some(error) = removed.inode.unknown_failure() {
                let is_full = self.untold.len() >= MOST_UNTOLD;
                if let Some(other) = self.untold.keys().next().copied().filter(|_| is_full) {
                    self.untold.remove(&other);
                }
                self.untold.insert(ino, error);
            }
            self.gone += 1;
            self.last_gone.truncate(REMEMBERED - 1);
            self.last_gone.push_front(ino);
        }
    }

    /// How many inodes were open and are not any more.
    pub(super) fn gone(&self) -> u64 {
        self.gone
    }

    /// Whether one was taken off after `gone` of them were, or may have been.
    pub(super) fn is_gone_since(&self, ino: InodeId, gone: u64) -> bool {
        let since = usize::try_from(self.gone - gone).unwrap_or(usize::MAX);
        since > self.last_gone.len() || self.last_gone.range(..since).any(|last| *last == ino)
    }
}
