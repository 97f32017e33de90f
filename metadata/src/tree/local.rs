//! The tree that is served in this process: its parts, its start and its end.

use std::fmt;
use std::io::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::object::Bucket;
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use tracing::{debug, warn};

use crate::adopt::not_whole;
use crate::commit::{Committer, Txn};
use crate::dump::{self, DumpReport, Frozen};
use crate::follow::{Follower, Following, Lag};
use crate::fsck::{self, FsckReport, Repair};
use crate::gc::{self, Collector, GcReport};
use crate::import::Importer;
use crate::kv::Durability;
use crate::mover::{Mover, free_unfinished};

use crate::records::{
    Awaited, Change, Look, OutsideChange, OutsideListener, Records, Shared, Spelling, Stored, TreeSettings,
    asking_session, names_of, path_or_name,
};
use crate::schema::{
    Counters, ImportState, Inode, Keys, OWN_NUMBERS, Partial, SessionRecord, Tag, encode_plain,
};

/// How long `close` goes on moving and deleting objects.
const CLOSE_DRAIN: Duration = Duration::from_secs(5);
/// How long it then waits for listings and moves under way before it cancels them.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);
/// Claims, and loans, whose keys are kept in memory; where there are more, each is asked for.
const MOST_KNOWN: usize = 4096;
/// Files whose first content is looked for at once.
const BEGINNING_AT_ONCE: usize = 32;

/// What a tree is made of. Cheap to clone, like its parts.
#[derive(Clone)]
pub struct TreeParts {
    /// The volume whose records these are.
    pub volume: VolumeId,
    /// The engine, behind its committer.
    pub committer: Committer,
    /// Where the objects are; a tree without a bucket has only owned blobs.
    pub bucket: Option<Bucket>,
    /// A number that no other session of this volume had or will have.
    pub session: u64,
    /// Time.
    pub clock: Clock,
    /// Chance, for the names of owned blobs.
    pub rng: Rng,
    /// Where listings and the mover run, as a child group.
    pub tasks: TaskGroup,
}

/// A directory tree in a key-value engine, over a bucket. The one active server of its volume.
///
/// Dropping it without [`super::Tree::close`] leaves its tasks to their group; nothing acknowledged as durable is lost.
pub struct LocalTree {
    pub(crate) committer: Committer,
    pub(super) shared: Arc<Shared>,
    pub(super) importer: Option<Importer>,
    pub(super) mover: Option<Mover>,
    /// Of a read-only tree, the one that it follows.
    pub(super) following: OnceLock<Arc<Following>>,
    /// Whoever begins or ends the counting of a directory holds this meanwhile.
    pub(super) counting: tokio::sync::Mutex<()>,
    /// Whoever looks for the first content of a file holds that of its number meanwhile, and who opens the same one waits.
    pub(super) beginning: [tokio::sync::Mutex<()>; BEGINNING_AT_ONCE],
    rng: Rng,
    tasks: TaskGroup,
}

impl LocalTree {
    /// Opens the tree of a volume, or begins an empty one. Settles what an earlier session left undone: writes that
    /// may or may not have happened, inodes that it had open without names.
    pub async fn open(parts: TreeParts, settings: TreeSettings) -> Result<Self> {
        let tree = Self::prepare(parts, settings).await?;
        if let Some(mover) = &tree.mover {
            mover.start();
            gc::start(mover, &tree.tasks);
        }
        Ok(tree)
    }

    /// Shows from now on what the tree of `follower` has, and looks every so often what changed there; at [`Self::catch_up`] alone
    /// where that is zero.
    ///
    /// # Errors
    /// `Bug` on a tree that does not [follow](TreeSettings::follows), or does already.
    pub fn follow(&self, follower: Follower, every: Duration) -> Result<()> {
        let (committer, shared, importer) =
            (self.committer.clone(), self.shared.clone(), self.importer.clone());
        let following = Arc::new(Following::new(follower, committer, shared, importer));
        if !self.shared.settings.follows || self.following.set(following.clone()).is_err() {
            return Err(Error::bug("this tree follows no other, or does already"));
        }
        if !every.is_zero() {
            following.start(every, &self.tasks);
        }
        Ok(())
    }

    /// Returns when it shows all that the tree which it follows had durably when this was called; at once where it follows none.
    ///
    /// # Errors
    /// Those of a tree that cannot be looked at: what is shown stays as it is.
    pub async fn catch_up(&self) -> Result<()> {
        match self.following.get() {
            Some(following) => following.catch_up().await,
            None => Ok(()),
        }
    }

    /// How far it is behind the tree that it follows, if it does.
    pub fn lag(&self) -> Option<Lag> {
        self.following.get().map(|following| following.lag())
    }

