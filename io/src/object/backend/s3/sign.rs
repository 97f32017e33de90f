//! Signing a request of S3's protocol.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};
use object_store::aws::{AmazonS3, AwsCredential};
use object_store::client::HttpRequestBody;
use object_store::path::Path;
use object_store::signer::{SignedUrlOptions, Signer};
use object_store::{Result, StaticCredentialProvider};

use super::super::send::{Sender, generic};

/// How long a signature holds; a request is sent right after it was signed.
const SIGNED_FOR: Duration = Duration::from_secs(900);

/// Signs requests and sends them.
#[derive(Debug)]
pub(in crate::object::backend) struct Signed {
    sender: Sender,
    signer: AmazonS3,
    /// The bucket is public and requests go unsigned.
    anonymous: bool,
}

impl Signed {
    pub(in crate::object::backend) fn new(sender: Sender, signer: AmazonS3, anonymous: bool) -> Self {
        Self { sender, signer, anonymous }
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
            .map_err(generic)?;
        self.sender.send(key, request).await.map(|(_, body)| body)
    }
}
