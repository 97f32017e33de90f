//! The cache of this process: composes tiers and origin behind [`Blocks`].

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{BlockKey, Error, ErrorKind, Result, VolumeId};
use forebay_io::object::Bucket;
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use futures::stream::{self, StreamExt};
use tokio::sync::oneshot;

use crate::block::{Block, BlockId, check_within};
use crate::demand::Demand;
use crate::flight::{Flights, Role};
use crate::get::{Brought, Keep, Sources, get, get_at_hand, get_for_all};
use crate::origin::Origin;
use crate::peers::{Local, Peers, serve};
use crate::room::Room;
use crate::tier::disk::DiskTier;
use crate::tier::memory::MemoryTier;
use crate::{Blocks, CacheSettings, Ceiling, Counters, Filled, Residency, Unpinned};

/// Longer than the origin's own deadline, so that only a hung disk is not waited for.
const CLOSE_DEADLINE: Duration = Duration::from_secs(60);

/// Blocks that one call of `stat` verifies at once; bounded, since each is read into memory.
const STATS: usize = 8;

/// A cache in this process, over one bucket.
#[derive(Debug)]
pub struct Node {
    sources: Arc<Sources>,
    /// Blocks that are brought to the disk, from before they are fetched until they are written.
    fills: Room,
    tasks: TaskGroup,
    memory_hits: AtomicU64,
    joined: AtomicU64,
}

/// Whether other hosts are asked for what this one has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Through {
    Peers,
    Nobody,
}

impl Node {
    /// Opens a cache of blobs of `bucket`; must be called in an async runtime, whose tasks then do its work.
    ///
    /// # Errors
    /// `Invalid` when the settings contradict themselves; `Conflict` when another process uses the directory; what
    /// the file system says when it cannot be created or written.
    pub async fn open(bucket: Bucket, settings: CacheSettings) -> Result<Arc<Self>> {
        settings.validate()?;
        let tasks = TaskGroup::new("cache");
        let sources = Arc::new(Sources {
            memory: MemoryTier::new(settings.memory_bytes),
            disk: DiskTier::open(&settings, &tasks).await?,
            origin: Origin::new(bucket, &settings),
            flights: Flights::new("fetch", tasks.clone()),
            peers: OnceLock::new(),
            shared_flights: Flights::new("fetch for all", tasks.clone()),
        });
        let fills = Room::new(settings.fill_bytes(), settings.fills());
        Ok(Arc::new(Self {
            sources,
            fills,
            tasks,
            memory_hits: AtomicU64::new(0),
            joined: AtomicU64::new(0),
        }))
    }

    /// Begins to share blocks of `volume` with the hosts that the settings name, if any; returns once it is known which of
    /// them are there, or two seconds later. What they are asked for besides is had from the store.
    ///
    /// # Errors
    /// What is wrong with the secret, or with the port.
    pub async fn join(self: &Arc<Self>, settings: &CacheSettings, volume: VolumeId) -> Result<()> {
        if !settings.peers.is_on() {
            return Ok(());
        }
        let drawn = Rng::system().u64();
        let share = match &self.sources.disk {
            Some(disk) => disk.share(drawn).await?,
            None => drawn,
        };
        let room = Room::new(settings.peer_bytes(), settings.fetches);
        let opening = Peers::open(settings.peers.clone(), room, share, volume, self.tasks.clone());
        let peers = Arc::new(opening.await?);
        let serving = serve(peers.clone(), Arc::downgrade(self), self.tasks.clone());
        self.tasks.spawn("serve peers", serving);
        let (know, known) = oneshot::channel();
        let (following, stop) = (peers.clone(), self.tasks.stop());
        self.tasks.spawn("follow peers", async move { following.follow(stop, know).await });
        Peers::await_first_look(known).await;
        self.sources.peers.set(peers).map_err(|_| Error::bug("a cache joined its peers twice"))
    }

    /// Waits until what is under way has ended, for at most 60 s, and gives the cache directory free. Reads still
    /// work afterwards, from memory and origin.
    pub async fn close(&self) {
        self.tasks.shutdown(CLOSE_DEADLINE).await;
        if let Some(disk) = &self.sources.disk {
            disk.close();
        }
    }

    /// Fetches under way.
    #[cfg(test)]
    pub(crate) fn flights(&self) -> usize {
        self.sources.flights.len()
    }

    /// What holds up writes to disk while it is locked, and changes of pins.
    #[cfg(test)]
    pub(crate) fn disk_writes(&self) -> &parking_lot::Mutex<()> {
        self.sources.disk.as_ref().expect("a disk").pinning()
    }

    /// How many other hosts it sends a block, or will once it has it.
    #[cfg(test)]
    pub(crate) fn waiting_for(&self, key: &BlockKey) -> usize {
        self.sources.peers.get().expect("peers").waiting_for(key)
    }

