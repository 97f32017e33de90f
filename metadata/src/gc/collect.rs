//! A round: list, suspect, clear, queue, delete.

use std::time::Duration;

use forebay_core::{Blob, Error, ErrorKind, Result};
use forebay_io::object::{ObjectInfo, Scheme};
use futures::stream::StreamExt;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::plan::{NAMING, Sessions, Suspects};
use crate::kv::Durability;
use crate::mover::Mover;
use crate::records::{Change, Records};
use crate::schema::{Deletion, Tag};

/// Suspects held in memory at once; the records are walked again for every further as many.
const MOST_SUSPECTS: usize = 100_000;
/// Deletions queued in one transaction.
const STEP: usize = 128;
/// Objects listed between two rests.
const PAGE: usize = 1000;

/// What a round of gc found, and freed unless it was asked only to look.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// Owned blobs in the bucket, those of living sessions included.
    pub listed: u64,
    /// Those that no session of this tree wrote: another tree's over the same bucket, as of one that was lost. None of them is
    /// freed.
    pub foreign: u64,
    /// Their bytes.
    pub foreign_bytes: u64,
    /// Blobs that dead sessions left and nothing refers to.
    pub blobs: u64,
    /// Their bytes.
    pub blob_bytes: u64,
    /// Unfinished uploads of dead sessions. The store does not tell their bytes.
    pub uploads: u64,
    /// Staged files and uploads that dead processes left in a directory.
    pub leftovers: u64,
    /// Their bytes.
    pub leftover_bytes: u64,
    /// Blobs that lost their last reference and wait for their time.
    pub waiting: u64,
    /// Their bytes.
    pub waiting_bytes: u64,
    /// Deleted files and directories whose time in the trash is over.
    pub trash: u64,
    /// Those that can still be brought back.
    pub trash_waiting: u64,
    /// Segments that were compacted, which is the volume's to do: sparse ones and small ones.
    pub segments: u64,
    /// Their bytes.
    pub segment_bytes: u64,
    /// Those of them that were in use.
    pub segment_live_bytes: u64,
    /// Whether nothing was freed.
    pub dry_run: bool,
}

impl GcReport {
    /// Whether there was nothing to free.
    pub fn is_clean(&self) -> bool {
        self.blobs + self.uploads + self.leftovers == 0
    }
}

/// Does one round.
pub(crate) struct Collector<'a> {
    pub(crate) mover: &'a Mover,
    /// How long to rest after each page.
    pub(crate) pause: Duration,
    pub(crate) dry_run: bool,
}

