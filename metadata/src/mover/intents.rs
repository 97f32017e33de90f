//! Writes to plain objects of which it is not known whether they happened.

use forebay_core::{Blob, ErrorKind, FileLayout, InodeId, ObjectKey, Result};
use forebay_io::object::{Authorship, ObjectInfo};
use tokio::time::Instant;

use super::Mover;
use super::deletions::after;
use super::moves::{discard, is_still};
use super::run::{PAGE, Tally};
use crate::kv::Durability;
use crate::records::{Change, Records, session_of};
use crate::schema::{Announced, HolderState, Inode, Intent, Tag};

/// Seconds that a store's clock may differ from this host's: past that, stores refuse what it has signed.
const CLOCKS_APART: u64 = 15 * 60;

impl Mover {
    /// Settles every intent there is: at start-up, when nobody can be writing.
    pub(crate) async fn settle_all(&self) -> Result<()> {
        loop {
            let keys = self.shared().keys;
            let (start, end) = keys.family(Tag::Intent);
            let found = self.look(move |look| look.reads().scan(&start, &end, PAGE)).await?;
            if found.is_empty() {
                return Ok(());
            }
            for (key, _) in found {
                let ino = InodeId(keys.number_in(&key)?);
                self.end_uploads(ino).await?;
                self.settle_intent(ino).await?;
            }
        }
    }

    /// Frees what a dead session has uploaded of what an intent announced. The store may have begun that and the session
    /// have died before it could note it, so uploads are looked for; an outsider's may be under way to the same key, so
    /// only those that were begun when the intent was made are taken.
    async fn end_uploads(&self, ino: InodeId) -> Result<()> {
        let intent = self.look(move |look| look.intent(ino)).await?;
        let Some(Intent { key, mark: Some(mark), .. }) = intent else { return Ok(()) };
        let found = match self.bucket().uploads_to(&key).await {
            // Azure's end by themselves, Google's are kept aside.
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(()),
            found => found?,
        };
        for upload in found {
            if upload.started.seconds.abs_diff(mark.made.seconds) <= CLOCKS_APART {
                self.bucket().abort_upload(&key, &upload.id).await?;
            }
        }
        Ok(())
    }

    /// Settles the intents of inodes that are gone or in the trash, which nobody is writing.
    pub(super) async fn settle_abandoned(&self) -> Result<Tally> {
        let keys = self.shared().keys;
        let (mut start, end) = keys.family(Tag::Intent);
        let mut tally = Tally::default();
        loop {
            let _turn = self.turn().await;
            let (from, to) = (start.clone(), end.clone());
            let page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = page.last() else { return Ok(tally) };
            start = after(last);
            for (key, value) in page {
                let ino = InodeId(keys.number_in(&key)?);
                if self.is_abandoned(ino).await? {
                    let intent = Intent::decode(value)?;
                    tally.add(self.settle_intent_of(ino, true, Some(&intent)).await.map(usize::from));
                }
            }
        }
    }

    /// Whether nobody is writing to an inode: it is gone or in the trash.
    async fn is_abandoned(&self, ino: InodeId) -> Result<bool> {
        let inode = self.look(move |look| look.find(ino)).await?;
        Ok(inode.is_none_or(|inode| inode.nlink == 0) && self.shared().openers(ino) == 0)
    }

    /// Whether a file has newer content than an intent of it announces.
    async fn is_outdone(&self, ino: InodeId, intent: &Intent) -> Result<bool> {
        let inode = self.look(move |look| look.find(ino)).await?;
        Ok(inode.is_some_and(|inode| intent.is_outdone(inode.generation)))
    }

    /// The same of those that name `key`: what is found there may be what such a file wrote last. Returns whether any named
    /// it. The caller holds the turn.
    pub(super) async fn settle_writes_to(&self, key: &ObjectKey) -> Result<bool> {
        let keys = self.shared().keys;
        let (mut start, end) = keys.family(Tag::Intent);
        let mut is_named = false;
        loop {
            let (from, to) = (start.clone(), end.clone());
            let page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = page.last() else { return Ok(is_named) };
            start = after(last);
            for (record, value) in page {
                let intent = Intent::decode(value)?;
                if intent.key == *key {
                    let ino = InodeId(keys.number_in(&record)?);
                    is_named = true;
                    if self.is_abandoned(ino).await? || self.is_outdone(ino, &intent).await? {
                        self.settle_intent_of(ino, true, Some(&intent)).await?;
                    }
                }
            }
        }
    }

