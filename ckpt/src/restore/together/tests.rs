//! Each slice is read once, passes every host that wants it, and is right or said not to be.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::net::{BulkReceiver, BulkSender, Door, Label};
use forebay_io::object::{Bucket, Condition, OperationKind};
use tokio::runtime::Handle;

use super::super::tests::{Cut, Job, bucket_of_each, connect, said, store};
use super::rounds::Reading;
use super::shares::{Origin, Placed, Shares};
use super::*;
use crate::testing::{chance, rounds};

/// Sends some of the slices that are to come.
type Send = Box<dyn FnOnce(&BulkSender, &[SliceId]) + std::marker::Send>;

fn send(sender: &BulkSender, label: Label, piece: &[u8]) -> Result<()> {
    let mut sending = sender.sending();
    sending.send(label, piece)?;
    sending.end()
}

/// Bytes of a slice of [`rows`].
const ROW: usize = 32 << 10;

/// A tensor of so many rows, a slice each, all in one shard, and its bytes.
async fn rows(bucket: &Bucket, count: u64) -> (Manifest, Vec<u8>) {
    let width = ROW as u64 / 4;
    let at: Vec<[[u64; 2]; 2]> = (0..count).map(|row| [[row, 0], [1, width]]).collect();
    let cuts: Vec<Cut<'_>> = at.iter().map(|[at, size]| (SliceKind::Box, &at[..], &size[..], 0)).collect();
    let (manifest, mut contents) = store(bucket, &[("w", &[count, width], &cuts)]).await;
    (manifest, contents.swap_remove(0))
}

/// Whoever wants all of it.
fn all(manifest: &Manifest) -> Vec<Wish> {
    vec![Wish { tensor: 0, region: Region::whole(&manifest.tensors[0].shape) }]
}

/// What the test sends for the other rank: through a way of it, or over a connection that says nothing by itself.
enum Other {
    Way(BulkSender),
    Silent { _open: TcpStream },
}

/// The plan and ways of the second of two ranks, each on a host of its own, of which the first is only the test.
fn beside(manifest: &Manifest, origin: Origin, is_silent: bool) -> (Together, Links, Other) {
    let patience = Duration::from_secs(60);
    let wishes = said(&[all(manifest), all(manifest)]);
    let reader = Reader { rank: 1, hosts: &[0, 1], origin };
    let together = Together::new(manifest, &wishes, reader).expect("plan");
    assert!(together.peers().from.contains(&0));
    let doors = [Door::open("a".into()).expect("a port"), Door::open("b".into()).expect("a port")];
    let address = |(door, secret): (&Door, &str)| {
        let port = door.port().expect("port");
        Address { addresses: vec!["127.0.0.1".into()], port, secret: secret.into() }
    };
    let addresses: Vec<Address> = doors.iter().zip(["a", "b"]).map(address).collect();
    std::thread::scope(|scope| {
        let Address { addresses: at, port, secret } = addresses[1].clone();
        let going = scope.spawn(move || {
            if is_silent {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
                stream.write_all(secret.as_bytes()).expect("say");
                stream.read_exact(&mut [0; 8]).expect("welcome");
                stream.write_all(&0_u32.to_le_bytes()).expect("say");
                // It has no card.
                stream.write_all(&[0; 32]).expect("say");
                stream.read_exact(&mut [0; 32]).expect("hear");
                return Other::Silent { _open: stream };
            }
            Other::Way(BulkSender::connect(&at, port, &secret, 0, patience, None).expect("there"))
        });
        let came = together.peers().to.contains(&0).then(|| {
            let door = &doors[0];
            scope.spawn(move || BulkReceiver::welcome(door, 1, patience, None).expect("wait"))
        });
        let links = Links::connect(&doors[1], &addresses, 1, together.peers(), None).expect("connect");
        // Nobody takes what this rank sends: its way breaks.
        drop(came.map(|came| came.join().expect("join")));
        (together, links, going.join().expect("join"))
    })
}

