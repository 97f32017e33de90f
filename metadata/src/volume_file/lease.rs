//! Holding a lease: a task that renews it, and a cheap question whether it is still held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version};
use forebay_io::clock::{Clock, Moment};
use forebay_io::object::{Bucket, Condition};
use forebay_io::task::{Task, TaskGroup};
use tokio::sync::{Notify, oneshot, watch};

use super::record::VolumeRecord;

/// How a lease is asked for.
#[derive(Debug, Clone)]
pub struct LeaseSettings {
    /// How long the holder's counter must stand still before another may take the lease. Default 15 s. It is
    /// renewed three times as often, which is what it costs in puts.
    pub duration: Duration,
    /// Where others can reach this server, recorded for them.
    pub address: Option<String>,
}

impl Default for LeaseSettings {
    fn default() -> Self {
        Self { duration: Duration::from_secs(15), address: None }
    }
}

/// How a claim stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseState {
    /// It is held, or needs no lease.
    Held,
    /// It could not be renewed in time; nothing may be acknowledged. It is held again when a renewal succeeds,
    /// which proves that nobody took it meanwhile.
    Lapsed,
    /// Another took it. This is final.
    Lost,
}

/// Renewals in a lease.
const RENEWALS: u32 = 3;
/// Tries in a lease once a renewal failed.
const RETRIES: u32 = 12;

/// The object as it was last seen, and this holder's place in it.
pub(super) struct Held {
    pub(super) bucket: Bucket,
    pub(super) record: VolumeRecord,
    pub(super) version: Version,
}

/// A lease that a task renews.
#[derive(Debug)]
pub(super) struct Lease {
    shared: Arc<Shared>,
    /// Sent to release the lease; dropped to let it run out.
    stop: Option<oneshot::Sender<()>>,
    task: Task<Result<()>>,
}

#[derive(Debug)]
struct Shared {
    clock: Clock,
    origin: Moment,
    /// Milliseconds after `origin` until which the last renewal holds.
    valid_ms: AtomicU64,
    duration: Duration,
    state: watch::Sender<LeaseState>,
    /// The volume is being closed: the next renewal says so.
    ending: AtomicBool,
    /// Renewals that have begun, and how many of them had when the last one ended.
    begun: AtomicU64,
    ended: watch::Sender<u64>,
    /// Somebody waits for the next one.
    wanted: Notify,
}

impl Shared {
    fn check(&self) -> Result<()> {
        if *self.state.borrow() == LeaseState::Lost {
            return Err(Error::new(ErrorKind::Conflict, "another mount took this volume over")
                .with_hint("unmount this one"));
        }
        match self.clock.now() < self.valid_until() {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::Unavailable,
                "the volume's lease could not be renewed: the bucket does not answer",
            )
            .with_hint(
                "check that its store can be reached from this host, as `forebay doctor` does, and try again",
            )),
        }
    }

    fn valid_until(&self) -> Moment {
        self.origin + Duration::from_millis(self.valid_ms.load(Ordering::Acquire))
    }

    /// A renewal succeeded that was sent at `sent`. Others count from when they see it, which is later.
    fn extend(&self, sent: Moment) {
        let valid = (sent + self.duration).since(self.origin);
        self.valid_ms.store(valid.as_millis() as u64, Ordering::Release);
        self.turn(LeaseState::Held);
    }

    fn turn(&self, to: LeaseState) {
        self.state.send_if_modified(|state| {
            let turns = *state != to && *state != LeaseState::Lost;
            if turns {
                match &to {
                    LeaseState::Lapsed => {
                        tracing::warn!("the volume's lease ran out: nothing becomes durable for now");
                    }
                    LeaseState::Held => tracing::info!("the volume's lease is held again"),
                    LeaseState::Lost => {}
                }
                *state = to.clone();
            }
            turns
        });
    }
}

impl Lease {
    /// Begins renewing a lease whose claim was sent at `sent`.
    pub(super) fn keep(held: Held, duration: Duration, clock: &Clock, sent: Moment) -> Self {
        let (clock, state) = (clock.clone(), watch::Sender::new(LeaseState::Held));
        let (begun, ended, wanted) = (AtomicU64::new(0), watch::Sender::new(0), Notify::new());
        let (valid_ms, ending) = (AtomicU64::new(0), AtomicBool::new(false));
        let shared = Shared { clock, origin: sent, valid_ms, duration, state, ending, begun, ended, wanted };
        let shared = Arc::new(shared);
        shared.extend(sent);
        let (stop, stopped) = oneshot::channel();
        let renewing = renew_until_stopped(held, shared.clone(), stopped);
        let task = TaskGroup::new("volume").spawn("lease", renewing);
        Self { shared, stop: Some(stop), task }
    }

    /// Whether the lease is held at this moment.
    pub(super) fn check(&self) -> Result<()> {
        self.shared.check()
    }

