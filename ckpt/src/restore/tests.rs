//! Slices of every kind come back as the tensor they were cut from.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use forebay_core::ErrorKind;
use forebay_io::mem::{ReadMapping, SharedMemory, WriteMapping};
use forebay_io::net::Door;
use forebay_io::object::{Condition, OperationKind};

use super::through::tests::taker;
use super::*;
use crate::manifest::{Checksum, Identity, Shard, ShardKey, SliceKind};
use crate::testing::{card, chance, rounds};

/// Bytes no two of which at a short distance are equal.
fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Elements of the box of `tensor`, whose elements have `size` bytes.
pub(super) fn cut(tensor: &[u8], size: usize, shape: &[u64], offsets: &[u64], lengths: &[u64]) -> Vec<u8> {
    let count: u64 = lengths.iter().product();
    let mut out = Vec::new();
    for number in 0..count {
        let (mut rest, mut at, mut stride) = (number, 0, 1);
        for i in (0..shape.len()).rev() {
            at += (offsets[i] + rest % lengths[i]) * stride;
            rest /= lengths[i];
            stride *= shape[i];
        }
        let at = at as usize * size;
        out.extend_from_slice(&tensor[at..at + size]);
    }
    out
}

/// A slice to be cut: kind, offsets, lengths, shard.
pub(super) type Cut<'a> = (SliceKind, &'a [u64], &'a [u64], u32);

