//! Extended attributes.
//!
//! `user.`, `trusted.` and `security.` names are kept as they come. Of `system.` there are POSIX access control lists,
//! which the kernel enforces; other names are refused. A dataset mount has none: it answers ENOSYS, and the kernel, which
//! otherwise asks for each file of every `ls -l`, never asks again.

use bytes::{BufMut, Bytes, BytesMut};
use forebay_core::{Error, ErrorKind, InodeId};
use forebay_metadata::tree::XattrMode;

use super::FileSystem;
use crate::errno::{Errno, FsResult};

/// Longest name in bytes: XATTR_NAME_MAX.
const NAME_MAX: usize = 255;
/// What holds file capabilities.
const CAPABILITY: &[u8] = b"security.capability";
/// Longest value in bytes: XATTR_SIZE_MAX.
const VALUE_MAX: usize = 65_536;

/// What no attribute can meet.
const BOTH: i32 = libc::XATTR_CREATE | libc::XATTR_REPLACE;

/// Who may do what with an inode.
const ACCESS_LIST: &[u8] = b"system.posix_acl_access";
/// What is made in a directory starts with this list.
const DEFAULT_LIST: &[u8] = b"system.posix_acl_default";

/// Answer to a request that may only ask for the size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum XattrReply {
    /// Bytes that the answer would have.
    Size(u32),
    /// The answer.
    Value(Bytes),
}

impl XattrReply {
    /// getxattr(2): room 0 asks for the size, and too little room is ERANGE.
    fn fit(value: Bytes, room: u32) -> FsResult<Self> {
        match (value.len(), room as usize) {
            (length, 0) => Ok(Self::Size(length as u32)),
            (length, room) if length > room => Err(Errno(libc::ERANGE)),
            _ => Ok(Self::Value(value)),
        }
    }
}

impl FileSystem {
    /// The value of an attribute, if it fits `room` bytes.
    pub async fn xattr(&self, ino: InodeId, name: &[u8], room: u32) -> FsResult<XattrReply> {
        self.check_kept()?;
        check_name(name)?;
        let value = match self.volume.tree().xattr(ino, name).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.xattr_left(ino, name, error.into()).await?
            }
            value => value?,
        };
        XattrReply::fit(value, room)
    }

    /// All names, each followed by a NUL, if they fit `room` bytes.
    pub async fn xattrs(&self, ino: InodeId, room: u32) -> FsResult<XattrReply> {
        self.check_kept()?;
        let mut list = BytesMut::new();
        let names = match self.volume.tree().xattrs(ino).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let list = self.left(ino, error.into()).await?.access_list;
                list.map(|_| Bytes::from_static(ACCESS_LIST)).into_iter().collect()
            }
            names => names?,
        };
        for name in names {
            list.put(name);
            list.put_u8(0);
        }
        // listxattr(2): a list that no buffer can take is E2BIG.
        if list.len() > VALUE_MAX {
            return Err(Errno(libc::E2BIG));
        }
        XattrReply::fit(list.freeze(), room)
    }

    /// Sets an attribute; `flags` are setxattr(2)'s. `group` is that of a caller without privileges, for whom a new
    /// access list takes the set-gid bit away from what belongs to another group. The library does not pass the
    /// kernel's own answer on (FUSE_SETXATTR_EXT), so that supplementary groups do not count here.
    pub async fn set_xattr(
        &self,
        ino: InodeId,
        name: &[u8],
        value: Bytes,
        flags: i32,
        group: Option<u32>,
    ) -> FsResult<()> {
        check_name(name)?;
        if name == ACCESS_LIST
            && let Some(group) = group
        {
            self.clear_setgid_of_others(ino, group).await?;
        }
        if value.len() > VALUE_MAX {
            return Err(Errno(libc::E2BIG));
        }
        let mode = match flags {
            0 => XattrMode::Set,
            libc::XATTR_CREATE => XattrMode::Create,
            libc::XATTR_REPLACE => XattrMode::Replace,
            // Nothing is there and not there. Linux tells which of both fails.
            BOTH => {
                self.volume.tree().xattr(ino, name).await?;
                return Err(Errno(libc::EEXIST));
            }
            _ => return Err(Errno(libc::EINVAL)),
        };
        self.volume.tree().set_xattr(ino, name, value, mode).await.map_err(xattr_errno)
    }

    /// The value of an attribute of what has no name any more. The kernel asks for the access control list before it lets a
    /// program look into a directory; others are gone.
    async fn xattr_left(&self, ino: InodeId, name: &[u8], errno: Errno) -> FsResult<Bytes> {
        let list = self.left(ino, errno).await?.access_list;
        list.filter(|_| name == ACCESS_LIST).ok_or(Errno(libc::ENODATA))
    }

    fn check_kept(&self) -> FsResult<()> {
        if self.policy.dataset { Err(Errno(libc::ENOSYS)) } else { Ok(()) }
    }

    /// Removes an attribute.
    pub async fn remove_xattr(&self, ino: InodeId, name: &[u8]) -> FsResult<()> {
        check_name(name)?;
        Ok(self.volume.tree().remove_xattr(ino, name).await?)
    }

    /// Removes file capabilities, if there are any.
    pub(super) async fn clear_capability(&self, ino: InodeId) -> FsResult<()> {
        let tree = self.volume.tree();
        let cleared = match tree.xattr(ino, CAPABILITY).await {
            Ok(_) => tree.remove_xattr(ino, CAPABILITY).await,
            Err(error) => Err(error),
        };
        match cleared {
            Err(error) if error.kind() != ErrorKind::NoAttribute => Err(error.into()),
            _ => Ok(()),
        }
    }
}

fn check_name(name: &[u8]) -> FsResult<()> {
    match name {
        name if name.is_empty() || name.len() > NAME_MAX => Err(Errno(libc::ERANGE)),
        name if [ACCESS_LIST, DEFAULT_LIST].contains(&name) => Ok(()),
        name if name.starts_with(b"system.") => Err(Errno(libc::EOPNOTSUPP)),
        _ => Ok(()),
    }
}

/// Errno of a refused value: for an attribute "too large" is E2BIG, not EFBIG.
fn xattr_errno(failure: Error) -> Errno {
    match failure.kind() {
        ErrorKind::TooLarge => Errno(libc::E2BIG),
        _ => failure.into(),
    }
}
