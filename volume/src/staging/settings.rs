//! What a mount can be told about staging.

use forebay_core::units::MIB;
use serde::{Deserialize, Serialize};

/// Whether and how written bytes are staged on the local disk and uploaded behind.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WritebackSettings {
    /// Stage what is written below the state directory and upload it later. Default false: what is closed is in the
    /// bucket. A read-only mount writes nothing and stages nothing.
    pub enabled: bool,
    /// Most bytes that are staged, where each file counts as whole blocks of 4 KiB; past them, writes go to the store as
    /// without. Default 10 GiB.
    pub bytes: u64,
    /// Milliseconds between the close of a file and its upload. Default 1,000: files that live shorter, as programs make
    /// them on their way, are never uploaded.
    pub delay_ms: u64,
    /// Milliseconds after which bytes of a file that stays open are uploaded as they are, to be sealed when it is closed.
    /// Default 60,000: they are uploaded twice then, and until then only this host has them.
    pub open_ms: u64,
}

impl Default for WritebackSettings {
    fn default() -> Self {
        Self { enabled: false, bytes: 10 * 1024 * MIB, delay_ms: 1_000, open_ms: 60_000 }
    }
}
