//! New files in a directory that a person named, such as an export: each lies under another name until it is whole.
//!
//! For threads that may block.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use forebay_core::{Error, Result};

/// A file that is being written, as `<its name>.part`. Dropped before it is finished, it is removed.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    part: PathBuf,
    path: PathBuf,
    is_finished: bool,
}

impl NewFile {
    /// Begins it, in place of what an earlier attempt left.
    pub fn create(path: &Path) -> Result<Self> {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let (part, path) = (PathBuf::from(part), path.to_owned());
        let file = File::create(&part).map_err(|error| named(error, &part))?;
        Ok(Self { file, part, path, is_finished: false })
    }

    /// Adds bytes.
    pub fn write(&mut self, data: &[u8]) -> Result<()> {
        self.file.write_all(data).map_err(|error| named(error, &self.part))
    }

    /// Adds a range of another file by copy_file_range(2): where both lie on a file system that lets files share bytes,
    /// none is moved.
    ///
    /// # Errors
    /// `Corrupt` when the other file ends before the range does.
    pub fn share(&mut self, from: &Path, range: Range<u64>) -> Result<()> {
        let copy = || {
            let mut source = File::open(from)?;
            source.seek(SeekFrom::Start(range.start))?;
            // The standard library's copy between two files is the system call.
            io::copy(&mut source.take(range.end - range.start), &mut &self.file)
        };
        let copied = copy().map_err(|error| named(error, from))?;
        if copied != range.end - range.start {
            return Err(Error::corrupt(format!("{} ends before byte {}", from.display(), range.end)));
        }
        Ok(())
    }

    /// Gives it its name, once it is on disk.
    pub fn finish(mut self) -> Result<()> {
        let finished = self.file.sync_all().and_then(|()| fs::rename(&self.part, &self.path));
        finished.map_err(|error| named(error, &self.path))?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_finished {
            // What stays is replaced by the next attempt.
            fs::remove_file(&self.part).ok();
        }
    }
}

/// File systems of this host's disks, as statfs(2) calls them: ext4, XFS, Btrfs, F2FS, and overlayfs and tmpfs, which lie on
/// them or in memory.
const LOCAL: [u32; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x794c_7630, 0x0102_1994];

/// Whether a file lies on a disk of this host, or in its memory, and on no server.
pub(crate) fn is_local(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| LOCAL.contains(&(found.f_type as u32)))
}

/// Whether a read failed for want of something that the host has for others, and may have again: it says nothing about the
/// disk.
pub fn is_want(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Whether there is anything of that name.
pub fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Makes a directory and those above it, unless they are there.
pub fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|error| named(error, path))
}

fn named(error: io::Error, path: &Path) -> Error {
    Error::from(error).context(path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that may open no more files says nothing about the disk: no bytes are given up for that.
    #[test]
    fn a_host_that_lacks_something_is_told_from_a_disk_that_fails() {
        let check = |errno, expected| {
            assert_eq!(is_want(&io::Error::from_raw_os_error(errno)), expected, "errno {errno}");
        };
        check(libc::EMFILE, true);
        check(libc::ENFILE, true);
        check(libc::ENOMEM, true);
        check(libc::EIO, false);
        check(libc::ENODEV, false);
    }

    #[test]
    fn a_file_has_its_name_once_it_is_whole() {
        let folder = tempfile::tempdir().expect("scratch");
        let (source, path) = (folder.path().join("source"), folder.path().join("a/new"));
        fs::write(&source, b"0123456789").expect("write");
        make_directory(&folder.path().join("a")).expect("a directory");
        let mut file = NewFile::create(&path).expect("create");
        file.write(b"head ").expect("write");
        file.share(&source, 3..7).expect("share");
        file.write(b" tail").expect("write");
        assert!(file.share(&source, 8..11).expect_err("too short").message().contains("ends before byte 11"));
        drop(file);
        assert_eq!(fs::read_dir(folder.path().join("a")).expect("a directory").count(), 0);
        let mut file = NewFile::create(&path).expect("create");
        file.share(&source, 0..10).expect("share");
        assert!(!exists(&path));
        file.finish().expect("finish");
        assert_eq!(fs::read(&path).expect("whole"), b"0123456789");
    }
}
