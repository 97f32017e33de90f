//! Checks over the repository's own files: edges, sizes, leftovers, promises (STYLE: "a test reads the manifests").
//!
//! Each check is a pure function from the files to findings and carries bad samples that it must catch. Sources are
//! read line by line, which suffices because `cargo fmt --check` fixes where items begin and end.

mod repo;
mod scan;
mod manifests;
mod sources;
mod documents;
mod checks;

pub use checks::{CHECKS, Check};
pub use repo::{Finding, Repo};
