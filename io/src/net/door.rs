//! A way into a process from other hosts: a TCP port, for whoever knows a secret.
//!
//! The secret keeps out who is lost, and other jobs; like what follows it, it goes over the network as it is, as among the
//! processes of torch.distributed, for whose networks this is.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use forebay_core::Result;
use rustix::net::sockopt;

use super::FdStream;
use crate::clock::Clock;

/// How long whoever connected may take to say the secret, and to be told that it is right.
const GREETING: Duration = Duration::from_secs(2);
/// What whoever said the secret hears.
const WELCOME: &[u8; 8] = b"forebay\n";
/// A host that is silent for so long is asked whether it is there, so often, as many times.
const IDLE: Duration = Duration::from_secs(20);
const AGAIN: Duration = Duration::from_secs(5);
const TIMES: u32 = 4;

/// A port of this host that others may come to.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    secret: String,
}

impl Door {
    /// Opens one, at all addresses of this host, for who knows the `secret`.
    pub fn open(secret: String) -> Result<Self> {
        let any = |address: IpAddr| TcpListener::bind(SocketAddr::new(address, 0));
        // The first takes those of both families; a host may have one family alone.
        let listener = any(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| any(Ipv4Addr::UNSPECIFIED.into()))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, secret })
    }

    /// Its port.
    pub fn port(&self) -> Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }

    /// Who came and knows the secret, if anybody did.
    pub fn welcome(&self) -> Result<Option<FdStream>> {
        Ok(self.visitor()?.map(FdStream::over_tcp))
    }

    /// As [`Self::welcome`], for whoever speaks in no frames.
    pub(super) fn visitor(&self) -> Result<Option<TcpStream>> {
        let (mut visitor, from) = match self.listener.accept() {
            Ok(came) => came,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        match self.greet(&mut visitor) {
            Ok(()) => Ok(Some(visitor)),
            Err(error) => {
                tracing::warn!(%from, %error, "who came to the job's port was turned away");
                Ok(None)
            }
        }
    }

    fn greet(&self, visitor: &mut TcpStream) -> std::io::Result<()> {
        prepare(visitor)?;
        let mut said = vec![0; self.secret.len()];
        visitor.read_exact(&mut said)?;
        let differs =
            said.iter().zip(self.secret.as_bytes()).fold(0, |all, (one, other)| all | (one ^ other));
        if differs != 0 {
            return Err(std::io::Error::new(
                std::io::ErrorKind::PermissionDenied,
                "it did not say the secret",
            ));
        }
        visitor.write_all(WELCOME)
    }
}

impl AsFd for Door {
    /// Readable when somebody came.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Comes to the door of another process, at the first of its host's `addresses` (names or numbers) where it is, within
/// `patience`; `None` where it is at none.
pub fn come(addresses: &[String], port: u16, secret: &str, patience: Duration) -> Option<FdStream> {
    reach(addresses, port, secret, patience).map(FdStream::over_tcp)
}

/// As [`come`], for whoever speaks in no frames.
pub(super) fn reach(addresses: &[String], port: u16, secret: &str, patience: Duration) -> Option<TcpStream> {
    let clock = Clock::system();
    let deadline = clock.now() + patience;
    let found = addresses.iter().flat_map(|name| (name.as_str(), port).to_socket_addrs().ok()).flatten();
    found
        .map(|address| {
            let left = deadline.since(clock.now()).min(GREETING).max(Duration::from_millis(1));
            let mut stream = TcpStream::connect_timeout(&address, left)?;
            prepare(&stream)?;
            stream.write_all(secret.as_bytes())?;
            let mut heard = [0; WELCOME.len()];
            stream.read_exact(&mut heard)?;
            match heard == *WELCOME {
                true => Ok(stream),
                false => Err(std::io::Error::from(std::io::ErrorKind::InvalidData)),
            }
        })
        .find_map(std::io::Result::ok)
}

/// Small words are sent at once, and nobody is waited for without end.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING))?;
    stream.set_write_timeout(Some(GREETING))?;
    keep_alive(stream)
}

/// A host that is gone without a word is found to be.
pub(super) fn keep_alive(stream: &impl AsFd) -> std::io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, IDLE)?;
    sockopt::set_tcp_keepintvl(stream, AGAIN)?;
    sockopt::set_tcp_keepcnt(stream, TIMES)?;
    // What is sent and not taken is no more waited for than an answer.
    let millis = (IDLE + AGAIN * TIMES).as_millis() as u32;
    Ok(sockopt::set_tcp_user_timeout(stream, millis)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn at(port: u16) -> SocketAddr {
        SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)
    }

    /// Waits until somebody came.
    fn next(door: &Door) -> Option<FdStream> {
        super::super::wait_readable(&[door.as_fd()], PATIENCE).expect("wait");
        door.welcome().expect("look")
    }

    #[test]
    fn who_knows_the_secret_comes_in_and_nobody_else() {
        let secret = "0123456789abcdef".to_owned();
        let door = Door::open(secret.clone()).expect("a port");
        let port = door.port().expect("port");
        assert!(door.welcome().expect("look").is_none(), "nobody came");
        let wrong: String = secret.chars().rev().collect();
        for said in [wrong.as_bytes(), &secret.as_bytes()[..9], b"GET / HTTP/1.1\r\n\r\n"] {
            let mut stranger = TcpStream::connect(at(port)).expect("connect");
            stranger.write_all(said).expect("say");
            stranger.shutdown(std::net::Shutdown::Write).expect("shut");
            assert!(next(&door).is_none());
            assert_eq!(stranger.read(&mut [0; 64]).unwrap_or(0), 0, "not a word");
        }
        std::thread::scope(|scope| {
            let addresses = ["no.such.host.invalid".to_owned(), "127.0.0.1".to_owned()];
            let secret = &secret;
            let came = scope.spawn(move || come(&addresses, port, secret, PATIENCE).expect("the door"));
            let mut here = next(&door).expect("a visitor");
            let mut there = came.join().expect("came");
            there.send(b"hello", None).expect("send");
            assert_eq!(here.receive().expect("receive").expect("frame").0, b"hello");
            drop(there);
            assert!(here.receive().expect("end").is_none());
        });
        drop(door);
        assert!(come(&["127.0.0.1".to_owned()], port, &secret, PATIENCE).is_none());
    }

    #[test]
    fn another_programs_port_is_not_taken_for_the_door() {
        let other = TcpListener::bind(at(0)).expect("bind");
        let port = other.local_addr().expect("address").port();
        std::thread::scope(|scope| {
            let came = scope.spawn(move || come(&["127.0.0.1".to_owned()], port, "secret", PATIENCE));
            let (mut visitor, _) = other.accept().expect("accept");
            visitor.write_all(b"220 ESMTP").expect("say");
            assert!(came.join().expect("came").is_none());
        });
    }
}
