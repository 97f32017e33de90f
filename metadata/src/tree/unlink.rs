//! Removing the name of something that is not a directory.

use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};

use crate::records::{Change, Records, Removed, check_name};

/// As [`super::Tree::unlink`].
pub(super) fn unlink(change: &mut Change<'_, '_>, parent: InodeId, name: &[u8]) -> Result<Option<Removed>> {
    check_name(name)?;
    let directory = change.directory(parent)?;
    let found = change.entry(parent, name)?;
    if found.kind == FileKind::Directory {
        let name = String::from_utf8_lossy(name);
        return Err(Error::new(ErrorKind::IsDirectory, format!("`{name}` is a directory")));
    }
    let removed = change.remove_name(parent, name, found.ino)?;
    change.put_changed_directory(parent, directory)?;
    Ok(removed)
}
