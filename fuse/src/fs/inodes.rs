//! Lookup, forget, attributes and the size of the whole.

use forebay_core::{Attributes, ErrorKind, FileKind, InodeId, Timestamp};
use forebay_metadata::tree::{Lookup, SetAttributes, SetIds};

use super::FileSystem;
use crate::errno::FsResult;

/// Bytes that statfs shows as free on a writable mount: 1 PiB. A bucket has no end; programs want a number that they
/// can add to without overflow.
const FREE_BYTES: u64 = 1 << 50;
/// Inodes that statfs shows as free on a writable mount.
const FREE_INODES: u64 = 1 << 40;

/// A new time for an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeChange {
    /// UTIME_NOW.
    Now,
    /// This time.
    At(Timestamp),
}

/// What setattr changes; `None` leaves a field alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// Permission, set-id and sticky bits.
    pub mode: Option<u16>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// New size of a file.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<TimeChange>,
    /// Last change of content.
    pub mtime: Option<TimeChange>,
}

/// What statfs shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Bytes of all files.
    pub used_bytes: u64,
    /// Bytes that may still be written.
    pub free_bytes: u64,
    /// Inodes known.
    pub used_inodes: u64,
    /// Inodes that may still be made.
    pub free_inodes: u64,
}

impl FileSystem {
    /// Finds `name`; a miss is `None`. A hit is one more reference that the kernel holds.
    pub async fn lookup(&self, parent: InodeId, name: &[u8]) -> FsResult<Option<Attributes>> {
        let found = match self.volume.lookup_now(parent, name) {
            Some(found) => found?,
            None => self.volume.lookup(parent, name).await?,
        };
        Ok(match found {
            Lookup::Found(attributes) => Some(self.enter(attributes)),
            Lookup::Miss => None,
        })
    }

