//! A key of one's own (SSE-C), of which the store keeps nothing: each request about what it encrypts brings it.

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

/// The key, as headers that object_store puts into its own requests.
#[derive(Debug, Default)]
pub(in crate::object::backend) struct CustomerKey(Option<[HeaderValue; 3]>);

impl CustomerKey {
    /// That of a store's options, if there is one. What is wrong with it is told when the store is built.
    pub(in crate::object::backend) fn of(builder: &AmazonS3Builder) -> Self {
        let value = |name: &str| {
            let key = name.parse::<AmazonS3ConfigKey>().ok()?;
            builder.get_config_value(&key)
        };
        let is_used = value("aws_server_side_encryption").as_deref() == Some("sse-c");
        let key = value("aws_sse_customer_key_base64").filter(|_| is_used);
        Self(key.and_then(|key| Self::headers(&key)))
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

    /// For a request about an object that it encrypts.
    pub(super) fn of_object(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        self.named(OBJECT)
    }

    /// For a request that copies out of such an object.
    pub(super) fn of_source(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        self.named(SOURCE)
    }

    fn named(&self, names: [&'static str; 3]) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        let values = self.0.iter().flatten().cloned();
        names.into_iter().map(HeaderName::from_static).zip(values)
    }
}
