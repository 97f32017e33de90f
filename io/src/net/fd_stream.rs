//! Frames over a unix socket between two processes of one host; a frame may carry one file descriptor. Over TCP, between
//! hosts, none does.
//!
//! A frame is its length (u32, little-endian) and that many bytes. A descriptor rides with the length, so that the
//! frame it belongs to is never in doubt. Calls block; [`FdStream::readable`] waits with a limit.
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};

use super::inherited::{InUse, Using};

/// The longest frame, in bytes: a manifest of a million tensors fits, a broken length does not exhaust memory.
pub const MAX_FRAME: usize = 512 << 20;

/// Room for the control message that carries one descriptor; larger than any platform's header and padding.
const CONTROL: usize = 64;

/// A connected unix stream socket that sends and receives frames.
#[derive(Debug)]
pub struct FdStream {
    socket: Arc<Socket>,
    /// What came of the next frame.
    begun: Option<Begun>,
}

/// What all handles on a connection share: one descriptor, and its note for forked children, which goes first.
#[derive(Debug)]
struct Socket {
    _noted: Option<Using>,
    stream: UnixStream,
}

/// A part of a frame.
#[derive(Debug, Default)]
struct Begun {
    length: [u8; 4],
    /// Bytes of the length that came.
    length_read: usize,
    frame: Vec<u8>,
    /// Bytes of the frame that came.
    frame_read: usize,
    fd: Option<OwnedFd>,
}

/// What [`FdStream::receive_more`] found.
#[derive(Debug)]
pub enum Received {
    /// A whole frame, and the descriptor that came with it.
    Frame(Vec<u8>, Option<OwnedFd>),
    /// The other side closed between two frames.
    Closed,
    /// Nothing, or a part of a frame, which is kept.
    Pause,
}

impl FdStream {
    /// Wraps one end of a connection.
    pub fn new(stream: UnixStream) -> Self {
        Self { socket: Arc::new(Socket { _noted: None, stream }), begun: None }
    }

    /// Wraps a connection to another host, which carries no descriptors. All that is asked of the socket here is alike for both
    /// kinds but for who is at the other end.
    pub fn over_tcp(stream: TcpStream) -> Self {
        Self::new(UnixStream::from(OwnedFd::from(stream)))
    }

    /// As [`Self::new`], noted as in use for as long as there is a handle on it.
    pub fn noted(stream: UnixStream, place: Arc<InUse>) -> Self {
        let noted = place.note(stream.as_fd());
        Self { socket: Arc::new(Socket { _noted: Some(noted), stream }), begun: None }
    }

    fn stream(&self) -> &UnixStream {
        &self.socket.stream
    }

    /// Two connected ends.
    pub fn pair() -> Result<(Self, Self)> {
        let (left, right) = UnixStream::pair()?;
        Ok((Self::new(left), Self::new(right)))
    }

    /// A second handle on the same connection, and the same descriptor.
    pub fn share(&self) -> Self {
        Self { socket: self.socket.clone(), begun: None }
    }

    /// Ends the connection for both sides, whoever else holds a handle on it.
    pub fn shutdown(&self) {
        // The other side may be gone already, which is what was asked for.
        self.stream().shutdown(std::net::Shutdown::Both).ok();
    }

    /// Waits until one of `streams` at least can be received from, and tells which; none when `timeout` passed first.
    pub fn readable_among(streams: &[&Self], timeout: Duration) -> Result<Vec<usize>> {
        wait_readable(&streams.iter().map(AsFd::as_fd).collect::<Vec<_>>(), timeout)
    }

    /// Lets sending and receiving fail with `Unavailable` once the other side held them up for so long.
    pub fn set_patience(&self, patience: Duration) -> Result<()> {
        self.stream().set_read_timeout(Some(patience))?;
        Ok(self.stream().set_write_timeout(Some(patience))?)
    }

    /// The user at the other end of a unix socket, as the kernel knows it.
    pub fn peer_user(&self) -> Result<u32> {
        Ok(self.peer()?.uid)
    }

    /// The process at the other end that made or took the connection.
    pub fn peer_process(&self) -> Result<u32> {
        Ok(self.peer()?.pid.unsigned_abs())
    }

