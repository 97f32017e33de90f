//! Operations on names: mkdir, mknod, symlink, link, unlink, rmdir, rename, readlink.

use bytes::Bytes;
use forebay_core::{Attributes, ErrorKind, FileKind, InodeId, Result};
use forebay_metadata::tree::{Existing, NewInode, Removed, RenameMode};

use super::FileSystem;
use crate::errno::{Errno, FsResult};

/// Who asks: the owner of what is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits that the caller leaves out of what it makes; 0 where the kernel has done so.
    pub umask: u16,
}

impl Caller {
    /// An inode of this caller's.
    pub(super) fn new_inode(self, kind: FileKind, mode: u16) -> NewInode {
        let Self { uid, gid, umask } = self;
        NewInode { kind, mode: mode & 0o7777, umask, uid, gid, rdev: 0, target: Bytes::new() }
    }
}

impl FileSystem {
    /// Makes a directory.
    pub async fn make_directory(
        &self,
        caller: Caller,
        parent: InodeId,
        name: &[u8],
        mode: u16,
    ) -> FsResult<Attributes> {
        self.make(parent, name, caller.new_inode(FileKind::Directory, mode)).await
    }

    /// Makes a file, pipe, socket or device node.
    pub async fn make_node(
        &self,
        caller: Caller,
        parent: InodeId,
        name: &[u8],
        kind: FileKind,
        mode: u16,
        rdev: u32,
    ) -> FsResult<Attributes> {
        if matches!(kind, FileKind::Directory | FileKind::Symlink) {
            return Err(Errno(libc::EINVAL));
        }
        let is_device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
        let rdev = if is_device { rdev } else { 0 };
        self.make(parent, name, NewInode { rdev, ..caller.new_inode(kind, mode) }).await
    }

    /// Makes a symlink to `target`.
    pub async fn make_symlink(
        &self,
        caller: Caller,
        parent: InodeId,
        name: &[u8],
        target: Bytes,
    ) -> FsResult<Attributes> {
        if target.is_empty() {
            return Err(Errno(libc::ENOENT));
        }
        if target.len() >= libc::PATH_MAX as usize {
            return Err(Errno(libc::ENAMETOOLONG));
        }
        self.make(parent, name, NewInode { target, ..caller.new_inode(FileKind::Symlink, 0o777) }).await
    }

    async fn make(&self, parent: InodeId, name: &[u8], new: NewInode) -> FsResult<Attributes> {
        let (attributes, _) = self.volume.tree().create(parent, name, new, Existing::Refuse).await?;
        Ok(self.enter(attributes))
    }

    /// Gives a file a further name.
    pub async fn link(&self, ino: InodeId, parent: InodeId, name: &[u8]) -> FsResult<Attributes> {
        self.volume.tree().link(ino, parent, name).await?;
        // What the tree returns lacks writes not committed yet: the kernel would cut the file to the older size.
        Ok(self.enter(self.attributes(ino).await?))
    }

    /// Removes a name of something that is not a directory.
    pub async fn unlink(&self, parent: InodeId, name: &[u8]) -> FsResult<()> {
        self.change_names(&[parent], self.volume.unlink(parent, name)).await
    }

    /// Removes an empty directory.
    pub async fn remove_directory(&self, parent: InodeId, name: &[u8]) -> FsResult<()> {
        self.change_names(&[parent], self.volume.tree().remove_directory(parent, name)).await
    }

    /// Moves or exchanges names; `flags` are renameat2's. Anything but its combinations is EINVAL.
    pub async fn rename(
        &self,
        Caller { uid, gid, .. }: Caller,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        flags: u32,
    ) -> FsResult<()> {
        const WHITEOUT_NOREPLACE: u32 = libc::RENAME_WHITEOUT | libc::RENAME_NOREPLACE;
        let mode = match flags {
            0 => RenameMode::Replace,
            libc::RENAME_NOREPLACE => RenameMode::NoReplace,
            libc::RENAME_EXCHANGE => RenameMode::Exchange,
            libc::RENAME_WHITEOUT => RenameMode::Whiteout { uid, gid, may_replace: true },
            WHITEOUT_NOREPLACE => RenameMode::Whiteout { uid, gid, may_replace: false },
            _ => return Err(Errno(libc::EINVAL)),
        };
        self.change_names(&[from.0, to.0], self.volume.rename(from, to, mode)).await
    }

    /// Changes names in these directories.
    ///
    /// # Errors
    /// ESTALE where a directory is gone, as another host may have removed it; ENOENT where a name is.
    async fn change_names<C>(&self, directories: &[InodeId], change: C) -> FsResult<()>
    where
        C: Future<Output = Result<Option<Removed>>>,
    {
        let Err(failure) = self.removing(change).await else { return Ok(()) };
        if failure.kind() == ErrorKind::NotFound {
            for directory in directories {
                if self.attributes_inside(*directory).await == Err(Errno(libc::ENOENT)) {
                    return Err(Errno(libc::ESTALE));
                }
            }
        }
        Err(failure.into())
    }

    /// Target of a symlink.
    pub async fn read_link(&self, ino: InodeId) -> FsResult<Bytes> {
        Ok(self.volume.tree().read_link(ino).await?)
    }
}
