//! Blocks that one host has in memory and another one asks it for, against as many bytes on bare streams.
//!
//! Both hosts are caches of this process, as are both ends of the streams, so that its processor time is that of both.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use forebay_cache::{Blocks, CacheSettings, Node, PeerSettings};
use forebay_core::units::{GIB, MIB};
use forebay_core::{BLOCK_SIZE, BlockKey, ObjectKey, VolumeBlob, VolumeId};
use forebay_io::net::secure::{Host, Identity, Listen, Stream, Transport};
use forebay_io::object::{Bucket, Condition};
use forebay_io::task::TaskGroup;
use futures::stream::{self, StreamExt, TryStreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;

use super::common::mib_a_second;
use crate::context::{Context, noise};
use crate::report::{Aim, Row};
use crate::sample::{Pairs, Sample, measure};

const SECRET: &[u8] = b"what both hosts of the benchmark know";
const BLOCKS: u64 = 64;
/// How many of them are asked for in one run, each several times.
const GETS: usize = 256;
/// Blocks on their way at once.
const AT_ONCE: usize = 8;
const HOSTS: [SocketAddr; 2] = [address(1), address(2)];

const fn address(host: u8) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 93, 47, host)), 7400)
}

pub(super) fn run(context: &Context, scenario: &str) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (transport, name) in [(Transport::Tcp, "TLS over TCP"), (Transport::Quic, "QUIC")] {
        let tasks = TaskGroup::new("bench");
        let hosts = context.wait(Hosts::open(context, transport))?;
        let secure = context.wait(Streams::secure(transport, &tasks))?;
        let get = || measure(None, || context.wait(hosts.get()));
        let pairs = Pairs::run(context.settings.pairs, get, || measure(None, || context.wait(secure.get())))?;
        let title = format!("blocks of another host, {AT_ONCE} at a time, {name}");
        let (rates, cpu) = (pairs.figures(mib_a_second), pairs.figures(cpu_a_gib));
        let rate = Row::of_pairs(scenario, &title, "MiB/s", &rates, "the same bytes on its streams");
        rows.push(rate.aim(Aim::RatioAtLeast(0.95)));
        rows.push(Row::of_pairs(scenario, &title, "CPU s a GiB, both ends", &cpu, "the same"));
        if transport == Transport::Tcp {
            let plain = context.wait(Streams::plain(&tasks))?;
            let get = || measure(None, || context.wait(hosts.get()));
            let bare = || measure(None, || context.wait(plain.get()));
            let rates = Pairs::run(context.settings.pairs, get, bare)?.figures(mib_a_second);
            rows.push(Row::of_pairs(scenario, &title, "MiB/s", &rates, "TCP, in the clear, no checksum"));
        }
        context.wait(async {
            hosts.close().await;
            tasks.shutdown(Duration::from_secs(10)).await;
            Ok(())
        })?;
    }
    Ok(rows)
}

fn cpu_a_gib(sample: &Sample) -> f64 {
    sample.client_cpu / (sample.amount / GIB as f64)
}

/// One that has all blocks in memory, and one that keeps nothing and asks it for those that it owns.
struct Hosts {
    nodes: [Arc<Node>; 2],
    keys: Vec<BlockKey>,
}

