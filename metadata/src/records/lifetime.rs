//! The end of inodes: without a name they live while somebody has them open, or in the trash.

use bytes::Bytes;
use forebay_core::{Attributes, Extent, FileKind, FileLayout, InodeId, Result, Source};
use serde::{Deserialize, Serialize};

use super::{Change, Charge, Records, usage_of};
use crate::schema::{HolderState, Inode, Orphan, Tag, decode_plain};

/// Extended attributes deleted in one step; what is left goes in the next.
const STEP: usize = 256;

/// The attribute that says who may do what.
pub(crate) const ACCESS_LIST: &[u8] = b"system.posix_acl_access";

/// What a change took the last name from, as it was then. Unless it is open, or kept in the trash, the tree knows it no more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// Its attributes, without links.
    pub attributes: Attributes,
    /// Its access control list, if it had one: the permission bits of such an inode do not say who may do what. Left out of
    /// files and symlinks, which nobody opens any more.
    pub access_list: Option<Bytes>,
}

impl Change<'_, '_> {
    /// Goes on without names: keeps the inode for those who have it open, or ends it.
    pub(crate) fn lose(&mut self, ino: InodeId, mut inode: Inode) -> Result<Removed> {
        self.charge(inode.parent, -usage_of(&inode), Charge::Forced)?;
        inode.nlink = 0;
        inode.ctime = self.now;
        if inode.kind == FileKind::Directory && !self.is_import {
            self.doom_prefix(ino)?;
        }
        let removed = self.removed(ino, &inode)?;
        if self.shared.openers(ino) == 0 {
            self.discard(ino, inode, self.kept_ms())?;
            return Ok(removed);
        }
        let orphan = Orphan::Open { kept_ms: Some(self.kept_ms()) };
        self.put(self.keys().orphan(self.shared.session, ino), orphan.encode())?;
        self.put_inode(ino, &inode)?;
        self.settle_home(ino, &inode)?;
        Ok(removed)
    }

    fn removed(&self, ino: InodeId, inode: &Inode) -> Result<Removed> {
        let list = match inode.kind {
            FileKind::File | FileKind::Symlink => None,
            _ => self.reads().get(&self.keys().xattr(ino, ACCESS_LIST))?,
        };
        let access_list = list.map(|list| decode_plain(list, "extended attribute")).transpose()?;
        Ok(Removed { attributes: inode.attributes(ino), access_list })
    }

    /// The plain object that was a file's is gone, or holds somebody else's bytes: gives it up without deleting
    /// anything, and takes the file away under all its names if it needs those bytes.
    pub(crate) fn vanish(&mut self, ino: InodeId, mut inode: Inode) -> Result<()> {
        let Some(home) = inode.home.clone() else { return Ok(()) };
        self.keeps_deleted = false;
        let needs_it = self.layout(ino, &inode)?.blobs().any(|blob| *blob == home);
        self.give_up_home(ino, &mut inode)?;
        if !needs_it {
            return Ok(());
        }
        for _ in 0..inode.nlink {
            let Some(left) = self.find(ino)?.filter(|left| left.nlink > 0) else { break };
            self.remove_name(left.parent, &left.name, ino)?;
        }
        Ok(())
    }

    /// Whether a file has bytes of its plain object and others beside them.
    pub(crate) fn is_mixed(&self, ino: InodeId, inode: &Inode) -> Result<bool> {
        let Some(home) = &inode.home else { return Ok(false) };
        let layout = self.layout(ino, inode)?;
        let is_home = |extent: &Extent| matches!(&extent.source, Source::Blob { blob, .. } if blob == home);
        let of_home = layout.extents().iter().filter(|extent| is_home(extent)).count();
        Ok(of_home > 0 && of_home < layout.extents().len())
    }

    /// Forgets that a plain object is a file's, which is one more borrower of it then.
    pub(crate) fn give_up_home(&mut self, ino: InodeId, inode: &mut Inode) -> Result<()> {
        let layout = self.layout(ino, inode)?;
        if let Some(home) = self.replace_layout((ino, inode), &layout, None)? {
            let claim = self.claim(home.key.as_str())?;
            if claim.is_some_and(|claim| claim.state == HolderState::Held(ino)) {
                self.delete_claim(home.key.as_str())?;
            }
        }
        self.put_inode(ino, inode)
    }

    /// Removes every record of an inode and gives up its bytes.
    pub(crate) fn free(&mut self, ino: InodeId, mut inode: Inode) -> Result<()> {
        if inode.kind == FileKind::File {
            // An intent outlives the inode: what it announced may still arrive, and until that is known no other
            // file may be placed there. The mover ends it.
            if let Some(home) = self.replace_layout((ino, &mut inode), &FileLayout::empty(), None)? {
                self.doom_plain(&home)?;
            }
            // A directory's moves outlive it: the mover takes its claims back.
            self.delete(self.keys().movement(ino))?;
        }
        if inode.kind == FileKind::Directory {
            self.delete(self.keys().import(ino))?;
            self.delete_quota(ino)?;
        }
        let (start, end) = self.keys().below(Tag::Xattr, ino.0);
        loop {
            let some = self.reads().scan(&start, &end, STEP)?;
            let done = some.len() < STEP;
            for (key, _) in some {
                self.delete(key)?;
            }
            if done {
                break;
            }
        }
        self.delete(self.keys().inode(ino))?;
        self.count(-1, 0)
    }

    /// Ends an inode without names that nobody has open any more; anything else is left alone.
    pub(crate) fn free_orphan(&mut self, session: u64, ino: InodeId) -> Result<()> {
        if self.shared.openers(ino) > 0 {
            return Ok(());
        }
        let key = self.keys().orphan(session, ino);
        let kept_ms = match self.reads().get(&key)?.map(Orphan::decode).transpose()? {
            Some(Orphan::Open { kept_ms }) => kept_ms.unwrap_or_else(|| self.kept_ms()),
            Some(Orphan::Unfinished) | None => return Ok(()),
        };
        self.delete(key)?;
        match self.find(ino)? {
            Some(inode) if inode.nlink == 0 => self.discard(ino, inode, kept_ms),
            _ => Ok(()),
        }
    }
}
