//! The tree that one process serves to mounts of other hosts: lookups and new files, as they ask for them.
//!
//! Server and mounts are of this process, and speak over loopback as they do between hosts: TLS, a session each, told of what others
//! change. Its two cores serve both ends. The engine is LMDB, as `forebay meta --engine lmdb:DIR` has it.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use forebay_core::{FileKind, InodeId, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::net::secure::{Host, Identity, Listen, Transport};
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use forebay_metadata::commit::{Committer, CommitterSettings};
use forebay_metadata::kv::{Batch, Durability, Engine, LmdbEngine, LmdbSettings};
use forebay_metadata::remote::{PROTOCOL, RemoteParts, RemoteTree, Server};
use forebay_metadata::tree::{Existing, LocalTree, Lookup, NewInode, Tree, TreeParts, TreeSettings};
use futures::FutureExt;
use futures::future::try_join_all;

use super::common::a_second;
use crate::context::Context;
use crate::report::{Aim, Row};
use crate::sample::{Pairs, measure};

const NAME: &str = "metadata";
const SECRET: &[u8] = b"what all hosts of the benchmark know";
const VOLUME: VolumeId = VolumeId(1);
const DIRECTORIES: usize = 1000;
const NAMES: usize = 1_000_000;
const MOUNTS: usize = 4;
/// Calls of one mount on their way at once.
const WINDOW: usize = 64;
/// Lookups of one run.
const LOOKUPS: usize = 400_000;
/// Files that are made in one run.
const FILES: usize = 50_000;
/// Bytes of the records that a new file adds to the engine, about: of its name, and of its inode.
const RECORDS: [(usize, usize); 2] = [(40, 16), (24, 96)];

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let site = context.wait(Site::open(context))?;
    let pairs = context.settings.pairs;
    let mut rows = Vec::new();
    for (mounts, least) in [(1, 600_000.0), (MOUNTS, 3_000_000.0)] {
        let guests: Vec<Arc<dyn Tree>> = site.guests[..mounts].to_vec();
        let here: Vec<Arc<dyn Tree>> = vec![site.tree.clone(); mounts];
        let served = || measure(None, || context.wait(look_up(&guests, &site.directories)));
        let local = || measure(None, || context.wait(look_up(&here, &site.directories)));
        let name =
            format!("lookups with attributes over {NAMES} names, {mounts} mounts, {WINDOW} at once each");
        let figures = Pairs::run(pairs, served, local)?.figures(a_second);
        let row = Row::of_pairs(NAME, &name, "1/s", &figures, "the same, asked of the tree in its process");
        rows.push(row.aim(Aim::AtLeast(least)));
    }
    let mut runs = 0;
    for (at_once, is_durable) in [(64, false), (64, true), (512, true)] {
        let made = || {
            runs += 1;
            measure(None, || context.wait(site.make(runs, at_once, is_durable)))
        };
        let written = || measure(None, || context.wait(site.write(at_once)));
        let how = if is_durable { "durable" } else { "acknowledged" };
        let name = format!("new files over {DIRECTORIES} directories, {how}, {at_once} at once");
        let figures = Pairs::run(pairs, made, written)?.figures(a_second);
        let row = Row::of_pairs(NAME, &name, "1/s", &figures, "as many records, written by the engine");
        rows.push(row.aim(if is_durable { Aim::RatioAtLeast(0.8) } else { Aim::AtLeast(100_000.0) }));
    }
    context.wait(site.close())?;
    Ok(rows)
}

/// A tree, mounts that it is served to, and an engine of its like beside it.
struct Site {
    tree: Arc<LocalTree>,
    server: Server,
    tasks: TaskGroup,
    guests: Vec<Arc<dyn Tree>>,
    directories: Vec<InodeId>,
    engine: LmdbEngine,
}