/// Stores `tensors` (name, shape, slices) of float32 in two shards.
pub(super) async fn store(
    bucket: &Bucket,
    tensors: &[(&str, &[u64], &[Cut<'_>])],
) -> (Manifest, Vec<Vec<u8>>) {
    let mut files = [vec![b' '; 4096], vec![b' '; 4096]];
    let (mut described, mut contents) = (Vec::new(), Vec::new());
    for (name, shape, cuts) in tensors {
        let content = pattern(shape.iter().product::<u64>() as usize * 4);
        let slices = cuts.iter().map(|(kind, offsets, lengths, shard)| {
            let flat = [content.len() as u64 / 4];
            let shape = if *kind == SliceKind::Flat { &flat } else { *shape };
            let bytes = cut(&content, 4, shape, offsets, lengths);
            let file = &mut files[*shard as usize];
            let start = file.len() as u64;
            file.extend_from_slice(&bytes);
            let (offsets, lengths) = (offsets.to_vec(), lengths.to_vec());
            let (end, crc32c) = (file.len() as u64, Checksum(forebay_core::crc32c(&bytes)));
            let blake3 = Identity::of(&bytes);
            Slice { kind: *kind, offsets, lengths, shard: *shard, start, end, crc32c, blake3 }
        });
        let slices = slices.collect();
        described.push(Tensor {
            name: (*name).into(),
            dtype: "float32".into(),
            shape: shape.to_vec(),
            slices,
        });
        contents.push(content);
    }
    let mut shards = Vec::new();
    for (rank, file) in (0u32..).zip(files) {
        let (size, crc32c) = (file.len() as u64, Checksum(forebay_core::crc32c(&file)));
        let (attempt, layout) = ("0a1b2c3d".to_owned(), ShardKey::layout_of(&file[..4096]));
        let key = ShardKey { step: 1, incarnation: 1, attempt, rank, save: 1, layout }.object();
        shards.push(Shard { key: key.as_str().into(), size, header: 4096, crc32c, rank, step: 1 });
        bucket.put(&key, Bytes::from(file), Condition::Always).await.expect("put");
    }
    let id = "0123456789abcdef".repeat(2);
    let manifest = Manifest {
        commit: id.clone(),
        run: id,
        incarnation: 1,
        step: 1,
        created_ms: 0,
        world_size: 2,
        parents: Vec::new(),
        shards,
        tensors: described,
        extras: Vec::new(),
    };
    manifest.check().expect("the test's manifest holds together");
    (manifest, contents)
}

/// Reads parts of tensors of float32, on a thread of its own as a trainer does.
async fn read_parts(
    bucket: &Bucket,
    manifest: &Manifest,
    wanted: Vec<(usize, Region)>,
    threads: usize,
) -> Result<Vec<Vec<u8>>> {
    let (runtime, bucket, manifest) = (Handle::current(), bucket.clone(), manifest.clone());
    let work = move || {
        let mut buffers: Vec<Vec<u8>> =
            wanted.iter().map(|(_, region)| vec![0xee; region.elements() as usize * 4]).collect();
        let targets = wanted.into_iter().zip(&mut buffers);
        let targets = targets.map(|((tensor, region), bytes)| Target { tensor, region, bytes });
        read_tensors(&runtime, &bucket, &manifest, targets.collect(), threads).map(|()| buffers)
    };
    tokio::task::spawn_blocking(work).await.expect("join")
}

async fn read_all(bucket: &Bucket, manifest: &Manifest) -> Result<Vec<Vec<u8>>> {
    let whole = manifest.tensors.iter().map(|tensor| Region::whole(&tensor.shape));
    read_parts(bucket, manifest, whole.enumerate().collect(), 2).await
}

#[tokio::test]
async fn every_kind_of_slice_comes_back() {
    use SliceKind::{Box, Flat};
    let bucket = Bucket::in_memory();
    let large: &[u64] = &[3, 1 << 20];
    let (manifest, contents) = store(
        &bucket,
        &[
            ("scalar", &[], &[(Box, &[], &[], 0)]),
            ("empty", &[0, 5], &[]),
            ("rows", &[4, 3], &[(Box, &[2, 0], &[2, 3], 1), (Box, &[0, 0], &[2, 3], 0)]),
            ("columns", &[4, 6], &[(Box, &[0, 0], &[4, 2], 0), (Box, &[0, 2], &[4, 4], 1)]),
            (
                "blocks",
                &[2, 3, 4],
                &[
                    (Box, &[0, 0, 0], &[2, 3, 1], 1),
                    (Box, &[0, 0, 1], &[1, 3, 3], 0),
                    (Box, &[1, 0, 1], &[1, 2, 3], 0),
                    (Box, &[1, 2, 1], &[1, 1, 3], 1),
                ],
            ),
            ("flat", &[5, 5], &[(Flat, &[0], &[13], 0), (Flat, &[13], &[12], 1)]),
            ("large", large, &[(Box, &[0, 0], large, 0)]),
        ],
    )
    .await;
    assert_eq!(read_all(&bucket, &manifest).await.expect("read"), contents);
}

/// Any part of any tensor, whatever slices it was stored in: bit-exact, and no byte of a slice that it does not touch.
#[tokio::test]
async fn any_part_of_any_slicing_is_read() {
    use SliceKind::{Box, Flat};
    let bucket = Bucket::in_memory();
    let shape: &[u64] = &[4, 6];
    let tensors: [(&str, &[u64], &[Cut<'_>]); 4] = [
        ("rows", shape, &[(Box, &[2, 0], &[2, 6], 1), (Box, &[0, 0], &[2, 6], 0)]),
        ("columns", shape, &[(Box, &[0, 0], &[4, 2], 0), (Box, &[0, 2], &[4, 4], 1)]),
        ("flat", shape, &[(Flat, &[0], &[7], 0), (Flat, &[7], &[17], 1)]),
        ("whole", shape, &[(Box, &[0, 0], shape, 0)]),
    ];
    let (manifest, contents) = store(&bucket, &tensors).await;
    for (tensor, content) in contents.iter().enumerate() {
        for (offsets, lengths) in [([0, 0], [4, 6]), ([1, 0], [2, 6]), ([0, 3], [4, 2]), ([1, 1], [2, 3])] {
            let region = Region { kind: Box, offsets: offsets.into(), lengths: lengths.into() };
            for threads in [1, 3] {
                let read = read_parts(&bucket, &manifest, vec![(tensor, region.clone())], threads).await;
                let expected = cut(content, 4, shape, &offsets, &lengths);
                assert_eq!(read.expect("read"), [expected], "tensor {tensor}, {offsets:?} {lengths:?}");
            }
        }
    }
    let before = bucket.counters().of(OperationKind::Get).bytes;
    let upper = Region { kind: Box, offsets: vec![0, 0], lengths: vec![2, 6] };
    read_parts(&bucket, &manifest, vec![(0, upper)], 1).await.expect("read");
    assert_eq!(bucket.counters().of(OperationKind::Get).bytes - before, 48, "the other half was not read");
}

/// However many slices a target takes parts of, few of them are there at once.
#[tokio::test]
async fn what_is_read_aside_is_shared_out_within_a_target() {
    let shape: &[u64] = &[8, 4];
    let offsets: Vec<[u64; 2]> = (0..8).map(|row| [row, 0]).collect();
    let rows: Vec<Cut<'_>> = offsets.iter().map(|at| (SliceKind::Box, &at[..], &[1, 4][..], 0)).collect();
    let tensors = [("one", shape, &rows[..]), ("two", shape, &rows[..])];
    let (manifest, _) = store(&Bucket::in_memory(), &tensors).await;
    let columns = Region { kind: SliceKind::Box, offsets: vec![0, 1], lengths: vec![8, 2] };
    let (mut one, mut two) = ([0; 64], [0; 64]);
    let target = |tensor, bytes| Target { tensor, region: columns.clone(), bytes };
    let targets = [target(0, &mut one[..]), target(1, &mut two[..])];
    let wants: Vec<Vec<Want>> =
        targets.iter().map(|target| wanted(&manifest, target, &HashSet::new()).expect("wants")).collect();
    // A slice has 16 bytes.
    for (room, counts) in [(48, vec![3, 3, 3, 3, 3, 1]), (1, vec![1; 16]), (1000, vec![16])] {
        let (mut found, mut sizes) = (vec![Vec::new(), Vec::new()], Vec::new());
        for Batch { first, wants } in batches(&manifest, &targets, &wants, room) {
            sizes.push(wants.iter().map(|wants| wants.len()).sum::<usize>());
            for (target, wants) in (first..).zip(wants) {
                found[target].extend(wants.iter().map(|want| want.slice));
            }
        }
        assert_eq!(sizes, counts, "in {room} bytes");
        assert_eq!(found, vec![(0..8).collect::<Vec<_>>(); 2]);
    }
}

/// What each rank wants of the tensors, read together; the bytes that each fetched.
pub(super) async fn read_as_ranks(
    bucket: &Bucket,
    manifest: &Manifest,
    wishes: Vec<Vec<Wish>>,
    buffer: u64,
) -> Result<(Vec<Vec<Vec<u8>>>, Vec<u64>)> {
    let hosts = vec![0; wishes.len()];
    read_on_hosts(bucket, manifest, wishes, hosts, buffer).await
}

/// What ranks say that want this.
pub(super) fn said(wishes: &[Vec<Wish>]) -> Vec<Wishes> {
    wishes.iter().map(|wishes| Wishes::of(wishes).expect("boxes")).collect()
}

/// Targets for wishes.
fn targets<'a>(wishes: &[Wish], buffers: &'a mut [Vec<u8>]) -> Vec<Target<'a>> {
    let pairs = wishes.iter().zip(buffers);
    let target = |(wish, bytes): (&Wish, &'a mut Vec<u8>)| Target {
        tensor: wish.tensor,
        region: wish.region.clone(),
        bytes,
    };
    pairs.map(target).collect()
}

/// Ranks of one host, where they meet.
struct Meeting {
    all: Barrier,
    is_whole: AtomicBool,
}

impl Meeting {
    pub(super) fn new(ranks: usize) -> Self {
        Self { all: Barrier::new(ranks), is_whole: AtomicBool::new(true) }
    }

    /// Tells the others, and hears of them.
    pub(super) fn meet(&self, filled: Result<Filled>) -> Result<bool> {
        if !matches!(&filled, Ok(filled) if filled.is_whole) {
            self.is_whole.store(false, Ordering::SeqCst);
        }
        self.all.wait();
        let is_whole = self.is_whole.load(Ordering::SeqCst);
        // Nobody says anything of the next meeting before all have heard of this one.
        self.all.wait();
        filled.map(|_| is_whole)
    }
}

/// The memory that each rank lends to those of its host.
pub(super) fn lend(ranks: &[Together]) -> Vec<(Vec<WriteMapping>, Vec<ReadMapping>)> {
    let lend = |together: &Together| {
        let bytes = together.buffer_bytes();
        let memory = SharedMemory::create("test", together.buffers() * bytes).expect("memory");
        let buffers = || (0..together.buffers()).map(|number| number * bytes..(number + 1) * bytes);
        let own = buffers().map(|buffer| memory.map_write(buffer).expect("map")).collect();
        (own, buffers().map(|buffer| memory.map_read(buffer).expect("map")).collect())
    };
    ranks.iter().map(lend).collect()
}

/// The same bytes in a bucket for each rank, which counts what that rank fetches.
pub(super) async fn bucket_of_each(ranks: usize, bucket: &Bucket, manifest: &Manifest) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    for _ in 0..ranks {
        let own = Bucket::in_memory();
        for shard in &manifest.shards {
            let (bytes, _) = bucket.get_whole(&shard.object()).await.expect("get");
            own.put(&shard.object(), bytes, Condition::Always).await.expect("put");
        }
        buckets.push(own);
    }
    buckets
}

/// Ranks that read a step, each of a bucket that holds all of it.
pub(super) struct Job<'a> {
    pub ranks: &'a [Together],
    pub hosts: &'a [usize],
    pub manifest: &'a Manifest,
    pub wishes: &'a [Vec<Wish>],
    pub buckets: &'a [Bucket],
}

impl Job<'_> {
    /// Has each rank read what several want, in a thread of its own, copied into `buffers` and given into `given`; `change` sees,
    /// and may change, what each of them is to tell at its next meeting.
    pub(super) fn read(
        &self,
        runtime: &Handle,
        buffers: &mut [Vec<Vec<u8>>],
        given: &mut [Vec<Vec<u8>>],
        change: &(dyn Fn(usize, Result<Filled>) -> Result<Filled> + Sync),
    ) -> Vec<Result<bool>> {
        let hosts = self.hosts;
        let (own, lent): (Vec<_>, Vec<_>) = lend(self.ranks).into_iter().unzip();
        let near = |rank: usize| (0..hosts.len()).filter(move |other| hosts[*other] == hosts[rank]);
        let meetings: Vec<Meeting> = (0..hosts.len()).map(|rank| Meeting::new(near(rank).count())).collect();
        let all_links = connect(self.ranks);
        std::thread::scope(|scope| {
            let parts = own.into_iter().zip(all_links).zip(buffers).zip(given).enumerate();
            let reading = parts.map(|(rank, (((mut own, links), buffers), given))| {
                let (lent, meetings) = (&lent, &meetings);
                scope.spawn(move || {
                    let (wishes, meeting) =
                        (&self.wishes[rank], near(rank).next().map(|first| &meetings[first]));
                    let own = own.iter_mut().map(|buffer| &mut buffer[..]).collect();
                    let of = |rank: usize| lent[rank].iter().map(AsRef::as_ref).collect();
                    let lent = Lent { own, all: near(rank).map(of).collect() };
                    let mut give = taker(wishes, given);
                    let places = Places { targets: targets(wishes, buffers), wishes, give: &mut give };
                    let mut meet =
                        |filled: Result<Filled>| meeting.expect("its own").meet(change(rank, filled));
                    let shards = Shards::Store(runtime, &self.buckets[rank]);
                    let place = (&shards, self.manifest);
                    let whole = self.ranks[rank].read(place, lent, &links, places, 2, &mut meet);
                    if let Some(trouble) = links.trouble() {
                        println!("rank {rank} did without its card: {trouble}");
                    }
                    whole
                })
            });
            let reading: Vec<_> = reading.collect();
            reading.into_iter().map(|read| read.join().expect("join")).collect()
        })
    }
}

