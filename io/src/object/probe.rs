//! What a store really does, found out by doing it.
//!
//! Stores that speak one protocol differ in what they honour, and a store that accepts a condition and ignores it
//! loses data silently. So a read-write start probes: every answer below comes from requests under
//! `.forebay/probe/RANDOM/`, which are removed again. The probe never reads or writes anything else.

use bytes::Bytes;
use forebay_core::{ErrorKind, ObjectKey, Result, Version};
use futures::stream::{FuturesUnordered, StreamExt, TryStreamExt};
use object_store::PutMultipartOptions;
use serde::{Deserialize, Serialize};

use super::request::{Request, UploadId};
use super::{Bucket, Condition};

/// Writers that race for one key: enough to catch stores that check and write in two steps.
const RACERS: usize = 8;

/// A name that encoders and parsers trip over.
const ODD_NAME: &str = "keys/a%2Bb+c d~ü";

/// What a store honours. Everything is false where the bucket is not writable, since nothing could be tried.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// Objects can be written and deleted.
    pub writable: bool,
    /// Of several writers that create a key only if it is absent, exactly one succeeds.
    pub conditional_create: bool,
    /// A write that names the wrong version is refused, one that names the right version is not.
    pub conditional_update: bool,
    /// An upload in parts that must create its key is refused at its completion when the key is taken.
    pub conditional_complete: bool,
    /// An upload in parts that names the wrong version is refused at its completion.
    pub conditional_complete_update: bool,
    /// A part can be copied from another object inside the store.
    pub part_copy: bool,
    /// A part copy that names a version that is gone is refused.
    pub conditional_part_copy: bool,
    /// Parts of an upload may differ in size. Not tried, as that takes 16 MiB: it is taken for granted until an upload is refused,
    /// of stores that are not known by their names.
    pub unequal_parts: bool,
    /// Unfinished uploads can be found.
    pub list_uploads: bool,
    /// A range of an object is exactly the bytes asked for.
    pub range_get: bool,
    /// A read that names a version that is gone is refused.
    pub conditional_get: bool,
    /// Writing, HEAD, GET and listing give the same version, and other bytes give another one.
    pub etag_stable: bool,
    /// Keys with spaces, `%`, `+` and Unicode are kept and listed as they were written.
    pub exact_keys: bool,
}

impl Capabilities {
    /// Whether several hosts may write through this store: no write of one can silently undo another's.
    pub fn safe_for_many_writers(&self) -> bool {
        self.writable && self.conditional_create && self.conditional_update
    }
}

impl Bucket {
    /// Probes the store with about 60 small requests and cleans up after itself.
    ///
    /// # Errors
    /// Only when the store cannot be reached. A bucket that may not be written is an answer: `writable` is false.
    pub async fn probe(&self) -> Result<Capabilities> {
        let probe = Probe { bucket: self, folder: format!(".forebay/probe/{}", self.token()) };
        match self.put(&probe.key("write"), "1".into(), Condition::Always).await {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::Denied | ErrorKind::ReadOnly) => {
                return Ok(Capabilities::default());
            }
            Err(error) => return Err(error),
        }
        let found = probe.run().await;
        let cleaned = probe.clean().await;
        let found = found?;
        cleaned?;
        Ok(found)
    }
}

struct Probe<'a> {
    bucket: &'a Bucket,
    folder: String,
}

/// An outcome that says whether the store did what it was asked; only an unreachable store is an error.
fn held<T>(outcome: Result<T>) -> Result<bool> {
    match outcome {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Unavailable => Err(error),
        Err(_) => Ok(false),
    }
}

/// Whether `outcome` is the refusal that a condition which does not hold must give.
fn refused<T>(outcome: Result<T>, kind: ErrorKind) -> Result<bool> {
    match outcome {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == ErrorKind::Unavailable => Err(error),
        Err(error) => Ok(error.kind() == kind),
    }
}

