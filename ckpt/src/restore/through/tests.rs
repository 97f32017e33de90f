//! What passes through a buffer arrives whole, whatever its slices, and takes no more than that.

use std::collections::BTreeSet;

use forebay_core::ErrorKind;
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, BucketUrl, Condition, OperationKind, StoreSettings};
use tokio::runtime::Handle;

use super::super::tests::{Cut, cut, store};
use super::super::{Shards, read_through};
use super::*;
use crate::local::{Local, PATIENCE};

/// Puts what is given of parts of float32 tensors into memory.
pub(in super::super) fn taker<'a>(
    wishes: &'a [Wish],
    found: &'a mut [Vec<u8>],
) -> impl FnMut(usize, &Spot, &[u8]) -> Result<()> + 'a {
    |wish, spot, bytes| {
        let shape = &wishes[wish].region.lengths;
        let starts: Vec<(u64, u64)> = match spot {
            Spot::From(at) => vec![(*at, bytes.len() as u64)],
            Spot::Box(offsets, lengths) => {
                let region =
                    Region { kind: SliceKind::Box, offsets: offsets.clone(), lengths: lengths.clone() };
                assert!(region.fits(shape), "{spot:?} of {shape:?}");
                region.runs(shape).map(|run| (run.start * 4, (run.end - run.start) * 4)).collect()
            }
        };
        let mut rest = bytes;
        for (at, length) in starts {
            let (now, later) = rest.split_at(length as usize);
            found[wish][at as usize..][..now.len()].copy_from_slice(now);
            rest = later;
        }
        assert!(rest.is_empty(), "{spot:?} of {shape:?}");
        Ok(())
    }
}

/// Reads parts of tensors of float32 through a buffer of so many bytes: what they hold, and how long the pieces were.
async fn read_through_a_buffer(
    bucket: &Bucket,
    manifest: &Manifest,
    wishes: Vec<Wish>,
    size: usize,
) -> Result<(Vec<Vec<u8>>, Vec<usize>)> {
    let (runtime, bucket, manifest) = (Handle::current(), bucket.clone(), manifest.clone());
    let work = move || {
        let empty = |wish: &Wish| vec![0xee; wish.region.elements() as usize * 4];
        let (mut found, mut lengths): (Vec<_>, Vec<_>) = (wishes.iter().map(empty).collect(), Vec::new());
        let mut take = taker(&wishes, &mut found);
        let mut give = |wish: usize, spot: &Spot, bytes: &[u8]| {
            lengths.push(bytes.len());
            take(wish, spot, bytes)
        };
        let through = Through { buffer: &mut vec![0; size], give: &mut give };
        read_through(&Shards::Store(&runtime, &bucket), &manifest, &wishes, through, 2)?;
        drop(take);
        Ok((found, lengths))
    };
    tokio::task::spawn_blocking(work).await.expect("join")
}

