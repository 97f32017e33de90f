//! QUIC over UDP: one connection to a host, and streams in it.

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{BLOCK_SIZE, Error, Result};
use parking_lot::Mutex;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, IdleTimeout, Incoming, ServerConfig,
    TransportConfig, VarInt,
};
use tokio::sync::Semaphore;

use super::{GREETING, GREETINGS, Identity, STREAMS, Stream, denied};
use crate::task::TaskGroup;

/// A host that says nothing for so long is gone.
const IDLE: Duration = Duration::from_secs(20);
/// So often it says something, though there is nothing to say.
const BEAT: Duration = Duration::from_secs(5);
/// Bytes that may be on their way to this host in one stream, and in all of a connection.
const STREAM_WINDOW: u32 = 2 * BLOCK_SIZE as u32;
const WINDOW: u32 = 16 * BLOCK_SIZE as u32;
/// The same of requests, from whoever comes.
const REQUEST_WINDOW: u32 = 64 << 10;
/// Bytes that a connection keeps until they are known to have arrived: a block, so that a thousand hosts that ask at once take
/// no more than as many. At 50 ms that is 80 MB/s a host.
const SEND_WINDOW: u64 = BLOCK_SIZE;

#[derive(Debug)]
pub(super) struct Host {
    endpoint: Endpoint,
    /// Those that this side began.
    connections: Mutex<HashMap<SocketAddr, Connection>>,
}

impl Host {
    pub(super) fn open(listen: SocketAddr, identity: &Identity) -> std::io::Result<Self> {
        // Who comes asks in few bytes, and is sent blocks; who is gone to is asked, and sends them.
        let mut asked = transport();
        asked
            .stream_receive_window(REQUEST_WINDOW.into())
            .receive_window((16 * REQUEST_WINDOW).into())
            .send_window(SEND_WINDOW)
            .max_concurrent_bidi_streams((STREAMS as u32).into())
            .max_concurrent_uni_streams(VarInt::from_u32(0));
        let mut asking = transport();
        asking
            .stream_receive_window(STREAM_WINDOW.into())
            .receive_window(WINDOW.into())
            .send_window(u64::from(16 * REQUEST_WINDOW))
            .max_concurrent_bidi_streams(VarInt::from_u32(0))
            .max_concurrent_uni_streams(VarInt::from_u32(1));
        let unusable = |error: quinn::crypto::rustls::NoInitialCipherSuite| std::io::Error::other(error);
        let server = QuicServerConfig::try_from(identity.server.clone()).map_err(unusable)?;
        let client = QuicClientConfig::try_from(identity.client.clone()).map_err(unusable)?;
        let mut server = ServerConfig::with_crypto(Arc::new(server));
        server.transport_config(Arc::new(asked));
        let mut client = ClientConfig::new(Arc::new(client));
        client.transport_config(Arc::new(asking));
        let mut endpoint = Endpoint::server(server, listen)?;
        endpoint.set_default_client_config(client);
        Ok(Self { endpoint, connections: Mutex::default() })
    }

    pub(super) fn address(&self) -> std::io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    pub(super) async fn serve<F>(
        &self,
        tasks: &TaskGroup,
        answer: impl Fn(Stream) -> F + Clone + Send + Sync + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let (stop, streams) = (tasks.stop(), Arc::new(Semaphore::new(STREAMS)));
        let greetings = Arc::new(Semaphore::new(GREETINGS));
        loop {
            let came = tokio::select! {
                came = self.endpoint.accept() => came,
                () = stop.cancelled() => break,
            };
            let Some(came) = came else { break };
            // Whoever is not where it says that it is takes no place of those who are.
            if !came.remote_address_validated() && greetings.available_permits() < GREETINGS / 2 {
                came.retry().ok();
                continue;
            }
            let Ok(greeting) = greetings.clone().try_acquire_owned() else {
                came.refuse();
                continue;
            };
            let (group, answer, streams) = (tasks.clone(), answer.clone(), streams.clone());
            tasks.spawn("connection", async move {
                let greeted = greet(came).await;
                drop(greeting);
                if let Some(connection) = greeted {
                    hear(&connection, &group, answer, &streams).await;
                }
            });
        }
        // Those at the other ends hear of it, and do not wait.
        self.endpoint.close(VarInt::from_u32(0), b"closed");
    }

    pub(super) fn forget(&self, host: SocketAddr) {
        if let Some(connection) = self.connections.lock().remove(&host) {
            connection.close(VarInt::from_u32(0), b"it did not answer");
        }
    }

    pub(super) async fn reach(&self, to: SocketAddr) -> Result<Stream> {
        let open = self.connections.lock().get(&to).cloned();
        let connection = match open.filter(|connection| connection.close_reason().is_none()) {
            Some(connection) => connection,
            None => {
                let connecting = self.endpoint.connect(to, "forebay").map_err(std::io::Error::other)?;
                let connection = connecting.await.map_err(broken)?;
                // In TLS 1.3 this side is through before the other one has looked at it: who was let in hears so.
                connection.accept_uni().await.map_err(broken)?;
                let mut connections = self.connections.lock();
                connections.retain(|_, connection| connection.close_reason().is_none());
                connections.insert(to, connection.clone());
                connection
            }
        };
        let (send, receive) = connection.open_bi().await.map_err(broken)?;
        Ok(Box::new(tokio::io::join(receive, send)))
    }
}

/// What both sides of a connection have in common.
fn transport() -> TransportConfig {
    let mut transport = TransportConfig::default();
    transport.max_idle_timeout(IdleTimeout::try_from(IDLE).ok()).keep_alive_interval(Some(BEAT));
    transport
}

async fn greet(came: Incoming) -> Option<Connection> {
    let from = came.remote_address();
    let shaking = async {
        let connection = came.await?;
        let mut welcome = connection.open_uni().await?;
        welcome.write_all(&[1]).await.map_err(std::io::Error::from)?;
        Ok::<_, std::io::Error>(connection)
    };
    match tokio::time::timeout(GREETING, shaking).await {
        Ok(Ok(connection)) => Some(connection),
        Ok(Err(error)) => {
            tracing::debug!(%from, %error, "who came to the port for other hosts was turned away");
            None
        }
        Err(_) => None,
    }
}

/// Streams of one connection, until it or the group ends.
async fn hear<F>(
    connection: &Connection,
    tasks: &TaskGroup,
    answer: impl Fn(Stream) -> F + Clone + Send + 'static,
    streams: &Arc<Semaphore>,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let stop = tasks.stop();
    loop {
        let came = tokio::select! {
            came = connection.accept_bi() => came,
            () = stop.cancelled() => return,
        };
        let Ok((send, receive)) = came else { return };
        // Dropped where there are too many, which ends it.
        let Ok(place) = streams.clone().try_acquire_owned() else { continue };
        let (stream, answer, stop) = (tokio::io::join(receive, send), answer.clone(), stop.clone());
        tasks.spawn("stream", async move {
            let _place = place;
            tokio::select! {
                () = answer(Box::new(stream)) => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

fn broken(error: ConnectionError) -> Error {
    /// From here to 0x1ff, a connection was closed for an alert of TLS (RFC 9001, 4.8).
    const ALERTS: std::ops::Range<u64> = 0x100..0x200;
    let code = match &error {
        ConnectionError::TransportError(error) => Some(u64::from(error.code)),
        ConnectionError::ConnectionClosed(close) => Some(u64::from(close.error_code)),
        _ => None,
    };
    match code.is_some_and(|code| ALERTS.contains(&code)) {
        true => denied(error),
        false => Error::from(std::io::Error::from(error)),
    }
}
