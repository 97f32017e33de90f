//! What goes in and out of a bucket.

use forebay_core::{Blob, ObjectKey, Timestamp, Version};
use object_store::{PutMode, UpdateVersion};
use serde::{Deserialize, Serialize};

/// How to reach a store; the credentials come from the provider's own chain.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreSettings {
    /// Requests in flight at once that carry more than 256 KiB, and as many others; those of the tree and of the lease are
    /// counted apart: none waits behind the bytes of files. Default 64: enough to fill 25 Gbit/s at 30 ms with 4 MiB GETs.
    pub max_in_flight: usize,
    /// Milliseconds until a request that keeps failing is given up, retries included. Default 30,000.
    pub deadline_ms: u64,
    /// All parts of an upload but the last are of one size, for stores that want that. Default false: Cloudflare R2 is known by its
    /// endpoint's name, and others are once they refuse an upload, which is lost.
    pub even_parts: bool,
    /// Send requests without credentials, to a bucket that anybody may read. Default false. The environment's `AWS_SKIP_SIGNATURE`,
    /// `GOOGLE_SKIP_SIGNATURE` and `AZURE_SKIP_SIGNATURE` say the same.
    pub anonymous: bool,
    /// The storage class of what is written: one of S3's or Google's, or an access tier of Azure's. Default none: that of the bucket.
    /// The environment's `AWS_STORAGE_CLASS`, `GOOGLE_STORAGE_CLASS` and `AZURE_STORAGE_CLASS` say it where this does not.
    pub storage_class: Option<String>,
    /// Extra store options by their object_store names, e.g. `aws_region`; they override the environment.
    pub options: std::collections::BTreeMap<String, String>,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            max_in_flight: 64,
            deadline_ms: 30_000,
            even_parts: false,
            anonymous: false,
            storage_class: None,
            options: Default::default(),
        }
    }
}

/// What a store says about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its key below the bucket's prefix.
    pub key: ObjectKey,
    /// Its ETag; empty where the store gives none.
    pub version: Version,
    /// Bytes.
    pub size: u64,
    /// When it was last written, by the store's clock.
    pub modified: Timestamp,
}

impl ObjectInfo {
    /// The object's content as a blob.
    pub fn blob(&self) -> Blob {
        Blob { key: self.key.clone(), version: self.version.clone(), size: self.size }
    }
}

/// Who wrote an object, as far as the store tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Authorship {
    /// The write in question.
    Ours,
    /// Another one.
    Others,
    /// The store does not tell.
    Unknown,
}

/// An upload that was neither completed nor aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// The key that it would have.
    pub key: ObjectKey,
    /// The store's name for it.
    pub id: String,
    /// When it was started, by the store's clock.
    pub started: Timestamp,
}

/// Bytes beside the key space that a dead process left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    /// Where they lie, relative to the bucket.
    pub name: String,
    /// How many.
    pub bytes: u64,
}

/// Keys that a listing met and left out, because nothing can be addressed or shown by them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skipped {
    /// How many; of one level, each prefix of such keys counts as one.
    pub keys: u64,
    /// The first of them.
    pub first: Option<String>,
}

impl Skipped {
    /// Notes one more; a key that is no UTF-8 has no name here.
    pub fn note(&mut self, key: Option<String>) {
        self.keys += 1;
        self.first.get_or_insert_with(|| key.unwrap_or_else(|| "(not UTF-8)".into()));
    }

    /// Adds those of what was listed after it.
    pub fn add(&mut self, later: Self) {
        self.keys += later.keys;
        self.first = self.first.take().or(later.first);
    }
}

/// One level of the key space: what lies directly below a prefix.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// Objects directly below the prefix, a marker for the prefix itself (`dir/`) left out.
    pub objects: Vec<ObjectInfo>,
    /// Next segments that have keys below them, without slashes.
    pub directories: Vec<String>,
    /// What tells the marker for the prefix itself from a later one, for [`super::Bucket::delete_marker`], if there is one.
    pub marker: Option<Version>,
    /// What else lies there, by keys that have no address.
    pub skipped: Skipped,
}

impl Listing {
    /// Adds the next page.
    pub fn add(&mut self, page: Self) {
        self.objects.extend(page.objects);
        self.directories.extend(page.directories);
        self.marker = self.marker.take().or(page.marker);
        self.skipped.add(page.skipped);
    }
}

/// What must hold for a write to be accepted; otherwise it fails with `Conflict`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Write in any case.
    Always,
    /// No object has the key (`If-None-Match: *`).
    IfAbsent,
    /// The key holds this version (`If-Match`).
    IfVersion(Version),
}

/// The condition in object_store's terms.
pub(super) fn put_mode(condition: &Condition) -> PutMode {
    match condition {
        Condition::Always => PutMode::Overwrite,
        Condition::IfAbsent => PutMode::Create,
        Condition::IfVersion(version) => {
            PutMode::Update(UpdateVersion { e_tag: Some(version.as_str().to_owned()), version: None })
        }
    }
}
