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
pub fn combine(first: u32, second: u32, second_length: u64) -> u32 {
    crc_fast::checksum_combine(CrcAlgorithm::Crc32Iscsi, u64::from(first), u64::from(second), second_length)
        as u32
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
}
