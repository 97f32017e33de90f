//! One run of a closure over the newest state.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use forebay_core::{Error, Result};

use super::gather::{Gathered, State, Want};
use super::view::{Changes, Txn, View};
use crate::kv::{Durability, Limits};

/// What a run of a closure came to.
pub(super) enum Ran<T> {
    /// It ended well.
    Done(T, Changes),
    /// It read what is not in memory.
    Missed(Vec<Want>),
    /// It ended with an error, or panicked; nothing of it stays.
    Refused(Error),
}

/// Runs `work` once.
pub(super) fn run<T>(
    work: &mut impl FnMut(&mut Txn<'_>) -> Result<T>,
    state: &State,
    durability: Durability,
    limits: Limits,
    mut gathered: Option<&mut Gathered>,
) -> Ran<T> {
    let overlay = state.overlay.read();
    let ready = match gathered.as_deref_mut() {
        Some(gathered) => gathered.begin_run(&overlay),
        None => Ok(()),
    };
    if let Err(error) = overlay.check().and_then(|()| state.may_change(durability)).and(ready) {
        return Ran::Refused(error);
    }
    let view = View::new(state.engine.as_ref(), &overlay, gathered.as_deref());
    let mut txn = Txn::new(view, limits);
    let ended = catch_unwind(AssertUnwindSafe(|| work(&mut txn)));
    let (missed, changes) = txn.into_parts();
    match ended {
        Err(panic) => Ran::Refused(Error::bug(format!("a transaction panicked: {}", text(&*panic)))),
        Ok(_) if !missed.is_empty() => Ran::Missed(missed),
        Ok(Err(error)) => Ran::Refused(error),
        Ok(Ok(value)) => Ran::Done(value, changes),
    }
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