    /// All of that but the mover's task: objects are moved and deleted by `drain` only.
    pub(super) async fn prepare(parts: TreeParts, settings: TreeSettings) -> Result<Self> {
        let tasks = parts.tasks.child("tree");
        let tree = Self::assemble(parts, settings, tasks);
        tree.begin().await?;
        if tree.shared.settings.read_only {
            return Ok(tree);
        }
        tree.load_quotas().await?;
        tree.expect_guests().await?;
        if let Some(mover) = &tree.mover {
            mover.settle_all().await?;
        }
        tree.end_dead_sessions().await?;
        if tree.mover.is_none() {
            free_unfinished(&tree.committer, &tree.shared).await?;
        }
        Ok(tree)
    }

    fn assemble(parts: TreeParts, settings: TreeSettings, tasks: TaskGroup) -> Self {
        let TreeParts { volume, committer, bucket, session, clock, rng, .. } = parts;
        let spelling = Spelling::of(bucket.as_ref().map(Bucket::url));
        let read_only = settings.read_only;
        let shared = Arc::new(Shared::new(Keys(volume), settings, session, clock, spelling));
        let importer = bucket
            .as_ref()
            .map(|bucket| Importer::new(bucket.clone(), committer.clone(), shared.clone(), tasks.clone()));
        let mover = match (&bucket, &importer) {
            (Some(bucket), Some(importer)) if !read_only => {
                let (bucket, importer) = (bucket.clone(), importer.clone());
                let (committer, shared) = (committer.clone(), shared.clone());
                Some(Mover::new(bucket, committer, shared, importer, rng.clone(), tasks.clone()))
            }
            _ => None,
        };
        let following = OnceLock::new();
        let (counting, beginning) = Default::default();
        Self { committer, shared, importer, mover, following, counting, beginning, rng, tasks }
    }

    /// Makes the root of a new volume, and notes this session.
    async fn begin(&self) -> Result<()> {
        self.transact(Durability::Buffered, |change| {
            if let Some(mark) = change.reads().get(&change.keys().loading())? {
                return Err(not_whole(&Partial::decode(mark)?));
            }
            // Few keys are claimed or lent at a time, and each new file asks about its own.
            for tag in [Tag::Claim, Tag::Loan] {
                let (first, end) = change.keys().family(tag);
                change.txn.know_whole(first, end, MOST_KNOWN)?;
            }
            let session = SessionRecord { started: change.now, is_guest: false };
            change.put(change.keys().session(change.shared.session), session.encode())?;
            change.put(change.keys().known(change.shared.session), encode_plain(b""))?;
            if change.shared.settings.follows {
                change.put(change.keys().copied(), encode_plain(b""))?;
            }
            if change.find(InodeId::ROOT)?.is_some() {
                return Ok(());
            }
            let mut root = Inode::unset(FileKind::Directory, change.now);
            root.kept = true;
            change.put_inode(InodeId::ROOT, &root)?;
            let prefix = (change.shared.spelling != Spelling::Nothing).then(String::new);
            change.put_import_state(InodeId::ROOT, &ImportState { prefix, listed: None })?;
            let next_ino = if change.shared.settings.follows { OWN_NUMBERS } else { InodeId::ROOT.0 + 1 };
            let counters = Counters { next_ino, inodes: 1, bytes: 0 };
            change.put(change.keys().counters(), counters.encode())
        })
        .await
    }

    /// Notes that another mount writes to this tree as `session`, which it is known by in the names of what it writes. Returns
    /// whether it was expected: it goes on then.
    pub(crate) async fn welcome(&self, session: u64) -> Result<bool> {
        self.check_writable()?;
        // First: what it wrote is kept from here on, if it is not gone.
        let was_expected = self.shared.guests.welcome(session);
        let note = move |change: &mut Change<'_, '_>| {
            let record = SessionRecord { started: change.now, is_guest: true };
            change.put(change.keys().session(session), record.encode())?;
            change.put(change.keys().known(session), encode_plain(b""))
        };
        match self.transact(Durability::Durable, note).await {
            Ok(()) => Ok(was_expected),
            Err(error) => {
                self.shared.guests.forget(session);
                if was_expected {
                    self.shared.guests.expect(session);
                }
                Err(error)
            }
        }
    }

    /// A path of an inode, or the one that it had last.
    pub async fn path(&self, ino: InodeId) -> Result<String> {
        let path = self.look(move |look| path_or_name(look, &look.inode(ino)?)).await?;
        Ok(String::from_utf8_lossy(&path).into_owned())
    }

    /// Whether a file ends with its last handle: it has no name, and deleted ones are not kept.
    pub async fn is_ending(&self, ino: InodeId) -> Result<bool> {
        let is_kept = self.shared.settings.trash_ms > 0;
        self.look(move |look| Ok(!is_kept && look.find(ino)?.is_some_and(|inode| inode.nlink == 0))).await
    }

