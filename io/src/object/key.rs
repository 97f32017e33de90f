//! Which keys can be addressed.
//!
//! object_store's `Path` normalises: it drops a leading and a trailing slash and refuses empty, `.` and `..` segments
//! and control characters. A key that would come back changed names another object or none, so here it has no
//! address: listings leave it out and count it, and requests for it are refused. Everything else, `%`, spaces and
//! any Unicode included, is spelled as it is.

use object_store::path::Path;

/// The path that is exactly `key`, if there is one.
pub(super) fn address(key: &str) -> Option<Path> {
    Path::parse(key).ok().filter(|path| !key.is_empty() && path.as_ref() == key)
}

/// Whether `name` can be one segment of a key.
pub(super) fn is_segment(name: &str) -> bool {
    !name.contains('/') && address(name).is_some()
}

/// Turns what people write as a directory (`a/b`, `a/b/`, `/`, empty) into the prefix of the keys below it.
pub(super) fn directory_prefix(directory: &str) -> Option<String> {
    match directory.trim_matches('/') {
        "" => Some(String::new()),
        inner => address(inner).map(|path| format!("{path}/")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_addressed_as_it_is_or_not_at_all() {
        for key in
            ["a", "a/b", "100%", "a%2Fb", "über/größe", "a b", "a~b[c]{d}#?*|<>", "a\\b", "日本/語", "..."]
        {
            assert_eq!(address(key).expect(key).as_ref(), key);
        }
        for key in ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\nb", "a\0b"] {
            assert!(address(key).is_none(), "{key:?}");
        }
        assert_eq!(directory_prefix("/").as_deref(), Some(""));
        assert_eq!(directory_prefix("a/b/").as_deref(), Some("a/b/"));
        assert_eq!(directory_prefix("a//b"), None);
        assert!(is_segment("a b") && !is_segment("a/b") && !is_segment("..") && !is_segment(""));
    }
}