/// Fills the one buffer of that rank while the test sends what it likes; where it sends nothing, without a word.
async fn fill(
    bucket: &Bucket,
    manifest: &Manifest,
    origin: Origin,
    send: Option<Send>,
) -> (Result<Filled>, Vec<u8>, u64) {
    let (runtime, bucket, manifest) = (Handle::current(), bucket.clone(), manifest.clone());
    let work = move || {
        let is_held = origin != Origin::Store;
        let (together, links, other) = beside(&manifest, origin, send.is_none());
        let coming = together.placed[together.own].iter().flatten().filter(|placed| placed.from.is_some());
        let coming: Vec<SliceId> = coming.map(|placed| placed.slice).collect();
        let mut buffer = vec![0xee; together.buffer_bytes()];
        let before = bucket.counters().of(OperationKind::Get).bytes;
        let held = [None::<Bytes>, None];
        let shards = if is_held { Shards::Held(&held) } else { Shards::Store(&runtime, &bucket) };
        let filled = std::thread::scope(|scope| {
            // A silent one stays until the end.
            let _silent = match (other, send) {
                (Other::Way(sender), Some(send)) => {
                    scope.spawn(move || send(&sender, &coming));
                    None
                }
                (other, _) => Some(other),
            };
            let reading = Reading::new(&shards, &manifest, 2).expect("a place that is read together");
            together.fill(&reading, 0, &mut buffer, &links, &now())
        });
        (filled, buffer, bucket.counters().of(OperationKind::Get).bytes - before)
    };
    tokio::task::spawn_blocking(work).await.expect("join")
}

/// A turn that has come.
fn now() -> Receiver<()> {
    let (turn, its_turn) = channel();
    turn.send(()).expect("it is there");
    its_turn
}

fn lost(rank: usize) -> Filled {
    Filled { is_whole: true, lost: BTreeSet::from([rank]) }
}

#[tokio::test]
async fn what_does_not_come_or_comes_damaged_is_read_of_the_store() {
    let bucket = Bucket::in_memory();
    let (manifest, content) = rows(&bucket, 6).await;
    let whole = content.len() as u64;
    let row = |content: &[u8], (_, row): SliceId| content[row * ROW..][..ROW].to_vec();
    let label = |(tensor, slice): SliceId, piece| [0, tensor as u32, slice as u32, piece];

    let sent = content.clone();
    let honest = move |sender: &BulkSender, coming: &[SliceId]| {
        coming.iter().for_each(|id| send(sender, label(*id, 0), &row(&sent, *id)).expect("send"));
    };
    let (filled, buffer, read) = fill(&bucket, &manifest, Origin::Store, Some(Box::new(honest))).await;
    assert_eq!(filled.expect("filled"), Filled { is_whole: true, lost: BTreeSet::new() });
    assert_eq!((buffer[..content.len()] == content, read), (true, whole / 2), "half of it was read");

    let sent = content.clone();
    let flipped = move |sender: &BulkSender, coming: &[SliceId]| {
        for id in coming {
            let mut row = row(&sent, *id);
            row[ROW / 2] ^= u8::from(*id == coming[0]);
            send(sender, label(*id, 0), &row).expect("send");
        }
    };
    let (filled, buffer, read) = fill(&bucket, &manifest, Origin::Store, Some(Box::new(flipped))).await;
    assert_eq!(filled.expect("filled"), lost(0));
    assert_eq!((buffer[..content.len()] == content, read), (true, whole / 2 + ROW as u64), "one slice again");

    let sent = content.clone();
    let cut_off = move |sender: &BulkSender, coming: &[SliceId]| {
        send(sender, label(coming[0], 0), &row(&sent, coming[0])).expect("send");
    };
    let (filled, buffer, read) = fill(&bucket, &manifest, Origin::Store, Some(Box::new(cut_off))).await;
    assert_eq!(filled.expect("filled"), lost(0));
    assert_eq!(
        (buffer[..content.len()] == content, read),
        (true, whole - ROW as u64),
        "all but the one that came"
    );

    // A piece that is not of this round, of a slice that this rank has not, too long, twice the same.
    for wrong in 0..4 {
        let sent = content.clone();
        let stray = move |sender: &BulkSender, coming: &[SliceId]| {
            let first = coming[0];
            let (labelled, length) = match wrong {
                0 => ([1, 0, first.1 as u32, 0], ROW),
                1 => ([0, 7, 9, 0], ROW),
                2 => (label(first, 0), ROW + 1),
                _ => (label(first, 1), ROW),
            };
            if wrong == 3 {
                send(sender, label(first, 0), &row(&sent, first)).expect("send");
            }
            // The other end may have closed by then.
            send(sender, labelled, &vec![0; length]).ok();
        };
        let (filled, buffer, _) = fill(&bucket, &manifest, Origin::Store, Some(Box::new(stray))).await;
        assert_eq!(filled.expect("filled"), lost(0), "{wrong}");
        assert!(buffer[..content.len()] == content, "{wrong}");
    }
}

