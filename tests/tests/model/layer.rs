//! The file-system layer without a kernel: what the kernel's own part of each call does, and the requests that it sends.
//!
//! Paths are walked, symlinks followed and descriptors kept here, as the kernel does; every question of what a file
//! system holds is a request, with what fuser would hand over. Requests come from root, who passes every check.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{Attributes, FileKind, InodeId, Timestamp};
use forebay_fuse::fs::{Caller, Change, FileSystem, OpenFlags, Policy, TimeChange, XattrReply};
use forebay_fuse::{Errno, FsResult, Handle};
use forebay_io::clock::Clock;
use forebay_volume::{Volume, VolumeSettings, connect};
use tokio::runtime::Runtime;

use super::calls::{Called, Calls, Kind, Seen, Status};
use super::operation::Time;

/// Root, with the usual umask.
const CALLER: Caller = Caller { uid: 0, gid: 0, umask: 0o022 };
/// Whose descriptors all are.
const OWNER: u64 = 1;
/// Symlinks that the kernel follows in one walk.
const MOST_LINKS: usize = 40;
/// Largest READ and WRITE.
const REQUEST_BYTES: usize = 1 << 20;
/// Entries that one READDIR takes: few, so that listings go on from where they were.
const TAKEN: usize = 3;

/// A file system of its own over a volume of a folder.
pub(crate) struct Layer {
    runtime: Runtime,
    source: String,
    fs: Arc<FileSystem>,
    volume: Arc<Volume>,
    open: HashMap<usize, Descriptor>,
    opened: usize,
    /// What the last call was told of and the kernel would forget soon.
    references: Vec<InodeId>,
}

#[derive(Debug, Clone, Copy)]
struct Descriptor {
    ino: InodeId,
    handle: Handle,
    folder: bool,
    flags: i32,
}

impl Descriptor {
    fn reads(self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_WRONLY
    }

    fn writes(self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }
}

/// Where a walk ended: a name in a directory, and what it names.
struct Place {
    parent: InodeId,
    name: Vec<u8>,
    found: Option<Attributes>,
}

/// Listings expire at once and are not waited for, so that they come between and beside all steps.
async fn assemble(source: &str, home: &Path) -> (Arc<FileSystem>, Arc<Volume>) {
    let mut settings = VolumeSettings { state_directory: home.to_owned(), ..VolumeSettings::default() };
    (settings.import.ttl_ms, settings.import.relist_wait_ms) = (0, 0);
    let volume = connect(source, settings).await.expect("a volume");
    let policy = Policy { dataset: false, ttl: Policy::LIVE_TTL, relatime: false };
    (Arc::new(FileSystem::new(volume.clone(), policy, Clock::system())), volume)
}

