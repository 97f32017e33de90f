//! Mounts of several hosts that share what they have cached: what leaves the store, and what a person sees of it.
//!
//! Hosts are mounts of this one, each with a home, a cache and an address of its own (127.0.0.0/8 has enough for all).

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_core::ObjectKey;
use forebay_io::object::Condition;
use forebay_io::rng::Rng;
use forebay_tests::s3::Server;
use forebay_tests::settings::scale;
use forebay_tests::{Door, Forebay, Mount, Outcome, Scratch, require_fuse};
use serde_json::Value;

/// Longest that something may take to show.
const DEADLINE: Duration = Duration::from_secs(60);
/// Objects of one folder: small ones and two of three blocks.
const SMALL: usize = 30;
const LARGE: usize = 2;
const BLOCKS: usize = SMALL + 3 * LARGE;

/// A bucket behind a door that counts, and hosts that mount it.
struct Cluster {
    scratch: Scratch,
    door: Door,
    variables: Vec<(String, String)>,
    source: String,
    addresses: Vec<Ipv4Addr>,
    mounts: Vec<Mount>,
}

impl Cluster {
    /// A bucket with two folders, `early` and `late`.
    async fn new(hosts: usize) -> Self {
        let server = Server::shared();
        let bucket = server.bucket("data").await;
        for folder in ["early", "late"] {
            for (name, size) in objects() {
                let key = ObjectKey::new(format!("{folder}/{name}"));
                bucket.put(&key, content(&name, size), Condition::Always).await.expect("put");
            }
        }
        let door = Door::new(server.address()).expect("a door");
        let random = Rng::system();
        let address = |_| {
            let [a, b, c, ..] = random.u64().to_le_bytes();
            Ipv4Addr::new(127, a, b, c)
        };
        let scratch = Scratch::new();
        fs::write(scratch.join("secret"), "what all of these hosts know\n").expect("a secret");
        Self {
            variables: server.envs_at(door.endpoint()),
            source: bucket.url().to_string(),
            addresses: (0..hosts).map(address).collect(),
            scratch,
            door,
            mounts: Vec::new(),
        }
    }

    fn home(&self, host: usize) -> PathBuf {
        self.scratch.folder(&format!("home-{host}"))
    }

    fn mount(&mut self, options: &[&str]) {
        for host in 0..self.addresses.len() {
            let mount = self.mount_one(host, options);
            self.mounts.push(mount);
        }
        let others = self.addresses.len() as u64 - 1;
        for host in 0..self.addresses.len() {
            self.until(host, "peers_here", others);
        }
        self.door.take_requests();
    }

    fn mount_one(&self, host: usize, options: &[&str]) -> Mount {
        let members: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        let (members, listen) = (members.join(","), self.addresses[host].to_string());
        let secret = self.scratch.join("secret").display().to_string();
        let cache = self.scratch.join(&format!("cache-{host}")).display().to_string();
        // What is counted does not depend on how busy this machine is.
        let config = self.home(host).join("config/forebay");
        fs::create_dir_all(&config).expect("a folder");
        fs::write(config.join("forebay.toml"), "[volume.cache.peers]\ndeadline_ms = 120000\n")
            .expect("settings");
        let own =
            ["--peers", &members, "--peer-listen", &listen, "--peer-secret", &secret, "--cache-dir", &cache];
        let folder = self.scratch.join(&format!("mnt-{host}"));
        Mount::new(&self.home(host), &self.source, &folder, &[options, &own].concat(), &self.variables)
    }

    fn forebay(&self, host: usize, line: &[&str]) -> Outcome {
        Forebay::new(&self.home(host), line).envs(&self.variables).run()
    }

