//! Files whose bytes lie elsewhere than their path says: copied to the key of the path, inside the store.
//!
//! An intent says that the copy is coming, the copy comes, one commit makes it the file's content and queues the old
//! object for deletion. A file that is being written, or whose key is held by another, waits.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, FileKind, FileLayout, InodeId, ObjectKey, Result, Version};
use forebay_io::object::{Condition, ObjectInfo, is_withheld};
use futures::stream::{self, StreamExt};
use tracing::{debug, warn};

use super::Mover;
use super::deletions::after;
use super::doubts::Asked;
use super::run::{AT_ONCE, PAGE, Tally};
use crate::kv::Durability;
use crate::records::{Change, Occupancy, Records};
use crate::schema::{Claim, HolderState, Inode, Intent, Move, Tag};

/// Pages of files that are moved, and bytes that are copied for them, before all else that a pass does has its turn: half a minute's
/// worth in a store across a network.
const PAGES_A_TURN: usize = 4;
const BYTES_A_TURN: u64 = 16 << 30;

/// How far files were moved in this turn.
#[derive(Debug, Default)]
struct Turn {
    tally: Tally,
    /// Bytes to be copied.
    bytes: u64,
    /// The record to be looked at next.
    next: Bytes,
}

impl Turn {
    fn is_over(&self) -> bool {
        self.bytes >= BYTES_A_TURN
    }
}

/// A copy to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    from: Blob,
    to: ObjectKey,
    /// What lies there, if that is the file's own older content.
    replaces: Option<Version>,
}

impl Plan {
    /// What the records say of it.
    fn intent(&self) -> Intent {
        let (key, replaces) = (self.to.clone(), self.replaces.clone());
        Intent { key, replaces, copies: Some(self.from.clone()), mark: None }
    }
}

/// What became of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Copied {
    /// It was made.
    To(ObjectInfo),
    /// An outsider's object is where it should go. The next listing shows that one instead, or it is gone by the next
    /// attempt.
    TargetTaken,
    /// An outsider replaced the bytes before they could be copied.
    SourceLost,
    /// There is no object where the bytes were.
    SourceMissing,
    /// A host has staged the bytes and has not brought them in.
    SourceStaged,
}

/// What is to be done about one file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Next {
    /// Nothing; the record is gone.
    Done,
    /// Nothing now.
    Wait,
    /// Nothing now, but others can go on.
    WayMade,
    /// Nothing before it is known whether older content came to the path, as this intent announced.
    Settle(Intent),
    /// The intent is recorded; copy.
    Copy(Plan),
    /// Others hold bytes of this object, which stands where newer content is to go: they get a copy.
    MakeRoom(Blob),
}

impl Mover {
    /// Moves the files that can be moved, a page at a time, from the record `start` on, or the first, for one turn. Gives the record
    /// to go on from in the next one; `None` when all were looked at.
    pub(crate) async fn move_files(&self, start: Option<Bytes>) -> Result<(Tally, Option<Bytes>)> {
        let (first, end) = self.shared().keys.family(Tag::Move);
        let mut turn = Turn { next: start.unwrap_or(first), ..Turn::default() };
        for _ in 0..PAGES_A_TURN {
            let _moving = self.moving().await;
            let (from, to) = (turn.next.clone(), end.clone());
            let page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let is_last = page.len() < PAGE;
            self.move_page(page, &mut turn).await?;
            if self.is_stopping() || (is_last && !turn.is_over()) {
                return Ok((turn.tally, None));
            }
            if turn.is_over() {
                break;
            }
        }
        Ok((turn.tally, Some(turn.next)))
    }

    async fn move_page(&self, page: Vec<(Bytes, Bytes)>, turn: &mut Turn) -> Result<()> {
        let mut plans = Vec::new();
        let ready = match self.plan_page(page, &mut plans, turn).await {
            // Without its intent on disk, a copy would look like somebody else's object after a crash.
            Ok(()) if !plans.is_empty() => self.committer().sync().await,
            planned => planned,
        };
        if let Err(error) = ready {
            plans.iter().for_each(|(ino, plan)| self.doubt(*ino, &plan.to, Asked::Never));
            return Err(error);
        }
        let each = plans.into_iter().map(|(ino, plan)| self.copy(ino, plan));
        let done: Vec<_> = stream::iter(each).buffer_unordered(AT_ONCE).collect().await;
        done.into_iter().for_each(|done| turn.tally.add(done.map(usize::from)));
        Ok(())
    }

