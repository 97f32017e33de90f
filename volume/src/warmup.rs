//! Warmup: bringing files into the cache before they are asked for, and proving that they are there.
//!
//! Nothing is kept between runs: what is in the cache already is counted as such and not fetched again, so a warmup
//! that was killed goes on where it was by being started again.

mod fits;

use std::collections::HashSet;

pub use forebay_cache::Unpinned;
use forebay_cache::{Fill, Proof, Residency};
use forebay_core::{Attributes, BlockKey, ErrorKind, FileKind, Result};
use futures::stream::{self, BoxStream, Stream, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use forebay_metadata::tree::{Walked, resolve, walk};

use crate::Volume;

/// Files whose layouts are asked for at once.
const LAYOUTS_AT_ONCE: usize = 32;
/// Missing or failed blocks that an outcome names; past it they are only counted.
const NAMED: usize = 1_000;
/// Blocks that are proved at once: what is wrong with them is in memory until it is told, or mended.
const PROVED_AT_ONCE: usize = 256;

/// What to warm, and how.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Request {
    /// Paths in the volume, names joined by `/`; an empty one is the whole volume.
    pub paths: Vec<String>,
    /// Keep the blocks on disk until they are unpinned.
    pub pin: bool,
    /// Only say what would be done.
    pub dry_run: bool,
    /// Blocks on their way at once.
    pub concurrency: usize,
}

/// How far a warmup has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Files to warm.
    pub files: u64,
    /// Bytes to warm.
    pub bytes: u64,
    /// Bytes dealt with so far.
    pub done_bytes: u64,
    /// Bytes that left the bucket for it.
    pub origin_bytes: u64,
}

/// What a warmup did, and whether the data is in the cache now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The totals.
    pub progress: Progress,
    /// Blocks of the files, as they were when they were looked for last.
    pub blocks: u64,
    /// Blocks fetched from the bucket.
    pub fetched: u64,
    /// Blocks that were in the cache before.
    pub already: u64,
    /// Blocks found in the cache when all was checked again at the end, their copies on disk read back.
    pub proved: u64,
    /// Those of them that are in memory only: whatever is read next may take their place.
    pub memory_only: u64,
    /// Blocks that were not there, the first 1,000 by object and byte range.
    pub missing: Vec<String>,
    /// How many were not there.
    pub missing_blocks: u64,
    /// Why blocks could not be brought in, the first 1,000.
    pub failures: Vec<String>,
    /// Whether it was cancelled.
    pub cancelled: bool,
}

impl Outcome {
    /// Whether every block was proved to be in the cache. The proof alone tells: files come and go since the others were
    /// counted.
    pub fn is_complete(&self) -> bool {
        !self.cancelled && self.missing_blocks == 0
    }
}

/// Warms what `request` names. `progress` hears after every block; `cancel` is heard throughout.
///
/// # Errors
/// `NotFound` when a path does not exist; `Unavailable` when the tree cannot be read; `NoSpace`, before anything is fetched, when it is
/// more than the cache can hold. Blocks that cannot be brought
/// in are no error: the outcome names them.
pub async fn warmup(
    volume: &Volume,
    request: &Request,
    mut progress: impl FnMut(&Progress) + Send,
    cancel: &CancellationToken,
) -> Result<Outcome> {
    let counted = measure(volume, &request.paths, cancel).await?;
    let mut outcome = Outcome { progress: counted, ..Outcome::default() };
    progress(&outcome.progress);
    if request.dry_run {
        return dry_run(volume, request, outcome, cancel).await;
    }
    fits::check(volume, request, &outcome.progress, cancel).await?;
    let fill = Fill { concurrency: request.concurrency, pin: request.pin };
    let mut walked: Result<()> = Ok(());
    let keys = until_error(blocks(volume, &request.paths), &mut walked);
    let at = &mut outcome.progress;
    let report = forebay_cache::fill_many(
        &**volume.blocks(),
        keys,
        fill,
        |done| {
            // A segment may hold bytes of other files, too.
            (at.done_bytes, at.origin_bytes) = (done.bytes.min(at.bytes), done.origin_bytes);
            progress(at);
        },
        cancel,
    )
    .await;
    walked?;
    outcome.blocks = report.total.blocks;
    (outcome.fetched, outcome.already) = (report.total.from_origin, report.total.already);
    outcome.cancelled = report.cancelled;
    outcome.failures =
        report.failures.iter().take(NAMED).map(|(key, error)| format!("{}: {error}", name(key))).collect();
    if outcome.cancelled {
        return Ok(outcome);
    }
    // Files that share bytes are dealt with together.
    outcome.progress.done_bytes = outcome.progress.bytes;
    prove(volume, request, (fill, &mut outcome), cancel).await?;
    Ok(outcome)
}

