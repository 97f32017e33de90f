//! The trash: inodes without a name that can be brought back until their time is over.
//!
//! A deleted inode keeps its record, and with it the name and the directory that it had; deleted directories do, too, so
//! that the way to a file is known for as long as the file is. Of its object at its path it becomes one more borrower:
//! the mover copies the bytes to an owned blob and deletes the object, so that a new file is free to take the path.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use forebay_core::{Attributes, Error, ErrorKind, FileKind, InodeId, Result};

use super::{Change, Charge, Records, check_new_name, usage_of};
use crate::schema::{Dentry, ImportState, Inode, encode_plain};

/// Names something in the trash. As text `DUE-INODE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TrashId {
    /// Milliseconds since 1970 until which it can be brought back.
    pub due_ms: u64,
    /// The inode.
    pub ino: InodeId,
}

impl fmt::Display for TrashId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.due_ms, self.ino.0)
    }
}

impl FromStr for TrashId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let (due_ms, ino) = text.split_once('-')?;
            Some(Self { due_ms: due_ms.parse().ok()?, ino: InodeId(ino.parse().ok()?) })
        };
        parse().ok_or_else(|| {
            Error::invalid(format!("`{text}` names nothing in a trash"))
                .with_hint("`forebay trash ls` shows names such as 1790000000000-42")
        })
    }
}

impl Change<'_, '_> {
    /// For how many milliseconds what this takes away is kept in the trash; 0: not at all.
    pub(crate) fn kept_ms(&self) -> u64 {
        if self.keeps_deleted { self.shared.settings.trash_ms } else { 0 }
    }

    /// The end of an inode without names that nobody has open: it goes to the trash for `kept_ms`, or is freed where that is 0.
    pub(crate) fn discard(&mut self, ino: InodeId, mut inode: Inode, kept_ms: u64) -> Result<()> {
        if kept_ms == 0 {
            return self.free(ino, inode);
        }
        self.part_with_home(ino, &mut inode)?;
        match inode.kind {
            FileKind::File => self.delete(self.keys().movement(ino))?,
            FileKind::Directory => self.delete(self.keys().import(ino))?,
            _ => {}
        }
        self.put_inode(ino, &inode)?;
        let due_ms = self.shared.now_ms().saturating_add(kept_ms);
        self.put(self.keys().trash(due_ms, ino), encode_plain(b""))
    }

    /// Makes a file a borrower of the plain object that was its own, which is to go. The caller puts the inode.
    pub(crate) fn part_with_home(&mut self, ino: InodeId, inode: &mut Inode) -> Result<()> {
        if inode.home.is_none() {
            return Ok(());
        }
        let layout = self.layout(ino, inode)?;
        match self.replace_layout((ino, inode), &layout, None)? {
            Some(home) => self.doom_plain(&home),
            None => Ok(()),
        }
    }

    /// Frees something in the trash for good, unless somebody still reads it. Returns whether it is out of the trash.
    pub(crate) fn purge(&mut self, id: TrashId) -> Result<bool> {
        let record = self.keys().trash(id.due_ms, id.ino);
        if self.reads().get(&record)?.is_none() {
            return Ok(true);
        }
        if self.shared.openers(id.ino) > 0 {
            return Ok(false);
        }
        self.delete(record)?;
        if let Some(inode) = self.find(id.ino)?.filter(|inode| inode.nlink == 0) {
            self.free(id.ino, inode)?;
        }
        Ok(true)
    }

    /// Gives something in the trash the name `name` in `parent`.
    ///
    /// # Errors
    /// `NotFound` when it is not there any more; `Exists` when the name is taken; `OverQuota`.
    pub(crate) fn restore(&mut self, id: TrashId, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        check_new_name(parent, name)?;
        let mut directory = self.directory(parent)?;
        let record = self.keys().trash(id.due_ms, id.ino);
        let is_there = self.reads().get(&record)?.is_some();
        let found = self.find(id.ino)?.filter(|inode| is_there && inode.nlink == 0);
        let mut inode = found
            .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("`{id}` is not in the trash any more")))?;
        if self.dentry(parent, name)?.is_some() {
            let name = String::from_utf8_lossy(name);
            return Err(Error::new(ErrorKind::Exists, format!("`{name}` is in directory {parent} already")));
        }
        self.delete(record)?;
        let is_directory = inode.kind == FileKind::Directory;
        inode.nlink = if is_directory { 2 } else { 1 };
        (inode.parent, inode.name) = (parent, Bytes::copy_from_slice(name));
        inode.kept |= is_directory;
        inode.ctime = self.now;
        if inode.kind == FileKind::File {
            inode.note_since(self.now.seconds);
        }
        self.charge(parent, usage_of(&inode), Charge::Checked)?;
        self.put_inode(id.ino, &inode)?;
        self.put_dentry(parent, name, Dentry { ino: id.ino, kind: inode.kind })?;
        directory.nlink += u32::from(is_directory);
        self.put_changed_directory(parent, directory)?;
        if is_directory {
            self.put_import_state(id.ino, &ImportState::default())?;
            self.attach(id.ino)?;
            // Removed directories are empty; whoever was counting it may have given up then.
            self.count_empty(id.ino)?;
        }
        if inode.kind == FileKind::File {
            self.queue_move(id.ino)?;
        }
        Ok(inode.attributes(id.ino))
    }
}