    /// Finds out what came of an inode's intent and ends it; false where that cannot be known yet. The caller has the turn
    /// alone, since a copy may be on its way, or has made sure that there is none.
    pub(super) async fn settle_intent(&self, ino: InodeId) -> Result<bool> {
        self.settle_intent_of(ino, true, None).await
    }

    /// Settles what a writer announced and does not go on with, if that still stands. Where nothing came of it so far, it
    /// stands for as long as something may.
    pub(super) async fn settle_write(&self, ino: InodeId, intent: &Intent) -> Result<bool> {
        let _turn = self.copying_turn().await;
        self.settle_intent_of(ino, false, Some(intent)).await
    }

    async fn settle_intent_of(&self, ino: InodeId, may_be_copy: bool, only: Option<&Intent>) -> Result<bool> {
        let doubt = self.doubts().of(ino);
        let intent = self.look(move |look| look.intent(ino)).await?;
        let Some(intent) = intent else {
            self.doubts().end(ino, doubt.as_ref());
            return Ok(true);
        };
        if only.is_some_and(|only| *only != intent) {
            return Ok(false);
        }
        let now_ms = self.shared().now_ms();
        if intent.copies.is_some() && (!may_be_copy || self.doubts().holds(ino, &intent, now_ms)) {
            return Ok(false);
        }
        let found = match &intent.mark {
            Some(mark) => self.bucket().head_of(&intent.key, &mark.token).await?,
            // What lies there is somebody else's.
            None if doubt.as_ref().is_some_and(|doubt| doubt.is_unasked(&intent)) => None,
            None => self.bucket().head(&intent.key).await?.map(|found| (found, Authorship::Unknown)),
        };
        let is_unchanged = found.as_ref().map(|(found, _)| &found.version) == intent.replaces.as_ref();
        if only.is_some() && is_unchanged && self.doubts().still_awaits(ino, &intent, self.shared().now_ms())
        {
            return Ok(false);
        }
        let is_copy = match (&intent.copies, &found) {
            (Some(source), Some((found, _))) => self.is_copy(source, found).await?,
            _ => false,
        };
        let settle =
            move |change: &mut Change<'_, '_>| settle(change, ino, (&intent, is_copy), found.as_ref());
        self.transact(Durability::Buffered, settle).await?;
        self.doubts().end(ino, doubt.as_ref());
        Ok(true)
    }

    /// As `settle_intent`, for a writer that asks for a place. A copy under way is waited for `until` then; false where that
    /// is not enough, and the writer goes elsewhere. What a writer began is known by nobody but the store.
    pub(crate) async fn settle(&self, ino: InodeId, until: Instant) -> Result<bool> {
        let intent = self.look(move |look| look.intent(ino)).await?;
        if let Some(intent) = intent.filter(|intent| intent.copies.is_some()) {
            if self.doubts().holds(ino, &intent, self.shared().now_ms()) {
                return Ok(false);
            }
            let mover = self.clone();
            let settle = async move { mover.settle_intent(ino).await };
            return Ok(self.alone_until(until, "settle a copy", settle).await? == Some(true));
        }
        let _turn = self.copying_turn().await;
        self.settle_intent_of(ino, false, None).await
    }
}

