//! When directories are listed: once for however many wait, again after a while, at once when told to, and ahead of who
//! walks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};
use forebay_io::clock::Moment;
use forebay_io::object::{Bucket, Listing, Skipped};
use forebay_io::task::TaskGroup;
use futures::future::{BoxFuture, FutureExt, Shared as SharedFuture};
use futures::stream::{self, StreamExt, TryStreamExt};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tracing::{debug, info, warn};

use super::ahead::{Ask, SKIPS, Walks};
use super::items::Items;
use super::phantoms::Phantoms;
use super::reconcile::{Cursor, Work, reconcile, remove_emptied};
use crate::commit::Committer;
use crate::kv::Durability;
use crate::records::{Change, Look, OutsideChange, Records, Shared, Spelling, prefix_with_slash};

/// Directories whose freshness is remembered. Past it the expired ones are forgotten, then all: they are listed again.
const MOST_REMEMBERED: usize = 200_000;
/// A listing stays true for at least this many times the time that it took, so that huge directories are not listed
/// without end.
const SHARE_OF_TIME: u32 = 10;
/// How often a listing is begun again because its directory was renamed meanwhile.
const MOST_ATTEMPTS: u32 = 5;

/// How often a long listing says how far it is.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// Directories that are listed ahead at once.
const AHEAD_AT_ONCE: usize = 16;
/// Names that they have together, in about 64 MiB, if they are as large as those of before.
const AHEAD_NAMES: usize = 200_000;
/// Names that are looked through for directories to be listed ahead.
const AHEAD_SCAN: usize = 1024;

/// What everybody waiting for a listing is told.
type Outcome = Result<(), Arc<Error>>;

/// A listing under way.
#[derive(Clone)]
struct Flight {
    began: Moment,
    outcome: SharedFuture<BoxFuture<'static, Outcome>>,
}

/// Takes listings over into the tree; cheap to clone.
#[derive(Clone)]
pub(crate) struct Importer(Arc<Inner>);

struct Inner {
    bucket: Bucket,
    committer: Committer,
    shared: Arc<Shared>,
    tasks: TaskGroup,
    state: Mutex<State>,
    ahead: Semaphore,
}

#[derive(Default)]
struct State {
    listed: HashMap<InodeId, Listed>,
    flights: HashMap<InodeId, Flight>,
    walks: Walks,
    /// Names that directories have of late, the large ones above all.
    names: usize,
}

/// A listing taken by this process.
#[derive(Debug, Clone, Copy)]
struct Listed {
    began: Moment,
    took: Duration,
}

/// How far what is known of a directory can be trusted.
enum Freshness {
    Fresh,
    Stale,
    Unknown,
}

/// What a listing left to be done: directories to look at, and names to tell of.
type Taken = (Vec<(Bytes, InodeId)>, Vec<OutsideChange>);

impl Importer {
    pub(crate) fn new(bucket: Bucket, committer: Committer, shared: Arc<Shared>, tasks: TaskGroup) -> Self {
        let (state, ahead) = (Mutex::default(), Semaphore::new(AHEAD_AT_ONCE));
        Self(Arc::new(Inner { bucket, committer, shared, tasks, state, ahead }))
    }

    /// Whether what is known of the directory is true.
    pub(crate) fn is_fresh(&self, directory: InodeId) -> bool {
        matches!(self.freshness(directory), Freshness::Fresh)
    }

    /// Whether the directory can be looked at without waiting: nobody waits any more for a listing that takes so long.
    pub(crate) fn is_ready(&self, directory: InodeId) -> bool {
        match self.freshness(directory) {
            Freshness::Fresh => true,
            Freshness::Stale => {
                let under_way = self.0.state.lock().flights.get(&directory).map(|flight| flight.began);
                under_way.is_some_and(|began| self.gives_up(began) <= self.0.shared.clock.now())
            }
            Freshness::Unknown => false,
        }
    }

    /// When who comes to a directory that was listed before waits no longer for the listing that began then.
    fn gives_up(&self, began: Moment) -> Moment {
        began + Duration::from_millis(self.0.shared.settings.import.relist_wait_ms)
    }

    fn freshness(&self, directory: InodeId) -> Freshness {
        let listed = self.0.state.lock().listed.get(&directory).copied();
        match listed {
            None => Freshness::Unknown,
            Some(listed) if self.expires(listed) > self.0.shared.clock.now() => Freshness::Fresh,
            Some(_) => Freshness::Stale,
        }
    }

