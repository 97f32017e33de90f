//! Files: the tree, the cached blocks and the objects of one volume, joined.
//!
//! Owns reading (layout, prefetch, blocks), writing (buffer, upload, commit, seal) and the composition of a volume
//! from its parts. Knows nothing of FUSE and decides nothing about names, which are the tree's.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests spawn, sleep and time as they need"))]

pub mod prefetch;
pub mod staging;
pub mod settings;
mod unsealed;
mod copying;
mod gathering;
mod fetch;
mod content;
mod segments;
mod discards;
mod store;
mod inode;
mod file;
mod volume;
mod charging;
mod sealing;
pub mod warmup;
mod compact;
pub mod packed;
mod dumping;
pub mod upkeep;
pub mod clone;
pub mod trash;
pub mod quota;
pub mod control;
mod joining;
mod standby;
mod tree_file;
mod connect;
pub mod backup;
#[cfg(test)]
mod tests;

pub use connect::{connect, hold};
pub use file::{Access, File, Seek};
pub use inode::Position;
pub use joining::{JoinSettings, Joined, Sharing};
pub use settings::VolumeSettings;
pub use standby::Standby;
pub use volume::{Parts, Volume, Writeback};
