//! Hosts that are late, lost, or lie, and what strangers say: played by tests that speak the protocol themselves.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::Duration;

use forebay_core::units::KIB;
use forebay_io::net::secure::{Host, Identity, Listen, Stream, Transport};
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Cluster, SECRET, VOLUME, World, addresses, blocks, data, rounds, until};
use crate::{Blocks, Residency};

/// Takes one request off a stream: its kind, and its code.
async fn request(stream: &mut Stream) -> Option<(u8, u8)> {
    let mut head = [0; 24];
    stream.read_exact(&mut head).await.ok()?;
    let length = u32::from_le_bytes(head[4..8].try_into().expect("four bytes"));
    stream.read_exact(&mut vec![0; length as usize]).await.ok()?;
    Some((head[0], head[1]))
}

/// A head of an answer.
fn head(kind: u8, code: u8, length: u32, first: u64) -> Vec<u8> {
    [&[kind, code, 0, 0][..], &length.to_le_bytes(), &first.to_le_bytes(), &[9; 8]].concat()
}

/// What is said in the place of an answer; none to end the stream.
type Lie = fn() -> Option<Vec<u8>>;

/// Greets as another host does, and has `lie` answer all else; ends the stream after it where that says so.
async fn lie(mut stream: Stream, lie: Lie) {
    while let Some((kind, _)) = request(&mut stream).await {
        let answer = match kind {
            1 => head(1, 0, 0, 77),
            _ => match lie() {
                Some(answer) => answer,
                None => return,
            },
        };
        stream.write_all(&answer).await.ok();
        stream.flush().await.ok();
    }
}

/// Has the one host read as many small files, one after another.
async fn read_forty(cluster: &Cluster) {
    for number in 0..40 {
        cluster.world.put(&format!("k/{number}"), 10 * KIB).await.check_all(&*cluster.nodes[0]).await;
    }
}

