//! Waiting until nothing is staged any more.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, ObjectKey, Result};

use super::{Staged, Staging};
use crate::Volume;

impl Volume {
    /// What is staged on this host and not in the bucket yet.
    pub fn staged(&self) -> Staged {
        self.staging().map(|staging| staging.pending(u64::MAX)).unwrap_or_default()
    }

    pub(crate) fn staging(&self) -> Option<&Arc<Staging>> {
        self.store().uploads.as_ref().map(|uploads| &uploads.staging)
    }

    /// Commits everything, and returns when all that was staged is in the bucket, however long that takes; `progress` is
    /// told what is left. For a volume that nobody uses any more. Cancel-safe: what is left stays staged, and the next
    /// mount with the same state directory goes on.
    ///
    /// # Errors
    /// When what was written cannot be committed; `Corrupt` while files lack staged bytes that the disk lost.
    pub async fn drain(&self, mut progress: impl FnMut(&Staged)) -> Result<()> {
        let Some(uploads) = &self.store().uploads else { return Ok(()) };
        self.ending.store(true, Ordering::Relaxed);
        // What cannot be committed keeps nothing else from the bucket.
        let mut committed = self.commit_open().await;
        self.sync_names().await.ok();
        uploads.drain(self, (u64::MAX, None), &mut progress).await?;
        if committed.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unavailable) {
            committed = self.commit_open().await;
            uploads.drain(self, (u64::MAX, None), progress).await?;
        }
        committed?;
        // Of names, what counts is how it is by now: the store may have been away before.
        self.sync_names().await?;
        self.check_damaged().await
    }

    /// Fails while files refer to staged bytes that the disk lost.
    async fn check_damaged(&self) -> Result<()> {
        match self.settle_damaged().await? {
            0 => Ok(()),
            lost => Err(Error::corrupt(format!("{lost} staged blobs are damaged on the local disk, and lost"))
                .with_hint(
                    "the log names them, and `forebay fsck` their files: remove these for good, or write them anew",
                )),
        }
    }

    /// Commits what was written, and returns when what was staged before is in the bucket.
    ///
    /// # Errors
    /// As [`Self::sync`]; `Unavailable` when nothing could be uploaded for as long as the deadline of fsync.
    pub(crate) async fn bring_all_in(&self) -> Result<()> {
        let Some(uploads) = &self.store().uploads else { return Ok(()) };
        // What is staged from here on may stay uncommitted for as long as its writer likes.
        let end = uploads.staging.mark();
        self.sync().await?;
        let patience = Duration::from_millis(self.store().write.deadline_ms);
        uploads.drain(self, (end, Some(patience)), |_| {}).await
    }

    /// As [`Self::sync`], brings in what is staged, and fails, too, while files lack staged bytes that the disk lost, or bytes of
    /// an open file are lost and its writers do not know it yet. They are told all the same.
    pub(crate) async fn sync_all(&self) -> Result<()> {
        self.sync().await?;
        self.bring_all_in().await?;
        let lost = self.open_inodes().into_iter().find_map(|inode| Some((inode.ino(), inode.failure()?)));
        match lost {
            Some((ino, error)) => Err(error.context(format!("written bytes of inode {ino} are lost"))),
            None => self.check_damaged().await,
        }
    }

    /// Brings in what is staged, and returns the blobs whose bytes the disk lost.
    ///
    /// # Errors
    /// As [`Self::bring_all_in`].
    pub(crate) async fn bring_in_or_tell(&self) -> Result<Vec<ObjectKey>> {
        self.bring_all_in().await?;
        self.settle_damaged().await?;
        let damaged = self.staging().map(|staging| staging.damaged()).unwrap_or_default();
        Ok(damaged.into_iter().map(|(key, _)| key).collect())
    }
}
