//! What a tree offers, whoever serves it: the in-process tree now, a client of a metadata server later.

mod api;

pub use api::{
    DirectoryEntry, DirectoryPage, Existing, Lookup, NewInode, Placement, RenameMode, SetAttributes,
    Statistics, Tree, XattrMode,
};
