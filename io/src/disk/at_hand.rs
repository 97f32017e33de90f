//! What the kernel has in memory of files, without a wait for their disk.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::path::Path;

use memmap2::MmapOptions;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::param::page_size;

/// What kernels, filters of system calls and file systems say that know no such call.
const UNKNOWN: [Errno; 4] = [Errno::NOSYS, Errno::INVAL, Errno::OPNOTSUPP, Errno::PERM];

/// Opens a file to be read; `None` where a look at the disk would have to come first.
///
/// # Errors
/// `Unsupported` where the kernel (before 5.12) cannot tell.
pub fn open_at_hand(path: &Path) -> io::Result<Option<File>> {
    match openat2(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::CACHED) {
        Ok(file) => Ok(Some(file.into())),
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(told(error)),
    }
}

/// Reads a file from its beginning, and gives how many bytes came; `None` where a wait for the disk would have to come first, which
/// then begins to read ahead. Fewer than `buffer` takes are all that the file has, or all of it that is in memory.
///
/// # Errors
/// `Unsupported` where the file system cannot tell.
pub fn read_at_hand(file: &File, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match preadv2(file, &mut [IoSliceMut::new(buffer)], 0, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(Some(count)),
        // A pipe: nobody knows.
        Err(Errno::AGAIN | Errno::SPIPE) => Ok(None),
        Err(error) => Err(told(error)),
    }
}

fn told(error: Errno) -> io::Error {
    if UNKNOWN.contains(&error) { io::ErrorKind::Unsupported.into() } else { error.into() }
}

/// Whether the kernel has all of the first `length` bytes of a file in memory. No read begins by that.
pub fn is_at_hand(file: &File, length: usize) -> bool {
    // SAFETY: nothing is read through the mapping, so that it does not matter who changes the file.
    #[allow(unsafe_code)]
    let Ok(map) = (unsafe { MmapOptions::new().len(length).map(file) }) else { return false };
    let mut pages = vec![0_u8; length.div_ceil(page_size())];
    // SAFETY: the mapping is of `length` bytes, and there is a byte for each of its pages.
    #[allow(unsafe_code)]
    let told = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr()) };
    told == 0 && pages.iter().all(|page| page & 1 == 1)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// Has the kernel forget a file's bytes; false where it keeps them all the same, as in memory.
    fn forget(file: &File) -> bool {
        file.sync_all().expect("sync");
        // SAFETY: a call on an open descriptor that takes numbers only.
        #[allow(unsafe_code)]
        let told = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        told == 0 && super::super::is_local(file)
    }

    #[test]
    fn what_the_kernel_has_is_read_and_what_it_has_not_is_left() {
        let folder = tempfile::tempdir().expect("scratch");
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 10_000]).expect("write");
        let mut buffer = [0; 10_001];
        let file = open_at_hand(&path).expect("open").expect("it was just made");
        assert_eq!(read_at_hand(&file, &mut buffer).expect("read"), Some(10_000));
        assert_eq!(buffer[..10_000], [7; 10_000]);
        assert!(is_at_hand(&file, 10_000));
        if forget(&file) {
            assert!(!is_at_hand(&file, 10_000));
            let found = read_at_hand(&file, &mut buffer).expect("read");
            assert!(found.is_none_or(|count| count == 10_000), "all of it, or none: {found:?}");
            std::fs::read(&path).expect("from the disk");
            assert_eq!(read_at_hand(&file, &mut buffer).expect("read"), Some(10_000));
        }
        // That there is none may be known, or not.
        match open_at_hand(&folder.path().join("none")) {
            Ok(found) => assert!(found.is_none()),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
        }
    }

    /// Who reads from one waits for who writes to it.
    #[test]
    fn nobody_waits_for_a_pipe() {
        let folder = tempfile::tempdir().expect("scratch");
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .expect("a pipe");
        let _writer = File::options().read(true).write(true).open(&path).expect("open");
        let file = open_at_hand(&path).expect("open").expect("it was just made");
        assert_eq!(read_at_hand(&file, &mut [0; 10]).expect("nothing to be told"), None);
    }
}
