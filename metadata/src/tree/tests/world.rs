//! What the tests of the tree stand on: engines that can lose power, a bucket, and files as bytes.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{
    Attributes, Error, ErrorKind, FileKind, FileLayout, InodeId, ObjectKey, Result, Timestamp, VolumeId,
};
use forebay_io::clock::Clock;
use forebay_io::object::{
    Bucket, BucketUrl, Condition, FaultMode, Faults, ObjectInfo, OperationKind, StoreSettings,
};
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use futures::stream::{StreamExt, TryStreamExt};
use parking_lot::Mutex;

use crate::commit::{Committer, CommitterSettings};
use crate::kv::{
    Batch, Durability, Engine, Limits, LmdbEngine, LmdbSettings, Pair, SlateEngine, SlateSettings, Snapshot,
};
use crate::tree::{
    CloneGuide, Cloned, Existing, LocalTree, Lookup, NewInode, Placement, Tree, TreeParts, TreeSettings,
    resolve, walk,
};

type Map = BTreeMap<Bytes, Bytes>;

/// A disk whose unsynced writes are lost when the power goes.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk(Arc<Mutex<Power>>);

#[derive(Debug, Default)]
struct Power {
    cached: Map,
    durable: Map,
    epoch: u64,
    /// Values and ranges asked for.
    reads: u64,
    /// Records in each batch written.
    batches: Vec<usize>,
    /// Where each range began that was asked for.
    scans: Vec<Bytes>,
}

impl Power {
    fn scan(&mut self, start: &[u8], end: &[u8], limit: usize) -> Vec<Pair> {
        self.scans.push(Bytes::copy_from_slice(start));
        pairs(&self.cached, start, end, limit)
    }
}

impl Disk {
    /// The power goes; `keeps_cache` when by luck everything had been written.
    pub(super) fn fail(&self, keeps_cache: bool) {
        let mut power = self.0.lock();
        power.epoch += 1;
        match keeps_cache {
            true => power.durable = power.cached.clone(),
            false => power.cached = power.durable.clone(),
        }
    }

    /// How often it was asked for anything, so far.
    pub(super) fn reads(&self) -> u64 {
        self.0.lock().reads
    }

    /// How many records each batch had that was written since this was asked last.
    pub(super) fn batches(&self) -> Vec<usize> {
        std::mem::take(&mut self.0.lock().batches)
    }

    /// Where each range began that was asked for since this was asked last.
    pub(super) fn scans(&self) -> Vec<Bytes> {
        std::mem::take(&mut self.0.lock().scans)
    }

    fn open(&self) -> DiskEngine {
        let mut power = self.0.lock();
        power.epoch += 1;
        DiskEngine { disk: self.clone(), epoch: power.epoch }
    }
}

/// The engine on such a disk.
struct DiskEngine {
    disk: Disk,
    epoch: u64,
}

impl DiskEngine {
    fn with<T>(&self, work: impl FnOnce(&mut Power) -> T) -> Result<T> {
        let mut power = self.disk.0.lock();
        match power.epoch == self.epoch {
            true => {
                power.reads += 1;
                Ok(work(&mut power))
            }
            false => Err(Error::new(ErrorKind::Conflict, "the power went")),
        }
    }
}

#[async_trait]
impl Engine for DiskEngine {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.with(|power| power.cached.get(key).cloned())
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        self.with(|power| power.scan(start, end, limit))
    }

    fn get_now(&self, key: &[u8]) -> Option<Result<Option<Bytes>>> {
        Some(self.with(|power| power.cached.get(key).cloned()))
    }

    fn scan_now(&self, start: &[u8], end: &[u8], limit: usize) -> Option<Result<Vec<Pair>>> {
        Some(self.with(|power| power.scan(start, end, limit)))
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        self.with(|power| Box::new(Moment(power.cached.clone())) as Box<dyn Snapshot>)
    }

    async fn write(&self, batch: Batch, durability: Durability) -> Result<()> {
        self.with(|power| {
            power.batches.push(batch.changes().len());
            for (key, value) in batch.changes() {
                match value {
                    Some(value) => power.cached.insert(key.clone(), value.clone()),
                    None => power.cached.remove(key),
                };
            }
            if durability == Durability::Durable {
                power.durable = power.cached.clone();
            }
        })
    }

    async fn sync(&self) -> Result<()> {
        self.with(|power| power.durable = power.cached.clone())
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn limits(&self) -> Limits {
        Limits { max_key_bytes: 1200, max_value_bytes: 1 << 20 }
    }

    async fn close(&self) -> Result<()> {
        self.sync().await
    }
}

