//! A copy of a file, or of a directory with all below it, that shares all bytes with it: one transaction, so that it
//! shows one moment.
//!
//! Owners, modes, times and extended attributes are kept; of hard links each becomes a file of its own. What has to be
//! read is asked for side by side, level by level: on an engine whose reads wait, the transaction runs once for each step
//! down, not once for each file.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, FileKind, FileLayout, InodeId, Result};

use super::Cloned;
use crate::kv::Pair;
use crate::records::{Change, Charge, Records, check_new_name};
use crate::schema::{Dentry, HolderState, Inode, Tag, Usage};

/// Most entries of one clone: others wait while it is made, and its changes are in memory until they are written.
const MOST_ENTRIES: usize = 100_000;

/// Something to be copied.
struct Entry {
    ino: InodeId,
    inode: Inode,
    /// The name of the copy.
    name: Bytes,
    /// Position of the directory above it; none for the top.
    above: Option<usize>,
}

/// As [`super::Tree::clone_tree`].
pub(super) fn clone_tree(
    change: &mut Change<'_, '_>,
    source: InodeId,
    (parent, name): (InodeId, &[u8]),
) -> Result<Cloned> {
    check_new_name(parent, name)?;
    let mut directory = change.directory(parent)?;
    if change.dentry(parent, name)?.is_some() {
        let name = String::from_utf8_lossy(name);
        return Err(Error::new(ErrorKind::Exists, format!("`{name}` exists"))
            .with_hint("name a path that does not exist yet"));
    }
    check_outside(change, source, parent)?;
    let entries = gather(change, source, name)?;
    let layouts: Vec<_> = entries.iter().map(|entry| shared_layout(change, entry)).collect();
    let attributes: Vec<_> = entries.iter().map(|entry| attributes(change, entry.ino)).collect();
    let (layouts, attributes) = (all(layouts)?, all(attributes)?);

    let bytes: u64 = layouts.iter().map(FileLayout::size).sum();
    let usage = Usage { inodes: entries.len() as i64, bytes: bytes as i64 };
    change.charge(parent, usage, Charge::Checked)?;
    // The bytes count where each file takes them.
    change.charge(parent, Usage { inodes: 0, bytes: -usage.bytes }, Charge::Forced)?;
    let first = change.take_numbers(entries.len() as u64)?;
    let number = |at: usize| InodeId(first + at as u64);
    let mut cloned = Cloned { bytes, ..Cloned::default() };
    for (at, entry) in entries.iter().enumerate() {
        let above = entry.above.map_or(parent, number);
        put_copy(change, entry, (above, number(at)), &layouts[at], &attributes[at])?;
        match entry.inode.kind {
            FileKind::Directory => cloned.directories += 1,
            _ => cloned.files += 1,
        }
    }
    directory.nlink += u32::from(entries[0].inode.kind == FileKind::Directory);
    change.put_changed_directory(parent, directory)?;
    change.count(usage.inodes, 0)?;
    Ok(cloned)
}

/// Refuses to clone a directory into itself.
fn check_outside(change: &Change<'_, '_>, source: InodeId, mut at: InodeId) -> Result<()> {
    loop {
        if at == source {
            return Err(Error::invalid("a directory cannot be cloned into itself")
                .with_hint("name a path outside of it"));
        }
        if at == InodeId::ROOT {
            return Ok(());
        }
        at = change.inode(at)?.parent;
    }
}

