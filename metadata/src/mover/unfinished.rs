//! What clones left that did not come to their end: freed, whoever began them.

use std::sync::Arc;

use forebay_core::{InodeId, Result};

use super::Mover;
use super::deletions::after;
use super::run::{PAGE, Tally};
use crate::commit::{Committer, Txn, View};
use crate::kv::Durability;
use crate::records::{Change, Shared};
use crate::schema::{Orphan, Tag};

/// Entries freed in one transaction.
const STEP: usize = 256;

impl Mover {
    /// Frees what clones left, but for what living ones build.
    pub(crate) async fn free_unfinished(&self) -> Result<Tally> {
        let done = free_unfinished(self.committer(), self.shared_arc()).await?;
        Ok(Tally { done, failed: 0 })
    }
}

/// The same without a bucket. Returns how many directories are gone.
pub(crate) async fn free_unfinished(committer: &Committer, shared: &Arc<Shared>) -> Result<usize> {
    let mut freed = 0;
    loop {
        // Those below are marked by the steps above.
        let before = freed;
        let (mut start, end) = shared.keys.family(Tag::Orphan);
        loop {
            let (from, to) = (start.clone(), end.clone());
            let page = committer.read(move |view: &View<'_>| scan(view, &from, &to)).await?;
            let Some((last, _)) = page.last() else { break };
            start = after(last);
            for (key, value) in page {
                let (session, top) = shared.keys.number_and_ino_in(&key)?;
                if Orphan::decode(value)?.is_unfinished && !shared.clones.builds(top) {
                    free(committer, shared, session, top).await?;
                    freed += 1;
                }
            }
        }
        if freed == before {
            return Ok(freed);
        }
    }
}

fn scan(view: &View<'_>, from: &[u8], to: &[u8]) -> Result<Vec<crate::kv::Pair>> {
    crate::commit::Reads::scan(view, from, to, PAGE)
}

async fn free(committer: &Committer, shared: &Arc<Shared>, session: u64, top: InodeId) -> Result<()> {
    loop {
        let shared = shared.clone();
        let step = move |txn: &mut Txn<'_>| Change::new(txn, &shared).free_unfinished(session, top, STEP);
        if committer.transact(Durability::Buffered, step).await? {
            return Ok(());
        }
        tokio::task::yield_now().await;
    }
}
