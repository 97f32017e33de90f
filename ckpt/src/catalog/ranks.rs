//! What each rank notes of a save under way: what it refers to, and what it stored of a step that several save together,
//! until all are there and the manifest is made of it.
//!
//! ```text
//! ranks/<step>/<incarnation>-<attempt>/<rank>.intent
//! ranks/<step>/<incarnation>-<attempt>/<rank>.again
//! ranks/<step>/<incarnation>-<attempt>/<rank>.json
//! ranks/<step>/<incarnation>-<attempt>/<rank>.<round>.failed
//! ranks/<step>/<incarnation>-<attempt>/<rank>.alive
//! ```
//! An intent names the shards of earlier steps that a save refers to; it is there before the save makes sure that they
//! still are, and stays until the step is committed. `again` is that of an agent that took a dead one's place: it takes
//! nothing back that the dead one noted. A rank's index is a manifest of its own part, which need not cover
//! its tensors; it is written after the shard. The next, of a rank that will not store its part, says why: the step is
//! never committed in that round. The last is put again and again while a rank's part takes long: it is empty, and only its time counts.
//! Whoever finds all indexes of one round puts them together: the outcome is the same bytes, whoever does it. What another
//! round left is not there for it, and is put over.

use std::collections::HashMap;

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Timestamp};
use forebay_io::object::{Bucket, Condition, ObjectInfo};
use futures::stream::{self, StreamExt, TryStreamExt};

use super::{Round, Run, StepKey};
use crate::manifest::{Intent, Manifest, Tensor, TextLength};
use crate::trees;

/// The prefix of all indexes.
pub(super) const RANKS: &str = "ranks";
/// The longest reason that is read, in bytes.
const MAX_REASON: u64 = 1 << 20;
/// Indexes read at once.
const PARALLEL: usize = 16;

/// Which rank's note of which save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankKey {
    /// The save.
    pub save: StepKey,
    /// The rank.
    pub rank: u32,
    /// What it tells.
    pub note: Note,
}

/// What a rank notes of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Note {
    /// Shards that it refers to.
    Intent,
    /// Shards that it refers to when it is saved by another agent than at first.
    Again,
    /// What was stored.
    Index,
    /// Why nothing will be, in this round of those that have one.
    Failed(Option<Round>),
    /// That it is being stored.
    Alive,
}

impl Note {
    fn suffix(self) -> String {
        match self {
            Self::Intent => "intent".to_owned(),
            Self::Again => "again".to_owned(),
            Self::Index => "json".to_owned(),
            Self::Failed(None) => "failed".to_owned(),
            Self::Failed(Some(round)) => format!("{round}.failed"),
            Self::Alive => "alive".to_owned(),
        }
    }

    fn parse(suffix: &str) -> Option<Self> {
        match suffix {
            "intent" => Some(Self::Intent),
            "again" => Some(Self::Again),
            "json" => Some(Self::Index),
            "failed" => Some(Self::Failed(None)),
            "alive" => Some(Self::Alive),
            other => Some(Self::Failed(Some(Round::parse(other.strip_suffix(".failed")?)?))),
        }
    }
}

impl RankKey {
    pub(super) fn object(&self) -> ObjectKey {
        let (directory, suffix) = (directory_of(&self.save), self.note.suffix());
        ObjectKey::new(format!("{directory}/{:06}.{suffix}", self.rank))
    }

    /// Reads a key; `None` for one that is no note's.
    pub(super) fn parse(key: &ObjectKey) -> Option<Self> {
        let mut parts = key.as_str().split('/').skip(1);
        let (step, name, rank) = (parts.next()?, parts.next()?, parts.next()?);
        let (incarnation, attempt) = name.split_once('-')?;
        let (step, incarnation) = (step.parse().ok()?, incarnation.parse().ok()?);
        let save = StepKey { step, incarnation, attempt: attempt.to_owned() };
        let (rank, suffix) = rank.split_once('.')?;
        let parsed = Self { save, rank: rank.parse().ok()?, note: Note::parse(suffix)? };
        (parsed.object() == *key).then_some(parsed)
    }
}

/// Where the notes of a save are.
fn directory_of(StepKey { step, incarnation, attempt }: &StepKey) -> String {
    format!("{RANKS}/{step:020}/{incarnation:010}-{attempt}")
}

/// Which ranks' notes there are, of all saves under way.
pub async fn list_ranks(bucket: &Bucket) -> Result<Vec<RankKey>> {
    Ok(list_notes(bucket).await?.into_iter().map(|(key, _)| key).collect())
}

