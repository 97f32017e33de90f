//! A bucket prefix as the rest of Forebay sees it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectKey, Result, Timestamp, Version};
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Attribute, CopyMode, CopyOptions, GetResult, ObjectMeta, ObjectStore, PutOptions};

use super::aside::Aside;
use super::backend::{Connected, Plain, STAGED, connect, sweep_directory};
use super::counters::Meter;
use super::error::convert;
use super::front::{Front, pages};
use super::key::{address, directory_prefix};
use super::layer::{Delay, Faults, Guard, Prefix, Rate, TOKEN_ATTRIBUTE};
use super::request::{DELETE_LIMIT, ListRequest, Page, Reply, Request, Shared, UploadId};
use super::stack::Stack;
use super::types::{Leftover, Unfinished, put_mode};
use super::unanswered::Unanswered;
use super::upload::{MIN_PART_BYTES, Upload, UploadOptions, even_part_size};
use super::{Authorship, BucketUrl, Condition, Counters, Listing, ObjectInfo, Scheme, StoreSettings};
use crate::clock::Clock;
use crate::task::{TaskGroup, blocking};

/// A handle on a bucket prefix; cheap to clone.
///
/// Every request is counted, bounded in number, and retried until the settings' deadline. Reads and listings are
/// cancel-safe. A dropped write may or may not have been carried out, except for [`Upload::complete`], which goes on.
#[derive(Clone, Debug)]
pub struct Bucket(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    url: BucketUrl,
    name: String,
    stack: Stack,
    service: Shared,
    store: Arc<Front>,
    clock: Clock,
}

/// What to do where a bucket answers nobody without credentials, and was asked without.
const NOT_PUBLIC: &str = "not anybody may list this bucket: leave out --anonymous (AWS_SKIP_SIGNATURE, GOOGLE_SKIP_SIGNATURE or \
    AZURE_SKIP_SIGNATURE in the environment, `anonymous` of [volume.store] in the settings) and give credentials";

impl Bucket {
    /// Connects to the store that `url` names, with the provider's own credential chain, and proves that it can be
    /// listed. A store that takes no connection fails this within 5 s, one that does not answer at its deadline.
    ///
    /// # Errors
    /// `NotFound` for a bucket or directory that does not exist, `Denied` for credentials that are missing, wrong or
    /// too weak, `Unavailable` for an endpoint that does not answer, `Invalid` for a wrong region or option; each
    /// with its cause and a hint.
    pub async fn open(url: &BucketUrl, settings: &StoreSettings) -> Result<Self> {
        if settings.max_in_flight == 0 {
            return Err(Error::invalid("max_in_flight is 0: no request could ever be sent"));
        }
        let Connected { service: base, wants_even_parts, is_anonymous, storage_class } =
            connect(url, settings).await?;
        let even_parts = settings.even_parts || wants_even_parts;
        // As the environment has them as well.
        let settings =
            &StoreSettings { even_parts, anonymous: is_anonymous, storage_class, ..settings.clone() };
        let first = Self::over(url.clone(), Stack::opening(base.clone(), settings));
        let found = first.list_some().await.map_err(|error| match error.kind() {
            ErrorKind::Denied if is_anonymous => error.with_hint(NOT_PUBLIC),
            _ => error,
        })?;
        if found.is_empty() && url.scheme != Scheme::File && !url.prefix.is_empty() {
            // A listing below an object is empty, too.
            let root = BucketUrl { prefix: String::new(), ..url.clone() };
            let whole =
                Self::over(root.clone(), Stack::opening(connect(&root, settings).await?.service, settings));
            if whole.head(&ObjectKey::new(&url.prefix)).await.is_ok_and(|found| found.is_some()) {
                return Err(Error::new(ErrorKind::NotDirectory, format!("{url} is an object, not a prefix"))
                    .with_hint("name the prefix that it is in, without its last segment"));
            }
        }
        Ok(Self::over(url.clone(), Stack::new(base, settings)))
    }

    /// A bucket over any store, with default settings. Uploads are staged in memory until they are complete, so
    /// this is for tests; [`Bucket::open`] is the way to real stores.
    pub fn from_store(url: BucketUrl, store: Arc<dyn ObjectStore>) -> Self {
        Self::over(url, Stack::new(Arc::new(Plain::staged(store, false)), &StoreSettings::default()))
    }

