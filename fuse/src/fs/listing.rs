//! Where a reader stands in a directory that changes under it.
//!
//! The tree lists by name and the kernel resumes by number. A cursor numbers the names that it hands out, 3 for the
//! first (1 and 2 are `.` and `..`), and remembers which name went under which number: a position that was handed out
//! once leads to the same place for as long as the directory is open, whatever came and went meanwhile. A name that is
//! read again keeps its number; one that has come in between starts a run of new numbers.
//!
//! Memory is bounded for any directory. Names lie in blocks, each name without what it shares with the one before: a
//! million short ones take some 5 MiB. Past `LOG_BYTES`, every second old block goes; a position in one is found by
//! counting on from the block before, which is exact while nothing changed there.

use std::collections::VecDeque;

use bytes::Bytes;

/// Number of `.`.
pub(super) const DOT: u64 = 1;
/// Number of `..`.
pub(super) const DOT_DOT: u64 = 2;
/// Names in one block: one of them is kept whole.
const BLOCK_NAMES: u64 = 32;
/// Bytes of one cursor's names before old blocks are thinned out.
const LOG_BYTES: usize = 16 << 20;

/// The position of a reader in a directory.
#[derive(Debug)]
pub(super) struct Cursor {
    /// Names in the order of their numbers, with gaps where blocks were thinned out.
    blocks: VecDeque<Block>,
    /// The number after the last one given.
    end: u64,
    /// The name last noted.
    last: Bytes,
    bytes: usize,
    limit: usize,
}

/// Up to [`BLOCK_NAMES`] names with numbers in a row.
#[derive(Debug)]
struct Block {
    first: u64,
    count: u64,
    /// For each name: how many bytes it shares with the one before, how many follow, and those.
    packed: Vec<u8>,
}

/// Where to go on.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Resume {
    /// The listing goes on after this name.
    pub(super) after: Option<Bytes>,
    /// The number of that name.
    pub(super) number: u64,
}

impl Default for Cursor {
    fn default() -> Self {
        let last = Bytes::new();
        Self { blocks: VecDeque::new(), end: DOT_DOT + 1, last, bytes: 0, limit: LOG_BYTES }
    }
}

impl Block {
    /// The name of its number `number`, or of the last before it.
    fn name(&self, number: u64) -> Bytes {
        let wanted = number.min(self.first + self.count - 1) - self.first;
        let (mut name, mut rest) = (Vec::with_capacity(64), self.packed.as_slice());
        for _ in 0..=wanted {
            let [shared, more, tail @ ..] = rest else { break };
            let (suffix, next) = tail.split_at(usize::from(*more));
            name.truncate(usize::from(*shared));
            name.extend_from_slice(suffix);
            rest = next;
        }
        name.into()
    }

    fn push(&mut self, name: &[u8], before: &[u8]) {
        let shared = match self.count {
            0 => 0,
            _ => name.iter().zip(before).take_while(|(a, b)| a == b).count(),
        };
        // Names have at most 255 bytes.
        self.packed.extend([shared as u8, (name.len() - shared) as u8]);
        self.packed.extend_from_slice(&name[shared..]);
        self.count += 1;
    }

    fn size(&self) -> usize {
        size_of::<Self>() + self.packed.capacity()
    }
}

impl Cursor {
    /// The nearest known name at or before `number`. Entries between its number and `number` are to be skipped.
    pub(super) fn resume(&self, number: u64) -> Resume {
        match self.block(number) {
            Some(block) => {
                let number = number.min(block.first + block.count - 1);
                Resume { after: Some(block.name(number)), number }
            }
            None => Resume { after: None, number: DOT_DOT },
        }
    }

    /// The number of `name`, which follows the one that has the number `previous`.
    pub(super) fn number_after(&self, previous: u64, name: &[u8]) -> u64 {
        let next = previous + 1;
        match self.block(next) {
            Some(block) if next < block.first + block.count && block.name(next) != name => self.end,
            _ => next,
        }
    }

    /// Notes that `name` was handed out under `number`. Numbers that were given before keep their names.
    pub(super) fn note(&mut self, number: u64, name: Bytes) {
        if number < self.end {
            return;
        }
        if self.blocks.back().is_none_or(|block| block.count == BLOCK_NAMES) {
            self.seal_last();
            self.blocks.push_back(Block { first: number, count: 0, packed: Vec::new() });
        }
        if let Some(block) = self.blocks.back_mut() {
            block.push(&name, &self.last);
        }
        self.end = number + 1;
        self.last = name;
    }

    /// The last block that begins at or before `number`.
    fn block(&self, number: u64) -> Option<&Block> {
        let later = self.blocks.partition_point(|block| block.first <= number);
        self.blocks.get(later.checked_sub(1)?)
    }

    /// Counts the block that is full, and makes room when there are too many.
    fn seal_last(&mut self) {
        let Some(block) = self.blocks.back_mut() else { return };
        block.packed.shrink_to_fit();
        self.bytes += block.size();
        if self.bytes > self.limit {
            let mut keeps = false;
            self.blocks.retain(|_| {
                keeps = !keeps;
                keeps
            });
            self.bytes = self.blocks.iter().map(Block::size).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u64) -> Bytes {
        format!("{number:09}").into()
    }

    fn filled(count: u64) -> Cursor {
        let mut cursor = Cursor::default();
        for number in 3..3 + count {
            cursor.note(cursor.number_after(number - 1, &name(number)), name(number));
        }
        cursor
    }

    #[test]
    fn a_new_cursor_starts_behind_dot_dot() {
        assert_eq!(Cursor::default().resume(DOT_DOT), Resume { after: None, number: DOT_DOT });
    }

    #[test]
    fn every_name_of_a_million_is_found_exactly_in_little_memory() {
        let cursor = filled(1_000_000);
        for number in (3..1_000_003).step_by(997) {
            assert_eq!(cursor.resume(number), Resume { after: Some(name(number)), number });
        }
        assert!(cursor.bytes < LOG_BYTES, "{}", cursor.bytes);
    }

    #[test]
    fn names_read_again_keep_their_numbers_and_new_ones_get_new_numbers() {
        let mut cursor = filled(5000);
        assert_eq!(cursor.number_after(2, &name(3)), 3);
        let newcomer = Bytes::from_static(b"000000003x");
        assert_eq!(cursor.number_after(3, &newcomer), 5003);
        cursor.note(5003, newcomer.clone());
        assert_eq!(cursor.number_after(5003, &name(4)), 5004, "the run of new numbers goes on");
        for number in [3, 4, 777, 5002] {
            assert_eq!(cursor.resume(number), Resume { after: Some(name(number)), number });
        }
        assert_eq!(cursor.resume(5003), Resume { after: Some(newcomer), number: 5003 });
    }

    #[test]
    fn memory_is_bounded_for_any_directory() {
        let mut cursor = Cursor { limit: 64 << 10, ..Cursor::default() };
        for number in 3..200_003 {
            cursor.note(number, name(number));
            assert!(cursor.bytes <= 64 << 10, "{number}");
        }
        let Resume { after, number } = cursor.resume(100_000);
        assert_eq!(after, Some(name(number)));
        assert!(number <= 100_000);
        assert_eq!(cursor.resume(200_002), Resume { after: Some(name(200_002)), number: 200_002 });
    }
}