    /// Decides about a page of files, or as many as the turn still has room for: what is to be copied comes to `plans`, also
    /// before an error.
    async fn plan_page(
        &self,
        page: Vec<(Bytes, Bytes)>,
        plans: &mut Vec<(InodeId, Plan)>,
        turn: &mut Turn,
    ) -> Result<()> {
        let (mut crowded, mut outdone) = (Vec::new(), Vec::new());
        for (key, value) in page {
            if turn.is_over() {
                break;
            }
            turn.next = after(&key);
            let planned = self.plan_one(&key, value).await;
            let Ok((ino, next)) = planned else {
                turn.tally.pass_over(planned.map(|_| 0))?;
                continue;
            };
            match next {
                Next::Done | Next::WayMade => turn.tally.done += 1,
                Next::Wait => {}
                Next::Settle(intent) => outdone.push((ino, intent)),
                Next::Copy(plan) => {
                    turn.bytes = turn.bytes.saturating_add(plan.from.size);
                    plans.push((ino, plan));
                }
                Next::MakeRoom(blob) => {
                    turn.bytes = turn.bytes.saturating_add(blob.size);
                    crowded.push(blob);
                }
            }
        }
        stream::iter(crowded).for_each_concurrent(AT_ONCE, |blob| self.save_one(blob)).await;
        self.settle_writes(outdone, &mut turn.tally).await;
        Ok(())
    }

    /// Decides about one.
    async fn plan_one(&self, key: &Bytes, value: Bytes) -> Result<(InodeId, Next)> {
        let ino = InodeId(self.shared().keys.number_in(key)?);
        if Move::decode(value)? != Move::File {
            return Ok((ino, Next::Wait));
        }
        let fresh = self.fresh_key();
        let plan = move |change: &mut Change<'_, '_>| plan(change, ino, &fresh);
        let next = self.transact(Durability::Buffered, plan).await?;
        self.shared().aside.end_crowd(ino);
        Ok((ino, next))
    }

    /// Settles what was announced to be written, as long as the store answers.
    pub(super) async fn settle_writes(&self, writes: Vec<(InodeId, Intent)>, tally: &mut Tally) {
        let is_away = &AtomicBool::new(false);
        let each = writes.into_iter().map(|(ino, intent)| self.settle_unless_away(ino, intent, is_away));
        let done: Vec<_> = stream::iter(each).buffer_unordered(AT_ONCE).collect().await;
        done.into_iter().for_each(|done| tally.add(done.map(usize::from)));
    }

    async fn settle_unless_away(&self, ino: InodeId, intent: Intent, is_away: &AtomicBool) -> Result<bool> {
        if is_away.load(Relaxed) {
            return Ok(false);
        }
        let settled = self.settle_write(ino, &intent).await;
        is_away.fetch_or(settled.is_err(), Relaxed);
        settled
    }

    /// Makes the copy that was planned, if nobody ended its intent while others had their turn. Returns whether the move is
    /// done with.
    async fn copy(&self, ino: InodeId, plan: Plan) -> Result<bool> {
        let _turn = self.copying_turn().await;
        let looked = self.look(move |look| look.intent(ino)).await;
        let intent = looked.inspect_err(|_| self.doubt(ino, &plan.to, Asked::Never))?;
        match intent == Some(plan.intent()) {
            true => self.copy_now(ino, plan).await,
            false => Ok(false),
        }
    }