impl Site {
    async fn open(context: &Context) -> Result<Self> {
        let place = context.place(NAME)?;
        let open = async |name: &str| LmdbEngine::open(place.join(name), &LmdbSettings::default()).await;
        let (tasks, rng) = (TaskGroup::new("bench"), Rng::system());
        let parts = TreeParts {
            volume: VOLUME,
            committer: Committer::start(Arc::new(open("tree").await?), CommitterSettings::default()),
            bucket: None,
            session: rng.u64(),
            clock: Clock::system(),
            rng: rng.clone(),
            tasks: tasks.clone(),
        };
        let settings = TreeSettings { serves: true, ..TreeSettings::default() };
        let tree = Arc::new(LocalTree::open(parts, settings).await?);
        let mut directories = Vec::new();
        for directory in 0..DIRECTORIES {
            let name = format!("{directory:04}");
            let made =
                tree.create(InodeId::ROOT, name.as_bytes(), new(FileKind::Directory), Existing::Refuse);
            let (directory, _) = made.await?;
            directories.push(directory.ino);
            for file in 0..NAMES / DIRECTORIES {
                let name = name_of(file);
                let made = tree.create(directory.ino, &name, new(FileKind::File), Existing::Refuse);
                made.await?;
            }
        }
        tree.sync().await?;
        let at = host()?;
        let address = at.address()?;
        let server = Server::start(tree.clone(), at, rng.u64(), Server::PATIENCE, &tasks);
        let mut guests: Vec<Arc<dyn Tree>> = Vec::new();
        for number in 0..MOUNTS {
            let parts = RemoteParts {
                volume: VOLUME,
                host: host()?,
                find: Arc::new(move || async move { Ok(vec![address]) }.boxed()),
                name: format!("mount {number}"),
                first: Duration::from_secs(20),
                deadline: Duration::from_secs(60),
                rng: rng.clone(),
            };
            guests.push(Arc::new(RemoteTree::open(parts).await?));
        }
        Ok(Self { tree, server, tasks, guests, directories, engine: open("engine").await? })
    }

    /// Makes files through one mount, so many at once; with a sync each where they are to be durable.
    async fn make(&self, run: usize, at_once: usize, is_durable: bool) -> Result<f64> {
        let files = if is_durable { FILES / 5 } else { FILES };
        let making = (0..at_once).map(|first| async move {
            let guest = &self.guests[0];
            for file in (first..files).step_by(at_once) {
                let name = format!("new {run} {file}");
                let directory = self.directories[file % DIRECTORIES];
                let made = guest.create(directory, name.as_bytes(), new(FileKind::File), Existing::Refuse);
                ensure!(made.await?.1, "it is new");
                if is_durable {
                    guest.sync().await?;
                }
            }
            Ok(())
        });
        try_join_all(making).await?;
        Ok(files as f64)
    }

    /// Has the engine write the records of as many files, those of `at_once` in a batch.
    async fn write(&self, at_once: usize) -> Result<f64> {
        let rng = Rng::system();
        for _ in 0..FILES / at_once {
            let mut batch = Batch::default();
            for (key, value) in (0..at_once).flat_map(|_| RECORDS) {
                let random: Vec<u8> = (0..key.div_ceil(8)).flat_map(|_| rng.u64().to_le_bytes()).collect();
                batch.put(random, Bytes::from(vec![7; value]));
            }
            self.engine.write(batch, Durability::Durable).await?;
        }
        Ok((FILES / at_once * at_once) as f64)
    }

    async fn close(self) -> Result<()> {
        for guest in &self.guests {
            guest.close().await?;
        }
        self.server.stop().await;
        self.tree.close().await?;
        self.tasks.shutdown(Duration::from_secs(10)).await;
        Ok(self.engine.close().await?)
    }
}

fn host() -> Result<Host> {
    let identity = Identity::new(SECRET, &VOLUME.0.to_le_bytes(), PROTOCOL)?;
    let listen = Listen { ip: Some(Ipv4Addr::LOCALHOST.into()), port: 0 };
    Ok(Host::open(Transport::Tcp, listen, &identity)?)
}

fn new(kind: FileKind) -> NewInode {
    NewInode { kind, mode: 0o755, umask: 0, uid: 0, gid: 0, rdev: 0, target: Bytes::new() }
}

fn name_of(file: usize) -> Vec<u8> {
    format!("{file:06}.bin").into_bytes()
}

/// Looks names up, chosen by chance, through all of these trees, so many at once each.
async fn look_up(trees: &[Arc<dyn Tree>], directories: &[InodeId]) -> Result<f64> {
    let each = LOOKUPS / trees.len() / WINDOW;
    let looking =
        trees.iter().flat_map(|tree| (0..WINDOW).map(move |_| tree.clone())).map(|tree| async move {
            let rng = Rng::system();
            for _ in 0..each {
                let chosen = rng.u64() as usize % NAMES;
                let (directory, name) = (directories[chosen % DIRECTORIES], name_of(chosen / DIRECTORIES));
                ensure!(
                    matches!(tree.lookup(directory, &name).await?, Lookup::Found(_)),
                    "a name is missing"
                );
            }
            Ok(())
        });
    try_join_all(looking).await?;
    Ok((each * trees.len() * WINDOW) as f64)
}
