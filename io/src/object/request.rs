//! One request to a store as a value, and the one trait of everything that answers requests.
//!
//! object_store's trait has fifteen methods and lacks what Forebay needs most (conditional completion, part copy,
//! unfinished uploads). So each decorator here has a single method over a request value; `front` turns the result
//! back into an `ObjectStore`, which is how an engine inside the bucket goes through the same decorators.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use forebay_core::{Timestamp, Version};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, GetOptions, GetResult, ObjectMeta, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result,
};

use super::OperationKind;
use super::types::{Condition, Skipped};

/// Answers requests: a backend, or a decorator around another service.
#[async_trait]
pub(super) trait Service: Debug + Send + Sync + 'static {
    /// Carries out one request. Not cancel-safe for writes: a dropped future may or may not have taken effect.
    async fn call(&self, request: Request) -> Result<Reply>;
}

/// A service behind a pointer.
pub(super) type Shared = Arc<dyn Service>;

/// What a store is asked to do. Cheap to clone: payloads are shared.
#[derive(Debug, Clone)]
pub(super) enum Request {
    /// A body or (with `options.head`) only what the store says about it.
    Get { key: Path, options: GetOptions },
    /// A whole object. A store that keeps user metadata keeps `token` with it.
    Put { key: Path, payload: PutPayload, options: PutOptions, token: String },
    /// Deletes up to [`DELETE_LIMIT`] objects; those that are gone already count as deleted. Where it is sent `once`, that is not
    /// done again after it was not answered: what lies there by then is not what was looked at.
    Delete { keys: Vec<Path>, once: bool },
    /// Deletes the marker of a directory (`dir/`) if it has this version still; elsewhere than in S3 nothing.
    DeleteMarker { directory: Path, version: Version },
    /// One page of keys.
    List(ListRequest),
    /// Copies an object of so many bytes inside the store; 0 where the caller does not know.
    Copy { from: Path, to: Path, bytes: u64, options: CopyOptions },
    /// Starts an upload. A store that keeps user metadata keeps `token` with the object. Only a `conditional` one can be
    /// completed on a condition.
    Create { key: Path, options: PutMultipartOptions, token: String, conditional: bool },
    /// Part `index`, whose first byte is byte `offset` of the object.
    Part { upload: UploadId, index: usize, offset: u64, payload: PutPayload },
    /// Part `index` from bytes `range` of another object, if it still has `version`.
    CopyPart {
        upload: UploadId,
        index: usize,
        offset: u64,
        from: Path,
        version: Option<Version>,
        range: Range<u64>,
    },
    /// Makes the object of `parts` visible if `condition` holds.
    Complete { upload: UploadId, parts: Vec<PartId>, condition: Condition },
    /// Gives an upload up; one that is gone already is no error.
    Abort { upload: UploadId },
    /// One page of unfinished uploads whose keys start with `prefix`.
    ListUploads { prefix: String, token: Option<String> },
    /// Whether anybody has sent a part to an upload.
    ListParts { upload: UploadId },
}

/// The most keys of one delete request, as S3 has it.
pub(super) const DELETE_LIMIT: usize = 1000;

/// An upload in parts that is not complete.
#[derive(Debug, Clone)]
pub(super) struct UploadId {
    pub(super) key: Path,
    pub(super) id: String,
    /// What the upload was created with; empty when another process created it.
    pub(super) token: String,
}

/// Which keys to list.
#[derive(Debug, Clone, Default)]
pub(super) struct ListRequest {
    /// Empty, or whole segments with a slash at the end.
    pub(super) prefix: String,
    /// Only what lies directly below `prefix`.
    pub(super) delimited: bool,
    /// Only keys after this one.
    pub(super) after: Option<String>,
    /// Where the last page ended, in the store's own words.
    pub(super) token: Option<String>,
    /// The most entries wanted; the store may give fewer.
    pub(super) limit: Option<usize>,
}

/// One page of keys, in key order within and over pages.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) objects: Vec<ObjectMeta>,
    /// Next segments below the prefix, without slashes.
    pub(super) directories: Vec<String>,
    /// How to ask for the next page; `None` at the end.
    pub(super) next: Option<String>,
    /// What is known of the marker of the prefix itself, where it can be deleted.
    pub(super) marker: Option<Version>,
    /// Keys left out because they have no address here.
    pub(super) skipped: Skipped,
}

/// One page of unfinished uploads.
#[derive(Debug, Default)]
pub(super) struct UploadsPage {
    pub(super) uploads: Vec<(UploadId, Timestamp)>,
    pub(super) next: Option<String>,
}

/// What a store answers.
#[derive(Debug)]
pub(super) enum Reply {
    Object(GetResult),
    Put(PutResult),
    Page(Page),
    Upload(UploadId),
    Part(PartId),
    Uploads(UploadsPage),
    HasParts(bool),
    Done,
}

macro_rules! expect {
    ($($method:ident, $variant:ident, $type:ty;)*) => {
        impl Reply {
            $(
                /// The reply as what the request asked for; anything else is an internal error.
                pub(super) fn $method(self) -> Result<$type> {
                    match self {
                        Self::$variant(value) => Ok(value),
                        other => Err(mismatch(stringify!($variant), &other)),
                    }
                }
            )*
        }
    };
}

