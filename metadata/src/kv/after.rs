//! An engine whose writes come after something else is durable.
//!
//! Bytes that records refer to may lie outside of bucket and engine, on a disk of this host. No batch may outlive them,
//! so what it may refer to is made durable first, here, once for all that wait for the batch.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::Result;

use super::{Batch, Durability, Engine, Limits, Pair, Snapshot};

/// What must be durable before any record that refers to it is.
#[async_trait]
pub trait Before: Send + Sync + 'static {
    /// Makes durable everything that a record may refer to by now.
    async fn sync(&self) -> Result<()>;
}

/// `engine`, each write of which waits for `before`.
pub fn after(before: Arc<dyn Before>, engine: Arc<dyn Engine>) -> Arc<dyn Engine> {
    Arc::new(After { before, engine })
}

struct After {
    before: Arc<dyn Before>,
    engine: Arc<dyn Engine>,
}

#[async_trait]
impl Engine for After {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.engine.get(key).await
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        self.engine.scan(start, end, limit).await
    }

    fn get_now(&self, key: &[u8]) -> Option<Result<Option<Bytes>>> {
        self.engine.get_now(key)
    }

    fn scan_now(&self, start: &[u8], end: &[u8], limit: usize) -> Option<Result<Vec<Pair>>> {
        self.engine.scan_now(start, end, limit)
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        self.engine.snapshot()
    }

    async fn write(&self, batch: Batch, durability: Durability) -> Result<()> {
        self.before.sync().await?;
        self.engine.write(batch, durability).await
    }

    async fn sync(&self) -> Result<()> {
        self.engine.sync().await
    }

    fn epoch(&self) -> u64 {
        self.engine.epoch()
    }

    fn limits(&self) -> Limits {
        self.engine.limits()
    }

    async fn close(&self) -> Result<()> {
        self.engine.close().await
    }
}
