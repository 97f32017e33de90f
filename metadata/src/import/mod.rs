//! An existing bucket as a tree: directories are listed when somebody looks, and what was found is reconciled with
//! what the tree knows.
//!
//! Owns when a directory is listed and what a listing means. Promises one listing of a directory at a time however
//! many wait for it, and that nothing which Forebay itself changed meanwhile is undone by it. Writes nothing to the
//! bucket. A directory is listed whole: the first look at one of a million objects takes its thousand list requests,
//! later looks do not wait for the next listing longer than `relist_wait_ms`. Those that follow are listed ahead of who reads one
//! after another.

mod ahead;
mod items;
mod phantoms;
mod reconcile;
mod importer;

pub(crate) use importer::Importer;
