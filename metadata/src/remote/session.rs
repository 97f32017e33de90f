//! One mount that is served here: what it asks for, done in its name.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, InodeId, Result};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::interest::Interest;
use super::wire::{Answer, Failure, Request, Twice};
use crate::records::asking_as;
use crate::tree::{LocalTree, OutsideChange, Tree};

/// Requests of one session whose answers are kept in case that they are asked for again: many times what is on its way at once.
const MOST_KEPT: usize = 1 << 14;

/// Files that are opened at once for a mount that comes with many: each may be a read of the store.
const REOPENED_AT_ONCE: usize = 32;

/// Carries commands of people out.
pub type Command = Box<dyn Fn(Bytes) -> BoxFuture<'static, Bytes> + Send + Sync>;

/// Who carries commands out, once there is somebody.
#[derive(Default)]
pub(super) struct Commands(pub(super) OnceLock<Command>);

impl fmt::Debug for Commands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Commands").field(&self.0.get().is_some()).finish()
    }
}

/// What came of a request.
pub(super) type Outcome = Result<Answer, Failure>;

/// A request that was made before: its answer, once there is one.
type Kept = watch::Receiver<Option<Outcome>>;

/// Whether a request is made now, or was before.
enum Begun {
    Now(watch::Sender<Option<Outcome>>),
    Before(Kept),
    /// Its mount had said that it knows the answer: it was on its way for long.
    Never,
}

/// One mount's session.
#[derive(Debug)]
pub(super) struct Session {
    tree: Arc<LocalTree>,
    number: u64,
    commands: Arc<Commands>,
    answers: Answers,
    interest: Mutex<Interest>,
    /// Whoever opens what its mount had open with the process before holds this meanwhile.
    reopening: tokio::sync::Mutex<()>,
}

/// Of requests that do something, what came of them, until the mount says that it knows.
#[derive(Debug, Default)]
struct Answers(Mutex<(u64, BTreeMap<u64, Kept>)>);

impl Answers {
    /// Begins a request, unless it was begun before. Those below `oldest` are not asked for again.
    fn begin(&self, id: u64, oldest: u64) -> Begun {
        let (known, answers) = &mut *self.0.lock();
        *known = oldest.max(*known);
        *answers = answers.split_off(known);
        if id < *known {
            return Begun::Never;
        }
        if let Some(before) = answers.get(&id) {
            return Begun::Before(before.clone());
        }
        if answers.len() >= MOST_KEPT {
            // It waits for one that takes long; of those that were answered since, the first have arrived.
            let is_answered = |kept: &Kept| kept.borrow().is_some();
            let first = answers.iter().find(|(_, kept)| is_answered(kept)).map(|(id, _)| *id);
            first.and_then(|id| answers.remove(&id));
        }
        let (told, kept) = watch::channel(None);
        answers.insert(id, kept);
        Begun::Now(told)
    }

    /// Takes a request back that was begun, and of which nothing was done: asked for again, it is made.
    fn take_back(&self, id: u64) {
        self.0.lock().1.remove(&id);
    }
}