    fn peer(&self) -> Result<libc::ucred> {
        // SAFETY: all zeros is a valid `ucred`.
        let mut credentials: libc::ucred = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        let into = (&raw mut credentials).cast();
        let (fd, level) = (self.stream().as_raw_fd(), libc::SOL_SOCKET);
        // SAFETY: `into` points at a live `ucred`, and `length` says how long it is.
        match unsafe { libc::getsockopt(fd, level, libc::SO_PEERCRED, into, &mut length) } {
            0 => Ok(credentials),
            _ => Err(std::io::Error::last_os_error().into()),
        }
    }

    /// Sends one frame, with a descriptor if one is given.
    ///
    /// # Errors
    /// `Unavailable` when the other side is gone.
    pub fn send(&mut self, frame: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.send_while(frame, fd, &mut || false)
    }

    /// As [`Self::send`]; each time that the other side held it up for the [patience](Self::set_patience), it goes on if
    /// `goes_on` says so. Where that does not, a part may be sent, and the connection is of no use any more.
    pub fn send_while(
        &mut self,
        frame: &[u8],
        fd: Option<BorrowedFd<'_>>,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        if frame.len() > MAX_FRAME {
            return Err(Error::new(ErrorKind::TooLarge, format!("a frame of {} bytes", frame.len())));
        }
        let length = (frame.len() as u32).to_le_bytes();
        match fd {
            Some(fd) => self.send_with_fd(&length, fd, goes_on)?,
            None => self.patient(goes_on).write_all(&length)?,
        }
        Ok(self.patient(goes_on).write_all(frame)?)
    }

    /// The next frame and the descriptor that came with it; `None` when the other side closed between two frames.
    pub fn receive(&mut self) -> Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
        self.receive_while(&mut || false)
    }

    /// As [`Self::receive`], and goes on as [`Self::send_while`] does.
    pub fn receive_while(
        &mut self,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
        loop {
            match self.receive_more()? {
                Received::Frame(frame, fd) => return Ok(Some((frame, fd))),
                Received::Closed => return Ok(None),
                Received::Pause if goes_on() => {}
                Received::Pause => return Err(std::io::Error::from(std::io::ErrorKind::WouldBlock).into()),
            }
        }
    }

    /// Receives what is there of the next frame, and waits for more as long as the [patience](Self::set_patience) lasts. A
    /// frame that pauses is gone on with by the next call.
    ///
    /// # Errors
    /// `Unavailable` when the other side is gone in the middle of a frame; `Corrupt` for one of an impossible length.
    pub fn receive_more(&mut self) -> Result<Received> {
        let mut begun = self.begun.take().unwrap_or_default();
        match self.fill(&mut begun) {
            Ok(true) => Ok(Received::Frame(begun.frame, begun.fd)),
            Ok(false) => Ok(Received::Closed),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                self.begun = Some(begun).filter(|begun| begun.length_read > 0);
                Ok(Received::Pause)
            }
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                Err(Error::corrupt(error.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a part of a frame was received and the rest was not.
    pub fn is_amid(&self) -> bool {
        self.begun.is_some()
    }

    /// Reads on until the frame is whole; false when the other side closed before it began.
    fn fill(&self, begun: &mut Begun) -> std::io::Result<bool> {
        if begun.length_read == 0 {
            (begun.length_read, begun.fd) = self.receive_with_fd(&mut begun.length)?;
            if begun.length_read == 0 {
                return Ok(false);
            }
        }
        self.read_on(&mut begun.length, &mut begun.length_read)?;
        let length = u32::from_le_bytes(begun.length) as usize;
        if length > MAX_FRAME {
            let fact = format!("a frame announces {length} bytes");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, fact));
        }
        if begun.frame.len() < length {
            begun.frame = vec![0; length];
        }
        self.read_on(&mut begun.frame, &mut begun.frame_read)?;
        Ok(true)
    }

    /// Fills `bytes` from `read` on.
    fn read_on(&self, bytes: &mut [u8], read: &mut usize) -> std::io::Result<()> {
        while *read < bytes.len() {
            match self.stream().read(&mut bytes[*read..]) {
                Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Ok(more) => *read += more,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the other side has closed the connection; what it sent before may still be there to be received.
    pub fn is_left(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.stream().as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one live pollfd, and the count says one.
        unsafe { libc::poll(&mut poll, 1, 0) > 0 && poll.revents & libc::POLLHUP != 0 }
    }

    /// Waits until a frame, or the end of the connection, can be received; false when `timeout` passed first.
    pub fn readable(&self, timeout: Duration) -> Result<bool> {
        let mut poll = libc::pollfd { fd: self.stream().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let timeout_ms = timeout.as_millis().min(i32::MAX as u128) as libc::c_int;
        // SAFETY: one live pollfd, and the count says one.
        match unsafe { libc::poll(&mut poll, 1, timeout_ms) } {
            0 => Ok(false),
            count if count > 0 => Ok(true),
            _ => {
                let error = std::io::Error::last_os_error();
                // A signal ends the wait early, so that the caller can look at it.
                if error.kind() == std::io::ErrorKind::Interrupted { Ok(false) } else { Err(error.into()) }
            }
        }
    }

    fn patient<'a>(&'a self, goes_on: &'a mut dyn FnMut() -> bool) -> Patient<'a> {
        Patient { stream: self.stream(), goes_on }
    }

    fn send_with_fd(
        &mut self,
        bytes: &[u8; 4],
        fd: BorrowedFd<'_>,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let mut part = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
        let mut control = ControlBuffer([0; CONTROL]);
        let mut message = message(&mut part, &mut control);
        let size = size_of::<libc::c_int>() as libc::c_uint;
        // SAFETY: the control buffer is aligned and larger than one header with one descriptor, so that the first
        // header exists and its data lies inside the buffer.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size) as _;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size) as _;
            libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(fd.as_raw_fd());
        }
        loop {
            // SAFETY: `message` points at live buffers of the stated lengths.
            let sent = unsafe { libc::sendmsg(self.stream().as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
            match usize::try_from(sent) {
                Ok(sent) => return Ok(self.patient(goes_on).write_all(&bytes[sent..])?),
                Err(_) => retry_if(goes_on)?,
            }
        }
    }

    fn receive_with_fd(&self, bytes: &mut [u8; 4]) -> std::io::Result<(usize, Option<OwnedFd>)> {
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = ControlBuffer([0; CONTROL]);
        let mut message = message(&mut part, &mut control);
        let read = loop {
            // SAFETY: `message` points at live buffers of the stated lengths, which the kernel may fill.
            let read =
                unsafe { libc::recvmsg(self.stream().as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) };
            match usize::try_from(read) {
                Ok(read) => break read,
                Err(_) => {
                    let error = std::io::Error::last_os_error();
                    if error.kind() != std::io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        };
        // SAFETY: the kernel filled the headers within `msg_controllen`; a descriptor it delivered is ours alone.
        let fd = unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            let is_fd = !header.is_null()
                && (*header).cmsg_level == libc::SOL_SOCKET
                && (*header).cmsg_type == libc::SCM_RIGHTS;
            is_fd
                .then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<libc::c_int>().read_unaligned()))
        };
        Ok((read, fd))
    }
}

impl AsFd for FdStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

/// Waits until one of `fds` at least can be read or accepted from, and tells which; none when `timeout` passed first, or
/// a signal ended the wait.
pub fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Duration) -> Result<Vec<usize>> {
    let entry = |fd: &BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut polls: Vec<libc::pollfd> = fds.iter().map(entry).collect();
    let timeout_ms = timeout.as_millis().min(i32::MAX as u128) as libc::c_int;
    // SAFETY: as many live entries as the count says.
    let count = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout_ms) };
    if count < 0 {
        retry_if(&mut || false)?;
        return Ok(Vec::new());
    }
    Ok(polls.iter().enumerate().filter(|(_, poll)| poll.revents != 0).map(|(index, _)| index).collect())
}

/// A buffer aligned as control message headers must be.
#[repr(align(8))]
struct ControlBuffer([u8; CONTROL]);

fn message(part: &mut libc::iovec, control: &mut ControlBuffer) -> libc::msghdr {
    // SAFETY: all zeros is a valid, empty message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL as _;
    message
}

/// After a call that was interrupted, or one whose patience is over where it is to go on; the last error otherwise.
fn retry_if(goes_on: &mut dyn FnMut() -> bool) -> Result<()> {
    let error = std::io::Error::last_os_error();
    match error.kind() {
        std::io::ErrorKind::Interrupted => Ok(()),
        std::io::ErrorKind::WouldBlock if goes_on() => Ok(()),
        _ => Err(error.into()),
    }
}

/// Writes that go on, each time that the socket's patience is over, as long as they are to.
struct Patient<'a> {
    stream: &'a UnixStream,
    goes_on: &'a mut dyn FnMut() -> bool,
}

