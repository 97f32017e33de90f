//! From a slot to a committed step: check, name, upload, commit.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition, UploadOptions};

use super::inspect::inspect;
use super::{Member, Seal};
use crate::catalog::{
    Run, commit, failure_of, forget_ranks, list_ranks, load_manifest, merge_ranks, of_save, put_rank,
};
use crate::manifest::{Checksum, Identity, Manifest, Shard};

/// The first pause between two looks for the other ranks, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// How long the other ranks are waited for.
const RANKS_PATIENCE: Duration = Duration::from_secs(600);

/// Brings the shard in `slot` to the bucket; gives what the manifest will say of it. Afterwards the slot is not needed.
///
/// # Errors
/// `Unavailable` when it is to be tried again; `Corrupt` when the slot no longer holds what was sealed: then nothing was
/// uploaded; `Conflict` when this start committed the step already, with other content.
pub(super) async fn store(
    bucket: &Bucket,
    run: &Run,
    member: Option<&Member>,
    (seal, slot): (&Seal, &Bytes),
) -> Result<Manifest> {
    let shard = slot.slice(..seal.size as usize);
    let (checked, copy) = (shard.clone(), seal.clone());
    let inspected = forebay_io::task::blocking(move || inspect(&copy, &checked)).await;
    let (identity, crc32c) = inspected.map_err(|error| error.context("hash a shard"))??;
    let manifest = manifest_of(run, member, seal, identity, crc32c);
    manifest.check_part()?;
    upload(bucket, &manifest.shards[0], shard).await?;
    if let Some(member) = member {
        match bucket.head(&member.save(seal.step).object()).await? {
            None => put_rank(bucket, run, member.rank, &manifest).await?,
            Some(_) => expect_part(bucket, member, &manifest).await?,
        }
    }
    Ok(manifest)
}

/// A step that is there already holds this rank's part: an agent that died brought it there. Else it is another save of
/// this start under the same number.
async fn expect_part(bucket: &Bucket, member: &Member, part: &Manifest) -> Result<()> {
    let there = load_manifest(bucket, &member.save(part.step)).await?;
    if there.shards.contains(&part.shards[0]) {
        return Ok(());
    }
    let message = format!("step {} was saved already in this run", part.step);
    Err(Error::new(ErrorKind::Conflict, message).with_hint("a step is saved once"))
}

/// Commits the step whose part was stored, or waits until the job's other ranks allow that; gives an error where they
/// never will.
///
/// # Errors
/// `Unavailable` when it is to be tried again.
pub(super) async fn settle(
    clock: &Clock,
    bucket: &Bucket,
    run: &Run,
    member: Option<&Member>,
    stored: &Manifest,
) -> Result<Result<()>> {
    match member {
        None => commit(bucket, run, stored).await.map(|_| Ok(())),
        Some(member) => commit_together(clock, bucket, member, stored.step).await,
    }
}

/// Waits until every rank stored its part, and commits the step unless another rank's agent was first.
async fn commit_together(clock: &Clock, bucket: &Bucket, member: &Member, step: u64) -> Result<Result<()>> {
    let Member { run, world_size, .. } = member;
    let save = member.save(step);
    let deadline = clock.now() + RANKS_PATIENCE;
    let mut pause = PAUSES[0];
    loop {
        if bucket.head(&save.object()).await?.is_some() {
            return Ok(Ok(()));
        }
        let keys = list_ranks(bucket).await?;
        let refused = |why: String| {
            Ok(Err(Error::new(ErrorKind::Unavailable, format!("step {step} was not saved: {why}"))))
        };
        if let Some(failed) = of_save(&keys, &save).find(|key| key.failed) {
            let rank = failed.rank;
            return refused(format!("rank {rank}: {}", failure_of(bucket, failed).await?));
        }
        let there: BTreeSet<u32> = of_save(&keys, &save).map(|key| key.rank).collect();
        if there.len() == *world_size as usize {
            match merge_ranks(bucket, &save, *world_size).await {
                Ok(manifest) => {
                    commit(bucket, run, &manifest).await?;
                    return forget_ranks(bucket, &save).await.map(Ok);
                }
                // Another agent just committed the step and took the indexes away.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) if error.kind() == ErrorKind::Invalid => return Ok(Err(error)),
                Err(error) => return Err(error),
            }
        }
        if clock.now() > deadline {
            let late: Vec<u32> = (0..*world_size).filter(|rank| !there.contains(rank)).collect();
            return refused(format!("ranks {late:?} did not store their parts in time"));
        }
        clock.sleep(pause).await;
        pause = (pause * 3 / 2).min(PAUSES[1]);
    }
}

fn manifest_of(run: &Run, member: Option<&Member>, seal: &Seal, blake3: Identity, crc32c: u32) -> Manifest {
    let (rank, world_size) = member.map_or((0, 1), |member| (member.rank, member.world_size));
    let key = Shard::key_of(&blake3).as_str().to_owned();
    let (size, header, step) = (seal.size, seal.header, seal.step);
    let shard = Shard { key, size, header, blake3, crc32c: Checksum(crc32c), rank, step };
    // The ranks of a job must find the same; each of them saves a step once.
    let save = if member.is_some() { 0 } else { seal.save };
    let unique = format!("{}/{save}/{step}", run.start.nonce);
    let commit = blake3::hash(unique.as_bytes()).to_hex()[..32].to_owned();
    Manifest {
        commit,
        run: run.run.clone(),
        incarnation: run.incarnation,
        step,
        created_ms: seal.created_ms,
        world_size,
        parents: Vec::new(),
        shards: vec![shard],
        tensors: seal.tensors.clone(),
        extras: seal.extras.clone(),
    }
}

/// Writes the shard under its identity. The bytes of that key are always the same, so that writing twice is no harm.
async fn upload(bucket: &Bucket, shard: &Shard, data: Bytes) -> Result<()> {
    let key = Shard::key_of(&shard.blake3);
    // One PUT where that is enough, else parts side by side; an upload that fails aborts itself.
    let options = UploadOptions { conditional: false, ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&key, options)?;
    upload.write(data).await?;
    let stored = upload.complete(Condition::Always).await?;
    if stored.size != shard.size {
        let (got, expected) = (stored.size, shard.size);
        return Err(Error::corrupt(format!("the store holds {got} bytes of shard `{key}`, not {expected}")));
    }
    Ok(())
}