    /// Where other hosts find it.
    #[cfg(test)]
    pub(crate) fn peer_address(&self) -> std::net::SocketAddr {
        self.sources.peers.get().expect("peers").address()
    }

    /// Fetches and writes to disk under way.
    #[cfg(test)]
    pub(crate) fn running(&self) -> Vec<String> {
        self.tasks.running()
    }

    async fn residency(&self, key: BlockKey, verify: bool) -> Residency {
        let peers = self.sources.peers.get().filter(|peers| !peers.keeps());
        match (self.residency_here(key.clone(), verify).await, peers) {
            (here @ (Residency::Absent | Residency::Memory), Some(peers)) => {
                match peers.stat(&key, verify).await {
                    Some(there) if there != Residency::Absent => there,
                    _ => here,
                }
            }
            (here, _) => here,
        }
    }

    /// Brings a block to this host.
    async fn bring(&self, key: &BlockKey, pin: bool, through: Through) -> Result<Filled> {
        if key.is_empty() {
            return Err(Error::invalid(format!("{key} lies past its end")));
        }
        let Some(disk) = &self.sources.disk else {
            if pin {
                let error = Error::new(ErrorKind::Unsupported, "a cache in memory only cannot pin");
                return Err(error.with_hint("give the cache a directory"));
            }
            let Brought { filled, .. } = self.block(key, &Demand::later(), Keep::Behind, through).await?;
            self.sources.memory.touch(&BlockId::of(key));
            return Ok(filled);
        };
        let what = if pin { "pin" } else { "fill" };
        let expect_answers =
            || disk.expect_answers().map_err(|error| error.context(format_args!("{what} of {key}")));
        expect_answers()?;
        if let Some(slot) = disk.peek(key)
            && (!pin || slot.pinned || disk.set_pinned(slot, true).await?)
        {
            return Ok(Filled::Disk);
        }
        // A disk slower than the origin holds up fills, and leaves readers a part of what may be on its way.
        let _turn = self.fills.enter(key.len()).await;
        // Before the fetch, so that a disk that hangs costs no egress, nor a full share of pins.
        expect_answers()?;
        if pin {
            disk.check_pin(key).map_err(|error| error.context(format_args!("pin of {key}")))?;
        }
        let brought = self.block(key, &Demand::later(), Keep::Caller, through).await?;
        let Brought { block, filled, place } = brought;
        let _place = place.filter(|_| self.fills.is_smaller(self.sources.origin.room()));
        match disk.ensure(key, &block, pin).await {
            Err(error) if pin || error.kind() == ErrorKind::Unavailable => {
                Err(error.context(format_args!("{what} of {key}")))
            }
            // Counted and logged by the tier; a proof will miss the block when memory lets go of it.
            _ => Ok(filled),
        }
    }

    /// A block and where it came from, counted.
    async fn block(&self, key: &BlockKey, demand: &Demand, keep: Keep, through: Through) -> Result<Brought> {
        let (mut brought, role) = match through {
            Through::Peers => get(&self.sources, key, demand, keep).await?,
            Through::Nobody => get_for_all(&self.sources, key, demand, keep).await?,
        };
        match (brought.filled, role) {
            (_, Role::Joined) => self.joined.fetch_add(1, Relaxed),
            (Filled::Memory, Role::Led) => self.memory_hits.fetch_add(1, Relaxed),
            _ => 0,
        };
        if role == Role::Joined {
            brought.filled = Filled::Memory;
        }
        Ok(brought)
    }
}

#[async_trait]
impl Local for Node {
    async fn block_here(&self, key: &BlockKey) -> Result<Block> {
        let brought = get_for_all(&self.sources, key, &Demand::now(), Keep::Behind).await;
        brought.map(|(brought, _)| brought.block)
    }

    async fn block_at_hand(&self, key: &BlockKey) -> Option<Block> {
        get_at_hand(&self.sources, key).await
    }

    async fn residency_here(&self, key: BlockKey, verify: bool) -> Residency {
        let on_disk = match &self.sources.disk {
            Some(disk) if disk.peek(&key).is_some() && verify => disk.verify(&key).await,
            Some(disk) if disk.peek(&key).is_some() => Residency::Disk,
            _ => Residency::Absent,
        };
        match on_disk {
            Residency::Absent | Residency::Damaged if self.sources.memory.contains(&BlockId::of(&key)) => {
                Residency::Memory
            }
            residency => residency,
        }
    }

    async fn fill_here(&self, key: &BlockKey, pin: bool) -> Result<Filled> {
        self.bring(key, pin, Through::Nobody).await
    }

    async fn unpin_here(&self, key: &BlockKey) -> Result<Unpinned> {
        let Some(disk) = &self.sources.disk else { return Ok(Unpinned::default()) };
        match disk.peek(key) {
            Some(slot) => disk.unpin(slot).await,
            None => Ok(Unpinned::default()),
        }
    }

