//! Descriptors that a forked child inherits from a thread of its parent: nobody there uses them, and whoever waits for
//! their other ends to be closed waits for the child as well.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use parking_lot::Mutex;

/// The descriptors that one thread of this process holds open, for a forked child to close.
#[derive(Debug)]
pub struct Inherited {
    process: u32,
    fds: Mutex<Vec<RawFd>>,
}

/// That they are open. To be dropped before any of them is closed: its number may be another file's then.
#[derive(Debug)]
#[must_use = "they are noted for as long as this is there"]
pub struct Noted<'a>(&'a Inherited);

impl Inherited {
    /// None yet, of this process.
    pub fn new() -> Self {
        Self { process: std::process::id(), fds: Mutex::default() }
    }

    /// Notes those that a thread owns which no forked child has: one that forks itself must not own them.
    pub fn note<'fd>(&self, fds: impl Iterator<Item = BorrowedFd<'fd>>) -> Noted<'_> {
        *self.fds.lock() = fds.map(|fd| fd.as_raw_fd()).collect();
        Noted(self)
    }

    /// Closes them in a forked child; nothing in the process that they are of.
    pub fn close_in_child(&self) {
        if self.process == std::process::id() {
            return;
        }
        // Where the thread was changing them at the fork they stay open.
        let Some(mut fds) = self.fds.try_lock() else { return };
        for fd in fds.drain(..) {
            // SAFETY: open at the fork, as `Noted` was there; their owner was on a thread that the child does not have, so
            // that nobody here uses them or closes them again.
            unsafe { libc::close(fd) };
        }
    }
}

impl Default for Inherited {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        self.0.fds.lock().clear();
    }
}

/// Where none is noted.
const NONE: RawFd = -1;

/// A descriptor that any thread of this process may be using when a child is forked, which is to be rid of it even so:
/// nothing here is waited for.
#[derive(Debug)]
pub struct InUse {
    process: u32,
    fd: AtomicI32,
}

/// That it is open. To be dropped before it is closed.
#[derive(Debug)]
pub(super) struct Using {
    place: Arc<InUse>,
    fd: RawFd,
}

impl InUse {
    /// None yet, of this process.
    pub fn new() -> Self {
        Self { process: std::process::id(), fd: AtomicI32::new(NONE) }
    }

    /// Notes one, in the place of an earlier one.
    pub(super) fn note(self: Arc<Self>, fd: BorrowedFd<'_>) -> Using {
        let fd = fd.as_raw_fd();
        self.fd.store(fd, Ordering::SeqCst);
        Using { place: self, fd }
    }

    /// Has it be open no more in a forked child; nothing in the process that it is of. Its number stays taken, as there may be
    /// an owner that closes it. Where no descriptor is left for what takes its place, it stays open.
    pub fn leave_in_child(&self) {
        if self.process == std::process::id() {
            return;
        }
        let fd = self.fd.swap(NONE, Ordering::SeqCst);
        if fd == NONE {
            return;
        }
        // SAFETY: the path ends with a zero. `fd` was open at the fork, as `Using` was there, and whoever owns it here finds
        // another file under its number; what is closed was opened here.
        unsafe {
            let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            if nothing >= 0 {
                libc::dup3(nothing, fd, libc::O_CLOEXEC);
                libc::close(nothing);
            }
        }
    }
}

impl Default for InUse {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        // Not a later one's.
        self.place.fd.compare_exchange(self.fd, NONE, Ordering::SeqCst, Ordering::SeqCst).ok();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::mem::ManuallyDrop;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::net::Meeting;

    /// A name was taken, and a peer waited, for as long as a forked child lived. No child is forked here, which would hold
    /// what other tests have open.
    #[test]
    fn a_forked_child_holds_neither_a_name_nor_a_connection() {
        let name = format!("forebay-test-inherited-{}", std::process::id());
        // As in a child: their owners never get to close them.
        let meeting = ManuallyDrop::new(Meeting::hold(&name).expect("hold"));
        let (near, mut far) = UnixStream::pair().expect("pair");
        let near = ManuallyDrop::new(near);
        let here = Inherited::new();
        let noted = here.note([meeting.as_fd(), near.as_fd()].into_iter());
        here.close_in_child();
        assert!(Meeting::hold(&name).is_err(), "this process is no child");
        drop(noted);
        assert!(here.fds.lock().is_empty(), "their numbers may be others' by now");
        let child = Inherited { process: here.process + 1, fds: Mutex::default() };
        let _noted = child.note([meeting.as_fd(), near.as_fd()].into_iter());
        child.close_in_child();
        Meeting::hold(&name).expect("free");
        far.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
        assert_eq!(far.read(&mut [0]).expect("closed"), 0);
    }

    /// One that another thread of the parent was in a call with stayed open, as did one that could not be looked at.
    #[test]
    fn a_forked_child_is_rid_of_what_threads_were_using() {
        let pair = || UnixStream::pair().expect("pair");
        let ((near, _far), (other, mut far)) = (pair(), pair());
        let here = Arc::new(InUse::new());
        let (first, second) = (here.clone().note(near.as_fd()), here.clone().note(other.as_fd()));
        drop(first);
        assert_eq!(here.fd.load(Ordering::SeqCst), other.as_raw_fd(), "the newer one");
        here.leave_in_child();
        far.set_nonblocking(true).expect("set");
        far.read(&mut [0]).expect_err("this process is no child");
        drop(second);
        assert_eq!(here.fd.load(Ordering::SeqCst), NONE, "its number may be another's by now");
        let child = Arc::new(InUse { process: here.process + 1, fd: AtomicI32::new(NONE) });
        let _using = child.clone().note(other.as_fd());
        child.leave_in_child();
        child.leave_in_child();
        assert_eq!(far.read(&mut [0]).expect("closed"), 0);
        // Its owner closes what is there now.
        other.peer_addr().expect_err("no socket");
    }
}
