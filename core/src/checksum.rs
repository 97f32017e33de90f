//! CRC-32C (Castagnoli, RFC 3720 appendix B.4), the checksum of blocks, records and shards.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC-32C of a byte string that arrives in pieces.
#[derive(Debug, Clone)]
pub struct Crc32c(Digest);

impl Default for Crc32c {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }
}

impl Crc32c {
    /// Takes the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of everything taken so far.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}

/// CRC-32C of two adjacent byte strings from their checksums; `second_length` is in bytes.
///
/// Appending n bits to a message multiplies its remainder by x^n modulo the polynomial, which takes one product for
/// each bit that is set in n: as zlib's `crc32_combine`. A product is some ten nanoseconds.
pub fn combine(first: u32, second: u32, second_length: u64) -> u32 {
    let mut shifted = first;
    let mut rest = second_length;
    // x^8, squared once for each bit: x^(8 * 2^k).
    for power in BYTE_POWERS {
        if rest == 0 {
            break;
        }
        if rest & 1 == 1 {
            shifted = product(shifted, power);
        }
        rest >>= 1;
    }
    shifted ^ second
}

/// CRC-32C's polynomial, the coefficient of x^31 in the lowest bit.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// x^(8 * 2^k) modulo the polynomial, by k.
const BYTE_POWERS: [u32; u64::BITS as usize] = {
    let mut powers = [0x0080_0000; u64::BITS as usize];
    let mut k = 1;
    while k < powers.len() {
        powers[k] = product(powers[k - 1], powers[k - 1]);
        k += 1;
    }
    powers
};

/// The product of two polynomials of degree 31 at most, modulo the polynomial.
const fn product(a: u32, mut b: u32) -> u32 {
    let mut sum = 0;
    let mut bit = u32::BITS;
    while bit > 0 {
        bit -= 1;
        if a >> bit & 1 == 1 {
            sum ^= b;
        }
        b = (b >> 1) ^ (if b & 1 == 1 { POLYNOMIAL } else { 0 });
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of RFC 3720: 32 bytes of zeros give 8a9136aa.
    #[test]
    fn agrees_with_the_rfc() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let mut pieces = Crc32c::default();
        pieces.update(b"1234");
        pieces.update(b"56789");
        assert_eq!(pieces.value(), 0xe306_9283);
        assert_eq!(combine(crc32c(b"1234"), crc32c(b"56789"), 5), 0xe306_9283);
    }

    #[test]
    fn joins_strings_of_any_length() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for length in (0..300).chain([4095, 4096, 4097, 65_536, 99_999]) {
            let (first, second) = bytes.split_at(bytes.len() - length);
            assert_eq!(combine(crc32c(first), crc32c(second), length as u64), crc32c(&bytes), "{length}");
        }
        for length in [1 << 32, (1 << 45) + 12_345, u64::MAX >> 3] {
            let algorithm = CrcAlgorithm::Crc32Iscsi;
            let expected = crc_fast::checksum_combine(algorithm, 0x1234_5678, 0x9abc_def0, length) as u32;
            assert_eq!(combine(0x1234_5678, 0x9abc_def0, length), expected, "{length}");
        }
    }
}