/// Promise S71: With `--peers`, a read returns the bytes of the version that its file's layout names, whichever host they came
/// from: a host that dies, hangs, answers late or sends damaged bytes costs time, and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_peer_says_wrong_is_had_from_the_store() {
    const SIZE: u64 = 10 * KIB;
    // What is said, and whether it is an answer: what is none ends the stream, and who said it is away.
    let lies: [(&str, bool, Lie); 9] = [
        ("damaged", true, || Some([head(2, 0, SIZE as u32, 12345), vec![1; SIZE as usize]].concat())),
        ("a refusal", true, || Some([head(7, 2, 5, 0), b"stale".to_vec()].concat())),
        ("a refusal of no kind", true, || Some([head(7, 250, 2, 0), vec![0xff, 0xfe]].concat())),
        ("something else", true, || Some(head(3, 1, 0, 0))),
        ("a byte short", false, || Some([head(2, 0, SIZE as u32 - 1, 0), vec![1; SIZE as usize]].concat())),
        ("endless", false, || Some(head(2, 0, u32::MAX, 0))),
        ("cut off", false, || None),
        ("unheard of", false, || Some(head(99, 0, 0, 0))),
        ("a long refusal", false, || Some(head(7, 0, u32::MAX, 0))),
    ];
    for (what, is_answer, told) in lies {
        let (cluster, _other) = Cluster::beside(120_000, move |stream| lie(stream, told)).await;
        for number in 0..40 {
            let blob = cluster.world.put(&format!("k/{number}"), SIZE).await;
            blob.check_all(&*cluster.nodes[0]).await;
            let found = cluster.nodes[0].stat(&blob.keys(), false).await.expect("looked");
            assert_eq!(found, [Residency::Memory], "{what}");
        }
        let counters = cluster.nodes[0].counters();
        assert_eq!((counters.peer_hits, counters.origin_requests), (0, 40), "{what}");
        assert_eq!(counters.peer_failures > 0, is_answer, "{what}: {counters:?}");
        cluster.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_falls_silent_is_given_up_and_found_again() {
    static SPEAKS: AtomicBool = AtomicBool::new(true);
    let (cluster, _other) = Cluster::beside(3_000, |mut stream| async move {
        while let Some((kind, _)) = request(&mut stream).await {
            if kind != 1 || !SPEAKS.load(SeqCst) {
                SPEAKS.store(false, SeqCst);
                std::future::pending::<()>().await;
            }
            stream.write_all(&head(1, 0, 0, 77)).await.ok();
            stream.flush().await.ok();
        }
    })
    .await;
    let blobs = data(&cluster.world, "a").await;
    cluster.read(&blobs).await;
    let counters = cluster.nodes[0].counters();
    assert_eq!((counters.peer_hits, counters.peers_here), (0, 0));
    assert_eq!(counters.origin_requests, blocks(&blobs));
    SPEAKS.store(true, SeqCst);
    until(|| cluster.nodes[0].counters().peers_here == 1).await;
    cluster.close().await;
}

/// Whoever an owner names may have nothing, or be nobody: then the owner is asked again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_named_and_does_not_give_a_block_is_passed_over() {
    const SIZE: u64 = 600 * KIB;
    static ASKED: parking_lot::Mutex<Vec<u8>> = parking_lot::Mutex::new(Vec::new());
    // The other host names `named`; asked for what it has at hand it says so, and where it is asked itself, no.
    type Named = fn() -> (u64, Option<Vec<u8>>);
    let all: [(&str, &[u8], Named); 5] = [
        ("somebody unknown", &[0, 1], || (5, None)),
        ("who refuses", &[0, 2, 1], || (77, Some([head(7, 1, 2, 0), b"no".to_vec()].concat()))),
        ("who sends damaged bytes", &[0, 2, 1], || {
            (77, Some([head(2, 0, SIZE as u32, 5), vec![1; SIZE as usize]].concat()))
        }),
        ("who sends it on in turn", &[0, 2, 1], || (77, Some(head(9, 0, 0, 77)))),
        ("who ends in the middle", &[0, 2, 1], || {
            (77, Some([head(2, 0, SIZE as u32, 5), vec![1; 9]].concat()))
        }),
    ];
    for (what, codes, named) in all {
        let (cluster, _other) = Cluster::beside(120_000, move |mut stream| async move {
            while let Some((kind, code)) = request(&mut stream).await {
                let (who, at_hand) = named();
                let is_cut = at_hand.as_ref().is_some_and(|said| said.len() == 24 + 9);
                let answer = match (kind, code) {
                    (1, _) => head(1, 0, 0, 77),
                    (_, 0) => head(9, 0, 0, who),
                    (_, 2) => at_hand.unwrap_or_default(),
                    _ => [head(7, 0, 4, 0), b"away".to_vec()].concat(),
                };
                if kind == 2 {
                    ASKED.lock().push(code);
                }
                stream.write_all(&answer).await.ok();
                stream.flush().await.ok();
                if is_cut && code == 2 {
                    return;
                }
            }
        })
        .await;
        let mut asked = 0;
        for number in 0..40 {
            let blob = cluster.world.put(&format!("k/{number}"), SIZE).await;
            blob.check_all(&*cluster.nodes[0]).await;
            let codes_asked = std::mem::take(&mut *ASKED.lock());
            if !codes_asked.is_empty() {
                assert_eq!(codes_asked, codes, "{what}");
                asked += 1;
            }
        }
        // Three times in a row, and then it is left alone.
        assert_eq!(asked, 3, "{what}");
        let counters = cluster.nodes[0].counters();
        assert_eq!((counters.peer_hits, counters.origin_requests), (0, 40), "{what}");
        cluster.close().await;
    }
}

/// It works, and says so, for longer than it may, on each block, while the store gives them at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_is_late_where_the_store_is_quick_is_left_alone() {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let (cluster, _other) = Cluster::beside(4_000, |mut stream| async move {
        while let Some((kind, _)) = request(&mut stream).await {
            if kind == 1 {
                stream.write_all(&head(1, 0, 0, 77)).await.ok();
                stream.flush().await.ok();
                continue;
            }
            ASKED.fetch_add(1, SeqCst);
            while stream.write_all(&head(6, 0, 0, 0)).await.is_ok() && stream.flush().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    })
    .await;
    read_forty(&cluster).await;
    assert_eq!(ASKED.load(SeqCst), 3, "three times in a row");
    let counters = cluster.nodes[0].counters();
    assert_eq!((counters.peer_failures, counters.peers_here, counters.origin_requests), (3, 0, 40));
    cluster.close().await;
}

