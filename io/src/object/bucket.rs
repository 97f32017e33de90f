//! A bucket prefix as the rest of Forebay sees it.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectKey, Result, Timestamp, Version};
use futures::stream::{BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion,
};

use super::{BucketUrl, Condition, Listing, ObjectInfo, Scheme, StoreSettings};

/// A handle on a bucket prefix; cheap to clone.
#[derive(Clone, Debug)]
pub struct Bucket {
    url: BucketUrl,
    store: Arc<dyn ObjectStore>,
}

impl Bucket {
    /// Connects to the store that `url` names, with the provider's own credential chain.
    pub async fn open(url: &BucketUrl, settings: &StoreSettings) -> Result<Self> {
        let store: Arc<dyn ObjectStore> = match url.directory() {
            Some(directory) => {
                let local =
                    object_store::local::LocalFileSystem::new_with_prefix(&directory).map_err(convert)?;
                Arc::new(local.with_fsync(true))
            }
            None => {
                let text = BucketUrl { prefix: String::new(), ..url.clone() }.to_string();
                let parsed = ::url::Url::parse(&text).map_err(|error| Error::invalid(error.to_string()))?;
                let environment = std::env::vars().map(|(name, value)| (name.to_ascii_lowercase(), value));
                let options = environment.chain(settings.options.clone());
                let (store, _) = object_store::parse_url_opts(&parsed, options).map_err(convert)?;
                match url.prefix.as_str() {
                    "" => Arc::from(store),
                    prefix => Arc::new(object_store::prefix::PrefixStore::new(store, prefix)),
                }
            }
        };
        Ok(Self { url: url.clone(), store })
    }

    /// A bucket over any store, for tests and for decorators.
    pub fn from_store(url: BucketUrl, store: Arc<dyn ObjectStore>) -> Self {
        Self { url, store }
    }

    /// A bucket in memory, for tests.
    pub fn in_memory() -> Self {
        let url = BucketUrl { scheme: Scheme::S3, bucket: "memory".into(), prefix: String::new() };
        Self::from_store(url, Arc::new(object_store::memory::InMemory::new()))
    }

    /// Where this bucket is.
    pub fn url(&self) -> &BucketUrl {
        &self.url
    }

    /// The store itself, decorators included, for an engine that keeps its tree inside the bucket.
    pub fn store(&self) -> Arc<dyn ObjectStore> {
        self.store.clone()
    }

    /// What the store says about `key`; `None` when there is no such object.
    pub async fn head(&self, key: &ObjectKey) -> Result<Option<ObjectInfo>> {
        match self.store.head(&path(key)?).await {
            Ok(meta) => Ok(Some(info(meta))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(convert(error)),
        }
    }

    /// Bytes `range` of the object, in one ranged GET.
    ///
    /// # Errors
    /// `Stale` when `version` is given and the key holds another one; `NotFound` when the key is gone.
    pub async fn get(&self, key: &ObjectKey, version: Option<&Version>, range: Range<u64>) -> Result<Bytes> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let if_match = version.map(|version| version.as_str().to_owned());
        let options = GetOptions { range: Some(range.into()), if_match, ..Default::default() };
        let result = self.store.get_opts(&path(key)?, options).await.map_err(stale_if_replaced)?;
        result.bytes().await.map_err(convert)
    }

    /// A whole object and what the store says about it, from one GET.
    pub async fn get_whole(&self, key: &ObjectKey) -> Result<(Bytes, ObjectInfo)> {
        let result = self.store.get(&path(key)?).await.map_err(convert)?;
        let info = info(result.meta.clone());
        Ok((result.bytes().await.map_err(convert)?, info))
    }

    /// Writes a whole object in one PUT.
    ///
    /// # Errors
    /// `Conflict` when `condition` does not hold.
    pub async fn put(&self, key: &ObjectKey, data: Bytes, condition: Condition) -> Result<ObjectInfo> {
        let size = data.len() as u64;
        let mode = match condition {
            Condition::Always => PutMode::Overwrite,
            Condition::IfAbsent => PutMode::Create,
            Condition::IfVersion(version) => {
                PutMode::Update(UpdateVersion { e_tag: Some(version.as_str().to_owned()), version: None })
            }
        };
        let options = PutOptions { mode, ..Default::default() };
        let put = self.store.put_opts(&path(key)?, data.into(), options).await.map_err(convert)?;
        let version = Version::new(put.e_tag.unwrap_or_default());
        Ok(ObjectInfo { key: key.clone(), version, size, modified: now() })
    }

