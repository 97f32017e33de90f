//! Uploads that the store began and whose names were lost with its answers.
//!
//! Where a request to begin an upload goes unanswered and is sent again, the store may have begun two, of which one is
//! known. Which other uploads to that key are ours no store tells. Here those are taken that were begun while an answer
//! was missing, and to which nobody has sent a part by the time the upload that was answered ends: nobody can send one to
//! an upload whose name was lost. Times are compared on the store's own clock: that upload's is known on both clocks. Where
//! there are more of them than answers were lost, one is an outsider's, and all stay.
//!
//! What the store does not tell then is asked again by [`Bucket::end_unanswered`]. When this process dies, what is known
//! here goes with it: a session's intents and the names of owned blobs tell the next one of such uploads.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Timestamp};
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::request::{Request, UploadId};
use super::{Bucket, Unfinished};

/// Keys remembered at once. An upload to one more is left to the store's own rules for what was not completed.
const MOST_KEYS: usize = 1024;
/// What rounding to seconds may hide of a time.
const ROUNDING: i128 = 1_000_000_000;

/// The uploads of this process that go on, and what was not answered, by key. Shared by all handles on a bucket.
#[derive(Debug, Default)]
pub(super) struct Unanswered(Mutex<HashMap<Path, Entry>>);

#[derive(Debug, Default)]
struct Entry {
    /// Uploads to the key that this process has begun, or is beginning, and not ended.
    active: usize,
    doubt: Option<Doubt>,
}

/// Requests to begin an upload whose answers were lost.
#[derive(Debug, Clone, Copy)]
struct Doubt {
    /// When the first was sent.
    since: Instant,
    /// When the last was given up.
    until: Instant,
    count: usize,
}

impl Doubt {
    fn and(self, other: Option<Self>) -> Self {
        let Some(other) = other else { return self };
        let (since, until) = (self.since.min(other.since), self.until.max(other.until));
        Self { since, until, count: self.count + other.count }
    }
}

/// An upload to a key, from before it is asked for until it has ended.
#[derive(Debug)]
pub(super) struct Active {
    all: Arc<Unanswered>,
    key: Path,
    sent: Instant,
}

impl Unanswered {
    /// An upload to `key` is about to be asked for.
    pub(super) fn enter(self: &Arc<Self>, key: &Path) -> Active {
        self.0.lock().entry(key.clone()).or_default().active += 1;
        Active { all: self.clone(), key: key.clone(), sent: Instant::now() }
    }

    /// A request to begin an upload to `key`, which somebody entered, was sent at `sent` and is not going to be answered.
    pub(super) fn note(&self, key: &Path, sent: Instant) {
        let mut all = self.0.lock();
        let is_full = all.values().filter(|entry| entry.doubt.is_some()).count() >= MOST_KEYS;
        let Some(entry) = all.get_mut(key) else { return };
        if is_full && entry.doubt.is_none() {
            tracing::warn!(%key, "too much is unanswered: an upload that was begun may stay");
            return;
        }
        let doubt = Doubt { since: sent, until: Instant::now(), count: 1 };
        entry.doubt = Some(doubt.and(entry.doubt));
    }

    /// Keys with something unanswered to which nothing is being uploaded.
    fn idle(&self) -> Vec<Path> {
        let all = self.0.lock();
        let is_idle = |(_, entry): &(&Path, &Entry)| entry.active == 0 && entry.doubt.is_some();
        all.iter().filter(is_idle).map(|(key, _)| key.clone()).collect()
    }
}

impl Active {
    /// Whether the upload is the only one of this process to its key.
    fn is_alone(&self) -> bool {
        self.all.0.lock().get(&self.key).is_some_and(|entry| entry.active == 1)
    }

    /// What was not answered, if this is the only upload to its key; the last one looks at what all of them left.
    fn take(&self) -> Option<Doubt> {
        let mut all = self.all.0.lock();
        let entry = all.get_mut(&self.key).filter(|entry| entry.active == 1)?;
        entry.doubt.take()
    }

    fn put_back(&self, doubt: Doubt) {
        let mut all = self.all.0.lock();
        let entry = all.entry(self.key.clone()).or_default();
        entry.doubt = Some(doubt.and(entry.doubt));
    }

    /// Ends what was begun to the key and never answered, while the upload `known`, answered at `answered`, has not ended.
    /// Returns how many there were.
    ///
    /// # Errors
    /// When the store could not be asked, and will be again.
    pub(super) async fn settle(&self, bucket: &Bucket, known: &UploadId, answered: Instant) -> Result<usize> {
        let Some(doubt) = self.take() else { return Ok(0) };
        match self.end(bucket, known, (doubt, answered)).await {
            Ok(Some(ended)) => Ok(ended),
            Ok(None) => {
                self.put_back(doubt);
                Ok(0)
            }
            Err(error) => self.leave(doubt, error).map(|()| 0),
        }
    }

    /// Whether the store has any upload to the key; where it has none, nothing is in doubt any more.
    async fn is_anything_begun(&self, bucket: &Bucket) -> Result<bool> {
        let Some(doubt) = self.take() else { return Ok(false) };
        match bucket.uploads_to(&ObjectKey::new(self.key.as_ref())).await {
            Ok(found) if found.is_empty() => Ok(false),
            Ok(_) => {
                self.put_back(doubt);
                Ok(true)
            }
            Err(error) => self.leave(doubt, error).map(|()| false),
        }
    }

