//! The task that brings staged blobs to the store, a few files at a time, for as long as it takes.

use std::sync::{Arc, Weak};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, InodeId, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::mem::{Budget, Permit};
use forebay_io::task::{Stop, TaskGroup};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::schedule::{Next, Schedule};
use super::{Staged, Staging, WritebackSettings};
use crate::Volume;

/// Files that are brought in at once: small ones are a round trip each.
pub(super) const AT_ONCE: usize = 8;
/// How long blobs that nothing refers to wait for others, so that one write of the tree makes all of it certain.
const SWEEP_DELAY: Duration = Duration::from_secs(1);
/// One permit of the share, in bytes: a semaphore counts less far than memory goes.
const SHARE_UNIT: u64 = 1024;

/// What became of a look at a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Brought {
    /// Nothing of it is staged any more.
    In,
    /// The same, but it is not at its path yet: that is tried again.
    Bytes,
    /// It is being written: look again then.
    Later(Moment),
}

/// What is to be brought in, and by whom.
#[derive(Debug)]
pub(crate) struct Uploads {
    pub(super) staging: Arc<Staging>,
    pub(super) settings: WritebackSettings,
    pub(super) clock: Clock,
    /// The most of the budget that uploads may hold: writers never wait for them alone.
    share: Arc<Semaphore>,
    share_units: u64,
    schedule: Mutex<Schedule>,
    sweep: Mutex<Option<Moment>>,
    changed: Notify,
    /// Another host has the volume; that was told.
    is_taken_over: Mutex<bool>,
}

impl Uploads {
    pub(crate) fn new(
        staging: Arc<Staging>,
        settings: WritebackSettings,
        clock: Clock,
        budget: &Budget,
    ) -> Arc<Self> {
        let share_units = (budget.ceiling() / 2 / SHARE_UNIT).clamp(1, Semaphore::MAX_PERMITS as u64);
        let share = Arc::new(Semaphore::new(share_units as usize));
        Arc::new(Self {
            staging,
            settings,
            clock,
            share,
            share_units,
            schedule: Mutex::default(),
            sweep: Mutex::default(),
            changed: Notify::new(),
            is_taken_over: Mutex::default(),
        })
    }

    /// Starts to bring in what there is and will be.
    pub(crate) fn start(self: &Arc<Self>, volume: &Arc<Volume>, tasks: &TaskGroup) {
        let now = self.clock.now();
        {
            let mut schedule = self.schedule.lock();
            self.staging.inodes().into_iter().for_each(|ino| schedule.add(ino, now));
        }
        let (own, volume, stop, group) = (self.clone(), Arc::downgrade(volume), tasks.stop(), tasks.clone());
        tasks.spawn("uploads", async move { own.run(volume, stop, group).await });
    }

    /// What was staged for a file is committed, or never will be. It is uploaded if the file stays open for long.
    pub(crate) fn committed(&self, ino: InodeId) {
        if self.staging.settle(ino) {
            self.add(ino, self.settings.open_ms);
        }
    }

    /// Whether a closed file is this one's to seal: one with bytes here, and any while bytes are staged.
    pub(crate) fn brings_in(&self, ino: InodeId) -> bool {
        self.settings.enabled || self.staging.has_ready(ino)
    }

    /// A file that was written was closed; it may be there to be sealed.
    pub(crate) fn closed(&self, ino: InodeId, is_sealed: bool) {
        if is_sealed || self.staging.has_ready(ino) {
            self.add(ino, self.settings.delay_ms);
        }
    }

    fn add(&self, ino: InodeId, delay_ms: u64) {
        self.schedule.lock().add(ino, self.clock.now() + Duration::from_millis(delay_ms));
        self.changed.notify_one();
    }

    /// Failures in a row of one file.
    pub(super) fn failures(&self, ino: InodeId) -> u32 {
        self.schedule.lock().failures(ino)
    }

    /// Whether someone waits for everything.
    pub(super) fn is_hurried(&self) -> bool {
        self.schedule.lock().hurried > 0
    }

    /// Memory for `bytes` on their way, to be had before any lock. Writers that hold all of it and do nothing give theirs
    /// up for it.
    ///
    /// # Errors
    /// When what they hold cannot be brought anywhere.
    pub(super) async fn charge(
        &self,
        volume: &Volume,
        bytes: u64,
    ) -> Result<(Option<OwnedSemaphorePermit>, Permit)> {
        let units = bytes.div_ceil(SHARE_UNIT).clamp(1, self.share_units);
        // It is never closed.
        let share = self.share.clone().acquire_many_owned(units as u32).await.ok();
        Ok((share, volume.charge_write(bytes.min(units * SHARE_UNIT)).await?))
    }

    /// Blobs are there that nothing refers to.
    pub(super) fn sweep_soon(&self) {
        self.sweep.lock().get_or_insert(self.clock.now() + SWEEP_DELAY);
        self.changed.notify_one();
    }

    /// Tells once that another host has the volume.
    pub(super) fn tell_taken_over(&self, error: &Error) {
        if !std::mem::replace(&mut *self.is_taken_over.lock(), true) {
            tracing::warn!(
                %error,
                "the volume is another's: staged bytes are uploaded under keys of their own, so that it can read them"
            );
        }
    }

