//! Waiting for steps: a listing now and then, compared with what was seen before.

use std::collections::HashSet;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::object::Bucket;

use super::{StepInfo, StepKey, list_steps};

/// What was seen of a bucket's steps. Each manifest is told once; a step that a later start saves again is told again.
#[derive(Debug)]
pub struct Watch {
    seen: HashSet<StepKey>,
    clock: Clock,
    interval: Duration,
}

impl Watch {
    /// Looks every `interval`. Steps that are there already are told only if they are above `after`.
    pub async fn begin(
        bucket: &Bucket,
        clock: Clock,
        interval: Duration,
        after: Option<u64>,
    ) -> Result<Self> {
        let steps = list_steps(bucket).await?.into_iter().map(|info| info.key);
        let seen = steps.filter(|key| after.is_none_or(|after| key.step <= after)).collect();
        Ok(Self { seen, clock, interval })
    }

    /// The same of a place that was not there yet: every step in it is told.
    pub fn of_new(clock: Clock, interval: Duration) -> Self {
        Self { seen: HashSet::new(), clock, interval }
    }

    /// The steps that are new, oldest first; waits for the first of them, until none came for `patience`. A store that is
    /// away has none: `trouble` hears of each look that failed.
    pub async fn next(
        &mut self,
        bucket: &Bucket,
        patience: Option<Duration>,
        mut trouble: impl FnMut(&Error),
    ) -> Result<Vec<StepInfo>> {
        let start = self.clock.now();
        loop {
            let steps = match list_steps(bucket).await {
                Ok(steps) => Some(steps),
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    trouble(&error);
                    None
                }
                Err(error) => return Err(error),
            };
            let new = steps.map(|steps| self.take(steps)).unwrap_or_default();
            let left = patience.map(|patience| patience.saturating_sub(self.clock.now().since(start)));
            if !new.is_empty() || left.is_some_and(|left| left.is_zero()) {
                return Ok(new);
            }
            self.clock.sleep(left.map_or(self.interval, |left| left.min(self.interval))).await;
        }
    }

    /// Those of `steps`, which are all that there are, that were not told before.
    fn take(&mut self, steps: Vec<StepInfo>) -> Vec<StepInfo> {
        let is_new = |info: &&StepInfo| !info.superseded && !self.seen.contains(&info.key);
        let new = steps.iter().filter(is_new).cloned().collect();
        // What was deleted meanwhile need not be remembered.
        self.seen = steps.into_iter().map(|info| info.key).collect();
        new
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use forebay_io::object::{Condition, Faults};

    use super::*;

    #[tokio::test]
    async fn each_new_manifest_is_told_once() {
        let bucket = Bucket::in_memory();
        let key = |step, incarnation| StepKey { incarnation, step, attempt: "0a1b2c3d".into() };
        let put = async |key: StepKey| {
            bucket.put(&key.object(), Bytes::new(), Condition::Always).await.expect("put");
        };
        put(key(1, 1)).await;
        put(key(2, 1)).await;
        let (clock, interval) = (Clock::system(), Duration::from_millis(1));
        let mut watch = Watch::begin(&bucket, clock, interval, Some(1)).await.expect("begin");
        let mut next = async |patience| -> Vec<StepKey> {
            let patience = Some(Duration::from_millis(patience));
            let steps = watch.next(&bucket, patience, |error| panic!("{error}")).await.expect("next");
            steps.into_iter().map(|info| info.key).collect()
        };
        assert_eq!(next(0).await, [key(2, 1)]);
        assert_eq!(next(3).await, []);
        put(key(3, 1)).await;
        put(key(2, 2)).await;
        assert_eq!(next(60_000).await, [key(3, 1), key(2, 2)], "a step that was saved again is new");
        assert_eq!(next(0).await, []);
    }

    /// Evaluation jobs wait for days: what a store is away for is told, and waited for.
    #[tokio::test]
    async fn a_store_that_is_away_is_waited_for() {
        let (plain, faults) = (Bucket::in_memory(), Faults::new());
        let bucket = plain.with_faults(&faults);
        let mut watch = Watch::of_new(Clock::system(), Duration::from_millis(1));
        let key = StepKey { incarnation: 1, step: 7, attempt: "0a1b2c3d".into() };
        bucket.put(&key.object(), Bytes::new(), Condition::Always).await.expect("put");
        faults.set_down(true);
        let mut failed = 0;
        let count = |_: &Error| {
            failed += 1;
            faults.set_down(failed < 2);
        };
        let steps = watch.next(&bucket, None, count).await.expect("it comes back");
        assert_eq!((steps.into_iter().map(|info| info.key).collect::<Vec<_>>(), failed), (vec![key], 2));
    }
}
