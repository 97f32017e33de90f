//! Which directories to list ahead of those who read one after another. Pure: it sees which directories are read and
//! answers which to list, and lists nothing.
//!
//! Who walks a tree reads the directories of each directory in the order of their names, and waits for the store at each.
//! The first of them, or two one after the other, make a *walk*, which is served a window that doubles up to
//! `ImportSettings::max_ahead`, and holds no more than it reaches before the listings are too old. Several readers of one
//! directory have walks of their own. Those who take every so many-th of its directories make none, but for a first window where they
//! begin with the first.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::InodeId;
use forebay_io::clock::Moment;

/// Walks told apart; the one that rested longest gives way.
const WALKS: usize = 32;
/// The first window in directories.
const FIRST: usize = 8;
/// How many directories a walk may pass over from one that it reads to the next.
pub(super) const SKIPS: usize = 1;
/// A window is read within this part of the time for which a listing is true.
const SHARE_OF_TTL: u32 = 4;

/// Directories that are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ask {
    /// In this one, in the order of names.
    pub(super) parent: InodeId,
    /// Behind this name.
    pub(super) after: Bytes,
    /// No more than so many.
    pub(super) directories: usize,
    /// Whether a walk begins: then `after` was the one read before this, or is empty and before all, and this has to be behind it
    /// by no more than [`SKIPS`], and those wanted come behind this one.
    pub(super) begins_at: Option<Bytes>,
    walk: u64,
}

/// The walks of one tree's readers.
#[derive(Debug, Default)]
pub(super) struct Walks {
    /// The one that went on last comes last.
    walks: Vec<Walk>,
    /// Names the next walk.
    next: u64,
}

#[derive(Debug)]
struct Walk {
    name: u64,
    parent: InodeId,
    /// What was read last, and when.
    reached: Bytes,
    at: Moment,
    window: usize,
    /// Directories that were asked for and are not reached yet, in their order.
    ahead: VecDeque<Bytes>,
    awaits: bool,
    /// Nothing follows `ahead`.
    is_over: bool,
}

impl Walks {
    /// Notes that the directory `name` of `parent` is read from its start, and answers what to list, mostly nothing.
    /// A window is no larger than `most`, and listings stay true for `ttl`.
    pub(super) fn observe(
        &mut self,
        (parent, name): (InodeId, &Bytes),
        now: Moment,
        (most, ttl): (usize, Duration),
    ) -> Option<Ask> {
        let is_before = |walk: &&Walk| walk.parent == parent && walk.reached < *name;
        let nearest = self.walks.iter().filter(is_before).max_by(|a, b| a.reached.cmp(&b.reached));
        let nearest = nearest.map(|walk| walk.name);
        let Some(at) = self.walks.iter().position(|walk| Some(walk.name) == nearest) else {
            if self.walks.len() == WALKS {
                self.walks.remove(0);
            }
            self.next += 1;
            // As if what is before all names had been read a moment ago.
            let mut walk = Walk::start(self.next, parent, Bytes::new(), now);
            let ask = walk.step(name, now, (most, ttl));
            self.walks.push(walk);
            return ask;
        };
        let mut walk = self.walks.remove(at);
        let ask = walk.step(name, now, (most, ttl));
        self.walks.push(walk);
        ask
    }

    /// `names` follow, and are being listed, and perhaps more behind them; `None` where the walk that was to begin is none.
    pub(super) fn answer(&mut self, ask: &Ask, names: Option<&[Bytes]>) {
        let Some(walk) = self.walks.iter_mut().find(|walk| walk.name == ask.walk) else { return };
        walk.awaits = false;
        match names {
            Some(names) => {
                walk.is_over = names.len() < ask.directories;
                // Some may have been read before the answer came.
                walk.ahead.extend(names.iter().filter(|name| **name > walk.reached).cloned());
            }
            None => walk.stop(),
        }
    }
}

impl Walk {
    fn start(name: u64, parent: InodeId, reached: Bytes, at: Moment) -> Self {
        let ahead = VecDeque::new();
        Self { name, parent, reached, at, window: 0, ahead, awaits: false, is_over: false }
    }

    fn stop(&mut self) {
        self.ahead.clear();
        (self.window, self.is_over) = (0, false);
    }

    fn step(&mut self, name: &Bytes, now: Moment, (most, ttl): (usize, Duration)) -> Option<Ask> {
        let before = std::mem::replace(&mut self.reached, name.clone());
        let pace = now.since(std::mem::replace(&mut self.at, now));
        let passed = self.ahead.partition_point(|ahead| ahead < name);
        let is_ahead = self.ahead.get(passed) == Some(name);
        self.ahead.drain(..passed + usize::from(is_ahead));
        if self.awaits {
            return None;
        }
        if self.window > 0 && (!is_ahead || passed > SKIPS) {
            self.stop();
        }
        if self.is_over || self.ahead.len() > self.window / 2 {
            return None;
        }
        let begins_at = (self.window == 0).then(|| name.clone());
        let reach = (ttl / SHARE_OF_TTL).as_nanos() / pace.as_nanos().max(1);
        let most = most.min(usize::try_from(reach).unwrap_or(usize::MAX));
        let window = (self.window * 2).max(FIRST).min(most);
        let directories = window.saturating_sub(self.ahead.len());
        if directories == 0 {
            return None;
        }
        (self.window, self.awaits) = (window, true);
        let after = match begins_at {
            Some(_) => before,
            None => self.ahead.back().unwrap_or(name).clone(),
        };
        Some(Ask { parent: self.parent, after, directories, begins_at, walk: self.name })
    }
}

