//! Which shards are named by a step, or by a save under way: deletion leaves them alone.
//!
//! A save notes what it refers to, then makes sure that the step it has that from is still there, commits, and takes the
//! note back. Deletion takes manifests first, then looks here: at the notes, then at the manifests. So a save that
//! found the step in place is seen, by its note or by its manifest; one that did not refers to nothing.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use forebay_core::{ErrorKind, Result, Version};
use forebay_io::object::Bucket;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::ranks::shards_of_note;
use super::{Note, RankKey, StepInfo, StepKey, list_ranks, list_steps, load_manifest};

/// Notes and manifests read at once.
const PARALLEL: usize = 8;

/// Which shards manifests name: whoever deletes steps again and again, as an agent does, keeps this, and reads each
/// manifest once. Steps that refer to one another's shards name the same ones, of which it has each once.
#[derive(Debug, Default)]
pub struct KnownShards {
    steps: HashMap<StepKey, Shards>,
    keys: HashSet<Arc<str>>,
}

#[derive(Debug)]
struct Shards {
    /// Of the manifest, as it was listed before it was read: one that was deleted and saved again is read again.
    version: Version,
    keys: Vec<Arc<str>>,
}

impl Shards {
    fn are_of(&self, listed: &Version) -> bool {
        !listed.as_str().is_empty() && self.version == *listed
    }
}

impl KnownShards {
    /// The shards that a listed manifest names; `None` for one that is gone.
    ///
    /// # Errors
    /// `Corrupt` when it cannot be read.
    pub(super) async fn of(&mut self, bucket: &Bucket, listed: &StepInfo) -> Result<Option<&[Arc<str>]>> {
        if !self.steps.get(&listed.key).is_some_and(|shards| shards.are_of(&listed.version)) {
            self.steps.remove(&listed.key);
            self.learn(bucket, vec![(listed.key.clone(), listed.version.clone())]).await?;
        }
        Ok(self.steps.get(&listed.key).map(|shards| shards.keys.as_slice()))
    }

    async fn learn(&mut self, bucket: &Bucket, mut steps: Vec<(StepKey, Version)>) -> Result<()> {
        steps.retain(|(key, _)| !self.steps.contains_key(key));
        let read = |(key, version): (StepKey, Version)| async move {
            match load_manifest(bucket, &key).await {
                // Another deletion took it.
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                manifest => manifest.map(|manifest| Some((manifest, key, version))),
            }
        };
        let mut found = stream::iter(steps).map(read).buffer_unordered(PARALLEL);
        while let Some(found) = found.try_next().await? {
            let Some((manifest, key, version)) = found else { continue };
            let keys = manifest.shards.into_iter().map(|shard| self.kept(&shard.key)).collect();
            self.steps.insert(key, Shards { version, keys });
        }
        Ok(())
    }

    fn kept(&mut self, key: &str) -> Arc<str> {
        match self.keys.get(key) {
            Some(known) => known.clone(),
            None => {
                let key: Arc<str> = key.into();
                self.keys.insert(key.clone());
                key
            }
        }
    }

    /// Forgets the other steps, and shards that none of these names.
    fn retain(&mut self, mut stays: impl FnMut(&StepKey, &Shards) -> bool) {
        self.steps.retain(|key, shards| stays(key, shards));
        self.keys.retain(|key| Arc::strong_count(key) > 1);
    }
}

/// What was seen to be named so far.
#[derive(Debug)]
pub(super) struct Named<'a> {
    known: &'a mut KnownShards,
    shards: HashSet<Arc<str>>,
    /// Steps whose shards are among them.
    steps: HashSet<StepKey>,
}

impl<'a> Named<'a> {
    pub(super) fn new(known: &'a mut KnownShards) -> Self {
        Self { known, shards: HashSet::new(), steps: HashSet::new() }
    }

    /// Looks at what saves under way refer to, and then at the steps, but for those that are `going`.
    pub(super) async fn look(&mut self, bucket: &Bucket, going: &HashSet<StepKey>) -> Result<()> {
        let notes = list_ranks(bucket).await?;
        self.look_at_notes(
            bucket,
            notes.into_iter().filter(|key| matches!(key.note, Note::Intent | Note::Again)),
        )
        .await?;
        self.look_at_steps(bucket, going).await
    }

