//! Bringing a file together: as a plain object at its own path, or into a segment where its directory is packed.

use std::sync::atomic::Ordering::Relaxed;

use forebay_core::{Blob, Error, ErrorKind, FileLayout, Result};
use forebay_io::object::Upload;
use forebay_metadata::tree::Placement;

use super::OpenInode;
use crate::content::Content;

impl OpenInode {
    /// Brings a file that lies in owned blobs together, if policy and path allow it; false where they do not.
    pub(crate) async fn seal(&self) -> Result<bool> {
        let _turn = self.writer.lock().await;
        if !self.needs_seal() {
            return Ok(false);
        }
        self.take_over().await?;
        match self.store.packs(self.ino, self.look(Content::size)).await? {
            true => self.pack_together().await,
            false if self.may_carry().await? => self.bring_home(true).await,
            false => Ok(false),
        }
    }

    /// Whether it may be sealed through this host; tells once if not.
    async fn may_carry(&self) -> Result<bool> {
        let (layout, store) = (self.look(|content| content.layout().clone()), &self.store);
        let may = store.may_carry(self.ino, &layout).await?;
        if !may && store.unsealed.note(self.ino) {
            let (ino, carried, size) = (self.ino, store.carried_bytes(&layout), layout.size());
            let most = store.write.seal_max_bytes;
            tracing::warn!(%ino, size, carried, most, "not sealed: too many bytes would pass through this host");
        }
        Ok(may)
    }

    /// Brings a file to its own path if it lies in segments or other owned blobs, whatever the policy; false where that is
    /// not free.
    pub(crate) async fn unpack(&self) -> Result<bool> {
        let mut turn = self.writer.lock().await;
        self.commit_all(&mut turn).await?;
        self.take_over().await?;
        if self.look(|content| content.layout().is_plain()) { Ok(true) } else { self.bring_home(false).await }
    }

    /// Puts all bytes of a small file into a segment. The caller has the turn.
    async fn pack_together(&self) -> Result<bool> {
        // An upload to its own path that was not answered may have come. If it still may, it is known by its intent then.
        self.store.tree.settle(self.ino).await?;
        self.take_over().await?;
        let (layout, generation) = self.look(|content| (content.layout().clone(), content.generation()));
        if layout.is_packed() {
            return Ok(false);
        }
        let content = self.store.fetch.bytes(layout.pieces(0..layout.size())).await?;
        let stored = self.store.segments.put(content).await?;
        self.move_to(stored.layout.clone(), generation).await
    }

    /// Writes the file as a plain object at its own path; false where that is not free. The caller has the turn, and tries
    /// again what is `Unavailable` if it `comes_back`.
    async fn bring_home(&self, comes_back: bool) -> Result<bool> {
        let (layout, generation) = self.look(|content| (content.layout().clone(), content.generation()));
        let (upload, placement) = self.store.start_sealing(self.ino, layout.size()).await?;
        if let Placement::Owned { comes_free, .. } = placement {
            upload.abort().await?;
            let later = || Error::new(ErrorKind::Unavailable, "what is at its path is still on its way out");
            return if comes_free && comes_back { Err(later()) } else { Ok(false) };
        }
        if self.was_brought_home(&layout, generation).await? {
            upload.abort().await?;
            self.store.ended(self.ino, &placement).await;
            return Ok(true);
        }
        // Many bytes take long, and a writer waits for the turn: its close has the file sealed again.
        let gives_way = comes_back && self.store.carried_bytes(&layout) > self.store.write.seal_max_bytes;
        match self.write_home(upload, &placement, &layout, gives_way).await {
            Ok(Some(blob)) => self.move_to(FileLayout::of_blob(blob), generation).await,
            Ok(None) => {
                self.store.ended(self.ino, &placement).await;
                Ok(false)
            }
            Err(error) => {
                self.store.failed(self.ino, &placement, &error).await;
                Err(error)
            }
        }
    }

    /// Writes what `layout` names as one object; `None` where a writer came first and it `gives_way`.
    async fn write_home(
        &self,
        mut upload: Upload,
        placement: &Placement,
        layout: &FileLayout,
        gives_way: bool,
    ) -> Result<Option<Blob>> {
        let whole = tokio::select! {
            biased;
            () = self.has_writer(), if gives_way => return Ok(None),
            whole = self.store.copy_content(layout, &mut upload) => whole?,
        };
        let blob = self.store.complete(upload, placement).await?.blob();
        if let Some(whole) = whole {
            self.store.fetch.remember(&blob, whole);
        }
        Ok(Some(blob))
    }

    /// Whether an earlier try, of which the answer was lost, brought the file home after all: asking for a place found it then.
    async fn was_brought_home(&self, layout: &FileLayout, generation: u64) -> Result<bool> {
        let (now, current) = self.store.tree.layout(self.ino).await?;
        if current == generation && (now == *layout || !now.is_plain()) {
            return Ok(false);
        }
        // Nothing is written to the place that was just asked for.
        self.move_to(now, current).await
    }

    async fn move_to(&self, layout: FileLayout, generation: u64) -> Result<bool> {
        self.store.tree.relocate(self.ino, generation, layout.clone()).await?;
        *self.content.write() = Content::committed(layout, generation);
        self.shares.store(false, Relaxed);
        self.store.unsealed.forget(self.ino);
        Ok(true)
    }
}