/// A device's memory is not read into: what is to get there passes through a buffer that is smaller than it.
#[tokio::test]
async fn what_is_read_through_a_buffer_never_takes_more() {
    use SliceKind::{Box, Flat};
    let bucket = Bucket::in_memory();
    let shape: &[u64] = &[40, 10];
    let tensors: [(&str, &[u64], &[Cut<'_>]); 5] = [
        ("rows", shape, &[(Box, &[20, 0], &[20, 10], 1), (Box, &[0, 0], &[20, 10], 0)]),
        ("scalar", &[], &[(Box, &[], &[], 0)]),
        ("flat", shape, &[(Flat, &[0], &[77], 0), (Flat, &[77], &[323], 1)]),
        ("empty", &[0, 5], &[]),
        ("columns", shape, &[(Box, &[0, 0], &[40, 4], 0), (Box, &[0, 4], &[40, 6], 1)]),
    ];
    let (manifest, contents) = store(&bucket, &tensors).await;
    let whole = |tensor: usize| Wish { tensor, region: Region::whole(&manifest.tensors[tensor].shape) };
    let lower = Region { kind: Box, offsets: vec![20, 0], lengths: vec![20, 10] };
    for size in [64, 100, 1000, 1 << 20] {
        let mut wishes: Vec<Wish> = (0..4).map(whole).collect();
        wishes.push(Wish { tensor: 0, region: lower.clone() });
        let before = bucket.counters().of(OperationKind::Get).bytes;
        let (found, lengths) = read_through_a_buffer(&bucket, &manifest, wishes, size).await.expect("read");
        let mut expected = contents[..4].to_vec();
        expected.push(contents[0][800..].to_vec());
        assert_eq!(found, expected, "through {size} bytes");
        assert!(lengths.iter().all(|length| *length <= size), "{lengths:?}");
        let needed: usize = expected.iter().map(Vec::len).sum();
        assert!(bucket.counters().of(OperationKind::Get).bytes - before >= needed as u64);
        assert_eq!(lengths.iter().sum::<usize>(), needed);
    }
    // What lies scattered in its slices comes as a box of each, and in a flat range run by run.
    let part =
        |tensor| Wish { tensor, region: Region { kind: Box, offsets: vec![1, 1], lengths: vec![2, 3] } };
    for size in [64, 1 << 20] {
        let wishes = vec![whole(4), part(0), part(2), Wish { tensor: 4, region: Region::flat(5..25) }];
        let (found, lengths) = read_through_a_buffer(&bucket, &manifest, wishes, size).await.expect("read");
        let little = cut(&contents[0], 4, shape, &[1, 1], &[2, 3]);
        assert_eq!(found, [contents[4].clone(), little.clone(), little, contents[4][20..100].to_vec()]);
        assert_eq!(lengths.into_iter().collect::<BTreeSet<_>>(), BTreeSet::from([640, 960, 24, 16, 20, 4]));
    }

    // Damage of what fits the buffer is given to nobody, and that of what does not is told.
    let key = manifest.shards[0].object();
    let (sound, _) = bucket.get_whole(&key).await.expect("get");
    for at in [4096, sound.len() - 1] {
        let mut damaged = sound.to_vec();
        damaged[at] ^= 1;
        bucket.put(&key, damaged.into(), Condition::Always).await.expect("put");
        for size in [64, 1 << 20] {
            let wishes = [0, 1, 2, 4].map(whole).to_vec();
            let error = read_through_a_buffer(&bucket, &manifest, wishes, size).await.expect_err("a bit");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "byte {at}: {error}");
        }
    }
}

/// Rows whose border lies within a slice: that one is read aside, and the others go as they are. Nothing is asked twice.
#[tokio::test]
async fn only_slices_at_a_border_are_moved_together() {
    use SliceKind::Box;
    let bucket = Bucket::in_memory();
    let shape: &[u64] = &[64, 16];
    let offsets: Vec<[u64; 2]> = (0..16).map(|row| [4 * row, 0]).collect();
    let rows: Vec<Cut<'_>> = offsets.iter().map(|at| (Box, &at[..], &[4, 16][..], 0)).collect();
    let names: Vec<String> = (0..50).map(|number| format!("w{number}")).collect();
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), shape, &rows[..])).collect();
    let (manifest, contents) = store(&bucket, &tensors).await;
    let region = Region { kind: Box, offsets: vec![6, 0], lengths: vec![20, 16] };
    let wishes: Vec<Wish> = (0..50).map(|tensor| Wish { tensor, region: region.clone() }).collect();
    let count = |kind| bucket.counters().of(kind).requests;
    let (heads, gets) = (count(OperationKind::Head), count(OperationKind::Get));
    let (found, lengths) = read_through_a_buffer(&bucket, &manifest, wishes, 64 << 10).await.expect("read");
    for (found, content) in found.iter().zip(&contents) {
        assert_eq!(*found, cut(content, 4, shape, &[6, 0], &[20, 16]));
    }
    // Of each: two rows, four slices, two rows.
    assert_eq!(lengths.len(), 50 * 6);
    assert_eq!(lengths.iter().filter(|length| **length == 128).count(), 100);
    assert_eq!(count(OperationKind::Head) - heads, 1, "each shard is looked at once");
    // Six slices of 256 bytes of each: 75 KiB, through halves of 32 KiB.
    assert_eq!(count(OperationKind::Get) - gets, 3);
}

/// While one half is given away, the other is read into.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_is_read_while_the_other_is_given() {
    let bucket = Bucket::in_memory();
    let slices: &[Cut<'_>] = &[(SliceKind::Flat, &[0], &[400], 0)];
    let (manifest, _) = store(&bucket, &[("w", &[400], slices)]).await;
    let (runtime, counted) = (Handle::current(), bucket.clone());
    let before = bucket.counters().of(OperationKind::Get).requests;
    let work = move || {
        let wishes = [Wish { tensor: 0, region: Region::whole(&[400]) }];
        let mut given = 0;
        let mut give = |_: usize, _: &Spot, _: &[u8]| {
            given += 1;
            // 1,600 bytes in four passes: the next one is asked for whatever becomes of this one.
            while counted.counters().of(OperationKind::Get).requests - before < (given + 1).min(4) {
                std::thread::yield_now();
            }
            Ok(())
        };
        let through = Through { buffer: &mut [0; 896], give: &mut give };
        read_through(&Shards::Store(&runtime, &bucket), &manifest, &wishes, through, 1)?;
        Ok::<u64, Error>(given)
    };
    assert_eq!(tokio::task::spawn_blocking(work).await.expect("join").expect("read"), 4);
}

/// While pieces are given away, nothing is asked of a disk: however long that takes, it does not hang.
#[test]
fn a_disk_does_not_hang_while_pieces_are_given() {
    let scratch = tempfile::tempdir().expect("scratch");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let url: BucketUrl = format!("file://{}", scratch.path().display()).parse().expect("a URL");
    let bucket = runtime.block_on(Bucket::open(&url, &StoreSettings::default())).expect("open");
    let slices: &[Cut<'_>] = &[(SliceKind::Flat, &[0], &[400], 0)];
    let (manifest, contents) = runtime.block_on(store(&bucket, &[("w", &[400], slices)]));
    let (local, clock) = (Local::of_test(bucket), Clock::manual());
    let wishes = [Wish { tensor: 0, region: Region::whole(&[400]) }];
    let mut found = vec![vec![0; 1600]];
    let mut take = taker(&wishes, &mut found);
    let mut give = |wish: usize, spot: &Spot, bytes: &[u8]| {
        clock.advance(PATIENCE);
        take(wish, spot, bytes)
    };
    // One half, so that nothing is being read meanwhile.
    let through = Through { buffer: &mut [0; 64], give: &mut give };
    let shards = Shards::Local(runtime.handle(), &local, &clock);
    read_through(&shards, &manifest, &wishes, through, 1).expect("read");
    drop(take);
    assert!(found == contents);
}