impl Collector<'_> {
    /// Finds and frees what dead sessions left.
    ///
    /// # Errors
    /// `Unsupported` where another tree may refer to the bucket's blobs; `Corrupt` when a record cannot be read, and
    /// nothing is freed then; `Unavailable` when not all that was found could be deleted: it is queued.
    pub(crate) async fn collect(&self) -> Result<GcReport> {
        self.check_is_only_tree()?;
        let mut report = GcReport { dry_run: self.dry_run, ..GcReport::default() };
        self.sweep_trash(&mut report).await?;
        if !self.dry_run {
            self.mover.free_unfinished().await?;
        }
        let sessions = self.sessions().await?;
        self.sweep_blobs(&sessions, &mut report).await?;
        self.sweep_uploads(&sessions, &mut report).await?;
        self.count_waiting(&mut report).await?;
        if !report.is_clean() {
            info!(?report, "gc");
        }
        Ok(report)
    }

    /// How many unfinished uploads, and staged files and uploads of a directory, dead sessions left. Frees nothing.
    ///
    /// # Errors
    /// `Unsupported` as above.
    pub(crate) async fn look_at_uploads(&self) -> Result<(u64, u64)> {
        self.check_is_only_tree()?;
        let mut report = GcReport::default();
        let looker = Collector { dry_run: true, ..*self };
        looker.sweep_uploads(&self.sessions().await?, &mut report).await?;
        Ok((report.uploads, report.leftovers))
    }

    fn check_is_only_tree(&self) -> Result<()> {
        if self.mover.shared().settings.gc.is_only_tree {
            return Ok(());
        }
        let message = "this volume's tree is kept on one host and cannot tell whose the bucket's blobs are";
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// The sessions that have a record. This one does; all that were before it are dead, or fenced off.
    async fn sessions(&self) -> Result<Sessions> {
        let keys = self.mover.shared().keys;
        let mut sessions = Sessions::default();
        sessions.living.insert(self.mover.shared().session);
        let pages = self.mover.pages(self.pause);
        // First: one that begins meanwhile is not known, and nothing of it goes.
        pages
            .each(Tag::Known, |key, _| {
                sessions.known.insert(keys.number_in(&key)?);
                Ok(())
            })
            .await?;
        pages
            .each(Tag::Session, |key, _| {
                // Uploads of a dead one may still be noted.
                if !keys.is_upload(&key) {
                    sessions.living.insert(keys.number_in(&key)?);
                }
                Ok(())
            })
            .await?;
        Ok(sessions)
    }

    async fn sweep_trash(&self, report: &mut GcReport) -> Result<()> {
        let (keys, now_ms) = (self.mover.shared().keys, self.mover.shared().now_ms());
        let count = |key, _| {
            match keys.number_in(&key)? <= now_ms {
                true => report.trash += 1,
                false => report.trash_waiting += 1,
            }
            Ok(())
        };
        self.mover.pages(self.pause).each(Tag::Trash, count).await?;
        if report.trash > 0 && !self.dry_run {
            self.mover.purge_trash().await?;
        }
        Ok(())
    }

    async fn sweep_blobs(&self, sessions: &Sessions, report: &mut GcReport) -> Result<()> {
        let prefix = Blob::OWNED_PREFIX.trim_end_matches('/');
        let mut listing = self.mover.bucket().list(prefix).chunks(PAGE);
        let mut suspects = Suspects::default();
        while let Some(page) = listing.next().await {
            if self.mover.is_stopping() {
                return Ok(());
            }
            let page: Vec<ObjectInfo> = page.into_iter().collect::<Result<_>>()?;
            report.listed += page.len() as u64;
            for info in page.iter().filter(|info| sessions.is_foreign(&info.key)) {
                report.foreign += 1;
                report.foreign_bytes += info.size;
            }
            suspects.add(page, sessions);
            if suspects.len() >= MOST_SUSPECTS {
                self.free(std::mem::take(&mut suspects), report).await?;
            }
            self.mover.shared().clock.sleep(self.pause).await;
        }
        self.free(suspects, report).await
    }

    /// Frees those suspects that no record names.
    async fn free(&self, mut suspects: Suspects, report: &mut GcReport) -> Result<()> {
        for tag in NAMING {
            // The counts come first: after them hardly ever anything is left to be looked for.
            if suspects.len() == 0 {
                return Ok(());
            }
            self.mover.pages(self.pause).each(tag, |_, value| suspects.clear(tag, value)).await?;
        }
        if suspects.len() > 0 {
            let name = |key: bytes::Bytes, value| suspects.clear_given_up(&key, value);
            self.mover.pages(self.pause).each(Tag::Xattr, name).await?;
        }
        let garbage = suspects.into_garbage();
        report.blobs += garbage.len() as u64;
        report.blob_bytes += garbage.iter().map(|info| info.size).sum::<u64>();
        if self.dry_run || garbage.is_empty() {
            return Ok(());
        }
        for step in garbage.chunks(STEP) {
            let step = step.to_vec();
            self.mover.transact(Durability::Buffered, move |change| queue(change, &step)).await?;
        }
        match self.mover.delete_due().await?.failed {
            0 => Ok(()),
            failed => {
                let message = format!("{failed} pages of deletions failed; they are queued and tried again");
                Err(Error::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Uploads to owned blobs, whose keys say whose they are; in a directory, all that is staged.
    async fn sweep_uploads(&self, sessions: &Sessions, report: &mut GcReport) -> Result<()> {
        let bucket = self.mover.bucket();
        let min_age = Duration::from_millis(self.mover.shared().settings.gc.staging_ms);
        for left in bucket.sweep_staging(min_age, self.dry_run).await? {
            report.leftovers += 1;
            report.leftover_bytes += left.bytes;
        }
        if bucket.url().scheme == Scheme::File {
            return Ok(());
        }
        let found = match bucket.list_uploads(Blob::OWNED_PREFIX.trim_end_matches('/')).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(()),
            found => found?,
        };
        for upload in found.into_iter().filter(|upload| sessions.left(&upload.key)) {
            report.uploads += 1;
            if !self.dry_run {
                bucket.abort_upload(&upload.key, &upload.id).await?;
            }
        }
        Ok(())
    }

    async fn count_waiting(&self, report: &mut GcReport) -> Result<()> {
        let count = |_, value| {
            let deletion = Deletion::decode(value)?;
            if deletion.blob.is_owned() && deletion.session.is_none() {
                report.waiting += 1;
                report.waiting_bytes += deletion.blob.size;
            }
            Ok(())
        };
        self.mover.pages(self.pause).each(Tag::Deletion, count).await
    }
}

/// Queues garbage for deletion now. What a file came to share while the records were walked has a count by then.
fn queue(change: &mut Change<'_, '_>, garbage: &[ObjectInfo]) -> Result<()> {
    let due_ms = change.shared.now_ms();
    for info in garbage {
        if change.references(info.key.as_str())?.is_some_and(|references| references.count > 0) {
            warn!(key = %info.key, "not freed: it is referred to again");
            continue;
        }
        change.queue_deletion(due_ms, Deletion { blob: info.blob(), session: None })?;
    }
    Ok(())
}
