//! Sealed shards as files on a disk of this host: nearer than the store, and there after the host's memory is gone.
//!
//! ```text
//! starts                                            the starts that went on from one another here, oldest first, and up to
//!                                                   which number others were in the store then
//! shards/<step>/0000000001-<attempt>/<rank>-<save>-00000000.safetensors   a rank's shard, whole, as it was sealed
//! seals/<step>/<attempt>/<rank>-<world_size>.json       its seal, put once the shard is on the disk
//! seals/<step>/<attempt>/<rank>-<world_size>.durable    empty: the step was committed in the store
//! ```
//! A step is there once the seals of all its ranks are. Whatever a start saved counts as long as the starts after it went
//! on from here; what others saved is never offered, and goes. One directory is one job's, and all its ranks'.
//! A directory is a bucket to this module: files appear whole, under their names, once they are on the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version};
use forebay_io::object::{Bucket, BucketUrl, Condition, StoreSettings, UploadOptions};
use futures::TryStreamExt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::arena::{Held, HeldStep, attempt_of, manifest_of};
use crate::manifest::{Manifest, ShardKey, TextLength, read_local, write_local};

mod room;

/// Where seals lie.
const SEALS: &str = "seals";
/// Where the list of starts lies.
const STARTS: &str = "starts";
/// Starts that are remembered at most: of so many that saved nothing in between, the first are forgotten.
const MAX_STARTS: usize = 100;
/// Milliseconds until the disk is given up: syncing all of a shard may take minutes.
const DEADLINE_MS: u64 = 600_000;
/// What a process left of files that it was writing goes when nothing was written to them for so long.
const LEAST_AGE: Duration = Duration::from_secs(60);

/// How long a disk may take for a copy, beside what the bytes take at [`LEAST_RATE`].
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes a second below which a disk is as good as none: a store is faster.
const LEAST_RATE: u64 = 32 << 20;

/// How long a disk is waited for that is to take, or give, so many bytes.
pub fn patience(bytes: u64) -> Duration {
    PATIENCE + Duration::from_secs(bytes / LEAST_RATE)
}

/// A directory of local copies, for whoever writes there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LocalTier {
    /// The directory of this job, which exists.
    pub directory: String,
    /// Steps that stay there.
    pub keep: usize,
    /// Bytes that all ranks together may have there; none for as many as the disk takes.
    pub ceiling: Option<u64>,
    /// This start's nonce, and before it those of the starts that it goes on from, oldest first.
    pub starts: Vec<String>,
    /// The highest number that a start had in the store when this one looked; 0 where it never did.
    pub seen: u64,
    /// A step of an earlier start that the store may not have: it is to be brought there.
    pub resumes: Option<HeldStep>,
}

/// A step that is whole on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalStep {
    /// Its name.
    pub name: HeldStep,
    /// Whether it was committed in the store as well.
    pub is_durable: bool,
}

/// What is on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Found {
    /// The starts that went on from one another, oldest first.
    pub starts: Vec<String>,
    /// The highest number that a start had in the store when the last of them looked.
    pub seen: u64,
    /// Their steps that are whole, newest first.
    pub steps: Vec<LocalStep>,
}

/// Whose the copies are, as noted.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Lineage {
    Seen {
        starts: Vec<String>,
        seen: u64,
    },
    /// A former version's.
    Unseen(Vec<String>),
}

/// The copies in one directory.
#[derive(Debug, Clone)]
pub struct Local(Bucket);

/// A rank's shard on the disk.
#[derive(Debug, Clone)]
pub struct LocalShard {
    bucket: Bucket,
    key: ObjectKey,
    version: Version,
}

impl LocalShard {
    /// Reads some bytes, of the file that was found, into memory of their own.
    ///
    /// # Errors
    /// `Corrupt` where they are not there, or cannot be read.
    pub async fn read(&self, range: Range<u64>) -> Result<Bytes> {
        self.bucket.get_own(&self.key, Some(&self.version), range).await.map_err(as_damage)
    }
}

/// Names what a rank notes.
struct NoteKey {
    step: u64,
    attempt: String,
    rank: u32,
    world_size: u32,
    is_durable: bool,
}

