//! What a file consists of, and which owned blobs are referred to.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::Ordering;

use forebay_core::{Blob, Difference, FileLayout, InodeId, ObjectKey, Result, Version};

use super::access::borrowed;
use super::layouts::Stored;
use super::{Change, Records, session_of};
use crate::schema::{Deletion, Inode, Loan, Recut, References, encode_extents};

impl Change<'_, '_> {
    /// Replaces a file's layout, size and plain object; references, loans, further extents and counts follow. Returns
    /// the plain object that was the file's. The caller puts the inode.
    pub(crate) fn replace_layout(
        &mut self,
        (ino, inode): (InodeId, &mut Inode),
        layout: &FileLayout,
        home: Option<Blob>,
    ) -> Result<Option<Blob>> {
        self.note_relocation();
        let stored = self.stored(ino, inode)?;
        self.replace_stored((ino, inode), &stored, layout, home)
    }

    /// The same for who has read what is `stored`, and gives the file a new generation or notes that it was relocated.
    pub(crate) fn replace_stored(
        &mut self,
        (ino, inode): (InodeId, &mut Inode),
        stored: &Stored,
        layout: &FileLayout,
        home: Option<Blob>,
    ) -> Result<Option<Blob>> {
        let old = self.resolve(stored.layout.clone(), inode.home.as_ref())?;
        let layout = self.resolve(layout.clone(), home.as_ref())?;
        self.change_loans((&stored.layout, inode.home.as_ref()), (&layout, home.as_ref()))?;
        self.change_references(ino, &old, &layout)?;
        let before = std::mem::replace(&mut inode.home, home);
        let Recut { head, cuts, changed } = stored.cuts.recut(stored.layout.extents(), layout.extents());
        for (n, extents) in changed {
            self.put(self.keys().extents(ino, n), encode_extents(&extents))?;
        }
        let further = cuts.count();
        for n in further..inode.further {
            self.delete(self.keys().extents(ino, n))?;
        }
        self.charge_size(inode, layout.size())?;
        self.count(0, layout.size() as i64 - inode.size as i64)?;
        inode.size = layout.size();
        inode.extents = head;
        inode.further = further;
        if further > 0 {
            self.note_layout(ino, Stored { layout, cuts });
        }
        Ok(before)
    }

