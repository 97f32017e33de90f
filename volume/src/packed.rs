//! Packed directories by paths: which are, and their files turned back into plain objects. A request and its report are
//! plain data, as a mount's control socket carries them.

use std::sync::Arc;

use forebay_core::{ErrorKind, FileKind, InodeId, Result};
use forebay_metadata::tree::{LocalTree, Walked, resolve, resolve_directory, walk};
use futures::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::Volume;
use crate::volume::local;
use crate::warmup::{Progress, measure};

/// Files that are exported at once: many, for each waits for the store.
const AT_ONCE: usize = 16;
/// Failures that an outcome names; past it they are only counted.
const NAMED: usize = 1_000;

/// How small files of a directory are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Each as an object at its own path.
    Plain,
    /// Many in one object.
    Packed,
}

/// What can be asked. Paths are from the volume's root, names joined by `/`, empty for the root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Request {
    /// The policy of a directory, which is `set` first if that is given.
    Policy {
        /// The directory.
        path: String,
        /// What it is to be from now on.
        set: Option<Policy>,
    },
    /// Turn packed files back into plain objects.
    Export {
        /// A file, or a directory with all below it.
        path: String,
        /// Make the directories plain first.
        plain: bool,
    },
}

/// What an export did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exported {
    /// Files, and bytes of them, that were looked at.
    pub progress: Progress,
    /// Files that became plain objects.
    pub exported: u64,
    /// Their bytes.
    pub exported_bytes: u64,
    /// Directories that were made plain.
    pub directories: u64,
    /// Files that could not be exported.
    pub failed: u64,
    /// Which and why, the first 1,000.
    pub failures: Vec<String>,
    /// Whether it was cancelled.
    pub cancelled: bool,
}

impl Exported {
    /// Whether no file is packed any more of those that were there.
    pub fn is_complete(&self) -> bool {
        !self.cancelled && self.failed == 0
    }
}

/// The policy of a directory, after it was set if that is asked for.
///
/// # Errors
/// `NotFound`; `NotDirectory`; `ReadOnly`; `Unsupported` when the tree is served elsewhere.
pub async fn policy(volume: &Volume, path: &str, set: Option<Policy>) -> Result<Policy> {
    let tree = local(volume)?;
    let directory = resolve_directory(tree, path).await?;
    if let Some(set) = set {
        tree.set_packed(directory, set == Policy::Packed).await?;
        volume.sync_names().await?;
    }
    Ok(if tree.is_packed(directory).await? { Policy::Packed } else { Policy::Plain })
}

/// Turns packed files at or below `path` back into plain objects, each at its own path, and with them those that lie in
/// other owned blobs, as one does that was changed and is not sealed yet. Those that are plain stay as they are, so that an export that was cut off goes on where it was. `progress` hears after every file.
///
/// # Errors
/// `NotFound` for a path that does not exist; `Unavailable` when the tree cannot be read. Files that cannot be exported are
/// no error: the outcome names them.
pub async fn export(
    volume: &Arc<Volume>,
    (path, plain): (&str, bool),
    mut progress: impl FnMut(&Progress) + Send,
    cancel: &CancellationToken,
) -> Result<Exported> {
    let tree = local(volume)?;
    let mut outcome = Exported::default();
    if plain {
        outcome.directories = make_plain(tree, path).await?;
    }
    outcome.progress = measure(volume, &[path.to_owned()], cancel).await?;
    progress(&outcome.progress);
    let root = resolve(tree, path).await?;
    let files = match root.kind {
        FileKind::Directory => walk(tree, root.ino).boxed(),
        _ => {
            stream::iter([Ok(Walked { path: path.to_owned().into_bytes().into(), attributes: root })]).boxed()
        }
    };
    let is_file = |walked: &Walked| std::future::ready(walked.attributes.kind == FileKind::File);
    let mut exported = files
        .try_filter(is_file)
        .map_ok(async |walked| {
            let done = match cancel.is_cancelled() {
                true => Ok(None),
                false => export_file(volume, tree, walked.attributes.ino).await.map(Some),
            };
            Ok((walked, done))
        })
        .try_buffer_unordered(AT_ONCE);
    while let Some((walked, done)) = exported.try_next().await? {
        outcome.note(&walked, done);
        progress(&outcome.progress);
    }
    drop(exported);
    outcome.cancelled = cancel.is_cancelled();
    volume.sync_names().await?;
    Ok(outcome)
}

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Done {
    /// It is a plain object now.
    Exported,
    /// It was none of those.
    WasPlain,
    /// More than is to move through this host.
    TooLarge,
    /// Its path is no key, or the key holds bytes of another file.
    NoPlace,
}

impl Exported {
    fn note(&mut self, walked: &Walked, done: Result<Option<Done>>) {
        let size = walked.attributes.size;
        let why = match done {
            // A cancelled one is not dealt with.
            Ok(None) => return,
            Ok(Some(Done::WasPlain)) => None,
            Ok(Some(Done::Exported)) => {
                self.exported += 1;
                self.exported_bytes += size;
                None
            }
            Ok(Some(Done::NoPlace)) => {
                Some("its path is no key of an object, or that holds bytes of another file".to_owned())
            }
            Ok(Some(Done::TooLarge)) => Some(
                "more of it than write.seal_max_bytes allows would have to pass through this host".to_owned(),
            ),
            Err(error) => Some(error.to_string()),
        };
        self.progress.done_bytes += size;
        let Some(why) = why else { return };
        self.failed += 1;
        if self.failures.len() < NAMED {
            self.failures.push(format!("{}: {why}", String::from_utf8_lossy(&walked.path)));
        }
    }
}

async fn export_file(volume: &Arc<Volume>, tree: &LocalTree, ino: InodeId) -> Result<Done> {
    use forebay_metadata::tree::Tree;
    // What is being written and not committed goes where its directory says.
    volume.commit(ino).await?;
    let exported = match tree.layout(ino).await {
        Ok((layout, _)) if layout.is_plain() => return Ok(Done::WasPlain),
        Ok((layout, _)) => match volume.store().may_carry(ino, &layout).await {
            Ok(false) => return Ok(Done::TooLarge),
            Ok(true) => volume.unpack(ino).await,
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    match exported {
        Ok(true) => Ok(Done::Exported),
        Ok(false) => Ok(Done::NoPlace),
        // Gone since it was listed.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Done::WasPlain),
        Err(error) => Err(error),
    }
}

/// Makes a directory and all below it plain. Returns how many were not.
async fn make_plain(tree: &LocalTree, path: &str) -> Result<u64> {
    let root = resolve(tree, path).await?;
    if root.kind != FileKind::Directory {
        return Ok(0);
    }
    let mut changed = u64::from(make_one_plain(tree, root.ino).await?);
    let mut below = walk(tree, root.ino);
    while let Some(walked) = below.next().await.transpose()? {
        if walked.attributes.kind == FileKind::Directory {
            changed += u64::from(make_one_plain(tree, walked.attributes.ino).await?);
        }
    }
    Ok(changed)
}

async fn make_one_plain(tree: &LocalTree, directory: InodeId) -> Result<bool> {
    let is_packed = match tree.is_packed(directory).await {
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        is_packed => is_packed?,
    };
    if is_packed {
        tree.set_packed(directory, false).await?;
    }
    Ok(is_packed)
}
