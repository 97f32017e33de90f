//! Where transactions take their turn, and the task that writes what they changed, batch after batch.
//!
//! A closure runs where its caller is, one at a time behind a lock, so that one whose reads are in memory is answered
//! without any switch of threads. While a batch is being written, closures go on running into the next.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::committer::CommitterSettings;
use super::gather::{Gathered, State, Want};
use super::overlay::BatchNumber;
use super::run::{Ran, run};
use super::view::{Changes, Txn};
use crate::kv::{Batch, Durability, Limits};

/// Told once a batch is durable, or why it is not.
type Waiting = oneshot::Sender<Result<()>>;

/// The next batch.
#[derive(Default)]
struct Forming {
    keys: BTreeSet<Bytes>,
    bytes: usize,
    /// Who is answered once it is durable: one for each caller that waits.
    waiting: Vec<Waiting>,
    /// When its first change came.
    since: Option<Instant>,
    /// Somebody waits for it, or it has waited long enough.
    urgent: bool,
}

/// The batches there were and the one that forms.
struct Turn {
    forming: Forming,
    /// Number of the batch that is forming.
    number: BatchNumber,
    /// Nothing more is taken.
    closed: bool,
}

/// What a caller's attempt came to.
pub(super) enum Attempt<T> {
    Done(T),
    /// It ran; its changes are durable once this is told so.
    Waiting(T, oneshot::Receiver<Result<()>>),
    /// Its reads have to be fetched, then it may try again.
    Missed(Vec<Want>),
    /// Too much waits for the engine; it may try again when there is room.
    Full,
}

/// When the writer has something to do.
enum Due {
    Now,
    At(Instant),
    /// Not before something changes.
    Later,
    /// Never again.
    Ended,
}

/// The serial order of one committer.
pub(super) struct Serial {
    pub(super) state: Arc<State>,
    settings: CommitterSettings,
    limits: Limits,
    turn: Mutex<Turn>,
    /// The forming batch may be due earlier than before.
    changed: Notify,
    /// A batch has been taken to be written, so that there is room in the next, or nothing is taken any more.
    room: Notify,
}

impl Serial {
    pub(super) fn new(state: Arc<State>, settings: CommitterSettings) -> Self {
        Self {
            limits: state.engine.limits(),
            state,
            settings,
            turn: Mutex::new(Turn { forming: Forming::default(), number: 1, closed: false }),
            changed: Notify::new(),
            room: Notify::new(),
        }
    }

