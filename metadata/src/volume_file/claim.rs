//! Opening a volume: reading or creating its file, and claiming its lease.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::lock_file::{LockFile, Locked};
use forebay_io::object::{Bucket, Condition};
use forebay_io::rng::Rng;
use forebay_io::task::blocking;
use futures::future::{BoxFuture, FutureExt};
use tokio::sync::watch;

use super::lease::{Held, Lease, LeaseSettings, LeaseState};
use super::lock::{STILL_ENDING, held_by, is_ending, lock, say_ending};
use super::record::{EngineKind, LeaseRecord, VolumeRecord, damaged};

/// How long requests of a mount that was taken over may still be on their way.
const LATE_REQUESTS: Duration = Duration::from_secs(1);

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
/// How long the lock of a directory is waited for: its holder may be a mount that was just unmounted, and about to say so.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
/// How long it is once the holder says that it closes the volume, and a lease that is renewed.
const ENDING_PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// Opens the volume of one bucket.
#[derive(Debug, Clone)]
pub struct VolumeFile {
    bucket: Bucket,
    engine: EngineKind,
    settings: LeaseSettings,
    clock: Clock,
    rng: Rng,
}

impl VolumeFile {
    /// The volume of `bucket`, whose tree `engine` will keep if it is created now.
    pub fn of(bucket: &Bucket, engine: EngineKind) -> Self {
        let (settings, clock, rng) = (LeaseSettings::default(), Clock::system(), Rng::system());
        Self { bucket: bucket.clone(), engine, settings, clock, rng }
    }

    /// With these settings instead of the default ones.
    pub fn with_settings(self, settings: LeaseSettings) -> Self {
        Self { settings, ..self }
    }

    /// Recording where others reach the tree that this process serves, if it does.
    pub fn at(mut self, address: Option<String>) -> Self {
        self.settings.address = address;
        self
    }

    /// The record, whoever holds the volume; none where it is none yet.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` when it cannot be read; what the store says.
    pub async fn look(&self) -> Result<Option<VolumeRecord>> {
        Ok(read(&self.bucket).await?.map(|(record, _)| record))
    }

    /// With another clock than the machine's.
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Opens the volume, and creates its record when there is none and `access` allows.
    ///
    /// For `ReadWrite` this waits, when another's lease is recorded, until that one is seen renewing or its
    /// counter has stood still for a whole lease. `take_over` does not wait for that: the one before is then stopped
    /// by the engine's fence at its next write, and by its next renewal. It waits a second for requests of the one
    /// before that the store has yet to carry out: copies and deletions have no condition that would keep them from
    /// what is written from now on.
    ///
    /// # Errors
    /// `Conflict`, naming the holder, when another writes to the volume; `Corrupt` or `Unsupported` when the
    /// record cannot be read; `Unsupported` when the store has no conditional puts.
    pub async fn open_or_create(&self, access: Access, take_over: bool) -> Result<Claim> {
        match (access, self.bucket.url().directory()) {
            (Access::ReadOnly, _) => {
                let record = read(&self.bucket).await?.map(|(record, _)| record);
                Ok(Claim { record, right: Right::Read })
            }
            (Access::ReadWrite, Some(directory)) => self.claim_directory(directory).await,
            (Access::ReadWrite, None) => self.claim_bucket(take_over).await,
        }
    }

