//! The manifest: what a step holds and where each byte of it lies. Drawn in docs/formats-checkpoint.md.

mod name;
mod model;
mod check;
mod text;
mod length;

pub use check::Fault;
pub(crate) use check::{MAX_RANKS, MAX_SLICES};
pub(crate) use length::MAX_FILES;
pub use length::TextLength;
pub use model::{Checksum, Encoding, Extra, Identity, Manifest, Shard, Slice, SliceKind, Tensor};
pub use name::ShardKey;
pub use text::Intent;
pub(crate) use text::{read_local, write_local};
