//! A tree that cannot be asked for a layout right after each commit, and is there again then; and whose answers can be held
//! up.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Attributes, Error, ErrorKind, FileLayout, InodeId, ObjectKey, Result, Timestamp};
use parking_lot::Mutex;
use tokio::sync::Notify;

use forebay_metadata::tree::{
    Blocker, CloneGuide, Cloned, DirectoryPage, Existing, LocalTree, Lock, LockAnswer, LockRange, Lookup,
    NewInode, OutsideChanges, Placement, Removed, RenameMode, SegmentPin, SetAttributes, Statistics, Tree,
    XattrMode,
};

/// What the tree says of any file's bytes instead of what it has.
pub(crate) type Older = Arc<Mutex<Option<(FileLayout, u64)>>>;

/// Holds up the next answer of the tree that says what a file is, or the next commit on its way there.
#[derive(Debug, Default)]
pub(crate) struct HeldUp {
    is_set: AtomicBool,
    is_set_for_commit: AtomicBool,
    is_lucky: AtomicBool,
    layouts: AtomicU64,
    asked: Notify,
    goes_on: Notify,
}

impl HeldUp {
    pub(crate) fn set(&self) {
        self.is_set.store(true, SeqCst);
    }

    pub(crate) fn set_for_commit(&self) {
        self.is_set_for_commit.store(true, SeqCst);
    }

    /// Has the tree answer after commits as well.
    pub(crate) fn be_lucky(&self) {
        self.is_lucky.store(true, SeqCst);
    }

    /// How often the tree was asked for a layout.
    pub(crate) fn layouts(&self) -> u64 {
        self.layouts.load(SeqCst)
    }

    /// Returns when the tree has answered what is held up, or a commit is.
    pub(crate) async fn reached(&self) {
        self.asked.notified().await;
    }

    pub(crate) fn go_on(&self) {
        self.goes_on.notify_one();
    }

    async fn pass(&self) {
        self.wait_if(&self.is_set).await;
    }

    async fn wait_if(&self, is_set: &AtomicBool) {
        if is_set.swap(false, SeqCst) {
            self.asked.notify_one();
            self.goes_on.notified().await;
        }
    }
}

/// Passes everything on.
#[derive(Debug)]
pub(crate) struct Unlucky {
    tree: LocalTree,
    fails: AtomicBool,
    /// Whether no file can be opened, or have its bytes moved.
    refuses: Arc<AtomicBool>,
    held_up: Arc<HeldUp>,
    older: Older,
}

impl Unlucky {
    pub(crate) fn new(tree: LocalTree, refuses: Arc<AtomicBool>, held_up: Arc<HeldUp>, older: Older) -> Self {
        Self { tree, fails: AtomicBool::default(), refuses, held_up, older }
    }
}

#[async_trait]
impl Tree for Unlucky {
    async fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Lookup> {
        let answer = self.tree.lookup(parent, name).await;
        self.held_up.pass().await;
        answer
    }

    fn lookup_now(&self, parent: InodeId, name: &[u8]) -> Option<Result<Lookup>> {
        self.tree.lookup_now(parent, name)
    }

    async fn attributes(&self, ino: InodeId) -> Result<Attributes> {
        let answer = self.tree.attributes(ino).await;
        self.held_up.pass().await;
        answer
    }

    fn attributes_now(&self, ino: InodeId) -> Option<Result<Attributes>> {
        self.tree.attributes_now(ino)
    }

