//! Whether the cache can hold what a warmup names, told before any of it is fetched: what is too much evicts what others
//! read, and its own beginning.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::pin::pin;

use forebay_cache::Ceiling;
use forebay_core::units::format_bytes;
use forebay_core::{BLOCK_SIZE, BlockKey, Error, ErrorKind, Result};
use futures::StreamExt;
use futures::stream::TryStreamExt;
use tokio_util::sync::CancellationToken;

use super::{Progress, Request, blocks};
use crate::Volume;

/// More than a block takes beside its bytes: its names, and what is left of its last page.
const BESIDE_A_BLOCK: u64 = 8 << 10;
/// Blocks of about one size that are told apart at once, some 0.5 MiB of them. Of more, a sample stands for all, right to within
/// a percent.
const SAMPLE: usize = 16 << 10;
/// What a sample is taken to be too high by: a part in so many.
const DOUBT: u64 = 32;

/// Refuses what has no room in the cache, be it empty. What is there of it already counts, too.
///
/// # Errors
/// `NoSpace`; what the tree says.
pub(super) async fn check(
    volume: &Volume,
    request: &Request,
    counted: &Progress,
    cancel: &CancellationToken,
) -> Result<()> {
    let ceiling = volume.blocks().ceiling(request.pin);
    let room = ceiling.bytes.saturating_mul(ceiling.hosts);
    let most_blocks = counted.files + counted.bytes / BLOCK_SIZE;
    if counted.bytes + most_blocks * BESIDE_A_BLOCK <= room {
        return Ok(());
    }
    // Sizes of files tell too much where they share bytes or have holes.
    let mut needed = Needed::default();
    let mut keys = pin!(blocks(volume, &request.paths).take_until(cancel.cancelled()));
    while let Some(key) = keys.try_next().await? {
        needed.add(name(&key), volume.blocks().cost(&key));
    }
    match cancel.is_cancelled() || needed.bytes() <= room {
        true => Ok(()),
        false => Err(refusal(needed.bytes(), ceiling, request.pin)),
    }
}

fn name(key: &BlockKey) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

fn refusal(needed: u64, Ceiling { bytes, hosts, on_disk }: Ceiling, pin: bool) -> Error {
    let (needed, each) = (format_bytes(needed), format_bytes(bytes));
    let (what, may) = if pin { ("pinned", "may pin") } else { ("warmed", "holds") };
    let whose = match hosts {
        1 => format!("the cache {may} {each}"),
        _ => format!("the cache of each of {hosts} hosts {may} {each}"),
    };
    let hint = match (on_disk, pin) {
        (false, _) => "warm a part of it, or give the mount a cache directory (--cache-dir, --cache-size)",
        (true, false) => "warm a part of it, or give the cache more room (--cache-size)",
        (true, true) => {
            "pin a part of it, or give the cache more room (--cache-size, `pin_bytes` of [volume.cache])"
        }
    };
    let message = format!("{needed} are to be {what}, with 4 KiB a block at least, and {whose}");
    Error::new(ErrorKind::NoSpace, message).with_hint(hint)
}

/// What blocks take, each once however often it is named, in bounded memory. Each power of two has a sample of its own: in
/// one of all sizes a few large blocks, by which hash they have, made much of the sum.
#[derive(Debug, Default)]
struct Needed(BTreeMap<u32, Sample>);

impl Needed {
    fn add(&mut self, name: u64, cost: u64) {
        self.0.entry(cost.max(1).ilog2()).or_default().add(name, cost);
    }

    /// No more than all of them, as far as is known.
    fn bytes(&self) -> u64 {
        self.0.values().map(Sample::bytes).sum()
    }
}

/// Blocks of about one size. Past so many those alone count whose hashes end in a number of zeros, and stand for all.
#[derive(Debug, Default)]
struct Sample {
    costs: HashMap<u64, u64>,
    zeros: u32,
}

impl Sample {
    fn add(&mut self, name: u64, cost: u64) {
        if name.trailing_zeros() < self.zeros {
            return;
        }
        self.costs.insert(name, cost);
        while self.costs.len() > SAMPLE {
            self.zeros += 1;
            let zeros = self.zeros;
            self.costs.retain(|name, _| name.trailing_zeros() >= zeros);
        }
    }

    fn bytes(&self) -> u64 {
        let sum: u64 = self.costs.values().sum();
        match self.zeros {
            0 => sum,
            zeros => (sum - sum / DOUBT) << zeros,
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_io::rng::Rng;

    use super::*;

    #[test]
    fn blocks_are_counted_once_and_many_by_a_sample() {
        let (random, mut needed) = (Rng::seeded(1), Needed::default());
        let names: Vec<u64> = (0..1 << 20).map(|_| random.u64()).collect();
        let few = &names[..SAMPLE];
        few.iter().chain(few).for_each(|name| needed.add(*name, 4096));
        assert_eq!(needed.bytes(), (SAMPLE as u64) << 12);
        names.iter().chain(&names).for_each(|name| needed.add(*name, 4096));
        assert!(needed.0.values().all(|sample| sample.costs.len() <= SAMPLE));
        let all = (names.len() as u64) << 12;
        assert!((all / 20 * 18..=all).contains(&needed.bytes()), "{} of {all}", needed.bytes());
    }

    #[test]
    fn a_refusal_names_both_sizes_and_what_to_do() {
        for (on_disk, pin, hosts, told, hint) in [
            (
                true,
                false,
                1,
                "10.0 TiB are to be warmed, with 4 KiB a block at least, and the cache holds 500 GiB",
                "--cache-size",
            ),
            (
                true,
                true,
                1,
                "are to be pinned, with 4 KiB a block at least, and the cache may pin 500 GiB",
                "pin_bytes",
            ),
            (false, false, 3, "and the cache of each of 3 hosts holds 500 GiB", "--cache-dir"),
        ] {
            let refused = refusal(10 << 40, Ceiling { bytes: 500 << 30, hosts, on_disk }, pin);
            assert!(refused.message().contains(told), "{refused}");
            assert!(refused.hint().is_some_and(|text| text.contains(hint)), "{refused}");
        }
    }

    /// Some 80 large blocks of a sample stood for half of the sum.
    #[test]
    fn a_few_large_blocks_among_many_small_ones_are_counted_as_well() {
        for seed in 0..20 {
            let (random, mut needed) = (Rng::seeded(seed), Needed::default());
            let (small, large) = (1_000_000, 2_000);
            (0..small).for_each(|_| needed.add(random.u64(), 4 << 10));
            (0..large).for_each(|_| needed.add(random.u64(), 4 << 20));
            let all = (small << 12) + (large << 22);
            let found = needed.bytes();
            assert!((all / 20 * 18..=all).contains(&found), "seed {seed}: {found} of {all}");
        }
    }
}