/// `source` and everything below it, directories before what they hold.
fn gather(change: &Change<'_, '_>, source: InodeId, name: &[u8]) -> Result<Vec<Entry>> {
    let (inode, name) = (change.inode(source)?, Bytes::copy_from_slice(name));
    let mut entries = vec![Entry { ino: source, inode, name, above: None }];
    let mut level = 0..1;
    while !level.is_empty() {
        let is_directory = |at: &usize| entries[*at].inode.kind == FileKind::Directory;
        let directories: Vec<usize> = level.filter(is_directory).collect();
        let listed = directories.iter().map(|at| listed(change, entries[*at].ino)).collect();
        let found: Vec<(usize, Bytes, Dentry)> = directories
            .iter()
            .zip(all(listed)?)
            .flat_map(|(at, below)| below.into_iter().map(|(name, entry)| (*at, name, entry)))
            .collect();
        if entries.len() + found.len() > MOST_ENTRIES {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("more than {MOST_ENTRIES} files and directories cannot be cloned at once"),
            )
            .with_hint("clone the directories below it one by one"));
        }
        let keys: Vec<Bytes> = found.iter().map(|(.., entry)| change.keys().inode(entry.ino)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        let inodes = change.reads().get_many(&keys)?;
        level = entries.len()..entries.len() + found.len();
        for ((above, name, Dentry { ino, .. }), inode) in found.into_iter().zip(inodes) {
            let missing = || Error::corrupt(format!("inode {ino} has a name and no record"));
            let inode = Inode::decode(inode.ok_or_else(missing)?)?;
            entries.push(Entry { ino, inode, name, above: Some(above) });
        }
    }
    Ok(entries)
}

/// The entries of a directory.
///
/// # Errors
/// `Conflict` when the bucket has not been looked at for it.
fn listed(change: &Change<'_, '_>, directory: InodeId) -> Result<Vec<(Bytes, Dentry)>> {
    let (state, entries) =
        (change.import_state(directory), change.entries(directory, None, MOST_ENTRIES + 1));
    let state = state?;
    if state.prefix.is_some() && state.listed.is_none() {
        return Err(Error::new(ErrorKind::Conflict, format!("directory {directory} was not listed yet")));
    }
    entries
}

/// The layout that a copy of a file shares, empty for anything else. Reads all that making the copy is going to read.
///
/// # Errors
/// `Conflict` when bytes are about to be replaced or deleted.
fn shared_layout(change: &Change<'_, '_>, entry: &Entry) -> Result<FileLayout> {
    if entry.inode.kind != FileKind::File {
        return Ok(FileLayout::empty());
    }
    let layout = change.layout(entry.ino, &entry.inode)?;
    let read = layout.blobs().map(|blob| {
        let key = blob.key.as_str();
        if blob.is_owned() {
            return change.references(key).map(drop);
        }
        let (claim, loan) = (change.claim(key), change.loan(blob));
        loan?;
        match claim?.map(|claim| claim.state) {
            None | Some(HolderState::Held(_)) => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::Conflict, format!("`{key}` is about to be replaced"))),
        }
    });
    all(read.collect())?;
    Ok(layout)
}

/// The records of an inode's extended attributes.
fn attributes(change: &Change<'_, '_>, ino: InodeId) -> Result<Vec<Pair>> {
    let (start, end) = change.keys().below(Tag::Xattr, ino.0);
    change.reads().scan(&start, &end, usize::MAX)
}

/// Makes the copy `ino` of an entry in the directory `parent`.
fn put_copy(
    change: &mut Change<'_, '_>,
    entry: &Entry,
    (parent, ino): (InodeId, InodeId),
    layout: &FileLayout,
    attributes: &[Pair],
) -> Result<()> {
    let kind = entry.inode.kind;
    let mut inode = Inode::new(kind, entry.inode.mode, (entry.inode.uid, entry.inode.gid), change.now);
    (inode.parent, inode.name) = (parent, entry.name.clone());
    (inode.atime, inode.mtime) = (entry.inode.atime, entry.inode.mtime);
    (inode.rdev, inode.target) = (entry.inode.rdev, entry.inode.target.clone());
    match kind {
        FileKind::File if layout.size() > 0 => {
            change.replace_layout((ino, &mut inode), layout, None)?;
            inode.generation = 1;
        }
        FileKind::File => {}
        FileKind::Directory => {
            (inode.nlink, inode.kept, inode.packed) = (entry.inode.nlink, true, entry.inode.packed);
        }
        _ => inode.size = entry.inode.size,
    }
    for (key, value) in attributes {
        let name = change.keys().name_in(key)?;
        change.put(change.keys().xattr(ino, &name), value.clone())?;
    }
    change.put_inode(ino, &inode)?;
    change.put_dentry(parent, &entry.name, Dentry { ino, kind })
}

/// All values, once every one was asked for.
fn all<T>(values: Vec<Result<T>>) -> Result<Vec<T>> {
    values.into_iter().collect()
}