/// What such a disk held at one moment.
struct Moment(Map);

#[async_trait]
impl Snapshot for Moment {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        Ok(self.0.get(key).cloned())
    }

    async fn scan(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        Ok(pairs(&self.0, start, end, limit))
    }
}

fn pairs(map: &Map, start: &[u8], end: &[u8], limit: usize) -> Vec<Pair> {
    let end = if end.is_empty() { Bound::Unbounded } else { Bound::Excluded(end) };
    let range = map.range::<[u8], _>((Bound::Included(start), end));
    range.take(limit).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// What says whether the volume is still held; clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Lease(Arc<Mutex<Holding>>);

#[derive(Debug, Default)]
struct Holding {
    asked: u64,
    /// It is not known whether it is held while these questions are asked.
    unsure: std::ops::Range<u64>,
}

impl Lease {
    /// How often it was asked, so far.
    pub(super) fn asked(&self) -> u64 {
        self.0.lock().asked
    }

    /// From the `nth` question from now on (1 is the next one) it says `times` times that it does not know.
    pub(super) fn lapse(&self, nth: u64, times: u64) {
        let mut holding = self.0.lock();
        let first = holding.asked + nth;
        holding.unsure = first..first.saturating_add(times);
    }

    /// It is held again, for good.
    pub(super) fn renew(&self) {
        self.0.lock().unsure = 0..0;
    }

    pub(super) fn check(&self) -> Result<()> {
        let mut holding = self.0.lock();
        holding.asked += 1;
        match holding.unsure.contains(&holding.asked) {
            true => Err(Error::new(ErrorKind::Unavailable, "the lease has lapsed")),
            false => Ok(()),
        }
    }
}

/// When nothing comes any more of what was not answered.
pub(super) const LATER: Duration = Duration::from_secs(6 * 60);

/// What a world runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The disk above, without a bucket.
    Alone,
    /// The disk above, over a bucket in memory.
    Memory,
    /// LMDB, over a folder.
    Lmdb,
    /// SlateDB inside the bucket that holds the objects.
    Slate,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Alone, Self::Memory, Self::Lmdb, Self::Slate];
}

/// A volume and its bucket, mounted again and again.
pub(super) struct World {
    pub(super) kind: Kind,
    pub(super) bucket: Option<Bucket>,
    pub(super) clock: Clock,
    pub(super) disk: Disk,
    pub(super) lease: Lease,
    pub(super) settings: TreeSettings,
    pub(super) committing: CommitterSettings,
    directory: tempfile::TempDir,
    pub(super) sessions: AtomicU64,
    tasks: Mutex<TaskGroup>,
}

impl World {
    pub(super) async fn new(kind: Kind) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let bucket = match kind {
            Kind::Alone => None,
            Kind::Memory | Kind::Slate => Some(Bucket::in_memory()),
            Kind::Lmdb => {
                let objects = directory.path().join("objects");
                std::fs::create_dir(&objects).expect("a folder");
                let url: BucketUrl = format!("file://{}", objects.display()).parse().expect("a URL");
                Some(Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket"))
            }
        };
        let settings = TreeSettings { delete_delay_ms: 0, ..TreeSettings::default() };
        let tasks = Mutex::new(TaskGroup::new("test"));
        let sessions = AtomicU64::new(1);
        Self {
            kind,
            bucket,
            clock: Clock::manual(),
            disk: Disk::default(),
            lease: Lease::default(),
            settings,
            committing: CommitterSettings::default(),
            directory,
            sessions,
            tasks,
        }
    }

    pub(super) async fn memory() -> Self {
        Self::new(Kind::Memory).await
    }

