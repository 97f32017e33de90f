//! Where a reader stands in a directory that changes under it.
//!
//! The tree lists by name and the kernel resumes by number. A cursor numbers the names that it hands out, 3 for the
//! first (1 and 2 are `.` and `..`): a position that was handed out once leads to the same place for as long as the
//! directory is open, whatever came and went meanwhile. A name that is read again keeps its number; where another one
//! is found than before, a run of new numbers starts.
//!
//! A block remembers names that followed each other: the first and the last as they are, and a hash of each. A
//! [`Seek`] reads the directory from the block's first name on, and goes on after the last name found that the block has
//! up to the position; what has none of its hashes came later. So a name that stays is neither missed nor doubled. Of
//! one that came where a name was removed nobody can tell on which side of that it lies.
//!
//! In a large directory a name takes 9 to 13 bytes, however long it is. Memory is bounded for any: past `LOG_BYTES`,
//! every second old block goes, but not the first of a run. A position in one is found by counting on from the block before,
//! which is exact while nothing changed there. Only where runs are so many that their first blocks take most of the room do
//! these go, too; a position there is off.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};

use bytes::Bytes;

/// Number of `.`.
pub(super) const DOT: u64 = 1;
/// Number of `..`.
pub(super) const DOT_DOT: u64 = 2;
/// Names in one block: two of them are kept whole, and a seek reads up to so many.
pub(super) const BLOCK_NAMES: usize = 128;
/// Bytes of one cursor's blocks before old ones are thinned out: 2,600,000 names of 255 bytes.
const LOG_BYTES: usize = 32 << 20;
/// Blocks that stay when others are thinned out. The kernel asks again for what did not fit a program's buffer, which
/// holds 1,365 names at most where it has the usual 32 KiB.
const NEWEST_BLOCKS: usize = 16;

/// The position of a reader in a directory.
#[derive(Debug)]
pub(super) struct Cursor {
    /// In the order of their numbers, with gaps where blocks were thinned out and before each run of new numbers.
    blocks: VecDeque<Block>,
    /// The number after the last one given.
    end: u64,
    /// Bytes of all blocks but the last.
    bytes: usize,
    limit: usize,
    /// With a key of its own: nobody can make names that are taken for each other.
    hasher: RandomState,
}

/// Up to [`BLOCK_NAMES`] names that followed each other, with numbers in a row.
#[derive(Debug)]
struct Block {
    first: u64,
    /// Whether a run of numbers begins here: the names before are others than the numbers say.
    begins_run: bool,
    head: Box<[u8]>,
    tail: Vec<u8>,
    /// Of all names, in their order. That two names among so few have one hash of 64 bits is left out of account.
    hashes: Vec<u64>,
}

/// The way to a position: entries are to be read after `after`, from the start when there is none, until
/// [`Seek::advance`] has found it among them.
#[derive(Debug)]
pub(super) struct Seek<'a> {
    pub(super) after: Option<Bytes>,
    cursor: &'a Cursor,
    target: Target<'a>,
}

#[derive(Debug)]
enum Target<'a> {
    /// So many entries on.
    Count(u64),
    /// After the last name there is of those that the block has up to `index`. `found` is the last one seen.
    Known { block: &'a Block, index: usize, found: Bytes },
}

impl Default for Cursor {
    fn default() -> Self {
        let (blocks, hasher) = (VecDeque::new(), RandomState::new());
        Self { blocks, end: DOT_DOT + 1, bytes: 0, limit: LOG_BYTES, hasher }
    }
}

impl Block {
    fn new(first: u64, begins_run: bool, name: &[u8], hash: u64) -> Self {
        Self { first, begins_run, head: name.into(), tail: name.into(), hashes: vec![hash] }
    }

    fn push(&mut self, name: &[u8], hash: u64) {
        self.tail.clear();
        self.tail.extend_from_slice(name);
        self.hashes.push(hash);
    }

    /// The hash of the name that has the number.
    fn hash(&self, number: u64) -> Option<u64> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.hashes.get(index).copied()
    }

    fn index(&self, hash: u64) -> Option<usize> {
        self.hashes.iter().position(|known| *known == hash)
    }

    /// How many of the names lie up to the last that the block has at or before `index`, and whether one lies beyond.
    fn pass(&self, index: usize, names: &[&Bytes], hasher: &RandomState) -> (usize, bool) {
        let mut passed = 0;
        for (at, name) in names.iter().enumerate() {
            match self.index(hasher.hash_one(&name[..])) {
                Some(known) if known <= index => passed = at + 1,
                None if name[..] < self.tail[..] => {}
                _ => return (passed, true),
            }
        }
        (passed, false)
    }

    fn size(&self) -> usize {
        size_of::<Self>() + self.head.len() + self.tail.capacity() + self.hashes.capacity() * size_of::<u64>()
    }
}

