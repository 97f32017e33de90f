//! Opening, listing and syncing directories.

use bytes::Bytes;
use forebay_core::{Attributes, FileKind, InodeId};

use super::FileSystem;
use super::listing::{DOT, DOT_DOT, Resume};
use super::state::Directory;
use crate::errno::{Errno, FsResult};
use crate::handle::Handle;

/// Entries asked for at a time. One READDIRPLUS of the usual 32 KiB holds about 180.
const PAGE: usize = 128;

/// One entry of a directory listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listed {
    /// `.` or `..`: the kernel takes no reference to these.
    Dots(InodeId, &'static str),
    /// A name and what it names.
    Name(Bytes, Attributes),
}

impl Listed {
    /// The name.
    pub fn name(&self) -> &[u8] {
        match self {
            Self::Dots(_, name) => name.as_bytes(),
            Self::Name(name, _) => name,
        }
    }

    /// The inode.
    pub fn ino(&self) -> InodeId {
        match self {
            Self::Dots(ino, _) => *ino,
            Self::Name(_, attributes) => attributes.ino,
        }
    }

    /// The type of the inode.
    pub fn kind(&self) -> FileKind {
        match self {
            Self::Dots(..) => FileKind::Directory,
            Self::Name(_, attributes) => attributes.kind,
        }
    }
}

impl FileSystem {
    /// Opens a directory. ENOSYS on a dataset mount, which tells the kernel to do without OPENDIR from then on.
    pub fn open_directory(&self) -> FsResult<Handle> {
        if self.policy.dataset {
            return Err(Errno(libc::ENOSYS));
        }
        self.directories.insert(Directory::default()).map_err(|_| Errno(libc::ENFILE))
    }

    /// Hands entries after number `offset` (0 for the start) to `take`, each with its own number, until there are no
    /// more or `take` returns false, which says that it did not take the entry.
    ///
    /// With `references`, each name taken is one more reference that the kernel holds. Attributes are read anew in
    /// every call, so that the kernel never sees a size from before a write that it has made since.
    pub async fn read_directory<F>(
        &self,
        ino: InodeId,
        handle: Handle,
        offset: u64,
        references: bool,
        mut take: F,
    ) -> FsResult<()>
    where
        F: FnMut(u64, &Listed) -> bool + Send,
    {
        let directory = self.directory(ino, handle)?;
        let mut cursor = directory.lock().await;
        if offset < DOT && !take(DOT, &Listed::Dots(ino, ".")) {
            return Ok(());
        }
        if offset < DOT_DOT {
            let parent = self.volume.tree().parent(ino).await?;
            if !take(DOT_DOT, &Listed::Dots(parent, "..")) {
                return Ok(());
            }
        }
        let wanted = offset.max(DOT_DOT);
        let Resume { mut after, mut number } = cursor.resume(wanted);
        let mut skipped = wanted - number;
        loop {
            let page = self.volume.read_directory(ino, after.as_deref(), PAGE).await?;
            after = page.entries.last().map(|entry| entry.name.clone());
            for entry in page.entries {
                number = cursor.number_after(number, &entry.name);
                if skipped > 0 {
                    skipped -= 1;
                } else if !self.hand_out(&mut take, number, &entry, references) {
                    return Ok(());
                }
                cursor.note(number, entry.name);
            }
            if page.complete || after.is_none() {
                return Ok(());
            }
        }
    }

    fn hand_out<F>(
        &self,
        take: &mut F,
        number: u64,
        entry: &forebay_metadata::tree::DirectoryEntry,
        references: bool,
    ) -> bool
    where
        F: FnMut(u64, &Listed) -> bool,
    {
        let taken = take(number, &Listed::Name(entry.name.clone(), entry.attributes.clone()));
        if taken && references {
            self.inodes.looked_up(entry.attributes.ino);
        }
        taken
    }

    /// Closes a directory.
    pub fn release_directory(&self, handle: Handle) -> FsResult<()> {
        self.directories.remove(handle).map(drop)
    }

    /// fsync(2) of a directory: every name given so far is durable in the bucket on return. Fails past the deadline, and
    /// gives nothing up then.
    pub async fn sync_directory(&self) -> FsResult<()> {
        if self.volume.read_only() {
            return Ok(());
        }
        Ok(self.volume.sync_names().await?)
    }

    fn directory(&self, ino: InodeId, handle: Handle) -> FsResult<Directory> {
        if handle != Handle::NONE {
            return self.directories.get(handle);
        }
        if !self.policy.dataset {
            return Err(Errno(libc::EBADF));
        }
        let shared = self.shared_directories.get(ino);
        Ok(shared.unwrap_or_else(|| self.shared_directories.insert(ino, Directory::default()).0))
    }
}
