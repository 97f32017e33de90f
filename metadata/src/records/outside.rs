//! Names that changed without anybody having asked for it through a mount: by a listing of the bucket, or by a command.

use bytes::Bytes;
use forebay_core::InodeId;
use tokio::sync::broadcast;

/// Changes that a slow listener may be behind before it loses the oldest. Whoever loses some is wrong for no longer
/// than the time to live of what it keeps.
const QUEUE: usize = 1 << 14;

/// A name that means something else, or nothing, or something for the first time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutsideChange {
    /// The directory.
    pub directory: InodeId,
    /// The name in it.
    pub name: Bytes,
}

/// Tells such changes to whoever listens, after they were committed. Never waits.
#[derive(Debug)]
pub struct OutsideChanges(broadcast::Sender<OutsideChange>);

impl Default for OutsideChanges {
    fn default() -> Self {
        Self(broadcast::Sender::new(QUEUE))
    }
}

impl OutsideChanges {
    /// Hears of every change from now on.
    pub fn listen(&self) -> broadcast::Receiver<OutsideChange> {
        self.0.subscribe()
    }

    /// Tells of one.
    pub fn tell(&self, change: OutsideChange) {
        // Nobody listens: no mount is there.
        let _ = self.0.send(change);
    }
}
