//! `LocalTree` as a [`Tree`]: what has to be listed first, then one transaction or one look.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{
    Attributes, Error, ErrorKind, FileKind, FileLayout, InodeId, ObjectKey, Result, Timestamp,
};
use tokio::time::Instant;

use super::commit_layout::{Content, commit_layout};
use super::local::LocalTree;
use super::place::{Step, place};
use super::{
    Blocker, CloneGuide, Cloned, Created, DirectoryEntry, DirectoryPage, Existing, Lock, LockAnswer,
    LockRange, Lookup, NewInode, OutsideChanges, Placement, Removed, RenameMode, SegmentPin, SetAttributes,
    Statistics, Tree, XattrMode, clone, create, following, link, quota, remove_directory, rename, segments,
    set_attributes, unlink, xattr,
};
use crate::mover::{Settled, Unplaced};
use crate::records::{Change, Look, Records, check_name, owned_key};
use crate::schema::{Inode, Intent, UploadRecord};

/// Most entries in one page.
const MOST_ENTRIES: usize = 4096;
/// How often `place` has something to wait for before it takes an owned blob.
const MOST_STEPS: u32 = 8;
/// How long `place` waits for objects that are copied away or deleted before it takes an owned blob: more than what one
/// small copy and a deletion take, and much less than the 30 s that a writer waits.
const PATIENCE: Duration = Duration::from_secs(2);

fn look_up(look: &Look<'_, '_>, parent: InodeId, name: &[u8]) -> Result<Lookup> {
    let Some(entry) = look.dentry(parent, name)? else {
        look.directory(parent)?;
        return Ok(Lookup::Miss);
    };
    Ok(Lookup::Found(look.inode(entry.ino)?.attributes(entry.ino)))
}

fn read_page(look: &Look<'_, '_>, ino: InodeId, after: Option<&[u8]>, limit: usize) -> Result<DirectoryPage> {
    look.directory(ino)?;
    let mut found = look.entries(ino, after, limit + 1)?;
    let complete = found.len() <= limit;
    found.truncate(limit);
    let keys: Vec<Bytes> = found.iter().map(|(_, entry)| look.keys.inode(entry.ino)).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    let inodes = look.reads().get_many(&keys)?;
    let mut entries = Vec::with_capacity(found.len());
    for ((name, entry), inode) in found.into_iter().zip(inodes) {
        let missing = || Error::corrupt(format!("inode {} has a name and no record", entry.ino));
        let inode = crate::schema::Inode::decode(inode.ok_or_else(missing)?)?;
        entries.push(DirectoryEntry { name, attributes: inode.attributes(entry.ino) });
    }
    Ok(DirectoryPage { entries, complete })
}

#[async_trait]
impl Tree for LocalTree {
    async fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Lookup> {
        check_name(name)?;
        if let Some(importer) = &self.importer {
            importer.ensure_name(parent, name).await?;
        }
        self.look(|look| look_up(look, parent, name)).await
    }

    fn lookup_now(&self, parent: InodeId, name: &[u8]) -> Option<Result<Lookup>> {
        if let Err(error) = check_name(name) {
            return Some(Err(error));
        }
        if !self.is_ready(parent) {
            return None;
        }
        self.look_now(|look| look_up(look, parent, name))
    }

    async fn attributes(&self, ino: InodeId) -> Result<Attributes> {
        self.look(|look| look.inode(ino).map(|inode| inode.attributes(ino))).await
    }

    fn attributes_now(&self, ino: InodeId) -> Option<Result<Attributes>> {
        self.look_now(|look| look.inode(ino).map(|inode| inode.attributes(ino)))
    }

