//! What a listing means for a directory, a window of names at a time, each window one transaction.
//!
//! The bucket is right about keys that no claim speaks for, except where Forebay changed them while the listing was
//! on its way; the tree is right about everything that is not an object: symlinks, empty directories, files not
//! uploaded yet.

use std::ops::Range;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, FileKind, FileLayout, InodeId, Result};
use forebay_io::object::ObjectInfo;
use tracing::warn;

use super::items::{Item, Items, OBJECT_SUFFIX, beside};
use crate::follow::take_back_name;
use crate::records::{Change, Charge, Records, check_name, child_prefix, prefix_with_slash, usage_of};
use crate::schema::{Claim, Dentry, HolderState, ImportState, Inode, OWN_NUMBERS};

/// Names in one window. A closure runs again for reads that depend on one another, on engines whose reads wait: this
/// keeps their number far below what the committer allows.
const WINDOW: usize = 128;

/// A listing to be reconciled.
pub(super) struct Work {
    pub(super) directory: InodeId,
    /// Where it was listed.
    pub(super) prefix: String,
    pub(super) items: Items,
}

/// How far it got.
#[derive(Debug, Clone, Default)]
pub(super) struct Cursor {
    /// The last name that is done.
    after: Option<Bytes>,
    /// Position of the next listed name.
    next: usize,
    /// Whether nothing is left.
    pub(super) done: bool,
    /// Directories whose prefix was not listed any more.
    pub(super) emptied: Vec<(Bytes, InodeId)>,
}

/// Does the next window.
///
/// # Errors
/// `Conflict` when the directory is listed from elsewhere by now.
pub(super) fn reconcile(change: &mut Change<'_, '_>, work: &Work, at: &Cursor) -> Result<Cursor> {
    let directory = change.directory(work.directory)?;
    if change.import_state(work.directory)?.prefix.as_ref() != Some(&work.prefix) {
        let message = format!("directory {} was renamed while it was listed", work.directory);
        return Err(Error::new(ErrorKind::Conflict, message));
    }
    let entries = change.entries(work.directory, at.after.as_deref(), WINDOW)?;
    let rest = &work.items.items[at.next..];
    let listed = &rest[..rest.len().min(WINDOW)];
    let until = window_end(&entries, listed, rest.len());
    let within = |name: &Bytes| until.as_ref().is_none_or(|until| name <= until);
    let listed = &listed[..listed.partition_point(|(name, _)| within(name))];
    let entries = &entries[..entries.partition_point(|(name, _)| within(name))];

    let claims = change.any_claims()?;
    prefetch(change, work, claims, listed, entries)?;
    let mut window = Window::new(change, work, directory, listed.len() as u64, claims);
    let mut known = entries.iter().peekable();
    for (name, item) in listed {
        while let Some((unlisted, entry)) = known.next_if(|(known, _)| known < name) {
            window.unlisted(unlisted, *entry)?;
        }
        let entry = known.next_if(|(known, _)| known == name).map(|(_, entry)| *entry);
        window.listed(name, item, entry)?;
    }
    for (unlisted, entry) in known {
        window.unlisted(unlisted, *entry)?;
    }
    let mut emptied = at.emptied.clone();
    emptied.append(&mut window.emptied);
    window.finish()?;
    Ok(Cursor { done: until.is_none(), after: until, next: at.next + listed.len(), emptied })
}

/// Does one name while the listing `number` is under way: what the store said of that name alone since. Returns whether the tree is right
/// about it now. It only ever adds a name: what is another thing by now, or gone, is left to the listing, which comes upon all that
/// belongs to it.
pub(super) fn reconcile_one(
    change: &mut Change<'_, '_>,
    work: &Work,
    number: u64,
    name: &Bytes,
) -> Result<bool> {
    let directory = change.directory(work.directory)?;
    let is_current = change.shared.touched.is_under_way(work.directory, number)
        && change.import_state(work.directory)?.prefix.as_ref() == Some(&work.prefix);
    if !is_current || change.shared.touched.is(work.directory, name, &work.key_of(name)) {
        return Ok(is_current);
    }
    let entry = change.dentry(work.directory, name)?;
    let item = work.items.get(name);
    let Some(entry) = entry else {
        let Some(item) = item else { return Ok(true) };
        let claims = change.any_claims()?;
        let mut window = Window::new(change, work, directory, 1, claims);
        window.listed(name, item, None)?;
        window.finish()?;
        // The listing may be of before it came.
        change.touch_entry(work.directory, name);
        return Ok(true);
    };
    let inode = change.inode(entry.ino)?;
    Ok(match (item, entry.kind) {
        (Some(Item::Directory), FileKind::Directory) => true,
        (Some(Item::File(info)), FileKind::File) => inode.home == Some(info.blob()),
        (Some(_), _) => false,
        (None, FileKind::Directory) => inode.kept,
        (None, FileKind::File) => inode.home.is_none(),
        (None, _) => true,
    })
}

