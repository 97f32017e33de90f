//! The callbacks: each takes its arguments out of the library's types and names the operation and the reply.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use forebay_io::mem::Pool;
use fuser::{
    BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo, InitFlags, KernelConfig, LockOwner,
    Notifier, OpenFlags as Flags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use tokio::sync::watch;

use super::{Answerer, convert, reply as replies};
use crate::fs::{Caller, Change, FileSystem, Locker, OpenFlags, Opened, Write};
use crate::notify::tell_of_size;

/// Largest READ and WRITE in bytes: what 256 pages, the kernel's default limit, hold.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Readahead and asynchronous requests that the kernel has in flight at a time. 128 of 1 MiB fill any link; the
/// kernel's own default of 12 does not fill a store with 30 ms latency.
const BACKGROUND_MAX: u16 = 128;

/// The callbacks of one mount.
#[derive(Debug)]
pub(crate) struct Dispatch {
    pub(super) fs: Arc<FileSystem>,
    pub(super) answers: Answerer,
    /// For the data of large WRITEs.
    buffers: Pool,
    end: watch::Sender<bool>,
    /// By which the kernel is told of something, once the mount is there.
    pub(super) kernel: Arc<OnceLock<Notifier>>,
}

/// Buffers of large WRITEs that stay unused: those of the 8 parts that an upload has in flight and of the one that
/// forms. What is kept was charged to the memory budget a moment ago, so that its ceiling bounds this too.
const UNUSED_BUFFERS: usize = 72;

impl Dispatch {
    /// `end` becomes true when the session has ended.
    pub(crate) fn new(
        fs: Arc<FileSystem>,
        answers: Answerer,
        end: watch::Sender<bool>,
        kernel: Arc<OnceLock<Notifier>>,
    ) -> Self {
        Self { fs, answers, buffers: Pool::new(REQUEST_BYTES_MAX as usize, UNUSED_BUFFERS), end, kernel }
    }

    fn ttl(&self) -> Duration {
        self.fs.policy().ttl
    }

    /// Works on a request with the file system at hand.
    fn run<F, W>(&self, operation: &'static str, ino: INodeNo, work: F)
    where
        F: FnOnce(Arc<FileSystem>) -> W,
        W: Future<Output = ()> + Send + 'static,
    {
        self.answers.run(operation, convert::inode(ino), work(self.fs.clone()));
    }

    fn drop_references(&self, ino: INodeNo, count: u64) {
        if let Some(rest) = self.fs.forget(convert::inode(ino), count) {
            self.answers.run("forget", convert::inode(ino), rest);
        }
    }
}

/// The owner of what a request makes, with the umask that the kernel leaves to us.
fn caller(request: &Request, umask: u32) -> Caller {
    Caller { uid: request.uid(), gid: request.gid(), umask: (umask & 0o777) as u16 }
}

/// Whether the caller keeps set-id bits when it changes content. The library hides the kernel's own answer
/// (FATTR_KILL_SUIDGID); root without CAP_FSETID is the only caller told apart wrongly, to its favour.
fn privileged(request: &Request) -> bool {
    request.uid() == 0
}

fn bytes(name: &OsStr) -> Vec<u8> {
    name.as_bytes().to_vec()
}

/// What is asked of the kernel, where it has it.
fn capabilities(dataset: bool, keeps_locks: bool) -> InitFlags {
    let common = InitFlags::FUSE_ASYNC_DIO
        | InitFlags::FUSE_PARALLEL_DIROPS
        | InitFlags::FUSE_DO_READDIRPLUS
        | InitFlags::FUSE_CACHE_SYMLINKS
        | InitFlags::FUSE_AUTO_INVAL_DATA;
    let locks = InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS;
    let common = if keeps_locks { common | locks } else { common };
    match dataset {
        true => common | InitFlags::FUSE_NO_OPEN_SUPPORT | InitFlags::FUSE_NO_OPENDIR_SUPPORT,
        // KILLPRIV_V2: without it every write is preceded by a question for `security.capability`. ATOMIC_O_TRUNC is
        // left out: with it a program that runs is emptied before the kernel refuses the open with ETXTBSY.
        // DIRECT_IO_ALLOW_MMAP: what a mapping has changed is written back before a direct write beside it.
        false => {
            common
                | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP
                | InitFlags::FUSE_READDIRPLUS_AUTO
                | InitFlags::FUSE_HANDLE_KILLPRIV_V2
                | InitFlags::FUSE_POSIX_ACL
                | InitFlags::FUSE_DONT_MASK
        }
    }
}

impl Filesystem for Dispatch {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = capabilities(self.fs.policy().dataset, self.fs.keeps_locks()) & config.capabilities();
        let accepted = config.add_capabilities(wanted).is_ok()
            && config.set_max_write(REQUEST_BYTES_MAX).is_ok()
            && config.set_max_background(BACKGROUND_MAX).is_ok();
        if accepted { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPROTO)) }
    }

    fn destroy(&mut self) {
        self.end.send_replace(true);
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (ttl, name) = (self.ttl(), bytes(name));
        self.run("lookup", parent, |fs| async move {
            let found = fs.lookup(convert::inode(parent), &name).await;
            let ttl = if matches!(found, Ok(None)) { fs.miss_ttl() } else { ttl };
            replies::found(reply, ttl, found);
        });
    }

    fn forget(&self, _: &Request, ino: INodeNo, count: u64) {
        self.drop_references(ino, count);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let ttl = self.ttl();
        self.run("getattr", ino, |fs| async move {
            replies::attributes(reply, ttl, fs.attributes(convert::inode(ino)).await);
        });
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mode = mode.map(|mode| (mode & 0o7777) as u16);
        let (atime, mtime) = (atime.map(convert::time_change), mtime.map(convert::time_change));
        let change = Change { mode, uid, gid, size, atime, mtime };
        let (ttl, privileged) = (self.ttl(), privileged(request));
        let truncated = handle.filter(|_| size.is_some()).map(convert::handle);
        self.run("setattr", ino, |fs| async move {
            let result = fs.set_attributes(convert::inode(ino), change, privileged).await;
            if let (Ok(_), Some(handle)) = (&result, truncated) {
                fs.note_truncated(handle);
            }
            replies::attributes(reply, ttl, result);
        });
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        self.run("readlink", ino, |fs| async move {
            replies::data(reply, fs.read_link(convert::inode(ino)).await);
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let Some(kind) = convert::kind_of_mode(mode) else { return reply.error(Errno::EINVAL) };
        let (ttl, name, caller, mode) = (self.ttl(), bytes(name), caller(request, umask), mode as u16);
        self.run("mknod", parent, |fs| async move {
            let made = fs.make_node(caller, convert::inode(parent), &name, kind, mode, rdev).await;
            replies::entry(reply, ttl, made);
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let (ttl, name, caller, mode) = (self.ttl(), bytes(name), caller(request, umask), mode as u16);
        self.run("mkdir", parent, |fs| async move {
            replies::entry(reply, ttl, fs.make_directory(caller, convert::inode(parent), &name, mode).await);
        });
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (ttl, name, caller) = (self.ttl(), bytes(name), caller(request, 0));
        let target = Bytes::copy_from_slice(target.as_os_str().as_bytes());
        self.run("symlink", parent, |fs| async move {
            replies::entry(reply, ttl, fs.make_symlink(caller, convert::inode(parent), &name, target).await);
        });
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (ttl, name) = (self.ttl(), bytes(name));
        self.run("link", ino, |fs| async move {
            replies::entry(reply, ttl, fs.link(convert::inode(ino), convert::inode(parent), &name).await);
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = bytes(name);
        self.run("unlink", parent, |fs| async move {
            replies::renamed(reply, fs.unlink(convert::inode(parent), &name).await);
        });
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = bytes(name);
        self.run("rmdir", parent, |fs| async move {
            replies::renamed(reply, fs.remove_directory(convert::inode(parent), &name).await);
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (caller, from, to) = (caller(request, 0), bytes(name), bytes(new_name));
        self.run("rename", parent, |fs| async move {
            let (from, to) =
                ((convert::inode(parent), from.as_slice()), (convert::inode(new_parent), to.as_slice()));
            replies::renamed(reply, fs.rename(caller, from, to, flags.bits()).await);
        });
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: Flags, reply: ReplyOpen) {
        let kernel = self.kernel.clone();
        self.run("open", ino, |fs| async move {
            let opened = fs.open(convert::inode(ino), OpenFlags(flags.0)).await;
            if let (Ok(Opened { is_as_long: false, .. }), Some(kernel)) = (&opened, kernel.get()) {
                tell_of_size(kernel, convert::inode(ino));
            }
            replies::opened(reply, opened);
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (ttl, name, caller, mode) = (self.ttl(), bytes(name), caller(request, umask), mode as u16);
        self.run("create", parent, |fs| async move {
            let made = fs.create(caller, convert::inode(parent), &name, mode, OpenFlags(flags)).await;
            replies::created(reply, ttl, made);
        });
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: Flags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.run("read", ino, |fs| async move {
            replies::data(reply, fs.read(convert::inode(ino), convert::handle(handle), offset, size).await);
        });
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: Flags,
        lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let body = self.answers.body(data.len());
        let data = self.buffers.copy(data);
        let clears_setid = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let (file, handle) = (convert::inode(ino), convert::handle(handle));
        // Pages that are written back belong where they are, through whichever handle they come.
        let is_page = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let flags = OpenFlags(flags.0);
        let position = if is_page { offset.into() } else { flags.position(offset) };
        let write = Write { position, offset, clears_setid, syncs: !is_page && flags.syncs(), is_page };
        let writer = lock_owner.map(|owner| owner.0);
        self.run("write", ino, |fs| async move {
            if !is_page {
                fs.note_writer(handle, writer);
            }
            replies::written(reply, fs.write(file, handle, write, data).await);
            drop(body);
        });
    }

    fn flush(&self, _: &Request, ino: INodeNo, handle: FileHandle, owner: LockOwner, reply: ReplyEmpty) {
        self.run("flush", ino, |fs| async move {
            replies::empty(reply, fs.close(convert::handle(handle), owner.0).await);
        });
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _flags: Flags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.run("release", ino, |fs| async move {
            replies::empty(reply, fs.release(convert::handle(handle)).await);
        });
    }

    fn fsync(&self, _: &Request, ino: INodeNo, handle: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.run("fsync", ino, |fs| async move {
            replies::empty(reply, fs.sync_file(convert::handle(handle)).await);
        });
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: Flags, reply: ReplyOpen) {
        match self.fs.open_directory() {
            Ok(handle) => reply.opened(FileHandle(handle.0), FopenFlags::empty()),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    fn readdir(&self, _: &Request, ino: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let (directory, handle) = (convert::inode(ino), convert::handle(handle));
        self.run("readdir", ino, |fs| async move {
            let take = |number, entry: &crate::fs::Listed| {
                let kind = convert::kind(entry.kind());
                !reply.add(INodeNo(entry.ino().0), number, kind, OsStr::from_bytes(entry.name()))
            };
            match fs.read_directory(directory, handle, offset, false, take).await {
                Ok(()) => reply.ok(),
                Err(errno) => reply.error(convert::errno(errno)),
            }
        });
    }

    fn readdirplus(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let (ttl, directory, handle) = (self.ttl(), convert::inode(ino), convert::handle(handle));
        self.run("readdirplus", ino, |fs| async move {
            let take = |number, entry: &crate::fs::Listed| {
                let (found, name) = (convert::listed(entry), OsStr::from_bytes(entry.name()));
                !reply.add(found.ino, number, name, &ttl, &found, replies::GENERATION)
            };
            match fs.read_directory(directory, handle, offset, true, take).await {
                Ok(()) => reply.ok(),
                Err(errno) => reply.error(convert::errno(errno)),
            }
        });
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: Flags, reply: ReplyEmpty) {
        replies::empty(reply, self.fs.release_directory(convert::handle(handle)));
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.run("fsyncdir", ino, |fs| async move {
            replies::empty(reply, fs.sync_directory(convert::inode(ino)).await);
        });
    }

    fn statfs(&self, _: &Request, ino: INodeNo, reply: ReplyStatfs) {
        self.run("statfs", ino, |fs| async move {
            replies::space(reply, fs.space().await);
        });
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let (name, value) = (bytes(name), Bytes::copy_from_slice(value));
        let group = (!privileged(request)).then(|| request.gid());
        self.run("setxattr", ino, |fs| async move {
            replies::empty(reply, fs.set_xattr(convert::inode(ino), &name, value, flags, group).await);
        });
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = bytes(name);
        self.run("getxattr", ino, |fs| async move {
            replies::xattr(reply, fs.xattr(convert::inode(ino), &name, size).await);
        });
    }

    fn listxattr(&self, _: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.run("listxattr", ino, |fs| async move {
            replies::xattr(reply, fs.xattrs(convert::inode(ino), size).await);
        });
    }

    fn removexattr(&self, _: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = bytes(name);
        self.run("removexattr", ino, |fs| async move {
            replies::empty(reply, fs.remove_xattr(convert::inode(ino), &name).await);
        });
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (file, handle) = (convert::inode(ino), convert::handle(handle));
        self.run("fallocate", ino, |fs| async move {
            replies::empty(reply, fs.allocate(file, handle, mode, offset, length).await);
        });
    }

    fn lseek(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let (file, handle) = (convert::inode(ino), convert::handle(handle));
        self.run("lseek", ino, |fs| async move {
            replies::offset(reply, fs.seek(file, handle, offset, whence).await);
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        from: INodeNo,
        from_handle: FileHandle,
        from_offset: u64,
        to: INodeNo,
        to_handle: FileHandle,
        to_offset: u64,
        length: u64,
        _: fuser::CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let source = (convert::inode(from), convert::handle(from_handle), from_offset);
        let target = (convert::inode(to), convert::handle(to_handle), to_offset);
        let clears_setid = !privileged(request);
        self.run("copy_file_range", to, |fs| async move {
            replies::written(reply, fs.copy_range(source, target, length, clears_setid).await);
        });
    }

    fn getlk(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        owner: LockOwner,
        first: u64,
        last: u64,
        kind: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        self.look_for_lock(convert::inode(ino), (owner.0, pid), (first, last), kind, reply);
    }

    fn setlk(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        first: u64,
        last: u64,
        kind: i32,
        pid: u32,
        waits: bool,
        reply: ReplyEmpty,
    ) {
        let (ino, handle, owner) = (convert::inode(ino), convert::handle(handle), owner.0);
        if kind == libc::F_UNLCK {
            return self.unlock(ino, handle, owner, (first, last), reply);
        }
        let locker = Locker { handle, waits, thread: request.pid() };
        self.set_lock(ino, locker, (owner, pid), (first, last), kind, reply);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: fuser::IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    /// ENOSYS: files are always ready, which the kernel then answers on its own.
    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: fuser::PollNotifier,
        _: fuser::PollEvents,
        _: fuser::PollFlags,
        reply: fuser::ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS);
    }
}
