//! The directory tree of a volume: names, attributes and layouts over a small transactional key-value engine.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests spawn, sleep and time as they need"))]

#[cfg(test)]
mod testing;
pub mod kv;
pub mod commit;
pub mod volume_file;
pub mod schema;
mod locks;
mod records;
pub mod adopt;
pub mod dump;
pub mod follow;
mod import;
mod mover;
pub mod gc;
pub mod fsck;
pub mod tree;
pub mod remote;