    /// The volume whose tree this is.
    pub(crate) fn volume(&self) -> VolumeId {
        self.shared.keys.0
    }

    /// Whether this process surely may act for the volume now.
    pub(crate) fn expect_sure(&self) -> Result<()> {
        self.committer.expect_sure()
    }

    /// Waits until this process may act for the volume again, where that is for a renewal of the lease.
    pub(crate) async fn regain(&self) -> Result<()> {
        self.committer.regain().await
    }

    /// Whether other mounts may write to it through this process.
    pub fn serves(&self) -> bool {
        self.shared.settings.serves
    }

    /// Lets a session go that is to be ended: it does not come back.
    pub(crate) fn forget_guest(&self, session: u64) {
        self.shared.guests.forget(session);
    }

    /// Whether there are quotas.
    pub(crate) fn has_quotas(&self) -> bool {
        !self.shared.quotas.is_empty()
    }

    /// Whether a session is one that the process before served, and has time to come.
    pub(crate) fn expects(&self, session: u64) -> bool {
        self.shared.guests.has(session)
    }

    /// Hears what others than a session change.
    pub(crate) fn listen_as(&self, session: u64) -> OutsideListener {
        self.shared.outside.listen_as(session)
    }

    /// Whether a session has an inode open.
    pub(crate) fn has_open(&self, session: u64, ino: InodeId) -> bool {
        self.shared.guests.has_open(session, ino)
    }

    /// What a session has open, as often as it has.
    pub(crate) fn opened_by(&self, session: u64) -> Vec<InodeId> {
        self.shared.guests.opened_by(session)
    }

    /// Notes that a session is at these files' own paths, as it was when the process before served it.
    pub(crate) fn hold(&self, session: u64, files: &[InodeId]) {
        files.iter().for_each(|ino| self.shared.holds.take(*ino, session));
    }

    /// A session is at a file's own path no more, and has not said what came of it.
    pub(crate) async fn let_go(&self, ino: InodeId, session: u64) -> Result<()> {
        match (&self.mover, self.shared.holds.release(ino, session)) {
            (Some(mover), true) => mover.doubt_write(ino).await,
            _ => Ok(()),
        }
    }

    /// The names from the root to an inode's first name; empty for the root.
    pub async fn ino_path(&self, ino: InodeId) -> Result<Vec<Bytes>> {
        if ino == InodeId::ROOT {
            return Ok(Vec::new());
        }
        self.look(move |look| names_of(look, &look.inode(ino)?)).await
    }

    /// Works until no object is left to be moved or deleted that can be now.
    pub async fn drain(&self) -> Result<()> {
        match &self.mover {
            Some(mover) => mover.drain().await,
            None => Ok(()),
        }
    }

    /// Finds, and frees unless `dry_run`, what dead sessions left in the bucket: owned blobs that nothing refers to,
    /// unfinished uploads, staged files.
    ///
    /// # Errors
    /// `ReadOnly` on a read-only tree; `Unsupported` where another tree may refer to the bucket's blobs; `Corrupt` when
    /// a record cannot be read, and nothing is freed then; `Unavailable` when some could not be deleted yet.
    pub async fn collect_garbage(&self, dry_run: bool) -> Result<GcReport> {
        self.check_writable()?;
        let Some(mover) = &self.mover else { return Ok(GcReport { dry_run, ..GcReport::default() }) };
        Collector { mover, pause: Duration::ZERO, dry_run }.collect().await
    }

    /// Writes the tree as it is at this moment to `out`, for backup or for another engine.
    ///
    /// # Errors
    /// As [`dump::dump`].
    pub async fn dump(&self, out: impl Write + Send + 'static) -> Result<DumpReport> {
        dump::dump(&self.committer, self.shared.keys, self.shared.now(), out).await
    }

    /// Holds on to the tree as it is at this moment, for a dump that may not name every blob.
    ///
    /// # Errors
    /// As [`dump::freeze`].
    pub async fn freeze(&self) -> Result<Frozen> {
        dump::freeze(&self.committer, self.shared.keys, self.shared.now()).await
    }

    /// Checks the tree against itself and its bucket; with `repair`, mends what can be mended without destroying bytes.
    /// Nobody else may use the tree while it is being repaired.
    ///
    /// # Errors
    /// `ReadOnly` on a read-only tree; `Unsupported` for one without a bucket; others when engine or bucket cannot be
    /// read at all.
    pub async fn fsck(&self, repair: impl Into<Repair>) -> Result<FsckReport> {
        self.check_writable()?;
        let mover = self.mover.as_ref().ok_or_else(fsck::no_bucket)?;
        fsck::check(mover, repair.into()).await
    }

