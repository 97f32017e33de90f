//! Workers of a data loader, and signals that ask a whole job to end.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::{io, mem, ptr};

use pyo3::prelude::*;

/// The trainer that a worker works for, where that is not its parent; else 0.
static TRAINER: AtomicI32 = AtomicI32::new(0);

/// Has this process, a worker, heed `signals` of its parent alone, or of the `trainer` of that number, at which it ends.
///
/// What is run by it later heeds all, as a handler does not outlive exec.
#[pyfunction]
#[pyo3(signature = (signals, trainer=None))]
pub(crate) fn heed_parent(signals: Vec<c_int>, trainer: Option<libc::pid_t>) -> PyResult<()> {
    TRAINER.store(trainer.unwrap_or(0), Ordering::Relaxed);
    for signal in signals {
        // SAFETY: a sigaction of zeros is one without flags; the handler is of the kind that SA_SIGINFO says, and calls nothing
        // that may not be called by one.
        let outcome = unsafe {
            let mut action: libc::sigaction = mem::zeroed();
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = heed;
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &action, ptr::null_mut())
        };
        if outcome != 0 {
            return Err(io::Error::last_os_error().into());
        }
    }
    Ok(())
}

extern "C" fn heed(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    let trainer = TRAINER.load(Ordering::Relaxed);
    // SAFETY: the kernel gives a handler of this kind what it knows of the signal; getppid and _exit are made for handlers.
    unsafe {
        let sender = (*info).si_pid();
        if sender == if trainer == 0 { libc::getppid() } else { trainer } {
            libc::_exit(0);
        }
    }
}
