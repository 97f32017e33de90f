//! The geometry and the names of cached blocks.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::{Blob, VolumeId};

/// Blocks inside a large blob, in bytes; a blob up to this size is one block.
/// 4 MiB: large enough that a ranged GET reaches a store's full rate, small enough that 16 in flight fit 64 MiB.
pub const BLOCK_SIZE: u64 = 4 << 20;

/// A blob of one volume under a short name that is computed once; cheap to clone, hash and compare.
///
/// The volume is part of the name, so that tenants never share a cached block by accident; so is the version, so
/// that a cached block never needs invalidation.
#[derive(Clone)]
pub struct VolumeBlob(Arc<Named>);

struct Named {
    volume: VolumeId,
    blob: Blob,
    digest: u128,
}

impl VolumeBlob {
    /// Names `blob` of `volume`.
    pub fn new(volume: VolumeId, blob: Blob) -> Self {
        let hash = blake3::hash(&identity(volume, &blob));
        let (half, _) = hash.as_bytes().split_at(16);
        let digest = u128::from_le_bytes(half.try_into().expect("16 of a hash's 32 bytes"));
        Self(Arc::new(Named { volume, blob, digest }))
    }

    /// The volume.
    pub fn volume(&self) -> VolumeId {
        self.0.volume
    }

    /// The blob.
    pub fn blob(&self) -> &Blob {
        &self.0.blob
    }

    /// Bytes in the blob.
    pub fn size(&self) -> u64 {
        self.0.blob.size
    }

    /// The first 128 bits of BLAKE3 over [`Self::identity`]: names that differ have digests that differ, even names
    /// chosen to collide.
    pub fn digest(&self) -> u128 {
        self.0.digest
    }

    /// Everything that makes the blob what it is, unambiguously: volume, size, length of the key (little-endian
    /// u64 each), key, version.
    pub fn identity(&self) -> Vec<u8> {
        identity(self.0.volume, &self.0.blob)
    }

    /// How many blocks it has.
    pub fn block_count(&self) -> u64 {
        self.size().div_ceil(BLOCK_SIZE)
    }

    /// Its block number `index`.
    pub fn block(&self, index: u64) -> BlockKey {
        BlockKey { blob: self.clone(), index }
    }
}

fn identity(volume: VolumeId, blob: &Blob) -> Vec<u8> {
    let (key, version) = (blob.key.as_str().as_bytes(), blob.version.as_str().as_bytes());
    let numbers = [volume.0, blob.size, key.len() as u64].map(u64::to_le_bytes);
    [numbers.as_flattened(), key, version].concat()
}

impl PartialEq for VolumeBlob {
    fn eq(&self, other: &Self) -> bool {
        self.0.digest == other.0.digest
    }
}

impl Eq for VolumeBlob {}

impl Hash for VolumeBlob {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.digest as u64);
    }
}

impl fmt::Debug for VolumeBlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for VolumeBlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Named { volume, blob, .. } = &*self.0;
        write!(f, "{} (version {}) of volume {volume}", blob.key, blob.version)
    }
}

/// Names one block of one blob of one volume, wherever it is cached.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// The blob.
    pub blob: VolumeBlob,
    /// Which block of the blob, from 0.
    pub index: u64,
}

impl BlockKey {
    /// First byte of the block in the blob.
    pub fn offset(&self) -> u64 {
        self.index.saturating_mul(BLOCK_SIZE)
    }

    /// Bytes in the block: `BLOCK_SIZE`, or less for the last one.
    pub fn len(&self) -> u64 {
        self.blob.size().saturating_sub(self.offset()).min(BLOCK_SIZE)
    }

    /// Whether the block lies past the blob's end.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} of {}", self.index, self.blob)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ObjectKey, Version};

    fn named(volume: u64, key: &str, version: &str, size: u64) -> VolumeBlob {
        let blob = Blob { key: ObjectKey::new(key), version: Version::new(version), size };
        VolumeBlob::new(VolumeId(volume), blob)
    }

    #[test]
    fn a_name_holds_volume_key_version_and_size() {
        let base = named(1, "ab", "c", 9);
        assert_eq!(base, named(1, "ab", "c", 9));
        for other in
            [named(2, "ab", "c", 9), named(1, "a", "bc", 9), named(1, "ab", "d", 9), named(1, "ab", "c", 8)]
        {
            assert_ne!(base, other);
            assert_ne!(base.identity(), other.identity());
        }
        assert_ne!(base.block(0), base.block(1));
    }

    #[test]
    fn the_last_block_is_short() {
        let blob = named(1, "k", "v", 2 * BLOCK_SIZE + 5);
        assert_eq!(blob.block_count(), 3);
        let lengths: Vec<u64> = (0..4).map(|index| blob.block(index).len()).collect();
        assert_eq!(lengths, [BLOCK_SIZE, BLOCK_SIZE, 5, 0]);
        assert!(blob.block(3).is_empty() && blob.block(u64::MAX).is_empty());
        assert_eq!(named(1, "k", "v", 0).block_count(), 0);
    }
}
