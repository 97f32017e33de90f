//! The commit: one put of the manifest, after everything that it names.

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::object::{Bucket, Condition};
use futures::{StreamExt, TryStreamExt, stream};

use super::{Run, StepKey};
use crate::manifest::{Manifest, Shard, TextLength};

/// Shards that are looked for at once.
const PARALLEL: usize = 16;

/// Makes the step exist.
///
/// # Errors
/// `Conflict` when this start of the run saved the step already, with other content.
pub async fn commit(bucket: &Bucket, run: &Run, manifest: &Manifest) -> Result<ObjectKey> {
    try_commit(bucket, run, manifest).await?.ok_or_else(|| saved_already(manifest.step))
}

/// As [`commit`]; nothing where another save has the step, as its manifest says. Whether an answer was lost or another
/// writer came first is settled by reading back: an agent of the same save that died may have committed it, even with its
/// bytes in other shards.
///
/// # Errors
/// `Unavailable` where it could not be read whose the step is, `Corrupt` where it is damaged: it may be this very save's.
pub(crate) async fn try_commit(bucket: &Bucket, run: &Run, manifest: &Manifest) -> Result<Option<ObjectKey>> {
    let key = run.save(manifest.step).object();
    let data = manifest.encode()?;
    let error = match bucket.put(&key, data.clone(), Condition::IfAbsent).await {
        Ok(_) => return Ok(Some(key)),
        // The name is this start's alone, so that an unconditional put cannot hide another's manifest.
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            bucket.put(&key, data, Condition::Always).await?;
            return Ok(Some(key));
        }
        Err(error) => error,
    };
    match bucket.get_whole_at_most(&key, TextLength::MOST).await {
        Ok((found, _)) if found == data => Ok(Some(key)),
        Ok((found, _)) => match Manifest::decode(&found) {
            Ok(found) => Ok((found.commit == manifest.commit).then_some(key)),
            Err(fault) => Err(Error::from(fault).context(format!("`{key}`"))),
        },
        Err(unread) if unread.kind() == ErrorKind::Corrupt => Err(unread),
        Err(unread) if error.kind() == ErrorKind::Conflict => {
            let message = format!("step {} is there, and whose could not be read: {unread}", manifest.step);
            Err(Error::new(ErrorKind::Unavailable, message).with_source(unread))
        }
        Err(_) => Err(error),
    }
}

/// Looks whether a step that is there is what another agent of the same save committed.
///
/// # Errors
/// `Corrupt` when its first bytes are damaged: no more of it is read.
pub(crate) async fn is_commit_of(bucket: &Bucket, save: &StepKey, commit: &str) -> Result<bool> {
    let key = save.object();
    let head = match bucket.get(&key, None, 0..Manifest::HEAD_BYTES as u64).await {
        Ok(head) => head,
        // It was there: a later start had no use for it.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    match Manifest::commit_at_head(&head) {
        Some(found) => Ok(found == commit),
        None => Err(Error::corrupt(format!("`{key}` is no manifest"))),
    }
}

/// The key of one of these shards that is not there as it was stored.
pub(crate) async fn missing(
    bucket: &Bucket,
    shards: impl Iterator<Item = &Shard> + Send,
) -> Result<Option<String>> {
    let look = |shard: Shard| async move {
        let found = bucket.head(&shard.object()).await?;
        Ok::<_, Error>(found.is_none_or(|found| found.size != shard.size).then_some(shard.key))
    };
    let shards: Vec<Shard> = shards.cloned().collect();
    let mut looks = stream::iter(shards).map(look).buffer_unordered(PARALLEL);
    while let Some(missing) = looks.try_next().await? {
        if missing.is_some() {
            return Ok(missing);
        }
    }
    Ok(None)
}

/// What a person can do about shards that are deleted.
pub(crate) const DELETED_HINT: &str =
    "a lifecycle rule of the bucket that deletes objects by age must leave a run's place alone";

/// Tells that a step would have been committed without a shard that it names.
pub(crate) fn deleted(step: u64, shard: &str) -> Error {
    let message = format!("step {step} was not saved: `{shard}` was deleted before its commit");
    Error::new(ErrorKind::Unavailable, message).with_hint(DELETED_HINT)
}

/// Tells that a step is there with other content.
pub(crate) fn saved_already(step: u64) -> Error {
    let message = format!("step {step} was saved already in this run");
    Error::new(ErrorKind::Conflict, message).with_hint("a step is saved once")
}
