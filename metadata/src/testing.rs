//! What the random tests of this package share: how many rounds to run and where chance comes from.

mod store;

use std::fmt;

pub(crate) use store::Unruly;

/// `base` rounds, times `FOREBAY_TEST_SCALE` when that is set.
pub(crate) fn rounds(base: u64) -> u64 {
    let scale = std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    base * scale.unwrap_or(1u64)
}

/// A seeded generator (SplitMix64). It prints its seed when the test that holds it panics.
pub(crate) struct Chance {
    seed: u64,
    state: u64,
}

impl Chance {
    /// The same seed gives the same numbers.
    pub(crate) fn seeded(seed: u64) -> Self {
        Self { seed, state: seed }
    }

    /// A seed from the clock: a failing run prints it.
    pub(crate) fn fresh() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self::seeded(now.map_or(1, |now| now.as_nanos() as u64))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `0..bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
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
            let _ = writeln!(std::io::stderr(), "the random test failed with seed {}", self.seed);
        }
    }
}
