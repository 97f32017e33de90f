//! Names of things: volumes, inodes, objects and blobs. Newtypes, so that they cannot be swapped.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A volume: one tree over one bucket prefix. From the bucket's URL at creation, then recorded in
/// `.forebay/volume.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VolumeId(pub u64);

impl VolumeId {
    /// The id of a bucket that has no volume record, from its URL (the first 8 bytes of BLAKE3), so that what a
    /// host cached of it is found again. Block names hold the object's version besides: buckets of one URL at two
    /// endpoints share an id and no bytes that differ.
    pub fn of_url(url: &str) -> Self {
        let hash = blake3::hash(url.as_bytes());
        Self(u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes")))
    }
}

/// An inode number, unique in its volume and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InodeId(pub u64);

impl InodeId {
    /// The root directory of every volume, as FUSE has it.
    pub const ROOT: Self = Self(1);
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Display for InodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The full key of an object relative to the volume's prefix, without a leading slash: `images/cat.jpg`. Clones share it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct ObjectKey(Arc<str>);

impl ObjectKey {
    /// Wraps a key as the store spells it.
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into().into())
    }

    /// The key as the store spells it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for ObjectKey {
    fn from(key: String) -> Self {
        Self(key.into())
    }
}

impl From<ObjectKey> for String {
    fn from(key: ObjectKey) -> Self {
        key.0.as_ref().into()
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What tells one content of a key from the next: an ETag, opaque, compared only for equality. Clones share it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Version(Arc<str>);

impl Version {
    /// Wraps the store's own spelling, quotes included.
    pub fn new(version: impl Into<String>) -> Self {
        Self(version.into().into())
    }

    /// The store's own spelling.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Version {
    fn from(version: String) -> Self {
        Self(version.into())
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.0.as_ref().into()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An immutable byte string in the object store: a key, the version that fixes its bytes, and its length.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Blob {
    /// Where it lies.
    pub key: ObjectKey,
    /// Which content of that key is meant.
    pub version: Version,
    /// Length in bytes.
    pub size: u64,
}

impl Blob {
    /// The prefix of blobs that Forebay itself wrote and alone deletes.
    pub const OWNED_PREFIX: &'static str = ".forebay/blobs/";
    /// How the last part of a segment's key begins.
    pub const SEGMENT_MARK: &'static str = "segment-";

    /// Whether Forebay wrote this blob under its own prefix; every other blob is borrowed.
    pub fn is_owned(&self) -> bool {
        self.key.as_str().starts_with(Self::OWNED_PREFIX)
    }

    /// Whether it is an owned blob that many small files share.
    pub fn is_segment(&self) -> bool {
        let name = self.key.as_str().strip_prefix(Self::OWNED_PREFIX).and_then(|rest| rest.split('/').nth(1));
        name.is_some_and(|name| name.starts_with(Self::SEGMENT_MARK))
    }

    /// An owned blob whose bytes lie on a disk of `host` until they are uploaded. It has no version yet and needs none:
    /// no two blobs share an owned key.
    pub fn staged(key: ObjectKey, size: u64, host: &str) -> Self {
        Self { key, version: Version::new(format!("{STAGED}{host}")), size }
    }

    /// The host that staged the blob. It may have been uploaded since.
    pub fn staged_on(&self) -> Option<&str> {
        self.version.as_str().strip_prefix(STAGED).filter(|_| self.is_owned())
    }
}

/// What the version of a staged blob begins with. No store gives such versions.
const STAGED: &str = "staged@";