impl Hosts {
    async fn open(context: &Context, transport: Transport) -> Result<Self> {
        let bucket = Bucket::in_memory();
        let data = noise((BLOCKS * BLOCK_SIZE) as usize);
        let put = bucket.put(&ObjectKey::new("blocks"), data, Condition::Always).await?;
        let volume = VolumeId(1);
        let blob = VolumeBlob::new(volume, put.blob());
        let secret = context.place("peers")?.join("secret of blocks");
        std::fs::write(&secret, SECRET)?;
        let open = async |own: SocketAddr, memory_bytes: u64| {
            let peers = PeerSettings {
                members: HOSTS.iter().map(ToString::to_string).collect(),
                secret: Some(secret.clone()),
                listen: Some(own.to_string()),
                transport,
                ..PeerSettings::default()
            };
            let settings =
                CacheSettings { memory_bytes, fetch_bytes: 256 * MIB, peers, ..CacheSettings::default() };
            let node = Node::open(bucket.clone(), settings.clone()).await?;
            node.join(&settings, volume).await?;
            Ok::<_, anyhow::Error>(node)
        };
        let nodes = [open(HOSTS[0], GIB).await?, open(HOSTS[1], 0).await?];
        for node in &nodes {
            while node.counters().peers_here == 0 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        let mut keys = Vec::new();
        for key in (0..BLOCKS).map(|index| blob.block(index)) {
            nodes[0].get(&key, 0..key.len()).await?;
            let before = nodes[1].counters().peer_hits;
            nodes[1].get(&key, 0..key.len()).await?;
            if nodes[1].counters().peer_hits > before {
                keys.push(key);
            }
        }
        ensure!(!keys.is_empty(), "one host owns all blocks");
        Ok(Self { nodes, keys })
    }

    /// Bytes that came.
    async fn get(&self) -> Result<f64> {
        let before = self.nodes[1].counters().peer_bytes;
        let keys = self.keys.iter().cycle().take(GETS).cloned();
        let get = |key: BlockKey| async move { self.nodes[1].get(&key, 0..key.len()).await };
        stream::iter(keys).map(get).buffer_unordered(AT_ONCE).try_for_each(async |_| Ok(())).await?;
        let came = self.nodes[1].counters().peer_bytes - before;
        ensure!(came > 0, "nothing came from the other host");
        Ok(came as f64)
    }

    async fn close(&self) {
        for node in &self.nodes {
            node.close().await;
        }
    }
}

/// Streams whose other ends send a block for each byte that they are sent.
struct Streams(Vec<Mutex<Stream>>);

impl Streams {
    async fn secure(transport: Transport, tasks: &TaskGroup) -> Result<Self> {
        let identity = Identity::new(SECRET, b"bench", "bench/1")?;
        let here = Listen { ip: Some(Ipv4Addr::LOCALHOST.into()), port: 0 };
        let host = Arc::new(Host::open(transport, here, &identity)?);
        let (there, block, group) = (host.clone(), noise(BLOCK_SIZE as usize), tasks.clone());
        tasks.spawn("send blocks", async move {
            let answer = move |stream| {
                let block = block.clone();
                async move { send(stream, block).await }
            };
            there.serve(&group, answer).await;
        });
        let mut streams = Vec::new();
        for _ in 0..AT_ONCE {
            streams.push(Mutex::new(host.reach(host.address()?).await?));
        }
        Ok(Self(streams))
    }

    async fn plain(tasks: &TaskGroup) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (address, block) = (listener.local_addr()?, noise(BLOCK_SIZE as usize));
        let (group, stop) = (tasks.clone(), tasks.stop());
        tasks.spawn("send blocks", async move {
            while let Some(Ok((socket, _))) = stop.run_until_cancelled(listener.accept()).await {
                let (block, stop) = (block.clone(), stop.clone());
                group.spawn("stream", async move {
                    stop.run_until_cancelled(send(Box::new(socket), block)).await;
                });
            }
        });
        let mut streams = Vec::new();
        for _ in 0..AT_ONCE {
            let stream: Stream = Box::new(TcpStream::connect(address).await?);
            streams.push(Mutex::new(stream));
        }
        Ok(Self(streams))
    }

    async fn get(&self) -> Result<f64> {
        let get = async |number: usize| {
            let mut stream = self.0[number % AT_ONCE].lock().await;
            let mut block = vec![0; BLOCK_SIZE as usize];
            stream.write_all(&[1]).await?;
            stream.flush().await?;
            stream.read_exact(&mut block).await.context("a stream ended")?;
            Ok::<_, anyhow::Error>(())
        };
        let gets = stream::iter(0..GETS).map(get).buffer_unordered(AT_ONCE);
        gets.try_for_each(async |()| Ok(())).await?;
        Ok((GETS as u64 * BLOCK_SIZE) as f64)
    }
}

async fn send(mut stream: Stream, block: Bytes) {
    while stream.read_u8().await.is_ok()
        && stream.write_all(&block).await.is_ok()
        && stream.flush().await.is_ok()
    {}
}
