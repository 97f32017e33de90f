//! Reading, writing, seeking and allocating.

use bytes::Bytes;
use forebay_core::{ErrorKind, InodeId};
use forebay_io::task::may_block;
use forebay_volume::{Position, Seek};

use super::FileSystem;
use crate::errno::{Errno, FsResult};
use crate::handle::Handle;

/// How bytes are to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// Where to.
    pub position: Position,
    /// Where the kernel has put it: it takes the file to reach there.
    pub offset: u64,
    /// Whether set-id bits go, as the kernel asks for callers without CAP_FSETID.
    pub clears_setid: bool,
    /// Whether they are durable on return: see [`OpenFlags::syncs`].
    ///
    /// [`OpenFlags::syncs`]: super::OpenFlags::syncs
    pub syncs: bool,
    /// Whether it is a page that a mapping wrote.
    pub is_page: bool,
}

impl<P: Into<Position>> From<P> for Write {
    fn from(position: P) -> Self {
        let position = position.into();
        let offset = match position {
            Position::At(offset) | Position::PieceAt(offset) => offset,
            Position::End => 0,
        };
        Self { position, offset, clears_setid: false, syncs: false, is_page: false }
    }
}

impl FileSystem {
    /// Up to `length` bytes at `offset`; fewer only at the end of the file.
    pub async fn read(&self, ino: InodeId, handle: Handle, offset: u64, length: u32) -> FsResult<Bytes> {
        let file = match self.file_now(ino, handle) {
            Some(file) => file,
            None => self.file(ino, handle).await?,
        };
        if self.policy.relatime {
            file.note_access(self.clock.wall());
        }
        let may_block = may_block();
        if let Some(bytes) = file.read_now(offset, length, may_block) {
            return Ok(bytes);
        }
        if may_block {
            // Ends what the worker thread does: the fetch then starts inside the runtime, in the task that waits for it,
            // and wakes no second thread.
            tokio::task::yield_now().await;
        }
        Ok(file.read(offset, length).await?)
    }

    /// Writes `data`. File capabilities go with any write; what passes through the page cache has been seen to by the
    /// kernel.
    pub async fn write(
        &self,
        ino: InodeId,
        handle: Handle,
        write: impl Into<Write>,
        data: Bytes,
    ) -> FsResult<u32> {
        let Write { position, offset, clears_setid, syncs, is_page } = write.into();
        let file = self.file(ino, handle).await?;
        let position = match position {
            // The file is shorter than the kernel saw it last: nothing is on its way to what is missing.
            Position::PieceAt(_) if self.inodes.size(ino) > file.size() => Position::End,
            position => position,
        };
        if clears_setid {
            self.clear_setid(ino).await?;
        }
        if !file.access().read {
            self.clear_capability(ino).await?;
        }
        let written = file.write(position, data).await?;
        // Of a write that cannot be brought to the store the kernel has the bytes, and of the content of before the generation.
        self.inodes.doubt_cache(ino);
        self.inodes.reaches(ino, offset.saturating_add(u64::from(written)));
        if is_page {
            file.note_page();
        }
        if syncs {
            file.fsync().await?;
        }
        Ok(written)
    }

    /// Allocates or frees a range; `mode` has fallocate(2)'s flags.
    pub async fn allocate(
        &self,
        ino: InodeId,
        handle: Handle,
        mode: i32,
        offset: u64,
        length: u64,
    ) -> FsResult<()> {
        self.file(ino, handle).await?.allocate(mode, offset, length).await?;
        if mode & libc::FALLOC_FL_KEEP_SIZE == 0 {
            self.inodes.reaches(ino, offset.saturating_add(length));
        }
        Ok(())
    }

    /// Puts `length` bytes of one file over those of another, by sharing them. Returns how many: fewer at the end of the
    /// source, none past it. EOPNOTSUPP where they are to be copied, which the kernel then does.
    pub async fn copy_range(
        &self,
        source: (InodeId, Handle, u64),
        target: (InodeId, Handle, u64),
        length: u64,
        clears_setid: bool,
    ) -> FsResult<u32> {
        let (from, to) = (self.file(source.0, source.1).await?, self.file(target.0, target.1).await?);
        let range = source.2..source.2.saturating_add(length);
        if range.start < from.size() && !to.pays_to_share(&from, &range, target.2) {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        if clears_setid {
            self.clear_setid(target.0).await?;
        }
        // What fits the reply, and 4 KiB pages whole.
        let length = length.min(u64::from(u32::MAX) & !0xfff);
        let end = source.2.checked_add(length).ok_or(Errno(libc::EINVAL))?;
        match to.share(&from, source.2..end, target.2).await {
            Err(error) if error.kind() == ErrorKind::Conflict => Err(Errno(libc::EOPNOTSUPP)),
            shared => {
                let shared = shared?;
                self.inodes.reaches(target.0, target.2.saturating_add(shared));
                Ok(u32::try_from(shared).unwrap_or(u32::MAX))
            }
        }
    }

    /// The next data or hole at or after `offset`; `whence` is SEEK_DATA or SEEK_HOLE. ENXIO past the end, and where
    /// no data follows.
    pub async fn seek(&self, ino: InodeId, handle: Handle, offset: i64, whence: i32) -> FsResult<u64> {
        let whence = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(Errno(libc::EINVAL)),
        };
        let offset = u64::try_from(offset).map_err(|_| Errno(libc::ENXIO))?;
        let file = self.file(ino, handle).await?;
        if offset >= file.size() {
            return Err(Errno(libc::ENXIO));
        }
        file.seek(offset, whence).await?.ok_or(Errno(libc::ENXIO))
    }
}
