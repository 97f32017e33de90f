//! From a slot to a committed step: upload, and check meanwhile; complete, commit.

use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{Error, ObjectKey, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::object::{Bucket, Condition, Upload, UploadOptions};
use futures::future::{FutureExt, OptionFuture};
use tokio::sync::Mutex;

use super::base::Base;
use super::copy::Copy;
use super::delta::{File, Lent, candidates, describe, named};
use super::inspect::{inspect, slices_of};
use super::leave::Leave;
use super::source::Source;
use super::{Member, Seal};
use crate::arena::Held;
use crate::catalog::{
    Note, OLD, RankKey, Run, abort_uploads_to, forget_notes, load_manifest, missing, put_intent, put_rank,
    try_commit,
};
use crate::manifest::{Checksum, Identity, Manifest, Shard, ShardKey};
use crate::trees;

/// How often an upload is begun anew that somebody else aborted, at most.
pub(super) const MOST_BEGUN_ANEW: u32 = 3;

/// A sealed snapshot and where it lies.
pub(super) struct Save {
    pub(super) held: Arc<Held>,
    pub(super) source: Source,
    pub(super) given: Given,
    /// The copy on this host's disk, which comes first.
    pub(super) local: Option<Copy>,
    /// The copy in another host's memory.
    pub(super) replica: Option<Copy>,
    /// Whoever looks at the slot has this: a thread, which nothing ends before it is through.
    pub(super) looking: Arc<Mutex<()>>,
}

impl Save {
    /// One that is copied nowhere.
    pub(super) fn new(held: Arc<Held>, source: Source, given: Given) -> Self {
        Self { held, source, given, local: None, replica: None, looking: Arc::default() }
    }

    /// The trainer's number for it.
    pub(super) fn number(&self) -> u64 {
        self.held.seal.save
    }

    /// Waits until nobody looks at the slot, also of those whom nobody waits for any more.
    pub(super) async fn seen(&self) {
        drop(self.looking.lock().await);
    }
}

/// Whether other agents had a save before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Given {
    /// None had.
    First,
    /// One of this start and rank, which died.
    Again,
    /// One that may live: of an earlier start, which left it on this host's disk, or of another host, which has this one keep it.
    Left,
}

/// What a save brought to the bucket.
pub(super) struct Stored {
    /// What the manifest will say of it.
    pub(super) part: Manifest,
    /// Whether it was noted what the part refers to, or that it took long.
    pub(super) has_notes: bool,
}

impl Stored {
    /// Bytes that were uploaded.
    pub(super) fn uploaded(&self) -> u64 {
        self.part.shards[0].size
    }
}

/// What became of a save that was brought there.
pub(super) enum Outcome {
    /// It is committed; and what kept the notes of its ranks from being taken back, if anything did.
    Durable(Option<Error>),
    /// It never will be, as the job's other ranks tell.
    Refused(Error),
    /// This shard, which it names, is gone, so that it was not committed.
    Gone(String),
    /// Another save has its step: a manifest that was read says so. Where a commit was tried, nothing else is a reason to
    /// delete anything.
    Taken,
}

/// Brings a sealed shard to the bucket, or what of it is not there since `base`, and looks at it meanwhile.
/// Afterwards where it lies is not needed. Whether this start may, as `allowed` tells, is asked beside the upload.
///
/// # Errors
/// `Unavailable` when it is to be tried again; `Corrupt` when the seal or the shard changed since; what `allowed` says.
/// Then nothing is there under the shard's name.
pub(super) async fn store(
    bucket: &Bucket,
    run: &Run,
    member: Option<&Member>,
    save: &Save,
    base: Option<&Base>,
    allowed: impl Future<Output = Result<()>>,
) -> Result<Stored> {
    let Save { held, source, .. } = save;
    let seal = &held.seal;
    held.expect_sound().map_err(|error| error.with_hint("nothing was saved; check the host's memory"))?;
    let header = source.header(seal).await?;
    let mut part = manifest_of(run, member, seal);
    if member.is_none() {
        // Of several ranks' trees it is known once all parts are there.
        trees::check(&part)?;
    }
    let mut identities = vec![None; slices_of(seal).count()];
    let found = base.and_then(|base| Some(Lent { base, slices: candidates(base, seal)? }));
    let has_notes = found.is_some();
    let (lent, unasked) = match found {
        Some(found) => {
            // Who may not, notes nothing.
            allowed.await?;
            (borrow(bucket, run, member, save, found, &mut identities).await?, None)
        }
        None => (None, Some(allowed)),
    };
    let file = match &lent {
        Some(lent) => File::of(seal, &lent.slices.iter().map(Option::is_none).collect::<Vec<_>>())?,
        None => File::whole(seal, header),
    };
    part.shards.push(shard_of(run, member, seal, &file.header));
    // Shards are large, and seldom read soon: a folder's page cache is for what the training reads.
    let past_cache = Some(file.size);
    let options = UploadOptions { conditional: false, past_cache, ..source.upload_options(file.size) };
    let key = part.shards[0].object();
    if save.given == Given::Again {
        end_dead_uploads(bucket, &key).await;
    }
    let mut upload = bucket.upload_with(&key, options)?;
    let sent_and_seen = send_and_look(&mut upload, &file, save, &mut identities);
    let allowed = OptionFuture::from(unasked).map(|allowed| allowed.unwrap_or(Ok(())));
    // Nothing takes the shard's name before all of it was found sound.
    if let Err(error) = tokio::try_join!(sent_and_seen, allowed) {
        give_up(upload).await;
        return Err(error);
    }
    describe(&mut part, &file, identities.into_iter().flatten().collect(), lent);
    part.check_part()?;
    finish(upload, &part.shards[0]).await?;
    Ok(Stored { part, has_notes })
}

