//! Hosts that share blocks: what leaves the store, and who is asked where hosts come and go.
//!
//! Hosts are caches of this process at addresses of their own: 127.0.0.0/8 has enough for every test to draw some.

mod strange;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::units::{KIB, MIB};
use forebay_core::{BLOCK_SIZE, BlockKey, VolumeId};
use forebay_io::net::secure::{Host, Identity, Listen, Stream, Transport};
use forebay_io::object::Delay;
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use futures::future::join_all;

use super::support::{TestBlob, World, rounds};
use crate::{Blocks, CacheSettings, Counters, Node, PeerSettings, Residency};

const VOLUME: VolumeId = VolumeId(7);
const SECRET: &str = "what all of these hosts know";

/// Addresses that nobody else has.
fn addresses(count: usize) -> Vec<SocketAddr> {
    let random = Rng::system();
    let one = |_| {
        let [a, b, c, ..] = random.u64().to_le_bytes();
        SocketAddr::from(([127, a, b, c], 7400))
    };
    (0..count).map(one).collect()
}

/// Hosts over one store.
struct Cluster {
    world: World,
    scratch: tempfile::TempDir,
    nodes: Vec<Arc<Node>>,
}

impl Cluster {
    /// As many hosts that know each other, with a disk each where `disks`, and whatever else `with` says.
    async fn new(world: World, count: usize, disks: bool, with: impl Fn(&mut PeerSettings)) -> Self {
        let addresses = addresses(count);
        let mut cluster = Self { world, scratch: tempfile::tempdir().expect("scratch"), nodes: Vec::new() };
        let open = addresses.iter().enumerate().map(|(number, address)| {
            let mut settings = cluster.settings(*address, &addresses);
            settings.directory = disks.then(|| cluster.scratch.path().join(number.to_string()));
            with(&mut settings.peers);
            cluster.open(settings)
        });
        let nodes = join_all(open).await;
        cluster.nodes = nodes;
        for node in &cluster.nodes {
            until(|| node.counters().peers_here == count as u64 - 1).await;
        }
        cluster
    }

    fn settings(&self, own: SocketAddr, members: &[SocketAddr]) -> CacheSettings {
        let peers = PeerSettings {
            members: members.iter().map(ToString::to_string).collect(),
            secret: Some(secret(self.scratch.path(), SECRET)),
            listen: Some(own.to_string()),
            // What is counted does not depend on how busy this machine is.
            deadline_ms: 120_000,
            ..PeerSettings::default()
        };
        CacheSettings {
            memory_bytes: 256 * MIB,
            disk_bytes: Some(256 * MIB),
            free_bytes: Some(0),
            peers,
            ..CacheSettings::default()
        }
    }

    async fn open(&self, settings: CacheSettings) -> Arc<Node> {
        let node = self.world.open(settings.clone()).await;
        node.join(&settings, VOLUME).await.expect("joined");
        node
    }

    /// One host of two, which asks for no longer than it is told; the other is what `answer` makes of it.
    async fn beside<F>(
        deadline_ms: u64,
        answer: impl Fn(Stream) -> F + Clone + Send + Sync + 'static,
    ) -> (Self, TaskGroup)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut cluster =
            Self { world: World::new(), scratch: tempfile::tempdir().expect("scratch"), nodes: Vec::new() };
        let [own, other] = addresses(2)[..] else { unreachable!("two were asked for") };
        let identity = Identity::new(SECRET.as_bytes(), &VOLUME.0.to_le_bytes(), "forebay-blocks/1");
        let listen = Listen { ip: Some(other.ip()), port: other.port() };
        let host = Host::open(Transport::Tcp, listen, &identity.expect("an identity")).expect("a port");
        let (tasks, group) = (TaskGroup::new("other"), TaskGroup::new("streams"));
        tasks.spawn("serve", async move { host.serve(&group, answer).await });
        let mut settings = cluster.settings(own, &[other]);
        settings.peers.deadline_ms = deadline_ms;
        let node = cluster.open(settings).await;
        until(|| node.counters().peers_here == 1).await;
        cluster.nodes.push(node);
        (cluster, tasks)
    }

    fn total(&self, of: impl Fn(Counters) -> u64) -> u64 {
        self.nodes.iter().map(|node| of(node.counters())).sum()
    }

    /// All hosts read all of `blobs`, at once.
    async fn read(&self, blobs: &[TestBlob]) {
        let reads = self.nodes.iter().map(|node| {
            let (node, blobs) = (node.clone(), blobs.to_vec());
            tokio::spawn(async move {
                join_all(blobs.iter().map(|blob| blob.check_all(&*node))).await;
            })
        });
        for read in join_all(reads).await {
            read.expect("right bytes");
        }
    }

    async fn close(self) {
        join_all(self.nodes.iter().map(|node| node.close())).await;
    }
}

