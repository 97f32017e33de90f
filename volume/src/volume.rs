//! A volume as one mount or command uses it: its tree, with the state of files that are open here laid over it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use forebay_cache::Blocks;
use forebay_core::{Attributes, BlockKey, Error, ErrorKind, FileKind, InodeId, Result, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::mem::Budget;
use forebay_io::object::Bucket;
use forebay_io::task::TaskGroup;
use forebay_metadata::remote::Server;
use forebay_metadata::tree::{DirectoryPage, LocalTree, Lookup, SetAttributes, Tree};
use forebay_metadata::volume_file::Claim;
use futures::stream::{self, StreamExt};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::content::Content;
use crate::discards::Discards;
use crate::fetch::Fetch;
use crate::inode::OpenInode;
use crate::prefetch::directory::Walks;
use crate::prefetch::{PrefetchSettings, Readers};
use crate::segments::Segments;
use crate::settings::WriteSettings;
use crate::staging::{Staging, Uploads, WritebackSettings};
use crate::standby::Standby;
use crate::store::Store;
use crate::unsealed::Unsealed;
use table::OpenTable;

mod ahead;
mod names;
mod opening;
mod sharing;
mod table;

/// Files that are sealed at once: each holds one upload's buffers.
const SEALS_AT_ONCE: usize = 2;
/// Open files that are committed at once where all are: a round trip or more each.
const COMMITS_AT_ONCE: usize = 16;

/// How long a close waits for files that are being sealed; what is left stays readable through Forebay.
const CLOSE_DEADLINE: Duration = Duration::from_secs(60);

/// What a volume is made of.
#[derive(Debug)]
pub struct Parts {
    /// Names, attributes, layouts.
    pub tree: Arc<dyn Tree>,
    /// Cached blocks of blobs.
    pub blocks: Arc<dyn Blocks>,
    /// The objects.
    pub bucket: Bucket,
    /// Names the volume in block keys.
    pub volume: VolumeId,
    /// Whether changes are refused.
    pub read_only: bool,
    /// The right to write to the bucket; none where the tree's own lock keeps others out.
    pub claim: Option<Arc<Claim>>,
    /// How files are written.
    pub write: WriteSettings,
    /// Whether the store copies ranges of objects into new ones, and only of the version meant.
    pub part_copy: bool,
    /// Where written bytes are staged, if they are or were.
    pub writeback: Option<Writeback>,
    /// How far readers are served ahead.
    pub prefetch: PrefetchSettings,
    /// The ceiling on bytes in flight.
    pub budget: Budget,
    /// What runs in the background ends with this group.
    pub tasks: TaskGroup,
    /// Gives the times of changes.
    pub clock: Clock,
    /// What serves the tree to other mounts, if it is.
    pub server: Option<Server>,
    /// What takes the volume over when the process that serves its tree is lost, if anything does.
    pub standby: Option<Standby>,
}

/// What is staged on this host, and how that is done.
#[derive(Debug)]
pub struct Writeback {
    pub(crate) staging: Arc<Staging>,
    pub(crate) settings: WritebackSettings,
}

/// A volume in use.
#[derive(Debug)]
pub struct Volume {
    store: Arc<Store>,
    read_only: bool,
    open: Mutex<OpenTable>,
    fills: Arc<Semaphore>,
    walks: Mutex<Walks>,
    windows: Arc<Semaphore>,
    pub(crate) readers: Arc<Readers>,
    pub(crate) seals: Semaphore,
    claim: Mutex<Option<Arc<Claim>>>,
    pub(crate) budget: Budget,
    tasks: TaskGroup,
    pub(crate) server: Option<Server>,
    standby: Mutex<Option<Standby>>,
    /// Nobody uses it any more; what is staged is being uploaded.
    pub(crate) ending: AtomicBool,
}

/// What came of giving back a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// It is counted off.
    Counted,
    /// It goes on, to seal the file.
    Seals,
    /// It goes on, to commit what a mapping wrote: nobody would be told that it was lost.
    Commits,
    /// It is the last one of a file with uncommitted bytes.
    Pending,
    /// It was not open.
    Gone,
}

/// The tree where it is served in this process.
///
/// # Errors
/// `Unsupported` when it is served elsewhere.
pub(crate) fn local(volume: &Volume) -> Result<&LocalTree> {
    let elsewhere = || match volume.tree().remote() {
        Some(tree) => tree.elsewhere("this is done"),
        None => Error::new(ErrorKind::Unsupported, "the tree of this volume is served elsewhere"),
    };
    volume.tree().local().ok_or_else(elsewhere)
}

