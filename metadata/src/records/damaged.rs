//! Records that cannot be read. They are left for fsck, which needs the tree to be opened, and keep nothing else from being
//! done.

use forebay_core::{Error, ErrorKind, Result};
use tracing::warn;

/// Whether work failed for what a single record says, or lacks: other work need not fail.
pub(crate) fn is_about_a_record(error: &Error) -> bool {
    use ErrorKind::{Corrupt, IsDirectory, NotDirectory, NotFound};
    matches!(error.kind(), Corrupt | IsDirectory | NotDirectory | NotFound)
}

/// What a key or a value says; nothing where it is damaged.
pub(crate) fn readable<T>(decoded: Result<T>) -> Option<T> {
    decoded.inspect_err(|error| warn!(%error, "a damaged record is passed over; see `forebay fsck`")).ok()
}

/// Work on one record that may be damaged.
///
/// # Errors
/// Those that are about more than the record.
pub(crate) fn pass_over<T>(done: Result<T>) -> Result<Option<T>> {
    match done {
        Err(error) if is_about_a_record(&error) => Ok(readable(Err(error))),
        done => done.map(Some),
    }
}
