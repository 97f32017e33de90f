//! Giving a file a further name.

use forebay_core::{Attributes, Error, ErrorKind, FileKind, InodeId, Result};

use crate::records::{Change, Records, check_new_name};

/// As [`super::Tree::link`].
pub(super) fn link(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    parent: InodeId,
    name: &[u8],
) -> Result<Attributes> {
    check_new_name(parent, name)?;
    let directory = change.directory(parent)?;
    let mut inode = change.inode(ino)?;
    if inode.kind == FileKind::Directory {
        return Err(Error::new(ErrorKind::Denied, "a directory cannot have a second name"));
    }
    if inode.nlink == 0 {
        return Err(Error::new(ErrorKind::NotFound, format!("inode {ino} has no name any more")));
    }
    if change.dentry(parent, name)?.is_some() {
        let name = String::from_utf8_lossy(name);
        return Err(Error::new(ErrorKind::Exists, format!("`{name}` is in directory {parent} already")));
    }
    inode.nlink = inode.nlink.checked_add(1).ok_or_else(|| Error::invalid("an inode has too many names"))?;
    inode.ctime = change.now;
    change.put_link(ino, &inode, parent, name)?;
    change.put_inode(ino, &inode)?;
    change.put_changed_directory(parent, directory)?;
    Ok(inode.attributes(ino))
}
