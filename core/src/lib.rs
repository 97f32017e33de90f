//! Forebay's words: ids, attributes, layouts, ranges, units, errors and checksums.
//!
//! Owns the types that every other package speaks. Does no I/O, spawns nothing, knows no clock.

pub mod error;
pub mod units;
pub mod shell;
pub mod checksum;
pub mod id;
pub mod attr;
pub mod layout;
pub mod block;

pub use attr::{Appearance, Attributes, FileKind, Timestamp, UNSET_ID, UNSET_MODE};
pub use block::{BLOCK_SIZE, BlockKey, VolumeBlob};
pub use checksum::crc32c;
pub use error::{Error, ErrorKind, Result};
pub use id::{Blob, InodeId, ObjectKey, Version, VolumeId};
pub use layout::{Difference, Extent, Extents, FileLayout, Piece, Source};
