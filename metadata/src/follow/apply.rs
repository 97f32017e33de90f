//! Changes of another mount's tree, made in the copy of a read-only one.
//!
//! What that tree says of a record goes before what listings made of it here: they are taken back where both have something to
//! say, and the next listing tells whether the bucket still says otherwise.

use std::collections::HashSet;

use bytes::Bytes;
use forebay_core::{FileKind, InodeId, Result};

use super::copy::is_followed;
use crate::kv::Edit;
use crate::records::{Change, OutsideChange, Records};
use crate::schema::{
    Beneath, Claim, Counters, Dentry, HolderState, ImportState, Inode, Keys, OWN_NUMBERS, Tag,
};

/// What came of changes beside the records.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Applied {
    /// What others may know otherwise.
    pub(super) told: Vec<OutsideChange>,
    /// Directories that are listed from elsewhere.
    pub(super) moved: Vec<InodeId>,
}

/// Makes the changes, which are those of whole transactions.
pub(super) fn apply(change: &mut Change<'_, '_>, edits: &[Edit]) -> Result<Applied> {
    let keys = change.keys();
    let mut kept = HashSet::new();
    for (key, value) in edits {
        if value.is_none() && keys.tag_in(key)? == Tag::Inode {
            let ino = InodeId(keys.number_in(key)?);
            if change.shared.openers(ino) > 0 {
                kept.insert(ino);
            }
        }
    }
    let mut applying =
        Applying { change, keys, kept, under_way: HashSet::new(), applied: Applied::default() };
    for (key, value) in edits {
        let is_followed = match value {
            Some(value) => keys.tag_in(key)? == Tag::Counters || is_followed(keys, key, value)?,
            None => true,
        };
        applying.edit(key, value.as_ref().filter(|_| is_followed).cloned())?;
    }
    Ok(applying.applied)
}

/// Shows under a name, at which a listing finds nothing any more that it had put there, what their tree has.
pub(crate) fn take_back_name(change: &mut Change<'_, '_>, parent: InodeId, name: &[u8]) -> Result<()> {
    let (keys, [kept, under_way]) = (change.keys(), Default::default());
    let is_import = std::mem::replace(&mut change.is_import, false);
    let mut applying = Applying { change, keys, kept, under_way, applied: Applied::default() };
    let outcome = applying.take_back_name(parent, name);
    let told = applying.applied.told;
    change.is_import = is_import;
    change.outside.extend(told);
    outcome
}

struct Applying<'a, 'c, 't> {
    change: &'a mut Change<'c, 't>,
    keys: Keys,
    /// Files that go, and are open here.
    kept: HashSet<InodeId>,
    /// Files that are being taken back: their names lead to them once more.
    under_way: HashSet<InodeId>,
    applied: Applied,
}

