//! Extended attributes.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};

use super::local::LocalTree;
use super::{XattrMode, acl};
use crate::records::{Change, Records};
use crate::schema::{SET_GID, SET_UID, Tag, decode_plain, encode_plain};

/// What holds the capabilities of a file.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";

/// Longest value, as Linux has it.
const MOST_VALUE_BYTES: usize = 64 << 10;
/// Most names of one inode, so that a list of them fits the 64 KiB that Linux allows it.
const MOST_XATTRS: usize = 1024;

/// As [`super::Tree::xattr`].
pub(super) fn get(records: &dyn Records, ino: InodeId, name: &[u8]) -> Result<Bytes> {
    match records.reads().get(&records.keys().xattr(ino, name))? {
        Some(value) => decode_plain(value, "extended attribute"),
        None => {
            records.inode(ino)?;
            Err(missing(ino, name))
        }
    }
}

impl LocalTree {
    /// Whether a write takes nothing away from a file: it has neither set-id bits nor a capability.
    pub(crate) async fn is_bare(&self, ino: InodeId) -> Result<bool> {
        self.look(|look| {
            let has_set_ids = look.inode(ino)?.mode & (SET_UID | SET_GID) != 0;
            Ok(!has_set_ids && look.reads().get(&look.keys().xattr(ino, CAPABILITY))?.is_none())
        })
        .await
    }
}

/// As [`super::Tree::xattrs`].
pub(super) fn list(records: &dyn Records, ino: InodeId) -> Result<Vec<Bytes>> {
    records.inode(ino)?;
    let (start, end) = records.keys().below(Tag::Xattr, ino.0);
    let found = records.reads().scan(&start, &end, MOST_XATTRS)?;
    found.iter().map(|(key, _)| records.keys().name_in(key)).collect()
}

/// As [`super::Tree::set_xattr`].
pub(super) fn set(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    name: &[u8],
    value: &[u8],
    mode: XattrMode,
) -> Result<()> {
    if name.is_empty() || name.contains(&0) {
        return Err(Error::invalid("an attribute's name cannot be empty or hold NUL"));
    }
    if name.len() > 255 {
        return Err(Error::new(ErrorKind::NameTooLong, "an attribute's name has more than 255 bytes"));
    }
    if value.len() > MOST_VALUE_BYTES {
        return Err(Error::new(ErrorKind::TooLarge, "an attribute's value has more than 64 KiB"));
    }
    if acl::is_list(name) {
        return acl::set(change, ino, name, value);
    }
    let key = change.keys().xattr(ino, name);
    let exists = change.reads().get(&key)?.is_some();
    match mode {
        XattrMode::Create if exists => {
            return Err(Error::new(ErrorKind::Exists, format!("inode {ino} has the attribute already")));
        }
        XattrMode::Replace if !exists => return Err(missing(ino, name)),
        _ => {}
    }
    if !exists && list(change, ino)?.len() >= MOST_XATTRS {
        return Err(Error::new(ErrorKind::NoSpace, format!("inode {ino} has {MOST_XATTRS} attributes")));
    }
    change.put(key, encode_plain(value))?;
    touch(change, ino)
}

/// As [`super::Tree::remove_xattr`].
pub(super) fn remove(change: &mut Change<'_, '_>, ino: InodeId, name: &[u8]) -> Result<()> {
    let key = change.keys().xattr(ino, name);
    if change.reads().get(&key)?.is_none() {
        change.inode(ino)?;
        // An access control list that is not there says what the permission bits do: Linux takes it away all the same.
        return if acl::is_list(name) { Ok(()) } else { Err(missing(ino, name)) };
    }
    change.delete(key)?;
    touch(change, ino)
}

fn touch(change: &mut Change<'_, '_>, ino: InodeId) -> Result<()> {
    let mut inode = change.inode(ino)?;
    inode.ctime = change.now;
    inode.kept |= inode.kind == FileKind::Directory;
    change.put_inode(ino, &inode)
}

fn missing(ino: InodeId, name: &[u8]) -> Error {
    let name = String::from_utf8_lossy(name);
    Error::new(ErrorKind::NoAttribute, format!("inode {ino} has no attribute `{name}`"))
}
