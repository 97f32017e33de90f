//! What a cache offers to those above it, whether it is in this process or behind a socket.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{BlockKey, Result};
use serde::{Deserialize, Serialize};

/// Cached blocks of blobs.
///
/// Every method is cancel-safe: dropping a future costs nothing but that caller's answer.
#[async_trait]
pub trait Blocks: Send + Sync + std::fmt::Debug {
    /// Bytes `within` (relative to the block) of one block, sharing the cache's memory.
    ///
    /// # Errors
    /// `Invalid` when `within` leaves the block, `Stale` when the object was replaced or is gone, `NotFound` when it was
    /// staged and is not in the bucket, `Unavailable` when the block is not cached and the origin does not answer.
    async fn get(&self, key: &BlockKey, within: Range<u64>) -> Result<Bytes>;

    /// The same, only if the block is in memory right now; never waits, and needs no async runtime.
    fn get_now(&self, key: &BlockKey, within: Range<u64>) -> Option<Bytes>;

    /// The same, and also if it is a small block on disk: may wait for the disk, so only for threads that may. `None`
    /// also when enough of them wait already.
    fn get_near(&self, key: &BlockKey, within: Range<u64>) -> Option<Bytes>;

    /// Brings a block in, to the disk tier where there is one, and says where it came from.
    ///
    /// With `pin`, the block stays on disk until it is unpinned, also over restarts; without, a disk tier that
    /// fails is no error: the block is then in memory only, and [`Self::stat`] tells.
    ///
    /// # Errors
    /// As [`Self::get`]; `Unavailable`, naming the disk, where it hangs; with `pin` also `NoSpace` at the ceiling of pins,
    /// `Unsupported` without a disk tier, and whatever the disk says.
    async fn fill(&self, key: &BlockKey, pin: bool) -> Result<Filled>;

    /// Brings a block in ahead of who reads it, and waits for no disk: what there is no room for on the way there stays in
    /// memory only.
    ///
    /// # Errors
    /// As [`Self::get`].
    async fn fetch_ahead(&self, key: &BlockKey) -> Result<()>;

    /// Lets a block be evicted again, if it is pinned.
    ///
    /// # Errors
    /// What the disk says.
    async fn unpin(&self, key: &BlockKey) -> Result<Unpinned>;

    /// The same of all blocks, those of objects that were replaced or deleted since as well.
    ///
    /// # Errors
    /// As [`Self::unpin`]; some may be unpinned then.
    async fn unpin_all(&self) -> Result<Unpinned>;

    /// Where each block is now, without touching the order of eviction. With `verify`, copies on disk are read and
    /// checked, and bad ones are dropped; copies in memory were checked when they arrived and are trusted.
    async fn stat(&self, keys: &[BlockKey], verify: bool) -> Result<Vec<Residency>>;

    /// Puts bytes that the caller already has (of a freshly written blob) into the cache; `bytes` is the whole block.
    fn insert(&self, key: &BlockKey, bytes: Bytes);

    /// Says that whoever read this block has read all of it and keeps a copy, so that its memory may soon serve others.
    /// A copy on disk stays.
    fn spend(&self, key: &BlockKey);

    /// What there may be of blocks that are filled, be they pinned.
    fn ceiling(&self, pin: bool) -> Ceiling;

    /// Bytes of that which a block takes.
    fn cost(&self, key: &BlockKey) -> u64;

    /// What happened since the cache was opened, and what it holds now.
    fn counters(&self) -> Counters;
}

/// What was pinned before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpinned {
    /// Blocks.
    pub blocks: u64,
    /// Bytes that they take on disk.
    pub bytes: u64,
}

impl std::ops::AddAssign for Unpinned {
    fn add_assign(&mut self, other: Self) {
        (self.blocks, self.bytes) = (self.blocks + other.blocks, self.bytes + other.bytes);
    }
}

/// How much a cache can hold of what is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ceiling {
    /// Bytes on this host.
    pub bytes: u64,
    /// Hosts that take even shares of what is filled, as far as they are known: this one, and those that it shares blocks with.
    pub hosts: u64,
    /// Whether they lie on disk, else in memory.
    pub on_disk: bool,
}

/// Where a filled block came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// It was in memory, or another caller was fetching it.
    Memory,
    /// It was on disk.
    Disk,
    /// It was fetched from another host that has it, or had it from the origin.
    Peer {
        /// Bytes that came over the network.
        bytes: u64,
    },
    /// It was fetched.
    Origin {
        /// Bytes that left the origin.
        bytes: u64,
    },
}

/// Where a block is. One that is both on disk and in memory counts as on disk: that copy lasts longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// In memory only.
    Memory,
    /// On disk.
    Disk,
    /// Nowhere in this cache.
    Absent,
    /// Nowhere any more: it was on disk, and its copy turned out to be damaged. Said once, by who verifies.
    Damaged,
}

/// What a cache did and holds. Counts since it was opened unless stated otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Reads answered from memory.
    pub memory_hits: u64,
    /// Blocks brought to memory from disk.
    pub disk_hits: u64,
    /// Reads that joined another one's fetch of the same block.
    pub joined: u64,
    /// Requests sent to the origin.
    pub origin_requests: u64,
    /// Bytes received from the origin.
    pub origin_bytes: u64,
    /// Requests to the origin that failed.
    pub origin_failures: u64,
    /// Blocks that came from other hosts.
    #[serde(default)]
    pub peer_hits: u64,
    /// Bytes in them.
    #[serde(default)]
    pub peer_bytes: u64,
    /// Those of them that came from another host than their owner, which was sending them to others just then.
    #[serde(default)]
    pub peer_referrals: u64,
    /// Blocks that their owner did not give, or gave damaged or late, for which the origin was asked.
    #[serde(default)]
    pub peer_failures: u64,
    /// Blocks that other hosts were given.
    #[serde(default)]
    pub served_blocks: u64,
    /// Bytes in them.
    #[serde(default)]
    pub served_bytes: u64,
    /// Other hosts that share blocks, as far as they are known now.
    #[serde(default)]
    pub peers: u64,
    /// Those of them that answered when they were asked last.
    #[serde(default)]
    pub peers_here: u64,
    /// Copies on disk that failed their checksum or did not parse, and were dropped.
    pub corruptions: u64,
    /// Blocks evicted from memory.
    pub memory_evictions: u64,
    /// Blocks evicted from disk.
    pub disk_evictions: u64,
    /// Blocks written to disk.
    pub disk_writes: u64,
    /// Blocks not written to disk because too much was on its way there, or because the disk keeps failing or hangs.
    pub disk_skips: u64,
    /// Writes to disk that failed.
    pub disk_failures: u64,
    /// How often the disk did not answer in time, and was left alone for a while.
    #[serde(default)]
    pub disk_stalls: u64,
    /// Bytes in memory now, bookkeeping included.
    pub memory_bytes: u64,
    /// Bytes on disk now, in whole 4 KiB pages.
    pub disk_bytes: u64,
    /// Bytes of pinned blocks now, part of `disk_bytes`.
    pub pinned_bytes: u64,
    /// Bytes of memory that the list of blocks on disk takes now, beside `memory_bytes`.
    #[serde(default)]
    pub disk_index_bytes: u64,
}
