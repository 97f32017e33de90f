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

use super::ranks::{RANKS, list_notes};
use super::{Run, StepKey};
use crate::manifest::ShardKey;

/// The least age of garbage: an agent tries for ten minutes to store its part, waits as long for the others', and tells
/// every few minutes that it goes on where that takes longer.
pub const LEAST_AGE: Duration = Duration::from_secs(3600);

/// Where shards lie.
pub(super) const SHARDS: &str = "shards";

/// An upload as the store names it: key and id.
type Upload = (ObjectKey, String);

/// Aborts the dead uploads to shards that starts other than `own` began; returns how many there were. Where there is no
/// upload at all it costs one request, and none of its own start's is looked at: those it ends itself, or its successor.
///
/// # Errors
/// What the store says. One that cannot tell of uploads frees them by rules of its own: that is no error.
pub async fn abort_dead_uploads(bucket: &Bucket, own: &Run) -> Result<usize> {
    let is_own = |save: StepKey| save == own.save(save.step);
    let mut uploads = list(bucket).await?;
    uploads.retain(|((key, _), _)| !save_of(key).is_some_and(is_own));
    if uploads.is_empty() {
        return Ok(0);
    }
    let age = i64::try_from(LEAST_AGE.as_secs()).unwrap_or(i64::MAX);
    let before = stores_time(bucket).await?.seconds.saturating_sub(age);
    // Looked for after the uploads: a save tells long before its upload is old.
    let notes = list_notes(bucket).await?.into_iter();
    let live = notes.filter(|(_, put)| put.seconds >= before).map(|(key, _)| key.save).collect();
    let dead = dead(uploads, before, &live);
    abort(bucket, &dead).await?;
    Ok(dead.len())
}

/// The dead ones, all starts' of them: those that were begun before that second, and not of a save that is `live`.
pub(super) async fn dead_uploads(
    bucket: &Bucket,
    before: i64,
    live: &HashSet<StepKey>,
) -> Result<Vec<Upload>> {
    Ok(dead(list(bucket).await?, before, live))
}

/// Aborts uploads; one that is gone by now is no error.
pub(super) async fn abort(bucket: &Bucket, uploads: &[Upload]) -> Result<()> {
    for (key, id) in uploads {
        bucket.abort_upload(key, id).await?;
    }
    Ok(())
}

/// What time the store has: that of an object that was just written.
pub(super) async fn stores_time(bucket: &Bucket) -> Result<Timestamp> {
    let key = ObjectKey::new(format!("{RANKS}/clock-{}", Rng::system().name()));
    bucket.put(&key, Default::default(), Condition::Always).await?;
    let found = bucket.head(&key).await;
    bucket.delete(&key).await?;
    let gone = || Error::new(ErrorKind::Unavailable, format!("`{key}` is gone right after it was written"));
    Ok(found?.ok_or_else(gone)?.modified)
}

/// Which save a shard is of; `None` for a key that is no shard's.
pub(super) fn save_of(key: &ObjectKey) -> Option<StepKey> {
    let ShardKey { step, incarnation, attempt, .. } = ShardKey::parse(key.as_str())?;
    Some(StepKey { incarnation, step, attempt })
}

async fn list(bucket: &Bucket) -> Result<Vec<(Upload, Timestamp)>> {
    match bucket.list_uploads(SHARDS).await {
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
