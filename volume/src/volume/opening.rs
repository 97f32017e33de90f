//! Opening files and making them: the one shared state of all handles that this mount has on a file.

use std::sync::Arc;

use forebay_core::{Attributes, FileLayout, InodeId, Result};
use forebay_metadata::remote::RemoteTree;
use forebay_metadata::tree::{Created, Existing, NewInode};

use super::Volume;
use crate::file::{Access, File};
use crate::inode::OpenInode;

/// When the tree was asked: what was closed here by then, and, of a tree elsewhere, what others changed.
struct Moment {
    gone: u64,
    heard: Option<u64>,
}

impl Volume {
    /// Opens a file.
    ///
    /// # Errors
    /// `Stale` where the tree follows another one, in which the file has no name any more, and its bytes are gone: the name that
    /// led to it leads elsewhere by now.
    pub async fn open(self: &Arc<Self>, ino: InodeId, access: Access) -> Result<Arc<File>> {
        let inode = self.acquire(ino).await?;
        let file = self.hand_out(inode.clone(), access).await?;
        if let Err(error) = inode.check_outlived().await {
            file.release().await?;
            return Err(error);
        }
        Ok(file)
    }

    /// A handle on an inode that was acquired for it.
    async fn hand_out(self: &Arc<Self>, inode: Arc<OpenInode>, access: Access) -> Result<Arc<File>> {
        let file = Arc::new(File::new(inode.clone(), self.clone(), access));
        if access.truncate
            && access.write
            && inode.look(|content| content.size()) > 0
            && let Err(error) = inode.truncate(0).await
        {
            // There is no handle that would do this.
            inode.leave_writer();
            if let Err(error) = self.release(&inode, true).await {
                tracing::warn!(ino = %inode.ino(), %error, "could not close what could not be emptied");
            }
            return Err(error);
        }
        Ok(file)
    }

    /// Makes a file under a name, or takes the one there, and opens it.
    pub async fn create(
        self: &Arc<Self>,
        parent: InodeId,
        name: &[u8],
        new: NewInode,
        existing: Existing,
        access: Access,
    ) -> Result<(Attributes, Arc<File>)> {
        let before = self.moment();
        let Created { attributes, is_new, layout, generation } =
            self.store.tree.create_opened(parent, name, new, existing).await?;
        // A new file is committed at its close, even if it was made for reading only.
        let access = Access { write: access.write || is_new, ..access };
        let inode = self.take_in(attributes.ino, (layout, generation), before).await?;
        let file = self.hand_out(inode.clone(), access).await?;
        if is_new {
            inode.touch();
        }
        Ok((self.shown(attributes, self.gone()).await?, file))
    }

    /// The shared state of an open inode with one more handle.
    pub(crate) async fn acquire(&self, ino: InodeId) -> Result<Arc<OpenInode>> {
        let before = self.moment();
        // First, so that there is no handle to take back where the tree refuses.
        let found = self.store.tree.opened(ino).await?;
        self.take_in(ino, found, before).await
    }

    /// The same of an inode that the tree knows to be open, with what it had after the moment `before`.
    async fn take_in(
        &self,
        ino: InodeId,
        mut found: (FileLayout, u64),
        mut before: Moment,
    ) -> Result<Arc<OpenInode>> {
        let open = self.open.lock().add_handle(ino, || None);
        if let Some(inode) = open {
            self.renew(ino).await;
            return Ok(inode);
        }
        loop {
            if let Some(inode) = self.adopt(ino, found, before.gone) {
                if before.heard.is_none() || self.moment().heard != before.heard {
                    // What was told between the two found nobody.
                    self.renew(ino).await;
                }
                return Ok(inode);
            }
            before = self.moment();
            found = match self.store.tree.layout(ino).await {
                Ok(found) => found,
                Err(error) => {
                    self.store.tree.closed(ino).await?;
                    return Err(error);
                }
            };
        }
    }

    fn moment(&self) -> Moment {
        Moment { gone: self.gone(), heard: self.store.tree.remote().map(RemoteTree::heard) }
    }

    /// The inode with one more handle, as the tree had it after `gone` were closed. `None` if it was closed since: it may have
    /// been brought elsewhere, and what the layout names be deleted.
    pub(crate) fn adopt(
        &self,
        ino: InodeId,
        (layout, generation): (FileLayout, u64),
        gone: u64,
    ) -> Option<Arc<OpenInode>> {
        let mut open = self.open.lock();
        let is_old = open.is_gone_since(ino, gone);
        let fresh = || Arc::new(OpenInode::new(ino, self.store.clone(), layout, generation));
        open.add_handle(ino, || (!is_old).then(fresh))
    }
}
