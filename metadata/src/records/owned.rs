//! How owned blobs are named: `.forebay/blobs/SESSION/NAME`.
//!
//! The name says which session wrote the blob, so that one which no layout refers to yet is known to be on its way, or,
//! after its session ended, to be left over.

use forebay_core::{Blob, ObjectKey};

/// The key of the owned blob that `session` calls `name`.
pub(crate) fn owned_key(session: u64, name: &str) -> ObjectKey {
    ObjectKey::new(format!("{}{session:016x}/{name}", Blob::OWNED_PREFIX))
}

/// Whose blob lies at an owned key; `None` for names of another shape, which no session gives.
pub(crate) fn session_of(key: &ObjectKey) -> Option<u64> {
    let (session, _) = key.as_str().strip_prefix(Blob::OWNED_PREFIX)?.split_once('/')?;
    u64::from_str_radix(session, 16).ok().filter(|_| session.len() == 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blobs_name_says_whose_it_is() {
        let key = owned_key(0xfe, "n");
        assert_eq!(key.as_str(), ".forebay/blobs/00000000000000fe/n");
        assert_eq!(session_of(&key), Some(0xfe));
        for other in [".forebay/blobs/n", ".forebay/blobs/fe/n", ".forebay/tree/00000000000000fe/n", "a/b"] {
            assert_eq!(session_of(&ObjectKey::new(other)), None, "{other}");
        }
    }
}