    async fn read_directory(
        &self,
        ino: InodeId,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<DirectoryPage> {
        let answer = self.tree.read_directory(ino, after, limit).await;
        self.held_up.pass().await;
        answer
    }

    async fn parent(&self, ino: InodeId) -> Result<InodeId> {
        self.tree.parent(ino).await
    }

    async fn layout(&self, ino: InodeId) -> Result<(FileLayout, u64)> {
        self.held_up.layouts.fetch_add(1, SeqCst);
        if let Some(older) = self.older.lock().clone() {
            return Ok(older);
        }
        match self.fails.swap(false, SeqCst) && !self.held_up.is_lucky.load(SeqCst) {
            true => Err(Error::new(ErrorKind::Unavailable, "the tree is not there")),
            false => self.tree.layout(ino).await,
        }
    }

    async fn files_after(&self, ino: InodeId, limit: usize) -> Result<Vec<(InodeId, FileLayout)>> {
        self.tree.files_after(ino, limit).await
    }

    async fn read_link(&self, ino: InodeId) -> Result<Bytes> {
        self.tree.read_link(ino).await
    }

    async fn create(
        &self,
        parent: InodeId,
        name: &[u8],
        new: NewInode,
        existing: Existing,
    ) -> Result<(Attributes, bool)> {
        self.tree.create(parent, name, new, existing).await
    }

    async fn link(&self, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        self.tree.link(ino, parent, name).await
    }

    async fn unlink(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>> {
        self.tree.unlink(parent, name).await
    }

    async fn remove_directory(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>> {
        self.tree.remove_directory(parent, name).await
    }

    async fn rename(
        &self,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        mode: RenameMode,
    ) -> Result<Option<Removed>> {
        self.tree.rename(from, to, mode).await
    }

    async fn set_attributes(&self, ino: InodeId, changes: SetAttributes) -> Result<Attributes> {
        let answer = self.tree.set_attributes(ino, changes).await;
        self.held_up.pass().await;
        answer
    }

    async fn accessed(&self, ino: InodeId, atime: Timestamp) -> Result<()> {
        self.tree.accessed(ino, atime).await
    }

    async fn xattr(&self, ino: InodeId, name: &[u8]) -> Result<Bytes> {
        self.tree.xattr(ino, name).await
    }

    async fn xattrs(&self, ino: InodeId) -> Result<Vec<Bytes>> {
        self.tree.xattrs(ino).await
    }

    async fn set_xattr(&self, ino: InodeId, name: &[u8], value: Bytes, mode: XattrMode) -> Result<()> {
        self.tree.set_xattr(ino, name, value, mode).await
    }

    async fn remove_xattr(&self, ino: InodeId, name: &[u8]) -> Result<()> {
        self.tree.remove_xattr(ino, name).await
    }

    async fn opened(&self, ino: InodeId) -> Result<(FileLayout, u64)> {
        if self.refuses.load(SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "the tree is not there"));
        }
        let opened = self.tree.opened(ino).await?;
        Ok(self.older.lock().clone().unwrap_or(opened))
    }

    async fn closed(&self, ino: InodeId) -> Result<()> {
        self.tree.closed(ino).await
    }

    async fn lock(&self, ino: InodeId, lock: Lock, waits: bool) -> Result<LockAnswer> {
        self.tree.lock(ino, lock, waits).await
    }

    async fn blocker(&self, ino: InodeId, lock: Lock) -> Result<Option<Blocker>> {
        self.tree.blocker(ino, lock).await
    }

    async fn unlock(&self, ino: InodeId, owner: u64, range: LockRange) -> Result<()> {
        self.tree.unlock(ino, owner, range).await
    }

    async fn reserve(&self, ino: InodeId, size: u64) -> Result<()> {
        self.tree.reserve(ino, size).await
    }

    async fn place(&self, ino: InodeId, seals: bool) -> Result<Placement> {
        self.tree.place(ino, seals).await
    }

    async fn doubt(&self, ino: InodeId) -> Result<()> {
        self.tree.doubt(ino).await
    }

    async fn is_in_doubt(&self, ino: InodeId) -> Result<bool> {
        self.tree.is_in_doubt(ino).await
    }

    async fn settle(&self, ino: InodeId) -> Result<()> {
        self.tree.settle(ino).await
    }

    fn fresh_blob(&self) -> ObjectKey {
        self.tree.fresh_blob()
    }

    async fn packs(&self, ino: InodeId) -> Result<bool> {
        self.tree.packs(ino).await
    }

    async fn has_object(&self, ino: InodeId) -> Result<bool> {
        self.tree.has_object(ino).await
    }

    fn fresh_segment(&self) -> SegmentPin {
        self.tree.fresh_segment()
    }

    async fn is_referred(&self, key: &ObjectKey) -> Result<bool> {
        self.tree.is_referred(key).await
    }

    async fn upload_started(&self, key: &ObjectKey, id: &str) -> Result<()> {
        self.tree.upload_started(key, id).await
    }

    async fn upload_ended(&self, id: &str) -> Result<()> {
        self.tree.upload_ended(id).await
    }

    async fn commit_layout(
        &self,
        ino: InodeId,
        expected: u64,
        layout: FileLayout,
        mtime: Timestamp,
    ) -> Result<Attributes> {
        self.held_up.wait_if(&self.held_up.is_set_for_commit).await;
        let committed = self.tree.commit_layout(ino, expected, layout, mtime).await?;
        self.fails.store(true, SeqCst);
        Ok(committed)
    }

    async fn commit_shared(
        &self,
        ino: InodeId,
        expected: u64,
        layout: FileLayout,
        mtime: Timestamp,
        lender: InodeId,
    ) -> Result<Attributes> {
        self.held_up.wait_if(&self.held_up.is_set_for_commit).await;
        let committed = self.tree.commit_shared(ino, expected, layout, mtime, lender).await?;
        self.fails.store(true, SeqCst);
        Ok(committed)
    }

    async fn clone_tree(
        &self,
        source: InodeId,
        to: (InodeId, &[u8]),
        guide: &dyn CloneGuide,
    ) -> Result<Cloned> {
        self.tree.clone_tree(source, to, guide).await
    }

    async fn relocate(&self, ino: InodeId, expected: u64, layout: FileLayout) -> Result<()> {
        if self.refuses.load(SeqCst) {
            return Err(Error::new(ErrorKind::Conflict, "the file has other content by now"));
        }
        self.tree.relocate(ino, expected, layout).await
    }

    async fn sync(&self) -> Result<()> {
        self.tree.sync().await
    }

    async fn statistics(&self) -> Result<Statistics> {
        self.tree.statistics().await
    }

    async fn refresh(&self, ino: InodeId) -> Result<()> {
        self.tree.refresh(ino).await
    }

    fn outside(&self) -> &OutsideChanges {
        self.tree.outside()
    }

    async fn close(&self) -> Result<()> {
        self.tree.close().await
    }

    fn local(&self) -> Option<&LocalTree> {
        self.tree.local()
    }
}
