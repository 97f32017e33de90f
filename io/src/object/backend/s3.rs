//! S3 and what speaks its protocol.
//!
//! object_store carries bodies and simple requests. What it lacks is sent from here over the same connections:
//! completion with a condition, part copy, unfinished uploads, and listings and deletions that survive any key. Those requests are
//! signed by object_store's own signer, so credentials, endpoint style and session tokens are its business alone.

mod xml;
mod sign;
mod customer;

use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use forebay_core::Version;
use http::{HeaderName, HeaderValue, Method};
use md5::Md5;
use object_store::aws::AmazonS3;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{Attribute, ObjectStore, PutResult, Result};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use sha2::{Digest, Sha256};

use super::credentials::Renewed;
use super::plain::delete_all;
use super::send::header;
use super::storage_class::StorageClass;
use crate::object::OperationKind;
use crate::object::error::{Fault, STORE, is_denied_head, refuses_credentials};
use crate::object::key::address;
use crate::object::layer::TOKEN_ATTRIBUTE;
use crate::object::request::{ListRequest, Page, Reply, Request, Service, UploadId, UploadsPage};
use crate::object::types::Condition;

pub(super) use customer::CustomerKey;
pub(super) use sign::{Manner, Signed};
pub(super) use xml::{read_completed as read_e_tag, read_page, write_parts};

/// Keys of one page, the most that S3 gives.
const PAGE_KEYS: usize = 1000;

/// One S3 bucket.
#[derive(Debug)]
pub(super) struct S3 {
    pub(super) store: AmazonS3,
    pub(super) signed: Signed,
    pub(super) bucket: String,
    /// Whether many objects are deleted in one request, which some servers lack.
    pub(super) deletes_many: bool,
    /// With what objects are encrypted, if with a key of one's own.
    pub(super) customer: CustomerKey,
    /// What is written with a class of its own.
    pub(super) class: StorageClass,
    /// The credentials, where they may change.
    pub(super) renewed: Option<Arc<Renewed>>,
}

/// The query of ListObjectsV2, which Google's store has, too.
pub(super) fn page_query(list: &ListRequest) -> Vec<(&'static str, String)> {
    let limit = list.limit.unwrap_or(PAGE_KEYS).min(PAGE_KEYS);
    let mut query =
        vec![("list-type", "2".to_owned()), ("max-keys", limit.to_string()), ("prefix", list.prefix.clone())];
    if list.delimited {
        query.push(("delimiter", "/".to_owned()));
    }
    match (&list.token, &list.after) {
        (Some(token), _) => query.push(("continuation-token", token.clone())),
        (None, Some(after)) => query.push(("start-after", after.clone())),
        (None, None) => {}
    }
    query
}

#[async_trait]
impl Service for S3 {
    /// Where credentials are refused before their time, new ones are got, and the request is sent once more if there are any.
    async fn call(&self, request: Request) -> Result<Reply> {
        let Some(renewed) = &self.renewed else { return self.carry_out(request).await };
        let is_head = request.kind() == OperationKind::Head;
        let used = renewed.current();
        match self.carry_out(request.clone()).await {
            Err(error)
                if refuses_credentials(&error, is_head)
                    || (is_head && renewed.are_of_file() && is_denied_head(&error)) =>
            {
                if renewed.renew_refused(used).await { self.carry_out(request).await } else { Err(error) }
            }
            answer => answer,
        }
    }
}

impl S3 {
    /// Whether requests carry no credentials.
    pub(super) fn is_anonymous(&self) -> bool {
        self.signed.is_anonymous()
    }

