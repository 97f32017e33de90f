//! What is kept in memory of quotas: which directories are counted, and what files that are being written may grow by.

use std::collections::{HashMap, HashSet};

use forebay_core::InodeId;
use parking_lot::Mutex;

/// One per tree. Only the committer's closures change it, hence one after another; what a closure that failed
/// noted is at most a directory too many or a file's reservation.
#[derive(Debug, Default)]
pub(crate) struct Quotas(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Directories that may have a `Q` record; no other has.
    counted: HashSet<InodeId>,
    /// Files that are being written, bounded by those that are open.
    reserved: HashMap<InodeId, Reservation>,
    /// Bytes reserved in each directory.
    promised: HashMap<InodeId, u64>,
}

/// Bytes that an open file may grow by, and where they count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reservation {
    pub(super) bytes: u64,
    pub(super) directories: Vec<InodeId>,
}

impl Quotas {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().counted.is_empty()
    }

    pub(crate) fn add(&self, directory: InodeId) {
        self.0.lock().counted.insert(directory);
    }

    /// Forgets a directory whose record is gone for good.
    pub(crate) fn remove(&self, directory: InodeId) {
        self.0.lock().counted.remove(&directory);
    }

    pub(super) fn may_have(&self, directory: InodeId) -> bool {
        self.0.lock().counted.contains(&directory)
    }

    pub(super) fn only_the_root(&self) -> bool {
        let state = self.0.lock();
        state.counted.len() == 1 && state.counted.contains(&InodeId::ROOT)
    }

    /// Takes back what a file may grow by: it was committed, or closed.
    pub(crate) fn release(&self, ino: InodeId) {
        let mut state = self.0.lock();
        let Some(reservation) = state.reserved.remove(&ino) else { return };
        for directory in reservation.directories {
            if let Some(promised) = state.promised.get_mut(&directory) {
                *promised = promised.saturating_sub(reservation.bytes);
            }
        }
    }

    pub(super) fn reservation(&self, ino: InodeId) -> Option<Reservation> {
        self.0.lock().reserved.get(&ino).cloned()
    }

    pub(super) fn hold(&self, ino: InodeId, reservation: Reservation) {
        self.release(ino);
        let mut state = self.0.lock();
        for directory in &reservation.directories {
            let promised = state.promised.entry(*directory).or_default();
            *promised = promised.saturating_add(reservation.bytes);
        }
        state.reserved.insert(ino, reservation);
    }

    pub(super) fn promised(&self, directory: InodeId) -> u64 {
        self.0.lock().promised.get(&directory).copied().unwrap_or(0)
    }
}
