//! One open inode, shared by all its handles: reading, writing, and turning writes into blobs and commits.
//!
//! Writers of an inode take turns (`writer`); readers do not wait for them: they cut what they need out of `content`
//! and fetch it without a lock. Methods that write are not cancel-safe: callers run them in tasks of their own.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use bytes::Bytes;
use forebay_core::units::MIB;
use forebay_core::{Blob, Error, ErrorKind, FileLayout, InodeId, ObjectKey, Result, Timestamp};
use forebay_io::mem::Permit;
use forebay_metadata::remote::RemoteTree;
use forebay_metadata::tree::{LocalTree, SetAttributes};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard, Notify};

use crate::content::Content;
use crate::fetch::join;
use crate::settings::SealPolicy;
use crate::store::Store;

mod early;
mod failures;
mod gather;
mod read;
mod seal;
mod share;
mod stream;

use failures::Failures;
pub(crate) use failures::Told;
use stream::Stream;

/// Times a new content is laid over what the tree went over to meanwhile.
const COMMIT_ATTEMPTS: usize = 4;

/// A file of one mount while at least one handle is open on it.
#[derive(Debug)]
pub(crate) struct OpenInode {
    ino: InodeId,
    store: Arc<Store>,
    content: RwLock<Content>,
    writer: AsyncMutex<Writer>,
    /// Whose turn it is to change the times that the tree has: a commit's or a caller's.
    times: AsyncMutex<()>,
    /// Handles for writing whose release has not begun.
    writers: AtomicUsize,
    /// Wakes who makes way for writers.
    came: Notify,
    /// Whether bytes were shared with another file since the last write: such a file becomes an object of its own by a
    /// copy inside the store.
    shares: AtomicBool,
    /// Whether a mapping has written since the last commit.
    has_pages: AtomicBool,
    /// Whether nothing was written since it was created or truncated last, or committed.
    is_touched: AtomicBool,
    /// Whether a writer has closed it since sealing it was last tried.
    awaits_seal: AtomicBool,
    /// When it was last read, if that is kept and the tree was not told yet.
    accessed: Mutex<Option<Timestamp>>,
    /// Whether no handle is open on it any more: who opens the file now gets another, and this one changes nothing.
    is_retired: AtomicBool,
    /// How often changes were lost with a process that served the tree, when this file was last compared with that.
    losses: AtomicU64,
    /// Whether others changed it while it could not be looked at.
    is_behind: AtomicBool,
    /// Whether short extents are being put together, and how many extents were left last time.
    is_gathering: AtomicBool,
    gathered: AtomicUsize,
    /// Owned blobs that the content may name and no commit has.
    early: Mutex<Vec<ObjectKey>>,
    /// What lost bytes, until fsync and close have told about it.
    failures: Failures,
}

/// What only the one writer at a time may touch.
#[derive(Debug, Default)]
struct Writer {
    stream: Option<Stream>,
    /// What charges the inline bytes to the memory budget.
    permits: Vec<Permit>,
    /// Where pieces of long appends are still to come, each before some that is there.
    gaps: Vec<Range<u64>>,
}

/// Where a write goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// To an offset.
    At(u64),
    /// To the end of the file, wherever that is.
    End,
    /// To the end, as a piece of a write whose pieces may come in any order: the offset that the sender reckoned with. It
    /// counts if it is past the end, or in a gap that a piece which came too early has left.
    PieceAt(u64),
}

impl From<u64> for Position {
    fn from(offset: u64) -> Self {
        Self::At(offset)
    }
}

impl Writer {
    /// The offset that `position` comes to for `length` bytes, in a file of `size`.
    fn offset(&self, position: Position, length: u64, size: u64) -> u64 {
        match position {
            Position::At(offset) => offset,
            Position::PieceAt(offset) if offset > size || self.gap(offset, length).is_some() => offset,
            Position::PieceAt(_) | Position::End => size,
        }
    }

    /// Keeps what charges bytes that were written, but for `spare` bytes.
    fn charge(&mut self, mut permit: Permit, spare: u64) {
        permit = match self.permits.pop() {
            Some(mut last) if last.bytes() < MIB => {
                last.join(permit);
                last
            }
            Some(last) => {
                self.permits.push(last);
                permit
            }
            None => permit,
        };
        drop(permit.split(spare));
        self.permits.push(permit);
    }

