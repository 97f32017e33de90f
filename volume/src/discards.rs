//! Owned blobs that were put, or may have been, and that no commit is going to name: what was written over, cut off or removed before
//! it was committed, and what the store did not answer.
//!
//! The tree is told of them behind those who write, and deletes them once nothing can come any more. What a process that dies has not
//! told is left to gc, and so is all of it where another process serves the tree: a commit that it did not answer may name them.

use std::sync::Arc;

use forebay_core::{ObjectKey, Result};
use forebay_io::task::TaskGroup;
use forebay_metadata::tree::Tree;
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;

/// Blobs that the tree is told of at once.
const STEP: usize = 256;
/// Blobs that wait to be told. What comes beyond is left to gc.
const MOST: usize = 1 << 16;

/// One per volume; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Discards {
    tree: Arc<dyn Tree>,
    tasks: TaskGroup,
    state: Arc<Mutex<State>>,
    /// Who tells the tree has it: whoever has had it knows that all is told.
    turn: Arc<AsyncMutex<()>>,
}

#[derive(Debug, Default)]
struct State {
    keys: Vec<ObjectKey>,
    is_telling: bool,
}

impl Discards {
    pub(crate) fn new(tree: Arc<dyn Tree>, tasks: TaskGroup) -> Self {
        Self { tree, tasks, state: Arc::default(), turn: Arc::default() }
    }

    /// Has blobs deleted that nobody names, nor is going to.
    pub(crate) fn add(&self, keys: Vec<ObjectKey>) {
        if keys.is_empty() || self.tree.local().is_none() {
            return;
        }
        {
            let mut state = self.state.lock();
            let room = MOST - state.keys.len();
            state.keys.extend(keys.into_iter().take(room));
            if std::mem::replace(&mut state.is_telling, true) {
                return;
            }
        }
        let discards = self.clone();
        self.tasks.spawn("discard", async move {
            if let Err(error) = discards.tell_all().await {
                tracing::debug!(%error, "blobs that nobody names are told of later");
            }
        });
    }

    /// Tells the tree of all that wait. Those of a step that failed wait for the next that are added.
    pub(crate) async fn tell_all(&self) -> Result<()> {
        let Some(tree) = self.tree.local() else { return Ok(()) };
        let _turn = self.turn.lock().await;
        loop {
            let step = {
                let mut state = self.state.lock();
                let left = state.keys.len().saturating_sub(STEP);
                let step = state.keys.split_off(left);
                state.is_telling = !step.is_empty();
                step
            };
            if step.is_empty() {
                return Ok(());
            }
            if let Err(error) = tree.discard(step.clone()).await {
                let mut state = self.state.lock();
                state.keys.extend(step);
                state.is_telling = false;
                return Err(error);
            }
        }
    }
}
