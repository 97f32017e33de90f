//! The checksum of a sealed step, of all that is said of it: a bit that changes later, in whoever's memory, is found.
//!
//! It is of the values, whatever text they travel in. Numbers are 8 bytes, little-endian; a text is its length and its
//! bytes, a list its length and its entries, what may be left out a list of none or one. All fields are taken in the
//! order in which the types have them, so that no two seals give the same bytes.

use forebay_core::checksum::Crc32c;

use super::{Held, Seal};
use crate::manifest::{Checksum, Encoding, Extra, Slice, SliceKind, Tensor};

/// Bytes that are checksummed together, for each call has a price.
const PIECE: usize = 16 << 10;

/// The bytes that were not checksummed yet, and the checksum of those before.
struct Sum {
    crc32c: Crc32c,
    bytes: Vec<u8>,
}

/// CRC-32C of all of `held` but the one that it carries.
pub(super) fn checksum(held: &Held) -> Checksum {
    let mut sum = Sum { crc32c: Crc32c::default(), bytes: Vec::with_capacity(2 * PIECE) };
    sum.held(held);
    sum.pour();
    Checksum(sum.crc32c.value())
}

// Each type is taken apart by name, so that a new field does not compile until it is in the checksum.
impl Sum {
    fn held(&mut self, held: &Held) {
        let Held { start, rank, world_size, seal, crc32c: _ } = held;
        self.text(start);
        self.number(u64::from(*rank));
        self.number(u64::from(*world_size));
        let Seal { save, round, slot, size, header, header_crc32c, step, created_ms, tensors, extras } = seal;
        self.number(*save);
        self.list(round.as_slice(), |sum, round| sum.number(round.number()));
        for number in [*slot as u64, *size, *header, u64::from(header_crc32c.0), *step, *created_ms] {
            self.number(number);
        }
        self.list(tensors, Self::tensor);
        self.list(extras, Self::extra);
    }

    fn tensor(&mut self, Tensor { name, dtype, shape, slices }: &Tensor) {
        self.text(name);
        self.text(dtype);
        self.numbers(shape);
        self.list(slices, Self::slice);
    }

    fn slice(&mut self, slice: &Slice) {
        let Slice { kind, offsets, lengths, shard, start, end, crc32c, blake3 } = slice;
        self.number(match kind {
            SliceKind::Box => 0,
            SliceKind::Flat => 1,
        });
        self.numbers(offsets);
        self.numbers(lengths);
        for number in [u64::from(*shard), *start, *end, u64::from(crc32c.0)] {
            self.number(number);
        }
        self.bytes.extend_from_slice(&blake3.0);
    }

    fn extra(&mut self, Extra { name, encoding, data }: &Extra) {
        self.text(name);
        self.number(match encoding {
            Encoding::Json => 0,
        });
        self.text(data);
    }

    fn list<T>(&mut self, entries: &[T], take: impl Fn(&mut Self, &T)) {
        self.number(entries.len() as u64);
        entries.iter().for_each(|entry| take(self, entry));
    }

    fn numbers(&mut self, numbers: &[u64]) {
        self.list(numbers, |sum, number| sum.number(*number));
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        // It may be long, and needs no copy.
        self.pour();
        self.crc32c.update(text.as_bytes());
    }

    fn number(&mut self, number: u64) {
        self.bytes.extend_from_slice(&number.to_le_bytes());
        if self.bytes.len() >= PIECE {
            self.pour();
        }
    }

    fn pour(&mut self) {
        self.crc32c.update(&self.bytes);
        self.bytes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Round;
    use crate::manifest::Identity;

    /// The bytes as docs/formats-checkpoint.md has them.
    #[test]
    fn the_checksum_is_of_the_bytes_that_are_drawn() {
        let (offsets, lengths, blake3) = (vec![3], vec![2], Identity([7; 32]));
        let (kind, shard, start, end, crc32c) = (SliceKind::Flat, 0, 4096, 4098, Checksum(9));
        let slice = Slice { kind, offsets, lengths, shard, start, end, crc32c, blake3 };
        let shape = vec![5, 6];
        let tensor = Tensor { name: "ab".into(), dtype: "uint8".into(), shape, slices: vec![slice] };
        let extra = Extra { name: "state".into(), encoding: Encoding::Json, data: "x".repeat(PIECE) };
        let seal = Seal {
            save: 10,
            round: Some(Round::new(11)),
            slot: 1,
            size: 4098,
            header: 4096,
            header_crc32c: Checksum(12),
            step: 13,
            created_ms: 14,
            tensors: vec![tensor],
            extras: vec![extra],
        };
        let held = Held::new("cafe".into(), 1, 2, seal);
        let mut bytes = Vec::new();
        let numbers = |bytes: &mut Vec<u8>, numbers: &[u64]| {
            numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        };
        numbers(&mut bytes, &[4]);
        bytes.extend_from_slice(b"cafe");
        numbers(&mut bytes, &[1, 2, 10, 1, 11, 1, 4098, 4096, 12, 13, 14, 1, 2]);
        bytes.extend_from_slice(b"ab");
        numbers(&mut bytes, &[5]);
        bytes.extend_from_slice(b"uint8");
        numbers(&mut bytes, &[2, 5, 6, 1, 1, 1, 3, 1, 2, 0, 4096, 4098, 9]);
        bytes.extend_from_slice(&[7; 32]);
        numbers(&mut bytes, &[1, 5]);
        bytes.extend_from_slice(b"state");
        numbers(&mut bytes, &[0, PIECE as u64]);
        bytes.extend_from_slice(&[b'x'; PIECE]);
        assert_eq!(held.crc32c, Some(Checksum(forebay_core::crc32c(&bytes))));
        held.expect_sound().expect("as it was sealed");
    }
}
