//! The serial committer: transactions as closures, one after another, many to one engine write.
//!
//! Owns the order of changes, atomicity, and the newest state, of which part is not yet in the engine. Promises
//! that a durable answer means durable together with everything answered before it. Does no conflict control
//! beyond order (there is nothing to conflict with) and knows nothing of what keys mean.

mod hot;
mod known;
mod overlay;
mod gather;
mod view;
mod run;
mod serial;
mod committer;
#[cfg(test)]
mod twin;
#[cfg(test)]
mod tests;

pub use committer::{Committer, CommitterSettings};
pub use gather::Guard;
pub use view::{Reads, Txn, View};
