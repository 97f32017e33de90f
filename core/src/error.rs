//! The one error type that crosses package boundaries.
//!
//! A kind says what the caller must do; the message says what happened to which thing; the hint, when there is
//! one, says what a person can do about it. Modules keep their own precise enums and convert at the boundary.

use std::fmt;

/// What the caller must do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The named thing does not exist.
    NotFound,
    /// The named thing exists already.
    Exists,
    /// The request itself is wrong; repeating it cannot help.
    Invalid,
    /// Another change came first; read again and retry.
    Conflict,
    /// The other side cannot be reached or did not answer in time; retry later.
    Unavailable,
    /// The content that was asked for was replaced by an outsider.
    Stale,
    /// Bytes failed their checksum or do not parse, and no other copy is left.
    Corrupt,
    /// A disk or memory ceiling is exhausted.
    NoSpace,
    /// What a directory or the volume may hold is reached.
    OverQuota,
    /// The credentials or permissions do not allow it.
    Denied,
    /// This store, kernel or configuration cannot do it.
    Unsupported,
    /// The store will not take the request or give the object, however often it is asked; a person has to change something.
    Refused,
    /// An invariant of Forebay's own was broken.
    Bug,
    /// A path component is not a directory.
    NotDirectory,
    /// The operation is not for directories.
    IsDirectory,
    /// The directory has entries.
    NotEmpty,
    /// The volume is mounted read-only.
    ReadOnly,
    /// A name is longer than 255 bytes.
    NameTooLong,
    /// The inode has no attribute of that name.
    NoAttribute,
    /// The value does not fit the limit of what holds it.
    TooLarge,
}

impl ErrorKind {
    /// The kind's name as shown to people and in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not found",
            Self::Exists => "exists",
            Self::Invalid => "invalid",
            Self::Conflict => "conflict",
            Self::Unavailable => "unavailable",
            Self::Stale => "stale",
            Self::Corrupt => "corrupt",
            Self::NoSpace => "no space",
            Self::OverQuota => "quota exceeded",
            Self::Denied => "denied",
            Self::Unsupported => "unsupported",
            Self::Refused => "refused",
            Self::Bug => "internal error",
            Self::NotDirectory => "not a directory",
            Self::IsDirectory => "is a directory",
            Self::NotEmpty => "directory not empty",
            Self::ReadOnly => "read-only",
            Self::NameTooLong => "name too long",
            Self::NoAttribute => "no such attribute",
            Self::TooLarge => "too large",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure with its kind, its cause in words, and what lay below it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result type of every package boundary.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` whose message names the thing and the fact.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None, source: None }
    }

    /// Shorthand for [`ErrorKind::Invalid`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Shorthand for [`ErrorKind::Corrupt`].
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corrupt, message)
    }

    /// Shorthand for [`ErrorKind::Bug`].
    pub fn bug(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Bug, message)
    }

    /// Adds what a person can do about it.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the error that caused this one.
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Puts `context` before the message, keeping kind, hint and source.
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// What the caller must do.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What happened, without kind or hint.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What a person can do about it.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// A copy for a second waiter of the same failed work: the source is kept as text.
    pub fn duplicate(&self) -> Self {
        let message = match &self.source {
            Some(source) => format!("{} ({source})", self.message),
            None => self.message.clone(),
        };
        Self { kind: self.kind, message, hint: self.hint.clone(), source: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<std::io::Error> for Error {
    /// Keeps the kinds a caller acts on; everything else is `Unavailable`, since a disk error may be local.
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match error.kind() {
            Io::NotFound => ErrorKind::NotFound,
            Io::AlreadyExists => ErrorKind::Exists,
            Io::PermissionDenied => ErrorKind::Denied,
            Io::StorageFull | Io::QuotaExceeded => ErrorKind::NoSpace,
            Io::ReadOnlyFilesystem => ErrorKind::ReadOnly,
            Io::NotADirectory => ErrorKind::NotDirectory,
            Io::IsADirectory => ErrorKind::IsDirectory,
            Io::DirectoryNotEmpty => ErrorKind::NotEmpty,
            Io::InvalidInput | Io::InvalidData => ErrorKind::Invalid,
            Io::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Unavailable,
        };
        Self::new(kind, error.to_string())
    }
}