    async fn unpin_all_here(&self) -> Result<Unpinned> {
        let mut unpinned = Unpinned::default();
        let Some(disk) = &self.sources.disk else { return Ok(unpinned) };
        for slot in disk.pinned() {
            unpinned += disk.unpin(slot).await?;
        }
        Ok(unpinned)
    }
}

#[async_trait]
impl Blocks for Node {
    async fn get(&self, key: &BlockKey, within: Range<u64>) -> Result<Bytes> {
        check_within(key, &within)?;
        if within.is_empty() {
            return Ok(Bytes::new());
        }
        let Brought { block, .. } = self.block(key, &Demand::now(), Keep::Behind, Through::Peers).await?;
        block.slice(key, within)
    }

    fn get_now(&self, key: &BlockKey, within: Range<u64>) -> Option<Bytes> {
        let look = |block: &Block| block.slice(key, within).ok();
        let bytes = self.sources.memory.look(&BlockId::of(key), look).flatten()?;
        self.memory_hits.fetch_add(1, Relaxed);
        Some(bytes)
    }

    fn get_near(&self, key: &BlockKey, within: Range<u64>) -> Option<Bytes> {
        if let Some(bytes) = self.get_now(key, within.clone()) {
            return Some(bytes);
        }
        let block = self.sources.disk.as_ref()?.read_near(key)?;
        // Who reads all of it keeps it, and the disk has it, too.
        if within != (0..key.len()) {
            self.sources.memory.insert(BlockId::of(key), block.clone().compact());
        }
        block.slice(key, within).ok()
    }

    async fn fill(&self, key: &BlockKey, pin: bool) -> Result<Filled> {
        // Who keeps copies of what others own fills its own disk, through them.
        if let Some(peers) = self.sources.peers.get().filter(|peers| !peers.keeps())
            && let Some(filled) = peers.fill(key, pin).await
        {
            return filled;
        }
        self.bring(key, pin, Through::Peers).await
    }

    async fn fetch_ahead(&self, key: &BlockKey) -> Result<()> {
        if self.sources.disk.as_ref().is_some_and(|disk| disk.peek(key).is_some()) {
            return Ok(());
        }
        let fetched = self.block(key, &Demand::later(), Keep::Behind, Through::Peers).await;
        self.sources.memory.touch(&BlockId::of(key));
        fetched.map(drop)
    }

    async fn unpin(&self, key: &BlockKey) -> Result<Unpinned> {
        let mut unpinned = self.unpin_here(key).await?;
        if let Some(peers) = self.sources.peers.get()
            && let Some(there) = peers.unpin(key).await
        {
            unpinned += there?;
        }
        Ok(unpinned)
    }

    async fn unpin_all(&self) -> Result<Unpinned> {
        let mut unpinned = self.unpin_all_here().await?;
        if let Some(peers) = self.sources.peers.get() {
            unpinned += peers.unpin_all().await?;
        }
        Ok(unpinned)
    }

    async fn stat(&self, keys: &[BlockKey], verify: bool) -> Result<Vec<Residency>> {
        // Keys are cloned (a counter each) because a stream of borrows is not general enough for this trait.
        let residencies = stream::iter(keys.to_vec()).map(|key| self.residency(key, verify));
        Ok(residencies.buffered(STATS).collect().await)
    }

    fn insert(&self, key: &BlockKey, bytes: Bytes) {
        if bytes.len() as u64 != key.len() || bytes.is_empty() {
            tracing::error!(%key, got = bytes.len(), "bytes of another length were offered for a block");
            return;
        }
        let block = Block::foreign(bytes);
        self.sources.memory.insert(BlockId::of(key), block.clone());
        if let Some(disk) = &self.sources.disk {
            disk.offer(key, &block);
        }
    }

    fn spend(&self, key: &BlockKey) {
        self.sources.memory.spend(BlockId::of(key), key.len());
    }

    fn ceiling(&self, pin: bool) -> Ceiling {
        let peers = self.sources.peers.get().filter(|peers| !peers.keeps());
        let hosts = 1 + peers.map_or(0, |peers| peers.others());
        match &self.sources.disk {
            Some(disk) => Ceiling { bytes: disk.ceiling(pin), hosts, on_disk: true },
            None => Ceiling { bytes: self.sources.memory.ceiling(), hosts, on_disk: false },
        }
    }

    fn cost(&self, key: &BlockKey) -> u64 {
        match &self.sources.disk {
            Some(_) => DiskTier::cost(key),
            None => MemoryTier::cost(key),
        }
    }

    fn counters(&self) -> Counters {
        let (memory_hits, joined) = (self.memory_hits.load(Relaxed), self.joined.load(Relaxed));
        let mut counters = Counters { memory_hits, joined, ..Counters::default() };
        self.sources.memory.report(&mut counters);
        self.sources.origin.report(&mut counters);
        if let Some(disk) = &self.sources.disk {
            disk.report(&mut counters);
        }
        if let Some(peers) = self.sources.peers.get() {
            peers.report(&mut counters);
        }
        counters
    }
}
