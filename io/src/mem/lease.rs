//! Who reads which bytes of shared memory, known to all processes that have it.
//!
//! A lease is a lock of the kernel's on a range of the memory's file (`fcntl(2)`, open file description locks). The
//! kernel ends it with its holder, however that one ends. Descriptors that processes send one another share one
//! description, whose locks never meet; so each lease has a description of its own.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use forebay_core::{Error, Result};

use super::SharedMemory;

/// Says that bytes of shared memory are being read, until it is dropped.
#[derive(Debug)]
pub struct Lease(#[expect(dead_code, reason = "holds the lock")] File);

impl SharedMemory {
    /// Takes a lease of `range`.
    ///
    /// # Errors
    /// What the kernel says: where `/proc` is not mounted, the memory cannot be opened anew.
    pub fn lease(&self, range: Range<usize>) -> Result<Lease> {
        let name = format!("/proc/self/fd/{}", self.as_fd().as_raw_fd());
        let file = File::open(name).map_err(|error| Error::from(error).context("open shared memory anew"))?;
        control(&file, libc::F_OFD_SETLK, libc::F_RDLCK, &range)?;
        Ok(Lease(file))
    }

    /// Whether there is a lease of any of `range`, in whichever process.
    pub fn is_leased(&self, range: Range<usize>) -> Result<bool> {
        let found = control(self, libc::F_OFD_GETLK, libc::F_WRLCK, &range)?;
        Ok(found.l_type != libc::F_UNLCK as libc::c_short)
    }
}

fn control(
    file: &impl AsFd,
    command: libc::c_int,
    kind: libc::c_int,
    range: &Range<usize>,
) -> Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.start as libc::off_t,
        l_len: range.len() as libc::off_t,
        l_pid: 0,
    };
    // SAFETY: a call on an open descriptor, with a lock that lives across it.
    if unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, &raw mut lock) } < 0 {
        return Err(Error::from(std::io::Error::last_os_error()).context("lease shared memory"));
    }
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_seen_by_all_that_have_the_memory_until_its_last_holder_is_gone() {
        let memory = SharedMemory::create("test", 4 * 4096).expect("create");
        let sent = memory.as_fd().try_clone_to_owned().expect("dup");
        let sent = SharedMemory::from_fd(sent).expect("take over");
        let seen = |range: Range<usize>| {
            let both = [&memory, &sent].map(|memory| memory.is_leased(range.clone()).expect("told"));
            assert_eq!(both[0], both[1]);
            both[0]
        };
        assert!(!seen(0..4 * 4096));
        let first = memory.lease(4096..8192).expect("lease");
        let second = sent.lease(4096..8192).expect("lease");
        assert!(seen(4096..8192) && seen(8191..8193) && seen(0..4 * 4096));
        assert!(!seen(0..4096) && !seen(8192..4 * 4096), "only what was asked for");
        drop(first);
        assert!(seen(4096..8192));
        drop(second);
        assert!(!seen(0..4 * 4096));
    }
}
