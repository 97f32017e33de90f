//! Paths and the object keys that they spell.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, InodeId, Result};
use forebay_io::object::{BucketUrl, Scheme};

use super::{Change, Records};
use crate::schema::Inode;

/// Longest object key in bytes, as S3 has it.
const MOST_KEY_BYTES: usize = 1024;
/// Deepest path; a longer way up means that the tree bites its tail.
const MOST_DEPTH: usize = 4096;

/// Which names a store cannot take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// There is no bucket: no path is a key.
    Nothing,
    /// An object store, and the bytes that the prefix of its URL leaves of a key.
    Objects { most_bytes: usize },
    /// A directory of files, whose writer makes `name#1` first and so cannot take `#digits` at an end, nor names
    /// that leave no room for that.
    Files,
}

impl Spelling {
    /// What the bucket at `url` takes.
    pub(crate) fn of(url: Option<&BucketUrl>) -> Self {
        match url {
            None => Self::Nothing,
            Some(BucketUrl { scheme: Scheme::File, .. }) => Self::Files,
            Some(BucketUrl { prefix, .. }) => {
                let taken = prefix_with_slash(prefix).len();
                Self::Objects { most_bytes: MOST_KEY_BYTES.saturating_sub(taken) }
            }
        }
    }

    /// Whether `key` can be an object's key of the user's: segments that every store keeps as they are, not under the
    /// reserved prefix, and no longer than the store takes.
    fn takes_key(self, key: &str) -> bool {
        match self {
            Self::Objects { most_bytes } => key.len() <= most_bytes && is_key(key),
            Self::Nothing | Self::Files => is_key(key),
        }
    }

    /// Whether `name` can be the last segment of a key.
    fn takes(self, name: &str) -> bool {
        const ROOM_FOR_SUFFIX: usize = 16;
        let numbered = || {
            let suffix = name.rsplit_once('#').map(|(_, suffix)| suffix);
            suffix.is_some_and(|suffix| !suffix.is_empty() && suffix.bytes().all(|b| b.is_ascii_digit()))
        };
        match self {
            Self::Nothing => false,
            Self::Objects { .. } => true,
            Self::Files => name.len() + ROOM_FOR_SUFFIX <= 255 && !numbered(),
        }
    }
}

/// Whether `key` can be one of the user's below no prefix.
fn is_key(key: &str) -> bool {
    let segment =
        |s: &str| !s.is_empty() && s != "." && s != ".." && !s.bytes().any(|b| b.is_ascii_control());
    key.len() <= MOST_KEY_BYTES && key.split('/').all(segment) && key.split('/').next() != Some(".forebay")
}

/// The prefix of what lies below a directory's prefix, as listings and claims spell it.
pub(crate) fn prefix_with_slash(prefix: &str) -> String {
    if prefix.is_empty() { String::new() } else { format!("{prefix}/") }
}

/// The key of `name` in the directory of `prefix`, if it can be one.
pub(crate) fn child_prefix(spelling: Spelling, prefix: &str, name: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(name).ok()?;
    Some(format!("{}{name}", prefix_with_slash(prefix))).filter(|key| spelling.takes_key(key))
}

/// The names from the root to an inode's first name; of an inode without names, to where it last was.
pub(crate) fn names_of(records: &dyn Records, inode: &Inode) -> Result<Vec<Bytes>> {
    let mut names = vec![inode.name.clone()];
    let mut at = inode.parent;
    while at != InodeId::ROOT {
        let directory = records.inode(at)?;
        names.push(directory.name);
        at = directory.parent;
        if names.len() > MOST_DEPTH {
            return Err(Error::corrupt(format!("directory {at} lies below itself")));
        }
    }
    names.reverse();
    Ok(names)
}

/// The path of an inode, or to where it last was. Where a directory on the way is gone for good, which only what is in the
/// trash outlives, `?` stands for it and all above it.
pub(crate) fn path_or_name(records: &dyn Records, inode: &Inode) -> Result<Bytes> {
    match names_of(records, inode) {
        Ok(names) => Ok(names.join(&b'/').into()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok([b"?/", &inode.name[..]].concat().into()),
        Err(error) => Err(error),
    }
}

impl Change<'_, '_> {
    /// The key that the inode's first path spells, if it is one. The root spells the empty prefix.
    pub(crate) fn key_of(&self, ino: InodeId, inode: &Inode) -> Result<Option<String>> {
        if ino == InodeId::ROOT {
            return Ok((self.shared.spelling != Spelling::Nothing).then(String::new));
        }
        let names = names_of(self, inode)?;
        let texts: Result<Vec<&str>, _> = names.iter().map(|name| std::str::from_utf8(name)).collect();
        let Ok(texts) = texts else { return Ok(None) };
        let takes = texts.last().is_some_and(|name| self.shared.spelling.takes(name));
        Ok(Some(texts.join("/")).filter(|key| takes && self.shared.spelling.takes_key(key)))
    }

    /// Whether `directory` is `ino` or lies below it.
    pub(crate) fn is_within(&self, directory: InodeId, ino: InodeId) -> Result<bool> {
        let mut at = directory;
        for _ in 0..MOST_DEPTH {
            if at == ino {
                return Ok(true);
            }
            if at == InodeId::ROOT {
                return Ok(false);
            }
            at = self.inode(at)?.parent;
        }
        Err(Error::corrupt(format!("directory {at} lies below itself")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_that_every_store_keeps() {
        for key in ["a", "a/b c", "über/größe", "100%", ".forebayx", "a/.forebay"] {
            assert!(is_key(key), "{key}");
        }
        for key in ["", "/a", "a/", "a//b", ".", "a/..", "a\nb", ".forebay", ".forebay/x", &"k".repeat(1025)]
        {
            assert!(!is_key(key), "{key}");
        }
        let objects = Spelling::Objects { most_bytes: 3 };
        assert_eq!(child_prefix(objects, "", b"a").as_deref(), Some("a"));
        assert_eq!(child_prefix(objects, "a", b"b").as_deref(), Some("a/b"));
        assert_eq!((child_prefix(objects, "a", b"\xff"), child_prefix(objects, "a", b"bc")), (None, None));
        assert!(Spelling::Files.takes("a#b") && Spelling::Files.takes("#"));
        assert!(!Spelling::Files.takes("a#12") && objects.takes("a#12"));
        assert!(!Spelling::Nothing.takes("a"));
    }
}
