//! Owners, modes and times.

use forebay_core::{Attributes, FileKind, InodeId, Result, Timestamp};

use super::{SetAttributes, SetIds, acl};
use crate::records::{Change, Records};
use crate::schema::SET_GID;

/// As [`super::Tree::set_attributes`].
pub(super) fn set_attributes(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    wanted: &SetAttributes,
) -> Result<Attributes> {
    let mut inode = change.inode(ino)?;
    let owner_changes = wanted.uid.is_some() || wanted.gid.is_some();
    match wanted.clears.or(owner_changes.then_some(SetIds::All)) {
        Some(SetIds::All) => inode.drop_set_id(),
        Some(SetIds::GroupUnless(group)) if inode.gid != group => inode.mode &= !SET_GID,
        Some(SetIds::GroupUnless(_)) | None => {}
    }
    if let Some(mode) = wanted.mode {
        inode.mode = mode & 0o7777;
        acl::follow_mode(change, ino, mode)?;
    }
    inode.uid = wanted.uid.unwrap_or(inode.uid);
    inode.gid = wanted.gid.unwrap_or(inode.gid);
    inode.atime = wanted.atime.unwrap_or(inode.atime);
    if let Some(mtime) = wanted.mtime {
        let since = inode.since();
        inode.mtime = mtime;
        if inode.kind == FileKind::File {
            inode.note_since(since);
        }
    }
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
