//! The log file of a mount in the background, which is its stderr: bounded, for a mount may live for years.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use tracing_subscriber::fmt::MakeWriter;

/// Past so many bytes a log becomes the older one, in the place of the one before, and another is begun.
const MOST: u64 = 64 << 20;

/// Writes to stderr, and begins its file anew when that is full.
#[derive(Debug)]
pub(super) struct LogFile(Mutex<Writer>);

impl LogFile {
    /// Of a stderr that is a file with a name; `None` where it is anything else.
    pub(super) fn of_stderr() -> Option<Self> {
        let path = fs::read_link("/proc/self/fd/2").ok()?;
        let found = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        let begin_anew = |file: File| rustix::stdio::dup2_stderr(&file).map_err(io::Error::from);
        Some(Self(Mutex::new(Writer { path, bytes: found.len(), most: MOST, begin_anew })))
    }
}

impl<'a> MakeWriter<'a> for LogFile {
    type Writer = Turn<'a>;

    fn make_writer(&'a self) -> Turn<'a> {
        Turn(self.0.lock())
    }
}

/// Holds the file for one event.
#[derive(Debug)]
pub(super) struct Turn<'a>(MutexGuard<'a, Writer>);

impl Write for Turn<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.make_room(text.len() as u64);
        let written = io::stderr().write(text)?;
        self.0.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[derive(Debug)]
struct Writer {
    path: PathBuf,
    bytes: u64,
    most: u64,
    /// Has what is written from here on go to another file.
    begin_anew: fn(File) -> io::Result<()>,
}

impl Writer {
    /// Where that fails, the log grows on, and it is tried again when it has twice the size.
    fn make_room(&mut self, more: u64) {
        if self.bytes + more <= self.most {
            return;
        }
        match next(&self.path).and_then(self.begin_anew) {
            Ok(()) => self.bytes = 0,
            Err(_) => self.most = self.most.saturating_mul(2),
        }
    }
}

/// Gives a log the name of the older one, and makes another.
fn next(path: &Path) -> io::Result<File> {
    let mut older = path.as_os_str().to_owned();
    older.push(".old");
    fs::rename(path, older)?;
    OpenOptions::new().create(true).append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_log_becomes_the_older_one() {
        let scratch = tempfile::tempdir().expect("scratch");
        let path = scratch.path().join("mount.log");
        let older = scratch.path().join("mount.log.old");
        fs::write(&path, "first").expect("a log");
        let mut log = Writer { path: path.clone(), bytes: 5, most: 10, begin_anew: |_| Ok(()) };
        log.make_room(5);
        assert!(!older.exists());
        log.make_room(6);
        assert_eq!(
            (fs::read(&older).expect("older"), fs::read(&path).expect("new")),
            (b"first".to_vec(), vec![])
        );
        assert_eq!(log.bytes, 0);
        // The one before goes.
        fs::write(&path, "second").expect("a log");
        log.make_room(11);
        assert_eq!(fs::read(&older).expect("older"), b"second");
        // What cannot be begun anew is written on.
        fs::remove_file(&path).expect("removed");
        log.make_room(11);
        assert_eq!(log.most, 20);
    }
}
