//! A folder, by the kernel's calls: below a mount, or of a tmpfs.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_tests::Scratch;
use forebay_tests::process::run_apart;
use rustix::fs::{self, AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom};
use rustix::fs::{Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::{Errno, pread, pwrite};

use super::calls::{Answer, Called, Calls, Kind, Seen, Status};
use super::neighbour::Neighbours;
use super::operation::{Operation, Time};

/// A folder and what is open of it.
pub(crate) struct Folder {
    root: PathBuf,
    open: HashMap<usize, OwnedFd>,
    opened: usize,
    /// Whether fallocate knows FALLOC_FL_ZERO_RANGE.
    zero_range: bool,
    /// Whether storing in a mapping changes a file's times.
    marks_stores: bool,
    /// Something was stored in a mapping and not synced yet.
    stored: bool,
    neighbours: Neighbours,
}

impl Folder {
    pub(crate) fn new(root: &Path) -> Self {
        let (root, neighbours) = (root.to_owned(), Neighbours::new(root));
        let (open, stored) = (HashMap::new(), false);
        Self { root, open, opened: 0, zero_range: true, marks_stores: true, stored, neighbours }
    }

    fn path(&self, path: &Path) -> PathBuf {
        self.root.join(path)
    }

    /// Gives a file the time that storing in a mapping should.
    fn mark_stores(&mut self) -> Called<()> {
        if std::mem::take(&mut self.stored) && !self.marks_stores { self.neighbours.touch() } else { Ok(()) }
    }

    /// As fallocate(2) says of FALLOC_FL_ZERO_RANGE, which tmpfs lacks: a hole, and the size grows.
    fn zero(&self, file: &OwnedFd, mode: FallocateFlags, offset: u64, length: u64) -> rustix::io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fs::fallocate(file, hole, offset, length)?;
        let grows = !mode.contains(FallocateFlags::KEEP_SIZE)
            && fs::fstat(file)?.st_size < (offset + length).cast_signed();
        if grows { fs::ftruncate(file, offset + length) } else { Ok(()) }
    }
}

/// A tmpfs of its own, which is what others are compared with.
pub(crate) struct Tmpfs {
    folder: Scratch,
}

