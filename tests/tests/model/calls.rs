//! The calls of a file system, and what a program sees of an operation made of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::operation::{Operation, SLOTS, Time};

/// What a call returns, or its errno.
pub(crate) type Called<T> = Result<T, i32>;

/// What a program can see of an operation.
pub(crate) type Answer = Called<Vec<u8>>;

/// Times before this are told exactly: a test set them. Later ones are the clock's. 2020-01-01.
const RECENT: i64 = 1_577_836_800;

/// A time, as far as two file systems agree about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    At(i64, u32),
    Recent,
}

impl Seen {
    pub(crate) fn new(seconds: i64, nanos: u32) -> Self {
        if seconds < RECENT { Self::At(seconds, nanos) } else { Self::Recent }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    File,
    Folder,
    Symlink,
    Pipe,
    Socket,
    CharDevice,
    BlockDevice,
    Other,
}

/// What stat tells, as far as it is promised: of directories no size, of symlinks no mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Status {
    pub kind: Kind,
    pub mode: u32,
    pub links: u64,
    pub user: u32,
    pub group: u32,
    pub size: u64,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    pub accessed: Seen,
    pub modified: Seen,
}

impl Status {
    /// Without what is not promised of its kind.
    pub(crate) fn promised(self) -> Self {
        let mode = if self.kind == Kind::Symlink { 0 } else { self.mode & 0o7777 };
        let size = if self.kind == Kind::Folder { 0 } else { self.size };
        let is_device = matches!(self.kind, Kind::CharDevice | Kind::BlockDevice);
        let device = if is_device { self.device } else { (0, 0) };
        Self { mode, size, device, ..self }
    }
}

/// A file system by its calls. Paths are relative to its root; an open file is a number. A named pipe is never left
/// open: opening one that could be is ESPIPE, and ENXIO where it could not.
pub(crate) trait Calls {
    fn open(&mut self, path: &Path, flags: i32, mode: u32) -> Called<usize>;
    fn close(&mut self, file: usize) -> Called<()>;
    /// Fewer bytes than asked for only at the end.
    fn read(&mut self, file: usize, offset: u64, length: usize) -> Called<Vec<u8>>;
    /// All of `bytes`.
    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Called<()>;
    fn set_size(&mut self, file: usize, size: u64) -> Called<()>;
    fn sync(&mut self, file: usize) -> Called<()>;
    fn allocate(&mut self, file: usize, mode: i32, offset: u64, length: u64) -> Called<()>;
    fn seek(&mut self, file: usize, offset: u64, whence: i32) -> Called<u64>;
    fn copy(&mut self, from: (usize, u64), to: (usize, u64), length: usize) -> Called<usize>;
    fn status(&mut self, file: usize) -> Called<Status>;

    fn make_folder(&mut self, path: &Path, mode: u32) -> Called<()>;
    fn make_node(&mut self, path: &Path, kind: Kind, mode: u32, device: (u32, u32)) -> Called<()>;
    fn symlink(&mut self, target: &Path, path: &Path) -> Called<()>;
    fn read_link(&mut self, path: &Path) -> Called<Vec<u8>>;
    fn link(&mut self, from: &Path, to: &Path) -> Called<()>;
    fn remove(&mut self, path: &Path) -> Called<()>;
    fn remove_folder(&mut self, path: &Path) -> Called<()>;
    fn rename(&mut self, from: &Path, to: &Path, flags: u32) -> Called<()>;
    /// Names and kinds, `.` and `..` too, in any order.
    fn list(&mut self, path: &Path) -> Called<Vec<(Vec<u8>, Kind)>>;
    /// Of a symlink itself, as all that follows but `set_mode`.
    fn look(&mut self, path: &Path) -> Called<Status>;
    fn set_mode(&mut self, path: &Path, mode: u32) -> Called<()>;
    fn set_owner(&mut self, path: &Path, user: Option<u32>, group: Option<u32>) -> Called<()>;
    fn set_times(&mut self, path: &Path, accessed: Time, modified: Time) -> Called<()>;
    fn set_xattr(&mut self, path: &Path, name: &str, value: &[u8], flags: i32) -> Called<()>;
    fn xattr(&mut self, path: &Path, name: &str) -> Called<Vec<u8>>;
    /// Names, in any order.
    fn xattrs(&mut self, path: &Path) -> Called<Vec<String>>;
    fn remove_xattr(&mut self, path: &Path, name: &str) -> Called<()>;
    /// Size of a block and longest name in bytes.
    fn space(&mut self, path: &Path) -> Called<(u64, u64)>;

