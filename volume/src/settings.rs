//! What a mount can be told, with its defaults.

use forebay_core::units::MIB;
use serde::{Deserialize, Serialize};

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
    /// Largest file in bytes that is sealed. Default 1 GiB: sealing without part copy moves every byte once more.
    pub seal_max_bytes: u64,
}

impl Default for WriteSettings {
    fn default() -> Self {
        Self { buffer_bytes: 8 * MIB, seal: SealPolicy::OnClose, seal_max_bytes: 1024 * MIB }
    }
}
