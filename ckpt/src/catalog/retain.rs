//! Retention: the newest steps, pinned ones and every so many-th are kept, others go.
//!
//! Manifests go first, then the shards that only they named: a crash in between leaves bytes without a name, never
//! a step without its bytes. What a save under way is about to name is never touched, see `named`.

use std::collections::HashSet;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition};
use forebay_io::rng::Rng;
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};

use super::named::{KnownShards, Named};
use super::{StepInfo, StepKey, StepName, find_step, list_steps};

/// The prefix of pins: an empty object for each manifest that is kept whatever the schedule, see [`beside`].
const PINS: &str = "pins";
/// The prefix of marks: an empty object for each manifest that is being deleted.
pub(super) const DELETING: &str = "deleting";
/// What is marked for longer, by the store's clock, nobody is deleting any more.
const STALE_S: i64 = 600;
/// How long after its marks a deletion begins at the latest: well before they are stale.
const GIVEN_UP: Duration = Duration::from_secs(120);
/// Marks that are written at a time.
const MARKS_AT_ONCE: usize = 16;

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
pub async fn retain(bucket: &Bucket, keep: Keep, known: &mut KnownShards) -> Result<Removed> {
    let steps = list_steps(bucket).await?;
    let alive = steps.iter().filter(|info| !info.superseded).count();
    let mut surplus = keep.newest.map_or(0, |newest| alive.saturating_sub(newest.max(1)));
    let mut going = Vec::new();
    for info in steps {
        let old = !info.superseded && surplus > 0;
        surplus -= usize::from(old);
        let stays = keep.every.is_some_and(|every| info.key.step.is_multiple_of(every));
        if info.superseded || (old && !stays) {
            going.push(info);
        }
    }
    if !going.is_empty() {
        let pins = list_pins(bucket).await?;
        going.retain(|info| !pins.contains(&info.key));
    }
    remove(bucket, going, known).await
}

/// Deletes steps, given by number.
///
/// # Errors
/// `NotFound` for one that is not there, `Denied` for one that is pinned, or was before another start saved it again;
/// nothing is deleted then. `Corrupt` as in [`retain`].
pub async fn remove_steps(bucket: &Bucket, numbers: &[u64]) -> Result<Removed> {
    let pins = list_pins(bucket).await?;
    for step in numbers {
        find_step(bucket, (*step).into()).await?;
        if let Some(key) = pins.iter().filter(|key| key.step == *step).min() {
            let text = format!("step {step} is pinned, as start {} saved it", key.incarnation);
            return Err(Error::new(ErrorKind::Denied, text)
                .with_hint("`forebay ckpt unpin` leaves it to deletion again"));
        }
    }
    let mut steps = list_steps(bucket).await?;
    steps.retain(|info| numbers.contains(&info.key.step));
    remove(bucket, steps, &mut KnownShards::default()).await
}

async fn remove(bucket: &Bucket, steps: Vec<StepInfo>, known: &mut KnownShards) -> Result<Removed> {
    let mut going: HashSet<StepKey> = steps.iter().map(|info| info.key.clone()).collect();
    if going.is_empty() {
        return Ok(Removed::default());
    }
    let mut unnamed: HashSet<String> = HashSet::new();
    for info in &steps {
        match known.of(bucket, info).await {
            Ok(shards) => unnamed.extend(shards.into_iter().flatten().map(|shard| shard.to_string())),
            // A damaged manifest names nothing that could be trusted; its shards stay.
            Err(error) if error.kind() == ErrorKind::Corrupt => {}
            Err(error) => return Err(error),
        }
    }
    let mut named = Named::new(known);
    named.look_at_steps(bucket, &going).await?;
    going = delete_manifests(bucket, going).await?;
    named.look(bucket, &going).await?;
    let unnamed = unnamed.into_iter().filter(|shard| !named.contains(shard));
    let shards: Vec<_> = unnamed.map(ObjectKey::new).collect();
    bucket.delete_many(&shards).await?;
    Ok(Removed { manifests: going.len(), shards: shards.len() })
}