    async fn read_directory(
        &self,
        ino: InodeId,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<DirectoryPage> {
        if after.is_none() {
            self.walk_on(ino);
        }
        self.ensure_listed(ino).await?;
        let limit = limit.clamp(1, MOST_ENTRIES);
        self.look(|look| read_page(look, ino, after, limit)).await
    }

    async fn parent(&self, ino: InodeId) -> Result<InodeId> {
        self.look(|look| look.inode(ino).map(|inode| inode.parent)).await
    }

    async fn layout(&self, ino: InodeId) -> Result<(FileLayout, u64)> {
        let (inode, layout) = self.laid(ino).await?;
        Ok((layout, inode.generation))
    }

    async fn files_after(&self, ino: InodeId, limit: usize) -> Result<Vec<(InodeId, FileLayout)>> {
        let limit = limit.clamp(1, MOST_ENTRIES);
        self.look(|look| following::files_after(look, ino, limit)).await
    }

    async fn read_link(&self, ino: InodeId) -> Result<Bytes> {
        let inode = self.look(|look| look.inode(ino)).await?;
        match inode.kind {
            FileKind::Symlink => Ok(inode.target),
            _ => Err(Error::invalid(format!("inode {ino} is not a symlink"))),
        }
    }

    async fn create(
        &self,
        parent: InodeId,
        name: &[u8],
        new: NewInode,
        existing: Existing,
    ) -> Result<(Attributes, bool)> {
        self.check_writable()?;
        self.ensure_listed(parent).await?;
        let (name, is_directory) = (Bytes::copy_from_slice(name), new.kind == FileKind::Directory);
        let made = self.change(move |change| create::create(change, parent, &name, &new, existing)).await?;
        if let (true, Some(importer)) = (is_directory, &self.importer) {
            importer.inherit(made.0.ino, parent);
        }
        Ok(made)
    }

    async fn create_opened(
        &self,
        parent: InodeId,
        name: &[u8],
        new: NewInode,
        existing: Existing,
    ) -> Result<Created> {
        let (attributes, is_new) = self.create(parent, name, new, existing).await?;
        // Of a new name the listing has told that there is no object.
        let (layout, generation) = self.count_opener(attributes.ino, !is_new).await?;
        Ok(Created { attributes, is_new, layout, generation })
    }

    async fn link(&self, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        self.check_writable()?;
        self.ensure_listed(parent).await?;
        let name = Bytes::copy_from_slice(name);
        self.change(move |change| link::link(change, ino, parent, &name)).await
    }

    async fn unlink(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>> {
        self.check_writable()?;
        self.ensure_listed(parent).await?;
        let name = Bytes::copy_from_slice(name);
        self.change(move |change| unlink::unlink(change, parent, &name)).await
    }

    async fn remove_directory(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>> {
        self.check_writable()?;
        self.ensure_below(parent, name).await?;
        let name = Bytes::copy_from_slice(name);
        self.change(move |change| remove_directory::remove_directory(change, parent, &name)).await
    }

    async fn rename(
        &self,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        mode: RenameMode,
    ) -> Result<Option<Removed>> {
        self.check_writable()?;
        // Of two directories that are at fault, the first is named.
        self.look(|look| look.directory(from.0)).await?;
        self.ensure_listed(from.0).await?;
        self.ensure_below(to.0, to.1).await?;
        let (from, to) = ((from.0, Bytes::copy_from_slice(from.1)), (to.0, Bytes::copy_from_slice(to.1)));
        let mut counted = Vec::new();
        let renamed = rename::rename_counted(self, &from, &to, mode, &mut counted).await;
        for directory in counted {
            self.end_count(directory).await?;
        }
        renamed
    }

    async fn set_attributes(&self, ino: InodeId, changes: SetAttributes) -> Result<Attributes> {
        self.change(move |change| set_attributes::set_attributes(change, ino, &changes)).await
    }

    async fn accessed(&self, ino: InodeId, atime: Timestamp) -> Result<()> {
        let is_due = |look: &Look<'_, '_>| {
            Ok(look.find(ino)?.is_some_and(|inode| inode.attributes(ino).access_is_due(atime)))
        };
        match self.look(is_due).await? {
            true => self.change(move |change| set_attributes::accessed(change, ino, atime)).await,
            false => Ok(()),
        }
    }

    async fn xattr(&self, ino: InodeId, name: &[u8]) -> Result<Bytes> {
        self.look(|look| xattr::get(look, ino, name)).await
    }

    async fn xattrs(&self, ino: InodeId) -> Result<Vec<Bytes>> {
        self.look(|look| xattr::list(look, ino)).await
    }

    async fn set_xattr(&self, ino: InodeId, name: &[u8], value: Bytes, mode: XattrMode) -> Result<()> {
        let name = Bytes::copy_from_slice(name);
        self.change(move |change| xattr::set(change, ino, &name, &value, mode)).await
    }

    async fn remove_xattr(&self, ino: InodeId, name: &[u8]) -> Result<()> {
        let name = Bytes::copy_from_slice(name);
        self.change(move |change| xattr::remove(change, ino, &name)).await
    }

    async fn opened(&self, ino: InodeId) -> Result<(FileLayout, u64)> {
        self.count_opener(ino, true).await
    }

    async fn closed(&self, ino: InodeId) -> Result<()> {
        if self.shared.settings.serves {
            match self.shared.guests.closed(self.asking(), ino) {
                None => return Ok(()),
                Some(true) => self.let_go(ino, self.asking()).await?,
                Some(false) => {}
            }
        }
        if !self.shared.forget_opener(ino) || self.shared.settings.read_only {
            return Ok(());
        }
        self.shared.quotas.release(ino);
        // Who takes its last name away, and found it open, has done so by then.
        self.committer.pass();
        let gone = self.look(|look| Ok(look.find(ino)?.is_none_or(|inode| inode.nlink > 0))).await?;
        if gone {
            return Ok(());
        }
        let session = self.shared.session;
        self.change(move |change| change.free_orphan(session, ino)).await
    }

    async fn lock(&self, ino: InodeId, lock: Lock, waits: bool) -> Result<LockAnswer> {
        self.set_lock(ino, lock, waits).await
    }

    async fn blocker(&self, ino: InodeId, lock: Lock) -> Result<Option<Blocker>> {
        self.find_blocker(ino, lock).await
    }

    async fn unlock(&self, ino: InodeId, owner: u64, range: LockRange) -> Result<()> {
        self.shared.locks.unlock(self.asking(), ino, owner, range);
        Ok(())
    }

    async fn reserve(&self, ino: InodeId, size: u64) -> Result<()> {
        if self.shared.quotas.is_empty() {
            return Ok(());
        }
        self.change(move |change| change.reserve(ino, size)).await
    }

    async fn place(&self, ino: InodeId, seals: bool) -> Result<Placement> {
        let (mut gone, until, session) = (None, Instant::now() + PATIENCE, self.asking());
        // What it was at before is over. What another mount is at is waited for, and then this one goes elsewhere.
        self.shared.holds.release(ino, session);
        let mut is_late = !self.shared.holds.free(ino, session, until).await;
        let mut in_doubt = None;
        for step in 1..=MOST_STEPS {
            let (key, token) = (owned_key(session, &self.fresh_name()), self.fresh_name());
            let (is_last, lost) = (step == MOST_STEPS || is_late, gone.clone());
            let before = in_doubt.clone();
            let mut unplaced = Unplaced::new(self.mover.clone(), ino, &token);
            let attempt = move |change: &mut Change<'_, '_>| {
                let is_last = is_last || change.shared.holds.is_others(ino, session);
                let step =
                    place(change, ino, (&key, &token, seals), (is_last, lost.as_ref()), before.as_ref())?;
                if change.shared.settings.serves
                    && let Step::Placed { placement: Placement::Own { .. }, .. } = step
                {
                    // Here, where one comes after another.
                    change.shared.holds.take(ino, session);
                }
                Ok(step)
            };
            let step = self.change(attempt).await?;
            if !matches!(step, Step::Placed { .. }) {
                unplaced.forget();
            }
            match (step, &self.mover) {
                (Step::Placed { placement, is_first }, _) => {
                    // On disk before anything is written: what is overwritten, what nobody else would ever find, and
                    // that the key is free. Else what is written there would be somebody else's after a crash, and stay
                    // when the file goes on. A file's first content may be: it is found again at the file's path, unless
                    // that led elsewhere. It waits, too, while another host may have the volume.
                    let left = self.shared.names_left.pending();
                    let may_lead_elsewhere =
                        left.is_some() || self.shared.prefixes_freed.load(Ordering::SeqCst) > 0;
                    if !is_first || may_lead_elsewhere || !self.committer.is_sure() {
                        self.committer.sync().await?;
                        left.inspect(|left| self.shared.names_left.synced(*left));
                    }
                    unplaced.forget();
                    return Ok(placement);
                }
                (Step::Unsettled, Some(mover)) => match mover.settle(ino, until).await? {
                    Settled::Over | Settled::Changed => {}
                    Settled::Copying => is_late = true,
                    Settled::InDoubt(intent) => in_doubt = Some(intent),
                },
                (Step::Doomed(key), Some(mover)) => is_late |= !mover.delete_doomed(&key, until).await?,
                (Step::Lent(blob), Some(mover)) => match mover.move_lent(&blob, until).await? {
                    Some(is_there) => gone = (!is_there).then_some(blob),
                    None => is_late = true,
                },
                (_, None) => return Err(Error::bug("a tree without a bucket has an intent")),
            }
        }
        Err(Error::new(ErrorKind::Unavailable, format!("inode {ino} is written by another")))
    }

    async fn settle(&self, ino: InodeId) -> Result<()> {
        self.shared.holds.release(ino, self.asking());
        if self.shared.holds.is_held(ino) {
            // Another mount is at it, and tells.
            return Ok(());
        }
        let intent = self.look(move |look| look.intent(ino)).await?;
        if let (Some(mover), Some(Intent { copies: None, .. })) = (&self.mover, intent) {
            mover.settle_ended(ino).await?;
        }
        Ok(())
    }

    async fn doubt(&self, ino: InodeId) -> Result<()> {
        self.shared.holds.release(ino, self.asking());
        match &self.mover {
            Some(mover) if !self.shared.holds.is_held(ino) => mover.doubt_write(ino).await,
            _ => Ok(()),
        }
    }

    async fn is_in_doubt(&self, ino: InodeId) -> Result<bool> {
        match &self.mover {
            Some(mover) => mover.awaits_write(ino).await,
            None => Ok(false),
        }
    }

    fn fresh_blob(&self) -> ObjectKey {
        owned_key(self.shared.session, &self.fresh_name())
    }

    async fn packs(&self, ino: InodeId) -> Result<bool> {
        self.look(|look| segments::packs(look, ino)).await
    }

    async fn has_object(&self, ino: InodeId) -> Result<bool> {
        self.look(|look| look.file(ino).map(|inode| inode.home.is_some() && inode.nlink > 0)).await
    }

    fn fresh_segment(&self) -> SegmentPin {
        SegmentPin::new(&self.shared.segments, self.shared.session, &self.fresh_name())
    }

    async fn is_referred(&self, key: &ObjectKey) -> Result<bool> {
        self.look(|look| Ok(look.references(key.as_str())?.is_some_and(|record| record.count > 0))).await
    }

    async fn upload_started(&self, key: &ObjectKey, id: &str) -> Result<()> {
        let record = UploadRecord { key: key.clone(), id: id.to_owned() };
        self.change(move |change| change.put(change.upload_key(&record.id), record.encode())).await
    }

    async fn upload_ended(&self, id: &str) -> Result<()> {
        let id = id.to_owned();
        self.change(move |change| change.delete(change.upload_key(&id))).await
    }

    async fn commit_layout(
        &self,
        ino: InodeId,
        expected: u64,
        layout: FileLayout,
        mtime: Timestamp,
    ) -> Result<Attributes> {
        self.check_writable()?;
        self.commit(ino, Content { expected, layout, mtime: Some(mtime), lender: None, awaits: false }).await
    }

    async fn commit_shared(
        &self,
        ino: InodeId,
        expected: u64,
        layout: FileLayout,
        mtime: Timestamp,
        lender: InodeId,
    ) -> Result<Attributes> {
        self.check_writable()?;
        self.commit(
            ino,
            Content { expected, layout, mtime: Some(mtime), lender: Some(lender), awaits: false },
        )
        .await
    }

    async fn clone_tree(
        &self,
        source: InodeId,
        to: (InodeId, &[u8]),
        guide: &dyn CloneGuide,
    ) -> Result<Cloned> {
        self.check_writable()?;
        self.ensure_listed(to.0).await?;
        clone::clone_tree(self, source, (to.0, Bytes::copy_from_slice(to.1)), guide).await
    }

    async fn relocate(&self, ino: InodeId, expected: u64, layout: FileLayout) -> Result<()> {
        let awaits = self.is_in_doubt(ino).await?;
        self.commit(ino, Content { expected, layout, mtime: None, lender: None, awaits }).await.map(|_| ())
    }

    async fn sync(&self) -> Result<()> {
        self.committer.sync().await
    }

    async fn statistics(&self) -> Result<Statistics> {
        let (counters, quota) =
            self.look(|look| Ok((look.counters()?, quota::read(look, InodeId::ROOT)?))).await?;
        Ok(Statistics { bytes: counters.bytes, inodes: counters.inodes, quota })
    }

    async fn refresh(&self, ino: InodeId) -> Result<()> {
        self.look(|look| look.directory(ino)).await?;
        if let Some(importer) = &self.importer {
            importer.forget_all();
        }
        self.ensure_listed(ino).await
    }

    fn outside(&self) -> &OutsideChanges {
        &self.shared.outside
    }

    async fn close(&self) -> Result<()> {
        self.shut_down().await
    }

    fn local(&self) -> Option<&LocalTree> {
        Some(self)
    }
}

impl LocalTree {
    /// Counts who opens a file, and tells what it holds. If it `may_begin`, and nobody else has it open, the first content that a
    /// mount put and did not record is looked for: found later, it would be taken for newer than what is written until then.
    async fn count_opener(&self, ino: InodeId, may_begin: bool) -> Result<(FileLayout, u64)> {
        if self.shared.settings.serves {
            self.shared.guests.opened(self.asking(), ino);
        }
        *self.shared.openers.lock().entry(ino).or_default() += 1;
        // Counted first: an unlink that runs before this look has freed the inode, one that runs after has not.
        let found = self.content_of(ino, may_begin && !self.shared.settings.read_only).await;
        if found.is_err() {
            // An unlink may have found it open meanwhile, and a session may have ended with all that it had open.
            self.closed(ino).await.ok();
        }
        found
    }

    async fn content_of(&self, ino: InodeId, may_begin: bool) -> Result<(FileLayout, u64)> {
        let (inode, layout) = self.laid(ino).await?;
        let (found, is_blank) = ((layout, inode.generation), inode.is_blank());
        let Some(importer) = self.importer.as_ref().filter(|_| is_blank) else { return Ok(found) };
        let handed_out = &self.shared.handed_out_blank;
        if !may_begin {
            handed_out.lock().insert(ino);
            return Ok(found);
        }
        let _turn = self.beginning[ino.0 as usize % self.beginning.len()].lock().await;
        let is_awaited = !handed_out.lock().contains(&ino);
        if is_awaited && !importer.begin(ino).await? {
            handed_out.lock().insert(ino);
        }
        self.layout(ino).await
    }

    /// A file and where its bytes lie. What is read of many extents is known from then on, if it is open.
    async fn laid(&self, ino: InodeId) -> Result<(Inode, FileLayout)> {
        let at_hand = self.look(|look| {
            let inode = look.file(ino)?;
            let is_short = inode.further == 0 || self.shared.openers(ino) == 0;
            let is_at_hand = is_short || look.known(ino, &inode).is_some();
            let layout = if is_at_hand { Some(look.layout(ino, &inode)?) } else { None };
            Ok((inode, layout))
        });
        if let (inode, Some(layout)) = at_hand.await? {
            return Ok((inode, layout));
        }
        let awaited = self.shared.layouts.await_one(ino);
        self.committer.pass();
        let read = self.look(|look| {
            let inode = look.file(ino)?;
            let stored = look.stored(ino, &inode)?;
            let layout = look.resolve(stored.layout.clone(), inode.home.as_ref())?;
            Ok((inode, stored, layout))
        });
        let (inode, stored, layout) = read.await?;
        if inode.further > 0 {
            self.shared.layouts.learn(awaited, stored);
        }
        Ok((inode, layout))
    }

    async fn commit(&self, ino: InodeId, content: Content) -> Result<Attributes> {
        let committed = self.change_patiently(move |change| commit_layout(change, ino, &content)).await?;
        self.shared.holds.release(ino, self.asking());
        Ok(committed)
    }

    /// Lists a directory and, if `name` is a directory in it, that one: it may have to be known whether it is empty.
    async fn ensure_below(&self, parent: InodeId, name: &[u8]) -> Result<()> {
        self.ensure_listed(parent).await?;
        let entry = self.look(|look| look.dentry(parent, name)).await?;
        match entry {
            Some(entry) if entry.kind == FileKind::Directory => self.ensure_listed(entry.ino).await,
            _ => Ok(()),
        }
    }
}
