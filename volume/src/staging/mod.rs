//! Writing back: what is written is staged on a disk of this host and brought to the store behind the writers' backs.
//!
//! A staged blob is an owned blob whose bytes are not in the bucket yet. Layouts refer to it as to any other, and the
//! tree is durable no sooner than the bytes are here. A closed file is sealed straight into the plain object at its path;
//! what cannot be sealed is uploaded under its owned key; what nothing refers to any more is never uploaded.

mod settings;
mod file;
mod origin;
mod entries;
mod folder;
mod schedule;
mod uploads;
mod stage;
mod drain;
mod open;
mod bring;
mod durable;
mod left;

use serde::{Deserialize, Serialize};

pub(crate) use durable::Durable;
pub(crate) use folder::Staging;
pub use left::{Left, left};
#[cfg(test)]
pub(crate) use open::upload_all;
pub(crate) use open::{heal, open};
pub(crate) use schedule::pause;
pub use settings::WritebackSettings;
pub(crate) use uploads::Uploads;

/// What is staged and not in the bucket yet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staged {
    /// Files with such bytes.
    pub files: u64,
    /// The bytes.
    pub bytes: u64,
    /// Seconds since the first of them was staged.
    pub oldest_seconds: Option<u64>,
    /// Blobs whose staged bytes were damaged on the disk, or that it neither kept nor gave back: they will never be uploaded.
    pub damaged: u64,
    /// Why uploads fail, while they do.
    pub last_error: Option<String>,
}
