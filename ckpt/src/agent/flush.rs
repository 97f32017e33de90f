//! From a slot to a committed step: upload, and check meanwhile; complete, commit.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::checksum::combine;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition, Upload, UploadOptions};

use super::inspect::{expect_no_gaps, inspect, slices_of};
use super::{Member, Seal};
use crate::catalog::{
    Run, commit, failure_of, forget_ranks, list_ranks, load_manifest, merge_ranks, of_save, put_rank,
};
use crate::manifest::{Checksum, Manifest, Shard, ShardKey, Slice};

/// The first pause between two looks for the other ranks, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// How long the other ranks are waited for.
const RANKS_PATIENCE: Duration = Duration::from_secs(600);

/// Brings the shard in `slot` to the bucket, and looks at it meanwhile; gives what the manifest will say of it.
/// Afterwards the slot is not needed.
///
/// # Errors
/// `Unavailable` when it is to be tried again; `Corrupt` when the slot no longer holds what was sealed: then nothing is
/// there under the shard's name.
pub(super) async fn store(
    bucket: &Bucket,
    run: &Run,
    member: Option<&Member>,
    (seal, slot): (&Arc<Seal>, &Bytes),
) -> Result<Manifest> {
    expect_no_gaps(seal)?;
    let mut manifest = manifest_of(run, member, seal, &slot[..seal.header as usize]);
    let mut upload = begin(bucket, &manifest.shards[0])?;
    let (copy, bytes) = (seal.clone(), slot.clone());
    let all: Vec<usize> = (0..slices_of(seal).count()).collect();
    let look = forebay_io::task::blocking(move || inspect(&copy, &bytes, &all));
    let (sent, seen) = tokio::join!(send(&mut upload, slot.slice(..seal.size as usize)), look);
    let seen = seen.map_err(|error| error.context("hash a shard")).flatten();
    // Nothing takes the shard's name before all of it was found sound.
    let identities = match seen.and_then(|identities| sent.map(|()| identities)) {
        Ok(identities) => identities,
        Err(error) => {
            give_up(upload).await;
            return Err(error);
        }
    };
    let slices = manifest.tensors.iter_mut().flat_map(|tensor| &mut tensor.slices);
    slices.zip(identities).for_each(|(slice, identity)| slice.blake3 = identity);
    manifest.shards[0].crc32c = Checksum(crc32c_of(seal, slot));
    manifest.check_part()?;
    finish(upload, &manifest.shards[0]).await?;
    Ok(manifest)
}

/// Tells the job's other ranks of a part that was stored.
///
/// # Errors
/// `Unavailable` when it is to be tried again; `Conflict` when this start committed the step already, with other
/// content.
pub(super) async fn publish(
    bucket: &Bucket,
    run: &Run,
    member: Option<&Member>,
    part: &Manifest,
) -> Result<()> {
    let Some(member) = member else { return Ok(()) };
    match bucket.head(&member.save(part.step).object()).await? {
        None => put_rank(bucket, run, member.rank, part).await,
        Some(_) => expect_part(bucket, member, part).await,
    }
}

/// A step that is there already holds this rank's part of the same save: an agent that died brought it there. Else it is
/// another save of this start under the same number.
async fn expect_part(bucket: &Bucket, member: &Member, part: &Manifest) -> Result<()> {
    let there = load_manifest(bucket, &member.save(part.step)).await?;
    let save = |shard: &Shard| ShardKey::parse(&shard.key).map(|key| (key.step, key.rank, key.save));
    if there.shards.iter().any(|shard| save(shard) == save(&part.shards[0])) {
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

/// What a manifest says of a sealed shard that begins with `header`, but for what is known only once it was looked at.
fn manifest_of(run: &Run, member: Option<&Member>, seal: &Seal, header: &[u8]) -> Manifest {
    let (rank, world_size) = member.map_or((0, 1), |member| (member.rank, member.world_size));
    let &Seal { save, size, step, .. } = seal;
    let (attempt, layout) = (run.attempt().to_owned(), ShardKey::layout_of(header));
    let key = ShardKey { step, incarnation: run.incarnation, attempt, rank, save, layout };
    let (key, header) = (key.object().as_str().to_owned(), header.len() as u64);
    let shard = Shard { key, size, header, crc32c: Checksum(0), rank, step };
    // The ranks of a job must find the same; each of them saves a step once.
    let save = if member.is_some() { 0 } else { save };
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

/// The CRC-32C of a whole shard, of which the slices were found sound.
fn crc32c_of(seal: &Seal, slot: &[u8]) -> u32 {
    let mut slices: Vec<&Slice> = slices_of(seal).map(|(_, slice)| slice).collect();
    slices.sort_by_key(|slice| slice.start);
    let header = forebay_core::crc32c(&slot[..seal.header as usize]);
    slices.iter().fold(header, |crc32c, slice| combine(crc32c, slice.crc32c.0, slice.len()))
}

/// One PUT where that is enough, else parts side by side. The bytes of a key are always the same, so that writing twice
/// is no harm.
fn begin(bucket: &Bucket, shard: &Shard) -> Result<Upload> {
    bucket.upload_with(&shard.object(), UploadOptions { conditional: false, ..UploadOptions::default() })
}

/// Sends what can be sent before it is known that all of it is to be there.
async fn send(upload: &mut Upload, data: Bytes) -> Result<()> {
    upload.write(data).await?;
    if upload.is_in_parts() {
        upload.relieve().await?;
    }
    Ok(())
}

async fn finish(upload: Upload, shard: &Shard) -> Result<()> {
    let stored = upload.complete(Condition::Always).await?;
    if stored.size != shard.size {
        let (key, got, expected) = (&shard.key, stored.size, shard.size);
        return Err(Error::corrupt(format!("the store holds {got} bytes of shard `{key}`, not {expected}")));
    }
    Ok(())
}

async fn give_up(upload: Upload) {
    if let Err(error) = upload.abort().await {
        tracing::warn!(%error, "an upload that is not wanted stays until garbage is collected");
    }
}

/// Deletes what was uploaded for a save that is none: another save has its step.
pub(super) async fn discard(bucket: &Bucket, part: &Manifest) {
    if let Err(error) = bucket.delete(&part.shards[0].object()).await {
        tracing::warn!(%error, "a shard that no step names stays until garbage is collected");
    }
}
