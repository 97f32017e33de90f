//! The engine on a local disk: LMDB, a memory-mapped B+tree with one synced commit a batch.
//!
//! Reads never wait on a network, so `get_now` always answers. Every write is synced, buffered ones too: LMDB
//! without syncs can lose or tear what came before. One process at a time, by a lock file of our own that
//! names its holder; LMDB's own locks would let a second one in. Not for network file systems.

// LMDB maps a file into memory, and its binding marks the opening unsafe for that.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::lock_file::{LockFile, Locked};
use forebay_io::task::blocking;
use heed::types::Bytes as Raw;
use heed::{CommitOrAbort, EnvFlags, EnvOpenOptions, MdbError, RoTxn, WithoutTls};
use parking_lot::{Mutex, RwLock};
use rustix::fs::FallocateFlags;

use super::{Batch, Durability, Engine, Limits, Pair, Snapshot};

/// How often, and after which pause, a tree is opened that a process of the same number, in another PID namespace, is reading:
/// LMDB knows readers by these numbers. As one reads that copies it, it ends.
const TRIES: u32 = 40;
const PAUSE: Duration = Duration::from_millis(250);
/// Batches between two looks for readers that were killed.
const LOOK_EVERY: u64 = 256;

type Env = heed::Env<WithoutTls>;
type Table = heed::Database<'static, Raw, Raw>;

/// How much an LMDB file may hold.
#[derive(Debug, Clone)]
pub struct LmdbSettings {
    /// Bytes of address space reserved at open, the most that the tree can grow to. Default 1 TiB; no memory
    /// or disk is used before it is needed. A multiple of 4 KiB.
    pub map_bytes: usize,
}

impl Default for LmdbSettings {
    fn default() -> Self {
        Self { map_bytes: 1 << 40 }
    }
}

/// The engine on a local disk.
pub struct LmdbEngine {
    tree: RwLock<Option<Arc<Tree>>>,
    directory: PathBuf,
    epoch: u64,
    limits: Limits,
}

/// What an open engine holds; the lock is let go of after the file is closed.
struct Tree {
    env: Env,
    table: Table,
    /// Batches that were written.
    writes: AtomicU64,
    _lock: LockFile,
}

impl LmdbEngine {
    /// Opens or creates the tree in `directory`.
    ///
    /// # Errors
    /// `Conflict`, naming the process, when another one has it open; `Corrupt` when the file is no tree.
    pub async fn open(directory: impl Into<PathBuf>, settings: &LmdbSettings) -> Result<Self> {
        let directory = directory.into();
        for _ in 0..TRIES {
            match Self::open_once(&directory, settings).await {
                Err(error) if error.kind() == ErrorKind::Unavailable => Clock::system().sleep(PAUSE).await,
                opened => return opened,
            }
        }
        Self::open_once(&directory, settings).await
    }

    async fn open_once(directory: &Path, settings: &LmdbSettings) -> Result<Self> {
        let (directory, settings) = (directory.to_owned(), settings.clone());
        blocking(move || Self::open_blocking(directory, &settings)).await?
    }

    fn open_blocking(directory: PathBuf, settings: &LmdbSettings) -> Result<Self> {
        let at = |error: Error| error.context(format!("the tree in {}", directory.display()));
        std::fs::create_dir_all(&directory).map_err(|error| at(error.into()))?;
        let lock = take(&directory).map_err(at)?;
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        options.map_size(settings.map_bytes).max_dbs(2).max_readers(1024);
        // SAFETY: the file must not change under the map other than through LMDB, and no unsafe flag may be
        // set. The exclusive lock keeps other processes of ours out, and no flag is set.
        let env = unsafe { options.open(&directory) }.map_err(|error| at(convert(error)))?;
        // Where it fails, so would all reads.
        env.read_txn().map(drop).map_err(|error| at(convert(error)))?;
        forget_dead_readers(&env);
        cover_missing_tail(&env, &directory).map_err(at)?;
        let (table, epoch) = begin_epoch(&env).map_err(|error| at(convert(error)))?;
        keep_names(&directory).map_err(|error| at(error.into()))?;
        let limits = Limits { max_key_bytes: env.max_key_size(), max_value_bytes: 64 << 20 };
        let tree = RwLock::new(Some(Arc::new(Tree { env, table, writes: AtomicU64::new(0), _lock: lock })));
        Ok(Self { tree, directory, epoch, limits })
    }

    /// The tree in `directory` as it is at this moment, whoever writes to it, and the number of its last commit. To be read soon:
    /// it keeps old pages alive.
    ///
    /// # Errors
    /// `NotFound` where there is none; `Denied` where LMDB's own lock file cannot be written; `Corrupt` when the file is no tree.
    pub async fn view(
        directory: impl Into<PathBuf>,
        settings: &LmdbSettings,
    ) -> Result<(Box<dyn Snapshot>, u64)> {
        let (directory, settings) = (directory.into(), settings.clone());
        let view = blocking(move || Self::view_blocking(&directory, &settings)).await??;
        let commit = view.txn.lock().id() as u64;
        Ok((Box::new(view), commit))
    }

