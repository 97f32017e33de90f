//! Names: what they may be, and what giving and taking one means.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, InodeId, Result};

use super::{Change, Charge, Records, Removed, usage_of};
use crate::schema::{Dentry, Inode, Tag, encode_plain};

/// Longest name in bytes, as Linux has it.
const MOST_NAME_BYTES: usize = 255;

/// Refuses what cannot be a name.
///
/// # Errors
/// `NameTooLong`; `Invalid` for the empty name, `.`, `..`, and names with a slash or NUL.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > MOST_NAME_BYTES {
        return Err(Error::new(
            ErrorKind::NameTooLong,
            format!("a name has {} bytes, not over 255", name.len()),
        ));
    }
    if name.is_empty() || name == b"." || name == b".." || name.iter().any(|byte| matches!(byte, 0 | b'/')) {
        return Err(Error::invalid(format!("`{}` cannot be a name", String::from_utf8_lossy(name))));
    }
    Ok(())
}

/// Whether Forebay keeps the name for itself.
pub(crate) fn is_reserved(parent: InodeId, name: &[u8]) -> bool {
    parent == InodeId::ROOT && name == b".forebay"
}

/// Refuses what no new name may be.
pub(crate) fn check_new_name(parent: InodeId, name: &[u8]) -> Result<()> {
    check_name(name)?;
    match is_reserved(parent, name) {
        true => Err(Error::new(ErrorKind::Denied, "`.forebay` is where Forebay keeps the volume's own data")),
        false => Ok(()),
    }
}

impl Change<'_, '_> {
    /// Gives an inode that has names a further one. The caller puts the inode, and has counted the name.
    pub(crate) fn put_link(
        &mut self,
        ino: InodeId,
        inode: &Inode,
        parent: InodeId,
        name: &[u8],
    ) -> Result<()> {
        self.put_dentry(parent, name, Dentry { ino, kind: inode.kind })?;
        self.put(self.keys().link(ino, parent, name), encode_plain(b""))
    }

    /// Takes a name from something that is not a directory, and frees it when that was the last, as is told then.
    pub(crate) fn remove_name(
        &mut self,
        parent: InodeId,
        name: &[u8],
        ino: InodeId,
    ) -> Result<Option<Removed>> {
        self.delete_dentry(parent, name)?;
        let mut inode = self.inode(ino)?;
        if inode.nlink > 1 || self.shared.settings.trash_ms > 0 {
            self.leave_name((ino, &inode), (parent, name))?;
        }
        inode.nlink = inode.nlink.saturating_sub(1);
        inode.ctime = self.now;
        if inode.nlink == 0 {
            return self.lose(ino, inode).map(Some);
        }
        if !(inode.parent == parent && inode.name == name) {
            self.delete(self.keys().link(ino, parent, name))?;
            self.put_inode(ino, &inode)?;
            return Ok(None);
        }
        let (start, end) = self.keys().below(Tag::Link, ino.0);
        let first = self.reads().scan(&start, &end, 1)?;
        let (key, _) = first.first().ok_or_else(|| Error::corrupt(format!("inode {ino} misses a name")))?;
        (inode.parent, inode.name) = self.keys().link_in(key)?;
        self.recharge(parent, inode.parent, usage_of(&inode), Charge::Forced)?;
        self.delete(key.clone())?;
        self.put_inode(ino, &inode)?;
        self.settle_home(ino, &inode)?;
        Ok(None)
    }

    /// Notes that an inode goes on without a name. Where that is the path of its object, a claim keeps others from there.
    fn leave_name(&self, (ino, inode): (InodeId, &Inode), (parent, name): (InodeId, &[u8])) -> Result<()> {
        let is_first = inode.parent == parent && inode.name == name;
        let is_at_home = match &inode.home {
            Some(home) if is_first => self.key_of(ino, inode)?.as_deref() == Some(home.key.as_str()),
            _ => false,
        };
        if !is_at_home {
            self.shared.names_left.note();
        }
        Ok(())
    }

    /// Replaces the name `from` of an inode by `to`, entries left to the caller, which puts the inode.
    pub(crate) fn change_name(
        &mut self,
        (ino, inode): (InodeId, &mut Inode),
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
    ) -> Result<()> {
        self.leave_name((ino, inode), from)?;
        if inode.parent == from.0 && inode.name == from.1 {
            inode.parent = to.0;
            inode.name = Bytes::copy_from_slice(to.1);
            return Ok(());
        }
        self.delete(self.keys().link(ino, from.0, from.1))?;
        self.put(self.keys().link(ino, to.0, to.1), encode_plain(b""))
    }
}
