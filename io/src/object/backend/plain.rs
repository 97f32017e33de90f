//! Any store that object_store knows.
//!
//! Google Cloud Storage and Azure use their own multipart uploads; their listings, and conditions on the completion of an
//! upload, are their own affair. A store without them (in memory, or one that a test brings) stages parts in memory
//! until completion, and then also has conditional completion, part copy and a list of unfinished uploads, so that
//! tests meet the whole interface.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::Timestamp;
use futures::stream::{StreamExt, TryStreamExt};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, GetOptions, ListResult, ObjectStore, ObjectStoreExt, PutMultipartOptions,
    PutOptions, PutPayload, Result,
};
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::object::error::{Fault, unsupported};
use crate::object::key::is_segment;
use crate::object::layer::TOKEN_ATTRIBUTE;
use crate::object::request::{ListRequest, Page, Reply, Request, Service, UploadId, UploadsPage};
use crate::object::types::{Condition, Skipped, put_mode};
use crate::rng::Rng;

/// A store of object_store's as a service.
#[derive(Debug)]
pub(in crate::object) struct Plain {
    store: Arc<dyn ObjectStore>,
    native: Option<Native>,
    keeps_metadata: bool,
    /// Parts but the last have to be of one size, and the last no larger.
    of_even_parts: bool,
    staged: Mutex<BTreeMap<String, Staged>>,
    rng: Rng,
}

/// A cloud store's uploads in parts.
struct Native(Arc<dyn MultipartStore>);

impl std::fmt::Debug for Native {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Native")
    }
}

/// An upload whose parts wait in memory.
#[derive(Debug)]
struct Staged {
    upload: UploadId,
    options: PutMultipartOptions,
    parts: BTreeMap<usize, Bytes>,
    started: Timestamp,
}

impl Plain {
    /// A cloud store, with its own multipart uploads; its listings are read where that is known.
    pub(super) fn cloud<S: ObjectStore + MultipartStore>(store: S) -> Self {
        let store = Arc::new(store);
        Self { native: Some(Native(store.clone())), ..Self::staged(store, true) }
    }

    /// Any store; `keeps_metadata` says whether it keeps user metadata with objects.
    pub(in crate::object) fn staged(store: Arc<dyn ObjectStore>, keeps_metadata: bool) -> Self {
        let (staged, rng) = (Mutex::default(), Rng::system());
        Self { store, native: None, keeps_metadata, of_even_parts: false, staged, rng }
    }

    /// The same, as strict about parts as Cloudflare's R2.
    pub(in crate::object) fn of_even_parts(self) -> Self {
        Self { of_even_parts: true, ..self }
    }

    fn mark(&self, attributes: &mut Attributes, token: String) {
        if self.keeps_metadata && !token.is_empty() {
            attributes.insert(Attribute::Metadata(TOKEN_ATTRIBUTE.into()), token.into());
        }
    }

    /// One page with everything, for stores that do not promise an order.
    async fn list(&self, list: ListRequest) -> Result<Page> {
        if self.native.is_some() {
            return Err(unsupported("the listing of keys is each cloud's own"));
        }
        let prefix = Path::parse(&list.prefix)?;
        let result = if list.delimited {
            self.store.list_with_delimiter(Some(&prefix)).await?
        } else {
            let mut objects: Vec<_> = self.store.list(Some(&prefix)).try_collect().await?;
            objects.sort_by(|a, b| a.location.as_ref().cmp(b.location.as_ref()));
            ListResult { objects, common_prefixes: Vec::new(), extensions: Default::default() }
        };
        let mut page = to_page(&list, result);
        if let Some(after) = &list.after {
            page.objects.retain(|meta| meta.location.as_ref() > after.as_str());
        }
        if let Some(limit) = list.limit.filter(|_| list.delimited) {
            page.objects.truncate(limit);
        }
        Ok(page)
    }

    async fn create(&self, key: Path, mut options: PutMultipartOptions, token: String) -> Result<UploadId> {
        self.mark(&mut options.attributes, token.clone());
        if let Some(native) = &self.native {
            let id = native.0.create_multipart_opts(&key, options).await?;
            return Ok(UploadId { key, id, token });
        }
        let upload = UploadId { key, id: self.rng.name(), token };
        let (parts, started) = (BTreeMap::new(), Clock::system().wall());
        let staged = Staged { upload: upload.clone(), options, parts, started };
        self.staged.lock().insert(upload.id.clone(), staged);
        Ok(upload)
    }

    fn stage(&self, upload: &UploadId, index: usize, data: Bytes) -> Result<PartId> {
        let mut uploads = self.staged.lock();
        let staged = uploads.get_mut(&upload.id).ok_or_else(|| no_upload(upload))?;
        staged.parts.insert(index, data);
        Ok(PartId { content_id: index.to_string() })
    }

    async fn complete(&self, upload: UploadId, parts: Vec<PartId>, condition: Condition) -> Result<Reply> {
        if self.native.is_some() {
            return Err(unsupported("the completion of an upload is each cloud's own"));
        }
        let (payload, options) = {
            let uploads = self.staged.lock();
            let staged = uploads.get(&upload.id).ok_or_else(|| no_upload(&upload))?;
            let known =
                |part: &PartId| part.content_id.parse().ok().and_then(|index| staged.parts.get(&index));
            let pieces: Option<Vec<Bytes>> = parts.iter().map(|part| known(part).cloned()).collect();
            let pieces = pieces.ok_or_else(|| no_upload(&upload))?;
            if self.of_even_parts && !are_even(&pieces) {
                let (code, message) =
                    ("InvalidPart".to_owned(), "All non-trailing parts must have the same length.");
                return Err(Fault::Service { status: 400, code, message: message.to_owned() }.into());
            }
            (pieces.into_iter().collect::<PutPayload>(), staged.options.clone())
        };
        let options = PutOptions {
            mode: put_mode(&condition),
            tags: options.tags,
            attributes: options.attributes,
            extensions: options.extensions,
        };
        let put = self.store.put_opts(&upload.key, payload, options).await?;
        self.staged.lock().remove(&upload.id);
        Ok(Reply::Put(put))
    }

