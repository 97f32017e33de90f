//! The records that name objects by their versions, and where in them they do.

use bytes::Bytes;
use forebay_core::{Blob, Error, Extent, Result, Source};

use crate::schema::{Deletion, Inode, Intent, Keys, Loan, Loose, Tag, decode_extents, encode_extents};

/// The families whose records do, those that layouts rest on last.
pub(super) const NAMING: [Tag; 6] =
    [Tag::Intent, Tag::Loan, Tag::Loose, Tag::Deletion, Tag::Extents, Tag::Inode];

/// What an object is to the record that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The file's own plain object.
    Home,
    /// Bytes of the file.
    Layout,
    /// A plain object that files other than its own refer to.
    Lent,
    /// A segment, a copy that is meant instead, one to be made, or an object to be deleted.
    Other,
}

/// A record of one of these families.
#[derive(Debug)]
pub(super) enum Naming {
    Intent(Intent),
    Loan(Loan),
    Loose(Loose),
    Deletion(Deletion),
    Extents(Vec<Extent>),
    Inode(Box<Inode>),
}

impl Naming {
    /// Reads a record of the family `tag`.
    pub(super) fn decode(tag: Tag, value: Bytes) -> Result<Self> {
        Ok(match tag {
            Tag::Intent => Self::Intent(Intent::decode(value)?),
            Tag::Loan => Self::Loan(Loan::decode(value)?),
            Tag::Loose => Self::Loose(Loose::decode(value)?),
            Tag::Deletion => Self::Deletion(Deletion::decode(value)?),
            Tag::Extents => Self::Extents(decode_extents(value)?),
            Tag::Inode => Self::Inode(Box::new(Inode::decode(value)?)),
            other => return Err(Error::bug(format!("{other:?} records name no objects"))),
        })
    }

    /// The record, and its key if that is not `key` any more: a loan's holds the version.
    pub(super) fn encode(&self, keys: Keys, key: &Bytes) -> (Bytes, Bytes) {
        match self {
            Self::Intent(intent) => (key.clone(), intent.encode()),
            Self::Loan(loan) => (keys.loan(&loan.blob), loan.encode()),
            Self::Loose(loose) => (key.clone(), loose.encode()),
            Self::Deletion(deletion) => (key.clone(), deletion.encode()),
            Self::Extents(extents) => (key.clone(), encode_extents(extents)),
            Self::Inode(inode) => (key.clone(), inode.encode()),
        }
    }

    /// Every object that it names.
    pub(super) fn blobs(&mut self) -> Vec<(Role, &mut Blob)> {
        match self {
            Self::Intent(intent) => intent.copies.iter_mut().map(|blob| (Role::Other, blob)).collect(),
            Self::Loan(loan) => {
                let moved = loan.moved.iter_mut().map(|blob| (Role::Other, blob));
                [(Role::Lent, &mut loan.blob)].into_iter().chain(moved).collect()
            }
            Self::Loose(loose) => vec![(Role::Other, &mut loose.blob)],
            // A removed directory's prefix stands there like an object.
            Self::Deletion(deletion) if deletion.blob.key.as_str().ends_with('/') => Vec::new(),
            Self::Deletion(deletion) => vec![(Role::Other, &mut deletion.blob)],
            Self::Extents(extents) => in_extents(extents).collect(),
            Self::Inode(inode) => {
                let home = inode.home.iter_mut().map(|blob| (Role::Home, blob));
                home.chain(in_extents(&mut inode.extents)).collect()
            }
        }
    }
}

fn in_extents(extents: &mut [Extent]) -> impl Iterator<Item = (Role, &mut Blob)> {
    extents.iter_mut().filter_map(|extent| match &mut extent.source {
        Source::Blob { blob, .. } => Some((Role::Layout, blob)),
        Source::Inline(_) => None,
    })
}