    fn expires(&self, listed: Listed) -> Moment {
        let ttl = Duration::from_millis(self.0.shared.settings.import.ttl_ms);
        listed.began + ttl.max(listed.took * SHARE_OF_TIME)
    }

    /// Returns when the directory can be looked at: listed, and not too long ago. A directory that was listed before
    /// is not waited for longer than `relist_wait_ms` from when its listing began, however many come meanwhile, nor refused
    /// when the store cannot be reached.
    pub(crate) async fn ensure(&self, directory: InodeId) -> Result<()> {
        match self.freshness(directory) {
            Freshness::Fresh => Ok(()),
            Freshness::Unknown => self.flight(directory).outcome.await.map_err(|error| error.duplicate()),
            Freshness::Stale => {
                let Flight { began, outcome } = self.flight(directory);
                tokio::select! {
                    biased;
                    outcome = outcome => match outcome {
                        Err(error) if error.kind() == ErrorKind::Unavailable => Ok(()),
                        outcome => outcome.map_err(|error| error.duplicate()),
                    },
                    () = self.0.shared.clock.sleep_until(self.gives_up(began)) => Ok(()),
                }
            }
        }
    }

    /// Returns when a name of the directory can be looked up. Where that was not listed before, and takes longer than
    /// `relist_wait_ms`, the name is looked for alone.
    pub(crate) async fn ensure_name(&self, directory: InodeId, name: &[u8]) -> Result<()> {
        if !matches!(self.freshness(directory), Freshness::Unknown) {
            return self.ensure(directory).await;
        }
        let Flight { began, outcome } = self.flight(directory);
        tokio::select! {
            biased;
            outcome = outcome.clone() => return outcome.map_err(|error| error.duplicate()),
            () = self.0.shared.clock.sleep_until(self.gives_up(began)) => {}
        }
        match self.look_alone(directory, name, outcome.clone().map(drop)).await {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => debug!(%directory, %error, "a name was looked for alone in vain"),
        }
        outcome.await.map_err(|error| error.duplicate())
    }

    /// Has a file that never had content begin with the object at its path, if one is there: a mount may have put it and died
    /// before it had recorded that. A listing does the same for its own directory, but nobody who comes by a name in another one
    /// waits for it, and it leaves files alone that are open. Returns whether it did.
    pub(crate) async fn begin(&self, ino: InodeId) -> Result<bool> {
        let awaited = self.transact(move |change| change.awaited_at(ino)).await?;
        let Some(key) = awaited else { return Ok(false) };
        let Some(object) = self.0.bucket.head(&key).await? else { return Ok(false) };
        let begin = move |change: &mut Change<'_, '_>| {
            let is_awaited = change.awaits(ino, &object)?;
            if is_awaited {
                let inode = change.inode(ino)?;
                change.begin_with(ino, inode, &object)?;
                // A listing under way may be of before it came.
                change.shared.touched.key(object.key.as_str());
            }
            Ok(is_awaited)
        };
        let has_begun = self.transact(begin).await?;
        if has_begun {
            self.0.shared.outside.tell(OutsideChange::Inode { ino, has_content: true });
        }
        Ok(has_begun)
    }

    /// Notes that the directory `name` of `parent` is read from its start, and lists those that its reader comes to next.
    pub(crate) fn walk_on(&self, parent: InodeId, name: &Bytes) {
        let settings = &self.0.shared.settings.import;
        let limits = (settings.max_ahead, Duration::from_millis(settings.ttl_ms));
        let now = self.0.shared.clock.now();
        let Some(ask) = self.0.state.lock().walks.observe((parent, name), now, limits) else { return };
        let importer = self.clone();
        self.0.tasks.spawn("list-ahead", async move {
            let found = importer.following(&ask).await.unwrap_or_else(|error| {
                debug!(%error, "could not look ahead");
                None
            });
            let names = found.as_ref().map(|found| found.0.as_slice());
            importer.0.state.lock().walks.answer(&ask, names);
            let (_, directories) = found.unwrap_or_default();
            let at_once = AHEAD_NAMES.checked_div(importer.0.state.lock().names).unwrap_or(AHEAD_AT_ONCE);
            let list = async |directory: InodeId| {
                let Ok(_permit) = importer.0.ahead.acquire().await else { return };
                if !importer.is_fresh(directory) {
                    // The reader that comes to it asks again and gets the error.
                    let _ = importer.flight(directory).outcome.await;
                }
            };
            match at_once {
                0 => {}
                _ => stream::iter(directories).for_each_concurrent(at_once, list).await,
            }
        });
    }