    /// Maps a file, shared and to be written, instead of what was mapped, and has it open by that alone.
    fn map(&mut self, path: &Path, offset: u64, length: usize) -> Called<()>;
    /// Stores what the file and the mapping have room for, and says how much.
    fn store(&mut self, at: usize, bytes: &[u8]) -> Called<usize>;
    /// What is there up to the end of the file's last page; EFAULT where nothing is.
    fn load(&mut self, at: usize, length: usize) -> Called<Vec<u8>>;
    fn sync_map(&mut self) -> Called<()>;
    fn unmap(&mut self) -> Called<()>;
    /// What only a kernel does.
    fn beside(&mut self, operation: &Operation) -> Answer;
    /// Nothing that runs beside the program holds anything.
    fn rest(&mut self) -> Called<()>;
}

/// All that is below a root.
pub(crate) type Tree = BTreeMap<PathBuf, Entry>;

/// One entry of a tree. Its bytes are a file's, or a symlink's target.
#[derive(PartialEq, Eq)]
pub(crate) struct Entry {
    status: Status,
    xattrs: BTreeMap<String, Vec<u8>>,
    bytes: Vec<u8>,
}

/// What tells `got` from `expected`, in words.
pub(crate) fn differences(expected: &Tree, got: &Tree) -> Option<String> {
    let missing = expected.keys().filter(|path| !got.contains_key(*path));
    let unexpected = got.keys().filter(|path| !expected.contains_key(*path));
    let missing = missing.map(|path| format!("{}: missing", path.display()));
    let unexpected = unexpected.map(|path| format!("{}: unexpected", path.display()));
    let both = expected.iter().filter_map(|(path, left)| Some((path, left, got.get(path)?)));
    let differ = both.filter(|(_, left, right)| left != right).map(|(path, left, right)| {
        let (l, r) = (&left.bytes, &right.bytes);
        let at = l.iter().zip(r).position(|(l, r)| l != r).unwrap_or(l.len().min(r.len()));
        let bytes = if l == r { String::new() } else { format!(", bytes differ from {at} on") };
        let (left, right) = ((&left.status, &left.xattrs), (&right.status, &right.xattrs));
        format!("{}: {right:?}, expected {left:?}{bytes}", path.display())
    });
    let found: Vec<_> = missing.chain(unexpected).chain(differ).collect();
    let shown = found.iter().take(10).cloned().collect::<Vec<_>>().join("\n");
    (!found.is_empty()).then(|| format!("{} differences:\n{shown}", found.len()))
}

/// A program that runs over a file system, with what it has open.
pub(crate) struct Program<C> {
    pub calls: C,
    open: [Option<usize>; SLOTS],
    /// Something was stored in a mapping and not synced yet.
    stored: bool,
}

impl<C: Calls> Program<C> {
    pub(crate) fn new(calls: C) -> Self {
        Self { calls, open: [None; SLOTS], stored: false }
    }

    /// Closes what is open.
    pub(crate) fn close_all(&mut self) -> Called<()> {
        self.unmap()?;
        self.calls.rest()?;
        (0..SLOTS).try_for_each(|slot| self.close(slot))
    }

    fn close(&mut self, slot: usize) -> Called<()> {
        self.open[slot].take().map_or(Ok(()), |file| self.calls.close(file))
    }

    fn at(&self, slot: usize) -> Called<usize> {
        self.open[slot].ok_or(libc::EBADF)
    }

    pub(crate) fn run(&mut self, operation: &Operation) -> Answer {
        match operation {
            Operation::Open { slot, path, flags, mode } => {
                self.close(*slot)?;
                self.open[*slot] = Some(self.calls.open(path, *flags, *mode)?);
                Ok(Vec::new())
            }
            Operation::Close { slot } => said(self.close(*slot)),
            Operation::ReadAt { slot, offset, length } => self.calls.read(self.at(*slot)?, *offset, *length),
            Operation::WriteAt { slot, offset, bytes } => {
                said(self.calls.write(self.at(*slot)?, *offset, &bytes.0))
            }
            Operation::SetSize { slot, size } => said(self.calls.set_size(self.at(*slot)?, *size)),
            Operation::Sync { slot } => said(self.calls.sync(self.at(*slot)?)),
            Operation::Allocate { slot, mode, offset, length } => {
                said(self.calls.allocate(self.at(*slot)?, *mode, *offset, *length))
            }
            Operation::Seek { slot, offset, whence } => self.seek(self.at(*slot)?, *offset, *whence),
            Operation::Copy { from, to, length } => self.copy(*from, *to, *length),
            Operation::Status { slot } => {
                let status = self.calls.status(self.at(*slot)?);
                said(status.map(|status| self.settled(status)))
            }
            // What is mapped would change a tree while it is looked at.
            Operation::Remount => said(self.unmap()),
            _ if operation.is_the_kernels() => self.calls.beside(operation),
            _ => self.run_on_mapping(operation),
        }
    }