    /// The same for one who has the turn and whose intent stands.
    async fn copy_now(&self, ino: InodeId, plan: Plan) -> Result<bool> {
        let to = plan.to.clone();
        match self.copy_object(ino, &plan).await {
            Ok(Copied::To(copied)) => {
                let commit = move |change: &mut Change<'_, '_>| commit(change, ino, &plan, &copied);
                let committed = self.transact(Durability::Buffered, commit).await;
                committed.inspect_err(|_| self.doubt(ino, &to, Asked::Over))
            }
            Ok(failed) => {
                let (from, is_lost) = (plan.from.clone(), failed == Copied::SourceLost);
                let end = move |change: &mut Change<'_, '_>| give_up(change, ino, &plan, is_lost);
                let ended = self.transact(Durability::Buffered, end).await;
                ended.inspect_err(|_| self.doubt(ino, &to, Asked::Never))?;
                match failed {
                    Copied::SourceMissing => Err(missing(ino, &from)),
                    _ => Ok(is_lost),
                }
            }
            Err(error) => {
                // Whether the copy was made is not known: the intent says what to look for.
                self.doubt(ino, &to, Asked::Over);
                self.settle_intent(ino).await?;
                match self.aside(ino, &plan, &error).await? {
                    Some(aside) => Box::pin(self.copy_now(ino, aside)).await,
                    None => Err(error),
                }
            }
        }
    }

    /// The copy of a file to where it is in nobody's way, if `error` says that the store does not take it where it should go:
    /// in a folder, for one, the path may lead through a file that waits for just this one.
    async fn aside(&self, ino: InodeId, plan: &Plan, error: &Error) -> Result<Option<Plan>> {
        // Nobody else writes where it would go aside: a store that refuses that, too, refuses all.
        let is_aside = plan.to.as_str().starts_with(Blob::OWNED_PREFIX);
        if error.kind() != ErrorKind::Conflict || plan.from.is_owned() || is_aside {
            return Ok(None);
        }
        let (from, fresh) = (plan.from.clone(), self.fresh_key());
        let plan = move |change: &mut Change<'_, '_>| plan_aside(change, ino, &from, &fresh);
        let aside = self.transact(Durability::Buffered, plan).await?;
        let synced = self.committer().sync().await;
        if let (Err(_), Some(aside)) = (&synced, &aside) {
            self.doubt(ino, &aside.to, Asked::Never);
        }
        synced.map(|()| aside)
    }

    async fn copy_object(&self, ino: InodeId, plan: &Plan) -> Result<Copied> {
        let from = match self.bucket().head(&plan.from.key).await? {
            None if plan.from.staged_on().is_some() => return Ok(Copied::SourceStaged),
            None => return Ok(Copied::SourceMissing),
            Some(source) if !is_source(&plan.from, &source) => return Ok(Copied::SourceLost),
            Some(source) => source.blob(),
        };
        let target = self.bucket().head(&plan.to).await?;
        if target.as_ref().map(|target| &target.version) != plan.replaces.as_ref() {
            return Ok(Copied::TargetTaken);
        }
        if let Some(target) = target {
            self.save_lent(&target.blob()).await?;
        }
        let condition = plan.replaces.clone().map_or(Condition::IfAbsent, Condition::IfVersion);
        let copied = match self.copy_inside(&from, &plan.to, condition).await {
            Ok(copied) => self.check_copy(plan, &from, copied).await,
            failed => failed,
        };
        if copied.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unavailable && !is_withheld(error)) {
            self.doubt(ino, &plan.to, Asked::Unanswered);
        }
        copied.map(Copied::To)
    }

    /// The copy that the store says it made. Where what was to be replaced lies there still, it did not: taken for the copy,
    /// that would become the file's content, and the only bytes of the new one would be freed. A copy of the same bytes may
    /// get the same version, and is told by its token.
    async fn check_copy(&self, plan: &Plan, from: &Blob, copied: ObjectInfo) -> Result<ObjectInfo> {
        let is_unchanged = plan.replaces.as_ref() == Some(&copied.version) && copied.version != from.version;
        if is_unchanged && !self.is_copy(from, &copied).await? {
            let message = format!("`{}` was to be replaced by a copy, and holds what it did", plan.to);
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        Ok(copied)
    }
}

/// Whether an object is the one meant. What was staged got its version when it was brought in, and nobody else writes there.
fn is_source(from: &Blob, found: &ObjectInfo) -> bool {
    match from.staged_on() {
        Some(_) => found.size == from.size,
        None => found.version == from.version,
    }
}