/// It is there, and stops without a word, as one whose host was cut off.
#[tokio::test]
async fn a_rank_that_says_nothing_any_more_is_not_waited_for() {
    let bucket = Bucket::in_memory();
    let (manifest, content) = rows(&bucket, 6).await;
    let (filled, buffer, read) = fill(&bucket, &manifest, Origin::Store, None).await;
    assert_eq!(filled.expect("filled"), lost(0));
    assert_eq!((buffer[..content.len()] == content, read), (true, content.len() as u64));
}

#[tokio::test]
async fn what_another_rank_failed_to_read_is_not_read_by_all() {
    let bucket = Bucket::in_memory();
    let (manifest, content) = rows(&bucket, 6).await;
    let gives_up = |sender: &BulkSender, _: &[SliceId]| sender.give_up([0; 4]).expect("say");
    let (filled, _, read) = fill(&bucket, &manifest, Origin::Store, Some(Box::new(gives_up))).await;
    assert_eq!(filled.expect("filled"), Filled { is_whole: false, lost: BTreeSet::new() });
    assert_eq!(read, content.len() as u64 / 2, "its own half");
}

#[tokio::test]
async fn what_lies_in_another_hosts_memory_comes_from_there_or_not_at_all() {
    let bucket = Bucket::in_memory();
    let (manifest, content) = rows(&bucket, 3).await;
    let row = |content: &[u8], (_, row): SliceId| content[row * ROW..][..ROW].to_vec();
    for (damage, expected) in
        [(0, Filled { is_whole: true, lost: BTreeSet::new() }), (1, Filled { is_whole: false, ..lost(0) })]
    {
        let sent = content.clone();
        let honest = move |sender: &BulkSender, coming: &[SliceId]| {
            assert_eq!(coming.len(), 3);
            for id in coming {
                let mut row = row(&sent, *id);
                row[7] ^= damage;
                send(sender, [0, 0, id.1 as u32, 0], &row).expect("send");
            }
        };
        let (filled, buffer, read) =
            fill(&bucket, &manifest, Origin::Hosts(vec![0, 0]), Some(Box::new(honest))).await;
        assert_eq!((filled.expect("filled"), read), (expected, 0));
        assert_eq!(buffer[..content.len()] == content, damage == 0);
    }
    let (filled, ..) = fill(&bucket, &manifest, Origin::Hosts(vec![0, 0]), Some(Box::new(|_, _| {}))).await;
    assert_eq!(filled.expect("filled"), Filled { is_whole: false, ..lost(0) });
}

#[tokio::test]
async fn damage_in_the_store_is_told_by_who_reads_it() {
    let bucket = Bucket::in_memory();
    let (manifest, _) = rows(&bucket, 2).await;
    let key = manifest.shards[0].object();
    let mut damaged = bucket.get_whole(&key).await.expect("get").0.to_vec();
    let last = damaged.len() - 5;
    (damaged[last], damaged[4096]) = (!damaged[last], !damaged[4096]);
    bucket.put(&key, damaged.into(), Condition::Always).await.expect("put");
    let (filled, ..) = fill(&bucket, &manifest, Origin::Store, Some(Box::new(|_, _| {}))).await;
    let error = filled.expect_err("damaged");
    assert!(error.kind() == ErrorKind::Corrupt && error.message().contains("are damaged"), "{error}");
}

