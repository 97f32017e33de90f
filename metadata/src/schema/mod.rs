//! Every key and value that a tree keeps in its engine, in one place (docs/formats.md, "The tree").
//!
//! Owns key prefixes, record types and their encodings, format version 1. Promises that whatever it encodes it
//! decodes to the same, and that damaged bytes are refused as `Corrupt`. Knows nothing of what records mean
//! together: that is the tree's.

mod codec;
pub(crate) mod text;
mod key;
mod inode;
mod parts;
mod record;
mod intent;
mod quota;

pub use codec::{FORMAT, decode_plain, encode_plain};
pub use inode::{CLOCKS_APART, Inode, NumberRun, OWN_NUMBERS, decode_extents, encode_extents};
pub(crate) use inode::{SET_GID, SET_UID};
pub use intent::{Announced, Earlier, Intent, Mark};
pub use key::{Keys, Tag, hash_of};
pub use parts::{Cuts, Parts, Recut};
pub use quota::{Quota, QuotaLimits, Usage};
pub use record::{
    Beneath, Claim, Counters, Deletion, Dentry, HolderState, ImportState, Loan, Loose, Member, Move, Orphan,
    Partial, References, SessionRecord, UploadRecord,
};

#[cfg(test)]
mod tests;