/// As [`list_ranks`], each with when it was put last, by the store's clock.
pub(super) async fn list_notes(bucket: &Bucket) -> Result<Vec<(RankKey, Timestamp)>> {
    list_notes_below(bucket, RANKS).await
}

/// As [`list_notes`], of one save: what others left is not read with them.
pub(crate) async fn list_notes_of(bucket: &Bucket, save: &StepKey) -> Result<Vec<(RankKey, Timestamp)>> {
    list_notes_below(bucket, &directory_of(save)).await
}

async fn list_notes_below(bucket: &Bucket, prefix: &str) -> Result<Vec<(RankKey, Timestamp)>> {
    let objects: Vec<_> = bucket.list(prefix).try_collect().await?;
    let note = |object: ObjectInfo| Some((RankKey::parse(&object.key)?, object.modified));
    Ok(objects.into_iter().filter_map(note).collect())
}

/// Tells that a rank stored its shard.
pub async fn put_rank(bucket: &Bucket, run: &Run, rank: u32, index: &Manifest) -> Result<()> {
    // The name is this rank's alone, and in one round an agent always says the same there.
    let key = RankKey { save: run.save(index.step), rank, note: Note::Index }.object();
    bucket.put(&key, index.encode_index()?, Condition::Always).await.map(drop)
}

/// Tells, in an `Intent` or `Again`, which shards a rank's part of a save will refer to.
pub async fn put_intent(bucket: &Bucket, key: &RankKey, shards: Vec<String>) -> Result<()> {
    bucket.put(&key.object(), Intent { shards }.encode()?, Condition::Always).await.map(drop)
}

/// Tells that a rank's part of `save` is being stored.
pub async fn put_alive(bucket: &Bucket, save: StepKey, rank: u32) -> Result<()> {
    let key = RankKey { save, rank, note: Note::Alive }.object();
    bucket.put(&key, Default::default(), Condition::Always).await.map(drop)
}

/// Takes all of these back, once the steps are committed.
pub async fn forget_notes(bucket: &Bucket, saves: &[StepKey], rank: u32) -> Result<()> {
    let key = |save: &StepKey, note| RankKey { save: save.clone(), rank, note }.object();
    let keys = |save| [Note::Intent, Note::Again, Note::Alive].map(|note| key(save, note));
    bucket.delete_many(&saves.iter().flat_map(keys).collect::<Vec<_>>()).await
}

/// Tells that a rank will not store its part of `save` in this round, and why.
pub async fn put_failed(
    bucket: &Bucket,
    save: StepKey,
    rank: u32,
    round: Option<Round>,
    reason: &str,
) -> Result<()> {
    let key = RankKey { save, rank, note: Note::Failed(round) }.object();
    bucket.put(&key, reason.to_owned().into(), Condition::Always).await.map(drop)
}

/// Why a rank did not store its part.
pub async fn failure_of(bucket: &Bucket, key: &RankKey) -> Result<String> {
    match bucket.get_whole_at_most(&key.object(), MAX_REASON).await {
        Ok((data, _)) => Ok(String::from_utf8_lossy(&data).into_owned()),
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(format!("why is not to be read: {error}")),
        Err(error) => Err(error),
    }
}

/// Reads all indexes of a save and puts those of one `commit` together; `None` where a rank's is of another round, and this
/// one's not there yet. Which rank's is remembered in `late`: until it is there, the others are not read again.
///
/// # Errors
/// `Corrupt` when one is damaged, `Invalid` when together they are no checkpoint: a tensor that is not covered exactly
/// once is named, as is one that a tree names and nobody stored.
pub async fn merge_ranks(
    bucket: &Bucket,
    save: &StepKey,
    world_size: u32,
    commit: &str,
    late: &mut Option<u32>,
) -> Result<Option<Manifest>> {
    if let Some(rank) = *late {
        let index = load_index(bucket, save, rank, world_size).await?;
        if index.commit != commit {
            return Ok(None);
        }
    }
    let indexes: Vec<Manifest> = stream::iter(0..world_size)
        .map(|rank| load_index(bucket, save, rank, world_size))
        .buffered(PARALLEL)
        .try_collect()
        .await?;
    *late = (0..).zip(&indexes).find(|(_, index)| index.commit != commit).map(|(rank, _)| rank);
    match late {
        Some(_) => Ok(None),
        None => {
            let whole = merge(indexes)?;
            trees::check(&whole)?;
            Ok(Some(whole))
        }
    }
}

