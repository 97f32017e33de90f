//! What the random tests of this package share: how many rounds to run and where chance comes from.

use std::fmt;

use forebay_io::rng::Rng;

/// `base` rounds, times `FOREBAY_TEST_SCALE` when that is set.
pub(crate) fn rounds(base: u64) -> u64 {
    let scale = std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    base * scale.unwrap_or(1u64)
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