fn secret(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join(format!("secret of {} bytes", text.len()));
    std::fs::write(&path, format!("{text}\n")).expect("written");
    path
}

/// Waits for what is bound to come.
async fn until(come: impl Fn() -> bool) {
    for _ in 0..6000 {
        if come() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not come within a minute");
}

/// A large file, and small ones.
async fn data(world: &World, name: &str) -> Vec<TestBlob> {
    let mut blobs = vec![world.put(&format!("{name}/large"), 7 * BLOCK_SIZE + 5).await];
    for number in 0..40 {
        blobs.push(world.put(&format!("{name}/{number}"), 10 * KIB + number).await);
    }
    blobs
}

fn blocks(blobs: &[TestBlob]) -> u64 {
    blobs.iter().map(|blob| blob.keys().len() as u64).sum()
}

fn keys(blobs: &[TestBlob]) -> Vec<BlockKey> {
    blobs.iter().flat_map(TestBlob::keys).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_leaves_the_store_once_for_all_hosts() {
    for transport in [Transport::Tcp, Transport::Quic] {
        let cluster = Cluster::new(World::slow(), 3, false, |peers| peers.transport = transport).await;
        let blobs = data(&cluster.world, "a").await;
        cluster.read(&blobs).await;
        let count = blocks(&blobs);
        assert_eq!(cluster.world.gets(), count, "{transport:?}");
        assert_eq!(cluster.total(|node| node.origin_requests), count, "{transport:?}");
        // Two of three hosts had each from its owner.
        assert_eq!(cluster.total(|node| node.peer_hits), 2 * count, "{transport:?}");
        assert_eq!(cluster.total(|node| node.served_blocks), 2 * count, "{transport:?}");
        assert_eq!(cluster.total(|node| node.peer_bytes), cluster.total(|node| node.served_bytes));
        assert_eq!(cluster.total(|node| node.peer_failures), 0, "{transport:?}");
        for node in &cluster.nodes {
            assert!(node.counters().served_blocks > 0, "{transport:?}: each has a share");
        }
        cluster.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_is_lost_is_replaced_and_one_that_comes_takes_its_share() {
    for transport in [Transport::Tcp, Transport::Quic] {
        let mut cluster = Cluster::new(World::new(), 3, false, |peers| peers.transport = transport).await;
        cluster.read(&data(&cluster.world, "before").await).await;
        let lost = cluster.nodes.pop().expect("three");
        lost.close().await;
        drop(lost);
        let (blobs, gets) = (data(&cluster.world, "after").await, cluster.world.gets());
        cluster.read(&blobs).await;
        assert_eq!(cluster.world.gets() - gets, blocks(&blobs), "{transport:?}: the next owner is asked");
        for node in &cluster.nodes {
            assert_eq!(node.counters().peers_here, 1, "{transport:?}");
        }
        cluster.close().await;
    }
    let world = World::new();
    let mut cluster = Cluster { world, scratch: tempfile::tempdir().expect("scratch"), nodes: Vec::new() };
    let [first, second] = addresses(2)[..] else { unreachable!("two were asked for") };
    let alone = cluster.open(cluster.settings(first, &[first, second])).await;
    cluster.nodes.push(alone);
    let blobs = data(&cluster.world, "alone").await;
    cluster.read(&blobs).await;
    let late = cluster.open(cluster.settings(second, &[first, second])).await;
    cluster.nodes.push(late);
    for node in &cluster.nodes {
        until(|| node.counters().peers_here == 1).await;
    }
    cluster.read(&blobs).await;
    let (first, second) = (cluster.nodes[0].counters(), cluster.nodes[1].counters());
    assert_eq!(first.origin_requests, blocks(&blobs));
    assert!(
        second.origin_requests < blocks(&blobs),
        "it took its own share from the store, the rest from the first"
    );
    assert_eq!(second.origin_requests + second.peer_hits, blocks(&blobs));
    cluster.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_host_warms_and_pins_for_all_and_all_tell_where_it_lies() {
    let cluster = Cluster::new(World::new(), 3, true, |_| {}).await;
    let blobs = data(&cluster.world, "a").await;
    let keys = keys(&blobs);
    assert_eq!(cluster.nodes[0].ceiling(true).hosts, 3);
    for key in &keys {
        cluster.nodes[0].fill(key, true).await.expect("filled");
    }
    assert_eq!(cluster.world.gets(), blocks(&blobs));
    assert_eq!(cluster.total(|node| node.disk_writes), blocks(&blobs), "each lies on one disk");
    let pinned = cluster.total(|node| node.pinned_bytes);
    assert!(pinned >= keys.iter().map(BlockKey::len).sum());
    for node in &cluster.nodes {
        assert!(node.counters().pinned_bytes > 0 && node.counters().pinned_bytes < pinned);
        let found = node.stat(&keys, true).await.expect("looked");
        assert!(found.iter().all(|residency| *residency == Residency::Disk), "{found:?}");
    }
    cluster.read(&blobs).await;
    assert_eq!(cluster.world.gets(), blocks(&blobs), "nobody asks the store again");
    let mut unpinned = crate::Unpinned::default();
    for key in &keys {
        unpinned += cluster.nodes[2].unpin(key).await.expect("unpinned");
    }
    assert_eq!((unpinned.blocks, unpinned.bytes), (blocks(&blobs), pinned));
    assert_eq!(cluster.total(|node| node.pinned_bytes), 0);
    for key in &keys {
        cluster.nodes[1].fill(key, true).await.expect("filled");
    }
    assert_eq!(cluster.nodes[2].unpin_all().await.expect("unpinned"), unpinned);
    assert_eq!(cluster.total(|node| node.pinned_bytes), 0);
    cluster.close().await;
}

/// As a pod that was moved, or started again, may be found elsewhere with the disk that it had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_stays_with_the_disk_that_has_it_wherever_that_is_found() {
    let mut cluster = Cluster::new(World::new(), 2, true, |_| {}).await;
    let blobs = data(&cluster.world, "a").await;
    for key in keys(&blobs) {
        cluster.nodes[0].fill(&key, true).await.expect("filled");
    }
    let gets = cluster.world.gets();
    join_all(cluster.nodes.drain(..).map(|node| async move { node.close().await })).await;
    let members = addresses(2);
    for (number, own) in members.iter().enumerate() {
        let mut settings = cluster.settings(*own, &members);
        settings.directory = Some(cluster.scratch.path().join(number.to_string()));
        let node = cluster.open(settings).await;
        cluster.nodes.push(node);
    }
    for node in &cluster.nodes {
        until(|| node.counters().peers_here == 1).await;
    }
    cluster.read(&blobs).await;
    assert_eq!(cluster.world.gets(), gets, "all of it lies where it is looked for");
    cluster.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_that_keep_what_comes_have_it_when_the_others_are_gone() {
    let mut cluster = Cluster::new(World::new(), 2, true, |peers| peers.keep = true).await;
    let blobs = data(&cluster.world, "a").await;
    for node in &cluster.nodes {
        for key in keys(&blobs) {
            node.fill(&key, false).await.expect("filled");
        }
    }
    assert_eq!(cluster.world.gets(), blocks(&blobs), "one took from the other");
    cluster.nodes.pop().expect("two").close().await;
    let found = cluster.nodes[0].stat(&keys(&blobs), true).await.expect("looked");
    assert!(found.iter().all(|residency| *residency == Residency::Disk), "{found:?}");
    cluster.close().await;
}

/// Of hosts that know different others, each takes another one for a block's owner: nobody waits for who waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_that_take_each_other_for_the_owner_do_not_wait_for_each_other() {
    let world = World::slow();
    let mut cluster = Cluster { world, scratch: tempfile::tempdir().expect("scratch"), nodes: Vec::new() };
    let [first, second, third] = addresses(3)[..] else { unreachable!("three were asked for") };
    let open = [(first, second), (second, third), (third, first)]
        .map(|(own, other)| cluster.open(cluster.settings(own, &[other])));
    let nodes = join_all(open).await;
    cluster.nodes = nodes;
    for node in &cluster.nodes {
        until(|| node.counters().peers_here == 1).await;
    }
    let blobs = data(&cluster.world, "a").await;
    cluster.read(&blobs).await;
    let hits = cluster.total(|node| node.peer_hits);
    assert!(hits > 0 && cluster.world.gets() <= 3 * blocks(&blobs), "{hits} came from others");
    assert_eq!(cluster.total(|node| node.peer_failures), 0);
    cluster.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_holds_another_secret_or_another_volume_shares_nothing() {
    let world = World::new();
    let mut cluster = Cluster { world, scratch: tempfile::tempdir().expect("scratch"), nodes: Vec::new() };
    let members = addresses(3);
    for (number, own) in members.iter().enumerate() {
        let mut settings = cluster.settings(*own, &members);
        if number == 1 {
            settings.peers.secret = Some(secret(cluster.scratch.path(), "what only this host knows"));
        }
        let node = cluster.world.open(settings.clone()).await;
        node.join(&settings, if number == 2 { VolumeId(8) } else { VOLUME }).await.expect("joined");
        cluster.nodes.push(node);
    }
    let blobs = data(&cluster.world, "a").await;
    cluster.read(&blobs).await;
    assert_eq!(cluster.total(|node| node.origin_requests), 3 * blocks(&blobs));
    assert_eq!(cluster.total(|node| node.peers_here + node.served_blocks), 0);
    until(|| cluster.total(|node| node.peers) == 3 * 2).await;
    cluster.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_works_long_is_waited_for_up_to_the_deadline() {
    for (request_us, deadline_ms, hits) in [(2_500_000, 60_000, true), (5_000_000, 1_000, false)] {
        let bucket =
            World::new().bucket.with_delay(Delay { request_us, mib_us: 0 }).with_deadline_ms(120_000);
        let world = World { bucket, ..World::new() };
        let cluster = Cluster::new(world, 2, false, |peers| peers.deadline_ms = deadline_ms).await;
        let blobs: Vec<_> = join_all((0..8).map(|number| {
            let (world, key) = (&cluster.world, format!("small/{number}"));
            async move { world.put(&key, 10 * KIB).await }
        }))
        .await;
        cluster.read(&blobs).await;
        assert_eq!(cluster.total(|node| node.peer_hits) == 8, hits);
        assert_eq!(cluster.total(|node| node.peer_failures) == 8, !hits);
        assert_eq!(
            cluster.total(|node| node.peers_here),
            2,
            "it said that it was at it, and the store was as slow"
        );
        cluster.close().await;
    }
}

/// Where all hosts want a block at the same time, its owner sends it to one of them, which passes it on, and so on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_many_want_at_once_is_passed_on() {
    const HOSTS: u64 = 8;
    for transport in [Transport::Tcp, Transport::Quic] {
        let world = World::new();
        let world = World { bucket: world.bucket.with_deadline_ms(120_000), ..world };
        let cluster = Cluster::new(world, HOSTS as usize, false, |peers| peers.transport = transport).await;
        let mut blobs = Vec::new();
        for number in 0..5 {
            let blob = cluster.world.put(&format!("large/{number}"), BLOCK_SIZE).await;
            // All of them have asked before the store gives the first byte.
            let (gate, key) = (cluster.world.faults.gate(1), blob.name.block(0));
            let askers = || cluster.nodes.iter().map(|node| node.waiting_for(&key)).sum::<usize>();
            let opened = async {
                gate.reached().await;
                until(|| askers() == HOSTS as usize - 1).await;
                gate.open();
            };
            tokio::join!(cluster.read(std::slice::from_ref(&blob)), opened);
            blobs.push(blob);
        }
        // One that is too small to be passed on.
        blobs.push(cluster.world.put("small", 5).await);
        cluster.read(&blobs[5..]).await;
        // All but two hosts of each large block.
        let (count, most) = (blocks(&blobs), 5 * (HOSTS - 2));
        assert_eq!(cluster.world.gets(), count, "{transport:?}: it leaves the store once");
        assert_eq!(cluster.total(|node| node.peer_hits), (HOSTS - 1) * count, "{transport:?}");
        assert_eq!(cluster.total(|node| node.peer_failures), 0, "{transport:?}");
        let referrals = cluster.total(|node| node.peer_referrals);
        assert_eq!(referrals, most, "{transport:?}");
        // What is here is sent from here, whoever came first.
        let (served, again) =
            (cluster.total(|node| node.served_blocks), cluster.total(|node| node.peer_hits));
        cluster.read(&blobs).await;
        assert_eq!(cluster.total(|node| node.served_blocks), served, "{transport:?}");
        assert_eq!(cluster.total(|node| node.peer_hits), again, "{transport:?}");
        cluster.close().await;
    }
}

/// The others took what it owned for what it had owned before, and the store was asked twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_starts_again_with_another_share_is_known_by_that() {
    for transport in [Transport::Tcp, Transport::Quic] {
        let world = World::new();
        let mut cluster =
            Cluster { world, scratch: tempfile::tempdir().expect("scratch"), nodes: Vec::new() };
        let members = addresses(2);
        let settings = |cluster: &Cluster, own: usize| {
            let mut settings = cluster.settings(members[own], &members);
            settings.peers.transport = transport;
            settings
        };
        for own in 0..2 {
            let node = cluster.open(settings(&cluster, own)).await;
            cluster.nodes.push(node);
        }
        for node in &cluster.nodes {
            until(|| node.counters().peers_here == 1).await;
        }
        cluster.read(&data(&cluster.world, "before").await).await;
        cluster.nodes.pop().expect("two").close().await;
        let is_free = || match transport {
            Transport::Tcp => std::net::TcpListener::bind(members[1]).is_ok(),
            Transport::Quic => std::net::UdpSocket::bind(members[1]).is_ok(),
        };
        until(is_free).await;
        let node = cluster.open(settings(&cluster, 1)).await;
        cluster.nodes.push(node);
        // One read may find that the other one was started again; what comes then is known.
        cluster.read(&data(&cluster.world, "while").await).await;
        for node in &cluster.nodes {
            until(|| node.counters().peers_here == 1).await;
        }
        let (blobs, gets) = (data(&cluster.world, "after").await, cluster.world.gets());
        cluster.read(&blobs).await;
        assert_eq!(cluster.world.gets() - gets, blocks(&blobs), "{transport:?}");
        cluster.close().await;
    }
}

/// Hosts are closed and opened again while all others read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_that_come_and_go_cost_no_read_and_no_wrong_byte() {
    let seed = Rng::system().u64();
    let random = Rng::seeded(seed);
    let mut cluster = Cluster::new(World::slow(), 0, true, |_| {}).await;
    let members = addresses(4);
    let settings = |cluster: &Cluster, host: usize| CacheSettings {
        directory: Some(cluster.scratch.path().join(host.to_string())),
        memory_bytes: 8 * MIB,
        ..cluster.settings(members[host], &members)
    };
    let mut hosts: Vec<Option<Arc<Node>>> = Vec::new();
    for host in 0..members.len() {
        hosts.push(Some(cluster.open(settings(&cluster, host)).await));
    }
    let blobs = data(&cluster.world, "a").await;
    for round in 0..rounds(12) {
        let changed = random.below(members.len() as u64) as usize;
        let leaves = hosts[changed].take();
        let readers = hosts.iter().flatten().flat_map(|node| {
            (0..4).map(|_| {
                let (node, blob) = (node.clone(), blobs[random.below(blobs.len() as u64) as usize].clone());
                let range = blob.random_range(&random);
                tokio::spawn(async move { blob.check(&*node, range).await })
            })
        });
        let readers: Vec<_> = readers.collect();
        match leaves {
            Some(node) if random.chance(0.7) => {
                node.close().await;
                drop(node);
            }
            Some(node) => hosts[changed] = Some(node),
            None => {
                // What a host still does when it is closed may hold its port for a moment.
                let is_free = || std::net::TcpListener::bind(members[changed]).is_ok();
                until(is_free).await;
                hosts[changed] = Some(cluster.open(settings(&cluster, changed)).await);
            }
        }
        for read in join_all(readers).await {
            let read = read.unwrap_or_else(|error| panic!("seed {seed}, round {round}: {error}"));
            read.unwrap_or_else(|error| panic!("seed {seed}, round {round}: {error}"));
        }
    }
    cluster.nodes = hosts.into_iter().flatten().collect();
    // One that is gone counts as there until it is asked for something.
    let present = cluster.nodes.len() as u64;
    for node in &cluster.nodes {
        until(|| node.counters().peers_here >= present - 1).await;
    }
    cluster.read(&blobs).await;
    cluster.close().await;
}
