//! A tree as a portable stream: for backup, and to carry it to another engine or format.
//!
//! Owns the stream's format (docs/formats.md, "Dumps"): lines of JSON, compressed, with a header first and a checksum
//! last. Promises that a dump is of one moment, that a damaged one, or one of another volume, is refused before anything is
//! changed, and that a tree whose loading was cut off is refused until it is loaded again. Carries the tree, not the bytes
//! of files: those stay in the bucket.

mod line;
mod write;
mod verify;
mod sound;
mod load;

pub use line::Header;
pub use load::{LoadOptions, LoadReport, load, load_moved};
pub use write::{DumpReport, Dumped, Frozen, dump, freeze};