    async fn copy_part(&self, request: Request) -> Result<Reply> {
        let Request::CopyPart { upload, index, from, version, range, .. } = request else {
            return Err(unsupported("not a part copy"));
        };
        if self.native.is_some() {
            return Err(unsupported("this store has no part copy"));
        }
        let if_match = version.map(|version| version.as_str().to_owned());
        let options = GetOptions { range: Some(range.into()), if_match, ..GetOptions::default() };
        let data = self.store.get_opts(&from, options).await?.bytes().await?;
        self.stage(&upload, index, data).map(Reply::Part)
    }

    async fn abort(&self, upload: UploadId) -> Result<Reply> {
        match &self.native {
            Some(native) => match native.0.abort_multipart(&upload.key, &upload.id).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            },
            None => drop(self.staged.lock().remove(&upload.id)),
        }
        Ok(Reply::Done)
    }

    fn list_uploads(&self, prefix: &str) -> Result<UploadsPage> {
        if self.native.is_some() {
            return Err(unsupported("this store cannot list unfinished uploads"));
        }
        let staged = self.staged.lock();
        let below = staged.values().filter(|staged| staged.upload.key.as_ref().starts_with(prefix));
        let uploads = below.map(|staged| (staged.upload.clone(), staged.started)).collect();
        Ok(UploadsPage { uploads, next: None })
    }

    fn has_parts(&self, upload: &UploadId) -> Result<bool> {
        if self.native.is_some() {
            return Err(unsupported("this store cannot list the parts of an upload"));
        }
        let staged = self.staged.lock();
        staged.get(&upload.id).map(|staged| !staged.parts.is_empty()).ok_or_else(|| no_upload(upload))
    }
}

#[async_trait]
impl Service for Plain {
    async fn call(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Get { key, options } => self.store.get_opts(&key, options).await.map(Reply::Object),
            Request::Put { key, payload, mut options, token } => {
                self.mark(&mut options.attributes, token);
                self.store.put_opts(&key, payload, options).await.map(Reply::Put)
            }
            Request::Delete { keys, .. } => delete_all(self.store.as_ref(), keys).await,
            Request::DeleteMarker { .. } => Ok(Reply::Done),
            Request::List(list) => self.list(list).await.map(Reply::Page),
            Request::Copy { from, to, options, .. } => {
                self.store.copy_opts(&from, &to, options).await?;
                Ok(Reply::Done)
            }
            Request::Create { key, options, token, .. } => {
                self.create(key, options, token).await.map(Reply::Upload)
            }
            Request::Part { upload, index, payload, .. } => match &self.native {
                Some(native) => {
                    native.0.put_part(&upload.key, &upload.id, index, payload).await.map(Reply::Part)
                }
                None => self.stage(&upload, index, payload.into()).map(Reply::Part),
            },
            copy @ Request::CopyPart { .. } => self.copy_part(copy).await,
            Request::Complete { upload, parts, condition } => self.complete(upload, parts, condition).await,
            Request::Abort { upload } => self.abort(upload).await,
            Request::ListUploads { prefix, .. } => self.list_uploads(&prefix).map(Reply::Uploads),
            Request::ListParts { upload } => self.has_parts(&upload).map(Reply::HasParts),
        }
    }
}

/// Deletes `keys` in as few requests as the store allows; keys without an object are no error.
pub(super) async fn delete_all(store: &dyn ObjectStore, keys: Vec<Path>) -> Result<Reply> {
    if let [key] = keys.as_slice() {
        return match store.delete(key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(Reply::Done),
            Err(error) => Err(error),
        };
    }
    let mut deleted = store.delete_stream(futures::stream::iter(keys.into_iter().map(Ok)).boxed());
    while let Some(outcome) = deleted.next().await {
        match outcome {
            Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Reply::Done)
}

/// Turns object_store's listing into a page, leaving out the marker of the prefix itself.
fn to_page(list: &ListRequest, result: ListResult) -> Page {
    let own_marker = list.prefix.trim_end_matches('/');
    let objects: Vec<_> = result.objects.into_iter().filter(|m| m.location.as_ref() != own_marker).collect();
    let names = result.common_prefixes.iter().filter_map(|path| path.filename().map(str::to_owned));
    let directories = names.filter(|name| is_segment(name)).collect();
    Page { objects, directories, next: None, marker: None, skipped: Skipped::default() }
}

fn are_even(pieces: &[Bytes]) -> bool {
    let Some((last, rest)) = pieces.split_last() else { return true };
    rest.iter().all(|piece| piece.len() == rest[0].len())
        && rest.first().is_none_or(|first| last.len() <= first.len())
}

fn no_upload(upload: &UploadId) -> object_store::Error {
    let source = format!("no upload {}", upload.id).into();
    object_store::Error::NotFound { path: upload.key.to_string(), source }
}
