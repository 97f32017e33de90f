//! Cutting blob ranges into blocks, and the small id under which every tier files a block.

use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ops::Range;

use bytes::Bytes;
use forebay_core::{BLOCK_SIZE, BlockKey, Error, Result, VolumeBlob, crc32c};

/// The blocks that `range` of `blob` touches, in order, each with the bytes meant inside it. What lies past the
/// blob's end is left out.
pub fn pieces(blob: &VolumeBlob, range: Range<u64>) -> impl Iterator<Item = (BlockKey, Range<u64>)> + use<> {
    let end = range.end.min(blob.size());
    let start = range.start.min(end);
    let blob = blob.clone();
    (start / BLOCK_SIZE..end.div_ceil(BLOCK_SIZE)).filter(move |_| start < end).map(move |index| {
        let key = blob.block(index);
        let offset = key.offset();
        (key, start.saturating_sub(offset)..(end - offset).min(BLOCK_SIZE))
    })
}

/// A block key in 24 bytes, without its names: the digest stands for the blob. Packed, as millions of them are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C, packed(8))]
pub(crate) struct BlockId {
    pub(crate) digest: u128,
    pub(crate) index: u64,
}

impl BlockId {
    pub(crate) fn of(key: &BlockKey) -> Self {
        Self { digest: key.blob.digest(), index: key.index }
    }
}

impl Hash for BlockId {
    /// The digest is uniform already; the odd factor (2^64 over the golden ratio) spreads neighbouring blocks.
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64((self.digest as u64).wrapping_add(self.index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    }
}

/// Takes the one word that a [`BlockId`] writes as the hash itself.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Uniform(u64);

impl Hasher for Uniform {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Hashes [`BlockId`]s.
pub(crate) type BuildUniform = BuildHasherDefault<Uniform>;

/// The bytes of a block beside their CRC-32C, computed once, when they arrived.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) bytes: Bytes,
    pub(crate) crc: u32,
}

/// Bytes up to this size are copied when they are put in from outside: they may be a small slice of a large buffer
/// that a cached block would keep alive. Larger ones are worth their buffer.
const COPY_UP_TO: usize = 256 << 10;

impl Block {
    /// A block whose bytes have an allocation of their own.
    pub(crate) fn new(bytes: Bytes) -> Self {
        let crc = crc32c(&bytes);
        Self { bytes, crc }
    }

    /// A block of bytes that somebody else allocated.
    pub(crate) fn foreign(bytes: Bytes) -> Self {
        Self::new(if bytes.len() <= COPY_UP_TO { Bytes::copy_from_slice(&bytes) } else { bytes })
    }

    /// The same block for keeping: small bytes in an allocation of their own, as in [`Self::foreign`].
    pub(crate) fn compact(self) -> Self {
        match self.bytes.len() <= COPY_UP_TO {
            true => Self { bytes: Bytes::copy_from_slice(&self.bytes), ..self },
            false => self,
        }
    }

    /// Bytes `within`, sharing the block's memory; `key` is for the error.
    pub(crate) fn slice(&self, key: &BlockKey, within: Range<u64>) -> Result<Bytes> {
        check_within(key, &within)?;
        Ok(self.bytes.slice(within.start as usize..within.end as usize))
    }
}

/// Refuses ranges that do not lie inside the block.
pub(crate) fn check_within(key: &BlockKey, within: &Range<u64>) -> Result<()> {
    let length = key.len();
    if within.start <= within.end && within.end <= length {
        return Ok(());
    }
    Err(Error::invalid(format!("bytes {}..{} of {key}, which has {length}", within.start, within.end)))
}

#[cfg(test)]
mod tests {
    use forebay_core::{Blob, ObjectKey, Version, VolumeId};

    use super::*;

    #[test]
    fn ranges_are_cut_at_block_edges() {
        const B: u64 = BLOCK_SIZE;
        let size = 2 * B + 10;
        let blob = Blob { key: ObjectKey::new("k"), version: Version::new("v"), size };
        let blob = VolumeBlob::new(VolumeId(1), blob);
        for (range, expected) in [
            (0..0, vec![]),
            (5..6, vec![(0, 5..6)]),
            (0..B, vec![(0, 0..B)]),
            (B - 1..B + 1, vec![(0, B - 1..B), (1, 0..1)]),
            (B..u64::MAX, vec![(1, 0..B), (2, 0..10)]),
            (size..size + 5, vec![]),
            (size + 5..size + 9, vec![]),
        ] {
            let cut: Vec<_> = pieces(&blob, range.clone()).map(|(key, within)| (key.index, within)).collect();
            assert_eq!(cut, expected, "{range:?}");
        }
    }
}
