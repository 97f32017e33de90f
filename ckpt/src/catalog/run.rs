//! Incarnations: each start of a run takes the next number, by creating an object that must not exist yet.
//!
//! A later incarnation supersedes the earlier ones: their trainers may commit nothing more. The numbers need only
//! create-if-absent, which every store that Forebay knows has and `file://` as well. A store that ignores the
//! condition is found out by trying it twice; then two starts at one moment may get one number, and the record that
//! was written last counts.

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::{Bucket, Condition};
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};

use super::keys::{RUNS, StepKey, incarnation_key, parse_incarnation};

/// Starts of one run that race for a number at most; each loser takes the next.
const MAX_ATTEMPTS: usize = 16;

/// The longest record of a start that is read, in bytes: a hundred times what one has.
const MAX_RECORD: u64 = 64 << 10;
/// By how much clocks of hosts may differ: records that are older than a start by more were there before it.
const CLOCKS_MS: u64 = 24 * 3_600_000;

/// Records that are read side by side.
const LOADS: usize = 16;

/// Who starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// 32 random hex digits, new at each start.
    pub nonce: String,
    /// The host's name.
    pub host: String,
    /// The trainer's process id, for people.
    pub pid: u32,
    /// Milliseconds since 1970 by the trainer's clock.
    pub started_ms: u64,
}

/// One start of a run, as recorded in the bucket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The format of this record, 1.
    version: u32,
    /// 32 hex digits, the same for all incarnations.
    pub run: String,
    /// Which start this is, from 1.
    pub incarnation: u64,
    /// Who started.
    pub start: Start,
    /// Whether the store was seen to honour create-if-absent.
    pub conditional: bool,
}

impl Run {
    /// That of a start which has no number yet.
    pub(crate) fn unbegun(start: Start) -> Self {
        Self { version: 1, run: String::new(), incarnation: 0, start, conditional: true }
    }

    /// Whether it has its number.
    pub(crate) fn is_begun(&self) -> bool {
        self.incarnation > 0
    }

    /// What keeps this start's manifests apart from those of another with the same number.
    pub fn attempt(&self) -> &str {
        self.start.nonce.get(..8).unwrap_or_default()
    }

    /// What this start's save of a step is called.
    pub fn save(&self, step: u64) -> StepKey {
        StepKey { incarnation: self.incarnation, step, attempt: self.attempt().to_owned() }
    }
}

/// Takes the next incarnation.
pub async fn begin_run(bucket: &Bucket, start: Start) -> Result<Run> {
    begin_run_unless(bucket, start, None, |_| false).await
}

/// As [`begin_run`], of a start that looked before, when `seen` was the highest number: one that it took since, it keeps.
/// Where it has none, it takes none if it `is_over` now that the newest start is that.
///
/// # Errors
/// `Stale` then.
pub(crate) async fn begin_run_unless(
    bucket: &Bucket,
    start: Start,
    mut seen: Option<u64>,
    is_over: impl Fn(&Run) -> bool,
) -> Result<Run> {
    if start.nonce.len() != 32 || !start.nonce.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Error::invalid("a start's nonce is 32 hex digits"));
    }
    for _ in 0..MAX_ATTEMPTS {
        let numbers = incarnations(bucket).await?;
        let last = match numbers.last() {
            Some(number) => Some(load(bucket, *number).await?),
            None => None,
        };
        // Our own record: the answer to an earlier try was lost, or another agent of the same start took it. It need not be
        // the last one: a second number would supersede our successor.
        if let Some(own) = last.as_ref().filter(|last| last.start.nonce == start.nonce) {
            return Ok(own.clone());
        }
        let seen = *seen.get_or_insert(numbers.last().copied().unwrap_or(0));
        let earlier = numbers.iter().rev().skip(1).copied().take_while(|number| *number > seen);
        let is_past = |run: &Run| run.start.started_ms.saturating_add(CLOCKS_MS) < start.started_ms;
        if let (Some(own), _) = find_among(bucket, earlier, &start.nonce, is_past).await? {
            return Ok(own);
        }
        if let Some(last) = last.as_ref().filter(|last| is_over(last)) {
            return Err(took_over(last.clone()));
        }
        let run = match &last {
            Some(last) => last.run.clone(),
            None => start.nonce.clone(),
        };
        let incarnation = last.map_or(1, |last| last.incarnation + 1);
        let mut record = Run { version: 1, run, incarnation, start: start.clone(), conditional: true };
        match create(bucket, &record).await {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Conflict => continue,
            Err(error) => return Err(error),
        }
        // The same put again must now be refused; where it is not, the record says so from then on.
        record.conditional = false;
        if matches!(create(bucket, &record).await, Err(error) if error.kind() == ErrorKind::Conflict) {
            record.conditional = true;
        }
        return Ok(record);
    }
    let url = bucket.url();
    Err(Error::new(
        ErrorKind::Conflict,
        format!("{MAX_ATTEMPTS} other starts took an incarnation of {url} first"),
    ))
}