    async fn carry_out(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Get { key, options } => self.store.get_opts(&key, options).await.map(Reply::Object),
            Request::Put { key, payload, mut options, token } => {
                if !token.is_empty() {
                    options.attributes.insert(Attribute::Metadata(TOKEN_ATTRIBUTE.into()), token.into());
                }
                self.class.mark(&key, &mut options.attributes);
                self.store.put_opts(&key, payload, options).await.map(Reply::Put)
            }
            Request::Delete { keys, .. } if self.deletes_many => self.delete(&keys).await,
            Request::Delete { keys, .. } => delete_all(&self.store, keys).await,
            Request::DeleteMarker { directory, version } => self.delete_marker(&directory, &version).await,
            Request::List(list) => self.list(list).await.map(Reply::Page),
            Request::Copy { from, to, options, .. } => {
                if let Some(class) = self.class.of(&to).filter(|_| !self.signed.is_in_query()) {
                    return self.copy(&from, &to, class).await;
                }
                self.store.copy_opts(&from, &to, options).await?;
                Ok(Reply::Done)
            }
            Request::Create { key, mut options, token, .. } => {
                options.attributes.insert(Attribute::Metadata(TOKEN_ATTRIBUTE.into()), token.clone().into());
                self.class.mark(&key, &mut options.attributes);
                let id = self.store.create_multipart_opts(&key, options).await?;
                Ok(Reply::Upload(UploadId { key, id, token }))
            }
            Request::Part { upload, index, payload, .. } => {
                self.store.put_part(&upload.key, &upload.id, index, payload).await.map(Reply::Part)
            }
            copy @ Request::CopyPart { .. } => self.copy_part(copy).await.map(Reply::Part),
            Request::Complete { upload, parts, condition } => {
                self.complete(&upload, &parts, &condition).await.map(Reply::Put)
            }
            Request::Abort { upload } => match self.store.abort_multipart(&upload.key, &upload.id).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(Reply::Done),
                Err(error) => Err(error),
            },
            Request::ListUploads { prefix, token } => {
                self.list_uploads(prefix, token).await.map(Reply::Uploads)
            }
            Request::ListParts { upload } => self.has_parts(&upload).await.map(Reply::HasParts),
        }
    }

    async fn list(&self, list: ListRequest) -> Result<Page> {
        self.ask_bucket(page_query(&list), |body| read_page(body, &list.prefix)).await
    }

    /// Deletes up to a thousand objects in one request. object_store's own panics where the answer names a key that was not
    /// asked for, and takes a key such as `SlowDown.txt` in the answer for an error: here a success names no keys.
    async fn delete(&self, keys: &[Path]) -> Result<Reply> {
        let body = Bytes::from(xml::write_deleted(keys));
        let headers = vec![
            header("content-type", "application/xml")?,
            // Some servers want the one, some the other.
            header("content-md5", &BASE64_STANDARD.encode(Md5::digest(&body)))?,
            header("x-amz-checksum-sha256", &BASE64_STANDARD.encode(Sha256::digest(&body)))?,
        ];
        let query = vec![("delete", String::new())];
        let answer = self.signed.send(Method::POST, &Path::ROOT, query, headers, body).await?;
        match xml::read_deleted(&answer)? {
            None => Ok(Reply::Done),
            Some((code, message)) => Err(Fault::Service { status: 200, code, message }.into()),
        }
    }

    /// No request has a condition that tells an empty object from the next one: they are told by their times.
    async fn delete_marker(&self, directory: &Path, version: &Version) -> Result<Reply> {
        let list = ListRequest { prefix: format!("{directory}/"), limit: Some(1), ..ListRequest::default() };
        if self.list(list).await?.marker.as_ref() == Some(version) {
            self.signed.delete_marker(directory).await?;
        }
        Ok(Reply::Done)
    }

    /// A request about the bucket whose answer names keys. Keys may hold characters that XML cannot: then the answer
    /// cannot be read and is asked for again URL-encoded. Not at once, since servers differ in how they encode.
    async fn ask_bucket<T>(
        &self,
        mut query: Vec<(&'static str, String)>,
        read: impl Fn(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let plain = query.clone();
        let body = self.signed.send(Method::GET, &Path::ROOT, plain, Vec::new(), Bytes::new()).await?;
        if let Ok(answer) = read(&body) {
            return Ok(answer);
        }
        query.push(("encoding-type", "url".to_owned()));
        let body = self.signed.send(Method::GET, &Path::ROOT, query, Vec::new(), Bytes::new()).await?;
        read(&body)
    }

    /// Copies a whole object into a class: object_store's copies are all of the bucket's own. What lies at the target is replaced, as
    /// S3 takes no condition with it.
    async fn copy(&self, from: &Path, to: &Path, class: &str) -> Result<Reply> {
        let mut headers = vec![self.source(from)?, header("x-amz-storage-class", class)?];
        headers.extend(self.customer.of_store());
        headers.extend(self.customer.of_object().chain(self.customer.of_source()));
        self.signed.send(Method::PUT, to, Vec::new(), headers, Bytes::new()).await?;
        Ok(Reply::Done)
    }

    /// The object that is copied, as requests name it.
    fn source(&self, from: &Path) -> Result<(HeaderName, HeaderValue)> {
        let parts =
            from.as_ref().split('/').map(|part| utf8_percent_encode(part, NON_ALPHANUMERIC).to_string());
        header("x-amz-copy-source", &format!("{}/{}", self.bucket, parts.collect::<Vec<_>>().join("/")))
    }

    async fn copy_part(&self, request: Request) -> Result<PartId> {
        let Request::CopyPart { upload, index, from, version, range, .. } = request else {
            return Err(object_store::Error::Generic { store: STORE, source: "not a part copy".into() });
        };
        let query = vec![("partNumber", (index + 1).to_string()), ("uploadId", upload.id.clone())];
        let last = range.end - 1;
        let mut headers = vec![
            self.source(&from)?,
            header("x-amz-copy-source-range", &format!("bytes={}-{last}", range.start))?,
        ];
        if let Some(version) = &version {
            headers.push(header("x-amz-copy-source-if-match", version.as_str())?);
        }
        headers.extend(self.customer.of_object().chain(self.customer.of_source()));
        let body = self.signed.send(Method::PUT, &upload.key, query, headers, Bytes::new()).await?;
        let content_id = xml::read_copied_part(&body)?;
        Ok(PartId { content_id })
    }

    async fn complete(
        &self,
        upload: &UploadId,
        parts: &[PartId],
        condition: &Condition,
    ) -> Result<PutResult> {
        let query = vec![("uploadId", upload.id.clone())];
        let mut headers = vec![header("content-type", "application/xml")?];
        match condition {
            Condition::Always => {}
            Condition::IfAbsent => headers.push(header("if-none-match", "*")?),
            Condition::IfVersion(version) => headers.push(header("if-match", version.as_str())?),
        }
        // Wanted where parts have checksums.
        headers.extend(self.customer.of_object());
        let body = Bytes::from(xml::write_parts(parts));
        let body = self.signed.send(Method::POST, &upload.key, query, headers, body).await?;
        let e_tag = Some(xml::read_completed(&body)?);
        Ok(PutResult { e_tag, version: None, extensions: Default::default() })
    }

    async fn list_uploads(&self, prefix: String, token: Option<String>) -> Result<UploadsPage> {
        let mut query = vec![("uploads", String::new()), ("prefix", prefix)];
        if let Some((key, id)) = token.as_deref().and_then(|token| token.split_once('\n')) {
            query.extend([("key-marker", key.to_owned()), ("upload-id-marker", id.to_owned())]);
        }
        let listed = self.ask_bucket(query, xml::read_uploads).await?;
        let address_of = |(key, id, started): (String, String, _)| {
            address(&key).map(|key| (UploadId { key, id, token: String::new() }, started))
        };
        let next = listed.next.map(|(key, id)| format!("{key}\n{id}"));
        Ok(UploadsPage { uploads: listed.uploads.into_iter().filter_map(address_of).collect(), next })
    }

    async fn has_parts(&self, upload: &UploadId) -> Result<bool> {
        let query = vec![("uploadId", upload.id.clone()), ("max-parts", "1".to_owned())];
        let headers = self.customer.of_object().collect();
        let body = self.signed.send(Method::GET, &upload.key, query, headers, Bytes::new()).await?;
        xml::read_has_parts(&body)
    }
}