    /// Notes what a piece at `offset`, in a file of `size` before it came, fills and leaves open.
    fn note_piece(&mut self, offset: u64, length: u64, size: u64) {
        if offset > size {
            self.gaps.push(size..offset);
        } else if let Some(found) = self.gap(offset, length) {
            let gap = self.gaps.swap_remove(found);
            let rest = [gap.start..offset, offset + length..gap.end];
            self.gaps.extend(rest.into_iter().filter(|rest| !rest.is_empty()));
        }
    }

    fn gap(&self, offset: u64, length: u64) -> Option<usize> {
        self.gaps.iter().position(|gap| gap.start <= offset && offset.saturating_add(length) <= gap.end)
    }
}

impl OpenInode {
    pub(crate) fn new(ino: InodeId, store: Arc<Store>, layout: FileLayout, generation: u64) -> Self {
        let losses = AtomicU64::new(store.tree.remote().map_or(0, RemoteTree::losses));
        Self {
            ino,
            store,
            content: RwLock::new(Content::committed(layout, generation)),
            writer: AsyncMutex::default(),
            times: AsyncMutex::default(),
            writers: AtomicUsize::default(),
            came: Notify::new(),
            shares: AtomicBool::new(false),
            has_pages: AtomicBool::new(false),
            is_touched: AtomicBool::new(false),
            awaits_seal: AtomicBool::new(false),
            accessed: Mutex::default(),
            is_retired: AtomicBool::new(false),
            losses,
            is_behind: AtomicBool::new(false),
            is_gathering: AtomicBool::new(false),
            gathered: AtomicUsize::default(),
            early: Mutex::default(),
            failures: Failures::default(),
        }
    }

    pub(crate) fn ino(&self) -> InodeId {
        self.ino
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Counts a handle for writing.
    pub(crate) fn enter_writer(&self) {
        self.writers.fetch_add(1, SeqCst);
        self.came.notify_waiters();
    }

    /// Counts a handle for writing off; its last flush comes after this.
    pub(crate) fn leave_writer(&self) {
        self.writers.fetch_sub(1, SeqCst);
    }

    /// Notes that a mapping wrote.
    pub(crate) fn note_page(&self) {
        self.has_pages.store(true, SeqCst);
    }

    /// Whether a mapping has written since the last commit.
    pub(crate) fn has_pages(&self) -> bool {
        self.has_pages.load(SeqCst)
    }

    /// Gives up what a mapping wrote and nobody was told of: who opens the file next is.
    pub(crate) fn lose_pages(&self, error: Error) {
        tracing::error!(ino = %self.ino, %error, "lost what a mapping wrote");
        self.record_failure(error);
        self.has_pages.store(false, SeqCst);
    }

    /// Whether a flush is certain to come.
    pub(crate) fn has_writers(&self) -> bool {
        self.writers.load(SeqCst) > 0
    }

    /// Whether one is certain to come beside that of a handle for writing.
    pub(crate) fn has_writers_beside(&self) -> bool {
        self.writers.load(SeqCst) > 1
    }

    /// Whether what is uncommitted came of its creation or truncation alone, which no handle answers for: whichever is
    /// closed next commits it.
    pub(crate) fn is_touched(&self) -> bool {
        self.is_touched.load(SeqCst)
    }

    /// Returns once a handle for writing is open.
    async fn has_writer(&self) {
        loop {
            let came = self.came.notified();
            if self.has_writers() {
                return;
            }
            came.await;
        }
    }

    /// The writers' turn: nothing is committed while it is kept.
    pub(crate) async fn turn(&self) -> MutexGuard<'_, impl Sized> {
        self.writer.lock().await
    }

    /// Notes that its last handle is gone. What it holds uncommitted, if anything, is older than what comes to the file
    /// from now on; the caller has the turn then.
    pub(crate) fn retire(&self) {
        self.is_retired.store(true, SeqCst);
        self.discard_early();
    }

    fn is_retired(&self) -> bool {
        self.is_retired.load(SeqCst)
    }

    /// Shows another content, unless it is older than the one that is shown. Nobody writes to it here.
    pub(crate) fn renew(&self, layout: FileLayout, generation: u64) {
        let mut content = self.content.write();
        if generation >= content.generation() {
            *content = Content::committed(layout, generation);
        }
    }

