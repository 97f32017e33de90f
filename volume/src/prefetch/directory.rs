//! Which files to bring in ahead of those who read small files one after another. Pure: it sees which files are read
//! and answers which to fetch, and fetches nothing.
//!
//! Inode numbers are handed out in the order of a listing, so that whoever takes a directory in its order takes numbers
//! that grow. Some such steps in a row make a *walk*, which is served a window of files that doubles up to
//! `PrefetchSettings::max_files`. Several readers that share one walk come a little out of order; others have walks of
//! their own. What all of them have ahead shares with open windows (`Readers`): what is fetched is to be in memory still when
//! its reader comes. Random readers make no walk, and those who take every so many-th file, as the ranks of a job do, none that
//! is served: less than every second file of theirs would be wanted.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_core::{BLOCK_SIZE, InodeId};

use super::{PrefetchSettings, Reader, Readers};

/// Walks told apart, as many as data loaders have workers; the one that rested longest gives way.
const WALKS: usize = 32;
/// How far a file may lie from where a walk is and still belong to it.
const NEAR: u64 = 16;
/// Steps forward that make a walk.
const STEPS: u32 = 3;
/// A walk is served while at least one of so many files that it passes is read.
const SPARSE: u64 = 2;
/// The first window in files.
const FIRST_FILES: usize = 8;
/// Files that others read until a walk that did not go on is taken for left: what it has ahead holds up nobody then.
const LEFT_AFTER: u64 = 512;
/// Past all files: an answer is awaited.
const AWAITS: u64 = u64::MAX;
/// Files above this are served by a window of their own, within the file.
pub(crate) const SMALL_FILE: u64 = BLOCK_SIZE;

/// Files that are wanted: the next `files` ones behind `after`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) after: InodeId,
    pub(crate) files: usize,
    walk: u64,
}

/// The walks of one volume's readers.
#[derive(Debug)]
pub(crate) struct Walks {
    max_files: usize,
    readers: Arc<Readers>,
    /// The one that went on last comes last.
    walks: Vec<Walk>,
    /// Names the next walk.
    next: u64,
    /// Counts the files that are read.
    now: u64,
}

#[derive(Debug)]
struct Walk {
    name: u64,
    /// The furthest file read.
    reached: u64,
    steps: u32,
    /// Where it was when it was looked at last, and how many of its files were read since.
    mark: u64,
    read: u64,
    /// When it went on last.
    seen: u64,
    window: usize,
    /// Files that were asked for and are not reached yet, in their order, with their sizes.
    ahead: VecDeque<(u64, u64)>,
    /// While there are any, or an answer is awaited.
    reader: Option<Reader>,
    /// Nothing is asked for before a file past this one is read: an answer is awaited, or nothing followed.
    rests_to: Option<u64>,
}

impl Walks {
    /// Nobody has read anything yet; `max_files` 0 switches walks off.
    pub(crate) fn new(settings: &PrefetchSettings, readers: &Arc<Readers>) -> Self {
        let (max_files, readers) = (settings.max_files, readers.clone());
        Self { max_files, readers, walks: Vec::new(), next: 0, now: 0 }
    }

    /// Takes the first read of a small file, and answers what to bring in, mostly nothing.
    pub(crate) fn observe(&mut self, ino: InodeId) -> Option<Ask> {
        if self.max_files == 0 {
            return None;
        }
        self.now += 1;
        let now = self.now;
        self.walks.iter_mut().take_while(|walk| walk.seen + LEFT_AFTER < now).for_each(Walk::leave);
        let found = self.walks.iter().rposition(|walk| walk.has(ino.0));
        let mut walk = match found {
            Some(at) => self.walks.remove(at),
            None => {
                if self.walks.len() == WALKS {
                    self.walks.remove(0);
                }
                self.next += 1;
                Walk::start(self.next, ino.0)
            }
        };
        walk.seen = now;
        let ask = walk.step(ino.0, self.max_files);
        if ask.is_some() {
            walk.reader.get_or_insert_with(|| Reader::enter(&self.readers));
        }
        self.walks.push(walk);
        ask
    }