/// Leaves of what seems to be in the bucket what is: first the save notes what it refers to, then it makes sure that the
/// step which has it is still there, then the identities are compared.
async fn borrow<'a>(
    bucket: &Bucket,
    run: &Run,
    member: Option<&Member>,
    save: &Save,
    mut found: Lent<'a>,
    identities: &mut [Option<Identity>],
) -> Result<Option<Lent<'a>>> {
    let Save { held, given, .. } = save;
    let shards = named(found.base, &found.slices).into_iter().map(|shard| shard.key.clone());
    // What an agent that died noted stays: a request of its last moment may still arrive, and what it stored may be what
    // is committed.
    let note = if *given == Given::First { Note::Intent } else { Note::Again };
    let key = RankKey { save: run.save(held.seal.step), rank: rank_of(member), note };
    put_intent(bucket, &key, shards.collect()).await?;
    if bucket.head(&found.base.key.object()).await?.is_none() {
        return Ok(None);
    }
    let wanted = (0..identities.len()).filter(|index| found.slices[*index].is_some()).collect();
    match &save.source {
        Source::Slot(slot) => look_at(save, slot, wanted, identities).await?,
        Source::Disk(disk) => {
            let seen = disk.read_through(held, wanted, None).await?;
            seen.into_iter().for_each(|(index, identity)| identities[index] = Some(identity));
        }
    }
    for (slice, identity) in found.slices.iter_mut().zip(identities) {
        slice.take_if(|slice| *identity != Some(slice.blake3));
    }
    Ok(Some(found))
}

/// Sends what can be sent before it is known that all of it is to be there, and looks at what was not looked at yet.
async fn send_and_look(
    upload: &mut Upload,
    file: &File,
    save: &Save,
    identities: &mut [Option<Identity>],
) -> Result<()> {
    let held = &save.held;
    match &save.source {
        Source::Slot(slot) => {
            let (sent, seen) = tokio::join!(send(upload, file, slot), look(save, slot, identities));
            seen.and(sent)
        }
        Source::Disk(disk) => {
            upload.write(file.header.clone()).await?;
            let seen = disk.read_through(held, file.slices(&held.seal), Some(&mut *upload)).await?;
            seen.into_iter().for_each(|(index, identity)| identities[index] = Some(identity));
            send_rest(upload).await
        }
    }
}

/// Looks at the slices whose identities are not known yet.
async fn look(save: &Save, slot: &Bytes, identities: &mut [Option<Identity>]) -> Result<()> {
    let unknown = (0..identities.len()).filter(|index| identities[*index].is_none()).collect();
    look_at(save, slot, unknown, identities).await
}

async fn look_at(
    save: &Save,
    slot: &Bytes,
    wanted: Vec<usize>,
    identities: &mut [Option<Identity>],
) -> Result<()> {
    let (held, slot, looking) = (save.held.clone(), slot.clone(), save.looking.clone().lock_owned().await);
    let seen = forebay_io::task::blocking(move || {
        let seen = inspect(&held.seal, &slot, &wanted).map(|seen| (wanted, seen));
        drop(slot);
        drop(looking);
        seen
    });
    let (wanted, seen) = seen.await.map_err(|error| error.context("hash a shard")).flatten()?;
    wanted.into_iter().zip(seen).for_each(|(index, identity)| identities[index] = Some(identity));
    Ok(())
}

/// A shard that a part names and that is gone. Those of earlier steps are looked for where they were not `seen` since the
/// part was stored: whoever keeps the store may have deleted them, as a rule by age does, and neither the base nor its
/// manifest shows it. All are where the part was begun so long ago that others may have taken it for garbage.
///
/// A request for each shard, of fewer than a manifest has files: to list them takes more where jobs have many ranks or keep
/// many steps, and costs more anyway.
pub(super) async fn find_gone(
    clock: &Clock,
    bucket: &Bucket,
    part: &Manifest,
    begun: Moment,
    seen: bool,
) -> Result<Option<String>> {
    let (own, earlier) = part.shards.split_at(1);
    let is_old = clock.now().since(begun) > OLD;
    let own = own.iter().filter(|_| is_old);
    let earlier = earlier.iter().filter(|_| is_old || !seen);
    missing(bucket, own.chain(earlier)).await
}

