//! Volumes over a bucket in memory: contents against a plain array, costs, faults, ceilings, warmup.

pub(crate) mod support;
mod unlucky;
mod model;
mod reading;
mod writing;
mod memory;
mod sizes;
mod removing;
mod failing;
mod moving;
mod others;
mod outside;
mod cloning;
mod closing;
mod costs;
mod discards;
mod gathering;
mod doubts;
mod packing;
mod warming;
mod asking;
mod trash;
mod writeback;

use std::path::Path;

use forebay_core::Result;

/// A file of this name in a folder of staged bytes: no file beside it can be made durable.
pub(crate) const REFUSES_SYNC: &str = "refuses-sync";

/// Fails as fsync does on a full disk, where a test asked for it.
pub(crate) fn refuse_sync(path: &Path) -> Result<()> {
    match path.parent().is_some_and(|folder| folder.join(REFUSES_SYNC).exists()) {
        true => Err(std::io::Error::from(std::io::ErrorKind::StorageFull).into()),
        false => Ok(()),
    }
}
