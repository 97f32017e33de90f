//! What writers have to do with staging.

use bytes::Bytes;
use forebay_core::{Blob, Error, FileLayout, InodeId, Source};

use crate::store::Store;

impl Store {
    /// Stages bytes of a file as an owned blob; `None` where nothing is staged or there is no room.
    pub(crate) async fn stage(&self, ino: InodeId, data: &Bytes) -> Option<Blob> {
        let staging = &self.uploads.as_ref()?.staging;
        staging.put(ino, self.tree.fresh_blob(), data.clone()).await
    }

    /// Whether `bytes` more can be staged.
    pub(crate) fn can_stage(&self, bytes: u64) -> bool {
        self.uploads.as_ref().is_some_and(|uploads| uploads.staging.has_room(bytes))
    }

    /// What was staged for a file is committed by now, or never will be.
    pub(crate) fn settled(&self, ino: InodeId) {
        if let Some(uploads) = &self.uploads {
            uploads.committed(ino);
        }
    }

    /// That staged bytes of a file are lost, until a call that `tells` whoever writes it.
    pub(crate) fn lost(&self, ino: InodeId, layout: &FileLayout, tells: bool) -> Option<Error> {
        let staging = &self.uploads.as_ref()?.staging;
        let is_lost = staging.has_lost(ino, |key| layout.blobs().any(|blob| blob.key == *key), tells);
        is_lost.then(|| Error::corrupt("the local disk lost bytes that were staged with --writeback"))
    }

    /// Whether a file was written front to back, staged first and now in memory: all of it can be one upload.
    pub(crate) fn is_staged_stream(&self, layout: &FileLayout) -> bool {
        let (mut at, mut is_inline) = (0, false);
        for extent in layout.extents().iter() {
            let fits = match &extent.source {
                Source::Blob { blob, .. } => !is_inline && self.fetch.is_staged(blob),
                Source::Inline(_) => true,
            };
            is_inline |= matches!(extent.source, Source::Inline(_));
            if !fits || extent.offset != at {
                return false;
            }
            at = extent.end();
        }
        at == layout.size()
    }
}
