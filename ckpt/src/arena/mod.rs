//! Where snapshots are taken: memory that outlives the trainer, filled by Forebay's own threads.

mod checksum;
mod copy;
mod held;
mod slots;
mod snapshot;

pub use copy::{CopyWatch, Job, Source, copy};
pub(crate) use held::attempt_of;
pub use held::{Held, HeldStep, Seal, manifest_of};
#[cfg(test)]
pub(crate) use slots::LACKS_MEMORY;
pub use slots::{Arena, Slot};
pub(crate) use slots::{LEFT, SLOTS, populate_copy, slot_range};
pub(crate) use snapshot::Cut;
pub use snapshot::Snapshot;
