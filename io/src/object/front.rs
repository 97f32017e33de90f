//! The decorated store as an object_store `ObjectStore`, for an engine that keeps its tree inside the bucket.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use parking_lot::Mutex;

use super::key::directory_prefix;
use super::request::{DELETE_LIMIT, ListRequest, Page, Request, Shared, UploadId};
use super::types::Condition;
use crate::rng::Rng;

/// A service seen through object_store's trait.
#[derive(Debug)]
pub(super) struct Front {
    pub(super) service: Shared,
    pub(super) rng: Rng,
    pub(super) name: String,
}

impl std::fmt::Display for Front {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Forebay({})", self.name)
    }
}

/// Every page that `list` asks for, one request after the other.
pub(super) fn pages(service: Shared, list: ListRequest) -> BoxStream<'static, Result<Page>> {
    futures::stream::try_unfold(Some(list), move |state| {
        let service = service.clone();
        async move {
            let Some(list) = state else { return Ok(None) };
            let page = service.call(Request::List(list.clone())).await?.page()?;
            let next = page.next.clone().map(|token| ListRequest { token: Some(token), ..list });
            Ok(Some((page, next)))
        }
    })
    .boxed()
}

impl Front {
    fn list_from(
        &self,
        prefix: Option<&Path>,
        after: Option<String>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let prefix = prefix.and_then(|path| directory_prefix(path.as_ref())).unwrap_or_default();
        let pages = pages(self.service.clone(), ListRequest { prefix, after, ..ListRequest::default() });
        pages.map_ok(|page| futures::stream::iter(page.objects.into_iter().map(Ok))).try_flatten().boxed()
    }
}

#[async_trait]
impl ObjectStore for Front {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let token = if options.mode == PutMode::Overwrite { String::new() } else { self.rng.name() };
        self.service.call(Request::Put { key: location.clone(), payload, options, token }).await?.put()
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let (key, token) = (location.clone(), self.rng.name());
        let create = Request::Create { key, options, token, conditional: false };
        let upload = self.service.call(create).await?.upload()?;
        let parts = Arc::default();
        Ok(Box::new(FrontUpload { service: self.service.clone(), upload, parts, index: 0, offset: 0 }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.service.call(Request::Get { key: location.clone(), options }).await?.object()
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let service = self.service.clone();
        locations
            .try_chunks(DELETE_LIMIT)
            .map_err(|error| error.1)
            .and_then(move |keys| {
                let service = service.clone();
                async move {
                    service.call(Request::Delete { keys: keys.clone(), once: false }).await?;
                    Ok(futures::stream::iter(keys.into_iter().map(Ok)))
                }
            })
            .try_flatten()
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_from(prefix, None)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_from(prefix, Some(offset.to_string()))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let prefix = prefix.and_then(|path| directory_prefix(path.as_ref())).unwrap_or_default();
        let list = ListRequest { prefix: prefix.clone(), delimited: true, ..ListRequest::default() };
        let mut pages = pages(self.service.clone(), list);
        let mut result =
            ListResult { common_prefixes: Vec::new(), objects: Vec::new(), extensions: Default::default() };
        while let Some(page) = pages.try_next().await? {
            result.objects.extend(page.objects);
            for name in page.directories {
                result.common_prefixes.push(Path::parse(format!("{prefix}{name}"))?);
            }
        }
        Ok(result)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let copy = Request::Copy { from: from.clone(), to: to.clone(), bytes: 0, options };
        self.service.call(copy).await.map(drop)
    }
}

#[derive(Debug)]
struct FrontUpload {
    service: Shared,
    upload: UploadId,
    parts: Arc<Mutex<Vec<Option<PartId>>>>,
    index: usize,
    offset: u64,
}

#[async_trait]
impl MultipartUpload for FrontUpload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        let (index, offset) = (self.index, self.offset);
        self.index += 1;
        self.offset += payload.content_length() as u64;
        self.parts.lock().push(None);
        let (service, parts) = (self.service.clone(), self.parts.clone());
        let request = Request::Part { upload: self.upload.clone(), index, offset, payload };
        Box::pin(async move {
            let part = service.call(request).await?.part()?;
            parts.lock()[index] = Some(part);
            Ok(())
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        if self.index == 0 {
            self.put_part(Bytes::new().into()).await?;
        }
        let parts: Option<Vec<PartId>> = self.parts.lock().iter().cloned().collect();
        let missing =
            || object_store::Error::Generic { store: "forebay", source: "a part is missing".into() };
        let (upload, parts) = (self.upload.clone(), parts.ok_or_else(missing)?);
        let complete = Request::Complete { upload, parts, condition: Condition::Always };
        self.service.call(complete).await?.put()
    }

    async fn abort(&mut self) -> Result<()> {
        self.service.call(Request::Abort { upload: self.upload.clone() }).await.map(drop)
    }
}
