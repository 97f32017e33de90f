//! Taking a volume over from a process that is lost, by a mount that joined.
//!
//! It holds the volume then beside its mount, as `forebay meta` does, and the mount joins that as all others do: nothing that is open
//! changes hands. Who does is decided by the lease, as ever.

use std::sync::Arc;
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::units::MIB;
use forebay_io::task::{Stop, Task, TaskGroup};
use forebay_metadata::remote::RemoteTree;
use parking_lot::Mutex;

use crate::connect::connect_alone;
use crate::{Volume, VolumeSettings};

/// How long nobody must have served the tree: a process that is started again has that long before its lease is watched.
const LOST: Duration = Duration::from_secs(2);
/// What the volume that is taken over may hold of files, which it only compacts and moves.
const LITTLE_MEMORY: u64 = 256 * MIB;
/// Between two looks at that, and between two tries.
const PAUSE: Duration = Duration::from_millis(500);
/// Between two tries that came to nothing.
const REST: Duration = Duration::from_secs(5);
/// How long the end of what was taken over may take.
const CLOSING: Duration = Duration::from_secs(60);

/// A mount that stands by.
#[derive(Debug)]
pub struct Standby {
    /// What it has taken over.
    held: Arc<Mutex<Option<Arc<Volume>>>>,
    tasks: TaskGroup,
    standing: Task<()>,
}

impl Standby {
    /// Stands by for the process that serves `tree`.
    pub(crate) fn start(source: &str, settings: &VolumeSettings, tree: Arc<RemoteTree>) -> Self {
        let (tasks, held) = (TaskGroup::new("standby"), Arc::default());
        let mut settings = VolumeSettings { must_exist: true, take_over: false, ..settings.clone() };
        // The mount beside it has the cache, and reads and writes the files.
        settings.memory_bytes = settings.memory_bytes.min(LITTLE_MEMORY);
        settings.cache.directory = None;
        settings.cache.peers = Default::default();
        let stood = stand_by(source.to_owned(), settings, tree, Arc::clone(&held), tasks.stop());
        let standing = tasks.spawn("stand by", stood);
        Self { held, tasks, standing }
    }

    /// What it has taken over, if it has.
    pub(crate) fn held(&self) -> Option<Arc<Volume>> {
        self.held.lock().clone()
    }

    /// Gives what was taken over to whoever comes next. Call it when the mount's own tree is closed.
    pub(crate) async fn end(self) {
        self.tasks.stop().cancel();
        if tokio::time::timeout(CLOSING, self.standing).await.is_err() {
            tracing::warn!("what this mount had taken over is left to its lease");
        }
    }
}

async fn stand_by(
    source: String,
    settings: VolumeSettings,
    tree: Arc<RemoteTree>,
    held: Arc<Mutex<Option<Arc<Volume>>>>,
    stop: Stop,
) {
    loop {
        let taking = async {
            is_lost(&tree).await;
            connect_alone(&source, settings.clone()).await
        };
        let Some(taken) = stop.run_until_cancelled(taking).await else { return };
        match taken {
            Ok(volume) => {
                tracing::warn!("the process that served the tree was lost: this one serves it from here on");
                *held.lock() = Some(volume.clone());
                stop.run_until_cancelled(volume.lost()).await;
                held.lock().take();
                if let Err(error) = volume.close().await {
                    tracing::warn!(%error, "the volume that was taken over was not closed well");
                }
            }
            // Another one was faster, most likely.
            Err(error) => {
                match error.kind() {
                    ErrorKind::Conflict => tracing::debug!(%error, "another process has the volume"),
                    _ => tracing::warn!(%error, "the volume could not be taken over"),
                }
                if stop.run_until_cancelled(tokio::time::sleep(REST)).await.is_none() {
                    return;
                }
            }
        }
    }
}

/// Returns when nobody has served the tree for a while.
async fn is_lost(tree: &RemoteTree) {
    let mut looks = 0;
    while looks < LOST.as_millis() / PAUSE.as_millis() {
        tokio::time::sleep(PAUSE).await;
        looks = if tree.reached().is_none() { looks + 1 } else { 0 };
    }
}
