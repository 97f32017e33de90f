//! Retention: the newest steps are kept, older ones go.
//!
//! Manifests go first, then the shards that only they named: a crash in between leaves bytes without a name, never
//! a step without its bytes.

use std::collections::HashSet;

use forebay_core::{ErrorKind, ObjectKey, Result};
use forebay_io::object::Bucket;

use super::{StepInfo, list_steps, load_manifest};

/// What retention took away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Removed {
    /// Manifests.
    pub manifests: usize,
    /// Shard files.
    pub shards: usize,
}

/// Keeps the newest `keep` steps and deletes the others.
///
/// # Errors
/// `Corrupt` when a step to be kept cannot be read: then nothing is deleted, for it is unknown what it needs.
pub async fn retain(bucket: &Bucket, keep: usize) -> Result<Removed> {
    let steps = list_steps(bucket).await?;
    let alive = steps.iter().filter(|info| !info.superseded).count();
    let mut surplus = alive.saturating_sub(keep.max(1));
    let goes = |info: &StepInfo| {
        let old = !info.superseded && surplus > 0;
        surplus -= usize::from(old);
        info.superseded || old
    };
    let (goes, stays): (Vec<_>, Vec<_>) = steps.into_iter().partition(goes);
    if goes.is_empty() {
        return Ok(Removed::default());
    }
    let mut needed = HashSet::new();
    for info in &stays {
        needed.extend(load_manifest(bucket, &info.key).await?.shards.into_iter().map(|shard| shard.key));
    }
    let mut unnamed = HashSet::new();
    for info in &goes {
        match load_manifest(bucket, &info.key).await {
            Ok(manifest) => unnamed.extend(manifest.shards.into_iter().map(|shard| shard.key)),
            // A damaged manifest names nothing that could be trusted; its shards stay.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    let shards: Vec<_> = unnamed.difference(&needed).map(ObjectKey::new).collect();
    let removed = Removed { manifests: goes.len(), shards: shards.len() };
    bucket.delete_many(&goes.iter().map(|info| info.key.object()).collect::<Vec<_>>()).await?;
    bucket.delete_many(&shards).await?;
    Ok(removed)
}
