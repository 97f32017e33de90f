//! Notice to quit: signals that ask a process to end, for one that finishes something first.
//!
//! Nothing is interrupted: the signals are held back for good, and a descriptor tells that one came.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use forebay_core::Result;

use super::wait_readable;

/// What asks a process to end: service managers and batch systems, a terminal, one that is closed.
const ASKING: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
/// What means something to other processes of a job, to all of which it may be sent, and would end this one.
const MEANT_FOR_OTHERS: [libc::c_int; 2] = [libc::SIGUSR1, libc::SIGUSR2];

/// Whether this process was asked to end. It can be read from, and waited for, once it was, and ever after.
#[derive(Debug)]
pub struct Notice(OwnedFd);

impl Notice {
    /// Holds the signals back from this thread and those that it starts: for the first thread of a process, before others.
    pub fn take() -> Result<Self> {
        hold_back(&set_of(&[ASKING.as_slice(), &MEANT_FOR_OTHERS].concat()))?;
        let asking = set_of(&ASKING);
        // SAFETY: `asking` is a set that was initialised.
        let fd = unsafe { libc::signalfd(-1, &raw const asking, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        // SAFETY: the kernel has just made it, so that this is its only owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Whether this process was asked to end by now.
    pub fn is_given(&self) -> Result<bool> {
        Ok(!wait_readable(&[self.as_fd()], Duration::ZERO)?.is_empty())
    }
}

impl AsFd for Notice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: a set is plain numbers, which `sigemptyset` initialises; each signal is one that there is.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

fn hold_back(set: &libc::sigset_t) -> Result<()> {
    // SAFETY: `set` was initialised; what was held back before is not asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(std::io::Error::from_raw_os_error(error).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raise(signal: libc::c_int) {
        // SAFETY: to this thread alone, which holds it back.
        assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), signal) }, 0);
    }

    #[test]
    fn a_process_that_was_asked_to_end_knows_and_goes_on() {
        for signal in ASKING {
            // Signals to a thread are pending there alone: each gets one of its own.
            let asked = std::thread::spawn(move || {
                let notice = Notice::take().expect("notice");
                MEANT_FOR_OTHERS.into_iter().for_each(raise);
                let before = notice.is_given().expect("given");
                raise(signal);
                (before, [(); 2].map(|()| notice.is_given().expect("given")))
            });
            assert_eq!(asked.join().expect("it goes on"), (false, [true; 2]), "signal {signal}");
        }
    }
}
