//! What tests of this package share: where chance comes from, how many rounds to run, and a rank's network card.

use std::sync::Arc;

use forebay_io::net::Rdma;
use forebay_io::rng::Rng;

/// A rank's network card, in a machine that has some (`tests/tests/rdma.rs`); elsewhere bytes go over TCP.
pub(crate) fn card(rank: usize) -> Option<Arc<Rdma>> {
    let wanted = std::env::var("FOREBAY_TEST_RDMA").ok()?;
    let card = Rdma::open(&wanted.parse().expect("names of cards"), rank).expect("open").expect("a card");
    println!("rank {rank} has {card}");
    Some(card)
}

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