    /// A bucket in memory, for tests.
    pub fn in_memory() -> Self {
        Self::in_memory_below("")
    }

    /// The same below a prefix of the bucket, for tests.
    pub fn in_memory_below(prefix: &str) -> Self {
        let url = BucketUrl { scheme: Scheme::S3, bucket: "memory".into(), prefix: prefix.into() };
        let store = Plain::staged(Arc::new(object_store::memory::InMemory::new()), true);
        Self::over(url, Stack::new(Prefix::wrap(Arc::new(store), prefix), &StoreSettings::default()))
    }

    /// The same, refusing at its completion an upload whose parts but the last are not of one size, as Cloudflare R2 does.
    pub fn in_memory_of_even_parts() -> Self {
        let url = BucketUrl { scheme: Scheme::S3, bucket: "memory".into(), prefix: String::new() };
        let store = Plain::staged(Arc::new(object_store::memory::InMemory::new()), true).of_even_parts();
        Self::over(url, Stack::new(Arc::new(store), &StoreSettings::default()))
    }

    pub(super) fn over(url: BucketUrl, stack: Stack) -> Self {
        let (name, service) = (url.to_string(), stack.build());
        let store = Front { service: service.clone(), rng: stack.rng.clone(), name: name.clone() };
        Self(Arc::new(Inner { url, name, stack, service, store: Arc::new(store), clock: Clock::system() }))
    }

    fn derive(&self, change: impl FnOnce(&mut Stack)) -> Self {
        let mut stack = self.0.stack.clone();
        change(&mut stack);
        Self::over(self.0.url.clone(), stack)
    }

    /// The same bucket with another deadline, in milliseconds.
    pub fn with_deadline_ms(&self, deadline_ms: u64) -> Self {
        self.derive(|stack| stack.settings.deadline_ms = deadline_ms)
    }

    /// The same bucket for requests that must not wait behind those of others, however many these are: they have
    /// places of their own, as many as all others together have.
    pub fn apart(&self) -> Self {
        self.derive(|stack| stack.stand_apart(stack.settings.max_in_flight))
    }

    /// The same bucket, refusing every write with `ReadOnly`.
    pub fn read_only(&self) -> Self {
        self.derive(|stack| stack.read_only = true)
    }

    /// The same bucket, changing it only while `guard` says that this process may: that is asked right before each request
    /// that changes anything is sent, or sent again, whatever it waited for until then. One under way is given up half a
    /// second after at the latest. [`super::is_withheld`] tells what was not sent at all.
    pub fn guarded(&self, guard: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        self.derive(|stack| stack.guard = Some(Guard(Arc::new(guard))))
    }

    /// Whether requests carry no credentials, by the settings or by the environment.
    pub fn is_anonymous(&self) -> bool {
        self.0.stack.settings.anonymous
    }

    /// The storage class of what is written, by the settings or by the environment; `None` for the bucket's own.
    pub fn storage_class(&self) -> Option<&str> {
        self.0.stack.settings.storage_class.as_deref()
    }

    /// Whether all parts of an upload but the last are of one size: the store wants it, as far as is known.
    pub fn wants_even_parts(&self) -> bool {
        self.0.stack.even_parts.load(Ordering::Relaxed)
    }

