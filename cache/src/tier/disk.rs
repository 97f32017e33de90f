//! The disk tier: one file a block, under a ceiling, for blocks of every size; survives the process.
//!
//! Promises: a damaged file is told from its block, dropped and counted; a disk that is full, unwritable, gone or hung
//! costs copies, never a read (but for small ones that waited on their callers' threads when it began to hang); pinned blocks are
//! not evicted. Files are not synced: after a power cut the checksum tells which ones made it.
//!
//! Small blocks are read on their callers' threads, as far as the kernel has them in memory or few of these threads wait. All else is
//! read by io_uring, where the kernel has that: no thread waits for their bytes, of which many are asked for at once. Large blocks go
//! past the page cache, unless it has them, as it has what a warmup fetched: else they are in memory twice, and copying them there
//! takes several times the processor time of the read.

use std::io::ErrorKind as Io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use forebay_core::{BlockKey, Error, ErrorKind, Result};
use forebay_io::files::is_want;
use forebay_io::task::{TaskGroup, blocking};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::block::{Block, BlockId};
use crate::demand::Demand;
use crate::flight::{Flights, Role, Ticket};
use crate::room::{Place, Room};
use crate::tier::directory::Directory;
use crate::tier::file::{self, ReadError};
use crate::tier::index::{self, Full, Index, Slot};
use crate::tier::others::Others;
use crate::tier::reader::Reader;
use crate::tier::stalls::Stalls;
use crate::{CacheSettings, Counters, Residency, Unpinned};

/// Files read at once, and written at once: threads that wait for the disk.
const CARRIERS: u32 = 32;

/// Deadlines of a read in that of a write: no reader waits for one, and a disk that works may hold up all of them until it
/// has written what others on the host gave it.
const WRITE_PATIENCE: u32 = 6;

/// After n failed writes in a row the next 2^n are not tried, up to 2^10.
const MAX_BACKOFF: u32 = 10;

/// Blocks on disk.
#[derive(Debug)]
pub(crate) struct DiskTier {
    directory: Directory,
    index: Mutex<Index>,
    others: Others,
    health: Mutex<Health>,
    stalls: Stalls,
    /// The same of writes, which the kernel may take while it reads nothing, and the other way round.
    late_writes: Stalls,
    /// Held while a pin changes, which takes several steps; by threads that may wait only.
    pinning: Mutex<()>,
    stores: Flights<()>,
    tasks: TaskGroup,
    /// Reads, which nobody waits for at the end: a disk that hangs may keep them.
    loads: TaskGroup,
    /// Blocks are also offered from threads outside the runtime.
    runtime: Handle,
    reads: Room,
    reader: Reader,
    writes: Room,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    hits: AtomicU64,
    writes: AtomicU64,
    skips: AtomicU64,
    failures: AtomicU64,
    corruptions: AtomicU64,
    evictions: AtomicU64,
}

/// Why there is no block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// Its copy was bad, and is gone now.
    Dropped,
    /// There is none, or it cannot be read for now.
    Unread,
}

/// Why a block was not written.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Full(#[from] Full),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl WriteError {
    /// The file system has no room, whatever the books say.
    fn disk_is_full(&self) -> bool {
        matches!(self, Self::Io(error) if matches!(error.kind(), Io::StorageFull | Io::QuotaExceeded))
    }
}

/// Whether writes work, counted in writes, not in time.
#[derive(Debug, Default)]
struct Health {
    failed: u32,
    skip: u32,
}

