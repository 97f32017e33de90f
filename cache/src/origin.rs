//! The bucket as the last source: one ranged GET a block, bounded in requests and in bytes, and counted.
//!
//! Retries and deadlines are the bucket's own.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use forebay_core::{BLOCK_SIZE, BlockKey, Error, ErrorKind, Result};
use forebay_io::mem::Pool;
use forebay_io::object::Bucket;

use crate::block::Block;
use crate::demand::Demand;
use crate::room::{Place, Room};
use crate::{CacheSettings, Counters};

/// Buffers of whole blocks that evictions left and fetches will take again: 32 MiB. Both come at one rate, so that few
/// are ever unused.
const UNUSED_BUFFERS: usize = 8;

/// Blocks up to this size go into an allocation of their own, which need not be cleared first.
const SMALL_BYTES: u64 = 128 << 10;

/// The bucket that blobs come from.
#[derive(Debug)]
pub(crate) struct Origin {
    bucket: Bucket,
    room: Room,
    buffers: Pool,
    requests: AtomicU64,
    bytes: AtomicU64,
    failures: AtomicU64,
}

impl Origin {
    pub(crate) fn new(bucket: Bucket, settings: &CacheSettings) -> Self {
        let room = Room::new(settings.origin_bytes(), settings.fetches);
        let [requests, bytes, failures] = Default::default();
        let buffers = Pool::new(BLOCK_SIZE as usize, UNUSED_BUFFERS);
        Self { bucket, room, buffers, requests, bytes, failures }
    }

    /// Buffers for blocks, from wherever they come.
    pub(crate) fn buffers(&self) -> &Pool {
        &self.buffers
    }

    /// Bytes on their way from the bucket, and requests.
    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    /// Waits until the block may be fetched.
    pub(crate) async fn admit(&self, key: &BlockKey, demand: &Demand) -> Place {
        self.room.enter_for(demand, key.len()).await
    }

    /// Fetches a whole block, of exactly the version that the key names.
    ///
    /// # Errors
    /// `Stale` when the object has another version or length now, or is gone; what the bucket says otherwise.
    /// `NotFound` is for staged blobs alone, which may not have come to the bucket yet.
    pub(crate) async fn fetch(&self, key: &BlockKey, _place: &Place) -> Result<Block> {
        self.requests.fetch_add(1, Relaxed);
        match self.request(key).await {
            Ok(bytes) => {
                self.bytes.fetch_add(bytes.len() as u64, Relaxed);
                Ok(Block::new(bytes))
            }
            Err(error) => {
                self.failures.fetch_add(1, Relaxed);
                Err(error.context(format_args!("fetch of {key}")))
            }
        }
    }

    /// Into an allocation of the block's own: what the client hands out may be a slice of a larger buffer, which a
    /// cached block would keep alive past the memory ceiling.
    async fn request(&self, key: &BlockKey) -> Result<Bytes> {
        let blob = key.blob.blob();
        let range = key.offset()..key.offset() + key.len();
        // A store without ETags gives empty versions; the length is then all that can be checked. The key of a blob that
        // was staged says by itself which bytes are meant.
        let is_known = !blob.version.as_str().is_empty() && blob.staged_on().is_none();
        let version = Some(&blob.version).filter(|_| is_known);
        let got = if key.len() <= SMALL_BYTES {
            self.bucket.get_own(&blob.key, version, range).await
        } else {
            let mut buffer = self.buffers.take(key.len() as usize);
            let got = self.bucket.get_into(&blob.key, version, range, &mut buffer).await;
            got.map(|()| buffer.freeze())
        };
        let is_staged = blob.staged_on().is_some();
        got.map_err(|error| match error.kind() {
            // The range is right for the blob, so an object that has no such range is another one.
            ErrorKind::Invalid => {
                Error::new(ErrorKind::Stale, "the object has another length").with_source(error)
            }
            // There is the file, which says that these are its bytes: it is not what is missing.
            ErrorKind::NotFound if !is_staged => {
                Error::new(ErrorKind::Stale, "the object is gone").with_source(error)
            }
            _ => error,
        })
    }

    /// Fills in what an origin knows.
    pub(crate) fn report(&self, counters: &mut Counters) {
        counters.origin_requests = self.requests.load(Relaxed);
        counters.origin_bytes = self.bytes.load(Relaxed);
        counters.origin_failures = self.failures.load(Relaxed);
    }
}
