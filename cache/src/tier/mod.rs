//! Where copies of blocks are kept.

pub(crate) mod spent;
pub(crate) mod memory;
pub(crate) mod file;
pub(crate) mod reader;
pub(crate) mod index;
pub(crate) mod directory;
pub(crate) mod others;
pub(crate) mod stalls;
pub(crate) mod disk;
