//! The geometry of cached blocks.

use crate::{Blob, VolumeId};

/// Blocks inside a large blob, in bytes; a blob up to this size is one block.
/// 4 MiB: large enough that a ranged GET reaches a store's full rate, small enough that 16 in flight fit 64 MiB.
pub const BLOCK_SIZE: u64 = 4 << 20;

/// Names one block of one blob of one volume, wherever it is cached.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// The volume, so that tenants never share a cached block by accident.
    pub volume: VolumeId,
    /// The blob; its version is part of the name, so a cached block never needs invalidation.
    pub blob: Blob,
    /// Which block of the blob, from 0.
    pub index: u64,
}

impl BlockKey {
    /// First byte of the block in the blob.
    pub fn offset(&self) -> u64 {
        self.index * BLOCK_SIZE
    }

    /// Bytes in the block: `BLOCK_SIZE`, or less for the last one.
    pub fn len(&self) -> u64 {
        self.blob.size.saturating_sub(self.offset()).min(BLOCK_SIZE)
    }

    /// Whether the block lies past the blob's end.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
