//! A file whose lock goes with its process, and which names its holder to whoever comes second.
//!
//! Holds between processes of one host, and of hosts whose file system shares locks. Blocks on the disk.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;

/// A lock, held until this is dropped.
#[derive(Debug)]
pub struct LockFile(File);

impl Drop for LockFile {
    fn drop(&mut self) {
        // Closing it is not enough: a program that is just being started holds a copy until it runs.
        let _ = self.0.unlock();
    }
}

/// What came of asking for a lock.
#[derive(Debug)]
pub enum Locked {
    /// It is held.
    Mine(LockFile),
    /// Another holds it, under this name; empty if it has not written it yet.
    By(String),
}

impl LockFile {
    /// Locks the file at `path`, which is made if need be, in the name of `holder`.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn lock(path: &Path, holder: &str) -> io::Result<Locked> {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {
                let mut other = String::new();
                let _ = file.read_to_string(&mut other);
                return Ok(Locked::By(other.trim().to_owned()));
            }
        }
        let lock = Self(file);
        lock.say(holder)?;
        Ok(Locked::Mine(lock))
    }

    /// Has the file say this from now on to whoever comes second.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn say(&self, holder: &str) -> io::Result<()> {
        let mut file = &self.0;
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{holder}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy of the descriptor, as a program that is being started has one, keeps nobody out.
    #[test]
    fn a_dropped_lock_is_free_whoever_has_a_copy() {
        let folder = tempfile::tempdir().expect("scratch");
        let path = folder.path().join("lock");
        let Ok(Locked::Mine(lock)) = LockFile::lock(&path, "first") else { panic!("nobody has it") };
        let copy = lock.0.try_clone().expect("a copy");
        let Ok(Locked::By(holder)) = LockFile::lock(&path, "second") else { panic!("it is held") };
        assert_eq!(holder, "first");
        drop(lock);
        assert!(matches!(LockFile::lock(&path, "third"), Ok(Locked::Mine(_))));
        drop(copy);
    }
}