/// Tells the job's other ranks of a part that was stored; not where this start committed the step already, with other
/// content.
///
/// # Errors
/// `Unavailable` when it is to be tried again.
pub(super) async fn publish(
    bucket: &Bucket,
    run: &Run,
    member: Option<&Member>,
    part: &Manifest,
) -> Result<bool> {
    let Some(member) = member else { return Ok(true) };
    match bucket.head(&member.save(part.step).object()).await? {
        None => put_rank(bucket, run, member.rank, part).await.map(|()| true),
        Some(_) => holds_part(bucket, member, part).await,
    }
}

/// Whether a step that is there already holds this rank's part of the same save: an agent that died brought it there. Else
/// it is another save of this start under the same number.
async fn holds_part(bucket: &Bucket, member: &Member, part: &Manifest) -> Result<bool> {
    let there = load_manifest(bucket, &member.save(part.step)).await?;
    let save = |shard: &Shard| ShardKey::parse(&shard.key).map(|key| (key.step, key.rank, key.save));
    Ok(there.shards.iter().any(|shard| save(shard) == save(&part.shards[0])))
}

/// Commits the step whose part a rank alone stored. What it began to store at `begun` long ago is looked for first: its host may
/// have been suspended, and told nobody that the save goes on.
///
/// # Errors
/// `Unavailable` when it is to be tried again, `Stale` when a later start took over meanwhile.
pub(super) async fn commit_alone(leave: &mut Leave<'_>, part: &Manifest, begun: Moment) -> Result<Outcome> {
    leave.renew().await?;
    if let Some(shard) = find_gone(leave.clock, leave.bucket, part, begun, true).await? {
        return Ok(Outcome::Gone(shard));
    }
    if try_commit(leave.bucket, leave.run, part).await?.is_none() {
        return Ok(Outcome::Taken);
    }
    Ok(Outcome::Durable(None))
}

/// What a manifest says of a sealed shard that is stored in a file with `header`, but for what is known only once it was
/// looked at.
fn shard_of(run: &Run, member: Option<&Member>, seal: &Seal, header: &[u8]) -> Shard {
    let (rank, &Seal { save, size, step, .. }) = (rank_of(member), seal);
    let (attempt, layout) = (run.attempt().to_owned(), ShardKey::layout_of(header));
    let key = ShardKey { step, incarnation: run.incarnation, attempt, rank, save, layout };
    let (key, header) = (key.object().as_str().to_owned(), header.len() as u64);
    Shard { key, size, header, crc32c: Checksum(0), rank, step }
}

/// What a manifest says of what was sealed, but for the shards.
fn manifest_of(run: &Run, member: Option<&Member>, seal: &Seal) -> Manifest {
    let world_size = member.map_or(1, |member| member.world_size);
    let commit = commit_of(run, member, seal);
    Manifest {
        commit,
        run: run.run.clone(),
        incarnation: run.incarnation,
        step: seal.step,
        created_ms: seal.created_ms,
        world_size,
        parents: Vec::new(),
        shards: Vec::new(),
        tensors: seal.tensors.clone(),
        extras: seal.extras.clone(),
    }
}

/// What tells a step from other saves of it, other tries too.
pub(super) fn commit_of(run: &Run, member: Option<&Member>, seal: &Seal) -> String {
    let &Seal { save, step, .. } = seal;
    // The ranks of a job must find the same, which their numbers need not be.
    let save = match (member, seal.round) {
        (None, _) => save.to_string(),
        (Some(_), Some(round)) => round.to_string(),
        (Some(_), None) => "0".to_owned(),
    };
    let unique = format!("{}/{save}/{step}", run.start.nonce);
    blake3::hash(unique.as_bytes()).to_hex()[..32].to_owned()
}

fn rank_of(member: Option<&Member>) -> u32 {
    member.map_or(0, |member| member.rank)
}

async fn send(upload: &mut Upload, file: &File, slot: &Bytes) -> Result<()> {
    upload.write(file.header.clone()).await?;
    for run in &file.runs {
        upload.write(slot.slice(run.clone())).await?;
    }
    send_rest(upload).await
}

/// What fits one PUT is sent later.
async fn send_rest(upload: &mut Upload) -> Result<()> {
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

/// Ends what an agent that died had begun of this shard: no other start does, before an hour has passed.
async fn end_dead_uploads(bucket: &Bucket, key: &ObjectKey) {
    let Some(shard) = ShardKey::parse(key.as_str()) else { return };
    match abort_uploads_to(bucket, &shard).await {
        Ok(0) => {}
        Ok(aborted) => tracing::info!(%key, aborted, "uploads that an agent left when it died"),
        Err(error) => tracing::warn!(%key, %error, "uploads that an agent left when it died stay"),
    }
}

/// Deletes what was brought to the bucket for a save that is none: another save has its step.
pub(super) async fn discard(bucket: &Bucket, run: &Run, member: Option<&Member>, stored: &Stored) {
    let mut deleted = bucket.delete(&stored.part.shards[0].object()).await;
    if stored.has_notes {
        deleted = deleted.and(forget_notes(bucket, &[run.save(stored.part.step)], rank_of(member)).await);
    }
    if let Err(error) = deleted {
        tracing::warn!(%error, "what no step names stays until garbage is collected");
    }
}
