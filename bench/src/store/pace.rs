//! A network between client and store: a delay for each request, a rate for its bytes and one for all bytes together.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How slow the network is; the default is none at all.
#[derive(Debug, Clone, Copy, Default)]
pub struct PaceSettings {
    /// Before each answer.
    pub delay: Duration,
    /// Bytes a second over all connections, both ways together; `None` is no limit.
    pub rate: Option<u64>,
    /// Bytes a second of one request; `None` is no limit.
    pub request_rate: Option<u64>,
}

/// Holds answers back.
#[derive(Debug)]
pub(super) struct Pace {
    settings: PaceSettings,
    /// When the link has carried all that was given to it so far.
    free: Mutex<Option<Instant>>,
}

impl Pace {
    pub(super) fn new(settings: PaceSettings) -> Self {
        Self { settings, free: Mutex::new(None) }
    }

    /// Waits for the delay and until the link has carried `bytes` more.
    pub(super) async fn wait(&self, bytes: u64) {
        let now = Instant::now();
        let own = self.settings.request_rate.map_or(Duration::ZERO, |rate| time_of(bytes, rate));
        let until = (now + self.settings.delay + own).max(self.carried(now, bytes));
        if until > now {
            tokio::time::sleep_until(until).await;
        }
    }

    fn carried(&self, now: Instant, bytes: u64) -> Instant {
        let Some(rate) = self.settings.rate else { return now };
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let start = free.map_or(now, |free| free.max(now));
        let until = start + time_of(bytes, rate);
        *free = Some(until);
        until
    }
}

fn time_of(bytes: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn all_requests_share_the_rate() {
        let settings =
            PaceSettings { delay: Duration::from_millis(20), rate: Some(1000), request_rate: Some(800) };
        let pace = Pace::new(settings);
        let start = Instant::now();
        tokio::join!(pace.wait(500), pace.wait(500), pace.wait(1000));
        assert_eq!(start.elapsed(), Duration::from_secs(2));
        let start = Instant::now();
        pace.wait(0).await;
        assert_eq!(start.elapsed(), Duration::from_millis(20));
        let start = Instant::now();
        pace.wait(500).await;
        assert_eq!(start.elapsed(), Duration::from_millis(645), "each has its own rate as well");
    }
}
