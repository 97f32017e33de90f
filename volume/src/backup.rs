//! Dumping and loading the tree of a volume that nobody has open.

use std::io::{Read, Seek};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_metadata::dump::{self, DumpReport, LoadReport};
use forebay_metadata::schema::Keys;

pub use crate::dumping::Target;
pub use forebay_metadata::dump::LoadOptions;

use crate::connect::Records;
use crate::dumping;
use crate::settings::VolumeSettings;

/// Writes the tree of the volume that `source` names to `target`.
///
/// # Errors
/// As [`crate::connect`] and [`dump::dump`]; `Unavailable` while this host has staged bytes of the volume: a dump belongs to
/// the objects that are there when it is taken, and they are none yet; `Exists` for a file that is there.
pub async fn dump(source: &str, settings: &VolumeSettings, target: Target) -> Result<DumpReport> {
    let records = Records::open(source, settings).await?;
    let dumped = dump_records(&records, target).await;
    let closed = records.close().await;
    dumped.and_then(|report| closed.map(|()| report))
}

async fn dump_records(records: &Records, target: Target) -> Result<DumpReport> {
    refuse_staged(records, |_| String::new())?;
    let taken = Clock::system().wall();
    let frozen = dump::freeze(&records.committer, Keys(records.volume), taken).await?;
    // Those are damaged.
    let (held, _) = records.staging().map(|staging| staging.keys()).unwrap_or_default();
    dumping::whole(dumping::write(frozen, target, &held).await?)
}

/// Replaces the tree of the volume that `source` names by a dump, which is read twice.
///
/// # Errors
/// As [`crate::connect`] and [`dump::load`]; `Unavailable` while this host has staged bytes of the volume, whatever the
/// options: nothing in the dump would refer to them, and the next mount would delete them.
pub async fn load(
    source: &str,
    settings: &VolumeSettings,
    from: impl Read + Seek + Send + 'static,
    options: LoadOptions,
) -> Result<LoadReport> {
    let records = Records::open(source, settings).await?;
    let loaded = match refuse_staged(&records, |folder| {
        format!(
            ". Where the tree cannot be mounted, move {folder} aside: they are no file's once it is replaced"
        )
    }) {
        Ok(()) => dump::load(&records.committer, Keys(records.volume), from, options).await,
        Err(error) => Err(error),
    };
    let closed = records.close().await;
    loaded.and_then(|report| closed.map(|()| report))
}

fn refuse_staged(records: &Records, more: impl FnOnce(std::path::Display<'_>) -> String) -> Result<()> {
    let Some(staging) = records.staging() else { return Ok(()) };
    match staging.pending(u64::MAX).files {
        0 => Ok(()),
        files => Err(Error::new(
            ErrorKind::Unavailable,
            format!("{files} files have bytes that are staged on this host and not in the bucket yet"),
        )
        .with_hint(format!(
            "mount the volume here and unmount it again: once its process ends, they are uploaded{}",
            more(staging.folder().display())
        ))),
    }
}
