//! How an object is cut into parts.

use forebay_core::units::MIB;

/// The most parts of one upload, as S3 has it.
pub const MAX_PARTS: usize = 10_000;
/// The least bytes of a part that is not the last, as S3 has it.
pub const MIN_PART_BYTES: u64 = 5 * MIB;
/// The largest piece that one part copies inside the store. S3 allows 5 GiB; smaller ones run side by side.
pub const COPY_PART_BYTES: u64 = 1 << 30;
/// The first part, and with it the largest object that is one PUT.
const FIRST_PART_BYTES: u64 = 8 * MIB;
/// Parts of one size; then the size doubles. With 800, an object needs parts of about 1/800 of its size.
const PARTS_OF_A_SIZE: usize = 800;
/// The largest part, as S3 has it.
pub(super) const LARGEST_PART_BYTES: u64 = 5 << 30;

/// Bytes of part `index`, counted from 0: 8 MiB for the first 800 parts, then doubling every 800 up to 5 GiB. All
/// 10,000 parts together hold more than 16 TiB.
pub fn part_size(index: usize) -> u64 {
    (FIRST_PART_BYTES << (index / PARTS_OF_A_SIZE).min(20)).min(LARGEST_PART_BYTES)
}

/// Bytes of each part where all but the last have to be alike, of an object of so many bytes, if that is known: 8 MiB, or as
/// many as it takes to have enough of them.
pub fn even_part_size(length: Option<u64>) -> u64 {
    length.unwrap_or(0).div_ceil(MAX_PARTS as u64).max(FIRST_PART_BYTES)
}
