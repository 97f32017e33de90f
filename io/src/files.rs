//! New files in a directory that a person named, such as an export: each lies under another name until it is whole.
//!
//! For threads that may block.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

use crate::rng::Rng;

/// A file that is being written, under its name with `.part` at the end. Dropped before it is finished, it is removed.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    part: PathBuf,
    path: PathBuf,
    /// Whether it may take the place of another.
    replaces: bool,
    is_finished: bool,
}

impl NewFile {
    /// Begins it, in place of what an earlier attempt left.
    ///
    /// # Errors
    /// `Conflict` while another one is at it.
    pub fn create(path: &Path) -> Result<Self> {
        let part = with_suffix(path, ".part");
        let file = loop {
            let file = File::options().write(true).create(true).truncate(false).open(&part);
            let file = file.map_err(|error| unmade(error, path))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => {
                    let message = format!("{} is being written already", path.display());
                    return Err(Error::new(ErrorKind::Conflict, message)
                        .with_hint("wait for who writes it, or write to another directory"));
                }
                // Where files cannot be locked, who writes one twice at once is on their own.
                Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => {}
                locked => locked.map_err(|error| unmade(error.into(), path))?,
            }
            // Whoever had it before may have given it its name meanwhile.
            if is_there(&file, &part).map_err(|error| unmade(error, path))? {
                break file;
            }
        };
        file.set_len(0).map_err(|error| unmade(error, path))?;
        Ok(Self { file, part, path: path.to_owned(), replaces: true, is_finished: false })
    }

    /// Begins one that takes nothing's place, under a name that no other attempt has.
    ///
    /// # Errors
    /// `Exists` when there is something of that name, here or once it is finished.
    pub fn create_new(path: &Path) -> Result<Self> {
        refuse_taken(path)?;
        let part = with_suffix(path, &format!(".{:016x}.part", Rng::system().u64()));
        let file = File::create_new(&part).map_err(|error| unmade(error, path))?;
        Ok(Self { file, part, path: path.to_owned(), replaces: false, is_finished: false })
    }

    /// Another handle of it, to write through.
    pub fn handle(&self) -> Result<File> {
        self.file.try_clone().map_err(|error| named(error, &self.path))
    }

    /// Adds bytes.
    pub fn write(&mut self, data: &[u8]) -> Result<()> {
        self.file.write_all(data).map_err(|error| named(error, &self.path))
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
        self.file.sync_all().map_err(|error| named(error, &self.path))?;
        match self.replaces {
            true => fs::rename(&self.part, &self.path).map_err(|error| named(error, &self.path))?,
            false => self.take_free_name()?,
        }
        self.is_finished = true;
        Ok(())
    }

    fn take_free_name(&self) -> Result<()> {
        let renamed = renameat_with(CWD, &self.part, CWD, &self.path, RenameFlags::NOREPLACE);
        match renamed {
            // Some file systems of networks know no such rename.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                refuse_taken(&self.path)?;
                fs::rename(&self.part, &self.path).map_err(|error| named(error, &self.path))
            }
            renamed => renamed.map_err(|error| named(error.into(), &self.path)),
        }
    }
}

/// Whether a file still lies under that name.
fn is_there(file: &File, path: &Path) -> io::Result<bool> {
    let named = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        named => named?,
    };
    let own = file.metadata()?;
    Ok((own.dev(), own.ino()) == (named.dev(), named.ino()))
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_finished {
            // What stays is replaced by the next attempt.
            fs::remove_file(&self.part).ok();
        }
    }
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

fn refuse_taken(path: &Path) -> Result<()> {
    match exists(path) {
        true => Err(named(Errno::EXIST.into(), path)),
        false => Ok(()),
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes a directory and those above it, unless they are there.
pub fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|error| named(error, path))
}

/// Why a new file cannot be begun where a person wants it.
fn unmade(error: io::Error, path: &Path) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "its directory has to be there: make it with `mkdir -p`",
        io::ErrorKind::NotADirectory => "a part of its path is a file",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "choose a directory that you can write to"
        }
        _ => return named(error, path),
    };
    named(error, path).with_hint(hint)
}

fn named(error: io::Error, path: &Path) -> Error {
    Error::from(error).context(path.display())
}

/// Lets nobody but this user look into a directory whose files hold bytes that not everybody may read. One that is another user's
/// stays as it is.
pub fn keep_private(directory: &Path) {
    if let Err(error) = fs::set_permissions(directory, fs::Permissions::from_mode(0o700)) {
        tracing::warn!(directory = %directory.display(), %error, "who may look into it is left as it is");
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::ErrorKind;

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

    /// Ranks that all export to one directory: each cut off what the others had written, and the last one to be killed left
    /// zeros under the file's name.
    #[test]
    fn a_file_is_written_by_one_at_a_time() {
        let folder = tempfile::tempdir().expect("scratch");
        let path = folder.path().join("new");
        let mut first = NewFile::create(&path).expect("create");
        first.write(b"first").expect("write");
        let told = NewFile::create(&path).expect_err("it is being written");
        assert_eq!(told.kind(), ErrorKind::Conflict, "{told}");
        first.write(b" and whole").expect("write");
        first.finish().expect("finish");
        // What a killed one left is nobody's.
        fs::write(folder.path().join("new.part"), b"a longer rest of another attempt").expect("write");
        let mut second = NewFile::create(&path).expect("create");
        second.write(b"second").expect("write");
        assert_eq!(fs::read(&path).expect("whole"), b"first and whole");
        second.finish().expect("finish");
        assert_eq!(fs::read(&path).expect("whole"), b"second");
    }

    #[test]
    fn a_place_where_no_file_can_be_is_named_as_it_was_given() {
        let folder = tempfile::tempdir().expect("scratch");
        fs::write(folder.path().join("file"), b"").expect("write");
        for (place, kind, hint) in [
            ("none/new", ErrorKind::NotFound, "mkdir -p"),
            ("file/new", ErrorKind::NotDirectory, "is a file"),
        ] {
            let path = folder.path().join(place);
            for told in
                [NewFile::create(&path), NewFile::create_new(&path)].map(|made| made.expect_err(place))
            {
                assert_eq!(told.kind(), kind, "{told}");
                assert!(told.message().starts_with(&format!("{}: ", path.display())), "{told}");
                assert!(told.hint().is_some_and(|said| said.contains(hint)), "{told:?}");
            }
        }
    }

    #[test]
    fn a_file_that_replaces_nothing_finds_its_name_taken() {
        let folder = tempfile::tempdir().expect("scratch");
        let path = folder.path().join("new");
        let names = || fs::read_dir(folder.path()).expect("a directory").count();
        let mut first = NewFile::create_new(&path).expect("create");
        let second = NewFile::create_new(&path).expect("nothing has the name yet");
        assert_eq!(names(), 2);
        first.write(b"first").expect("write");
        second.handle().and_then(|mut file| Ok(file.write_all(b"second")?)).expect("write");
        first.finish().expect("finish");
        assert_eq!(second.finish().expect_err("it is taken").kind(), ErrorKind::Exists);
        assert_eq!(NewFile::create_new(&path).expect_err("it is taken").kind(), ErrorKind::Exists);
        assert_eq!((fs::read(&path).expect("whole"), names()), (b"first".to_vec(), 1));
    }
}