/// As [`read_as_ranks`], of ranks that are on the hosts of those numbers: bytes that are sent between them are not fetched.
async fn read_on_hosts(
    bucket: &Bucket,
    manifest: &Manifest,
    wishes: Vec<Vec<Wish>>,
    hosts: Vec<usize>,
    buffer: u64,
) -> Result<(Vec<Vec<Vec<u8>>>, Vec<u64>)> {
    let buckets = bucket_of_each(hosts.len(), bucket, manifest).await;
    let (runtime, manifest) = (Handle::current(), manifest.clone());
    let work = move || {
        let told = said(&wishes);
        let plan = |rank| {
            let reader = Reader { rank, hosts: &hosts, origin: Origin::Store };
            Together::in_buffers_of(buffer, &manifest, &told, reader).expect("plan")
        };
        let ranks: Vec<Together> = (0..wishes.len()).map(plan).collect();
        let size = |wish: &Wish| wish.region.elements() as usize * 4;
        let empty = |wishes: &Vec<Wish>| wishes.iter().map(|wish| vec![0xee; size(wish)]).collect();
        let mut buffers: Vec<Vec<Vec<u8>>> = wishes.iter().map(empty).collect();
        // The same through a buffer of few bytes, for what cannot be read into.
        let mut given = buffers.clone();
        let got = |rank: usize| buckets[rank].counters().of(OperationKind::Get).bytes;
        let mut again = Vec::new();
        for (rank, together) in ranks.iter().enumerate() {
            let shards = Shards::Store(&runtime, &buckets[rank]);
            let place = (&shards, &manifest);
            together.read_rest(place, targets(&wishes[rank], &mut buffers[rank]), 2)?;
            let before = got(rank);
            let mut give = taker(&wishes[rank], &mut given[rank]);
            let through = Through { buffer: &mut [0; 256], give: &mut give };
            together.read_rest_through(place, &wishes[rank], through, 2)?;
            again.push(got(rank) - before);
        }
        let job =
            Job { ranks: &ranks, hosts: &hosts, manifest: &manifest, wishes: &wishes, buckets: &buckets };
        let expected = |_, filled: Result<Filled>| {
            assert!(filled.as_ref().map_or(true, |filled| filled.lost.is_empty()), "{filled:?}");
            filled
        };
        let whole = job.read(&runtime, &mut buffers, &mut given, &expected);
        assert_eq!(whole.into_iter().collect::<Result<Vec<bool>>>()?, vec![true; hosts.len()]);
        assert!(given == buffers);
        let fetched = again.iter().enumerate().map(|(rank, again)| got(rank) - again).collect();
        Ok((buffers, fetched))
    };
    tokio::task::spawn_blocking(work).await.expect("join")
}

