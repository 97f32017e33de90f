//! Files read and written past the page cache.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// What disks want reads and writes past the page cache aligned to, in memory and in the file, in bytes.
pub const ALIGNMENT: usize = 4096;

/// File systems of this host's disks, as statfs(2) calls them: ext4, XFS, Btrfs, F2FS, and overlayfs and tmpfs, which lie on
/// them or in memory.
const LOCAL: [u32; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x794c_7630, 0x0102_1994];

/// Whether a file lies on a disk of this host, or in its memory, and on no server.
pub fn is_local(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| LOCAL.contains(&(found.f_type as u32)))
}

/// Opens a file to be written past the page cache, where the file system has that.
pub fn open_direct(path: &Path) -> Option<File> {
    File::options().write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path).ok()
}

/// Writes the first of `bytes` past the page cache and gives how many; the rest is not aligned, or the file system wants
/// more than that.
pub fn write_direct(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    let end = bytes.len() / ALIGNMENT * ALIGNMENT;
    let mut done = 0;
    while done < end {
        let (left, at) = (&bytes[done..end], offset + done as u64);
        if !(left.as_ptr() as usize).is_multiple_of(ALIGNMENT) || !at.is_multiple_of(ALIGNMENT as u64) {
            break;
        }
        match file.write_at(left, at) {
            Ok(0) => break,
            Ok(written) => done += written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => match error.kind() {
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => break,
                _ => return Err(error),
            },
        }
    }
    Ok(done)
}

/// Has what is read from a file from now on come from its disk, and stay out of the page cache; false where the file system has no
/// such way. Who reads then keeps to [`ALIGNMENT`].
pub fn pass_cache(file: &File) -> bool {
    is_local(file) && fcntl_getfl(file).and_then(|flags| fcntl_setfl(file, flags | OFlags::DIRECT)).is_ok()
}
