//! Whether the lines of a dump make records that this program writes: what a checksum cannot tell.
//!
//! Each line is looked at by itself, and its place among the others. What takes the whole tree to see, such as a directory
//! below itself or an entry that leads to no inode, is fsck's.

use bytes::Bytes;
use forebay_core::{Error, Extent, FileKind, InodeId, Result};

use super::line::Line;
use crate::records::check_new_name;
use crate::schema::Keys;

/// Longest name of an extended attribute in bytes, as Linux has it.
const MOST_XATTR_NAME_BYTES: usize = 255;

/// What was seen of a dump so far.
pub(super) struct Sound {
    keys: Keys,
    /// The key of the last record.
    last: Bytes,
    has_root: bool,
}

impl Sound {
    /// Nothing yet.
    pub(super) fn new(keys: Keys) -> Self {
        Self { keys, last: Bytes::new(), has_root: false }
    }

    /// Looks at the next line.
    ///
    /// # Errors
    /// `Corrupt` or `Invalid` for one that makes no record, or not at this place.
    pub(super) fn take(&mut self, line: &Line) -> Result<()> {
        check_parts(line)?;
        let (key, value) = line.record(self.keys)?;
        if Line::of(self.keys, &key, value)?.as_ref() != Some(line) {
            return Err(Error::corrupt("it has fields that its record cannot hold"));
        }
        if key <= self.last {
            return Err(Error::corrupt(
                "its record comes after one that it belongs before, or is there twice",
            ));
        }
        self.last = key;
        self.has_root |= matches!(line, Line::Inode { ino: InodeId::ROOT, .. });
        Ok(())
    }

    /// Looks at what was missing.
    ///
    /// # Errors
    /// `Corrupt` without a root.
    pub(super) fn finish(&self) -> Result<()> {
        match self.has_root {
            true => Ok(()),
            false => Err(Error::corrupt("it has no root")),
        }
    }
}

/// Refuses what no encoder takes, and names that nothing can have.
fn check_parts(line: &Line) -> Result<()> {
    match line {
        Line::Entry { parent, name, .. } | Line::Link { parent, name, .. } => check_new_name(*parent, name),
        Line::Inode { ino: InodeId::ROOT, inode } if inode.kind != FileKind::Directory => {
            Err(Error::corrupt("the root is no directory"))
        }
        Line::Inode { inode, .. } => {
            // The root has no name, nor has what a clone builds.
            if !inode.name.is_empty() {
                check_new_name(inode.parent, &inode.name)?;
            }
            check_extents(&inode.extents)
        }
        Line::Extents { extents, .. } => check_extents(extents),
        Line::Xattr { name, .. } if name.len() > MOST_XATTR_NAME_BYTES || name.contains(&0) => {
            Err(Error::corrupt("an attribute has a name that none can have"))
        }
        _ => Ok(()),
    }
}

fn check_extents(extents: &[Extent]) -> Result<()> {
    let mut end = 0;
    for Extent { offset, length, .. } in extents {
        let after = offset.checked_add(*length).filter(|_| *offset >= end);
        end = after.ok_or_else(|| {
            Error::corrupt(format!("an extent of {length} bytes at {offset} follows one that ends at {end}"))
        })?;
    }
    Ok(())
}
