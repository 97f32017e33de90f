//! All buckets, objects and pending uploads, behind one lock that is never held across an await.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::HeaderMap;

use super::fault::Fault;
use super::listing::{self, ListQuery, Page};
use super::multipart::{Part, PendingUpload};
use super::object::{ByteRange, Conditions, Object};

type Bucket = BTreeMap<String, Arc<Object>>;

/// What the server holds.
#[derive(Debug, Default)]
pub(super) struct Objects {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    buckets: BTreeMap<String, Bucket>,
    uploads: BTreeMap<String, PendingUpload>,
    /// Counts everything that was ever written: the source of ETags and upload ids.
    written: u64,
}

impl State {
    fn bucket(&mut self, name: &str) -> Result<&mut Bucket, Fault> {
        self.buckets.get_mut(name).ok_or(Fault::NoSuchBucket)
    }

    fn upload(&mut self, at: &At, id: &str) -> Result<&mut PendingUpload, Fault> {
        let upload = self.uploads.get_mut(id).ok_or(Fault::NoSuchUpload)?;
        if upload.bucket == at.bucket && upload.key == at.key { Ok(upload) } else { Err(Fault::NoSuchUpload) }
    }

    fn number(&mut self) -> u64 {
        self.written += 1;
        self.written
    }

    fn store(
        &mut self,
        at: &At,
        conditions: &Conditions,
        pieces: Vec<Bytes>,
        headers: HeaderMap,
    ) -> Result<Arc<Object>, Fault> {
        let etag = format!("\"{:032x}\"", self.number());
        let bucket = self.bucket(&at.bucket)?;
        conditions.check_write(bucket.get(&at.key).map(Arc::as_ref))?;
        let object = Arc::new(Object::new(pieces, etag, headers));
        bucket.insert(at.key.clone(), object.clone());
        Ok(object)
    }
}

/// A key in a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct At {
    pub(super) bucket: String,
    pub(super) key: String,
}

/// An object to copy from, and what must hold of it.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) at: At,
    pub(super) conditions: Conditions,
    /// A part copy's range; the whole object without one.
    pub(super) range: Option<ByteRange>,
}

impl Objects {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn create_bucket(&self, name: &str) {
        self.lock().buckets.entry(name.to_owned()).or_default();
    }

    pub(super) fn has_bucket(&self, name: &str) -> Result<(), Fault> {
        self.lock().bucket(name).map(|_| ())
    }

    pub(super) fn get(&self, at: &At, conditions: &Conditions) -> Result<Arc<Object>, Fault> {
        let object = self.lock().bucket(&at.bucket)?.get(&at.key).cloned().ok_or(Fault::NoSuchKey)?;
        conditions.check_read(&object)?;
        Ok(object)
    }

    pub(super) fn put(
        &self,
        at: &At,
        conditions: &Conditions,
        data: Bytes,
        headers: HeaderMap,
    ) -> Result<Arc<Object>, Fault> {
        self.lock().store(at, conditions, vec![data], headers)
    }

    pub(super) fn delete(&self, at: &At, conditions: &Conditions) -> Result<(), Fault> {
        let mut state = self.lock();
        let bucket = state.bucket(&at.bucket)?;
        conditions.check_write(bucket.get(&at.key).map(Arc::as_ref))?;
        bucket.remove(&at.key);
        Ok(())
    }

    pub(super) fn list(&self, bucket: &str, query: &ListQuery) -> Result<Page, Fault> {
        Ok(listing::page(self.lock().bucket(bucket)?, query))
    }

    /// Copies `source` to `to`; its headers go with it unless new ones are given.
    pub(super) fn copy(
        &self,
        source: &Source,
        to: &At,
        conditions: &Conditions,
        headers: Option<HeaderMap>,
    ) -> Result<Arc<Object>, Fault> {
        let object = self.get(&source.at, &source.conditions).map_err(as_failed)?;
        let headers = headers.unwrap_or_else(|| object.headers.clone());
        self.lock().store(to, conditions, object.pieces.clone(), headers)
    }

    pub(super) fn start_upload(&self, at: &At, headers: HeaderMap) -> Result<String, Fault> {
        let mut state = self.lock();
        state.bucket(&at.bucket)?;
        let id = format!("upload-{}", state.number());
        let (bucket, key) = (at.bucket.clone(), at.key.clone());
        state.uploads.insert(id.clone(), PendingUpload { bucket, key, headers, parts: BTreeMap::new() });
        Ok(id)
    }

    /// Stores a part and returns its ETag.
    pub(super) fn put_part(
        &self,
        at: &At,
        id: &str,
        number: u32,
        pieces: Vec<Bytes>,
    ) -> Result<String, Fault> {
        let mut state = self.lock();
        let etag = format!("\"{:032x}\"", state.number());
        state.upload(at, id)?.parts.insert(number, Part { pieces, etag: etag.clone() });
        Ok(etag)
    }

    /// Stores a part that is a range of an object.
    pub(super) fn copy_part(&self, source: &Source, at: &At, id: &str, number: u32) -> Result<String, Fault> {
        let object = self.get(&source.at, &source.conditions).map_err(as_failed)?;
        let range: Range<u64> = match source.range {
            Some(range) => range.within(object.size)?,
            None => 0..object.size,
        };
        self.put_part(at, id, number, object.slice(range))
    }

    /// Makes an upload's object visible. A refused condition leaves the upload as it was.
    pub(super) fn complete(
        &self,
        at: &At,
        id: &str,
        parts: &[(u32, String)],
        conditions: &Conditions,
    ) -> Result<Arc<Object>, Fault> {
        let mut state = self.lock();
        let upload = state.upload(at, id)?;
        let (pieces, headers) = (upload.assemble(parts)?, upload.headers.clone());
        let object = state.store(at, conditions, pieces, headers)?;
        state.uploads.remove(id);
        Ok(object)
    }

    pub(super) fn abort(&self, at: &At, id: &str) -> Result<(), Fault> {
        let mut state = self.lock();
        state.upload(at, id)?;
        state.uploads.remove(id);
        Ok(())
    }

    /// (key, upload id) of every pending upload below a prefix.
    pub(super) fn uploads(&self, bucket: &str, prefix: &str) -> Result<Vec<(String, String)>, Fault> {
        let mut state = self.lock();
        state.bucket(bucket)?;
        let pending = state.uploads.iter().filter(|(_, upload)| upload.bucket == bucket);
        let mut found: Vec<_> = pending.map(|(id, upload)| (upload.key.clone(), id.clone())).collect();
        found.retain(|(key, _)| key.starts_with(prefix));
        found.sort();
        Ok(found)
    }
}

/// A copy's source that is unchanged is a failed condition, not an answer without a body.
fn as_failed(fault: Fault) -> Fault {
    if fault == Fault::NotModified { Fault::PreconditionFailed } else { fault }
}
