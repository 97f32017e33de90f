//! Puts every key below a prefix of the bucket.

use async_trait::async_trait;
use object_store::path::Path;
use object_store::{ObjectMeta, Result};

use crate::object::error::STORE;
use crate::object::key::address;
use crate::object::request::{Reply, Request, Service, Shared, UploadId};

#[derive(Debug)]
pub(in crate::object) struct Prefix {
    next: Shared,
    /// With a slash at its end.
    prefix: String,
}

impl Prefix {
    /// Wraps `next`; an empty prefix wraps nothing.
    pub(in crate::object) fn wrap(next: Shared, prefix: &str) -> Shared {
        match prefix {
            "" => next,
            prefix => std::sync::Arc::new(Self { next, prefix: format!("{prefix}/") }),
        }
    }

    fn outer(&self, key: &Path) -> Result<Path> {
        let full = format!("{}{key}", self.prefix);
        let refused =
            || object_store::Error::Generic { store: STORE, source: format!("bad key {full}").into() };
        address(&full).ok_or_else(refused)
    }

    fn outer_upload(&self, upload: UploadId) -> Result<UploadId> {
        Ok(UploadId { key: self.outer(&upload.key)?, ..upload })
    }

    fn inner(&self, key: &Path) -> Path {
        key.as_ref().strip_prefix(&self.prefix).and_then(address).unwrap_or_else(|| key.clone())
    }

    fn inner_meta(&self, meta: ObjectMeta) -> ObjectMeta {
        ObjectMeta { location: self.inner(&meta.location), ..meta }
    }

    fn push(&self, request: Request) -> Result<Request> {
        Ok(match request {
            Request::Get { key, options } => Request::Get { key: self.outer(&key)?, options },
            Request::Put { key, payload, options, token } => {
                Request::Put { key: self.outer(&key)?, payload, options, token }
            }
            Request::Delete { keys, once } => {
                Request::Delete { keys: keys.iter().map(|key| self.outer(key)).collect::<Result<_>>()?, once }
            }
            Request::DeleteMarker { directory, version } => {
                Request::DeleteMarker { directory: self.outer(&directory)?, version }
            }
            Request::List(mut list) => {
                list.prefix.insert_str(0, &self.prefix);
                list.after = list.after.map(|after| format!("{}{after}", self.prefix));
                Request::List(list)
            }
            Request::Copy { from, to, bytes, options } => {
                Request::Copy { from: self.outer(&from)?, to: self.outer(&to)?, bytes, options }
            }
            Request::Create { key, options, token, conditional } => {
                Request::Create { key: self.outer(&key)?, options, token, conditional }
            }
            Request::Part { upload, index, offset, payload } => {
                Request::Part { upload: self.outer_upload(upload)?, index, offset, payload }
            }
            Request::CopyPart { upload, index, offset, from, version, range } => {
                let (upload, from) = (self.outer_upload(upload)?, self.outer(&from)?);
                Request::CopyPart { upload, index, offset, from, version, range }
            }
            Request::Complete { upload, parts, condition } => {
                Request::Complete { upload: self.outer_upload(upload)?, parts, condition }
            }
            Request::Abort { upload } => Request::Abort { upload: self.outer_upload(upload)? },
            Request::ListParts { upload } => Request::ListParts { upload: self.outer_upload(upload)? },
            Request::ListUploads { prefix, token } => {
                Request::ListUploads { prefix: format!("{}{prefix}", self.prefix), token }
            }
        })
    }

    fn pull(&self, reply: Reply) -> Reply {
        match reply {
            Reply::Object(mut object) => {
                object.meta = self.inner_meta(object.meta);
                Reply::Object(object)
            }
            Reply::Page(mut page) => {
                page.objects = page.objects.into_iter().map(|meta| self.inner_meta(meta)).collect();
                page.skipped.first =
                    page.skipped.first.map(|key| key.strip_prefix(&self.prefix).unwrap_or(&key).to_owned());
                Reply::Page(page)
            }
            Reply::Upload(upload) => Reply::Upload(UploadId { key: self.inner(&upload.key), ..upload }),
            Reply::Uploads(mut page) => {
                for (upload, _) in &mut page.uploads {
                    upload.key = self.inner(&upload.key);
                }
                Reply::Uploads(page)
            }
            other => other,
        }
    }
}

#[async_trait]
impl Service for Prefix {
    async fn call(&self, request: Request) -> Result<Reply> {
        Ok(self.pull(self.next.call(self.push(request)?).await?))
    }
}
