//! What the random tests of this package share: where chance comes from, and how many rounds to run.

use forebay_io::rng::Rng;

/// `base` rounds, times `FOREBAY_TEST_SCALE` when that is set, each with a number that its chance is seeded with. It is
/// printed, which is seen when the test fails; `FOREBAY_TEST_SEED` repeats that round alone.
pub(crate) fn rounds(base: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match number("FOREBAY_TEST_SEED") {
        Some(seed) => vec![seed],
        None => {
            let rng = Rng::system();
            (0..base * number("FOREBAY_TEST_SCALE").unwrap_or(1)).map(|_| rng.u64()).collect()
        }
    }
}

/// The chance of one round.
pub(crate) fn chance(seed: u64) -> Rng {
    println!("repeat with FOREBAY_TEST_SEED={seed}");
    Rng::seeded(seed)
}
