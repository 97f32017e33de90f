//! Memory: one ceiling for all bytes in flight, large buffers that are used again, and what the rest of Forebay may
//! not touch by itself: shared mappings.

mod budget;
mod shared;
mod fused;
mod pool;

pub use budget::{Budget, Class, Permit};
pub use fused::copy_with_crc32c;
pub use pool::{Buffer, Pool};
pub use shared::{ReadMapping, SharedMemory, WriteMapping, expect_read, populate};
