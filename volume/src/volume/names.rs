//! Names that go and move: what is being written below them is completed first.

use forebay_core::{ErrorKind, FileKind, InodeId, Result};
use forebay_metadata::tree::{Lookup, Removed, RenameMode};

use super::Volume;
use crate::content::Content;

impl Volume {
    /// Removes a name, as [`Tree::unlink`]. A file that is being written is committed first, so that its object and its name stay
    /// one.
    pub async fn unlink(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>> {
        self.settle_removed(parent, name).await;
        self.store.tree.unlink(parent, name).await
    }

    /// Moves or exchanges names, as [`Tree::rename`].
    pub async fn rename(
        &self,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        mode: RenameMode,
    ) -> Result<Option<Removed>> {
        self.settle(from.0, from.1).await?;
        match mode {
            RenameMode::Replace | RenameMode::Whiteout { may_replace: true, .. } => {
                self.settle_removed(to.0, to.1).await
            }
            _ => self.settle(to.0, to.1).await?,
        }
        self.store.tree.rename(from, to, mode).await
    }

    /// The same for a path that is about to be removed: what its file fails with is for those who wrote it.
    async fn settle_removed(&self, parent: InodeId, name: &[u8]) {
        if let Err(error) = self.settle(parent, name).await {
            tracing::debug!(%error, "could not complete what is removed");
        }
    }

    /// Completes uploads to the path that is about to change and to all below it: what comes to that path next may leave
    /// no way to theirs.
    async fn settle(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        if self.open.lock().is_empty() {
            return Ok(());
        }
        let Lookup::Found(moved) = self.store.tree.lookup(parent, name).await? else { return Ok(()) };
        if moved.kind != FileKind::Directory {
            let Some(inode) = self.find_open(moved.ino) else { return Ok(()) };
            // What is committed has no upload to complete, and may be sealed for minutes, of which the tree keeps track.
            return if inode.is_pending() { inode.settle().await } else { Ok(()) };
        }
        for inode in self.open_inodes() {
            if !inode.look(Content::readable) && self.is_below(inode.ino(), moved.ino).await? {
                inode.settle().await?;
            }
        }
        Ok(())
    }

    /// Whether a file's first name is in `directory` or below it: that of a removed file leads nowhere.
    async fn is_below(&self, mut ino: InodeId, directory: InodeId) -> Result<bool> {
        while ino != directory && ino != InodeId::ROOT {
            match self.store.tree.parent(ino).await {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
                parent => ino = parent?,
            }
        }
        Ok(ino == directory)
    }
}
