//! The commit: one put of the manifest, after everything that it names.

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::object::{Bucket, Condition};

use super::Run;
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
        Ok(_) => {
            let message = format!("step {} was saved already in this run", manifest.step);
            Err(Error::new(ErrorKind::Conflict, message).with_hint("a step is saved once"))
        }
        Err(_) => Err(error),
    }
}

fn is_commit(data: &[u8], commit: &str) -> bool {
    Manifest::decode(data).is_ok_and(|found| found.commit == commit)
}
