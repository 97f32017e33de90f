//! The composition root: from a bucket URL and settings to a volume in use.
//!
//! Decides where the tree lives (DESIGN section 4): in the bucket itself where the store honours conditional puts,
//! in LMDB inside a `file://` bucket, and in LMDB in the state directory for everything else: mounts that may not
//! write, and stores that cannot say who wrote first.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use forebay_cache::Node;
use forebay_core::{Error, ErrorKind, ObjectKey, Result, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::mem::Budget;
use forebay_io::object::{Bucket, BucketUrl};
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use forebay_metadata::adopt::looks_copied;
use forebay_metadata::commit::{Committer, CommitterSettings, Guard, Txn};
use forebay_metadata::follow::{self, Follower, Leader};
use forebay_metadata::kv::{Durability, Engine, SlateEngine, after};
use forebay_metadata::schema::{Keys, encode_plain};
use forebay_metadata::tree::{GcSettings, ImportSettings, LocalTree, TreeParts, TreeSettings};
use forebay_metadata::volume_file::{Access, Claim, EngineKind, VolumeFile, VolumeRecord};
use futures::future::{BoxFuture, FutureExt};

use crate::settings::{VolumeSettings, WriteSettings};
use crate::staging::{self, Durable, Staging};
use crate::standby::Standby;
use crate::{Parts, Volume, Writeback};
use crate::{compact, control, tree_file};

/// How often a tree that another mount changes meanwhile is copied until it is given up.
const COPY_TRIES: u32 = 3;

/// Longer than any mount lives.
const CENTURY_MS: u64 = 100 * 365 * 24 * 60 * 60 * 1000;
/// How long one who holds the volume is looked for before its lease is watched.
const JOIN_FIRST: Duration = Duration::from_secs(3);
/// Between two tries of one who stands by to hold a volume, in which its lease is watched besides.
const STANDBY_PAUSE: Duration = Duration::from_secs(1);
/// Between two tries to join or to hold a volume.
const JOIN_PAUSE: Duration = Duration::from_millis(500);

/// Opens the volume of the bucket that `source` names.
///
/// # Errors
/// `Invalid` for a malformed URL or settings; `NotFound` when the bucket does not exist; `Denied` for refused
/// credentials; `Unavailable` when the store cannot be reached; `Conflict` when another mount writes to it.
pub async fn connect(source: &str, settings: VolumeSettings) -> Result<Arc<Volume>> {
    settings.validate()?;
    if !settings.join.is_on() || settings.read_only || settings.dataset {
        return connect_alone(source, settings).await;
    }
    let until = tokio::time::Instant::now() + settings.join.deadline();
    loop {
        let why = match join(source, &settings).await {
            Ok(volume) => return Ok(volume),
            Err(error) if error.kind() != ErrorKind::Unavailable => return Err(error),
            Err(error) if settings.join.only => error,
            Err(error) => match connect_alone(source, settings.clone()).await {
                // Somebody else was faster, or lives and was slow to answer.
                Err(held) if held.kind() == ErrorKind::Conflict => held.with_source(error),
                connected => return connected,
            },
        };
        if tokio::time::Instant::now() >= until {
            return Err(why);
        }
        tracing::info!(error = %why, "waiting for a process that serves the tree");
        tokio::time::sleep(JOIN_PAUSE).await;
    }
}

/// Opens the volume of the bucket that `source` names, and joins nobody. With `standby` it waits while another process holds it.
///
/// # Errors
/// As [`connect`].
pub async fn hold(source: &str, settings: VolumeSettings, standby: bool) -> Result<Arc<Volume>> {
    let mut has_told = false;
    loop {
        match connect_alone(source, settings.clone()).await {
            Err(error) if standby && error.kind() == ErrorKind::Conflict => {
                if !std::mem::replace(&mut has_told, true) {
                    tracing::info!(%error, "standing by");
                }
                tokio::time::sleep(STANDBY_PAUSE).await;
            }
            held => return held,
        }
    }
}

/// Joins the mount that holds the volume.
///
/// # Errors
/// `Unavailable` where nobody does, or that one cannot be reached or serves nobody; `Denied` where it knows another secret.
async fn join(source: &str, settings: &VolumeSettings) -> Result<Arc<Volume>> {
    let url: BucketUrl = source.parse()?;
    let bucket = Bucket::open(&url, &settings.store).await?;
    bucket.check().await?;
    let (bucket, home, part_copy) = choose_home(bucket, &settings.state_directory).await?;
    let engine = match home {
        Home::Bucket => EngineKind::SlateDb,
        Home::Directory { inside_bucket: true, .. } => EngineKind::Lmdb,
        Home::Directory { .. } => {
            let fact = "the tree of this bucket is one host's, as its store ignores conditional puts";
            return Err(Error::new(ErrorKind::Unsupported, fact)
                .with_hint("mount it without --join-secret, on that host"));
        }
    };
    let record = VolumeFile::of(&bucket, engine).look().await?;
    let Some(record) = record.filter(|record| record.lease.is_some()) else {
        return Err(Error::new(ErrorKind::Unavailable, "nobody holds the volume"));
    };
    let tasks = TaskGroup::new("volume");
    let tree = settings.join.join(&bucket, &record, JOIN_FIRST).await?;
    tracing::info!(url = %bucket.url(), server = ?tree.reached(), "joined: another process serves the tree");
    settings.tell_what_counts_elsewhere();
    let blocks = Node::open(bucket.clone(), settings.cache()).await?;
    blocks.join(&settings.cache(), record.volume).await?;
    let tree = Arc::new(tree);
    let standby = (!settings.join.only).then(|| Standby::start(source, settings, tree.clone()));
    let deadline_ms = settings.write.deadline_ms.max(settings.join.deadline_ms);
    Ok(Volume::assemble(Parts {
        tree,
        blocks,
        bucket,
        volume: record.volume,
        read_only: false,
        claim: None,
        write: WriteSettings { deadline_ms, ..settings.write.clone() },
        part_copy,
        writeback: None,
        prefetch: settings.prefetch(),
        budget: Budget::new(settings.budget_bytes()),
        tasks,
        clock: Clock::system(),
        server: None,
        standby,
    }))
}

pub(crate) async fn connect_alone(source: &str, settings: VolumeSettings) -> Result<Arc<Volume>> {
    let records = Records::open(source, &settings).await?;
    let claim = records.claim.clone();
    if let Err(error) = refuse_copy(source, &records, &settings).await {
        let closed = records.close().await;
        closed.unwrap_or_else(|error| tracing::warn!(%error, "closing the volume"));
        return Err(error);
    }
    let opened = open(records, settings).await;
    if opened.is_err() {
        give_up(claim).await;
    }
    opened
}

/// Keeps a mount for writing from taking the objects of a copied bucket for an outsider's, and what its tree knows with them.
/// Only a bucket that became a volume under another URL is looked at, and once under each: what outsiders replace later is theirs.
async fn refuse_copy(source: &str, records: &Records, settings: &VolumeSettings) -> Result<()> {
    let url = records.bucket.url();
    if records.bucket.is_read_only()
        || settings.must_exist
        || records.volume == VolumeId::of_url(&url.to_string())
    {
        return Ok(());
    }
    let (tree, keys) = (records.committer.engine().snapshot()?, Keys(records.volume));
    let home = encode_plain(url.to_string().as_bytes());
    if tree.get(&keys.home()).await?.as_ref() == Some(&home) {
        return Ok(());
    }
    match looks_copied(&*tree, keys, &records.bucket).await? {
        false => {
            let note = move |txn: &mut Txn<'_>| txn.put(keys.home(), home.clone());
            records.committer.transact(Durability::Buffered, note).await
        }
        true => {
            let fact = format!(
                "{source} seems to be a copy: its objects have the sizes that its tree knows, and other versions"
            );
            Err(Error::new(ErrorKind::Conflict, fact).with_hint(
                "`forebay volume adopt` takes it for the same volume; mounted as it is, it would lose modes, links and more",
            ))
        }
    }
}

/// Gives a volume back that could not be opened: the next mount would wait for the lease of one that never was.
async fn give_up(claim: Option<Arc<Claim>>) {
    if let Some(claim) = claim.and_then(Arc::into_inner)
        && let Err(error) = claim.release().await
    {
        tracing::warn!(%error, "the volume's lease stays until it runs out");
    }
}

/// The records of a volume, claimed, with what they lie in and what they are about.
pub(crate) struct Records {
    pub(crate) bucket: Bucket,
    home: Home,
    claim: Option<Arc<Claim>>,
    /// Whether the store copies ranges of objects into uploads, and holds to conditions on them.
    part_copy: bool,
    writeback: Option<Writeback>,
    pub(crate) volume: VolumeId,
    pub(crate) committer: Committer,
    /// Of a read-only mount: the tree of the one for writing, if there is one.
    follower: Option<Follower>,
}

impl Records {
    pub(crate) async fn open(source: &str, settings: &VolumeSettings) -> Result<Self> {
        settings.validate()?;
        let url: BucketUrl = source.parse()?;
        let bucket = Bucket::open(&url, &settings.store).await?;
        bucket.check().await?;
        if settings.must_exist && !exists(&bucket, &settings.state_directory).await? {
            let fact = format!("{url} is no volume: nobody ever mounted it for writing");
            return Err(Error::new(ErrorKind::NotFound, fact)
                .with_hint("check the URL; it names a bucket, and a prefix in it, as it is mounted"));
        }
        let read_only = settings.read_only || settings.dataset;
        let (bucket, home, part_copy) = match read_only {
            true => (bucket.read_only(), Home::of_reader(&settings.state_directory, &url), false),
            false => choose_home(bucket, &settings.state_directory).await?,
        };
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let address = if settings.join.is_on() { Some(settings.join.advertised()?) } else { None };
        let claim = match home.claim(&bucket, access, settings.take_over, address).await {
            Err(error) if error.kind() == ErrorKind::Conflict => {
                return Err(match heal(&bucket, &home, settings).await {
                    Ok(()) => error,
                    Err(why) => error.context(format!("bytes that were staged here stay here ({why})")),
                });
            }
            claim => claim?.map(Arc::new),
        };
        let recorded = claim.as_ref().and_then(|claim| claim.record()).cloned();
        let volume =
            recorded.as_ref().map_or_else(|| VolumeId::of_url(&url.to_string()), |record| record.volume);
        let opened = async {
            let record = claim.as_ref().and_then(|claim| claim.record());
            let writeback = match read_only {
                true => None,
                false => {
                    let state = &settings.state_directory;
                    staging::open(state, &bucket, volume, record, &settings.writeback).await?
                }
            };
            let engine = home.engine(&bucket, settings).await?;
            if read_only {
                // Of a tree that is there no more, or cannot be had now, nothing is shown.
                follow::forget(Keys(volume), &*engine).await?;
            }
            let follower =
                match recorded.as_ref().filter(|_| read_only).and_then(|record| follower(&bucket, record)) {
                    Some(follower) => copy_tree(&bucket, follower, &*engine).await,
                    None => None,
                };
            Ok((engine, writeback, follower.filter(|_| !settings.dataset)))
        };
        match opened.await {
            Ok((engine, writeback, follower)) => {
                let engine = match &writeback {
                    // No record outlives the bytes that it is about.
                    Some(writeback) => after(Durable::new(&writeback.staging, &bucket), engine),
                    None => engine,
                };
                let committer = start_committer(engine, claim.as_ref(), settings.writeback.enabled);
                Ok(Self { bucket, home, claim, part_copy, writeback, volume, committer, follower })
            }
            Err(error) => {
                give_up(claim).await;
                Err(error)
            }
        }
    }

    /// What this host has staged of the volume, if it ever did.
    pub(crate) fn staging(&self) -> Option<&Arc<Staging>> {
        self.writeback.as_ref().map(|writeback| &writeback.staging)
    }

    /// Makes everything durable and gives the volume back.
    pub(crate) async fn close(self) -> Result<()> {
        self.committer.sync().await?;
        self.committer.close().await?;
        match self.claim.and_then(Arc::into_inner) {
            Some(claim) => claim.release().await,
            None => Ok(()),
        }
    }
}

/// The tree of the mount for writing that a bucket's record tells of.
fn follower(bucket: &Bucket, record: &VolumeRecord) -> Option<Follower> {
    let leader = match (record.engine, bucket.url().directory()) {
        (EngineKind::Lmdb, Some(directory)) => Leader::Directory(tree_directory(&directory)),
        (EngineKind::SlateDb, None) => Leader::Bucket(bucket.clone()),
        _ => {
            let error = Error::new(ErrorKind::Unsupported, "its tree is of another kind of store");
            warn_of_no_tree(bucket, &error);
            return None;
        }
    };
    Some(Follower::new(leader, Keys(record.volume)))
}

/// Takes over what the mount for writing knows beyond the objects, for a read-only one. Where that cannot be had, the objects
/// are what there is. Gives the follower back where it may do better later.
async fn copy_tree(bucket: &Bucket, mut follower: Follower, into: &dyn Engine) -> Option<Follower> {
    let mut tries = 1;
    loop {
        match follower.copy(into).await {
            Ok(records) => {
                tracing::info!(records, "the tree is shown as it was now, and objects as they are listed");
                return Some(follower);
            }
            // The writer may have deleted what it needed no more, and this copy did.
            Err(error) if tries < COPY_TRIES && may_pass(error.kind()) => {
                tracing::info!(%error, "the tree is copied from its beginning again")
            }
            Err(error) => {
                warn_of_no_tree(bucket, &error);
                return Some(follower).filter(|_| may_pass(error.kind()));
            }
        }
        tries += 1;
    }
}

fn warn_of_no_tree(bucket: &Bucket, error: &Error) {
    tracing::warn!(
        url = %bucket.url(),
        %error,
        "the tree of this bucket, which is written through Forebay, cannot be read: its objects are shown, without \
         links, modes, packed files, and what is not at its own path yet"
    );
}

/// Whether a copy that is begun anew may do better.
fn may_pass(kind: ErrorKind) -> bool {
    !matches!(kind, ErrorKind::Denied | ErrorKind::Unsupported)
}

/// Where another has the volume, uploads what this host staged of it before.
async fn heal(bucket: &Bucket, home: &Home, settings: &VolumeSettings) -> Result<()> {
    let record = match home.claim(bucket, Access::ReadOnly, false, None).await {
        Ok(Some(claim)) => claim.record().cloned(),
        _ => None,
    };
    match record {
        Some(record) => staging::heal(&settings.state_directory, bucket, &record).await,
        None => Ok(()),
    }
}

/// Where the records of a tree lie.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Home {
    /// In the bucket, as a log-structured tree.
    Bucket,
    /// In a directory of this host; `shared` says that the directory is inside the bucket.
    Directory { path: PathBuf, inside_bucket: bool },
}

