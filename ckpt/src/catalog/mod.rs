//! What a checkpoint bucket holds, and the few writes that change it.
//!
//! ```text
//! runs/<incarnation>.json                      one for each start of the run
//! steps/<step>/<incarnation>-<attempt>.json    a manifest: its existence is the commit
//! ranks/<step>/<incarnation>-<attempt>/<rank>.*  what a rank notes of a save, until the manifest is there
//! pins/<step>/<incarnation>-<attempt>           a manifest that retention keeps
//! deleting/<step>/<incarnation>-<attempt>/<name> one that is being deleted
//! shards/<step>/<incarnation>-<attempt>/<rank>-<save>-<layout>.safetensors  bytes, never changed
//! ```
//! Numbers are decimal with leading zeros, so that listings are in order. `attempt` is the first eight digits of
//! the incarnation's random nonce: even where a store lets two starts take one incarnation, neither overwrites the
//! other's manifest.

mod keys;
mod steps;
mod watch;
mod under_way;
mod run;
mod commit;
mod round;
mod ranks;
mod part;
mod alive;
mod named;
mod retain;
mod uploads;
mod gc;

pub(crate) use alive::{Alive, EVERY};
pub use commit::commit;
pub(crate) use commit::{DELETED_HINT, deleted, is_commit_of, missing, saved_already, try_commit};
pub use gc::{Garbage, collect_garbage};
pub use keys::{StepKey, incarnation_key};
pub use named::KnownShards;
pub(crate) use part::{Part, remove_part};
pub use ranks::{
    Note, RankKey, failure_of, forget_notes, forget_ranks, list_ranks, merge_ranks, put_alive, put_failed,
    put_intent, put_rank,
};
pub(crate) use ranks::{list_notes_of, merge};
pub use retain::{Keep, Removed, list_pins, pin, remove_steps, retain, unpin};
pub use round::Round;
pub use run::{
    Run, Start, begin_run, find_run, newest_number, newest_run, refuse_if_superseded, superseded_by,
};
pub(crate) use run::{begin_run_unless, find_run_of_job};
pub use steps::{StepInfo, StepName, find_step, list_steps, load_manifest};
pub use under_way::{RankNews, RankState, UnderWay, under_way};
pub use uploads::LEAST_AGE;
pub(crate) use uploads::{
    OLD, SECOND_LOOK, abort as abort_uploads, abort_uploads_to, find_dead_uploads, still_dead,
};
pub use watch::Watch;

#[cfg(test)]
mod tests;
