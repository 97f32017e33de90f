//! Everything that moves or deletes objects, behind the commits that ask for it.
//!
//! Owns the queues `G` (deletions) and `J` (moves), the time limit of `T` (trash) and the settling of `W` (intents) and
//! `L` (loans). Promises that an object goes only after the commit which gave it up is durable, that whatever it does
//! can be cut off anywhere and taken up again, and that no object is touched which holds other bytes than the records say. Between its look at a plain object and
//! the deletion an outsider may still replace it: stores have no conditional deletion that all of them honour.

mod doubts;
mod copies;
mod loans;
mod intents;
mod deletions;
mod trash;
mod unfinished;
mod moves;
mod subtrees;
mod run;

pub(crate) use copies::LONGEST_COPY;
pub(crate) use doubts::{LONGEST_MS, Unplaced};
pub(crate) use intents::Settled;
pub(crate) use run::Mover;
pub(crate) use unfinished::free_unfinished;
