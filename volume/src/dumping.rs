//! Writing a tree to where a dump goes, which never names bytes that are on this host only.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use forebay_core::{Blob, Error, ErrorKind, InodeId, ObjectKey, Result};
use forebay_io::files::NewFile;
use forebay_io::task::blocking;
use forebay_metadata::dump::{DumpReport, Dumped, Frozen};

use crate::Volume;
use crate::volume::local;

/// How often a dump is begun while others write: what they stage after all was brought in may be in the tree already.
const ATTEMPTS: u32 = 4;

/// Where a dump goes.
pub enum Target {
    /// A new file, which is there once the dump is whole.
    File(PathBuf),
    /// Wherever it leads.
    Stream(Box<dyn Write + Send>),
}

/// Writes the tree of an open volume to a new file, once what it has staged is in the bucket. `meanwhile` is called before and
/// after a look at what is staged.
///
/// # Errors
/// `Unavailable` when the store takes no staged bytes, or writers stage more faster than that; `Corrupt` for those that are
/// damaged; `Exists`.
pub(crate) async fn dump(
    volume: &Volume,
    file: &Path,
    mut meanwhile: impl AsyncFnMut(),
) -> Result<DumpReport> {
    let tree = local(volume)?;
    let Some(staging) = volume.staging() else {
        let frozen = tree.freeze().await?;
        return whole(write(frozen, Target::File(file.to_owned()), &HashSet::new()).await?);
    };
    for _ in 0..ATTEMPTS {
        volume.bring_all_in().await?;
        meanwhile().await;
        let (held, next) = staging.keys();
        meanwhile().await;
        let frozen = tree.freeze().await?;
        // What was staged since may be in the frozen tree, and sealed and forgotten before it is looked for.
        if staging.next() != next {
            continue;
        }
        match write(frozen, Target::File(file.to_owned()), &held).await? {
            Dumped::Names { blob, .. } if staging.damaged().iter().all(|(key, _)| *key != blob.key) => {}
            dumped => return whole(dumped),
        }
    }
    let message = "files are written faster than they come from this host to the bucket";
    Err(Error::new(ErrorKind::Unavailable, message).with_hint(
        "dump when less is written, or after the volume was unmounted: once its process ends, all of them are there",
    ))
}

/// Writes a frozen tree that may not name the blobs that this host holds.
pub(crate) async fn write(frozen: Frozen, target: Target, held: &HashSet<ObjectKey>) -> Result<Dumped> {
    let may_not_name = |blob: &Blob| held.contains(&blob.key);
    let path = match target {
        Target::Stream(out) => return frozen.write(out, may_not_name).await,
        Target::File(path) => path,
    };
    let make = move || NewFile::create_new(&path).and_then(|made| Ok((made.handle()?, made)));
    let (out, made) = blocking(make).await?.map_err(to_new_files_only)?;
    let dumped = frozen.write(out, may_not_name).await;
    let finish = move || match &dumped {
        Ok(Dumped::Whole(_)) => made.finish().and(dumped),
        // What was written goes with `made`.
        _ => dumped,
    };
    blocking(finish).await?.map_err(to_new_files_only)
}

fn to_new_files_only(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Exists => error.with_hint("a dump is written to a new file only"),
        _ => error,
    }
}

/// What was dumped, where nothing stood against it but damage.
pub(crate) fn whole(dumped: Dumped) -> Result<DumpReport> {
    match dumped {
        Dumped::Whole(report) => Ok(report),
        Dumped::Names { ino, .. } => Err(damaged(ino)),
    }
}

fn damaged(ino: InodeId) -> Error {
    let message =
        format!("bytes of inode {ino} were staged on this host, are damaged, and never came to the bucket");
    Error::corrupt(message)
        .with_hint("`forebay fsck` names the file: remove it, or write it again, and dump then")
}
