//! Where copies of blocks are kept.

pub(crate) mod memory;