impl DiskTier {
    /// Opens the tier below the settings' directory, if they name one, and takes over what is there.
    pub(crate) async fn open(settings: &CacheSettings, tasks: &TaskGroup) -> Result<Option<Arc<Self>>> {
        let Some(root) = settings.directory.clone() else { return Ok(None) };
        let (given, mut index) =
            (settings.disk_bytes, Index::new(settings.disk_ceiling(), settings.pin_ceiling()));
        let others = Others::new(settings);
        let (directory, index, others) = blocking(move || {
            let directory = Directory::open(&root)?;
            if let Some(bytes) = given {
                directory.remember_ceiling(bytes);
            }
            let mut leave = Vec::new();
            directory.scan(|slot| leave.extend(index.adopt(slot)));
            leave.extend(index.settle());
            leave.iter().for_each(|slot| directory.remove(slot));
            let (bytes, memory, removed) = (index.used(), index.bytes(), leave.len());
            tracing::info!(directory = %directory.root().display(), bytes, memory, removed, "disk cache opened");
            let index = Mutex::new(index);
            others.give_way(&directory, &index);
            Ok::<_, Error>((directory, index, others))
        })
        .await??;
        Ok(Some(Arc::new(Self {
            directory,
            index,
            others,
            health: Mutex::default(),
            stalls: Stalls::new(Duration::from_millis(settings.disk_deadline_ms)),
            late_writes: Stalls::new(WRITE_PATIENCE * Duration::from_millis(settings.disk_deadline_ms)),
            pinning: Mutex::default(),
            stores: Flights::new("store", tasks.clone()),
            tasks: tasks.clone(),
            loads: TaskGroup::new("disk"),
            runtime: Handle::current(),
            reads: Room::new(settings.disk_read_bytes(), CARRIERS),
            reader: Reader::new(settings.io_uring),
            writes: Room::new(settings.store_bytes, CARRIERS),
            counts: Counts::default(),
        })))
    }

    /// Ends the use of the directory; the tier is empty from now on. A write that a disk holds up beyond this removes its
    /// file.
    pub(crate) fn close(&self) {
        self.index.lock().close();
        self.directory.unlock();
    }

    /// By what hosts that share blocks know those that lie here; `drawn` where that is not known yet.
    pub(crate) async fn share(self: &Arc<Self>, drawn: u64) -> Result<u64> {
        let own = self.clone();
        blocking(move || own.directory.share(drawn)).await
    }

    /// The block's file, if it is listed, without reading it or touching the order of eviction.
    pub(crate) fn peek(&self, key: &BlockKey) -> Option<Slot> {
        self.index.lock().peek(&BlockId::of(key))
    }

    /// Waits for a turn to read; `None` while the disk hangs.
    pub(crate) async fn admit(&self, key: &BlockKey, demand: &Demand) -> Option<Place> {
        if !self.stalls.may_ask() {
            return None;
        }
        let place = self.stalls.turn(self.reads.enter_for(demand, key.len())).await;
        if place.is_none() {
            self.missed();
        }
        place
    }

    /// A checked copy in memory of its own, or `None` when there is no good one, or none in time. A bad one is dropped.
    pub(crate) async fn read(self: &Arc<Self>, key: &BlockKey, place: Place) -> Option<Block> {
        self.index.lock().find(&BlockId::of(key))?;
        let block = self.load(key, place).await.ok()?;
        self.counts.hits.fetch_add(1, Relaxed);
        Some(block.compact())
    }

    /// A checked copy of a small block, read on the calling thread into a buffer that is only lent; `None` when there
    /// is no good one, or it is to wait for the disk and there is no turn for that, or the disk hangs.
    pub(crate) fn read_near(&self, key: &BlockKey) -> Option<Block> {
        let slot = self.index.lock().find(&BlockId::of(key))?;
        let path = self.directory.path(&slot);
        let block = self.reader.read_near(&path, key, slot.size, self.stalls.answers())?;
        self.counts.hits.fetch_add(1, Relaxed);
        Some(block)
    }

    /// Whether there is a good copy. A bad one is dropped. Does not touch the order of eviction.
    pub(crate) async fn verify(self: &Arc<Self>, key: &BlockKey) -> Residency {
        let Some(place) = self.admit(key, &Demand::later()).await else { return Residency::Absent };
        match self.load(key, place).await {
            Ok(_) => Residency::Disk,
            Err(Lost::Dropped) => Residency::Damaged,
            Err(Lost::Unread) => Residency::Absent,
        }
    }

    /// Loads within the deadline. The place is given back when the disk has answered, whoever still waits for it.
    async fn load(self: &Arc<Self>, key: &BlockKey, place: Place) -> Result<Block, Lost> {
        let (own, key, asked) = (self.clone(), key.clone(), Instant::now());
        let work = self.loads.spawn("load", async move {
            let _place = place;
            let block = own.load_file(&key).await;
            if own.stalls.answered(asked) {
                tracing::info!(directory = %own.directory.root().display(), "the disk cache answers again");
            }
            block
        });
        match self.stalls.answer(work).await {
            // A panic was logged where it happened; the next source is asked.
            Some(loaded) => loaded.unwrap_or(Err(Lost::Unread)),
            None => {
                self.missed();
                Err(Lost::Unread)
            }
        }
    }

