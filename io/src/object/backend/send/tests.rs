//! What is made of a service's answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use aws_credential_types::Credentials;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use forebay_core::{ErrorKind, ObjectKey};
use http::Method;
use object_store::RetryConfig;
use object_store::aws::AmazonS3Builder;

use super::super::credentials::{Origin, Renewed};
use super::super::profile_file::ProfileFiles;
use super::super::s3::{Manner, S3, Signed};
use super::*;
use crate::clock::Clock;
use crate::object::stack::Stack;
use crate::object::{Bucket, Condition, OperationKind, StoreSettings, UploadOptions};

#[test]
fn errors_are_found_in_answers_of_any_status() {
    let text = "\n <?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>later</Message></Error>";
    assert_eq!(read_error(text.as_bytes()), ("SlowDown".into(), "later".into()));
    let marked = format!("\u{feff}{}", text.trim_start());
    assert_eq!(read_error(marked.as_bytes()).0, "SlowDown");
    for other in [
        &b"<ListBucketResult><Key>Error</Key></ListBucketResult>"[..],
        b"<?xml version=\"1.0\"?> <DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>",
        b"",
    ] {
        assert_eq!(read_error(other), (String::new(), String::new()));
    }
    assert_eq!(read_error(b"<Error>?").0, "Error");
}

/// A bucket that takes an upload of any key, and answers the first request with bytes by 400 and this code.
#[derive(Debug)]
struct Door {
    code: &'static str,
    bodies: AtomicUsize,
}

#[async_trait]
impl HttpService for Door {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (method, query) = (request.method().clone(), request.uri().query().unwrap_or("").to_owned());
        let is_first = || self.bodies.fetch_add(1, Ordering::SeqCst) == 0;
        let (status, body) = match (method, query.contains("uploads")) {
            (Method::POST, true) => {
                let named = "<Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId>";
                (200, format!("<InitiateMultipartUploadResult>{named}</InitiateMultipartUploadResult>"))
            }
            (Method::POST, false) => {
                let named = "<Key>k</Key><ETag>\"whole\"</ETag>";
                (200, format!("<CompleteMultipartUploadResult>{named}</CompleteMultipartUploadResult>"))
            }
            (Method::PUT, _) if is_first() => {
                (400, format!("<Error><Code>{}</Code><Message>why</Message></Error>", self.code))
            }
            _ => (200, String::new()),
        };
        let response = http::Response::builder().status(status).header("etag", "\"part\"");
        Ok(response.body(HttpResponseBody::from(Bytes::from(body))).expect("an answer"))
    }
}

/// Connects to a door.
#[derive(Debug, Clone)]
struct Way(HttpClient);

impl HttpConnector for Way {
    fn connect(&self, _: &ClientOptions) -> Result<HttpClient> {
        Ok(self.0.clone())
    }
}

/// A store behind `client`, of which each request is sent once.
fn builder(client: &HttpClient) -> AmazonS3Builder {
    AmazonS3Builder::new()
        .with_bucket_name("b")
        .with_region("r")
        .with_endpoint("http://door")
        .with_allow_http(true)
        .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
        .with_http_connector(Way(client.clone()))
}

fn bucket_that_says(code: &'static str) -> Bucket {
    let door = HttpClient::new(Door { code, bodies: AtomicUsize::new(0) });
    let client = HttpClient::new(Typed(door));
    let built = builder(&client).with_access_key_id("id").with_secret_access_key("key").build();
    let store = built.expect("a store");
    let signed = Signed::new(Sender(client), store.clone(), Manner::InQuery);
    let s3 = S3 {
        store,
        signed,
        bucket: "b".into(),
        deletes_many: true,
        customer: Default::default(),
        class: Default::default(),
        renewed: None,
    };
    Bucket::over("s3://b".parse().expect("a URL"), Stack::new(Arc::new(s3), &StoreSettings::default()))
}

/// S3 says 400 where others say 408: bytes that came too slowly lost the whole upload.
#[tokio::test(start_paused = true)]
async fn bytes_that_came_too_slowly_are_sent_again() {
    let key = ObjectKey::new("k");
    let bucket = bucket_that_says("RequestTimeout");
    let options = UploadOptions { part_bytes: Some(4), ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&key, options).expect("upload");
    upload.write("tenletters".into()).await.expect("write");
    upload.complete(Condition::Always).await.expect("complete");
    let counters = bucket.counters();
    assert_eq!((counters.of(OperationKind::Part).requests, counters.retries), (4, 1));
    let bucket = bucket_that_says("RequestTimeout");
    bucket.put(&key, "whole".into(), Condition::Always).await.expect("put");
    assert_eq!((bucket.counters().of(OperationKind::Put).requests, bucket.counters().retries), (2, 1));
    // What is wrong with a request stays wrong, and is told.
    let bucket = bucket_that_says("InvalidBucketName");
    let told = bucket.put(&key, "whole".into(), Condition::Always).await.expect_err("refused");
    assert_eq!((told.kind(), bucket.counters().retries), (ErrorKind::Invalid, 0), "{told}");
}