    pub(super) fn bucket(&self) -> &Bucket {
        self.bucket.as_ref().expect("this world has a bucket")
    }

    /// A path for a file of the test's own.
    pub(super) fn scratch(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    /// Opens the tree in a new session. Its mover works only when the test drains.
    pub(super) async fn open(&self) -> LocalTree {
        self.open_over(self.bucket.clone()).await
    }

    /// The same through another handle on the bucket.
    pub(super) async fn open_over(&self, bucket: Option<Bucket>) -> LocalTree {
        self.try_open(bucket).await.expect("the tree opens")
    }

    /// The engine alone.
    pub(super) async fn engine(&self) -> Result<Arc<dyn Engine>> {
        Ok(match self.kind {
            Kind::Alone | Kind::Memory => Arc::new(self.disk.open()),
            Kind::Lmdb => {
                let path = self.directory.path().join("tree");
                std::fs::create_dir_all(&path).expect("a folder");
                Arc::new(LmdbEngine::open(&path, &LmdbSettings::default()).await?)
            }
            Kind::Slate => Arc::new(SlateEngine::open(self.bucket(), &SlateSettings::default()).await?),
        })
    }

    pub(super) async fn try_open(&self, bucket: Option<Bucket>) -> Result<LocalTree> {
        LocalTree::prepare(self.parts(bucket).await?, self.settings.clone()).await
    }

    /// Opens the tree as a mount does: its mover works by itself.
    pub(super) async fn open_moving(&self) -> LocalTree {
        let parts = self.parts(self.bucket.clone()).await.expect("an engine");
        LocalTree::open(parts, self.settings.clone()).await.expect("the tree opens")
    }

    async fn parts(&self, bucket: Option<Bucket>) -> Result<TreeParts> {
        let (engine, lease) = (self.engine().await?, self.lease.clone());
        let tasks = TaskGroup::new("session");
        *self.tasks.lock() = tasks.clone();
        Ok(TreeParts {
            volume: VolumeId(7),
            committer: Committer::start_guarded(engine, self.committing.clone(), move || lease.check()),
            bucket,
            session: self.sessions.fetch_add(1, Ordering::SeqCst),
            clock: self.clock.clone(),
            rng: Rng::system(),
            tasks,
        })
    }

    /// The power goes. Unsynced changes are lost unless `keeps_cache`.
    pub(super) async fn crash(&self, tree: LocalTree, keeps_cache: bool) {
        self.disk.fail(keeps_cache);
        let tasks = self.tasks.lock().clone();
        tasks.shutdown(Duration::ZERO).await;
        drop(tree);
    }

    /// Has the tree's clock be a minute ahead of the store's: what comes to the store is older than what is done here. Without
    /// this it is newer.
    pub(super) fn be_ahead(&self) {
        let ahead = Clock::system().wall().seconds.unsigned_abs() + 60;
        self.clock.advance(Duration::from_secs(ahead));
    }

    /// Lets every listing expire.
    pub(super) fn pass_ttl(&self) {
        self.clock.advance(Duration::from_secs(61));
    }

    /// Lets the mover go on until nothing comes any more that was not answered.
    pub(super) async fn end_doubts(&self, tree: &LocalTree) {
        tree.drain().await.expect("drained");
        self.clock.advance(LATER);
        tree.drain().await.expect("drained");
    }

    /// An outsider writes an object.
    pub(super) async fn put(&self, key: &str, bytes: &[u8]) {
        let bytes = Bytes::copy_from_slice(bytes);
        self.bucket().put(&ObjectKey::new(key), bytes, Condition::Always).await.expect("put");
    }

    /// An outsider deletes an object.
    pub(super) async fn delete(&self, key: &str) {
        self.bucket().delete(&ObjectKey::new(key)).await.expect("delete");
    }

    /// All objects outside the tree's own, with their bytes, owned blobs under one name each.
    pub(super) async fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        let keys: Vec<ObjectKey> =
            self.bucket().list("").map_ok(|info| info.key).try_collect().await.expect("a listing");
        let mut objects = BTreeMap::new();
        for key in keys.into_iter().filter(|key| !key.as_str().starts_with(".forebay/tree/")) {
            let (bytes, _) = self.bucket().get_whole(&key).await.expect("an object");
            objects.insert(key.as_str().to_owned(), bytes.to_vec());
        }
        objects
    }

