//! Giving a file new content.

use std::cell::LazyCell;
use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::Ordering;

use forebay_core::{Attributes, Blob, Difference, Error, ErrorKind, FileLayout, InodeId, Result, Timestamp};

use super::LocalTree;
use crate::records::{Change, Records, session_of};
use crate::schema::{HolderState, Inode, Intent};

/// What [`super::Tree::commit_layout`] and [`super::Tree::relocate`] are told.
#[derive(Debug, Clone)]
pub(super) struct Content {
    /// The generation that the caller started from.
    pub(super) expected: u64,
    pub(super) layout: FileLayout,
    /// When the content changed; `None` when only its place did.
    pub(super) mtime: Option<Timestamp>,
    /// The file whose bytes the layout shares.
    pub(super) lender: Option<InodeId>,
    /// Whether what was asked of the store to bring to the file's own path may still come.
    pub(super) awaits: bool,
}

impl LocalTree {
    /// Counts what may have brought bytes of files elsewhere: as long as it says the same, a file of one generation has the layout that
    /// it had when it was asked for after this.
    pub fn relocations(&self) -> u64 {
        let relocations = self.shared.relocations.load(Ordering::SeqCst);
        // One that is counted may still be under way.
        self.committer.pass();
        relocations
    }
}

/// As [`super::Tree::commit_layout`].
pub(super) fn commit_layout(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    content: &Content,
) -> Result<Attributes> {
    let mut inode = change.file(ino)?;
    let conflict = |why: &str| Err(Error::new(ErrorKind::Conflict, format!("inode {ino} {why}")));
    if inode.generation != content.expected {
        return conflict(&format!("has generation {}, not {}", inode.generation, content.expected));
    }
    // The mover's own intents are its to end: its copy may be on the way.
    let intent = change.intent(ino)?.filter(|intent| intent.copies.is_none());
    let stored = change.stored(ino, &inode)?;
    let old = change.resolve(stored.layout.clone(), inode.home.as_ref())?;
    // What the caller started from may name objects that were moved since.
    let layout = change.resolve(content.layout.clone(), inode.home.as_ref())?;
    let lent = lent(change, content.lender)?;
    if content.lender.is_some() {
        change.reserve(ino, layout.size())?;
    }
    let added = added(&old, &layout);
    let known = LazyCell::new(|| {
        let keys = added.iter().map(|blob| blob.key.as_str()).collect();
        old.blobs_at(&keys).chain(&lent).collect::<HashSet<&Blob>>()
    });
    let known = |blob: &Blob| known.contains(blob);
    if !change.has_segments(added.iter().copied(), known) {
        return conflict("takes bytes of a segment that was compacted");
    }
    if change.session != change.shared.session && has_lost(change, &added, known)? {
        let fact = format!(
            "inode {ino} would have bytes of a session that ended: this host was cut off for too long"
        );
        return Err(Error::new(ErrorKind::Stale, fact));
    }
    let Some(home) = new_home(&inode, known, intent.as_ref(), &added) else {
        return conflict("was moved: its layout is based on an object that is not its own any more");
    };
    if let (Some(intent), Some(_)) = (&intent, content.mtime)
        && names_what_may_be_gone(&layout, intent)
    {
        return conflict("is based on an object that a write may have replaced of which nobody was told");
    }
    if content.mtime.is_none() {
        change.note_relocation();
    }
    let before = change.replace_stored((ino, &mut inode), &stored, &layout, home)?;
    if let Some(intent) = &intent {
        end_intent(change, (ino, intent), content, &layout)?;
    }
    if layout.single_blob().is_some_and(|blob| change.shared.aside.has(&blob.key)) {
        change.queue_move(ino)?;
    }
    if let Some(before) = before {
        give_up(change, (ino, &mut inode), &before, &layout)?;
    }
    if let Some(mtime) = content.mtime {
        inode.generation = change.next_generation(&inode);
        change.tell_of_inode(ino, true);
        inode.mtime = mtime;
        inode.note_since(change.now.seconds);
        // The change was made when the content was, not now; utimes may have set an mtime that is still to come.
        inode.ctime = inode.ctime.max(mtime.min(change.now));
        change.shared.quotas.release(ino);
    }
    change.put_inode(ino, &inode)?;
    change.settle_home(ino, &inode)?;
    Ok(inode.attributes(ino))
}

