//! Removing an empty directory.

use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};

use crate::records::{Change, Records, Removed, check_name};

/// As [`super::Tree::remove_directory`].
pub(super) fn remove_directory(
    change: &mut Change<'_, '_>,
    parent: InodeId,
    name: &[u8],
) -> Result<Option<Removed>> {
    check_name(name)?;
    let mut directory = change.directory(parent)?;
    let found = change.entry(parent, name)?;
    if found.kind != FileKind::Directory {
        let name = String::from_utf8_lossy(name);
        return Err(Error::new(ErrorKind::NotDirectory, format!("`{name}` is not a directory")));
    }
    check_empty(change, found.ino)?;
    change.delete_dentry(parent, name)?;
    let inode = change.inode(found.ino)?;
    let removed = change.lose(found.ino, inode)?;
    directory.nlink = directory.nlink.saturating_sub(1);
    change.put_changed_directory(parent, directory)?;
    Ok(Some(removed))
}

/// # Errors
/// `NotEmpty`.
pub(super) fn check_empty(change: &Change<'_, '_>, directory: InodeId) -> Result<()> {
    let not_empty = |what: String| Err(Error::new(ErrorKind::NotEmpty, what));
    if change.has_entries(directory)? {
        return not_empty(format!("directory {directory} has entries"));
    }
    match change.shared.unshown.below(directory) {
        Some(key) => not_empty(format!("directory {directory} holds {key:?}, which no path spells")),
        None => Ok(()),
    }
}