    /// The directories that are asked for, by name and number; `None` where no walk begins.
    async fn following(&self, ask: &Ask) -> Result<Option<(Vec<Bytes>, Vec<InodeId>)>> {
        let keys = self.0.shared.keys;
        let entries = self.0.committer.read(|view| {
            let look = Look::plain(view, keys);
            look.entries(ask.parent, Some(&ask.after), AHEAD_SCAN)
        });
        let mut found = entries.await?;
        found.retain(|(_, entry)| entry.kind == FileKind::Directory);
        if let Some(first) = &ask.begins_at {
            match found.iter().take(1 + SKIPS).position(|(name, _)| name == first) {
                Some(at) => drop(found.drain(..=at)),
                None => return Ok(None),
            }
        }
        found.truncate(ask.directories);
        Ok(Some(found.into_iter().map(|(name, entry)| (name, entry.ino)).unzip()))
    }

    /// Lets a directory just made count as listed when its parent was: that one would have shown it.
    pub(crate) fn inherit(&self, directory: InodeId, parent: InodeId) {
        let mut state = self.0.state.lock();
        if let Some(listed) = state.listed.get(&parent).copied() {
            state.listed.insert(directory, listed);
        }
    }

    /// Forgets when these directories were listed.
    pub(crate) fn forget(&self, directories: &[InodeId]) {
        let mut state = self.0.state.lock();
        for directory in directories {
            state.listed.remove(directory);
        }
    }

    /// Forgets when anything was listed.
    pub(crate) fn forget_all(&self) {
        self.0.state.lock().listed.clear();
    }

    /// The listing under way, or a new one.
    fn flight(&self, directory: InodeId) -> Flight {
        let mut state = self.0.state.lock();
        if let Some(flight) = state.flights.get(&directory) {
            return flight.clone();
        }
        let importer = self.clone();
        // Owned by the group, so that a caller who goes away does not leave a directory half taken over.
        let task = self.0.tasks.spawn(format!("list {directory}"), async move {
            let outcome = importer.list(directory).await;
            importer.0.state.lock().flights.remove(&directory);
            if let Err(error) = &outcome {
                debug!(%directory, %error, "listing failed");
            }
            outcome
        });
        let outcome =
            async move { task.await.and_then(|outcome| outcome).map_err(Arc::new) }.boxed().shared();
        let flight = Flight { began: self.0.shared.clock.now(), outcome };
        state.flights.insert(directory, flight.clone());
        flight
    }

    async fn list(&self, directory: InodeId) -> Result<()> {
        for _ in 0..MOST_ATTEMPTS {
            match self.list_once(directory).await {
                Err(error) if error.kind() == ErrorKind::Conflict => continue,
                outcome => return outcome,
            }
        }
        Err(Error::new(ErrorKind::Unavailable, format!("directory {directory} is renamed all the time")))
    }

    async fn list_once(&self, directory: InodeId) -> Result<()> {
        let began = self.0.shared.clock.now();
        let (prefix, is_known) = self.prefix_of(directory).await?;
        let Some(prefix) = prefix else {
            self.remember(directory, began);
            return Ok(());
        };
        self.0.shared.touched.begin(directory, prefix_with_slash(&prefix));
        let taken = self.take_over(directory, prefix, is_known).await;
        self.0.shared.touched.end(directory);
        let (emptied, changes) = taken?;
        changes.into_iter().for_each(|change| self.0.shared.outside.tell(change));
        for (name, child) in emptied {
            self.empty(directory, name, child).await?;
        }
        self.remember(directory, began);
        Ok(())
    }

