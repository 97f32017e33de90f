//! A disk whose power fails: a file system in memory that forgets what was not synced, all of it, or any part.
//!
//! The strictest reading of POSIX: bytes, size and times of a file last from its fsync on, the names in a directory from
//! the fsync of the directory on, and neither brings the other along. File systems of a kernel keep more, in any order: pages
//! of a file without each other, and names without the bytes that they lead to.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use forebay_tests::Seeded;
use forebay_tests::process::apart;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rand::RngExt;

/// Bytes of a file that are copied at once when they change after a sync.
const PAGE: usize = 64 << 10;
/// How long the kernel may keep names and attributes: it alone changes them.
const TTL: Duration = Duration::from_secs(3600);
/// More than any test needs, in blocks of 4 KiB.
const BLOCKS: u64 = 1 << 24;

/// A mounted disk.
pub(crate) struct PowerDisk {
    folder: PathBuf,
    disk: Arc<Mutex<Disk>>,
    session: Option<BackgroundSession>,
    chance: Seeded,
}

impl PowerDisk {
    /// An empty disk, mounted at `folder`.
    pub(crate) fn mount(folder: PathBuf) -> Self {
        let root = Inode::new(true, 0o755);
        let disk = Disk { inodes: HashMap::from([(INodeNo::ROOT.0, root)]), last: INodeNo::ROOT.0 };
        let (disk, chance) = (Arc::new(Mutex::new(disk)), Seeded::new());
        let mut mounted = Self { folder, disk, session: None, chance };
        mounted.start();
        mounted
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }

    /// The power goes and comes back; every second time some of what was not synced is there. Nobody may have a file of it
    /// open.
    pub(crate) fn fail(&mut self) {
        self.stop();
        let written_percent = if self.chance.random_bool(0.5) { 0 } else { self.chance.random_range(1..100) };
        lock(&self.disk).forget(&mut self.chance, written_percent);
        self.start();
    }

    fn start(&mut self) {
        let server =
            Server { disk: self.disk.clone(), listings: Mutex::default(), handles: AtomicU64::default() };
        let session = fuser::spawn_mount(server, &self.folder, &Config::default());
        self.session = Some(session.expect("a file system can be mounted"));
    }

    fn stop(&mut self) {
        if let Some(session) = self.session.take() {
            apart(|| session.umount_and_join()).expect("nobody uses it");
        }
    }
}

