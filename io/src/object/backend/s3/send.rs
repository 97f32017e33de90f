//! Sending a signed request, and telling a service's "later" from its "no".

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use object_store::aws::{AmazonS3, AwsCredential};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};
use object_store::path::Path;
use object_store::signer::{SignedUrlOptions, Signer};
use object_store::{ClientOptions, Result, StaticCredentialProvider};
use parking_lot::Mutex;

use super::xml::read_error;
use crate::object::error::{Fault, STORE, is_busy};

/// How long a signature holds; a request is sent right after it was signed.
const SIGNED_FOR: Duration = Duration::from_secs(900);

/// The connections of one store, shared between object_store's client and ours. It also turns answers that ask for
/// another try into typed errors, since object_store keeps the status of an error to itself.
#[derive(Debug, Clone, Default)]
pub(in crate::object::backend) struct Transport(Arc<Mutex<Option<HttpClient>>>);

impl HttpConnector for Transport {
    /// Called for each credential endpoint and last for the store itself.
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        let client = HttpClient::new(Typed(ReqwestConnector::default().connect(options)?));
        *self.0.lock() = Some(client.clone());
        Ok(client)
    }
}

/// Gives "later" answers as errors with a type.
#[derive(Debug)]
struct Typed(HttpClient);

#[async_trait]
impl HttpService for Typed {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.0.execute(request).await?;
        let status = response.status();
        if !status.is_server_error() && !matches!(status.as_u16(), 408 | 409 | 429) {
            return Ok(response);
        }
        let (head, body) = response.into_parts();
        let body = body.bytes().await?;
        let (code, message) = read_error(&body);
        if is_busy(status.as_u16(), &code) {
            let fault = Fault::Service { status: status.as_u16(), code, message };
            return Err(HttpError::new(HttpErrorKind::Unknown, fault));
        }
        Ok(HttpResponse::from_parts(head, HttpResponseBody::from(body)))
    }
}

/// Sends requests that object_store has no method for.
#[derive(Debug)]
pub(in crate::object::backend) struct Sender {
    client: HttpClient,
    signer: AmazonS3,
    /// The bucket is public and requests go unsigned.
    anonymous: bool,
}

impl Sender {
    /// `signer` must have been built over `transport`.
    pub(in crate::object::backend) fn new(
        transport: &Transport,
        signer: AmazonS3,
        anonymous: bool,
    ) -> Result<Self> {
        let client = transport.0.lock().clone();
        let missing =
            || object_store::Error::Generic { store: STORE, source: "the client never connected".into() };
        Ok(Self { client: client.ok_or_else(missing)?, signer, anonymous })
    }

    /// Credentials that only make the signer produce a URL, for buckets that want none.
    pub(in crate::object::backend) fn no_credentials() -> Arc<StaticCredentialProvider<AwsCredential>> {
        let none = AwsCredential { key_id: "anonymous".into(), secret_key: "anonymous".into(), token: None };
        Arc::new(StaticCredentialProvider::new(none))
    }

    /// Sends one request about `key` (the root is the bucket) and returns the body of a success.
    pub(super) async fn send(
        &self,
        method: Method,
        key: &Path,
        query: Vec<(&'static str, String)>,
        headers: Vec<(HeaderName, HeaderValue)>,
        body: Bytes,
    ) -> Result<Bytes> {
        let mut options = SignedUrlOptions::default().with_query(query);
        for (name, value) in &headers {
            options = options.with_signed_header(name.clone(), value.clone());
        }
        let mut url = self.signer.signed_url_opts(method.clone(), key, SIGNED_FOR, &options).await?;
        if self.anonymous {
            let kept: Vec<_> = url.query_pairs().into_owned().collect();
            let kept = kept.into_iter().filter(|(name, _)| !name.starts_with("X-Amz-"));
            let plain = kept.collect::<Vec<_>>();
            url.query_pairs_mut().clear().extend_pairs(plain);
        }
        let mut request = http::Request::builder().method(method).uri(url.as_str());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request
            .header(http::header::CONTENT_LENGTH, body.len())
            .body(HttpRequestBody::from(body))
            .map_err(|error| object_store::Error::Generic { store: STORE, source: Box::new(error) })?;
        let generic = |error| object_store::Error::Generic { store: STORE, source: Box::new(error) };
        let response = self.client.execute(request).await.map_err(generic)?;
        let status = response.status();
        let body = response.into_body().bytes().await.map_err(generic)?;
        // Long operations answer 200 before they know, and put their error into the body.
        let (code, message) = read_error(&body);
        if status.is_success() && code.is_empty() {
            return Ok(body);
        }
        Err(refuse(key, status, code, message))
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
        (StatusCode::NOT_FOUND, _) => Store::NotFound { path, source },
        (StatusCode::FORBIDDEN, _) => Store::PermissionDenied { path, source },
        (StatusCode::UNAUTHORIZED, _) => Store::Unauthenticated { path, source },
        (StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED, _) => Store::NotSupported { source },
        _ => Store::Generic { store: STORE, source },
    }
}