impl Probe<'_> {
    fn key(&self, name: &str) -> ObjectKey {
        ObjectKey::new(format!("{}/{name}", self.folder))
    }

    async fn run(&self) -> Result<Capabilities> {
        Ok(Capabilities {
            writable: true,
            conditional_create: self.conditional_create().await?,
            conditional_update: self.conditional_update().await?,
            conditional_complete: self.conditional_complete().await?,
            conditional_complete_update: self.conditional_complete_update().await?,
            part_copy: self.part_copy().await?,
            conditional_part_copy: self.conditional_part_copy().await?,
            unequal_parts: !self.bucket.wants_even_parts(),
            list_uploads: self.list_uploads().await?,
            range_get: self.range_get().await?,
            conditional_get: self.conditional_get().await?,
            etag_stable: self.etag_stable().await?,
            exact_keys: self.exact_keys().await?,
        })
    }

    async fn conditional_create(&self) -> Result<bool> {
        let key = self.key("create");
        let race = |n: usize| self.bucket.put(&key, Bytes::from(n.to_string()), Condition::IfAbsent);
        let outcomes: Vec<_> = (0..RACERS).map(race).collect::<FuturesUnordered<_>>().collect().await;
        let mut winners = 0;
        for outcome in outcomes {
            winners += usize::from(held(outcome)?);
        }
        let late = self.bucket.put(&key, "late".into(), Condition::IfAbsent).await;
        Ok(winners == 1 && refused(late, ErrorKind::Conflict)?)
    }

    async fn conditional_update(&self) -> Result<bool> {
        let key = self.key("update");
        let first = self.bucket.put(&key, "first".into(), Condition::Always).await?;
        let second =
            self.bucket.put(&key, "second".into(), Condition::IfVersion(first.version.clone())).await;
        let stale = self.bucket.put(&key, "third".into(), Condition::IfVersion(first.version)).await;
        let absent = Condition::IfVersion(Version::new("\"00000000000000000000000000000000\""));
        let missing = self.bucket.put(&self.key("nothing"), "x".into(), absent).await;
        Ok(held(second)? && refused(stale, ErrorKind::Conflict)? && held_back(missing)?)
    }

    /// Starts an upload of `key`, gives it one part as `part` says, and completes it if `condition` holds.
    async fn upload(
        &self,
        key: &ObjectKey,
        part: impl FnOnce(UploadId) -> Request,
        condition: Condition,
    ) -> Result<()> {
        let create = Request::Create {
            key: self.bucket.path(key)?,
            options: PutMultipartOptions::default(),
            token: self.bucket.token(),
            conditional: true,
        };
        let wrong = |error| self.bucket.error(error);
        let upload = self.bucket.call(create).await?.upload().map_err(wrong)?;
        let complete = async {
            let part = self.bucket.call(part(upload.clone())).await?.part().map_err(wrong)?;
            let complete = Request::Complete { upload: upload.clone(), parts: vec![part], condition };
            self.bucket.call(complete).await.map(drop)
        };
        let completed = complete.await;
        if completed.is_err() {
            self.bucket.call(Request::Abort { upload }).await?;
        }
        completed
    }

    /// Completes an upload of one small part of `key`.
    async fn write_in_parts(&self, key: &ObjectKey, condition: Condition) -> Result<()> {
        let part = |upload| Request::Part { upload, index: 0, offset: 0, payload: "part".into() };
        self.upload(key, part, condition).await
    }

    async fn conditional_complete(&self) -> Result<bool> {
        let key = self.key("complete");
        let first = self.write_in_parts(&key, Condition::IfAbsent).await;
        let again = self.write_in_parts(&key, Condition::IfAbsent).await;
        Ok(held(first)? && refused(again, ErrorKind::Conflict)?)
    }

    async fn conditional_complete_update(&self) -> Result<bool> {
        let key = self.key("complete-update");
        let old = self.bucket.put(&key, "old".into(), Condition::Always).await?.version;
        let new = self.bucket.put(&key, "newer".into(), Condition::Always).await?.version;
        let stale = self.write_in_parts(&key, Condition::IfVersion(old)).await;
        let right = self.write_in_parts(&key, Condition::IfVersion(new)).await;
        Ok(refused(stale, ErrorKind::Conflict)? && held(right)?)
    }

    /// Copies four bytes out of `version` of the object `copy-from` into a new one.
    async fn copy_in_parts(&self, version: Version) -> Result<Bytes> {
        let (from, to) = (self.bucket.path(&self.key("copy-from"))?, self.key("copy-to"));
        let copy = |upload| {
            let version = Some(version);
            Request::CopyPart { upload, index: 0, offset: 0, from, version, range: 2..6 }
        };
        self.upload(&to, copy, Condition::Always).await?;
        Ok(self.bucket.get_whole(&to).await?.0)
    }

    async fn part_copy(&self) -> Result<bool> {
        let put = self.bucket.put(&self.key("copy-from"), "0123456789".into(), Condition::Always).await?;
        let copied = self.copy_in_parts(put.version).await;
        let right = copied.as_ref().is_ok_and(|copied| copied.as_ref() == b"2345");
        Ok(held(copied)? && right)
    }

    async fn conditional_part_copy(&self) -> Result<bool> {
        let from = self.key("copy-from");
        let old = self.bucket.put(&from, "0123456789".into(), Condition::Always).await?.version;
        let new = self.bucket.put(&from, "abcdefghij".into(), Condition::Always).await?.version;
        let stale = self.copy_in_parts(old).await;
        let right = self.copy_in_parts(new).await;
        Ok(refused(stale, ErrorKind::Conflict)? && held(right)?)
    }

    async fn list_uploads(&self) -> Result<bool> {
        let key = self.key("unfinished");
        let create = Request::Create {
            key: self.bucket.path(&key)?,
            options: PutMultipartOptions::default(),
            token: self.bucket.token(),
            conditional: true,
        };
        let upload = self.bucket.call(create).await?.upload().map_err(|error| self.bucket.error(error))?;
        let listed = self.bucket.list_uploads(&self.folder).await;
        let found = listed.as_ref().is_ok_and(|all| all.iter().any(|unfinished| unfinished.key == key));
        self.bucket.call(Request::Abort { upload }).await?;
        Ok(held(listed)? && found)
    }

    async fn range_get(&self) -> Result<bool> {
        let key = self.key("range");
        self.bucket.put(&key, "0123456789".into(), Condition::Always).await?;
        let part = self.bucket.get(&key, None, 3..7).await;
        let right = part.as_ref().is_ok_and(|part| part.as_ref() == b"3456");
        Ok(held(part)? && right)
    }

    async fn conditional_get(&self) -> Result<bool> {
        let key = self.key("get");
        let old = self.bucket.put(&key, "old".into(), Condition::Always).await?.version;
        let new = self.bucket.put(&key, "newer".into(), Condition::Always).await?.version;
        let right = self.bucket.get(&key, Some(&new), 0..3).await;
        let stale = self.bucket.get(&key, Some(&old), 0..3).await;
        Ok(held(right)? && refused(stale, ErrorKind::Stale)?)
    }

    async fn etag_stable(&self) -> Result<bool> {
        let key = self.key("etag");
        let other = self.bucket.put(&key, "other".into(), Condition::Always).await?.version;
        let written = self.bucket.put(&key, "bytes".into(), Condition::Always).await?.version;
        let headed = self.bucket.head(&key).await?.map(|info| info.version);
        let (_, got) = self.bucket.get_whole(&key).await?;
        let listed: Vec<_> = self.bucket.list(&self.folder).try_collect().await?;
        let listed = listed.into_iter().find(|info| info.key == key).map(|info| info.version);
        let same =
            headed.as_ref() == Some(&written) && got.version == written && listed.as_ref() == Some(&written);
        Ok(same && written != other && !written.as_str().is_empty())
    }

    async fn exact_keys(&self) -> Result<bool> {
        let (folder, key) = (format!("{}/keys", self.folder), self.key(ODD_NAME));
        self.bucket.put(&key, "x".into(), Condition::Always).await?;
        let listed: Vec<_> = self.bucket.list(&folder).map_ok(|info| info.key).try_collect().await?;
        Ok(listed == [key])
    }

    async fn clean(&self) -> Result<()> {
        let mut left: Vec<ObjectKey> =
            self.bucket.list(&self.folder).map_ok(|info| info.key).try_collect().await?;
        // A store that changes keys may know this one only by the name that it was given.
        left.push(self.key(ODD_NAME));
        self.bucket.delete_many(&left).await
    }
}

/// A conditional write to a key without an object: refused as a conflict or as not found, but not carried out.
fn held_back<T>(outcome: Result<T>) -> Result<bool> {
    Ok(!held(outcome)?)
}
