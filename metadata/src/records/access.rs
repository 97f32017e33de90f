//! Reading and writing records by type.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, FileKind, FileLayout, InodeId, Result, Timestamp};

use super::layouts::{Awaited, Layouts, Stored};
use super::{OutsideChange, Shared};
use crate::commit::{Reads, Txn, View};
use crate::kv::Pair;
use crate::schema::{
    Beneath, Claim, Counters, Dentry, ImportState, Inode, Intent, Keys, Loan, Move, Parts, References, Tag,
    decode_extents,
};

/// The plain objects in a layout that are not the file's own, each once.
pub(crate) fn borrowed<'a>(layout: &'a FileLayout, home: Option<&Blob>) -> Vec<&'a Blob> {
    let mut found: HashSet<&Blob> = HashSet::new();
    let others = layout.plain_objects().filter(|blob| Some(*blob) != home);
    others.filter(|blob| found.insert(blob)).collect()
}

/// Typed reads, the same in a transaction and outside.
pub(crate) trait Records {
    fn reads(&self) -> &dyn Reads;
    fn keys(&self) -> Keys;

    /// An inode, if it exists.
    fn find(&self, ino: InodeId) -> Result<Option<Inode>> {
        self.reads().get(&self.keys().inode(ino))?.map(Inode::decode).transpose()
    }

