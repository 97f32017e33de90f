//! A copy that is being written to this host's disk, between the task that writes it and the one that flushes: the disk
//! comes first, and where it hangs it is no longer waited for, until it answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_io::clock::Clock;
use tokio::sync::oneshot;

use crate::local::patience;

/// Whether this host's disk hangs, as far as is known; clones are one.
#[derive(Debug, Clone, Default)]
pub(super) struct Health(Arc<AtomicBool>);

impl Health {
    /// Whether it let a copy wait for too long and did not answer since.
    pub(super) fn hangs(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Notes that it does or does not; gives what was known before.
    pub(super) fn set(&self, hangs: bool) -> bool {
        self.0.swap(hangs, Ordering::SeqCst)
    }
}

/// The flusher's end.
pub(super) struct Copy {
    health: Health,
    is_wanted: Arc<AtomicBool>,
    done: oneshot::Receiver<()>,
    patience: Duration,
}

/// The disk's end; the copy is done, for better or worse, when it is dropped.
pub(super) struct Ticket {
    is_wanted: Arc<AtomicBool>,
    _done: oneshot::Sender<()>,
}

/// A copy of so many bytes.
pub(super) fn copy(health: &Health, bytes: u64) -> (Copy, Ticket) {
    let (_done, done) = oneshot::channel();
    let is_wanted = Arc::new(AtomicBool::new(true));
    let patience = patience(bytes);
    (
        Copy { health: health.clone(), is_wanted: is_wanted.clone(), done, patience },
        Ticket { is_wanted, _done },
    )
}

impl Ticket {
    /// Whether the slot still holds what it held when the copy was asked for. What was read before this said so is sound.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst)
    }
}

/// What became of a copy.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Settled {
    /// The disk is done with it, for better or worse.
    Done,
    /// The disk hangs: it let this one wait for so long.
    Hangs(Duration),
    /// The disk hangs, as was known.
    StillHangs,
}

impl Copy {
    /// Waits until the disk needs the slot no longer, or hangs. Then nothing is made of what it may still write.
    pub(super) async fn settled(self, clock: &Clock) -> Settled {
        let patience = if self.health.hangs() { Duration::ZERO } else { self.patience };
        tokio::select! {
            biased;
            // It ends by itself, whatever came of it.
            _ = self.done => Settled::Done,
            () = clock.sleep(patience) => {
                self.is_wanted.store(false, Ordering::SeqCst);
                if self.health.set(true) { Settled::StillHangs } else { Settled::Hangs(patience) }
            }
        }
    }
}
