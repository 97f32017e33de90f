//! What every engine promises.

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::Result;

use super::Batch;

/// A key and its value.
pub type Pair = (Bytes, Bytes);

/// A key and what it has from then on, if anything.
pub type Edit = (Bytes, Option<Bytes>);

/// When a write is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Once it is visible to reads. It survives a crash only after a later durable write, `sync` or `close`;
    /// what a crash loses is always the newest writes, never one in the middle.
    Buffered,
    /// Once it, and every write before it, survives a crash.
    Durable,
}

/// The sizes that an engine can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest key. At least 1,200 in every engine, since keys hold object names of up to 1,024 bytes.
    pub max_key_bytes: usize,
    /// Longest value.
    pub max_value_bytes: usize,
}

/// A consistent view of one moment.
#[async_trait]
pub trait Snapshot: Send + Sync {
    /// The value of `key` at that moment.
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>>;

    /// As [`Engine::scan`], at that moment.
    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>>;
}

/// An ordered map of bytes with one writer.
///
/// Calls to `write` come one at a time (the committer's promise); reads come from anywhere. After a failed
/// `write` it is unknown whether the batch was applied, but it was applied whole or not at all.
///
/// # Errors
/// `Conflict` when another process took the store over: nothing written since is or will be acknowledged, and
/// no retry on this engine can succeed. `NoSpace`, `Corrupt` and `Unavailable` as their names say.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// The value of `key`.
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>>;

    /// Up to `limit` pairs with `start <= key < end`, in key order. An empty `end` means no upper bound.
    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>>;

    /// As `get`, without ever waiting on a network; `None` when that cannot be promised.
    fn get_now(&self, key: &[u8]) -> Option<Result<Option<Bytes>>>;

    /// As `scan`, without ever waiting on a network; `None` when that cannot be promised.
    fn scan_now(&self, start: &[u8], end: &[u8], limit: usize) -> Option<Result<Vec<Pair>>>;

    /// A view that later writes do not change. Hold it briefly: it keeps old pages or tables alive.
    fn snapshot(&self) -> Result<Box<dyn Snapshot>>;

    /// Applies the batch atomically; visible to reads when this returns. Not cancel-safe: once polled, the
    /// batch may be applied even if the future is dropped.
    async fn write(&self, batch: Batch, durability: Durability) -> Result<()>;

    /// Makes everything written so far durable.
    async fn sync(&self) -> Result<()>;

    /// Counts writers of this store: larger than in any earlier opening.
    fn epoch(&self) -> u64;

    /// The sizes that this engine can hold.
    fn limits(&self) -> Limits;

    /// Makes everything durable and lets go of the store, so that it can be opened again at once. Every other
    /// call fails afterwards; closing twice is no error.
    async fn close(&self) -> Result<()>;
}
