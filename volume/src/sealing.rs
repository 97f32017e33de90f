//! What is done to files behind those who use them. After the last close they are brought together where nothing is staged, and
//! what a mapping wrote after the last descriptor was closed is committed where that failed. Before it, short extents are put
//! together where many have come.

use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::mem::Class;

use crate::Volume;
use crate::gathering::Batch;
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

    /// Puts short extents of a file together in the background if many have come: see [`crate::gathering`]. Its writer waits
    /// only while the tree is told, and what fails leaves them as they are.
    pub(crate) fn gather_behind(self: &Arc<Self>, inode: &Arc<OpenInode>) {
        if !inode.begin_gathering() {
            return;
        }
        let (volume, inode) = (self.clone(), inode.clone());
        self.tasks().spawn("gather", async move {
            if let Err(error) = volume.gather(&inode).await {
                tracing::debug!(ino = %inode.ino(), %error, "short extents stay as they are");
            }
            inode.end_gathering();
        });
    }

    /// Goes through a file once. Ends early where memory is short, and where the file is closed: then all of it is sealed.
    async fn gather(&self, inode: &OpenInode) -> Result<()> {
        let (mut offset, each) = (0, self.store().write.gather_extents);
        while inode.has_writers() && !self.tasks().stop().is_cancelled() {
            let batch = inode.look(|content| Batch::next(content.base(), offset, each));
            let Some(end) = batch.end() else { break };
            let Some(_permit) = self.budget.try_acquire(Class::Write, batch.bytes()) else { break };
            if !inode.gather(&batch).await? {
                break;
            }
            offset = end;
        }
        Ok(())
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