/// What a rank told that it stored.
pub(super) async fn load_index(
    bucket: &Bucket,
    save: &StepKey,
    rank: u32,
    world_size: u32,
) -> Result<Manifest> {
    let key = RankKey { save: save.clone(), rank, note: Note::Index }.object();
    let (data, _) = bucket.get_whole_at_most(&key, TextLength::MOST).await?;
    let index = Manifest::decode_index(&data).map_err(|fault| {
        Error::from(fault).context(format!("the index of rank {rank} of step {}", save.step))
    })?;
    let is_ranks = index.shards.iter().all(|shard| shard.step != save.step || shard.rank == rank);
    let told = (index.step, index.incarnation, index.world_size);
    if !is_ranks || told != (save.step, save.incarnation, world_size) {
        return Err(Error::corrupt(format!("`{key}` is another rank's index or another save's")));
    }
    Ok(index)
}

/// Deletes the notes of a save that is committed, and of this start's earlier ones, which never will be. `keys` were
/// listed before the commit: no agent of the start was at a later save then.
pub async fn forget_ranks(bucket: &Bucket, keys: &[RankKey], save: &StepKey) -> Result<()> {
    let of_start = |key: &RankKey| {
        (key.save.incarnation, &key.save.attempt) == (save.incarnation, &save.attempt)
            && key.save.step <= save.step
    };
    let keys: Vec<_> = keys.iter().filter(|key| of_start(key)).map(RankKey::object).collect();
    bucket.delete_many(&keys).await
}

