//! Decorators of one trait. From the caller inwards: read-only, retry, rate, limit, patience, guard, instrument,
//! delay, fail.

mod body;
mod fail;
mod delay;
mod instrument;
mod guard;
mod patience;
mod limit;
mod rate;
mod retry;
mod read_only;
mod prefix;

pub use delay::Delay;
pub use fail::{FaultMode, Faults, Gate};
pub use rate::Rate;

#[cfg(test)]
pub(super) use body::map_body;
pub(super) use delay::Delayed;
pub(super) use fail::Failing;
pub(super) use guard::{Guard, Guarded};
pub(super) use instrument::Instrument;
pub(super) use limit::{Limit, Places};
pub(super) use patience::Patience;
pub(super) use prefix::Prefix;
pub(super) use rate::Rated;
pub(super) use read_only::ReadOnly;
pub(super) use retry::{Retry, Retrying, TOKEN_ATTRIBUTE};
