//! Bringing one file's staged bytes to the store.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, InodeId, ObjectKey, Result};
use forebay_io::object::{Bucket, Condition};
use futures::future::ready;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::uploads::{AT_ONCE, Brought};
use super::{Staging, Uploads};
use crate::Volume;
use crate::content::Content;

/// Failures of sealing a file after which its bytes are uploaded as they are: where the store is away, if somebody waits for that.
const SEAL_ATTEMPTS: u32 = 3;

/// What came of sealing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sealed {
    /// The file is a plain object, or nothing that can be one.
    Done,
    /// It is being written.
    Busy,
    /// It could not be, and its bytes are not to wait for that.
    Late,
}

impl Volume {
    /// Makes a plain object of a file that is closed, and uploads what is left of its staged blobs under their own keys.
    pub(crate) async fn bring_in(self: &Arc<Self>, uploads: &Uploads, ino: InodeId) -> Result<Brought> {
        let is_ending = self.ending.load(Ordering::Relaxed);
        let sealed = match self.seal_staged(uploads, ino).await {
            Ok(sealed) => sealed,
            Err(error) if uploads.failures(ino) + 1 < SEAL_ATTEMPTS => return Err(error),
            Err(error) if error.kind() == ErrorKind::Unavailable && !uploads.is_hurried() => {
                return Err(error);
            }
            // What is at its path may be on its way out for minutes. Who waits for everything waits for the bytes alone: the
            // file is sealed once that can be.
            Err(error) if error.kind() == ErrorKind::Unavailable && !is_ending => Sealed::Late,
            Err(error) => {
                self.store().tell_unsealed(ino, &error);
                Sealed::Done
            }
        };
        let staging = &uploads.staging;
        for (key, size) in staging.ready(ino) {
            match self.tree().is_referred(&key).await {
                Ok(false) => {
                    staging.doom(&key);
                    uploads.sweep_soon();
                }
                Ok(true) if sealed == Sealed::Busy && !uploads.is_hurried() && !is_old(uploads, ino) => {
                    let open = Duration::from_millis(uploads.settings.open_ms);
                    return Ok(Brought::Later(uploads.clock.now() + open));
                }
                // Another host has the tree: only it knows what is wanted, and an owned key is nobody else's.
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    uploads.tell_taken_over(&error);
                    self.upload_staged(uploads, key, size).await?;
                }
                Err(error) => return Err(error),
                Ok(true) => self.upload_staged(uploads, key, size).await?,
            }
        }
        Ok(if sealed == Sealed::Late { Brought::Bytes } else { Brought::In })
    }

    async fn seal_staged(self: &Arc<Self>, uploads: &Uploads, ino: InodeId) -> Result<Sealed> {
        let inode = match self.acquire(ino).await {
            // Deleted for good, or into the trash.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Sealed::Done),
            acquired => acquired?,
        };
        let is_busy = inode.has_writers() || inode.look(Content::modified).is_some();
        let sealed = match is_busy || !inode.needs_seal() {
            true => Ok(()),
            false => {
                let bytes = inode.look(|content| inode.store().sealing_bytes(content.layout()));
                match uploads.charge(self, bytes).await {
                    Ok(_charge) => inode.seal().await.map(drop),
                    Err(error) => Err(error),
                }
            }
        };
        self.release(&inode, false).await?;
        sealed.map(|()| if is_busy { Sealed::Busy } else { Sealed::Done })
    }

    async fn upload_staged(&self, uploads: &Uploads, key: ObjectKey, size: u64) -> Result<()> {
        let _charge = uploads.charge(self, size).await?;
        upload(&uploads.staging, self.bucket(), key, size).await
    }

    /// Deletes the staged blobs that nothing refers to, once that is durable.
    pub(crate) async fn forget_doomed(&self) -> Result<()> {
        let Some(staging) = self.staging() else { return Ok(()) };
        let doomed = staging.doomed();
        if doomed.is_empty() {
            return Ok(());
        }
        self.sync_names().await?;
        staging.forget(doomed).await
    }

    /// Deletes damaged files that are of no use: nothing refers to them, as where they were not written to their end, or the
    /// bucket has their bytes, as where a failure of power brought them back. Returns how many are left: their bytes are lost.
    pub(crate) async fn settle_damaged(&self) -> Result<usize> {
        let Some(staging) = self.staging() else { return Ok(0) };
        let each = staging.damaged().into_iter().map(|(key, size)| async move {
            if !self.tree().is_referred(&key).await? {
                staging.doom(&key);
                return Ok::<usize, Error>(0);
            }
            if is_there(self.bucket(), &key, size).await? {
                staging.forget(vec![key]).await?;
                return Ok(0);
            }
            tracing::error!(%key, "the staged bytes of a file are damaged and lost");
            Ok(1)
        });
        let lost =
            stream::iter(each).buffer_unordered(AT_ONCE).try_fold(0, |sum, one| ready(Ok(sum + one))).await?;
        self.forget_doomed().await?;
        Ok(lost)
    }
}

/// Whether the bucket has a blob, of the size that it should have. An object appears whole or not at all.
pub(super) async fn is_there(bucket: &Bucket, key: &ObjectKey, size: Option<u64>) -> Result<bool> {
    Ok(bucket.head(key).await?.is_some_and(|found| size.is_none_or(|size| size == found.size)))
}

/// Whether a file that is being written has had staged bytes for so long that they are not to wait for its close.
fn is_old(uploads: &Uploads, ino: InodeId) -> bool {
    uploads.staging.age(ino).saturating_mul(1000) >= uploads.settings.open_ms
}

/// Uploads one staged blob under its own key and forgets it.
pub(super) async fn upload(staging: &Arc<Staging>, bucket: &Bucket, key: ObjectKey, size: u64) -> Result<()> {
    match staging.read(&key, 0..size).await {
        Ok(Some(data)) => put(staging, bucket, key, data).await,
        Ok(None) => Ok(()),
        // It was, and a failure of power brought something back under its name.
        Err(_) if is_there(bucket, &key, Some(size)).await? => staging.forget(vec![key]).await,
        Err(error) => Err(error),
    }
}

/// Puts the bytes of a staged blob, which may be there from a try whose answer was lost, and forgets it: that it is there is
/// seen, not taken from a refusal, for these may be all that there is of them.
pub(super) async fn put(staging: &Staging, bucket: &Bucket, key: ObjectKey, data: Bytes) -> Result<()> {
    let size = data.len() as u64;
    match bucket.put(&key, data, Condition::IfAbsent).await {
        Err(error) if error.kind() == ErrorKind::Conflict && is_there(bucket, &key, Some(size)).await? => {}
        put => drop(put?),
    }
    staging.forget(vec![key]).await
}