    /// An inode that must exist.
    fn inode(&self, ino: InodeId) -> Result<Inode> {
        self.find(ino)?.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("inode {ino} is gone")))
    }

    /// A directory that must exist and still have its name.
    fn directory(&self, ino: InodeId) -> Result<Inode> {
        let inode = self.inode(ino)?;
        match inode.kind {
            FileKind::Directory if inode.nlink > 0 => Ok(inode),
            FileKind::Directory => {
                Err(Error::new(ErrorKind::NotFound, format!("directory {ino} was removed")))
            }
            _ => Err(Error::new(ErrorKind::NotDirectory, format!("inode {ino} is not a directory"))),
        }
    }

    /// A regular file that must exist.
    fn file(&self, ino: InodeId) -> Result<Inode> {
        let inode = self.inode(ino)?;
        match inode.kind {
            FileKind::File => Ok(inode),
            FileKind::Directory => {
                Err(Error::new(ErrorKind::IsDirectory, format!("inode {ino} is a directory")))
            }
            _ => Err(Error::invalid(format!("inode {ino} is not a regular file"))),
        }
    }

    fn dentry(&self, parent: InodeId, name: &[u8]) -> Result<Option<Dentry>> {
        self.reads().get(&self.keys().dentry(parent, name))?.map(Dentry::decode).transpose()
    }

    /// An entry that must exist.
    fn entry(&self, parent: InodeId, name: &[u8]) -> Result<Dentry> {
        self.dentry(parent, name)?.ok_or_else(|| {
            let name = String::from_utf8_lossy(name);
            Error::new(ErrorKind::NotFound, format!("`{name}` is not in directory {parent}"))
        })
    }

    /// Up to `limit` entries of a directory after `after`.
    fn entries(
        &self,
        directory: InodeId,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<(Bytes, Dentry)>> {
        let (mut start, end) = self.keys().below(Tag::Dentry, directory.0);
        if let Some(after) = after {
            // The smallest key above that of `after`.
            let mut next = self.keys().dentry(directory, after).to_vec();
            next.push(0);
            start = next.into();
        }
        let decode = |(key, value): Pair| Ok((self.keys().name_in(&key)?, Dentry::decode(value)?));
        self.reads().scan(&start, &end, limit)?.into_iter().map(decode).collect()
    }

    fn has_entries(&self, directory: InodeId) -> Result<bool> {
        Ok(!self.entries(directory, None, 1)?.is_empty())
    }

    /// Where the inode's bytes are.
    fn layout(&self, ino: InodeId, inode: &Inode) -> Result<FileLayout> {
        self.resolve(self.stored(ino, inode)?.layout.clone(), inode.home.as_ref())
    }

    /// The layout with plain objects that were moved away replaced by their owned copies. `home` is the file's own
    /// object, which is none of them.
    fn resolve(&self, layout: FileLayout, home: Option<&Blob>) -> Result<FileLayout> {
        let mut moved = HashMap::new();
        for blob in borrowed(&layout, home) {
            if let Some(copy) = self.loan(blob)?.and_then(|loan| loan.moved) {
                moved.insert(blob.clone(), copy);
            }
        }
        match moved.is_empty() {
            true => Ok(layout),
            false => Ok(layout.with_blobs(|blob| moved.get(blob).cloned())),
        }
    }

    /// What files other than its own make of a plain object.
    fn loan(&self, blob: &Blob) -> Result<Option<Loan>> {
        self.reads().get(&self.keys().loan(blob))?.map(Loan::decode).transpose()
    }

    /// The layout as the records have it.
    fn stored(&self, ino: InodeId, inode: &Inode) -> Result<Arc<Stored>> {
        if let Some(known) = self.known(ino, inode) {
            return Ok(known);
        }
        let parts = self.parts(ino, inode)?;
        let layout = FileLayout::from_parts(inode.size, parts.joined())?;
        Ok(Arc::new(Stored { layout, cuts: parts.cuts() }))
    }

    /// The same where no record besides that of the inode has to be read for it.
    fn known(&self, ino: InodeId, inode: &Inode) -> Option<Arc<Stored>>;

    fn parts(&self, ino: InodeId, inode: &Inode) -> Result<Parts> {
        let mut parts = Parts { head: inode.extents.clone(), further: Vec::new() };
        if inode.further > 0 {
            let keys: Vec<Bytes> = (0..inode.further).map(|n| self.keys().extents(ino, n)).collect();
            let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
            for value in self.reads().get_many(&keys)? {
                let value = value.ok_or_else(|| {
                    Error::corrupt(format!("a part of the layout of inode {ino} is missing"))
                })?;
                parts.further.push(decode_extents(value)?);
            }
        }
        Ok(parts)
    }

    /// Whether there is a claim on any key at all.
    fn any_claims(&self) -> Result<bool> {
        let (start, end) = self.keys().family(Tag::Claim);
        Ok(!self.reads().scan(&start, &end, 1)?.is_empty())
    }

    fn claim(&self, key: &str) -> Result<Option<Claim>> {
        let claim = self.reads().get(&self.keys().claim(key))?.map(Claim::decode).transpose()?;
        match claim {
            Some(claim) if claim.key.as_str() != key => {
                Err(Error::corrupt(format!("the claim on `{key}` is one on `{}`", claim.key)))
            }
            claim => Ok(claim),
        }
    }

    /// Whether others hold bytes of a plain object that were not copied away.
    fn is_lent(&self, blob: &Blob) -> Result<bool> {
        Ok(self.loan(blob)?.is_some_and(|loan| loan.moved.is_none()))
    }

    /// The write to a plain object that is under way for an inode.
    fn intent(&self, ino: InodeId) -> Result<Option<Intent>> {
        self.reads().get(&self.keys().intent(ino))?.map(Intent::decode).transpose()
    }

    /// How many inodes refer to an owned blob; `None` when none ever did.
    fn references(&self, key: &str) -> Result<Option<References>> {
        self.reads().get(&self.keys().references(key))?.map(References::decode).transpose()
    }

    /// The same of many, of which all that have to be fetched are fetched at once.
    fn counts<'k>(&self, blobs: impl Iterator<Item = &'k str> + Clone) -> Result<HashMap<&'k str, u64>>
    where
        Self: Sized,
    {
        let keys: Vec<Bytes> = blobs.clone().map(|key| self.keys().references(key)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        let counted = blobs.zip(self.reads().get_many(&keys)?).filter_map(|(key, value)| {
            let record = References::decode(value?);
            Some(record.map(|record| (key, record.count)))
        });
        counted.collect()
    }

    /// What the mover is to do about an inode.
    fn movement(&self, ino: InodeId) -> Result<Option<Move>> {
        self.reads().get(&self.keys().movement(ino))?.map(Move::decode).transpose()
    }

    fn import_state(&self, directory: InodeId) -> Result<ImportState> {
        let state = self.reads().get(&self.keys().import(directory))?.map(ImportState::decode);
        Ok(state.transpose()?.unwrap_or_default())
    }

    fn counters(&self) -> Result<Counters> {
        let missing = || Error::corrupt("the tree has no counters");
        Counters::decode(self.reads().get(&self.keys().counters())?.ok_or_else(missing)?)
    }
}

