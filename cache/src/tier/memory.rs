//! The memory tier: blocks under an exact ceiling, evicted by S3-FIFO, which one pass over cold data does not flush.
//!
//! Bytes that a reader still holds after the eviction of their block are the reader's, not counted here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use forebay_core::BlockKey;
use foyer::{Cache, CacheBuilder, Event, EventListener, S3FifoConfig};
use parking_lot::Mutex;

use crate::Counters;
use crate::block::{Block, BlockId, BuildUniform};
use crate::tier::spent::Spent;

/// What the bookkeeping of one block takes besides its bytes: record, index slot, queue links and shared-bytes
/// header, rounded up. Counted, so that a million tiny blocks stay under the ceiling too.
const OVERHEAD: usize = 256;

/// Shards share the ceiling evenly; each must hold a good number of the largest blocks to evict sensibly.
const SHARD_BYTES: u64 = 256 << 20;

/// Shards beyond this gain nothing against lock contention on the hosts we know.
const MAX_SHARDS: u64 = 64;

/// Blocks in memory.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    cache: Cache<BlockId, Block, BuildUniform>,
    /// The largest weight that fits a shard.
    largest: usize,
    spent: Mutex<Spent>,
    evictions: Arc<Evictions>,
}

#[derive(Debug, Default)]
struct Evictions(AtomicU64);

impl EventListener for Evictions {
    type Key = BlockId;
    type Value = Block;

    fn on_leave(&self, reason: Event, _: &BlockId, _: &Block) {
        if reason == Event::Evict {
            self.0.fetch_add(1, Relaxed);
        }
    }
}

fn weight(block: &Block) -> usize {
    block.bytes.len() + OVERHEAD
}

impl MemoryTier {
    pub(crate) fn new(ceiling: u64) -> Self {
        let shards = (ceiling / SHARD_BYTES).clamp(1, MAX_SHARDS) as usize;
        let spent = Mutex::new(Spent::new(ceiling));
        let ceiling = usize::try_from(ceiling).unwrap_or(usize::MAX);
        let evictions = Arc::new(Evictions::default());
        let cache = CacheBuilder::new(ceiling)
            .with_shards(shards)
            .with_eviction_config(S3FifoConfig::default())
            .with_hash_builder(BuildUniform::default())
            .with_weighter(|_: &BlockId, block: &Block| weight(block))
            .with_event_listener(evictions.clone())
            .build();
        Self { cache, largest: ceiling / shards, spent, evictions }
    }

    pub(crate) fn ceiling(&self) -> u64 {
        self.cache.capacity() as u64
    }

    /// What a block takes of it.
    pub(crate) fn cost(key: &BlockKey) -> u64 {
        key.len() + OVERHEAD as u64
    }

    pub(crate) fn get(&self, id: &BlockId) -> Option<Block> {
        self.look(id, Block::clone)
    }

    /// What `look` makes of the block.
    pub(crate) fn look<T>(&self, id: &BlockId, look: impl FnOnce(&Block) -> T) -> Option<T> {
        self.cache.get(id).map(|entry| look(entry.value()))
    }

    /// Whether the block is here, without touching the order of eviction.
    pub(crate) fn contains(&self, id: &BlockId) -> bool {
        self.cache.contains(id)
    }

    pub(crate) fn insert(&self, id: BlockId, block: Block) {
        if weight(&block) <= self.largest {
            self.cache.insert(id, block);
        }
    }

    /// Keeps a block that was fetched ahead from being the first to leave: of those that nobody read yet S3-FIFO evicts the
    /// oldest, which its reader needs next.
    pub(crate) fn touch(&self, id: &BlockId) {
        self.look(id, |_| ());
    }

    /// Gives up the block of `bytes` bytes soon, unless it is spent again: see [`Spent`].
    pub(crate) fn spend(&self, id: BlockId, bytes: u64) {
        let leave = self.spent.lock().add(id, bytes + OVERHEAD as u64);
        for id in leave {
            self.cache.remove(&id);
        }
    }

    /// Fills in what a memory tier knows.
    pub(crate) fn report(&self, counters: &mut Counters) {
        counters.memory_bytes = self.cache.usage() as u64;
        counters.memory_evictions = self.evictions.0.load(Relaxed);
    }
}