    /// Lists and reconciles. Returns directories that have to be looked at because their prefix is gone, and the names
    /// that changed, if somebody may know older ones.
    async fn take_over(&self, directory: InodeId, prefix: String, is_known: bool) -> Result<Taken> {
        let mut listing = self.list_whole(&prefix).await?;
        let (bucket, committer, keys) = (&self.0.bucket, &self.0.committer, self.0.shared.keys);
        Phantoms { bucket, committer, keys }.drop(directory, &prefix, &mut listing).await?;
        self.0.shared.markers.note(&prefix_with_slash(&prefix), listing.marker.take());
        let items = Items::of(directory, &prefix, listing);
        debug!(%directory, prefix, names = items.items.len(), skipped = items.skipped.keys, "listed");
        {
            let mut state = self.0.state.lock();
            state.names = items.items.len().max(state.names - state.names / 8);
        }
        if self.0.shared.unshown.note(directory, items.skipped.clone()) {
            let Skipped { keys, first } = &items.skipped;
            warn!(prefix, keys, first = ?first, "objects are not shown: no path spells their keys, or it is another's");
        }
        let work = Arc::new(Work { directory, prefix, items });
        let (mut cursor, mut changes) = (Cursor::default(), Vec::new());
        while !cursor.done {
            let (work, at) = (work.clone(), cursor);
            let window = move |change: &mut Change<'_, '_>| {
                let cursor = reconcile(change, &work, &at)?;
                Ok((cursor, std::mem::take(&mut change.outside)))
            };
            let done = self.transact(window).await?;
            cursor = done.0;
            if is_known {
                changes.extend(done.1);
            }
        }
        let stamp = move |change: &mut Change<'_, '_>| {
            let mut state = change.import_state(directory)?;
            state.listed = Some(change.now);
            change.put_import_state(directory, &state)
        };
        self.transact(stamp).await?;
        Ok((cursor.emptied, changes))
    }

    /// All that lies directly below a prefix. Tells every now and then how far it is: a directory of millions takes minutes.
    async fn list_whole(&self, prefix: &str) -> Result<Listing> {
        let mut pages = self.0.bucket.list_directory_pages(prefix);
        let (mut whole, mut told) = (Listing::default(), self.0.shared.clock.now());
        while let Some(page) = pages.try_next().await? {
            whole.add(page);
            let now = self.0.shared.clock.now();
            if now.since(told) >= TELL_EVERY {
                told = now;
                let names = whole.objects.len() + whole.directories.len();
                info!(prefix, names, "listing a large directory: so many names so far");
            }
        }
        Ok(whole)
    }

    /// Where the directory is listed from; tries to attach one that had no key space of its own.
    /// The bool tells whether it was listed before.
    async fn prefix_of(&self, directory: InodeId) -> Result<(Option<String>, bool)> {
        let keys = self.0.shared.keys;
        let state = self.0.committer.read(|view| {
            let look = Look::plain(view, keys);
            look.directory(directory)?;
            look.import_state(directory)
        });
        let state = state.await?;
        if state.prefix.is_some() || self.0.shared.spelling == Spelling::Nothing {
            return Ok((state.prefix, state.listed.is_some()));
        }
        let prefix = self.transact(move |change| change.attach(directory)).await?;
        Ok((prefix, state.listed.is_some()))
    }

    /// A known directory's prefix is not there any more: lists it, which takes its objects away, and removes it if
    /// nothing is left.
    async fn empty(&self, parent: InodeId, name: Bytes, child: InodeId) -> Result<()> {
        let keys = self.0.shared.keys;
        let known = self.0.committer.read(|view| Look::plain(view, keys).has_entries(child)).await?;
        if known {
            // A directory below, never one above: this ends at the leaves.
            let outcome = self.flight(child).outcome.await;
            if let Err(error) = outcome
                && error.kind() != ErrorKind::NotFound
            {
                return Err(error.duplicate());
            }
        }
        let remove = move |change: &mut Change<'_, '_>| {
            remove_emptied(change, parent, &name, child)?;
            Ok(std::mem::take(&mut change.outside))
        };
        let changes = self.transact(remove).await?;
        changes.into_iter().for_each(|change| self.0.shared.outside.tell(change));
        Ok(())
    }

    pub(super) fn bucket(&self) -> &Bucket {
        &self.0.bucket
    }

    pub(super) fn committer(&self) -> &Committer {
        &self.0.committer
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.0.shared
    }

    pub(super) async fn transact<T: Send + 'static>(
        &self,
        mut work: impl FnMut(&mut Change<'_, '_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let shared = self.0.shared.clone();
        let closure = move |txn: &mut crate::commit::Txn<'_>| {
            let mut change = Change::new(txn, &shared);
            change.is_import = true;
            change.keeps_deleted = false;
            work(&mut change)
        };
        self.0.committer.transact(Durability::Buffered, closure).await
    }

    fn remember(&self, directory: InodeId, began: Moment) {
        let now = self.0.shared.clock.now();
        let mut state = self.0.state.lock();
        if state.listed.len() >= MOST_REMEMBERED {
            state.listed.retain(|_, listed| self.expires(*listed) > now);
            if state.listed.len() >= MOST_REMEMBERED {
                state.listed.clear();
            }
        }
        state.listed.insert(directory, Listed { began, took: now.since(began) });
    }
}