    fn run_on_mapping(&mut self, operation: &Operation) -> Answer {
        match operation {
            Operation::Map { path, offset, length } => {
                self.calls.map(path, *offset, *length)?;
                self.stored = false;
                Ok(Vec::new())
            }
            Operation::Store { at, bytes } => {
                let stored = self.calls.store(*at, &bytes.0)?;
                self.stored |= stored > 0;
                said(Ok(stored))
            }
            Operation::Load { at, length } => self.calls.load(*at, *length),
            Operation::SyncMap => {
                self.stored = false;
                said(self.calls.sync_map())
            }
            Operation::Unmap => said(self.unmap()),
            _ => self.run_on_path(operation),
        }
    }

    fn unmap(&mut self) -> Called<()> {
        self.stored = false;
        self.calls.unmap()
    }

    /// Storing in a mapping changes the time of modification at any moment until it is synced, says POSIX.
    fn settled(&self, status: Status) -> Status {
        if self.stored { Status { modified: Seen::Recent, ..status } } else { status }
    }

    fn run_on_path(&mut self, operation: &Operation) -> Answer {
        // The time that is set is to be the last.
        if self.stored && matches!(operation, Operation::Times { .. }) {
            self.run_on_mapping(&Operation::SyncMap)?;
        }
        if let Operation::Look { path } = operation {
            let status = self.calls.look(path);
            return said(status.map(|status| self.settled(status)));
        }
        let calls = &mut self.calls;
        match operation {
            Operation::MakeFolder { path, mode } => said(calls.make_folder(path, *mode)),
            Operation::MakeNode { path, kind, mode, device } => {
                said(calls.make_node(path, *kind, *mode, *device))
            }
            Operation::Symlink { path, target } => said(calls.symlink(target, path)),
            Operation::ReadLink { path } => calls.read_link(path),
            Operation::Link { from, to } => said(calls.link(from, to)),
            Operation::Remove { path } => said(calls.remove(path)),
            Operation::RemoveFolder { path } => said(calls.remove_folder(path)),
            Operation::Rename { from, to, flags } => said(calls.rename(from, to, *flags)),
            Operation::List { path } => said(sorted(calls.list(path))),
            Operation::Mode { path, mode } => said(calls.set_mode(path, *mode)),
            Operation::Owner { path, user, group } => said(calls.set_owner(path, *user, *group)),
            Operation::Times { path, accessed, modified } => {
                said(calls.set_times(path, *accessed, *modified))
            }
            Operation::SetXattr { path, name, value, flags } => {
                said(calls.set_xattr(path, name, value, *flags))
            }
            Operation::Xattr { path, name } => calls.xattr(path, name),
            Operation::Xattrs { path } => said(sorted(calls.xattrs(path))),
            Operation::RemoveXattr { path, name } => said(calls.remove_xattr(path, name)),
            Operation::SetList { path, name, list } => said(calls.set_xattr(path, name, &list.encode(), 0)),
            Operation::Space { path } => said(calls.space(path)),
            _ => self.run_once(operation),
        }
    }

    /// What opens a file for itself.
    fn run_once(&mut self, operation: &Operation) -> Answer {
        let (path, flags) = match operation {
            Operation::Write { path, .. } => (path, libc::O_WRONLY | libc::O_CREAT),
            Operation::Append { path, .. } => (path, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND),
            Operation::Replace { path, .. } => (path, libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC),
            Operation::Truncate { path, .. } => (path, libc::O_WRONLY),
            Operation::Read { path, .. } => (path, libc::O_RDONLY),
            other => unreachable!("{other:?} opens no file for itself"),
        };
        let calls = &mut self.calls;
        let file = calls.open(path, flags, 0o666)?;
        let done = match operation {
            Operation::Write { offset, bytes, sync, .. } => {
                let written = calls.write(file, *offset, &bytes.0);
                said(written.and_then(|()| if *sync { calls.sync(file) } else { Ok(()) }))
            }
            Operation::Append { bytes, .. } | Operation::Replace { bytes, .. } => {
                said(calls.write(file, 0, &bytes.0))
            }
            Operation::Truncate { size, .. } => said(calls.set_size(file, *size)),
            Operation::Read { offset, length, .. } => calls.read(file, *offset, *length),
            _ => Ok(Vec::new()),
        };
        let closed = calls.close(file);
        done.and_then(|answer| closed.map(|()| answer))
    }

