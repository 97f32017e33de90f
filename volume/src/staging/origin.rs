//! Whose bytes a folder of staged blobs holds: the file `bucket` in it has the bucket's URL and a line feed.
//!
//! A copy of a bucket is the same volume by its record, and has the same folder. Its tree does not refer to what was staged
//! for the original, which would be deleted.

use std::fs;
use std::io;
use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::files::NewFile;
use forebay_io::object::BucketUrl;

use super::folder::sync;

/// The file's name: no blob's.
pub(super) const NAME: &str = "bucket";

/// Makes the folder that of the bucket, durably, if it `is_empty` or nobody's. Tells whether it is now.
///
/// # Errors
/// `Invalid` when it is another's; when that cannot be known.
pub(super) fn mark(folder: &Path, bucket: &BucketUrl, is_empty: bool) -> Result<bool> {
    let (path, url) = (folder.join(NAME), real(bucket));
    match read(folder) {
        Ok(Some(found)) if found == url => return Ok(true),
        Ok(Some(found)) if !is_empty => return Err(refused(&found, &url, &path)),
        Err(error) if !is_empty => return Err(error.context(path.display())),
        _ => {}
    }
    let written = NewFile::create(&path)
        .and_then(|mut file| file.write(format!("{url}\n").as_bytes()).and_then(|()| file.finish()))
        .and_then(|()| sync(folder));
    if let Err(error) = &written {
        tracing::warn!(%error, "written bytes go straight to the store");
    }
    Ok(written.is_ok())
}

/// The bucket whose bytes a folder holds; `None` where nobody has said it.
///
/// # Errors
/// Those of the disk.
pub(super) fn read(folder: &Path) -> Result<Option<String>> {
    match fs::read_to_string(folder.join(NAME)) {
        Ok(found) => Ok(Some(found.trim_end().to_owned()).filter(|found| !found.is_empty())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The URL, by whatever way a directory is named.
fn real(bucket: &BucketUrl) -> String {
    let directory = bucket.directory().and_then(|directory| fs::canonicalize(directory).ok());
    directory.map_or_else(|| bucket.to_string(), |directory| format!("file://{}", directory.display()))
}

fn refused(found: &str, url: &str, path: &Path) -> Error {
    let message = format!("it holds bytes for {found} that are not uploaded yet, and this is {url}");
    let hint = format!(
        "mount {found} on this host to have them uploaded, or use another state directory for {url}; if the bucket was \
         moved there, and is no copy, remove {}",
        path.display()
    );
    Error::new(ErrorKind::Invalid, message).with_hint(hint)
}
