//! The decorators of one bucket, in their order.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::StoreSettings;
use super::counters::Meter;
use super::layer::{
    Delay, Delayed, Failing, Faults, Guard, Guarded, Instrument, Limit, Patience, Places, Rate, Rated,
    ReadOnly, Retry, Retrying,
};
use super::request::Shared;
use super::unanswered::Unanswered;
use crate::rng::Rng;
use crate::task::TaskGroup;

/// The longest that opening waits for an endpoint that takes no connection, in milliseconds: someone is looking at it.
const OPEN_DEADLINE_MS: u64 = 5_000;
/// How long one attempt may take at least, whatever the deadline: a busy host takes this long to look at an answer.
const LEAST_ATTEMPT_MS: u64 = 1000;

/// What a bucket's decorators are built from. Handles that derive from one another share counts, tasks, what was not
/// answered, and places, if they do not stand apart.
#[derive(Debug, Clone)]
pub(super) struct Stack {
    base: Shared,
    pub(super) meter: Arc<Meter>,
    pub(super) unanswered: Arc<Unanswered>,
    places: Places,
    pub(super) tasks: TaskGroup,
    pub(super) rng: Rng,
    pub(super) settings: StoreSettings,
    /// Whether all parts of an upload but the last have to be of one size: known from the start, or once the store said so.
    pub(super) even_parts: Arc<AtomicBool>,
    /// How long an endpoint that takes no connection is tried, if not until the deadline.
    unreachable_ms: u64,
    is_opening: bool,
    pub(super) faults: Option<Faults>,
    pub(super) delay: Option<Delay>,
    pub(super) rate: Option<Rate>,
    pub(super) guard: Option<Guard>,
    pub(super) read_only: bool,
}

impl Stack {
    /// A stack over `base`, without faults and delays.
    pub(super) fn new(base: Shared, settings: &StoreSettings) -> Self {
        let places = Places::new(settings.max_in_flight);
        let (meter, unanswered) = (Arc::default(), Arc::default());
        let (tasks, rng) = (TaskGroup::new("bucket"), Rng::system());
        let (settings, even_parts) = (settings.clone(), Arc::new(AtomicBool::new(settings.even_parts)));
        let (faults, delay, rate, guard, read_only) = (None, None, None, None, false);
        let unreachable_ms = settings.deadline_ms;
        Self {
            base,
            meter,
            unanswered,
            places,
            tasks,
            rng,
            settings,
            even_parts,
            unreachable_ms,
            is_opening: false,
            faults,
            delay,
            rate,
            guard,
            read_only,
        }
    }

    /// The same for the first requests, which do not wait long for an endpoint that is not there.
    pub(super) fn opening(base: Shared, settings: &StoreSettings) -> Self {
        Self { unreachable_ms: OPEN_DEADLINE_MS, is_opening: true, ..Self::new(base, settings) }
    }

    /// Takes `count` places that others do not wait for.
    pub(super) fn stand_apart(&mut self, count: usize) {
        self.places = Places::new(count);
    }

    /// Bytes go through these from the last to the first.
    pub(super) fn build(&self) -> Shared {
        let mut service = self.base.clone();
        if let Some(delay) = self.delay {
            service = Arc::new(Delayed { next: service, delay });
        }
        if let Some(faults) = self.faults.clone() {
            service = Arc::new(Failing { next: service, faults });
        }
        service = Arc::new(Instrument { next: service, meter: self.meter.clone() });
        if let Some(guard) = self.guard.clone() {
            service = Arc::new(Guarded { next: service, guard });
        }
        // A third of the deadline, so that one silent connection leaves time for two more tries.
        let attempt_ms = (self.settings.deadline_ms / 3).max(LEAST_ATTEMPT_MS);
        service = Arc::new(Patience { next: service, attempt_ms });
        service = Arc::new(Limit { next: service, places: self.places.clone() });
        if let Some(rate) = self.rate.clone() {
            service = Arc::new(Rated { next: service, rate });
        }
        service = Arc::new(Retry(Arc::new(Retrying {
            next: service,
            deadline_ms: self.settings.deadline_ms,
            unreachable_ms: self.unreachable_ms,
            is_opening: self.is_opening,
            rng: self.rng.clone(),
            meter: self.meter.clone(),
            unanswered: self.unanswered.clone(),
        })));
        if self.read_only {
            service = Arc::new(ReadOnly { next: service });
        }
        service
    }
}