/// Reads outside a transaction.
pub(crate) struct Look<'a, 'v> {
    view: &'a View<'v>,
    pub(crate) keys: Keys,
    /// What is known of the tree that is looked at.
    layouts: Option<&'a Layouts>,
}

impl<'a, 'v> Look<'a, 'v> {
    /// Reads in a tree.
    pub(crate) fn new(view: &'a View<'v>, shared: &'a Shared) -> Self {
        Self { view, keys: shared.keys, layouts: Some(&shared.layouts) }
    }

    /// Reads where nobody has the tree open, or nothing of a layout.
    pub(crate) fn plain(view: &'a View<'v>, keys: Keys) -> Self {
        Self { view, keys, layouts: None }
    }
}

impl Records for Look<'_, '_> {
    fn reads(&self) -> &dyn Reads {
        self.view
    }

    fn keys(&self) -> Keys {
        self.keys
    }

    fn known(&self, ino: InodeId, inode: &Inode) -> Option<Arc<Stored>> {
        self.layouts.filter(|_| inode.further > 0)?.of(ino, inode)
    }
}

/// A transaction under way.
pub(crate) struct Change<'a, 't> {
    pub(crate) txn: &'a mut Txn<'t>,
    pub(crate) shared: &'a Shared,
    /// One moment for all that it changes.
    pub(crate) now: Timestamp,
    /// Whether listings in flight need not learn of it, because a listing is what it comes from.
    pub(crate) is_import: bool,
    /// Whether what it takes away goes to the trash, if there is one: not so when its bytes are gone already.
    pub(crate) keeps_deleted: bool,
    /// Whether the blobs that it gives up are gone from the bucket: should they come back, nothing is to delete them.
    pub(crate) is_gone: bool,
    /// Whether it put a claim.
    pub(crate) has_claimed: bool,
    /// The session that it is made for.
    pub(crate) session: u64,
    /// What it changed so far that others are told of: names by a listing, all where other mounts write to the tree.
    pub(crate) outside: Vec<OutsideChange>,
    /// The files of which it changed `E` records so far, and what these say now if that is known.
    laid: HashMap<InodeId, Option<Arc<Stored>>>,
}

impl Records for Change<'_, '_> {
    fn reads(&self) -> &dyn Reads {
        self.txn
    }

    fn keys(&self) -> Keys {
        self.shared.keys
    }

    fn known(&self, ino: InodeId, inode: &Inode) -> Option<Arc<Stored>> {
        match self.laid.get(&ino) {
            _ if inode.further == 0 => None,
            Some(laid) => laid.clone().filter(|stored| stored.is_of(inode)),
            None => self.shared.layouts.of(ino, inode),
        }
    }
}

/// What other transactions knew of the layouts that this one changed goes before it ends. One that is run again leaves it.
impl Drop for Change<'_, '_> {
    fn drop(&mut self) {
        if !self.txn.has_missed() {
            self.laid.keys().for_each(|ino| self.shared.layouts.forget(*ino));
        }
    }
}

impl<'a, 't> Change<'a, 't> {
    pub(crate) fn new(txn: &'a mut Txn<'t>, shared: &'a Shared) -> Self {
        let (now, outside) = (shared.now(), Vec::new());
        Self {
            txn,
            shared,
            now,
            is_import: false,
            keeps_deleted: true,
            is_gone: false,
            has_claimed: false,
            session: shared.session,
            outside,
            laid: HashMap::new(),
        }
    }

