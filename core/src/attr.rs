//! What stat shows of an inode.

use serde::{Deserialize, Serialize};

use crate::InodeId;

/// The type of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// A point in time: seconds since the epoch (negative before 1970) and nanoseconds in that second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Timestamp {
    /// Seconds since 1970-01-01T00:00:00Z.
    pub seconds: i64,
    /// Nanoseconds, 0 to 999,999,999.
    pub nanos: u32,
}

/// The owner, and the group, of what nobody gave one: each mount shows its own, see [`Appearance`]. chown(2) takes this number for
/// "leave it as it is", so that nobody has it.
pub const UNSET_ID: u32 = u32::MAX;
/// The mode of what nobody gave one.
pub const UNSET_MODE: u16 = 1 << 15;

/// What a mount shows of inodes that nobody gave an owner, a group or a mode: what was found in the bucket, and the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appearance {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits of files.
    pub file_mode: u16,
    /// Permission bits of directories.
    pub directory_mode: u16,
}

/// The attributes of an inode, as stat shows them, but for what nobody has set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// The inode.
    pub ino: InodeId,
    /// Its type.
    pub kind: FileKind,
    /// Permission, set-id and sticky bits (0 to 0o7777), or [`UNSET_MODE`].
    pub mode: u16,
    /// Owner, or [`UNSET_ID`].
    pub uid: u32,
    /// Group, or [`UNSET_ID`].
    pub gid: u32,
    /// Names of the inode; for directories 2 plus its subdirectories.
    pub nlink: u32,
    /// Device number of device nodes, else 0.
    pub rdev: u32,
    /// Bytes of a file, length of a symlink's target, 0 for a directory.
    pub size: u64,
    /// Bytes of a file that are not holes. Of a file with many extents, what follows the first ones counts whole.
    pub allocated: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of anything.
    pub ctime: Timestamp,
    /// Counts changes of content: two reads under one generation saw the same bytes.
    pub generation: u64,
}

impl Attributes {
    /// These with what nobody has set as `appearance` says.
    pub fn shown_as(mut self, appearance: &Appearance) -> Self {
        if self.uid == UNSET_ID {
            self.uid = appearance.uid;
        }
        if self.gid == UNSET_ID {
            self.gid = appearance.gid;
        }
        if self.mode & UNSET_MODE != 0 {
            let is_directory = self.kind == FileKind::Directory;
            self.mode = if is_directory { appearance.directory_mode } else { appearance.file_mode };
        }
        self
    }

    /// Whether an access at `now` is to be noted, as relatime has it: the last one was before a change, or a day ago.
    pub fn access_is_due(&self, now: Timestamp) -> bool {
        const DAY_SECONDS: i64 = 86_400;
        let is_old = now.seconds.saturating_sub(self.atime.seconds) >= DAY_SECONDS;
        now > self.atime && (self.atime <= self.mtime || self.atime <= self.ctime || is_old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file((atime, mtime, ctime): (i64, i64, i64)) -> Attributes {
        let time = |seconds| Timestamp { seconds, nanos: 0 };
        Attributes {
            ino: InodeId::ROOT,
            kind: FileKind::File,
            mode: 0,
            uid: 0,
            gid: 0,
            nlink: 1,
            rdev: 0,
            size: 0,
            allocated: 0,
            atime: time(atime),
            mtime: time(mtime),
            ctime: time(ctime),
            generation: 0,
        }
    }

    #[test]
    fn what_nobody_set_is_shown_as_the_mount_says() {
        let appearance = Appearance { uid: 1, gid: 2, file_mode: 0o640, directory_mode: 0o750 };
        let check = |kind, (uid, gid, mode), expected| {
            let shown = Attributes { kind, uid, gid, mode, ..file((0, 0, 0)) }.shown_as(&appearance);
            assert_eq!((shown.uid, shown.gid, shown.mode), expected);
        };
        check(FileKind::File, (UNSET_ID, UNSET_ID, UNSET_MODE), (1, 2, 0o640));
        check(FileKind::Directory, (UNSET_ID, UNSET_ID, UNSET_MODE), (1, 2, 0o750));
        check(FileKind::File, (7, UNSET_ID, 0), (7, 2, 0));
        check(FileKind::Directory, (UNSET_ID, 0, 0o7777), (1, 0, 0o7777));
        check(FileKind::File, (0, 0, UNSET_MODE), (0, 0, 0o640));
    }

    #[test]
    fn an_access_is_noted_after_a_change_and_once_a_day() {
        let time = |seconds| Timestamp { seconds, nanos: 0 };
        let check = |times, now, expected| {
            let attributes = file(times);
            assert_eq!(attributes.access_is_due(time(now)), expected, "{attributes:?} {now}");
        };
        check((5, 5, 5), 6, true);
        check((6, 5, 5), 7, false);
        check((6, 5, 8), 9, true);
        check((6, 8, 5), 9, true);
        check((6, 5, 5), 86_405, false);
        check((6, 5, 5), 86_406, true);
        check((6, 8, 8), 6, false);
        check((-5, -9, -9), 86_395, true);
    }
}
