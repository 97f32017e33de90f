//! A bucket that a test mounts and looks into beside the mount: a folder, or a prefix on an S3 server of its own.

use std::ops::Deref;
use std::path::Path;

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, StoreSettings};

use crate::s3::Server;

/// The bucket as other tools see it, and how `forebay` processes reach it.
#[derive(Debug)]
pub struct TestBucket {
    bucket: Bucket,
    server: Option<Server>,
}

impl TestBucket {
    /// Over `folder`, which is there.
    pub async fn folder(folder: &Path) -> Self {
        let url = format!("file://{}", folder.display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("the folder is there");
        Self { bucket, server: None }
    }

    /// Over an S3 server that is started for it.
    pub async fn s3() -> Self {
        let server = Server::for_volume();
        Self { bucket: server.bucket("a/prefix").await, server: Some(server) }
    }

    /// What `forebay mount` is told.
    pub fn source(&self) -> String {
        self.bucket.url().to_string()
    }

    /// The environment with which a `forebay` process reaches it.
    pub fn envs(&self) -> Vec<(String, String)> {
        self.server.as_ref().map(Server::envs).unwrap_or_default()
    }

    /// Whether there is an object at `key`.
    pub async fn has(&self, key: &str) -> bool {
        self.bucket.head(&ObjectKey::new(key)).await.expect("the store answers").is_some()
    }

    /// The bytes of the object at `key`, which is there.
    pub async fn text(&self, key: &str) -> String {
        let (bytes, _) = self.bucket.get_whole(&ObjectKey::new(key)).await.expect("an object");
        String::from_utf8(bytes.to_vec()).expect("text")
    }
}

impl Deref for TestBucket {
    type Target = Bucket;

    fn deref(&self) -> &Bucket {
        &self.bucket
    }
}