#[cfg(test)]
mod tests {
    use forebay_io::clock::Clock;

    use super::*;

    const PARENT: InodeId = InodeId(7);
    const TTL: Duration = Duration::from_secs(60);

    fn name(at: usize) -> Bytes {
        format!("{at:06}").into()
    }

    /// What is listed ahead, in its order, while those directories of 0..`all` are `read`, each for so long.
    fn listed_at(read: impl IntoIterator<Item = usize>, all: usize, pace: Duration) -> Vec<usize> {
        let (mut walks, clock, mut listed) = (Walks::default(), Clock::manual(), Vec::new());
        for at in read {
            clock.advance(pace);
            let Some(ask) = walks.observe((PARENT, &name(at)), clock.now(), (32, TTL)) else { continue };
            let behind = |after: &Bytes| {
                let after = after.clone();
                (0..all).map(name).filter(move |name| *name > after)
            };
            let names: Option<Vec<Bytes>> = match &ask.begins_at {
                None => Some(behind(&ask.after).take(ask.directories).collect()),
                Some(at) => {
                    let is_next = behind(&ask.after).take(1 + SKIPS).any(|name| name == *at);
                    is_next.then(|| behind(at).take(ask.directories).collect())
                }
            };
            walks.answer(&ask, names.as_deref());
            let numbers =
                names.into_iter().flatten().map(|name| String::from_utf8_lossy(&name).parse::<usize>());
            listed.extend(numbers.map(|number| number.expect("a number")));
        }
        listed
    }

    fn listed(read: impl IntoIterator<Item = usize>, all: usize) -> Vec<usize> {
        listed_at(read, all, Duration::ZERO)
    }

    #[test]
    fn who_walks_has_every_directory_listed_once_ahead() {
        assert_eq!(listed(0..1000, 1000), (1..1000).collect::<Vec<_>>());
        let ahead = listed(0..100, 1000);
        assert!((100..=132).contains(ahead.last().expect("some")), "{ahead:?}");
        assert_eq!(listed(0..3, 3), [1, 2]);
        assert_eq!(listed(1..4, 4), [2, 3], "from the second on");
        assert_eq!(listed(5..8, 8), [7], "from within");
        assert_eq!(
            listed([0, 1, 3, 4, 6, 7, 8, 10], 11),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            "some are passed over"
        );
    }

    #[test]
    fn one_who_reads_a_few_here_and_there_has_none_listed() {
        assert!(listed([3], 1000).is_empty());
        assert!(listed((0..100).map(|at| at * 3 + 2), 1000).is_empty(), "every third");
        assert_eq!(
            listed((0..100).map(|at| at * 3), 1000),
            (1..=FIRST).collect::<Vec<_>>(),
            "from the first on"
        );
        assert!(listed((2..100).rev(), 100).is_empty(), "backwards");
        let jumps = (0..20).flat_map(|at| [at * 50, at * 50 + 1]);
        assert!(listed(jumps, 1000).len() <= 20 * FIRST, "two at a time");
        let thinning = (0..=10).chain((1..40).map(|at| 20 + at * 8));
        assert_eq!(listed(thinning, 1000), (1..21).collect::<Vec<_>>(), "none once it thins out");
    }

    #[test]
    fn readers_of_one_directory_have_walks_of_their_own() {
        let two: Vec<usize> = listed((0..100).flat_map(|at| [at, 500 + at]), 1000);
        for first in [0, 500] {
            let own = two.iter().filter(|at| (first..first + 500).contains(*at)).count();
            assert!((98..=140).contains(&own), "{own} from {first}");
        }
        let shared: Vec<usize> = listed((0..50).flat_map(|at| [2 * at + 1, 2 * at]), 100);
        assert!(shared.len() <= 200, "{} listed for 100", shared.len());
    }

    #[test]
    fn who_goes_slowly_is_not_served_what_is_too_old_when_it_comes() {
        for (seconds, most) in [(1, 15), (5, 3), (10, 1), (16, 0)] {
            let pace = Duration::from_secs(seconds);
            let ahead = listed_at(0..20, 1000, pace);
            match most {
                // Nobody knows a pace yet when the first is read.
                0 => assert_eq!(ahead, (1..=FIRST).collect::<Vec<_>>()),
                _ => assert!(ahead.last().is_some_and(|last| *last <= 19 + most), "{ahead:?}"),
            }
        }
    }
}