impl Session {
    pub(super) fn new(tree: Arc<LocalTree>, number: u64, commands: Arc<Commands>) -> Self {
        let (answers, interest, reopening) = Default::default();
        Self { tree, number, commands, answers, interest, reopening }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether its mount has to be told of a change.
    pub(super) fn hears_of(&self, change: &OutsideChange) -> bool {
        let is_open = match change {
            OutsideChange::Inode { ino, .. } => self.tree.has_open(self.number, *ino),
            _ => false,
        };
        is_open || self.interest.lock().is_in(change)
    }

    /// The answer to a request that only looks at what is at hand; none where it does more than that, or has to wait.
    pub(super) fn answer_now(&self, request: &Request) -> Option<Outcome> {
        let look = || {
            Some(match request {
                Request::Lookup(parent, name) => self.tree.lookup_now(*parent, name)?.map(Answer::Lookup),
                Request::Attributes(ino) => self.tree.attributes_now(*ino)?.map(Answer::Attributes),
                _ => return None,
            })
        };
        let mut interest = self.interest.lock();
        interest.ask(request);
        // What a process says that may not act any more may be untrue: it waits then until it may again.
        self.tree.expect_sure().ok()?;
        let outcome = look()?;
        self.tree.expect_sure().ok()?;
        if let Ok(answer) = &outcome {
            interest.show(answer);
        }
        Some(outcome.map_err(Failure::from))
    }

    /// The answer to a request, which is done once, however often it is asked for.
    ///
    /// None where this process may not act now, so that what it says may be untrue: another one may have the tree. Once it may
    /// again, its mount asks again.
    pub(super) async fn answer(&self, id: u64, oldest: u64, request: Request) -> Option<Outcome> {
        self.interest.lock().ask(&request);
        let outcome = match request.twice() {
            Twice::Looks => {
                self.tree.regain().await.ok()?;
                self.outcome(request).await
            }
            _ => self.outcome_once(id, oldest, request).await?,
        };
        self.tree.regain().await.ok()?;
        if let Ok(answer) = &outcome {
            self.interest.lock().show(answer);
        }
        Some(outcome)
    }

    /// What came of a request, now or when it was made before. None where it was not made.
    async fn outcome_once(&self, id: u64, oldest: u64, request: Request) -> Option<Outcome> {
        match self.answers.begin(id, oldest) {
            Begun::Never => Some(Err(Error::bug("an answer that had arrived is asked for again").into())),
            Begun::Now(told) => {
                if self.tree.regain().await.is_err() {
                    self.answers.take_back(id);
                    return None;
                }
                let outcome = self.outcome(request).await;
                // Kept also where it may not be told now: it was made, and is not to be made twice.
                told.send_replace(Some(outcome.clone()));
                Some(outcome)
            }
            Begun::Before(mut kept) => {
                // None where it was taken back.
                let answered = kept.wait_for(Option::is_some).await;
                answered.ok().and_then(|answer| answer.clone())
            }
        }
    }

    /// What comes of a request. Who asks is told of a panic, and the others of its requests go on.
    async fn outcome(&self, request: Request) -> Outcome {
        let making = AssertUnwindSafe(asking_as(self.number, self.make(request))).catch_unwind();
        making.await.unwrap_or_else(|panic| Err(panicked(panic))).map_err(Failure::from)
    }

    async fn make(&self, request: Request) -> Result<Answer> {
        let tree: &LocalTree = &self.tree;
        let done = |(): ()| Answer::Done;
        let layout = |(layout, generation)| Answer::Layout(layout, generation);
        match request {
            Request::Lookup(parent, name) => tree.lookup(parent, &name).await.map(Answer::Lookup),
            Request::Attributes(ino) => tree.attributes(ino).await.map(Answer::Attributes),
            Request::ReadDirectory(ino, after, limit) => {
                tree.read_directory(ino, after.as_deref(), limit as usize).await.map(Answer::Page)
            }
            Request::Parent(ino) => tree.parent(ino).await.map(Answer::Inode),
            Request::Layout(ino) => tree.layout(ino).await.map(layout),
            Request::FilesAfter(ino, limit) => tree.files_after(ino, limit as usize).await.map(Answer::Files),
            Request::ReadLink(ino) => tree.read_link(ino).await.map(Answer::Bytes),
            Request::Create(parent, name, new, existing) => {
                let made = tree.create(parent, &name, new, existing).await;
                made.map(|(attributes, is_new)| Answer::Made(attributes, is_new))
            }
            Request::Link(ino, parent, name) => tree.link(ino, parent, &name).await.map(Answer::Attributes),
            Request::Unlink(parent, name) => tree.unlink(parent, &name).await.map(Answer::Removed),
            Request::RemoveDirectory(parent, name) => {
                tree.remove_directory(parent, &name).await.map(Answer::Removed)
            }
            Request::Rename(from, to, mode) => {
                tree.rename((from.0, &from.1), (to.0, &to.1), mode).await.map(Answer::Removed)
            }
            Request::SetAttributes(ino, changes) => {
                tree.set_attributes(ino, changes).await.map(Answer::Attributes)
            }
            Request::Accessed(ino, atime) => tree.accessed(ino, atime).await.map(done),
            Request::Xattr(ino, name) => tree.xattr(ino, &name).await.map(Answer::Bytes),
            Request::Xattrs(ino) => tree.xattrs(ino).await.map(Answer::Names),
            Request::SetXattr(ino, name, value, mode) => {
                tree.set_xattr(ino, &name, value, mode).await.map(done)
            }
            Request::RemoveXattr(ino, name) => tree.remove_xattr(ino, &name).await.map(done),
            Request::CreateOpened(parent, name, new, existing) => {
                tree.create_opened(parent, &name, new, existing).await.map(Answer::Created)
            }
            Request::Opened(ino) => self.open(ino).await,
            Request::Closed(ino) => tree.closed(ino).await.map(done),
            Request::Reserve(ino, size) => tree.reserve(ino, size).await.map(done),
            Request::Place(ino, seals) => tree.place(ino, seals).await.map(Answer::Placement),
            Request::Settle(ino) => tree.settle(ino).await.map(done),
            Request::Doubt(ino) => tree.doubt(ino).await.map(done),
            Request::IsInDoubt(ino) => tree.is_in_doubt(ino).await.map(Answer::Flag),
            Request::HasObject(ino) => tree.has_object(ino).await.map(Answer::Flag),
            Request::IsReferred(key) => tree.is_referred(&key).await.map(Answer::Flag),
            Request::UploadStarted(key, id) => tree.upload_started(&key, &id).await.map(done),
            Request::UploadEnded(id) => tree.upload_ended(&id).await.map(done),
            Request::CommitLayout(ino, generation, layout, mtime) => {
                tree.commit_layout(ino, generation, layout, mtime).await.map(Answer::Attributes)
            }
            Request::CommitShared(ino, generation, layout, mtime, lender) => {
                tree.commit_shared(ino, generation, layout, mtime, lender).await.map(Answer::Attributes)
            }
            Request::Relocate(ino, generation, layout) => {
                tree.relocate(ino, generation, layout).await.map(done)
            }
            Request::Sync => tree.sync().await.map(done),
            Request::Statistics => tree.statistics().await.map(Answer::Statistics),
            Request::Refresh(ino) => tree.refresh(ino).await.map(done),
            other => self.make_own(other).await,
        }
    }

    /// The same of what is no call of a tree, or one of a session's own.
    async fn make_own(&self, request: Request) -> Result<Answer> {
        let tree: &LocalTree = &self.tree;
        match request {
            Request::Reopen(open, held, locks) => {
                // First: others wait for it.
                let lost = tree.relock(self.number, locks);
                self.reopen(open, held).await.map(|gone| Answer::Reopened(gone, lost))
            }
            Request::Command(command) => match self.commands.0.get() {
                Some(commands) => Ok(Answer::Bytes(commands(command).await)),
                None => Err(Error::new(ErrorKind::Unavailable, "it takes no commands yet")),
            },
            Request::Bye => tree.end_guest(self.number).await.map(|()| Answer::Done),
            Request::Lock(ino, lock, asking) => Ok(Answer::Lock(tree.ask_lock(ino, lock, asking))),
            Request::Unlock(ino, owner, range) => tree.unlock(ino, owner, range).await.map(|()| Answer::Done),
            Request::Leave(ino, ticket) => {
                tree.leave_lock(ino, ticket);
                Ok(Answer::Done)
            }
            _ => Err(Error::bug("a request that nobody makes")),
        }
    }

    async fn open(&self, ino: InodeId) -> Result<Answer> {
        let (layout, generation) = self.tree.opened(ino).await?;
        // After that its mount is told of changes. It asks again where nobody knows.
        let is_bare = self.tree.is_bare(ino).await.unwrap_or(false);
        Ok(Answer::Opened(layout, generation, is_bare))
    }

    async fn reopen(&self, open: Vec<InodeId>, held: Vec<InodeId>) -> Result<Vec<InodeId>> {
        // One that was cut off goes on: what it opens is counted by then.
        let _turn = self.reopening.lock().await;
        // It may have said so before: what it said then is what it has open now, but for what came since.
        let mut before: HashMap<InodeId, usize> = HashMap::new();
        for ino in self.tree.opened_by(self.number) {
            *before.entry(ino).or_default() += 1;
        }
        let is_missing = |ino: &InodeId| match before.get_mut(ino) {
            Some(times) if *times > 0 => {
                *times -= 1;
                false
            }
            _ => true,
        };
        let missing: Vec<InodeId> = open.into_iter().filter(is_missing).collect();
        let opening = stream::iter(missing).map(async |ino| match self.tree.opened(ino).await {
            Ok(_) => Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Some(ino)),
            Err(error) => Err(error),
        });
        // To their ends, also where one fails: one that is given up halfway stays counted.
        let opened: Vec<Result<_>> = opening.buffer_unordered(REOPENED_AT_ONCE).collect().await;
        let gone = opened.into_iter().flat_map(Result::transpose).collect::<Result<_>>()?;
        for (ino, times) in before {
            for _ in 0..times {
                self.tree.closed(ino).await?;
            }
        }
        self.tree.hold(self.number, &held);
        Ok(gone)
    }
}

