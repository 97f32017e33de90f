//! A copy of a file, or of a directory with all below it, that shares all bytes with it, as it is at one moment.
//!
//! It is made in steps of a bounded number of entries, each one transaction, so that others go on. What fits into one step
//! is made by that one. Otherwise the copy is built in a directory without a name, which no path leads to and which
//! counts in no quota ([`crate::records`] has the rules). Each step first follows what was changed of what is copied
//! already, then copies further entries. The step that finds nothing left to follow nor to copy links the directory: the
//! copy is the tree as it is at that moment, and nothing has to be kept for it before, since every step shares what the
//! tree names in that very transaction.
//!
//! A clone that does not come to its end is freed: at once when it fails, by the mover when its caller went away, by the
//! next session when the process died.

mod copy;
mod follow;
mod step;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, InodeId, Result};
use futures::stream::{self, StreamExt, TryStreamExt};

use self::step::{Job, Runs, Step, step};
use super::local::LocalTree;
use super::{CloneGuide, Cloned};
use crate::mover::free_unfinished;
use crate::records::{CloneTicket, Clones};

/// Steps that may wait for the engine: more would keep others' changes waiting behind them.
const STEPS_AHEAD: usize = 8;
/// Directories listed at the same time.
const LISTED_AT_ONCE: usize = 16;

/// As [`super::Tree::clone_tree`].
pub(super) async fn clone_tree(
    tree: &LocalTree,
    source: InodeId,
    to: (InodeId, Bytes),
    guide: &dyn CloneGuide,
) -> Result<Cloned> {
    let ticket = Clones::begin(&tree.shared);
    let made = build(tree, &ticket, (source, to), guide).await;
    let has_left = made.is_err() && ticket.with(|building| building.top.is_some());
    drop(ticket);
    if has_left && let Err(error) = free_unfinished(&tree.committer, &tree.shared).await {
        tracing::warn!(%error, "what a clone left is freed later");
    }
    made
}

async fn build(
    tree: &LocalTree,
    ticket: &CloneTicket,
    (source, to): (InodeId, (InodeId, Bytes)),
    guide: &dyn CloneGuide,
) -> Result<Cloned> {
    let job = Job { number: ticket.number(), source, to, limit: tree.shared.settings.clone_step.max(1) };
    let (mut steps, mut waits) = (0, 0);
    loop {
        if !guide.goes_on(&ticket.with(|building| building.cloned)) {
            return Err(Error::new(ErrorKind::Unavailable, "the clone was cancelled: nothing was made"));
        }
        let (job, mut runs) = (job.clone(), Runs::default());
        match tree.change(move |change| step(change, &job, &mut runs)).await? {
            Step::Linked => return Ok(ticket.with(|building| building.cloned)),
            Step::More => {
                steps += 1;
                match steps % STEPS_AHEAD {
                    0 => tree.committer.sync().await?,
                    _ => tokio::task::yield_now().await,
                }
            }
            Step::Unlisted(directories) => list(tree, directories).await?,
            Step::HeldUp(files) => {
                waits += 1;
                if !guide.settle(&files, waits).await? {
                    let message = format!("the bytes of {} files are about to be replaced", files.len());
                    return Err(Error::new(ErrorKind::Conflict, message)
                        .with_hint("try again when less is written there"));
                }
            }
        }
    }
}

/// Looks at directories of the bucket that nobody has looked at.
async fn list(tree: &LocalTree, directories: Vec<InodeId>) -> Result<()> {
    // What the records call unlisted is listed, whatever is remembered of it: else the next step would ask for the same.
    if let Some(importer) = &tree.importer {
        importer.forget(&directories);
    }
    let listed = stream::iter(directories).map(|directory| async move {
        match tree.ensure_listed(directory).await {
            // The next step learns that it is gone.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            listed => listed,
        }
    });
    listed.buffer_unordered(LISTED_AT_ONCE).try_collect::<Vec<()>>().await.map(drop)
}
