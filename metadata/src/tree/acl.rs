//! POSIX access control lists (POSIX.1e draft 17; acl(5)), kept as the extended attributes that Linux names.
//!
//! Owns what binds them to the rest of an inode: an access list and the permission bits say the same, a change of one
//! changes the other; what is made in a directory with a default list takes its list from there instead of the umask.
//! Checking access is the kernel's.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};

use crate::records::{ACCESS_LIST, Change, Records};
use crate::schema::{Inode, decode_plain, encode_plain};

/// The list that says who may do what.
pub(super) const ACCESS: &[u8] = ACCESS_LIST;
/// Of a directory: the list that what is made in it starts with.
pub(super) const DEFAULT: &[u8] = b"system.posix_acl_default";

/// Whether an attribute of this name is an access control list.
pub(super) fn is_list(name: &[u8]) -> bool {
    name == ACCESS || name == DEFAULT
}

/// Version and tags of linux/posix_acl_xattr.h and linux/posix_acl.h.
const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const ENTRY_BYTES: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    tag: u16,
    permissions: u16,
    id: u32,
}

/// A list in the order that the kernel demands.
#[derive(Debug, Clone, PartialEq, Eq)]
struct List(Vec<Entry>);

impl List {
    /// Reads an attribute's value: version, then tag, permissions and id of each entry, little-endian.
    fn decode(mut value: &[u8]) -> Result<Self> {
        let malformed = || Error::invalid("not an access control list");
        if value.len() < 4 || value.get_u32_le() != VERSION || !value.len().is_multiple_of(ENTRY_BYTES) {
            return Err(malformed());
        }
        let mut entries = Vec::with_capacity(value.len() / ENTRY_BYTES);
        while value.has_remaining() {
            let (tag, permissions) = (value.get_u16_le(), value.get_u16_le());
            entries.push(Entry { tag, permissions, id: value.get_u32_le() });
        }
        let list = Self(entries);
        if list.is_valid() { Ok(list) } else { Err(malformed()) }
    }

    fn encode(&self) -> Bytes {
        let mut value = BytesMut::with_capacity(4 + self.0.len() * ENTRY_BYTES);
        value.put_u32_le(VERSION);
        for entry in &self.0 {
            value.put_u16_le(entry.tag);
            value.put_u16_le(entry.permissions);
            value.put_u32_le(entry.id);
        }
        value.freeze()
    }

    /// Owner, named users, group, named groups, mask, others, in this order; a mask where there are named ones.
    fn is_valid(&self) -> bool {
        let count = |tag| self.0.iter().filter(|entry| entry.tag == tag).count();
        let once = [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|tag| count(*tag) == 1);
        let mask = count(MASK) <= 1 && (count(MASK) == 1 || count(USER) + count(GROUP) == 0);
        let known = |entry: &Entry| {
            [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER].contains(&entry.tag) && entry.permissions <= 7
        };
        once && mask && self.0.iter().all(known) && self.0.is_sorted_by_key(|entry| entry.tag)
    }

    /// Changes the three entries that permission bits show: owner, others, and the mask, or the group without one.
    fn change(&mut self, mode: u16, change: impl Fn(u16, u16) -> u16) {
        let has_mask = self.0.iter().any(|entry| entry.tag == MASK);
        for entry in &mut self.0 {
            let bits = match entry.tag {
                USER_OBJ => mode >> 6,
                OTHER => mode,
                MASK => mode >> 3,
                GROUP_OBJ if !has_mask => mode >> 3,
                _ => continue,
            };
            entry.permissions = change(entry.permissions, bits & 7);
        }
    }

    /// The permission bits.
    fn mode(&self) -> u16 {
        let of = |tag| self.0.iter().find(|entry| entry.tag == tag).map(|entry| entry.permissions);
        let group = of(MASK).or(of(GROUP_OBJ)).unwrap_or(0);
        of(USER_OBJ).unwrap_or(0) << 6 | group << 3 | of(OTHER).unwrap_or(0)
    }

    /// Whether permission bits say all of it.
    fn is_minimal(&self) -> bool {
        self.0.len() == 3
    }
}

fn find(records: &dyn Records, ino: InodeId, name: &[u8]) -> Result<Option<List>> {
    let Some(value) = records.reads().get(&records.keys().xattr(ino, name))? else { return Ok(None) };
    List::decode(&decode_plain(value, "extended attribute")?).map(Some)
}