impl Tmpfs {
    /// Says why where none can be mounted.
    pub(crate) fn new() -> Result<Self, String> {
        let folder = Scratch::new();
        // Access times stay and devices lead nowhere, as through Forebay.
        let args = ["-t", "tmpfs", "-o", "size=4g,noatime,nodev,mode=755", "tmpfs"];
        let mounted = run_apart(Command::new("mount").args(args).arg(folder.path()));
        match mounted {
            Ok(done) if done.status.success() => Ok(Self { folder }),
            Ok(done) => Err(format!("no tmpfs: {}", String::from_utf8_lossy(&done.stderr).trim())),
            Err(error) => Err(format!("no tmpfs: {error}")),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// What tmpfs and Forebay differ in, and neither POSIX nor ext4 decides:
    ///
    /// - tmpfs has no FALLOC_FL_ZERO_RANGE: a hole and the size stand for it, which is what it says to do;
    /// - tmpfs keeps data in pages, and calls what was allocated data: SEEK_DATA and SEEK_HOLE are held to what they
    ///   may say, and `st_blocks` is not compared;
    /// - tmpfs changes no times when a page that was only read is stored to: what POSIX leaves to any moment until the
    ///   next msync is done then;
    /// - directories have sizes of different kinds.
    pub(crate) fn calls(&self) -> Folder {
        Folder { zero_range: false, marks_stores: false, ..Folder::new(self.folder.path()) }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily: a failed test may have left files open.
        let _ = run_apart(Command::new("umount").arg("-l").arg(self.folder.path()));
    }
}

fn kind(kind: FileType) -> Kind {
    match kind {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Folder,
        FileType::Symlink => Kind::Symlink,
        FileType::Fifo => Kind::Pipe,
        FileType::Socket => Kind::Socket,
        FileType::CharacterDevice => Kind::CharDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        _ => Kind::Other,
    }
}

fn status(stat: Stat) -> Status {
    let status = Status {
        kind: kind(FileType::from_raw_mode(stat.st_mode)),
        mode: stat.st_mode,
        links: stat.st_nlink,
        user: stat.st_uid,
        group: stat.st_gid,
        size: stat.st_size.cast_unsigned(),
        device: (fs::major(stat.st_rdev), fs::minor(stat.st_rdev)),
        accessed: Seen::new(stat.st_atime, stat.st_atime_nsec as u32),
        modified: Seen::new(stat.st_mtime, stat.st_mtime_nsec as u32),
    };
    status.promised()
}

fn timespec(time: Time) -> Timespec {
    let (tv_sec, tv_nsec) = match time {
        Time::Keep => (0, fs::UTIME_OMIT),
        Time::Now => (0, fs::UTIME_NOW),
        Time::At(seconds, nanos) => (seconds, i64::from(nanos)),
    };
    Timespec { tv_sec, tv_nsec }
}

/// An errno instead of rustix's type.
fn called<T>(result: rustix::io::Result<T>) -> Called<T> {
    result.map_err(Errno::raw_os_error)
}

impl Calls for Folder {
    fn open(&mut self, path: &Path, flags: i32, mode: u32) -> Called<usize> {
        let flags = OFlags::from_bits_retain(flags.cast_unsigned()) | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = called(fs::open(self.path(path), flags, Mode::from_raw_mode(mode)))?;
        if status(called(fs::fstat(&file))?).kind == Kind::Pipe {
            return Err(libc::ESPIPE);
        }
        self.opened += 1;
        self.open.insert(self.opened, file);
        Ok(self.opened)
    }

    fn close(&mut self, file: usize) -> Called<()> {
        // What close would say, only unsafe code can ask for; what was lost shows in the tree.
        self.open.remove(&file).map(drop).ok_or(libc::EBADF)
    }

    fn read(&mut self, file: usize, offset: u64, length: usize) -> Called<Vec<u8>> {
        let (file, mut bytes, mut filled) = (&self.open[&file], vec![0; length], 0);
        while filled < length {
            match called(pread(file, &mut bytes[filled..], offset + filled as u64))? {
                0 => break,
                more => filled += more,
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Called<()> {
        let mut written = called(pwrite(&self.open[&file], bytes, offset))?;
        while written < bytes.len() {
            let (rest, offset) = (&bytes[written..], offset + written as u64);
            written += called(pwrite(&self.open[&file], rest, offset))?;
        }
        Ok(())
    }

    fn set_size(&mut self, file: usize, size: u64) -> Called<()> {
        called(fs::ftruncate(&self.open[&file], size))
    }

    fn sync(&mut self, file: usize) -> Called<()> {
        called(fs::fsync(&self.open[&file]))
    }

    fn allocate(&mut self, file: usize, mode: i32, offset: u64, length: u64) -> Called<()> {
        let (file, mode) = (&self.open[&file], FallocateFlags::from_bits_retain(mode.cast_unsigned()));
        called(match mode.contains(FallocateFlags::ZERO_RANGE) && !self.zero_range {
            true => self.zero(file, mode, offset, length),
            false => fs::fallocate(file, mode, offset, length),
        })
    }

    fn seek(&mut self, file: usize, offset: u64, whence: i32) -> Called<u64> {
        let to = if whence == libc::SEEK_DATA { SeekFrom::Data(offset) } else { SeekFrom::Hole(offset) };
        called(fs::seek(&self.open[&file], to))
    }

    fn copy(&mut self, from: (usize, u64), to: (usize, u64), length: usize) -> Called<usize> {
        let (source, target) = (&self.open[&from.0], &self.open[&to.0]);
        let (mut from, mut to) = (from.1, to.1);
        called(fs::copy_file_range(source, Some(&mut from), target, Some(&mut to), length))
    }

    fn status(&mut self, file: usize) -> Called<Status> {
        called(fs::fstat(&self.open[&file])).map(status)
    }

    fn make_folder(&mut self, path: &Path, mode: u32) -> Called<()> {
        called(fs::mkdir(self.path(path), Mode::from_raw_mode(mode)))
    }

    fn make_node(&mut self, path: &Path, kind: Kind, mode: u32, device: (u32, u32)) -> Called<()> {
        let kind = match kind {
            Kind::Pipe => FileType::Fifo,
            Kind::Socket => FileType::Socket,
            Kind::CharDevice => FileType::CharacterDevice,
            Kind::BlockDevice => FileType::BlockDevice,
            other => unreachable!("{other:?} is no node"),
        };
        let device = fs::makedev(device.0, device.1);
        called(fs::mknodat(CWD, self.path(path), kind, Mode::from_raw_mode(mode), device))
    }

    fn symlink(&mut self, target: &Path, path: &Path) -> Called<()> {
        called(fs::symlink(target, self.path(path)))
    }

    fn read_link(&mut self, path: &Path) -> Called<Vec<u8>> {
        called(fs::readlink(self.path(path), Vec::new())).map(std::ffi::CString::into_bytes)
    }

    fn link(&mut self, from: &Path, to: &Path) -> Called<()> {
        called(fs::link(self.path(from), self.path(to)))
    }

    fn remove(&mut self, path: &Path) -> Called<()> {
        called(fs::unlink(self.path(path)))
    }

    fn remove_folder(&mut self, path: &Path) -> Called<()> {
        called(fs::rmdir(self.path(path)))
    }

    fn rename(&mut self, from: &Path, to: &Path, flags: u32) -> Called<()> {
        let flags = RenameFlags::from_bits_retain(flags);
        called(fs::renameat_with(CWD, self.path(from), CWD, self.path(to), flags))
    }

    fn list(&mut self, path: &Path) -> Called<Vec<(Vec<u8>, Kind)>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = called(fs::open(self.path(path), flags, Mode::empty()))?;
        let entries = called(fs::Dir::read_from(&folder))?;
        entries
            .map(|entry| called(entry).map(|it| (it.file_name().to_bytes().to_vec(), kind(it.file_type()))))
            .collect()
    }

    fn look(&mut self, path: &Path) -> Called<Status> {
        called(fs::lstat(self.path(path))).map(status)
    }

    fn set_mode(&mut self, path: &Path, mode: u32) -> Called<()> {
        called(fs::chmod(self.path(path), Mode::from_raw_mode(mode)))
    }

    fn set_owner(&mut self, path: &Path, user: Option<u32>, group: Option<u32>) -> Called<()> {
        let (user, group) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
        called(fs::chownat(CWD, self.path(path), user, group, AtFlags::SYMLINK_NOFOLLOW))
    }

    fn set_times(&mut self, path: &Path, accessed: Time, modified: Time) -> Called<()> {
        let times = Timestamps { last_access: timespec(accessed), last_modification: timespec(modified) };
        called(fs::utimensat(CWD, self.path(path), &times, AtFlags::SYMLINK_NOFOLLOW))
    }

    fn set_xattr(&mut self, path: &Path, name: &str, value: &[u8], flags: i32) -> Called<()> {
        let flags = XattrFlags::from_bits_retain(flags.cast_unsigned());
        called(fs::lsetxattr(self.path(path), name, value, flags))
    }

    fn xattr(&mut self, path: &Path, name: &str) -> Called<Vec<u8>> {
        let mut value = vec![0; 64 << 10];
        let length = called(fs::lgetxattr(self.path(path), name, &mut value))?;
        value.truncate(length);
        Ok(value)
    }

    fn xattrs(&mut self, path: &Path) -> Called<Vec<String>> {
        let mut list = vec![0; 64 << 10];
        let length = called(fs::llistxattr(self.path(path), &mut list))?;
        let names = list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| OsStr::from_bytes(name).to_string_lossy().into_owned()).collect())
    }

    fn remove_xattr(&mut self, path: &Path, name: &str) -> Called<()> {
        called(fs::lremovexattr(self.path(path), name))
    }

    fn space(&mut self, path: &Path) -> Called<(u64, u64)> {
        let space = called(fs::statvfs(self.path(path)))?;
        Ok((space.f_bsize, space.f_namemax))
    }

    fn map(&mut self, path: &Path, offset: u64, length: usize) -> Called<()> {
        self.mark_stores()?;
        self.neighbours.map(path, offset, length)
    }

    fn store(&mut self, at: usize, bytes: &[u8]) -> Called<usize> {
        let stored = self.neighbours.store(at, bytes)?;
        self.stored |= stored > 0;
        Ok(stored)
    }

    fn load(&mut self, at: usize, length: usize) -> Called<Vec<u8>> {
        self.neighbours.load(at, length)
    }

    fn sync_map(&mut self) -> Called<()> {
        self.neighbours.sync()?;
        self.mark_stores()
    }

    fn unmap(&mut self) -> Called<()> {
        self.mark_stores()?;
        self.neighbours.unmap()
    }

    fn beside(&mut self, operation: &Operation) -> Answer {
        self.neighbours.run(operation)
    }

    fn rest(&mut self) -> Called<()> {
        self.neighbours.rest()
    }
}
