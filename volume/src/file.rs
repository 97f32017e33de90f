//! A handle on an open file.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use bytes::Bytes;
use forebay_core::units::KIB;
use forebay_core::{BlockKey, Error, ErrorKind, InodeId, Result, Timestamp};
use parking_lot::Mutex;

use crate::content::{Content, beside};
use crate::inode::{OpenInode, Position, Told};
use crate::prefetch::Prefetch;
use crate::prefetch::directory::SMALL_FILE;
use crate::volume::Volume;

/// What a handle was opened for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Access {
    /// O_RDONLY or O_RDWR.
    pub read: bool,
    /// O_WRONLY or O_RDWR.
    pub write: bool,
    /// O_TRUNC.
    pub truncate: bool,
}

/// What lseek looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The next byte that is not in a hole.
    Data,
    /// The next hole; the end of the file counts as one.
    Hole,
}

/// FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE and FALLOC_FL_ZERO_RANGE of linux/falloc.h.
const KEEP_SIZE: i32 = 0x01;
const PUNCH_HOLE: i32 = 0x02;
const ZERO_RANGE: i32 = 0x10;

/// The largest size that a file may get; one that was larger before stays so.
pub(crate) const LARGEST_BYTES: u64 = 16 << 40;

/// Processes that are told apart as writers of one handle.
const MAX_WRITERS: usize = 32;

/// An open file. Methods that write are not cancel-safe: callers run them in tasks of their own.
#[derive(Debug)]
pub struct File {
    inode: Arc<OpenInode>,
    volume: Arc<Volume>,
    access: Access,
    prefetch: Mutex<Prefetch>,
    writers: Mutex<Writers>,
    /// Whether something was written through it after its last flush.
    is_unflushed: AtomicBool,
    told: Told,
}

/// Who wrote through a handle and has not closed it since. Forked processes share a handle.
#[derive(Debug, Default)]
struct Writers {
    named: Vec<u64>,
    /// Some write did not say who made it, or too many did.
    is_incomplete: bool,
}

/// Bytes of which fewer are copied instead of shared, of a part of a file.
const LEAST_SHARED: u64 = 256 * KIB;
/// The same for each extent that their new file has already.
const PER_EXTENT: u64 = 4 * KIB;

impl File {
    pub(crate) fn new(inode: Arc<OpenInode>, volume: Arc<Volume>, access: Access) -> Self {
        let prefetch = Mutex::new(Prefetch::new(&inode.store().prefetch, &volume.readers));
        if access.write {
            inode.enter_writer();
        }
        let told = inode.begin_telling();
        let is_unflushed = AtomicBool::new(false);
        Self { inode, volume, access, prefetch, writers: Mutex::default(), is_unflushed, told }
    }

    /// The inode.
    pub fn ino(&self) -> InodeId {
        self.inode.ino()
    }

    /// What the handle was opened for.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Its size, in bytes, with what is not committed.
    pub fn size(&self) -> u64 {
        self.inode.look(Content::size)
    }

    /// Generation of the last commit seen: the kernel's cached pages of an older one are of no use.
    pub fn generation(&self) -> u64 {
        self.inode.look(|content| content.generation())
    }

    /// The bytes at `offset`, short at the end of the file, if all of them are in memory, or small and on disk where
    /// the caller may wait for a disk.
    pub fn read_now(&self, offset: u64, length: u32, may_block: bool) -> Option<Bytes> {
        let bytes = self.inode.read_now(offset, u64::from(length), may_block)?;
        self.spend(self.look_around(offset, u64::from(length)));
        self.walk_on(offset);
        Some(bytes)
    }

    /// The bytes at `offset`, short at the end of the file.
    ///
    /// # Errors
    /// `Stale` when an outsider replaced or deleted the object and no cached copy is left; `Unavailable` past the
    /// deadline.
    pub async fn read(&self, offset: u64, length: u32) -> Result<Bytes> {
        let passed = self.look_around(offset, u64::from(length));
        self.walk_on(offset);
        let bytes = self.inode.read(offset, u64::from(length)).await?;
        self.spend(passed);
        Ok(bytes)
    }

