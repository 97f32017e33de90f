//! How large a run is, where chance comes from, and what this machine can do.

use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};

use rand::SeedableRng;
use rand::rngs::StdRng;

/// What the round counts of long suites are multiplied by: `FOREBAY_TEST_SCALE`, default 1.
pub fn scale() -> usize {
    std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Whether this is a long run, which also does what the gate has no time for.
pub fn is_long() -> bool {
    scale() > 1
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

/// A program that `make setup` builds from source, or a system package's. Where it is missing, `test` cannot run, and
/// the skip is shown.
#[must_use]
pub fn tool(name: &str, test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(cache().join("tools/bin")).chain([cache().join("tools")]);
    let mut places = folders.chain(std::env::split_paths(&path)).map(|folder| folder.join(name));
    let found = places.find(|place| place.is_file());
    if found.is_none() {
        skip(test, &format!("{name} is not installed"));
    }
    found
}

/// Where `make` keeps what it downloads and builds.
pub(crate) fn cache() -> PathBuf {
    let given = std::env::var_os("FOREBAY_CACHE").map(PathBuf::from);
    given.unwrap_or_else(|| std::env::home_dir().expect("a user has a home directory").join(".cache/forebay"))
}

/// Says, past the test runner's capture, that `test` did not run; `make test` counts such lines.
pub fn skip(test: &str, why: &str) {
    // A lost message is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// The checkout whose tests these are. Asked at run time: a build that is kept may come from one elsewhere.
pub fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("tests are run by cargo");
    Path::new(&package).parent().expect("the package lies below the root").to_owned()
}