/// A bucket that takes no request signed with the first key of all, and says so with this status and code.
#[derive(Debug)]
struct Revoking(u16, &'static str);

#[async_trait]
impl HttpService for Revoking {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let signed = request.headers()["authorization"].to_str().expect("text");
        let is_bulk = request.method() == Method::POST;
        let (status, body) = match signed.contains("key-1/") {
            true if request.method() == Method::HEAD => (self.0, String::new()),
            true => (self.0, format!("<Error><Code>{}</Code><Message>why</Message></Error>", self.1)),
            false if is_bulk => (200, "<DeleteResult></DeleteResult>".to_owned()),
            false => (200, String::new()),
        };
        let response = http::Response::builder().status(status).header("etag", "\"v\"");
        let response = response.header("content-length", body.len());
        let response = response.header("last-modified", "Wed, 01 May 2024 10:00:00 GMT");
        Ok(response.body(HttpResponseBody::from(Bytes::from(body))).expect("an answer"))
    }
}

/// Gives keys 1, 2, 3, ... that live for ever.
#[derive(Debug, Default)]
struct Numbered(AtomicUsize);

impl ProvideCredentials for Numbered {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let number = self.0.fetch_add(1, Ordering::SeqCst) + 1;
        let given = Credentials::new(format!("key-{number}"), "secret", None, None, "test");
        future::ProvideCredentials::ready(Ok(given))
    }
}

/// A bucket that refuses the first credentials with `code`, after these were got a while ago.
async fn bucket_that_revokes(code: &'static str) -> (Bucket, Arc<Renewed>) {
    bucket_that_answers(Origin::Profile("lab".into()), 400, code).await
}

/// The same of credentials from `origin`, by this status.
async fn bucket_that_answers(origin: Origin, status: u16, code: &'static str) -> (Bucket, Arc<Renewed>) {
    let (clock, client) = (Clock::manual(), HttpClient::new(Typed(HttpClient::new(Revoking(status, code)))));
    let provider = SharedCredentialsProvider::new(Numbered::default());
    let renewed = Arc::new(Renewed::over(origin, provider, clock.clone()));
    let store = builder(&client).with_credentials(renewed.clone()).build().expect("a store");
    let manner = Manner::InHeader { region: "r".into(), is_payer: false };
    let signed = Signed::new(Sender(client), store.clone(), manner);
    let s3 = S3 {
        store,
        signed,
        bucket: "b".into(),
        deletes_many: true,
        customer: Default::default(),
        class: Default::default(),
        renewed: Some(renewed.clone()),
    };
    let key = object_store::CredentialProvider::get_credential(&*renewed).await.expect("the first");
    assert_eq!(key.key_id, "key-1");
    clock.advance(std::time::Duration::from_secs(60));
    let stack = Stack::new(Arc::new(s3), &StoreSettings::default());
    (Bucket::over("s3://b".parse().expect("a URL"), stack), renewed)
}

/// A session that was revoked, or a store whose clock goes ahead, refused everything until the credentials' own time came.
#[tokio::test]
async fn credentials_that_are_refused_before_their_time_are_renewed() {
    let key = ObjectKey::new("k");
    for code in [
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
    ] {
        let (bucket, _) = bucket_that_revokes(code).await;
        bucket.put(&key, "x".into(), Condition::Always).await.expect(code);
        let (bucket, _) = bucket_that_revokes(code).await;
        bucket.delete(&key).await.expect(code);
        let (bucket, renewed) = bucket_that_revokes(code).await;
        assert!(bucket.head(&key).await.expect(code).is_some());
        let held = object_store::CredentialProvider::get_credential(&*renewed).await.expect("held");
        assert_eq!(held.key_id, "key-2", "once");
    }
    let (bucket, renewed) = bucket_that_revokes("AccessDenied").await;
    bucket.put(&key, "x".into(), Condition::Always).await.expect_err("no matter of time");
    let held = object_store::CredentialProvider::get_credential(&*renewed).await.expect("held");
    assert_eq!(held.key_id, "key-1");
}

/// The answer to a HEAD says 403 and nothing else, of a key that was replaced as of an object that may not be read. A file is
/// looked at all the same; a program is not run each time.
#[tokio::test]
async fn a_head_that_is_denied_is_sent_again_with_the_new_keys_of_a_file() {
    let key = ObjectKey::new("k");
    let of_file = || Origin::Keys(ProfileFiles::of(&[]));
    let (bucket, renewed) = bucket_that_answers(of_file(), 403, "InvalidAccessKeyId").await;
    assert!(bucket.head(&key).await.expect("with the second key").is_some());
    assert_eq!(renewed.current().expect("held").key_id, "key-2", "once");
    let (bucket, renewed) =
        bucket_that_answers(Origin::Profile("lab".into()), 403, "InvalidAccessKeyId").await;
    bucket.head(&key).await.expect_err("denied");
    assert_eq!(renewed.current().expect("held").key_id, "key-1");
    bucket.put(&key, "x".into(), Condition::Always).await.expect("this answer says why");
    assert_eq!(renewed.current().expect("held").key_id, "key-2");
}