    /// Asserts what the bucket holds: keys and bytes, a star for owned blobs.
    pub(super) async fn check_objects(&self, expected: &[(&str, &str)]) {
        let show =
            |key: &str| if key.starts_with(".forebay/blobs/") { "*".to_owned() } else { key.to_owned() };
        let mut found: Vec<(String, String)> = self
            .objects()
            .await
            .into_iter()
            .map(|(key, bytes)| (show(&key), String::from_utf8_lossy(&bytes).into_owned()))
            .collect();
        found.sort();
        let expected: Vec<_> = expected.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        assert_eq!(found, expected);
    }

    /// Reads a file's bytes from where its layout says, versions checked.
    pub(super) async fn read(&self, tree: &dyn Tree, ino: InodeId) -> Result<Vec<u8>> {
        let (layout, _) = tree.layout(ino).await?;
        let mut bytes = vec![0; layout.size() as usize];
        for piece in layout.pieces(0..layout.size()) {
            let target = &mut bytes[piece.range.start as usize..piece.range.end as usize];
            match piece.source {
                Some(forebay_core::Source::Blob { blob, offset }) => {
                    let range = offset..offset + target.len() as u64;
                    let read = self.bucket().get(&blob.key, Some(&blob.version), range).await?;
                    target.copy_from_slice(&read);
                }
                Some(forebay_core::Source::Inline(inline)) => target.copy_from_slice(&inline),
                None => {}
            }
        }
        Ok(bytes)
    }

    pub(super) async fn read_path(&self, tree: &dyn Tree, path: &str) -> Result<String> {
        let ino = resolve(tree, path).await?.ino;
        self.read(tree, ino).await.map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Writes a file whole, as the writer does: place, put, commit; again when an outsider came first.
    pub(super) async fn write(&self, tree: &dyn Tree, ino: InodeId, bytes: &[u8]) -> Result<Placement> {
        for _ in 0..4 {
            let placement = tree.place(ino, false).await?;
            match self.put_at(&placement, bytes).await {
                Err(error) if error.kind() == ErrorKind::Conflict => continue,
                Err(error) => return Err(error),
                Ok(info) => {
                    let (_, generation) = tree.layout(ino).await?;
                    let layout = FileLayout::of_blob(info.blob());
                    tree.commit_layout(ino, generation, layout, self.clock.wall()).await?;
                    return Ok(placement);
                }
            }
        }
        panic!("the outsider always comes first");
    }

    /// Puts what a writer brings, as it does.
    pub(super) async fn put_at(&self, placement: &Placement, bytes: &[u8]) -> Result<ObjectInfo> {
        let bytes = Bytes::copy_from_slice(bytes);
        let (key, condition) = (placement.key(), condition(placement));
        match placement {
            Placement::Own { token, .. } => self.bucket().put_as(key, bytes, condition, token).await,
            Placement::Owned { .. } => self.bucket().put(key, bytes, condition).await,
        }
    }

    /// Creates a file, or finds it, and writes it.
    pub(super) async fn write_path(&self, tree: &dyn Tree, path: &str, text: &str) -> Result<Placement> {
        let (directory, name) = split(tree, path).await?;
        let (file, _) = tree.create(directory, name.as_bytes(), new_file(), Existing::Accept).await?;
        self.write(tree, file.ino, text.as_bytes()).await
    }
}

/// A way to be cut off: the store fails from the `nth` request of a kind on, and then the power goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    kind: OperationKind,
    nth: u64,
    mode: FaultMode,
    keeps_cache: bool,
}

impl Cut {
    /// Every way, up to the request number `most` of each kind.
    pub(super) fn each(kinds: &[OperationKind], most: u64) -> impl Iterator<Item = Self> {
        let modes = [(FaultMode::Before, false), (FaultMode::LoseReply, false), (FaultMode::LoseReply, true)];
        let each = move |kind: OperationKind| {
            (1..=most)
                .flat_map(move |nth| modes.map(|(mode, keeps_cache)| Self { kind, nth, mode, keeps_cache }))
        };
        kinds.iter().copied().flat_map(each)
    }