/// The shards that a note names; none of one that is gone by now.
pub(super) async fn shards_of_note(bucket: &Bucket, key: &RankKey) -> Result<Vec<String>> {
    if matches!(key.note, Note::Failed(_) | Note::Alive) {
        return Ok(Vec::new());
    }
    let object = key.object();
    let data = match bucket.get_whole_at_most(&object, TextLength::MOST).await {
        Ok((data, _)) => data,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let named = match key.note {
        Note::Intent | Note::Again => Intent::decode(&data).map(|intent| intent.shards),
        _ => Manifest::decode_index(&data)
            .map(|index| index.shards.into_iter().map(|shard| shard.key).collect()),
    };
    named.map_err(|fault| Error::from(fault).context(format!("`{object}`")))
}

/// Puts indexes together, in the order of ranks.
pub(crate) fn merge(indexes: Vec<Manifest>) -> Result<Manifest> {
    let mut indexes = indexes.into_iter();
    let mut whole = indexes.next().ok_or_else(|| Error::bug("a save of no rank"))?;
    let mut places: HashMap<String, usize> =
        whole.tensors.iter().enumerate().map(|(place, tensor)| (tensor.name.clone(), place)).collect();
    let shards = (0u32..).zip(&whole.shards);
    let mut numbers: HashMap<String, u32> =
        shards.map(|(number, shard)| (shard.key.clone(), number)).collect();
    for index in indexes {
        whole.created_ms = whole.created_ms.max(index.created_ms);
        // Two ranks may refer to one earlier shard, which ranks that were cut otherwise wrote.
        let numbers: Vec<u32> = index
            .shards
            .into_iter()
            .map(|shard| {
                *numbers.entry(shard.key.clone()).or_insert_with(|| {
                    whole.shards.push(shard);
                    whole.shards.len() as u32 - 1
                })
            })
            .collect();
        whole.extras.extend(index.extras);
        whole.parents.extend(index.parents);
        for mut tensor in index.tensors {
            tensor.slices.iter_mut().for_each(|slice| {
                slice.shard = numbers.get(slice.shard as usize).copied().unwrap_or(u32::MAX)
            });
            match places.get(&tensor.name) {
                Some(place) => join(&mut whole.tensors[*place], tensor)?,
                None => {
                    places.insert(tensor.name.clone(), whole.tensors.len());
                    whole.tensors.push(tensor);
                }
            }
        }
    }
    whole.parents.sort_unstable();
    whole.parents.dedup();
    whole.check().map_err(|fault| {
        Error::invalid(format!("step {}: what the ranks stored is no checkpoint: {fault}", whole.step))
    })?;
    Ok(whole)
}

fn join(tensor: &mut Tensor, other: Tensor) -> Result<()> {
    if (&tensor.dtype, &tensor.shape) != (&other.dtype, &other.shape) {
        let name = &tensor.name;
        return Err(Error::invalid(format!("tensor `{name}` has two types or shapes on two ranks")));
    }
    tensor.slices.extend(other.slices);
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::catalog::{Start, begin_run};
    use crate::manifest::{Checksum, Identity, Shard, ShardKey, Slice, SliceKind};

    /// Four bytes of eight that two ranks hold alike, as one of them stored them in step 5.
    pub(in crate::catalog) fn index_of(run: &Run, rank: u32) -> Manifest {
        let (attempt, layout) = (run.attempt().to_owned(), "0a0a0a0a".to_owned());
        let (step, incarnation, first) = (5, run.incarnation, u64::from(rank) * 4);
        let key = ShardKey { step, incarnation, attempt, rank, save: 1, layout }.object();
        let shard =
            Shard { key: key.as_str().into(), size: 4100, header: 4096, crc32c: Checksum(7), rank, step };
        let slice = Slice {
            kind: SliceKind::Flat,
            offsets: vec![first],
            lengths: vec![4],
            shard: 0,
            start: 4096,
            end: 4100,
            crc32c: Checksum(8),
            blake3: Identity([9; 32]),
        };
        let tensor = Tensor { name: "w".into(), dtype: "uint8".into(), shape: vec![8], slices: vec![slice] };
        Manifest {
            commit: "c0".repeat(16),
            run: run.run.clone(),
            incarnation,
            step,
            created_ms: 1_700_000_000_000,
            world_size: 2,
            parents: Vec::new(),
            shards: vec![shard],
            tensors: vec![tensor],
            extras: Vec::new(),
        }
    }

    /// A step is never made of an index that is not what its rank wrote.
    #[tokio::test]
    async fn an_index_that_is_damaged_anywhere_is_named_and_no_step_is_made_of_it() {
        let bucket = Bucket::in_memory();
        let start = Start { nonce: "ab".repeat(16), host: "h".into(), pid: 1, started_ms: 0 };
        let run = begin_run(&bucket, start).await.expect("run");
        let save = run.save(5);
        let merged = async || merge_ranks(&bucket, &save, 2, &"c0".repeat(16), &mut None).await;
        let (mut keys, mut texts) = (Vec::new(), Vec::new());
        for rank in 0..2 {
            put_rank(&bucket, &run, rank, &index_of(&run, rank)).await.expect("put");
            let key = RankKey { save: save.clone(), rank, note: Note::Index }.object();
            texts.push(bucket.get_whole(&key).await.expect("get").0);
            keys.push(key);
        }
        let put = async |rank: usize, data: Vec<u8>| {
            bucket.put(&keys[rank], data.into(), Condition::Always).await.expect("put");
        };
        assert_eq!(merged().await.expect("whole").expect("of one round").shards.len(), 2);
        for (rank, text) in texts.iter().enumerate() {
            for position in 0..text.len() {
                let mut damaged = text.to_vec();
                damaged[position] ^= 1 << (position % 8);
                for data in [damaged, text[..position].to_vec()] {
                    put(rank, data).await;
                    let error = merged().await.expect_err("a damaged index");
                    let fact = format!("the index of rank {rank} of step 5");
                    assert!(
                        error.kind() == ErrorKind::Corrupt && error.to_string().contains(&fact),
                        "{position}: {error}"
                    );
                }
            }
            // Whole, but the other's.
            put(rank, texts[1 - rank].to_vec()).await;
            let error = merged().await.expect_err("another's index");
            assert!(error.to_string().contains("is another rank's index"), "{error}");
            put(rank, text.to_vec()).await;
        }
        assert!(merged().await.expect("whole again").is_some());
    }

    #[test]
    fn keys_round_trip() {
        let save = StepKey { step: 500, incarnation: 3, attempt: "0a1b2c3d".into() };
        let key = RankKey { save: save.clone(), rank: 12, note: Note::Index };
        let round = Some(Round::new(0x0a1b));
        for note in [Note::Intent, Note::Again, Note::Failed(None), Note::Failed(round), Note::Alive] {
            let other = RankKey { save: save.clone(), rank: 12, note };
            assert_eq!(RankKey::parse(&other.object()), Some(other));
        }
        let failed = RankKey { save: save.clone(), rank: 12, note: Note::Failed(round) }.object();
        let start = "ranks/00000000000000000500/0000000003-0a1b2c3d";
        assert_eq!(failed.as_str(), format!("{start}/000012.0000000000000a1b.failed"));
        let object = key.object();
        assert_eq!(object.as_str(), "ranks/00000000000000000500/0000000003-0a1b2c3d/000012.json");
        assert_eq!(RankKey::parse(&object), Some(key));
        assert_eq!(StepKey::parse(&object), None, "no index is taken for a manifest");
        for other in ["ranks/x", "ranks/5/3-a/1.json", "ranks/5/3-a/1.x", "ranks", "ranks/a/b/c/d"] {
            assert_eq!(RankKey::parse(&ObjectKey::new(other)), None, "{other}");
        }
        for other in ["a1b.failed", "0000000000000A1B.failed", ".failed", "0000000000000a1b"] {
            let key = ObjectKey::new(format!("{start}/000012.{other}"));
            assert_eq!(RankKey::parse(&key), None, "{other}");
        }
    }
}
