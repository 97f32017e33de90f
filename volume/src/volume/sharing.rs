//! A volume that other mounts write to as well.

use forebay_core::{Error, ErrorKind, InodeId, Result};
use forebay_metadata::volume_file::LeaseState;

use super::Volume;
use crate::joining::Sharing;

/// In the place of a directory, for who syncs all of a volume.
pub(super) const ALL: InodeId = InodeId(0);

impl Volume {
    /// Whether other mounts may write to it as well.
    pub fn is_shared(&self) -> bool {
        self.server.is_some() || self.tree().remote().is_some()
    }

    /// Returns when another process took the volume over; never where it is not this one's to lose.
    pub async fn lost(&self) {
        let claim = self.claim.lock().clone();
        let Some(mut state) = claim.map(|claim| claim.watch()) else { return std::future::pending().await };
        if state.wait_for(|state| *state == LeaseState::Lost).await.is_err() {
            std::future::pending().await
        }
    }

    /// How it is shared with other mounts that write, if it is.
    pub fn sharing(&self) -> Option<Sharing> {
        let served = self.server.as_ref().map(Sharing::of_server);
        served.or_else(|| self.taken_over()).or_else(|| self.tree().remote().map(Sharing::of_guest))
    }

    /// Has an open file show what the tree has by now, where another mount may have changed that.
    pub async fn renew(&self, ino: InodeId) {
        let Some(inode) = self.find_open(ino) else { return };
        if !self.read_only {
            if self.is_shared() {
                inode.catch_up_with_others().await;
            }
            return;
        }
        match self.store.tree.layout(ino).await {
            Ok((layout, generation)) => inode.renew(layout, generation),
            // Removed, most likely: who has it open goes on with what it was.
            Err(error) => tracing::debug!(%ino, %error, "an open file is shown as it was"),
        }
    }

    /// Has an open file show what others had committed by now, as whoever locks it is to see.
    ///
    /// # Errors
    /// `Unavailable` where the tree does not say what that is.
    pub async fn renew_locked(&self, ino: InodeId) -> Result<()> {
        let Some(inode) = self.find_open(ino) else { return Ok(()) };
        match inode.catch_up_for_certain().await {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Unavailable, "what a file is that was locked is not known")),
        }
    }

    /// Whom it serves what it took over.
    fn taken_over(&self) -> Option<Sharing> {
        let held = self.standby.lock().as_ref()?.held()?;
        held.server.as_ref().map(Sharing::of_server)
    }

    /// Whether names of a directory may have been lost with a process that served the tree, once for each.
    pub(super) fn tell_loss(&self, directory: InodeId) -> Result<()> {
        self.tree().remote().map_or(Ok(()), |tree| tree.tell_loss(directory))
    }

    /// fsync(2) of a directory.
    ///
    /// # Errors
    /// `Unavailable` past the deadline, and once where names may have been lost with the process that served the tree.
    pub async fn sync_directory(&self, ino: InodeId) -> Result<()> {
        self.store.sync_tree().await.and(self.tell_loss(ino))
    }

    /// Returns when every name and attribute answered so far is in the bucket; `Unavailable` past the deadline.
    pub async fn sync_names(&self) -> Result<()> {
        self.store.sync_tree().await
    }
}
