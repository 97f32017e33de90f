//! Finding the folder of a volume's staged bytes, at a mount that has the volume and at one that does not get it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::object::Bucket;
use forebay_io::task::blocking;
use forebay_metadata::volume_file::VolumeRecord;

use super::bring::{is_there, upload};
use super::{Staging, WritebackSettings};
use crate::volume::Writeback;

/// The folder of a volume. A bucket that was emptied and made a volume again is another one.
fn folder(state: &Path, volume: VolumeId, record: Option<&VolumeRecord>) -> PathBuf {
    let created = record.map_or(0, |record| record.created);
    state.join("staging").join(format!("{:016x}-{created:x}", volume.0))
}

/// Opens the folder where bytes are to be staged, or were: those are uploaded however the volume is opened now.
///
/// # Errors
/// As [`Staging::open`].
pub(crate) async fn open(
    state: &Path,
    bucket: &Bucket,
    volume: VolumeId,
    record: Option<&VolumeRecord>,
    settings: &WritebackSettings,
) -> Result<Option<Writeback>> {
    let folder = folder(state, volume, record);
    let look = folder.clone();
    if !settings.enabled && !blocking(move || look.exists()).await? {
        return Ok(None);
    }
    let ceiling = if settings.enabled { settings.bytes } else { 0 };
    let staging = Staging::open(folder, bucket.url(), ceiling, Clock::system()).await?;
    Ok(Some(Writeback { staging, settings: settings.clone() }))
}

/// Uploads what this host has staged of a volume that another one has by now, which can read it then.
///
/// # Errors
/// Those of the disk and of the store; what was not uploaded is kept.
pub(crate) async fn heal(state: &Path, bucket: &Bucket, record: &VolumeRecord) -> Result<()> {
    let folder = folder(state, record.volume, Some(record));
    let look = folder.clone();
    if !blocking(move || look.exists()).await? {
        return Ok(());
    }
    match Staging::open(folder, bucket.url(), 0, Clock::system()).await {
        // By a mount of this host, which sees to it.
        Err(error) if error.kind() == ErrorKind::Conflict => Ok(()),
        staging => upload_all(&staging?, bucket).await,
    }
}

/// Uploads every blob under its own key. One that cannot be read keeps no other here.
///
/// # Errors
/// As [`heal`]: the first; `Corrupt` when damaged ones stay.
pub(crate) async fn upload_all(staging: &Arc<Staging>, bucket: &Bucket) -> Result<()> {
    let mut outcome = Ok(());
    for ino in staging.inodes() {
        for (key, size) in staging.ready(ino) {
            tracing::warn!(
                %key,
                "the volume is another host's: bytes that were staged here are uploaded, so that it can read them"
            );
            if let Err(error) = upload(staging, bucket, key.clone(), size).await {
                tracing::warn!(%key, %error, "they stay here for now");
                // Each would wait for a store that is away.
                if error.kind() == ErrorKind::Unavailable && bucket.check().await.is_err() {
                    return Err(error);
                }
                outcome = outcome.and(Err(error));
            }
        }
    }
    for (key, size) in staging.damaged() {
        if is_there(bucket, &key, size).await? {
            staging.forget(vec![key]).await?;
        }
    }
    match staging.damaged().len() {
        0 => outcome,
        left => {
            outcome.and(Err(Error::corrupt(format!("{left} staged blobs are damaged on the local disk"))))
        }
    }
}