    fn missed(&self) {
        if self.stalls.missed() {
            let directory = self.directory.root().display();
            tracing::warn!(%directory, "the disk cache does not answer; reads go on without it");
        }
    }

    /// Waits for what changes files, for as long as others of its kind are answered, and the deadline longer. What was begun
    /// goes on.
    ///
    /// # Errors
    /// `Unavailable` where the disk hangs.
    async fn in_time<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        if !self.late_writes.may_ask() {
            return Err(self.hangs());
        }
        if let Some(done) = self.late_writes.turn(work).await {
            return done;
        }
        if self.late_writes.missed() {
            let directory = self.directory.root().display();
            tracing::warn!(%directory, "the disk cache takes no blocks; they stay in memory only");
        }
        Err(self.hangs())
    }

    /// A change of files that was `asked` for then has ended, however.
    fn written(&self, asked: Instant) {
        if self.late_writes.answered(asked) {
            tracing::info!(directory = %self.directory.root().display(), "the disk cache takes blocks again");
        }
    }

    fn hangs(&self) -> Error {
        let message = format!("disk cache {} does not answer", self.directory.root().display());
        Error::new(ErrorKind::Unavailable, message)
    }

    async fn load_file(self: &Arc<Self>, key: &BlockKey) -> Result<Block, Lost> {
        let mut slot = self.peek(key).ok_or(Lost::Unread)?;
        loop {
            let error = match self.reader.read(self.directory.path(&slot), key, slot.size).await {
                Ok(block) => return Ok(block),
                Err(error) => error,
            };
            // Pinning renames files: one that is gone may have been listed anew, at most a few times.
            let now = self.peek(key).ok_or(Lost::Unread)?;
            if matches!(error, ReadError::Gone) && now != slot {
                slot = now;
                continue;
            }
            let count = match &error {
                ReadError::Damaged(_) => &self.counts.corruptions,
                ReadError::Gone | ReadError::Io(_) => &self.counts.failures,
            };
            count.fetch_add(1, Relaxed);
            if matches!(&error, ReadError::Io(error) if is_want(error)) {
                tracing::warn!(%key, %error, "a copy on disk cannot be read for now");
                return Err(Lost::Unread);
            }
            tracing::warn!(%key, %error, "a copy on disk is dropped");
            if self.index.lock().remove(&slot) {
                let own = self.clone();
                // One that stays is nobody's, and goes when the tier is opened again.
                blocking(move || own.directory.remove(&slot)).await.ok();
            }
            return Err(Lost::Dropped);
        }
    }

    /// For work that has no deadline of its own.
    ///
    /// # Errors
    /// `Unavailable` while the disk hangs.
    pub(crate) fn expect_answers(&self) -> Result<()> {
        if self.stalls.answers() && !self.late_writes.rests() { Ok(()) } else { Err(self.hangs()) }
    }

    /// Writes a block in the background, if it is not there and there is room on the way.
    pub(crate) fn offer(self: &Arc<Self>, key: &BlockKey, block: &Block) {
        if self.peek(key).is_some() {
            return;
        }
        let answers = self.stalls.answers() && self.late_writes.answers();
        let healthy = answers && self.health.lock().may_write();
        let Some(place) = healthy.then(|| self.writes.try_enter(key.len())).flatten() else {
            self.counts.skips.fetch_add(1, Relaxed);
            return;
        };
        let (own, key, block) = (self.clone(), key.clone(), block.clone());
        let write = async move {
            // A failure was counted and logged where it happened; the read that led here has its bytes.
            let _ = own.store(&key, block, false, Some(place)).await;
        };
        let _runtime = self.runtime.enter();
        self.tasks.spawn("offer", write);
    }

    /// The ceiling that was set, of all blocks or of those that are pinned.
    pub(crate) fn ceiling(&self, pin: bool) -> u64 {
        self.index.lock().ceiling(pin)
    }

    /// What a block takes of it.
    pub(crate) fn cost(key: &BlockKey) -> u64 {
        index::cost(file::size(key))
    }

    /// Refuses a pin that would not fit now.
    pub(crate) fn check_pin(&self, key: &BlockKey) -> Result<()> {
        self.index.lock().may_pin(BlockId::of(key), file::size(key)).map_err(no_room)
    }

    /// Sees to it that a block is on disk, pinned if asked.
    ///
    /// # Errors
    /// `NoSpace` at a ceiling or on a full disk; `Unavailable` while the disk hangs; what the file system says otherwise.
    pub(crate) async fn ensure(self: &Arc<Self>, key: &BlockKey, block: &Block, pin: bool) -> Result<()> {
        // Another caller's write may end unpinned, or be evicted at once: look again, but not for ever.
        for _ in 0..4 {
            self.expect_answers()?;
            match self.peek(key) {
                Some(slot) if !pin || slot.pinned => return Ok(()),
                Some(slot) => {
                    if self.set_pinned(slot, true).await? {
                        return Ok(());
                    }
                }
                None => {
                    if self.in_time(self.store(key, block.clone(), pin, None)).await? == Role::Led {
                        return Ok(());
                    }
                }
            }
        }
        let message = format!("{key} was evicted from disk as fast as it was written");
        Err(Error::new(ErrorKind::NoSpace, message).with_hint("give the cache a larger disk or pin less"))
    }

    /// The files that are pinned now.
    pub(crate) fn pinned(&self) -> Vec<Slot> {
        self.index.lock().pinned_slots()
    }

    /// Unpins a file that is pinned and still listed.
    pub(crate) async fn unpin(self: &Arc<Self>, slot: Slot) -> Result<Unpinned> {
        match slot.pinned && self.set_pinned(slot, false).await? {
            true => Ok(Unpinned { blocks: 1, bytes: slot.cost() }),
            false => Ok(Unpinned::default()),
        }
    }

    /// Pins or unpins a file; `false` when it is no longer listed.
    pub(crate) async fn set_pinned(self: &Arc<Self>, slot: Slot, pinned: bool) -> Result<bool> {
        let (own, asked) = (self.clone(), Instant::now());
        let change = blocking(move || {
            let changed = own.set_pinned_blocking(&slot, pinned);
            own.written(asked);
            changed
        });
        self.in_time(async { change.await? }).await
    }

    fn set_pinned_blocking(&self, slot: &Slot, pinned: bool) -> Result<bool> {
        let _turn = self.pinning.lock();
        let (old, new) = (self.directory.path(slot), self.directory.path(&Slot { pinned, ..*slot }));
        // A reader finds the block under whichever name the index shows: both exist while it changes.
        match std::fs::hard_link(&old, &new) {
            Ok(()) => {}
            Err(error) if error.kind() == Io::NotFound => return Ok(false),
            Err(error) => return Err(Error::from(error).context("pin of a cached block")),
        }
        let changed = self.index.lock().set_pinned(slot, pinned);
        let leaves = if matches!(changed, Ok(Some(_))) { *slot } else { Slot { pinned, ..*slot } };
        self.directory.remove(&leaves);
        Ok(changed.map_err(no_room)?.is_some())
    }

    /// Writes a block, once however many ask.
    async fn store(
        self: &Arc<Self>,
        key: &BlockKey,
        block: Block,
        pin: bool,
        place: Option<Place>,
    ) -> Result<Role> {
        let (own, key) = (self.clone(), key.clone());
        let id = BlockId::of(&key);
        // What was offered is in its reader's memory, and the kernel has it for the file that was read. What a warmup fetched is
        // to be read yet, and where the disk does not keep up, the page cache takes what would be skipped.
        let may_pass_cache = place.is_some();
        let work = move |ticket: Arc<Ticket<()>>| async move {
            let _place = match place {
                Some(place) => place,
                None => ticket.wait(own.writes.enter(key.len())).await?,
            };
            let asked = Instant::now();
            blocking(move || {
                let stored =
                    own.store_blocking(&key, &block, pin, may_pass_cache && own.writes.is_half_free());
                own.written(asked);
                stored
            })
            .await?
        };
        self.stores.join(id, &Demand::now(), work).await.map(|((), role)| role)
    }

    #[cfg(test)]
    pub(crate) fn pinning(&self) -> &Mutex<()> {
        &self.pinning
    }

    fn store_blocking(&self, key: &BlockKey, block: &Block, pin: bool, may_pass_cache: bool) -> Result<()> {
        #[cfg(test)]
        drop(self.pinning.lock());
        if self.peek(key).is_some_and(|slot| slot.pinned || !pin) {
            return Ok(());
        }
        let mut written = self.write_blocking(key, block, pin, may_pass_cache);
        if written.as_ref().is_err_and(WriteError::disk_is_full) {
            self.index.lock().lower_ceiling();
            written = self.write_blocking(key, block, pin, may_pass_cache);
        }
        let directory = self.directory.root().display();
        match written {
            Ok(()) => {
                self.counts.writes.fetch_add(1, Relaxed);
                if self.health.lock().succeeded() {
                    tracing::info!(%directory, "the disk cache can be written again");
                }
                Ok(())
            }
            Err(WriteError::Full(full)) => {
                self.counts.skips.fetch_add(1, Relaxed);
                Err(no_room(full))
            }
            Err(WriteError::Io(error)) => {
                self.counts.failures.fetch_add(1, Relaxed);
                if self.health.lock().failed() {
                    tracing::warn!(%directory, %error, "the disk cache cannot be written; reads go on without it");
                }
                Err(Error::from(error).context(format_args!("disk cache {directory}")))
            }
        }
    }

    fn write_blocking(
        &self,
        key: &BlockKey,
        block: &Block,
        pin: bool,
        may_pass_cache: bool,
    ) -> Result<(), WriteError> {
        let gave_way = self.others.give_way(&self.directory, &self.index);
        self.counts.evictions.fetch_add(gave_way as u64, Relaxed);
        let size = file::size(key);
        let (slot, leave) = self.index.lock().reserve(BlockId::of(key), size, pin)?;
        self.counts.evictions.fetch_add(leave.len() as u64, Relaxed);
        leave.iter().for_each(|slot| self.directory.remove(slot));
        let path = self.directory.path(&slot);
        let write = || file::write(&path, key, block, may_pass_cache);
        let mut written = write();
        if written.as_ref().is_err_and(|error| error.kind() == Io::NotFound) {
            let parent = path.parent().expect("block files lie in folders");
            written = std::fs::create_dir_all(parent).and_then(|()| write());
        }
        if let Err(error) = written {
            self.directory.remove(&slot);
            self.index.lock().release(&slot);
            return Err(error.into());
        }
        let replaced = self.index.lock().commit(slot);
        replaced.iter().for_each(|slot| self.directory.remove(slot));
        Ok(())
    }

    /// Fills in what a disk tier knows.
    pub(crate) fn report(&self, counters: &mut Counters) {
        let counts = &self.counts;
        counters.disk_hits = counts.hits.load(Relaxed);
        counters.corruptions = counts.corruptions.load(Relaxed);
        counters.disk_evictions = counts.evictions.load(Relaxed);
        counters.disk_writes = counts.writes.load(Relaxed);
        counters.disk_skips = counts.skips.load(Relaxed);
        counters.disk_failures = counts.failures.load(Relaxed);
        counters.disk_stalls = self.stalls.count() + self.late_writes.count();
        let index = self.index.lock();
        (counters.disk_bytes, counters.pinned_bytes) = (index.used(), index.pinned());
        counters.disk_index_bytes = index.bytes();
    }
}

impl Health {
    fn may_write(&mut self) -> bool {
        let skipped = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        !skipped
    }

    /// Whether this is the first failure in a row.
    fn failed(&mut self) -> bool {
        self.failed = self.failed.saturating_add(1);
        self.skip = 1 << self.failed.min(MAX_BACKOFF);
        self.failed == 1
    }

    /// Whether failures came before.
    fn succeeded(&mut self) -> bool {
        let recovered = self.failed > 0;
        *self = Self::default();
        recovered
    }
}

fn no_room(full: Full) -> Error {
    Error::new(ErrorKind::NoSpace, full.to_string()).with_hint("give the cache a larger disk, or pin less")
}
