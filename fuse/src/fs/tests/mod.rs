//! The file system without a kernel: a real volume over an in-memory engine and an in-memory bucket.

mod directories;
mod files;
mod access;
mod names;
mod positions;
mod removed;
mod sharing;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_cache::{CacheSettings, Node};
use forebay_core::units::MIB;
use forebay_core::{Attributes, InodeId, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::mem::Budget;
use forebay_io::object::{Bucket, Faults};
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use forebay_metadata::commit::{Committer, CommitterSettings};
use forebay_metadata::kv::{Engine, MemEngine};
use forebay_metadata::tree::{ImportSettings, LocalTree, TreeParts, TreeSettings};
use forebay_volume::prefetch::PrefetchSettings;
use forebay_volume::settings::WriteSettings;
use forebay_volume::{Parts, Volume};

use super::{Caller, FileSystem, OpenFlags, Policy};
use crate::errno::{Errno, FsResult};
use crate::handle::Handle;

const ROOT: InodeId = InodeId::ROOT;
const CALLER: Caller = Caller { uid: 1000, gid: 100, umask: 0 };
const VOLUME: VolumeId = VolumeId(7);

/// A volume over `bucket` with a fresh tree.
async fn volume(bucket: &Bucket, read_only: bool) -> Arc<Volume> {
    over(Arc::new(MemEngine::new()), bucket, read_only, WriteSettings::default()).await
}

/// The same with its tree in `engine`.
async fn over(
    engine: Arc<dyn Engine>,
    bucket: &Bucket,
    read_only: bool,
    write: WriteSettings,
) -> Arc<Volume> {
    let committer = Committer::start(engine, CommitterSettings::default());
    let parts = TreeParts {
        volume: VOLUME,
        committer,
        bucket: Some(bucket.clone()),
        session: 1,
        clock: Clock::system(),
        rng: Rng::seeded(1),
        tasks: TaskGroup::new("test"),
    };
    let settings = TreeSettings { read_only, ..TreeSettings::default() };
    let tree = LocalTree::open(parts, settings).await.expect("a tree");
    let blocks = Node::open(bucket.clone(), CacheSettings::default()).await.expect("a cache");
    Volume::assemble(Parts {
        server: None,
        standby: None,
        tree: Arc::new(tree),
        blocks,
        bucket: bucket.clone(),
        volume: VOLUME,
        read_only,
        claim: None,
        write,
        part_copy: true,
        writeback: None,
        prefetch: PrefetchSettings::default(),
        budget: Budget::new(64 * MIB),
        tasks: TaskGroup::new("test"),
        clock: Clock::system(),
    })
}

fn policy(dataset: bool) -> Policy {
    let appearance = ImportSettings::default().appearance();
    Policy { dataset, ttl: Duration::from_secs(1), relatime: false, appearance }
}

/// A read-write file system over an empty bucket.
async fn writable() -> FileSystem {
    FileSystem::new(volume(&Bucket::in_memory(), false).await, policy(false), Clock::system())
}

/// A dataset mount of a bucket that holds `objects`.
async fn dataset(objects: &[(&str, &str)]) -> FileSystem {
    let bucket = Bucket::in_memory();
    for (key, content) in objects {
        let key = forebay_core::ObjectKey::new(*key);
        let content = Bytes::copy_from_slice(content.as_bytes());
        bucket.put(&key, content, forebay_io::object::Condition::Always).await.expect("put");
    }
    FileSystem::new(volume(&bucket, true).await, policy(true), Clock::system())
}

/// What `name` names; a missing one fails the test.
async fn find(fs: &FileSystem, parent: InodeId, name: &str) -> Attributes {
    fs.lookup(parent, name.as_bytes()).await.expect("lookup").unwrap_or_else(|| panic!("no {name}"))
}

/// Makes a file with `content` and closes it.
async fn put(fs: &FileSystem, parent: InodeId, name: &str, content: &str) -> InodeId {
    let flags = OpenFlags(libc::O_WRONLY | libc::O_CREAT);
    let (attributes, opened) =
        fs.create(CALLER, parent, name.as_bytes(), 0o644, flags).await.expect("create");
    let content = Bytes::copy_from_slice(content.as_bytes());
    fs.write(attributes.ino, opened.handle, 0, content).await.expect("write");
    fs.close(opened.handle, 0).await.expect("flush");
    fs.release(opened.handle).await.expect("release");
    attributes.ino
}

/// Opens, reads all, closes.
async fn content(fs: &FileSystem, ino: InodeId) -> String {
    let handle = open(fs, ino, libc::O_RDONLY).await.expect("open");
    let bytes = fs.read(ino, handle, 0, 1 << 20).await.expect("read");
    fs.release(handle).await.expect("release");
    String::from_utf8(bytes.to_vec()).expect("text")
}

async fn open(fs: &FileSystem, ino: InodeId, flags: i32) -> FsResult<Handle> {
    Ok(fs.open(ino, OpenFlags(flags)).await?.handle)
}

/// Checks that `result` failed with `number`.
#[track_caller]
fn fails<T: std::fmt::Debug>(result: FsResult<T>, number: i32) {
    assert_eq!(result.map(|value| format!("{value:?}")), Err(Errno(number)));
}
