//! The task that runs closures one after another and writes their changes, batch after batch.
//!
//! While one batch is being written, closures go on running into the next. A closure whose reads must wait is
//! set aside, its reads are fetched beside the others, and it runs again in front of the queue.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{Error, Result};
use forebay_io::task::{Task, TaskGroup};
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::committer::CommitterSettings;
use super::gather::{Gathered, State};
use super::job::{Job, Ran};
use super::overlay::BatchNumber;
use crate::kv::{Batch, Durability, Limits};

/// What arrives in the queue.
pub(super) enum Message {
    Run(Box<dyn Job>),
    /// Take no more, write what there is, end.
    Close,
}

/// Messages taken from the queue before the loop looks at anything else.
const TAKEN_AT_ONCE: usize = 256;

/// The next batch, or the one being written.
#[derive(Default)]
struct Forming {
    keys: BTreeSet<Bytes>,
    bytes: usize,
    /// Who is answered once it is durable.
    waiting: Vec<Box<dyn Job>>,
    /// When its first change came.
    since: Option<Instant>,
    /// Somebody waits for it, or it has waited long enough.
    urgent: bool,
}

impl Forming {
    fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.waiting.is_empty()
    }
}

struct Writing {
    batch: Forming,
    write: BoxFuture<'static, Result<()>>,
}

/// A closure set aside, with what was fetched for it or why that failed.
type SetAside = (Box<dyn Job>, Gathered, Result<()>);

/// The serial task's state.
pub(super) struct Serial {
    state: Arc<State>,
    settings: CommitterSettings,
    limits: Limits,
    queue: mpsc::Receiver<Message>,
    /// The queue is closed and empty.
    drained: bool,
    forming: Forming,
    /// Number of the batch that is forming.
    number: BatchNumber,
    writing: Option<Writing>,
    set_aside: FuturesUnordered<Task<SetAside>>,
    tasks: TaskGroup,
}

impl Serial {
    pub(super) fn new(
        state: Arc<State>,
        settings: CommitterSettings,
        queue: mpsc::Receiver<Message>,
        tasks: TaskGroup,
    ) -> Self {
        Self {
            limits: state.engine.limits(),
            state,
            settings,
            queue,
            drained: false,
            forming: Forming::default(),
            number: 1,
            writing: None,
            set_aside: FuturesUnordered::new(),
            tasks,
        }
    }

