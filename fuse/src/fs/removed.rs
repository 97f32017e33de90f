//! What has lost its last name through this mount and is still held by the kernel: a directory that a program is in, a pipe, a
//! device, or what a descriptor leads to that opens nothing (O_PATH).
//!
//! A tree keeps what is open without a name, and that is regular files alone: all else it frees with the name, and knows it no
//! more. A program that has it may ask what it is all the same. So the last attributes are remembered, in the kernel's inode's
//! own record, until it is forgotten. What is removed by others is not remembered: of that the kernel is told that it is gone.

use std::sync::Arc;

use forebay_core::{Attributes, InodeId, Result};
use forebay_metadata::tree::Removed;
use parking_lot::Mutex;
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

use super::inodes::set_ids;
use super::{Change, FileSystem};
use crate::errno::{Errno, FsResult};

/// Tells when changes of names that are under way have come to their end.
#[derive(Debug, Default)]
pub(super) struct Removals(Mutex<Arc<RwLock<()>>>);

impl Removals {
    /// Begins one, which ends with the guard.
    async fn begin(&self) -> OwnedRwLockReadGuard<()> {
        let round = self.0.lock().clone();
        round.read_owned().await
    }

    /// Returns when those that have begun by now have ended. Later ones are not waited for, nor held up.
    async fn ended(&self) {
        let round = std::mem::take(&mut *self.0.lock());
        drop(round.write().await);
    }
}

impl FileSystem {
    /// Makes a change that may take a last name away, and remembers what that was.
    pub(super) async fn removing<C>(&self, change: C) -> Result<()>
    where
        C: Future<Output = Result<Option<Removed>>>,
    {
        let _under_way = self.removals.begin().await;
        if let Some(removed) = change.await? {
            self.inodes.removed(removed);
        }
        Ok(())
    }

    /// What is left of an inode that the tree does not know, as `errno` says.
    ///
    /// # Errors
    /// `errno`, where it is another failure, or nothing is left.
    pub(super) async fn left(&self, ino: InodeId, errno: Errno) -> FsResult<Removed> {
        if errno != Errno(libc::ENOENT) || self.inodes.lookups(ino) == 0 {
            return Err(errno);
        }
        if let Some(removed) = self.inodes.left(ino) {
            return Ok(removed);
        }
        // The tree is ahead of what this mount has been answered.
        self.removals.ended().await;
        self.inodes.left(ino).ok_or(errno)
    }

    /// Changes attributes of what the tree does not know, as `errno` says: nobody else sees it any more.
    ///
    /// # Errors
    /// `errno` also for bytes, which are gone, and for a mode beside an access control list, which would have to follow it.
    pub(super) async fn change_left(
        &self,
        ino: InodeId,
        errno: Errno,
        change: &Change,
    ) -> FsResult<Attributes> {
        let Removed { attributes: mut left, access_list } = self.left(ino, errno).await?;
        if change.size.is_some() || change.mode.is_some() && access_list.is_some() {
            return Err(errno);
        }
        let Change { mode, uid, gid, size: _, atime, mtime } = change;
        if uid.is_some() || gid.is_some() || *change == Change::default() {
            left.mode &= !set_ids(&left);
        }
        left.mode = mode.map_or(left.mode, |mode| mode & 0o7777);
        left.uid = uid.unwrap_or(left.uid);
        left.gid = gid.unwrap_or(left.gid);
        left.atime = atime.map_or(left.atime, |time| self.resolve(time));
        left.mtime = mtime.map_or(left.mtime, |time| self.resolve(time));
        left.ctime = self.clock.wall();
        self.inodes.changed(&left);
        Ok(self.shown(left))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn what_has_begun_is_waited_for_and_what_begins_later_is_not() {
        let removals = Removals::default();
        let (first, second) = (removals.begin().await, removals.begin().await);
        let mut ended = pin!(removals.ended());
        assert!(ended.as_mut().now_or_never().is_none());
        let _later = removals.begin().now_or_never().expect("it is not held up");
        drop(first);
        assert!(ended.as_mut().now_or_never().is_none());
        drop(second);
        ended.now_or_never().expect("both are over");
    }
}
