//! Copies of files and trees that share all bytes with what they were copied from: no byte is read or written.
//!
//! The tree makes them in one transaction. Before that, what is written there so far is committed, and what was never
//! looked at is listed.

use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Attributes, ErrorKind, FileKind, Result};
use forebay_metadata::tree::{Cloned, OutsideChange, resolve, walk};
use futures::StreamExt;

use crate::Volume;

/// Attempts while files are being written or moved, and what the next waits longer.
const ATTEMPTS: u32 = 10;
const WAIT: Duration = Duration::from_millis(50);

/// Makes `to`, which must not exist, a copy of the file or directory `from`. Both are paths from the volume's root.
///
/// # Errors
/// `NotFound`, and those of the tree's `clone_tree`; `Conflict` for a file that is written all the time. Nothing is made
/// then.
pub async fn clone(volume: &Volume, from: &str, to: &str) -> Result<Cloned> {
    let tree = &**volume.tree();
    let source = resolve(tree, from).await?;
    let to = to.trim_end_matches('/');
    let (directory, name) = to.rsplit_once('/').unwrap_or(("", to));
    let parent = resolve(tree, directory).await?;
    let mut attempt = 0;
    let made = loop {
        attempt += 1;
        prepare(volume, &source).await?;
        match tree.clone_tree(source.ino, (parent.ino, name.as_bytes())).await {
            Err(error) if error.kind() == ErrorKind::Conflict && attempt < ATTEMPTS => {
                volume.clock().sleep(WAIT * attempt).await;
            }
            made => break made?,
        }
    };
    // The kernel may know that there was no such name.
    let name = Bytes::copy_from_slice(name.as_bytes());
    tree.outside().tell(OutsideChange { directory: parent.ino, name });
    tree.outside().heard().await;
    volume.sync_names().await?;
    Ok(made)
}

/// Commits what was written so far to `source` and to all below it, and lists its directories.
async fn prepare(volume: &Volume, source: &Attributes) -> Result<()> {
    volume.commit(source.ino).await?;
    if source.kind == FileKind::Directory {
        let mut below = walk(&**volume.tree(), source.ino);
        while let Some(entry) = below.next().await.transpose()? {
            volume.commit(entry.attributes.ino).await?;
        }
    }
    Ok(())
}
