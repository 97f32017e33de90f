//! Injects faults, for tests: scripted (the Nth request of a kind) or random from a seed; holds a request back.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::StreamExt;
use object_store::Result;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::body::map_body;
use crate::object::OperationKind;
use crate::object::error::Fault;
use crate::object::request::{Reply, Request, Service, Shared};
use crate::rng::Rng;

/// What goes wrong with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultMode {
    /// The request never reaches the store.
    Before,
    /// The store carries the request out and the reply is lost.
    LoseReply,
    /// The store carries the request out, the reply is lost, and no later request reaches the store: it is down.
    LoseReplyThenDown,
    /// The body of a GET breaks after this many bytes; other requests lose their reply.
    BreakBody(u64),
    /// The store says that the condition does not hold, without having looked.
    Refuse,
    /// The store carries the request out and says that the condition does not hold: something on the way sent it twice.
    DoAndRefuse,
    /// The store carries the request out and says that what it is about is not there: as when a completion is sent twice.
    DoAndMiss,
    /// The store says that it is done, and nothing was. For requests whose answer says no more than that.
    Skip,
    /// The client panics, as one may that does not understand an answer. The store does nothing.
    Panic,
    /// The store says that this is not allowed.
    Deny,
    /// No reply ever comes: only the caller's patience ends it. The store does nothing.
    Hang,
}

/// The script of what goes wrong; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Faults(Arc<Mutex<Script>>);

#[derive(Debug, Default)]
struct Script {
    /// Requests seen since the last entry for that kind was made, and the entries left.
    scripted: BTreeMap<OperationKind, (u64, Vec<(u64, FaultMode)>)>,
    /// What must be in the key of a request for it to count among those; empty for all.
    part: String,
    random: Option<(Rng, f64)>,
    down: bool,
    /// How many requests are let through before the process is cut off from the store.
    cut: Option<u64>,
    injected: u64,
    /// How many requests are let through before one is held back.
    gate: Option<(u64, Gate)>,
}

/// Holds one request back, so that a test can do something else at that moment; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<Latch>);

#[derive(Debug, Default)]
struct Latch {
    reached: Notify,
    opened: Notify,
}

impl Gate {
    /// Waits until the request is there.
    pub async fn reached(&self) {
        self.0.reached.notified().await;
    }

    /// Lets it through.
    pub fn open(&self) {
        self.0.opened.notify_one();
    }
}

impl Faults {
    /// Nothing goes wrong until told.
    pub fn new() -> Self {
        Self::default()
    }

    /// Every request fails with `probability`, half of them before and half after the store did its work.
    pub fn random(seed: u64, probability: f64) -> Self {
        let faults = Self::default();
        faults.0.lock().random = Some((Rng::seeded(seed), probability));
        faults
    }

    /// The `nth` request of `kind` from now (1 is the next one) goes wrong as `mode` says.
    pub fn script(&self, kind: OperationKind, nth: u64, mode: FaultMode) -> &Self {
        let mut script = self.0.lock();
        let (seen, entries) = script.scripted.entry(kind).or_default();
        entries.push((*seen + nth, mode));
        drop(script);
        self
    }

    /// What is scripted is of requests with `part` in their keys: others are neither counted nor go wrong.
    pub fn of_keys_with(&self, part: &str) -> &Self {
        part.clone_into(&mut self.0.lock().part);
        self
    }

    /// How many requests of `kind` came so far, of those that count.
    pub fn seen(&self, kind: OperationKind) -> u64 {
        self.0.lock().scripted.get(&kind).map_or(0, |(seen, _)| *seen)
    }

    /// The `nth` request of any kind from now (1 is the next one) waits until the gate is opened.
    pub fn gate(&self, nth: u64) -> Gate {
        let gate = Gate::default();
        self.0.lock().gate = Some((nth, gate.clone()));
        gate
    }

    fn due_gate(&self) -> Option<Gate> {
        let mut script = self.0.lock();
        let (left, _) = script.gate.as_mut()?;
        *left = left.saturating_sub(1);
        script.gate.take_if(|(left, _)| *left == 0).map(|(_, gate)| gate)
    }

    /// The `nth` request of any kind from now (1 is the next one) is carried out and loses its reply, and no later one
    /// reaches the store: as when the process is killed then.
    pub fn cut_off(&self, nth: u64) -> &Self {
        self.0.lock().cut = Some(nth);
        self
    }