    fn view_blocking(directory: &Path, settings: &LmdbSettings) -> Result<LmdbSnapshot> {
        let at = |error: Error| error.context(format!("the tree in {}", directory.display()));
        let file = directory.join("data.mdb");
        std::fs::metadata(&file).map_err(|error| at(error.into()))?;
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        options.map_size(settings.map_bytes).max_dbs(2).max_readers(1024);
        // SAFETY: the file must not change under the map other than through LMDB, whose writer sees by LMDB's own locks which
        // pages this one reads; the flag only keeps this process from writing.
        let env = unsafe { options.flags(EnvFlags::READ_ONLY).open(directory) };
        let env = env.map_err(|error| at(convert(error)))?;
        forget_dead_readers(&env);
        lengthen(&file, needed_bytes(&env)).map_err(|error| at(error.into()))?;
        let (table, txn) = find_table(&env).map_err(|error| at(convert(error)))?;
        let table = table.ok_or_else(|| at(Error::corrupt("data.mdb holds no tree")))?;
        Ok(LmdbSnapshot { table, txn: Mutex::new(txn) })
    }

    fn tree(&self) -> Result<Arc<Tree>> {
        self.tree.read().clone().ok_or_else(closed)
    }

    fn with_tree<T>(&self, read: impl FnOnce(&Tree) -> heed::Result<T>) -> Result<T> {
        let tree = self.tree.read();
        let tree = tree.as_ref().ok_or_else(closed)?;
        read(tree).map_err(|error| self.describe(error))
    }

    fn describe(&self, error: heed::Error) -> Error {
        convert(error).context(format!("the tree in {}", self.directory.display()))
    }
}

/// Has LMDB forget readers whose processes were killed: it keeps all pages that changed since they began, and looks for the dead
/// in few cases by itself. Where that fails, as it is.
fn forget_dead_readers(env: &Env) {
    match env.clear_stale_readers() {
        Ok(0) => {}
        Ok(count) => {
            tracing::debug!(count, "processes that were killed while they read the tree are forgotten")
        }
        Err(error) => {
            tracing::debug!(%error, "whether processes that read the tree were killed cannot be told")
        }
    }
}

/// Takes the directory's lock, or says which process has it.
fn take(directory: &Path) -> Result<LockFile> {
    match LockFile::lock(&directory.join("forebay.lock"), &std::process::id().to_string())? {
        Locked::Mine(file) => Ok(file),
        Locked::By(process) => {
            let message = format!("it is in use by process {process}");
            Err(Error::new(ErrorKind::Conflict, message)
                .with_hint("unmount it there first; one process at a time may open it"))
        }
    }
}

/// Syncs the directories above the tree's file, which LMDB does not: what it commits to a file without a name is lost
/// when the power fails. Two of them may have been made for the tree.
fn keep_names(directory: &Path) -> std::io::Result<()> {
    directory.ancestors().take(3).try_for_each(|directory| File::open(directory)?.sync_all())
}

/// Fills a file that was cut short with zeros, so that reading a lost page is an error and not a bus error.
/// LMDB itself may leave its last pages unwritten when nothing refers to them, so a short file proves nothing.
fn cover_missing_tail(env: &Env, directory: &Path) -> Result<()> {
    let needed = needed_bytes(env);
    let file = OpenOptions::new().write(true).open(directory.join("data.mdb"))?;
    if file.metadata()?.len() < needed {
        file.set_len(needed)?;
    }
    Ok(())
}

/// As [`cover_missing_tail`], of a file that another process writes to, which makes it longer itself: never shorter.
fn lengthen(file: &Path, needed: u64) -> std::io::Result<()> {
    if std::fs::metadata(file)?.len() < needed {
        let file = OpenOptions::new().write(true).open(file)?;
        rustix::fs::fallocate(file, FallocateFlags::empty(), 0, needed)?;
    }
    Ok(())
}

/// The length of a file that has all its pages.
fn needed_bytes(env: &Env) -> u64 {
    (env.info().last_page_number as u64 + 1) * u64::from(env.unnamed_database_stat().page_size)
}

/// The table of records, if there is one, and a view of this moment.
fn find_table(env: &Env) -> heed::Result<(Option<Table>, RoTxn<'static, WithoutTls>)> {
    let opened = env.open_databases_and_commit(env.read_txn()?, |opener, txn| {
        let table = opener.open_database::<Raw, Raw>(txn, Some("tree"))?;
        heed::Result::Ok(CommitOrAbort::<_, ()>::Commit(table))
    })?;
    Ok((opened.unwrap_commit(), env.clone().static_read_txn()?))
}

/// Opens the tables and counts this opening.
fn begin_epoch(env: &Env) -> heed::Result<(Table, u64)> {
    let mut epoch = 0;
    let opened = env.create_databases_and_commit(env.write_txn()?, |opener, txn| {
        let table = opener.create_database::<Raw, Raw>(txn, Some("tree"))?;
        let meta = opener.create_database::<Raw, Raw>(txn, Some("meta"))?;
        let last = meta.get(txn, b"epoch")?.and_then(|bytes| bytes.try_into().ok());
        epoch = last.map_or(0, u64::from_be_bytes) + 1;
        meta.put(txn, b"epoch", &epoch.to_be_bytes())?;
        heed::Result::Ok(CommitOrAbort::<_, ()>::Commit(table))
    })?;
    Ok((opened.unwrap_commit(), epoch))
}

