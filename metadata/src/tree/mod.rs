//! What a tree offers, whoever serves it, and the tree that is served in this process.
//!
//! `api` has the trait; each operation is a file of its own that runs inside one transaction; `local` joins them with
//! the bucket. Knows nothing of caches or mounts.

mod api;
mod acl;
mod create;
mod link;
mod unlink;
mod remove_directory;
mod rename;
mod set_attributes;
mod xattr;
mod commit_layout;
mod place;
mod clone;
mod following;
mod discard;
mod leftovers;
mod local;
mod locking;
mod operations;
mod quota;
mod trash;
mod segments;
mod paths;

pub use api::{
    CloneGuide, Created, DirectoryEntry, DirectoryPage, Existing, Lookup, NewInode, Placement, RenameMode,
    SetAttributes, SetIds, Statistics, Tree, XattrMode,
};
pub use local::{LocalTree, TreeParts};
pub use paths::{Walked, resolve, resolve_directory, walk};
pub(crate) use xattr::CAPABILITY;

pub use quota::DirectoryQuota;
pub use trash::Trashed;

pub use crate::locks::{Blocker, Lock, LockAnswer, LockKind, LockRange};
pub use crate::records::{
    Cloned, GcSettings, ImportSettings, OutsideChange, OutsideChanges, OutsideListener, Removed, SegmentPin,
    TrashId, TreeSettings,
};
pub use crate::schema::{Loose, Quota, QuotaLimits, Usage};

#[cfg(test)]
mod tests;