/// Not so one that names another host, which is late in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_blamed_for_what_another_host_was_to_pass_on() {
    const SIZE: u64 = 600 * KIB;
    static ASKED: AtomicU32 = AtomicU32::new(0);
    // It is to have named the other one by then, however busy this machine is.
    let (cluster, _other) = Cluster::beside(8_000, |mut stream| async move {
        while let Some((kind, code)) = request(&mut stream).await {
            let mut answer = match (kind, code) {
                (1, _) => head(1, 0, 0, 77),
                (_, 2) => head(2, 0, SIZE as u32, 5),
                _ => {
                    ASKED.fetch_add(1, SeqCst);
                    head(9, 0, 0, 77)
                }
            };
            // A byte at a time, so that it is not silent.
            while stream.write_all(&answer).await.is_ok() && stream.flush().await.is_ok() && code == 2 {
                answer = vec![1];
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    })
    .await;
    let mut blobs = Vec::new();
    for number in 0..24 {
        blobs.push(cluster.world.put(&format!("k/{number}"), SIZE).await);
    }
    join_all(blobs.iter().map(|blob| blob.check_all(&*cluster.nodes[0]))).await;
    assert!(ASKED.load(SeqCst) > 3, "it is asked again and again");
    let counters = cluster.nodes[0].counters();
    assert_eq!((counters.peer_hits, counters.peers_here, counters.origin_requests), (0, 1, 24));
    cluster.close().await;
}

/// Of a chain of owner, one that is lost in the middle of it, and one that waits for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_a_host_that_is_lost_in_the_middle_is_sent_the_block_by_its_owner() {
    const SIZE: u64 = 600 * KIB;
    static ASKED: AtomicU64 = AtomicU64::new(0);
    let world = World::new();
    let mut cluster = Cluster { world, scratch: tempfile::tempdir().expect("scratch"), nodes: Vec::new() };
    let [owner, lost, last] = addresses(3)[..] else { unreachable!("three were asked for") };
    let identity =
        Identity::new(SECRET.as_bytes(), &VOLUME.0.to_le_bytes(), "forebay-blocks/1").expect("one");
    let listen = Listen { ip: Some(lost.ip()), port: lost.port() };
    let host = Arc::new(Host::open(Transport::Tcp, listen, &identity).expect("a port"));
    let (tasks, group, serving) = (TaskGroup::new("lost"), TaskGroup::new("streams"), host.clone());
    tasks.spawn("serve", async move {
        let answer = |mut stream: Stream| async move {
            while let Some((kind, code)) = request(&mut stream).await {
                // The beginning of what it is to pass on, and a refusal of what it owns.
                let answer = match (kind, code) {
                    (1, _) => head(1, 0, 0, 77),
                    (2, 2) => [head(2, 0, SIZE as u32, 5), vec![1; 100_000]].concat(),
                    _ => [head(7, 2, 4, 0), b"gone".to_vec()].concat(),
                };
                stream.write_all(&answer).await.ok();
                stream.flush().await.ok();
                if (kind, code) == (2, 2) {
                    ASKED.fetch_add(1, SeqCst);
                    return;
                }
            }
        };
        serving.serve(&group, answer).await;
    });
    for own in [owner, last] {
        let node = cluster.open(cluster.settings(own, &[owner, lost, last])).await;
        cluster.nodes.push(node);
    }
    for node in &cluster.nodes {
        until(|| node.counters().peers_here == 2).await;
    }
    let mut referred = 0;
    for number in 0..60 {
        let name = format!("k/{number}");
        let blob = cluster.world.put(&name, SIZE).await;
        // It asks the first of the two others for it, takes the answer, and does not say that it has it.
        let mut stream = host.reach(owner).await.expect("reached");
        stream.write_all(&head(1, 0, 0, 77)).await.expect("said");
        stream.read_exact(&mut [0; 24]).await.expect("greeted");
        let version = blob.keys()[0].blob.blob().version.clone();
        let length = (name.len() + version.as_str().len()) as u32;
        let mut asked = head(2, 0, length, 0);
        asked[2] = name.len() as u8;
        asked[16..].copy_from_slice(&SIZE.to_le_bytes());
        asked.extend_from_slice(name.as_bytes());
        asked.extend_from_slice(version.as_str().as_bytes());
        stream.write_all(&asked).await.expect("said");
        stream.flush().await.expect("said");
        stream.read_exact(&mut vec![0; 24 + SIZE as usize]).await.expect("sent");
        let (asked, hits) = (ASKED.load(SeqCst), cluster.nodes[1].counters().peer_hits);
        blob.check_all(&*cluster.nodes[1]).await;
        if ASKED.load(SeqCst) > asked {
            referred += 1;
            assert_eq!(cluster.nodes[1].counters().peer_hits, hits + 1, "its owner sent it then");
        }
    }
    assert!(referred > 0, "nobody was referred to who is lost");
    assert_eq!(cluster.nodes[1].counters().peer_referrals, 0);
    for node in &cluster.nodes {
        assert_eq!(node.counters().peers_here, 2, "nobody is taken to be away for what was to be passed on");
    }
    cluster.close().await;
}