    /// Runs `work` in its turn if there is room for its changes.
    ///
    /// # Errors
    /// That of `work`; `Unavailable` once closed.
    pub(super) fn attempt<T>(
        &self,
        durability: Durability,
        work: &mut impl FnMut(&mut Txn<'_>) -> Result<T>,
        gathered: Option<&mut Gathered>,
    ) -> Result<Attempt<T>> {
        let mut turn = self.turn.lock();
        if turn.closed {
            return Err(closed());
        }
        if turn.forming.bytes >= self.settings.max_waiting_bytes {
            // Who could change nothing does not wait for room either.
            self.state.overlay.read().check().and_then(|()| self.state.may_change(durability))?;
            return Ok(Attempt::Full);
        }
        let (value, changes) = match run(work, &self.state, durability, self.limits, gathered) {
            Ran::Refused(error) => return Err(error),
            Ran::Missed(wants) => return Ok(Attempt::Missed(wants)),
            Ran::Done(value, changes) => (value, changes),
        };
        let was_due = self.is_due(&turn);
        let rested = turn.forming.since.is_none();
        self.apply(&mut turn, changes);
        let attempt = match durability {
            Durability::Buffered => Attempt::Done(value),
            Durability::Durable => {
                let (tell, told) = oneshot::channel();
                turn.forming.waiting.push(tell);
                turn.forming.urgent = true;
                Attempt::Waiting(value, told)
            }
        };
        let earlier = rested && turn.forming.since.is_some() || !was_due && self.is_due(&turn);
        drop(turn);
        if earlier {
            self.changed.notify_one();
        }
        Ok(attempt)
    }

    /// Returns when no transaction runs that began before.
    pub(super) fn pass(&self) {
        drop(self.turn.lock());
    }

    fn apply(&self, turn: &mut Turn, changes: Changes) {
        let Changes { changed, absent, wholes } = changes;
        let forming = &mut turn.forming;
        for (key, value) in &changed {
            forming.bytes += key.len() + value.as_ref().map_or(0, Bytes::len);
            forming.keys.insert(key.clone());
        }
        if !changed.is_empty() {
            forming.since.get_or_insert_with(Instant::now);
        }
        let mut overlay = self.state.overlay.write();
        absent.into_iter().for_each(|key| overlay.remember_absent(key));
        wholes.into_iter().for_each(|whole| overlay.remember_whole(whole));
        overlay.apply(turn.number, changed);
    }

    /// Returns when there may be room for further changes, or they may be refused by now: the right to the volume goes
    /// without telling anybody, and is asked for again every flush interval.
    ///
    /// # Errors
    /// `Unavailable` after `until`, where that is said.
    pub(super) async fn wait_for_room(&self, until: Option<Instant>) -> Result<()> {
        let now = Instant::now();
        if until.is_some_and(|until| now >= until) {
            return Err(late().with_hint("see whether the store can be reached: this change was not made"));
        }
        let freed = self.room.notified();
        tokio::pin!(freed);
        freed.as_mut().enable();
        let full = {
            let turn = self.turn.lock();
            turn.forming.bytes >= self.settings.max_waiting_bytes && !turn.closed
        };
        if full {
            // Either way the caller tries again.
            let look_again = now + self.settings.flush_interval;
            let _ = tokio::time::timeout_at(until.unwrap_or(look_again).min(look_again), freed).await;
        }
        Ok(())
    }

    /// Takes no more; what has run is written and then the writer ends.
    pub(super) fn close(&self) {
        self.turn.lock().closed = true;
        self.changed.notify_one();
        self.room.notify_waiters();
    }

    /// Writes batches until everything is closed and durable.
    pub(super) async fn write_batches(self: Arc<Self>) {
        loop {
            match self.due() {
                Due::Ended => return,
                Due::Now => self.write_batch().await,
                Due::Later => self.changed.notified().await,
                Due::At(instant) => {
                    tokio::select! {
                        () = self.changed.notified() => {}
                        () = tokio::time::sleep_until(instant) => self.turn.lock().forming.urgent = true,
                    }
                }
            }
        }
    }

    fn is_due(&self, turn: &Turn) -> bool {
        turn.forming.urgent || turn.forming.bytes >= self.settings.max_batch_bytes
    }

    fn due(&self) -> Due {
        let turn = self.turn.lock();
        let is_empty = turn.forming.keys.is_empty() && turn.forming.waiting.is_empty();
        match turn.forming.since {
            _ if is_empty && turn.closed => Due::Ended,
            _ if !is_empty && (turn.closed || self.is_due(&turn)) => Due::Now,
            Some(since) => Due::At(since + self.settings.flush_interval),
            None => Due::Later,
        }
    }

    async fn write_batch(&self) {
        let Some((number, batch, mut forming)) = self.take() else { return };
        let outcome = self.write_once_there_is_room(batch, &mut forming.waiting).await;
        let mut overlay = self.state.overlay.write();
        match &outcome {
            Ok(()) => overlay.commit(number, forming.keys),
            Err(error) => {
                tracing::error!(%error, "a batch could not be written: this tree takes no more changes");
                overlay.fail(error);
            }
        }
        drop(overlay);
        if outcome.is_err() {
            // What formed meanwhile builds on what was lost. What comes now is refused.
            answer(std::mem::take(&mut self.turn.lock().forming).waiting, &outcome);
            self.room.notify_waiters();
        }
        answer(forming.waiting, &outcome.and_then(|()| self.state.may_acknowledge()));
    }

    /// A disk that is full takes the batch again once it is not, so that nothing is lost: until then whoever waits for it to
    /// be durable is told, and changes form the next one. Ends with the error as the tree is closed.
    async fn write_once_there_is_room(&self, batch: Batch, waiting: &mut Vec<Waiting>) -> Result<()> {
        let mut was_told = false;
        loop {
            let outcome = self.state.engine.write(batch.clone(), Durability::Durable).await;
            let Err(error) = &outcome else { return outcome };
            if error.kind() != ErrorKind::NoSpace || self.turn.lock().closed {
                return outcome;
            }
            if !was_told {
                was_told = true;
                tracing::error!(%error, "changes of the tree wait for room on the disk that it lies on");
            }
            answer(std::mem::take(waiting), &outcome);
            answer(std::mem::take(&mut self.turn.lock().forming.waiting), &outcome);
            let _ = tokio::time::timeout(self.settings.flush_interval, self.changed.notified()).await;
        }
    }

    /// The batch that formed; `None`, with those answered who wait, where nothing has changed since the last one.
    fn take(&self) -> Option<(BatchNumber, Batch, Forming)> {
        let mut turn = self.turn.lock();
        let forming = std::mem::take(&mut turn.forming);
        if forming.keys.is_empty() {
            let outcome = self.state.overlay.read().check();
            drop(turn);
            answer(forming.waiting, &outcome.and_then(|()| self.state.may_acknowledge()));
            return None;
        }
        let number = turn.number;
        turn.number += 1;
        // Under the lock: values of the next batch must not slip into this one.
        let mut batch = Batch::default();
        let overlay = self.state.overlay.read();
        for key in &forming.keys {
            if let Some(value) = overlay.to_write(key) {
                batch.change(key.clone(), value);
            }
        }
        drop(overlay);
        drop(turn);
        self.room.notify_waiters();
        Some((number, batch, forming))
    }
}

fn answer(waiting: Vec<Waiting>, outcome: &Result<()>) {
    for tell in waiting {
        // A caller that went away does not want the answer; its change stands all the same.
        let _ = tell.send(outcome.as_ref().copied().map_err(Error::duplicate));
    }
}

/// The store did not take changes within the deadline.
pub(super) fn late() -> Error {
    Error::new(ErrorKind::Unavailable, "the store of the tree did not take changes in time")
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "the tree was closed")
}
