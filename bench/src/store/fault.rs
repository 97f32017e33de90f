//! Why a request is refused, in S3's codes.

use http::StatusCode;

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    NoSuchBucket,
    NoSuchKey,
    NoSuchUpload,
    InvalidPart,
    EntityTooSmall,
    PreconditionFailed,
    NotModified,
    InvalidRange,
    MalformedXml,
    InvalidArgument(&'static str),
    NotImplemented(&'static str),
}

impl Fault {
    /// S3's name of it.
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::NoSuchBucket => "NoSuchBucket",
            Self::NoSuchKey => "NoSuchKey",
            Self::NoSuchUpload => "NoSuchUpload",
            Self::InvalidPart => "InvalidPart",
            Self::EntityTooSmall => "EntityTooSmall",
            Self::PreconditionFailed => "PreconditionFailed",
            Self::NotModified => "NotModified",
            Self::InvalidRange => "InvalidRange",
            Self::MalformedXml => "MalformedXML",
            Self::InvalidArgument(_) => "InvalidArgument",
            Self::NotImplemented(_) => "NotImplemented",
        }
    }

    /// The HTTP status that goes with it.
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::NoSuchBucket | Self::NoSuchKey | Self::NoSuchUpload => StatusCode::NOT_FOUND,
            Self::InvalidPart | Self::EntityTooSmall | Self::MalformedXml | Self::InvalidArgument(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::PreconditionFailed => StatusCode::PRECONDITION_FAILED,
            Self::NotModified => StatusCode::NOT_MODIFIED,
            Self::InvalidRange => StatusCode::RANGE_NOT_SATISFIABLE,
            Self::NotImplemented(_) => StatusCode::NOT_IMPLEMENTED,
        }
    }

    /// What it is about, for people.
    pub(super) fn message(&self) -> &'static str {
        match self {
            Self::InvalidArgument(what) | Self::NotImplemented(what) => what,
            other => other.code(),
        }
    }
}