/// A host that has no store, while the others have one, would have each read of its blocks wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_cannot_reach_the_store_is_left_alone() {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let (cluster, _other) = Cluster::beside(120_000, |stream| {
        lie(stream, || {
            ASKED.fetch_add(1, SeqCst);
            Some([head(7, 0, 4, 0), b"away".to_vec()].concat())
        })
    })
    .await;
    read_forty(&cluster).await;
    assert_eq!(ASKED.load(SeqCst), 3, "it is asked three times in a row, and no more for a while");
    let counters = cluster.nodes[0].counters();
    assert_eq!((counters.peer_failures, counters.peers_here, counters.origin_requests), (3, 0, 40));
    cluster.close().await;
}

/// What strangers who hold the secret send is refused before memory is taken for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_none_end_their_stream_alone() {
    let cluster = Cluster::new(World::new(), 2, true, |_| {}).await;
    let blobs = data(&cluster.world, "a").await;
    let identity =
        Identity::new(SECRET.as_bytes(), &VOLUME.0.to_le_bytes(), "forebay-blocks/1").expect("one");
    let here = Host::open(Transport::Tcp, Listen { ip: None, port: 0 }, &identity).expect("a port");
    let seed = Rng::system().u64();
    let random = Rng::seeded(seed);
    for round in 0..rounds(200) {
        let mut said = vec![0; 24 + random.below(64) as usize];
        random.fill(&mut said);
        if round % 2 == 0 {
            // Of a kind that there is, and lengths that fit.
            said[0] = 1 + random.below(10) as u8;
            let length = said.len() as u32 - 24;
            said[4..8].copy_from_slice(&length.to_le_bytes());
            said[2..4].copy_from_slice(&(random.below(u64::from(length) + 1) as u16).to_le_bytes());
            // A block that there may be.
            said[8..16].fill(0);
        }
        let mut stream = here.reach(cluster.nodes[0].peer_address()).await.expect("reached");
        if round % 4 == 0 {
            // From somebody who has said who it is, twice.
            said = [&head(1, 0, 0, 55), &said[..], &said[..]].concat();
        }
        stream.write_all(&said).await.ok();
        stream.shutdown().await.ok();
        let mut heard = Vec::new();
        tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut heard))
            .await
            .expect("an end")
            .ok();
        assert!(heard.len() <= 24 + 2 * (24 + 4096), "seed {seed}, round {round}: {} bytes", heard.len());
    }
    cluster.read(&blobs).await;
    assert_eq!(cluster.total(|node| node.peer_failures), 0, "seed {seed}");
    cluster.close().await;
}
