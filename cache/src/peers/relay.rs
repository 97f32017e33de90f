//! A block that is passed on while it arrives.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::block::{Block, BlockId};

/// Bytes that are passed on at once.
const PIECE: usize = 64 << 10;

/// The large blocks that are on their way here.
#[derive(Debug, Default)]
pub(super) struct Relays {
    all: Mutex<HashMap<BlockId, Arc<Relay>>>,
}

/// One of them; others may be sent it before it is here.
#[derive(Debug, Default)]
pub(super) struct Relay {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Whether somebody is sent it: no byte is copied before.
    is_wanted: bool,
    /// The checksum that who has it all said.
    crc: Option<u32>,
    /// Of what has arrived since it is wanted, in order.
    pieces: Vec<Bytes>,
    /// Bytes in them.
    length: usize,
    end: Option<End>,
}

#[derive(Debug)]
enum End {
    /// It is here.
    Whole(Block),
    /// It did not arrive from where it was to come.
    Failed,
}

impl Relays {
    /// A block is to arrive; it is not any more once the guard is dropped.
    pub(super) fn begin(self: &Arc<Self>, id: BlockId) -> Arriving {
        let relay = Arc::<Relay>::default();
        self.all.lock().insert(id, relay.clone());
        Arriving { relays: self.clone(), id, relay }
    }

    /// A block that is on its way here.
    pub(super) fn find(&self, id: &BlockId) -> Option<Arc<Relay>> {
        self.all.lock().get(id).cloned()
    }
}

/// A block that is on its way here.
#[derive(Debug)]
pub(super) struct Arriving {
    relays: Arc<Relays>,
    id: BlockId,
    relay: Arc<Relay>,
}

impl Arriving {
    pub(super) fn relay(&self) -> &Relay {
        &self.relay
    }

    /// It is here.
    pub(super) fn whole(&self, block: &Block) {
        self.relay.finish(End::Whole(block.clone()));
    }

    /// It arrived damaged: who was sent of it is sent no more.
    pub(super) fn restart(&mut self) {
        let relays = self.relays.clone();
        *self = relays.begin(self.id);
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if let Entry::Occupied(entry) = self.relays.all.lock().entry(self.id)
            && Arc::ptr_eq(entry.get(), &self.relay)
        {
            entry.remove();
        }
        self.relay.finish(End::Failed);
    }
}

impl Relay {
    /// So much of a block has arrived, from its beginning on, the checksum of all of which is `crc`.
    pub(super) fn arrived(&self, crc: u32, bytes: &[u8], is_whole: bool) {
        let mut state = self.state.lock();
        let is_first = state.crc.replace(crc).is_none();
        // It may begin anew, on another stream.
        let more = bytes.len().saturating_sub(state.length);
        let is_due = state.is_wanted && (more >= PIECE || is_whole && more > 0);
        if is_due {
            let piece = Bytes::copy_from_slice(&bytes[state.length..]);
            state.length = bytes.len();
            state.pieces.push(piece);
        }
        drop(state);
        if is_first || is_due {
            self.changed.notify_waiters();
        }
    }

    fn finish(&self, end: End) {
        let mut state = self.state.lock();
        state.end.get_or_insert(end);
        // What is still to be sent is sent of the whole block.
        state.pieces = Vec::new();
        drop(state);
        self.changed.notify_waiters();
    }

    /// Whether it has begun to arrive.
    pub(super) fn has_begun(&self) -> bool {
        self.state.lock().crc.is_some()
    }

    /// Waits for its checksum; none where it does not arrive. What arrives is there to be sent from then on.
    pub(super) async fn begun(&self) -> Option<u32> {
        self.state.lock().is_wanted = true;
        self.watch(|state| match &state.end {
            Some(End::Whole(block)) => Some(Some(block.crc)),
            Some(End::Failed) => Some(None),
            None => state.crc.map(Some),
        })
        .await
    }

