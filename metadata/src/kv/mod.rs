//! Ordered key-value engines behind one small trait: in memory, LMDB on a local disk, SlateDB in the bucket.
//!
//! Owns durability, atomic batches and fencing. Does no conflict control: one writer, the committer, orders
//! everything. Knows nothing of what keys and values mean.

mod batch;
mod engine;
mod after;
pub mod mem;
pub mod lmdb;
pub mod slate;
mod slate_log;
mod slate_warm;
#[cfg(test)]
mod contract;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod fencing;

pub use after::{Before, after};
pub use batch::Batch;
pub use engine::{Durability, Edit, Engine, Limits, Pair, Snapshot};
pub use lmdb::{LmdbEngine, LmdbSettings};
pub use mem::{MemEngine, MemStore};
pub use slate::{SlateEngine, SlateSettings};
pub use slate_log::{Next, SlateLog};
