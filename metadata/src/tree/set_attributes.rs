//! Owners, modes and times.

use forebay_core::{Attributes, FileKind, InodeId, Result, Timestamp};

use super::{SetAttributes, acl};
use crate::records::{Change, Records};

const SET_UID: u16 = 0o4000;
const SET_GID: u16 = 0o2000;
const GROUP_EXECUTE: u16 = 0o010;

/// As [`super::Tree::set_attributes`].
pub(super) fn set_attributes(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    wanted: &SetAttributes,
) -> Result<Attributes> {
    let mut inode = change.inode(ino)?;
    let owner_changes = wanted.uid.is_some() || wanted.gid.is_some();
    if owner_changes && inode.kind != FileKind::Directory {
        inode.mode &= !SET_UID;
        // Without group execution the bit means mandatory locking, which a new owner does not change.
        if inode.mode & GROUP_EXECUTE != 0 {
            inode.mode &= !SET_GID;
        }
    }
    if let Some(mode) = wanted.mode {
        inode.mode = mode & 0o7777;
        acl::follow_mode(change, ino, mode)?;
    }
    inode.uid = wanted.uid.unwrap_or(inode.uid);
    inode.gid = wanted.gid.unwrap_or(inode.gid);
    inode.atime = wanted.atime.unwrap_or(inode.atime);
    inode.mtime = wanted.mtime.unwrap_or(inode.mtime);
    inode.ctime = change.now;
    // What somebody set on a directory is not to vanish with its last object.
    inode.kept |= inode.kind == FileKind::Directory;
    change.put_inode(ino, &inode)?;
    Ok(inode.attributes(ino))
}

/// As [`super::Tree::accessed`].
pub(super) fn accessed(change: &mut Change<'_, '_>, ino: InodeId, atime: Timestamp) -> Result<()> {
    let Some(mut inode) = change.find(ino)? else { return Ok(()) };
    if !inode.attributes(ino).access_is_due(atime) {
        return Ok(());
    }
    inode.atime = atime;
    change.put_inode(ino, &inode)
}
