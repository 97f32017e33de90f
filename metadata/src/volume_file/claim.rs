//! Opening a volume: reading or creating its file, and claiming its lease.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version, VolumeId};
use forebay_io::object::{Bucket, Condition};
use tokio::sync::watch;
use tokio::time::Instant;

use super::lease::{Held, Lease, LeaseSettings, LeaseState};
use super::lock::lock;
use super::record::{EngineKind, LeaseRecord, VolumeRecord};

/// What a volume is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing is written to the bucket; any number may at once.
    ReadOnly,
    /// One at a time.
    ReadWrite,
}

/// Times that another's put may come between reading the file and claiming it.
const MOST_TRIES: usize = 16;
/// Looks at the counter in one lease.
const LOOKS: u32 = 6;

/// Opens volumes.
pub struct VolumeFile;

impl VolumeFile {
    /// Opens the volume of `bucket`, and creates its record with `engine` when there is none and `access` allows.
    ///
    /// For `ReadWrite` this waits, when another's lease is recorded, until that one is seen renewing or its
    /// counter has stood still for a whole lease. `take_over` does not wait: the one before is then stopped by
    /// the engine's fence at its next write, and by its next renewal.
    ///
    /// # Errors
    /// `Conflict`, naming the holder, when another writes to the volume; `Corrupt` or `Unsupported` when the
    /// record cannot be read; `Unsupported` when the store has no conditional puts.
    pub async fn open_or_create(
        bucket: &Bucket,
        access: Access,
        take_over: bool,
        engine: EngineKind,
        settings: &LeaseSettings,
    ) -> Result<Claim> {
        let directory = bucket.url().directory();
        match (access, directory) {
            (Access::ReadOnly, _) => {
                let record = read(bucket).await?.map(|(record, _)| record);
                Ok(Claim { record, right: Right::Read })
            }
            (Access::ReadWrite, Some(directory)) => {
                claim_directory(bucket, directory, engine, settings).await
            }
            (Access::ReadWrite, None) => claim_bucket(bucket, take_over, engine, settings).await,
        }
    }
}

/// The right to read or write a volume. Dropping a read-write claim without [`Claim::release`] leaves its lease
/// to run out, as a crash does.
#[derive(Debug)]
pub struct Claim {
    record: Option<VolumeRecord>,
    right: Right,
}

#[derive(Debug)]
enum Right {
    Read,
    Leased(Lease),
    Locked { bucket: Bucket, state: watch::Sender<LeaseState>, _lock: File },
}

impl Claim {
    /// The volume as it was when it was opened; `None` for a read-only claim on a prefix that no read-write
    /// mount has been on.
    pub fn record(&self) -> Option<&VolumeRecord> {
        self.record.as_ref()
    }

    /// What this claim allows.
    pub fn access(&self) -> Access {
        match self.right {
            Right::Read => Access::ReadOnly,
            Right::Leased(_) | Right::Locked { .. } => Access::ReadWrite,
        }
    }

    /// Whether writes may be acknowledged at this moment: to be asked right before each acknowledgement, since
    /// it costs two comparisons and a clock reading.
    ///
    /// # Errors
    /// `Conflict` once another has the volume, for good; `Unavailable` while the lease cannot be renewed.
    pub fn check(&self) -> Result<()> {
        match &self.right {
            Right::Leased(lease) => lease.check(),
            Right::Read | Right::Locked { .. } => Ok(()),
        }
    }

    /// Follows the claim's state.
    pub fn watch(&self) -> watch::Receiver<LeaseState> {
        match &self.right {
            Right::Leased(lease) => lease.watch(),
            Right::Locked { state, .. } => state.subscribe(),
            Right::Read => watch::Sender::new(LeaseState::Held).subscribe(),
        }
    }

    /// Gives the volume back, so that the next mount has it at once. Call it after the engine is closed.
    ///
    /// # Errors
    /// `Conflict` when another has it already; others when the bucket could not be told, which only makes the
    /// next mount wait.
    pub async fn release(self) -> Result<()> {
        match self.right {
            Right::Read => Ok(()),
            Right::Leased(lease) => lease.release().await,
            Right::Locked { bucket, .. } => match self.record {
                Some(record) => put_always(&bucket, &VolumeRecord { lease: None, ..record }).await,
                None => Ok(()),
            },
        }
    }
}