    /// Notes what the records of a file say now.
    pub(super) fn note_layout(&mut self, ino: InodeId, stored: Stored) {
        self.laid.insert(ino, Some(Arc::new(stored)));
    }

    /// What the records of open files say from now on, to be learned once all that it changed was made. Nothing is changed after
    /// this.
    pub(crate) fn end_layouts(&mut self) -> Vec<(Awaited, Arc<Stored>)> {
        if self.txn.has_missed() {
            return Vec::new();
        }
        let shared = self.shared;
        let mut ended = Vec::new();
        for (ino, stored) in self.laid.drain() {
            match stored.filter(|_| shared.openers(ino) > 0) {
                Some(stored) => ended.push((shared.layouts.await_one(ino), stored)),
                None => shared.layouts.forget(ino),
            }
        }
        ended
    }

    /// Has other mounts that write to this tree hear that an inode, or its content, changed.
    pub(crate) fn tell_of_inode(&mut self, ino: InodeId, has_content: bool) {
        if !self.is_import && self.shared.settings.serves {
            self.tell_all_of_inode(ino, has_content);
        }
    }

    /// The same where nobody asked for that: this process's own mount hears of it, too.
    pub(crate) fn tell_all_of_inode(&mut self, ino: InodeId, has_content: bool) {
        let is_same = |change: &&mut OutsideChange| matches!(change, OutsideChange::Inode { ino: other, .. } if *other == ino);
        match self.outside.iter_mut().find(is_same) {
            Some(OutsideChange::Inode { has_content: known, .. }) => *known |= has_content,
            _ => self.outside.push(OutsideChange::Inode { ino, has_content }),
        }
    }

    fn touch_name(&mut self, parent: InodeId, name: &[u8]) {
        self.shared.clones.note_name(parent, name);
        if self.is_import || self.shared.settings.serves {
            let name = Bytes::copy_from_slice(name);
            self.outside.push(OutsideChange::Name { directory: parent, name });
        }
        if !self.is_import {
            self.shared.touched.name(parent, name);
        }
    }

    /// Has listings under way not be believed about a name.
    pub(crate) fn touch_entry(&self, parent: InodeId, name: &[u8]) {
        self.shared.touched.name(parent, name);
    }

    /// Notes that who holds `key` or what lies there changed.
    pub(crate) fn touch_key(&self, key: &str) {
        if !self.is_import {
            self.shared.touched.key(key);
        }
    }

    /// The key of the record of an upload of the session that asks.
    pub(crate) fn upload_key(&self, id: &str) -> Bytes {
        self.keys().upload(self.session, id)
    }

    pub(crate) fn put(&mut self, key: Bytes, value: Bytes) -> Result<()> {
        self.keep_beneath(&key)?;
        self.note_extents(&key)?;
        self.txn.put(key, value)
    }

    pub(crate) fn delete(&mut self, key: Bytes) -> Result<()> {
        self.keep_beneath(&key)?;
        self.note_extents(&key)?;
        self.txn.delete(key)
    }

    /// What was known of a layout is so no more where one of its records is changed.
    fn note_extents(&mut self, key: &Bytes) -> Result<()> {
        if self.keys().tag_in(key).is_ok_and(|tag| tag == Tag::Extents) {
            self.laid.insert(InodeId(self.keys().number_in(key)?), None);
        }
        Ok(())
    }

    /// Where a listing changes what another mount's tree is followed in, keeps what that tree has there.
    fn keep_beneath(&mut self, key: &Bytes) -> Result<()> {
        let is_kept = self.is_import && self.shared.settings.follows;
        if !is_kept || !self.keys().tag_in(key)?.is_of_the_tree() {
            return Ok(());
        }
        let beneath = self.keys().beneath(key);
        if self.txn.get(&beneath)?.is_none() {
            let value = Beneath(self.txn.get(key)?);
            self.txn.put(beneath, value.encode())?;
        }
        Ok(())
    }

