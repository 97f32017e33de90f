//! What the end-to-end and structural tests share. Test code: nothing here is used by a shipped package.
#![allow(clippy::print_stderr, reason = "a failing test tells people what it saw")]

pub mod tidy;
pub mod settings;
pub mod scratch;
mod server;
pub mod s3;
pub mod door;
mod dialect;
pub mod cloud;
mod bucket;
mod cable;
pub mod sample;
mod shrink;
pub mod compare;
pub mod process;
mod starting;
pub mod built;
pub mod machine;
pub mod mount;
pub mod meta;
mod mounted;

pub use bucket::TestBucket;
pub use cable::Cable;
pub use compare::{assert_same_trees, differences};
pub use door::{Door, Manner, Trouble};
pub use machine::Program;
pub use meta::Meta;
pub use mount::{DISK_CACHE, EARLY, EARLY_AND_SOON, Mount, SOON};
pub use mounted::Mounted;
pub use process::{Forebay, Outcome, shell};
pub use sample::{Names, noise, sample_tree};
pub use scratch::Scratch;
pub use settings::{Seeded, is_long, repository, require_fuse, scale};
pub use shrink::shrink;
