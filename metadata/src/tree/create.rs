//! Making an inode under a name.

use forebay_core::{Attributes, Error, ErrorKind, FileKind, InodeId, Result};

use super::{Existing, NewInode, acl};
use crate::records::{Change, Charge, Records, Spelling, check_new_name, child_prefix, prefix_with_slash};
use crate::schema::{Dentry, ImportState, Inode, Tag, Usage};

const SET_GID: u16 = 0o2000;

/// As [`super::Tree::create`].
pub(super) fn create(
    change: &mut Change<'_, '_>,
    parent: InodeId,
    name: &[u8],
    new: &NewInode,
    existing: Existing,
) -> Result<(Attributes, bool)> {
    check_new_name(parent, name)?;
    let mut directory = change.directory(parent)?;
    if let Some(found) = change.dentry(parent, name)? {
        if existing == Existing::Accept && found.kind == FileKind::File {
            return Ok((change.inode(found.ino)?.attributes(found.ino), false));
        }
        let name = String::from_utf8_lossy(name);
        return Err(Error::new(ErrorKind::Exists, format!("`{name}` is in directory {parent} already")));
    }
    change.charge(parent, Usage { inodes: 1, bytes: 0 }, Charge::Checked)?;
    let ino = change.next_ino(&mut directory)?;
    let mut inode = fresh(change, (parent, &directory), name, new);
    acl::inherit(change, parent, (ino, &mut inode), new.umask)?;
    if new.kind == FileKind::Directory {
        directory.nlink += 1;
        let state = import_state(change, parent, name)?;
        change.put_import_state(ino, &state)?;
        // Who makes files in it looks for their names first.
        let (first, end) = change.keys().below(Tag::Dentry, ino.0);
        change.txn.know_empty(first, end);
    }
    if new.kind == FileKind::File {
        // What the first write of the file looks for.
        let keys = change.keys();
        change.txn.know_absent(keys.intent(ino));
        change.txn.know_absent(keys.xattr(ino, b"security.capability"));
    }
    change.put_inode(ino, &inode)?;
    change.put_dentry(parent, name, Dentry { ino, kind: new.kind })?;
    change.put_changed_directory(parent, directory)?;
    change.count(1, 0)?;
    Ok((inode.attributes(ino), true))
}

fn fresh(
    change: &Change<'_, '_>,
    (parent, directory): (InodeId, &Inode),
    name: &[u8],
    new: &NewInode,
) -> Inode {
    let inherits = directory.mode & SET_GID != 0;
    let gid = if inherits { directory.gid } else { new.gid };
    let is_directory = new.kind == FileKind::Directory;
    let mode = if inherits && is_directory { new.mode | SET_GID } else { new.mode };
    let mut inode = Inode::new(new.kind, mode & 0o7777, (new.uid, gid), change.now);
    inode.parent = parent;
    inode.name = bytes::Bytes::copy_from_slice(name);
    inode.rdev = new.rdev;
    inode.kept = is_directory;
    inode.packed = is_directory && directory.packed;
    if new.kind == FileKind::Symlink {
        inode.size = new.target.len() as u64;
        inode.target = new.target.clone();
    }
    inode
}

/// A new directory sees what others put under its path, unless those keys belong to something else. It is as
/// freshly listed as its parent, which has just said that there is nothing.
fn import_state(change: &Change<'_, '_>, parent: InodeId, name: &[u8]) -> Result<ImportState> {
    if change.shared.spelling == Spelling::Nothing {
        return Ok(ImportState::default());
    }
    let above = change.import_state(parent)?;
    let Some(prefix) = above.prefix.and_then(|prefix| child_prefix(change.shared.spelling, &prefix, name))
    else {
        return Ok(ImportState::default());
    };
    let free = !change.lies_below_claim(&prefix_with_slash(&prefix))?
        && change
            .key_of(parent, &change.directory(parent)?)?
            .is_some_and(|path| child_prefix(change.shared.spelling, &path, name).as_ref() == Some(&prefix));
    Ok(ImportState { prefix: Some(prefix).filter(|_| free), listed: above.listed })
}
