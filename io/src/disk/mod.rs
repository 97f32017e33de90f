//! What the standard library does not ask the kernel for about files on disks.
#![allow(unsafe_code)]

mod at_hand;
mod direct;
mod ring;
mod shared;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;

pub use at_hand::{is_at_hand, open_at_hand, read_at_hand};
pub use direct::{ALIGNMENT, is_local, open_direct, pass_cache, write_direct};
pub use ring::Ring;
pub use shared::shared_file_system;

/// How much a file system holds, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Of all.
    pub total: u64,
    /// Of what any user may still write.
    pub free: u64,
}

/// The space of the file system that `path` is on. Blocks where that hangs.
///
/// # Errors
/// What the file system says.
pub fn space(path: &Path) -> io::Result<Space> {
    let told = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(told.f_frsize);
    Ok(Space { total: bytes(told.f_blocks), free: bytes(told.f_bavail) })
}

/// What file systems say that know no such call; whoever syncs the file then writes all of it out.
const UNKNOWN: [i32; 4] = [libc::ENOSYS, libc::EINVAL, libc::EOPNOTSUPP, libc::ESPIPE];

/// Waits until bytes `range` of a file, as far as they lie in the page cache alone, are on their way through its disk. What
/// makes them survive a failure of power, as the file's size and the disk's own cache, is left to fsync(2). Blocks.
pub(crate) fn write_out(file: &File, range: Range<u64>) -> io::Result<()> {
    let (at, length) = (range.start as libc::off64_t, (range.end - range.start) as libc::off64_t);
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: a call on an open descriptor that takes numbers only.
    if unsafe { libc::sync_file_range(file.as_raw_fd(), at, length, flags) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(code) if UNKNOWN.contains(&code) => Ok(()),
        _ => Err(error),
    }
}