    /// A counter of one mount's cache.
    fn count(&self, host: usize, name: &str) -> u64 {
        let place = self.mounts[host].path().display().to_string();
        let status = self.forebay(host, &["status", &place, "--json"]).succeeded();
        let status: Value = serde_json::from_str(&status).expect("json");
        status["mounts"][0]["cache"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {status}"))
    }

    fn until(&self, host: usize, name: &str, wanted: u64) {
        let started = Instant::now();
        while self.count(host, name) != wanted {
            assert!(started.elapsed() < DEADLINE, "host {host}: {name} is not {wanted}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// All mounts read all of a folder, at once.
    fn read(&self, folder: &str) {
        std::thread::scope(|scope| {
            for mount in &self.mounts {
                let folder = mount.path().join(folder);
                scope.spawn(move || {
                    for (name, size) in objects() {
                        let got =
                            fs::read(folder.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
                        assert!(got == content(&name, size), "{name} of {}", folder.display());
                    }
                });
            }
        });
    }

    /// GETs of a folder's bytes that reached the store since the last look.
    fn gets(&self, folder: &str) -> usize {
        let is_of_folder = |line: &&String| line.starts_with("GET") && line.contains(&format!("/{folder}/"));
        self.door.take_requests().iter().filter(is_of_folder).count()
    }
}

fn objects() -> Vec<(String, usize)> {
    let small = (0..SMALL).map(|number| (format!("small-{number}"), 5000 + number));
    small.chain((0..LARGE).map(|number| (format!("large-{number}"), (9 << 20) + number))).collect()
}

fn content(name: &str, size: usize) -> Bytes {
    let mut bytes = vec![0; size];
    Rng::seeded(u64::from(forebay_core::crc32c(name.as_bytes()))).fill(&mut bytes);
    bytes.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_many_hosts_read_leaves_the_store_once_and_a_host_that_dies_is_not_missed() {
    if !require_fuse("what_many_hosts_read_leaves_the_store_once_and_a_host_that_dies_is_not_missed") {
        return;
    }
    // Either is tried over loopback in the cache's own tests.
    for transport in ["tcp", "quic"].into_iter().take(scale()) {
        let mut cluster = Cluster::new(3).await;
        cluster.mount(&["--read-only", "--peer-transport", transport]);
        cluster.read("early");
        assert_eq!(cluster.gets("early"), BLOCKS, "{transport}");
        let hits: u64 = (0..3).map(|host| cluster.count(host, "peer_hits")).sum();
        assert_eq!(hits, 2 * BLOCKS as u64, "{transport}: two of three had each block from the third");
        let served: u64 = (0..3).map(|host| cluster.count(host, "served_blocks")).sum();
        assert_eq!(served, hits, "{transport}");

        cluster.mounts.pop().expect("three").kill();
        cluster.read("late");
        assert_eq!(cluster.gets("late"), BLOCKS, "{transport}: once more, for those that are left");
        let table = cluster.forebay(0, &["status"]).succeeded();
        assert!(table.contains("PEERS") && table.contains("1 of 2, "), "{table}");
        assert!(cluster.mounts[0].log().contains("a peer is away"), "{}", cluster.mounts[0].log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_warmup_is_for_all_hosts() {
    if !require_fuse("one_warmup_is_for_all_hosts") {
        return;
    }
    let mut cluster = Cluster::new(3).await;
    cluster.mount(&["--dataset"]);
    let warm = |cluster: &Cluster, host: usize| -> Value {
        let place = cluster.mounts[host].path().join("early").display().to_string();
        let said = cluster.forebay(host, &["warmup", &place, "--pin", "--json"]).succeeded();
        serde_json::from_str(&said).expect("json")
    };
    let first = warm(&cluster, 0);
    let counts = ["blocks", "fetched", "already", "proved", "memory_only"].map(|name| first[name].as_u64());
    assert_eq!(counts, [BLOCKS as u64, BLOCKS as u64, 0, BLOCKS as u64, 0].map(Some), "{first}");
    assert_eq!(cluster.gets("early"), BLOCKS);
    // Another host finds all of it there, and everybody reads it without the store.
    let second = warm(&cluster, 1);
    assert_eq!(second["already"].as_u64(), Some(BLOCKS as u64), "{second}");
    cluster.read("early");
    assert_eq!(cluster.gets("early"), 0);
    let pinned: Vec<u64> = (0..3).map(|host| cluster.count(host, "pinned_bytes")).collect();
    assert!(pinned.iter().all(|bytes| *bytes > 0), "each has its share: {pinned:?}");

    // A host that dies takes its share along until it is back; a warmup tells, and brings the rest elsewhere.
    let mut dead = cluster.mounts.pop().expect("three");
    dead.kill();
    let third = warm(&cluster, 0);
    let fetched = third["fetched"].as_u64().expect("a count");
    assert_eq!(
        (third["proved"].as_u64(), cluster.gets("early")),
        (Some(BLOCKS as u64), fetched as usize),
        "{third}"
    );
    dead.remount(&cluster.home(2));
    cluster.mounts.push(dead);
    for host in 0..3 {
        cluster.until(host, "peers_here", 2);
    }
    let fourth = warm(&cluster, 1);
    assert_eq!(
        fourth["already"].as_u64(),
        Some(BLOCKS as u64),
        "it came back with what its disk holds: {fourth}"
    );
    assert_eq!(cluster.gets("early"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_peers_is_told_before_anything_is_mounted() {
    let cluster = Cluster::new(1).await;
    let (source, folder) = (cluster.source.as_str(), cluster.scratch.folder("mnt").display().to_string());
    let write = |name: &str, text: &str| {
        fs::write(cluster.scratch.join(name), text).expect("written");
        cluster.scratch.join(name).display().to_string()
    };
    let (good, short) = (write("good", "what all of these hosts know"), write("short", "guess me"));
    let missing = cluster.scratch.join("missing").display().to_string();
    let held = TcpListener::bind(SocketAddr::from((cluster.addresses[0], 0))).expect("a port");
    let taken = held.local_addr().expect("an address").to_string();
    for (options, cause, hint) in [
        (&["--peers", "a"][..], "none is given", "peer_secret"),
        (&["--peers", "a", "--peer-secret", &missing], "No such file", "urandom"),
        (&["--peers", "a", "--peer-secret", &short], "8 bytes can be guessed", "urandom"),
        (&["--peers", "a:b", "--peer-secret", &good], "`a:b`", "host:7400"),
        (&["--peers", "a", "--peer-secret", &good, "--peer-listen", "nowhere"], "`nowhere`", ":7400"),
        (
            &["--peers", "a", "--peer-secret", &good, "--peer-listen", "192.0.2.1"],
            "192.0.2.1:7400",
            "of this host",
        ),
        (&["--peers", "a", "--peer-secret", &good, "--peer-transport", "pigeon"], "`pigeon`", "quic"),
        (
            &["--peers", "a", "--peer-secret", &good, "--peer-listen", &taken],
            "another process listens",
            "that is free",
        ),
        (&["--peer-keep"], "without `peers`", "--peers"),
    ] {
        let line = [&["mount", source, &folder, "--read-only"][..], options].concat();
        cluster.forebay(0, &line).failed_with(cause, hint);
    }
}
