//! Files that are brought together behind their last close, where nothing is staged.

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

    /// How many closed files could not become objects at their own paths.
    pub(crate) fn unsealed(&self) -> usize {
        let is_gone = |error: &Error| error.kind() == ErrorKind::NotFound;
        self.store()
            .unsealed
            .count(|ino| matches!(self.tree().attributes_now(ino), Some(Err(error)) if is_gone(&error)))
    }

    /// Seals a closed file, which stays open for that: again and again while the store is away, until the volume is closed.
    async fn seal_in_time(&self, inode: &OpenInode) -> Result<bool> {
        let stop = self.tasks().stop();
        for failures in 1.. {
            let permit = self.seals.acquire().await;
            let sealed = inode.seal().await;
            drop(permit);
            match sealed {
                Err(error) if error.kind() == ErrorKind::Unavailable && !stop.is_cancelled() => {
                    tracing::debug!(ino = %inode.ino(), %error, "sealed later");
                }
                sealed => return sealed,
            }
            // Cut short at the end: then it is tried for the last time.
            stop.run_until_cancelled(self.clock().sleep(pause(failures))).await;
        }
        Ok(false)
    }
}
