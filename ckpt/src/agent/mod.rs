//! The process beside the trainer that brings sealed snapshots into the bucket, whatever becomes of the trainer.

mod protocol;
mod inspect;
mod flush;
mod serve;

pub use protocol::{Hello, Member, Reply, Request, Seal};
pub use serve::serve;