impl Home {
    /// In a bucket that is a directory.
    fn in_bucket(directory: PathBuf) -> Self {
        Self::Directory { path: tree_directory(&directory), inside_bucket: true }
    }

    /// In the state directory, apart from the trees of other buckets.
    fn local(state: &Path, url: &BucketUrl) -> Self {
        Self::of_url(state.join("trees"), url)
    }

    /// The same of a read-only mount, which nobody may take for one that is written to.
    fn of_reader(state: &Path, url: &BucketUrl) -> Self {
        Self::of_url(state.join("read-only"), url)
    }

    fn of_url(folder: PathBuf, url: &BucketUrl) -> Self {
        let name: String = url
            .to_string()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' })
            .collect();
        Self::Directory { path: folder.join(name), inside_bucket: false }
    }

    /// Where on this host it is, or in what it sees as a directory; nowhere for one in a bucket that is none.
    fn directory(&self) -> &Path {
        match self {
            Self::Bucket => Path::new(""),
            Self::Directory { path, .. } => path,
        }
    }

    /// `address` is where others reach the tree, if this process is to serve it.
    async fn claim(
        &self,
        bucket: &Bucket,
        access: Access,
        take_over: bool,
        address: Option<String>,
    ) -> Result<Option<Claim>> {
        let engine = match self {
            // Nothing is leased, but a volume has one name for all who cache blocks of it.
            _ if access == Access::ReadOnly => EngineKind::Lmdb,
            Self::Bucket => EngineKind::SlateDb,
            Self::Directory { inside_bucket: true, .. } => EngineKind::Lmdb,
            // The tree's own lock keeps it to one process of this host; there is nothing to lease in the bucket.
            Self::Directory { inside_bucket: false, .. } => return Ok(None),
        };
        VolumeFile::of(bucket, engine).at(address).open_or_create(access, take_over).await.map(Some)
    }