    /// Looks at notes of saves under way.
    pub(super) async fn look_at_notes(
        &mut self,
        bucket: &Bucket,
        notes: impl IntoIterator<Item = RankKey>,
    ) -> Result<()> {
        let read = |key: RankKey| async move { shards_of_note(bucket, &key).await };
        let found: Vec<_> = stream::iter(notes).map(read).buffer_unordered(PARALLEL).try_collect().await?;
        self.shards.extend(found.into_iter().flatten().map(Arc::from));
        Ok(())
    }

    /// Looks at the steps that were not read yet, but for those that are `going`.
    ///
    /// # Errors
    /// `Corrupt` when one cannot be read: it is unknown what it needs.
    pub(super) async fn look_at_steps(&mut self, bucket: &Bucket, going: &HashSet<StepKey>) -> Result<()> {
        let listed = list_steps(bucket).await?.into_iter().map(|info| (info.key, info.version));
        let mut listed: HashMap<_, _> = listed.filter(|(key, _)| !going.contains(key)).collect();
        self.known.retain(|key, shards| {
            going.contains(key) || listed.get(key).is_some_and(|version| shards.are_of(version))
        });
        listed.retain(|key, _| !self.steps.contains(key));
        let new: Vec<_> = listed.keys().cloned().collect();
        self.known.learn(bucket, listed.into_iter().collect()).await?;
        for key in new {
            if let Some(shards) = self.known.steps.get(&key) {
                self.shards.extend(shards.keys.iter().cloned());
                self.steps.insert(key);
            }
        }
        Ok(())
    }

    /// Whether something names the shard.
    pub(super) fn contains(&self, shard: &str) -> bool {
        self.shards.contains(shard)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use forebay_io::object::Condition;

    use super::*;
    use crate::manifest::{Checksum, Manifest, Shard, ShardKey};

    fn manifest(step: u64, shards: &[u64]) -> Bytes {
        let shard = |save: &u64| {
            let (attempt, layout) = ("0a1b2c3d".into(), "0a0a0a0a".into());
            let key = ShardKey { step: 1, incarnation: 1, attempt, rank: 0, save: *save, layout }.object();
            let (key, crc32c) = (key.as_str().into(), Checksum(0));
            Shard { key, size: 4096, header: 4096, crc32c, rank: 0, step: 1 }
        };
        let manifest = Manifest {
            commit: "c0".repeat(16),
            run: "ab".repeat(16),
            incarnation: 1,
            step,
            created_ms: 0,
            world_size: 1,
            parents: if step == 1 { Vec::new() } else { vec![1] },
            shards: shards.iter().map(shard).collect(),
            tensors: Vec::new(),
            extras: Vec::new(),
        };
        manifest.encode().expect("a manifest")
    }

    /// An agent that keeps a thousand steps of sixty-four files kept sixty-four thousand names, of as many as there are files.
    #[tokio::test]
    async fn each_shard_is_known_once_however_many_steps_name_it() {
        let bucket = Bucket::in_memory();
        let key = |step| StepKey { incarnation: 1, step, attempt: "0a1b2c3d".into() };
        for (step, shards) in [(1, vec![1]), (2, vec![1, 2]), (3, vec![1, 2, 3])] {
            bucket.put(&key(step).object(), manifest(step, &shards), Condition::Always).await.expect("put");
        }
        let mut known = KnownShards::default();
        Named::new(&mut known).look_at_steps(&bucket, &HashSet::new()).await.expect("look");
        let named: Vec<_> = known.steps.values().flat_map(|shards| &shards.keys).collect();
        let kept: HashSet<_> = named.iter().map(|key| Arc::as_ptr(key).cast::<u8>()).collect();
        assert_eq!((named.len(), kept.len(), known.keys.len()), (6, 3, 3));
        bucket.delete(&key(3).object()).await.expect("delete");
        Named::new(&mut known).look_at_steps(&bucket, &HashSet::new()).await.expect("look");
        assert_eq!((known.steps.len(), known.keys.len()), (2, 2), "nor is one known that no step names");
    }
}