/// The version from before means that nothing happened. Another one is, after a writer's intent, the file's content
/// now, whoever wrote it, unless newer content was committed since, or the file has that elsewhere; after the mover's, what
/// has the size of the copy: the same content where it is known to be that, else a new one. A file without a name takes only
/// what was written for it, and what was written for one that is gone follows it: anything else there is an outsider's.
fn settle(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    (intent, is_copy): (&Intent, bool),
    found: Option<&(ObjectInfo, Authorship)>,
) -> Result<()> {
    if change.intent(ino)?.as_ref() != Some(intent) {
        return Ok(());
    }
    change.end_intent(ino, intent)?;
    if intent.copies.is_some() && found.is_none() && session_of(&intent.key) == Some(change.shared.session) {
        // What stepped aside in this session: no copy of it is on its way.
        change.forget_uncommitted(&intent.key)?;
    }
    let inode = change.find(ino)?;
    let may_be_others = inode.as_ref().is_some_and(|inode| inode.nlink > 0);
    let found = found
        .filter(|(found, by)| {
            Some(&found.version) != intent.replaces.as_ref() && (may_be_others || *by != Authorship::Others)
        })
        .map(|(found, by)| (found, *by));
    match (found, inode, &intent.copies) {
        (Some((found, Authorship::Ours)), None, None) => change.doom_plain(&found.blob()),
        (Some((found, Authorship::Ours)), Some(inode), None) if intent.is_outdone(inode.generation) => {
            match is_at_home(change, ino, &inode, &found.key)? {
                true => change.stand(ino, inode, found.blob()),
                false => discard_older(change, ino, inode, &found.blob()),
            }
        }
        // Somebody else's at a path that was the file's once: the next listing shows it.
        (Some((found, by)), Some(inode), None)
            if (by == Authorship::Others || intent.is_outdone(inode.generation))
                && !is_at_home(change, ino, &inode, &found.key)? =>
        {
            change.resettle_home(ino, &inode)
        }
        (Some((found, Authorship::Ours)), Some(inode), None)
            if seals(change, ino, &inode, (intent, found))? =>
        {
            seal(change, ino, inode, found.blob())
        }
        (Some((found, _)), Some(inode), None) if change.outlives(ino, &inode, found)? => {
            change.stand(ino, inode, found.blob())
        }
        (Some((found, _)), Some(inode), None) => adopt(change, ino, inode, found),
        // An owned copy that nothing refers to is queued for deletion already.
        (Some((found, _)), inode, Some(source)) if !found.blob().is_owned() && found.size == source.size => {
            match inode {
                Some(inode) if is_still(change, ino, &inode, (source, &intent.key))? => match is_copy {
                    true => seal(change, ino, inode, found.blob()),
                    false => adopt(change, ino, inode, found),
                },
                inode => discard(change, ino, inode, &found.blob()),
            }
        }
        (_, Some(inode), _) => change.resettle_home(ino, &inode),
        _ => Ok(()),
    }
}

/// Whether a key is what a file's path spells, and no other file's.
fn is_at_home(change: &Change<'_, '_>, ino: InodeId, inode: &Inode, key: &ObjectKey) -> Result<bool> {
    let holder = match change.claim(key.as_str())?.map(|claim| claim.state) {
        Some(HolderState::Held(holder) | HolderState::Intended(holder)) => Some(holder),
        _ => None,
    };
    let is_free = holder.is_none_or(|holder| holder == ino);
    Ok(is_free && inode.nlink > 0 && change.key_of(ino, inode)?.as_deref() == Some(key.as_str()))
}

/// Has older content of a file go that came to a path which was its own then.
fn discard_older(change: &mut Change<'_, '_>, ino: InodeId, mut inode: Inode, found: &Blob) -> Result<()> {
    if inode.home.as_ref().is_some_and(|home| home.key == found.key) {
        // That was replaced.
        inode.home = None;
        change.put_inode(ino, &inode)?;
    }
    change.doom_plain(found)?;
    change.settle_home(ino, &inode)
}

/// Whether an object holds the very content that the file has, as an intent announced.
fn seals(
    change: &Change<'_, '_>,
    ino: InodeId,
    inode: &Inode,
    (intent, found): (&Intent, &ObjectInfo),
) -> Result<bool> {
    let content = Some(Announced { generation: inode.generation, seals: true });
    Ok(intent.announced() == content && change.layout(ino, inode)?.size() == found.size)
}

/// What the file holds lies in `found` from now on.
fn seal(change: &mut Change<'_, '_>, ino: InodeId, mut inode: Inode, found: Blob) -> Result<()> {
    let (layout, home) = (FileLayout::of_blob(found.clone()), Some(found.clone()));
    let before = change.replace_layout((ino, &mut inode), &layout, home)?;
    if let Some(before) = before.filter(|before| before.key != found.key) {
        change.doom_plain(&before)?;
    }
    if inode.nlink == 0 && change.shared.openers(ino) == 0 {
        // In the trash, or on its way there: the path is not its own any more.
        change.part_with_home(ino, &mut inode)?;
    }
    change.put_inode(ino, &inode)?;
    change.settle_home(ino, &inode)
}

fn adopt(change: &mut Change<'_, '_>, ino: InodeId, mut inode: Inode, found: &ObjectInfo) -> Result<()> {
    inode.generation += 1;
    inode.mtime = found.modified;
    inode.ctime = change.now;
    seal(change, ino, inode, found.blob())
}
