//! Which bytes of a file to bring in ahead of a reader, and which files (`directory`). Pure: it sees reads and answers
//! ranges, and fetches nothing.
//!
//! The first read fetches nothing extra: many programs look at a header only. A reader that goes forward gets a window of
//! one block, then of four times as many each time, up to `PrefetchSettings::max_window_bytes`: each step is a wait for the
//! store. A window is filled up again when a quarter of it is consumed, so that a link is never idle. A jump closes it, so
//! that random reads fetch nothing extra. Open windows share half of the memory for blocks at rest.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use forebay_core::BLOCK_SIZE;
use forebay_core::units::MIB;
use serde::{Deserialize, Serialize};

pub(crate) mod directory;

/// How far ahead sequential readers are served.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefetchSettings {
    /// Largest window of one open file in bytes; 0 switches prefetch off.
    /// Default 128 MiB, and an eighth of the volume's memory at most: 32 blocks, of which S3 gives each 85 to 90 MB/s
    /// ("Performance design patterns for Amazon S3"), 20 ms late.
    pub max_window_bytes: u64,
    /// Most files that are brought in ahead of one who reads the small files of a directory in order; 0 switches that
    /// off. Default 64, and as many as there is memory for at most: enough for 3,000 files a second from a store 20 ms away.
    pub max_files: usize,
    /// Bytes that all windows of a volume may have together, of files and of directories: what is read ahead is to be there still when its reader comes.
    #[serde(skip)]
    pub(crate) shared_bytes: u64,
}

impl Default for PrefetchSettings {
    fn default() -> Self {
        Self { max_window_bytes: 32 * BLOCK_SIZE, max_files: 64, shared_bytes: 192 * MIB }
    }
}

/// How far a read may lie from where the last one ended and still count as going on: the kernel sends the READs
/// of one readahead window from several threads, up to 1 MiB each, in any order.
const REORDER_BYTES: u64 = 4 << 20;

/// The files of a volume that are read front to back, and walks along small files, which share what may be read ahead.
#[derive(Debug)]
pub(crate) struct Readers {
    shared_bytes: u64,
    count: AtomicUsize,
}

impl Readers {
    pub(crate) fn new(settings: &PrefetchSettings) -> Arc<Self> {
        Arc::new(Self { shared_bytes: settings.shared_bytes, count: AtomicUsize::new(0) })
    }

    /// The part of each.
    fn share(&self) -> u64 {
        self.shared_bytes / self.count.load(Relaxed).max(1) as u64
    }
}

/// One of them, until it is dropped.
#[derive(Debug)]
struct Reader(Arc<Readers>);

impl Reader {
    fn enter(readers: &Arc<Readers>) -> Self {
        readers.count.fetch_add(1, Relaxed);
        Self(readers.clone())
    }

    /// Its part of what all of them may have, a block at least.
    fn share(&self) -> u64 {
        self.0.share().max(BLOCK_SIZE)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Relaxed);
    }
}

/// The read pattern of one open file.
#[derive(Debug)]
pub(crate) struct Prefetch {
    readers: Arc<Readers>,
    /// While its window is open.
    reader: Option<Reader>,
    max_window: u64,
    window: u64,
    /// End of the furthest read so far in this run.
    reached: u64,
    /// End of what was already asked for.
    requested: u64,
    /// Start of what was read and is not yet told by [`Self::passed`], for those as well who bring in what is ahead of it.
    untold: Arc<AtomicU64>,
}

impl Prefetch {
    /// A file that nobody has read yet.
    pub(crate) fn new(settings: &PrefetchSettings, readers: &Arc<Readers>) -> Self {
        let [window, reached, requested] = [0; 3];
        let (readers, max_window) = (readers.clone(), settings.max_window_bytes);
        Self { readers, reader: None, max_window, window, reached, requested, untold: Arc::default() }
    }

    /// Up to where the run has come, by whole blocks: what it has passed is not to be brought in for it any more.
    pub(crate) fn place(&self) -> Arc<AtomicU64> {
        self.untold.clone()
    }

    /// Takes a read and answers what to bring in behind it, often nothing. Ranges never pass `size` and never repeat
    /// what the same run asked for.
    pub(crate) fn observe(&mut self, read: Range<u64>, size: u64) -> Range<u64> {
        let near = self.reached > 0 && read.start.abs_diff(self.reached) <= REORDER_BYTES;
        if !near || self.max_window == 0 {
            (self.window, self.reached, self.requested) = (0, read.end, read.end);
            self.reader = None;
            self.untold.store(read.start.next_multiple_of(BLOCK_SIZE), Relaxed);
            return read.end..read.end;
        }
        self.reached = self.reached.max(read.end);
        let left = self.requested.saturating_sub(self.reached);
        if left > self.window / 4 * 3 {
            return self.reached..self.reached;
        }
        let reader = self.reader.get_or_insert_with(|| Reader::enter(&self.readers));
        let most = self.max_window.min(reader.share());
        self.window = (self.window * 4).clamp(BLOCK_SIZE.min(most), most);
        let start = self.requested.max(self.reached);
        let end = (self.reached + self.window).min(size).max(start);
        self.requested = end;
        start..end
    }

