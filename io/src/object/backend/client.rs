//! The HTTP client of a store: reqwest's, made of the same options as object_store's own, which tells how bodies get on.
//!
//! object_store's hands a body over whole and says nothing until there is an answer. Here a body goes in pieces, and
//! whoever waits for the answer hears of each that the connection took ([`Progress`]): so a body that is slow and moves is
//! told from one that stands.

use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use http::header::ACCEPT_ENCODING;
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use object_store::client::{
    ClientConfigKey, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use object_store::{ClientOptions, Result};
use percent_encoding::{CONTROLS, percent_encode};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::tls::Certificate;
use reqwest::{ClientBuilder, NoProxy, Proxy, Url};

use super::send::generic;
use crate::object::progress::Progress;
use crate::rng::Rng;

/// What servers see in their logs, unless the options name another.
const USER_AGENT: &str = concat!("forebay/", env!("CARGO_PKG_VERSION"));
/// Bytes of a body that are handed over at a time: a connection that gets 10 KB/s takes one in half a minute.
const PIECE: usize = 256 << 10;

/// With a request, has its object sent as it is stored: compressed, where it lies so.
#[derive(Debug, Clone, Copy)]
pub(super) struct AsStored;

/// A client and its connections.
#[derive(Debug)]
pub(super) struct Client(reqwest::Client);

impl Client {
    /// As the options want it. Their timeouts of whole requests are left out: whoever waits bounds that.
    ///
    /// # Errors
    /// `Generic` for an option that does not parse, or that the client refuses.
    pub(super) fn new(options: &ClientOptions) -> Result<Self> {
        let options = Options(options);
        let mut builder = reqwest::Client::builder()
            .user_agent(options.text(ClientConfigKey::UserAgent).unwrap_or_else(|| USER_AGENT.to_owned()))
            .https_only(!options.is_set(ClientConfigKey::AllowHttp)?)
            .danger_accept_invalid_certs(options.is_set(ClientConfigKey::AllowInvalidCertificates)?);
        if let Some(proxy) = options.text(ClientConfigKey::ProxyUrl) {
            let excluded = options.text(ClientConfigKey::ProxyExcludes);
            let excluded = excluded.and_then(|hosts| NoProxy::from_string(&hosts));
            builder = builder.proxy(Proxy::all(proxy).map_err(generic)?.no_proxy(excluded));
        }
        let certificates = options.text(ClientConfigKey::ProxyCaCertificate).unwrap_or_default();
        let certificates = Certificate::from_pem_bundle(certificates.as_bytes()).map_err(generic)?;
        builder = match options.is_set(ClientConfigKey::NoSystemCertificates)? {
            true => builder.tls_certs_only(certificates),
            false => builder.tls_certs_merge(certificates),
        };
        if options.is_set(ClientConfigKey::RandomizeAddresses)? {
            builder = builder.dns_resolver(Arc::new(Shuffled(Rng::system())));
        }
        options.shape_connections(builder)?.build().map_err(generic).map(Self)
    }
}

/// What a person asked of a client.
struct Options<'a>(&'a ClientOptions);