/// Three ranks on a host each, of which some read of a store that has lost the shard: they hear of it at once, though each waits
/// for what the others read, and those that fail alone tell why.
#[tokio::test]
async fn ranks_that_fail_keep_no_other_waiting() {
    let (bucket, empty) = (Bucket::in_memory(), Bucket::in_memory());
    let (manifest, content) = rows(&bucket, 6).await;
    for failing in [vec![], vec![1], vec![0, 2], vec![0, 1, 2]] {
        let (runtime, manifest, is_whole) = (Handle::current(), manifest.clone(), failing.is_empty());
        let buckets: Vec<Bucket> =
            (0..3).map(|rank| if failing.contains(&rank) { empty.clone() } else { bucket.clone() }).collect();
        let work = move || {
            let wishes = said(&vec![all(&manifest); 3]);
            let plan = |rank| {
                let reader = Reader { rank, hosts: &[0, 1, 2], origin: Origin::Store };
                Together::new(&manifest, &wishes, reader).expect("plan")
            };
            let ranks: Vec<Together> = (0..3).map(plan).collect();
            let links = connect(&ranks);
            std::thread::scope(|scope| {
                let reading = ranks.iter().zip(&links).zip(&buckets).map(|((together, links), bucket)| {
                    let (runtime, manifest) = (&runtime, &manifest);
                    scope.spawn(move || {
                        let (shards, mut buffer) =
                            (Shards::Store(runtime, bucket), vec![0; together.buffer_bytes()]);
                        let reading = Reading::new(&shards, manifest, 2).expect("a store");
                        (together.fill(&reading, 0, &mut buffer, links, &now()), buffer)
                    })
                });
                let reading: Vec<_> = reading.collect();
                reading.into_iter().map(|read| read.join().expect("join")).collect::<Vec<_>>()
            })
        };
        let found = tokio::time::timeout(Duration::from_secs(60), tokio::task::spawn_blocking(work));
        for (rank, (filled, buffer)) in
            found.await.expect("nobody waits").expect("join").into_iter().enumerate()
        {
            match filled {
                Err(error) => {
                    assert!(failing.contains(&rank) && error.message().contains("is missing"), "{error}")
                }
                Ok(filled) => {
                    assert!(!failing.contains(&rank) && filled.lost.is_empty(), "{filled:?}");
                    assert_eq!((filled.is_whole, buffer[..content.len()] == content), (is_whole, is_whole));
                }
            }
        }
    }
}

/// What ranks want by chance, on hosts by chance: every slice that several want is read by one, and passes every host that wants
/// it in one round, from each holder to the next, within their buffers; readers have about the same to read.
#[tokio::test]
async fn every_slice_passes_every_host_that_wants_it_once() {
    let bucket = Bucket::in_memory();
    let (manifest, _) = rows(&bucket, 40).await;
    let width = manifest.tensors[0].shape[1];
    for seed in rounds(60) {
        let rng = chance(seed);
        let ranks = rng.below(12) as usize + 1;
        let hosts: Vec<usize> = (0..ranks).map(|_| rng.below(4) as usize).collect();
        let wish = || {
            let (first, second) = (rng.below(40), rng.below(40));
            let (row, count) = (first.min(second), first.abs_diff(second) + 1);
            let (at, columns) = if rng.chance(0.3) { (rng.below(width - 9), 9) } else { (0, width) };
            let (offsets, lengths) = (vec![row, at], vec![count, columns]);
            Wish { tensor: 0, region: Region { kind: SliceKind::Box, offsets, lengths } }
        };
        let wishes: Vec<Vec<Wish>> =
            (0..ranks).map(|_| (0..rng.below(3)).map(|_| wish()).collect()).collect();
        let wanted = |slice: u64| -> BTreeSet<usize> {
            let has = |wish: &Wish| {
                (wish.region.offsets[0]..wish.region.offsets[0] + wish.region.lengths[0]).contains(&slice)
            };
            (0..ranks).filter(|rank| wishes[*rank].iter().any(has)).collect()
        };
        let bytes = rng.below(5) * ROW as u64 + 1;
        for origin in [Origin::Store, Origin::Hosts(vec![rng.below(4) as usize; 2])] {
            let known = match &origin {
                Origin::Store => true,
                Origin::Hosts(at) => hosts.contains(&at[0]),
            };
            if !known {
                continue;
            }
            let shares = Shares::new(&manifest, &said(&wishes), &hosts, &origin, bytes).expect("plan");
            check(&shares, &hosts, &origin, wanted);
        }
    }
}

