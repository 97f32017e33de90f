//! Between Forebay's words and the FUSE library's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_core::{Attributes, FileKind, InodeId, Timestamp};
use forebay_metadata::tree::LockKind;
use fuser::{FileAttr, FileHandle, FileType, INodeNo, TimeOrNow};

use crate::errno::Errno;
use crate::fs::{Listed, TimeChange};
use crate::handle::Handle;

/// Bytes that programs are told to read and write at a time (`st_blksize`).
const PREFERRED_IO_BYTES: u32 = 128 << 10;
/// The unit of `st_blocks`.
const STAT_BLOCK_BYTES: u64 = 512;

pub(super) fn inode(ino: INodeNo) -> InodeId {
    InodeId(ino.0)
}

pub(super) fn handle(handle: FileHandle) -> Handle {
    Handle(handle.0)
}

/// What the kernel is told. It names inodes, not paths, so that one which is not there any more is gone: upon ESTALE it looks
/// the path up anew, where ENOENT would end in a program that makes a file. A miss is an answer, and no error.
pub(super) fn errno(errno: Errno) -> fuser::Errno {
    match errno {
        Errno(libc::ENOENT) => fuser::Errno::ESTALE,
        other => named(other),
    }
}

/// The same for what names an entry, which may be the one that is missing.
pub(super) fn named(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.0)
}

pub(super) fn kind(kind: FileKind) -> FileType {
    match kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// The kind in the file type bits of `mode`, if they spell one. No bits mean a file, as mknod(2) says.
pub(super) fn kind_of_mode(mode: u32) -> Option<FileKind> {
    Some(match mode & libc::S_IFMT {
        0 | libc::S_IFREG => FileKind::File,
        libc::S_IFDIR => FileKind::Directory,
        libc::S_IFLNK => FileKind::Symlink,
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        libc::S_IFCHR => FileKind::CharDevice,
        libc::S_IFBLK => FileKind::BlockDevice,
        _ => return None,
    })
}

/// What a type of lock of fcntl(2) is, if it is one.
pub(super) fn lock_kind(kind: i32) -> Option<LockKind> {
    match kind {
        libc::F_RDLCK => Some(LockKind::Read),
        libc::F_WRLCK => Some(LockKind::Write),
        _ => None,
    }
}

pub(super) fn lock_type(kind: LockKind) -> i32 {
    match kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
    }
}

pub(super) fn attributes(attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(attributes.ino.0),
        size: attributes.size,
        blocks: attributes.allocated.div_ceil(STAT_BLOCK_BYTES),
        atime: system_time(attributes.atime),
        mtime: system_time(attributes.mtime),
        ctime: system_time(attributes.ctime),
        crtime: UNIX_EPOCH,
        kind: kind(attributes.kind),
        perm: attributes.mode,
        nlink: attributes.nlink,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: attributes.rdev,
        blksize: PREFERRED_IO_BYTES,
        flags: 0,
    }
}

/// Attributes of a listed entry. Of `.` and `..` the kernel reads inode and type only.
pub(super) fn listed(entry: &Listed) -> FileAttr {
    match entry {
        Listed::Name(_, found) => attributes(found),
        Listed::Dots(ino, _) => FileAttr { ino: INodeNo(ino.0), ..nothing(FileType::Directory) },
    }
}

/// What a miss is answered with: inode 0, which the kernel keeps as "no such name" for the time given.
pub(super) fn miss() -> FileAttr {
    nothing(FileType::RegularFile)
}

fn nothing(kind: FileType) -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

/// A time that the platform's clock type cannot hold becomes the epoch.
fn system_time(time: Timestamp) -> SystemTime {
    let whole = Duration::from_secs(time.seconds.unsigned_abs());
    let seconds = match time.seconds < 0 {
        true => UNIX_EPOCH.checked_sub(whole),
        false => UNIX_EPOCH.checked_add(whole),
    };
    seconds
        .and_then(|seconds| seconds.checked_add(Duration::from_nanos(u64::from(time.nanos))))
        .unwrap_or(UNIX_EPOCH)
}

pub(super) fn time_change(time: TimeOrNow) -> TimeChange {
    match time {
        TimeOrNow::Now => TimeChange::Now,
        TimeOrNow::SpecificTime(time) => TimeChange::At(timestamp(time)),
    }
}

/// The time as the kernel sent it. For times before 1970 the library (fuser 0.18, `system_time_from_time`) takes the
/// nanoseconds away from the epoch instead of adding them to the second below it; read the same way, they come back.
fn timestamp(time: SystemTime) -> Timestamp {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Timestamp {
            seconds: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            nanos: after.subsec_nanos(),
        },
        Err(before) => {
            let before = before.duration();
            let seconds = i64::try_from(before.as_secs()).map_or(i64::MIN, |seconds| -seconds);
            Timestamp { seconds, nanos: before.subsec_nanos() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_go_out_as_they_are() {
        let before = system_time(Timestamp { seconds: -2, nanos: 250_000_000 });
        assert_eq!(before + Duration::from_millis(1750), UNIX_EPOCH);
        let after = system_time(Timestamp { seconds: 2, nanos: 250_000_000 });
        assert_eq!(after, UNIX_EPOCH + Duration::from_millis(2250));
    }

    /// What the library makes of (-2 s, 250 ms), see `timestamp`.
    #[test]
    fn times_before_1970_come_in_as_the_kernel_sent_them() {
        let received = UNIX_EPOCH - Duration::new(2, 250_000_000);
        let sent = Timestamp { seconds: -2, nanos: 250_000_000 };
        assert_eq!(time_change(TimeOrNow::SpecificTime(received)), TimeChange::At(sent));
    }

    #[test]
    fn kinds_and_modes_agree() {
        for (mode, expected) in [
            (0o644, Some(FileKind::File)),
            (libc::S_IFREG | 0o644, Some(FileKind::File)),
            (libc::S_IFIFO, Some(FileKind::Fifo)),
            (libc::S_IFSOCK, Some(FileKind::Socket)),
            (libc::S_IFCHR, Some(FileKind::CharDevice)),
            (libc::S_IFBLK, Some(FileKind::BlockDevice)),
            (libc::S_IFMT, None),
        ] {
            assert_eq!(kind_of_mode(mode), expected, "{mode:o}");
        }
    }
}