impl Write for Patient<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        loop {
            match self.stream.write(bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && (self.goes_on)() => {}
                done => return done,
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn frames_arrive_whole_with_their_descriptor() {
        let (mut left, mut right) = FdStream::pair().expect("pair");
        assert!(!right.readable(Duration::ZERO).expect("poll"));
        let mut file = tempfile::tempfile().expect("file");
        file.write_all(b"behind the descriptor").expect("write");
        left.send(b"first", None).expect("send");
        left.send(b"second", Some(file.as_fd())).expect("send");
        drop(left);
        assert!(right.readable(Duration::ZERO).expect("poll"));
        let (frame, fd) = right.receive().expect("receive").expect("frame");
        assert_eq!((frame.as_slice(), fd.is_none()), (b"first".as_slice(), true));
        let (frame, fd) = right.receive().expect("receive").expect("frame");
        let received = std::fs::File::from(fd.expect("descriptor"));
        assert_eq!(frame, b"second");
        assert_eq!(received.metadata().expect("metadata").len(), 21);
        assert!(right.receive().expect("end").is_none());
    }

    /// More than the socket takes: whoever does not read is waited for as long as that is to go on.
    #[test]
    fn a_frame_that_nobody_takes_is_given_up_where_it_is_not_to_go_on() {
        let (mut left, mut right) = FdStream::pair().expect("pair");
        for stream in [&left, &right] {
            stream.set_patience(Duration::from_millis(20)).expect("patience");
        }
        let (frame, mut asked) = (vec![7; 8 << 20], 0);
        let mut twice = || {
            asked += 1;
            asked < 3
        };
        left.send_while(&frame, None, &mut twice).expect_err("nobody reads");
        assert_eq!(asked, 3);
        // And who reads slowly gets all of it.
        let (mut left, mut slow) = FdStream::pair().expect("pair");
        left.set_patience(Duration::from_millis(1)).expect("patience");
        slow.set_patience(Duration::from_millis(1)).expect("patience");
        std::thread::scope(|scope| {
            scope.spawn(|| left.send_while(&frame, None, &mut || true).expect("send"));
            let received = slow.receive_while(&mut || true).expect("receive").expect("a frame").0;
            assert!(received == frame);
        });
        let mut asked = 0;
        let mut twice = || {
            asked += 1;
            asked < 3
        };
        right.receive_while(&mut twice).expect_err("the rest never comes");
        assert_eq!(asked, 3);
    }

    /// Whatever the pieces that it comes in, and the descriptor with the first of them.
    #[test]
    fn a_frame_that_pauses_is_gone_on_with() {
        let (mut left, mut right) = FdStream::pair().expect("pair");
        right.set_patience(Duration::from_millis(1)).expect("patience");
        assert!(matches!(right.receive_more(), Ok(Received::Pause)) && !right.is_amid());
        let file = tempfile::tempfile().expect("file");
        left.send_with_fd(&[3, 0, 0, 0], file.as_fd(), &mut || false).expect("send");
        for piece in [&b""[..], b"a", b"bc"] {
            assert!(matches!(right.receive_more(), Ok(Received::Pause)) && right.is_amid());
            left.stream().write_all(piece).expect("write");
        }
        let Ok(Received::Frame(frame, Some(_))) = right.receive_more() else { panic!("no frame") };
        assert_eq!((frame.as_slice(), right.is_amid()), (&b"abc"[..], false));
        for byte in [1, 0, 0, 0, b'x'] {
            assert!(matches!(right.receive_more(), Ok(Received::Pause)));
            left.stream().write_all(&[byte]).expect("write");
        }
        assert!(matches!(right.receive_more(), Ok(Received::Frame(frame, None)) if frame == b"x"));
        left.send(b"", None).expect("send");
        drop(left);
        assert!(matches!(right.receive_more(), Ok(Received::Frame(frame, None)) if frame.is_empty()));
        assert!(matches!(right.receive_more(), Ok(Received::Closed)));
    }

    #[test]
    fn a_frame_cut_short_is_an_error() {
        let (left, mut right) = FdStream::pair().expect("pair");
        left.stream().write_all(&[9, 0, 0, 0, 1]).expect("write");
        drop(left);
        assert!(right.receive().is_err());
    }
}