fn check(shares: &Shares, hosts: &[usize], origin: &Origin, wanted: impl Fn(u64) -> BTreeSet<usize>) {
    // Of each slice: round, rank and place.
    let mut found: HashMap<SliceId, BTreeMap<usize, (usize, Placed)>> = HashMap::new();
    for (rank, of_rank) in shares.placed.iter().enumerate() {
        assert!(of_rank.len() <= shares.rounds);
        for (round, placed) in of_rank.iter().enumerate() {
            for (number, one) in placed.iter().enumerate() {
                assert_eq!(one.at, number * ROW, "one behind the other");
                assert!((number + 1) * ROW <= shares.buffer as usize);
                assert!(found.entry(one.slice).or_default().insert(rank, (round, *one)).is_none());
            }
        }
    }
    for slice in 0..40 {
        let who = wanted(slice);
        let mut on: BTreeSet<usize> = who.iter().map(|rank| hosts[*rank]).collect();
        let passes = match origin {
            Origin::Store => who.len() > 1,
            Origin::Hosts(at) => {
                let is_wanted = on.iter().any(|host| *host != at[0]);
                on.insert(at[0]);
                is_wanted
            }
        };
        let id = (0, slice as usize);
        let held = found.get(&id).cloned().unwrap_or_default();
        assert_eq!(shares.shared.contains_key(&id), passes);
        let holding: Vec<usize> = held.keys().map(|rank| hosts[*rank]).collect();
        let once: BTreeSet<usize> = holding.iter().copied().collect();
        let expected = if passes { on } else { BTreeSet::new() };
        assert_eq!((once.len(), &once), (holding.len(), &expected), "one rank of each host");
        let rounds: BTreeSet<usize> = held.values().map(|(round, _)| *round).collect();
        assert!(rounds.len() <= 1, "in one round on all hosts");
        let Some((reader, _)) = held.iter().find(|(_, (_, placed))| placed.from.is_none()) else { continue };
        if let Origin::Hosts(at) = origin {
            assert_eq!(hosts[*reader], at[0], "it is read where it is");
        }
        // From the reader on, all others come one behind the other.
        let (mut seen, mut at) = (1, *reader);
        while let Some(to) = held[&at].1.to {
            assert_eq!(held[&to].1.from, Some(at));
            (seen, at) = (seen + 1, to);
        }
        assert_eq!(seen, held.len());
    }
}

#[tokio::test]
async fn hosts_read_alike_much_in_long_runs() {
    let bucket = Bucket::in_memory();
    let (manifest, _) = rows(&bucket, 64).await;
    for ranks in [2_usize, 4, 8, 16, 64, 100] {
        // Two ranks a host.
        let hosts: Vec<usize> = (0..ranks).map(|rank| rank / 2).collect();
        let wishes = said(&vec![all(&manifest); ranks]);
        let shares = Shares::new(&manifest, &wishes, &hosts, &Origin::Store, 8 * ROW as u64).expect("plan");
        let reads = |of_rank: &Vec<Vec<Placed>>| -> Vec<usize> {
            let own = of_rank.iter().flatten().filter(|placed| placed.from.is_none());
            own.map(|placed| placed.slice.1).collect()
        };
        let of_ranks: Vec<Vec<usize>> = shares.placed.iter().map(reads).collect();
        let counts: Vec<usize> = of_ranks.iter().map(Vec::len).collect();
        assert_eq!(counts.iter().sum::<usize>(), 64);
        let (least, most) = (counts.iter().min().expect("ranks"), counts.iter().max().expect("ranks"));
        assert!(most - least <= 1, "{ranks} ranks: {counts:?}");
        // 32 of the rows pass one of a host's two ranks, eight a round.
        assert_eq!(shares.rounds, 4);
        let runs = of_ranks.iter().flat_map(|rows| rows.windows(2)).filter(|rows| rows[1] != rows[0] + 1);
        assert!(runs.count() <= 3 * ranks, "a run a round");
    }
}