impl Cursor {
    /// The way to the place after the name with this number.
    pub(super) fn seek(&self, number: u64) -> Seek<'_> {
        let Some(block) = self.block(number) else {
            return Seek { after: None, cursor: self, target: Target::Count(number.saturating_sub(DOT_DOT)) };
        };
        let (on, last) = (number - block.first, block.hashes.len() - 1);
        let (from, target) = match usize::try_from(on) {
            Ok(0) => (&block.head[..], Target::Count(0)),
            Ok(index) if index < last => {
                let found = Bytes::copy_from_slice(&block.head);
                (&block.head[..], Target::Known { block, index, found })
            }
            _ => (&block.tail[..], Target::Count(on - last as u64)),
        };
        Seek { after: Some(Bytes::copy_from_slice(from)), cursor: self, target }
    }

    /// The number of `name`, which follows the one that has the number `previous`.
    pub(super) fn number_after(&self, previous: u64, name: &[u8]) -> u64 {
        let next = previous + 1;
        if next >= self.end {
            return next;
        }
        match self.block(next).and_then(|block| block.hash(next)) {
            Some(hash) if hash == self.hasher.hash_one(name) => next,
            // One number is left out: this name does not follow the last one noted.
            _ => self.end + 1,
        }
    }

    /// Notes that `name` was handed out under `number`. Numbers that were given before keep their names.
    pub(super) fn note(&mut self, number: u64, name: &[u8]) {
        if number < self.end {
            return;
        }
        let hash = self.hasher.hash_one(name);
        match self.blocks.back_mut() {
            Some(block) if number == self.end && block.hashes.len() < BLOCK_NAMES => block.push(name, hash),
            _ => {
                self.seal_last();
                self.blocks.push_back(Block::new(number, number != self.end, name, hash));
            }
        }
        self.end = number + 1;
    }

    /// The last block that begins at or before `number`.
    fn block(&self, number: u64) -> Option<&Block> {
        let later = self.blocks.partition_point(|block| block.first <= number);
        self.blocks.get(later.checked_sub(1)?)
    }

    /// Counts the block that is done, and makes room when there are too many.
    fn seal_last(&mut self) {
        let Some(block) = self.blocks.back_mut() else { return };
        block.tail.shrink_to_fit();
        block.hashes.shrink_to_fit();
        self.bytes += block.size();
        // With less room made than that it would soon be full again, and each time takes a look at all blocks.
        if self.bytes > self.limit && self.thin_out(true) > self.limit / 4 * 3 {
            self.thin_out(false);
        }
    }

    /// Takes every second old block away, be it the first of a run or not unless `keeps_runs`. Returns the bytes left.
    fn thin_out(&mut self, keeps_runs: bool) -> usize {
        let (mut at, old) = (0, self.blocks.len().saturating_sub(NEWEST_BLOCKS));
        self.blocks.retain(|block| {
            at += 1;
            at > old || at % 2 == 1 || (keeps_runs && block.begins_run)
        });
        self.bytes = self.blocks.iter().map(Block::size).sum();
        self.bytes
    }
}

#[cfg(test)]
impl Cursor {
    /// With room for so many bytes of blocks.
    pub(super) fn with_limit(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Whether the name of `number` is in a block.
    pub(super) fn knows(&self, number: u64) -> bool {
        self.block(number).is_some_and(|block| block.hash(number).is_some())
    }
}

impl Seek<'_> {
    /// Takes the names that were read after `after`; nothing follows them when they are `complete`. Returns how many of
    /// them lie before the position, or `None` while that is not known: `after` then says where to read next.
    pub(super) fn advance(&mut self, names: &[&Bytes], complete: bool) -> Option<usize> {
        let complete = complete || names.is_empty();
        let last = names.last().map(|name| Bytes::clone(name));
        match &mut self.target {
            Target::Count(left) => {
                let here = usize::try_from(*left).map_or(names.len(), |left| left.min(names.len()));
                if here < names.len() || complete {
                    return Some(here);
                }
                *left -= here as u64;
                self.after = last;
            }
            Target::Known { block, index, found } => {
                let (passed, decided) = block.pass(*index, names, &self.cursor.hasher);
                if let Some(name) = passed.checked_sub(1).and_then(|at| names.get(at)) {
                    *found = Bytes::clone(name);
                }
                if !decided && !complete {
                    self.after = last;
                } else if passed > 0 || self.after.as_ref() == Some(found) {
                    return Some(passed);
                } else {
                    // It was seen some reads ago, and only names that came later were after it.
                    (self.after, self.target) = (Some(found.clone()), Target::Count(0));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
