//! Names and inodes that changed without this mount having asked for it: by a listing of the bucket, by a command, or by
//! another mount that writes to the same tree.

use bytes::Bytes;
use forebay_core::InodeId;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, mpsc};

/// Changes that a slow listener may be behind before it loses the oldest. Whoever loses some is wrong for no longer
/// than the time to live of what it keeps.
const QUEUE: usize = 1 << 14;

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutsideChange {
    /// A name that means something else, or nothing, or something for the first time.
    Name {
        /// The directory.
        directory: InodeId,
        /// The name in it.
        name: Bytes,
    },
    /// What is known of an inode.
    Inode {
        /// The inode.
        ino: InodeId,
        /// Whether its bytes are others.
        has_content: bool,
    },
    /// Nobody knows: some changes were lost on their way here.
    Anything,
}

/// What goes to a listener.
#[derive(Debug, Clone)]
enum Message {
    /// With the session that made it, if one did.
    Change(OutsideChange, Option<u64>),
    /// Dropped by whoever meets it: all before it was dealt with.
    Mark(#[expect(dead_code, reason = "it is held and dropped")] mpsc::Sender<()>),
}

/// Tells such changes to whoever listens, after they were committed. Telling never waits.
#[derive(Debug)]
pub struct OutsideChanges {
    queue: broadcast::Sender<Message>,
    own: u64,
}

impl Default for OutsideChanges {
    fn default() -> Self {
        Self::of(0)
    }
}

impl OutsideChanges {
    /// Those that the session `own` hears of.
    pub(crate) fn of(own: u64) -> Self {
        Self { queue: broadcast::Sender::new(QUEUE), own }
    }

    /// Hears of every change from now on that others make.
    pub fn listen(&self) -> OutsideListener {
        self.listen_as(self.own)
    }

    /// The same for another session.
    pub(crate) fn listen_as(&self, own: u64) -> OutsideListener {
        OutsideListener { queue: self.queue.subscribe(), own }
    }

    /// Tells of one that no session made.
    pub fn tell(&self, change: OutsideChange) {
        // Nobody listens: no mount is there.
        let _ = self.queue.send(Message::Change(change, None));
    }

    /// Tells others of one that a session made.
    pub(crate) fn tell_from(&self, change: OutsideChange, session: u64) {
        let _ = self.queue.send(Message::Change(change, Some(session)));
    }

    /// Returns when everybody who listens has dealt with all that was told before.
    pub async fn heard(&self) {
        let (mark, mut dropped) = mpsc::channel(1);
        // Without listeners it comes back in the error, and goes with that.
        let _ = self.queue.send(Message::Mark(mark));
        // Nothing is ever sent: this waits for the last mark to go.
        let _ = dropped.recv().await;
    }
}

/// Hears of changes, one after another.
#[derive(Debug)]
pub struct OutsideListener {
    queue: broadcast::Receiver<Message>,
    own: u64,
}

impl OutsideListener {
    /// The next change. Asking for it says that the one before was dealt with.
    ///
    /// # Errors
    /// Those of the channel: that some were lost, or that there will be none.
    pub async fn next(&mut self) -> Result<OutsideChange, RecvError> {
        loop {
            match self.queue.recv().await? {
                Message::Change(change, by) if by != Some(self.own) => return Ok(change),
                _ => {}
            }
        }
    }

    /// The same if there is one already.
    pub(crate) fn next_now(&mut self) -> Option<Result<OutsideChange, RecvError>> {
        loop {
            match self.queue.try_recv() {
                Ok(Message::Change(change, by)) if by != Some(self.own) => return Some(Ok(change)),
                Ok(_) => {}
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Closed) => return Some(Err(RecvError::Closed)),
                Err(TryRecvError::Lagged(lost)) => return Some(Err(RecvError::Lagged(lost))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn change(number: u64) -> OutsideChange {
        OutsideChange::Name { directory: InodeId(number), name: Bytes::from_static(b"name") }
    }

    #[tokio::test]
    async fn what_was_told_is_heard_once_every_listener_asks_for_more() {
        let changes = OutsideChanges::default();
        changes.heard().await;
        let (mut first, mut second) = (changes.listen(), changes.listen());
        changes.tell(change(1));
        let mut heard = std::pin::pin!(changes.heard());
        assert!(heard.as_mut().now_or_never().is_none(), "nobody has asked");
        assert_eq!(first.next().await, Ok(change(1)));
        assert_eq!(second.next().await, Ok(change(1)));
        assert!(heard.as_mut().now_or_never().is_none(), "both may be dealing with it");
        assert!(first.next().now_or_never().is_none());
        assert!(heard.as_mut().now_or_never().is_none(), "one may be dealing with it");
        drop(second);
        heard.await;
    }

    #[tokio::test]
    async fn who_made_a_change_does_not_hear_of_it() {
        let changes = OutsideChanges::of(1);
        let (mut own, mut other) = (changes.listen(), changes.listen_as(2));
        changes.tell_from(change(1), 1);
        changes.tell_from(change(2), 2);
        changes.tell(change(3));
        assert_eq!((own.next().await, own.next().await), (Ok(change(2)), Ok(change(3))));
        assert_eq!((other.next().await, other.next().await), (Ok(change(1)), Ok(change(3))));
    }

    #[tokio::test]
    async fn a_listener_that_lost_changes_holds_nobody_up() {
        let changes = OutsideChanges::default();
        let mut slow = changes.listen();
        let mut heard = std::pin::pin!(changes.heard());
        assert!(heard.as_mut().now_or_never().is_none());
        (0..=QUEUE as u64).for_each(|number| changes.tell(change(number)));
        heard.await;
        assert!(matches!(slow.next().await, Err(RecvError::Lagged(_))));
    }
}
