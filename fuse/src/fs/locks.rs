//! Advisory locks, where other mounts write to the volume: flock(2), fcntl(2), and those of open file descriptions. On all other mounts the
//! kernel keeps them by itself.
//!
//! The library does not tell the kinds apart, so that they are one: a lock of flock(2) is one of all bytes, whose owner is the open file.
//! As on NFS who locks sees what others had committed before, and what was written is committed before it is unlocked.

use std::collections::HashMap;

use forebay_core::InodeId;
use forebay_metadata::tree::{Blocker, Lock, LockAnswer, LockRange};
use parking_lot::Mutex;

use super::FileSystem;
use crate::errno::{Errno, FsResult};
use crate::handle::Handle;
use crate::signals;

/// Through which handle each owner locked something of a file last, as long as it may have a lock. An owner is the descriptors of a
/// process, whose locks end when it closes any handle of the file, or a handle, with which its locks end.
#[derive(Debug, Default)]
pub(super) struct LockOwners(Mutex<HashMap<InodeId, HashMap<u64, Handle>>>);

impl LockOwners {
    fn enter(&self, ino: InodeId, owner: u64, handle: Handle) {
        self.0.lock().entry(ino).or_default().insert(owner, handle);
    }

    /// Forgets those of a file that `end`, and says which.
    fn leave(&self, ino: InodeId, end: impl Fn(u64, Handle) -> bool) -> Vec<u64> {
        let mut files = self.0.lock();
        let Some(owners) = files.get_mut(&ino) else { return Vec::new() };
        let left = owners.extract_if(|owner, handle| end(*owner, *handle)).map(|(owner, _)| owner).collect();
        if owners.is_empty() {
            files.remove(&ino);
        }
        left
    }

    fn through(&self, ino: InodeId, handle: Handle) -> Vec<u64> {
        let files = self.0.lock();
        let owners = files.get(&ino).into_iter().flatten();
        owners.filter(|(_, through)| **through == handle).map(|(owner, _)| *owner).collect()
    }
}

/// Who wants a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Locker {
    /// The handle by which it does.
    pub handle: Handle,
    /// Whether it waits for it.
    pub waits: bool,
    /// The thread that does then, as far as this process sees it; 0 otherwise.
    pub thread: u32,
}

impl FileSystem {
    /// Whether locks are kept here, so that they hold on all mounts of the volume.
    pub fn keeps_locks(&self) -> bool {
        self.volume.is_shared() && !self.volume.read_only()
    }

    /// Sets a lock. Returns the generation of what is locked if the kernel may have pages of an older one: it is told to drop them before
    /// the call returns, and then [`Self::pages_dropped`].
    ///
    /// # Errors
    /// EAGAIN where another lock is in the way, EDEADLK where its owner waits for this one; EINTR where the thread that waits was sent
    /// a signal; ENOLCK past the most that a mount may have; EIO where nobody serves the tree, or what the owner had locked is lost.
    pub async fn lock(&self, ino: InodeId, lock: Lock, locker: Locker) -> FsResult<Option<u64>> {
        let file = self.files.get(locker.handle)?;
        self.lock_owners.enter(ino, lock.owner, locker.handle);
        let answer = tokio::select! {
            biased;
            answer = self.volume.tree().lock(ino, lock, locker.waits) => answer?,
            () = signals::sent(locker.thread) => return Err(Errno(libc::EINTR)),
        };
        match answer {
            LockAnswer::Granted => {
                if let Err(error) = self.volume.renew_locked(ino).await {
                    self.volume.tree().unlock(ino, lock.owner, lock.range).await?;
                    return Err(error.into());
                }
                Ok(Some(file.generation()).filter(|generation| self.inodes.may_have_older(ino, *generation)))
            }
            LockAnswer::Deadlock => Err(Errno(libc::EDEADLK)),
            LockAnswer::Full => Err(Errno(libc::ENOLCK)),
            _ => Err(Errno(libc::EAGAIN)),
        }
    }

    /// Notes that the kernel has no pages of a file of before a generation.
    pub fn pages_dropped(&self, ino: InodeId, generation: u64) {
        self.inodes.dropped(ino, generation);
    }

    /// The lock that is in the way of another, if one is.
    pub async fn blocker(&self, ino: InodeId, lock: Lock) -> FsResult<Option<Blocker>> {
        Ok(self.volume.tree().blocker(ino, lock).await?)
    }

    /// Takes an owner's locks away. What was written is committed first, so that whoever locks it next sees it.
    ///
    /// # Errors
    /// Those of close(2); they are taken away all the same.
    pub async fn unlock(&self, ino: InodeId, handle: Handle, owner: u64, range: LockRange) -> FsResult<()> {
        let committed = self.files.get(handle)?.flush().await;
        let unlocked = self.volume.tree().unlock(ino, owner, range).await;
        Ok(committed.and(unlocked)?)
    }

    /// Takes all of them away as the process whose descriptors are `closer` closes the file.
    pub(super) async fn unlock_closed(&self, ino: InodeId, closer: u64) -> FsResult<()> {
        self.end_locks(ino, self.lock_owners.leave(ino, |owner, _| owner == closer)).await
    }

    /// The same as a handle ends.
    pub(super) async fn unlock_released(&self, ino: InodeId, handle: Handle) -> FsResult<()> {
        self.end_locks(ino, self.lock_owners.leave(ino, |_, through| through == handle)).await
    }

    async fn end_locks(&self, ino: InodeId, owners: Vec<u64>) -> FsResult<()> {
        let mut ended = Ok(());
        for owner in owners {
            ended = ended.and(self.volume.tree().unlock(ino, owner, LockRange::ALL).await);
        }
        Ok(ended?)
    }

    /// Fails where something is lost that was locked through a handle.
    pub(super) fn expect_locked(&self, ino: InodeId, handle: Handle) -> FsResult<()> {
        let Some(tree) = self.volume.tree().remote() else { return Ok(()) };
        match self.lock_owners.through(ino, handle).iter().any(|owner| tree.has_lost_locks(ino, *owner)) {
            true => Err(Errno(libc::EIO)),
            false => Ok(()),
        }
    }
}