/// What is told of a request that panicked: what it panicked with is in the log.
pub(super) fn panicked(_: Box<dyn Any + Send>) -> Error {
    Error::bug("what was asked for panicked")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_answered_is_kept_until_its_mount_knows_and_what_takes_long_pins_no_more_than_there_is_room_for()
     {
        let answers = Answers::default();
        let begin = |id, oldest| match answers.begin(id, oldest) {
            Begun::Now(told) => told,
            Begun::Before(_) | Begun::Never => panic!("{id} is new"),
        };
        let slow = begin(0, 0);
        for id in 1..2 * MOST_KEPT as u64 {
            begin(id, 0).send_replace(Some(Ok(Answer::Done)));
        }
        let is_known = |id| matches!(answers.begin(id, 0), Begun::Before(_));
        assert!(is_known(0) && is_known(2 * MOST_KEPT as u64 - 1), "one takes long, one is new");
        assert!(answers.0.lock().1.len() <= MOST_KEPT && !answers.0.lock().1.contains_key(&1));
        slow.send_replace(Some(Ok(Answer::Done)));
        begin(2 * MOST_KEPT as u64, 2 * MOST_KEPT as u64);
        assert_eq!(answers.0.lock().1.len(), 1, "its mount knows of all others");
        assert!(matches!(answers.begin(7, 0), Begun::Never), "it was on its way for long");
    }
}