impl Options<'_> {
    fn text(&self, key: ClientConfigKey) -> Option<String> {
        self.0.get_config_value(&key)
    }

    fn is_set(&self, key: ClientConfigKey) -> Result<bool> {
        match self.text(key).unwrap_or_default().to_ascii_lowercase().as_str() {
            "1" | "true" | "on" | "yes" | "y" => Ok(true),
            "" | "0" | "false" | "off" | "no" | "n" => Ok(false),
            _ => Err(unreadable(key, "true or false")),
        }
    }

    fn time(&self, key: ClientConfigKey) -> Result<Option<Duration>> {
        let parse =
            |text: String| humantime::parse_duration(&text).map_err(|_| unreadable(key, "a time as 30s"));
        self.text(key).map(parse).transpose()
    }

    fn number<T: FromStr>(&self, key: ClientConfigKey) -> Result<Option<T>> {
        self.text(key).map(|text| text.parse().map_err(|_| unreadable(key, "a number"))).transpose()
    }

    /// How long connections are tried, kept and asked whether they live, and what is spoken over them.
    fn shape_connections(&self, mut builder: ClientBuilder) -> Result<ClientBuilder> {
        if let Some(time) = self.time(ClientConfigKey::ConnectTimeout)? {
            builder = builder.connect_timeout(time);
        }
        if let Some(time) = self.time(ClientConfigKey::ReadTimeout)? {
            builder = builder.read_timeout(time);
        }
        if let Some(time) = self.time(ClientConfigKey::PoolIdleTimeout)? {
            builder = builder.pool_idle_timeout(time);
        }
        if let Some(most) = self.number(ClientConfigKey::PoolMaxIdlePerHost)? {
            builder = builder.pool_max_idle_per_host(most);
        }
        if self.is_set(ClientConfigKey::Http1Only)? {
            builder = builder.http1_only();
        }
        if self.is_set(ClientConfigKey::Http2Only)? {
            builder = builder.http2_prior_knowledge();
        }
        if let Some(time) = self.time(ClientConfigKey::Http2KeepAliveInterval)? {
            builder = builder.http2_keep_alive_interval(time);
        }
        if let Some(time) = self.time(ClientConfigKey::Http2KeepAliveTimeout)? {
            builder = builder.http2_keep_alive_timeout(time);
        }
        let while_idle = self.is_set(ClientConfigKey::Http2KeepAliveWhileIdle)?;
        let frame = self.number::<u32>(ClientConfigKey::Http2MaxFrameSize)?;
        Ok(builder.http2_keep_alive_while_idle(while_idle).http2_max_frame_size(frame))
    }
}

fn unreadable(key: ClientConfigKey, wanted: &str) -> object_store::Error {
    generic(format!("the option `{}` is not {wanted}", key.as_ref()))
}

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut head, body) = request.into_parts();
        if head.extensions.get::<AsStored>().is_some() {
            head.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
        let url = Url::parse(&head.uri.to_string())
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let mut request = reqwest::Request::new(head.method, url);
        *request.headers_mut() = head.headers;
        *request.body_mut() = Some(in_pieces(body));
        let response = self.0.execute(request).await.map_err(failed)?;
        let (mut head, body) = http::Response::<reqwest::Body>::from(response).into_parts();
        make_readable(&mut head.headers);
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body.map_err(failed))))
    }
}

/// Percent-encodes what is no visible ASCII in the values of headers. object_store wants all to be, and gives up the whole
/// answer else: an object to which somebody gave a file name with an umlaut could not even be read.
fn make_readable(headers: &mut HeaderMap) {
    for value in headers.values_mut().filter(|value| value.to_str().is_err()) {
        let encoded = percent_encode(value.as_bytes(), CONTROLS).to_string();
        *value = HeaderValue::from_str(&encoded).expect("only visible ASCII is left");
    }
}

/// The same bytes; how many they are is in the request's head.
fn in_pieces(body: HttpRequestBody) -> reqwest::Body {
    // Small, and made here.
    if let Some(whole) = body.as_bytes() {
        return whole.clone().into();
    }
    let progress = Progress::of_call();
    let pieces =
        stream::unfold((body.into_data_stream(), Bytes::new()), |(mut chunks, mut rest)| async move {
            while rest.is_empty() {
                match chunks.next().await? {
                    Ok(chunk) => rest = chunk,
                    Err(error) => return Some((Err(error), (chunks, rest))),
                }
            }
            let piece = rest.split_to(rest.len().min(PIECE));
            Some((Ok(piece), (chunks, rest)))
        });
    reqwest::Body::wrap_stream(pieces.inspect(move |_| {
        if let Some(progress) = &progress {
            progress.tell();
        }
    }))
}

fn failed(error: reqwest::Error) -> HttpError {
    let kind = match () {
        () if error.is_timeout() => HttpErrorKind::Timeout,
        () if error.is_connect() => HttpErrorKind::Connect,
        () if error.is_decode() => HttpErrorKind::Decode,
        () => HttpErrorKind::Unknown,
    };
    // URLs may be signed.
    HttpError::new(kind, error.without_url())
}

/// Gives a host's addresses in any order: so connections are spread over a store's servers.
struct Shuffled(Rng);

impl Resolve for Shuffled {
    fn resolve(&self, name: Name) -> Resolving {
        let rng = self.0.clone();
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let mut addresses: Vec<SocketAddr> = found.collect();
            addresses.sort_by_cached_key(|_| rng.u64());
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests;