/// Checks all blocks again, some at a time; those that are damaged on disk are fetched again.
async fn prove(
    volume: &Volume,
    request: &Request,
    (fill, outcome): (Fill, &mut Outcome),
    cancel: &CancellationToken,
) -> Result<()> {
    let mut walked: Result<()> = Ok(());
    {
        let keys = until_error(blocks(volume, &request.paths), &mut walked).take_until(cancel.cancelled());
        let mut windows = std::pin::pin!(keys.chunks(PROVED_AT_ONCE));
        while let Some(window) = windows.next().await {
            let mut proof = forebay_cache::prove(&**volume.blocks(), stream::iter(window)).await?;
            replace_damaged(volume, fill, (&mut proof, outcome), cancel).await?;
            outcome.proved += proof.present;
            outcome.memory_only += proof.memory_only;
            outcome.missing_blocks += proof.missing.len() as u64;
            let unnamed = NAMED - outcome.missing.len();
            outcome.missing.extend(proof.missing.iter().take(unnamed).map(name));
        }
    }
    walked?;
    outcome.cancelled = cancel.is_cancelled();
    outcome.blocks = outcome.proved + outcome.missing_blocks;
    Ok(())
}

/// Lets what a warmup pinned below `paths` be evicted again; where one of them is the whole volume, whatever is pinned, of
/// objects that were replaced or deleted since as well.
///
/// # Errors
/// As [`warmup`], and what the disk says; some may be unpinned then.
pub async fn unpin(volume: &Volume, paths: &[String]) -> Result<Unpinned> {
    let cache = volume.blocks();
    if paths.iter().any(String::is_empty) {
        return cache.unpin_all().await;
    }
    let mut unpinned = Unpinned::default();
    let mut keys = std::pin::pin!(blocks(volume, paths));
    while let Some(key) = keys.try_next().await? {
        unpinned += cache.unpin(&key).await?;
    }
    Ok(unpinned)
}

/// Fetches again what the proof found damaged on disk, and proves that.
async fn replace_damaged(
    volume: &Volume,
    fill: Fill,
    (proof, outcome): (&mut Proof, &mut Outcome),
    cancel: &CancellationToken,
) -> Result<()> {
    let damaged = std::mem::take(&mut proof.damaged);
    if damaged.is_empty() {
        return Ok(());
    }
    // One that was named twice was there no more the second time.
    let doubtful = [std::mem::take(&mut proof.missing), damaged.clone()].concat();
    let keys = stream::iter(damaged);
    let report = forebay_cache::fill_many(&**volume.blocks(), keys, fill, |_| {}, cancel).await;
    let fetched = report.total.from_origin;
    (outcome.fetched, outcome.already) = (outcome.fetched + fetched, outcome.already.saturating_sub(fetched));
    outcome.progress.origin_bytes += report.total.origin_bytes;
    let keys = stream::iter(doubtful).take_until(cancel.cancelled());
    let second = forebay_cache::prove(&**volume.blocks(), keys).await?;
    proof.present += second.present;
    proof.memory_only += second.memory_only;
    proof.missing.extend(second.missing.into_iter().chain(second.damaged));
    Ok(())
}

