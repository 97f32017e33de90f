//! What the file system does, in terms of a [`forebay_volume::Volume`]: one file per group of operations.
//!
//! Knows no type of the FUSE library and no kernel: every operation takes plain values and answers with plain values
//! or an [`crate::Errno`], so that all of it runs in tests without a mount. Permission checks are left to the kernel
//! (`default_permissions`). Reading updates access times where the policy says so (relatime); utimes sets them anyway.

mod state;
mod listing;
mod inodes;
mod removed;
mod names;
mod locks;
mod open;
mod data;
mod directory;
mod xattr;

pub use data::Write;
pub use directory::Listed;
pub use inodes::{Change, Space, TimeChange};
pub use locks::Locker;
pub use names::Caller;
pub use open::{OpenFlags, Opened};
pub use state::{FileSystem, Policy};
pub use xattr::XattrReply;

#[cfg(test)]
mod tests;
