//! What a mount can be told, with its defaults.

use std::path::PathBuf;

use forebay_cache::CacheSettings;
use forebay_core::units::{KIB, MIB, format_bytes};
use forebay_core::{Error, Result};
use forebay_io::object::{MAX_PARTS, StoreSettings};
use forebay_metadata::kv::SlateSettings;
use forebay_metadata::tree::{ImportSettings, TreeSettings};
use serde::{Deserialize, Serialize};

use crate::joining::JoinSettings;
use crate::prefetch::PrefetchSettings;
use crate::staging::WritebackSettings;

/// When a file whose bytes lie in owned blobs becomes a plain object at its own path again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SealPolicy {
    /// After its last close.
    OnClose,
    /// Never; only Forebay can read such files.
    Never,
}

/// How files are written.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WriteSettings {
    /// Bytes of one file kept in memory before they start to leave for the store. Default 8 MiB, the first part of a
    /// multipart upload.
    pub buffer_bytes: u64,
    /// When rewritten files become plain objects again. Default `on-close`.
    pub seal: SealPolicy,
    /// Milliseconds that fsync and sync wait for the tree to be durable before they fail. Default 30,000, as the
    /// store's own deadline.
    pub deadline_ms: u64,
    /// Most bytes that sealing one file may move through this host; 64 times as many where an older object of it is what
    /// other tools read. Default 1 GiB: what the store cannot copy by itself is read and written once more.
    pub seal_max_bytes: u64,
    /// Bytes of the largest file of a packed directory that shares an object with others. Default 256 KiB: at that size
    /// a request of its own costs little more than the bytes.
    pub pack_max_bytes: u64,
    /// Extents that a file which stays open gets before short ones are put together, and again each time. Default 1,000: a
    /// commit takes a few milliseconds with so many, which is little beside its request to the store.
    pub gather_extents: usize,
    /// Parts after which an upload is completed, and its file goes on in blobs: where memory is short, parts are sent before they are
    /// full, and a store takes 10,000. Tests alone have another number.
    #[serde(skip)]
    pub stream_parts: usize,
}

impl Default for WriteSettings {
    fn default() -> Self {
        Self {
            buffer_bytes: 8 * MIB,
            seal: SealPolicy::OnClose,
            deadline_ms: 30_000,
            seal_max_bytes: 1024 * MIB,
            pack_max_bytes: 256 * KIB,
            gather_extents: 1000,
            stream_parts: MAX_PARTS - 1_000,
        }
    }
}

/// When what nothing refers to any more is deleted.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GcSettings {
    /// Milliseconds between the last reference to an owned blob and its deletion. Default 24 h: readers may still use
    /// an older layout.
    pub delete_delay_ms: u64,
    /// Milliseconds between two looks of a read-write mount for what dead sessions left; 0 leaves it to `forebay gc`.
    /// Default 6 h: leaks come from crashes, which are rare.
    pub interval_ms: u64,
}

impl Default for GcSettings {
    fn default() -> Self {
        let tree = TreeSettings::default();
        Self { delete_delay_ms: tree.delete_delay_ms, interval_ms: tree.gc.interval_ms }
    }
}

/// How a volume is opened.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VolumeSettings {
    /// Refuse changes and write nothing to the bucket. Default false.
    pub read_only: bool,
    /// Read-only, and the content is taken as fixed: nothing is listed twice. Default false.
    pub dataset: bool,
    /// Take the bucket over from a mount that holds it. Default false.
    pub take_over: bool,
    /// Open what is there, and make no volume of a bucket that is none yet. Default false.
    #[serde(skip)]
    pub must_exist: bool,
    /// Directory for local trees, locks and sockets. Default none; whoever opens a volume names one.
    pub state_directory: PathBuf,
    /// The ceiling in bytes for all memory that holds file data: cached blocks take three eighths of it, bytes on their
    /// way the rest. Default 1 GiB.
    pub memory_bytes: u64,
    /// The block cache; its ceilings of memory follow `memory_bytes`.
    pub cache: CacheSettings,
    /// How objects that others put into the bucket appear.
    pub import: ImportSettings,
    /// How the store is reached.
    pub store: StoreSettings,
    /// How files are written.
    pub write: WriteSettings,
    /// Whether what is written is staged on the local disk first.
    pub writeback: WritebackSettings,
    /// How far readers are served ahead.
    pub prefetch: PrefetchSettings,
    /// When what nothing refers to any more is deleted.
    pub gc: GcSettings,
    /// Milliseconds for which what is deleted can be brought back. Default 0: there is no trash, and deleted files cost
    /// no copy in the store.
    pub trash_ms: u64,
    /// How several mounts write to the volume.
    pub join: JoinSettings,
}