    /// What comes behind the first `sent` bytes, once there is some; none where no more arrives.
    pub(super) async fn next(&self, sent: usize) -> Option<Bytes> {
        self.watch(|state| match &state.end {
            Some(End::Whole(block)) => Some(Some(block.bytes.slice(sent..))),
            Some(End::Failed) => Some(None),
            None => {
                let mut start = 0;
                let is_next = |piece: &&Bytes| {
                    start += piece.len();
                    start > sent
                };
                let found = state.pieces.iter().find(is_next)?;
                Some(Some(found.slice(found.len() - (start - sent)..)))
            }
        })
        .await
    }

    /// Waits until `look` finds something.
    async fn watch<T>(&self, look: impl Fn(&State) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            let found = look(&self.state.lock());
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: BlockId = BlockId { digest: 1, index: 0 };

    fn block(length: usize) -> Block {
        Block::foreign((0..length).map(|at| (at / 1000) as u8).collect::<Vec<_>>().into())
    }

    /// All that a follower is sent, from the pieces that it is given.
    async fn follow(relay: &Relay, length: usize) -> Option<Vec<u8>> {
        let mut sent = Vec::new();
        while sent.len() < length {
            sent.extend_from_slice(&relay.next(sent.len()).await?);
        }
        Some(sent)
    }

    #[tokio::test]
    async fn what_arrives_is_followed_from_any_moment_on() {
        const LENGTH: usize = 3 * PIECE + 77;
        let (relays, block) = (Arc::<Relays>::default(), block(LENGTH));
        for from in [0, 1, PIECE, 2 * PIECE + 5, LENGTH] {
            let arriving = relays.begin(ID);
            let relay = relays.find(&ID).expect("it is on its way");
            let (have, has_come) = tokio::sync::oneshot::channel();
            let follower = async {
                has_come.await.expect("it comes");
                assert_eq!(relay.begun().await, Some(block.crc));
                follow(&relay, LENGTH).await
            };
            let arrival = async {
                let mut have = Some(have);
                for arrived in (0..LENGTH).step_by(1000) {
                    if arrived >= from {
                        have.take().map(|have| have.send(()));
                        tokio::task::yield_now().await;
                    }
                    arriving.relay().arrived(block.crc, &block.bytes[..arrived], false);
                }
                arriving.relay().arrived(block.crc, &block.bytes, true);
                have.take().map(|have| have.send(()));
                tokio::task::yield_now().await;
                arriving.whole(&block);
            };
            let (followed, ()) = tokio::join!(follower, arrival);
            assert!(followed.is_some_and(|bytes| bytes == block.bytes), "from {from} on");
            drop(arriving);
            assert!(relays.find(&ID).is_none());
        }
    }

    #[tokio::test]
    async fn what_nobody_follows_is_not_copied() {
        let (relays, block) = (Arc::<Relays>::default(), block(2 * PIECE));
        let arriving = relays.begin(ID);
        arriving.relay().arrived(block.crc, &block.bytes, true);
        assert_eq!(arriving.relay().state.lock().pieces.len(), 0);
        arriving.whole(&block);
        let relay = relays.find(&ID).expect("it is here");
        assert_eq!(relay.begun().await, Some(block.crc));
        assert_eq!(follow(&relay, 2 * PIECE).await, Some(block.bytes.to_vec()));
    }

    #[tokio::test]
    async fn who_follows_what_does_not_arrive_is_told() {
        let (relays, block) = (Arc::<Relays>::default(), block(2 * PIECE));
        let mut arriving = relays.begin(ID);
        let first = relays.find(&ID).expect("it is on its way");
        let (begun, ()) = tokio::join!(first.begun(), async {
            arriving.relay().arrived(block.crc, &block.bytes[..PIECE], false);
        });
        assert_eq!(begun, Some(block.crc));
        arriving.relay().arrived(block.crc, &block.bytes[..PIECE + 1], false);
        arriving.relay().arrived(block.crc, &block.bytes[..1], false);
        arriving.restart();
        assert_eq!(first.next(PIECE + 1).await, None, "it comes anew");
        let second = relays.find(&ID).expect("it is on its way");
        drop(arriving);
        assert_eq!(second.begun().await, None);
        assert!(relays.find(&ID).is_none());
    }
}
