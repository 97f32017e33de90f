//! What clones left that did not come to their end: freed, whoever began them.

use std::sync::Arc;

use bytes::Bytes;
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
        free_unfinished(self.committer(), self.shared_arc()).await
    }
}

/// The same without a bucket.
pub(crate) async fn free_unfinished(committer: &Committer, shared: &Arc<Shared>) -> Result<Tally> {
    let mut freed = 0;
    loop {
        // Those below are marked by the steps above.
        let (before, mut tally) = (freed, Tally::default());
        let (mut start, end) = shared.keys.family(Tag::Orphan);
        loop {
            let (from, to) = (start.clone(), end.clone());
            let page = committer.read(move |view: &View<'_>| scan(view, &from, &to)).await?;
            let Some((last, _)) = page.last() else { break };
            start = after(last);
            for (key, value) in page {
                let done = free_if_unfinished(committer, shared, &key, value).await;
                freed += usize::from(*done.as_ref().unwrap_or(&false));
                tally.pass_over(done.map(usize::from))?;
            }
        }
        if freed == before {
            return Ok(Tally { done: freed, ..tally });
        }
    }
}

/// Frees what a record marks, if it does. Returns whether it did.
async fn free_if_unfinished(
    committer: &Committer,
    shared: &Arc<Shared>,
    key: &Bytes,
    value: Bytes,
) -> Result<bool> {
    let (session, top) = shared.keys.number_and_ino_in(key)?;
    let is_left = Orphan::decode(value)?.is_unfinished() && !shared.clones.builds(top);
    if is_left {
        free(committer, shared, session, top).await?;
    }
    Ok(is_left)
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