impl Default for VolumeSettings {
    fn default() -> Self {
        Self {
            read_only: false,
            dataset: false,
            take_over: false,
            must_exist: false,
            state_directory: PathBuf::new(),
            memory_bytes: 1024 * MIB,
            cache: CacheSettings::default(),
            import: ImportSettings::default(),
            store: StoreSettings::default(),
            write: WriteSettings::default(),
            writeback: WritebackSettings::default(),
            prefetch: PrefetchSettings::default(),
            gc: GcSettings::default(),
            trash_ms: 0,
            join: JoinSettings::default(),
        }
    }
}

/// Below this, one part of an upload, one block being read and one being fetched do not fit side by side.
const MIN_MEMORY_BYTES: u64 = 64 * MIB;

impl VolumeSettings {
    /// Refuses settings that cannot work.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.memory_bytes < MIN_MEMORY_BYTES {
            let (given, least) = (format_bytes(self.memory_bytes), format_bytes(MIN_MEMORY_BYTES));
            return Err(Error::invalid(format!("{given} of memory are too few"))
                .with_hint(format!("give the volume at least {least}")));
        }
        if self.join.is_on() && self.writeback.enabled {
            return Err(Error::invalid(
                "what is staged on one host cannot be read by others that write to the volume",
            )
            .with_hint("leave out either `writeback`, or `join_secret` (`secret` of [volume.join])"));
        }
        self.join.validate()?;
        self.cache.peers.validate()
    }

    /// The cache's share of the memory: three eighths for blocks at rest, a fourth for blocks being fetched, a sixteenth for
    /// blocks on their way to disk.
    pub(crate) fn cache(&self) -> CacheSettings {
        CacheSettings {
            memory_bytes: self.memory_bytes / 8 * 3,
            fetch_bytes: self.memory_bytes / 4,
            store_bytes: self.memory_bytes / 16,
            ..self.cache.clone()
        }
    }

    /// Warns of what a mount that joined is told and does not decide.
    pub(crate) fn tell_what_counts_elsewhere(&self) {
        if self.trash_ms > 0 {
            tracing::warn!(
                "what is deleted here is kept as whoever serves the tree keeps it: its --trash counts"
            );
        }
    }

    /// Windows of readers that the memory has room for: one takes an eighth of it at most, and all of them half of what is for
    /// blocks at rest.
    pub(crate) fn prefetch(&self) -> PrefetchSettings {
        let max_window_bytes = self.prefetch.max_window_bytes.min(self.memory_bytes / 8);
        let shared_bytes = self.cache().memory_bytes / 2;
        PrefetchSettings { max_window_bytes, shared_bytes, ..self.prefetch.clone() }
    }

    /// A tree in the bucket has a sixteenth of as much beside that for its records, and as little as by default at least.
    pub(crate) fn engine(&self) -> SlateSettings {
        let least = SlateSettings::default();
        let block_cache_bytes = least.block_cache_bytes.max(self.memory_bytes / 16);
        SlateSettings { block_cache_bytes, ..least }
    }

    /// The share of bytes being written. The last sixteenth is for copies that a request needs for a moment.
    pub(crate) fn budget_bytes(&self) -> u64 {
        self.memory_bytes / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trees_memory_follows_that_of_a_mount() {
        let of = |memory_bytes| VolumeSettings { memory_bytes, ..VolumeSettings::default() }.engine();
        assert_eq!(of(16 << 30).block_cache_bytes, 1 << 30);
        assert_eq!(of(64 << 20).block_cache_bytes, SlateSettings::default().block_cache_bytes);
    }
}
