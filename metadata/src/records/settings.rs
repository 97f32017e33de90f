//! What a tree is told at its start.

use serde::{Deserialize, Serialize};

/// How a tree behaves.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TreeSettings {
    /// Refuses every change, and writes nothing to the bucket. Default false.
    pub read_only: bool,
    /// How objects that others put into the bucket appear.
    pub import: ImportSettings,
    /// Milliseconds between the last reference to an owned blob and its deletion. Default 24 h: readers on other
    /// hosts may still use an older layout.
    pub delete_delay_ms: u64,
}

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

impl Default for TreeSettings {
    fn default() -> Self {
        let import = ImportSettings::default();
        Self { read_only: false, import, delete_delay_ms: DAY_MS }
    }
}

/// How imported objects appear, since a bucket has neither owners nor modes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImportSettings {
    /// Owner of imported files and directories. Default 0.
    pub uid: u32,
    /// Their group. Default 0.
    pub gid: u32,
    /// Permission bits of imported files. Default 0o644.
    pub file_mode: u16,
    /// Permission bits of imported directories. Default 0o755.
    pub dir_mode: u16,
    /// Milliseconds for which a directory's listing is taken as true. Default 60,000.
    pub ttl_ms: u64,
    /// Milliseconds that a caller waits for a listing to be taken again, before the one at hand is used while the
    /// new one goes on. A first listing is always waited for. Default 2,000.
    pub relist_wait_ms: u64,
}

impl Default for ImportSettings {
    fn default() -> Self {
        Self { uid: 0, gid: 0, file_mode: 0o644, dir_mode: 0o755, ttl_ms: 60_000, relist_wait_ms: 2_000 }
    }
}
