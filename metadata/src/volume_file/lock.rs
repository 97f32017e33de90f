//! The lease of a directory: a locked file, held for as long as its process lives.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};

/// Takes the lock for `holder`, or says who has it. Blocks on the disk.
pub(super) fn lock(bucket: &Path, holder: &str) -> Result<File> {
    let directory = bucket.join(".forebay");
    std::fs::create_dir_all(&directory)?;
    let path = directory.join("volume.lock");
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::Error(error)) => return Err(error.into()),
        Err(TryLockError::WouldBlock) => {
            let mut other = String::new();
            // A holder that has not written its name yet is still a holder.
            let _ = file.read_to_string(&mut other);
            let message = format!("the volume is mounted read-write by {}", other.trim());
            return Err(Error::new(ErrorKind::Conflict, message).with_hint(
                "unmount it there; on a directory the lock goes with its process and cannot be taken over",
            ));
        }
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{holder}")?;
    Ok(file)
}
