//! The copy of one entry. What has to be read is asked for side by side: on an engine whose reads wait, a transaction
//! runs once for each read that depends on another, not once for each file.

use bytes::Bytes;
use forebay_core::{Blob, Error, FileKind, FileLayout, InodeId, Result};

use crate::kv::Pair;
use crate::records::{Change, Records};
use crate::schema::{Dentry, HolderState, ImportState, Inode, Tag};

/// Something to be copied, with all that making the copy needs.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) ino: InodeId,
    pub(super) inode: Inode,
    pub(super) layout: FileLayout,
    pub(super) attributes: Vec<Pair>,
    /// Its bytes are about to be replaced or deleted: it cannot share them now.
    pub(super) is_held_up: bool,
}

impl Source {
    /// What it weighs in a transaction, roughly.
    pub(super) fn weight(&self) -> usize {
        /// An inode, an entry, and a count of references.
        const RECORDS: usize = 256;
        const EXTENT: usize = 64;
        let attributes: usize = self.attributes.iter().map(|(key, value)| key.len() + value.len()).sum();
        RECORDS + self.layout.extents().len() * EXTENT + attributes
    }

    /// Bytes of a file.
    pub(super) fn bytes(&self) -> u64 {
        self.layout.size()
    }
}

/// The inodes that entries lead to.
///
/// # Errors
/// `Corrupt` when one is missing.
pub(super) fn inodes(change: &Change<'_, '_>, entries: &[Dentry]) -> Result<Vec<(InodeId, Inode)>> {
    let keys: Vec<Bytes> = entries.iter().map(|entry| change.keys().inode(entry.ino)).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    let values = change.reads().get_many(&keys)?;
    let decode = |(entry, value): (&Dentry, Option<Bytes>)| {
        let missing = || Error::corrupt(format!("inode {} has a name and no record", entry.ino));
        Ok((entry.ino, Inode::decode(value.ok_or_else(missing)?)?))
    };
    entries.iter().zip(values).map(decode).collect()
}

/// Reads all that copying these is going to read.
pub(super) fn read(change: &Change<'_, '_>, found: Vec<(InodeId, Inode)>) -> Result<Vec<Source>> {
    let layouts: Vec<_> = found.iter().map(|(ino, inode)| shared_layout(change, *ino, inode)).collect();
    let attributes: Vec<_> = found.iter().map(|(ino, _)| change.attributes(*ino)).collect();
    let (layouts, attributes) = (all(layouts)?, all(attributes)?);
    let whole = found.into_iter().zip(layouts).zip(attributes);
    let source = |(((ino, inode), (layout, is_held_up)), attributes)| Source {
        ino,
        inode,
        layout,
        attributes,
        is_held_up,
    };
    Ok(whole.map(source).collect())
}

/// The layout that a copy of a file shares, empty for anything else, and whether it cannot now.
fn shared_layout(change: &Change<'_, '_>, ino: InodeId, inode: &Inode) -> Result<(FileLayout, bool)> {
    if inode.kind != FileKind::File {
        return Ok((FileLayout::empty(), false));
    }
    let layout = change.layout(ino, inode)?;
    let held_up: Vec<Result<bool>> = layout.blobs().map(|blob| is_held_up(change, blob)).collect();
    let is_held_up = all(held_up)?.contains(&true);
    Ok((layout, is_held_up))
}

fn is_held_up(change: &Change<'_, '_>, blob: &Blob) -> Result<bool> {
    let key = blob.key.as_str();
    if blob.is_owned() {
        return change.references(key).map(|_| false);
    }
    let (claim, loan) = (change.claim(key), change.loan(blob));
    loan?;
    Ok(!matches!(claim?.map(|claim| claim.state), None | Some(HolderState::Held(_))))
}

/// Makes a copy under a name, which counts in no quota yet. Returns its number.
pub(super) fn put_copy(
    change: &mut Change<'_, '_>,
    source: &Source,
    (parent, name): (InodeId, &Bytes),
) -> Result<InodeId> {
    let ino = put_inode(change, source, (parent, name))?;
    change.put_dentry(parent, name, Dentry { ino, kind: source.inode.kind })?;
    Ok(ino)
}

/// The same without the entry.
pub(super) fn put_inode(
    change: &mut Change<'_, '_>,
    source: &Source,
    (parent, name): (InodeId, &Bytes),
) -> Result<InodeId> {
    let ino = InodeId(change.take_numbers(1)?);
    let (from, kind) = (&source.inode, source.inode.kind);
    let mut inode = Inode::new(kind, from.mode, (from.uid, from.gid), change.now);
    (inode.parent, inode.name) = (parent, name.clone());
    (inode.rdev, inode.target) = (from.rdev, from.target.clone());
    match kind {
        FileKind::File if source.layout.size() > 0 => {
            // Without a name it is not charged; the whole copy is, when it is linked.
            let nlink = std::mem::take(&mut inode.nlink);
            change.replace_layout((ino, &mut inode), &source.layout, None)?;
            (inode.nlink, inode.generation) = (nlink, 1);
        }
        FileKind::File => {}
        // Where it is listed from is found out once somebody looks at it.
        FileKind::Directory => change.put_import_state(ino, &ImportState::default())?,
        _ => inode.size = from.size,
    }
    follow_attributes(change, (ino, inode), source)?;
    change.count(1, 0)?;
    Ok(ino)
}

/// Gives a copy the attributes that its source has.
pub(super) fn follow_attributes(
    change: &mut Change<'_, '_>,
    (ino, mut inode): (InodeId, Inode),
    source: &Source,
) -> Result<()> {
    let from = &source.inode;
    (inode.mode, inode.uid, inode.gid) = (from.mode, from.uid, from.gid);
    (inode.atime, inode.mtime) = (from.atime, from.mtime);
    if inode.kind == FileKind::File {
        inode.note_since(change.now.seconds);
    }
    if inode.kind == FileKind::Directory {
        (inode.kept, inode.packed) = (true, from.packed);
    }
    change.put_inode(ino, &inode)?;
    for (key, value) in &source.attributes {
        let name = change.keys().name_in(key)?;
        change.put(change.keys().xattr(ino, &name), value.clone())?;
    }
    Ok(())
}

/// Takes away the extended attributes that a copy has and its source has not.
pub(super) fn drop_attributes(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    (before, now): (&[Pair], &Source),
) -> Result<()> {
    let keys = change.keys();
    for (key, _) in before {
        let name = keys.name_in(key)?;
        if !now.attributes.iter().any(|(key, _)| keys.name_in(key).is_ok_and(|one| one == name)) {
            debug_assert_eq!(keys.tag_in(key).ok(), Some(Tag::Xattr));
            change.delete(keys.xattr(ino, &name))?;
        }
    }
    Ok(())
}

/// All values, once every one was asked for.
pub(super) fn all<T>(values: Vec<Result<T>>) -> Result<Vec<T>> {
    values.into_iter().collect()
}
