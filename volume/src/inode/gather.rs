//! Putting short extents together while the file is open.

use std::sync::atomic::Ordering::SeqCst;

use forebay_core::{Blob, Result};

use super::OpenInode;
use crate::gathering::Batch;

impl OpenInode {
    /// Whether it is time to put extents together, which is begun then.
    pub(crate) fn begin_gathering(&self) -> bool {
        let extents = self.look(|content| content.base().extents().len());
        let left = self.gathered.fetch_min(extents, SeqCst).min(extents);
        extents - left > self.store.write.gather_extents && !self.is_gathering.swap(true, SeqCst)
    }

    /// Looks again once there are many more extents than there are now.
    pub(crate) fn end_gathering(&self) {
        self.gathered.store(self.look(|content| content.base().extents().len()), SeqCst);
        self.is_gathering.store(false, SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn is_gathering(&self) -> bool {
        self.is_gathering.load(SeqCst)
    }

    /// Puts a batch of extents together. Returns whether that left fewer.
    pub(crate) async fn gather(&self, batch: &Batch) -> Result<bool> {
        let content = self.store.fetch.bytes(batch.pieces()).await?;
        // Past the local disk: whatever was staged counts as committed when the writer's next commit is.
        let blob = self.store.put_unstaged(self.ino, content).await?;
        let taken = self.take_in(batch, &blob).await;
        // Of one that failed it is the tree that knows.
        let is_used = match &taken {
            Ok(is_used) => *is_used,
            Err(_) => self.store.tree.is_referred(&blob.key).await?,
        };
        if !is_used {
            self.store.bucket.delete(&blob.key).await?;
        }
        taken
    }

    /// Takes the bytes of a batch from `blob`, as far as the file still has them; false where it is none the better for it, and
    /// where all of it is being written anew.
    async fn take_in(&self, batch: &Batch, blob: &Blob) -> Result<bool> {
        let turn = self.writer.lock().await;
        if turn.stream.is_some() || self.is_retired() {
            return Ok(false);
        }
        // An upload to its own path that was not answered may have come, and take the place of these bytes.
        self.store.tree.settle(self.ino).await?;
        self.take_over().await?;
        let (base, generation) = self.look(|content| (content.base().clone(), content.generation()));
        let moved = batch.moved_into(blob, &base);
        if moved.extents().len() >= base.extents().len() {
            return Ok(false);
        }
        self.store.tree.relocate(self.ino, generation, moved.clone()).await?;
        self.content.write().follow(moved);
        Ok(true)
    }
}
