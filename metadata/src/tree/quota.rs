//! Setting and counting quotas. The rules of what counts where are in [`crate::records`].
//!
//! A directory is counted without holding anybody up: its record counts every change from the first moment; then what is
//! below is counted in a snapshot, which holds the record as of the same moment; what the two differ by was there
//! before, and is added. The sum is exact, whatever changed meanwhile.

use bytes::Bytes;
use forebay_core::{ErrorKind, FileKind, InodeId, Result};
use futures::stream::{self, StreamExt};
use tracing::warn;

use super::local::LocalTree;
use crate::kv::Snapshot;
use crate::records::{Look, Records, names_of, usage_of};
use crate::schema::{Dentry, Inode, Keys, Quota, QuotaLimits, Tag, Usage};

/// Records read at once.
const PAGE: usize = 1024;
/// Inodes read at the same time.
const AT_ONCE: usize = 32;

/// A directory that has a quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryQuota {
    /// The directory.
    pub ino: InodeId,
    /// Its names from the root, joined by slashes; empty for the root.
    pub path: Bytes,
    /// What may lie below it, and what does.
    pub quota: Quota,
}

impl LocalTree {
    /// Limits what may lie below a directory; that of the root is the volume's. What is there already is counted first,
    /// and stays even if it is more. No limit at all ends the quota. Durable on return.
    ///
    /// # Errors
    /// `Unavailable` when the store does not take it in time, or what was changed before: all stays as it was.
    pub async fn set_quota(&self, directory: InodeId, limits: QuotaLimits) -> Result<Option<Quota>> {
        self.check_writable()?;
        let before = self.limit(directory, limits).await?;
        if let Err(error) = self.bring_to_disk(directory, limits).await {
            self.restore_limit(directory, limits, before).await?;
            self.end_count(directory).await?;
            return Err(error);
        }
        self.quota(directory).await
    }

    /// Counts what is limited now, or ends the count. A count goes after what ends it is durable: it may yet be needed.
    async fn bring_to_disk(&self, directory: InodeId, limits: QuotaLimits) -> Result<()> {
        let is_end = limits == QuotaLimits::default();
        if !is_end {
            self.count_below(directory).await?;
        }
        self.committer.sync_in_time().await?;
        if is_end { self.end_count(directory).await } else { Ok(()) }
    }

    /// Sets the limits of a directory back, unless somebody else has set them since.
    async fn restore_limit(&self, directory: InodeId, from: QuotaLimits, to: QuotaLimits) -> Result<()> {
        self.change(move |change| match change.quota(directory)? {
            Some(quota) if quota.limits == from => change.begin_count(directory, Some(to)).map(drop),
            _ => Ok(()),
        })
        .await
    }

    /// Sets the limits of a directory, counted or not. Returns those that it had.
    async fn limit(&self, directory: InodeId, limits: QuotaLimits) -> Result<QuotaLimits> {
        self.change(move |change| {
            let before = change.quota(directory)?.unwrap_or_default().limits;
            change.begin_count(directory, Some(limits)).map(|_| before)
        })
        .await
    }

    /// What may lie below a directory, and what does.
    pub async fn quota(&self, directory: InodeId) -> Result<Option<Quota>> {
        self.look(|look| {
            look.directory(directory)?;
            read(look, directory)
        })
        .await
    }

    /// Up to `limit` of the directories that have a quota, after `after` by their numbers; none when there are no more.
    pub async fn quotas(&self, after: Option<InodeId>, limit: usize) -> Result<Vec<DirectoryQuota>> {
        let keys = self.shared.keys;
        let (first, end) = keys.family(Tag::Quota);
        let first = after.map_or(first, |after| keys.quota(InodeId(after.0.saturating_add(1))));
        self.look(move |look| {
            let (mut start, mut found) = (first.clone(), Vec::new());
            while found.is_empty() {
                let page = look.reads().scan(&start, &end, limit)?;
                let Some((last, _)) = page.last() else { break };
                start = [&last[..], &[0]].concat().into();
                for (key, value) in page {
                    found.extend(directory_quota(look, &key, value)?);
                }
            }
            Ok(found)
        })
        .await
    }

    /// Learns which directories are counted, at the start. Counts what an earlier session did not come to the end of, and
    /// ends counts that were made for a rename which did not come.
    pub(super) async fn load_quotas(&self) -> Result<()> {
        let (mut start, end) = self.shared.keys.family(Tag::Quota);
        loop {
            let (from, to) = (start.clone(), end.clone());
            let page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            start = [&last[..], &[0]].concat().into();
            for (key, value) in page {
                self.load_quota(&key, value).await?;
            }
        }
    }

