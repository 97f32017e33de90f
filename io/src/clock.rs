//! Time: monotonic moments, the wall clock, and sleeping.
//!
//! Owns every reading of a clock in Forebay. Moments count time asleep too (CLOCK_BOOTTIME), so that a lease held
//! by a suspended machine is over when it wakes. Wall time is for showing and for stamping objects; nothing ever
//! compares two wall clocks. The manual clock is the twin for tests: it moves only when told.
#![allow(clippy::disallowed_methods, reason = "the one place that reads clocks and sleeps")]

use std::ops::{Add, Sub};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_core::Timestamp;
use tokio::sync::watch;

/// A point in monotonic time of this boot of this machine; meaningless anywhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(Duration);

impl Moment {
    /// Time since this machine started: the same in all its processes.
    pub fn since_boot(self) -> Duration {
        self.0
    }

    /// Time from `earlier` to here, zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by))
    }
}

impl Sub<Duration> for Moment {
    type Output = Self;

    fn sub(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(by))
    }
}

/// A source of time; cheap to clone.
#[derive(Debug, Clone)]
pub struct Clock(Kind);

#[derive(Debug, Clone)]
enum Kind {
    System,
    Manual(Arc<watch::Sender<Duration>>),
}

impl Clock {
    /// The machine's own clocks.
    pub fn system() -> Self {
        Self(Kind::System)
    }

    /// A clock for tests that starts at zero and moves only by [`Clock::advance`].
    pub fn manual() -> Self {
        Self(Kind::Manual(Arc::new(watch::Sender::new(Duration::ZERO))))
    }

    /// Monotonic time, time asleep included.
    pub fn now(&self) -> Moment {
        match &self.0 {
            Kind::System => {
                let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
                Moment(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
            }
            Kind::Manual(time) => Moment(*time.borrow()),
        }
    }

    /// The wall clock; the manual clock counts from 1970.
    pub fn wall(&self) -> Timestamp {
        let since = match &self.0 {
            Kind::System => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            Kind::Manual(time) => *time.borrow(),
        };
        Timestamp { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
    }

    /// Waits for `duration`. Cancel-safe.
    pub async fn sleep(&self, duration: Duration) {
        match &self.0 {
            Kind::System => tokio::time::sleep(duration).await,
            Kind::Manual(_) => self.sleep_until(self.now() + duration).await,
        }
    }

    /// Waits until `moment`. Cancel-safe.
    pub async fn sleep_until(&self, moment: Moment) {
        match &self.0 {
            Kind::System => tokio::time::sleep(moment.since(self.now())).await,
            Kind::Manual(time) => {
                // The sender lives in `self`, so the channel cannot close while this waits.
                let _ = time.subscribe().wait_for(|now| *now >= moment.0).await;
            }
        }
    }

    /// Moves a manual clock and wakes whoever it passes.
    ///
    /// # Panics
    /// On the system clock.
    pub fn advance(&self, by: Duration) {
        match &self.0 {
            Kind::System => panic!("only a manual clock can be advanced"),
            Kind::Manual(time) => time.send_modify(|now| *now += by),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_moves_forward() {
        let clock = Clock::system();
        let (before, after) = (clock.now(), clock.now());
        assert!(after >= before);
        assert!(clock.wall().seconds > 1_700_000_000, "the year is past 2023");
    }

    #[tokio::test]
    async fn a_manual_clock_wakes_sleepers_only_when_advanced() {
        let clock = Clock::manual();
        let sleeper = clock.sleep(Duration::from_secs(10));
        tokio::pin!(sleeper);
        assert!(futures::poll!(&mut sleeper).is_pending());
        clock.advance(Duration::from_secs(9));
        assert!(futures::poll!(&mut sleeper).is_pending());
        clock.advance(Duration::from_secs(1));
        sleeper.await;
        assert_eq!(clock.wall().seconds, 10);
    }
}
