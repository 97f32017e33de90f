//! What no record refers to and no living session is about to refer to: found in the bucket, and freed.
//!
//! Blobs that lost their last reference are queued by the commit that took it, and go with the mover, as does what was
//! in the trash long enough; a round only hurries that. Here is what no commit knows of: blobs that a session put and died before committing, its unfinished uploads, and staged files of a
//! directory. Promises to look nowhere but below `.forebay/`, and that an object goes only if its session is one that this tree
//! had and is dead, and no layout, intent, claim or queue names it when its deletion is decided. References are read from those records
//! themselves; the counts of references have a say only in keeping. Does not look where several trees might share
//! a bucket.

mod plan;
mod collect;
mod background;

pub(crate) use background::start;
pub(crate) use collect::Collector;
pub use collect::GcReport;
pub(crate) use plan::{Sessions, names_in};