    async fn engine(&self, bucket: &Bucket, settings: &VolumeSettings) -> Result<Arc<dyn Engine>> {
        Ok(match self {
            Self::Bucket => Arc::new(SlateEngine::open(bucket, &settings.engine()).await?),
            Self::Directory { path, inside_bucket } => Arc::new(tree_file::open(path, *inside_bucket).await?),
        })
    }
}

/// Where the tree of a bucket that is a directory lies.
fn tree_directory(bucket: &Path) -> PathBuf {
    bucket.join(".forebay/tree.lmdb")
}

/// Whether there is a tree that takes changes.
async fn exists(bucket: &Bucket, state: &Path) -> Result<bool> {
    let home = match bucket.url().directory() {
        Some(directory) => Home::in_bucket(directory),
        None if bucket.head(&ObjectKey::new(VolumeRecord::KEY)).await?.is_some() => return Ok(true),
        None => Home::local(state, bucket.url()),
    };
    Ok(home.directory().exists())
}

/// Where a tree that takes changes lives, and whether the store copies ranges of a known version.
async fn choose_home(bucket: Bucket, state: &Path) -> Result<(Bucket, Home, bool)> {
    if let Some(directory) = bucket.url().directory() {
        let home = Home::in_bucket(directory);
        return Ok((bucket, home, true));
    }
    let capabilities = bucket.probe().await?;
    if !capabilities.writable {
        return Err(Error::new(
            ErrorKind::Denied,
            format!("{} cannot be written with these credentials", bucket.url()),
        )
        .with_hint("mount it with --read-only, or give credentials that may put and delete objects"));
    }
    let part_copy = capabilities.part_copy && capabilities.conditional_part_copy;
    let local = Home::local(state, bucket.url());
    if capabilities.safe_for_many_writers() {
        if !local.directory().exists() || has_tree(&bucket).await? {
            return Ok((bucket, Home::Bucket, part_copy));
        }
        tracing::warn!(
            url = %bucket.url(),
            directory = %local.directory().display(),
            "the tree of this bucket was begun on this host, when the store ignored conditional puts, and stays there: to have it in \
             the bucket, write it with `forebay volume dump`, move the directory away, and read it with `forebay volume load`"
        );
        return Ok((bucket, local, part_copy));
    }
    if has_tree(&bucket).await? {
        let fact =
            "the volume's tree is in the bucket, and the store, as it answers now, ignores conditional puts";
        return Err(Error::new(ErrorKind::Unsupported, fact).with_hint(
            "two writers could undo each other's changes: `forebay doctor` shows what it does; --read-only shows the tree as it is",
        ));
    }
    tracing::warn!(
        url = %bucket.url(),
        "the store ignores conditional puts: names, modes and links are kept on this host only, and no second host \
         may mount this bucket for writing"
    );
    Ok((bucket, local, part_copy))
}

