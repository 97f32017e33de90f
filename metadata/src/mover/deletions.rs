//! Objects that nothing refers to any more.

use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Blob, ObjectKey, Result};
use forebay_io::clock::Moment;
use forebay_io::object::is_unrepeated;
use futures::stream::{self, StreamExt};
use tokio::time::Instant;
use tracing::warn;

use super::Mover;
use super::copies::LONGEST_COPY;
use super::run::{AT_ONCE, PAGE, Tally};
use crate::kv::Durability;
use crate::records::{Change, Records, Shared, is_about_a_record};
use crate::schema::{Deletion, HolderState, Tag};

/// How long a look at an object counts: an outsider may replace it meanwhile. Stores answer in a small part of it, those that
/// hang do not.
const LOOK_HOLDS: Duration = Duration::from_secs(5);

/// What is to be done about a queued deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The object goes.
    Delete,
    /// It was taken back, or is done.
    Forget,
    /// Another object lies there now, which has nothing to do with it.
    Leave,
    /// Not yet.
    Keep,
}

/// A queued deletion and the key of its record.
type Queued = (Bytes, Deletion);

/// The same, and since when it is known what is to be done about it.
struct Judged {
    queued: Queued,
    verdict: Verdict,
    since: Moment,
}

impl Mover {
    /// Deletes what is due, a page at a time.
    pub(crate) async fn delete_due(&self) -> Result<Tally> {
        let keys = self.shared().keys;
        let (mut start, end) = keys.family(Tag::Deletion);
        let mut tally = Tally::default();
        let mut is_held_up = false;
        loop {
            self.save_doomed(start.clone(), end.clone()).await?;
            let _turn = self.turn().await;
            let (from, to) = (start.clone(), end.clone());
            let mut page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let now = self.shared().now_ms();
            let Some((last, _)) = page.last() else { return Ok(tally) };
            start = after(last);
            let is_last = page.len() < PAGE || keys.number_in(last).is_ok_and(|due_ms| due_ms > now);
            page.retain(|(key, _)| keys.number_in(key).is_ok_and(|due_ms| due_ms <= now));
            let due = readable_in(page, &mut tally);
            // It may be of what lies below a prefix that is to go.
            is_held_up |= tally.failed > 0;
            let deleted = self.delete_queued(due, &mut is_held_up).await;
            is_held_up |= deleted.is_err();
            match deleted {
                Ok(deleted) => tally.join(deleted),
                Err(error) => tally.add(Err(error)),
            }
            if is_last || self.is_stopping() {
                return Ok(tally);
            }
        }
    }

    /// Copies what others hold of the next page of deletions away, while others may have their turn.
    async fn save_doomed(&self, start: Bytes, end: Bytes) -> Result<()> {
        let (keys, now) = (self.shared().keys, self.shared().now_ms());
        let lent = self.look(move |look| {
            let mut lent = Vec::new();
            for (key, value) in look.reads().scan(&start, &end, PAGE)? {
                let is_due = keys.number_in(&key).is_ok_and(|due_ms| due_ms <= now);
                // What cannot be read is told when it is to be deleted.
                let Ok(Deletion { blob, .. }) = Deletion::decode(value) else { continue };
                if is_due && !blob.is_owned() && look.is_lent(&blob).unwrap_or(false) {
                    lent.push(blob);
                }
            }
            Ok(lent)
        });
        let lent = lent.await?;
        stream::iter(lent).for_each_concurrent(AT_ONCE, |blob| self.save_one(blob)).await;
        Ok(())
    }

    /// Deletes the doomed object at `key` now, so that it can be written again. Returns whether that was done `until` then.
    pub(crate) async fn delete_doomed(&self, key: &ObjectKey, until: Instant) -> Result<bool> {
        let (mover, key) = (self.clone(), key.clone());
        let delete = async move { mover.delete_doomed_now(&key).await };
        Ok(self.alone_until(until, "delete what is in the way", delete).await?.is_some())
    }

    async fn delete_doomed_now(&self, key: &ObjectKey) -> Result<()> {
        self.settle_writes_to(key).await?;
        let (keys, wanted) = (self.shared().keys, key.clone());
        let queued = self.look(move |look| {
            let claim = look.claim(wanted.as_str())?;
            let Some(HolderState::Doomed { due_ms }) = claim.map(|claim| claim.state) else {
                return Ok(None);
            };
            let queued = keys.deletion(due_ms, wanted.as_str());
            Ok(look.reads().get(&queued)?.map(|value| (queued, value)))
        });
        match queued.await? {
            Some(queued) => {
                let queued = readable_in(vec![queued], &mut Tally::default());
                match self.delete_queued(queued.clone(), &mut false).await {
                    // Somebody waits for the key: judged anew at once.
                    Err(error) if is_unrepeated(&error) => {
                        self.delete_queued(queued, &mut false).await.map(drop)
                    }
                    deleted => deleted.map(drop),
                }
            }
            None => Ok(()),
        }
    }