    pub(super) async fn shut_down(&self) -> Result<()> {
        tokio::select! {
            // What others see in the bucket is then what was last seen here. What is left is done after the next start.
            drained = self.drain() => drained.unwrap_or_else(|error| warn!(%error, "moves and deletions are left")),
            () = self.shared.clock.sleep(CLOSE_DRAIN) => debug!("moves and deletions are left for the next start"),
        }
        self.tasks.shutdown(CLOSE_DEADLINE).await;
        if !self.shared.settings.read_only {
            let own = self.shared.session;
            self.transact(Durability::Buffered, move |change| change.delete(change.keys().session(own)))
                .await?;
        }
        self.committer.sync().await?;
        self.committer.close().await
    }

    /// Refuses changes on a read-only tree.
    pub(super) fn check_writable(&self) -> Result<()> {
        match self.shared.settings.read_only {
            true => Err(Error::new(ErrorKind::ReadOnly, "the volume is mounted read-only").with_hint(
                "mount it without `ro` (`--read-only`, `--dataset`), and with credentials that may write",
            )),
            false => Ok(()),
        }
    }

    /// Returns when the directory can be looked at.
    pub(super) async fn ensure_listed(&self, directory: InodeId) -> Result<()> {
        match &self.importer {
            Some(importer) => importer.ensure(directory).await,
            None => Ok(()),
        }
    }

    /// Notes that a directory is read from its start.
    pub(super) fn walk_on(&self, directory: InodeId) {
        let Some(importer) = &self.importer else { return };
        if directory != InodeId::ROOT
            && let Some(Ok(inode)) = self.look_now(|look| look.inode(directory))
        {
            importer.walk_on(inode.parent, &inode.name);
        }
    }

    /// Whether [`Self::ensure_listed`] would not wait.
    pub(super) fn is_ready(&self, directory: InodeId) -> bool {
        self.importer.as_ref().is_none_or(|importer| importer.is_ready(directory))
    }

    /// The session that asks for what is being done.
    pub(super) fn asking(&self) -> u64 {
        asking_session(self.shared.session)
    }

    pub(super) fn fresh_name(&self) -> String {
        self.rng.name()
    }

    pub(super) async fn look<T>(&self, mut work: impl FnMut(&Look<'_, '_>) -> Result<T> + Send) -> Result<T> {
        self.committer.read(|view| work(&Look::new(view, &self.shared))).await
    }

    pub(super) fn look_now<T>(&self, mut work: impl FnMut(&Look<'_, '_>) -> Result<T>) -> Option<Result<T>> {
        self.committer.read_now(|view| work(&Look::new(view, &self.shared)))
    }

    pub(super) async fn transact<T: Send + 'static>(
        &self,
        durability: Durability,
        mut work: impl FnMut(&mut Change<'_, '_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (shared, session) = (self.shared.clone(), self.asking());
        let closure = move |txn: &mut Txn<'_>| run(txn, &shared, session, &mut work);
        let (value, made) = self.committer.transact_in_time(durability, closure).await?;
        self.tell(made);
        Ok(value)
    }

    /// Has other mounts that write to this tree hear of what the one that asks changed, and the next commit know of the layouts.
    fn tell(&self, Made { told, laid }: Made) {
        let session = self.asking();
        laid.into_iter().for_each(|(awaited, stored)| self.shared.layouts.learn(awaited, stored));
        told.into_iter().for_each(|change| self.shared.outside.tell_from(change, session));
    }

    /// As `change`, for what was done already and is lost otherwise: it waits for room, however long.
    pub(super) async fn change_patiently<T: Send + 'static>(
        &self,
        mut work: impl FnMut(&mut Change<'_, '_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.check_writable()?;
        let (shared, session) = (self.shared.clone(), self.asking());
        let closure = move |txn: &mut Txn<'_>| run(txn, &shared, session, &mut work);
        let (value, made) = self.committer.transact(Durability::Buffered, closure).await?;
        self.tell(made);
        Ok(value)
    }

    /// A change of a writable tree, answered at once.
    pub(super) async fn change<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Change<'_, '_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.check_writable()?;
        self.transact(Durability::Buffered, work).await
    }
}

/// What others are told of a transaction once it is made, and what layouts are known of it.
struct Made {
    told: Vec<OutsideChange>,
    laid: Vec<(Awaited, Arc<Stored>)>,
}

/// One transaction. It may run elsewhere than who asks.
fn run<T>(
    txn: &mut Txn<'_>,
    shared: &Shared,
    session: u64,
    work: &mut impl FnMut(&mut Change<'_, '_>) -> Result<T>,
) -> Result<(T, Made)> {
    let mut change = Change::new(txn, shared);
    change.session = session;
    let value = work(&mut change)?;
    let (told, laid) = (std::mem::take(&mut change.outside), change.end_layouts());
    Ok((value, Made { told, laid }))
}

impl fmt::Debug for LocalTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalTree").field("volume", &self.shared.keys.0).finish_non_exhaustive()
    }
}