    pub(crate) fn put_inode(&mut self, ino: InodeId, inode: &Inode) -> Result<()> {
        self.shared.clones.note_inode(ino, inode);
        self.tell_of_inode(ino, false);
        self.put(self.keys().inode(ino), inode.encode())
    }

    pub(crate) fn put_dentry(&mut self, parent: InodeId, name: &[u8], dentry: Dentry) -> Result<()> {
        self.touch_name(parent, name);
        self.put(self.keys().dentry(parent, name), dentry.encode())
    }

    pub(crate) fn delete_dentry(&mut self, parent: InodeId, name: &[u8]) -> Result<()> {
        self.touch_name(parent, name);
        self.delete(self.keys().dentry(parent, name))
    }

    pub(crate) fn put_claim(&mut self, claim: &Claim) -> Result<()> {
        self.has_claimed = true;
        self.shared.claimed.note(claim.key.as_str());
        self.touch_key(claim.key.as_str());
        self.put(self.keys().claim(claim.key.as_str()), claim.encode())
    }

    pub(crate) fn delete_claim(&mut self, key: &str) -> Result<()> {
        self.touch_key(key);
        self.let_go_of(key)
    }

    /// Deletes the claim to a key at which nothing changed, so that what a listing under way tells of it still holds.
    pub(crate) fn let_go_of(&mut self, key: &str) -> Result<()> {
        self.delete(self.keys().claim(key))
    }

    pub(crate) fn put_import_state(&mut self, directory: InodeId, state: &ImportState) -> Result<()> {
        self.put(self.keys().import(directory), state.encode())
    }

    /// Counts inodes and bytes of files that come and go.
    pub(crate) fn count(&mut self, inodes: i64, bytes: i64) -> Result<()> {
        if inodes == 0 && bytes == 0 {
            return Ok(());
        }
        let mut counters = self.counters()?;
        counters.inodes = counters.inodes.saturating_add_signed(inodes);
        counters.bytes = counters.bytes.saturating_add_signed(bytes);
        self.put(self.keys().counters(), counters.encode())
    }

    /// Takes `count` inode numbers in a row that were never used.
    pub(crate) fn take_numbers(&mut self, count: u64) -> Result<u64> {
        let mut counters = self.counters()?;
        let first = counters.next_ino.max(self.shared.first_number.load(Ordering::Relaxed));
        counters.next_ino = first + count;
        self.put(self.keys().counters(), counters.encode())?;
        Ok(first)
    }

    /// The generation of a file's next content: one that no content had which was lost with the process that served the tree before,
    /// and which its guests may know of.
    pub(crate) fn next_generation(&self, inode: &Inode) -> u64 {
        (inode.generation + 1).max(self.shared.first_number.load(Ordering::Relaxed))
    }

    /// The next inode number for something made in `directory`, from its run. The caller puts the directory.
    pub(crate) fn next_ino(&mut self, directory: &mut Inode) -> Result<InodeId> {
        /// Numbers set aside at once: a page of dentries' worth, and 2^64 of them last for ever.
        const RUN: u64 = 64;
        let first = self.shared.first_number.load(Ordering::Relaxed);
        if directory.run.next >= directory.run.end || directory.run.next < first {
            directory.run.next = self.take_numbers(RUN)?;
            directory.run.end = directory.run.next + RUN;
        }
        directory.run.next += 1;
        Ok(InodeId(directory.run.next - 1))
    }

    /// Notes that a directory's entries were changed through Forebay: times, and that it is here to stay.
    pub(crate) fn put_changed_directory(&mut self, ino: InodeId, mut directory: Inode) -> Result<()> {
        directory.mtime = self.now;
        directory.ctime = self.now;
        directory.kept = true;
        self.put_inode(ino, &directory)
    }
}