    /// Waits until the lease is held: for one renewal that begins from now on, and no longer than a lease lasts. Where the store
    /// has just come back, nobody is to hear that it is away.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub(super) fn regain(&self) -> impl Future<Output = Result<()>> + Send + use<> {
        let shared = self.shared.clone();
        async move {
            let mut ended = shared.ended.subscribe();
            let wanted = shared.begun.load(Ordering::Acquire) + 1;
            let until = shared.clock.now() + shared.duration;
            loop {
                let outcome = shared.check();
                let is_final = |error: &Error| error.kind() != ErrorKind::Unavailable;
                if outcome.as_ref().err().is_none_or(is_final) || *ended.borrow_and_update() >= wanted {
                    return outcome;
                }
                shared.wanted.notify_one();
                tokio::select! {
                    _ = ended.changed() => {}
                    () = shared.clock.sleep_until(until) => return shared.check(),
                }
            }
        }
    }

    pub(super) fn watch(&self) -> watch::Receiver<LeaseState> {
        self.shared.state.subscribe()
    }

    /// Has renewals say that the lease is about to be given back.
    pub(super) fn say_ending(&self) {
        self.shared.ending.store(true, Ordering::Release);
    }

    /// Gives the lease back, so that the next one has it at once.
    pub(super) async fn release(mut self) -> Result<()> {
        if let Some(stop) = self.stop.take() {
            // The task ended already when it does not listen, and says why below.
            let _ = stop.send(());
        }
        self.task.await?
    }
}

/// Renews until told to release the lease, until nobody wants it any more, or until it is lost.
async fn renew_until_stopped(
    mut held: Held,
    shared: Arc<Shared>,
    mut stopped: oneshot::Receiver<()>,
) -> Result<()> {
    let mut pause = shared.duration / RENEWALS;
    loop {
        tokio::select! {
            biased;
            stop = &mut stopped => {
                return if stop.is_ok() { held.release().await } else { Ok(()) };
            }
            () = shared.clock.sleep(pause) => {}
            () = shared.wanted.notified() => {}
        }
        let sent = shared.clock.now();
        let number = shared.begun.fetch_add(1, Ordering::AcqRel) + 1;
        pause = match renew(&mut held, &shared).await {
            Ok(()) => {
                shared.extend(sent);
                shared.duration / RENEWALS
            }
            Err(error) if error.kind() == ErrorKind::Conflict => {
                tracing::error!(%error, "the volume's lease is lost");
                shared.turn(LeaseState::Lost);
                shared.ended.send_replace(number);
                return Ok(());
            }
            Err(error) => {
                tracing::warn!(%error, "the volume's lease could not be renewed, trying again");
                shared.duration / RETRIES
            }
        };
        shared.ended.send_replace(number);
    }
}

/// One renewal. A put that outlasts the lease counts as failed, and the lease lapses meanwhile.
async fn renew(held: &mut Held, shared: &Shared) -> Result<()> {
    let until = shared.clock.now() + shared.duration;
    let renewing = held.renew(shared.ending.load(Ordering::Acquire));
    tokio::pin!(renewing);
    tokio::select! {
        renewed = &mut renewing => return renewed,
        () = shared.clock.sleep_until(shared.valid_until()) => shared.turn(LeaseState::Lapsed),
    }
    tokio::select! {
        renewed = renewing => renewed,
        () = shared.clock.sleep_until(until) => {
            Err(Error::new(ErrorKind::Unavailable, "the put of a renewal was not answered"))
        }
    }
}

impl Held {
    /// Raises the counter, and says whether the volume is being closed.
    ///
    /// # Errors
    /// `Conflict` when another holds the lease; anything else may pass.
    async fn renew(&mut self, ending: bool) -> Result<()> {
        let mut next = self.record.clone();
        if let Some(lease) = &mut next.lease {
            lease.renewed += 1;
            lease.ending = ending;
        }
        self.replace(next).await
    }

    async fn release(mut self) -> Result<()> {
        let next = VolumeRecord { lease: None, ..self.record.clone() };
        self.replace(next).await
    }

    /// Puts `next` in place of what this holder put last. When that is not what is there, it may have been an
    /// earlier put of this holder's whose answer was lost: then it tries once more over that one.
    async fn replace(&mut self, next: VolumeRecord) -> Result<()> {
        match self.put(&next).await {
            Err(error) if error.kind() == ErrorKind::Conflict => {}
            other => return other,
        }
        let key = ObjectKey::new(VolumeRecord::KEY);
        let superseded = |by: &str| Error::new(ErrorKind::Conflict, format!("the volume is held by {by}"));
        let (text, info) = match self.bucket.get_whole_at_most(&key, VolumeRecord::MAX_BYTES).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(superseded("nobody: its file is gone"));
            }
            other => other?,
        };
        let found = VolumeRecord::decode(&text)?;
        if found == next {
            (self.record, self.version) = (next, info.version);
            return Ok(());
        }
        let holder = |record: &VolumeRecord| record.lease.as_ref().map(|lease| lease.holder.clone());
        if found.epoch != self.record.epoch || holder(&found) != holder(&self.record) {
            return Err(superseded(holder(&found).as_deref().unwrap_or("nobody")));
        }
        self.version = info.version;
        self.put(&next).await
    }

    async fn put(&mut self, next: &VolumeRecord) -> Result<()> {
        let key = ObjectKey::new(VolumeRecord::KEY);
        let put = self.bucket.put(&key, next.encode(), Condition::IfVersion(self.version.clone())).await?;
        (self.record, self.version) = (next.clone(), put.version);
        Ok(())
    }
}
