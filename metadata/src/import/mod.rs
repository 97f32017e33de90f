//! An existing bucket as a tree: directories are listed when somebody looks, and what was found is reconciled with
//! what the tree knows.
//!
//! Owns when a directory is listed and what a listing means. Promises one listing of a directory at a time however
//! many wait for it, and that nothing which Forebay itself changed meanwhile is undone by it. Writes nothing to the
//! bucket. A directory is listed whole: to read one of a million objects for the first time takes its thousand list requests. Who
//! looks for one name waits for that no longer than `relist_wait_ms`, and has that name looked for alone then; nor does anybody wait
//! longer for a directory to be listed again. Those that follow are listed ahead of who reads one after another.

mod ahead;
mod items;
mod phantoms;
mod reconcile;
mod importer;
mod single;

pub(crate) use importer::Importer;