    /// While down, every request fails before it reaches the store.
    pub fn set_down(&self, down: bool) {
        self.0.lock().down = down;
    }

    /// Nothing goes wrong any more.
    pub fn clear(&self) {
        let mut script = self.0.lock();
        *script = Script { injected: script.injected, ..Script::default() };
    }

    /// Faults injected so far.
    pub fn injected(&self) -> u64 {
        self.0.lock().injected
    }

    fn next(&self, kind: OperationKind, subject: impl FnOnce() -> String) -> Option<FaultMode> {
        let mut script = self.0.lock();
        let counts = script.part.is_empty() || subject().contains(&script.part);
        let (seen, entries) = script.scripted.entry(kind).or_default();
        *seen += u64::from(counts);
        let due = entries.iter().position(|(nth, _)| counts && nth == seen);
        let due = due.map(|index| entries.remove(index).1);
        let random = script.random.as_ref().and_then(|(rng, probability)| {
            let mode =
                if rng.chance(0.5) { FaultMode::Before } else { FaultMode::BreakBody(rng.below(4096)) };
            rng.chance(*probability).then_some(mode)
        });
        let cut = script.cut.as_mut().and_then(|left| {
            *left = left.checked_sub(1)?;
            (*left == 0).then_some(FaultMode::LoseReplyThenDown)
        });
        let mode = if script.down { Some(FaultMode::Before) } else { cut.or(due).or(random) };
        script.down |= mode == Some(FaultMode::LoseReplyThenDown);
        script.injected += u64::from(mode.is_some());
        mode
    }
}

#[derive(Debug)]
pub(in crate::object) struct Failing {
    pub(in crate::object) next: Shared,
    pub(in crate::object) faults: Faults,
}

#[async_trait]
impl Service for Failing {
    async fn call(&self, request: Request) -> Result<Reply> {
        let kind = request.kind();
        if let Some(Gate(latch)) = self.faults.due_gate() {
            latch.reached.notify_one();
            latch.opened.notified().await;
        }
        match self.faults.next(kind, || request.subject()) {
            None => self.next.call(request).await,
            Some(FaultMode::Before) => Err(Fault::Injected("the store cannot be reached").into()),
            Some(FaultMode::Hang) => std::future::pending().await,
            Some(FaultMode::Refuse) => Err(refused(&request)),
            Some(FaultMode::Skip) => Ok(Reply::Done),
            Some(FaultMode::Panic) => panic!("a test said so"),
            Some(FaultMode::Deny) => {
                let (path, source) = (request.subject(), "a test said so".into());
                Err(object_store::Error::PermissionDenied { path, source })
            }
            Some(FaultMode::DoAndRefuse) => {
                let refused = refused(&request);
                drop(self.next.call(request).await);
                Err(refused)
            }
            Some(FaultMode::DoAndMiss) => {
                let (path, source) = (request.subject(), "a test said so".into());
                drop(self.next.call(request).await);
                Err(object_store::Error::NotFound { path, source })
            }
            Some(FaultMode::BreakBody(after)) if kind == OperationKind::Get => {
                Ok(map_body(self.next.call(request).await?, |body| break_after(body, after)))
            }
            Some(FaultMode::LoseReply | FaultMode::LoseReplyThenDown | FaultMode::BreakBody(_)) => {
                // A refusal is lost just as a success is.
                drop(self.next.call(request).await);
                Err(Fault::Injected("the reply was lost").into())
            }
        }
    }
}

fn refused(request: &Request) -> object_store::Error {
    object_store::Error::Precondition { path: request.subject(), source: "a test said so".into() }
}

fn break_after(body: super::body::Body, after: u64) -> super::body::Body {
    let broken = futures::stream::unfold((body, Some(after)), |(mut body, left)| async move {
        let left = left?;
        if left == 0 {
            return Some((Err(Fault::Injected("the body broke").into()), (body, None)));
        }
        match body.next().await? {
            Ok(mut bytes) => {
                bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                let left = left - bytes.len() as u64;
                Some((Ok(bytes), (body, Some(left))))
            }
            Err(error) => Some((Err(error), (body, None))),
        }
    });
    broken.boxed()
}
