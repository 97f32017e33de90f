//! How large a run is, where chance comes from, and what this machine can do.

use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::path::Path;

use rand::SeedableRng;
use rand::rngs::StdRng;

/// What the round counts of long suites are multiplied by: `FOREBAY_TEST_SCALE`, default 1.
pub fn scale() -> usize {
    std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// A generator that prints its seed when the test fails; `FOREBAY_TEST_SEED` repeats a run.
#[derive(Debug)]
pub struct Seeded {
    seed: u64,
    rng: StdRng,
}

impl Seeded {
    /// Seeds from `FOREBAY_TEST_SEED`, else from the system.
    pub fn new() -> Self {
        let given = std::env::var("FOREBAY_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(rand::random);
        Self { seed, rng: StdRng::seed_from_u64(seed) }
    }
}

impl Default for Seeded {
    fn default() -> Self {
        Self::new()
    }
}

impl Deref for Seeded {
    type Target = StdRng;

    fn deref(&self) -> &StdRng {
        &self.rng
    }
}

impl DerefMut for Seeded {
    fn deref_mut(&mut self) -> &mut StdRng {
        &mut self.rng
    }
}

impl Drop for Seeded {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("repeat with FOREBAY_TEST_SEED={}", self.seed);
        }
    }
}

/// Whether file systems can be mounted here. A test that cannot run returns at once, and the skip is shown.
#[must_use]
pub fn require_fuse(test: &str) -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        skip(test, "/dev/fuse is missing");
    }
    there
}

/// Says, past the test runner's capture, that `test` did not run; `make test` counts such lines.
pub fn skip(test: &str, why: &str) {
    // A lost message is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}