impl Drop for PowerDisk {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// All there is, by inode number.
struct Disk {
    inodes: HashMap<u64, Inode>,
    last: u64,
}

struct Inode {
    now: Content,
    /// What is there when the power comes back.
    synced: Content,
    /// How many entries name it now.
    names: u32,
}

#[derive(Clone)]
struct Content {
    mode: u16,
    size: u64,
    modified: SystemTime,
    bytes: Vec<Arc<[u8; PAGE]>>,
    /// `None` of a file.
    entries: Option<BTreeMap<OsString, u64>>,
}

impl Inode {
    fn new(is_directory: bool, mode: u16) -> Self {
        let now = Content {
            mode,
            size: 0,
            modified: SystemTime::now(),
            bytes: Vec::new(),
            entries: is_directory.then(BTreeMap::new),
        };
        Self { synced: now.clone(), now, names: 1 }
    }
}

impl Inode {
    /// What was synced is there again, and whatever else `is_written` says of one piece after another.
    fn lose(&mut self, mut is_written: impl FnMut() -> bool) {
        let Content { size, modified, bytes, entries, .. } = self.now.clone();
        if entries.is_some() {
            if is_written() {
                self.synced.entries = entries;
            }
        } else {
            if is_written() {
                self.synced.set_size(size);
                self.synced.modified = modified;
            }
            let kept = self.synced.size;
            for (synced, now) in self.synced.bytes.iter_mut().zip(bytes) {
                if is_written() {
                    *synced = now;
                }
            }
            // Past the end of the file are zeros.
            self.synced.set_size(kept);
        }
        self.now = self.synced.clone();
    }
}

impl Content {
    fn set_size(&mut self, size: u64) {
        self.size = size;
        self.bytes.resize_with((size as usize).div_ceil(PAGE), || Arc::new([0; PAGE]));
        let used = size as usize % PAGE;
        if used > 0
            && let Some(last) = self.bytes.last_mut()
        {
            Arc::make_mut(last)[used..].fill(0);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let end = offset + data.len() as u64;
        if end > self.size {
            self.set_size(end);
        }
        let (mut at, mut data) = (offset as usize, data);
        while !data.is_empty() {
            let within = at % PAGE;
            let length = data.len().min(PAGE - within);
            Arc::make_mut(&mut self.bytes[at / PAGE])[within..within + length]
                .copy_from_slice(&data[..length]);
            (at, data) = (at + length, &data[length..]);
        }
        self.modified = SystemTime::now();
    }

    fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let end = (offset + length as u64).min(self.size) as usize;
        let mut found = Vec::with_capacity(length);
        let mut at = offset as usize;
        while at < end {
            let within = at % PAGE;
            let length = (end - at).min(PAGE - within);
            found.extend_from_slice(&self.bytes[at / PAGE][within..within + length]);
            at += length;
        }
        found
    }
}

impl Disk {
    /// Goes back to what was synced, and what came to the disk by itself: each page and each size of a file, and the names
    /// of each directory, in so many of 100 cases.
    fn forget(&mut self, chance: &mut Seeded, written_percent: u32) {
        // In an order of their own, so that a seed tells them all.
        let mut numbers: Vec<u64> = self.inodes.keys().copied().collect();
        numbers.sort_unstable();
        let mut is_written = || chance.random_range(0..100) < written_percent;
        for number in numbers {
            self.inodes.entry(number).and_modify(|inode| inode.lose(&mut is_written));
        }
        let mut reached = vec![INodeNo::ROOT.0];
        let mut at = 0;
        while let Some(number) = reached.get(at) {
            reached.extend(self.inodes[number].now.entries.iter().flat_map(BTreeMap::values));
            at += 1;
        }
        self.inodes.retain(|number, _| reached.contains(number));
        self.inodes.values_mut().for_each(|inode| inode.names = 0);
        for number in reached {
            self.inodes.entry(number).and_modify(|inode| inode.names += 1);
        }
    }

    fn inode(&mut self, number: INodeNo) -> Result<&mut Inode, Errno> {
        self.inodes.get_mut(&number.0).ok_or(Errno::ENOENT)
    }

    fn entries(&mut self, number: INodeNo) -> Result<&mut BTreeMap<OsString, u64>, Errno> {
        self.inode(number)?.now.entries.as_mut().ok_or(Errno::ENOTDIR)
    }

    fn find(&mut self, parent: INodeNo, name: &OsStr) -> Result<INodeNo, Errno> {
        self.entries(parent)?.get(name).copied().map(INodeNo).ok_or(Errno::ENOENT)
    }

    fn make(
        &mut self,
        parent: INodeNo,
        name: &OsStr,
        is_directory: bool,
        mode: u32,
    ) -> Result<FileAttr, Errno> {
        let number = self.last + 1;
        let entries = self.entries(parent)?;
        if entries.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        entries.insert(name.to_owned(), number);
        self.last = number;
        self.inodes.insert(number, Inode::new(is_directory, (mode & 0o7777) as u16));
        self.attributes(INodeNo(number))
    }