    /// A copy that goes on until all is copied or nothing is left of the source.
    fn copy(&mut self, from: (usize, u64), to: (usize, u64), length: usize) -> Answer {
        let (source, target) = (self.at(from.0)?, self.at(to.0)?);
        let mut copied = 0;
        loop {
            let (from, to) = ((source, from.1 + copied as u64), (target, to.1 + copied as u64));
            match self.calls.copy(from, to, length - copied)? {
                0 => return said(Ok(copied)),
                more => copied += more,
            }
        }
    }

    /// File systems differ in what they take for a hole: whether what they say can be is the answer. Data is not
    /// skipped, and what is called a hole holds zeros.
    fn seek(&mut self, file: usize, offset: u64, whence: i32) -> Answer {
        let Status { kind, size, .. } = self.calls.status(file)?;
        if kind != Kind::File {
            return Ok(b"of a directory, where nobody says what it is".to_vec());
        }
        // The kernel asks a FUSE file system where data is without writing what waits in a mapping (docs/semantics.md, S38).
        if self.stored {
            self.run_on_mapping(&Operation::SyncMap)?;
        }
        let found = self.calls.seek(file, offset, whence);
        if offset >= size || matches!(found, Err(errno) if errno != libc::ENXIO) {
            return said(found);
        }
        let Ok(rest) = self.calls.read(file, offset, (size - offset) as usize) else {
            return Ok(b"not readable".to_vec());
        };
        let zeros = |end: u64| rest[..(end - offset) as usize].iter().all(|byte| *byte == 0);
        let right = match found {
            Ok(data) if whence == libc::SEEK_DATA => (offset..size).contains(&data) && zeros(data),
            Ok(hole) => hole == size || rest.get((hole - offset) as usize) == Some(&0),
            Err(_) => whence == libc::SEEK_DATA && zeros(size),
        };
        if right { Ok(b"right".to_vec()) } else { Ok(format!("wrong: {found:?} of {size}").into_bytes()) }
    }

    /// Everything below the root.
    pub(crate) fn tree(&mut self) -> Called<Tree> {
        let (mut tree, mut folders) = (Tree::new(), vec![PathBuf::new()]);
        while let Some(folder) = folders.pop() {
            for (name, kind) in sorted(self.calls.list(&folder))? {
                if name == b"." || name == b".." {
                    continue;
                }
                let path = folder.join(String::from_utf8(name).expect("names are text"));
                let entry = self.entry(&path)?;
                assert_eq!(entry.status.kind, kind, "{}: kind as listed", path.display());
                if kind == Kind::Folder {
                    folders.push(path.clone());
                }
                tree.insert(path, entry);
            }
        }
        Ok(tree)
    }

    fn entry(&mut self, path: &Path) -> Called<Entry> {
        let calls = &mut self.calls;
        let (status, names) = (calls.look(path)?, calls.xattrs(path)?);
        let values = names.into_iter().map(|name| calls.xattr(path, &name).map(|value| (name, value)));
        let xattrs = values.collect::<Called<_>>()?;
        let bytes = match status.kind {
            Kind::Symlink => calls.read_link(path)?,
            Kind::File => {
                let file = calls.open(path, libc::O_RDONLY, 0)?;
                // One more than there should be.
                let read = calls.read(file, 0, status.size as usize + 1);
                calls.close(file).and(read)?
            }
            _ => Vec::new(),
        };
        Ok(Entry { status, xattrs, bytes })
    }
}

/// What is told of a result in words.
fn said<T: std::fmt::Debug>(result: Called<T>) -> Answer {
    result.map(|value| format!("{value:?}").into_bytes())
}

fn sorted<T: Ord>(list: Called<Vec<T>>) -> Called<Vec<T>> {
    list.map(|mut list| {
        list.sort();
        list
    })
}