impl NoteKey {
    fn of(held: &HeldStep, rank: u32, world_size: u32, is_durable: bool) -> Self {
        Self { step: held.step, attempt: attempt_of(&held.start).to_owned(), rank, world_size, is_durable }
    }

    fn object(&self) -> ObjectKey {
        let Self { step, attempt, rank, world_size, is_durable } = self;
        let suffix = if *is_durable { "durable" } else { "json" };
        ObjectKey::new(format!("{SEALS}/{step:020}/{attempt}/{rank:06}-{world_size:06}.{suffix}"))
    }

    /// Reads a key; `None` for one that is no note's.
    fn parse(key: &ObjectKey) -> Option<Self> {
        let mut parts = key.as_str().split('/').skip(1);
        let (step, attempt, name) = (parts.next()?, parts.next()?, parts.next()?);
        let (name, suffix) = name.split_once('.')?;
        let (rank, world_size) = name.split_once('-')?;
        let parsed = Self {
            step: step.parse().ok()?,
            attempt: attempt.to_owned(),
            rank: rank.parse().ok()?,
            world_size: world_size.parse().ok()?,
            is_durable: suffix == "durable",
        };
        (parsed.object() == *key).then_some(parsed)
    }
}

impl Local {
    /// The copies in `directory`, which exists.
    pub async fn open(directory: &str) -> Result<Self> {
        let url: BucketUrl = format!("file://{directory}").parse()?;
        let settings = StoreSettings { deadline_ms: DEADLINE_MS, ..StoreSettings::default() };
        Bucket::open(&url, &settings).await.map(Self)
    }

    /// The copies in what stands for a directory.
    #[cfg(test)]
    pub(crate) fn of_test(bucket: Bucket) -> Self {
        Self(bucket)
    }

    /// The files, to be read as a step's shards.
    pub fn bucket(&self) -> &Bucket {
        &self.0
    }

    /// From now on the copies are those of the last of `starts`, and of those before it. Starts in the store up to the number
    /// `seen` were there before it.
    pub async fn begin(&self, starts: &[String], seen: u64) -> Result<()> {
        let starts = starts[starts.len().saturating_sub(MAX_STARTS)..].to_vec();
        let note = write_local(&Lineage::Seen { starts, seen })?;
        self.0.put(&ObjectKey::new(STARTS), note, Condition::Always).await.map(drop)
    }

    /// Writes a rank's part; it is there once this returns true. That `slot` held it to the last byte is asked of
    /// `is_sound`, once all was read; where it says no, nothing is there.
    pub async fn put(&self, held: &Held, slot: &Bytes, is_sound: impl Fn() -> bool) -> Result<bool> {
        let past_cache = Some(held.seal.size);
        let options = UploadOptions { conditional: false, past_cache, ..UploadOptions::default() };
        let mut upload = self.0.upload_with(&held.key().object(), options)?;
        let shard = slot.slice(..held.seal.size as usize);
        match upload.write(shard).await {
            Ok(()) => upload.complete(Condition::Always).await?,
            Err(error) => {
                upload.abort().await?;
                return Err(error);
            }
        };
        let key = NoteKey::of(&held.name(), held.rank, held.world_size, false).object();
        if !is_sound() {
            // It may have been written before, by an agent that is gone.
            self.0.delete(&key).await?;
            return self.0.delete(&held.key().object()).await.map(|()| false);
        }
        self.0.put(&key, write_local(held)?, Condition::Always).await.map(|_| true)
    }

    /// Notes that a step was committed in the store.
    pub async fn mark_durable(&self, step: &HeldStep, rank: u32, world_size: u32) -> Result<()> {
        let key = NoteKey::of(step, rank, world_size, true).object();
        self.0.put(&key, Bytes::new(), Condition::Always).await.map(drop)
    }

