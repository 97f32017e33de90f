//! Which file is brought to the store next, and when. No I/O.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use forebay_core::InodeId;
use forebay_io::clock::Moment;

/// The pause after the first failure; each further one doubles it.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause: how late the return of a store may be noticed.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// What is to be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// This file is due.
    File(InodeId),
    /// Whether the store can be reached is to be found out first.
    Probe,
    /// Nothing before then.
    At(Moment),
    /// Nothing before something changes.
    Nothing,
}

/// Files that wait, in the order of their moments.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    due: BTreeSet<(Moment, InodeId)>,
    moments: HashMap<InodeId, Moment>,
    /// Being brought in, and when to look at them again if that was asked for meanwhile.
    active: HashSet<InodeId>,
    again: HashMap<InodeId, Moment>,
    /// Failures in a row, of each file and of all together.
    failures: HashMap<InodeId, u32>,
    in_a_row: u32,
    paused_until: Option<Moment>,
    /// How many want everything at once.
    pub(super) hurried: usize,
}

impl Schedule {
    /// Wants `ino` looked at at `at`, or when that was wanted already if that is earlier.
    pub(super) fn add(&mut self, ino: InodeId, at: Moment) {
        if self.active.contains(&ino) {
            let again = self.again.entry(ino).or_insert(at);
            *again = at.min(*again);
            return;
        }
        match self.moments.get(&ino) {
            Some(earlier) if *earlier <= at => {}
            before => {
                if let Some(before) = before {
                    self.due.remove(&(*before, ino));
                }
                self.due.insert((at, ino));
                self.moments.insert(ino, at);
            }
        }
    }

    /// Takes the next file. After a failure of the store nothing runs until a probe says that it is back.
    pub(super) fn next(&mut self, now: Moment) -> Next {
        if let Some(until) = self.paused_until.filter(|until| *until > now) {
            return Next::At(until);
        }
        let is_hurried = self.hurried > 0;
        let is_due =
            |(at, ino): &&(Moment, InodeId)| *at <= now || is_hurried && !self.failures.contains_key(ino);
        match self.due.iter().find(is_due).copied() {
            None => self.due.first().map_or(Next::Nothing, |(at, _)| Next::At(*at)),
            Some(_) if self.in_a_row > 0 => Next::Probe,
            Some((at, ino)) => {
                self.due.remove(&(at, ino));
                self.moments.remove(&ino);
                self.active.insert(ino);
                Next::File(ino)
            }
        }
    }

    /// Someone waits for everything from now on: an absent store is asked at once.
    pub(super) fn hurry(&mut self) {
        self.hurried += 1;
        self.paused_until = None;
    }

    /// A file was looked at; `later` asks for another look.
    pub(super) fn done(&mut self, ino: InodeId, later: Option<Moment>) {
        self.failures.remove(&ino);
        self.end(ino, later);
    }

    /// A file could not be brought in; `is_away` says that it is not the file's fault.
    pub(super) fn failed(&mut self, ino: InodeId, is_away: bool, now: Moment) {
        let failures = self.failures.entry(ino).or_default();
        *failures += 1;
        let pause = pause(*failures);
        if is_away {
            self.is_away(now);
        }
        self.end(ino, Some(now + pause));
    }

    /// Failures in a row of one file.
    pub(super) fn failures(&self, ino: InodeId) -> u32 {
        self.failures.get(&ino).copied().unwrap_or(0)
    }

    /// The store cannot be reached: it is asked again after a pause.
    pub(super) fn is_away(&mut self, now: Moment) {
        if self.paused_until.is_none_or(|until| until <= now) {
            self.in_a_row += 1;
            self.paused_until = Some(now + pause(self.in_a_row));
        }
    }

    /// The store can be reached.
    pub(super) fn is_back(&mut self) {
        self.in_a_row = 0;
        self.paused_until = None;
    }

    /// Whether a file waits or is being brought in.
    pub(super) fn is_idle(&self) -> bool {
        self.due.is_empty() && self.active.is_empty()
    }

    fn end(&mut self, ino: InodeId, later: Option<Moment>) {
        self.active.remove(&ino);
        let again = self.again.remove(&ino);
        if let Some(at) = later.into_iter().chain(again).min() {
            self.add(ino, at);
        }
    }
}

/// How long to wait after so many failures in a row.
pub(crate) fn pause(failures: u32) -> Duration {
    PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use forebay_io::clock::Clock;

    use super::*;

    const A: InodeId = InodeId(1);
    const B: InodeId = InodeId(2);

    fn seconds(count: u64) -> Moment {
        Clock::manual().now() + Duration::from_secs(count)
    }

    #[test]
    fn files_come_in_the_order_of_their_moments_and_one_at_a_time() {
        let mut schedule = Schedule::default();
        schedule.add(A, seconds(5));
        schedule.add(B, seconds(3));
        schedule.add(B, seconds(9));
        assert_eq!(schedule.next(seconds(1)), Next::At(seconds(3)));
        assert_eq!(schedule.next(seconds(3)), Next::File(B));
        schedule.add(B, seconds(4));
        assert_eq!(schedule.next(seconds(4)), Next::At(seconds(5)), "it is being brought in");
        schedule.done(B, None);
        assert_eq!(schedule.next(seconds(4)), Next::File(B), "it was asked for meanwhile");
        schedule.done(B, None);
        schedule.hurried = 1;
        assert_eq!(schedule.next(seconds(4)), Next::File(A));
        schedule.done(A, None);
        assert_eq!(schedule.next(seconds(4)), Next::Nothing);
        assert!(schedule.is_idle());
    }

    #[test]
    fn an_absent_store_is_asked_seldom_and_one_file_holds_up_no_other() {
        let mut schedule = Schedule::default();
        schedule.add(A, seconds(0));
        schedule.add(B, seconds(0));
        assert_eq!(schedule.next(seconds(0)), Next::File(A));
        schedule.failed(A, false, seconds(0));
        assert_eq!((schedule.failures(A), schedule.next(seconds(0))), (1, Next::File(B)));
        schedule.failed(B, true, seconds(0));
        assert_eq!(schedule.next(seconds(0)), Next::At(seconds(1)));
        for pause in [2, 4, 8, 16, 30, 30] {
            let at = schedule.paused_until.expect("a pause");
            assert_eq!(schedule.next(at), Next::Probe);
            schedule.is_away(at);
            assert_eq!(schedule.next(at), Next::At(at + Duration::from_secs(pause)));
        }
        schedule.is_back();
        assert_eq!(schedule.next(seconds(100)), Next::File(A));
    }
}