    /// A look at the content under its lock; `look` must not wait.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Content) -> T) -> T {
        look(&self.content.read())
    }

    /// Writes `data`, in memory first; long files start to leave for the store. `permit` charges the bytes for as
    /// long as they are in memory. Nothing is taken through a handle that was `told` too little: see [`Self::check_kept`].
    pub(crate) async fn write(
        &self,
        told: &Told,
        position: Position,
        data: Bytes,
        permit: Permit,
    ) -> Result<u32> {
        let mut writer = self.writer.lock().await;
        self.check_kept(told)?;
        let length = data.len();
        let size = self.look(Content::size);
        let offset = writer.offset(position, length as u64, size);
        self.let_in(offset.saturating_add(length as u64)).await?;
        if writer.stream.is_none() && self.look(Content::dirty) >= self.store.write.buffer_bytes {
            // Kept by a write that could not bring it away. Nothing of this one is taken if that fails again.
            self.spill(&mut writer, offset == size).await?;
        }
        if matches!(position, Position::PieceAt(_)) {
            writer.note_piece(offset, length as u64, size);
        }
        if let Some(stream) = &mut writer.stream {
            let is_room_left = stream.upload.parts() < self.store.write.stream_parts;
            if is_room_left && offset == self.look(Content::size) {
                if let Err(error) = stream.upload.write_charged(data, permit).await {
                    return Err(self.lose_stream(&mut writer, error).await);
                }
                self.is_touched.store(false, SeqCst);
                self.content.write().extend_stream(length as u64, self.store.now());
                return Ok(length as u32);
            }
            self.finish_stream(&mut writer).await?;
        }
        self.is_touched.store(false, SeqCst);
        let spare = self.content.write().write(offset, data, self.store.now());
        writer.charge(permit, spare);
        if self.look(Content::dirty) >= self.store.write.buffer_bytes
            && !self.condense(&mut writer)
            && let Err(error) = self.spill(&mut writer, offset + length as u64 >= size).await
        {
            // The bytes are kept, so this write has succeeded: a program that was told otherwise would append them again.
            // The next write and fsync try again, and tell.
            tracing::debug!(ino = %self.ino, %error, "written bytes stay in memory");
        }
        Ok(length as u32)
    }

    /// Asks whether the file may grow to `end`, before it does.
    ///
    /// # Errors
    /// `TooLarge` past the largest size, `OverQuota`.
    pub(crate) async fn let_in(&self, end: u64) -> Result<()> {
        if end <= self.look(Content::size) {
            return Ok(());
        }
        self.check_size(end)?;
        self.store.tree.reserve(self.ino, end).await
    }

    /// Sets the size; what lay past it is gone, what is new reads as zeros. Committed at once where nobody has the file open for
    /// writing: a writer that is seen commits it, for it is counted off before it flushes for the last time. What cannot be
    /// committed is not done either, unless there was more to commit before.
    pub(crate) async fn truncate(&self, size: u64) -> Result<()> {
        self.let_in(size).await?;
        let mut writer = self.writer.lock().await;
        if size == 0 && self.is_empty_for_all().await? {
            let times = SetAttributes { mtime: Some(self.store.now()), ..SetAttributes::default() };
            return self.store.tree.set_attributes(self.ino, times).await.map(drop);
        }
        let mut is_alone = false;
        self.edit_now(&mut writer, |content| {
            is_alone = content.modified().is_none();
            content.truncate(size, self.store.now());
        })
        .await?;
        // Else it is with what is half-written, of which nothing is left of an empty file.
        self.is_touched.fetch_or(is_alone || size == 0, SeqCst);
        if self.has_writers() {
            return Ok(());
        }
        let committed = self.commit_all(&mut writer).await;
        if committed.is_err() && is_alone {
            self.is_touched.store(false, SeqCst);
            self.fall_back(&mut writer).await;
        }
        committed
    }

    /// Whether anything of it is not committed, be it that a commit is under way: what was written is noted before it is answered,
    /// and that note stays until the tree has the layout.
    pub(crate) fn is_pending(&self) -> bool {
        self.look(|content| content.modified().is_some() || !content.readable())
    }

    /// Completes a running upload, so that the committed layout is the whole file but for inline bytes.
    pub(crate) async fn settle(&self) -> Result<()> {
        let mut writer = self.writer.lock().await;
        self.finish_stream(&mut writer).await
    }

    /// Whether the file is committed and lies in something else than one plain object or segments.
    pub(crate) fn needs_seal(&self) -> bool {
        let settings = &self.store.write;
        settings.seal == SealPolicy::OnClose
            && self.look(|content| {
                content.modified().is_none()
                    && (!content.is_whole()
                        || self.shares.load(Relaxed) && content.size() <= settings.seal_max_bytes)
            })
    }

    /// Notes that a writer has closed it: whoever closes it last has it sealed.
    pub(crate) fn await_seal(&self) {
        self.awaits_seal.store(true, SeqCst);
    }

    /// Begins an attempt to seal it; false where no writer has closed it since the last one.
    pub(crate) fn begin_seal(&self) -> bool {
        self.awaits_seal.swap(false, SeqCst)
    }

    /// Whether bytes were shared with another file since the last write.
    pub(crate) fn shares(&self) -> bool {
        self.shares.load(Relaxed)
    }

    /// Notes a change that left no bytes, such as the creation of an empty file.
    pub(crate) fn touch(&self) {
        self.content.write().touch(self.store.now());
        self.is_touched.store(true, SeqCst);
    }

    /// Has `set` tell the tree of another mtime, which a pending commit would otherwise set to the time of the last write. One that
    /// is being made is waited for: the later of the two calls stays.
    pub(crate) async fn set_mtime<T>(&self, mtime: Timestamp, set: impl Future<Output = T>) -> T {
        let _turn = self.times.lock().await;
        {
            let mut content = self.content.write();
            if content.modified().is_some() {
                content.set_mtime(mtime);
            }
        }
        set.await
    }

    /// Notes when the file was read.
    pub(crate) fn note_access(&self, now: Timestamp) {
        *self.accessed.lock() = Some(now);
    }

    /// When the file was read, if the tree was not told yet.
    pub(crate) fn accessed(&self) -> Option<Timestamp> {
        *self.accessed.lock()
    }

    /// The tree knows of all accesses up to `told`.
    pub(crate) fn forget_access(&self, told: Timestamp) {
        self.accessed.lock().take_if(|accessed| *accessed <= told);
    }

    /// Edits the content in the writers' turn, for a handle as [`Self::write`].
    pub(crate) async fn edit(&self, told: &Told, edit: impl FnOnce(&mut Content)) -> Result<()> {
        let mut writer = self.writer.lock().await;
        self.check_kept(told)?;
        self.edit_now(&mut writer, edit).await
    }

    /// The same for who has the turn.
    async fn edit_now(&self, writer: &mut Writer, edit: impl FnOnce(&mut Content)) -> Result<()> {
        self.finish_stream(writer).await?;
        edit(&mut self.content.write());
        writer.gaps.clear();
        if self.look(Content::dirty) == 0 {
            // What was written and cut off again is in memory no more.
            writer.permits.clear();
        }
        self.discard_superseded();
        Ok(())
    }

    /// Commits everything written so far, if `may` says so when the turn has come: a write that came in before has noted who
    /// makes it. What failed since this handle was `told` last is told here, once.
    pub(crate) async fn flush_if(&self, told: &Told, may: impl FnOnce() -> bool) -> Result<()> {
        let mut writer = self.writer.lock().await;
        if !may() {
            return Ok(());
        }
        self.tell_failure(told)?;
        if self.is_ending(&writer).await {
            return Ok(());
        }
        let committed = self.commit_all(&mut writer).await;
        // One that lost bytes is told here and now.
        committed.or_else(|error| self.failures.tell(told).and(Err(error)))
    }

    /// Whether there is nothing to commit, as nobody could find it once the last handle is gone, until when it is in memory here:
    /// [`forebay_metadata::tree::LocalTree::is_ending`]. To ask who serves the tree elsewhere would cost as much as it spares.
    async fn is_ending(&self, writer: &Writer) -> bool {
        let is_ending = match self.store.tree.local() {
            Some(tree) if writer.stream.is_none() => tree.is_ending(self.ino).await.unwrap_or(false),
            _ => false,
        };
        self.has_pages.fetch_and(!is_ending, SeqCst);
        is_ending
    }

    /// Brings inline bytes into the store and commits the layout.
    async fn commit(&self, writer: &mut Writer) -> Result<()> {
        if self.look(Content::modified).is_none() || self.is_retired() {
            return Ok(());
        }
        let whole = self.look(Content::whole_inline);
        match whole {
            Some(parts) => {
                let stored = self.store.put_whole(self.ino, join(parts)).await?;
                self.replace_layout(stored.layout.clone()).await?;
                writer.permits.clear();
                Ok(())
            }
            None => {
                // What lay in a blob of its own may have been moved since, and that deleted.
                self.keep_up().await;
                self.pack(writer).await?;
                match self.replace_layout(self.look(|content| content.layout().clone())).await {
                    // What was written lies over bytes that are gone: trying again would never do.
                    Err(error) if error.kind() == ErrorKind::Stale => {
                        tracing::error!(ino = %self.ino, %error, "lost written bytes: what they were written over was replaced");
                        self.failures.record(error.duplicate());
                        self.fall_back(writer).await;
                        Err(error)
                    }
                    committed => committed,
                }
            }
        }
    }

    /// Commits `layout` as the file's next content, over whatever the tree holds by now.
    async fn replace_layout(&self, mut layout: FileLayout) -> Result<()> {
        let turn = self.times.lock().await;
        let (mut base, mut generation, modified) =
            self.look(|content| (content.base().clone(), content.generation(), content.modified()));
        let mtime = modified.unwrap_or_else(|| self.store.now());
        let tree = &self.store.tree;
        let mut attempt = 1;
        let committed = loop {
            match tree.commit_layout(self.ino, generation, layout.clone(), mtime).await {
                Err(error) if error.kind() == ErrorKind::Conflict && attempt < COMMIT_ATTEMPTS => {
                    let (mut now, mut current) = tree.layout(self.ino).await?;
                    if (&now, current) == (&base, generation) {
                        // An upload that was lost may have come to what this is based on.
                        tree.settle(self.ino).await?;
                        (now, current) = tree.layout(self.ino).await?;
                        if (&now, current) == (&base, generation) {
                            if tree.is_in_doubt(self.ino).await? {
                                // It may come still, to what would be synced then.
                                let aside = self.store.put_aside(self.ino, &layout).await?;
                                self.note_early(&aside);
                                layout = FileLayout::of_blob(aside);
                            }
                            attempt += 1;
                            continue;
                        }
                    }
                    let same_bytes = current == generation;
                    if !same_bytes && layout.size() == 0 && now.size() == 0 {
                        // Emptied here and elsewhere, as lock files are by all who try them.
                        self.store.settled(self.ino);
                        *self.content.write() = Content::committed(now, current);
                        return Ok(());
                    }
                    layout = rebase(layout, &base, &now, same_bytes).ok_or_else(|| stale(error))?;
                    (base, generation) = (now, current);
                    attempt += 1;
                }
                committed => break committed?,
            }
        };
        let is_own = layout.single_blob().is_some();
        // While it counts as uncommitted, nobody else opens the file anew and stages what is not committed yet.
        self.store.settled(self.ino);
        self.content.write().commit(layout, committed.generation);
        drop(turn);
        self.shares.store(false, Relaxed);
        self.store.unsealed.forget(self.ino);
        if !is_own {
            self.keep_up().await;
        }
        Ok(())
    }

    /// Goes on from where the tree has the bytes before and after a commit: objects may have been moved. Goes on as before if
    /// the tree cannot tell: who finds bytes gone asks it again. The caller has the turn.
    async fn keep_up(&self) {
        let counted = self.store.tree.local().map(LocalTree::relocations);
        if counted.is_some() && counted == self.look(Content::relocations) {
            return;
        }
        if let Err(error) = self.take_over_as(counted).await {
            tracing::debug!(ino = %self.ino, %error, "what was committed may have been moved");
        }
    }
}

