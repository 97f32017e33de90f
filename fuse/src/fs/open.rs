//! Opening, creating, flushing, syncing and releasing files.

use std::sync::Arc;

use forebay_core::{Attributes, FileKind, InodeId};
use forebay_metadata::tree::Existing;
use forebay_volume::{Access, File, Position};

use super::{Caller, FileSystem};
use crate::errno::{Errno, FsResult};
use crate::handle::Handle;

/// The flags of open(2), as the kernel passes them on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenFlags(pub i32);

impl OpenFlags {
    fn access(self) -> FsResult<Access> {
        let (read, write) = match self.0 & libc::O_ACCMODE {
            libc::O_RDONLY => (true, false),
            libc::O_WRONLY => (false, true),
            libc::O_RDWR => (true, true),
            _ => return Err(Errno(libc::EINVAL)),
        };
        let truncate = self.has(libc::O_TRUNC);
        Ok(Access { read, write, truncate })
    }

    /// Where a write goes that the kernel has put at `offset`, with the flags that its descriptor has by now: fcntl(2)
    /// changes O_APPEND and O_DIRECT. Pieces of a long write past the page cache come in any order, if its caller does not wait.
    pub fn position(self, offset: u64) -> Position {
        match (self.has(libc::O_APPEND), self.passes_the_page_cache()) {
            (false, _) => Position::At(offset),
            (true, false) => Position::End,
            (true, true) => Position::PieceAt(offset),
        }
    }

    /// Whether a write with these flags, or with RWF_DSYNC, is durable once it is answered, and that is left to who answers
    /// it: the kernel sends FSYNC after writes through its page cache, and none after direct or asynchronous ones.
    pub fn syncs(self) -> bool {
        // O_SYNC contains O_DSYNC.
        self.has(libc::O_DSYNC) && self.passes_the_page_cache()
    }

    /// As [`Opened::direct`].
    fn is_direct(self) -> bool {
        self.0 & libc::O_ACCMODE == libc::O_WRONLY
    }

    fn passes_the_page_cache(self) -> bool {
        self.is_direct() || self.has(libc::O_DIRECT)
    }

    fn has(self, flag: i32) -> bool {
        self.0 & flag != 0
    }
}

/// A file as opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// Its handle.
    pub handle: Handle,
    /// Whether the pages that the kernel holds are of the content opened.
    pub keep_cache: bool,
    /// Whether close(2) has anything to flush through this handle.
    pub flushes: bool,
    /// Whether the kernel takes the file to be as long as it is. It reads no further otherwise, until it asks again.
    pub is_as_long: bool,
    /// Whether writes come without a stop in the kernel's page cache. So it is for handles that cannot read: nobody
    /// would look at those pages before the next open drops them, and filling them costs as much as all the rest.
    pub direct: bool,
}

impl FileSystem {
    /// Opens a file. ENOSYS on a dataset mount, which tells the kernel to do without OPEN from then on.
    ///
    /// O_TRUNC does not come with it: the kernel changes the size once it knows that nobody executes the file.
    pub async fn open(&self, ino: InodeId, flags: OpenFlags) -> FsResult<Opened> {
        if self.policy.dataset {
            return Err(Errno(libc::ENOSYS));
        }
        let access = flags.access()?;
        let file = self.volume.open(ino, access).await?;
        self.register(file, access.write, flags).await
    }

    /// Opens `parent/name`, making it if need be.
    pub async fn create(
        &self,
        caller: Caller,
        parent: InodeId,
        name: &[u8],
        mode: u16,
        flags: OpenFlags,
    ) -> FsResult<(Attributes, Opened)> {
        let access = flags.access()?;
        let existing = if flags.has(libc::O_EXCL) { Existing::Refuse } else { Existing::Accept };
        let new = caller.new_inode(FileKind::File, mode);
        let (attributes, file) = self.volume.create(parent, name, new, existing, access).await?;
        let attributes = self.enter(attributes);
        // Even a file that is made for reading only has something to flush: itself.
        match self.register(file, true, flags).await {
            Ok(opened) => Ok((attributes, opened)),
            Err(errno) => {
                self.inodes.forget(attributes.ino, 1);
                Err(errno)
            }
        }
    }

    async fn register(&self, file: Arc<File>, write: bool, flags: OpenFlags) -> FsResult<Opened> {
        let keep_cache = self.inodes.keeps_cache(file.ino(), file.generation());
        // A close ends the locks of who closes, also of what is read alone.
        let flushes = write || self.keeps_locks();
        let is_as_long = self.inodes.size(file.ino()) == file.size();
        let direct = flags.is_direct();
        match self.files.insert(file) {
            Ok(handle) => Ok(Opened { handle, keep_cache, flushes, is_as_long, direct }),
            Err(file) => {
                file.release().await?;
                Err(Errno(libc::ENFILE))
            }
        }
    }

    /// Opens a file for a mount without handles and keeps it until the kernel forgets the inode.
    pub(super) async fn share_file(&self, ino: InodeId) -> FsResult<Arc<File>> {
        let access = Access { read: true, write: false, truncate: false };
        let file = self.volume.open(ino, access).await?;
        let (file, dropped) = self.shared_files.insert(ino, file);
        release_shared(dropped).await;
        Ok(file)
    }

    /// close(2) of one descriptor by the process whose descriptors are `closer`: what was written through this inode is
    /// committed, what it has locked of it is locked no more, and failures surface here. One that wrote nothing, while others did, commits nothing either.
    pub async fn close(&self, handle: Handle, closer: u64) -> FsResult<()> {
        if self.policy.dataset {
            return Err(Errno(libc::ENOSYS));
        }
        let file = self.files.get(handle)?;
        let closed = file.close(closer).await;
        let unlocked = self.unlock_closed(file.ino(), closer).await;
        closed.map_err(Errno::from).and(unlocked)
    }

    /// Notes who makes the next write to a handle: the process whose descriptors are `writer`, where the kernel says.
    pub fn note_writer(&self, handle: Handle, writer: Option<u64>) {
        if let Ok(file) = self.files.get(handle) {
            file.note_writer(writer);
        }
    }

    /// Notes that a handle's file was truncated through it, as ftruncate(2) does.
    pub fn note_truncated(&self, handle: Handle) {
        if let Ok(file) = self.files.get(handle) {
            file.note_truncated();
        }
    }

    /// fsync(2) and fdatasync(2): durable in the bucket on return.
    pub async fn sync_file(&self, handle: Handle) -> FsResult<()> {
        if self.volume.read_only() {
            return Ok(());
        }
        let file = self.files.get(handle)?;
        file.fsync().await?;
        self.expect_locked(file.ino(), handle)
    }

    /// The last descriptor and mapping of an open file are gone.
    pub async fn release(&self, handle: Handle) -> FsResult<()> {
        let file = self.files.remove(handle)?;
        let released = file.release().await;
        let unlocked = self.unlock_released(file.ino(), handle).await;
        released.map_err(Errno::from).and(unlocked)
    }
}

/// Releases read-only files that nobody waits for.
pub(super) async fn release_shared(files: Vec<Arc<File>>) {
    for file in files {
        if let Err(failure) = file.release().await {
            tracing::debug!(ino = %file.ino(), %failure, "release of a file that was only read");
        }
    }
}
