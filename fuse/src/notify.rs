//! Telling the kernel of changes that it did not ask for.
//!
//! One thread of its own writes all notifications: the kernel may hold one up until a request is answered that has the
//! same directory locked, so no request's thread may ever write one of a name, and no request of the kernel waits for this thread
//! (commands do, once their work is done). Changes come committed, and no lock is held while the kernel is told. What is
//! lost when there are too many is seen when the time to live has run out.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use forebay_core::InodeId;
use forebay_io::task::TaskGroup;
use forebay_metadata::tree::{OutsideChange, OutsideListener};
use fuser::{INodeNo, Notifier};
use tokio::runtime::Handle as Runtime;
use tokio::sync::broadcast::error::RecvError;
use tracing::{debug, warn};

use crate::fs::FileSystem;

/// For attributes only, no pages.
const NO_PAGES: i64 = -1;
/// From the first byte, with a length of 0, to the end.
const ALL_PAGES: i64 = 0;

/// Starts the thread; it ends with `tasks`.
pub(crate) fn start(fs: Arc<FileSystem>, notifier: Notifier, runtime: &Runtime, tasks: &TaskGroup) {
    let mut changes = fs.outside_changes();
    let (stop, runtime_of_thread) = (tasks.stop(), runtime.clone());
    let _entered = runtime.enter();
    tasks.blocking("notify", move || {
        while let Some(Some(change)) =
            runtime_of_thread.block_on(stop.run_until_cancelled(next(&mut changes)))
        {
            match change {
                Next::Change(OutsideChange::Name { directory, name }) if fs.holds(directory) => {
                    tell_of_name(&notifier, directory, &name);
                }
                Next::Change(OutsideChange::Inode { ino, has_content }) if fs.holds(ino) => {
                    // First, so that what the kernel reads from then on is new.
                    runtime_of_thread.block_on(fs.renew(ino));
                    tell_of_inode(&notifier, ino, has_content);
                }
                Next::Change(OutsideChange::Anything) | Next::Lost => {
                    for ino in fs.followed() {
                        runtime_of_thread.block_on(fs.renew(ino));
                        tell_of_inode(&notifier, ino, true);
                    }
                }
                Next::Change(_) => {}
            }
        }
    });
}

enum Next {
    Change(OutsideChange),
    /// Some changes were lost: names stay in the kernel for their time to live, and what is open may have other bytes.
    Lost,
}

/// The next change; `None` when there will be none.
async fn next(changes: &mut OutsideListener) -> Option<Next> {
    match changes.next().await {
        Ok(change) => Some(Next::Change(change)),
        Err(RecvError::Lagged(lost)) => {
            warn!(lost, "too many changes at once: some names stay in the kernel for their time to live");
            Some(Next::Lost)
        }
        Err(RecvError::Closed) => None,
    }
}

fn tell_of_name(notifier: &Notifier, directory: InodeId, name: &[u8]) {
    let (parent, name) = (INodeNo(directory.0), OsStr::from_bytes(name));
    let told = notifier.inval_entry(parent, name).and_then(|()| notifier.inval_inode(parent, NO_PAGES, 0));
    if let Err(error) = told {
        debug!(%directory, ?name, %error, "the kernel did not take a notification");
    }
}

/// Has the kernel ask for a file's attributes before it reads. It waits for nothing then, so that any thread may say it.
pub(crate) fn tell_of_size(notifier: &Notifier, ino: InodeId) {
    tell_of_inode(notifier, ino, false);
}

pub(crate) fn tell_of_inode(notifier: &Notifier, ino: InodeId, has_content: bool) {
    let from = if has_content { ALL_PAGES } else { NO_PAGES };
    if let Err(error) = notifier.inval_inode(INodeNo(ino.0), from, 0) {
        debug!(%ino, %error, "the kernel did not take a notification");
    }
}
