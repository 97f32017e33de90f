//! Warming: bringing many blocks in, and proving afterwards that they are there.
//!
//! Both walk a stream of keys through a bounded window, so that memory does not grow with the number of blocks.

use forebay_core::{BlockKey, Error};
use forebay_io::task::Stop;
use futures::stream::{Stream, StreamExt};

use crate::{Blocks, Filled, Residency};

/// Failures that a report keeps in full; past it they are only counted.
const KEPT_FAILURES: usize = 1_000;

/// Keys that one round of a proof asks about.
const PROOF_WINDOW: usize = 256;

/// How to fill.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// Blocks on their way at once; at least 1.
    pub concurrency: usize,
    /// Whether to pin them.
    pub pin: bool,
}

/// How far a fill has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Blocks dealt with, failed ones included.
    pub blocks: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Blocks that were fetched, from the origin or another host.
    pub from_origin: u64,
    /// Bytes that left the origin.
    pub origin_bytes: u64,
    /// Blocks that were here already.
    pub already: u64,
    /// Blocks that failed.
    pub failed: u64,
}

/// What a fill did.
#[derive(Debug, Default)]
pub struct Report {
    /// The totals.
    pub total: Progress,
    /// The first failures, at most 1,000; `total.failed` counts all.
    pub failures: Vec<(BlockKey, Error)>,
    /// Whether it was cancelled before the keys ended.
    pub cancelled: bool,
}

/// Whether blocks are in the cache.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Proof {
    /// Blocks that are here, their copies on disk read back and checked.
    pub present: u64,
    /// Those of them that are in memory only: whatever is read next may take their place.
    pub memory_only: u64,
    /// Blocks that are not.
    pub missing: Vec<BlockKey>,
    /// Blocks whose copies on disk were damaged and are gone now, as a crash may cut one short.
    pub damaged: Vec<BlockKey>,
}

/// Brings every block of `keys` in; `progress` hears after each. A block that fails does not end the rest; `cancel`
/// does, after the blocks on their way.
pub async fn fill_many(
    blocks: &dyn Blocks,
    keys: impl Stream<Item = BlockKey> + Send,
    fill: Fill,
    mut progress: impl FnMut(&Progress) + Send,
    cancel: &Stop,
) -> Report {
    let mut report = Report::default();
    let one = |key: BlockKey| async move {
        let filled = blocks.fill(&key, fill.pin).await;
        (key, filled)
    };
    let window = keys.take_until(cancel.cancelled()).map(one).buffer_unordered(fill.concurrency.max(1));
    let mut window = std::pin::pin!(window);
    while let Some((key, filled)) = window.next().await {
        let total = &mut report.total;
        total.blocks += 1;
        total.bytes += key.len();
        match filled {
            Ok(Filled::Memory | Filled::Disk) => total.already += 1,
            Ok(Filled::Peer { .. }) => total.from_origin += 1,
            Ok(Filled::Origin { bytes }) => {
                total.from_origin += 1;
                total.origin_bytes += bytes;
            }
            Err(error) => {
                total.failed += 1;
                if report.failures.len() < KEPT_FAILURES {
                    report.failures.push((key, error));
                }
            }
        }
        progress(&report.total);
    }
    report.cancelled = cancel.is_cancelled();
    report
}

/// Checks every block of `keys`: copies on disk are read back against their checksums.
///
/// # Errors
/// What [`Blocks::stat`] says; a missing block is no error.
pub async fn prove(
    blocks: &dyn Blocks,
    keys: impl Stream<Item = BlockKey> + Send,
) -> forebay_core::Result<Proof> {
    let mut proof = Proof::default();
    let mut windows = std::pin::pin!(keys.chunks(PROOF_WINDOW));
    while let Some(window) = windows.next().await {
        let found = blocks.stat(&window, true).await?;
        for (key, residency) in window.into_iter().zip(found) {
            match residency {
                Residency::Disk => proof.present += 1,
                Residency::Memory => {
                    proof.present += 1;
                    proof.memory_only += 1;
                }
                Residency::Absent => proof.missing.push(key),
                Residency::Damaged => proof.damaged.push(key),
            }
        }
    }
    Ok(proof)
}
