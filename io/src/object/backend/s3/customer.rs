//! How objects are encrypted: with a key of one's own (SSE-C), of which the store keeps nothing, so that each request about what it
//! encrypts brings it, or with one that the store keeps, which requests that make an object may name.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::{HeaderName, HeaderValue};
use md5::{Digest, Md5};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};

const OBJECT: [&str; 3] = [
    "x-amz-server-side-encryption-customer-algorithm",
    "x-amz-server-side-encryption-customer-key",
    "x-amz-server-side-encryption-customer-key-md5",
];
const SOURCE: [&str; 3] = [
    "x-amz-copy-source-server-side-encryption-customer-algorithm",
    "x-amz-copy-source-server-side-encryption-customer-key",
    "x-amz-copy-source-server-side-encryption-customer-key-md5",
];

/// The headers of a key that the store keeps, and the options that they come from.
const KEPT: [(&str, &str); 3] = [
    ("x-amz-server-side-encryption", "aws_server_side_encryption"),
    ("x-amz-server-side-encryption-aws-kms-key-id", "aws_sse_kms_key_id"),
    ("x-amz-server-side-encryption-bucket-key-enabled", "aws_sse_bucket_key_enabled"),
];

/// The key, as headers that object_store puts into its own requests.
#[derive(Debug, Default)]
pub(in crate::object::backend) struct CustomerKey {
    own: Option<[HeaderValue; 3]>,
    kept: Vec<(HeaderName, HeaderValue)>,
}

impl CustomerKey {
    /// That of a store's options, if there is one. What is wrong with it is told when the store is built.
    pub(in crate::object::backend) fn of(builder: &AmazonS3Builder) -> Self {
        let value = |name: &str| {
            let key = name.parse::<AmazonS3ConfigKey>().ok()?;
            builder.get_config_value(&key)
        };
        let manner = value("aws_server_side_encryption");
        let is_own = manner.as_deref() == Some("sse-c");
        let key = value("aws_sse_customer_key_base64").filter(|_| is_own);
        let is_kept = manner.is_some() && !is_own;
        let kept = KEPT.iter().filter(|_| is_kept).filter_map(|(header, option)| {
            let value = HeaderValue::try_from(value(option)?).ok()?;
            Some((HeaderName::from_static(header), value))
        });
        Self { own: key.and_then(|key| Self::headers(&key)), kept: kept.collect() }
    }

    fn headers(key: &str) -> Option<[HeaderValue; 3]> {
        let digest = BASE64_STANDARD.encode(Md5::digest(BASE64_STANDARD.decode(key).ok()?));
        let secret = |text: &str| {
            let mut value = HeaderValue::from_str(text).ok()?;
            value.set_sensitive(true);
            Some(value)
        };
        Some([HeaderValue::from_static("AES256"), secret(key)?, secret(&digest)?])
    }

    /// For a request that makes an object and is not object_store's.
    pub(super) fn of_store(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        self.kept.iter().cloned()
    }

    /// For a request about an object that it encrypts.
    pub(super) fn of_object(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        self.named(OBJECT)
    }

    /// For a request that copies out of such an object.
    pub(super) fn of_source(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        self.named(SOURCE)
    }

    fn named(&self, names: [&'static str; 3]) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        let values = self.own.iter().flatten().cloned();
        names.into_iter().map(HeaderName::from_static).zip(values)
    }
}
