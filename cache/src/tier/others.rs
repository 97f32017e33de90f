//! What blocks leave of their disk to others who write to it: it is looked at before each write. Blocking.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use forebay_core::BLOCK_SIZE;
use forebay_io::disk::space;
use parking_lot::Mutex;

use crate::CacheSettings;
use crate::tier::directory::Directory;
use crate::tier::index::Index;

/// What others are left of a large file system in bytes: time to see that it fills up.
const MOST_KEPT_BYTES: u64 = 4 << 30;

/// The others on a disk.
#[derive(Debug)]
pub(crate) struct Others {
    /// What was set to be left to them in bytes.
    kept: Option<u64>,
    /// Held while blocks give way: they take their room until they are removed, and more would go for it.
    looking: Mutex<()>,
    is_told: AtomicBool,
}

impl Others {
    pub(crate) fn new(settings: &CacheSettings) -> Self {
        Self { kept: settings.free_bytes, looking: Mutex::default(), is_told: AtomicBool::new(false) }
    }

    /// Looks how much they have left, and has blocks give way; returns how many.
    pub(crate) fn give_way(&self, directory: &Directory, index: &Mutex<Index>) -> usize {
        let Some(_turn) = self.looking.try_lock() else { return 0 };
        // Of one that cannot be asked, writes find out when it is full.
        let Ok(space) = space(directory.root()) else { return 0 };
        let kept = self.kept.unwrap_or((space.total / 20).min(MOST_KEPT_BYTES));
        let leave = index.lock().give_way(space.free, kept);
        leave.iter().for_each(|slot| directory.remove(slot));
        self.tell(directory, space.free, kept);
        leave.len()
    }

    fn tell(&self, directory: &Directory, free: u64, kept: u64) {
        let directory = directory.root().display();
        if free < kept + BLOCK_SIZE && !self.is_told.swap(true, Relaxed) {
            tracing::warn!(%directory, free, kept, "the disk of the cache is nearly full: blocks give way to others");
        } else if free > 2 * (kept + BLOCK_SIZE) && self.is_told.swap(false, Relaxed) {
            tracing::info!(%directory, free, "the disk of the cache has room again");
        }
    }
}