/// Counts what is in the cache already; everything else is reported as missing.
async fn dry_run(
    volume: &Volume,
    request: &Request,
    mut outcome: Outcome,
    cancel: &CancellationToken,
) -> Result<Outcome> {
    let keys = blocks(volume, &request.paths).take_until(cancel.cancelled());
    let mut windows = std::pin::pin!(keys.try_chunks(NAMED));
    while let Some(window) = windows.next().await {
        let window = window.map_err(|error| error.1)?;
        for (key, residency) in window.iter().zip(volume.blocks().stat(&window, false).await?) {
            outcome.blocks += 1;
            match residency {
                Residency::Memory | Residency::Disk => outcome.already += 1,
                Residency::Absent | Residency::Damaged if outcome.missing.len() < NAMED => {
                    outcome.missing.push(name(key));
                }
                Residency::Absent | Residency::Damaged => {}
            }
        }
    }
    outcome.missing_blocks = outcome.blocks - outcome.already;
    outcome.cancelled = cancel.is_cancelled();
    Ok(outcome)
}

/// Counts files and bytes, those so far where it is cancelled.
pub(crate) async fn measure(
    volume: &Volume,
    paths: &[String],
    cancel: &CancellationToken,
) -> Result<Progress> {
    let mut total = Progress::default();
    for path in paths {
        if cancel.is_cancelled() {
            break;
        }
        let root = resolve(&**volume.tree(), path).await?;
        let mut found = std::pin::pin!(files(volume, root).take_until(cancel.cancelled()));
        while let Some(file) = found.try_next().await? {
            total.files += 1;
            total.bytes += file.size;
        }
    }
    Ok(total)
}

/// The blocks of all files at or below `paths`; those of segments, which many files share, once each.
fn blocks<'a>(volume: &'a Volume, paths: &'a [String]) -> impl Stream<Item = Result<BlockKey>> + Send + 'a {
    let mut segments = HashSet::new();
    let mut is_new = move |key: &BlockKey| !key.blob.blob().is_segment() || segments.insert(key.clone());
    stream::iter(paths)
        .then(async |path| {
            let root = resolve(&**volume.tree(), path).await?;
            Ok::<_, forebay_core::Error>(files(volume, root))
        })
        .try_flatten()
        .map_ok(|found| blocks_of(volume, found.ino))
        .try_buffered(LAYOUTS_AT_ONCE)
        .map_ok(|keys| stream::iter(keys.into_iter().map(Ok)))
        .try_flatten()
        .try_filter(move |key| std::future::ready(is_new(key)))
}

/// `root` if it is a file, or every file below it.
fn files(volume: &Volume, root: Attributes) -> BoxStream<'_, Result<Attributes>> {
    if root.kind != FileKind::Directory {
        let single = (root.kind == FileKind::File).then_some(Ok(root));
        return stream::iter(single).boxed();
    }
    walk(&**volume.tree(), root.ino)
        .map_ok(|Walked { attributes, .. }| attributes)
        .try_filter(|found| std::future::ready(found.kind == FileKind::File))
        .boxed()
}

/// The blocks of one file; none if it went away since it was listed.
async fn blocks_of(volume: &Volume, ino: forebay_core::InodeId) -> Result<Vec<BlockKey>> {
    match volume.block_keys(ino).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
}

/// The items of a stream up to its first error, which is left in `error`.
fn until_error<'a, T: Send + 'a>(
    items: impl Stream<Item = Result<T>> + Send + 'a,
    error: &'a mut Result<()>,
) -> impl Stream<Item = T> + Send + 'a {
    items.scan(error, |error, item| {
        std::future::ready(match item {
            Ok(item) => Some(item),
            Err(cause) => {
                **error = Err(cause);
                None
            }
        })
    })
}

/// An object and the bytes of it that a block holds.
fn name(key: &BlockKey) -> String {
    let start = key.offset();
    format!("{} bytes {start}-{}", key.blob.blob().key, start + key.len())
}
