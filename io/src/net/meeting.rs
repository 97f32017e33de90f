//! Meeting places: names under which processes of one user on one host find each other.
//!
//! A name is an abstract unix socket: it is gone with the process that holds it, and leaves no file behind. Whoever
//! connects from another user is turned away.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};

use super::FdStream;
use crate::clock::Clock;

/// The pause between two looks at a name that nobody holds yet, or between two looks for a visitor.
const PAUSE: Duration = Duration::from_millis(10);

/// Visitors that wait to be welcomed at most: as many as the kernel allows.
const BACKLOG: i32 = 4096;

/// A name that this process holds, for others to connect to.
#[derive(Debug)]
pub struct Meeting {
    name: String,
    listener: UnixListener,
}

impl Meeting {
    /// Takes `name`.
    ///
    /// # Errors
    /// `Exists` when another process of this host holds it.
    pub fn hold(name: &str) -> Result<Self> {
        let listener = UnixListener::bind_addr(&address(name)?).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                Error::new(ErrorKind::Exists, format!("the meeting place `{name}` is taken"))
            }
            _ => Error::from(error).context(format!("hold the meeting place `{name}`")),
        })?;
        listener.set_nonblocking(true)?;
        Ok(Self { name: name.to_owned(), listener })
    }

    /// Goes on holding `name`, which another process held and passed on as the descriptor of its [`Meeting`]: whoever came
    /// meanwhile waits there, and whoever comes from now on finds this process.
    pub fn handed(name: &str, place: OwnedFd) -> Result<Self> {
        let listener = UnixListener::from(place);
        // The kernel names to visitors the process that listened last.
        rustix::net::listen(&listener, BACKLOG)
            .map_err(|error| Error::from(std::io::Error::from(error)).context(format!("hold `{name}` on")))?;
        Ok(Self { name: name.to_owned(), listener })
    }

    /// The next visitor of this user; `None` when `patience` passed first.
    pub fn welcome(&self, patience: Duration) -> Result<Option<FdStream>> {
        let clock = Clock::system();
        let deadline = clock.now() + patience;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    let visitor = FdStream::new(stream);
                    if visitor.peer_user()? == rustix::process::geteuid().as_raw() {
                        return Ok(Some(visitor));
                    }
                    tracing::warn!(name = %self.name, "another user's process was turned away");
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if clock.now() >= deadline {
                        return Ok(None);
                    }
                    FdStream::readable_among(&[], PAUSE)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Meeting {
    /// Readable when somebody came.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Connects to whoever holds `name`, or will within `patience`; `None` when nobody did.
///
/// # Errors
/// `Denied` when another user's process holds it.
pub fn meet(name: &str, patience: Duration) -> Result<Option<FdStream>> {
    let (address, clock) = (address(name)?, Clock::system());
    let deadline = clock.now() + patience;
    loop {
        match UnixStream::connect_addr(&address) {
            Ok(stream) => {
                let host = FdStream::new(stream);
                if host.peer_user()? != rustix::process::geteuid().as_raw() {
                    let message = format!("the meeting place `{name}` is held by another user");
                    return Err(Error::new(ErrorKind::Denied, message));
                }
                return Ok(Some(host));
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error.into()),
        }
        if clock.now() >= deadline {
            return Ok(None);
        }
        FdStream::readable_among(&[], PAUSE)?;
    }
}

/// The names that begin with `prefix` and are held on this host, in its network's namespace, by whomever.
pub fn places(prefix: &str) -> Result<Vec<String>> {
    /// `__SO_ACCEPTCON` of the kernel: what listens, and not who is connected there, has it in the table of proc_net_unix(5).
    const LISTENS: &str = "00010000";
    let table = std::fs::read_to_string("/proc/net/unix")
        .map_err(|error| Error::from(error).context("read /proc/net/unix"))?;
    let names = table.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(3);
        (fields.next()? == LISTENS).then(|| fields.nth(3)?.strip_prefix('@'))?
    });
    Ok(names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect())
}

fn address(name: &str) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(name).map_err(|error| Error::invalid(format!("`{name}`: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_holder_and_is_free_after_it() {
        let name = format!("forebay-test-meeting-{}", std::process::id());
        let meeting = Meeting::hold(&name).expect("hold");
        assert_eq!(Meeting::hold(&name).expect_err("taken").kind(), ErrorKind::Exists);
        assert!(meeting.welcome(Duration::ZERO).expect("look").is_none());
        let mut visitor = meet(&name, Duration::ZERO).expect("meet").expect("it is held");
        assert_eq!(places(&name[..name.len() - 1]).expect("look"), [&name[..]]);
        let mut host = meeting.welcome(Duration::from_secs(60)).expect("look").expect("a visitor");
        visitor.send(b"hello", None).expect("send");
        assert_eq!(FdStream::readable_among(&[&host], Duration::from_secs(60)).expect("poll"), [0]);
        assert_eq!(host.receive().expect("receive").expect("frame").0, b"hello");
        let handed = Meeting::handed(&name, meeting.as_fd().try_clone_to_owned().expect("a descriptor"))
            .expect("it is");
        drop(meeting);
        let _visitor = meet(&name, Duration::ZERO).expect("meet").expect("it is held on");
        handed.welcome(Duration::from_secs(60)).expect("look").expect("a visitor");
        drop(handed);
        assert!(meet(&name, Duration::ZERO).expect("meet").is_none());
        assert!(places(&name).expect("look").is_empty());
        Meeting::hold(&name).expect("free again");
    }
}
