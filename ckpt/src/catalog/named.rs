//! Which shards are named by a step, or by a save under way: deletion leaves them alone.
//!
//! A save notes what it refers to, then makes sure that the step it has that from is still there, commits, and takes the
//! note back. Deletion takes manifests first, then looks here: at the notes, then at the manifests. So a save that
//! found the step in place is seen, by its note or by its manifest; one that did not refers to nothing.

use std::collections::HashSet;

use forebay_core::{ErrorKind, Result};
use forebay_io::object::Bucket;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::ranks::shards_of_note;
use super::{Note, RankKey, StepKey, list_ranks, list_steps, load_manifest};

/// Notes and manifests read at once.
const PARALLEL: usize = 8;

/// What was seen to be named so far.
#[derive(Debug, Default)]
pub(super) struct Named {
    shards: HashSet<String>,
    /// Steps that were read: they never change.
    steps: HashSet<StepKey>,
}

impl Named {
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
        self.shards.extend(found.into_iter().flatten());
        Ok(())
    }

    /// Looks at the steps that were not read yet, but for those that are `going`.
    ///
    /// # Errors
    /// `Corrupt` when one cannot be read: it is unknown what it needs.
    pub(super) async fn look_at_steps(&mut self, bucket: &Bucket, going: &HashSet<StepKey>) -> Result<()> {
        let new = list_steps(bucket).await?.into_iter().map(|info| info.key);
        let new: Vec<_> = new.filter(|key| !going.contains(key) && !self.steps.contains(key)).collect();
        let read = |key: StepKey| async move {
            match load_manifest(bucket, &key).await {
                // Another deletion took it.
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                manifest => manifest.map(|manifest| Some((manifest, key))),
            }
        };
        let mut found = stream::iter(new).map(read).buffer_unordered(PARALLEL);
        while let Some(found) = found.try_next().await? {
            let Some((manifest, key)) = found else { continue };
            self.shards.extend(manifest.shards.into_iter().map(|shard| shard.key));
            self.steps.insert(key);
        }
        Ok(())
    }

    /// Whether something names the shard.
    pub(super) fn contains(&self, shard: &str) -> bool {
        self.shards.contains(shard)
    }
}
