//! The baselines: object_store by itself, and a bare HTTP client, against the same server.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::stream::{StreamExt, TryStreamExt};
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt};

use crate::context::PART;
use crate::store::StoreProcess;

/// object_store's S3 client with its own defaults, but for unsigned payloads.
#[derive(Debug, Clone)]
pub struct ObjectStoreClient {
    s3: Arc<AmazonS3>,
    in_flight: usize,
}

impl ObjectStoreClient {
    /// A client of the bucket of `server`.
    pub fn new(server: &StoreProcess) -> Result<Self> {
        let builder = AmazonS3Builder::new().with_endpoint(server.endpoint()).with_allow_http(true);
        let builder = builder.with_bucket_name(StoreProcess::BUCKET).with_region("us-east-1");
        let builder = builder.with_access_key_id("bench").with_secret_access_key("bench");
        let s3 = Arc::new(builder.with_unsigned_payload(true).build()?);
        Ok(Self { s3, in_flight: server.in_flight() })
    }

    /// Reads an object by ranged GETs of `part` bytes, as many in flight as keep the store busy; returns the bytes it got.
    pub async fn get_ranges(&self, key: &str, size: u64, part: u64) -> Result<u64> {
        let key = Path::from(key);
        let gets = ranges(size, part).map(|range| {
            let (store, key) = (self.s3.clone(), key.clone());
            tokio::spawn(async move { store.get_range(&key, range).await })
        });
        let got = futures::stream::iter(gets).buffered(self.in_flight);
        let bytes = got.map(|joined| Ok::<_, anyhow::Error>(joined??.len() as u64));
        bytes.try_fold(0, async |sum, bytes| Ok(sum + bytes)).await
    }

    /// Reads whole objects, so many in flight; returns the bytes it got.
    pub async fn get_many(&self, keys: &[String], in_flight: usize) -> Result<u64> {
        let gets = keys.iter().map(|key| {
            let (store, key) = (self.s3.clone(), Path::from(key.as_str()));
            async move {
                let task = tokio::spawn(async move { store.get(&key).await?.bytes().await });
                Ok::<_, anyhow::Error>(task.await??.len() as u64)
            }
        });
        let got = futures::stream::iter(gets).buffer_unordered(in_flight);
        got.try_fold(0, async |sum, bytes| Ok(sum + bytes)).await
    }

    /// Writes whole objects of the same bytes, so many in flight.
    pub async fn put_many(&self, keys: &[String], data: Bytes, in_flight: usize) -> Result<()> {
        let puts = keys.iter().map(|key| {
            let (store, key, data) = (self.s3.clone(), Path::from(key.as_str()), data.clone());
            async move {
                let task = tokio::spawn(async move { store.put(&key, data.into()).await });
                task.await??;
                Ok::<_, anyhow::Error>(())
            }
        });
        futures::stream::iter(puts).buffer_unordered(in_flight).try_collect().await
    }

    /// Writes an object of so many parts of [`PART`] bytes by its multipart upload, as many in flight as keep the store
    /// busy; `data`, a multiple of them, is sent again and again.
    pub async fn put_multipart(&self, key: &str, data: Bytes, parts: usize) -> Result<()> {
        let mut upload = self.s3.put_multipart(&Path::from(key)).await?;
        let mut running = futures::stream::FuturesUnordered::new();
        for index in 0..parts {
            if running.len() == self.in_flight {
                running.next().await.context("a part is running")???;
            }
            let start = index * PART as usize % data.len();
            running.push(tokio::spawn(upload.put_part(data.slice(start..start + PART as usize).into())));
        }
        while let Some(done) = running.next().await {
            done??;
        }
        upload.complete().await?;
        Ok(())
    }

    /// Copies an object inside the store: the copies share its memory there.
    pub async fn copy(&self, from: &str, to: &str) -> Result<()> {
        Ok(self.s3.copy(&Path::from(from), &Path::from(to)).await?)
    }

    /// Deletes everything below a prefix.
    pub async fn delete_below(&self, prefix: &str) -> Result<()> {
        let keys = self.s3.list(Some(&Path::from(prefix))).map_ok(|meta| meta.location).boxed();
        self.s3.delete_stream(keys).try_for_each(async |_| Ok(())).await?;
        Ok(())
    }
}

/// A bare HTTP client: what is left when nothing signs, retries, counts or gathers.
#[derive(Debug, Clone)]
pub struct HttpClient {
    client: Client<HttpConnector, Empty<Bytes>>,
    base: String,
}

impl HttpClient {
    /// A client of the bucket of `server`.
    pub fn new(server: &StoreProcess) -> Self {
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { client, base: format!("{}/{}", server.endpoint(), StoreProcess::BUCKET) }
    }

    /// Reads an object by ranged GETs of `part` bytes, so many in flight; returns the bytes it got.
    pub async fn get_ranges(&self, key: &str, size: u64, part: u64, in_flight: usize) -> Result<u64> {
        let gets = ranges(size, part).map(|range| tokio::spawn(self.clone().get(key.to_owned(), range)));
        let got = futures::stream::iter(gets).buffered(in_flight);
        got.map(|joined| joined?).try_fold(0, async |sum, bytes| Ok(sum + bytes)).await
    }

    async fn get(self, key: String, range: std::ops::Range<u64>) -> Result<u64> {
        let request = http::Request::get(format!("{}/{key}", self.base))
            .header(http::header::RANGE, format!("bytes={}-{}", range.start, range.end - 1))
            .body(Empty::new())?;
        let mut response = self.client.request(request).await?;
        ensure!(response.status() == http::StatusCode::PARTIAL_CONTENT, "{}", response.status());
        let mut got = 0;
        while let Some(frame) = response.body_mut().frame().await {
            got += frame?.data_ref().map_or(0, |data| data.len() as u64);
        }
        Ok(got)
    }
}

fn ranges(size: u64, part: u64) -> impl Iterator<Item = std::ops::Range<u64>> {
    (0..size.div_ceil(part)).map(move |index| index * part..size.min((index + 1) * part))
}
