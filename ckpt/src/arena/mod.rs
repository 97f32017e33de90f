//! Where snapshots are taken: memory that outlives the trainer, filled by Forebay's own threads.

mod copy;
mod slots;
mod snapshot;

pub use copy::{Job, copy};
pub use slots::{Arena, Slot};
pub(crate) use slots::SLOTS;
pub use snapshot::Snapshot;