    /// `files` follow, with their sizes. Answers how many of them are to be brought in, as far as what is ahead of this walk, and
    /// of all, keeps to its share; after none the walk rests until it goes on behind them.
    pub(crate) fn answer(&mut self, ask: Ask, files: impl Iterator<Item = (InodeId, u64)>) -> usize {
        let all: u64 = self.walks.iter().map(Walk::bytes).sum();
        let Some(walk) = self.walks.iter_mut().find(|walk| walk.name == ask.walk) else { return 0 };
        let before = walk.ahead.len();
        let of_all = self.readers.shared_bytes.saturating_sub(all);
        let mut room = self.readers.share().saturating_sub(walk.bytes()).min(of_all);
        for (ino, size) in files {
            let Some(left) = room.checked_sub(size) else {
                // So many fit: it is asked again when half of them are read.
                walk.window = walk.ahead.len();
                break;
            };
            room = left;
            walk.ahead.push_back((ino.0, size));
        }
        let taken = walk.ahead.len() - before;
        walk.rests_to = (taken == 0).then(|| walk.end());
        walk.release();
        taken
    }
}

impl Walk {
    fn start(name: u64, ino: u64) -> Self {
        let (steps, read, seen, window) = (0, 0, 0, 0);
        let (ahead, reader, rests_to) = (VecDeque::new(), None, None);
        Self { name, reached: ino, steps, mark: ino, read, seen, window, ahead, reader, rests_to }
    }

    fn end(&self) -> u64 {
        self.ahead.back().map_or(self.reached, |(ino, _)| *ino).max(self.reached)
    }

    fn bytes(&self) -> u64 {
        self.ahead.iter().map(|(_, size)| size).sum()
    }

    fn has(&self, ino: u64) -> bool {
        (self.reached.saturating_sub(NEAR)..=self.end().saturating_add(NEAR)).contains(&ino)
    }

    /// Leaves its share to others once it needs none.
    fn release(&mut self) {
        if self.ahead.is_empty() && self.rests_to != Some(AWAITS) {
            self.reader = None;
        }
    }

    /// Nobody comes to what is ahead.
    fn leave(&mut self) {
        self.ahead.clear();
        self.release();
    }

