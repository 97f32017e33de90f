//! The places an open file works with: tree, cache and bucket of its volume, and how dirty bytes become blobs.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, InodeId, Result, Timestamp};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition, ObjectInfo, Upload};
use forebay_metadata::tree::{Placement, Tree};

use crate::fetch::Fetch;
use crate::prefetch::PrefetchSettings;
use crate::settings::WriteSettings;

/// Times a whole object is placed again after an outsider took its key in between.
const PLACE_ATTEMPTS: usize = 3;

/// What every open inode of a volume shares.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) tree: Arc<dyn Tree>,
    pub(crate) bucket: Bucket,
    pub(crate) fetch: Fetch,
    pub(crate) write: WriteSettings,
    pub(crate) prefetch: PrefetchSettings,
    pub(crate) clock: Clock,
}

impl Store {
    /// Returns when every name and attribute answered so far is in the bucket.
    ///
    /// # Errors
    /// `Unavailable` past the deadline; the changes are kept and still on their way.
    pub(crate) async fn sync_tree(&self) -> Result<()> {
        self.in_time("names and attributes reach the store", self.tree.sync()).await
    }

    /// Where the next whole content of a file goes, as [`Tree::place`].
    async fn place(&self, ino: InodeId) -> Result<Placement> {
        self.in_time("the intent to write reaches the store", self.tree.place(ino)).await
    }

    /// Waits for the tree as long as for any request: an engine inside the bucket goes on trying for ever.
    async fn in_time<T>(&self, what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let deadline = Duration::from_millis(self.write.deadline_ms);
        tokio::time::timeout(deadline, work).await.unwrap_or_else(|_| {
            let waited = self.write.deadline_ms / 1000;
            Err(Error::new(ErrorKind::Unavailable, format!("waited {waited} s until {what}"))
                .with_hint("see whether the store can be reached, then sync again: nothing was given up"))
        })
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.wall()
    }

    /// Writes the whole content of a file, which is at hand, as one object: at its own path when nothing else is
    /// there, else as an owned blob.
    pub(crate) async fn put_whole(&self, ino: InodeId, content: Bytes) -> Result<Blob> {
        let mut attempt = 1;
        loop {
            let placement = self.place(ino).await?;
            match self.bucket.put(placement.key(), content.clone(), condition(&placement)).await {
                Err(error) if error.kind() == ErrorKind::Conflict && attempt < PLACE_ATTEMPTS => attempt += 1,
                Err(error) => return Err(error),
                Ok(info) => {
                    let blob = info.blob();
                    self.remember(&blob, content);
                    return Ok(blob);
                }
            }
        }
    }

    /// Writes bytes of several extents as one owned blob.
    pub(crate) async fn put_owned(&self, packed: Bytes) -> Result<Blob> {
        let key = self.tree.fresh_blob();
        let blob = self.bucket.put(&key, packed.clone(), Condition::IfAbsent).await?.blob();
        self.remember(&blob, packed);
        Ok(blob)
    }

    /// Starts an object that is written front to back.
    pub(crate) async fn start_upload(&self, ino: InodeId) -> Result<(Upload, Placement)> {
        let placement = self.place(ino).await?;
        let upload = self.bucket.upload(placement.key()).await?;
        Ok((upload, placement))
    }

    /// Makes a streamed object visible.
    pub(crate) async fn complete(&self, upload: Upload, placement: &Placement) -> Result<ObjectInfo> {
        upload.complete(condition(placement)).await.map_err(|error| match error.kind() {
            ErrorKind::Conflict => Error::new(
                ErrorKind::Stale,
                format!("`{}` was changed in the bucket while it was being written", placement.key()),
            )
            .with_source(error),
            _ => error,
        })
    }

    /// Puts a fresh blob into the cache, so that reading back what was just written costs no request.
    fn remember(&self, blob: &Blob, content: Bytes) {
        for (key, _) in forebay_cache::pieces(&self.fetch.name(blob), 0..blob.size) {
            let start = key.offset() as usize;
            let end = start + key.len() as usize;
            self.fetch.blocks.insert(&key, content.slice(start..end));
        }
    }
}

/// What the store must still hold at a placement's key for a write to be ours to make.
fn condition(placement: &Placement) -> Condition {
    match placement {
        Placement::Own { replaces: Some(version), .. } => Condition::IfVersion(version.clone()),
        Placement::Own { replaces: None, .. } | Placement::Owned { .. } => Condition::IfAbsent,
    }
}