expect! {
    object, Object, GetResult;
    put, Put, PutResult;
    page, Page, Page;
    upload, Upload, UploadId;
    part, Part, PartId;
    uploads, Uploads, UploadsPage;
    has_parts, HasParts, bool;
}

fn mismatch(wanted: &str, got: &Reply) -> object_store::Error {
    object_store::Error::Generic {
        store: "forebay",
        source: format!("expected {wanted}, got {got:?}").into(),
    }
}

/// In the options of an upload: its length, and that nobody reads it soon. A directory takes the room for it at once and
/// writes past the page cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct PastCache(pub(super) u64);

impl Request {
    pub(super) fn kind(&self) -> OperationKind {
        match self {
            Self::Get { options, .. } if options.head => OperationKind::Head,
            Self::Get { .. } => OperationKind::Get,
            Self::Put { .. } => OperationKind::Put,
            Self::Delete { .. } | Self::DeleteMarker { .. } => OperationKind::Delete,
            Self::List(_) => OperationKind::List,
            Self::Copy { .. } => OperationKind::Copy,
            Self::Create { .. } => OperationKind::Create,
            Self::Part { .. } => OperationKind::Part,
            Self::CopyPart { .. } => OperationKind::CopyPart,
            Self::Complete { .. } => OperationKind::Complete,
            Self::Abort { .. } => OperationKind::Abort,
            Self::ListUploads { .. } | Self::ListParts { .. } => OperationKind::ListUploads,
        }
    }

    /// Bytes that travel to the store.
    pub(super) fn sent_bytes(&self) -> u64 {
        match self {
            Self::Put { payload, .. } | Self::Part { payload, .. } => payload.content_length() as u64,
            _ => 0,
        }
    }

    /// Bytes that take their time before the store answers: those that travel to it, or that it copies itself.
    pub(super) fn moved_bytes(&self) -> u64 {
        match self {
            Self::Copy { bytes, .. } => *bytes,
            Self::CopyPart { range, .. } => range.end - range.start,
            other => other.sent_bytes(),
        }
    }

    /// Parts that the store makes one object of before it answers.
    pub(super) fn joined_parts(&self) -> usize {
        match self {
            Self::Complete { parts, .. } => parts.len(),
            _ => 0,
        }
    }

    /// Whether the request changes what the store holds.
    pub(super) fn is_write(&self) -> bool {
        use Request::{Get, List, ListParts, ListUploads};
        !matches!(self, Get { .. } | List(_) | ListUploads { .. } | ListParts { .. })
    }

    /// Whether the request is not to be repeated where it may have been carried out.
    pub(super) fn is_sent_once(&self) -> bool {
        matches!(self, Self::Delete { once: true, .. })
    }

    /// Whether the request changes what a key holds, or whether it holds anything.
    pub(super) fn changes_keys(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Complete { .. } | Self::Copy { .. } | Self::Delete { .. })
    }

    /// What a store may refuse the request for: the object at which key is to be what.
    pub(super) fn condition(&self) -> Option<(&Path, Condition)> {
        let version = |tag: &Option<String>| tag.as_deref().map(Version::new).map(Condition::IfVersion);
        match self {
            Self::Get { key, options } => Some((key, version(&options.if_match)?)),
            Self::Put { key, options, .. } => match &options.mode {
                PutMode::Overwrite => None,
                PutMode::Create => Some((key, Condition::IfAbsent)),
                PutMode::Update(replaced) => Some((key, version(&replaced.e_tag)?)),
            },
            Self::Copy { to, options, .. } if options.mode == CopyMode::Create => {
                Some((to, Condition::IfAbsent))
            }
            Self::CopyPart { from, version, .. } => Some((from, Condition::IfVersion(version.clone()?))),
            Self::Complete { upload, condition, .. } => Some((&upload.key, condition.clone())),
            _ => None,
        }
    }

    /// By what a store knows the object that the request makes; empty where it does not.
    pub(super) fn token(&self) -> &str {
        match self {
            Self::Put { token, .. } => token,
            Self::Complete { upload, .. } => &upload.token,
            _ => "",
        }
    }

    /// The key or prefix that the request is about, for messages.
    pub(super) fn subject(&self) -> String {
        match self {
            Self::Get { key, .. } | Self::Put { key, .. } | Self::Create { key, .. } => key.to_string(),
            Self::Copy { to, .. } => to.to_string(),
            Self::Part { upload, .. }
            | Self::CopyPart { upload, .. }
            | Self::Complete { upload, .. }
            | Self::Abort { upload }
            | Self::ListParts { upload } => upload.key.to_string(),
            Self::Delete { keys, .. } => keys.first().map(Path::to_string).unwrap_or_default(),
            Self::DeleteMarker { directory, .. } => format!("{directory}/"),
            Self::List(list) => list.prefix.clone(),
            Self::ListUploads { prefix, .. } => prefix.clone(),
        }
    }

    /// HEAD of `key`.
    pub(super) fn head(key: Path) -> Self {
        Self::Get { key, options: GetOptions { head: true, ..GetOptions::default() } }
    }
}