/// Decides about one file and records the intent. `fresh` is used where the bytes have to step aside.
fn plan(change: &mut Change<'_, '_>, ino: InodeId, fresh: &ObjectKey) -> Result<Next> {
    let record = change.keys().movement(ino);
    let inode = change.find(ino)?.filter(|inode| inode.kind == FileKind::File && inode.nlink > 0);
    let Some(inode) = inode else {
        change.delete(record)?;
        return Ok(Next::Done);
    };
    if let Some(intent) = change.intent(ino)? {
        return Ok(if intent.is_outdone(inode.generation) { Next::Settle(intent) } else { Next::Wait });
    }
    let (from, to) = (whole(change, ino, &inode)?, change.key_of(ino, &inode)?);
    let wants = to.as_deref();
    // Where a whole content lies elsewhere, its copy comes with that.
    if from.as_ref().is_none_or(|from| Some(from.key.as_str()) == wants)
        && change.shared.aside.wants_room(ino)
        && let Some(home) = inode.home.as_ref().filter(|home| Some(home.key.as_str()) == wants)
        && change.is_lent(home)?
    {
        change.delete(record)?;
        return Ok(Next::MakeRoom(home.clone()));
    }
    let (Some(from), Some(to)) = (from, to) else {
        // Nothing can be copied whole, or nowhere: a new content or name asks again.
        change.delete(record)?;
        return Ok(Next::Done);
    };
    if from.key.as_str() == to {
        // Brought back from the trash before its object went: the copy that the deletion makes comes back instead.
        let is_doomed = matches!(change.claim(&to)?, Some(Claim { state: HolderState::Doomed { .. }, .. }));
        if is_doomed || change.lies_below_claim(&to)? {
            return Ok(Next::Wait);
        }
        change.settle_home(ino, &inode)?;
        change.delete(record)?;
        return Ok(Next::Done);
    }
    let to = match change.occupancy(ino, &to)? {
        Occupancy::Free => ObjectKey::new(to),
        Occupancy::Taken if is_in_ring(change, ino, to)? => {
            if from.is_owned() {
                // The file has stepped aside already: it was written since. The object of before is in the way of others.
                let mut inode = inode;
                change.part_with_home(ino, &mut inode)?;
                change.put_inode(ino, &inode)?;
                return Ok(Next::WayMade);
            }
            change.note_uncommitted(fresh)?;
            fresh.clone()
        }
        Occupancy::Doomed | Occupancy::Taken => return Ok(Next::Wait),
    };
    let replaces = inode.home.filter(|home| home.key == to).map(|home| home.version);
    let plan = Plan { from, to, replaces };
    change.put_intent(ino, &plan.intent())?;
    Ok(Next::Copy(plan))
}

/// Records the intent to bring a file's bytes to `fresh`, unless it changed meanwhile.
fn plan_aside(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    from: &Blob,
    fresh: &ObjectKey,
) -> Result<Option<Plan>> {
    let Some(inode) = change.find(ino)? else { return Ok(None) };
    if change.intent(ino)?.is_some() || whole(change, ino, &inode)?.as_ref() != Some(from) {
        return Ok(None);
    }
    change.note_uncommitted(fresh)?;
    let plan = Plan { from: from.clone(), to: fresh.clone(), replaces: None };
    change.put_intent(ino, &plan.intent())?;
    Ok(Some(plan))
}

/// Whether the key is held by a file whose own key is held, and so on, round to `ino`: exchanged files wait for one
/// another for ever unless one steps aside.
fn is_in_ring(change: &Change<'_, '_>, ino: InodeId, mut key: String) -> Result<bool> {
    /// Longer rings stay as they are; the bytes are right wherever they lie.
    const LONGEST: usize = 64;
    for _ in 0..LONGEST {
        let Some(HolderState::Held(holder)) = change.claim(&key)?.map(|claim| claim.state) else {
            return Ok(false);
        };
        if holder == ino {
            return Ok(true);
        }
        let Some(inode) = change.find(holder)?.filter(|inode| inode.nlink > 0) else { return Ok(false) };
        match change.key_of(holder, &inode)? {
            Some(next) => key = next,
            None => return Ok(false),
        }
    }
    Ok(false)
}

/// The object that alone is the whole file. A segment is none: others may come to share it.
fn whole(change: &Change<'_, '_>, ino: InodeId, inode: &Inode) -> Result<Option<Blob>> {
    Ok(change.layout(ino, inode)?.single_blob().filter(|blob| !blob.is_segment()).cloned())
}