    fn step(&mut self, ino: u64, max_files: usize) -> Option<Ask> {
        self.read += 1;
        if ino > self.reached {
            self.steps = self.steps.saturating_add(1);
            self.reached = ino;
            while self.ahead.front().is_some_and(|(next, _)| *next <= ino) {
                self.ahead.pop_front();
            }
            self.release();
        }
        let rests = self.rests_to.is_some_and(|end| ino <= end);
        if self.steps < STEPS || rests || self.ahead.len() > self.window / 2 {
            return None;
        }
        let is_sparse = self.read * SPARSE < self.reached - self.mark;
        (self.mark, self.read) = (self.reached, 0);
        if is_sparse {
            self.steps = 0;
            return None;
        }
        self.window = (self.window * 2).max(FIRST_FILES).min(max_files);
        let files = self.window.saturating_sub(self.ahead.len());
        self.rests_to = Some(AWAITS);
        (files > 0).then(|| Ask { after: InodeId(self.end()), files, walk: self.name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walks(max_files: usize) -> Walks {
        let settings = PrefetchSettings { max_files, ..PrefetchSettings::default() };
        Walks::new(&settings, &Readers::new(&settings))
    }

    /// What is asked for while `read` is read, in a directory of files 1..=`files`.
    fn fetched(read: impl IntoIterator<Item = u64>, files: u64) -> Vec<u64> {
        let (mut walks, mut all) = (walks(64), Vec::new());
        for ino in read {
            if let Some(ask) = walks.observe(InodeId(ino)) {
                let next: Vec<u64> = (ask.after.0 + 1..=files).take(ask.files).collect();
                walks.answer(ask, next.iter().map(|ino| (InodeId(*ino), 1)));
                all.extend(next);
            }
        }
        all
    }

    #[test]
    fn a_reader_in_order_gets_every_file_once_ahead_of_it() {
        assert_eq!(fetched(1..=1000, 1000), (5..=1000).collect::<Vec<_>>());
        let ahead = fetched(1..=200, 1000);
        assert_eq!(ahead, (5..=5 + ahead.len() as u64 - 1).collect::<Vec<_>>());
        assert!((200..=264).contains(ahead.last().expect("some")), "{ahead:?}");
    }

    #[test]
    fn readers_that_share_a_walk_may_come_out_of_order() {
        let read = (0..100).flat_map(|at| [at * 4 + 3, at * 4 + 1, at * 4 + 4, at * 4 + 2]);
        let mut files = fetched(read, 400);
        assert!(files.windows(2).all(|pair| pair[0] < pair[1]), "{files:?}");
        assert!(files.len() > 380, "{files:?}");
        files.dedup();
        assert_eq!(files.last(), Some(&400));
    }

    #[test]
    fn each_worker_of_a_loader_has_a_walk_of_its_own() {
        let read = (1..=100_u64).flat_map(|at| (0..8).map(move |worker| worker * 10_000 + at));
        let files = fetched(read, 100_000);
        for worker in 0..8 {
            let own = files.iter().filter(|ino| **ino / 10_000 == worker).count();
            assert!((96..=160).contains(&own), "{own} of worker {worker}");
        }
    }

    #[test]
    fn a_walk_goes_on_in_the_next_directory() {
        let mut walks = walks(64);
        let mut asked = Vec::new();
        for ino in 1..=60 {
            let Some(ask) = walks.observe(InodeId(ino)) else { continue };
            asked.push(ask.after.0);
            let end = if ino <= 20 { 20 } else { 60 };
            walks.answer(ask, (ask.after.0 + 1..=end).take(ask.files).map(|ino| (InodeId(ino), 1)));
        }
        assert!(asked.contains(&20) && asked.contains(&21), "{asked:?}");
        assert!(asked.len() < 15, "{asked:?}");
    }

    #[test]
    fn random_readers_fetch_next_to_nothing_extra() {
        let mut at = 1_u64;
        let read: Vec<u64> = (0..5000)
            .map(|_| {
                at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (at >> 33) % 100_000
            })
            .collect();
        let extra = fetched(read, 100_000).len();
        assert!(extra <= 50, "{extra} files for 5000 reads");
    }

    #[test]
    fn every_so_many_th_file_fetches_nothing_extra() {
        for stride in 3..=NEAR {
            let wanted = (1..500).map(|at| at * stride);
            assert!(fetched(wanted, 10_000).is_empty(), "every {stride}th");
        }
        let thinning = (1..=300).chain((1..500).map(|at| 300 + at * 8));
        let extra = fetched(thinning, 10_000).into_iter().filter(|ino| *ino > 300 + 64).count();
        assert!(extra <= 64, "{extra} files after it thinned out");
        let thickening = (1..100).map(|at| at * 8).chain(800..=1800);
        assert!(fetched(thickening, 1800).len() > 950);
    }

    /// Sixty-four files each were too many for memory: the oldest ones, which are read next, were evicted and fetched again.
    #[test]
    fn what_is_ahead_of_all_walks_keeps_to_what_they_share() {
        const SIZE: u64 = 7 << 19;
        let settings = PrefetchSettings::default();
        let readers = Readers::new(&settings);
        let mut walks = Walks::new(&settings, &readers);
        let (mut fetched, mut most, mut asked) = (Vec::new(), 0, 0);
        for (at, worker) in (1..=200_u64).flat_map(|at| (0..8).map(move |worker| (at, worker))) {
            if let Some(ask) = walks.observe(InodeId(worker * 10_000 + at)) {
                let files = (ask.after.0 + 1..).take(ask.files).map(|ino| (InodeId(ino), SIZE));
                let taken = walks.answer(ask, files);
                fetched.extend((ask.after.0 + 1..).take(taken));
                asked += 1;
            }
            most = most.max(walks.walks.iter().map(Walk::bytes).sum());
        }
        assert!((settings.shared_bytes / 2..=settings.shared_bytes).contains(&most), "{most}");
        let count = fetched.len();
        fetched.sort_unstable();
        fetched.dedup();
        assert_eq!(fetched.len(), count, "each file once");
        assert!(count > 8 * 180 && asked < 8 * 100, "{count} files, {asked} times asked");

        // What seven of them left holds the last one up for a while only.
        for at in 201..=900 {
            if let Some(ask) = walks.observe(InodeId(at)) {
                walks.answer(ask, (ask.after.0 + 1..).take(ask.files).map(|ino| (InodeId(ino), SIZE)));
            }
        }
        let last = walks.walks.last().map(Walk::bytes);
        assert!(last > Some(settings.shared_bytes / 2), "{last:?}");
        assert_eq!(readers.count.load(std::sync::atomic::Ordering::Relaxed), 1);
    }

    #[test]
    fn nobody_is_served_who_does_not_want_it() {
        let mut walks = walks(0);
        assert!((1..100).all(|ino| walks.observe(InodeId(ino)).is_none()));
    }
}
