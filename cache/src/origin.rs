//! The bucket as the last source: one ranged GET a block, bounded in requests and in bytes, and counted.
//!
//! Retries and deadlines are the bucket's own.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use forebay_core::{BlockKey, Error, ErrorKind, Result, Version};
use forebay_io::object::Bucket;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::CacheSettings;
use crate::block::Block;

/// What a permit stands for: 1 KiB on its way.
const PERMIT_BYTES: u64 = 1 << 10;

/// Blocks up to this size are copied out of the buffer they arrived in. The HTTP client hands a small body out as a
/// slice of a larger read buffer, which a cached slice would keep alive past the memory ceiling; larger bodies come
/// in several pieces and are joined in an allocation of their own.
const COPY_UP_TO: usize = 256 << 10;

/// The bucket that blobs come from.
#[derive(Debug)]
pub(crate) struct Origin {
    bucket: Bucket,
    room: Semaphore,
    permits: u32,
    /// What every request costs at least, so that many small ones stay under the limit of requests.
    least: u32,
    requests: AtomicU64,
    bytes: AtomicU64,
    failures: AtomicU64,
}

/// What an origin did so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OriginCounts {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) failures: u64,
}

impl Origin {
    pub(crate) fn new(bucket: Bucket, settings: &CacheSettings) -> Self {
        let permits =
            (settings.fetch_bytes / PERMIT_BYTES).clamp(u64::from(settings.fetches), 1 << 28) as u32;
        Self {
            bucket,
            room: Semaphore::new(permits as usize),
            permits,
            least: permits / settings.fetches,
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    /// Waits until the block may be fetched; the permit is held until it has arrived.
    pub(crate) async fn admit(&self, key: &BlockKey) -> SemaphorePermit<'_> {
        let cost = u32::try_from(key.len().div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX);
        let cost = cost.clamp(self.least, self.permits);
        self.room.acquire_many(cost).await.expect("this semaphore is never closed")
    }

    /// Fetches a whole block, of exactly the version that the key names.
    ///
    /// # Errors
    /// `Stale` when the object has another version or length now; what the bucket says otherwise.
    pub(crate) async fn fetch(&self, key: &BlockKey, _permit: SemaphorePermit<'_>) -> Result<Block> {
        self.requests.fetch_add(1, Relaxed);
        match self.request(key).await {
            Ok(bytes) => {
                self.bytes.fetch_add(bytes.len() as u64, Relaxed);
                Ok(Block::new(if bytes.len() <= COPY_UP_TO { Bytes::copy_from_slice(&bytes) } else { bytes }))
            }
            Err(error) => {
                self.failures.fetch_add(1, Relaxed);
                Err(error.context(format_args!("fetch of {key}")))
            }
        }
    }

    async fn request(&self, key: &BlockKey) -> Result<Bytes> {
        let blob = key.blob.blob();
        let range = key.offset()..key.offset() + key.len();
        // A store without ETags gives empty versions; the length is then all that can be checked.
        let version = Some(&blob.version).filter(|version| **version != Version::new(""));
        let bytes = self.bucket.get(&blob.key, version, range).await?;
        if bytes.len() as u64 == key.len() {
            return Ok(bytes);
        }
        let (got, expected) = (bytes.len(), key.len());
        Err(Error::new(ErrorKind::Stale, format!("{got} bytes came where {expected} were expected")))
    }

    pub(crate) fn counts(&self) -> OriginCounts {
        OriginCounts {
            requests: self.requests.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            failures: self.failures.load(Relaxed),
        }
    }
}
