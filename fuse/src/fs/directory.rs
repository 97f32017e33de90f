//! Opening, listing and syncing directories.

use bytes::Bytes;
use forebay_core::{Attributes, FileKind, InodeId};
use forebay_metadata::tree::{DirectoryEntry, DirectoryPage};
use tracing::debug;

use super::FileSystem;
use super::listing::{DOT, DOT_DOT, Seek};
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
        let mut number = offset.max(DOT_DOT);
        let mut page = self.page_at(ino, cursor.seek(number)).await?;
        loop {
            let last = page.entries.last().map(|entry| entry.name.clone());
            for entry in page.entries {
                number = cursor.number_after(number, &entry.name);
                if !self.hand_out(&mut take, number, &entry, references) {
                    return Ok(());
                }
                cursor.note(number, &entry.name);
            }
            let Some(after) = last.filter(|_| !page.complete) else { return Ok(()) };
            page = match self.volume.read_directory(ino, Some(&after), PAGE).await {
                Ok(page) => page,
                Err(error) => {
                    // What was taken is told, since its references count. Who comes for the rest is told of the error.
                    debug!(%ino, %error, "a listing ends early");
                    return Ok(());
                }
            };
        }
    }

    /// The first entries after a position.
    async fn page_at(&self, ino: InodeId, mut seek: Seek<'_>) -> FsResult<DirectoryPage> {
        loop {
            let mut page = self.volume.read_directory(ino, seek.after.as_deref(), PAGE).await?;
            let names: Vec<&Bytes> = page.entries.iter().map(|entry| &entry.name).collect();
            if let Some(passed) = seek.advance(&names, page.complete) {
                page.entries.drain(..passed);
                return Ok(page);
            }
        }
    }

    fn hand_out<F>(&self, take: &mut F, number: u64, entry: &DirectoryEntry, references: bool) -> bool
    where
        F: FnMut(u64, &Listed) -> bool,
    {
        let taken = take(number, &Listed::Name(entry.name.clone(), self.shown(entry.attributes.clone())));
        if taken && references {
            self.inodes.looked_up(entry.attributes.ino, entry.attributes.size);
        }
        taken
    }

    /// Closes a directory.
    pub fn release_directory(&self, handle: Handle) -> FsResult<()> {
        self.directories.remove(handle).map(drop)
    }

    /// fsync(2) of a directory: every name given so far is durable in the bucket on return. Fails past the deadline, and
    /// gives nothing up then.
    pub async fn sync_directory(&self, ino: InodeId) -> FsResult<()> {
        if self.volume.read_only() {
            return Ok(());
        }
        Ok(self.volume.sync_directory(ino).await?)
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