/// `layout`, which was made of new bytes and of `base`, after the tree went over to `now`: another place of the same
/// bytes, or an outsider's object. Where nothing of `base` is left the last writer wins; `None` where an outsider took
/// away what is needed.
fn rebase(layout: FileLayout, base: &FileLayout, now: &FileLayout, same_bytes: bool) -> Option<FileLayout> {
    if layout.size() == 0 && !same_bytes {
        // An empty object stood for it, of which no byte is needed.
        return Some(FileLayout::default());
    }
    let of_base: HashSet<&Blob> = base.blobs().collect();
    if !layout.blobs().any(|blob| of_base.contains(blob)) {
        return (!same_bytes).then_some(layout);
    }
    (same_bytes && base != now).then(|| layout.moved_into(base, now))
}

fn stale(conflict: Error) -> Error {
    Error::new(ErrorKind::Stale, "the file was replaced in the bucket while it was being written")
        .with_source(conflict)
}

#[cfg(test)]
mod tests {
    use forebay_core::{ObjectKey, Version};

    use super::*;

    fn layout(version: &str, size: u64) -> FileLayout {
        FileLayout::of_blob(Blob { key: ObjectKey::new("a"), version: Version::new(version), size })
    }

    /// A file that two hosts emptied, or one emptied that was empty while another one wrote to it: ESTALE, as if bytes were gone.
    #[test]
    fn what_is_emptied_needs_nothing_that_was_there() {
        let (empty, now) = (layout("v1", 0), layout("v2", 9));
        assert_eq!(rebase(empty.clone(), &empty, &now, false), Some(FileLayout::default()));
        assert_eq!(rebase(empty.clone(), &empty, &layout("v2", 0), true), Some(layout("v2", 0)), "moved");
        let mut grown = layout("v1", 5);
        grown.truncate(7);
        assert_eq!(rebase(grown, &layout("v1", 5), &now, false), None, "what was there is needed");
    }
}
