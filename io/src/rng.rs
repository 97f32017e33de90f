//! Chance: the one source of random numbers.
//!
//! Owns randomness that must be hard to guess or to collide (ids, tokens) and randomness that must be repeatable
//! (tests, jitter under test). A seeded generator gives the same numbers for the same seed on every run.
#![allow(clippy::disallowed_methods, reason = "the one place that draws random numbers")]

use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::{StdRng, SysRng};
use rand::{Rng as _, SeedableRng};

/// A cryptographically strong random generator; clones share its state.
#[derive(Debug, Clone)]
pub struct Rng(Arc<Mutex<StdRng>>);

impl Rng {
    /// Seeded by the operating system, and not by a generator of this thread: a forked child would have that of its parent,
    /// and all children the same names.
    pub fn system() -> Self {
        let generator = StdRng::try_from_rng(&mut SysRng).expect("the operating system has random numbers");
        Self(Arc::new(Mutex::new(generator)))
    }

    /// Repeatable: the same seed gives the same numbers.
    pub fn seeded(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(StdRng::seed_from_u64(seed))))
    }

    /// A generator of its own whose numbers follow from this one's state.
    pub fn fork(&self) -> Self {
        Self::seeded(self.u64())
    }

    /// 64 random bits.
    pub fn u64(&self) -> u64 {
        self.0.lock().next_u64()
    }

    /// A number below `bound`; 0 when `bound` is 0. The bias of the multiplication is below 2^-32 for bounds
    /// below 2^32.
    pub fn below(&self, bound: u64) -> u64 {
        ((u128::from(self.u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in 0.0..1.0 with 53 random bits.
    pub fn unit(&self) -> f64 {
        (self.u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True once in `1 / probability` times.
    pub fn chance(&self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Fills `bytes`.
    pub fn fill(&self, bytes: &mut [u8]) {
        self.0.lock().fill_bytes(bytes);
    }

    /// A name of 32 hexadecimal digits (128 bits), unique in practice.
    pub fn name(&self) -> String {
        format!("{:016x}{:016x}", self.u64(), self.u64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let (a, b) = (Rng::seeded(7), Rng::seeded(7));
        assert_eq!(a.name(), b.name());
        assert_ne!(a.name(), Rng::seeded(8).name());
        assert_ne!(Rng::system().name(), Rng::system().name());
        assert!((0..1000).all(|_| a.below(10) < 10));
        assert!((0..1000).all(|_| (0.0..1.0).contains(&a.unit())));
        assert_eq!(a.below(0), 0);
    }
}
