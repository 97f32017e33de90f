//! Memory: one ceiling for all bytes in flight, large buffers that are used again, how much the host has left, and what
//! the rest of Forebay may not touch by itself: mappings that processes share, and who reads them.

mod budget;
mod shared;
mod lease;
mod fused;
mod pool;
mod room;

pub use budget::{Budget, Class, Permit};
pub use fused::copy_with_crc32c;
pub use lease::Lease;
pub use pool::{Buffer, Pool};
pub use room::{available, counts_here};
pub use shared::{ReadMapping, SharedMemory, WriteMapping, absent_bytes, expect_read, give_up, populate};
