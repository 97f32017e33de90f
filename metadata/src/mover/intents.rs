//! Writes to plain objects of which it is not known whether they happened.

use forebay_core::{Blob, ErrorKind, FileLayout, InodeId, ObjectKey, Result};
use forebay_io::object::{Authorship, ObjectInfo, Scheme};
use futures::stream::{self, StreamExt, TryStreamExt};
use tokio::time::Instant;

use super::Mover;
use super::deletions::after;
use super::doubts::Asked;
use super::moves::{discard, is_still};
use super::run::{AT_ONCE, PAGE, Tally};
use crate::kv::{Durability, Pair};
use crate::records::{Change, Records, is_about_a_record, pass_over, readable, session_of};
use crate::schema::{Announced, HolderState, Inode, Intent, Tag};

/// Seconds that a store's clock may differ from this host's: past that, stores refuse what it has signed.
const CLOCKS_APART: u64 = 15 * 60;

/// Intents that are settled at once before anything is mounted: each takes requests to the store that answer in moments.
const SETTLED_AT_ONCE: usize = 32;

/// Whether an intent of which nothing has come yet is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Patience {
    /// It is.
    None,
    /// Not while it is known that the store did not answer, and may still do it.
    Known,
    /// Nor before it has been met like that for as long.
    Unknown,
}

/// What came of settling one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Settled {
    /// It is ended.
    Over,
    /// A copy of the mover's is, or may be, under way, or others had the turn all the time.
    Copying,
    /// It stands, for what a writer was not answered may still come.
    InDoubt(Intent),
    /// Another one stands by now.
    Changed,
}

impl Settled {
    fn is_over(&self) -> bool {
        *self == Self::Over
    }
}

impl Mover {
    /// Settles every intent there is: at start-up, when nobody can be writing but guests of the process before, who may be at what
    /// they announced. What a dead process asked of a store across a network may still come: nobody knows whether it was answered.
    /// One that cannot be read, or whose file cannot, stays, and keeps its key from others by its claim.
    pub(crate) async fn settle_all(&self) -> Result<()> {
        let keys = self.shared().keys;
        let has_guests = !self.shared().guests.expected().is_empty();
        let patience = match self.bucket().url().scheme {
            // What it asked of a disk ended with it.
            Scheme::File => Patience::None,
            _ => Patience::Unknown,
        };
        let (mut start, end) = keys.family(Tag::Intent);
        loop {
            let (from, to) = (start.clone(), end.clone());
            let found = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = found.last() else { return Ok(()) };
            start = after(last);
            let settle = |record| self.settle_of_before(record, has_guests, patience);
            let settled = stream::iter(found).map(settle).buffer_unordered(SETTLED_AT_ONCE);
            settled.map(pass_over).try_for_each(async |_| Ok(())).await?;
        }
    }

    /// Settles one of before this process.
    async fn settle_of_before(
        &self,
        (key, value): Pair,
        has_guests: bool,
        patience: Patience,
    ) -> Result<bool> {
        let ino = InodeId(self.shared().keys.number_in(&key)?);
        let intent = Intent::decode(value)?;
        if intent.copies.is_some() {
            return self.settle_copy_of_before(ino, &intent, patience).await;
        }
        let patience = match has_guests {
            true => Patience::Unknown,
            false => self.end_uploads(ino).await.map(|()| patience)?,
        };
        Ok(self.settle_intent_of(ino, false, (None, patience)).await?.is_over())
    }