/// The start that superseded `run`, if there is one.
pub async fn superseded_by(bucket: &Bucket, run: &Run) -> Result<Option<Run>> {
    let newest = newest_run(bucket).await?;
    Ok(newest.filter(|newest| newest.incarnation >= run.incarnation && newest.start.nonce != run.start.nonce))
}

/// Tells a start that a later one took over.
///
/// # Errors
/// `Stale` when one did.
pub async fn refuse_if_superseded(bucket: &Bucket, run: &Run) -> Result<()> {
    superseded_by(bucket, run).await?.map_or(Ok(()), |newer| Err(took_over(newer)))
}

fn took_over(newer: Run) -> Error {
    let (number, host, pid) = (newer.incarnation, newer.start.host, newer.start.pid);
    let message =
        format!("a later start of this run (incarnation {number}, process {pid} on {host}) took over");
    Error::new(ErrorKind::Stale, message).with_hint("end this trainer, or give it a bucket prefix of its own")
}

async fn create(bucket: &Bucket, record: &Run) -> Result<()> {
    let data = serde_json::to_vec(record).map_err(|error| Error::bug(format!("encode a run: {error}")))?;
    let key = incarnation_key(record.incarnation);
    match bucket.put(&key, data.clone().into(), Condition::IfAbsent).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            bucket.put(&key, data.into(), Condition::Always).await.map(drop)
        }
        other => other.map(drop),
    }
}

/// The latest start of the run, if there was one.
pub async fn newest_run(bucket: &Bucket) -> Result<Option<Run>> {
    match incarnations(bucket).await?.last() {
        Some(last) => load(bucket, *last).await.map(Some),
        None => Ok(None),
    }
}

/// The highest number that a start has; 0 where there was none.
pub async fn newest_number(bucket: &Bucket) -> Result<u64> {
    Ok(incarnations(bucket).await?.last().copied().unwrap_or(0))
}

/// What the start with that nonce recorded, if it came so far.
///
/// # Errors
/// `Corrupt` where there is none, and a record is damaged: it may be that one.
pub async fn find_run(bucket: &Bucket, nonce: &str) -> Result<Option<Run>> {
    let numbers = incarnations(bucket).await?.into_iter().rev();
    let (found, damage) = find_among(bucket, numbers, nonce, |_| false).await?;
    damage.filter(|_| found.is_none()).map_or(Ok(found), Err)
}

/// What rank 0 recorded of the start of a job, for another rank of it, where `seen` was the highest number before; none as long
/// as it recorded nothing. There will be nothing if it `is_over` now that the newest start is that.
///
/// # Errors
/// `Stale` then.
pub(crate) async fn find_run_of_job(
    bucket: &Bucket,
    start: &Start,
    seen: u64,
    is_over: impl Fn(&Run) -> bool,
) -> Result<Option<Run>> {
    let numbers = incarnations(bucket).await?.into_iter().rev().take_while(|number| *number > seen);
    let (found, damage) = find_among(bucket, numbers, &start.nonce, |_| false).await?;
    if found.is_some() {
        return Ok(found);
    }
    if let Some(newest) = newest_run(bucket).await?.filter(is_over) {
        return Err(took_over(newest));
    }
    damage.map_or(Ok(None), Err)
}

/// As [`find_run`], among the starts of these `numbers` up to one that `is_past`. Gives what is wrong with a record, too.
async fn find_among(
    bucket: &Bucket,
    numbers: impl Iterator<Item = u64>,
    nonce: &str,
    is_past: impl Fn(&Run) -> bool,
) -> Result<(Option<Run>, Option<Error>)> {
    let mut runs = stream::iter(numbers).map(|number| load(bucket, number)).buffered(LOADS);
    let mut damage = None;
    while let Some(run) = runs.next().await {
        match run {
            Ok(run) if run.start.nonce == nonce => return Ok((Some(run), damage)),
            Ok(run) if is_past(&run) => break,
            Err(error) if error.kind() == ErrorKind::Corrupt => damage = Some(error),
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Ok(_) | Err(_) => {}
        }
    }
    Ok((None, damage))
}

/// The numbers taken so far, ascending.
async fn incarnations(bucket: &Bucket) -> Result<Vec<u64>> {
    let objects: Vec<_> = bucket.list(RUNS).try_collect().await?;
    let mut numbers: Vec<_> = objects.iter().filter_map(|object| parse_incarnation(&object.key)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

async fn load(bucket: &Bucket, incarnation: u64) -> Result<Run> {
    let key = incarnation_key(incarnation);
    let (data, _) = bucket.get_whole_at_most(&key, MAX_RECORD).await?;
    let run: Run = serde_json::from_slice(&data).map_err(|error| {
        Error::corrupt(format!("`{key}` of {} is no run's record: {error}", bucket.url()))
    })?;
    if run.incarnation != incarnation || run.version != 1 {
        return Err(Error::corrupt(format!("`{key}` of {} records another start", bucket.url())));
    }
    Ok(run)
}
