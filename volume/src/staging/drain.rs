//! Waiting until nothing is staged any more.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_core::Result;

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
    /// When what was written cannot be committed.
    pub async fn drain(&self, progress: impl FnMut(&Staged)) -> Result<()> {
        let Some(uploads) = &self.store().uploads else { return Ok(()) };
        self.ending.store(true, Ordering::Relaxed);
        // What cannot be committed keeps nothing else from the bucket.
        let synced = self.sync().await;
        uploads.drain(self, None, progress).await.and(synced)
    }

    /// Returns when what is staged by now is in the bucket.
    ///
    /// # Errors
    /// `Unavailable` when nothing could be uploaded for as long as the deadline of fsync.
    pub(crate) async fn bring_all_in(&self) -> Result<()> {
        let patience = Duration::from_millis(self.store().write.deadline_ms);
        match &self.store().uploads {
            Some(uploads) => uploads.drain(self, Some(patience), |_| {}).await,
            None => Ok(()),
        }
    }
}
