//! Memory: one ceiling for all bytes in flight, and mappings that processes share.

mod budget;
mod shared;

pub use budget::{Budget, Class, Permit};
pub use shared::{ReadMapping, SharedMemory, WriteMapping, populate};