impl Layer {
    /// Over the volume that `source` names, with its state below `home`.
    pub(crate) fn new(source: &str, home: &Path) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let (fs, volume) = runtime.block_on(assemble(source, home));
        let (open, references) = (HashMap::new(), Vec::new());
        Self { runtime, source: source.to_owned(), fs, volume, open, opened: 0, references }
    }

    /// Ends as a mount does, with nothing open, and begins anew.
    pub(crate) fn reopen(&mut self, home: &Path) {
        self.end();
        (self.fs, self.volume) = self.runtime.block_on(assemble(&self.source, home));
    }

    /// Ends as a mount does, with nothing open.
    pub(crate) fn end(&mut self) {
        let seen = self.references.clone();
        self.forget();
        assert_eq!(self.fs.open_handles(), 0, "everything was released");
        assert!(seen.iter().all(|ino| self.fs.lookups(*ino) == 0), "everything was forgotten");
        self.runtime.block_on(async {
            self.fs.release_all().await;
            self.volume.close().await.expect("the volume closes");
        });
    }

    /// Answers a request.
    fn ask<T>(&self, request: impl Future<Output = FsResult<T>>) -> Called<T> {
        self.runtime.block_on(request).map_err(|errno| errno.0)
    }

    fn forget(&mut self) {
        for ino in std::mem::take(&mut self.references) {
            if let Some(rest) = self.fs.forget(ino, 1) {
                self.runtime.block_on(rest);
            }
        }
    }

    fn noted(&mut self, attributes: Attributes) -> Attributes {
        self.references.push(attributes.ino);
        attributes
    }

    fn lookup(&mut self, parent: InodeId, name: &[u8]) -> Called<Option<Attributes>> {
        let found = self.ask(self.fs.lookup(parent, name))?;
        Ok(found.map(|found| self.noted(found)))
    }

    /// Walks to `path`; `follow` a symlink at its end, too.
    fn walk(&mut self, path: &Path, follow: bool) -> Called<Place> {
        self.forget();
        let mut rest: VecDeque<OsString> = path.iter().map(OsString::from).collect();
        let (mut parent, mut links) = (InodeId::ROOT, 0);
        while let Some(name) = rest.pop_front() {
            let name = name.into_vec();
            let found = self.lookup(parent, &name)?;
            let last = rest.is_empty();
            match found {
                Some(link) if link.kind == FileKind::Symlink && (follow || !last) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(libc::ELOOP);
                    }
                    let target = self.ask(self.fs.read_link(link.ino))?;
                    let target = PathBuf::from(OsString::from_vec(target.to_vec()));
                    for part in target.iter().rev() {
                        rest.push_front(part.to_owned());
                    }
                }
                found if last => return Ok(Place { parent, name, found }),
                None => return Err(libc::ENOENT),
                Some(folder) if folder.kind == FileKind::Directory => parent = folder.ino,
                Some(_) => return Err(libc::ENOTDIR),
            }
        }
        let found = Some(self.ask(self.fs.attributes(InodeId::ROOT))?);
        Ok(Place { parent, name: Vec::new(), found })
    }

    /// What is at `path`.
    fn find(&mut self, path: &Path, follow: bool) -> Called<Attributes> {
        self.walk(path, follow)?.found.ok_or(libc::ENOENT)
    }

    fn at(&self, file: usize) -> Descriptor {
        self.open[&file]
    }

    /// Whether `folder` is `top` or lies below it.
    fn is_below(&self, mut folder: InodeId, top: InodeId) -> Called<bool> {
        while folder != top && folder != InodeId::ROOT {
            let parent = self.runtime.block_on(self.volume.tree().parent(folder));
            folder = parent.map_err(|failure| Errno::from(failure).0)?;
        }
        Ok(folder == top)
    }

    fn change(&self, ino: InodeId, change: Change) -> Called<()> {
        self.ask(self.fs.set_attributes(ino, change, true)).map(drop)
    }

    /// A descriptor, which holds the reference to its inode that the call took.
    fn keep(&mut self, descriptor: Descriptor) -> usize {
        let at = self.references.iter().rposition(|ino| *ino == descriptor.ino);
        self.references.remove(at.expect("what is opened was looked up"));
        self.opened += 1;
        self.open.insert(self.opened, descriptor);
        self.opened
    }

    fn open_found(&mut self, found: &Attributes, flags: i32) -> Called<Descriptor> {
        let descriptor = Descriptor { ino: found.ino, handle: Handle::NONE, folder: false, flags };
        let has = |flag: i32| flags & flag != 0;
        match found.kind {
            _ if has(libc::O_CREAT) && has(libc::O_EXCL) => Err(libc::EEXIST),
            FileKind::Symlink if has(libc::O_DIRECTORY) => Err(libc::ENOTDIR),
            FileKind::Symlink => Err(libc::ELOOP),
            FileKind::Directory if has(libc::O_CREAT | libc::O_TRUNC) || descriptor.writes() => {
                Err(libc::EISDIR)
            }
            FileKind::Directory => {
                let handle = self.fs.open_directory().map_err(|errno| errno.0)?;
                Ok(Descriptor { handle, folder: true, ..descriptor })
            }
            _ if has(libc::O_DIRECTORY) => Err(libc::ENOTDIR),
            FileKind::File => {
                let sent = OpenFlags(flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC));
                let handle = self.ask(self.fs.open(found.ino, sent))?.handle;
                if has(libc::O_TRUNC) {
                    self.change(found.ino, Change { size: Some(0), ..Change::default() })?;
                }
                Ok(Descriptor { handle, ..descriptor })
            }
            _ if flags & libc::O_ACCMODE == libc::O_WRONLY => Err(libc::ENXIO),
            _ => Err(libc::ESPIPE),
        }
    }

    /// user.* is for files and directories: what the kernel says of others.
    fn check_name(found: &Attributes, name: &str, refused: i32) -> Called<()> {
        let fits = matches!(found.kind, FileKind::File | FileKind::Directory);
        if name.starts_with("user.") && !fits { Err(refused) } else { Ok(()) }
    }
}

fn kind(kind: FileKind) -> Kind {
    match kind {
        FileKind::File => Kind::File,
        FileKind::Directory => Kind::Folder,
        FileKind::Symlink => Kind::Symlink,
        FileKind::Fifo => Kind::Pipe,
        _ => Kind::Other,
    }
}

