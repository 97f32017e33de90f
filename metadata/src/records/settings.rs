//! What a tree is told at its start.

use forebay_core::Appearance;
use serde::{Deserialize, Serialize};

/// How a tree behaves.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TreeSettings {
    /// Refuses every change, and writes nothing to the bucket. Default false.
    pub read_only: bool,
    /// Whether it is a copy of another mount's tree that follows this one. Default false.
    pub follows: bool,
    /// Whether other mounts may write to it through this process. Default false.
    pub serves: bool,
    /// How objects that others put into the bucket appear.
    pub import: ImportSettings,
    /// Milliseconds between the last reference to an owned blob and its deletion. Default 24 h: readers on other
    /// hosts may still use an older layout.
    pub delete_delay_ms: u64,
    /// Milliseconds for which what is deleted can be brought back. Default 0: there is no trash.
    pub trash_ms: u64,
    /// Entries that one transaction of a clone copies: others wait for so long. Default 500, some milliseconds.
    pub clone_step: usize,
    /// How blobs and uploads of dead sessions are looked for.
    pub gc: GcSettings,
}

/// How what dead sessions left in the bucket is found and freed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GcSettings {
    /// Whether no other tree refers to this bucket's owned blobs. Where that is not certain nothing is looked for.
    /// Default true.
    pub is_only_tree: bool,
    /// Milliseconds from the opening of a tree to its first look. Default 10 minutes, so that mounting and reading
    /// come first.
    pub first_ms: u64,
    /// Milliseconds between two looks; 0 leaves looking to `forebay gc`. Default 6 h: leaks come from crashes, which
    /// are rare.
    pub interval_ms: u64,
    /// Milliseconds of rest after each page of objects or records of a look in the background. Default 100, which
    /// bounds it to some ten requests a second.
    pub pause_ms: u64,
    /// Milliseconds for which nobody wrote to a staged file of a `file://` bucket before it counts as left over.
    /// Default one hour.
    pub staging_ms: u64,
}

const HOUR_MS: u64 = 60 * 60 * 1000;

impl Default for GcSettings {
    fn default() -> Self {
        Self {
            is_only_tree: true,
            first_ms: HOUR_MS / 6,
            interval_ms: 6 * HOUR_MS,
            pause_ms: 100,
            staging_ms: HOUR_MS,
        }
    }
}

const DAY_MS: u64 = 24 * HOUR_MS;

impl Default for TreeSettings {
    fn default() -> Self {
        let (import, gc) = (ImportSettings::default(), GcSettings::default());
        Self {
            read_only: false,
            follows: false,
            serves: false,
            import,
            delete_delay_ms: DAY_MS,
            trash_ms: 0,
            clone_step: 500,
            gc,
        }
    }
}

/// How imported objects appear, since a bucket has neither owners nor modes. Owners and modes are shown of what nobody gave others
/// through a mount, by each mount as it was told.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImportSettings {
    /// Owner of imported files and directories, and of the root. Default: the user of this process, as nobody else may look into
    /// a mount without `allow_other`.
    pub uid: u32,
    /// Their group. Default: that of this process.
    pub gid: u32,
    /// Permission bits of imported files. Default 0o644.
    #[serde(deserialize_with = "mode")]
    pub file_mode: u16,
    /// Permission bits of imported directories. Default 0o755.
    #[serde(deserialize_with = "mode")]
    pub dir_mode: u16,
    /// Milliseconds for which a directory's listing is taken as true. Default 60,000.
    pub ttl_ms: u64,
    /// Milliseconds that a caller waits for a listing to be taken again, before the one at hand is used while the
    /// new one goes on. A first listing is always waited for. Default 2,000.
    pub relist_wait_ms: u64,
    /// Milliseconds between two looks of a read-only mount at the tree of the mount for writing. Default 5,000, as that one
    /// makes its changes durable: one request of the store each. With 0 it looks at `forebay refresh` alone.
    pub follow_ms: u64,
    /// Most directories that are listed ahead of one who reads those of a directory in order; 0 switches that off.
    /// Default 32: enough for 800 directories a second from a store 20 ms away.
    pub max_ahead: usize,
}

impl ImportSettings {
    /// What is shown of inodes that nobody gave an owner or a mode.
    pub fn appearance(&self) -> Appearance {
        Appearance { uid: self.uid, gid: self.gid, file_mode: self.file_mode, directory_mode: self.dir_mode }
    }
}

/// Permission bits. What is written as a decimal number, as 644 is, would be others than those that are meant.
fn mode<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    let mode = u16::deserialize(from)?;
    match mode <= 0o777 {
        true => Ok(mode),
        false => Err(serde::de::Error::custom(format!("{mode} is 0o{mode:o}: no mode"))),
    }
}

impl Default for ImportSettings {
    fn default() -> Self {
        Self {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            file_mode: 0o644,
            dir_mode: 0o755,
            ttl_ms: 60_000,
            relist_wait_ms: 2_000,
            follow_ms: 5_000,
            max_ahead: 32,
        }
    }
}