/// Whether a tree was begun in a bucket that is no directory.
async fn has_tree(bucket: &Bucket) -> Result<bool> {
    let claim = VolumeFile::of(bucket, EngineKind::SlateDb).open_or_create(Access::ReadOnly, false).await?;
    Ok(claim.record().is_some_and(|record| record.engine == EngineKind::SlateDb))
}

/// Whether other mounts may write to the volume through this one.
fn serves(settings: &VolumeSettings) -> bool {
    settings.join.is_on() && !settings.read_only && !settings.dataset
}

/// A data set is listed once: what it holds is taken as fixed.
fn imports(settings: &VolumeSettings) -> ImportSettings {
    let import = settings.import.clone();
    if settings.dataset { ImportSettings { ttl_ms: CENTURY_MS, ..import } } else { import }
}

fn tree_settings(settings: &VolumeSettings, home: &Home) -> TreeSettings {
    // A tree in the state directory is one host's; there may be another's over the same bucket.
    let is_only_tree = !matches!(home, Home::Directory { inside_bucket: false, .. });
    TreeSettings {
        read_only: settings.read_only || settings.dataset,
        serves: serves(settings),
        import: imports(settings),
        delete_delay_ms: settings.gc.delete_delay_ms,
        trash_ms: settings.trash_ms,
        gc: GcSettings { is_only_tree, interval_ms: settings.gc.interval_ms, ..GcSettings::default() },
        ..TreeSettings::default()
    }
}

