//! A store with faults, blobs of known bytes, and a cache over both.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{BlockKey, ObjectKey, VolumeBlob, VolumeId};
use forebay_io::object::{Bucket, BucketUrl, Condition};
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;

use crate::{Blocks, CacheSettings, Node, pieces};

/// `base` rounds, times `FOREBAY_TEST_SCALE` when that is set.
pub(crate) fn rounds(base: u64) -> u64 {
    let scale = std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    base * scale
}

/// A seed for one round; printed by whoever fails.
pub(crate) fn generator(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// A store in memory that counts GETs, fails some, is down, or holds them back.
#[derive(Debug)]
pub(super) struct TestStore {
    inner: InMemory,
    pub(super) gets: AtomicU64,
    pub(super) down: AtomicBool,
    fail_next: AtomicU64,
    open: watch::Sender<bool>,
}

impl TestStore {
    /// Lets the next `count` GETs fail.
    pub(super) fn fail(&self, count: u64) {
        self.fail_next.store(count, SeqCst);
    }

    /// Holds GETs back until [`Self::release`].
    pub(super) fn hold(&self) {
        self.open.send_replace(false);
    }

    pub(super) fn release(&self) {
        self.open.send_replace(true);
    }
}

impl std::fmt::Display for TestStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("test store")
    }
}

fn unreachable_store() -> object_store::Error {
    object_store::Error::Generic { store: "test", source: "connection refused".into() }
}

#[async_trait]
impl ObjectStore for TestStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.gets.fetch_add(1, SeqCst);
        let _ = self.open.subscribe().wait_for(|open| *open).await;
        tokio::task::yield_now().await;
        let failing = self.fail_next.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok();
        if failing || self.down.load(SeqCst) {
            return Err(unreachable_store());
        }
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// A bucket with faults; caches are opened over it.
#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) store: Arc<TestStore>,
    pub(super) bucket: Bucket,
}

impl World {
    pub(super) fn new() -> Self {
        let store = Arc::new(TestStore {
            inner: InMemory::new(),
            gets: AtomicU64::new(0),
            down: AtomicBool::new(false),
            fail_next: AtomicU64::new(0),
            open: watch::channel(true).0,
        });
        let url: BucketUrl = "s3://test".parse().expect("url");
        Self { bucket: Bucket::from_store(url, store.clone()), store }
    }

    pub(super) fn gets(&self) -> u64 {
        self.store.gets.load(SeqCst)
    }

    pub(super) fn set_down(&self, down: bool) {
        self.store.down.store(down, SeqCst);
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
    pub(super) fn random_range(&self, random: &mut StdRng) -> Range<u64> {
        let start = random.random_range(0..self.name.size());
        let longest = (self.name.size() - start).min(5 << 20);
        start..start + random.random_range(1..=longest)
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

/// Bytes that differ from key to key and from word to word.
fn content(key: &str, size: u64) -> Bytes {
    let mut bytes = vec![0; size as usize];
    let salt = u64::from(forebay_core::crc32c(key.as_bytes()));
    for (index, word) in bytes.chunks_mut(8).enumerate() {
        let value = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (salt << 17);
        word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
    }
    bytes.into()
}