impl Applying<'_, '_, '_> {
    fn edit(&mut self, key: &Bytes, value: Option<Bytes>) -> Result<()> {
        match self.keys.tag_in(key)? {
            Tag::Counters => self.count(value),
            Tag::Import => self.set_import(key, value),
            Tag::Inode => self.set_inode(key, value),
            Tag::Dentry => {
                let (parent, name) = (InodeId(self.keys.number_in(key)?), self.keys.name_in(key)?);
                self.tell_name(parent, &name);
                let known = self.beneath(key)?;
                self.set(key, value)?;
                match known {
                    Some(known) => self.show_name(parent, &name, known),
                    None => Ok(()),
                }
            }
            Tag::Extents | Tag::Xattr | Tag::Link | Tag::Move => {
                let ino = InodeId(self.keys.number_in(key)?);
                if value.is_none() && self.kept.contains(&ino) {
                    return Ok(());
                }
                if self.set(key, value)? { self.take_back(ino) } else { Ok(()) }
            }
            Tag::Claim => {
                let before = self.change.reads().get(key)?;
                for claim in [before, value.clone()].into_iter().flatten() {
                    self.take_back_key(Claim::decode(claim)?.key.as_str())?;
                }
                self.set_whole(key, value)
            }
            tag if tag.is_of_the_tree() => self.set_whole(key, value),
            _ => Ok(()),
        }
    }

    /// What their tree has under `key` now. Returns whether listings changed that here: then it is kept beneath.
    fn set(&mut self, key: &Bytes, value: Option<Bytes>) -> Result<bool> {
        let beneath = self.keys.beneath(key);
        let is_beneath = self.change.reads().get(&beneath)?.is_some();
        match (is_beneath, value) {
            (true, value) => self.change.put(beneath, Beneath(value).encode())?,
            (false, Some(value)) => self.change.put(key.clone(), value)?,
            (false, None) => self.change.delete(key.clone())?,
        }
        Ok(is_beneath)
    }

    /// The same, whatever listings made of it.
    fn set_whole(&mut self, key: &Bytes, value: Option<Bytes>) -> Result<()> {
        self.change.delete(self.keys.beneath(key))?;
        self.set(key, value).map(drop)
    }

    /// What their tree has under a key that listings changed.
    fn beneath(&self, key: &Bytes) -> Result<Option<Option<Bytes>>> {
        let beneath = self.change.reads().get(&self.keys.beneath(key))?.map(Beneath::decode).transpose()?;
        Ok(beneath.map(|Beneath(value)| value))
    }

    /// Shows under `key` what their tree has there.
    fn restore(&mut self, key: &Bytes) -> Result<()> {
        match self.beneath(key)? {
            Some(value) => self.set_whole(key, value),
            None => Ok(()),
        }
    }

    /// Inodes and bytes are those of their tree; numbers are given out apart from it.
    fn count(&mut self, value: Option<Bytes>) -> Result<()> {
        let Some(theirs) = value.map(Counters::decode).transpose()? else { return Ok(()) };
        let counters = Counters { next_ino: self.change.counters()?.next_ino, ..theirs };
        self.change.put(self.keys.counters(), counters.encode())
    }

    /// Where a directory is listed from. When it was listed here stays known.
    fn set_import(&mut self, key: &Bytes, value: Option<Bytes>) -> Result<()> {
        let Some(theirs) = value.map(ImportState::decode).transpose()? else {
            return self.set_whole(key, None);
        };
        let directory = InodeId(self.keys.number_in(key)?);
        let own = self.change.import_state(directory)?;
        if own.prefix != theirs.prefix {
            self.applied.moved.push(directory);
            // What was listed is not there any more, and may be somewhere below the new prefix by now.
            for key in self.changed_below(Tag::Dentry, directory)? {
                self.take_back_name(directory, &self.keys.name_in(&key)?)?;
            }
            return self.set_whole(key, Some(theirs.encode()));
        }
        if own.listed.is_none() {
            return self.set_whole(key, Some(theirs.encode()));
        }
        self.change.put(self.keys.beneath(key), Beneath(Some(theirs.encode())).encode())
    }

    fn set_inode(&mut self, key: &Bytes, value: Option<Bytes>) -> Result<()> {
        let ino = InodeId(self.keys.number_in(key)?);
        let theirs = value.clone().map(Inode::decode).transpose()?;
        let own = self.change.find(ino)?;
        for inode in [&own, &theirs].into_iter().flatten() {
            // A listing under way may have seen other bytes at this name.
            self.change.touch_entry(inode.parent, &inode.name);
        }
        if let Some(home) = theirs.as_ref().and_then(|inode| inode.home.as_ref()) {
            self.take_back_key(home.key.as_str())?;
        }
        let kind = own.as_ref().or(theirs.as_ref()).map(|inode| inode.kind);
        if kind == Some(FileKind::Directory) {
            return self.set_directory(ino, own, theirs);
        }
        match (own, theirs) {
            (Some(mut own), None) if self.kept.contains(&ino) || self.change.shared.openers(ino) > 0 => {
                own.nlink = 0;
                self.change.delete(self.keys.beneath(key))?;
                self.change.put_inode(ino, &own)
            }
            (own, theirs) => {
                let is_older = |own: &Inode, theirs: &Inode| theirs.generation < own.generation;
                if own.as_ref().zip(theirs.as_ref()).is_some_and(|(own, theirs)| is_older(own, theirs)) {
                    // A dump was loaded: what is open here, and cached, is to be told from what comes now.
                    self.change.put(self.keys.beneath(key), Beneath(value.clone()).encode())?;
                }
                if self.set(key, value)? {
                    return self.take_back(ino);
                }
                if let (Some(own), Some(theirs)) = (own, theirs) {
                    self.tell_inode(ino, &own, &theirs);
                }
                Ok(())
            }
        }
    }

    /// A directory goes on with what was listed in it here.
    fn set_directory(&mut self, ino: InodeId, own: Option<Inode>, theirs: Option<Inode>) -> Result<()> {
        let (key, beneath) = (self.keys.inode(ino), self.keys.beneath(&self.keys.inode(ino)));
        let known = self.beneath(&key)?;
        let Some(mut theirs) = theirs else { return self.set_whole(&key, None) };
        match (own, known) {
            (Some(own), Some(Some(known))) => {
                self.change.put(beneath, Beneath(Some(theirs.encode())).encode())?;
                let (own, known) = (i64::from(own.nlink), i64::from(Inode::decode(known)?.nlink));
                // One that was removed is kept in the trash.
                if theirs.nlink > 0 {
                    theirs.nlink = u32::try_from(i64::from(theirs.nlink) + own - known).unwrap_or(2).max(2);
                }
                self.change.put_inode(ino, &theirs)?;
            }
            // A listing took it away.
            (None, _) => {
                self.set_whole(&key, Some(theirs.encode()))?;
                self.restore_directory(ino)?;
                self.take_back_name(theirs.parent, &theirs.name)?;
            }
            (Some(_), _) => self.set_whole(&key, Some(theirs.encode()))?,
        }
        self.applied.told.push(OutsideChange::Inode { ino, has_content: false });
        Ok(())
    }

    /// Brings back a directory that a listing took away.
    fn restore_directory(&mut self, ino: InodeId) -> Result<()> {
        self.restore(&self.keys.inode(ino))?;
        self.restore(&self.keys.import(ino))?;
        for key in self.changed_below(Tag::Xattr, ino)? {
            self.restore(&key)?;
        }
        Ok(())
    }

    /// Shows a file, and the names that it has in their tree, as they have it.
    fn take_back(&mut self, ino: InodeId) -> Result<()> {
        if !self.under_way.insert(ino) {
            return Ok(());
        }
        let outcome = self.take_back_once(ino);
        self.under_way.remove(&ino);
        outcome
    }

    fn take_back_once(&mut self, ino: InodeId) -> Result<()> {
        let own = self.change.find(ino)?;
        for tag in [Tag::Extents, Tag::Xattr, Tag::Move, Tag::Link] {
            for key in self.changed_below(tag, ino)? {
                self.restore(&key)?;
                if tag == Tag::Link {
                    let (parent, name) = self.keys.link_in(&key)?;
                    self.take_back_name(parent, &name)?;
                }
            }
        }
        let (key, beneath) = (self.keys.inode(ino), self.keys.beneath(&self.keys.inode(ino)));
        let Some(theirs) = self.beneath(&key)? else { return Ok(()) };
        match (own, theirs.clone().map(Inode::decode).transpose()?) {
            // It was made by a listing, and somebody has it open.
            (Some(mut own), None) if self.change.shared.openers(ino) > 0 => {
                own.nlink = 0;
                self.change.delete(beneath)?;
                self.change.put_inode(ino, &own)?;
                self.take_back_names(&own)
            }
            (Some(own), Some(mut theirs)) => {
                let (is_same, known) = (is_content_of(&own, &theirs), theirs.generation);
                // No two contents have one generation here.
                theirs.generation = known.max(own.generation + u64::from(!is_same));
                self.tell_inode(ino, &own, &theirs);
                match theirs.generation == known {
                    true => self.set_whole(&key, Some(theirs.encode()))?,
                    false => self.change.put_inode(ino, &theirs)?,
                }
                self.take_back_name(own.parent, &own.name)?;
                self.take_back_names(&theirs)
            }
            (None, Some(inode)) => {
                self.set_whole(&key, theirs)?;
                self.take_back_names(&inode)
            }
            (own, None) => {
                self.set_whole(&key, None)?;
                own.map_or(Ok(()), |own| self.take_back_names(&own))
            }
        }
    }

    fn take_back_names(&mut self, inode: &Inode) -> Result<()> {
        if let Some(home) = &inode.home {
            self.take_back_key(home.key.as_str())?;
        }
        self.take_back_name(inode.parent, &inode.name)
    }

    /// Lets go of a key that a listing gave to a file of this mount's own.
    fn take_back_key(&mut self, key: &str) -> Result<()> {
        self.change.touch_key(key);
        let claim = self.change.claim(key)?;
        self.restore(&self.keys.claim(key))?;
        match claim.map(|claim| claim.state) {
            Some(HolderState::Held(holder)) if holder.0 >= OWN_NUMBERS => self.take_back(holder),
            _ => Ok(()),
        }
    }

    /// Shows under a name what their tree has there.
    fn take_back_name(&mut self, parent: InodeId, name: &[u8]) -> Result<()> {
        match self.beneath(&self.keys.dentry(parent, name))? {
            Some(known) => self.show_name(parent, name, known),
            None => Ok(()),
        }
    }

    /// The same, of a name that led to `known` when listings changed that.
    fn show_name(&mut self, parent: InodeId, name: &[u8], known: Option<Bytes>) -> Result<()> {
        let key = self.keys.dentry(parent, name);
        let Some(theirs) = self.beneath(&key)? else { return Ok(()) };
        let own = self.change.dentry(parent, name)?;
        self.tell_name(parent, name);
        self.set_whole(&key, theirs.clone())?;
        let (known, theirs) =
            (known.map(Dentry::decode).transpose()?, theirs.map(Dentry::decode).transpose()?);
        let directories =
            |entry: &Option<Dentry>| i64::from(entry.is_some_and(|entry| entry.kind == FileKind::Directory));
        let listed = directories(&own) - directories(&known);
        if listed != 0
            && let Some(mut directory) = self.change.find(parent)?
            && directory.nlink > 0
        {
            // What listings counted goes; what their tree counts is in its record of the directory.
            directory.nlink = u32::try_from(i64::from(directory.nlink) - listed).unwrap_or(2).max(2);
            self.change.put_inode(parent, &directory)?;
        }
        for entry in [own, theirs].into_iter().flatten() {
            match entry.kind {
                FileKind::File => self.take_back(entry.ino)?,
                FileKind::Directory if self.change.find(entry.ino)?.is_none() => {
                    self.restore_directory(entry.ino)?
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The keys of an inode's records of a family that listings changed.
    fn changed_below(&self, tag: Tag, ino: InodeId) -> Result<Vec<Bytes>> {
        let (start, end) = self.keys.below(tag, ino.0);
        let (start, end) = (self.keys.beneath(&start), self.keys.beneath(&end));
        let found = self.change.reads().scan(&start, &end, usize::MAX)?;
        Ok(found.into_iter().map(|(key, _)| self.keys.above(&key)).collect())
    }

    fn tell_name(&mut self, directory: InodeId, name: &[u8]) {
        self.change.touch_entry(directory, name);
        self.applied.told.push(OutsideChange::Name { directory, name: Bytes::copy_from_slice(name) });
    }

    fn tell_inode(&mut self, ino: InodeId, own: &Inode, theirs: &Inode) {
        let has_content = own.generation != theirs.generation;
        self.applied.told.push(OutsideChange::Inode { ino, has_content });
    }
}

/// Whether two records of a file say that the same bytes are in the same places, as far as they alone tell.
fn is_content_of(one: &Inode, other: &Inode) -> bool {
    let content = |inode: &Inode| (inode.size, inode.home.clone(), inode.extents.clone());
    one.further == 0 && other.further == 0 && content(one) == content(other)
}
