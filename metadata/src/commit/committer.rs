//! The handle through which everything else reads and changes the tree.

use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::task::{Task, TaskGroup};
use parking_lot::RwLock;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;

use super::gather::{Gathered, Guard, State, Want};
use super::overlay::Overlay;
use super::serial::{Attempt, Serial, closed, late};
use super::view::{Txn, View};
use crate::kv::{Durability, Engine};

/// How the committer batches and what it may hold.
#[derive(Debug, Clone)]
pub struct CommitterSettings {
    /// How long an answered buffered change may wait to become durable. Default 1 s.
    pub flush_interval: Duration,
    /// Transactions whose reads are being fetched; further ones wait with theirs. Default 256.
    pub max_set_aside: usize,
    /// Bytes of changes that make a batch due at once. Default 4 MiB.
    pub max_batch_bytes: usize,
    /// Bytes of changes that may wait behind the batch being written. Default 32 MiB.
    pub max_waiting_bytes: usize,
    /// How long the reads of one run may take before the transaction fails with `Unavailable`, the wait for room among
    /// the changes that wait, and a sync that somebody waits for. Default 30 s.
    pub fetch_deadline: Duration,
    /// How often a transaction may run before it fails with `Bug`: once for every read that depends on one
    /// before it, on an engine whose reads wait. Default 1,000.
    pub max_runs: u32,
    /// Whether changes that nobody waits for are made while it is unknown whether this process still holds the volume.
    /// They become durable if it does and are lost if not. Default false.
    pub changes_while_unsure: bool,
    /// Bytes of recently used values kept in memory where the engine's reads may wait, and with a quarter as much which keys
    /// there are in ranges that are known whole. Default 64 MiB.
    pub hot_bytes: usize,
}

impl Default for CommitterSettings {
    fn default() -> Self {
        Self {
            flush_interval: Duration::from_secs(1),
            max_set_aside: 256,
            max_batch_bytes: 4 << 20,
            max_waiting_bytes: 32 << 20,
            fetch_deadline: Duration::from_secs(30),
            max_runs: 1000,
            changes_while_unsure: false,
            hot_bytes: 64 << 20,
        }
    }
}

/// Runs transactions one after another over an engine; cheap to clone.
///
/// When the engine refuses a batch it is unknown how much of it is stored, and every later change may build on
/// it: from then on every call returns that error, and nothing more is acknowledged. Opening the engine again
/// shows what is there.
#[derive(Clone)]
pub struct Committer(Arc<Shared>);

struct Shared {
    state: Arc<State>,
    serial: Arc<Serial>,
    /// Places for transactions whose reads are being fetched.
    set_aside: Semaphore,
    writer: Mutex<Option<Task<()>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.serial.close();
    }
}

impl Committer {
    /// Starts the task that does all writing to `engine` from now on. It ends with [`Self::close`], or after writing
    /// what is left once every clone is dropped.
    pub fn start(engine: Arc<dyn Engine>, settings: CommitterSettings) -> Self {
        Self::start_guarded(engine, settings, || Ok(()))
    }

    /// As [`Self::start`], asking `guard` before each change is made, and before it is acknowledged as durable,
    /// whether this process still holds the volume. What it refuses gets its error; nothing is poisoned, so
    /// that a lease which lapsed may come back. Reads go on while it says `Unavailable`, and with
    /// [`CommitterSettings::changes_while_unsure`] so do `Buffered` changes; nothing is durable then, and any other change waits
    /// as long as the guard does to [regain](Guard::regain) the volume.
    pub fn start_guarded(engine: Arc<dyn Engine>, settings: CommitterSettings, guard: impl Guard) -> Self {
        // An engine that answers at once needs no second copy of its values.
        let hot_bytes = if engine.get_now(b"\0").is_none() { settings.hot_bytes } else { 0 };
        let state = Arc::new(State {
            engine,
            guard: Box::new(guard),
            overlay: RwLock::new(Overlay::new(hot_bytes)),
            fetch_deadline: settings.fetch_deadline,
            most_runs: settings.max_runs,
            changes_while_unsure: settings.changes_while_unsure,
        });
        let set_aside = Semaphore::new(settings.max_set_aside.max(1));
        let serial = Arc::new(Serial::new(state.clone(), settings));
        let writer = TaskGroup::new("committer").spawn("serial", serial.clone().write_batches());
        Self(Arc::new(Shared { state, serial, set_aside, writer: Mutex::new(Some(writer)) }))
    }