    /// Does a page of deletions: all objects in one request where the store can. Returns how many records are gone.
    /// Prefixes go only while nothing was held up that may lie below them.
    async fn delete_queued(&self, page: Vec<Queued>, is_held_up: &mut bool) -> Result<Tally> {
        // The commits that queued these are durable before any object goes.
        self.committer().sync().await?;
        let judged = self.judge_all(page).await;
        *is_held_up |= judged.iter().any(|((_, deletion), verdict)| {
            *verdict == Verdict::Keep && !deletion.blob.is_owned() && !is_prefix(deletion)
        });
        let is_held_up = *is_held_up;
        let doomed = judged.iter().filter(|(_, verdict)| *verdict == Verdict::Delete);
        let doomed = doomed.map(|((_, deletion), _)| &deletion.blob);
        let (owned, plain): (Vec<&Blob>, Vec<&Blob>) = doomed.partition(|blob| blob.is_owned());
        let keys = |blobs: Vec<&Blob>| blobs.into_iter().map(|blob| blob.key.clone()).collect::<Vec<_>>();
        self.bucket().delete_many(&keys(owned)).await?;
        // Others may put something at a plain key as soon as it is free: a deletion that was not answered is not sent again
        // before what lies there was judged anew.
        self.bucket().delete_many_once(&keys(plain)).await?;
        let mut done: Vec<(Queued, Verdict)> = judged
            .into_iter()
            .filter(|((_, deletion), verdict)| {
                *verdict != Verdict::Keep && !(is_held_up && is_prefix(deletion))
            })
            .collect();
        let with_marker = done.iter().filter(|((_, deletion), _)| has_marker(deletion));
        let markers: Vec<Blob> = with_marker.map(|((_, deletion), _)| deletion.blob.clone()).collect();
        let deleted = stream::iter(markers).map(|blob| self.delete_marker(blob)).buffered(AT_ONCE);
        let stays: Vec<ObjectKey> = deleted.filter_map(async |stays| stays).collect().await;
        done.retain(|((_, deletion), _)| !stays.contains(&deletion.blob.key));
        self.forget_all(done).await
    }

    /// Takes back the records of what is done: at once, or one by one where a record of these is damaged.
    async fn forget_all(&self, done: Vec<(Queued, Verdict)>) -> Result<Tally> {
        let all = done.clone();
        let forget_all = move |change: &mut Change<'_, '_>| {
            all.iter().try_for_each(|(queued, verdict)| forget(change, queued, *verdict))
        };
        let forgotten = self.transact(Durability::Buffered, forget_all).await;
        match forgotten {
            Err(error) if is_about_a_record(&error) => {}
            forgotten => return forgotten.map(|()| Tally { done: done.len(), failed: 0 }),
        }
        let mut tally = Tally::default();
        for (queued, verdict) in done {
            let forget_one = move |change: &mut Change<'_, '_>| forget(change, &queued, verdict);
            tally.pass_over(self.transact(Durability::Buffered, forget_one).await.map(|()| 1))?;
        }
        Ok(tally)
    }

    /// Deletes the marker of a removed directory; gives its key where that has to be tried again.
    async fn delete_marker(&self, blob: Blob) -> Option<ObjectKey> {
        let Blob { key, version, .. } = blob;
        match self.bucket().delete_marker(key.as_str().trim_end_matches('/'), &version).await {
            Ok(()) => {
                self.shared().markers.note(key.as_str(), None);
                None
            }
            Err(error) => {
                warn!(%key, %error, "deletion put off");
                Some(key)
            }
        }
    }

    /// Judges a page. What was looked at long ago, once all are judged, is looked at again, and kept where that takes as long.
    async fn judge_all(&self, page: Vec<Queued>) -> Vec<(Queued, Verdict)> {
        let judged = stream::iter(page).map(|queued| self.judge(queued)).buffered(AT_ONCE);
        let judged: Vec<Judged> = judged.collect().await;
        let judged = stream::iter(judged).map(|judged| self.judge_again(judged)).buffered(AT_ONCE);
        let judged: Vec<Judged> = judged.collect().await;
        let fresh = |judged: Judged| match self.is_old(&judged) {
            true => (judged.queued, Verdict::Keep),
            false => (judged.queued, judged.verdict),
        };
        judged.into_iter().map(fresh).collect()
    }

    fn is_old(&self, judged: &Judged) -> bool {
        judged.verdict == Verdict::Delete && self.shared().clock.now().since(judged.since) > LOOK_HOLDS
    }