/// Ends an intent where the commit tells what came of it.
fn end_intent(
    change: &mut Change<'_, '_>,
    (ino, intent): (InodeId, &Intent),
    content: &Content,
    layout: &FileLayout,
) -> Result<()> {
    let is_there = layout.blobs_at(&BTreeSet::from([intent.key.as_str()])).next().is_some();
    // What was asked of the store may be there all the same, or on its way: the intent tells then that it is older. Who
    // brings bytes elsewhere has asked for nothing since he settled it; another mount may have.
    let may_come = content.awaits || change.shared.holds.is_others(ino, change.session);
    if is_there || !(content.mtime.is_some() || may_come) || intent.announced().is_none() {
        change.end_intent(ino, intent)?;
    }
    if !is_there {
        // The mover tries again.
        change.queue_move(ino)?;
    }
    Ok(())
}

/// The blobs of the extents that a file did not have before.
fn added<'a>(old: &'a FileLayout, layout: &'a FileLayout) -> Vec<&'a Blob> {
    let extents = layout.extents().differences(old.extents());
    let is_new = |difference| match difference {
        Difference::Old(extent) => extent.blob(),
        Difference::New(_) => None,
    };
    extents.filter_map(is_new).collect()
}

/// Whether a layout that another mount commits has owned blobs that may be gone: of a session that ended, and referred to by
/// no file.
fn has_lost(change: &Change<'_, '_>, added: &[&Blob], is_known: impl Fn(&Blob) -> bool) -> Result<bool> {
    let owned: HashSet<&Blob> = added.iter().copied().filter(|blob| blob.is_owned()).collect();
    for blob in owned.into_iter().filter(|blob| !is_known(blob)) {
        let is_referred = change.references(blob.key.as_str())?.is_some_and(|record| record.count > 0);
        if !is_referred && session_of(&blob.key).is_some_and(|session| !change.shared.is_living(session)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a layout has bytes of the very object that an intent is to replace, and nothing of what it announces.
fn names_what_may_be_gone(layout: &FileLayout, intent: &Intent) -> bool {
    let key = BTreeSet::from([intent.key.as_str()]);
    let mut there = layout.blobs_at(&key).peekable();
    there.peek().is_some() && there.all(|blob| Some(&blob.version) == intent.replaces.as_ref())
}

/// The plain objects and segments that `lender` may lend: those in its layout that stay. One that is about to be replaced or deleted
/// may go before it is known to be lent.
fn lent(change: &Change<'_, '_>, lender: Option<InodeId>) -> Result<Vec<Blob>> {
    let Some(lender) = lender else { return Ok(Vec::new()) };
    let inode = change.file(lender)?;
    let layout = change.layout(lender, &inode)?;
    let blobs: HashSet<&Blob> = layout.blobs().collect();
    let mut lent = Vec::new();
    for blob in blobs.into_iter().filter(|blob| !blob.is_owned() || blob.is_segment()) {
        let claim = change.claim(blob.key.as_str())?.map(|claim| claim.state);
        let stays = matches!(claim, None | Some(HolderState::Held(_)));
        if stays {
            lent.push(blob.clone());
        }
    }
    Ok(lent)
}

/// The plain object that is the file's after the commit; `None` when what it `added` is in one that it may not use.
fn new_home(
    inode: &Inode,
    is_known: impl Fn(&Blob) -> bool,
    intent: Option<&Intent>,
    added: &[&Blob],
) -> Option<Option<Blob>> {
    let mut written = None;
    for blob in added.iter().copied().filter(|blob| !blob.is_owned()) {
        if inode.home.as_ref() != Some(blob) && !is_known(blob) {
            let is_placed = intent.is_some_and(|intent| intent.key == blob.key);
            if !is_placed || written.is_some_and(|other| other != blob) {
                return None;
            }
            written = Some(blob);
        }
    }
    Some(written.or(inode.home.as_ref()).cloned())
}

/// Queues the plain object that was the file's for deletion, unless it was replaced in place, is still used, or stands
/// at the file's own path, where it stays until the next whole content replaces it: other tools never see a gap.
fn give_up(
    change: &mut Change<'_, '_>,
    (ino, inode): (InodeId, &mut Inode),
    before: &Blob,
    layout: &FileLayout,
) -> Result<()> {
    let is_used = layout.plain_objects().any(|blob| blob == before);
    let home = inode.home.as_ref();
    if home == Some(before) {
        let stands = inode.nlink > 0 && change.key_of(ino, inode)?.as_deref() == Some(before.key.as_str());
        if is_used || stands {
            return Ok(());
        }
        inode.home = None;
        return change.doom_plain(before);
    }
    if home.is_some_and(|home| home.key == before.key) {
        return Ok(());
    }
    if is_used {
        let message = format!("inode {ino} cannot use the object `{}` beside one at another key", before.key);
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    change.doom_plain(before)
}
