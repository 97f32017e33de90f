//! What the standard library does not ask the kernel for about files on disks.
//!
//! For threads that may block.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// What file systems say that know no such call; whoever syncs the file then writes all of it out.
const UNKNOWN: [i32; 4] = [libc::ENOSYS, libc::EINVAL, libc::EOPNOTSUPP, libc::ESPIPE];

/// Waits until bytes `range` of a file, as far as they lie in the page cache alone, are on their way through its disk. What
/// makes them survive a failure of power, as the file's size and the disk's own cache, is left to fsync(2).
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
