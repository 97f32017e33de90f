//! Memory that the rest of Forebay may not touch by itself: shared mappings.

mod shared;

pub use shared::{ReadMapping, SharedMemory, WriteMapping, populate};