/// Deletes what was not pinned meanwhile, and tells what that was. Whoever pins one of them sees its mark, or that it is
/// gone, or is seen here: see [`pin`].
async fn delete_manifests(bucket: &Bucket, mut going: HashSet<StepKey>) -> Result<HashSet<StepKey>> {
    // Of this deletion alone: whoever deletes the same at this moment has marks of their own.
    let name = Rng::system().name();
    let marks: Vec<_> =
        going.iter().map(|key| ObjectKey::new(format!("{}/{name}", beside(DELETING, key)))).collect();
    let clock = Clock::system();
    let marked_at = clock.now();
    let deleted = async {
        let mark =
            |mark| async move { bucket.put(&mark, Default::default(), Condition::Always).await.map(drop) };
        let marked = stream::iter(marks.clone()).map(Ok);
        marked.try_for_each_concurrent(MARKS_AT_ONCE, mark).await?;
        let pins = list_pins(bucket).await?;
        going.retain(|key| !pins.contains(key));
        if clock.now().since(marked_at) > GIVEN_UP {
            // Pins do not heed these marks for much longer.
            let fact = "deletion was held up for too long, and nothing was deleted";
            return Err(
                Error::new(ErrorKind::Unavailable, fact).with_hint("the next one takes what it would have")
            );
        }
        bucket.delete_many(&going.iter().map(StepKey::object).collect::<Vec<_>>()).await
    }
    .await;
    // Those that stay behind go stale, and then with the garbage.
    let unmarked = bucket.delete_many(&marks).await;
    deleted.and(unmarked).map(|()| going)
}

/// Keeps a step as it is saved now until it is unpinned: also when another start saves that step again.
///
/// # Errors
/// `NotFound` when it is not there, or was deleted meanwhile; `Conflict` when it may be in this moment.
pub async fn pin(bucket: &Bucket, name: StepName) -> Result<()> {
    let key = find_step(bucket, name).await?.key;
    let own = beside(PINS, &key);
    let was_pinned = bucket.head(&own).await?.is_some();
    bucket.put(&own, Default::default(), Condition::Always).await?;
    // Who deletes a step marks it, looks for pins, deletes it, and unmarks it. Who marks it after this looks for marks sees
    // the pin; what was unmarked before is gone by now.
    let is_marked = is_being_deleted(bucket, &key).await?;
    let is_there = list_steps(bucket).await?.iter().any(|info| info.key == key);
    // A pin that was there before held already.
    if is_there && (was_pinned || !is_marked) {
        return Ok(());
    }
    bucket.delete(&own).await?;
    let url = bucket.url();
    if is_there {
        let text =
            format!("step {name} in {url} is being deleted in this moment, or was just kept from that");
        return Err(Error::new(ErrorKind::Conflict, text)
            .with_hint("look with `forebay ckpt ls` whether it is there, and pin it again then"));
    }
    Err(Error::new(ErrorKind::NotFound, format!("{url} holds no step {name}: it was deleted a moment ago")))
}

/// Whether a pinned step is marked as one that is being deleted.
async fn is_being_deleted(bucket: &Bucket, key: &StepKey) -> Result<bool> {
    let marks: Vec<_> = bucket.list(beside(DELETING, key).as_str()).try_collect().await?;
    let Some(newest) = marks.iter().map(|mark| mark.modified.seconds).max() else { return Ok(false) };
    // Both by the store's clock.
    let pin = bucket.head(&beside(PINS, key)).await?;
    Ok(pin.is_none_or(|pin| pin.modified.seconds.saturating_sub(newest) <= STALE_S))
}

/// Leaves a step to retention again, or where `name` tells no start, all that were saved under its number; one that is
/// not pinned is no error.
///
/// # Errors
/// `NotFound` when there is no such step, and no pin of one.
pub async fn unpin(bucket: &Bucket, name: StepName) -> Result<()> {
    let pins = list_pins(bucket).await?;
    let keys: Vec<_> = pins.iter().filter(|key| name.means(key)).map(|key| beside(PINS, key)).collect();
    if keys.is_empty() {
        return find_step(bucket, name).await.map(drop);
    }
    bucket.delete_many(&keys).await
}

/// What is pinned.
pub async fn list_pins(bucket: &Bucket) -> Result<HashSet<StepKey>> {
    let objects: Vec<_> = bucket.list(PINS).try_collect().await?;
    let pinned = |key: &ObjectKey| {
        let manifest =
            format!("{}/{}.json", StepKey::PREFIX, key.as_str().strip_prefix(PINS)?.strip_prefix('/')?);
        StepKey::parse(&ObjectKey::new(manifest))
    };
    Ok(objects.iter().filter_map(|object| pinned(&object.key)).collect())
}

/// `<prefix>/<step>/<start>-<attempt>`, spelled as the manifest's name is.
fn beside(prefix: &str, key: &StepKey) -> ObjectKey {
    let manifest = key.object();
    let name = manifest.as_str().trim_start_matches(StepKey::PREFIX).trim_end_matches(".json");
    ObjectKey::new(format!("{prefix}{name}"))
}
