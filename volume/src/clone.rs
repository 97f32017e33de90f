//! Copies of files and trees that share all bytes with what they were copied from: no byte is read or written.
//!
//! The tree makes them. Before that, what is written there so far is committed, and what was never looked at is listed;
//! what is being replaced when the tree comes to it is brought to an end then.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Attributes, Error, ErrorKind, FileKind, InodeId, Result};
use forebay_metadata::tree::{CloneGuide, Cloned, OutsideChange, Tree, resolve, walk};
use futures::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::Volume;
use crate::warmup::Progress;

/// What files that are being written are waited for longer each time, and how often that grows.
const WAIT: Duration = Duration::from_millis(50);
const LONGER: u32 = 10;

/// Makes `to`, which must not exist, a copy of the file or directory `from`. Both are paths from the volume's root.
/// `progress` hears how many files there are and what was copied.
///
/// # Errors
/// `NotFound`, and those of the tree's `clone_tree`; `Conflict` for a file that is written all the time; `Unavailable` when
/// it is cancelled. Nothing is made then. `Unavailable`, too, when the copy is there and the store did not take its name in time.
pub async fn clone(
    volume: &Volume,
    (from, to): (&str, &str),
    progress: impl Fn(Progress) + Send + Sync,
    cancel: &CancellationToken,
) -> Result<Cloned> {
    let tree = &**volume.tree();
    let source = resolve(tree, from).await?;
    let to = to.trim_end_matches('/');
    let (directory, name) = to.rsplit_once('/').unwrap_or(("", to));
    let parent = resolve(tree, directory).await?;
    let mut guide = Guide { volume, total: Progress::default(), progress, cancel };
    guide.total = prepare(volume, &source, cancel).await?;
    let made = tree.clone_tree(source.ino, (parent.ino, name.as_bytes()), &guide).await?;
    // The kernel may know that there was no such name.
    let name = Bytes::copy_from_slice(name.as_bytes());
    tree.outside().tell(OutsideChange::Name { directory: parent.ino, name });
    tree.outside().heard().await;
    volume.sync_names().await.map_err(|error| {
        error
            .context("the copy is there, and is not known to be durable yet")
            .with_hint("`forebay sync` tells when it is")
    })?;
    Ok(made)
}

/// Commits what was written so far to `source` and to all below it, and lists its directories. Returns what there is.
async fn prepare(volume: &Volume, source: &Attributes, cancel: &CancellationToken) -> Result<Progress> {
    volume.commit(source.ino).await?;
    let mut total = Progress { files: 1, bytes: source.size, ..Progress::default() };
    if source.kind == FileKind::Directory {
        total = Progress::default();
        let mut below = walk(&**volume.tree(), source.ino);
        while let Some(entry) = below.next().await.transpose()? {
            if cancel.is_cancelled() {
                return Err(Error::new(ErrorKind::Unavailable, "the clone was cancelled: nothing was made"));
            }
            if entry.attributes.kind == FileKind::File {
                total.files += 1;
                total.bytes += entry.attributes.size;
            }
            volume.commit(entry.attributes.ino).await?;
        }
        // What was moved meanwhile was perhaps met nowhere.
        for inode in volume.open_inodes() {
            if is_within(&**volume.tree(), inode.ino(), source.ino).await? {
                volume.commit(inode.ino()).await?;
            }
        }
    }
    Ok(total)
}

/// Commits what was written through this mount so far to what is to be cloned where the tree is, and to nothing else: of other
/// files it may be half of a write.
pub(crate) async fn settle(volume: &Volume, from: &str) -> Result<()> {
    if !volume.open_inodes().iter().any(|inode| inode.is_pending()) {
        return Ok(());
    }
    let source = resolve(&**volume.tree(), from).await?;
    prepare(volume, &source, &CancellationToken::new()).await.map(drop)
}

/// Whether the first name of a file leads through `directory`.
async fn is_within(tree: &dyn Tree, ino: InodeId, directory: InodeId) -> Result<bool> {
    let mut at = ino;
    loop {
        match tree.parent(at).await {
            Ok(above) if above == directory => return Ok(true),
            Ok(above) if above == at => return Ok(false),
            Ok(above) => at = above,
            // It was removed.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        }
    }
}

/// What the tree asks while it clones.
struct Guide<'a, P> {
    volume: &'a Volume,
    total: Progress,
    progress: P,
    cancel: &'a CancellationToken,
}

#[async_trait]
impl<P: Fn(Progress) + Send + Sync> CloneGuide for Guide<'_, P> {
    fn goes_on(&self, cloned: &Cloned) -> bool {
        (self.progress)(Progress { done_bytes: cloned.bytes, ..self.total });
        !self.cancel.is_cancelled()
    }

    async fn settle(&self, files: &[InodeId], times: u32) -> Result<bool> {
        // A store that is slow takes as long to have the bytes as it may take for any write.
        let waited = WAIT * (1..times).map(|nth| nth.min(LONGER)).sum::<u32>();
        let patience = Duration::from_millis(self.volume.store().write.deadline_ms);
        if waited >= patience || self.cancel.is_cancelled() {
            return Ok(false);
        }
        for ino in files {
            self.volume.commit(*ino).await?;
        }
        self.volume.clock().sleep(WAIT * times.min(LONGER)).await;
        Ok(true)
    }
}