    async fn run(self: Arc<Self>, volume: Weak<Volume>, stop: Stop, group: TaskGroup) {
        let slots = Arc::new(Semaphore::new(AT_ONCE));
        loop {
            let Some(Ok(slot)) = stop.run_until_cancelled(slots.clone().acquire_owned()).await else {
                return;
            };
            let Some(next) = stop.run_until_cancelled(self.next(&volume)).await else { return };
            let Some(volume) = volume.upgrade() else { return };
            let own = self.clone();
            group.spawn("upload staged", async move {
                own.bring(&volume, next).await;
                drop(slot);
                own.changed.notify_one();
            });
        }
    }

    /// Waits for the next file that is due, and sweeps meanwhile.
    async fn next(&self, volume: &Weak<Volume>) -> InodeId {
        loop {
            let now = self.clock.now();
            let sweep = *self.sweep.lock();
            if sweep.is_some_and(|at| at <= now) {
                self.sweep(volume).await;
                continue;
            }
            let next = self.schedule.lock().next(now);
            let wake = match next {
                Next::File(ino) => return ino,
                Next::Probe => {
                    self.probe(volume).await;
                    continue;
                }
                Next::At(moment) => Some(moment),
                Next::Nothing => None,
            };
            match wake.into_iter().chain(sweep).min() {
                None => self.changed.notified().await,
                Some(moment) => tokio::select! {
                    () = self.changed.notified() => {}
                    () = self.clock.sleep_until(moment) => {}
                },
            }
        }
    }

    /// Asks whether the store is back.
    async fn probe(&self, volume: &Weak<Volume>) {
        let Some(volume) = volume.upgrade() else { return };
        match volume.bucket().check().await {
            Ok(()) => self.schedule.lock().is_back(),
            Err(error) => {
                self.staging.note_error(Some(error.to_string()));
                self.schedule.lock().is_away(self.clock.now());
            }
        }
    }

    /// Deletes what no durable tree refers to.
    async fn sweep(&self, volume: &Weak<Volume>) {
        let Some(volume) = volume.upgrade() else { return };
        *self.sweep.lock() = None;
        if let Err(error) = volume.forget_doomed().await {
            tracing::debug!(%error, "staged bytes that nothing refers to stay for now");
            *self.sweep.lock() = Some(self.clock.now() + SWEEP_DELAY);
        }
    }

    async fn bring(&self, volume: &Arc<Volume>, ino: InodeId) {
        let brought = volume.bring_in(self, ino).await;
        let now = self.clock.now();
        let mut schedule = self.schedule.lock();
        match brought {
            Ok(Brought::In) => {
                schedule.done(ino, None);
                schedule.is_back();
                self.staging.note_error(None);
            }
            Ok(Brought::Bytes) => schedule.failed(ino, false, now),
            Ok(Brought::Later(moment)) => schedule.done(ino, Some(moment)),
            Err(error) => {
                if schedule.failures(ino) == 0 {
                    tracing::warn!(%ino, %error, "staged bytes could not be uploaded yet");
                }
                schedule.failed(ino, error.kind() == ErrorKind::Unavailable, now);
                self.staging.note_error(Some(error.to_string()));
            }
        }
    }

    /// Returns when everything staged under numbers below `end`, as [`Staging::pending`] takes it, is in the bucket, telling
    /// `progress` what is left.
    ///
    /// # Errors
    /// `Unavailable` when uploads fail and none succeeds for as long as `patience`.
    pub(crate) async fn drain(
        &self,
        volume: &Volume,
        (end, patience): (u64, Option<Duration>),
        mut progress: impl FnMut(&Staged),
    ) -> Result<()> {
        let mut changes = self.staging.changes();
        self.schedule.lock().hurry();
        self.changed.notify_one();
        let _hurry = Hurry(self);
        let mut last: Option<(Staged, Moment)> = None;
        loop {
            let left = self.staging.pending(end);
            let now = self.clock.now();
            // Who has patience without end closes the volume: files without staged bytes of their own are sealed, too.
            if left.files == 0 && (patience.is_some() || self.schedule.lock().is_idle()) {
                break;
            }
            let since = match &last {
                Some((before, since)) if before.bytes == left.bytes && before.files == left.files => *since,
                _ => {
                    progress(&left);
                    now
                }
            };
            let late = patience.is_some_and(|patience| now.since(since) > patience);
            if late && let Some(why) = &left.last_error {
                let message = format!("{} staged files are not in the bucket yet: {why}", left.files);
                return Err(Error::new(ErrorKind::Unavailable, message).with_hint(
                    "they are kept and still on their way: see whether the store can be reached",
                ));
            }
            last = Some((left, since));
            tokio::select! {
                // The sender lives as long as this.
                _ = changes.changed() => {}
                () = self.clock.sleep(Duration::from_secs(1)) => {}
            }
        }
        volume.forget_doomed().await
    }
}

/// Someone waits for everything.
struct Hurry<'a>(&'a Uploads);

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.schedule.lock().hurried -= 1;
    }
}
