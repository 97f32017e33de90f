//! Dumping, loading and adopting the tree of a volume that nobody has open.

use std::io::{Read, Seek};

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, BucketUrl};
use forebay_metadata::adopt;
use forebay_metadata::dump::{self, DumpReport, LoadReport};
use forebay_metadata::schema::Keys;
use forebay_metadata::volume_file::VolumeRecord;

pub use crate::dumping::Target;
pub use forebay_metadata::adopt::{Adopted, Lacking, Why};
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
    let records = Records::open(source, &writable(settings)?).await?;
    let dumped = dump_records(&records, target).await;
    let closed = records.close().await;
    dumped.and_then(|report| closed.map(|()| report))
}

/// Refuses settings of a read-only mount, which has a copy of the tree at most.
fn writable(settings: &VolumeSettings) -> Result<VolumeSettings> {
    match settings.read_only || settings.dataset {
        true => Err(Error::new(ErrorKind::ReadOnly, "the settings are those of a read-only mount").with_hint(
            "take `read_only` and `dataset` out of the configuration file, or give another one with --config",
        )),
        false => Ok(settings.clone()),
    }
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
    let records = Records::open(source, &writable(settings)?).await?;
    let loaded = match refuse_staged(&records, move_aside) {
        Ok(()) => dump::load(&records.committer, Keys(records.volume), from, options).await,
        Err(error) => Err(error),
    };
    let closed = records.close().await;
    loaded.and_then(|report| closed.map(|()| report))
}

/// The same over a bucket that is a copy of the one that the dump was taken beside: as [`load`], then as [`adopt`].
///
/// # Errors
/// Those of both.
pub async fn load_moved(
    source: &str,
    settings: &VolumeSettings,
    from: impl Read + Seek + Send + 'static,
    options: LoadOptions,
) -> Result<(LoadReport, Adopted)> {
    let records = Records::open(source, &writable(settings)?).await?;
    let Records { committer, bucket, .. } = &records;
    let loaded = match refuse_staged(&records, move_aside) {
        Ok(()) => dump::load_moved(committer, Keys(records.volume), from, options, bucket).await,
        Err(error) => Err(error),
    };
    let closed = records.close().await;
    loaded.and_then(|report| closed.map(|()| report))
}

/// Has the tree in the bucket that `source` names, which was copied there from another one, name the objects that are there.
///
/// # Errors
/// As [`crate::connect`] and [`adopt::adopt`]; `NotFound` where no tree was copied; `Unavailable` while this host has staged
/// bytes of the volume.
pub async fn adopt(source: &str, settings: &VolumeSettings) -> Result<Adopted> {
    let settings = &writable(settings)?;
    let url: BucketUrl = source.parse()?;
    let bucket = Bucket::open(&url, &settings.store).await?;
    // Whoever opens it would make it a volume of another number, which the tree is not of.
    if bucket.head(&ObjectKey::new(VolumeRecord::KEY)).await?.is_none() {
        let fact = format!("{url} has no {}", VolumeRecord::KEY);
        return Err(Error::new(ErrorKind::NotFound, fact).with_hint(
            "check the URL, and copy all of `.forebay/`; a bucket that was copied without it takes a dump of the tree: \
             `forebay volume load --moved`",
        ));
    }
    let records = Records::open(source, settings).await?;
    let adopted = match refuse_staged(&records, |folder| {
        format!(". Where that cannot be, move {folder} aside: files that need those bytes are named then")
    }) {
        Ok(()) => adopt::adopt(&records.committer, Keys(records.volume), &records.bucket).await,
        Err(error) => Err(error),
    };
    let closed = records.close().await;
    adopted.and_then(|report| closed.map(|()| report))
}

fn move_aside(folder: std::path::Display<'_>) -> String {
    format!(". Where the tree cannot be mounted, move {folder} aside: they are no file's once it is replaced")
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What a read-only mount keeps was dumped, which may be nothing, and loaded into.
    #[tokio::test]
    async fn settings_of_a_read_only_mount_are_refused() {
        let folder = tempfile::tempdir().expect("a directory");
        let source = format!("file://{}", folder.path().display());
        let state_directory = folder.path().join("state");
        let settings = [(true, false), (false, true)].map(|(read_only, dataset)| VolumeSettings {
            read_only,
            dataset,
            state_directory: state_directory.clone(),
            ..VolumeSettings::default()
        });
        for settings in &settings {
            let to = Target::File(folder.path().join("dump"));
            let dumped = dump(&source, settings, to).await.expect_err("it has a copy at most").kind();
            let adopted = adopt(&source, settings).await.expect_err("it may change nothing").kind();
            let from = std::io::Cursor::new(Vec::new());
            let loaded = load(&source, settings, from, LoadOptions::default()).await.expect_err("nor").kind();
            assert_eq!([dumped, adopted, loaded], [ErrorKind::ReadOnly; 3]);
        }
        assert!(!state_directory.exists(), "nothing was begun");
    }
}