    /// Brings in what the read pattern calls for, in the background; returns the blocks that this read is the last of.
    fn look_around(&self, offset: u64, length: u64) -> Vec<BlockKey> {
        let fetch = &self.inode.store().fetch;
        let (ahead, passed, place) = self.inode.look(|content| {
            let size = content.size();
            let end = offset.saturating_add(length).min(size);
            let mut prefetch = self.prefetch.lock();
            let ahead = prefetch.observe(offset.min(end)..end, size);
            let (passed, place) = (prefetch.passed(size), prefetch.place());
            drop(prefetch);
            match content.readable() {
                true => (
                    fetch.keys_with_ends(content.layout(), ahead),
                    fetch.keys(content.layout(), passed),
                    place,
                ),
                false => (Vec::new(), Vec::new(), place),
            }
        });
        for (key, end) in ahead {
            let place = place.clone();
            // A reader that is quicker has read it by itself, and what is brought in then is dropped unread.
            self.volume.fill_ahead(key, move || place.load(Relaxed) < end);
        }
        passed
    }

    /// Whoever begins a small file may go through its directory.
    fn walk_on(&self, offset: u64) {
        if offset == 0 && self.inode.look(Content::size) <= SMALL_FILE {
            self.volume.walk_on(self.inode.ino());
        }
    }

    /// Who reads keeps what it was given, in the kernel's pages or its own.
    fn spend(&self, passed: Vec<BlockKey>) {
        for key in passed {
            self.volume.blocks().spend(&key);
        }
    }

    /// Notes that the file was read. The tree learns of it when a handle is closed, if relatime asks for it.
    pub fn note_access(&self, now: Timestamp) {
        self.inode.note_access(now);
    }

    /// Writes `data` at an offset, or at the end. Returns the bytes taken: all of them.
    ///
    /// # Errors
    /// That of bytes that were lost since the handle was opened, until fsync or close has told it.
    pub async fn write(&self, position: impl Into<Position>, data: Bytes) -> Result<u32> {
        let position = position.into();
        let length = data.len() as u64;
        let permit = self.volume.charge_write(length + beside(length)).await?;
        let written = self.inode.write(&self.told, position, data, permit).await?;
        self.is_unflushed.store(true, SeqCst);
        Ok(written)
    }

    /// Notes that the file was truncated through this handle, whose close commits it.
    pub fn note_truncated(&self) {
        self.is_unflushed.store(true, SeqCst);
    }

    /// Notes that a mapping wrote: the kernel brings its pages through whichever handle it finds.
    pub fn note_page(&self) {
        self.inode.note_page();
    }

    /// Whether to share `range` of `source` rather than copy it: a file of many short extents costs more at each read and commit
    /// than its bytes do. A whole file, or what is left of one that is copied in order, is one extent, whatever its size.
    pub fn pays_to_share(&self, source: &Self, range: &std::ops::Range<u64>, to: u64) -> bool {
        let of_source = source.inode.look(Content::size);
        let length = range.end.min(of_source).saturating_sub(range.start);
        let (size, extents) = self.inode.look(|content| (content.size(), content.layout().extents().len()));
        let is_rest = range.start == to && size == to && range.start + length == of_source;
        is_rest || length >= LEAST_SHARED.max(extents as u64 * PER_EXTENT)
    }

    /// copy_file_range(2) without moving a byte: `range` of `source` is shared, over what was at `to`. Returns the bytes
    /// shared: fewer at the end of `source`.
    ///
    /// # Errors
    /// `Conflict` when the bytes of `source` are about to be replaced: they have to be copied.
    pub async fn share(&self, source: &Self, range: std::ops::Range<u64>, to: u64) -> Result<u64> {
        let shared = self.inode.share(&self.told, &source.inode, range, to).await;
        self.is_unflushed.store(true, SeqCst);
        shared
    }

    /// close(2): commits what was written. The bytes are in the bucket on return, the name within 5 s.
    pub async fn flush(&self) -> Result<()> {
        self.flush_if(|| true).await
    }

    /// The same if it `may`, as is found out when nothing is being written.
    async fn flush_if(&self, may: impl FnOnce() -> bool) -> Result<()> {
        if self.access.write { self.commit_if(may).await } else { Ok(()) }
    }

    async fn commit_if(&self, may: impl FnOnce() -> bool) -> Result<()> {
        let may = || {
            let may = may();
            self.is_unflushed.fetch_and(!may, SeqCst);
            may
        };
        let was_lost = self.forget_lost();
        let flushed = self.inode.flush_if(&self.told, may).await;
        // What the close itself found lost is nothing to commit later.
        if flushed.is_err() && !was_lost && self.inode.is_pending() {
            self.is_unflushed.store(true, SeqCst);
        }
        flushed
    }

    /// Notes that the next write is made by the process whose descriptors are `writer`.
    pub fn note_writer(&self, writer: Option<u64>) {
        let mut writers = self.writers.lock();
        match writer {
            Some(writer) if writers.named.contains(&writer) => {}
            Some(writer) if writers.named.len() < MAX_WRITERS => writers.named.push(writer),
            _ => writers.is_incomplete = true,
        }
    }

