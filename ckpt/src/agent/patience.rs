//! How long a save is tried again while the store cannot be reached.
//!
//! Short outages are nothing to a save that takes hours: what counts is how long the store stays away at a time.

use std::time::Duration;

use forebay_io::clock::Moment;

/// How long the store may stay away.
pub(super) const GIVE_UP_AFTER: Duration = Duration::from_secs(600);
/// The first pause between two tries, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(20);
/// Outages that a save outlives at most: where each of so many tries fails though it got on, the next will, too.
const MOST_OUTAGES: u32 = 20;

/// What is left of it for one save.
pub(super) struct Patience {
    /// Until when the store is waited for, once it is away.
    deadline: Option<Moment>,
    pause: Duration,
    outages: u32,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self { deadline: None, pause: FIRST_PAUSE, outages: 0 }
    }

    /// How long to wait before the next try, after one that failed at `now` and `took` so long; `None` for ever. The store
    /// was there since the one before where this one `got_on`, or took longer than a store that is away is tried for.
    pub(super) fn after(&mut self, now: Moment, took: Duration, got_on: bool) -> Option<Duration> {
        let was_there = got_on || took > GIVE_UP_AFTER;
        if was_there && self.outages < MOST_OUTAGES {
            *self = Self { outages: self.outages + 1, ..Self::new() };
        }
        let deadline = *self.deadline.get_or_insert(now + GIVE_UP_AFTER);
        let pause = self.pause;
        self.pause = (2 * pause).min(LONGEST_PAUSE);
        (now + pause <= deadline).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use forebay_io::clock::Clock;

    use super::*;

    /// How often a save is tried again whose tries take so long, the `got_on`th of which got somewhere.
    fn tries(took: Duration, got_on: Option<u32>) -> (u32, Duration) {
        let (clock, mut patience) = (Clock::manual(), Patience::new());
        for number in 1.. {
            clock.advance(took);
            match patience.after(clock.now(), took, got_on == Some(number)) {
                Some(pause) => clock.advance(pause),
                None => return (number, clock.now().since_boot()),
            }
        }
        unreachable!("it is tried for ever")
    }

    #[test]
    fn a_store_that_stays_away_is_given_up_and_one_that_comes_back_is_not() {
        let second = Duration::from_secs(1);
        let (alone, until) = tries(second, None);
        assert!(until > GIVE_UP_AFTER - LONGEST_PAUSE && until <= GIVE_UP_AFTER + second, "{until:?}");
        let (more, later) = tries(second, Some(alone));
        assert!(more > alone && later > until + GIVE_UP_AFTER - 2 * LONGEST_PAUSE, "{later:?}");
        // What fails after hours each time is given up as well, some time.
        let (tries, _) = tries(3600 * second, None);
        assert_eq!(tries, MOST_OUTAGES + 1);
    }
}