fn seen(time: Timestamp) -> Seen {
    Seen::new(time.seconds, time.nanos)
}

fn status(attributes: &Attributes) -> Status {
    let status = Status {
        kind: kind(attributes.kind),
        mode: u32::from(attributes.mode),
        links: u64::from(attributes.nlink),
        user: attributes.uid,
        group: attributes.gid,
        size: attributes.size,
        accessed: seen(attributes.atime),
        modified: seen(attributes.mtime),
    };
    status.promised()
}

fn time_change(time: Time) -> Option<TimeChange> {
    match time {
        Time::Keep => None,
        Time::Now => Some(TimeChange::Now),
        Time::At(seconds, nanos) => Some(TimeChange::At(Timestamp { seconds, nanos })),
    }
}

fn bytes(reply: XattrReply) -> Bytes {
    match reply {
        XattrReply::Value(value) => value,
        XattrReply::Size(size) => panic!("{size} bytes where a value was asked for"),
    }
}

impl Calls for Layer {
    fn open(&mut self, path: &Path, flags: i32, mode: u32) -> Called<usize> {
        let (create, alone) = (flags & libc::O_CREAT != 0, flags & libc::O_EXCL != 0);
        let follow = flags & libc::O_NOFOLLOW == 0 && !(create && alone);
        let place = self.walk(path, follow)?;
        let descriptor = match place.found {
            Some(found) => self.open_found(&found, flags)?,
            None if create => {
                let Place { parent, name, .. } = place;
                let made = self.fs.create(CALLER, parent, &name, mode as u16, OpenFlags(flags));
                let (made, opened) = self.ask(made)?;
                let ino = self.noted(made).ino;
                Descriptor { ino, handle: opened.handle, folder: false, flags }
            }
            None => return Err(libc::ENOENT),
        };
        Ok(self.keep(descriptor))
    }

    fn close(&mut self, file: usize) -> Called<()> {
        let Descriptor { ino, handle, folder, .. } = self.open.remove(&file).ok_or(libc::EBADF)?;
        self.references.push(ino);
        if folder {
            return self.fs.release_directory(handle).map_err(|errno| errno.0);
        }
        let closed = self.ask(self.fs.close(handle, OWNER));
        closed.and(self.ask(self.fs.release(handle)))
    }

