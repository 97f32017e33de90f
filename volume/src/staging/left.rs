//! What processes that ended left staged, for those who look at this host and mount nothing.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use forebay_core::{Error, Result};
use forebay_io::task::blocking;
use serde::Serialize;

use super::file::key_of;
use super::folder::LOCK;
use super::{file, origin};

/// A folder of staged bytes that no process uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Left {
    /// Where it is.
    pub folder: PathBuf,
    /// The bucket that the bytes are for; `None` where an earlier build left them.
    pub source: Option<String>,
    /// The files in it: one for each piece that was written, of which some may not be wanted any more.
    pub blobs: u64,
    /// The bytes staged in them.
    pub bytes: u64,
}

/// What is left below the state directory, by folder.
///
/// # Errors
/// Those of the disk.
pub async fn left(state: &Path) -> Result<Vec<Left>> {
    let staging = state.join("staging");
    let found = blocking(move || {
        let folders = match fs::read_dir(&staging) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            folders => folders?,
        };
        let mut all = Vec::new();
        for folder in folders {
            all.extend(look(folder?.path())?);
        }
        all.sort_by(|a: &Left, b| a.folder.cmp(&b.folder));
        Ok(all)
    });
    found.await?.map_err(|error: io::Error| Error::from(error).context("the folders of staged bytes"))
}

/// `None` where nothing is left, or a process uses it.
fn look(folder: PathBuf) -> io::Result<Option<Left>> {
    if is_used(&folder)? {
        return Ok(None);
    }
    let (mut blobs, mut bytes) = (0, 0);
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        if entry.file_name().to_str().and_then(key_of).is_some() {
            blobs += 1;
            // One that is just being removed has none.
            bytes += entry.metadata().map_or(0, |found| file::data_bytes(found.len()));
        }
    }
    let source = origin::read(&folder).ok().flatten();
    Ok((blobs > 0).then_some(Left { folder, source, blobs, bytes }))
}

/// Whether a process has the folder. The lock is asked for to share it, and given back at once: a mount that comes in that
/// moment is told that the folder is in use.
fn is_used(folder: &Path) -> io::Result<bool> {
    let lock = match File::open(folder.join(LOCK)) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(!folder.is_dir());
        }
        lock => lock?,
    };
    match lock.try_lock_shared() {
        Ok(()) => lock.unlock().map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