    /// Opens the tree over a store that works until it is told to fail.
    pub(super) async fn open(&self, world: &World) -> (LocalTree, Faults) {
        println!("{self:?}");
        let faults = Faults::new();
        let bucket = world.bucket().with_faults(&faults).with_deadline_ms(30);
        (world.open_over(Some(bucket)).await, faults)
    }

    /// From here on the store fails so.
    pub(super) fn strike(&self, faults: &Faults) {
        faults.script(self.kind, self.nth, self.mode);
        for later in self.nth + 1..self.nth + 40 {
            faults.script(self.kind, later, FaultMode::Before);
        }
    }

    /// Lets the mover come as far as it can, cuts the power, and opens the tree again over a store that works.
    pub(super) async fn reopen(&self, world: &World, tree: LocalTree) -> LocalTree {
        // It fails, or comes to its end because there were fewer requests.
        let _ = tree.drain().await;
        world.crash(tree, self.keeps_cache).await;
        world.open().await
    }
}

/// A clone that nobody cares for: it waits for nothing.
pub(super) struct Alone;

#[async_trait]
impl CloneGuide for Alone {
    fn goes_on(&self, _: &Cloned) -> bool {
        true
    }

    async fn settle(&self, _: &[InodeId], _: u32) -> Result<bool> {
        Ok(false)
    }
}

fn condition(placement: &Placement) -> Condition {
    match placement {
        // A folder cannot compare versions.
        Placement::Own { replaces: Some(_), .. } => Condition::Always,
        _ => Condition::IfAbsent,
    }
}

pub(super) fn new_file() -> NewInode {
    new_inode(FileKind::File)
}

pub(super) fn new_inode(kind: FileKind) -> NewInode {
    NewInode { kind, mode: 0o644, umask: 0, uid: 1, gid: 2, rdev: 0, target: Bytes::new() }
}

/// The directory of a path, and its last name.
pub(super) async fn split<'p>(tree: &dyn Tree, path: &'p str) -> Result<(InodeId, &'p str)> {
    let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
    Ok((resolve(tree, directory).await?.ino, name))
}

pub(super) async fn make_directory(tree: &dyn Tree, path: &str) -> Result<Attributes> {
    let (directory, name) = split(tree, path).await?;
    let new = new_inode(FileKind::Directory);
    tree.create(directory, name.as_bytes(), new, Existing::Refuse).await.map(|(attributes, _)| attributes)
}

pub(super) async fn unlink(tree: &dyn Tree, path: &str) -> Result<()> {
    let (directory, name) = split(tree, path).await?;
    tree.unlink(directory, name.as_bytes()).await.map(drop)
}

pub(super) async fn rename(
    tree: &LocalTree,
    from: &str,
    to: &str,
    mode: crate::tree::RenameMode,
) -> Result<()> {
    let (from_directory, from) = split(tree, from).await?;
    let (to_directory, to) = split(tree, to).await?;
    tree.rename((from_directory, from.as_bytes()), (to_directory, to.as_bytes()), mode).await.map(drop)
}

/// Every path below the root, directories with a slash at the end.
pub(super) async fn paths(tree: &dyn Tree) -> Vec<String> {
    let mut paths: Vec<String> = walk(tree, InodeId::ROOT)
        .map(|walked| {
            let walked = walked.expect("a walk");
            let slash = if walked.attributes.kind == FileKind::Directory { "/" } else { "" };
            format!("{}{slash}", String::from_utf8_lossy(&walked.path))
        })
        .collect()
        .await;
    paths.sort();
    paths
}

pub(super) async fn found(tree: &dyn Tree, parent: InodeId, name: &[u8]) -> Attributes {
    match tree.lookup(parent, name).await.expect("a lookup") {
        Lookup::Found(attributes) => attributes,
        Lookup::Miss => panic!("{} is missing", String::from_utf8_lossy(name)),
    }
}

pub(super) fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.expect_err("an error").kind()
}

pub(super) fn time(seconds: i64) -> Timestamp {
    Timestamp { seconds, nanos: 5 }
}