/// Ranks on those hosts want all of some rows, one of which is in a buffer. Gives how much is read in place, what each rank's
/// reading gave, and the bytes that each fetched.
async fn read_rows(
    count: u64,
    hosts: &'static [usize],
    change: impl Fn(usize, &dyn Fn() -> u64, Result<Filled>) -> Result<Filled>
    + Sync
    + std::marker::Send
    + 'static,
) -> (usize, Vec<Result<bool>>, Vec<u64>) {
    let bucket = Bucket::in_memory();
    let (manifest, content) = rows(&bucket, count).await;
    let (buckets, runtime) = (bucket_of_each(hosts.len(), &bucket, &manifest).await, Handle::current());
    let work = move || {
        let wishes = vec![all(&manifest); hosts.len()];
        let told = said(&wishes);
        let plan = |rank| {
            let reader = Reader { rank, hosts, origin: Origin::Store };
            Together::in_buffers_of(ROW as u64, &manifest, &told, reader).expect("plan")
        };
        let ranks: Vec<Together> = (0..hosts.len()).map(plan).collect();
        assert!(ranks.iter().all(|together| together.buffers() == MOST_BUFFERS as usize));
        let job = Job { ranks: &ranks, hosts, manifest: &manifest, wishes: &wishes, buckets: &buckets };
        let mut buffers = vec![vec![vec![0; content.len()]]; hosts.len()];
        let mut given = buffers.clone();
        let got = |rank: usize| buckets[rank].counters().of(OperationKind::Get).bytes;
        let found =
            job.read(&runtime, &mut buffers, &mut given, &|rank, filled| change(rank, &|| got(rank), filled));
        let whole = buffers.iter().chain(&given).filter(|found| found[0] == content).count();
        (whole, found, (0..hosts.len()).map(got).collect())
    };
    tokio::task::spawn_blocking(work).await.expect("join")
}

/// What is read ahead of the first meeting, and of each, are so many rounds that a buffer is never filled while others copy out of
/// it: three, for they may copy out of the fourth.
#[tokio::test]
async fn rounds_are_read_ahead_into_buffers_that_nobody_copies_out_of() {
    let met = [AtomicU64::new(0), AtomicU64::new(0)];
    let ahead = MOST_BUFFERS - 2;
    let read = read_rows(16, &[0, 0], move |rank, got, filled| {
        let round = met[rank].fetch_add(1, Ordering::SeqCst);
        let begun = (round + ahead + 1).min(8) * ROW as u64;
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while got() < begun {
            assert!(std::time::Instant::now() < deadline, "round {round}: {} bytes", got());
            std::thread::yield_now();
        }
        assert_eq!(got(), begun, "in round {round}");
        filled
    });
    let (whole, found, fetched) = read.await;
    assert_eq!((whole, fetched), (4, vec![8 * ROW as u64; 2]));
    assert!(found.iter().all(|found| matches!(found, Ok(true))), "{found:?}");
}

/// Of two hosts: the one that is with it hears at its meeting, those of the other one by the ways. None of them reads in its stead.
#[tokio::test]
async fn a_rank_that_fails_between_rounds_keeps_no_other_waiting() {
    let met = AtomicU64::new(0);
    let read = read_rows(16, &[0, 0, 1, 1], move |rank, _, filled| {
        if rank == 1 && met.fetch_add(1, Ordering::SeqCst) == 1 {
            return Err(Error::invalid("no room for it"));
        }
        filled
    });
    let (whole, found, fetched) =
        tokio::time::timeout(Duration::from_secs(60), read).await.expect("nobody waits");
    assert_eq!(whole, 0);
    for (rank, found) in found.into_iter().enumerate() {
        match found {
            Err(error) => assert!(rank == 1 && error.message() == "no room for it", "{rank}: {error}"),
            Ok(is_whole) => assert!(rank != 1 && !is_whole, "{rank}"),
        }
    }
    let all: u64 = fetched.iter().sum();
    assert!(all < 16 * ROW as u64, "{all} bytes");
}