impl Volume {
    /// Joins the parts.
    pub fn assemble(parts: Parts) -> Arc<Self> {
        let staging = parts.writeback.as_ref().map(|writeback| writeback.staging.clone());
        let uploads = parts.writeback.map(|Writeback { staging, settings }| {
            Uploads::new(staging, settings, parts.clock.clone(), &parts.budget)
        });
        let fetch = Fetch { volume: parts.volume, blocks: parts.blocks, staging };
        let (tree, bucket, tasks) = (parts.tree.clone(), parts.bucket.clone(), parts.tasks.clone());
        let discards = Discards::new(tree.clone(), tasks.clone());
        let segments = Segments::new(tree, bucket, fetch.clone(), tasks);
        let store = Store {
            tree: parts.tree,
            bucket: parts.bucket,
            fetch,
            segments,
            write: parts.write,
            part_copy: parts.part_copy,
            prefetch: parts.prefetch,
            clock: parts.clock,
            uploads: uploads.clone(),
            unsealed: Unsealed::default(),
            discards,
        };
        let readers = Readers::new(&store.prefetch);
        let volume = Arc::new(Self {
            walks: Mutex::new(Walks::new(&store.prefetch, &readers)),
            readers,
            store: Arc::new(store),
            read_only: parts.read_only,
            open: Mutex::default(),
            fills: Arc::new(Semaphore::new(ahead::FILLS_AT_ONCE)),
            windows: Arc::new(Semaphore::new(ahead::WINDOWS_AT_ONCE)),
            seals: Semaphore::new(SEALS_AT_ONCE),
            claim: Mutex::new(parts.claim),
            budget: parts.budget,
            tasks: parts.tasks,
            server: parts.server,
            standby: Mutex::new(parts.standby),
            ending: AtomicBool::new(false),
        });
        if let Some(uploads) = uploads {
            uploads.start(&volume, &volume.tasks);
        }
        volume
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Whether changes are refused.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The tree, for everything about names that open files have no part in.
    pub fn tree(&self) -> &Arc<dyn Tree> {
        &self.store.tree
    }

    /// The cached blocks.
    pub fn blocks(&self) -> &Arc<dyn Blocks> {
        &self.store.fetch.blocks
    }

    /// The objects.
    pub fn bucket(&self) -> &Bucket {
        &self.store.bucket
    }

    /// Bytes of what is written that may be in memory.
    pub fn write_bytes(&self) -> u64 {
        self.budget.ceiling()
    }

    /// The blocks that hold the committed content of a file, in file order.
    pub async fn block_keys(&self, ino: InodeId) -> Result<Vec<BlockKey>> {
        let (layout, _) = self.store.tree.layout(ino).await?;
        Ok(self.store.fetch.keys(&layout, 0..layout.size()))
    }

    /// Finds `name` in `parent`.
    pub async fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Lookup> {
        loop {
            let gone = self.gone();
            let found = self.store.tree.lookup(parent, name).await?;
            if let Some(found) = self.overlay_lookup(found, gone) {
                return Ok(found);
            }
        }
    }

    /// The same if it can be told without waiting.
    pub fn lookup_now(&self, parent: InodeId, name: &[u8]) -> Option<Result<Lookup>> {
        let gone = self.gone();
        let found = self.store.tree.lookup_now(parent, name)?;
        found.map(|found| self.overlay_lookup(found, gone)).transpose()
    }

    /// Attributes of an inode.
    pub async fn attributes(&self, ino: InodeId) -> Result<Attributes> {
        loop {
            let gone = self.gone();
            let found = self.store.tree.attributes(ino).await?;
            if let Some(attributes) = self.overlay(found, gone) {
                return Ok(attributes);
            }
        }
    }

    /// The same if they can be told without waiting.
    pub fn attributes_now(&self, ino: InodeId) -> Option<Result<Attributes>> {
        let gone = self.gone();
        let found = self.store.tree.attributes_now(ino)?;
        found.map(|attributes| self.overlay(attributes, gone)).transpose()
    }

    /// Entries of a directory, as [`Tree::read_directory`].
    pub async fn read_directory(
        &self,
        ino: InodeId,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<DirectoryPage> {
        let gone = self.gone();
        let mut page = self.store.tree.read_directory(ino, after, limit).await?;
        if self.open.lock().is_unchanged(gone) {
            return Ok(page);
        }
        for entry in &mut page.entries {
            match self.shown(entry.attributes.clone(), gone).await {
                Ok(attributes) => entry.attributes = attributes,
                // Removed since; its name was still there.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(page)
    }

    /// Changes attributes; `size` truncates or extends the file.
    pub async fn set_attributes(
        self: &Arc<Self>,
        ino: InodeId,
        changes: SetAttributes,
        size: Option<u64>,
    ) -> Result<Attributes> {
        if let Some(size) = size {
            self.truncate(ino, size).await?;
        }
        if let (Some(_), Some(inode)) = (changes.atime, self.find_open(ino)) {
            inode.forget_access(self.store.now());
        }
        if changes == SetAttributes::default() {
            return self.attributes(ino).await;
        }
        let gone = self.gone();
        let (mtime, tree) = (changes.mtime, &self.store.tree);
        let changed = match (mtime, self.find_open(ino)) {
            (Some(mtime), Some(inode)) => inode.set_mtime(mtime, tree.set_attributes(ino, changes)).await?,
            _ => tree.set_attributes(ino, changes).await?,
        };
        self.shown(changed, gone).await
    }

    /// truncate(2) by inode. Where nobody has the file open for writing, committed at once, under a handle of its own:
    /// one that the caller has closed may still be on its way out here, and nothing would commit the change after it.
    /// O_TRUNC comes this way, too, and is committed with what is written next.
    async fn truncate(self: &Arc<Self>, ino: InodeId, size: u64) -> Result<()> {
        let inode = self.acquire(ino).await?;
        let truncated = inode.truncate(size).await;
        let released = self.release(&inode, true).await;
        truncated.and(released)
    }

    /// Everything written and changed so far is in the bucket on return, but for what was lost before: that is for those
    /// who wrote it.
    pub async fn sync(&self) -> Result<()> {
        self.commit_open().await.and(self.store.sync_tree().await).and(self.tell_loss(sharing::ALL))
    }

    /// Commits what was written to open files so far. One that fails keeps no other from that.
    pub(crate) async fn commit_open(&self) -> Result<()> {
        let commits = stream::iter(self.open_inodes()).map(async |inode| inode.commit_now().await);
        let told = commits.buffered(COMMITS_AT_ONCE);
        told.fold(Ok(()), async |outcome, committed| outcome.and(committed)).await
    }

    /// The numbers of the inodes that are open.
    pub fn open_numbers(&self) -> Vec<InodeId> {
        self.open.lock().all().map(|inode| inode.ino()).collect()
    }

    pub(crate) fn open_inodes(&self) -> Vec<Arc<OpenInode>> {
        self.open_inodes_that(|_| true)
    }

    pub(crate) fn open_inodes_that(&self, are_meant: impl Fn(&OpenInode) -> bool) -> Vec<Arc<OpenInode>> {
        self.open.lock().all().filter(|inode| are_meant(inode)).cloned().collect()
    }

    /// Commits what was written to a file so far, if it is open here, once it is not being sealed.
    pub(crate) async fn commit(&self, ino: InodeId) -> Result<()> {
        let Some(inode) = self.find_open(ino) else { return Ok(()) };
        drop(inode.turn().await);
        inode.commit_now().await
    }

    pub(crate) fn tasks(&self) -> &TaskGroup {
        &self.tasks
    }

    /// Brings a file that lies in owned blobs to its own path; false where that is not free.
    pub(crate) async fn unpack(self: &Arc<Self>, ino: InodeId) -> Result<bool> {
        let inode = self.acquire(ino).await?;
        let unpacked = inode.unpack().await;
        self.release(&inode, false).await?;
        unpacked
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.store.clock
    }

    /// Says that the volume is about to be closed, so that who wants it waits for that.
    pub async fn say_ending(&self) {
        let claim = self.claim.lock().clone();
        if let Some(claim) = claim {
            claim.say_ending().await;
        }
    }

    /// Commits everything, waits for what runs in the background, and closes the tree. What is staged stays so: see
    /// [`Self::drain`].
    pub async fn close(&self) -> Result<()> {
        self.say_ending().await;
        let synced = self.sync().await;
        if let (Err(_), false) = (&synced, self.is_shared()) {
            return synced;
        }
        // Others wait for what this process has, whatever became of its own files.
        if let Some(server) = &self.server {
            server.stop().await;
        }
        self.tasks.shutdown(CLOSE_DEADLINE).await;
        self.tell_of_discards().await;
        let closed = self.store.tree.close().await;
        let standby = self.standby.lock().take();
        if let Some(standby) = standby {
            standby.end().await;
        }
        synced.and(closed)?;
        if let Some(staging) = self.staging() {
            staging.close();
        }
        let claim = self.claim.lock().take();
        match claim.and_then(Arc::into_inner) {
            Some(claim) => claim.release().await,
            None => Ok(()),
        }
    }

    /// Has the tree know of all blobs that nobody names.
    pub(crate) async fn tell_of_discards(&self) {
        if let Err(error) = self.store.discards.tell_all().await {
            tracing::debug!(%error, "blobs that nobody names are told of later, or left to gc");
        }
    }

    /// Takes back one handle. The last one of a rewritten file goes to the background, which seals and then returns
    /// it: the inode stays open meanwhile, so that all who come share its one state.
    pub(crate) async fn release(self: &Arc<Self>, inode: &Arc<OpenInode>, written: bool) -> Result<()> {
        let ino = inode.ino();
        let told = match inode.accessed() {
            Some(accessed) => {
                self.store.tree.accessed(ino, accessed).await.map(|()| inode.forget_access(accessed))
            }
            None => Ok(()),
        };
        // Where written bytes are staged, sealing brings them in.
        let uploads = self.store.uploads.as_ref();
        let is_staged = uploads.is_some_and(|uploads| uploads.brings_in(ino)) && !inode.shares();
        let behind = is_staged && written && inode.needs_seal();
        if written {
            // Before the handle goes: a reader's may be the last one.
            inode.await_seal();
        }
        let mut left = self.leave(inode, !is_staged, false);
        if left == Left::Pending {
            // Others may be committing it: nothing of that may come after what the next to open the file writes.
            let _turn = inode.turn().await;
            left = self.leave(inode, !is_staged, true);
        }
        if left == Left::Gone {
            return told;
        }
        if left == Left::Seals {
            self.seal_behind(inode.clone());
            return told;
        }
        if left == Left::Commits {
            self.commit_behind(inode.clone());
            return told;
        }
        let closed = self.store.tree.closed(ino).await;
        if written && let Some(uploads) = uploads {
            uploads.closed(ino, behind);
        }
        told.and(closed)
    }

    /// Counts one handle off, unless it is the last one and the file is to be sealed, if it `may_seal`, or has something
    /// uncommitted, which takes the writers' turn.
    fn leave(&self, inode: &OpenInode, may_seal: bool, has_turn: bool) -> Left {
        let mut open = self.open.lock();
        let Some(opened) = open.get_mut(inode.ino()) else { return Left::Gone };
        if opened.handles > 1 {
            opened.handles -= 1;
            return Left::Counted;
        }
        if may_seal && inode.needs_seal() && inode.begin_seal() {
            return Left::Seals;
        }
        if !has_turn && inode.look(Content::modified).is_some() {
            return Left::Pending;
        }
        if has_turn && inode.has_pages() && inode.look(Content::modified).is_some() {
            return Left::Commits;
        }
        inode.retire();
        open.remove(inode.ino());
        // While nobody can begin to write: what was not committed by now never will be.
        self.store.settled(inode.ino());
        Left::Counted
    }

    /// How many inodes were open and are not any more.
    pub(crate) fn gone(&self) -> u64 {
        self.open.lock().gone()
    }

    /// How many handles of an inode are open here.
    pub(crate) fn handles(&self, ino: InodeId) -> usize {
        self.open.lock().handles(ino)
    }

    fn find_open(&self, ino: InodeId) -> Option<Arc<OpenInode>> {
        self.open.lock().get(ino).cloned()
    }

    /// As [`Self::overlay`]; asks the tree again where that cannot tell.
    async fn shown(&self, attributes: Attributes, gone: u64) -> Result<Attributes> {
        let ino = attributes.ino;
        match self.overlay(attributes, gone) {
            Some(attributes) => Ok(attributes),
            None => self.attributes(ino).await,
        }
    }

    fn overlay_lookup(&self, lookup: Lookup, gone: u64) -> Option<Lookup> {
        match lookup {
            Lookup::Found(attributes) => self.overlay(attributes, gone).map(Lookup::Found),
            Lookup::Miss => Some(Lookup::Miss),
        }
    }

    /// Shows the size and times that pending writes will commit, and the size of a commit that the tree's answer came
    /// just before: a kernel that is told an older size cuts what it holds of the file. The tree was asked after `gone` inodes
    /// were closed; `None` where this one was closed since, so that nothing tells whether the answer is from before its last
    /// commit.
    fn overlay(&self, mut attributes: Attributes, gone: u64) -> Option<Attributes> {
        if attributes.kind != FileKind::File {
            return Some(attributes);
        }
        let inode = {
            let open = self.open.lock();
            match open.get(attributes.ino) {
                Some(inode) => inode.clone(),
                None => return (!open.is_gone_since(attributes.ino, gone)).then_some(attributes),
            }
        };
        if let Some(accessed) = inode.accessed()
            && attributes.access_is_due(accessed)
        {
            attributes.atime = accessed;
        }
        inode.look(|content| {
            if let Some(mtime) = content.modified() {
                attributes.size = content.size();
                attributes.allocated = content.allocated();
                attributes.mtime = mtime;
                attributes.ctime = attributes.ctime.max(content.changed());
            } else if content.generation() > attributes.generation {
                attributes.size = content.size();
                attributes.allocated = content.allocated();
            }
        });
        Some(attributes)
    }
}
