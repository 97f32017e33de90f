//! Sending a request that object_store has no method for, and telling a service's "later" from its "no".

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use object_store::path::Path;
use object_store::{ClientOptions, Result};
use parking_lot::Mutex;
use serde::Deserialize;

use super::client::Client;
use crate::object::error::{Fault, STORE, is_busy};

/// The connections of one store, shared between object_store's client and ours. It also turns answers that ask for
/// another try into typed errors, since object_store keeps the status of an error to itself.
#[derive(Debug, Clone, Default)]
pub(super) struct Transport(Arc<Mutex<Option<HttpClient>>>);

impl HttpConnector for Transport {
    /// Called for each credential endpoint and last for the store itself.
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        let client = HttpClient::new(Typed(HttpClient::new(Client::new(options)?)));
        *self.0.lock() = Some(client.clone());
        Ok(client)
    }
}

/// A request that has it copies inside S3, which answers 200 before it knows and puts what went wrong into the body.
const COPY_SOURCE: &str = "x-amz-copy-source";

/// Gives "later" answers as errors with a type, and the errors of copies as such.
#[derive(Debug)]
struct Typed(HttpClient);

#[async_trait]
impl HttpService for Typed {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_copy = request.headers().contains_key(COPY_SOURCE);
        let response = self.0.execute(request).await?;
        let status = response.status();
        let may_be_copied = is_copy && status.is_success();
        // S3 says 400 where it waited for bytes in vain, too.
        let may_be_later = status.is_server_error() || matches!(status.as_u16(), 400 | 408 | 409 | 429);
        if !may_be_later && !may_be_copied {
            return Ok(response);
        }
        let (mut head, body) = response.into_parts();
        let body = body.bytes().await?;
        let (code, message) = read_error(&body);
        let fault = |code, message| {
            let fault = Fault::Service { status: status.as_u16(), code, message };
            HttpError::new(HttpErrorKind::Unknown, fault)
        };
        if is_busy(status.as_u16(), &code) {
            return Err(fault(code, message));
        }
        if may_be_copied && code.is_empty() && !names_object(&body) {
            return Err(fault("NoCopy".to_owned(), "the answer to a copy names none".to_owned()));
        }
        if may_be_copied && !code.is_empty() {
            // object_store looks for two codes in such a body, and takes all others for a success.
            head.status = match code.as_str() {
                "PreconditionFailed" => StatusCode::PRECONDITION_FAILED,
                _ => StatusCode::BAD_REQUEST,
            };
        }
        Ok(HttpResponse::from_parts(head, HttpResponseBody::from(body)))
    }
}

/// Sends requests over the connections that object_store has to the store.
#[derive(Debug)]
pub(super) struct Sender(HttpClient);

impl Sender {
    /// A store must have been built over `transport`.
    pub(super) fn new(transport: &Transport) -> Result<Self> {
        transport.0.lock().clone().map(Self).ok_or_else(|| generic("the client never connected"))
    }

    /// Sends one signed request about `key` (the root is the bucket) and returns head and body of a success.
    pub(super) async fn send(&self, key: &Path, request: HttpRequest) -> Result<(HeaderMap, Bytes)> {
        let response = self.0.execute(request).await.map_err(generic)?;
        let (head, body) = response.into_parts();
        let body = body.bytes().await.map_err(generic)?;
        // Long operations answer 200 before they know, and put their error into the body.
        let (code, message) = read_error(&body);
        if head.status.is_success() && code.is_empty() {
            return Ok((head.headers, body));
        }
        Err(refuse(key, head.status, code, message))
    }
}

/// A service's error in object_store's terms.
fn refuse(key: &Path, status: StatusCode, code: String, message: String) -> object_store::Error {
    use object_store::Error as Store;
    let path = key.to_string();
    let named = code.clone();
    let source = Box::new(Fault::Service { status: status.as_u16(), code, message });
    match (status, named.as_str()) {
        (_, "PreconditionFailed") | (StatusCode::PRECONDITION_FAILED, _) => {
            Store::Precondition { path, source }
        }
        (_, "BlobAlreadyExists") => Store::AlreadyExists { path, source },
        (StatusCode::NOT_FOUND, _) => Store::NotFound { path, source },
        (StatusCode::FORBIDDEN, _) => Store::PermissionDenied { path, source },
        (StatusCode::UNAUTHORIZED, _) => Store::Unauthenticated { path, source },
        (StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED, _) => Store::NotSupported { source },
        _ => Store::Generic { store: STORE, source },
    }
}

/// An error of this side.
pub(super) fn generic(
    source: impl Into<Box<dyn std::error::Error + Send + Sync + 'static>>,
) -> object_store::Error {
    object_store::Error::Generic { store: STORE, source: source.into() }
}

/// A header whose value comes from elsewhere.
pub(super) fn header(name: &'static str, value: &str) -> Result<(HeaderName, HeaderValue)> {
    Ok((HeaderName::from_static(name), HeaderValue::from_str(value).map_err(generic)?))
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ErrorAnswer {
    code: String,
    message: String,
}

#[derive(Debug, Deserialize)]
struct Named {
    #[serde(rename = "ETag")]
    e_tag: String,
}

/// Whether the answer to a copy says which object it made.
fn names_object(body: &[u8]) -> bool {
    let named =
        std::str::from_utf8(body).ok().map(|text| quick_xml::de::from_str::<Named>(text.trim_start()));
    named.is_some_and(|named| named.is_ok_and(|named| !named.e_tag.is_empty()))
}

/// Code and message of an error answer, which all services write alike; both empty when `body` is none. That of a deletion
/// may hold errors of its own, one for each object that stays.
fn read_error(body: &[u8]) -> (String, String) {
    const BLANKS: [char; 5] = ['\u{feff}', ' ', '\r', '\n', '\t'];
    let text = String::from_utf8_lossy(&body[..body.len().min(64 << 10)]);
    // Some begin with a byte order mark, some with spaces that kept the connection open.
    let text = text.trim_start_matches(BLANKS);
    let declared = text.strip_prefix("<?xml").and_then(|rest| rest.split_once("?>"));
    let root = declared.map_or(text, |(_, rest)| rest.trim_start_matches(BLANKS));
    if !root.starts_with("<Error>") && !root.starts_with("<Error ") {
        return Default::default();
    }
    let answer: ErrorAnswer = quick_xml::de::from_str(text).unwrap_or_default();
    match answer.code.as_str() {
        "" => ("Error".to_owned(), text.chars().take(200).collect()),
        _ => (answer.code, answer.message),
    }
}

#[cfg(test)]
mod tests;
