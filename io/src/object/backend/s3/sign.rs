//! Signing a request of S3's protocol.
//!
//! In a header, as object_store signs its own: policies of buckets may refuse what is signed in the query
//! (`s3:authType`). object_store's URLs of requests are had only with a signature in the query, which is cut off again.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};
use object_store::aws::{AmazonS3, AwsAuthorizer, AwsCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use object_store::path::Path;
use object_store::signer::{SignedUrlOptions, Signer};
use object_store::{Result, StaticCredentialProvider};
use url::Url;

use super::super::send::{Sender, generic};

/// How long a signature holds that is cut off.
const SIGNED_FOR: Duration = Duration::from_secs(900);

/// Signs requests and sends them.
#[derive(Debug)]
pub(in crate::object::backend) struct Signed {
    sender: Sender,
    signer: AmazonS3,
    manner: Manner,
}

/// How requests are signed.
#[derive(Debug)]
pub(in crate::object::backend) enum Manner {
    /// The bucket is public and requests go unsigned.
    Anonymous,
    /// In a header, for a region; whoever asks pays if `is_payer`.
    InHeader { region: String, is_payer: bool },
    /// In the query: the sessions of directory buckets (S3 Express) have a header that object_store keeps to itself.
    InQuery,
}

impl Signed {
    pub(in crate::object::backend) fn new(sender: Sender, signer: AmazonS3, manner: Manner) -> Self {
        Self { sender, signer, manner }
    }

    /// Credentials that only make the signer produce a URL, for buckets that want none.
    pub(in crate::object::backend) fn no_credentials() -> Arc<StaticCredentialProvider<AwsCredential>> {
        let none = AwsCredential { key_id: "anonymous".into(), secret_key: "anonymous".into(), token: None };
        Arc::new(StaticCredentialProvider::new(none))
    }

    /// Whether the bucket is public and requests go unsigned.
    pub(super) fn is_anonymous(&self) -> bool {
        matches!(self.manner, Manner::Anonymous)
    }

    /// Whether signatures are those of a directory bucket's sessions.
    pub(super) fn is_in_query(&self) -> bool {
        matches!(self.manner, Manner::InQuery)
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
        if matches!(self.manner, Manner::InQuery) {
            for (name, value) in &headers {
                options = options.with_signed_header(name.clone(), value.clone());
            }
        }
        let mut url = self.signer.signed_url_opts(method.clone(), key, SIGNED_FOR, &options).await?;
        if !matches!(self.manner, Manner::InQuery) {
            cut_off_signature(&mut url);
        }
        let mut request = http::Request::builder().method(method).uri(url.as_str());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let mut request = request
            .header(http::header::CONTENT_LENGTH, body.len())
            .body(HttpRequestBody::from(body))
            .map_err(generic)?;
        self.sign(&mut request).await?;
        self.sender.send(key, request).await.map(|(_, body)| body)
    }

    /// Deletes the marker of a directory, whose key is the path and a slash, which no path has.
    /// Where the path is signed in the query, as for directory buckets, it is left as it is.
    pub(super) async fn delete_marker(&self, directory: &Path) -> Result<()> {
        if matches!(self.manner, Manner::InQuery) {
            return Ok(());
        }
        let options = SignedUrlOptions::default();
        let mut url = self.signer.signed_url_opts(Method::DELETE, directory, SIGNED_FOR, &options).await?;
        cut_off_signature(&mut url);
        url.set_path(&format!("{}/", url.path()));
        let request = http::Request::builder().method(Method::DELETE).uri(url.as_str());
        let mut request = request.body(HttpRequestBody::empty()).map_err(generic)?;
        self.sign(&mut request).await?;
        self.sender.send(directory, request).await.map(drop)
    }

    async fn sign(&self, request: &mut HttpRequest) -> Result<()> {
        let Manner::InHeader { region, is_payer } = &self.manner else { return Ok(()) };
        let credential = self.signer.credentials().get_credential().await?;
        let authorizer = AwsAuthorizer::new(&credential, "s3", region).with_request_payer(*is_payer);
        authorizer.try_authorize(request, None)
    }
}

/// Leaves the rest of a query as it is written.
fn cut_off_signature(url: &mut Url) {
    let is_ours = |pair: &&str| !pair.to_ascii_lowercase().starts_with("x-amz-");
    let kept: Vec<&str> = url.query().unwrap_or_default().split('&').filter(is_ours).collect();
    let kept = (!kept.is_empty()).then(|| kept.join("&"));
    url.set_query(kept.as_deref());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_cut_off_and_the_rest_stays_as_it_is_written() {
        let cut = |text: &str| {
            let mut url: Url = text.parse().expect("a URL");
            cut_off_signature(&mut url);
            url.to_string()
        };
        let signed =
            "X-Amz-Algorithm=A&X-Amz-Credential=k%2Fs3&x-amz-request-payer=requester&X-Amz-Signature=0";
        assert_eq!(
            cut(&format!("http://h/b?prefix=a%20b%2B&uploads=&{signed}")),
            "http://h/b?prefix=a%20b%2B&uploads="
        );
        assert_eq!(cut(&format!("http://h/b/k?{signed}")), "http://h/b/k");
    }
}
