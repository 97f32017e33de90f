//! A store with faults, blobs of known bytes, and a cache over both.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{BlockKey, ObjectKey, VolumeBlob, VolumeId};
use forebay_io::object::{Bucket, Condition, Delay, Faults, OperationKind};
use forebay_io::rng::Rng;

use crate::{Blocks, CacheSettings, Node, pieces};

/// `base` rounds, times `FOREBAY_TEST_SCALE` when that is set.
pub(crate) fn rounds(base: u64) -> u64 {
    let scale = std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    base * scale
}

/// A number in `range`.
pub(crate) fn between(random: &Rng, range: Range<u64>) -> u64 {
    range.start + random.below(range.end - range.start)
}

/// One of `items`.
pub(super) fn pick<'a, T>(random: &Rng, items: &'a [T]) -> &'a T {
    &items[random.below(items.len() as u64) as usize]
}

/// A bucket with faults; caches are opened over it.
#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) bucket: Bucket,
    pub(super) faults: Faults,
}

impl World {
    /// Requests that fail are tried again for 200 ms.
    pub(super) fn new() -> Self {
        let faults = Faults::new();
        Self { bucket: Bucket::in_memory().with_faults(&faults).with_deadline_ms(200), faults }
    }

    /// The same, but every request takes a while, so that there is time to come in between.
    pub(super) fn slow() -> Self {
        let world = Self::new();
        Self { bucket: world.bucket.with_delay(Delay { request_us: 2_000, mib_us: 0 }), ..world }
    }

    /// GETs that reached the wire, repetitions included.
    pub(super) fn gets(&self) -> u64 {
        self.bucket.counters().of(OperationKind::Get).requests
    }

    pub(super) async fn open(&self, settings: CacheSettings) -> Arc<Node> {
        Node::open(self.bucket.clone(), settings).await.expect("open")
    }

    /// A cache in memory only.
    pub(super) async fn open_memory(&self, memory_bytes: u64) -> Arc<Node> {
        self.open(CacheSettings { memory_bytes, ..CacheSettings::default() }).await
    }

    /// Puts an object of known bytes.
    pub(super) async fn put(&self, key: &str, size: u64) -> TestBlob {
        let bytes = content(key, size);
        let put = self.bucket.put(&ObjectKey::new(key), bytes.clone(), Condition::Always).await;
        TestBlob { name: VolumeBlob::new(VolumeId(7), put.expect("put").blob()), bytes }
    }
}

/// A blob and its bytes.
#[derive(Debug, Clone)]
pub(super) struct TestBlob {
    pub(super) name: VolumeBlob,
    pub(super) bytes: Bytes,
}

impl TestBlob {
    pub(super) fn keys(&self) -> Vec<BlockKey> {
        (0..self.name.block_count()).map(|index| self.name.block(index)).collect()
    }

    /// A range of 1 byte to a little over a block.
    pub(super) fn random_range(&self, random: &Rng) -> Range<u64> {
        let start = random.below(self.name.size());
        let longest = (self.name.size() - start).min(5 << 20);
        start..start + 1 + random.below(longest)
    }

    /// Reads `range` through `blocks` and compares every byte.
    pub(super) async fn check(&self, blocks: &dyn Blocks, range: Range<u64>) -> forebay_core::Result<()> {
        for (key, within) in pieces(&self.name, range) {
            let at = (key.offset() + within.start) as usize..(key.offset() + within.end) as usize;
            let got = blocks.get(&key, within.clone()).await?;
            assert!(got == self.bytes.slice(at), "bytes {within:?} of {key}");
        }
        Ok(())
    }

    pub(super) async fn check_all(&self, blocks: &dyn Blocks) {
        self.check(blocks, 0..self.name.size()).await.expect("read");
    }
}

/// Bytes that differ from key to key and from page to page, made by copying, which is fast without optimisation.
fn content(key: &str, size: u64) -> Bytes {
    let mut page = [0; 4096];
    Rng::seeded(u64::from(forebay_core::crc32c(key.as_bytes()))).fill(&mut page);
    let mut bytes = vec![0; size as usize];
    for (number, chunk) in bytes.chunks_mut(page.len()).enumerate() {
        page[..8].copy_from_slice(&(number as u64).to_be_bytes());
        chunk.copy_from_slice(&page[..chunk.len()]);
    }
    bytes.into()
}
