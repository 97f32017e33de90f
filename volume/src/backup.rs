//! Dumping and loading the tree of a volume that nobody has open.

use std::io::{Read, Seek, Write};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_metadata::dump::{self, DumpReport, LoadReport};
use forebay_metadata::schema::Keys;

pub use forebay_metadata::dump::LoadOptions;

use crate::connect::Records;
use crate::settings::VolumeSettings;

/// Writes the tree of the volume that `source` names to `out`.
///
/// # Errors
/// As [`crate::connect`] and [`dump::dump`]; `Unavailable` while this host has staged bytes of the volume: a dump belongs to
/// the objects that are there when it is taken, and they are none yet.
pub async fn dump(
    source: &str,
    settings: &VolumeSettings,
    out: impl Write + Send + 'static,
) -> Result<DumpReport> {
    let records = Records::open(source, settings).await?;
    let taken = Clock::system().wall();
    let dumped = match records.staged() {
        0 => dump::dump(&records.committer, Keys(records.volume), taken, out).await,
        files => Err(Error::new(
            ErrorKind::Unavailable,
            format!("{files} files have bytes that are staged on this host and not in the bucket yet"),
        )
        .with_hint("mount the volume here and unmount it again: once its process ends, they are uploaded")),
    };
    let closed = records.close().await;
    dumped.and_then(|report| closed.map(|()| report))
}

/// Replaces the tree of the volume that `source` names by a dump, which is read twice.
///
/// # Errors
/// As [`crate::connect`] and [`dump::load`].
pub async fn load(
    source: &str,
    settings: &VolumeSettings,
    from: impl Read + Seek + Send + 'static,
    options: LoadOptions,
) -> Result<LoadReport> {
    let records = Records::open(source, settings).await?;
    let loaded = dump::load(&records.committer, Keys(records.volume), from, options).await;
    let closed = records.close().await;
    loaded.and_then(|report| closed.map(|()| report))
}