    /// The same for one. What is damaged limits nothing, and refuses no mount: a volume that cannot be mounted cannot be
    /// checked either.
    async fn load_quota(&self, key: &Bytes, value: Bytes) -> Result<()> {
        let Some((directory, quota)) = decode(self.shared.keys, key, value) else { return Ok(()) };
        self.shared.quotas.add(directory);
        if quota.limits == QuotaLimits::default() {
            return self.end_count(directory).await;
        }
        if quota.is_counted {
            return Ok(());
        }
        match self.count_below(directory).await {
            // It was removed, so that nothing is below it; it is counted when it is brought back.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotDirectory) => {
                warn!(%directory, %error, "a quota that cannot be counted limits nothing; see `forebay fsck`");
                Ok(())
            }
            counted => counted,
        }
    }

    /// Counts what lies below a directory into its record, which is made if need be, unless it is counted.
    pub(super) async fn count_below(&self, directory: InodeId) -> Result<()> {
        let _turn = self.counting.lock().await;
        if self.change(move |change| change.begin_count(directory, None)).await?.is_counted {
            return Ok(());
        }
        // A snapshot holds what was synced.
        self.committer.sync_in_time().await?;
        let keys = self.shared.keys;
        let snapshot = self.committer.engine().snapshot()?;
        let found = count(snapshot.as_ref(), keys, directory).await?;
        let recorded = snapshot.get(&keys.quota(directory)).await?.map(Quota::decode).transpose()?;
        drop(snapshot);
        // Removed meanwhile.
        let Some(recorded) = recorded else { return Ok(()) };
        let beyond = found - recorded.usage;
        self.change(move |change| change.finish_count(directory, beyond)).await
    }

    /// Ends the counting of a directory that has no limits.
    pub(super) async fn end_count(&self, directory: InodeId) -> Result<()> {
        let _turn = self.counting.lock().await;
        self.change(move |change| change.end_count(directory)).await?;
        // Its record is gone for good; it may be forgotten unless one was made since.
        self.change(move |change| {
            if change.quota(directory)?.is_none() {
                change.shared.quotas.remove(directory);
            }
            Ok(())
        })
        .await
    }
}

/// The quota of a directory, read where it is not known whether there is one.
pub(super) fn read(look: &Look<'_, '_>, directory: InodeId) -> Result<Option<Quota>> {
    let key = look.keys.quota(directory);
    let value = look.reads().get(&key)?;
    Ok(value.and_then(|value| decode(look.keys, &key, value)).map(|(_, quota)| quota))
}

/// A quota and its directory. One that cannot be read is as none, until it is set anew.
fn decode(keys: Keys, key: &Bytes, value: Bytes) -> Option<(InodeId, Quota)> {
    let decoded = keys.number_in(key).and_then(|ino| Ok((InodeId(ino), Quota::decode(value)?)));
    match decoded {
        Ok(decoded) => Some(decoded),
        Err(error) => {
            warn!(%error, "a quota that cannot be read limits nothing; see `forebay fsck`");
            None
        }
    }
}

/// What a list says of a quota; nothing where its directory was removed, or is missing, which is for fsck.
fn directory_quota(look: &Look<'_, '_>, key: &Bytes, value: Bytes) -> Result<Option<DirectoryQuota>> {
    let Some((ino, quota)) = decode(look.keys, key, value) else { return Ok(None) };
    let path = match ino {
        InodeId::ROOT => Ok(Vec::new()),
        ino => look.directory(ino).and_then(|inode| Ok(names_of(look, &inode)?.join(&b'/'))),
    };
    match path {
        Ok(path) => Ok(Some(DirectoryQuota { ino, path: path.into(), quota })),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotDirectory) => {
            warn!(directory = %ino, %error, "a quota is not listed; see `forebay fsck`");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// What lies below a directory in a snapshot. Holds a number for every directory that is still to be entered.
async fn count(snapshot: &dyn Snapshot, keys: Keys, top: InodeId) -> Result<Usage> {
    let mut usage = Usage::default();
    let mut waiting = vec![top];
    while let Some(directory) = waiting.pop() {
        let (mut start, end) = keys.below(Tag::Dentry, directory.0);
        loop {
            let page = snapshot.scan(&start, &end, PAGE).await?;
            let Some((last, _)) = page.last() else { break };
            start = [&last[..], &[0]].concat().into();
            let inodes = stream::iter(page).map(|(key, value)| async move {
                let (name, ino) = (keys.name_in(&key)?, Dentry::decode(value)?.ino);
                let inode = snapshot.get(&keys.inode(ino)).await?.map(Inode::decode).transpose()?;
                Ok::<_, forebay_core::Error>((name, ino, inode))
            });
            let mut inodes = inodes.buffered(AT_ONCE);
            while let Some(found) = inodes.next().await {
                let (name, ino, inode) = found?;
                // What is missing is for fsck; a further name of a file counts where its first one is.
                let Some(inode) = inode.filter(|inode| inode.parent == directory && inode.name == name)
                else {
                    continue;
                };
                usage = usage + usage_of(&inode);
                if inode.kind == FileKind::Directory {
                    waiting.push(ino);
                }
            }
        }
    }
    Ok(usage)
}
