//! What a clone has made and no path leads to: a directory without a name that is marked so, with all below it.
//!
//! It counts in no quota. While its clone lives nobody else touches it; then it is freed, a step at a time. A step
//! takes the name from every directory that it meets and marks that one as well, so that each moment is a whole tree.

use forebay_core::{FileKind, InodeId, Result};

use super::{Change, Records};
use crate::kv::Pair;
use crate::schema::{Inode, Orphan, Tag};

impl Change<'_, '_> {
    /// Marks a directory without a name as unfinished.
    pub(crate) fn mark_unfinished(&mut self, session: u64, ino: InodeId) -> Result<()> {
        self.put(self.keys().orphan(session, ino), Orphan::Unfinished.encode())
    }

    /// Frees up to `limit` entries of what a clone left, and the directory itself after the last one. Returns whether it is
    /// gone.
    pub(crate) fn free_unfinished(&mut self, session: u64, top: InodeId, limit: usize) -> Result<bool> {
        let record = self.keys().orphan(session, top);
        let mark = self.reads().get(&record)?.map(Orphan::decode).transpose()?;
        if !mark.is_some_and(Orphan::is_unfinished) || self.shared.clones.builds(top) {
            return Ok(true);
        }
        let Some(directory) = self.find(top)? else {
            return self.delete(record).map(|()| true);
        };
        let entries = self.entries(top, None, limit)?;
        let keys: Vec<_> = entries.iter().map(|(_, entry)| self.keys().inode(entry.ino)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        let mut below = Vec::with_capacity(entries.len());
        for ((name, entry), inode) in entries.into_iter().zip(self.reads().get_many(&keys)?) {
            below.push((name, entry.ino, inode.map(Inode::decode).transpose()?));
        }
        self.read_copies(below.iter().filter_map(|(_, ino, inode)| Some((*ino, inode.as_ref()?))))?;
        let is_last = below.len() < limit;
        for (name, ino, inode) in below {
            self.delete_dentry(top, &name)?;
            if let Some(inode) = inode {
                self.free_copy(session, ino, inode)?;
            }
        }
        if is_last {
            self.delete(record)?;
            self.free(top, directory)?;
        }
        Ok(is_last)
    }

    /// Frees a copy that has lost its name: a directory with what is below it later, step by step.
    pub(crate) fn free_copy(&mut self, session: u64, ino: InodeId, mut inode: Inode) -> Result<()> {
        inode.nlink = 0;
        if inode.kind == FileKind::Directory {
            self.shared.work.notify_one();
            self.put_inode(ino, &inode)?;
            return self.mark_unfinished(session, ino);
        }
        self.free(ino, inode)
    }

    /// Reads, side by side, what freeing copies is going to read.
    pub(crate) fn read_copies<'i>(&self, copies: impl Iterator<Item = (InodeId, &'i Inode)>) -> Result<()> {
        let files = copies.filter(|(_, inode)| inode.kind != FileKind::Directory);
        let read = files.flat_map(|(ino, inode)| {
            let attributes = self.attributes(ino).map(drop);
            let blobs = self.layout(ino, inode).map(|layout| {
                let blob = |blob: &forebay_core::Blob| match blob.is_owned() {
                    true => self.references(blob.key.as_str()).map(drop),
                    false => self.loan(blob).map(drop),
                };
                layout.blobs().map(blob).collect::<Vec<_>>()
            });
            [attributes].into_iter().chain(blobs.unwrap_or_else(|error| vec![Err(error)]))
        });
        let read: Vec<Result<()>> = read.collect();
        read.into_iter().collect()
    }

    /// The records of an inode's extended attributes.
    pub(crate) fn attributes(&self, ino: InodeId) -> Result<Vec<Pair>> {
        let (start, end) = self.keys().below(Tag::Xattr, ino.0);
        self.reads().scan(&start, &end, usize::MAX)
    }
}
