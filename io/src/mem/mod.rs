//! Memory: one ceiling for all bytes in flight, and what the rest of Forebay may not touch by itself: shared mappings.

mod budget;
mod shared;

pub use budget::{Budget, Class, Permit};
pub use shared::{ReadMapping, SharedMemory, WriteMapping, populate};
