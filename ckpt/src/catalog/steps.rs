//! Which steps there are, and which of them is the newest.
//!
//! The newest is the highest step of the highest incarnation, not the highest number: a run that went back to an
//! earlier step and saved again means its own steps. Of one step, the highest incarnation's manifest counts.

use forebay_core::{Error, ErrorKind, Result, Timestamp};
use forebay_io::object::Bucket;
use futures::TryStreamExt;

use super::StepKey;
use crate::manifest::Manifest;

/// A committed step, as the listing tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepInfo {
    /// Its name.
    pub key: StepKey,
    /// When it was committed, by the store's clock.
    pub committed: Timestamp,
    /// Whether a later incarnation saved the same step again, which then counts in its place.
    pub superseded: bool,
}

/// Every committed step, oldest first.
pub async fn list_steps(bucket: &Bucket) -> Result<Vec<StepInfo>> {
    let objects: Vec<_> = bucket.list(StepKey::PREFIX).try_collect().await?;
    let found = objects.into_iter().filter_map(|object| {
        let key = StepKey::parse(&object.key)?;
        Some(StepInfo { key, committed: object.modified, superseded: false })
    });
    let mut steps: Vec<StepInfo> = found.collect();
    steps.sort_by(|a, b| a.key.cmp(&b.key));
    let mut seen = std::collections::HashSet::new();
    for info in steps.iter_mut().rev() {
        info.superseded = !seen.insert(info.key.step);
    }
    Ok(steps)
}

/// The manifest that counts for `step`.
///
/// # Errors
/// `NotFound`, with the steps that there are as the hint.
pub async fn find_step(bucket: &Bucket, step: u64) -> Result<StepInfo> {
    let steps = list_steps(bucket).await?;
    let found = steps.iter().find(|info| info.key.step == step && !info.superseded).cloned();
    found.ok_or_else(|| {
        let url = bucket.url();
        let mut there: Vec<_> =
            steps.iter().filter(|info| !info.superseded).map(|info| info.key.step).collect();
        there.sort_unstable();
        let hint = match there.as_slice() {
            [] => "it holds no committed step at all".to_owned(),
            [.., last] => format!("{} steps are committed there, the last {last}", there.len()),
        };
        Error::new(ErrorKind::NotFound, format!("{url} holds no step {step}")).with_hint(hint)
    })
}

/// Reads, checks and returns a step's manifest.
///
/// # Errors
/// `Corrupt` with the fact when it is damaged or lies under another step's name.
pub async fn load_manifest(bucket: &Bucket, key: &StepKey) -> Result<Manifest> {
    let object = key.object();
    let place = || format!("step {} of {}", key.step, bucket.url());
    let (data, _) = bucket.get_whole(&object).await.map_err(|error| error.context(place()))?;
    let manifest = Manifest::decode(&data).map_err(|fault| Error::from(fault).context(place()))?;
    if (manifest.step, manifest.incarnation) != (key.step, key.incarnation) {
        let (step, incarnation) = (manifest.step, manifest.incarnation);
        let fact = format!("`{object}` holds the manifest of step {step}, incarnation {incarnation}");
        return Err(Error::corrupt(fact).context(place()));
    }
    Ok(manifest)
}
