//! What the tests of a volume start from.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use bytes::Bytes;
use forebay_cache::{Blocks, CacheSettings, Node};
use forebay_core::units::MIB;
use forebay_core::{Error, ErrorKind, FileKind, InodeId, ObjectKey, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::mem::Budget;
use forebay_io::object::Bucket;
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use forebay_metadata::commit::{Committer, CommitterSettings};
use forebay_metadata::kv::{Engine, MemEngine, MemStore, SlateEngine, SlateSettings, after};
use forebay_metadata::tree::{Existing, LocalTree, NewInode, Tree, TreeParts, TreeSettings};
use tokio_util::sync::CancellationToken;

use super::unlucky::{HeldUp, Older, Unlucky};
use super::warming::StopsAtProof;
use crate::prefetch::PrefetchSettings;
use crate::settings::WriteSettings;
use crate::staging::{Durable, Staging, WritebackSettings};
use crate::{Access, File, Parts, Volume, Writeback};

pub(crate) const READ_WRITE: Access = Access { read: true, write: true, truncate: false };
pub(crate) const READ: Access = Access { read: true, write: false, truncate: false };
pub(crate) const VOLUME: VolumeId = VolumeId(7);

/// `base` rounds, or more in a long run.
pub(crate) fn rounds(base: u64) -> u64 {
    base * std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Bytes of file `number`: no two places of a file look alike, nor do two files. By an optimised crate: made byte by byte
/// here, they took most of the tests' time.
pub(crate) fn pattern(number: u64, range: std::ops::Range<u64>) -> Bytes {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    let mut content = blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof();
    content.set_position(range.start);
    content.fill(&mut bytes);
    bytes.into()
}

/// A volume and what lies under it.
pub(crate) struct Fixture {
    pub(crate) bucket: Bucket,
    pub(crate) store: MemStore,
    /// The tree lies in the bucket, as it does on a store, and what it uploads counts.
    pub(crate) tree_in_bucket: bool,
    pub(crate) write: WriteSettings,
    pub(crate) part_copy: bool,
    pub(crate) budget: Budget,
    pub(crate) cache: CacheSettings,
    pub(crate) prefetch: PrefetchSettings,
    /// What is staged lies in the folder.
    pub(crate) writeback: Option<(tempfile::TempDir, WritebackSettings)>,
    pub(crate) clock: Clock,
    /// The tree cannot be asked right after a commit.
    pub(crate) is_unlucky: bool,
    /// The tree, if it is such a one, refuses to have files opened, and their bytes moved.
    pub(crate) refuses: Arc<AtomicBool>,
    /// The tree's answers, if it is such a one, can be held up.
    pub(crate) held_up: Arc<HeldUp>,
    /// The tree, if it is such a one, can be made to say something older.
    pub(crate) older: Older,
    /// Entries that a clone copies at a time.
    pub(crate) clone_step: usize,
    /// How long a change of the tree that nobody waits for may stay in memory.
    pub(crate) flush_interval: Duration,
    /// How long what is deleted can be brought back.
    pub(crate) trash_ms: u64,
    /// The right to the volume cannot be renewed: the tree takes no changes meanwhile.
    pub(crate) lapsed: Arc<AtomicBool>,
    /// Cancelled when copies are read back for the so manieth time.
    pub(crate) stops_at_proof: Option<(usize, CancellationToken)>,
}

impl Fixture {
    pub(crate) fn new(bucket: Bucket) -> Self {
        let write = WriteSettings { buffer_bytes: MIB, ..WriteSettings::default() };
        // Where it has a disk, what is kept there is not to depend on how full that is.
        let cache = CacheSettings { memory_bytes: 64 * MIB, free_bytes: Some(0), ..CacheSettings::default() };
        let (store, budget) = (MemStore::default(), Budget::new(64 * MIB));
        let (clock, writeback) = (Clock::system(), None);
        let (tree_in_bucket, is_unlucky, part_copy, lapsed) = (false, false, true, Arc::default());
        let TreeSettings { clone_step, trash_ms, .. } = TreeSettings::default();
        Self {
            bucket,
            store,
            tree_in_bucket,
            is_unlucky,
            refuses: Arc::default(),
            held_up: Arc::default(),
            older: Older::default(),
            write,
            part_copy,
            budget,
            cache,
            prefetch: PrefetchSettings::default(),
            writeback,
            clock,
            clone_step,
            flush_interval: CommitterSettings::default().flush_interval,
            trash_ms,
            lapsed,
            stops_at_proof: None,
        }
    }

    /// The same with bytes staged in a folder.
    pub(crate) fn writing_back(self, settings: WritebackSettings) -> Self {
        Self { writeback: Some((tempfile::tempdir().expect("scratch"), settings)), ..self }
    }

    fn unlucky(&self, tree: LocalTree) -> Unlucky {
        Unlucky::new(tree, self.refuses.clone(), self.held_up.clone(), self.older.clone())
    }

    async fn open_cache(&self) -> Arc<dyn Blocks> {
        let blocks = Node::open(self.bucket.clone(), self.cache.clone()).await.expect("a cache");
        match &self.stops_at_proof {
            Some((nth, stop)) => Arc::new(StopsAtProof::new(blocks, *nth, stop.clone())),
            None => blocks,
        }
    }

    /// Opens the volume; a second call finds what the first one closed.
    pub(crate) async fn open(&self) -> Arc<Volume> {
        let engine: Arc<dyn Engine> = match self.tree_in_bucket {
            true => Arc::new(
                SlateEngine::open(&self.bucket, &SlateSettings::default())
                    .await
                    .expect("a tree in the bucket"),
            ),
            false => Arc::new(MemEngine::open(&self.store)),
        };
        let mut writeback = None;
        if let Some((folder, settings)) = &self.writeback {
            let staging = Staging::open(
                folder.path().join("staging"),
                self.bucket.url(),
                settings.bytes,
                self.clock.clone(),
            );
            let staging = staging.await.expect("a folder for staged bytes");
            writeback = Some(Writeback { staging, settings: settings.clone() });
        }
        let engine = match &writeback {
            Some(writeback) => after(Durable::new(&writeback.staging, &self.bucket), engine),
            None => engine,
        };
        let lapsed = self.lapsed.clone();
        let guard = move || match lapsed.load(SeqCst) {
            true => Err(Error::new(ErrorKind::Unavailable, "the lease has lapsed")),
            false => Ok(()),
        };
        let changes_while_unsure = self.writeback.is_some();
        let flush_interval = self.flush_interval;
        let committing =
            CommitterSettings { changes_while_unsure, flush_interval, ..CommitterSettings::default() };
        let (clock, rng, tasks) = (self.clock.clone(), Rng::seeded(1), TaskGroup::new("test"));
        let parts = TreeParts {
            volume: VOLUME,
            committer: Committer::start_guarded(engine, committing, guard),
            bucket: Some(self.bucket.clone()),
            session: Rng::system().u64(),
            clock: clock.clone(),
            rng,
            tasks: tasks.clone(),
        };
        let (clone_step, trash_ms) = (self.clone_step, self.trash_ms);
        let settings = TreeSettings { delete_delay_ms: 0, clone_step, trash_ms, ..TreeSettings::default() };
        let tree = LocalTree::open(parts, settings).await.expect("a tree");
        let tree: Arc<dyn Tree> = match self.is_unlucky {
            true => Arc::new(self.unlucky(tree)),
            false => Arc::new(tree),
        };
        Volume::assemble(Parts {
            server: None,
            standby: None,
            tree,
            blocks: self.open_cache().await,
            bucket: self.bucket.clone(),
            volume: VOLUME,
            read_only: false,
            claim: None,
            write: self.write.clone(),
            writeback,
            part_copy: self.part_copy,
            prefetch: self.prefetch.clone(),
            budget: self.budget.clone(),
            tasks,
            clock,
        })
    }
}

/// Waits for what happens soon.
pub(crate) async fn until(what: &str, mut happened: impl AsyncFnMut() -> bool) {
    for _ in 0..2000 {
        if happened().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not within 10 s: {what}");
}

/// Makes `name` in the root and opens it.
pub(crate) async fn create(volume: &Arc<Volume>, name: &str) -> Arc<File> {
    let new = NewInode {
        kind: FileKind::File,
        mode: 0o644,
        umask: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: Bytes::new(),
    };
    let made = volume.create(InodeId::ROOT, name.as_bytes(), new, Existing::Accept, READ_WRITE).await;
    made.expect("a new file").1
}

/// Opens `name` in the root.
pub(crate) async fn open(volume: &Arc<Volume>, name: &str, access: Access) -> Arc<File> {
    let found = forebay_metadata::tree::resolve(&**volume.tree(), name).await.expect("the file");
    volume.open(found.ino, access).await.expect("an open file")
}

/// The bytes of an object.
pub(crate) async fn object(bucket: &Bucket, key: &str) -> Bytes {
    bucket.get_whole(&ObjectKey::new(key)).await.unwrap_or_else(|error| panic!("object {key}: {error}")).0
}

/// Runs a test on its own runtime with a deadline, so that a hang is a failure with a name.
pub(crate) fn run<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let limited = async { tokio::time::timeout(Duration::from_secs(120), test).await.expect("no hang") };
    runtime.expect("a runtime").block_on(limited);
}

/// Runs `check` with as many seeds as `base` rounds are, or with that of FOREBAY_TEST_SEED.
pub(crate) fn with_seeds<F: Future<Output = ()>>(base: u64, check: impl Fn(u64) -> F) {
    let given = std::env::var("FOREBAY_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seeds = given.map_or(0..rounds(base), |seed| seed..seed + 1);
    for seed in seeds {
        eprintln!("seed {seed}");
        run(check(seed));
    }
}

/// A file that is open, and what it should hold.
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) file: Arc<File>,
}

impl Model {
    /// Makes so many files.
    pub(crate) async fn files(volume: &Arc<Volume>, count: u64) -> Vec<Self> {
        let mut models = Vec::new();
        for number in 0..count {
            let name = format!("file-{number}");
            models.push(Self { file: create(volume, &name).await, name, bytes: Vec::new() });
        }
        models
    }

    pub(crate) async fn write(&mut self, offset: u64, data: Bytes) {
        let end = offset as usize + data.len();
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[offset as usize..end].copy_from_slice(&data);
        assert_eq!(self.file.write(offset, data.clone()).await.expect("write"), data.len() as u32);
    }

    pub(crate) async fn release(&self) {
        self.file.release().await.expect("release");
    }

    pub(crate) async fn reopen(&mut self, volume: &Arc<Volume>) {
        self.release().await;
        self.file = open(volume, &self.name, READ_WRITE).await;
    }

    /// Closes the volume and opens it again, and all files in it.
    pub(crate) async fn remount(models: &mut [Self], fixture: &Fixture, volume: &mut Arc<Volume>) {
        for model in &*models {
            model.release().await;
        }
        volume.close().await.expect("close");
        *volume = fixture.open().await;
        for model in models {
            model.file = open(volume, &model.name, READ_WRITE).await;
        }
    }
}