/// The ways between ranks of different hosts.
pub(super) fn connect(ranks: &[Together]) -> Vec<Links> {
    let doors: Vec<Door> = ranks.iter().map(|_| Door::open("secret".into()).expect("a port")).collect();
    let address = |door: &Door| {
        let port = door.port().expect("port");
        Address { addresses: vec!["127.0.0.1".into()], port, secret: "secret".into() }
    };
    let addresses: &Vec<Address> = &doors.iter().map(address).collect();
    std::thread::scope(|scope| {
        let coming = ranks.iter().zip(&doors).enumerate().map(|(rank, (together, door))| {
            scope.spawn(move || {
                let (peers, card) = (together.peers(), card(rank));
                let direct = if card.is_some() { peers.from.len() + peers.to.len() } else { 0 };
                let links = Links::connect(door, addresses, rank, peers, card).expect("connect");
                assert!(links.missing(peers).is_empty());
                assert_eq!(links.direct(), direct);
                links
            })
        });
        let coming: Vec<_> = coming.collect();
        coming.into_iter().map(|links| links.join().expect("join")).collect()
    })
}

/// Rows, columns, the same and overlapping parts: all bytes are right, and each slice is fetched by one rank.
#[tokio::test]
async fn ranks_read_each_slice_once_between_them() {
    use SliceKind::{Box, Flat};
    let bucket = Bucket::in_memory();
    let shape: &[u64] = &[64, 96];
    let rows: Vec<[[u64; 2]; 2]> = (0..16).map(|row| [[4 * row, 0], [4, 96]]).collect();
    let by_rows: Vec<Cut<'_>> =
        rows.iter().enumerate().map(|(row, [at, size])| (Box, &at[..], &size[..], row as u32 % 2)).collect();
    let tensors: [(&str, &[u64], &[Cut<'_>]); 3] = [
        ("rows", shape, &by_rows),
        ("columns", shape, &[(Box, &[0, 0], &[64, 48], 0), (Box, &[0, 48], &[64, 48], 1)]),
        ("flat", shape, &[(Flat, &[0], &[3000], 0), (Flat, &[3000], &[3144], 1)]),
    ];
    let (manifest, contents) = store(&bucket, &tensors).await;
    let boxed = |tensor, offsets: [u64; 2], lengths: [u64; 2]| Wish {
        tensor,
        region: Region { kind: Box, offsets: offsets.into(), lengths: lengths.into() },
    };
    let quarter = |tensor, rank: u64| boxed(tensor, [0, 24 * rank], [64, 24]);
    let cases: [Vec<Vec<Wish>>; 4] = [
        (0..4).map(|rank| (0..3).map(|tensor| quarter(tensor, rank)).collect()).collect(),
        (0..4).map(|_| (0..3).map(|tensor| boxed(tensor, [0, 0], [64, 96])).collect()).collect(),
        // Two by two, and a rank that wants little.
        (0..4).map(|rank| vec![boxed(0, [32 * (rank / 2), 48 * (rank % 2)], [32, 48])]).collect(),
        vec![
            vec![boxed(1, [1, 1], [50, 90])],
            vec![],
            vec![boxed(1, [3, 3], [1, 1]), boxed(2, [9, 0], [3, 96])],
        ],
    ];
    for wishes in cases {
        let tensors: BTreeSet<usize> = wishes.iter().flatten().map(|wish| wish.tensor).collect();
        // In one round, and in many: a row of slices has 1,536 bytes.
        let (buffers, fetched) = read_as_ranks(&bucket, &manifest, wishes.clone(), 1).await.expect("read");
        let whole_rounds = read_as_ranks(&bucket, &manifest, wishes.clone(), 1 << 20).await.expect("read");
        assert!(whole_rounds.0 == buffers);
        for hosts in [[0, 0, 1, 1], [0, 1, 0, 2], [0, 1, 2, 3]] {
            for bytes in [1, 4096, 1 << 20] {
                let hosts = hosts[..wishes.len()].to_vec();
                let found =
                    read_on_hosts(&bucket, &manifest, wishes.clone(), hosts, bytes).await.expect("read");
                // Gaps between what a rank reads in a round are read, too: who reads what has tests of its own.
                assert!(found.0 == buffers);
            }
        }
        for (wish, bytes) in wishes.iter().flatten().zip(buffers.iter().flatten()) {
            let Region { offsets, lengths, .. } = &wish.region;
            assert_eq!(*bytes, cut(&contents[wish.tensor], 4, shape, offsets, lengths), "{wish:?}");
        }
        let (all, whole) = (fetched.iter().sum::<u64>(), 64 * 96 * 4);
        assert!(all <= tensors.len() as u64 * whole, "{all} bytes of {} tensors", tensors.len());
        if wishes.len() == 4 && tensors.len() == 1 {
            assert_eq!(fetched, [whole / 4; 4], "the ranks share the reading");
        }
    }
    let rows = |rank: u64| vec![boxed(0, [0, 24 * rank], [64, 24])];
    let alone = |hosts| Reader { rank: 0, hosts, origin: Origin::Store };
    let both = said(&[rows(0), rows(1)]);
    let many = Together::in_buffers_of(3072, &manifest, &both, alone(&[0; 2])).expect("plan");
    assert_eq!((many.rounds(), many.buffer_bytes(), many.buffers()), (4, 64 << 10, 4), "two slices a round");
    for (wrong, what) in [
        (vec![boxed(3, [0, 0], [1, 1])], "no such tensor"),
        (vec![boxed(0, [0, 0], [1, 97])], "outside of it"),
        (vec![Wish { tensor: 0, region: Region::whole(&[64]) }], "of another shape"),
    ] {
        let error = Together::new(&manifest, &said(&[rows(0), wrong]), alone(&[0; 2])).expect_err(what);
        assert!(error.message().contains("rank 1 wants what no tensor"), "{what}: {error}");
    }
    let flat = Wish { tensor: 0, region: Region::flat(0..5) };
    assert_eq!(Wishes::of(&[flat]).expect_err("no box").kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn damage_that_ranks_share_is_named() {
    let bucket = Bucket::in_memory();
    let shape: &[u64] = &[8, 8];
    let (manifest, _) = store(&bucket, &[("w", shape, &[(SliceKind::Box, &[0, 0], shape, 0)])]).await;
    let key = manifest.shards[0].object();
    let mut damaged = bucket.get_whole(&key).await.expect("get").0.to_vec();
    damaged[5000 - 800] ^= 1;
    bucket.put(&key, damaged.into(), Condition::Always).await.expect("put");
    let columns = |at| {
        vec![Wish {
            tensor: 0,
            region: Region { kind: SliceKind::Box, offsets: vec![0, at], lengths: vec![8, 4] },
        }]
    };
    let error =
        read_as_ranks(&bucket, &manifest, vec![columns(0), columns(4)], 1).await.expect_err("a flipped bit");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.message().contains("tensor `w`"), "{error}");
}

#[tokio::test]
async fn damage_is_named_and_never_returned() {
    let bucket = Bucket::in_memory();
    let (manifest, _) = store(
        &bucket,
        &[
            ("first", &[8], &[(SliceKind::Box, &[0], &[8], 0)]),
            ("second", &[2, 2], &[(SliceKind::Box, &[0, 0], &[2, 2], 1)]),
        ],
    )
    .await;
    let key = manifest.shards[1].object();
    let (whole, _) = bucket.get_whole(&key).await.expect("get");
    for position in [4096, whole.len() - 1] {
        let mut damaged = whole.to_vec();
        damaged[position] ^= 1;
        bucket.put(&key, damaged.into(), Condition::Always).await.expect("put");
        let error = read_all(&bucket, &manifest).await.expect_err("a flipped bit");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.message().contains("tensor `second`"), "{error}");
    }
    bucket.put(&key, whole.slice(..whole.len() - 1), Condition::Always).await.expect("put");
    let error = read_all(&bucket, &manifest).await.expect_err("a cut shard");
    assert!(error.message().contains("has 4111 bytes, not 4112"), "{error}");
    bucket.delete(&key).await.expect("delete");
    let error = read_all(&bucket, &manifest).await.expect_err("a missing shard");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.message().contains("is missing"), "{error}");
}

/// What a bit flipped anywhere in a shard leads to: an error that names a tensor, or, in a header, nothing.
fn expect_caught(at: usize, read: Result<Vec<Vec<u8>>>, contents: &[Vec<u8>]) {
    match read {
        Ok(found) => assert!(at < 4096 && found == contents, "bit of byte {at}: wrong bytes were returned"),
        Err(error) => {
            assert!(at >= 4096 && error.kind() == ErrorKind::Corrupt, "byte {at}: {error}");
            assert!(error.message().contains("tensor `"), "byte {at}: {error}");
        }
    }
}

#[tokio::test]
async fn no_flipped_bit_is_returned_from_store_or_memory() {
    use SliceKind::{Box, Flat};
    let bucket = Bucket::in_memory();
    let tensors: [(&str, &[u64], &[Cut<'_>]); 3] = [
        ("rows", &[8, 100], &[(Box, &[0, 0], &[4, 100], 0), (Box, &[4, 0], &[4, 100], 1)]),
        ("columns", &[40, 10], &[(Box, &[0, 0], &[40, 4], 0), (Box, &[0, 4], &[40, 6], 1)]),
        ("range", &[500], &[(Flat, &[0], &[100], 0), (Flat, &[100], &[400], 1)]),
    ];
    let (manifest, contents) = store(&bucket, &tensors).await;
    let mut held = Vec::new();
    for shard in &manifest.shards {
        held.push(bucket.get_whole(&shard.object()).await.expect("get").0);
    }
    for seed in rounds(1000) {
        let rng = chance(seed);
        let index = rng.below(2) as usize;
        // Half of them where the tensors are.
        let from = if rng.chance(0.5) { 4096 } else { 0 };
        let at = from + rng.below((held[index].len() - from) as u64) as usize;
        let mut damaged = held[index].to_vec();
        damaged[at] ^= 1 << rng.below(8);
        let (key, damaged) = (manifest.shards[index].object(), Bytes::from(damaged));
        bucket.put(&key, damaged.clone(), Condition::Always).await.expect("put");
        expect_caught(at, read_all(&bucket, &manifest).await, &contents);
        let mut shards: Vec<Option<Bytes>> = held.iter().cloned().map(Some).collect();
        shards[index] = Some(damaged);
        let mut buffers: Vec<Vec<u8>> = contents.iter().map(|content| vec![0xee; content.len()]).collect();
        let targets = manifest.tensors.iter().zip(&mut buffers).enumerate();
        let targets = targets.map(|(tensor, (described, bytes))| Target {
            tensor,
            region: Region::whole(&described.shape),
            bytes,
        });
        let read = read_held(&shards, &manifest, targets.collect(), 1);
        expect_caught(at, read.map(|()| buffers), &contents);
        bucket.put(&key, held[index].clone(), Condition::Always).await.expect("put");
    }
    assert_eq!(read_all(&bucket, &manifest).await.expect("sound"), contents);
}

#[test]
fn small_neighbours_share_a_request_and_large_ones_are_cut() {
    let mut memory = vec![0u8; 30 << 20];
    let (small, rest) = memory.split_at_mut(1000);
    let (other, large) = rest.split_at_mut(1000);
    let segment = |shard, start, slice, target| Segment { shard, start, slice: (slice, 0), target };
    let reads = plan(
        vec![segment(0, 6000, 1, other), segment(0, 4096, 0, small), segment(0, 10 << 20, 2, large)],
        READ,
    );
    let shape: Vec<_> = reads.iter().map(|read| (read.range.clone(), read.segments.len())).collect();
    let end = (10 << 20) + (30 << 20) - 2000;
    let chunk = |i: u64| (10 << 20) + i * READ;
    assert_eq!(shape[0], (4096..7000, 2));
    assert_eq!(
        shape[1..],
        [(chunk(0)..chunk(1), 1), (chunk(1)..chunk(2), 1), (chunk(2)..chunk(3), 1), (chunk(3)..end, 1)]
    );
}

/// Two steps that hold a tensor in rows and in columns are compared by what they hold.
#[tokio::test]
async fn tensors_whose_slices_do_not_tell_are_read_and_compared() {
    use crate::diff::{Change, diff, settle};
    use SliceKind::Box;
    let shape: &[u64] = &[4, 6];
    let (one, two) = (Bucket::in_memory(), Bucket::in_memory());
    let (rows, _) =
        store(&one, &[("w", shape, &[(Box, &[2, 0], &[2, 6], 1), (Box, &[0, 0], &[2, 6], 0)])]).await;
    let (columns, _) =
        store(&two, &[("w", shape, &[(Box, &[0, 0], &[4, 3], 0), (Box, &[0, 3], &[4, 3], 1)])]).await;
    // The same bytes, and other columns.
    let mut turned = columns.clone();
    let slices = &mut turned.tensors[0].slices;
    (slices[0].offsets, slices[1].offsets) = (vec![0, 3], vec![0, 0]);
    for (other, expected) in [(columns, None), (turned, Some(Change::Changed))] {
        let mut found = diff(&rows, &other);
        assert_eq!(found.tensors[0].change, Change::Unknown);
        let (runtime, rows, buckets) = (Handle::current(), rows.clone(), [one.clone(), two.clone()]);
        let look = move || {
            let sides = [(&buckets[0], &rows), (&buckets[1], &other)];
            settle(&runtime, &mut found, sides, &|_| {}).map(|()| found)
        };
        let found = tokio::task::spawn_blocking(look).await.expect("join").expect("read");
        assert_eq!(found.tensors.first().map(|tensor| tensor.change), expected);
        assert_eq!((found.same, found.same_bytes), if expected.is_none() { (1, 96) } else { (0, 0) });
    }
}
