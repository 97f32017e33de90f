//! Streams over both transports, and who is turned away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const SECRET: &[u8] = b"a secret of 32 bytes, or longer.";
const HERE: Listen = Listen { ip: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)), port: 0 };

fn identity(secret: &[u8], scope: &[u8]) -> Identity {
    Identity::new(secret, scope, "test/1").expect("an identity")
}

/// A host that sends back what comes, a kilobyte at a time.
fn echo(transport: Transport, identity: &Identity, tasks: &TaskGroup) -> (Arc<Host>, SocketAddr) {
    let host = Arc::new(Host::open(transport, HERE, identity).expect("a port"));
    let (serving, group) = (host.clone(), tasks.clone());
    tasks.spawn("serve", async move {
        let answer = |mut stream: Stream| async move {
            let mut said = [0; 1024];
            while stream.read_exact(&mut said).await.is_ok() && stream.write_all(&said).await.is_ok() {
                stream.flush().await.ok();
            }
        };
        serving.serve(&group, answer).await;
    });
    let address = host.address().expect("an address");
    (host, address)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_holds_the_secret_is_answered_on_streams_of_either_transport() {
    for transport in [Transport::Tcp, Transport::Quic] {
        let (tasks, own) = (TaskGroup::new("test"), identity(SECRET, b"one"));
        let (_there, address) = echo(transport, &own, &tasks);
        let here = Host::open(transport, HERE, &own).expect("a port");
        let mut streams = Vec::new();
        for number in 0..4u8 {
            let mut stream = here.reach(address).await.expect("reached");
            for round in 0..3 {
                stream.write_all(&[number + round; 1024]).await.expect("said");
                stream.flush().await.expect("sent");
                let mut heard = [0; 1024];
                stream.read_exact(&mut heard).await.expect("answered");
                assert_eq!(heard, [number + round; 1024], "{transport:?}");
            }
            streams.push(stream);
        }
        assert!(tasks.shutdown(Duration::from_secs(60)).await.is_empty(), "{transport:?}: all end when told");
        // Who is gone is told so, and not waited for.
        let mut heard = [0; 1];
        for mut stream in streams {
            assert!(!matches!(stream.read(&mut heard).await, Ok(1..)), "{transport:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_holds_another_secret_or_scope_or_none_is_turned_away() {
    for transport in [Transport::Tcp, Transport::Quic] {
        let tasks = TaskGroup::new("test");
        let (_there, address) = echo(transport, &identity(SECRET, b"one"), &tasks);
        let other = Identity::new(SECRET, b"one", "test/2").expect("an identity");
        for stranger in
            [identity(b"another secret of that length...", b"one"), identity(SECRET, b"two"), other]
        {
            let here = Host::open(transport, HERE, &stranger).expect("a port");
            let error = here.reach(address).await.err().expect("turned away");
            assert_eq!(error.kind(), ErrorKind::Denied, "{transport:?}: {error}");
        }
        tasks.shutdown(Duration::from_secs(60)).await;
    }
    let error = Identity::new(b"short", b"", "test/1").expect_err("short");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

/// Takes any server.
#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// Who takes any server, and shows another key, or none, gets no further than who minds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_side_that_is_come_to_looks_for_itself() {
    static ANSWERED: AtomicBool = AtomicBool::new(false);
    for transport in [Transport::Tcp, Transport::Quic] {
        let (tasks, own) = (TaskGroup::new("test"), identity(SECRET, b"one"));
        let host = Arc::new(Host::open(transport, HERE, &own).expect("a port"));
        let (serving, group) = (host.clone(), tasks.clone());
        tasks.spawn("serve", async move {
            serving.serve(&group, |_| async { ANSWERED.store(true, Relaxed) }).await;
        });
        let address = host.address().expect("an address");
        let wrong = identity(b"another secret of that length...", b"one");
        for resolver in [Some(wrong.client.client_auth_cert_resolver.clone()), None] {
            let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_protocol_versions(&[&TLS13])
                .expect("TLS 1.3")
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Anyone));
            let mut client = match resolver {
                Some(resolver) => builder.with_client_cert_resolver(resolver),
                None => builder.with_no_client_auth(),
            };
            client.alpn_protocols = vec![b"test/1".to_vec()];
            let stranger = Identity { client: Arc::new(client), ..wrong.clone() };
            let here = Host::open(transport, HERE, &stranger).expect("a port");
            let error = here.reach(address).await.err().expect("turned away");
            assert_eq!(error.kind(), ErrorKind::Denied, "{transport:?}: {error}");
        }
        assert!(!ANSWERED.load(Relaxed), "{transport:?}");
        tasks.shutdown(Duration::from_secs(60)).await;
    }
}

#[tokio::test]
async fn strangers_and_their_bytes_end_nothing() {
    let (tasks, own) = (TaskGroup::new("test"), identity(SECRET, b"one"));
    let (there, address) = echo(Transport::Tcp, &own, &tasks);
    for said in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], b""] {
        let mut stranger = tokio::net::TcpStream::connect(address).await.expect("connected");
        stranger.write_all(said).await.expect("said");
        stranger.shutdown().await.expect("shut");
        let mut heard = Vec::new();
        stranger.read_to_end(&mut heard).await.ok();
        assert!(!heard.windows(4).any(|bytes| bytes == [7; 4]) && heard.len() < 64, "an alert at most");
    }
    let here = Host::open(Transport::Tcp, HERE, &own).expect("a port");
    let mut stream = here.reach(address).await.expect("reached");
    stream.write_all(&[7; 1024]).await.expect("said");
    stream.read_exact(&mut [0; 1024]).await.expect("answered");
    let taken = Listen { port: address.port(), ..HERE };
    let error = Host::open(Transport::Tcp, taken, &own).expect_err("taken");
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    tasks.shutdown(Duration::from_secs(60)).await;
    drop(there);
    let gone = here.reach(address).await.err().expect("gone");
    assert_eq!(gone.kind(), ErrorKind::Unavailable);
}

/// Others would wait for as long as it may say nothing.
#[test]
fn a_host_whose_process_ends_is_not_waited_for() {
    // What one of one thread has not done when its tasks have ended is not done at all.
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for transport in [Transport::Tcp, Transport::Quic] {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let process = std::thread::spawn(move || {
            runtime().block_on(async {
                let (tasks, own) = (TaskGroup::new("test"), identity(SECRET, b"one"));
                let (_host, address) = echo(transport, &own, &tasks);
                tell.send(address).expect("heard");
                ended.await.expect("told to end");
                tasks.shutdown(Duration::from_secs(60)).await
            })
        });
        let address = told.recv().expect("an address");
        runtime().block_on(async {
            let here = Host::open(transport, HERE, &identity(SECRET, b"one")).expect("a port");
            let (mut stream, mut heard) = (here.reach(address).await.expect("reached"), [0; 1024]);
            stream.write_all(&[7; 1024]).await.expect("said");
            stream.flush().await.expect("said");
            stream.read_exact(&mut heard).await.expect("answered");
            end.send(()).expect("it waits");
            match stream.read(&mut heard).await {
                Ok(count) => assert_eq!(count, 0, "{transport:?}"),
                Err(error) => assert_ne!(error.kind(), std::io::ErrorKind::TimedOut, "{transport:?}"),
            }
        });
        assert!(process.join().expect("it ends").is_empty(), "{transport:?}");
    }
}
