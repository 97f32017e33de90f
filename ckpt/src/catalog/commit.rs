//! The commit: one put of the manifest, after everything that it names.

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::object::{Bucket, Condition};

use super::{Run, StepKey};
use crate::manifest::Manifest;

/// Makes the step exist. Whether an answer was lost or another writer came first is settled by reading back: an agent of
/// the same save that died may have committed it, even with its bytes in other shards.
///
/// # Errors
/// `Conflict` when this start of the run saved the step already, with other content.
pub async fn commit(bucket: &Bucket, run: &Run, manifest: &Manifest) -> Result<ObjectKey> {
    let key = run.save(manifest.step).object();
    let data = manifest.encode()?;
    let error = match bucket.put(&key, data.clone(), Condition::IfAbsent).await {
        Ok(_) => return Ok(key),
        // The name is this start's alone, so that an unconditional put cannot hide another's manifest.
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            bucket.put(&key, data, Condition::Always).await?;
            return Ok(key);
        }
        Err(error) => error,
    };
    match bucket.get_whole(&key).await {
        Ok((found, _)) if found == data || is_commit(&found, &manifest.commit) => Ok(key),
        Ok(_) => Err(saved_already(manifest.step)),
        Err(_) => Err(error),
    }
}

/// Looks whether a step that is there is what another agent of the same save committed.
///
/// # Errors
/// `Conflict` when it is another save's, `Corrupt` when its first bytes are damaged: no more of it is read.
pub(crate) async fn expect_commit(bucket: &Bucket, save: &StepKey, commit: &str) -> Result<()> {
    let key = save.object();
    let head = match bucket.get(&key, None, 0..Manifest::HEAD_BYTES as u64).await {
        Ok(head) => head,
        // It was there: a later start had no use for it.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    match Manifest::commit_at_head(&head) {
        Some(found) if found == commit => Ok(()),
        Some(_) => Err(saved_already(save.step)),
        None => Err(Error::corrupt(format!("`{key}` is no manifest"))),
    }
}

/// Tells that a step is there with other content.
pub(crate) fn saved_already(step: u64) -> Error {
    let message = format!("step {step} was saved already in this run");
    Error::new(ErrorKind::Conflict, message).with_hint("a step is saved once")
}

fn is_commit(data: &[u8], commit: &str) -> bool {
    Manifest::decode(data).is_ok_and(|found| found.commit == commit)
}
