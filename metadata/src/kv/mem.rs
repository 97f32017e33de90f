//! An engine in memory: the reference for the others, and the tree of tests. Durable for the life of a
//! [`MemStore`], which stands for the disk.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use parking_lot::{RwLock, RwLockReadGuard};

use super::{Batch, Durability, Engine, Limits, Pair, Snapshot};

type Map = BTreeMap<Bytes, Bytes>;

/// What outlives an engine: opening it again finds the same pairs and fences the engine before.
#[derive(Debug, Clone, Default)]
pub struct MemStore {
    map: Arc<RwLock<Arc<Map>>>,
    epoch: Arc<AtomicU64>,
    asked: Arc<Asked>,
}

/// What was asked of a store so far.
#[derive(Debug, Default)]
struct Asked {
    reads: AtomicU64,
    records: AtomicU64,
}

impl MemStore {
    /// Values and ranges that were asked for so far.
    pub fn reads(&self) -> u64 {
        self.asked.reads.load(Ordering::Relaxed)
    }

    /// Records that were written or deleted so far.
    pub fn records_written(&self) -> u64 {
        self.asked.records.load(Ordering::Relaxed)
    }

    /// The pairs, for who reads one or a range of them.
    fn read(&self) -> RwLockReadGuard<'_, Arc<Map>> {
        self.asked.reads.fetch_add(1, Ordering::Relaxed);
        self.map.read()
    }
}

/// The engine in memory.
#[derive(Debug)]
pub struct MemEngine {
    store: MemStore,
    epoch: u64,
}

impl MemEngine {
    const LIMITS: Limits = Limits { max_key_bytes: 64 << 10, max_value_bytes: 64 << 20 };

    /// An engine over a store of its own.
    pub fn new() -> Self {
        Self::open(&MemStore::default())
    }

    /// Opens `store`; an engine opened on it before is fenced.
    pub fn open(store: &MemStore) -> Self {
        let epoch = store.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        Self { store: store.clone(), epoch }
    }

    fn map(&self) -> Result<Arc<Map>> {
        self.check()?;
        Ok(self.store.read().clone())
    }

    fn check(&self) -> Result<()> {
        match self.store.epoch.load(Ordering::SeqCst) == self.epoch {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Conflict, "the store was closed or opened by another")),
        }
    }
}

impl Default for MemEngine {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Engine for MemEngine {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        Ok(self.map()?.get(key).cloned())
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        Ok(scan(&*self.map()?, start, end, limit))
    }

    fn get_now(&self, key: &[u8]) -> Option<Result<Option<Bytes>>> {
        let found = self.check().map(|()| self.store.read().get(key).cloned());
        Some(found)
    }

    fn scan_now(&self, start: &[u8], end: &[u8], limit: usize) -> Option<Result<Vec<Pair>>> {
        Some(self.check().map(|()| scan(&self.store.read(), start, end, limit)))
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        Ok(Box::new(MemSnapshot(self.map()?)))
    }

    async fn write(&self, batch: Batch, _durability: Durability) -> Result<()> {
        batch.check(&Self::LIMITS)?;
        let mut map = self.store.map.write();
        self.check()?;
        let map = Arc::make_mut(&mut map);
        self.store.asked.records.fetch_add(batch.changes().len() as u64, Ordering::Relaxed);
        for (key, value) in batch.changes() {
            match value {
                Some(value) => map.insert(key.clone(), value.clone()),
                None => map.remove(key),
            };
        }
        Ok(())
    }

    async fn sync(&self) -> Result<()> {
        self.check()
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn limits(&self) -> Limits {
        Self::LIMITS
    }

    async fn close(&self) -> Result<()> {
        let (mine, next) = (self.epoch, self.epoch + 1);
        // Already closed or fenced: nothing is left to let go of.
        let _ = self.store.epoch.compare_exchange(mine, next, Ordering::SeqCst, Ordering::SeqCst);
        Ok(())
    }
}

struct MemSnapshot(Arc<Map>);

#[async_trait]
impl Snapshot for MemSnapshot {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        Ok(self.0.get(key).cloned())
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        Ok(scan(&self.0, start, end, limit))
    }
}

fn scan(map: &Map, start: &[u8], end: &[u8], limit: usize) -> Vec<Pair> {
    if !end.is_empty() && start >= end {
        return Vec::new();
    }
    let end = if end.is_empty() { Bound::Unbounded } else { Bound::Excluded(end) };
    let range = map.range::<[u8], _>((Bound::Included(start), end));
    range.take(limit).map(|(key, value)| (key.clone(), value.clone())).collect()
}