async fn claim_bucket(
    bucket: &Bucket,
    take_over: bool,
    engine: EngineKind,
    settings: &LeaseSettings,
) -> Result<Claim> {
    let holder = holder().await;
    for _ in 0..MOST_TRIES {
        let found = read(bucket).await?;
        if let Some((record, version)) = &found
            && let Some(lease) = &record.lease
            && lease.holder != holder
            && !take_over
        {
            wait_until_stale(bucket, lease, version).await?;
        }
        let condition = match &found {
            None => Condition::IfAbsent,
            Some((_, version)) => Condition::IfVersion(version.clone()),
        };
        let record = next_record(found.map(|(record, _)| record), &holder, engine, settings);
        let sent = Instant::now();
        match bucket.put(&ObjectKey::new(VolumeRecord::KEY), record.encode(), condition).await {
            Ok(put) => {
                let held = Held { bucket: bucket.clone(), record: record.clone(), version: put.version };
                let lease = Lease::keep(held, settings.duration, sent);
                return Ok(Claim { record: Some(record), right: Right::Leased(lease) });
            }
            // Another was faster, or the answer to an earlier put of this one was lost: look again.
            Err(error) if error.kind() == ErrorKind::Conflict => {}
            Err(error) => return Err(error.context(VolumeRecord::KEY)),
        }
    }
    Err(Error::new(ErrorKind::Conflict, format!("{} changed at every try to claim it", VolumeRecord::KEY)))
}

/// Returns once the holder's counter has stood still for its whole lease and a tenth, by this host's own clock.
///
/// # Errors
/// `Conflict`, naming the holder, as soon as it is seen renewing.
async fn wait_until_stale(bucket: &Bucket, lease: &LeaseRecord, version: &Version) -> Result<()> {
    let duration = Duration::from_millis(lease.duration_ms);
    tracing::info!(holder = lease.holder, ?duration, "another holds the volume: watching whether it lives");
    let patience = Instant::now() + duration + duration / 10;
    while Instant::now() < patience {
        tokio::time::sleep_until(patience.min(Instant::now() + duration / LOOKS)).await;
        match read(bucket).await? {
            Some((_, now)) if now == *version => {}
            // Released or created anew: the caller looks again.
            None | Some((VolumeRecord { lease: None, .. }, _)) => return Ok(()),
            Some((VolumeRecord { lease: Some(lease), .. }, _)) => return Err(mounted(&lease)),
        }
    }
    tracing::warn!(holder = lease.holder, "it did not renew its lease: taking the volume");
    Ok(())
}

fn mounted(lease: &LeaseRecord) -> Error {
    let at = lease.address.as_ref().map(|address| format!(" at {address}")).unwrap_or_default();
    let message = format!("the volume is mounted read-write by {}{at}", lease.holder);
    Error::new(ErrorKind::Conflict, message).with_hint(
        "unmount it there, mount with --read-only, or take it over with --take-over: the other mount then fails",
    )
}

/// On a directory the lock decides; the lease in the record only shows who holds it.
async fn claim_directory(
    bucket: &Bucket,
    directory: PathBuf,
    engine: EngineKind,
    settings: &LeaseSettings,
) -> Result<Claim> {
    let holder = holder().await;
    let locked = {
        let holder = holder.clone();
        tokio::task::spawn_blocking(move || lock(&directory, &holder)).await
    };
    let lock = locked.map_err(|error| Error::bug(format!("a disk task ended early: {error}")))??;
    let found = read(bucket).await?.map(|(record, _)| record);
    let record = next_record(found, &holder, engine, settings);
    put_always(bucket, &record).await?;
    let state = watch::Sender::new(LeaseState::Held);
    let right = Right::Locked { bucket: bucket.clone(), state, _lock: lock };
    Ok(Claim { record: Some(record), right })
}

/// The record with the lease in `holder`'s hands.
fn next_record(
    found: Option<VolumeRecord>,
    holder: &str,
    engine: EngineKind,
    settings: &LeaseSettings,
) -> VolumeRecord {
    let mut record = found.unwrap_or_else(|| VolumeRecord {
        format: VolumeRecord::FORMAT,
        volume: VolumeId(random()),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64),
        engine,
        epoch: 0,
        lease: None,
    });
    record.epoch += 1;
    record.lease = Some(LeaseRecord {
        holder: holder.to_owned(),
        address: settings.address.clone(),
        renewed: 0,
        duration_ms: settings.duration.as_millis() as u64,
    });
    record
}

async fn read(bucket: &Bucket) -> Result<Option<(VolumeRecord, Version)>> {
    match bucket.get_whole(&ObjectKey::new(VolumeRecord::KEY)).await {
        Ok((text, info)) => Ok(Some((VolumeRecord::decode(&text)?, info.version))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.context(VolumeRecord::KEY)),
    }
}

async fn put_always(bucket: &Bucket, record: &VolumeRecord) -> Result<()> {
    bucket.put(&ObjectKey::new(VolumeRecord::KEY), record.encode(), Condition::Always).await.map(drop)
}

/// Host, process and a random number.
async fn holder() -> String {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_else(|_| "unknown".to_owned());
    let host = tokio::task::spawn_blocking(move || read(Path::new("/proc/sys/kernel/hostname"))).await;
    let host = host.unwrap_or_else(|_| "unknown".to_owned());
    format!("{}-{}-{:016x}", host.trim(), std::process::id(), random())
}

/// 64 bits that the operating system seeded.
fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}
