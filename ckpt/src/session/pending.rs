//! Saves on their way, and what agents' deaths do to them.

use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};

use super::{Save, Session};
use crate::agent::Request;
use crate::arena::Slot;

/// Agents that a save may lose before it is given up, as what may be killing them. One may have been dead by the time it was
/// given the save.
pub(super) const AGENTS_A_SAVE: u32 = 3;

/// A save on its way, with all that is needed to send it again.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) save: Arc<Save>,
    /// Holds the step.
    pub(super) slot: Slot,
    /// Whether the last agent was given it.
    pub(super) is_given: bool,
    /// Whether another host has it, or will not.
    pub(super) is_replicated: bool,
    /// Agents that died while it was the oldest that they had.
    pub(super) deaths: u32,
}

/// The agent's process ended with saves unsettled.
#[derive(Debug)]
pub struct Lost {
    /// Steps that were not committed yet as far as is known.
    pub steps: Vec<u64>,
}

impl Session {
    /// The saves that a dead agent left unsettled; `None` while the agent lives or nothing is unsettled.
    pub fn lost(&self) -> Option<Lost> {
        let lost = self.stream.is_none() && !self.pending.is_empty();
        lost.then(|| Lost { steps: self.pending.iter().map(|pending| pending.save.step).collect() })
    }

    /// Counts the death of the last agent, if one died, against the oldest save that it had: it goes through them in their
    /// order. Gives that one up where it was too many, and has the new agent tell the job's other ranks.
    ///
    /// # Errors
    /// `Unavailable` when the new agent died before it was told: the save is given up with the next one.
    pub(super) fn give_up_what_kills(&mut self) -> Result<()> {
        let Some(oldest) = self.pending.front_mut() else { return Ok(()) };
        oldest.deaths += u32::from(oldest.is_given);
        let (number, step, deaths) = (oldest.save.number, oldest.save.step, oldest.deaths);
        let round = oldest.slot.held().and_then(|held| held.seal.round);
        self.pending.iter_mut().for_each(|pending| pending.is_given = false);
        if deaths < AGENTS_A_SAVE {
            return Ok(());
        }
        let message = format!("{deaths} agents died while they saved step {step}");
        if self.hello.member.is_some() {
            self.send(&Request::GiveUp { step, round, reason: message.clone() }, None)?;
        }
        let hint = "the host may be short of memory; see the agent's log (agent_log=)";
        self.settle_number(number, Err(Error::new(ErrorKind::Unavailable, message).with_hint(hint)));
        Ok(())
    }
}
