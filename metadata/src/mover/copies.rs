//! Copying one object inside the store.

use std::fmt;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use forebay_core::{Blob, Error, ErrorKind, ObjectKey, Result};
use forebay_io::object::{Condition, ObjectInfo, Scheme, UploadNotes, UploadOptions};
use tracing::{debug, warn};

use super::Mover;
use crate::kv::Durability;
use crate::records::Change;
use crate::schema::UploadRecord;

/// The largest object that is copied in one request where others go in parts: what stores copy in about a second. A copy
/// in parts shows nothing before the last request, which is short and has a condition; one request that was given up may
/// show its copy at any time.
pub(crate) const LONGEST_COPY: u64 = 64 << 20;
/// The largest object that stores copy in one request, as S3 has it. Up to it, what has a content type or metadata is.
const LARGEST_COPY: u64 = 5 << 30;

/// Bytes of each of two objects that are compared at once.
const COMPARED_AT_ONCE: usize = 4 << 20;

impl Mover {
    /// Copies an object inside the store. The caller knows that it is still the version meant.
    ///
    /// # Errors
    /// `Unavailable` when it is not known what became of it.
    pub(super) async fn copy_inside(
        &self,
        from: &Blob,
        to: &ObjectKey,
        condition: Condition,
    ) -> Result<ObjectInfo> {
        // A folder has what was given up under control, and syncs less at a time in one request.
        let in_parts = from.size > LONGEST_COPY
            && self.bucket().url().scheme != Scheme::File
            && !self.lacks_part_copy().load(Ordering::Relaxed)
            && (from.size > LARGEST_COPY || !self.bucket().has_attributes(&from.key).await?);
        if in_parts {
            match self.copy_in_parts(from, to, condition.clone()).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    debug!(%error, "large objects are copied in one request");
                    self.lacks_part_copy().store(true, Ordering::Relaxed);
                }
                Err(error) if !is_about_the_object(&error) => debug!(%error, "copied in one request"),
                copied => return copied,
            }
        }
        self.bucket().copy(&from.key, to, from.size, &condition).await
    }

    /// Whether `found` is a copy of `source` and nobody else's object of the same size: it has the same hash or carries the same
    /// token; in a folder, which may keep none, the same bytes.
    pub(super) async fn is_copy(&self, source: &Blob, found: &ObjectInfo) -> Result<bool> {
        if found.size != source.size || found.version == source.version {
            return Ok(found.size == source.size);
        }
        if source.staged_on().is_some() {
            // It has got its version when it was brought in.
            let brought = self.bucket().head(&source.key).await?;
            if brought.is_some_and(|brought| brought.version == found.version) {
                return Ok(true);
            }
        }
        let tokens = (self.bucket().token_of(&source.key).await?, self.bucket().token_of(&found.key).await?);
        match tokens {
            (Some(of_source), Some(of_found)) => Ok(of_source == of_found),
            _ if self.bucket().url().scheme == Scheme::File => self.are_alike(source, &found.blob()).await,
            _ => Ok(false),
        }
    }

    /// Whether two objects of the same size have the same bytes. One that is gone or was replaced is not like the other.
    async fn are_alike(&self, one: &Blob, other: &Blob) -> Result<bool> {
        for start in (0..one.size).step_by(COMPARED_AT_ONCE) {
            let range = start..one.size.min(start + COMPARED_AT_ONCE as u64);
            let read = |blob: &Blob| {
                let (key, version, range) = (blob.key.clone(), blob.version.clone(), range.clone());
                async move { self.bucket().get(&key, Some(&version), range).await }
            };
            match tokio::try_join!(read(one), read(other)) {
                Ok((one, other)) if one == other => {}
                Ok(_) => return Ok(false),
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Stale) => {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    async fn copy_in_parts(&self, from: &Blob, to: &ObjectKey, condition: Condition) -> Result<ObjectInfo> {
        let notes = Some(std::sync::Arc::new(Notes(self.clone())) as _);
        let token = self.bucket().token_of(&from.key).await?;
        let options = UploadOptions { notes, token, length: Some(from.size), ..UploadOptions::default() };
        let mut upload = self.bucket().upload_with(to, options)?;
        upload.copy_from(&from.key, &from.version, 0..from.size).await?;
        upload.complete(condition).await
    }
}

/// Whether it fails for what the objects are, or for now; else the store may not take the requests of a copy in parts.
fn is_about_the_object(error: &Error) -> bool {
    use ErrorKind::{Conflict, NotFound, Stale, Unavailable};
    matches!(error.kind(), Conflict | NotFound | Stale | Unavailable)
}

/// Notes uploads, which the next session ends when this one dies.
struct Notes(Mover);

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notes")
    }
}

#[async_trait]
impl UploadNotes for Notes {
    async fn started(&self, key: &ObjectKey, id: &str) {
        let record = UploadRecord { key: key.clone(), id: id.to_owned() };
        let note =
            move |change: &mut Change<'_, '_>| change.put(change.upload_key(&record.id), record.encode());
        if let Err(error) = self.0.transact(Durability::Buffered, note).await {
            warn!(%key, %error, "an upload is not noted: it stays in the store if this process dies");
        }
    }

    async fn ended(&self, id: &str) {
        let id = id.to_owned();
        let forget = move |change: &mut Change<'_, '_>| change.delete(change.upload_key(&id));
        if let Err(error) = self.0.transact(Durability::Buffered, forget).await {
            debug!(%error, "an upload that ended stays noted; the next mount forgets it");
        }
    }
}
