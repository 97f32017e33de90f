//! A file whose lock goes with its process, and which names its holder to whoever comes second.
//!
//! Holds between processes of one host, and of hosts whose file system shares locks. Blocks on the disk.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use forebay_core::Result;

/// What came of asking for a lock.
pub(crate) enum Locked {
    /// It is held for as long as this file is open.
    Mine(File),
    /// Another holds it, under this name.
    By(String),
}

/// Locks the file at `path`, which is made if need be, in the name of `holder`.
pub(crate) fn lock(path: &Path, holder: &str) -> Result<Locked> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::Error(error)) => return Err(error.into()),
        Err(TryLockError::WouldBlock) => {
            let mut other = String::new();
            // A holder that has not written its name yet is still a holder.
            let _ = file.read_to_string(&mut other);
            return Ok(Locked::By(other.trim().to_owned()));
        }
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{holder}")?;
    Ok(Locked::Mine(file))
}
