//! A copy that is being written to this host's disk, or sent to another host, between who writes it and the task that flushes: it is
//! waited for, unless it hangs, and then not until it answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use forebay_io::clock::Clock;
use tokio::sync::oneshot;

use crate::local::patience;

/// Whether a disk, or a host, hangs, as far as is known; clones are one.
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

/// Who settled a copy: whoever is first, and alone tells the trainer.
const OPEN: u8 = 0;
const BY_DISK: u8 = 1;
const GIVEN_UP: u8 = 2;

/// The flusher's end.
pub(super) struct Copy {
    health: Health,
    state: Arc<AtomicU8>,
    done: oneshot::Receiver<()>,
    patience: Duration,
}

/// The disk's end; the copy is done, for better or worse, when it is dropped.
pub(super) struct Ticket {
    state: Arc<AtomicU8>,
    _done: oneshot::Sender<()>,
}

/// A copy of so many bytes.
pub(super) fn copy(health: &Health, bytes: u64) -> (Copy, Ticket) {
    let (_done, done) = oneshot::channel();
    let state = Arc::new(AtomicU8::new(OPEN));
    let patience = patience(bytes);
    (Copy { health: health.clone(), state: state.clone(), done, patience }, Ticket { state, _done })
}

impl Ticket {
    /// Whether the slot still holds what it held when the copy was asked for. What was read before this said so is sound.
    pub(super) fn is_wanted(&self) -> bool {
        self.state.load(Ordering::SeqCst) != GIVEN_UP
    }

    /// The disk is done with the slot; says whether what became of the copy is for the disk to tell.
    pub(super) fn settle(&self) -> bool {
        settle(&self.state, BY_DISK)
    }
}

fn settle(state: &AtomicU8, by: u8) -> bool {
    state.compare_exchange(OPEN, by, Ordering::SeqCst, Ordering::SeqCst).is_ok()
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
    pub(super) async fn settled(mut self, clock: &Clock) -> Settled {
        let patience = if self.health.hangs() { Duration::ZERO } else { self.patience };
        tokio::select! {
            biased;
            // It ends by itself, whatever came of it.
            _ = &mut self.done => Settled::Done,
            () = clock.sleep(patience) => {
                if !settle(&self.state, GIVEN_UP) {
                    return Settled::Done;
                }
                if self.health.set(true) { Settled::StillHangs } else { Settled::Hangs(patience) }
            }
        }
    }
}

/// Who waits for it no more gives the slot away.
impl Drop for Copy {
    fn drop(&mut self) {
        settle(&self.state, GIVEN_UP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_nobody_waits_for_is_not_wanted() {
        let (wanted, ticket) = copy(&Health::default(), 0);
        assert!(ticket.is_wanted());
        drop(wanted);
        assert!(!ticket.is_wanted() && !ticket.settle());
    }

    /// Both ends told the trainer of the same copy where its patience ended while the disk was telling.
    #[tokio::test]
    async fn one_end_alone_settles_a_copy() {
        let (clock, health) = (Clock::manual(), Health::default());
        let (late, ticket) = copy(&health, 0);
        let waits = late.settled(&clock);
        tokio::pin!(waits);
        assert!(futures::poll!(&mut waits).is_pending());
        assert!(ticket.settle() && ticket.is_wanted());
        clock.advance(patience(0));
        assert_eq!(waits.await, Settled::Done);
        assert!(!health.hangs());
        let (late, ticket) = copy(&health, 0);
        let waits = late.settled(&clock);
        tokio::pin!(waits);
        assert!(futures::poll!(&mut waits).is_pending());
        clock.advance(patience(0));
        assert_eq!(waits.await, Settled::Hangs(patience(0)));
        assert!(!ticket.settle() && !ticket.is_wanted() && health.hangs());
    }
}