    /// Settles a copy of a dead process that was made; one that may still come, when it cannot any more. What comes to an owned
    /// key is nobody else's.
    async fn settle_copy_of_before(&self, ino: InodeId, intent: &Intent, patience: Patience) -> Result<bool> {
        if patience == Patience::Unknown && session_of(&intent.key).is_none() {
            let found = self.find(intent).await?.map(|found| found.object.version);
            if found == intent.replaces {
                self.doubt(ino, &intent.key, Asked::Unanswered);
                return Ok(false);
            }
        }
        self.settle_intent(ino).await
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
            let settle = |record| self.settle_if_abandoned(record);
            let mut settling = stream::iter(page).map(settle).buffer_unordered(AT_ONCE);
            while let Some(settled) = settling.next().await {
                let is_away = settled.as_ref().is_err_and(|error| !is_about_a_record(error));
                tally.add(settled.map(usize::from));
                if is_away {
                    return Ok(tally);
                }
            }
        }
    }

    async fn settle_if_abandoned(&self, (key, value): Pair) -> Result<bool> {
        let ino = InodeId(self.shared().keys.number_in(&key)?);
        let is_left = self.is_abandoned(ino).await?;
        if is_left { self.settle_left(ino, &Intent::decode(value)?).await } else { Ok(false) }
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
    /// it, as each may that cannot be read. The caller holds the turn.
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
                let intent = readable(Intent::decode(value));
                is_named |= intent.as_ref().is_none_or(|intent| intent.key == *key);
                let Some(intent) = intent.filter(|intent| intent.key == *key) else { continue };
                let settle = async {
                    let ino = InodeId(keys.number_in(&record)?);
                    let is_left = self.is_abandoned(ino).await? || self.is_outdone(ino, &intent).await?;
                    if is_left { self.settle_left(ino, &intent).await } else { Ok(false) }
                };
                pass_over(settle.await)?;
            }
        }
    }

    /// Finds out what came of an inode's intent and ends it; false where that cannot be known yet. The caller has the turn
    /// alone, since a copy may be on its way, or has made sure that there is none.
    pub(super) async fn settle_intent(&self, ino: InodeId) -> Result<bool> {
        self.settle_intent_of(ino, true, (None, Patience::None)).await.map(|settled| settled.is_over())
    }

    /// Settles what nobody goes on with, and which may still come.
    async fn settle_left(&self, ino: InodeId, intent: &Intent) -> Result<bool> {
        self.settle_intent_of(ino, true, (Some(intent), Patience::Unknown))
            .await
            .map(|settled| settled.is_over())
    }

    /// Settles what a writer announced and does not go on with, if that still stands. Where nothing came of it so far, it
    /// stands for as long as something may.
    pub(super) async fn settle_write(&self, ino: InodeId, intent: &Intent) -> Result<bool> {
        let _turn = self.copying_turn().await;
        self.settle_intent_of(ino, false, (Some(intent), Patience::Unknown))
            .await
            .map(|settled| settled.is_over())
    }

    async fn settle_intent_of(
        &self,
        ino: InodeId,
        may_be_copy: bool,
        (only, patience): (Option<&Intent>, Patience),
    ) -> Result<Settled> {
        let doubt = self.doubts().of(ino);
        let intent = self.look(move |look| look.intent(ino)).await?;
        let Some(intent) = intent else {
            self.doubts().end(ino, doubt.as_ref());
            return Ok(Settled::Over);
        };
        if only.is_some_and(|only| *only != intent) {
            return Ok(Settled::Changed);
        }
        let now_ms = self.shared().now_ms();
        if intent.copies.is_some() && (!may_be_copy || self.doubts().holds(ino, &intent, now_ms)) {
            return Ok(Settled::Copying);
        }
        // What lies there is somebody else's than the mover's.
        let is_unasked = doubt.as_ref().is_some_and(|doubt| doubt.is_unasked(&intent));
        let found = if is_unasked { None } else { self.find(&intent).await? };
        let is_unchanged = found.as_ref().map(|found| &found.object.version) == intent.replaces.as_ref();
        let is_unknown = patience == Patience::Unknown;
        if is_unchanged
            && patience != Patience::None
            && (self.shared().holds.is_held(ino)
                || self.doubts().awaits(ino, &intent, self.shared().now_ms(), is_unknown))
        {
            return Ok(Settled::InDoubt(intent));
        }
        let is_copy = match (&intent.copies, &found) {
            (Some(source), Some(found)) => self.is_copy(source, &found.object).await?,
            _ => false,
        };
        let settle =
            move |change: &mut Change<'_, '_>| settle(change, ino, (&intent, is_copy), found.as_ref());
        self.transact(Durability::Buffered, settle).await?;
        self.doubts().end(ino, doubt.as_ref());
        Ok(Settled::Over)
    }

    /// What lies where an intent announced something.
    async fn find(&self, intent: &Intent) -> Result<Option<Found>> {
        let Some(mark) = &intent.mark else {
            let object = self.bucket().head(&intent.key).await?;
            return Ok(object.map(|object| Found { object, by: Authorship::Unknown, of: None }));
        };
        let found = self.bucket().head_of(&intent.key, &mark.token).await?;
        if let Some((_, Authorship::Others)) = &found {
            for earlier in &mark.earlier {
                let found = self.bucket().head_of(&intent.key, &earlier.token).await?;
                if let Some((object, by @ Authorship::Ours)) = found {
                    return Ok(Some(Found { object, by, of: Some(earlier.of) }));
                }
            }
        }
        Ok(found.map(|(object, by)| Found { object, by, of: mark.of }))
    }

    /// As `settle_intent`, for a writer that asks for a place. A copy under way is waited for `until` then, and so is the
    /// turn; where that is not enough, the writer goes elsewhere. What a writer began is known by nobody but the store.
    pub(crate) async fn settle(&self, ino: InodeId, until: Instant) -> Result<Settled> {
        let intent = self.look(move |look| look.intent(ino)).await?;
        if let Some(intent) = intent.filter(|intent| intent.copies.is_some()) {
            if self.doubts().holds(ino, &intent, self.shared().now_ms()) {
                return Ok(Settled::Copying);
            }
            let mover = self.clone();
            let settle = async move { mover.settle_intent(ino).await };
            let settled = self.alone_until(until, "settle a copy", settle).await? == Some(true);
            return Ok(if settled { Settled::Over } else { Settled::Copying });
        }
        match tokio::time::timeout_at(until, self.copying_turn()).await {
            Ok(_turn) => self.settle_intent_of(ino, false, (None, Patience::Known)).await,
            Err(_) => Ok(Settled::Copying),
        }
    }

    /// The same for a writer that has ended, or goes on only when it is known what came of what it began.
    pub(crate) async fn settle_ended(&self, ino: InodeId) -> Result<()> {
        let _turn = self.copying_turn().await;
        self.settle_intent_of(ino, false, (None, Patience::Known)).await.map(drop)
    }
}

