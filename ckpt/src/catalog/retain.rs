//! Retention: the newest steps, pinned ones and every so many-th are kept, others go.
//!
//! Manifests go first, then the shards that only they named: a crash in between leaves bytes without a name, never
//! a step without its bytes. What a save under way is about to name is never touched, see `named`.

use std::collections::{BTreeSet, HashSet};

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::object::{Bucket, Condition};
use futures::TryStreamExt;
use serde::{Deserialize, Serialize};

use super::named::Named;
use super::{StepInfo, StepKey, find_step, list_steps, load_manifest};

/// The prefix of pins: `pins/<step>`, 20 digits, an empty object for each step that is kept whatever the schedule.
const PINS: &str = "pins";

/// What retention takes away, and what it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Removed {
    /// Manifests.
    pub manifests: usize,
    /// Shard files.
    pub shards: usize,
}

/// Which steps stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Keep {
    /// So many of the newest; `None` keeps all.
    pub newest: Option<usize>,
    /// And those whose number is a multiple of this.
    pub every: Option<u64>,
}

/// Keeps what `keep` says and what is pinned, and deletes the other steps.
///
/// # Errors
/// `Corrupt` when a step to be kept cannot be read: then nothing is deleted, for it is unknown what it needs.
pub async fn retain(bucket: &Bucket, keep: Keep) -> Result<Removed> {
    let steps = list_steps(bucket).await?;
    let alive = steps.iter().filter(|info| !info.superseded).count();
    let mut surplus = keep.newest.map_or(0, |newest| alive.saturating_sub(newest.max(1)));
    let pins = if surplus > 0 { list_pins(bucket).await? } else { BTreeSet::new() };
    let mut going = HashSet::new();
    for info in &steps {
        let step = info.key.step;
        let old = !info.superseded && surplus > 0;
        surplus -= usize::from(old);
        let stays = pins.contains(&step) || keep.every.is_some_and(|every| step.is_multiple_of(every));
        if info.superseded || (old && !stays) {
            going.insert(info.key.clone());
        }
    }
    remove(bucket, steps, |info| going.contains(&info.key)).await
}

/// Deletes steps, given by number.
///
/// # Errors
/// `NotFound` for one that is not there, `Denied` for one that is pinned; nothing is deleted then. `Corrupt` as in
/// [`retain`].
pub async fn remove_steps(bucket: &Bucket, numbers: &[u64]) -> Result<Removed> {
    let pins = list_pins(bucket).await?;
    for step in numbers {
        find_step(bucket, *step).await?;
        if pins.contains(step) {
            return Err(Error::new(ErrorKind::Denied, format!("step {step} is pinned"))
                .with_hint("`forebay ckpt unpin` leaves it to deletion again"));
        }
    }
    let steps = list_steps(bucket).await?;
    remove(bucket, steps, |info| numbers.contains(&info.key.step)).await
}

async fn remove(bucket: &Bucket, steps: Vec<StepInfo>, goes: impl Fn(&StepInfo) -> bool) -> Result<Removed> {
    let steps: Vec<StepInfo> = steps.into_iter().filter(goes).collect();
    let mut going: HashSet<StepKey> = steps.iter().map(|info| info.key.clone()).collect();
    if going.is_empty() {
        return Ok(Removed::default());
    }
    let mut named = Named::default();
    named.look_at_steps(bucket, &going).await?;
    let mut unnamed = HashSet::new();
    for key in &going {
        match load_manifest(bucket, key).await {
            Ok(manifest) => unnamed.extend(manifest.shards.into_iter().map(|shard| shard.key)),
            // A damaged manifest names nothing that could be trusted; its shards stay.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    // All that reading takes time: what was pinned meanwhile stays.
    let pins = list_pins(bucket).await?;
    for info in steps.iter().filter(|info| !info.superseded && pins.contains(&info.key.step)) {
        going.remove(&info.key);
    }
    bucket.delete_many(&going.iter().map(StepKey::object).collect::<Vec<_>>()).await?;
    named.look(bucket, &going).await?;
    let unnamed = unnamed.into_iter().filter(|shard| !named.contains(shard));
    let shards: Vec<_> = unnamed.map(ObjectKey::new).collect();
    bucket.delete_many(&shards).await?;
    Ok(Removed { manifests: going.len(), shards: shards.len() })
}

/// Keeps a step until it is unpinned.
///
/// # Errors
/// `NotFound` when it is not there, or was deleted meanwhile.
pub async fn pin(bucket: &Bucket, step: u64) -> Result<()> {
    find_step(bucket, step).await?;
    bucket.put(&pin_key(step), Default::default(), Condition::Always).await?;
    // Who deletes steps looks for pins once more before: one that did not see this pin has deleted the step by now, or
    // is about to.
    match find_step(bucket, step).await {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            unpin(bucket, step).await?;
            Err(error)
        }
        found => found.map(drop),
    }
}

/// Leaves a step to retention again; one that is not pinned is no error.
pub async fn unpin(bucket: &Bucket, step: u64) -> Result<()> {
    bucket.delete(&pin_key(step)).await
}

/// The steps that are pinned.
pub async fn list_pins(bucket: &Bucket) -> Result<BTreeSet<u64>> {
    let objects: Vec<_> = bucket.list(PINS).try_collect().await?;
    let step = |key: &ObjectKey| {
        let step = key.as_str().strip_prefix(PINS)?.strip_prefix('/')?.parse().ok()?;
        (pin_key(step) == *key).then_some(step)
    };
    Ok(objects.iter().filter_map(|object| step(&object.key)).collect())
}

fn pin_key(step: u64) -> ObjectKey {
    ObjectKey::new(format!("{PINS}/{step:020}"))
}
