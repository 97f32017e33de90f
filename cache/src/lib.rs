//! The blob cache of one process or host: copies of blocks of immutable blobs, in memory, on disk, or fetched.
//!
//! Promises: a block leaves the bucket once however many ask at once, on this host and on those it shares blocks with; no byte that failed its checksum is returned;
//! memory and disk stay under their ceilings. Holds only copies: losing all of it loses nothing. Knows nothing of
//! files, names or trees.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests spawn, sleep and time as they need"))]

pub mod block;
pub mod blocks;
mod demand;
mod room;
mod flight;
mod peers;
pub mod settings;
mod origin;
mod tier;
mod get;
pub mod node;
pub mod warm;

pub use block::pieces;
pub use blocks::{Blocks, Ceiling, Counters, Filled, Residency, Unpinned};
pub use node::Node;
pub use peers::PeerSettings;
pub use settings::CacheSettings;
pub use warm::{Fill, Progress, Proof, Report, fill_many, prove};

#[cfg(test)]
mod tests;