    /// close(2) by the process whose descriptors are `closer`: as [`Self::flush`], unless only others wrote, through this
    /// handle or another one. A child that is forked while its parent writes closes copies of the parent's descriptors,
    /// some of them after its parent has: what is half-written stays so. That bytes were lost is told unless only others wrote
    /// through this handle, whether it has something to commit or not.
    pub async fn close(&self, closer: u64) -> Result<()> {
        let mut tells = false;
        let may_commit = || {
            let mut writers = self.writers.lock();
            let others =
                !writers.is_incomplete && !writers.named.is_empty() && !writers.named.contains(&closer);
            writers.named.retain(|writer| *writer != closer);
            tells = !others;
            tells && (self.has_unflushed() || self.inode.is_touched() || !self.inode.has_writers_beside())
        };
        self.flush_if(may_commit).await?;
        if tells { self.inode.tell_failure(&self.told) } else { Ok(()) }
    }

    /// Whether something was written through it, or by a mapping, that was not committed.
    fn has_unflushed(&self) -> bool {
        self.is_unflushed.load(SeqCst) || self.inode.has_pages()
    }

    /// Whether that was lost, as its writer has not heard yet: then there is nothing to commit.
    fn forget_lost(&self) -> bool {
        let was_lost = self.inode.check_kept(&self.told).is_err();
        self.is_unflushed.fetch_and(!was_lost, SeqCst);
        was_lost
    }

    /// fsync(2): bytes and metadata are in the bucket on return.
    pub async fn fsync(&self) -> Result<()> {
        self.commit_if(|| true).await?;
        self.inode.store().sync_tree().await?;
        self.inode.check_losses().await;
        if self.access.write {
            self.volume.gather_behind(&self.inode);
        }
        // The local disk may have lost them meanwhile.
        self.inode.tell_failure(&self.told)
    }

    /// The last reference to the handle is gone. Commits what a mapping wrote after the last flush, and leaves the rest to
    /// those who are writing: the kernel tells of it late, and what they have half-written stays so. No program hears what fails
    /// here: what others wrote is still theirs to be told of.
    pub async fn release(&self) -> Result<()> {
        let flushed = match self.access.write {
            true => {
                self.inode.leave_writer();
                self.forget_lost();
                let may = || self.has_unflushed() || !self.inode.has_writers();
                let committed = self.inode.commit_if(may).await;
                self.inode.untold_failure(&self.told).and(committed)
            }
            false => Ok(()),
        };
        self.volume.release(&self.inode, self.access.write).await?;
        flushed
    }

    /// fallocate(2): grows the file, punches a hole or zeroes a range.
    ///
    /// # Errors
    /// `Unsupported` for other modes, which need blocks that exist apart from their content.
    pub async fn allocate(&self, mode: i32, offset: u64, length: u64) -> Result<()> {
        let end = offset
            .checked_add(length)
            .ok_or_else(|| Error::new(ErrorKind::TooLarge, "fallocate past the largest offset"))?;
        let keep_size = mode & KEEP_SIZE != 0;
        match mode & !KEEP_SIZE {
            0 => {}
            PUNCH_HOLE if keep_size => {}
            ZERO_RANGE => {}
            _ => return Err(Error::new(ErrorKind::Unsupported, format!("fallocate mode {mode:#x}"))),
        }
        let zero = mode & (PUNCH_HOLE | ZERO_RANGE) != 0;
        if !keep_size {
            self.inode.let_in(end).await?;
        }
        let store = self.inode.store();
        let edited = self
            .inode
            .edit(&self.told, |content| {
                let now = store.now();
                // As Linux has it, also where nothing else changes.
                content.touch(now);
                if zero {
                    content.punch(offset..end, now);
                }
                if !keep_size && end > content.size() {
                    content.truncate(end, now);
                }
            })
            .await;
        self.is_unflushed.store(true, SeqCst);
        edited
    }

    /// lseek(2) with SEEK_DATA or SEEK_HOLE; `None` (ENXIO) past the end or when no data follows.
    pub async fn seek(&self, offset: u64, whence: Seek) -> Result<Option<u64>> {
        self.inode.settle().await?;
        Ok(self.inode.look(|content| match whence {
            _ if offset >= content.size() => None,
            Seek::Data => content.layout().next_data(offset),
            Seek::Hole => Some(content.layout().next_hole(offset)),
        }))
    }
}