    /// What there is.
    ///
    /// # Errors
    /// `Corrupt` when it cannot be told whose the copies are.
    pub async fn look(&self) -> Result<Found> {
        let (starts, seen) = match self.read(&ObjectKey::new(STARTS)).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::default()),
            noted => match noted? {
                Lineage::Seen { starts, seen } => (starts, seen),
                Lineage::Unseen(starts) => (starts, 0),
            },
        };
        let steps = self.whole_steps(&starts, &self.notes().await?);
        Ok(Found { starts, seen, steps })
    }

    /// What a manifest of the step would say, made of its ranks' seals.
    ///
    /// # Errors
    /// `Corrupt` when one is damaged, or they are not those of one save, or a shard's header is damaged.
    pub async fn manifest(&self, step: &HeldStep) -> Result<Manifest> {
        let of_step = |key: &&NoteKey| key.step == step.step && key.attempt == attempt_of(&step.start);
        let notes = self.notes().await?;
        let world_size = notes.iter().find(of_step).map_or(0, |key| key.world_size);
        let mut parts = Vec::new();
        for rank in 0..world_size {
            let held = self.seal(step, rank, world_size).await.map_err(as_damage)?;
            let header =
                self.0.get(&held.key().object(), None, 0..held.seal.header).await.map_err(as_damage)?;
            if !held.seal.has_header(&header) {
                let fact = format!("the header of `{}` is damaged", held.key().object());
                return Err(Error::corrupt(format!("step {}: {fact}", step.step)));
            }
            parts.push(held);
        }
        if parts.is_empty() {
            return Err(Error::corrupt(format!("step {} is not on the local disk any more", step.step)));
        }
        manifest_of(parts)
    }

    /// A rank's part of a step: its seal, and where its shard is read, which is as long as sealed and else unchecked.
    ///
    /// # Errors
    /// `NotFound`, also where another number of ranks saved the step.
    pub async fn part(&self, step: &HeldStep, rank: u32, world_size: u32) -> Result<(Held, LocalShard)> {
        let held = match self.seal(step, rank, world_size).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(self.other_ranks(step, world_size).await?.unwrap_or(error));
            }
            held => held?,
        };
        let (key, size) = (held.key().object(), held.seal.size);
        match self.0.head(&key).await? {
            Some(info) if info.size == size => {
                Ok((held, LocalShard { bucket: self.0.clone(), key, version: info.version }))
            }
            found => {
                let found = found.map_or(0, |info| info.size);
                Err(Error::corrupt(format!("`{key}` has {found} bytes, not {size}")))
            }
        }
    }

    /// Deletes what no start after `starts` can use: all but the `keep` newest steps that are whole, and newer ones; and the
    /// one that is being `read` for the store. Nothing where what is there is of other starts by now.
    pub async fn prune(&self, starts: &[String], keep: usize, read: Option<&HeldStep>) -> Result<()> {
        let notes = self.notes().await?;
        let shards: Vec<_> = self.0.list("shards").try_collect().await?;
        let Some(starts) = self.present(starts).await? else { return Ok(()) };
        let starts = &starts[..];
        let oldest = self.whole_steps(starts, &notes).into_iter().take(keep.max(1)).next_back();
        let oldest = oldest.and_then(|oldest| age(starts, attempt_of(&oldest.name.start), oldest.name.step));
        let is_read = |attempt: &str, step| {
            read.is_some_and(|read| (attempt_of(&read.start), read.step) == (attempt, step))
        };
        let goes = |attempt: &str, step| match age(starts, attempt, step) {
            _ if is_read(attempt, step) => false,
            None => true,
            own => oldest.is_some() && own < oldest,
        };
        let seals = notes.iter().filter(|key| goes(&key.attempt, key.step)).map(NoteKey::object);
        // A seal goes before its shard.
        self.0.delete_many(&seals.collect::<Vec<_>>()).await?;
        let is_gone = |key: &ObjectKey| {
            ShardKey::parse(key.as_str()).is_some_and(|shard| goes(&shard.attempt, shard.step))
        };
        let shards = shards.into_iter().map(|object| object.key).filter(is_gone);
        self.0.delete_many(&shards.collect::<Vec<_>>()).await?;
        self.0.sweep_staging(LEAST_AGE, false).await.map(drop)
    }

    /// The starts whose the copies are by now, where `starts` are among them: their last may have been followed by another, of the
    /// same process or of one that took over. To be asked once it is known what is there, and before any of it goes: a start
    /// notes that it began before it copies anything.
    async fn present(&self, starts: &[String]) -> Result<Option<Vec<String>>> {
        let noted = match self.read(&ObjectKey::new(STARTS)).await {
            Ok(Lineage::Seen { starts, .. } | Lineage::Unseen(starts)) => starts,
            Err(error) if error.kind() == ErrorKind::NotFound => starts.to_vec(),
            Err(error) => return Err(error),
        };
        Ok(Some(noted).filter(|noted| starts.last().is_some_and(|own| noted.contains(own))))
    }

    /// Says that another number of ranks than `world_size` saved a step, if one did.
    async fn other_ranks(&self, step: &HeldStep, world_size: u32) -> Result<Option<Error>> {
        let notes = self.notes().await?;
        let its = notes.iter().find(|key| key.step == step.step && key.attempt == attempt_of(&step.start));
        let count = its.map(|key| key.world_size).filter(|count| *count != world_size);
        let told = count.map(|count| {
            let message = format!("it was saved by {count} ranks, and the job has {world_size} now");
            Error::new(ErrorKind::NotFound, message)
                .with_hint("`save_now` brings a step of theirs to the store")
        });
        Ok(told)
    }

    async fn notes(&self) -> Result<Vec<NoteKey>> {
        let objects: Vec<_> = self.0.list(SEALS).try_collect().await?;
        Ok(objects.iter().filter_map(|object| NoteKey::parse(&object.key)).collect())
    }

    /// The steps of `starts` whose ranks all sealed them, newest first.
    fn whole_steps(&self, starts: &[String], notes: &[NoteKey]) -> Vec<LocalStep> {
        let mut ranks: BTreeMap<(usize, u64, u32), (BTreeSet<u32>, bool)> = BTreeMap::new();
        for key in notes {
            let Some((start, step)) = age(starts, &key.attempt, key.step) else { continue };
            let entry = ranks.entry((start, step, key.world_size)).or_default();
            match key.is_durable {
                true => entry.1 = true,
                false => drop(entry.0.insert(key.rank)),
            }
        }
        let whole = ranks.into_iter().rev().filter(|((_, _, world_size), (ranks, _))| {
            ranks.len() == *world_size as usize && ranks.last().is_some_and(|last| last < world_size)
        });
        let step = |((start, step, _), (_, is_durable))| {
            let start: &String = &starts[start];
            LocalStep { name: HeldStep { start: start.clone(), step }, is_durable }
        };
        whole.map(step).collect()
    }

    async fn seal(&self, step: &HeldStep, rank: u32, world_size: u32) -> Result<Held> {
        let key = NoteKey::of(step, rank, world_size, false).object();
        let mut held: Held = self.read(&key).await?;
        if (held.name(), held.rank, held.world_size) != (step.clone(), rank, world_size) {
            return Err(Error::corrupt(format!("`{key}` is the seal of another rank or step")));
        }
        match held.crc32c {
            Some(_) => held.expect_sound().map_err(|error| error.context(format!("`{key}`")))?,
            // A former version's: the file's hash vouches for it until here.
            None => held = held.sealed_again(),
        }
        Ok(held)
    }

    async fn read<T: DeserializeOwned>(&self, key: &ObjectKey) -> Result<T> {
        let (data, _) = self.0.get_whole_at_most(key, TextLength::MOST).await?;
        read_local(&data).map_err(|fault| Error::corrupt(format!("`{key}` is damaged: {fault}")))
    }
}

/// Where a step stands among those of all `starts`; `None` for that of another start.
fn age(starts: &[String], attempt: &str, step: u64) -> Option<(usize, u64)> {
    starts.iter().rposition(|start| attempt_of(start) == attempt).map(|start| (start, step))
}

/// A copy that is gone or cannot be read is a damaged one: there are others.
pub fn as_damage(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Corrupt | ErrorKind::Bug => error,
        _ => Error::corrupt(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
