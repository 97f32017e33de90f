//! Typed access to a volume's records, and the rules that several operations share.
//!
//! Owns what must hold between records: names and link counts, paths and object keys, who holds which key, which
//! blobs are still referred to. Operations are in `tree`, what comes from the bucket in `import`, what goes back to
//! it in `mover`. Does no I/O of its own: everything here runs inside a closure of the committer.

mod settings;
mod damaged;
mod owned;
mod given_up;
mod pages;
mod outside;
mod counted;
mod clones;
mod segments;
mod layouts;
mod shared;
mod sessions;
mod access;
mod path;
mod name;
mod quota;
mod claimed;
mod claims;
mod content;
mod lifetime;
mod trash;
mod unfinished;

pub(crate) use access::{Change, Look, Records};
pub(crate) use claims::Occupancy;
pub use clones::Cloned;
#[cfg(test)]
pub(crate) use clones::MOST_CHANGED;
pub(crate) use clones::{Building, Changed, CloneTicket, Clones, Made, Read};
pub(crate) use damaged::{is_about_a_record, pass_over, readable};
pub(crate) use given_up::{LOST_OBJECTS, given_up_in};
pub(crate) use layouts::{Awaited, Stored};
pub(crate) use lifetime::ACCESS_LIST;
pub use lifetime::Removed;
pub(crate) use name::{check_name, check_new_name, is_reserved};
pub use outside::{OutsideChange, OutsideChanges, OutsideListener};
pub(crate) use owned::{owned_key, session_of};
pub(crate) use pages::Pages;
pub(crate) use path::{Spelling, child_prefix, names_of, path_or_name, prefix_with_slash};
pub(crate) use quota::{Charge, usage_of};
pub(crate) use segments::Pins;
pub use segments::SegmentPin;
pub(crate) use sessions::{asking_as, asking_session};
pub use settings::{GcSettings, ImportSettings, TreeSettings};
pub(crate) use shared::Shared;
pub use trash::TrashId;
