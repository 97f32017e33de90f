//! Names that changed without anybody having asked for it through a mount: by a listing of the bucket, or by a command.

use bytes::Bytes;
use forebay_core::InodeId;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc};

/// Changes that a slow listener may be behind before it loses the oldest. Whoever loses some is wrong for no longer
/// than the time to live of what it keeps.
const QUEUE: usize = 1 << 14;

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq)]
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
}

/// What goes to a listener.
#[derive(Debug, Clone)]
enum Message {
    Change(OutsideChange),
    /// Dropped by whoever meets it: all before it was dealt with.
    Mark(#[expect(dead_code, reason = "it is held and dropped")] mpsc::Sender<()>),
}

/// Tells such changes to whoever listens, after they were committed. Telling never waits.
#[derive(Debug)]
pub struct OutsideChanges(broadcast::Sender<Message>);

impl Default for OutsideChanges {
    fn default() -> Self {
        Self(broadcast::Sender::new(QUEUE))
    }
}

impl OutsideChanges {
    /// Hears of every change from now on.
    pub fn listen(&self) -> OutsideListener {
        OutsideListener(self.0.subscribe())
    }

    /// Tells of one.
    pub fn tell(&self, change: OutsideChange) {
        // Nobody listens: no mount is there.
        let _ = self.0.send(Message::Change(change));
    }

    /// Returns when everybody who listens has dealt with all that was told before.
    pub async fn heard(&self) {
        let (mark, mut dropped) = mpsc::channel(1);
        // Without listeners it comes back in the error, and goes with that.
        let _ = self.0.send(Message::Mark(mark));
        // Nothing is ever sent: this waits for the last mark to go.
        let _ = dropped.recv().await;
    }
}

/// Hears of changes, one after another.
#[derive(Debug)]
pub struct OutsideListener(broadcast::Receiver<Message>);

impl OutsideListener {
    /// The next change. Asking for it says that the one before was dealt with.
    ///
    /// # Errors
    /// Those of the channel: that some were lost, or that there will be none.
    pub async fn next(&mut self) -> Result<OutsideChange, RecvError> {
        loop {
            if let Message::Change(change) = self.0.recv().await? {
                return Ok(change);
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
