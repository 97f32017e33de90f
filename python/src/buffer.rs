//! Memory and descriptors that Python owns and lends by number.
//!
//! torch and numpy tell where their bytes are as an address and a length. The Python side keeps the object alive,
//! and does not resize it, until the call (or the background copy) that was given the numbers has returned. Another
//! thread may still write into it meanwhile: the copy is then of no use, and the version counters tell.
#![allow(unsafe_code)]

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use forebay_io::net::{FdStream, InUse};

/// Where some object's bytes lie.
pub(crate) type Span = (usize, usize);

/// The bytes of a live object, to be read.
pub(crate) fn bytes<'a>((address, length): Span) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: the caller on the Python side keeps `length` bytes at `address` alive, as stated at the top.
    unsafe { std::slice::from_raw_parts(address as *const u8, length) }
}

/// The bytes of a live object that nothing else looks at, to be written.
pub(crate) fn bytes_mut<'a>((address, length): Span) -> &'a mut [u8] {
    if length == 0 {
        return &mut [];
    }
    // SAFETY: as above; the object was made for this call, and each is given once.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) }
}

/// Takes over one end of a connected unix socket.
pub(crate) fn stream(fd: i32) -> FdStream {
    FdStream::new(socket(fd))
}

/// As [`stream`], noted as in use.
pub(crate) fn noted_stream(fd: i32, place: Arc<InUse>) -> FdStream {
    FdStream::noted(socket(fd), place)
}

fn socket(fd: i32) -> UnixStream {
    // SAFETY: the Python side detached the descriptor, so that this is its only owner.
    UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) })
}
