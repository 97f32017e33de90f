//! The state of one mounted file system: its volume, its policy, what the kernel holds and what is open.

use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Appearance, Attributes, InodeId};
use forebay_io::clock::Clock;
use forebay_metadata::tree::OutsideListener;
use forebay_volume::{File, Volume};

use super::listing::Cursor;
use super::locks::LockOwners;
use super::removed::Removals;
use crate::errno::{Errno, FsResult};
use crate::handle::{Handle, HandleTable, RecentMap};
use crate::inode::InodeTable;

/// Open files of one mount. Well above what a process may hold (1,048,576 by default on large hosts), low enough that
/// a leak shows before memory ends.
const OPEN_FILES_MAX: usize = 1 << 20;
/// Open directories of one mount.
const OPEN_DIRECTORIES_MAX: usize = 1 << 16;
/// Files that a mount without OPEN keeps at hand; more than that are opened again when they are next read.
const SHARED_FILES_MAX: usize = 1 << 14;
/// Directories that a mount without OPENDIR keeps a reading position for.
const SHARED_DIRECTORIES_MAX: usize = 1 << 10;

/// How a mount behaves towards the kernel.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Answer no OPEN, OPENDIR and FLUSH: the kernel opens and closes files on its own and keeps every page. For
    /// content that does not change.
    pub dataset: bool,
    /// How long the kernel may use names and attributes without asking: a second at most where other mounts may change them.
    pub ttl: Duration,
    /// Note when files are read, as relatime says.
    pub relatime: bool,
    /// Owner, group and mode of what nobody gave any.
    pub appearance: Appearance,
}

impl Policy {
    /// For read-write mounts and live prefixes: what others change shows after a second.
    pub const LIVE_TTL: Duration = Duration::from_secs(1);
    /// For datasets, whose content is taken as fixed: a day, so that a warm epoch asks nothing.
    pub const DATASET_TTL: Duration = Duration::from_secs(24 * 3600);
}

pub(super) type Directory = Arc<tokio::sync::Mutex<Cursor>>;

/// One mounted file system.
#[derive(Debug)]
pub struct FileSystem {
    pub(super) volume: Arc<Volume>,
    pub(super) policy: Policy,
    pub(super) clock: Clock,
    pub(super) inodes: InodeTable,
    pub(super) removals: Removals,
    pub(super) lock_owners: LockOwners,
    pub(super) files: HandleTable<Arc<File>>,
    pub(super) directories: HandleTable<Directory>,
    pub(super) shared_files: RecentMap<InodeId, Arc<File>>,
    pub(super) shared_directories: RecentMap<InodeId, Directory>,
}

impl FileSystem {
    /// A file system over `volume`; `clock` says what UTIME_NOW is.
    pub fn new(volume: Arc<Volume>, policy: Policy, clock: Clock) -> Self {
        // The kernel is told of what other mounts change, and that may be lost.
        let most = if volume.is_shared() { Policy::LIVE_TTL } else { Duration::MAX };
        let policy = Policy { ttl: policy.ttl.min(most), ..policy };
        Self {
            volume,
            policy,
            clock,
            inodes: InodeTable::default(),
            removals: Removals::default(),
            lock_owners: LockOwners::default(),
            files: HandleTable::new(OPEN_FILES_MAX),
            directories: HandleTable::new(OPEN_DIRECTORIES_MAX),
            shared_files: RecentMap::new(SHARED_FILES_MAX),
            shared_directories: RecentMap::new(SHARED_DIRECTORIES_MAX),
        }
    }

    /// How the mount behaves.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// How long the kernel may take it that a name is nobody's: where other mounts make names, who was told of one finds it.
    pub(crate) fn miss_ttl(&self) -> Duration {
        if self.volume.is_shared() { Duration::ZERO } else { self.policy.ttl }
    }

    /// References to `ino` that the kernel holds.
    pub fn lookups(&self, ino: InodeId) -> u64 {
        self.inodes.lookups(ino)
    }

    /// Whether the kernel may keep something of an inode.
    pub(crate) fn holds(&self, ino: InodeId) -> bool {
        ino == InodeId::ROOT || self.inodes.lookups(ino) > 0
    }

    /// Open files whose bytes another mount may change.
    pub(crate) fn followed(&self) -> Vec<InodeId> {
        if self.volume.read_only() || self.volume.is_shared() {
            self.volume.open_numbers()
        } else {
            Vec::new()
        }
    }

    /// Has an open file show what the tree has by now.
    pub(crate) async fn renew(&self, ino: InodeId) {
        self.volume.renew(ino).await;
    }

    /// Names that change without the kernel having asked for it, from now on.
    pub(crate) fn outside_changes(&self) -> OutsideListener {
        self.volume.tree().outside().listen()
    }

    /// Handles open now, files and directories.
    pub fn open_handles(&self) -> usize {
        self.files.len() + self.directories.len()
    }

    /// Releases every file that is still open. For the end of a mount, when the kernel will not.
    pub async fn release_all(&self) {
        for file in self.shared_files.drain().into_iter().chain(self.files.drain()) {
            if let Err(failure) = file.release().await {
                tracing::warn!(ino = %file.ino(), %failure, "a file was not written at the end of the mount");
            }
        }
    }

    /// Attributes as this mount shows them.
    pub(super) fn shown(&self, attributes: Attributes) -> Attributes {
        attributes.shown_as(&self.policy.appearance)
    }

    /// Hands `attributes` to the kernel under a name: one more reference.
    pub(super) fn enter(&self, attributes: Attributes) -> Attributes {
        self.inodes.looked_up(attributes.ino, attributes.size);
        self.shown(attributes)
    }

    /// The open file that a request means: by handle, or by inode where there are no handles.
    pub(super) async fn file(&self, ino: InodeId, handle: Handle) -> FsResult<Arc<File>> {
        if handle != Handle::NONE {
            return self.files.get(handle);
        }
        if !self.policy.dataset {
            return Err(Errno(libc::EBADF));
        }
        match self.shared_files.get(ino) {
            Some(file) => Ok(file),
            None => self.share_file(ino).await,
        }
    }

    /// The same without waiting, if it is open already.
    pub(super) fn file_now(&self, ino: InodeId, handle: Handle) -> Option<Arc<File>> {
        match handle {
            Handle::NONE => self.shared_files.get(ino),
            handle => self.files.get(handle).ok(),
        }
    }
}
