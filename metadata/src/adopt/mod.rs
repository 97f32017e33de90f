//! Taking a copy of a bucket for the volume that it is a copy of.
//!
//! A layout names an object by its key and its version, and a copy has other versions. Here each version that the records of
//! a tree name is replaced by the one that one listing of the copy shows, where key and size agree: that the bytes do is for
//! whoever calls this to know. What is missing or of another size stays as it is and is told.
//!
//! Promises that a tree whose adoption was cut off is refused until it is adopted again, and that nothing comes to mean an
//! object that it did not mean before: of several contents that records know of one key, one at most is there. Never deletes
//! or writes an object.

mod naming;
mod named;
mod matched;
mod run;
mod suspicion;

pub use matched::{Lacking, Why};
pub use run::{Adopted, adopt};
pub(crate) use run::{adopt_loaded, not_whole};
pub use suspicion::looks_copied;
