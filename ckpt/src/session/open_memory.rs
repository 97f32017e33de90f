//! What a trainer's own memory holds, open to the ranks of its job while they restore together.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_core::Result;
use forebay_io::net::FdStream;

use super::Session;
use crate::agent::{Door, Holdings, VISIT_VERSION, Visit};
use crate::arena::{Held, Slot};

/// The longest that nothing happens before the door is looked at.
const TICK: Duration = Duration::from_secs(3600);

/// A session's sealed steps, found at a meeting place by [`super::Predecessor::visit`] until this is dropped. Those who
/// came keep what they saw: no save may be begun before the ranks met again.
#[derive(Debug)]
pub struct OpenMemory {
    /// Its end ends the thread.
    pub(super) stop: Option<FdStream>,
    thread: Option<JoinHandle<()>>,
}

impl Session {
    /// Opens what this session's memory holds at `place`, whatever becomes of its saves and its agent.
    ///
    /// # Errors
    /// `Exists` where the place is taken.
    pub fn open_memory(&self, place: &str) -> Result<OpenMemory> {
        let step = |slot: &Slot| Some((slot.held()?.clone(), slot.memory().clone()));
        let steps: Vec<_> = self.held_slots().filter_map(step).collect();
        let is_durable = |held: &&Held| self.durable.contains(&held.name());
        let durable = steps.iter().map(|(held, _)| held).filter(is_durable);
        let durable: BTreeSet<u64> = durable.map(|held| held.seal.save).collect();
        let mut door = Door::hold(place)?;
        let (stop, end) = FdStream::pair()?;
        let (start, after) = (self.hello.start.clone(), self.hello.after.clone());
        let mut holdings = Holdings::of(steps);
        let mut show = move || -> Result<()> {
            while !end.readable(Duration::ZERO)? {
                // Whoever wants to take it over is let go.
                if let Some((Visit::Look { version: VISIT_VERSION }, mut visitor, _)) =
                    door.next(TICK, Some(end.as_fd()))?
                {
                    // One that leaves early is its own concern.
                    holdings.show((&start, &after), |save| durable.contains(&save), &[], &mut visitor).ok();
                }
            }
            Ok(())
        };
        let run = move || {
            if let Err(error) = show() {
                tracing::warn!(%error, "what is in memory is not shown to other ranks any more");
            }
        };
        let thread = std::thread::Builder::new().name("forebay-open".into()).spawn(run)?;
        Ok(OpenMemory { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for OpenMemory {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // Closing it would not do: a forked child may hold it, too.
            stop.shutdown();
        }
        if let Some(thread) = self.thread.take() {
            // It does not panic; and if it did, nothing is lost by it.
            thread.join().ok();
        }
    }
}