    /// Remembers what was not found out, unless the store will never tell.
    fn leave(&self, doubt: Doubt, error: Error) -> Result<()> {
        if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Denied) {
            tracing::warn!(key = %self.key, %error, "an upload that was begun and not answered may stay");
            return Ok(());
        }
        self.put_back(doubt);
        Err(error)
    }

    /// `None` where another upload of this process is in the way.
    async fn end(
        &self,
        bucket: &Bucket,
        known: &UploadId,
        (doubt, answered): (Doubt, Instant),
    ) -> Result<Option<usize>> {
        let key = ObjectKey::new(self.key.as_ref());
        let listed = bucket.uploads_to(&key).await?;
        // One that began before the listing is counted here, unless it has ended.
        if !self.is_alone() {
            return Ok(None);
        }
        let Some(own) = listed.iter().find(|upload| upload.id == known.id) else {
            // A store that does not list what goes on would be asked for ever.
            let message = format!("the store does not list an upload to `{key}` that goes on");
            return Err(Error::new(ErrorKind::Unsupported, message));
        };
        let begun = begun(nanos(own.started), (self.sent, answered), doubt);
        let mut lost = Vec::new();
        for upload in &listed {
            if upload.id != known.id
                && begun.contains(&nanos(upload.started))
                && self.is_empty(bucket, upload).await?
            {
                lost.push(upload);
            }
        }
        if lost.len() > doubt.count {
            tracing::warn!(%key, found = lost.len(), lost = doubt.count, "uploads stay: one of them is not ours");
            return Ok(Some(0));
        }
        for upload in &lost {
            bucket.abort_upload(&key, &upload.id).await?;
        }
        Ok(Some(lost.len()))
    }

    async fn is_empty(&self, bucket: &Bucket, upload: &Unfinished) -> Result<bool> {
        let upload = UploadId { key: self.key.clone(), id: upload.id.clone(), token: String::new() };
        match bucket.raw(Request::ListParts { upload }).await.and_then(|reply| reply.has_parts()) {
            Ok(has_parts) => Ok(!has_parts),
            // It ended meanwhile.
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(bucket.error(error)),
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let mut all = self.all.0.lock();
        if let Some(entry) = all.get_mut(&self.key) {
            entry.active -= 1;
            if entry.active == 0 && entry.doubt.is_none() {
                all.remove(&self.key);
            }
        }
    }
}

impl Bucket {
    /// Ends the uploads that the store began and did not tell of, to keys to which this process uploads nothing now: those
    /// that no later upload of its own could be compared with, and those about which the store could not be asked.
    /// Returns how many there were. It costs nothing where every answer arrived.
    ///
    /// # Errors
    /// The first of what the store said. Other keys had their turn nevertheless, unless it is not there.
    pub async fn end_unanswered(&self) -> Result<usize> {
        let (mut ended, mut failure) = (0, None);
        for key in self.unanswered().idle() {
            let bucket = self.clone();
            let task = async move { bucket.end_unanswered_to(&key).await };
            // What it begins it ends, even where nobody waits for it any more.
            match self.tasks().spawn("end lost uploads", task).await.flatten() {
                Ok(found) => ended += found,
                Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(ended), Err)
    }

    async fn end_unanswered_to(&self, key: &Path) -> Result<usize> {
        let active = self.unanswered().enter(key);
        // Asked first: where the store does not answer this, the next request would begin one more that is lost.
        if !active.is_anything_begun(self).await? {
            return Ok(0);
        }
        // What the store's clock says now is told by one more upload.
        let (options, token) = (Default::default(), self.token());
        let request = Request::Create { key: key.clone(), options, token, conditional: true };
        let known = match self.call(request).await {
            Ok(reply) => reply.upload().map_err(|error| self.error(error))?,
            Err(error) => {
                return active.take().map_or(Ok(()), |doubt| active.leave(doubt, error)).map(|()| 0);
            }
        };
        let settled = active.settle(self, &known, Instant::now()).await;
        if let Err(error) = self.call(Request::Abort { upload: known }).await {
            active.put_back(Doubt { since: active.sent, until: Instant::now(), count: 1 });
            return Err(error);
        }
        settled
    }
}

fn nanos(time: Timestamp) -> i128 {
    i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos)
}

/// When, by the store's clock in nanoseconds, it can have begun what it did not answer: it began another upload at `at`,
/// which it was asked for, the last time, not before `sent`, and had answered at `answered`.
fn begun(at: i128, (sent, answered): (Instant, Instant), doubt: Doubt) -> std::ops::RangeInclusive<i128> {
    let span = |from: Instant, to: Instant| to.saturating_duration_since(from).as_nanos() as i128;
    let first = at - span(doubt.since, answered) - ROUNDING;
    // Lost answers of the very request that was answered in the end are older than its upload.
    let last = at - span(doubt.until, sent) + if doubt.until < sent { ROUNDING } else { 0 };
    first..=last.min(at)
}

#[cfg(test)]
mod tests;
