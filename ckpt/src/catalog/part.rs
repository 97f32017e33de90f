//! A rank's part of a step that came to nothing: it goes once nobody can make a step of it any more.

use forebay_core::{ErrorKind, ObjectKey, Result};
use forebay_io::object::Bucket;

use super::ranks::load_index;
use super::{
    Note, RankKey, Run, StepKey, forget_notes, is_commit_of, list_steps, load_manifest, superseded_by,
};

/// What a rank stored of a step.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// The save.
    pub(crate) save: StepKey,
    /// The rank, and ranks in all.
    pub(crate) place: (u32, u32),
    /// What the step's manifest would have said.
    pub(crate) commit: String,
    /// Its shard.
    pub(crate) shard: ObjectKey,
}

/// Deletes a part of a step of `run`, and what its rank noted of it, unless a step names it: its own, where that came about
/// after all, or one that went on from it. For whoever knows that no agent is at that save any more. What it is not known of
/// stays, for garbage collection.
pub(crate) async fn remove_part(bucket: &Bucket, run: &Run, part: &Part) -> Result<()> {
    let Part { save, place: (rank, world_size), commit, shard } = part;
    if *world_size == 1 {
        // Nobody else noted anything of it, and it holds other steps' shards: it goes whatever became of this one.
        forget_notes(bucket, std::slice::from_ref(save), *rank).await?;
    }
    let Some(found) = bucket.head(shard).await? else { return Ok(()) };
    if bucket.head(&save.object()).await?.is_some() && is_commit_of(bucket, save, commit).await? {
        return Ok(());
    }
    // It may have gone on from the step before that was deleted: now that it is not there, no later one can.
    if superseded_by(bucket, run).await?.is_some() {
        return Ok(());
    }
    let later = list_steps(bucket)
        .await?
        .into_iter()
        .filter(|info| info.key.attempt == save.attempt && info.committed.seconds >= found.modified.seconds);
    for info in later {
        match load_manifest(bucket, &info.key).await {
            Ok(manifest) if manifest.shards.iter().all(|named| named.key != shard.as_str()) => {}
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                return Err(error);
            }
            _ => return Ok(()),
        }
    }
    match load_index(bucket, save, *rank, *world_size).await {
        Ok(index) if index.commit == *commit => {
            let key = RankKey { save: save.clone(), rank: *rank, note: Note::Index };
            bucket.delete(&key.object()).await?;
            forget_notes(bucket, std::slice::from_ref(save), *rank).await?;
        }
        // Another round's.
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    bucket.delete(shard).await
}