/// Runs transactions for as long as the claim holds: nothing is acknowledged after it is lost.
///
/// Who writes back needs no store to close a file: its names, too, wait for the store while the lease has lapsed.
fn start_committer(engine: Arc<dyn Engine>, claim: Option<&Arc<Claim>>, writes_back: bool) -> Committer {
    let settings = CommitterSettings { changes_while_unsure: writes_back, ..CommitterSettings::default() };
    match claim.map(Arc::downgrade) {
        None => Committer::start(engine, settings),
        // The volume holds the claim and gives it up after the tree is closed.
        Some(claim) => Committer::start_guarded(engine, settings, Claimed(claim)),
    }
}

/// Whether the volume is held, for its committer.
struct Claimed(Weak<Claim>);

impl Guard for Claimed {
    fn check(&self) -> Result<()> {
        self.0.upgrade().map_or_else(|| Err(closed()), |claim| claim.check())
    }

    fn regain(&self) -> BoxFuture<'static, Result<()>> {
        self.0.upgrade().map_or_else(|| std::future::ready(Err(closed())).boxed(), |claim| claim.regain())
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Conflict, "the volume is closed")
}

async fn open(records: Records, settings: VolumeSettings) -> Result<Arc<Volume>> {
    let Records { bucket, home, claim, part_copy, writeback, volume, committer, follower } = records;
    // Before the tree is begun, which another process is to have where this one cannot serve it.
    let host = if serves(&settings) { Some(settings.join.listen_for(volume).await?) } else { None };
    let (clock, rng, tasks) = (Clock::system(), Rng::system(), TaskGroup::new("volume"));
    let parts = TreeParts {
        volume,
        committer,
        bucket: Some(bucket.clone()),
        session: rng.u64(),
        clock: clock.clone(),
        rng,
        tasks: tasks.clone(),
    };
    let follows = follower.is_some();
    let tree = LocalTree::open(parts, TreeSettings { follows, ..tree_settings(&settings, &home) }).await?;
    if let Some(follower) = follower {
        tree.follow(follower, Duration::from_millis(settings.import.follow_ms))?;
    }
    let tree = Arc::new(tree);
    let server = match host {
        Some(host) => Some(settings.join.serve(host, tree.clone(), &tasks)?),
        None => None,
    };
    let blocks = Node::open(bucket.clone(), settings.cache()).await?;
    blocks.join(&settings.cache(), volume).await?;
    let volume = Volume::assemble(Parts {
        standby: None,
        server,
        tree,
        blocks: blocks.clone(),
        bucket,
        volume,
        read_only: settings.read_only || settings.dataset,
        claim,
        write: settings.write.clone(),
        part_copy,
        writeback,
        prefetch: settings.prefetch(),
        budget: Budget::new(settings.budget_bytes()),
        tasks,
        clock,
    });
    if let Some(server) = &volume.server {
        control::serve_elsewhere(&volume, server);
    }
    // It is asked again when all is to be in the bucket: what cannot be told now keeps nobody waiting.
    if let Err(error) = volume.settle_damaged().await {
        tracing::warn!(%error, "what became of damaged staged bytes is not known yet");
    }
    compact::start(&volume, settings.gc.interval_ms);
    Ok(volume)
}
