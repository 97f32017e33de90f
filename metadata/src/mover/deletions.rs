//! Objects that nothing refers to any more.

use bytes::Bytes;
use forebay_core::{ErrorKind, ObjectKey, Result};
use futures::stream::{self, StreamExt};
use tracing::warn;

use super::Mover;
use super::run::{AT_ONCE, PAGE, Tally};
use crate::kv::Durability;
use crate::records::{Change, Records};
use crate::schema::{Deletion, HolderState, Tag};

/// What the records say about a queued deletion.
enum Verdict {
    /// The object goes.
    Delete,
    /// It was taken back, or is done.
    Forget,
    /// Not yet.
    Keep,
}

impl Mover {
    /// Deletes what is due, a page at a time.
    pub(super) async fn delete_due(&self) -> Result<Tally> {
        let keys = self.shared().keys;
        let (mut start, end) = keys.family(Tag::Deletion);
        let mut tally = Tally::default();
        loop {
            let _turn = self.turn().await;
            let (from, to) = (start.clone(), end.clone());
            let mut page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let now = self.shared().now_ms();
            let found = page.len();
            page.retain(|(key, _)| keys.number_in(key).is_ok_and(|due_ms| due_ms <= now));
            let Some((last, _)) = page.last() else { return Ok(tally) };
            start = after(last);
            let is_last = page.len() < found || found < PAGE;
            // The commits that queued these are durable before any object goes.
            self.committer().sync().await?;
            let each = page.into_iter().map(|(key, value)| self.delete_queued(key, value));
            let done: Vec<_> = stream::iter(each).buffer_unordered(AT_ONCE).collect().await;
            done.into_iter().for_each(|done| tally.add("deletion", done));
            if is_last {
                return Ok(tally);
            }
        }
    }

    /// Deletes the doomed object at `key` now, so that it can be written again.
    pub(crate) async fn delete_doomed(&self, key: &ObjectKey) -> Result<()> {
        let _turn = self.turn().await;
        let (keys, wanted) = (self.shared().keys, key.clone());
        let queued = self.look(move |look| {
            let claim = look.claim(wanted.as_str())?;
            let Some(HolderState::Doomed { due_ms }) = claim.map(|claim| claim.state) else {
                return Ok(None);
            };
            let queued = keys.deletion(due_ms, wanted.as_str());
            Ok(look.reads().get(&queued)?.map(|value| (queued, value)))
        });
        if let Some((queued, value)) = queued.await? {
            self.committer().sync().await?;
            self.delete_queued(queued, value).await?;
        }
        Ok(())
    }

    /// Does one deletion. Returns whether it is done with.
    async fn delete_queued(&self, queued: Bytes, value: Bytes) -> Result<bool> {
        let deletion = Deletion::decode(value)?;
        let (key, again) = (queued.clone(), deletion.clone());
        let session = self.shared().session;
        match self.look(move |look| verdict(look, &key, &again, session)).await? {
            Verdict::Keep => return Ok(false),
            Verdict::Forget => {}
            Verdict::Delete if deletion.blob.is_owned() => self.bucket().delete(&deletion.blob.key).await?,
            Verdict::Delete => self.delete_plain(&deletion).await?,
        }
        let forget = move |change: &mut Change<'_, '_>| forget(change, &queued, &deletion);
        self.transact(Durability::Buffered, forget).await?;
        Ok(true)
    }

    async fn delete_plain(&self, deletion: &Deletion) -> Result<()> {
        let blob = &deletion.blob;
        match self.bucket().head(&blob.key).await? {
            Some(found) if found.version == blob.version => match self.bucket().delete(&blob.key).await {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
                outcome => outcome,
            },
            Some(_) => {
                warn!(key = %blob.key, "not deleted: the object was replaced by somebody else");
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn verdict(records: &dyn Records, key: &[u8], deletion: &Deletion, session: u64) -> Result<Verdict> {
    if records.reads().get(key)?.is_none() {
        return Ok(Verdict::Forget);
    }
    if !deletion.blob.is_owned() {
        return Ok(Verdict::Delete);
    }
    if deletion.session == Some(session) {
        return Ok(Verdict::Keep);
    }
    let referred = records.references(deletion.blob.key.as_str())?.is_some_and(|record| record.count > 0);
    Ok(if referred { Verdict::Forget } else { Verdict::Delete })
}

/// Takes back the records of a deletion that is done or not wanted any more.
fn forget(change: &mut Change<'_, '_>, queued: &Bytes, deletion: &Deletion) -> Result<()> {
    change.delete(queued.clone())?;
    let key = deletion.blob.key.as_str();
    if deletion.blob.is_owned() {
        let unused = change.references(key)?.is_some_and(|record| record.count == 0);
        return if unused { change.delete(change.keys().references(key)) } else { Ok(()) };
    }
    let due = change.keys().number_in(queued)?;
    match change.claim(key)?.map(|claim| claim.state) {
        Some(HolderState::Doomed { due_ms }) if due_ms == due => change.delete_claim(key),
        _ => Ok(()),
    }
}

/// The smallest key after `key`.
pub(super) fn after(key: &[u8]) -> Bytes {
    [key, &[0]].concat().into()
}