    fn read(&mut self, file: usize, offset: u64, length: usize) -> Called<Vec<u8>> {
        let at = self.at(file);
        match at {
            _ if !at.reads() => return Err(libc::EBADF),
            _ if at.folder => return Err(libc::EISDIR),
            _ => {}
        }
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let wanted = (length - bytes.len()).min(REQUEST_BYTES);
            let read = self.fs.read(at.ino, at.handle, offset + bytes.len() as u64, wanted as u32);
            let read = self.ask(read)?;
            bytes.extend_from_slice(&read);
            if read.len() < wanted {
                break;
            }
        }
        Ok(bytes)
    }

    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Called<()> {
        let at = self.at(file);
        if !at.writes() {
            return Err(libc::EBADF);
        }
        let mut offset = match at.flags & libc::O_APPEND {
            0 => offset,
            _ => self.ask(self.fs.attributes(at.ino))?.size,
        };
        for part in bytes.chunks(REQUEST_BYTES) {
            self.fs.note_writer(at.handle, Some(OWNER));
            let data = Bytes::copy_from_slice(part);
            let written = self.ask(self.fs.write(at.ino, at.handle, offset, data, false))?;
            assert_eq!(written as usize, part.len(), "a request is written whole");
            offset += u64::from(written);
        }
        Ok(())
    }

    fn set_size(&mut self, file: usize, size: u64) -> Called<()> {
        let at = self.at(file);
        if at.folder || !at.writes() {
            return Err(libc::EINVAL);
        }
        self.change(at.ino, Change { size: Some(size), ..Change::default() })
    }

    fn sync(&mut self, file: usize) -> Called<()> {
        let at = self.at(file);
        match at.folder {
            true => self.ask(self.fs.sync_directory()),
            false => self.ask(self.fs.sync_file(at.handle)),
        }
    }

    fn allocate(&mut self, file: usize, mode: i32, offset: u64, length: u64) -> Called<()> {
        let at = self.at(file);
        let known = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        let (punch, collapse) = (libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_COLLAPSE_RANGE);
        match mode {
            _ if length == 0 => Err(libc::EINVAL),
            mode if mode & punch != 0 && mode & libc::FALLOC_FL_KEEP_SIZE == 0 => Err(libc::EOPNOTSUPP),
            mode if mode & !(known | collapse) != 0 => Err(libc::EOPNOTSUPP),
            _ if !at.writes() => Err(libc::EBADF),
            mode if mode & !known != 0 => Err(libc::EOPNOTSUPP),
            _ => self.ask(self.fs.allocate(at.ino, at.handle, mode, offset, length)),
        }
    }

    fn seek(&mut self, file: usize, offset: u64, whence: i32) -> Called<u64> {
        let at = self.at(file);
        self.ask(self.fs.seek(at.ino, at.handle, offset.cast_signed(), whence))
    }

    fn copy(&mut self, from: (usize, u64), to: (usize, u64), length: usize) -> Called<usize> {
        let (source, target) = (self.at(from.0), self.at(to.0));
        match () {
            () if source.folder || target.folder => return Err(libc::EISDIR),
            () if !source.reads() || !target.writes() || target.flags & libc::O_APPEND != 0 => {
                return Err(libc::EBADF);
            }
            () => {}
        }
        let left = self.ask(self.fs.attributes(source.ino))?.size.saturating_sub(from.1);
        let length = left.min(length as u64);
        if source.ino == target.ino && to.1 + length > from.1 && to.1 < from.1 + length {
            return Err(libc::EINVAL);
        }
        if length == 0 {
            return Ok(0);
        }
        let (inside, into) = ((source.ino, source.handle, from.1), (target.ino, target.handle, to.1));
        match self.ask(self.fs.copy_range(inside, into, length, false)) {
            Err(libc::EOPNOTSUPP) => {
                let bytes = self.read(from.0, from.1, length as usize)?;
                self.write(to.0, to.1, &bytes).map(|()| bytes.len())
            }
            copied => copied.map(|copied| copied as usize),
        }
    }

    fn status(&mut self, file: usize) -> Called<Status> {
        self.ask(self.fs.attributes(self.at(file).ino)).map(|found| status(&found))
    }

    fn make_folder(&mut self, path: &Path, mode: u32) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        // Set-id bits are not mkdir's to give.
        let made = self.ask(self.fs.make_directory(CALLER, parent, &name, mode as u16 & 0o1777))?;
        self.noted(made);
        Ok(())
    }

    fn make_pipe(&mut self, path: &Path, mode: u32) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        let made = self.fs.make_node(CALLER, parent, &name, FileKind::Fifo, mode as u16, 0);
        let made = self.ask(made)?;
        self.noted(made);
        Ok(())
    }

    fn symlink(&mut self, target: &Path, path: &Path) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        let target = Bytes::copy_from_slice(target.as_os_str().as_bytes());
        let made = self.ask(self.fs.make_symlink(CALLER, parent, &name, target))?;
        self.noted(made);
        Ok(())
    }

    fn read_link(&mut self, path: &Path) -> Called<Vec<u8>> {
        let found = self.find(path, false)?;
        if found.kind != FileKind::Symlink {
            return Err(libc::EINVAL);
        }
        self.ask(self.fs.read_link(found.ino)).map(|target| target.to_vec())
    }

    fn link(&mut self, from: &Path, to: &Path) -> Called<()> {
        let source = self.find(from, false)?;
        let Place { parent, name, found } = self.walk(to, false)?;
        match found {
            Some(_) => return Err(libc::EEXIST),
            None if source.kind == FileKind::Directory => return Err(libc::EPERM),
            None => {}
        }
        let made = self.ask(self.fs.link(source.ino, parent, &name))?;
        self.noted(made);
        Ok(())
    }

    fn remove(&mut self, path: &Path) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        self.ask(self.fs.unlink(parent, &name))
    }

    fn remove_folder(&mut self, path: &Path) -> Called<()> {
        let Place { parent, name, .. } = self.walk(path, false)?;
        self.ask(self.fs.remove_directory(parent, &name))
    }

    fn rename(&mut self, from: &Path, to: &Path, flags: u32) -> Called<()> {
        if flags == libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE {
            return Err(libc::EINVAL);
        }
        // Both directories are looked for before both names.
        let (from, to) = match (self.walk(from, false), self.walk(to, false)) {
            (Err(libc::ENAMETOOLONG), Err(errno)) | (Err(errno), _) => return Err(errno),
            (Ok(Place { found: None, .. }), Err(libc::ENAMETOOLONG)) => return Err(libc::ENOENT),
            (from, to) => (from?, to?),
        };
        let source = from.found.as_ref().ok_or(libc::ENOENT)?.ino;
        let exchange = flags == libc::RENAME_EXCHANGE;
        match to.found.as_ref().map(|found| found.ino) {
            Some(_) if flags == libc::RENAME_NOREPLACE => return Err(libc::EEXIST),
            None if exchange => return Err(libc::ENOENT),
            _ if self.is_below(to.parent, source)? => return Err(libc::EINVAL),
            Some(target) if self.is_below(from.parent, target)? => {
                return Err(if exchange { libc::EINVAL } else { libc::ENOTEMPTY });
            }
            Some(target) if target == source => return Ok(()),
            _ => {}
        }
        self.ask(self.fs.rename((from.parent, &from.name), (to.parent, &to.name), flags))
    }

    fn list(&mut self, path: &Path) -> Called<Vec<(Vec<u8>, Kind)>> {
        let found = self.find(path, true)?;
        if found.kind != FileKind::Directory {
            return Err(libc::ENOTDIR);
        }
        let handle = self.fs.open_directory().map_err(|errno| errno.0)?;
        let (mut all, mut offset, mut referenced) = (Vec::new(), 0, Vec::new());
        loop {
            let (before, from) = (all.len(), offset);
            let take = |number, entry: &forebay_fuse::fs::Listed| {
                let takes = all.len() < before + TAKEN;
                if takes {
                    all.push((entry.name().to_vec(), kind(entry.kind())));
                    offset = number;
                    if let forebay_fuse::fs::Listed::Name(_, attributes) = entry {
                        referenced.push(attributes.ino);
                    }
                }
                takes
            };
            self.ask(self.fs.read_directory(found.ino, handle, from, true, take))?;
            if all.len() == before {
                break;
            }
        }
        self.references.append(&mut referenced);
        self.fs.release_directory(handle).map_err(|errno| errno.0)?;
        Ok(all)
    }

    fn look(&mut self, path: &Path) -> Called<Status> {
        self.find(path, false).map(|found| status(&found))
    }

    fn set_mode(&mut self, path: &Path, mode: u32) -> Called<()> {
        let found = self.find(path, true)?;
        self.change(found.ino, Change { mode: Some(mode as u16), ..Change::default() })
    }

    fn set_owner(&mut self, path: &Path, uid: Option<u32>, gid: Option<u32>) -> Called<()> {
        let found = self.find(path, false)?;
        self.change(found.ino, Change { uid, gid, ..Change::default() })
    }

    fn set_times(&mut self, path: &Path, accessed: Time, modified: Time) -> Called<()> {
        if accessed == Time::Keep && modified == Time::Keep {
            return Ok(());
        }
        let found = self.find(path, false)?;
        let (atime, mtime) = (time_change(accessed), time_change(modified));
        self.change(found.ino, Change { atime, mtime, ..Change::default() })
    }

    fn set_xattr(&mut self, path: &Path, name: &str, value: &[u8], flags: i32) -> Called<()> {
        let found = self.find(path, false)?;
        Self::check_name(&found, name, libc::EPERM)?;
        let value = Bytes::copy_from_slice(value);
        self.ask(self.fs.set_xattr(found.ino, name.as_bytes(), value, flags, None))
    }

    fn xattr(&mut self, path: &Path, name: &str) -> Called<Vec<u8>> {
        let found = self.find(path, false)?;
        Self::check_name(&found, name, libc::ENODATA)?;
        let value = self.ask(self.fs.xattr(found.ino, name.as_bytes(), 64 << 10))?;
        Ok(bytes(value).to_vec())
    }

    fn xattrs(&mut self, path: &Path) -> Called<Vec<String>> {
        let found = self.find(path, false)?;
        let list = bytes(self.ask(self.fs.xattrs(found.ino, 64 << 10))?);
        let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    fn remove_xattr(&mut self, path: &Path, name: &str) -> Called<()> {
        let found = self.find(path, false)?;
        Self::check_name(&found, name, libc::EPERM)?;
        self.ask(self.fs.remove_xattr(found.ino, name.as_bytes()))
    }

    /// The reply to STATFS adds these to what the layer counts (`dispatch/reply.rs`).
    fn space(&mut self, path: &Path) -> Called<(u64, u64)> {
        self.find(path, true)?;
        self.ask(self.fs.space()).map(|_| (4096, 255))
    }
}