    /// The whole blocks that the run has come past since the last call, with the end of the file in place of the
    /// last block's.
    pub(crate) fn passed(&mut self, size: u64) -> Range<u64> {
        let end = if self.reached >= size { size } else { self.reached / BLOCK_SIZE * BLOCK_SIZE };
        self.untold.fetch_max(end, Relaxed).min(end)..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(reads: impl Iterator<Item = Range<u64>>, size: u64) -> Vec<Range<u64>> {
        let settings = PrefetchSettings::default();
        let mut prefetch = Prefetch::new(&settings, &Readers::new(&settings));
        reads.map(|read| prefetch.observe(read, size)).filter(|range| !range.is_empty()).collect()
    }

    #[test]
    fn a_sequential_reader_gets_every_byte_once_in_growing_windows() {
        let size = 200 * MIB;
        let asked = run((0..200).map(|at| at * MIB..(at + 1) * MIB), size);
        assert!(asked.windows(2).all(|pair| pair[0].end == pair[1].start), "{asked:?}");
        assert_eq!(asked.last().map(|range| range.end), Some(size));
        let longest = asked.iter().map(|range| range.end - range.start).max();
        assert!(longest <= Some(32 * BLOCK_SIZE), "{asked:?}");
        assert!(asked.len() < 40, "few, large requests: {}", asked.len());
    }

    #[test]
    fn reads_of_one_window_may_come_in_any_order() {
        let order = [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10];
        let asked = run(order.iter().map(|at| at * MIB..(at + 1) * MIB), 64 * MIB);
        assert!(asked.iter().map(|range| range.end).max() >= Some(20 * MIB), "{asked:?}");
    }

    #[test]
    fn random_reads_fetch_nothing_extra() {
        let places = [700, 10, 500, 90, 300, 900];
        let asked = run(places.iter().map(|at| at * MIB..at * MIB + 4096), 1000 * MIB);
        assert_eq!(asked, []);
    }

    /// What a run of `reads` is told to have passed.
    fn passed(reads: &[Range<u64>], size: u64) -> Vec<Range<u64>> {
        let settings = PrefetchSettings::default();
        let mut prefetch = Prefetch::new(&settings, &Readers::new(&settings));
        let told = reads.iter().map(|read| {
            prefetch.observe(read.clone(), size);
            prefetch.passed(size)
        });
        told.filter(|range| !range.is_empty()).collect()
    }

    #[test]
    fn whole_blocks_are_passed_once_and_only_by_who_read_all_of_them() {
        let size = 9 * MIB;
        let reads: Vec<_> = (0..9).map(|at| at * MIB..(at + 1) * MIB).collect();
        assert_eq!(passed(&reads, size), [0..4 * MIB, 4 * MIB..8 * MIB, 8 * MIB..size]);
        assert_eq!(passed(&reads[2..], size), [4 * MIB..8 * MIB, 8 * MIB..size]);
        let whole = 0..100;
        assert_eq!(passed(&[0..100, 99..100], 100), [whole]);
        let random = [5 * MIB - 1..5 * MIB, 0..4096, 8 * MIB - 4096..8 * MIB];
        assert_eq!(passed(&random, size), []);
    }

    /// Eight workers of a loader, each with a large file of its own, read more ahead than the memory held until they came.
    #[test]
    fn many_readers_share_what_is_read_ahead() {
        let settings = PrefetchSettings::default();
        let readers = Readers::new(&settings);
        let ahead = |readers: &Arc<Readers>, count: usize| {
            let mut files: Vec<_> = (0..count).map(|_| Prefetch::new(&settings, readers)).collect();
            let mut unread = 0;
            for at in 0..200 {
                let read = at * MIB..(at + 1) * MIB;
                files.iter_mut().for_each(|file| _ = file.observe(read.clone(), 1000 * MIB));
                unread = files.iter().map(|file| file.requested - file.reached).sum::<u64>().max(unread);
            }
            unread
        };
        assert!(ahead(&readers, 1) > 96 * MIB);
        let unread = ahead(&readers, 8);
        assert!((96 * MIB..=192 * MIB).contains(&unread), "{unread}");
        // Who closes the file, or jumps, leaves its part to others.
        assert_eq!(readers.count.load(Relaxed), 0);
        let mut file = Prefetch::new(&settings, &readers);
        for read in [0..MIB, MIB..2 * MIB] {
            file.observe(read, 1000 * MIB);
        }
        assert_eq!(readers.count.load(Relaxed), 1);
        file.observe(500 * MIB..501 * MIB, 1000 * MIB);
        assert_eq!(readers.count.load(Relaxed), 0);
    }

    #[test]
    fn a_small_file_is_never_read_past_its_end() {
        assert_eq!(run(std::iter::once(0..100), 100), []);
    }
}
