//! How urgently the agent works: a trainer goes first, unless it waits for a save, or is gone.

use forebay_io::priority::Priority;
use parking_lot::Mutex;

/// Shared by all that know what is waited for.
pub(super) struct Pace {
    /// None where this process is not the agent's own.
    priority: Option<Priority>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The last save that was waited for; saves are settled in their order.
    awaited: u64,
    settled: u64,
    is_trainer_gone: bool,
}

impl Pace {
    /// That of a process whose trainer goes first.
    pub(super) fn new(priority: Option<Priority>) -> Self {
        Self { priority, state: Mutex::default() }
    }

    /// A thread begins.
    pub(super) fn join(&self) {
        self.priority.iter().for_each(Priority::join);
    }

    /// The trainer waits until a save is settled.
    pub(super) fn await_save(&self, save: u64) {
        self.change(|state| state.awaited = state.awaited.max(save));
    }

    /// A save is settled.
    pub(super) fn settled(&self, save: u64) {
        self.change(|state| state.settled = state.settled.max(save));
    }

    /// There is no trainer any more that could be held up; whoever comes next waits.
    pub(super) fn set_gone(&self) {
        self.change(|state| state.is_trainer_gone = true);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        if let Some(priority) = &self.priority {
            priority.set(state.awaited <= state.settled && !state.is_trainer_gone);
        }
    }
}
