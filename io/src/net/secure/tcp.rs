//! TLS over TCP: a connection a stream.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Result;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{GREETING, GREETINGS, Identity, STREAMS, Stream, refused};
use crate::net::door::keep_alive;
use crate::task::TaskGroup;

/// Bytes that are encrypted ahead of the socket: with 64 KiB, the default, half of the rate is lost.
const AHEAD: usize = 1 << 20;
/// What whoever was let in hears first.
const WELCOME: [u8; 1] = [1];
/// After a failure to accept, such as too many open files.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Host {
    listener: TcpListener,
    identity: Identity,
}

impl Host {
    pub(super) fn open(listen: SocketAddr, identity: &Identity) -> std::io::Result<Self> {
        let listener = std::net::TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener: TcpListener::from_std(listener)?, identity: identity.clone() })
    }

    pub(super) fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub(super) async fn serve<F>(
        &self,
        tasks: &TaskGroup,
        answer: impl Fn(Stream) -> F + Clone + Send + Sync + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let (stop, acceptor) = (tasks.stop(), TlsAcceptor::from(self.identity.server.clone()));
        let (greetings, streams) = (Arc::new(Semaphore::new(GREETINGS)), Arc::new(Semaphore::new(STREAMS)));
        loop {
            let came = tokio::select! {
                came = self.listener.accept() => came,
                () = stop.cancelled() => return,
            };
            let (socket, from) = match came {
                Ok(came) => came,
                Err(error) => {
                    tracing::warn!(%error, "who came to the port for other hosts could not be let in");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let Ok(place) = streams.clone().try_acquire_owned() else {
                tracing::debug!(%from, "too many streams of other hosts are open: one was turned away");
                continue;
            };
            let (acceptor, answer, stop) = (acceptor.clone(), answer.clone(), stop.clone());
            let greetings = greetings.clone();
            tasks.spawn("stream", async move {
                let _place = place;
                let answering = async {
                    if let Some(stream) = greet(acceptor, socket, from, &greetings).await {
                        answer(stream).await;
                    }
                };
                tokio::select! {
                    () = answering => {}
                    () = stop.cancelled() => {}
                }
            });
        }
    }

    pub(super) async fn reach(&self, to: SocketAddr) -> Result<Stream> {
        let socket = TcpStream::connect(to).await?;
        keep_alive(&socket)?;
        socket.set_nodelay(true)?;
        let connector = TlsConnector::from(self.identity.client.clone());
        let mut stream = connector.connect(name(), socket).await.map_err(refused)?;
        // In TLS 1.3 this side is through before the other one has looked at it.
        stream.read_exact(&mut [0; WELCOME.len()]).await.map_err(refused)?;
        stream.get_mut().1.set_buffer_limit(Some(AHEAD));
        Ok(Box::new(stream))
    }
}

/// A handshake with who came, in its turn.
async fn greet(
    acceptor: TlsAcceptor,
    socket: TcpStream,
    from: SocketAddr,
    turns: &Semaphore,
) -> Option<Stream> {
    let shaking = async {
        let _turn = turns.acquire().await;
        keep_alive(&socket)?;
        socket.set_nodelay(true)?;
        let mut stream = acceptor.accept(socket).await?;
        stream.write_all(&WELCOME).await?;
        stream.flush().await?;
        Ok(stream)
    };
    let shaken = match tokio::time::timeout(GREETING, shaking).await {
        Ok(shaken) => shaken,
        Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut)),
    };
    match shaken {
        Ok(mut stream) => {
            stream.get_mut().1.set_buffer_limit(Some(AHEAD));
            Some(Box::new(stream))
        }
        Err(error) => {
            tracing::debug!(%from, %error, "who came to the port for other hosts was turned away");
            None
        }
    }
}

/// Nobody looks at it, but the protocol has one.
fn name() -> ServerName<'static> {
    ServerName::try_from("forebay").expect("a name that DNS would take")
}
