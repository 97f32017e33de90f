//! The process beside the trainer that brings sealed snapshots into the bucket, whatever becomes of the trainer.

mod protocol;
mod inspect;
mod source;
mod base;
mod delta;
mod pace;
mod patience;
mod trainer;
mod copy;
mod leave;
mod flush;
mod remains;
mod disk;
mod replicas;
mod heir;
mod together;
mod sweep;
mod flusher;
mod holdings;
mod door;
mod serve;

pub(crate) use protocol::KeptStep;
pub use protocol::{
    Anew, Answer, Hello, Linger, LostRanks, Member, Origin, Replication, Reply, Request, Told, VISIT_VERSION,
    Visit,
};
pub(crate) use protocol::{MADE_WAY, MAKES_WAY_LATER};
pub use serve::serve;

pub(crate) use door::Door;
pub(crate) use holdings::Holdings;

pub use crate::arena::Seal;
