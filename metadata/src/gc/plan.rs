//! Which objects a round may free: data in, data out.

use std::collections::{BTreeMap, HashSet};

use bytes::Bytes;
use forebay_core::{Extent, ObjectKey, Result, Source};
use forebay_io::object::ObjectInfo;

use crate::records::{given_up_in, session_of};
use crate::schema::{Claim, Deletion, Inode, Intent, Loan, References, Tag, decode_extents};

/// The families whose records name owned blobs.
pub(super) const NAMING: [Tag; 7] =
    [Tag::References, Tag::Deletion, Tag::Inode, Tag::Extents, Tag::Intent, Tag::Claim, Tag::Loan];

/// Owned blobs that may be garbage: those of dead sessions that no record seen so far names.
#[derive(Debug, Default)]
pub(super) struct Suspects(BTreeMap<ObjectKey, ObjectInfo>);

impl Suspects {
    /// Suspects what was listed, but for what a living session wrote, or one of another tree.
    pub(super) fn add(&mut self, listed: impl IntoIterator<Item = ObjectInfo>, sessions: &Sessions) {
        let is_dead = |info: &ObjectInfo| sessions.left(&info.key);
        self.0.extend(listed.into_iter().filter(is_dead).map(|info| (info.key.clone(), info)));
    }

    /// Clears what a record names of suspicion.
    pub(super) fn clear(&mut self, tag: Tag, value: Bytes) -> Result<()> {
        for key in names_in(tag, value)? {
            self.0.remove(&key);
        }
        Ok(())
    }

    /// Clears what a damaged file says it lost, and what came back since.
    pub(super) fn clear_given_up(&mut self, key: &[u8], value: Bytes) -> Result<()> {
        for key in given_up_in(key, value)? {
            self.0.remove(&key);
        }
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// What no record named.
    pub(super) fn into_garbage(self) -> Vec<ObjectInfo> {
        self.0.into_values().collect()
    }
}

/// The sessions that a tree knows.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    /// Those that it has or had.
    pub(crate) known: HashSet<u64>,
    /// Those of them that have not ended.
    pub(crate) living: HashSet<u64>,
}

impl Sessions {
    /// Whether the session that named an owned key is dead. A key that names none, or one that the tree never had, as where
    /// it was begun anew over the bucket of a tree that was lost, may be of use to another tree.
    pub(super) fn left(&self, key: &ObjectKey) -> bool {
        session_of(key)
            .is_some_and(|session| self.known.contains(&session) && !self.living.contains(&session))
    }

    /// Whether an owned key was not named by a session of this tree.
    pub(super) fn is_foreign(&self, key: &ObjectKey) -> bool {
        session_of(key).is_none_or(|session| !self.known.contains(&session))
    }
}

/// The object keys that a record of a family names. A count of zero names nothing.
///
/// # Errors
/// `Corrupt` when the record cannot be read: then nothing may be freed, since it may name anything.
pub(crate) fn names_in(tag: Tag, value: Bytes) -> Result<Vec<ObjectKey>> {
    Ok(match tag {
        Tag::Inode => {
            let inode = Inode::decode(value)?;
            let home = inode.home.map(|home| home.key);
            blobs(inode.extents).chain(home).collect()
        }
        Tag::Extents => blobs(decode_extents(value)?).collect(),
        Tag::Intent => {
            let intent = Intent::decode(value)?;
            intent.copies.map(|blob| blob.key).into_iter().chain([intent.key]).collect()
        }
        Tag::Claim => vec![Claim::decode(value)?.key],
        Tag::Loan => {
            let loan = Loan::decode(value)?;
            loan.moved.map(|blob| blob.key).into_iter().chain([loan.blob.key]).collect()
        }
        Tag::Deletion => vec![Deletion::decode(value)?.blob.key],
        Tag::References => {
            let references = References::decode(value)?;
            if references.count > 0 { vec![references.key] } else { Vec::new() }
        }
        _ => Vec::new(),
    })
}

fn blobs(extents: Vec<Extent>) -> impl Iterator<Item = ObjectKey> {
    extents.into_iter().filter_map(|extent| match extent.source {
        Source::Blob { blob, .. } => Some(blob.key),
        Source::Inline(_) => None,
    })
}