    async fn claim_bucket(&self, take_over: bool) -> Result<Claim> {
        let holder = self.holder().await;
        // A try of a renewal that takes longer than the pause between two of them would be of no use.
        let patience_ms = self.settings.duration.as_millis() as u64 / 3;
        // Nor may it wait behind the bytes of files, which may take longer than the lease.
        let bucket = self.bucket.apart().with_deadline_ms(patience_ms);
        for _ in 0..MOST_TRIES {
            let found = read(&bucket).await?;
            let other = found.as_ref().and_then(|(record, version)| Some((record.lease.as_ref()?, version)));
            let other = other.filter(|(lease, _)| lease.holder != holder);
            let took_over = take_over && other.is_some();
            if let Some((lease, version)) = other
                && !take_over
            {
                self.wait_until_stale(lease, version).await?;
            }
            let condition = match &found {
                None => Condition::IfAbsent,
                Some((_, version)) => Condition::IfVersion(version.clone()),
            };
            let record = self.next_record(found.map(|(record, _)| record), &holder);
            let sent = self.clock.now();
            match bucket.put(&ObjectKey::new(VolumeRecord::KEY), record.encode(), condition).await {
                Ok(put) => {
                    if took_over {
                        tracing::info!(
                            "took the volume over: waiting for requests that the one before had sent"
                        );
                        self.clock.sleep(LATE_REQUESTS).await;
                    }
                    let held = Held { bucket, record: record.clone(), version: put.version };
                    let lease = Lease::keep(held, self.settings.duration, &self.clock, sent);
                    return Ok(Claim { record: Some(record), right: Right::Leased(lease) });
                }
                // Another was faster, or the answer to an earlier put of this one was lost: look again.
                Err(error) if error.kind() == ErrorKind::Conflict => {}
                Err(error) => return Err(error.context(VolumeRecord::KEY)),
            }
        }
        let message = format!("{} changed at every try to claim it", VolumeRecord::KEY);
        Err(Error::new(ErrorKind::Conflict, message))
    }

    /// Returns once the holder's counter has stood still for its whole lease and a tenth, by this host's own
    /// clock, or the lease is given back.
    ///
    /// # Errors
    /// `Conflict`, naming the holder, as soon as it is seen renewing; for a while not where it says that it closes the volume.
    async fn wait_until_stale(&self, lease: &LeaseRecord, version: &Version) -> Result<()> {
        let duration = Duration::from_millis(lease.duration_ms);
        tracing::info!(
            holder = lease.holder,
            ?duration,
            "another holds the volume: watching whether it lives"
        );
        let (patience, mut version) = (self.clock.now() + ENDING_PATIENCE, version.clone());
        let mut stale = self.clock.now() + duration + duration / 10;
        while self.clock.now() < stale {
            self.clock.sleep_until(stale.min(self.clock.now() + duration / LOOKS)).await;
            match read(&self.bucket).await? {
                Some((_, now)) if now == version => {}
                // Released or created anew: the caller looks again.
                None | Some((VolumeRecord { lease: None, .. }, _)) => return Ok(()),
                Some((VolumeRecord { lease: Some(lease), .. }, now))
                    if lease.ending && self.clock.now() < patience =>
                {
                    version = now;
                    stale = self.clock.now() + duration + duration / 10;
                }
                Some((VolumeRecord { lease: Some(lease), .. }, _)) => return Err(mounted(&lease)),
            }
        }
        tracing::warn!(holder = lease.holder, "it did not renew its lease: taking the volume");
        Ok(())
    }

    /// On a directory the lock decides; the lease in the record only shows who holds it.
    async fn claim_directory(&self, directory: PathBuf) -> Result<Claim> {
        let holder = self.holder().await;
        let lock = self.lock(&directory, &holder).await?;
        let found = read(&self.bucket).await?.map(|(record, _)| record);
        let record = self.next_record(found, &holder);
        put_always(&self.bucket, &record).await?;
        let state = watch::Sender::new(LeaseState::Held);
        let right = Right::Locked { bucket: self.bucket.clone(), state, lock: Arc::new(lock), holder };
        Ok(Claim { record: Some(record), right })
    }

