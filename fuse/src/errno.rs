//! The one place where an errno is chosen.
//!
//! Owns the table from [`ErrorKind`] to errno and the type that file-system operations fail with. A failure that an
//! operator should know of is logged here, once, because past this point only the number is left.

use forebay_core::{Error, ErrorKind};
use tracing::{debug, error, warn};

/// A Unix error number, positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

/// What file-system operations return.
pub type FsResult<T> = Result<T, Errno>;

impl From<ErrorKind> for Errno {
    fn from(kind: ErrorKind) -> Self {
        Self(match kind {
            ErrorKind::NotFound => libc::ENOENT,
            ErrorKind::Exists => libc::EEXIST,
            ErrorKind::Invalid => libc::EINVAL,
            // Whoever could retry has given up. EAGAIN would say the same, but programs spin on it.
            ErrorKind::Conflict => libc::EBUSY,
            // The deadline has passed already. ETIMEDOUT and ECONNREFUSED surprise programs that read files.
            ErrorKind::Unavailable => libc::EIO,
            ErrorKind::Stale => libc::ESTALE,
            // EBADMSG is more precise and hardly any program knows it; the log has the block's name.
            ErrorKind::Corrupt => libc::EIO,
            ErrorKind::NoSpace => libc::ENOSPC,
            ErrorKind::OverQuota => libc::EDQUOT,
            // The store's refusal, not a matter of ownership, which EPERM would say.
            ErrorKind::Denied => libc::EACCES,
            // Never ENOSYS: the kernel takes that as "never ask again" for the whole mount.
            ErrorKind::Unsupported => libc::EOPNOTSUPP,
            // Neither what the program asked nor who asks is wrong; the log has the store's reason.
            ErrorKind::Refused => libc::EIO,
            ErrorKind::Bug => libc::EIO,
            ErrorKind::NotDirectory => libc::ENOTDIR,
            ErrorKind::IsDirectory => libc::EISDIR,
            ErrorKind::NotEmpty => libc::ENOTEMPTY,
            ErrorKind::ReadOnly => libc::EROFS,
            ErrorKind::NameTooLong => libc::ENAMETOOLONG,
            ErrorKind::NoAttribute => libc::ENODATA,
            // A file past what the store can hold. Extended attributes say E2BIG instead (fs/xattr.rs).
            ErrorKind::TooLarge => libc::EFBIG,
        })
    }
}

impl From<Error> for Errno {
    fn from(failure: Error) -> Self {
        let kind = failure.kind();
        match kind {
            ErrorKind::Bug | ErrorKind::Corrupt => error!(%kind, %failure, "request failed"),
            ErrorKind::Unavailable
            | ErrorKind::Conflict
            | ErrorKind::Stale
            | ErrorKind::NoSpace
            | ErrorKind::Refused
            | ErrorKind::Denied => {
                warn!(%kind, %failure, "request failed");
            }
            _ => debug!(%kind, %failure, "request failed"),
        }
        kind.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program sees exactly these numbers.
    #[test]
    fn every_kind_has_its_number() {
        for (kind, expected) in [
            (ErrorKind::NotFound, libc::ENOENT),
            (ErrorKind::Exists, libc::EEXIST),
            (ErrorKind::Invalid, libc::EINVAL),
            (ErrorKind::Conflict, libc::EBUSY),
            (ErrorKind::Unavailable, libc::EIO),
            (ErrorKind::Stale, libc::ESTALE),
            (ErrorKind::Corrupt, libc::EIO),
            (ErrorKind::NoSpace, libc::ENOSPC),
            (ErrorKind::OverQuota, libc::EDQUOT),
            (ErrorKind::Denied, libc::EACCES),
            (ErrorKind::Unsupported, libc::EOPNOTSUPP),
            (ErrorKind::Refused, libc::EIO),
            (ErrorKind::Bug, libc::EIO),
            (ErrorKind::NotDirectory, libc::ENOTDIR),
            (ErrorKind::IsDirectory, libc::EISDIR),
            (ErrorKind::NotEmpty, libc::ENOTEMPTY),
            (ErrorKind::ReadOnly, libc::EROFS),
            (ErrorKind::NameTooLong, libc::ENAMETOOLONG),
            (ErrorKind::NoAttribute, libc::ENODATA),
            (ErrorKind::TooLarge, libc::EFBIG),
        ] {
            assert_eq!(Errno::from(Error::new(kind, "x")), Errno(expected), "{kind}");
        }
    }
}