/// An object where something was announced.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    object: ObjectInfo,
    by: Authorship,
    /// The content that it was announced as, as far as that is known.
    of: Option<Announced>,
}

impl Found {
    fn is_outdone(&self, inode: &Inode) -> bool {
        self.of.is_some_and(|of| of.is_outdone(inode.generation))
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
    found: Option<&Found>,
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
    let found = found.filter(|found| {
        Some(&found.object.version) != intent.replaces.as_ref()
            && (may_be_others || found.by != Authorship::Others)
    });
    let Some(found) = found else {
        return inode.map_or(Ok(()), |inode| change.resettle_home(ino, &inode));
    };
    match (&intent.copies, inode) {
        (Some(source), inode) => settle_copy(change, (ino, inode), (source, is_copy), found),
        (None, Some(inode)) => settle_write(change, (ino, inode), found),
        (None, None) if found.by == Authorship::Ours => change.doom_plain(&found.object.blob()),
        (None, None) => Ok(()),
    }
}

/// What a writer announced of a file that is there still.
fn settle_write(change: &mut Change<'_, '_>, (ino, inode): (InodeId, Inode), found: &Found) -> Result<()> {
    let (object, blob) = (&found.object, found.object.blob());
    let (is_ours, is_outdone) = (found.by == Authorship::Ours, found.is_outdone(&inode));
    let is_at_home = is_at_home(change, ino, &inode, object)?;
    if is_ours && is_outdone {
        return match is_at_home {
            true => change.stand(ino, inode, blob),
            false => discard_older(change, ino, inode, &blob),
        };
    }
    if !is_at_home && (is_outdone || found.by == Authorship::Others) {
        // Somebody else's at a path that was the file's once: the next listing shows it.
        return change.resettle_home(ino, &inode);
    }
    if is_ours && seals(change, ino, &inode, found)? {
        return seal(change, ino, inode, blob);
    }
    // Of what a writer said of it no clock is asked, nor the time that somebody gave the file.
    let is_newer = is_ours && found.of == Some(Announced { generation: inode.generation, seals: false });
    match !is_newer && change.outlives(ino, &inode, object)? {
        true => change.stand(ino, inode, blob),
        false => adopt(change, ino, inode, object),
    }
}

/// What the mover announced to copy there.
fn settle_copy(
    change: &mut Change<'_, '_>,
    (ino, inode): (InodeId, Option<Inode>),
    (source, is_copy): (&Blob, bool),
    found: &Found,
) -> Result<()> {
    let (object, blob) = (&found.object, found.object.blob());
    // An owned copy that nothing refers to is queued for deletion already.
    if blob.is_owned() || object.size != source.size {
        return inode.map_or(Ok(()), |inode| change.resettle_home(ino, &inode));
    }
    match inode {
        Some(inode) if is_still(change, ino, &inode, (source, &object.key))? => match is_copy {
            true => seal(change, ino, inode, blob),
            false => adopt(change, ino, inode, object),
        },
        // At the file's path it is in the way of what the file has; elsewhere the next listing shows what is not known to be
        // the copy.
        Some(inode) if is_copy || is_at_home(change, ino, &inode, object)? => {
            discard(change, ino, Some(inode), &blob)
        }
        None if is_copy => discard(change, ino, None, &blob),
        inode => inode.map_or(Ok(()), |inode| change.resettle_home(ino, &inode)),
    }
}

/// Whether an object lies where a file's path spells, and is neither another file's nor about to be deleted: what that left there
/// would be taken for the file's content, and deleted.
fn is_at_home(change: &Change<'_, '_>, ino: InodeId, inode: &Inode, found: &ObjectInfo) -> Result<bool> {
    let key = found.key.as_str();
    let is_free = match change.claim(key)?.map(|claim| claim.state) {
        Some(HolderState::Held(holder) | HolderState::Intended(holder)) => holder == ino,
        Some(HolderState::Doomed { due_ms }) => change.is_successor(due_ms, found)?,
        None | Some(HolderState::Subtree(_)) => true,
    };
    Ok(is_free && inode.nlink > 0 && change.key_of(ino, inode)?.as_deref() == Some(key))
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

/// Whether an object holds the very content that the file has, as was announced.
fn seals(change: &Change<'_, '_>, ino: InodeId, inode: &Inode, found: &Found) -> Result<bool> {
    let content = Some(Announced { generation: inode.generation, seals: true });
    Ok(found.of == content && change.layout(ino, inode)?.size() == found.object.size)
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
    inode.generation = change.next_generation(&inode);
    (inode.mtime, inode.since) = (found.modified, None);
    inode.ctime = change.now;
    change.tell_all_of_inode(ino, true);
    seal(change, ino, inode, found.blob())
}
