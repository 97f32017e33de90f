//! The listening side: connections, bodies, counts.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use bytes::{Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};

use super::answer::{self, Body};
use super::fault::Fault;
use super::objects::Objects;
use super::pace::{Pace, PaceSettings};
use super::process::Counts;
use super::request::Operation;

/// Largest body that is taken, as for one PUT to S3.
const LARGEST_BODY: u64 = 5 << 30;

/// How to serve.
#[derive(Debug, Clone, Default)]
pub struct ServerSettings {
    /// Buckets that are there from the start.
    pub buckets: Vec<String>,
    /// The network to act out.
    pub pace: PaceSettings,
}

/// Serves connections until the task is dropped. Connections are not bounded: the clients are our own.
pub async fn serve(listener: TcpListener, settings: ServerSettings) -> Result<()> {
    let server = Arc::new(Server {
        objects: Objects::default(),
        pace: Pace::new(settings.pace),
        counters: Counters::default(),
    });
    settings.buckets.iter().for_each(|bucket| server.objects.create_bucket(bucket));
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(server.clone().connection(stream));
    }
}

#[derive(Debug)]
struct Server {
    objects: Objects,
    pace: Pace,
    counters: Counters,
}

impl Server {
    /// Serves one connection; a client that goes away in the middle is nothing to report.
    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let service = service_fn(|request| {
            let server = self.clone();
            async move { Ok::<_, Infallible>(server.respond(request).await) }
        });
        let _ =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
    }

    async fn respond(&self, request: Request<Incoming>) -> Response<Body> {
        let operation = Operation::parse(request.method(), request.uri(), request.headers());
        if matches!(operation, Ok(Operation::Counts)) {
            let counts = serde_json::to_string(&self.counters.read()).unwrap_or_default();
            return answer::document(StatusCode::OK, counts);
        }
        let (head, body) = request.into_parts();
        let taken = collect(body).await;
        let answered = match (operation, taken) {
            (Ok(operation), Ok(body)) => {
                self.counters.count(&operation, body.len() as u64);
                answer::answer(&self.objects, operation, &head.headers, body)
            }
            (Err(fault), _) | (_, Err(fault)) => Err(fault),
        };
        let response = answered.unwrap_or_else(|fault| answer::refuse(&fault));
        let sent = if head.method == Method::HEAD { 0 } else { length(&response) };
        self.counters.bytes_out.fetch_add(sent, Ordering::Relaxed);
        self.pace.wait(sent + length_of(&head.headers)).await;
        response
    }
}

/// A request's body in one piece, so that later GETs of it send large slices.
async fn collect(mut body: Incoming) -> Result<Bytes, Fault> {
    let hint = hyper::body::Body::size_hint(&body).exact().unwrap_or(0);
    if hint > LARGEST_BODY {
        return Err(Fault::InvalidArgument("the body is too large"));
    }
    let mut bytes = BytesMut::with_capacity(hint as usize);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Fault::InvalidArgument("the body ended early"))?;
        if let Some(data) = frame.data_ref() {
            bytes.extend_from_slice(data);
        }
    }
    Ok(bytes.freeze())
}

fn length(response: &Response<Body>) -> u64 {
    length_of(response.headers())
}

fn length_of(headers: &http::HeaderMap) -> u64 {
    let text = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

#[derive(Debug, Default)]
struct Counters {
    gets: AtomicU64,
    heads: AtomicU64,
    puts: AtomicU64,
    lists: AtomicU64,
    others: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl Counters {
    fn count(&self, operation: &Operation, bytes_in: u64) {
        let counter = match operation {
            Operation::Get(..) => &self.gets,
            Operation::Head(..) | Operation::HeadBucket(_) => &self.heads,
            Operation::Put(..) | Operation::PutPart(..) => &self.puts,
            Operation::List(..) => &self.lists,
            _ => &self.others,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.bytes_in.fetch_add(bytes_in, Ordering::Relaxed);
    }

    fn read(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            gets: read(&self.gets),
            heads: read(&self.heads),
            puts: read(&self.puts),
            lists: read(&self.lists),
            others: read(&self.others),
            bytes_in: read(&self.bytes_in),
            bytes_out: read(&self.bytes_out),
        }
    }
}