    /// Runs `work` in its turn and applies its changes, all or, when it returns an error or panics, none.
    ///
    /// `work` may run several times (see [`super::Reads`]), each time over the newest state. With `Durable` the
    /// answer comes when its changes and everything it read are durable; with `Buffered` at once, and they
    /// become durable within the flush interval and before any later durable answer. An error of `work` itself
    /// comes at once with either. Where too many changes wait for the engine, it waits until there is room.
    ///
    /// Dropping the future gives up waiting: `work` has then run whole or not at all.
    pub async fn transact<T: Send + 'static>(
        &self,
        durability: Durability,
        work: impl FnMut(&mut Txn<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.transact_until(durability, work, || None).await
    }

    /// As [`Self::transact`], for those who have somebody waiting and can do without.
    ///
    /// # Errors
    /// `Unavailable`, and nothing changed, where there is no room past [`CommitterSettings::fetch_deadline`].
    pub async fn transact_in_time<T: Send + 'static>(
        &self,
        durability: Durability,
        work: impl FnMut(&mut Txn<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.transact_until(durability, work, || Some(Instant::now() + self.0.state.fetch_deadline)).await
    }

    async fn transact_until<T: Send + 'static>(
        &self,
        durability: Durability,
        mut work: impl FnMut(&mut Txn<'_>) -> Result<T> + Send + 'static,
        until: impl Fn() -> Option<Instant>,
    ) -> Result<T> {
        let serial = &self.0.serial;
        let mut gathered: Option<Gathered> = None;
        let mut room_until: Option<Option<Instant>> = None;
        let mut may_regain = true;
        // Bounded by `max_runs` and `fetch_deadline`.
        loop {
            let attempt = match serial.attempt(durability, &mut work, gathered.as_mut()) {
                Err(error) if may_regain && self.is_unsure(&error, durability) => {
                    self.0.state.guard.regain().await?;
                    may_regain = false;
                    continue;
                }
                attempt => attempt?,
            };
            match attempt {
                Attempt::Done(value) => return Ok(value),
                Attempt::Waiting(value, told) => {
                    drop(gathered);
                    let outcome = told.await.map_err(|_| closed())?;
                    return match outcome {
                        Err(error) if may_regain && self.is_unsure(&error, durability) => {
                            self.0.state.guard.regain().await?;
                            // It was held all the time, and what was done stands.
                            self.acknowledge().await.map(|()| value)
                        }
                        outcome => outcome.map(|()| value),
                    };
                }
                Attempt::Missed(wants) => {
                    let _place = self.0.set_aside.acquire().await.map_err(|_| closed())?;
                    gathered.get_or_insert_with(|| Gathered::new(self.0.state.clone())).fetch(wants).await?;
                }
                Attempt::Full => {
                    serial.wait_for_room(*room_until.get_or_insert_with(&until)).await?;
                }
            }
        }
    }

    /// Returns when everything before is durable, whoever has heard of it.
    async fn acknowledge(&self) -> Result<()> {
        let serial = &self.0.serial;
        loop {
            match serial.attempt(Durability::Durable, &mut |_: &mut Txn<'_>| Ok(()), None)? {
                Attempt::Waiting((), told) => return told.await.map_err(|_| closed())?,
                Attempt::Full => serial.wait_for_room(None).await?,
                Attempt::Done(()) | Attempt::Missed(_) => return Err(Error::bug("nothing was asked for")),
            }
        }
    }

    /// Whether a change was refused as nobody knows whether this process still holds the volume.
    fn is_unsure(&self, error: &Error, durability: Durability) -> bool {
        error.kind() == ErrorKind::Unavailable && self.0.state.may_change(durability).is_err()
    }

