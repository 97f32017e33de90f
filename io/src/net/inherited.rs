//! Descriptors that a forked child inherits from a thread of its parent: nobody there uses them, and whoever waits for
//! their other ends to be closed waits for the child as well.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

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
}