    /// Deletes an object; one that is gone already is no error.
    pub async fn delete(&self, key: &ObjectKey) -> Result<()> {
        match self.store.delete(&path(key)?).await {
            Err(object_store::Error::NotFound { .. }) | Ok(()) => Ok(()),
            Err(error) => Err(convert(error)),
        }
    }

    /// Every object whose key starts with `prefix` (a whole number of segments), in key order.
    pub fn list(&self, prefix: &str) -> BoxStream<'static, Result<ObjectInfo>> {
        let prefix = Path::from(prefix);
        self.store.list(Some(&prefix)).map(|meta| meta.map(info).map_err(convert)).boxed()
    }

    /// What lies directly below the directory `prefix` (`""` is the root).
    pub async fn list_directory(&self, prefix: &str) -> Result<Listing> {
        let prefix = Path::parse(prefix).map_err(|error| Error::invalid(error.to_string()))?;
        let listed = self.store.list_with_delimiter(Some(&prefix)).await.map_err(convert)?;
        let directories =
            listed.common_prefixes.iter().filter_map(|path| path.filename().map(str::to_owned)).collect();
        let objects = listed.objects.into_iter().filter(|meta| meta.location != prefix).map(info).collect();
        Ok(Listing { objects, directories })
    }

    /// Starts writing an object of unknown size, front to back.
    pub async fn upload(&self, key: &ObjectKey) -> Result<Upload> {
        let parts = self.store.put_multipart(&path(key)?).await.map_err(convert)?;
        Ok(Upload { bucket: self.clone(), key: key.clone(), parts, size: 0 })
    }

    /// Copies an object inside the bucket without moving its bytes through this host.
    pub async fn copy(&self, from: &ObjectKey, to: &ObjectKey) -> Result<ObjectInfo> {
        self.store.copy(&path(from)?, &path(to)?).await.map_err(convert)?;
        self.head(to).await?.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("copy {to} is gone")))
    }
}

/// An object being written front to back in parts.
#[derive(Debug)]
pub struct Upload {
    bucket: Bucket,
    key: ObjectKey,
    parts: Box<dyn object_store::MultipartUpload>,
    size: u64,
}

impl Upload {
    /// Uploads the next part; every part but the last is at least 5 MiB.
    pub async fn part(&mut self, data: Bytes) -> Result<()> {
        self.size += data.len() as u64;
        self.parts.put_part(PutPayload::from(data)).await.map_err(convert)
    }

    /// Makes the object visible, whole.
    pub async fn complete(mut self) -> Result<ObjectInfo> {
        self.parts.complete().await.map_err(convert)?;
        let (bucket, key) = (self.bucket, self.key);
        bucket.head(&key).await?.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{key} is gone")))
    }

    /// Gives the upload up and frees its parts.
    pub async fn abort(mut self) -> Result<()> {
        self.parts.abort().await.map_err(convert)
    }
}

fn path(key: &ObjectKey) -> Result<Path> {
    Path::parse(key.as_str()).map_err(|error| Error::invalid(format!("key `{key}`: {error}")))
}

fn info(meta: ObjectMeta) -> ObjectInfo {
    ObjectInfo {
        key: ObjectKey::new(meta.location.as_ref()),
        version: Version::new(meta.e_tag.unwrap_or_default()),
        size: meta.size,
        modified: Timestamp {
            seconds: meta.last_modified.timestamp(),
            nanos: meta.last_modified.timestamp_subsec_nanos(),
        },
    }
}

fn now() -> Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
}

fn stale_if_replaced(error: object_store::Error) -> Error {
    match error {
        object_store::Error::Precondition { path, .. } => {
            Error::new(ErrorKind::Stale, format!("object {path} was replaced"))
        }
        other => convert(other),
    }
}

fn convert(error: object_store::Error) -> Error {
    use object_store::Error as Store;
    let kind = match &error {
        Store::NotFound { .. } => ErrorKind::NotFound,
        Store::AlreadyExists { .. } | Store::Precondition { .. } => ErrorKind::Conflict,
        Store::NotSupported { .. } | Store::NotImplemented { .. } => ErrorKind::Unsupported,
        Store::InvalidPath { .. } | Store::UnknownConfigurationKey { .. } => ErrorKind::Invalid,
        Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => ErrorKind::Denied,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, error.to_string())
}
