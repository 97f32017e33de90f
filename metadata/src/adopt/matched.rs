//! What a tree names, looked up in one listing of the bucket.

use std::collections::{HashMap, HashSet};

use forebay_core::{Blob, ObjectKey, Result, Version};
use forebay_io::object::Bucket;
use futures::stream::TryStreamExt;
use serde::{Deserialize, Serialize};

use super::named::Named;

/// Why an object is not what a file needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// There is none.
    Missing,
    /// Another host had yet to upload it.
    NotUploaded,
    /// It has another size.
    OtherSize,
    /// It was replaced before the bucket was copied.
    Replaced,
}

/// A file that cannot be read whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lacking {
    /// Its path, or where it was before it came to the trash.
    pub path: String,
    /// An object that it needs.
    pub key: String,
    /// Why that is not what it needs.
    pub why: Why,
}

/// What came of the objects that a tree names.
#[derive(Debug, Default)]
pub(super) struct Matched {
    /// The versions that objects have here, where those are others.
    versions: HashMap<Blob, Version>,
    /// Those of plain objects where it is not known whether a write happened, which they are what it would replace.
    replaceable: HashMap<ObjectKey, Version>,
    lacking: HashMap<Blob, Why>,
    moved: HashMap<Blob, Blob>,
    pub(super) found: u64,
}

/// Looks them up, but for those that were `replaced`.
pub(super) async fn look_up(bucket: &Bucket, named: Named, replaced: &HashSet<Blob>) -> Result<Matched> {
    let Named { blobs, moved, intended, .. } = named;
    let mut wanted: HashMap<&ObjectKey, Vec<&Blob>> = HashMap::with_capacity(blobs.len());
    for blob in blobs.iter().filter(|blob| !replaced.contains(blob)) {
        wanted.entry(&blob.key).or_default().push(blob);
    }
    let mut matched = Matched { moved, ..Matched::default() };
    matched.lacking.extend(replaced.iter().map(|blob| (blob.clone(), Why::Replaced)));
    let mut listing = bucket.list("");
    while let Some(info) = listing.try_next().await? {
        for blob in wanted.remove(&info.key).into_iter().flatten() {
            if blob.size != info.size {
                matched.lacking.insert(blob.clone(), Why::OtherSize);
                continue;
            }
            matched.found += 1;
            if intended.contains(&info.key) {
                matched.replaceable.insert(info.key.clone(), info.version.clone());
            }
            if blob.version != info.version {
                matched.versions.insert(blob.clone(), info.version.clone());
            }
        }
    }
    for blob in wanted.into_values().flatten() {
        let why = if blob.staged_on().is_some() { Why::NotUploaded } else { Why::Missing };
        matched.lacking.insert(blob.clone(), why);
    }
    Ok(matched)
}

impl Matched {
    /// The version that an object has here, if it is another one.
    pub(super) fn version(&self, blob: &Blob) -> Option<&Version> {
        self.versions.get(blob)
    }

    /// The version of what lies where a write may have replaced it.
    pub(super) fn replaceable(&self, key: &ObjectKey) -> Option<&Version> {
        self.replaceable.get(key)
    }

    /// Why the bytes that a layout has in `blob` cannot be read.
    pub(super) fn lacks<'a>(&'a self, blob: &Blob) -> Option<(&'a Blob, Why)> {
        let meant = self.moved.get(blob).unwrap_or(blob);
        self.lacking.get_key_value(meant).map(|(meant, why)| (meant, *why))
    }

    /// How many objects have another version than the records say.
    pub(super) fn changed(&self) -> u64 {
        self.versions.len() as u64
    }
}
