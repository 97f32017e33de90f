//! The lease of a directory: a locked file, held for as long as its process lives.

use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};

use forebay_io::lock_file::{LockFile, Locked};

/// Takes the lock for `holder`, or says who has it. Blocks on the disk.
pub(super) fn lock(bucket: &Path, holder: &str) -> Result<LockFile> {
    let directory = bucket.join(".forebay");
    std::fs::create_dir_all(&directory)?;
    match LockFile::lock(&directory.join("volume.lock"), holder)? {
        Locked::Mine(file) => Ok(file),
        Locked::By(other) => {
            let message = format!("the volume is mounted read-write by {other}");
            Err(Error::new(ErrorKind::Conflict, message).with_hint(
                "unmount it there; on a directory the lock goes with its process and cannot be taken over",
            ))
        }
    }
}
