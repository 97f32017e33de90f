//! Requests for locks, which may wait for long, and so have places of their own.

use forebay_core::InodeId;
use forebay_io::task::blocking;
use forebay_metadata::tree::{Lock, LockRange};
use fuser::{Errno, ReplyEmpty, ReplyLock};

use super::callbacks::Dispatch;
use super::{convert, reply as replies};
use crate::fs::Locker;
use crate::handle::Handle;
use crate::notify::tell_of_inode;

/// A lock as the kernel sends it: owner and process, first and last byte, and its type.
fn lock((owner, pid): (u64, u32), (first, last): (u64, u64), kind: i32) -> Option<Lock> {
    let kind = convert::lock_kind(kind).filter(|_| first <= last)?;
    Some(Lock { owner, pid, range: LockRange { first, last }, kind })
}

impl Dispatch {
    pub(super) fn look_for_lock(
        &self,
        ino: InodeId,
        by: (u64, u32),
        bytes: (u64, u64),
        kind: i32,
        reply: ReplyLock,
    ) {
        let Some(lock) = lock(by, bytes, kind) else { return reply.error(Errno::EINVAL) };
        let Some(place) = self.answers.lock_place() else { return reply.error(Errno::ENOLCK) };
        let fs = self.fs.clone();
        self.answers.run_lock("getlk", ino, place, async move {
            replies::blocker(reply, fs.blocker(ino, lock).await);
        });
    }

    pub(super) fn set_lock(
        &self,
        ino: InodeId,
        locker: Locker,
        by: (u64, u32),
        bytes: (u64, u64),
        kind: i32,
        reply: ReplyEmpty,
    ) {
        let Some(lock) = lock(by, bytes, kind) else { return reply.error(Errno::EINVAL) };
        let Some(place) = self.answers.lock_place() else { return reply.error(Errno::ENOLCK) };
        let (fs, kernel) = (self.fs.clone(), self.kernel.clone());
        self.answers.run_lock("lock", ino, place, async move {
            let locked = fs.lock(ino, lock, locker).await;
            if let (Ok(Some(generation)), Some(kernel)) = (&locked, kernel.get().cloned()) {
                // Before who locks it reads.
                match blocking(move || tell_of_inode(&kernel, ino, true)).await {
                    Ok(()) => fs.pages_dropped(ino, *generation),
                    Err(error) => tracing::debug!(%ino, %error, "the kernel keeps its pages"),
                }
            }
            replies::empty(reply, locked.map(drop));
        });
    }

    pub(super) fn unlock(
        &self,
        ino: InodeId,
        handle: Handle,
        owner: u64,
        (first, last): (u64, u64),
        reply: ReplyEmpty,
    ) {
        if first > last {
            return reply.error(Errno::EINVAL);
        }
        let fs = self.fs.clone();
        self.answers.run("unlock", ino, async move {
            replies::empty(reply, fs.unlock(ino, handle, owner, LockRange { first, last }).await);
        });
    }
}