    /// The lock of a directory. `umount` returns before the mount's process has closed the volume: that is waited for.
    ///
    /// # Errors
    /// `Conflict`, naming the holder, when another writes to the volume.
    async fn lock(&self, directory: &Path, holder: &str) -> Result<LockFile> {
        let begun = self.clock.now();
        loop {
            let (path, name) = (directory.to_owned(), holder.to_owned());
            let other = match blocking(move || lock(&path, &name)).await?? {
                Locked::Mine(lock) => return Ok(lock),
                Locked::By(other) => other,
            };
            let patience = if is_ending(&other) { ENDING_PATIENCE } else { LOCK_PATIENCE };
            if self.clock.now() >= begun + patience {
                return Err(held_by(&other));
            }
            self.clock.sleep(LOCK_PAUSE).await;
        }
    }

    /// The record with the lease in `holder`'s hands.
    fn next_record(&self, found: Option<VolumeRecord>, holder: &str) -> VolumeRecord {
        let mut record = found.unwrap_or_else(|| VolumeRecord {
            format: VolumeRecord::FORMAT,
            // What was cached of the bucket before it became a volume is found again.
            volume: VolumeId::of_url(&self.bucket.url().to_string()),
            created: self.clock.wall().seconds,
            engine: self.engine,
            epoch: 0,
            lease: None,
        });
        record.epoch += 1;
        record.lease = Some(LeaseRecord {
            holder: holder.to_owned(),
            address: self.settings.address.clone(),
            renewed: 0,
            duration_ms: self.settings.duration.as_millis() as u64,
            ending: false,
        });
        record
    }

    /// Host, process and a random number.
    async fn holder(&self) -> String {
        let host = forebay_io::host::name().await;
        format!("{host}-{}-{:016x}", std::process::id(), self.rng.u64())
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
    Locked { bucket: Bucket, state: watch::Sender<LeaseState>, lock: Arc<LockFile>, holder: String },
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

    /// Waits until writes may be acknowledged, where that is for a renewal of the lease alone: for one that begins from now on.
    /// Who waits keeps nobody from giving the volume back.
    ///
    /// # Errors
    /// As [`Self::check`], after it.
    pub fn regain(&self) -> BoxFuture<'static, Result<()>> {
        match &self.right {
            Right::Leased(lease) => lease.regain().boxed(),
            Right::Read | Right::Locked { .. } => std::future::ready(Ok(())).boxed(),
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

    /// Says that the volume is about to be given back: whoever wants it waits. A lease, whose next holder waits until it is renewed,
    /// says so then.
    pub async fn say_ending(&self) {
        let (lock, holder) = match &self.right {
            Right::Read => return,
            Right::Leased(lease) => return lease.say_ending(),
            Right::Locked { lock, holder, .. } => (lock.clone(), holder.clone()),
        };
        let said = blocking(move || say_ending(&lock, &holder)).await;
        if let Err(error) = said.and_then(|said| said) {
            tracing::warn!(%error, "the lock does not say that the volume is being closed");
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

fn mounted(lease: &LeaseRecord) -> Error {
    let at = lease.address.as_ref().map(|address| format!(" at {address}")).unwrap_or_default();
    let message = format!("the volume is mounted read-write by {}{at}", lease.holder);
    let error = Error::new(ErrorKind::Conflict, message);
    if lease.ending {
        return error.with_hint(STILL_ENDING);
    }
    error.with_hint(
        "unmount it there, mount both with --join-secret, to write from both, or this one with --read-only, or take the volume over \
         with --take-over: the other mount then fails",
    )
}

async fn read(bucket: &Bucket) -> Result<Option<(VolumeRecord, Version)>> {
    let key = ObjectKey::new(VolumeRecord::KEY);
    match bucket.get_whole_at_most(&key, VolumeRecord::MAX_BYTES).await {
        Ok((text, info)) => Ok(Some((VolumeRecord::decode(&text)?, info.version))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == ErrorKind::Corrupt => Err(damaged(error)),
        Err(error) => Err(error.context(VolumeRecord::KEY)),
    }
}

async fn put_always(bucket: &Bucket, record: &VolumeRecord) -> Result<()> {
    bucket.put(&ObjectKey::new(VolumeRecord::KEY), record.encode(), Condition::Always).await.map(drop)
}