/// Whether the file still is that one object and still wants to be at `to`.
pub(super) fn is_still(
    change: &Change<'_, '_>,
    ino: InodeId,
    inode: &Inode,
    (from, to): (&Blob, &ObjectKey),
) -> Result<bool> {
    let wants = inode.nlink > 0 && change.key_of(ino, inode)?.as_deref() == Some(to.as_str());
    Ok(wants && whole(change, ino, inode)?.as_ref() == Some(from))
}

/// Makes the copy the file's content, if nothing changed meanwhile; else it is deleted again. Returns whether the
/// move is done with.
fn commit(change: &mut Change<'_, '_>, ino: InodeId, plan: &Plan, copied: &ObjectInfo) -> Result<bool> {
    let Some(intent) = change.intent(ino)?.filter(|intent| intent.key == plan.to) else {
        return Err(Error::bug(format!("the intent to move inode {ino} was ended by another")));
    };
    change.end_intent(ino, &intent)?;
    let copy = copied.blob();
    let inode = change.find(ino)?;
    let is_still = match &inode {
        _ if copied.size != plan.from.size => false,
        Some(inode) if copy.is_owned() => whole(change, ino, inode)?.as_ref() == Some(&plan.from),
        Some(inode) => is_still(change, ino, inode, (&plan.from, &plan.to))?,
        None => false,
    };
    let Some(mut inode) = inode.clone().filter(|_| is_still) else {
        debug!(%ino, key = %plan.to, "the file changed while it was moved");
        return discard(change, ino, inode, &copy).map(|()| false);
    };
    let is_owned = copy.is_owned();
    let home = Some(copy.clone()).filter(|_| !is_owned);
    let before = change.replace_layout((ino, &mut inode), &FileLayout::of_blob(copy), home)?;
    change.put_inode(ino, &inode)?;
    if let Some(before) = before.filter(|before| before.key != copied.key) {
        change.doom_plain(&before)?;
    }
    if !is_owned {
        change.delete(change.keys().movement(ino))?;
    }
    Ok(true)
}

/// Gives up a copy that the file does not want any more, and with it what it replaced.
pub(super) fn discard(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    inode: Option<Inode>,
    copy: &Blob,
) -> Result<()> {
    if copy.is_owned() {
        // Queued for deletion since before it was made.
        return Ok(());
    }
    if let Some(mut inode) = inode
        && inode.home.as_ref().is_some_and(|home| home.key == copy.key)
    {
        inode.home = None;
        change.put_inode(ino, &inode)?;
    }
    change.doom_plain(copy)
}

/// One look proves nothing, and the file's record is all that says what is missed: it stays, and the move with it.
fn missing(ino: InodeId, from: &Blob) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("the object `{}` is missing, whose bytes inode {ino} has", from.key),
    )
    .with_hint("restore that version of it, or run `forebay fsck --repair` and copy the bytes in")
}

/// Ends an attempt that cannot be made. A file whose bytes were replaced goes with them; any other stays where it is, and
/// its claim and the move with it.
fn give_up(change: &mut Change<'_, '_>, ino: InodeId, plan: &Plan, is_lost: bool) -> Result<()> {
    let from = &plan.from;
    if let Some(intent) = change.intent(ino)? {
        change.end_intent(ino, &intent)?;
        // The intent may have stood for the claim on an object that the file left behind meanwhile.
        if let Some(inode) = change.find(ino)? {
            change.resettle_home(ino, &inode)?;
        }
    }
    // The store was not asked for the copy.
    change.forget_uncommitted(&plan.to)?;
    let inode = change.find(ino)?;
    let has_changed = match &inode {
        Some(inode) => whole(change, ino, inode)?.as_ref() != Some(from),
        None => false,
    };
    // What the file got meanwhile is to be moved as well.
    if !is_lost || has_changed {
        return Ok(());
    }
    change.delete(change.keys().movement(ino))?;
    match inode.filter(|inode| inode.home.as_ref() == Some(from)) {
        Some(inode) => {
            warn!(%ino, key = %from.key, "somebody replaced an object before its file was moved");
            change.vanish(ino, inode)
        }
        None => Ok(()),
    }
}
