//! What is done to a volume as a whole, by the process that has it open: freeing what was left over, checking
//! and mending, backup.
//!
//! A request and its report are plain data, so that a mount does for a command what the command does by itself where
//! nothing is mounted.

use std::path::PathBuf;
use std::time::Duration;

use forebay_core::{ObjectKey, Result};
use forebay_metadata::dump::DumpReport;
use forebay_metadata::fsck::{FsckReport, Repair};
use forebay_metadata::gc::GcReport;
use forebay_metadata::tree::LocalTree;
use serde::{Deserialize, Serialize};

use crate::Volume;
use crate::compact::{Compacted, compact};
use crate::dumping;
use crate::volume::local;

/// What fsck calls bytes that a host staged, and that are not in the bucket.
const NOT_UPLOADED: &str = "not-uploaded";

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "snake_case")]
pub enum Request {
    /// Free what dead sessions left in the bucket.
    Gc {
        /// Only tell.
        dry_run: bool,
    },
    /// Check the tree against itself and the bucket.
    Fsck {
        /// Mend what can be mended. Not while it is mounted.
        repair: bool,
        /// Give up all that the store says is missing, however much that is.
        #[serde(default)]
        accept_loss: bool,
    },
    /// Write the tree to a new file.
    Dump {
        /// Its absolute path.
        file: PathBuf,
    },
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "snake_case")]
pub enum Report {
    /// What was found and freed.
    Gc(GcReport),
    /// What is wrong, and was mended.
    Fsck(FsckReport),
    /// What was written.
    Dump(DumpReport),
}

/// Does it.
///
/// # Errors
/// `Unsupported` when the tree is served elsewhere; what the work itself says.
pub async fn upkeep(volume: &Volume, request: &Request) -> Result<Report> {
    let tree = local(volume)?;
    match request {
        Request::Gc { dry_run } => gc(volume, tree, *dry_run).await.map(Report::Gc),
        Request::Dump { file } => dumping::dump(volume, file, async || {}).await.map(Report::Dump),
        Request::Fsck { repair, accept_loss } => {
            let repair = match (repair, accept_loss) {
                (true, true) => Repair::AcceptLoss,
                (repair, _) => Repair::from(*repair),
            };
            // What this host has staged is not missing.
            let lost = volume.bring_in_or_tell().await?;
            let mut report = tree.fsck(repair).await?;
            tell_lost(&mut report, &lost);
            Ok(Report::Fsck(report))
        }
    }
}

/// Says of bytes that this host staged, and whose blobs its disk `lost`, that nobody is going to upload them.
fn tell_lost(report: &mut FsckReport, lost: &[ObjectKey]) {
    for finding in report.findings.iter_mut().filter(|finding| finding.kind == NOT_UPLOADED) {
        if let Some(key) = lost.iter().find(|key| finding.detail.contains(&format!("`{key}`"))) {
            finding.detail =
                format!("its bytes at `{key}` were staged on this host and its disk damaged them");
        }
    }
}

/// Compacts, and frees what is left over.
async fn gc(volume: &Volume, tree: &LocalTree, dry_run: bool) -> Result<GcReport> {
    let compacted = compact(volume, Duration::ZERO, dry_run).await?;
    let freed = tree.collect_garbage(dry_run).await?;
    let Compacted { segments, bytes, live_bytes } = compacted;
    Ok(GcReport { segments, segment_bytes: bytes, segment_live_bytes: live_bytes, ..freed })
}
