//! Streams between hosts that hold one secret, over TCP or QUIC: encrypted, and each side sure of the other.
//!
//! Owns the ports, the handshakes and their bounds. What is said on a stream is its users' own: one side asks, the other
//! answers, as often as they like.

mod identity;
mod named;
mod tcp;
mod quic;
#[cfg(test)]
mod tests;

pub use identity::Identity;
pub use named::{endpoint, read_secret};

use std::fmt;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::task::TaskGroup;

/// How long a connection may take to be made, its handshake among it.
const GREETING: Duration = Duration::from_secs(10);
/// Handshakes at once; others wait their turn, for no longer than one may take.
const GREETINGS: usize = 256;
/// Streams that others may have open at one host; more are turned away. Each takes some 50 KiB.
const STREAMS: usize = 4096;

/// What carries streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TLS over TCP, a connection a stream: the faster one within a cluster.
    #[default]
    Tcp,
    /// QUIC over UDP, one connection to a host: for links that are long or lose packets.
    Quic,
}

impl FromStr for Transport {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "tcp" => Ok(Self::Tcp),
            "quic" => Ok(Self::Quic),
            _ => Err(Error::invalid(format!("no transport is called `{text}`")).with_hint("tcp, or quic")),
        }
    }
}

/// Both directions of a stream.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A stream to or from another host that holds the secret.
pub type Stream = Box<dyn Duplex>;

/// A port of this host to which those who hold the secret may come, and from which it goes to theirs.
#[derive(Debug)]
pub struct Host(Kind);

#[derive(Debug)]
enum Kind {
    Tcp(tcp::Host),
    Quic(quic::Host),
}

impl Host {
    /// Opens a port; all addresses of this host where `listen` has none. To be called in an async runtime.
    ///
    /// # Errors
    /// `Exists` where another process has the port; what the kernel says otherwise.
    pub fn open(transport: Transport, listen: Listen, identity: &Identity) -> Result<Self> {
        let open = |address: SocketAddr| match transport {
            Transport::Tcp => tcp::Host::open(address, identity).map(Kind::Tcp),
            Transport::Quic => quic::Host::open(address, identity).map(Kind::Quic),
        };
        let at = |ip: IpAddr| SocketAddr::new(ip, listen.port);
        let opened = match listen.ip {
            Some(ip) => open(at(ip)),
            // The first takes those of both families; a host may have one family alone.
            None => match open(at(Ipv6Addr::UNSPECIFIED.into())) {
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
                    open(at(Ipv4Addr::UNSPECIFIED.into()))
                }
                opened => opened,
            },
        };
        opened.map(Self).map_err(|error| {
            if error.kind() == std::io::ErrorKind::AddrInUse {
                let message = format!("another process listens at {listen}");
                return Error::new(ErrorKind::Exists, message).with_hint("name a port that is free");
            }
            Error::from(error)
                .context(format!("listen at {listen}"))
                .with_hint("name an address of this host, or none for all that it has")
        })
    }

    /// Where it listens.
    pub fn address(&self) -> Result<SocketAddr> {
        Ok(match &self.0 {
            Kind::Tcp(host) => host.address()?,
            Kind::Quic(host) => host.address()?,
        })
    }

    /// Hands streams from others to `answer`, each in a task of its own of `tasks`, until these are to end.
    pub async fn serve<F>(
        &self,
        tasks: &TaskGroup,
        answer: impl Fn(Stream) -> F + Clone + Send + Sync + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        match &self.0 {
            Kind::Tcp(host) => host.serve(tasks, answer).await,
            Kind::Quic(host) => host.serve(tasks, answer).await,
        }
    }

    /// Lets go of what is known of the way to another host, which did not answer.
    pub fn forget(&self, host: SocketAddr) {
        match &self.0 {
            Kind::Tcp(_) => {}
            Kind::Quic(own) => own.forget(host),
        }
    }

    /// A new stream to another host.
    ///
    /// # Errors
    /// `Denied` where it holds another secret, or none; `Unavailable` where it cannot be reached within ten seconds.
    pub async fn reach(&self, to: SocketAddr) -> Result<Stream> {
        let reaching = async {
            match &self.0 {
                Kind::Tcp(host) => host.reach(to).await,
                Kind::Quic(host) => host.reach(to).await,
            }
        };
        match tokio::time::timeout(GREETING, reaching).await {
            Ok(reached) => reached.map_err(|error| error.context(format!("reach {to}"))),
            Err(_) => Err(Error::new(
                ErrorKind::Unavailable,
                format!("{to} did not answer within {} s", GREETING.as_secs()),
            )),
        }
    }
}

/// Where a host listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen {
    /// The address; none for all that the host has.
    pub ip: Option<IpAddr>,
    /// The port; 0 for any that is free.
    pub port: u16,
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ip {
            Some(ip) => write!(f, "{}", SocketAddr::new(ip, self.port)),
            None => write!(f, "port {} of all addresses", self.port),
        }
    }
}

/// One who holds another secret is told from one who is not there.
fn refused(error: std::io::Error) -> Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls.is_some() {
        true => denied(error),
        false => Error::from(error),
    }
}

fn denied(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Denied, "it holds another secret, or speaks another protocol")
        .with_source(error)
        .with_hint("all hosts take the same secret, and mount the same bucket with builds of one version")
}
