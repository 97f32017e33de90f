//! Warming: true totals, cancelling, and the proof.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::units::{KIB, MIB};
use forebay_core::{BLOCK_SIZE, BlockKey, ErrorKind, Result};
use forebay_io::task::Stop;
use futures::stream;

use super::support::World;
use crate::{Blocks, Ceiling, Counters, Fill, Filled, Proof, Residency, Unpinned, fill_many, prove};

const FILL: Fill = Fill { concurrency: 4, pin: false };

#[tokio::test]
async fn a_fill_reports_what_it_did_and_the_proof_finds_it() {
    let world = World::new();
    let (large, small) = (world.put("large", 2 * BLOCK_SIZE + 1).await, world.put("small", 5 * KIB).await);
    let node = world.open_memory(64 * MIB).await;
    large.check(&*node, 0..1).await.expect("read");
    let keys = [large.keys(), small.keys()].concat();
    let proof = prove(&*node, stream::iter(keys.clone())).await.expect("prove");
    assert_eq!(proof, Proof { present: 1, memory_only: 1, missing: keys[1..].to_vec(), damaged: Vec::new() });

    let mut heard = Vec::new();
    let cancel = Stop::new();
    let report =
        fill_many(&*node, stream::iter(keys.clone()), FILL, |now| heard.push(now.blocks), &cancel).await;
    assert_eq!(heard, [1, 2, 3, 4]);
    let total = report.total;
    assert_eq!((total.blocks, total.already, total.from_origin, total.failed), (4, 1, 3, 0));
    assert_eq!((total.bytes, total.origin_bytes), (2 * BLOCK_SIZE + 1 + 5 * KIB, BLOCK_SIZE + 1 + 5 * KIB));
    assert!(!report.cancelled && report.failures.is_empty());

    let again = fill_many(&*node, stream::iter(keys.clone()), FILL, |_| (), &cancel).await;
    assert_eq!((again.total.already, again.total.origin_bytes), (4, 0));
    let proof = prove(&*node, stream::iter(keys)).await.expect("prove");
    assert_eq!(proof, Proof { present: 4, memory_only: 4, ..Proof::default() });
    assert_eq!(world.gets(), 4);
}

#[tokio::test]
async fn failed_blocks_are_named_and_the_rest_goes_on() {
    let world = World::new();
    let (gone, kept) = (world.put("gone", 10).await, world.put("kept", 10).await);
    world.bucket.delete(&gone.name.blob().key).await.expect("delete");
    let node = world.open_memory(64 * MIB).await;
    let keys = [gone.keys(), kept.keys()].concat();
    let report = fill_many(&*node, stream::iter(keys.clone()), FILL, |_| (), &Stop::new()).await;
    assert_eq!((report.total.blocks, report.total.from_origin, report.total.failed), (2, 1, 1));
    let [(key, error)] = &report.failures[..] else { panic!("{report:?}") };
    assert_eq!((key, error.kind()), (&keys[0], ErrorKind::Stale));
    assert_eq!(prove(&*node, stream::iter(keys.clone())).await.expect("prove").missing, keys[..1]);
}

#[tokio::test]
async fn a_cancelled_fill_stops_at_the_window() {
    let world = World::new();
    let blob = world.put("k", 10).await;
    let node = world.open_memory(64 * MIB).await;
    let cancel = Stop::new();
    let key = blob.name.block(0);
    let endless = stream::repeat_with(|| key.clone());
    let stop_at_ten = |now: &crate::Progress| {
        if now.blocks == 10 {
            cancel.cancel();
        }
    };
    let report = fill_many(&*node, endless, FILL, stop_at_ten, &cancel).await;
    assert!(report.cancelled && (10..=20).contains(&report.total.blocks), "{report:?}");
}

/// A cache that evicts a block just before its copy is read back.
#[derive(Debug)]
struct Evicts;

#[async_trait]
impl Blocks for Evicts {
    async fn stat(&self, keys: &[BlockKey], verify: bool) -> Result<Vec<Residency>> {
        Ok(vec![if verify { Residency::Absent } else { Residency::Disk }; keys.len()])
    }
    async fn get(&self, _: &BlockKey, _: Range<u64>) -> Result<Bytes> {
        unreachable!("a proof reads nothing else")
    }
    fn get_now(&self, _: &BlockKey, _: Range<u64>) -> Option<Bytes> {
        None
    }
    fn get_near(&self, _: &BlockKey, _: Range<u64>) -> Option<Bytes> {
        None
    }
    async fn fill(&self, _: &BlockKey, _: bool) -> Result<Filled> {
        unreachable!("a proof fills nothing")
    }
    async fn fetch_ahead(&self, _: &BlockKey) -> Result<()> {
        unreachable!("a proof fetches nothing")
    }
    async fn unpin(&self, _: &BlockKey) -> Result<Unpinned> {
        Ok(Unpinned::default())
    }
    async fn unpin_all(&self) -> Result<Unpinned> {
        Ok(Unpinned::default())
    }
    fn insert(&self, _: &BlockKey, _: Bytes) {}
    fn spend(&self, _: &BlockKey) {}
    fn ceiling(&self, _: bool) -> Ceiling {
        Ceiling { bytes: 0, hosts: 1, on_disk: true }
    }
    fn cost(&self, key: &BlockKey) -> u64 {
        key.len()
    }
    fn counters(&self) -> Counters {
        Counters::default()
    }
}

/// It was called damaged, and fetched again in place of what had taken its room.
#[tokio::test]
async fn what_was_evicted_meanwhile_is_not_damaged() {
    let blob = World::new().put("k", 10).await;
    let proof = prove(&Evicts, stream::iter(blob.keys())).await.expect("prove");
    assert_eq!(proof, Proof { missing: blob.keys(), ..Proof::default() });
}
