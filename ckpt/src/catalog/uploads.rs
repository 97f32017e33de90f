//! Uploads that nobody will finish: their agents died, and the store keeps their parts, and charges for them, until they
//! are aborted.
//!
//! An upload under way is younger than an hour, or its save has told within the hour that it goes on: what neither holds
//! of is dead. Both are told by the store's own clock. What is no shard's upload is another tool's, and stays.

use std::collections::HashSet;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Timestamp};
use forebay_io::object::{Bucket, Condition};
use forebay_io::rng::Rng;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::alive::EVERY;
use super::ranks::{RANKS, list_notes};
use super::{Run, StepKey};
use crate::manifest::ShardKey;

/// The least age of garbage: an agent tries for ten minutes to store its part, waits as long for the others', and tells
/// every few minutes that it goes on where that takes longer.
pub const LEAST_AGE: Duration = Duration::from_secs(3600);

/// Once so much has passed, others may soon take for garbage what no manifest names yet.
pub(crate) const OLD: Duration = Duration::from_secs(LEAST_AGE.as_secs() / 2);

/// Where shards lie.
pub(super) const SHARDS: &str = "shards";

/// How long after the first look at uploads the second is: a save that goes on tells in between, whatever a store says of
/// when its upload was begun.
pub(crate) const SECOND_LOOK: Duration = EVERY.saturating_mul(2);
/// Uploads aborted at once.
const PARALLEL: usize = 16;

/// An upload as the store names it: key and id.
type Upload = (ObjectKey, String);

/// Uploads that seem to be dead.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Which.
    pub(crate) uploads: Vec<Upload>,
    /// A save that told anything since this second goes on.
    before: i64,
}

/// The uploads to shards that starts other than `own` began, and that seem to be dead. Where there is no upload at all it
/// costs one request, and none of its own start's is looked at: those end with it, see [`abort_uploads_to`].
///
/// # Errors
/// What the store says. One that cannot tell of uploads frees them by rules of its own: that is no error.
pub(crate) async fn find_dead_uploads(bucket: &Bucket, own: &Run) -> Result<Found> {
    let is_own = |save: StepKey| save == own.save(save.step);
    let mut uploads = list(bucket, SHARDS).await?;
    uploads.retain(|((key, _), _)| !save_of(key).is_some_and(is_own));
    if uploads.is_empty() {
        return Ok(Found::default());
    }
    let age = i64::try_from(LEAST_AGE.as_secs()).unwrap_or(i64::MAX);
    let before = stores_time(bucket).await?.seconds.saturating_sub(age);
    // Looked for after the uploads: a save tells long before its upload is old.
    let live = live(bucket, before).await?;
    Ok(Found { uploads: dead(uploads, before, &live), before })
}

/// Those of them whose saves still have told nothing.
pub(crate) async fn still_dead(bucket: &Bucket, Found { mut uploads, before }: Found) -> Result<Vec<Upload>> {
    let live = live(bucket, before).await?;
    uploads.retain(|(key, _)| save_of(key).is_some_and(|save| !live.contains(&save)));
    Ok(uploads)
}

/// Aborts what other agents of the same start, which died, left of a rank's part of a save, in whatever layout; returns how
/// many there were.
pub(crate) async fn abort_uploads_to(bucket: &Bucket, shard: &ShardKey) -> Result<usize> {
    let of_save = |key: &ObjectKey| {
        ShardKey::parse(key.as_str())
            .is_some_and(|other| other == ShardKey { layout: other.layout.clone(), ..shard.clone() })
    };
    let key = shard.object();
    let folder = key.as_str().rsplit_once('/').map_or(SHARDS, |(folder, _)| folder);
    let uploads = list(bucket, folder).await?.into_iter().map(|(upload, _)| upload);
    let uploads: Vec<_> = uploads.filter(|(key, _)| of_save(key)).collect();
    abort(bucket, &uploads).await?;
    Ok(uploads.len())
}

/// The saves that told anything since that second.
async fn live(bucket: &Bucket, before: i64) -> Result<HashSet<StepKey>> {
    let notes = list_notes(bucket).await?.into_iter();
    Ok(notes.filter(|(_, put)| put.seconds >= before).map(|(key, _)| key.save).collect())
}

/// The dead ones, all starts' of them: those that were begun before that second, and not of a save that is `live`.
pub(super) async fn dead_uploads(
    bucket: &Bucket,
    before: i64,
    live: &HashSet<StepKey>,
) -> Result<Vec<Upload>> {
    Ok(dead(list(bucket, SHARDS).await?, before, live))
}

/// Aborts uploads; one that is gone by now is no error.
pub(crate) async fn abort(bucket: &Bucket, uploads: &[Upload]) -> Result<()> {
    let abort = |(key, id): &Upload| {
        let (key, id) = (key.clone(), id.clone());
        async move { bucket.abort_upload(&key, &id).await }
    };
    stream::iter(uploads.iter().map(abort)).buffer_unordered(PARALLEL).try_collect().await
}

/// What the names of objects begin with that are written to learn the time.
const CLOCK: &str = "clock-";

/// What time the store has: that of an object that was just written.
pub(super) async fn stores_time(bucket: &Bucket) -> Result<Timestamp> {
    let key = ObjectKey::new(format!("{RANKS}/{CLOCK}{}", Rng::system().name()));
    bucket.put(&key, Default::default(), Condition::Always).await?;
    let found = bucket.head(&key).await;
    bucket.delete(&key).await?;
    let gone = || Error::new(ErrorKind::Unavailable, format!("`{key}` is gone right after it was written"));
    Ok(found?.ok_or_else(gone)?.modified)
}

/// Whether the object is one that was written for [`stores_time`].
pub(super) fn is_clock(key: &ObjectKey) -> bool {
    let name = key.as_str().strip_prefix(RANKS).and_then(|name| name.strip_prefix('/'));
    let name = name.and_then(|name| name.strip_prefix(CLOCK));
    name.is_some_and(|name| !name.contains(['/', '.']))
}

/// Which save a shard is of; `None` for a key that is no shard's.
pub(super) fn save_of(key: &ObjectKey) -> Option<StepKey> {
    let ShardKey { step, incarnation, attempt, .. } = ShardKey::parse(key.as_str())?;
    Some(StepKey { incarnation, step, attempt })
}

async fn list(bucket: &Bucket, folder: &str) -> Result<Vec<(Upload, Timestamp)>> {
    match bucket.list_uploads(folder).await {
        Ok(found) => Ok(found.into_iter().map(|upload| ((upload.key, upload.id), upload.started)).collect()),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn dead(uploads: Vec<(Upload, Timestamp)>, before: i64, live: &HashSet<StepKey>) -> Vec<Upload> {
    let is_dead = |(upload, started): &(Upload, Timestamp)| {
        started.seconds < before && save_of(&upload.0).is_some_and(|save| !live.contains(&save))
    };
    uploads.into_iter().filter(is_dead).map(|(upload, _)| upload).collect()
}
