//! What is done to files behind their last close: where nothing is staged they are brought together, and what a mapping
//! wrote after the last descriptor was closed is committed where that failed.

use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};

use crate::Volume;
use crate::inode::OpenInode;
use crate::staging::pause;

impl Volume {
    /// Seals in the background and releases the handle that it was given.
    pub(crate) fn seal_behind(self: &Arc<Self>, inode: Arc<OpenInode>) {
        let volume = self.clone();
        self.tasks().spawn("seal", async move {
            let ino = inode.ino();
            let sealed = volume.seal_in_time(&inode).await.unwrap_or_else(|error| {
                inode.store().tell_unsealed(ino, &error);
                false
            });
            // Sealed once more if it was written again meanwhile.
            if let Err(error) = volume.release(&inode, sealed).await {
                tracing::warn!(%ino, %error, "could not close a sealed inode");
            }
        });
    }

    /// Commits in the background what a mapping wrote, and releases the handle that it was given. A program whose descriptors
    /// are closed is told nothing: what it wrote is tried until it is there, or a reason that will not pass says that it can't be.
    pub(crate) fn commit_behind(self: &Arc<Self>, inode: Arc<OpenInode>) {
        let volume = self.clone();
        self.tasks().spawn("commit-pages", async move {
            if let Err(error) = volume.commit_in_time(&inode).await {
                let _turn = inode.turn().await;
                // Whoever else has it open tries again, and is told.
                if volume.handles(inode.ino()) == 1 {
                    inode.lose_pages(error);
                }
            }
            if let Err(error) = volume.release(&inode, true).await {
                tracing::warn!(ino = %inode.ino(), %error, "could not close an inode that a mapping wrote to");
            }
        });
    }

    /// How many closed files could not become objects at their own paths.
    pub(crate) fn unsealed(&self) -> usize {
        let is_gone = |error: &Error| error.kind() == ErrorKind::NotFound;
        self.store()
            .unsealed
            .count(|ino| matches!(self.tree().attributes_now(ino), Some(Err(error)) if is_gone(&error)))
    }

    /// Seals a closed file, which stays open for that, in the end.
    async fn seal_in_time(&self, inode: &OpenInode) -> Result<bool> {
        for failures in 1.. {
            let permit = self.seals.acquire().await;
            let sealed = inode.seal().await;
            drop(permit);
            match sealed {
                Err(error) if self.may_try_again(inode, &error) => self.await_next(failures).await,
                sealed => return sealed,
            }
        }
        Ok(false)
    }

    /// The same of what is to be committed.
    async fn commit_in_time(&self, inode: &OpenInode) -> Result<()> {
        for failures in 1.. {
            // Who has it open for writing by now commits it, too, and is not to have half of a write published.
            match inode.commit_if(|| !inode.has_writers()).await {
                Err(error) if self.may_try_again(inode, &error) => self.await_next(failures).await,
                committed => return committed,
            }
        }
        Ok(())
    }

    /// Whether the store is away, until the volume is closed.
    fn may_try_again(&self, inode: &OpenInode, error: &Error) -> bool {
        let may = error.kind() == ErrorKind::Unavailable && !self.tasks().stop().is_cancelled();
        if may {
            tracing::debug!(ino = %inode.ino(), %error, "tried again later");
        }
        may
    }

    /// Cut short at the end: then it is tried for the last time.
    async fn await_next(&self, failures: u32) {
        self.tasks().stop().run_until_cancelled(self.clock().sleep(pause(failures))).await;
    }
}