    /// Has those who have files open look where their bytes are.
    pub(crate) fn note_relocation(&self) {
        self.shared.relocations.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts the inode in at the plain objects of others that only `new` names, and out at those that only `old` does.
    /// Both come with the file's own object.
    fn change_loans(
        &mut self,
        old: (&FileLayout, Option<&Blob>),
        new: (&FileLayout, Option<&Blob>),
    ) -> Result<()> {
        let (old, new) = (borrowed(old.0, old.1), borrowed(new.0, new.1));
        let (of_old, of_new) = (HashSet::<_>::from_iter(&old), HashSet::<_>::from_iter(&new));
        for blob in new.iter().filter(|blob| !of_old.contains(blob)) {
            let loan = self.loan(blob)?.unwrap_or(Loan { blob: (*blob).clone(), count: 0, moved: None });
            self.put_loan(&Loan { count: loan.count + 1, ..loan })?;
        }
        for blob in old.iter().filter(|blob| !of_new.contains(blob)) {
            match self.loan(blob)? {
                Some(loan) if loan.count > 1 => self.put_loan(&Loan { count: loan.count - 1, ..loan })?,
                _ => self.delete(self.keys().loan(blob))?,
            }
        }
        Ok(())
    }

    /// Says that an owned copy is meant wherever layouts name a plain object that is lent. From here on the copy is
    /// what they hold.
    pub(crate) fn move_loan(&mut self, blob: &Blob, copy: &Blob) -> Result<()> {
        let Some(loan) = self.loan(blob)?.filter(|loan| loan.moved.is_none()) else { return Ok(()) };
        self.put_references(copy, loan.count)?;
        self.delete(self.keys().deletion(Deletion::UNCOMMITTED_MS, copy.key.as_str()))?;
        self.put_loan(&Loan { moved: Some(copy.clone()), ..loan })
    }

    /// Notes what other files make of a plain object.
    pub(crate) fn put_loan(&mut self, loan: &Loan) -> Result<()> {
        if loan.moved.is_some() {
            self.note_relocation();
        }
        self.put(self.keys().loan(&loan.blob), loan.encode())
    }

    /// Counts the inode in at the owned blobs that only `new` has, and out at those that only `old` has. A blob that
    /// nothing refers to any more is queued for deletion.
    fn change_references(&mut self, ino: InodeId, old: &FileLayout, new: &FileLayout) -> Result<()> {
        let (mut only_old, mut only_new) = (BTreeMap::new(), BTreeMap::new());
        for difference in old.extents().differences(new.extents()) {
            let (extent, blobs) = match difference {
                Difference::Old(extent) => (extent, &mut only_old),
                Difference::New(extent) => (extent, &mut only_new),
            };
            blobs.extend(extent.blob().filter(|blob| blob.is_owned()).map(|blob| (blob.key.as_str(), blob)));
        }
        let counts = self.counts(only_new.keys().chain(only_old.keys()).copied())?;
        let count = |key: &str| counts.get(key).copied().unwrap_or(0);
        // What no file refers to, this one does not.
        let referred = only_new.keys().copied().filter(|key| count(key) > 0).collect();
        let (known, kept) = (named(old, &referred), named(new, &only_old.keys().copied().collect()));
        for (key, blob) in only_new {
            if !known.contains(key) {
                let count = count(key);
                self.put_references(blob, count + 1)?;
                if blob.is_segment() {
                    self.join_segment(blob, ino, count == 0)?;
                }
                self.delete(self.keys().deletion(Deletion::UNCOMMITTED_MS, key))?;
            }
        }
        for (key, blob) in only_old {
            if kept.contains(key) {
                if blob.is_segment() {
                    self.loosen(blob)?;
                }
                continue;
            }
            let count = count(key);
            self.put_references(blob, count.saturating_sub(1))?;
            if blob.is_segment() {
                self.leave_segment(blob, ino, count <= 1)?;
            }
            if count <= 1 && self.is_gone {
                self.delete(self.keys().references(key))?;
            } else if count <= 1 {
                let due_ms = self.shared.now_ms().saturating_add(self.shared.settings.delete_delay_ms);
                self.queue_deletion(due_ms, Deletion { blob: blob.clone(), session: None })?;
            }
        }
        Ok(())
    }

    /// Notes that an owned blob is about to be written. The record of its deletion says by whom, and goes when a layout
    /// refers to it. Nobody is woken for it: it is left alone while this session lives.
    pub(crate) fn note_uncommitted(&mut self, key: &ObjectKey) -> Result<()> {
        let blob = Blob { key: key.clone(), version: Version::new(""), size: 0 };
        let session = Some(session_of(key).unwrap_or(self.shared.session));
        let record = self.keys().deletion(Deletion::UNCOMMITTED_MS, key.as_str());
        self.put(record, Deletion { blob, session }.encode())
    }

    /// Takes that back of a blob that was certainly not written and will not be.
    pub(crate) fn forget_uncommitted(&mut self, key: &ObjectKey) -> Result<()> {
        self.delete(self.keys().deletion(Deletion::UNCOMMITTED_MS, key.as_str()))
    }

    /// Notes how many inodes refer to an owned blob.
    pub(crate) fn put_references(&mut self, blob: &Blob, count: u64) -> Result<()> {
        let record = References { key: blob.key.clone(), count };
        self.put(self.keys().references(blob.key.as_str()), record.encode())
    }
}

/// Those of some keys at which a layout has blobs.
fn named<'a>(layout: &'a FileLayout, keys: &BTreeSet<&str>) -> BTreeSet<&'a str> {
    layout.blobs_at(keys).map(|blob| blob.key.as_str()).collect()
}