    /// The kernel drops `count` references to `ino`; returns what is left to do when it was the last.
    pub fn forget(&self, ino: InodeId, count: u64) -> Option<impl Future<Output = ()> + Send + 'static> {
        if !self.inodes.forget(ino, count) {
            return None;
        }
        self.shared_directories.remove(ino);
        let file = self.shared_files.remove(ino)?;
        Some(super::open::release_shared(vec![file]))
    }

    /// Attributes of an inode, which the kernel goes by from now on.
    pub async fn attributes(&self, ino: InodeId) -> FsResult<Attributes> {
        match self.attributes_inside(ino).await {
            Ok(attributes) => Ok(self.show(attributes)),
            Err(errno) => Ok(self.shown(self.left(ino, errno).await?.attributes)),
        }
    }

    /// Attributes that the kernel goes by from now on.
    fn show(&self, attributes: Attributes) -> Attributes {
        self.inodes.shown(attributes.ino, attributes.size);
        if attributes.nlink == 0 {
            self.inodes.changed(&attributes);
        }
        self.shown(attributes)
    }

    /// The same for a look that the kernel learns nothing of.
    pub(super) async fn attributes_inside(&self, ino: InodeId) -> FsResult<Attributes> {
        let attributes = match self.volume.attributes_now(ino) {
            Some(attributes) => attributes?,
            None => self.volume.attributes(ino).await?,
        };
        Ok(self.shown(attributes))
    }

    /// Changes attributes. `privileged` tells whether the caller keeps set-id bits when it changes the size.
    pub async fn set_attributes(
        &self,
        ino: InodeId,
        change: Change,
        privileged: bool,
    ) -> FsResult<Attributes> {
        match self.change_attributes(ino, &change, privileged).await {
            Ok(changed) => Ok(self.show(changed)),
            Err(errno) => self.change_left(ino, errno, &change).await,
        }
    }

    async fn change_attributes(
        &self,
        ino: InodeId,
        change: &Change,
        privileged: bool,
    ) -> FsResult<Attributes> {
        let mut changes = SetAttributes {
            mode: change.mode,
            clears: None,
            uid: change.uid,
            gid: change.gid,
            atime: change.atime.map(|time| self.resolve(time)),
            mtime: change.mtime.map(|time| self.resolve(time)),
        };
        if change.size.is_some() && changes.mode.is_none() && !privileged && self.has_setid(ino).await? {
            changes.clears = Some(SetIds::All);
        }
        if changes == SetAttributes::default() && change.size.is_none() {
            // So the kernel sends a chown(2) that names neither user nor group. Set-id bits go as with any other.
            self.clear_setid(ino).await?;
            return self.attributes_inside(ino).await;
        }
        Ok(self.volume.set_attributes(ino, changes, change.size).await?)
    }

    pub(super) fn resolve(&self, time: TimeChange) -> Timestamp {
        match time {
            TimeChange::At(time) => time,
            TimeChange::Now => self.clock.wall(),
        }
    }

    /// Clears the set-id bits of a file, as a write by someone without CAP_FSETID must.
    pub(super) async fn clear_setid(&self, ino: InodeId) -> FsResult<()> {
        match self.has_setid(ino).await? {
            true => self.clear(ino, SetIds::All).await,
            false => Ok(()),
        }
    }

    /// Clears the set-gid bit of what does not belong to `group`.
    pub(super) async fn clear_setgid_of_others(&self, ino: InodeId, group: u32) -> FsResult<()> {
        let attributes = self.attributes_inside(ino).await?;
        match attributes.gid != group && attributes.mode & 0o2000 != 0 {
            true => self.clear(ino, SetIds::GroupUnless(group)).await,
            false => Ok(()),
        }
    }

    async fn clear(&self, ino: InodeId, clears: SetIds) -> FsResult<()> {
        let changes = SetAttributes { clears: Some(clears), ..SetAttributes::default() };
        self.volume.set_attributes(ino, changes, None).await?;
        Ok(())
    }

    /// Whether there may be set-id bits to clear. Of most files there are none, which costs no change.
    async fn has_setid(&self, ino: InodeId) -> FsResult<bool> {
        if self.volume.tree().lacks_set_ids(ino) {
            return Ok(false);
        }
        Ok(set_ids(&self.attributes_inside(ino).await?) != 0)
    }

    /// Counts for statfs.
    pub async fn space(&self) -> FsResult<Space> {
        let statistics = match self.volume.tree().statistics().await {
            Ok(statistics) => statistics,
            // `df` of an unreachable volume shows zeros rather than failing for every other file system too.
            Err(failure) if failure.kind() == ErrorKind::Unavailable => Default::default(),
            Err(failure) => return Err(failure.into()),
        };
        let quota = statistics.quota.unwrap_or_default();
        let (used_bytes, free_bytes) =
            room(quota.limits.bytes, quota.usage.bytes, (statistics.bytes, FREE_BYTES));
        let (used_inodes, free_inodes) =
            room(quota.limits.inodes, quota.usage.inodes, (statistics.inodes, FREE_INODES));
        let writable = |free| if self.volume.read_only() { 0 } else { free };
        let (free_bytes, free_inodes) = (writable(free_bytes), writable(free_inodes));
        Ok(Space { used_bytes, free_bytes, used_inodes, free_inodes })
    }
}

/// The set-id bits that go when somebody without CAP_FSETID changes what an inode is. Set-gid without group execution is the
/// mark of mandatory locking and stays.
pub(super) fn set_ids(attributes: &Attributes) -> u16 {
    match attributes.kind {
        FileKind::Directory => 0,
        _ if attributes.mode & 0o2010 == 0o2010 => attributes.mode & 0o6000,
        _ => attributes.mode & 0o4000,
    }
}

/// What is used and what is free: of the volume's quota, if it has one, else what is there and more than anybody needs.
fn room(limit: Option<u64>, used: i64, without: (u64, u64)) -> (u64, u64) {
    let Some(limit) = limit else { return without };
    let used = used.max(0) as u64;
    (used, limit.saturating_sub(used))
}