    /// Runs a read-only closure over the newest state, at once where the engine's reads do not wait. It does
    /// not queue behind transactions, but holds them up while it runs: keep it short.
    pub async fn read<T>(&self, mut work: impl FnMut(&View<'_>) -> Result<T> + Send) -> Result<T> {
        let mut missed = match self.attempt(&mut work, None) {
            Ok(result) => return result,
            Err(missed) => missed,
        };
        let mut gathered = Gathered::new(self.0.state.clone());
        loop {
            gathered.fetch(missed).await?;
            // Bounded by `max_runs`.
            match self.attempt(&mut work, Some(&mut gathered)) {
                Ok(result) => return result,
                Err(more) => missed = more,
            }
        }
    }

    /// Returns when no transaction runs that began before: what one did that went by something beside the tree, as it was before it
    /// changed, is what the next read shows.
    pub(crate) fn pass(&self) {
        self.0.serial.pass();
    }

    /// As [`Self::read`], but `None` where it would have to wait.
    pub fn read_now<T>(&self, mut work: impl FnMut(&View<'_>) -> Result<T>) -> Option<Result<T>> {
        self.attempt(&mut work, None).ok()
    }

    fn attempt<T>(
        &self,
        work: &mut impl FnMut(&View<'_>) -> Result<T>,
        mut gathered: Option<&mut Gathered>,
    ) -> Result<Result<T>, Vec<Want>> {
        let overlay = self.0.state.overlay.read();
        let ready = match gathered.as_deref_mut() {
            Some(gathered) => gathered.begin_run(&overlay),
            None => Ok(()),
        };
        if let Err(error) = overlay.check().and_then(|()| self.0.state.may_read()).and(ready) {
            return Ok(Err(error));
        }
        let view = View::new(self.0.state.engine.as_ref(), &overlay, gathered.as_deref());
        let result = work(&view);
        match view.into_missed() {
            missed if missed.is_empty() => Ok(result),
            missed => Err(missed),
        }
    }

    /// Returns when every change answered before is durable.
    pub async fn sync(&self) -> Result<()> {
        self.transact(Durability::Durable, |_| Ok(())).await
    }

    /// As [`Self::sync`], for those who have somebody waiting.
    ///
    /// # Errors
    /// `Unavailable` past [`CommitterSettings::fetch_deadline`]; the changes are kept and still on their way.
    pub async fn sync_in_time(&self) -> Result<()> {
        tokio::time::timeout(self.0.state.fetch_deadline, self.sync()).await.map_err(|_| late())?
    }

    /// Whether this process surely may act for the volume now.
    pub fn is_sure(&self) -> bool {
        self.expect_sure().is_ok()
    }

    /// Returns once it may, where that is for a renewal of the lease alone, and the reason why not otherwise.
    pub(crate) async fn regain(&self) -> Result<()> {
        match self.expect_sure() {
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                self.0.state.guard.regain().await?;
                self.expect_sure()
            }
            sure => sure,
        }
    }

    /// The same, with the reason why not.
    pub(crate) fn expect_sure(&self) -> Result<()> {
        self.0.state.may_acknowledge()
    }

    /// The engine, for its epoch, limits and snapshots. A snapshot holds what was synced before it was taken
    /// and perhaps more, but whole transactions only.
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.0.state.engine
    }

    /// Makes durable what has run, ends the task and closes the engine. Later calls, and transactions whose reads are
    /// still being fetched, fail with `Unavailable`. Closing twice is no error.
    pub async fn close(&self) -> Result<()> {
        self.0.serial.close();
        if let Some(writer) = self.0.writer.lock().await.take() {
            writer.await?;
        }
        let written = self.0.state.overlay.read().check();
        written.and(self.0.state.engine.close().await)
    }

    /// Number of changed keys laid over the engine.
    #[cfg(test)]
    pub(super) fn overlaid(&self) -> usize {
        self.0.state.overlay.read().len()
    }
}