/// The last name that both sides are known up to; `None` when both are known to their end.
fn window_end(entries: &[(Bytes, Dentry)], listed: &[(Bytes, Item)], rest: usize) -> Option<Bytes> {
    let entries_end = entries.last().filter(|_| entries.len() == WINDOW).map(|(name, _)| name);
    let listed_end = listed.last().filter(|_| listed.len() < rest).map(|(name, _)| name);
    match (entries_end, listed_end) {
        (Some(a), Some(b)) => Some(a.min(b).clone()),
        (a, b) => a.or(b).cloned(),
    }
}

/// Asks for what the window is going to read in one go.
fn prefetch(
    change: &Change<'_, '_>,
    work: &Work,
    claims: bool,
    listed: &[(Bytes, Item)],
    entries: &[(Bytes, Dentry)],
) -> Result<()> {
    let keys = change.keys();
    let mut wanted: Vec<Bytes> = Vec::with_capacity(listed.len() + 2 * entries.len());
    for (name, item) in listed.iter().filter(|_| claims) {
        wanted.push(match item {
            Item::File(info) => keys.claim(info.key.as_str()),
            Item::Directory => keys.claim(&prefix_with_slash(&work.key_of(name))),
        });
    }
    for (_, entry) in entries {
        wanted.push(keys.inode(entry.ino));
        if entry.kind == FileKind::Directory {
            wanted.push(keys.import(entry.ino));
        }
    }
    let wanted: Vec<&[u8]> = wanted.iter().map(|key| &key[..]).collect();
    change.reads().get_many(&wanted).map(|_| ())
}

impl Work {
    /// The key of a listed name.
    fn key_of(&self, name: &[u8]) -> String {
        format!("{}{}", prefix_with_slash(&self.prefix), String::from_utf8_lossy(name))
    }
}

/// A window under way.
struct Window<'a, 'c, 't> {
    change: &'a mut Change<'c, 't>,
    work: &'a Work,
    directory: Inode,
    /// Inode numbers taken for this window.
    numbers: Range<u64>,
    /// The most that it can need.
    room: u64,
    /// Whether there were claims on keys when it began: most buckets have none, and then none is looked for.
    claims: bool,
    /// Inodes and bytes that came, counted once for the window.
    made: (i64, i64),
    changed: bool,
    /// Whether a name was taken away, which may be one that comes later in this window.
    has_lost: bool,
    emptied: Vec<(Bytes, InodeId)>,
}

impl<'a, 'c, 't> Window<'a, 'c, 't> {
    fn new(
        change: &'a mut Change<'c, 't>,
        work: &'a Work,
        directory: Inode,
        room: u64,
        claims: bool,
    ) -> Self {
        Self {
            change,
            work,
            directory,
            room,
            numbers: 0..0,
            claims,
            made: (0, 0),
            changed: false,
            has_lost: false,
            emptied: Vec::new(),
        }
    }
}

