//! What the random tests of this package share: how many rounds to run and where chance comes from.

use std::fmt;

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, Condition, FaultMode, Faults, OperationKind, StoreSettings};
use forebay_io::rng::Rng;
use tokio::task::JoinSet;

/// `base` rounds, times `FOREBAY_TEST_SCALE` when that is set.
pub(crate) fn rounds(base: u64) -> u64 {
    let scale = std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    base * scale.unwrap_or(1u64)
}

/// As many files' bytes as `bucket` sends at once are on their way for twenty minutes, and more wait behind them.
pub(crate) async fn fill(bucket: &Bucket) -> JoinSet<()> {
    let places = StoreSettings::default().max_in_flight as u64;
    let faults = Faults::new();
    for nth in 1..=places {
        faults.script(OperationKind::Put, nth, FaultMode::Hang);
    }
    let (bucket, mut puts) = (bucket.with_faults(&faults).with_deadline_ms(3_600_000), JoinSet::new());
    for number in 0..places + 8 {
        let (bucket, key) = (bucket.clone(), ObjectKey::new(format!("data/{number}")));
        puts.spawn(async move {
            bucket.put(&key, "bytes".into(), Condition::Always).await.expect("put");
        });
    }
    while faults.injected() < places {
        tokio::task::yield_now().await;
    }
    puts
}

/// A seeded generator that prints its seed when the test that holds it panics; `FOREBAY_TEST_SEED` repeats a run.
pub(crate) struct Chance {
    seed: u64,
    rng: Rng,
}

impl Chance {
    /// The same seed gives the same numbers.
    pub(crate) fn seeded(seed: u64) -> Self {
        Self { seed, rng: Rng::seeded(seed) }
    }

    /// Seeded by `FOREBAY_TEST_SEED`, else by chance: a failing run prints it.
    pub(crate) fn fresh() -> Self {
        let given = std::env::var("FOREBAY_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        Self::seeded(given.unwrap_or_else(|| Rng::system().u64()))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.rng.u64()
    }

    /// A number in `0..bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.rng.below(bound)
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.rng.fill(&mut bytes);
        bytes
    }
}

impl fmt::Debug for Chance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}", self.seed)
    }
}

impl Drop for Chance {
    fn drop(&mut self) {
        if std::thread::panicking() {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "repeat with FOREBAY_TEST_SEED={}", self.seed);
        }
    }
}
