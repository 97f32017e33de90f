//! A closure waiting for its turn, and whoever waits for its answer.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use forebay_core::{Error, Result};
use tokio::sync::oneshot;

use super::gather::{Gathered, State, Want};
use super::view::{Txn, View};
use crate::kv::{Durability, Limits};

/// What a run of a closure came to.
pub(super) enum Ran {
    /// It ended well, with these changes; its value is kept for the answer.
    Done(BTreeMap<Bytes, Option<Bytes>>),
    /// It read what is not in memory.
    Missed(Vec<Want>),
    /// It ended with an error, or panicked; nothing of it stays.
    Refused(Error),
}

/// A closure of whatever type, as the serial task handles it.
pub(super) trait Job: Send {
    fn durability(&self) -> Durability;

    /// Runs the closure once over the newest state.
    fn run(&mut self, state: &State, limits: Limits, gathered: Option<&mut Gathered>) -> Ran;

    /// Sends the kept value, or the error instead. Nobody may be waiting any more.
    fn answer(self: Box<Self>, outcome: Result<()>);
}

/// The one implementation.
pub(super) struct Call<T, F> {
    pub(super) work: F,
    pub(super) durability: Durability,
    pub(super) value: Option<T>,
    pub(super) reply: oneshot::Sender<Result<T>>,
}

impl<T, F> Job for Call<T, F>
where
    T: Send + 'static,
    F: FnMut(&mut Txn<'_>) -> Result<T> + Send + 'static,
{
    fn durability(&self) -> Durability {
        self.durability
    }

    fn run(&mut self, state: &State, limits: Limits, mut gathered: Option<&mut Gathered>) -> Ran {
        let overlay = state.overlay.read();
        let ready = match gathered.as_deref_mut() {
            Some(gathered) => gathered.begin_run(&overlay),
            None => Ok(()),
        };
        if let Err(error) = overlay.check().and_then(|()| state.may_change()).and(ready) {
            return Ran::Refused(error);
        }
        let view = View::new(state.engine.as_ref(), &overlay, gathered.as_deref());
        let mut txn = Txn::new(view, limits);
        let ended = catch_unwind(AssertUnwindSafe(|| (self.work)(&mut txn)));
        let (missed, changes) = txn.into_parts();
        match ended {
            Err(panic) => Ran::Refused(Error::bug(format!("a transaction panicked: {}", text(&*panic)))),
            Ok(_) if !missed.is_empty() => Ran::Missed(missed),
            Ok(Err(error)) => Ran::Refused(error),
            Ok(Ok(value)) => {
                self.value = Some(value);
                Ran::Done(changes)
            }
        }
    }

    fn answer(self: Box<Self>, outcome: Result<()>) {
        let lost = || Error::bug("a transaction was answered before it ran");
        let Self { value, reply, .. } = *self;
        // A caller that went away does not want the answer; its change stands all the same.
        let _ = reply.send(outcome.and_then(|()| value.ok_or_else(lost)));
    }
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