fn put(change: &mut Change<'_, '_>, ino: InodeId, name: &[u8], list: &List) -> Result<()> {
    change.put(change.keys().xattr(ino, name), encode_plain(&list.encode()))
}

/// Sets a list; the permission bits follow. One that they say all of is not kept.
pub(super) fn set(change: &mut Change<'_, '_>, ino: InodeId, name: &[u8], value: &[u8]) -> Result<()> {
    let list = List::decode(value)?;
    let mut inode = change.inode(ino)?;
    if inode.kind == FileKind::Symlink {
        return Err(Error::new(ErrorKind::Unsupported, "a symlink has no access control list"));
    }
    if name == DEFAULT && inode.kind != FileKind::Directory {
        return Err(Error::new(ErrorKind::Denied, "only a directory has a default access control list"));
    }
    if name == ACCESS {
        inode.mode = inode.mode & 0o7000 | list.mode();
    }
    inode.ctime = change.now;
    inode.kept |= inode.kind == FileKind::Directory;
    change.put_inode(ino, &inode)?;
    match name == ACCESS && list.is_minimal() {
        true => change.delete(change.keys().xattr(ino, name)),
        false => put(change, ino, name, &list),
    }
}

/// Makes the access list, if there is one, say what new permission bits say.
pub(super) fn follow_mode(change: &mut Change<'_, '_>, ino: InodeId, mode: u16) -> Result<()> {
    let Some(mut list) = find(change, ino, ACCESS)? else { return Ok(()) };
    list.change(mode, |_, bits| bits);
    put(change, ino, ACCESS, &list)
}

/// Gives what is made in `parent` its lists and the mode that is left: `umask` counts only without a default list.
pub(super) fn inherit(
    change: &mut Change<'_, '_>,
    parent: InodeId,
    (ino, inode): (InodeId, &mut Inode),
    umask: u16,
) -> Result<()> {
    if inode.kind == FileKind::Symlink {
        return Ok(());
    }
    let Some(mut list) = find(change, parent, DEFAULT)? else {
        inode.mode &= !(umask & 0o777);
        return Ok(());
    };
    if inode.kind == FileKind::Directory {
        put(change, ino, DEFAULT, &list)?;
    }
    list.change(inode.mode, |own, bits| own & bits);
    inode.mode = inode.mode & !0o777 | list.mode();
    if list.is_minimal() { Ok(()) } else { put(change, ino, ACCESS, &list) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let list = List(
            entries
                .iter()
                .map(|(tag, permissions, id)| Entry { tag: *tag, permissions: *permissions, id: *id })
                .collect(),
        );
        list.encode().to_vec()
    }

    const NONE: u32 = u32::MAX;

    #[test]
    fn only_lists_that_the_kernel_takes_are_read() {
        let whole = [(1, 6, NONE), (2, 7, 5), (4, 4, NONE), (8, 1, 6), (16, 6, NONE), (32, 0, NONE)];
        let list = List::decode(&value(&whole)).expect("a list");
        assert_eq!((list.encode().to_vec(), list.mode(), list.is_minimal()), (value(&whole), 0o660, false));
        let minimal = List::decode(&value(&[(1, 6, NONE), (4, 4, NONE), (32, 1, NONE)])).expect("a list");
        assert_eq!((minimal.mode(), minimal.is_minimal()), (0o641, true));
        for refused in [
            value(&whole[..5]),
            value(&whole[1..]),
            value(&[(1, 6, NONE), (2, 7, 5), (4, 4, NONE), (32, 0, NONE)]),
            value(&[(1, 8, NONE), (4, 4, NONE), (32, 0, NONE)]),
            value(&[(1, 6, NONE), (32, 0, NONE), (4, 4, NONE)]),
            value(&[(1, 6, NONE), (4, 4, NONE), (32, 0, NONE), (64, 0, NONE)]),
            value(&[(1, 6, NONE), (1, 6, NONE), (4, 4, NONE), (32, 0, NONE)]),
            value(&whole)[..20].to_vec(),
            [&[1, 0, 0, 0], &value(&whole)[4..]].concat(),
            Vec::new(),
        ] {
            assert_eq!(
                List::decode(&refused).expect_err("refused").kind(),
                ErrorKind::Invalid,
                "{refused:?}"
            );
        }
    }
}