#[async_trait]
impl Engine for LmdbEngine {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.with_tree(|tree| get(tree.table, &tree.env.read_txn()?, key))
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        self.with_tree(|tree| scan(tree.table, &tree.env.read_txn()?, start, end, limit))
    }

    fn get_now(&self, key: &[u8]) -> Option<Result<Option<Bytes>>> {
        Some(self.with_tree(|tree| get(tree.table, &tree.env.read_txn()?, key)))
    }

    fn scan_now(&self, start: &[u8], end: &[u8], limit: usize) -> Option<Result<Vec<Pair>>> {
        Some(self.with_tree(|tree| scan(tree.table, &tree.env.read_txn()?, start, end, limit)))
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        let tree = self.tree()?;
        let txn = tree.env.clone().static_read_txn().map_err(|error| self.describe(error))?;
        Ok(Box::new(LmdbSnapshot { table: tree.table, txn: Mutex::new(txn) }))
    }

    async fn write(&self, batch: Batch, _durability: Durability) -> Result<()> {
        batch.check(&self.limits)?;
        let tree = self.tree()?;
        // A commit that began ends, whoever gives up waiting for it.
        blocking(move || apply(&tree, &batch)).await?.map_err(|error| self.describe(error))
    }

    async fn sync(&self) -> Result<()> {
        self.tree().map(drop)
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    async fn close(&self) -> Result<()> {
        let tree = self.tree.write().take();
        blocking(move || drop(tree)).await
    }
}

/// A read transaction; it may move between threads but is used by one at a time.
struct LmdbSnapshot {
    table: Table,
    txn: Mutex<RoTxn<'static, WithoutTls>>,
}

#[async_trait]
impl Snapshot for LmdbSnapshot {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        get(self.table, &self.txn.lock(), key).map_err(convert)
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        scan(self.table, &self.txn.lock(), start, end, limit).map_err(convert)
    }
}

fn get(table: Table, txn: &RoTxn<'_, WithoutTls>, key: &[u8]) -> heed::Result<Option<Bytes>> {
    match key {
        [] => Ok(None),
        _ => Ok(table.get(txn, key)?.map(Bytes::copy_from_slice)),
    }
}

fn scan(
    table: Table,
    txn: &RoTxn<'_, WithoutTls>,
    start: &[u8],
    end: &[u8],
    limit: usize,
) -> heed::Result<Vec<Pair>> {
    if !end.is_empty() && start >= end {
        return Ok(Vec::new());
    }
    let from = if start.is_empty() { Bound::Unbounded } else { Bound::Included(start) };
    let to = if end.is_empty() { Bound::Unbounded } else { Bound::Excluded(end) };
    let pairs = table.range(txn, &(from, to))?.take(limit);
    pairs.map(|pair| pair.map(|(k, v)| (Bytes::copy_from_slice(k), Bytes::copy_from_slice(v)))).collect()
}

fn apply(tree: &Tree, batch: &Batch) -> heed::Result<()> {
    if tree.writes.fetch_add(1, Relaxed) % LOOK_EVERY == LOOK_EVERY - 1 {
        forget_dead_readers(&tree.env);
    }
    let mut txn = tree.env.write_txn()?;
    for (key, value) in batch.changes() {
        match value {
            Some(value) => tree.table.put(&mut txn, key, value)?,
            None => drop(tree.table.delete(&mut txn, key)?),
        }
    }
    txn.commit()
}

fn closed() -> Error {
    Error::new(ErrorKind::Conflict, "the tree was closed")
}

fn convert(error: heed::Error) -> Error {
    use heed::Error as Heed;
    let damaged = |message: String| {
        Error::corrupt(message).with_hint(
            "the file data.mdb is damaged or of another version: move it away; the tree is read again from \
             the bucket or from its last dump there",
        )
    };
    match error {
        Heed::Io(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            let fact = "a process of the same number, in another PID namespace, is using it";
            Error::new(ErrorKind::Unavailable, fact).with_hint(
                "share the PID namespace (`hostPID`, `--pid=host`), or mount once that one has ended",
            )
        }
        Heed::Io(error) => error.into(),
        Heed::Mdb(MdbError::MapFull) => Error::new(ErrorKind::NoSpace, "the reserved map is full")
            .with_hint("open it with a larger map_bytes"),
        Heed::Mdb(
            error @ (MdbError::Invalid
            | MdbError::Corrupted
            | MdbError::PageNotFound
            | MdbError::VersionMismatch
            | MdbError::Incompatible),
        ) => damaged(error.to_string()),
        Heed::Mdb(MdbError::Panic) => {
            Error::new(ErrorKind::Unavailable, "an earlier write to the disk failed; open the tree again")
        }
        Heed::Mdb(MdbError::ReadersFull) => {
            Error::new(ErrorKind::Unavailable, "too many reads at once on the tree")
        }
        other => Error::bug(other.to_string()),
    }
}
