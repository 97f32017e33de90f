//! Garbage: what agents that died left behind. Shards that no step names, parts of steps that never came about, and
//! uploads that nobody will finish.
//!
//! A save under way has bytes in the bucket that no manifest names yet. Its ranks note something well before those are
//! old, and again and again for as long as they go on: what belongs to a save that has any young note stays. Of the rest what
//! is old is taken, by the store's own clock on both sides of the comparison; and what is named is looked up after the
//! shards were listed, indexes before manifests, the order in which a save makes them. What lies beside them under names
//! that are none of a checkpoint's is somebody else's, and stays.

use std::collections::HashSet;
use std::time::Duration;

use forebay_core::{Error, ObjectKey, Result, Timestamp};
use forebay_io::object::Bucket;
use futures::TryStreamExt;

use super::named::{KnownShards, Named};
use super::ranks::RANKS;
use super::retain::DELETING;
use super::uploads::{LEAST_AGE, SHARDS, abort, dead_uploads, is_clock, save_of, stores_time};
use super::{RankKey, StepKey, list_ranks};

/// What was found, and deleted unless it was only looked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Garbage {
    /// Shards that nothing names.
    pub shards: Vec<ObjectKey>,
    /// Notes of saves that never were committed, and of deletions that were not ended.
    pub indexes: Vec<ObjectKey>,
    /// Unfinished uploads: key and id.
    pub uploads: Vec<(ObjectKey, String)>,
    /// Bytes of those shards.
    pub bytes: u64,
}

/// Finds what is older than `age` and belongs to nothing, and deletes it unless `only_look`.
///
/// # Errors
/// `Invalid` for an age below [`LEAST_AGE`]. `Corrupt` when a step cannot be read: then nothing is deleted, for it is
/// unknown what it needs.
pub async fn collect_garbage(bucket: &Bucket, age: Duration, only_look: bool) -> Result<Garbage> {
    if age < LEAST_AGE {
        let least = LEAST_AGE.as_secs();
        return Err(Error::invalid(format!("what is younger than {least} s may belong to a save under way"))
            .with_hint("give a larger age, or delete single steps"));
    }
    let age = i64::try_from(age.as_secs()).unwrap_or(i64::MAX);
    let before = stores_time(bucket).await?.seconds.saturating_sub(age);
    let is_old = |time: &Timestamp| time.seconds < before;
    let shards: Vec<_> = bucket.list(SHARDS).try_collect().await?;
    let indexes: Vec<_> = bucket.list(RANKS).try_collect().await?;
    let young = indexes.iter().filter(|object| !is_old(&object.modified));
    let live: HashSet<StepKey> =
        young.filter_map(|object| RankKey::parse(&object.key)).map(|key| key.save).collect();
    let is_garbage =
        |key: &ObjectKey| RankKey::parse(key).map_or(is_clock(key), |key| !live.contains(&key.save));
    let old = indexes.iter().filter(|object| is_old(&object.modified) && is_garbage(&object.key));
    let old: HashSet<ObjectKey> = old.map(|object| object.key.clone()).collect();
    let is_over = |key: &ObjectKey| save_of(key).is_some_and(|save| !live.contains(&save));
    let mut known = KnownShards::default();
    let mut named = Named::new(&mut known);
    // Twice, for a save that noted what it refers to after the first look at the notes, and a step that was deleted
    // before the look at the steps.
    for _ in 0..2 {
        let live = list_ranks(bucket).await?.into_iter().filter(|key| !old.contains(&key.object()));
        named.look_at_notes(bucket, live).await?;
        named.look_at_steps(bucket, &HashSet::new()).await?;
    }
    let mut garbage = Garbage { indexes: old.into_iter().collect(), ..Garbage::default() };
    let marks: Vec<_> = bucket.list(DELETING).try_collect().await?;
    garbage.indexes.extend(marks.into_iter().filter(|mark| is_old(&mark.modified)).map(|mark| mark.key));
    garbage.indexes.sort();
    for object in shards {
        if is_old(&object.modified) && !named.contains(object.key.as_str()) && is_over(&object.key) {
            garbage.bytes += object.size;
            garbage.shards.push(object.key);
        }
    }
    garbage.uploads = dead_uploads(bucket, before, &live).await?;
    if !only_look {
        bucket.delete_many(&garbage.indexes).await?;
        bucket.delete_many(&garbage.shards).await?;
        abort(bucket, &garbage.uploads).await?;
    }
    Ok(garbage)
}