    /// Runs until the queue is closed and everything taken from it is answered and durable.
    pub(super) async fn run(mut self) {
        let mut messages = Vec::with_capacity(TAKEN_AT_ONCE);
        loop {
            self.begin_write_if_due();
            if self.is_finished() {
                return;
            }
            let (due, resting, may_take) = (self.due(), self.is_resting(), self.may_take());
            tokio::select! {
                biased;
                written = written(&mut self.writing) => self.end_write(written),
                Some(fetched) = self.set_aside.next() => self.resume(fetched),
                taken = self.queue.recv_many(&mut messages, TAKEN_AT_ONCE), if may_take => {
                    self.drained = taken == 0;
                    messages.drain(..).for_each(|message| self.take(message));
                }
                () = tokio::time::sleep_until(due), if resting => self.forming.urgent = true,
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Close => self.queue.close(),
            Message::Run(job) => self.attempt(job, None),
        }
    }

    fn attempt(&mut self, mut job: Box<dyn Job>, mut gathered: Option<Gathered>) {
        match job.run(&self.state, self.limits, gathered.as_mut()) {
            Ran::Refused(error) => job.answer(Err(error)),
            Ran::Done(changes) => {
                self.apply(changes);
                // Let go only now: the overlay may drop what this closure read.
                drop(gathered);
                match job.durability() {
                    Durability::Buffered => job.answer(Ok(())),
                    Durability::Durable => {
                        self.forming.waiting.push(job);
                        self.forming.urgent = true;
                    }
                }
            }
            Ran::Missed(wants) => {
                let mut gathered = gathered.unwrap_or_else(|| Gathered::new(self.state.clone()));
                let fetch = async move {
                    let fetched = gathered.fetch(wants).await;
                    (job, gathered, fetched)
                };
                self.set_aside.push(self.tasks.spawn("fetch", fetch));
            }
        }
    }

    fn apply(&mut self, changes: BTreeMap<Bytes, Option<Bytes>>) {
        if changes.is_empty() {
            return;
        }
        for (key, value) in &changes {
            self.forming.bytes += key.len() + value.as_ref().map_or(0, Bytes::len);
            self.forming.keys.insert(key.clone());
        }
        self.forming.since.get_or_insert_with(Instant::now);
        self.state.overlay.write().apply(self.number, changes);
    }

    fn resume(&mut self, fetched: Result<SetAside>) {
        match fetched {
            Ok((job, gathered, Ok(()))) => self.attempt(job, Some(gathered)),
            Ok((job, _, Err(error))) => job.answer(Err(error)),
            // The job went with its task, and its caller learns that from the dropped reply.
            Err(error) => tracing::error!(%error, "a fetch for a transaction ended early"),
        }
    }

    fn begin_write_if_due(&mut self) {
        let large = self.forming.bytes >= self.settings.max_batch_bytes;
        let due = self.forming.urgent || large || self.drained;
        if self.writing.is_some() || self.forming.is_empty() || !due {
            return;
        }
        let forming = std::mem::take(&mut self.forming);
        if forming.keys.is_empty() {
            // Everything before is durable already.
            let outcome = self.state.overlay.read().check();
            return answer(forming.waiting, &outcome.and_then(|()| self.state.may_change()));
        }
        self.number += 1;
        let mut batch = Batch::default();
        let overlay = self.state.overlay.read();
        forming.keys.iter().for_each(|key| batch.change(key.clone(), overlay.changed(key)));
        drop(overlay);
        let engine = self.state.engine.clone();
        let write = Box::pin(async move { engine.write(batch, Durability::Durable).await });
        self.writing = Some(Writing { batch: forming, write });
    }

    fn end_write(&mut self, outcome: Result<()>) {
        let Some(writing) = self.writing.take() else { return };
        let mut overlay = self.state.overlay.write();
        match &outcome {
            Ok(()) => overlay.commit(self.number - 1, writing.batch.keys),
            Err(error) => {
                tracing::error!(%error, "a batch could not be written: this tree takes no more changes");
                overlay.fail(error);
            }
        }
        drop(overlay);
        if outcome.is_err() {
            // What formed meanwhile builds on what was lost.
            answer(std::mem::take(&mut self.forming).waiting, &outcome);
        }
        answer(writing.batch.waiting, &outcome.and_then(|()| self.state.may_change()));
    }

    fn may_take(&self) -> bool {
        !self.drained
            && self.forming.bytes < self.settings.max_waiting_bytes
            && self.set_aside.len() < self.settings.max_set_aside
    }

    /// Only time can make the forming batch due.
    fn is_resting(&self) -> bool {
        self.writing.is_none() && self.forming.since.is_some() && !self.forming.urgent
    }

    fn due(&self) -> Instant {
        self.forming.since.unwrap_or_else(Instant::now) + self.settings.flush_interval
    }

    fn is_finished(&self) -> bool {
        self.drained && self.forming.is_empty() && self.writing.is_none() && self.set_aside.is_empty()
    }
}

/// Waits for the batch that is being written; for ever when there is none.
async fn written(writing: &mut Option<Writing>) -> Result<()> {
    match writing {
        Some(writing) => (&mut writing.write).await,
        None => std::future::pending().await,
    }
}

fn answer(waiting: Vec<Box<dyn Job>>, outcome: &Result<()>) {
    for job in waiting {
        job.answer(outcome.as_ref().copied().map_err(Error::duplicate));
    }
}
