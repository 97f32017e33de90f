//! Copies of which it is not known whether they were made, or still will be: the store was asked and did not answer.
//!
//! Their intents stand meanwhile, so that nobody else writes where they may appear: a store may still be at a copy that
//! nobody waits for. What another process left in this state is settled when the next one starts.

use std::collections::HashMap;

use forebay_core::{InodeId, ObjectKey, Result};
use parking_lot::Mutex;

use super::Mover;
use super::run::Tally;

/// How long a store may go on with a copy that nobody waits for. It had more time than that for the bytes of any that is
/// large; what is left is one that hung on the way.
const LONGEST_MS: u64 = 5 * 60 * 1000;

/// The inodes whose copies these are, where they go, and until when. In memory only.
#[derive(Debug, Default)]
pub(super) struct Doubts(Mutex<HashMap<InodeId, (ObjectKey, u64)>>);

impl Doubts {
    /// The copy of `ino` to `key` may still be made after now; without, it only has to be looked at again.
    pub(super) fn add(&self, ino: InodeId, key: &ObjectKey, now_ms: u64, may_come: bool) {
        let until_ms = if may_come { now_ms.saturating_add(LONGEST_MS) } else { now_ms };
        self.0.lock().insert(ino, (key.clone(), until_ms));
    }

    pub(super) fn end(&self, ino: InodeId) {
        self.0.lock().remove(&ino);
    }

    /// Whether the copy of `ino` may still come.
    pub(super) fn holds(&self, ino: InodeId, now_ms: u64) -> bool {
        self.0.lock().get(&ino).is_some_and(|(_, until_ms)| *until_ms > now_ms)
    }

    /// Whether any copy goes to `key`, until it is settled.
    pub(super) fn names(&self, key: &ObjectKey) -> bool {
        self.0.lock().values().any(|(named, _)| named == key)
    }

    fn over(&self, now_ms: u64) -> Vec<InodeId> {
        let doubts = self.0.lock();
        doubts.iter().filter(|(_, (_, until_ms))| *until_ms <= now_ms).map(|(ino, _)| *ino).collect()
    }
}

impl Mover {
    /// Settles what cannot come any more.
    pub(super) async fn settle_doubts(&self) -> Result<Tally> {
        let mut tally = Tally::default();
        for ino in self.doubts().over(self.shared().now_ms()) {
            let _turn = self.turn().await;
            tally.add(self.settle_intent(ino).await.map(usize::from));
        }
        Ok(tally)
    }
}