    fn attributes(&mut self, ino: INodeNo) -> Result<FileAttr, Errno> {
        let Inode { now: Content { mode, size, modified, entries, .. }, names, .. } = self.inode(ino)?;
        let (kind, nlink) = match entries {
            Some(_) => (FileType::Directory, 2),
            None => (FileType::RegularFile, *names),
        };
        let (perm, size, time, blocks) = (*mode, *size, *modified, size.div_ceil(512));
        Ok(FileAttr {
            ino,
            size,
            blocks,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn link(&mut self, ino: INodeNo, parent: INodeNo, name: &OsStr) -> Result<(), Errno> {
        let entries = self.entries(parent)?;
        if entries.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        entries.insert(name.to_owned(), ino.0);
        self.inode(ino)?.names += 1;
        Ok(())
    }

    fn remove(&mut self, parent: INodeNo, name: &OsStr) -> Result<(), Errno> {
        let number = self.find(parent, name)?;
        let inode = self.inode(number)?;
        if inode.now.entries.as_ref().is_some_and(|entries| !entries.is_empty()) {
            return Err(Errno::ENOTEMPTY);
        }
        inode.names -= 1;
        self.entries(parent)?.remove(name);
        Ok(())
    }

    fn rename(
        &mut self,
        (parent, name): (INodeNo, &OsStr),
        (to_parent, to): (INodeNo, &OsStr),
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        let number = self.find(parent, name)?;
        match self.find(to_parent, to) {
            Ok(_) if flags.contains(RenameFlags::RENAME_NOREPLACE) => return Err(Errno::EEXIST),
            _ if flags.contains(RenameFlags::RENAME_EXCHANGE) => return Err(Errno::EINVAL),
            Ok(_) => self.remove(to_parent, to)?,
            Err(_) => {}
        }
        self.entries(parent)?.remove(name);
        self.entries(to_parent)?.insert(to.to_owned(), number.0);
        Ok(())
    }

    fn sync(&mut self, ino: INodeNo) -> Result<(), Errno> {
        let inode = self.inode(ino)?;
        inode.synced = inode.now.clone();
        Ok(())
    }
}

/// An entry of a directory.
type Listed = (INodeNo, FileType, OsString);

/// The kernel's side.
struct Server {
    disk: Arc<Mutex<Disk>>,
    /// Directories as they were when they were opened.
    listings: Mutex<HashMap<u64, Vec<Listed>>>,
    handles: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panicked")
}

impl Server {
    fn disk(&self) -> MutexGuard<'_, Disk> {
        lock(&self.disk)
    }
}

fn entry(reply: ReplyEntry, found: Result<FileAttr, Errno>) {
    match found {
        Ok(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
        Err(error) => reply.error(error),
    }
}

fn empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut disk = self.disk();
        let found = disk.find(parent, name).and_then(|ino| disk.attributes(ino));
        entry(reply, found);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.disk().attributes(ino) {
            Ok(attributes) => reply.attr(&Duration::ZERO, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut disk = self.disk();
        if let Ok(inode) = disk.inode(ino) {
            if let Some(mode) = mode {
                inode.now.mode = (mode & 0o7777) as u16;
            }
            if let Some(size) = size {
                inode.now.set_size(size);
                inode.now.modified = SystemTime::now();
            }
            match modified {
                Some(TimeOrNow::SpecificTime(time)) => inode.now.modified = time,
                Some(TimeOrNow::Now) => inode.now.modified = SystemTime::now(),
                None => {}
            }
        }
        match disk.attributes(ino) {
            Ok(attributes) => reply.attr(&Duration::ZERO, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let made = self.disk().make(parent, name, true, mode);
        entry(reply, made);
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        match self.disk().make(parent, name, false, mode) {
            Ok(made) => reply.created(&TTL, &made, Generation(0), FileHandle(0), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.disk().remove(parent, name);
        empty(reply, done);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.disk().remove(parent, name);
        empty(reply, done);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        to_parent: INodeNo,
        to: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let done = self.disk().rename((parent, name), (to_parent, to), flags);
        empty(reply, done);
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut disk = self.disk();
        let linked = disk.link(ino, parent, name);
        entry(reply, linked.and_then(|()| disk.attributes(ino)));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.disk().inode(ino) {
            Ok(inode) => reply.data(&inode.now.read(offset, size as usize)),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.disk().inode(ino) {
            Ok(inode) => {
                inode.now.write(offset, data);
                reply.written(data.len() as u32);
            }
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let done = self.disk().sync(ino);
        empty(reply, done);
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let mut disk = self.disk();
        let names = match disk.entries(ino) {
            Ok(entries) => entries.clone(),
            Err(error) => return reply.error(error),
        };
        let listed = names.into_iter().map(|(name, number)| {
            let is_directory = disk.inodes[&number].now.entries.is_some();
            let kind = if is_directory { FileType::Directory } else { FileType::RegularFile };
            (INodeNo(number), kind, name)
        });
        let handle = self.handles.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.listings).insert(handle, listed.collect());
        reply.opened(FileHandle(handle), FopenFlags::empty());
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listings = lock(&self.listings);
        let names = listings.get(&handle.0).map_or(&[][..], Vec::as_slice);
        for (at, (ino, kind, name)) in names.iter().enumerate().skip(offset as usize) {
            if reply.add(*ino, at as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        lock(&self.listings).remove(&handle.0);
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let done = self.disk().sync(ino);
        empty(reply, done);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCKS, 4096, 255, 4096);
    }
}