    /// Has them be so from now on, in all handles that derive from one another.
    pub fn want_even_parts(&self) {
        if !self.0.stack.even_parts.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                bucket = %self.0.name,
                "the store wants all parts of an upload but the last to be of one size, and gets them so from now on"
            );
        }
    }

    /// The least bytes of a part that is not the last: what an upload may keep back after [`Upload::relieve`].
    pub fn least_part_bytes(&self) -> u64 {
        if self.wants_even_parts() { even_part_size(None) } else { MIN_PART_BYTES }
    }

    /// Whether this handle refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.0.stack.read_only
    }

    /// The same bucket with faults injected below the retries, for tests.
    pub fn with_faults(&self, faults: &Faults) -> Self {
        self.derive(|stack| stack.faults = Some(faults.clone()))
    }

    /// The same bucket made slow, for tests.
    pub fn with_delay(&self, delay: Delay) -> Self {
        self.derive(|stack| stack.delay = Some(delay))
    }

    /// The same bucket, whose handles that were given `rate` together send no more than that.
    pub fn with_rate(&self, rate: &Rate) -> Self {
        self.derive(|stack| stack.rate = Some(rate.clone()))
    }

    /// Where this bucket is.
    pub fn url(&self) -> &BucketUrl {
        &self.0.url
    }

    /// The directory that holds the objects, where requests do nothing but read files.
    pub(super) fn folder(&self) -> Option<PathBuf> {
        let is_plain = self.0.stack.faults.is_none() && self.0.stack.delay.is_none();
        self.0.url.directory().filter(|_| is_plain)
    }

    pub(super) fn meter(&self) -> &Arc<Meter> {
        &self.0.stack.meter
    }

    /// The store itself, decorators included, for an engine that keeps its tree inside the bucket.
    pub fn store(&self) -> Arc<dyn ObjectStore> {
        self.0.store.clone()
    }

    /// As [`Self::store`], for an engine that only looks at its tree: what it puts stays in this process, and hides what the
    /// bucket has there.
    pub fn store_aside(&self) -> Arc<dyn ObjectStore> {
        Arc::new(Aside::over(self.store()))
    }

    /// What went over the wire so far, by this handle and those that derive from it or that it derives from.
    pub fn counters(&self) -> Counters {
        self.0.stack.meter.snapshot()
    }

    /// Waits for uploads that are completing or being aborted; after `deadline` they are cancelled and named.
    pub async fn shutdown(&self, deadline: Duration) -> Vec<String> {
        self.0.stack.tasks.shutdown(deadline).await
    }

    /// Proves with one request that the bucket can be reached and listed.
    pub async fn check(&self) -> Result<()> {
        self.list_some().await.map(drop)
    }

    /// The names at the start of the listing, at least one where there is any.
    async fn list_some(&self) -> Result<Vec<String>> {
        let list = ListRequest { limit: Some(1), delimited: true, ..ListRequest::default() };
        let page = self.call(Request::List(list)).await?.page().map_err(|error| self.error(error))?;
        let objects = page.objects.into_iter().map(|meta| meta.location.to_string());
        Ok(objects.chain(page.directories).collect())
    }

    /// What the store says about `key`; `None` when there is no such object.
    pub async fn head(&self, key: &ObjectKey) -> Result<Option<ObjectInfo>> {
        Ok(self.find(key).await?.map(|object| info(object.meta)))
    }

    /// Whether an object carries anything that a copy in parts would lose: a content type, metadata of its writer.
    pub async fn has_attributes(&self, key: &ObjectKey) -> Result<bool> {
        /// What stores call an object of which nothing was said.
        const NO_TYPES: [&str; 2] = ["binary/octet-stream", "application/octet-stream"];
        let is_plain = |attribute: &Attribute, value: &str| match attribute {
            Attribute::Metadata(name) => *name == TOKEN_ATTRIBUTE,
            Attribute::ContentType => NO_TYPES.contains(&value),
            _ => false,
        };
        let attributes = self.find(key).await?.map(|object| object.attributes).unwrap_or_default();
        Ok(attributes.iter().any(|(attribute, value)| !is_plain(attribute, value)))
    }

    async fn find(&self, key: &ObjectKey) -> Result<Option<GetResult>> {
        match self.0.service.call(Request::head(self.path(key)?)).await.and_then(Reply::object) {
            Ok(object) => Ok(Some(object)),
            Err(error) => match self.error(error) {
                // A bucket that is gone is an error, an object that is gone an answer; HEAD cannot tell them apart.
                error if error.kind() == ErrorKind::NotFound => Ok(None),
                error => Err(error),
            },
        }
    }

    /// The same, and whether the write that carried `token` put it there: see [`Bucket::put_as`].
    pub async fn head_of(&self, key: &ObjectKey, token: &str) -> Result<Option<(ObjectInfo, Authorship)>> {
        let Some(object) = self.find(key).await? else { return Ok(None) };
        let held = object.attributes.get(&Attribute::Metadata(TOKEN_ATTRIBUTE.into()));
        let authorship = match held {
            Some(held) if held.as_ref() == token => Authorship::Ours,
            // A folder whose file system keeps no tokens with its files, of which this process remembers no write.
            None if self.0.url.scheme == Scheme::File => Authorship::Unknown,
            _ => Authorship::Others,
        };
        Ok(Some((info(object.meta), authorship)))
    }

    /// What the write of an object carried, if it was one as of [`Bucket::put_as`]; copies inside the store carry the same.
    /// Never empty: that is what a folder says of whatever others wrote.
    pub async fn token_of(&self, key: &ObjectKey) -> Result<Option<String>> {
        let held = |object: GetResult| {
            let held = object.attributes.get(&Attribute::Metadata(TOKEN_ATTRIBUTE.into()));
            held.map(|held| held.as_ref().to_owned()).filter(|token| !token.is_empty())
        };
        Ok(self.find(key).await?.and_then(held))
    }

    /// Writes a whole object in one PUT.
    ///
    /// # Errors
    /// `Conflict` when `condition` does not hold.
    pub async fn put(&self, key: &ObjectKey, data: Bytes, condition: Condition) -> Result<ObjectInfo> {
        self.put_payload(key, data.into(), condition, None).await
    }

    /// As [`Bucket::put`], with a token of the caller's, which no other write has: [`Bucket::head_of`] knows the object
    /// by it, also for a process that comes later.
    pub async fn put_as(
        &self,
        key: &ObjectKey,
        data: Bytes,
        condition: Condition,
        token: &str,
    ) -> Result<ObjectInfo> {
        self.put_payload(key, data.into(), condition, Some(token.to_owned())).await
    }

    /// As [`Bucket::put`], for bytes that lie in pieces; with a token of the caller's, if there is one.
    pub(super) async fn put_payload(
        &self,
        key: &ObjectKey,
        payload: object_store::PutPayload,
        condition: Condition,
        token: Option<String>,
    ) -> Result<ObjectInfo> {
        let size = payload.content_length() as u64;
        let options = PutOptions { mode: put_mode(&condition), ..Default::default() };
        // Without a condition a repetition is never refused, so there is nothing to settle.
        let settled = || if condition == Condition::Always { String::new() } else { self.token() };
        let token = token.unwrap_or_else(settled);
        let request = Request::Put { key: self.path(key)?, payload, options, token };
        let put = self.call(request).await?.put().map_err(|error| self.error(error))?;
        Ok(self.written(key, put.e_tag, size))
    }

    /// Deletes an object; one that is gone already is no error.
    pub async fn delete(&self, key: &ObjectKey) -> Result<()> {
        self.delete_many(std::slice::from_ref(key)).await
    }

    /// Deletes objects, up to a thousand in one request; those that are gone already are no error.
    pub async fn delete_many(&self, keys: &[ObjectKey]) -> Result<()> {
        self.delete_chunks(keys, false).await
    }

    /// The same of objects that others may replace, which the caller has just looked at: where the store does not answer, it is
    /// not asked again. Else what somebody put there after the first attempt would go with the second.
    ///
    /// # Errors
    /// One of which [`super::is_unrepeated`] is true where the store did not answer: the caller looks again what is there.
    pub async fn delete_many_once(&self, keys: &[ObjectKey]) -> Result<()> {
        self.delete_chunks(keys, true).await
    }

    async fn delete_chunks(&self, keys: &[ObjectKey], once: bool) -> Result<()> {
        for keys in keys.chunks(DELETE_LIMIT) {
            let keys = keys.iter().map(|key| self.path(key)).collect::<Result<_>>()?;
            self.call(Request::Delete { keys, once }).await?;
        }
        Ok(())
    }

    /// Deletes the marker of a directory (`dir/`) that a listing showed, unless another one has its place by now. Only in S3: a
    /// folder has none, and those of other stores are left as they are.
    pub async fn delete_marker(&self, directory: &str, version: &Version) -> Result<()> {
        let directory = self.path(&ObjectKey::new(directory))?;
        self.call(Request::DeleteMarker { directory, version: version.clone() }).await.map(drop)
    }

    /// Every object below the directory `prefix` (`""` is the root), in key order, one page of up to a thousand keys
    /// in memory at a time.
    ///
    /// Markers of directories (`dir/`) are left out. So are keys that Forebay cannot address (with empty, `.` or `..`
    /// segments or control characters); [`Counters::skipped_keys`] counts them.
    pub fn list(&self, prefix: &str) -> BoxStream<'static, Result<ObjectInfo>> {
        let objects = |page: Listing| futures::stream::iter(page.objects.into_iter().map(Ok));
        self.list_pages(prefix, false).map_ok(objects).try_flatten().boxed()
    }

    /// What lies directly below the directory `prefix` (`""` is the root), all in memory.
    pub async fn list_directory(&self, prefix: &str) -> Result<Listing> {
        let whole = |mut whole: Listing, page: Listing| async move {
            whole.add(page);
            Ok(whole)
        };
        self.list_directory_pages(prefix).try_fold(Listing::default(), whole).await
    }

    /// Whether a listing of the directory `prefix` would show anything, a marker of its own or keys without an address included:
    /// then a listing of the directory above shows it.
    pub async fn has_below(&self, prefix: &str) -> Result<bool> {
        let refused = || Error::invalid(format!("`{prefix}` cannot be the directory of a key"));
        let prefix = directory_prefix(prefix).ok_or_else(refused)?;
        let list = ListRequest { prefix, delimited: true, limit: Some(1), ..ListRequest::default() };
        let page = self.call(Request::List(list)).await?.page().map_err(|error| self.error(error))?;
        let is_empty = page.objects.is_empty() && page.directories.is_empty() && page.skipped.keys == 0;
        Ok(!is_empty || page.marker.is_some() || page.next.is_some())
    }

    /// As [`Bucket::list_directory`], page by page, for directories of any size.
    pub fn list_directory_pages(&self, prefix: &str) -> BoxStream<'static, Result<Listing>> {
        self.list_pages(prefix, true)
    }

    fn list_pages(&self, prefix: &str, delimited: bool) -> BoxStream<'static, Result<Listing>> {
        let Some(prefix) = directory_prefix(prefix) else {
            let error = Error::invalid(format!("`{prefix}` cannot be the directory of a key"));
            return futures::stream::once(async { Err(error) }).boxed();
        };
        let list = ListRequest { prefix, delimited, ..ListRequest::default() };
        let bucket = self.clone();
        pages(self.0.service.clone(), list)
            .map(move |page| {
                let page = page.map_err(|error| bucket.error(error))?;
                let objects = page.objects.into_iter().map(info).collect();
                let Page { directories, marker, skipped, .. } = page;
                Ok(Listing { objects, directories, marker, skipped })
            })
            .boxed()
    }

    /// Starts writing an object of unknown size, front to back. Nothing is sent until a part is full.
    pub async fn upload(&self, key: &ObjectKey) -> Result<Upload> {
        self.upload_with(key, UploadOptions::default())
    }

    /// As [`Bucket::upload`], with options.
    pub fn upload_with(&self, key: &ObjectKey, options: UploadOptions) -> Result<Upload> {
        self.path(key)?;
        Ok(Upload::new(self.clone(), key.clone(), options))
    }

    /// Uploads below the directory `prefix` that were neither completed nor aborted.
    ///
    /// # Errors
    /// `Unsupported` where the store cannot tell (Google Cloud Storage, Azure).
    pub async fn list_uploads(&self, prefix: &str) -> Result<Vec<Unfinished>> {
        let refused = || Error::invalid(format!("`{prefix}` cannot be the directory of a key"));
        self.find_uploads(directory_prefix(prefix).ok_or_else(refused)?).await
    }

    /// Uploads to `key` that were neither completed nor aborted.
    ///
    /// # Errors
    /// As [`Bucket::list_uploads`].
    pub async fn uploads_to(&self, key: &ObjectKey) -> Result<Vec<Unfinished>> {
        let mut found = self.find_uploads(key.as_str().to_owned()).await?;
        found.retain(|upload| upload.key == *key);
        Ok(found)
    }

    async fn find_uploads(&self, prefix: String) -> Result<Vec<Unfinished>> {
        let (mut found, mut token) = (Vec::new(), None);
        loop {
            let request = Request::ListUploads { prefix: prefix.clone(), token };
            let page = self.call(request).await?.uploads().map_err(|error| self.error(error))?;
            found.extend(page.uploads.into_iter().map(|(upload, started)| {
                let key = ObjectKey::new(upload.key.as_ref());
                Unfinished { key, id: upload.id, started }
            }));
            match page.next {
                Some(next) => token = Some(next),
                None => return Ok(found),
            }
        }
    }

    /// Gives up an upload that this or another process started; one that is gone already is no error.
    pub async fn abort_upload(&self, key: &ObjectKey, id: &str) -> Result<()> {
        let upload = UploadId { key: self.path(key)?, id: id.to_owned(), token: String::new() };
        self.call(Request::Abort { upload }).await.map(drop)
    }

    /// What dead processes left beside the key space of a directory, or under Google's keys for uploads, untouched for
    /// at least `min_age`: removed unless `keep`. Other stores keep such things to themselves, as unfinished uploads.
    pub async fn sweep_staging(&self, min_age: Duration, keep: bool) -> Result<Vec<Leftover>> {
        if self.0.url.scheme == Scheme::Gcs {
            return self.sweep_uploads(min_age, keep).await;
        }
        let Some(root) = self.0.url.directory() else { return Ok(Vec::new()) };
        if self.is_read_only() && !keep {
            return Err(Error::new(ErrorKind::ReadOnly, "this handle on the bucket may not write"));
        }
        let shown = self.0.name.clone();
        let swept = blocking(move || sweep_directory(&root, min_age, keep)).await?;
        swept.map_err(|error| Error::from(error).context(format!("staging folder of {shown}")))
    }

    async fn sweep_uploads(&self, min_age: Duration, keep: bool) -> Result<Vec<Leftover>> {
        let before = self.0.clock.wall().seconds.saturating_sub_unsigned(min_age.as_secs());
        let found: Vec<ObjectInfo> = self.list(STAGED).try_collect().await?;
        let old: Vec<ObjectInfo> = found.into_iter().filter(|info| info.modified.seconds <= before).collect();
        if !keep {
            let keys: Vec<ObjectKey> = old.iter().map(|info| info.key.clone()).collect();
            self.delete_many(&keys).await?;
        }
        let left = |info: ObjectInfo| Leftover { name: info.key.as_str().to_owned(), bytes: info.size };
        Ok(old.into_iter().map(left).collect())
    }

    /// Copies an object of so many bytes inside the bucket without moving them through this host. On S3 up to 5 GiB;
    /// larger ones go part by part through [`Upload::copy_from`].
    ///
    /// Of the conditions, stores have `IfAbsent` alone for this, and S3 has none: the caller has looked at `to` before.
    ///
    /// # Errors
    /// `Conflict` when the condition was looked at and does not hold, also after a copy of this call whose reply was lost;
    /// `Unavailable` when it is not known what became of it.
    pub async fn copy(
        &self,
        from: &ObjectKey,
        to: &ObjectKey,
        bytes: u64,
        condition: &Condition,
    ) -> Result<ObjectInfo> {
        let mode = match condition {
            Condition::IfAbsent if self.0.url.scheme != Scheme::S3 => CopyMode::Create,
            _ => CopyMode::Overwrite,
        };
        let options = CopyOptions::new().with_mode(mode);
        self.call(Request::Copy { from: self.path(from)?, to: self.path(to)?, bytes, options }).await?;
        self.head(to).await?.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("copy {to} is gone")))
    }

    /// One request whose error the caller wants to look at first.
    pub(super) async fn raw(&self, request: Request) -> object_store::Result<Reply> {
        self.0.service.call(request).await
    }

    pub(super) async fn call(&self, request: Request) -> Result<Reply> {
        self.0.service.call(request).await.map_err(|error| self.error(error))
    }

    pub(super) fn error(&self, error: object_store::Error) -> Error {
        convert(&self.0.name, error)
    }

    pub(super) fn unanswered(&self) -> &Arc<Unanswered> {
        &self.0.stack.unanswered
    }

    pub(super) fn tasks(&self) -> &TaskGroup {
        &self.0.stack.tasks
    }

    pub(super) fn token(&self) -> String {
        self.0.stack.rng.name()
    }

    /// What is known of an object that was just written.
    pub(super) fn written(&self, key: &ObjectKey, e_tag: Option<String>, size: u64) -> ObjectInfo {
        let version = Version::new(e_tag.unwrap_or_default());
        ObjectInfo { key: key.clone(), version, size, modified: self.0.clock.wall() }
    }

    pub(super) fn path(&self, key: &ObjectKey) -> Result<Path> {
        address(key.as_str()).ok_or_else(|| {
            Error::invalid(format!("`{key}` cannot be the key of an object"))
                .with_hint("keys have no empty, `.` or `..` segments and no control characters")
        })
    }
}

pub(super) fn info(meta: ObjectMeta) -> ObjectInfo {
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
