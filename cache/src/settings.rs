//! What can be set about a cache.

use std::path::PathBuf;

use forebay_core::units::{GIB, MIB, format_bytes};
use forebay_core::{BLOCK_SIZE, Error, Result};
use serde::{Deserialize, Serialize};

use crate::peers::PeerSettings;
use crate::tier::directory::remembered_ceiling;

/// Ceilings and places of one cache.
///
/// Memory for blocks is at most `memory_bytes + fetch_bytes + store_bytes`. On top come bytes of evicted blocks that
/// readers still hold, 80 to 160 bytes for every block on disk ([`crate::Counters::disk_index_bytes`]), and the kernel's page
/// cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheSettings {
    /// Ceiling of the memory tier in bytes; 0 keeps nothing in memory. Default 512 MiB.
    pub memory_bytes: u64,
    /// Where the disk tier lies; no process shares it with another. Default none: no disk tier.
    pub directory: Option<PathBuf>,
    /// Ceiling of the disk tier in bytes, at least 16 MiB. Default what the directory was given last, else 16 GiB.
    pub disk_bytes: Option<u64>,
    /// Ceiling of pinned blocks in bytes, part of `disk_bytes`. Default four fifths of it, so that a disk full of
    /// pinned blocks still caches others.
    pub pin_bytes: Option<u64>,
    /// Bytes of the directory's file system that are left to others, whatever `disk_bytes` says: blocks give way to what they
    /// write. Default a twentieth of it, 4 GiB at most.
    pub free_bytes: Option<u64>,
    /// Requests to the origin in flight at once. Default 64: enough for 4 MiB GETs at 30 ms to fill 25 Gbit/s.
    pub fetches: u32,
    /// Bytes on their way into memory at once, at least 8 MiB: a quarter (and no less than a block) is kept for reads
    /// from disk, which so never wait for a slow origin. Default 64 MiB: 12 blocks from the origin, 4 from disk.
    pub fetch_bytes: u64,
    /// Bytes on their way to the disk tier at once; blocks read past it stay in memory only. Default 64 MiB.
    pub store_bytes: u64,
    /// Milliseconds that the disk may take for one block, or for nothing at all while others wait for their turn; then the
    /// origin is asked, and the disk is left alone for 30 s. What is written has six times as long, and is skipped then.
    /// Default 5,000: a disk that works takes tens of them.
    pub disk_deadline_ms: u64,
    /// Whether blocks are read from the disk by io_uring(7), where the kernel has it, and not by threads that wait.
    pub io_uring: bool,
    /// Hosts that share the blocks that they have. Default none.
    pub peers: PeerSettings,
}

impl Default for CacheSettings {
    fn default() -> Self {
        Self {
            memory_bytes: 512 * MIB,
            directory: None,
            disk_bytes: None,
            pin_bytes: None,
            free_bytes: None,
            fetches: 64,
            fetch_bytes: 64 * MIB,
            store_bytes: 64 * MIB,
            disk_deadline_ms: 5_000,
            io_uring: true,
            peers: PeerSettings::default(),
        }
    }
}

/// The ceiling of a directory that was never given one.
const DISK_BYTES: u64 = 16 * GIB;
/// Below this a disk tier cannot hold a few blocks and turn over.
const MIN_DISK_BYTES: u64 = 16 * MIB;

impl CacheSettings {
    /// The ceiling of the disk tier: what is set, else what its directory was given last.
    pub fn disk_ceiling(&self) -> u64 {
        let remembered = || self.directory.as_deref().and_then(remembered_ceiling);
        self.disk_bytes.or_else(remembered).unwrap_or(DISK_BYTES)
    }

    /// The ceiling of pinned blocks.
    pub(crate) fn pin_ceiling(&self) -> u64 {
        self.pin_bytes.unwrap_or(self.disk_ceiling() / 5 * 4)
    }

    /// The part of `fetch_bytes` that is for reads from disk.
    pub(crate) fn disk_read_bytes(&self) -> u64 {
        (self.fetch_bytes / 4).max(BLOCK_SIZE)
    }

    /// The part of `fetch_bytes` that is for blocks on their way from other hosts, as much for those on their way there, and as
    /// much for copies of the former, which are passed on while they arrive.
    pub(crate) fn peer_bytes(&self) -> u64 {
        match self.peers.is_on() {
            true => ((self.fetch_bytes - self.disk_read_bytes()) / 4).max(BLOCK_SIZE),
            false => 0,
        }
    }

    /// The part of `fetch_bytes` that is for blocks on their way from the origin.
    pub(crate) fn origin_bytes(&self) -> u64 {
        (self.fetch_bytes - self.disk_read_bytes()).saturating_sub(3 * self.peer_bytes()).max(BLOCK_SIZE)
    }

    /// Bytes of blocks that are brought to the disk, from before they are fetched until they are written: they keep their place among
    /// those on their way from the origin, of which a quarter is left to readers where that is a block.
    pub(crate) fn fill_bytes(&self) -> u64 {
        (self.origin_bytes() / 4 * 3).max(BLOCK_SIZE)
    }

    /// The same in requests.
    pub(crate) fn fills(&self) -> u32 {
        (self.fetches / 4 * 3).max(1)
    }

    /// Refuses settings that cannot work.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.fetches == 0 {
            return Err(Error::invalid("a cache with no fetches in flight can fetch nothing")
                .with_hint("set `fetches` to 1 or more"));
        }
        if self.fetch_bytes < 2 * BLOCK_SIZE {
            let (given, least) = (format_bytes(self.fetch_bytes), format_bytes(2 * BLOCK_SIZE));
            return Err(Error::invalid(format!("`fetch_bytes` of {given} is less than two blocks"))
                .with_hint(format!("set it to {least} or more")));
        }
        if self.disk_deadline_ms == 0 {
            return Err(Error::invalid("a disk cache that may take no time is never read")
                .with_hint("set `disk_deadline_ms` to 1 or more, or leave the directory out"));
        }
        let disk_bytes = self.disk_ceiling();
        if self.directory.is_some() && disk_bytes < MIN_DISK_BYTES {
            let (given, least) = (format_bytes(disk_bytes), format_bytes(MIN_DISK_BYTES));
            return Err(Error::invalid(format!("a disk cache of {given} is too small"))
                .with_hint(format!("give it {least} or more, or leave the directory out")));
        }
        if self.directory.is_some() && self.pin_ceiling() > disk_bytes {
            let (pins, disk) = (format_bytes(self.pin_ceiling()), format_bytes(disk_bytes));
            return Err(Error::invalid(format!("pinned blocks may take {pins} of a disk cache of {disk}"))
                .with_hint("set `pin_bytes` to at most `disk_bytes`"));
        }
        self.peers.validate()
    }
}
