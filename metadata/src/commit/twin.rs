//! An engine for tests whose reads always wait, whose writes can be counted, held back and made to fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::kv::{Batch, Durability, Engine, Limits, MemEngine, Pair, Snapshot};
use crate::testing::Chance;

/// Behind it, an engine in memory.
pub(super) struct Twin {
    pub(super) memory: MemEngine,
    /// Reads answer at once, as on a local disk.
    pub(super) reads_at_once: bool,
    /// Asynchronous reads so far.
    pub(super) fetches: AtomicUsize,
    /// The changes of every batch written so far.
    pub(super) batches: Mutex<Vec<Batch>>,
    /// Every write takes one permit, or fails once this is closed.
    pub(super) permits: Semaphore,
    /// Every write fails while there is no room.
    pub(super) is_full: AtomicBool,
    /// Reads wait while a test holds this for writing.
    pub(super) gate: tokio::sync::RwLock<()>,
    /// Reads fail.
    pub(super) reads_fail: AtomicBool,
    chance: Mutex<Chance>,
}

impl Twin {
    /// One that lets every write pass.
    pub(super) fn new(reads_at_once: bool) -> Arc<Self> {
        let twin = Self::held(reads_at_once);
        twin.permits.add_permits(Semaphore::MAX_PERMITS);
        twin
    }

    /// One whose writes wait for permits.
    pub(super) fn held(reads_at_once: bool) -> Arc<Self> {
        Arc::new(Self {
            memory: MemEngine::new(),
            reads_at_once,
            fetches: AtomicUsize::new(0),
            batches: Mutex::default(),
            permits: Semaphore::new(0),
            is_full: AtomicBool::new(false),
            gate: tokio::sync::RwLock::default(),
            reads_fail: AtomicBool::new(false),
            chance: Mutex::new(Chance::fresh()),
        })
    }

    async fn wait(&self) -> Result<()> {
        self.fetches.fetch_add(1, Ordering::SeqCst);
        drop(self.gate.read().await);
        let pause = self.chance.lock().below(5);
        for _ in 0..pause {
            tokio::task::yield_now().await;
        }
        match self.reads_fail.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::Unavailable, "injected")),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl Engine for Twin {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.wait().await?;
        let value = self.memory.get(key).await;
        // The answer travels too: what it says may be old when it arrives.
        self.wait().await?;
        value
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        self.wait().await?;
        let pairs = self.memory.scan(start, end, limit).await;
        self.wait().await?;
        pairs
    }

    fn get_now(&self, key: &[u8]) -> Option<Result<Option<Bytes>>> {
        if self.reads_at_once { self.memory.get_now(key) } else { None }
    }

    fn scan_now(&self, start: &[u8], end: &[u8], limit: usize) -> Option<Result<Vec<Pair>>> {
        if self.reads_at_once { self.memory.scan_now(start, end, limit) } else { None }
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        self.memory.snapshot()
    }

    async fn write(&self, batch: Batch, durability: Durability) -> Result<()> {
        if self.is_full.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::NoSpace, "the disk is full"));
        }
        let refused = |_| Error::new(ErrorKind::Unavailable, "the write failed");
        self.permits.acquire().await.map_err(refused)?.forget();
        self.batches.lock().push(batch.clone());
        self.memory.write(batch, durability).await
    }

    async fn sync(&self) -> Result<()> {
        self.memory.sync().await
    }

    fn epoch(&self) -> u64 {
        self.memory.epoch()
    }

    fn limits(&self) -> Limits {
        Limits { max_key_bytes: 64, max_value_bytes: 1024 }
    }

    async fn close(&self) -> Result<()> {
        self.memory.close().await
    }
}