impl Window<'_, '_, '_> {
    fn listed(&mut self, name: &Bytes, item: &Item, entry: Option<Dentry>) -> Result<()> {
        let entry = match entry {
            Some(entry) if self.is_still(name, entry)? => Some(entry),
            _ => None,
        };
        match item {
            Item::Directory => self.prefix_listed(name, entry),
            Item::File(info) => self.object_listed(name, info, entry),
        }
    }

    /// Whether an entry from before this window is there still.
    fn is_still(&self, name: &[u8], entry: Dentry) -> Result<bool> {
        Ok(!self.has_lost || self.change.dentry(self.work.directory, name)? == Some(entry))
    }

    /// Takes a file away whose object is gone or somebody else's now.
    fn vanish(&mut self, ino: InodeId, inode: Inode) -> Result<()> {
        (self.changed, self.has_lost) = (true, true);
        self.change.vanish(ino, inode)
    }

    fn is_touched(&self, name: &[u8], key: &str) -> bool {
        self.change.shared.touched.is(self.work.directory, name, key)
    }

    fn claim(&self, key: &str) -> Result<Option<Claim>> {
        if self.claims || self.change.has_claimed { self.change.claim(key) } else { Ok(None) }
    }

    fn prefix_listed(&mut self, name: &Bytes, entry: Option<Dentry>) -> Result<()> {
        let key = self.work.key_of(name);
        if self.is_touched(name, &key) || self.claim(&prefix_with_slash(&key))?.is_some() {
            return Ok(());
        }
        match entry {
            None => self.make_directory(name, key),
            Some(entry) if entry.kind == FileKind::File => {
                if self.step_aside(name, &key, entry)? {
                    self.make_directory(name, key)?;
                }
                Ok(())
            }
            // A directory already; or a symlink or the like, which no object can be and which therefore stays.
            Some(_) => Ok(()),
        }
    }

    /// Frees the name of a file for a directory. Returns whether that could be done.
    fn step_aside(&mut self, name: &Bytes, key: &str, entry: Dentry) -> Result<bool> {
        let mut inode = self.change.inode(entry.ino)?;
        if inode.home.as_ref().is_some_and(|home| home.key.as_str() == key) {
            // An object beside keys below it: it is imported again, under the name that says so.
            self.forget(name, entry.ino, inode)?;
            return Ok(true);
        }
        let (directory, aside) = (self.work.directory, beside(name));
        if check_name(&aside).is_err() || self.change.dentry(directory, &aside)?.is_some() {
            return Ok(false);
        }
        self.changed = true;
        self.change.delete_dentry(directory, name)?;
        self.change.put_dentry(directory, &aside, entry)?;
        self.change.change_name((entry.ino, &mut inode), (directory, name), (directory, &aside))?;
        self.change.put_inode(entry.ino, &inode)?;
        self.change.settle_home(entry.ino, &inode)?;
        Ok(true)
    }

    /// Whether an outsider replaced the object that held all bytes of a file elsewhere; takes that file away then. One
    /// with further bytes of its own is fsck's to tell of.
    fn is_lost(&mut self, holder: InodeId, info: &ObjectInfo) -> Result<bool> {
        let inode = self.change.find(holder)?;
        let held = |inode: &Inode| inode.home.as_ref().filter(|home| home.key == info.key).cloned();
        match inode.as_ref().and_then(held) {
            Some(home) if home == info.blob() => Ok(false),
            Some(_) if self.has_others(holder, inode.as_ref())? => Ok(false),
            Some(_) => {
                warn!(key = %info.key, ino = %holder, "somebody replaced an object before its file was moved");
                inode.map_or(Ok(()), |inode| self.vanish(holder, inode)).map(|()| true)
            }
            None => Ok(false),
        }
    }

    /// Gives a file that stood beside a directory the name back, now that the directory is gone.
    fn step_back(&mut self, name: &Bytes, ino: InodeId) -> Result<()> {
        let (directory, aside) = (self.work.directory, beside(name));
        if self.change.dentry(directory, &aside)?.is_none_or(|entry| entry.ino != ino) {
            return Ok(());
        }
        let mut inode = self.change.inode(ino)?;
        (self.changed, self.has_lost) = (true, true);
        self.change.delete_dentry(directory, &aside)?;
        self.change.put_dentry(directory, name, Dentry { ino, kind: inode.kind })?;
        self.change.change_name((ino, &mut inode), (directory, &aside), (directory, name))?;
        self.change.put_inode(ino, &inode)?;
        self.change.settle_home(ino, &inode)
    }

    fn object_listed(&mut self, name: &Bytes, info: &ObjectInfo, entry: Option<Dentry>) -> Result<()> {
        let key = info.key.as_str();
        let entry = match entry {
            // It may have got the name in this very window.
            None if name.ends_with(OBJECT_SUFFIX) => self.change.dentry(self.work.directory, name)?,
            entry => entry,
        };
        if self.is_touched(name, key) {
            return Ok(());
        }
        if let Some(entry) = entry.filter(|entry| entry.kind == FileKind::Directory) {
            return self.object_at_directory(name, info, entry);
        }
        match self.claim(key)?.map(|claim| claim.state) {
            None => {}
            Some(HolderState::Held(holder)) if entry.is_some_and(|entry| entry.ino == holder) => {}
            Some(HolderState::Held(holder)) if self.is_lost(holder, info)? => {}
            Some(HolderState::Held(holder)) if entry.is_none() => return self.step_back(name, holder),
            Some(HolderState::Doomed { due_ms }) if self.change.is_successor(due_ms, info)? => {}
            Some(_) => return self.was_anothers(name, key, entry),
        }
        match entry {
            None => self.make_file(name, info),
            Some(entry) if entry.kind == FileKind::File => self.compare(name, info, entry),
            Some(_) => Ok(()),
        }
    }

    /// Beside a tree that is followed, a listing may have shown an object before that told whose it is.
    fn was_anothers(&mut self, name: &[u8], key: &str, entry: Option<Dentry>) -> Result<()> {
        let Some(entry) = entry.filter(|entry| entry.ino.0 >= OWN_NUMBERS && entry.kind == FileKind::File)
        else {
            return Ok(());
        };
        let inode = self.change.inode(entry.ino)?;
        match inode.home.as_ref().is_some_and(|home| home.key.as_str() == key) {
            true => self.forget(name, entry.ino, inode),
            false => Ok(()),
        }
    }

    /// The tree has a directory where the bucket has no keys below: one that was made here, or one that is gone there.
    fn object_at_directory(&mut self, name: &Bytes, info: &ObjectInfo, entry: Dentry) -> Result<()> {
        self.prefix_unlisted(name, entry)?;
        let aside = beside(name);
        if check_name(&aside).is_err() || !info.key.as_str().as_bytes().ends_with(name) {
            return Ok(());
        }
        let entry = self.change.dentry(self.work.directory, &aside)?;
        self.object_listed(&aside, info, entry)
    }

    fn compare(&mut self, name: &Bytes, info: &ObjectInfo, entry: Dentry) -> Result<()> {
        let inode = self.change.inode(entry.ino)?;
        match &inode.home {
            Some(home) if *home == info.blob() => Ok(()),
            // It is about to be uploaded, and will learn of the outsider's object then.
            None if self.change.shared.openers(entry.ino) > 0 => Ok(()),
            None if self.change.outlives(entry.ino, &inode, info)? => {
                self.change.stand(entry.ino, inode, info.blob())
            }
            None if self.change.awaits_content(entry.ino, &inode, info.key.as_str())? => {
                self.change.begin_with(entry.ino, inode, info)?;
                // Tells of the name, so that whoever knows it asks for the size again.
                self.change.put_dentry(self.work.directory, name, entry)
            }
            _ => {
                self.forget_if_at(name, info.key.as_str(), entry.ino, inode)?;
                self.make_file(name, info)
            }
        }
    }

    fn forget_if_at(&mut self, name: &[u8], key: &str, ino: InodeId, inode: Inode) -> Result<()> {
        if inode.home.as_ref().is_some_and(|home| home.key.as_str() == key) {
            return self.forget(name, ino, inode);
        }
        (self.changed, self.has_lost) = (true, true);
        self.change.remove_name(self.work.directory, name, ino).map(drop)
    }

    /// Takes the name from a file whose object is not its own any more: nothing of the bucket is to be deleted.
    fn forget(&mut self, name: &[u8], ino: InodeId, mut inode: Inode) -> Result<()> {
        (self.changed, self.has_lost) = (true, true);
        self.change.give_up_home(ino, &mut inode)?;
        self.change.remove_name(self.work.directory, name, ino).map(drop)
    }

    fn unlisted(&mut self, name: &Bytes, entry: Dentry) -> Result<()> {
        if !self.is_still(name, entry)? {
            return Ok(());
        }
        match entry.kind {
            FileKind::Directory => self.prefix_unlisted(name, entry),
            FileKind::File => self.object_unlisted(name, entry),
            _ => Ok(()),
        }
    }

    fn prefix_unlisted(&mut self, name: &Bytes, entry: Dentry) -> Result<()> {
        let Some(key) = child_prefix(self.change.shared.spelling, &self.work.prefix, name) else {
            return Ok(());
        };
        let stays = self.change.inode(entry.ino)?.kept
            || self.change.import_state(entry.ino)?.prefix.as_ref() != Some(&key)
            || self.is_touched(name, &key)
            || self.claim(&prefix_with_slash(&key))?.is_some();
        if !stays {
            self.emptied.push((name.clone(), entry.ino));
        }
        Ok(())
    }

    fn object_unlisted(&mut self, name: &Bytes, entry: Dentry) -> Result<()> {
        let inode = self.change.inode(entry.ino)?;
        let Some(home) = inode.home.clone() else { return Ok(()) };
        let key = home.key.as_str();
        let prefix = prefix_with_slash(&self.work.prefix);
        let Some(last) = key.strip_prefix(&prefix).filter(|last| !last.contains('/')) else { return Ok(()) };
        if self.work.items.has_object(last.as_bytes()) || self.is_touched(name, key) {
            return Ok(());
        }
        match self.claim(key)?.map(|claim| claim.state) {
            None => {}
            // It was shown before the tree that is followed told whose it is.
            Some(_) if entry.ino.0 >= OWN_NUMBERS => {}
            // An object that was listed beside a directory, under the name of that. Of a renamed file, whether or not it can
            // ever be moved, and of one with further bytes, the record is all that says what is missed.
            Some(HolderState::Held(holder))
                if holder == entry.ino
                    && beside(last.as_bytes()) == *name
                    && !self.is_moving(holder)?
                    && !self.has_others(holder, Some(&inode))? => {}
            Some(_) => return Ok(()),
        }
        self.vanish(entry.ino, inode)?;
        match entry.ino.0 >= OWN_NUMBERS {
            true => take_back_name(self.change, self.work.directory, name),
            false => Ok(()),
        }
    }

    fn is_moving(&self, ino: InodeId) -> Result<bool> {
        self.change.is_moving(ino)
    }

    /// Whether a file has bytes beside those of its plain object.
    fn has_others(&self, ino: InodeId, inode: Option<&Inode>) -> Result<bool> {
        inode.map_or(Ok(false), |inode| self.change.is_mixed(ino, inode))
    }

    fn make_file(&mut self, name: &Bytes, info: &ObjectInfo) -> Result<()> {
        let mut inode = Inode::unset(FileKind::File, info.modified);
        inode.size = info.size;
        inode.extents = FileLayout::of_blob(info.blob()).extents().to_vec();
        inode.home = Some(info.blob());
        let ino = self.make(name, inode)?;
        self.made.1 = self.made.1.saturating_add_unsigned(info.size);
        if self.work.key_of(name) != info.key.as_str() {
            let claim = Claim { key: info.key.clone(), state: HolderState::Held(ino) };
            self.change.put_claim(&claim)?;
        }
        Ok(())
    }

    fn make_directory(&mut self, name: &Bytes, prefix: String) -> Result<()> {
        let inode = Inode::unset(FileKind::Directory, self.change.now);
        let ino = self.make(name, inode)?;
        self.directory.nlink += 1;
        self.change.put_import_state(ino, &ImportState { prefix: Some(prefix), listed: None })
    }

    fn make(&mut self, name: &Bytes, mut inode: Inode) -> Result<InodeId> {
        if self.numbers.is_empty() {
            let first = self.change.take_numbers(self.room)?;
            self.numbers = first..first + self.room;
        }
        let ino = InodeId(self.numbers.start);
        self.numbers.start += 1;
        self.changed = true;
        inode.parent = self.work.directory;
        inode.name = name.clone();
        self.change.put_inode(ino, &inode)?;
        self.change.put_dentry(self.work.directory, name, Dentry { ino, kind: inode.kind })?;
        self.change.charge(self.work.directory, usage_of(&inode), Charge::Forced)?;
        self.made.0 += 1;
        Ok(ino)
    }

    fn finish(self) -> Result<()> {
        self.change.count(self.made.0, self.made.1)?;
        if !self.changed {
            return Ok(());
        }
        let mut directory = self.directory;
        // What is seen for the first time has not changed: `tar` fails when times move as it reads.
        if self.change.import_state(self.work.directory)?.listed.is_some() {
            directory.mtime = self.change.now;
            directory.ctime = self.change.now;
        }
        self.change.put_inode(self.work.directory, &directory)
    }
}

/// Removes an imported directory that has nothing below it any more, unless something came meanwhile.
pub(super) fn remove_emptied(
    change: &mut Change<'_, '_>,
    parent: InodeId,
    name: &[u8],
    ino: InodeId,
) -> Result<()> {
    let found = change.dentry(parent, name)?.filter(|entry| entry.ino == ino);
    let (Some(_), Some(inode)) = (found, change.find(ino)?) else { return Ok(()) };
    if inode.kept || change.has_entries(ino)? {
        return Ok(());
    }
    change.delete_dentry(parent, name)?;
    change.lose(ino, inode)?;
    let mut directory = change.directory(parent)?;
    directory.nlink = directory.nlink.saturating_sub(1);
    directory.mtime = change.now;
    directory.ctime = change.now;
    change.put_inode(parent, &directory)
}