    async fn judge_again(&self, judged: Judged) -> Judged {
        if self.is_old(&judged) { self.judge(judged.queued).await } else { judged }
    }

    /// What cannot be found out now is kept, and does not hold up the others.
    async fn judge(&self, (key, deletion): Queued) -> Judged {
        let since = self.shared().clock.now();
        let verdict = self.verdict(&key, &deletion).await.unwrap_or_else(|error| {
            warn!(key = %deletion.blob.key, %error, "deletion put off");
            Verdict::Keep
        });
        Judged { queued: (key, deletion), verdict, since }
    }

    async fn is_lent(&self, blob: &Blob) -> Result<bool> {
        self.look(|look| look.is_lent(blob)).await
    }

    async fn verdict(&self, key: &[u8], deletion: &Deletion) -> Result<Verdict> {
        if self.shared().segments.holds(&deletion.blob.key) {
            return Ok(Verdict::Keep);
        }
        let recorded = self.look(|look| recorded(look, key, deletion, self.shared())).await?;
        if recorded != Verdict::Delete {
            return Ok(recorded);
        }
        let blob = &deletion.blob;
        if self.is_copied_in_doubt(&blob.key).await? {
            return Ok(Verdict::Keep);
        }
        if !blob.is_owned() {
            // The deletion's claim keeps others from the key while a copy may still come there.
            if self.doubts().names(&blob.key) {
                return Ok(Verdict::Keep);
            }
            match self.bucket().head(&blob.key).await? {
                Some(found) if found.version == blob.version => {
                    // Tried again before the next page: here nobody else has a turn.
                    if blob.size > LONGEST_COPY && self.is_lent(blob).await? {
                        return Ok(Verdict::Keep);
                    }
                    self.save_lent(blob).await?;
                }
                // What a removed file wrote last is doomed in its turn: the key stays claimed until that is gone.
                Some(_) if self.settle_writes_to(&blob.key).await? => return Ok(Verdict::Keep),
                Some(_) => {
                    warn!(key = %blob.key, "not deleted: the object was replaced by somebody else");
                    return Ok(Verdict::Leave);
                }
                None => return Ok(Verdict::Forget),
            }
        }
        Ok(recorded)
    }
}

/// The deletions of a page; those that cannot be read are counted.
fn readable_in(page: Vec<(Bytes, Bytes)>, tally: &mut Tally) -> Vec<Queued> {
    let mut due = Vec::with_capacity(page.len());
    for (key, value) in page {
        match Deletion::decode(value) {
            Ok(deletion) => due.push((key, deletion)),
            Err(error) => tally.add(Err(error)),
        }
    }
    due
}

/// Whether it is no object but the prefix of a removed directory.
fn is_prefix(deletion: &Deletion) -> bool {
    deletion.blob.key.as_str().ends_with('/')
}

/// Whether it is one that lies in the bucket as an object, too.
fn has_marker(deletion: &Deletion) -> bool {
    is_prefix(deletion) && !deletion.blob.version.as_str().is_empty()
}

/// What the records alone say.
fn recorded(records: &dyn Records, key: &[u8], deletion: &Deletion, shared: &Shared) -> Result<Verdict> {
    if records.reads().get(key)?.is_none() {
        return Ok(Verdict::Forget);
    }
    if is_prefix(deletion) {
        return Ok(Verdict::Forget);
    }
    if !deletion.blob.is_owned() {
        return Ok(Verdict::Delete);
    }
    if deletion.session.is_some_and(|session| shared.is_living(session)) {
        return Ok(Verdict::Keep);
    }
    let referred = records.references(deletion.blob.key.as_str())?.is_some_and(|record| record.count > 0);
    Ok(if referred { Verdict::Forget } else { Verdict::Delete })
}

/// Takes back the records of a deletion that is done or not wanted any more.
fn forget(change: &mut Change<'_, '_>, (queued, deletion): &Queued, verdict: Verdict) -> Result<()> {
    change.delete(queued.clone())?;
    let key = deletion.blob.key.as_str();
    if deletion.blob.is_owned() {
        let unused = change.references(key)?.is_some_and(|record| record.count == 0);
        return if unused { change.delete(change.keys().references(key)) } else { Ok(()) };
    }
    let due = change.keys().number_in(queued)?;
    match change.claim(key)?.map(|claim| claim.state) {
        // A listing under way tells of that object, which is to be taken over.
        Some(HolderState::Doomed { due_ms }) if due_ms == due && verdict == Verdict::Leave => {
            change.let_go_of(key)
        }
        Some(HolderState::Doomed { due_ms }) if due_ms == due => change.delete_claim(key),
        _ => Ok(()),
    }
}

/// The smallest key after `key`.
pub(super) fn after(key: &[u8]) -> Bytes {
    [key, &[0]].concat().into()
}
