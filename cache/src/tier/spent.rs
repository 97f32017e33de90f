//! Which blocks in memory have done their work: those that a reader has read to the end and keeps a copy of, as the
//! kernel does in its pages. Pure bookkeeping.
//!
//! The memory of spent blocks is what the next fetches run through, so that a stream of any length goes through few
//! pages instead of claiming fresh ones up to the ceiling: clearing a fresh page costs more than filling it. The latest
//! ones stay readable, for readers that come a little late. A block that is spent a second time shows that its reader
//! keeps no copy, or lost it: from then on it stays as long as any other.

use std::collections::{HashMap, VecDeque};

use crate::block::{BlockId, BuildUniform};

/// Spent blocks that stay readable: eight of the largest, as much as one reader has in flight ahead of it.
const BYTES: u64 = 32 << 20;
/// Blocks remembered as given up, at about 100 bytes each: those of 128 GiB of large blobs.
const REMEMBERED: usize = 1 << 15;

/// The books of spent blocks.
#[derive(Debug)]
pub(crate) struct Spent {
    /// Still readable, oldest first, with the bytes that each one takes.
    waiting: VecDeque<(BlockId, u64)>,
    bytes: u64,
    limit: u64,
    /// Given up, oldest first.
    gone: VecDeque<BlockId>,
    /// Everything in the two queues; `true` while the block is to be given up.
    known: HashMap<BlockId, bool, BuildUniform>,
}

impl Spent {
    /// For a tier with this ceiling in bytes.
    pub(crate) fn new(ceiling: u64) -> Self {
        let (waiting, gone, known) = Default::default();
        Self { waiting, bytes: 0, limit: BYTES.min(ceiling / 4), gone, known }
    }

    /// Notes that a block which takes `bytes` is spent; returns the blocks to give up now.
    pub(crate) fn add(&mut self, id: BlockId, bytes: u64) -> Vec<BlockId> {
        if let Some(leaves) = self.known.get_mut(&id) {
            *leaves = false;
            return Vec::new();
        }
        self.known.insert(id, true);
        self.waiting.push_back((id, bytes));
        self.bytes += bytes;
        let mut leave = Vec::new();
        while self.bytes > self.limit
            && let Some((id, bytes)) = self.waiting.pop_front()
        {
            self.bytes -= bytes;
            if let Some(leaves) = self.known.get_mut(&id)
                && std::mem::take(leaves)
            {
                leave.push(id);
            }
            self.gone.push_back(id);
        }
        while self.gone.len() > REMEMBERED
            && let Some(id) = self.gone.pop_front()
        {
            self.known.remove(&id);
        }
        leave
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn id(index: u64) -> BlockId {
        BlockId { digest: 7, index }
    }

    #[test]
    fn the_latest_blocks_stay_and_each_leaves_once_in_order() {
        let mut spent = Spent::new(1 << 30);
        let left: Vec<BlockId> = (0..100).flat_map(|index| spent.add(id(index), 4 * MIB)).collect();
        assert_eq!(left, (0..92).map(id).collect::<Vec<_>>());
        assert_eq!(Spent::new(8 * MIB).add(id(0), 4 * MIB), [id(0)], "a small tier keeps less");
    }

    #[test]
    fn a_block_that_is_spent_again_stays() {
        let mut spent = Spent::new(1 << 30);
        assert_eq!(spent.add(id(0), 4 * MIB), []);
        assert_eq!(spent.add(id(0), 4 * MIB), [], "while it is readable");
        let left: Vec<BlockId> = (1..20).flat_map(|index| spent.add(id(index), 4 * MIB)).collect();
        assert_eq!(left, (1..12).map(id).collect::<Vec<_>>());
        assert_eq!(spent.add(id(1), 32 * MIB), [], "after it was given up");
    }

    #[test]
    fn the_books_are_bounded() {
        let mut spent = Spent::new(1 << 30);
        for index in 0..200_000 {
            spent.add(id(index), 4096);
        }
        assert_eq!(spent.gone.len(), REMEMBERED);
        assert_eq!(spent.known.len(), spent.gone.len() + spent.waiting.len());
        assert!(spent.waiting.len() as u64 <= BYTES / 4096);
    }
}
