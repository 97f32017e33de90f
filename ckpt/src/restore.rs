//! Reading tensors back: only the slices wanted, in few large requests, each checked.
//!
//! A slice that is one run of its target is read straight into place, its checksum taken on the way; one that is
//! scattered there, or only partly wanted, is read aside, checked and copied. Several threads take requests in order.
//! The shards lie in the store, or in memory that the agents of killed trainers hold. What several ranks of a job want
//! of the store is read once between them (`together`).
//! Slices are read whole, since that is what their checksums are of. After an error the targets hold anything.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use bytes::Bytes;
use forebay_core::checksum::combine;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::object::Bucket;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::dtype::Dtype;
use crate::local::{Local, as_damage};
use crate::manifest::{Manifest, Slice, Tensor};
use crate::region::Region;

mod held;
mod disk;
mod source;
mod together;
mod through;

use disk::Disk;
pub use held::assemble;
use source::Source;
pub use through::{Spot, Through};
pub use together::{
    Address, Filled, Lent, Links, Meet, Origin, Peers, Places, Reader, Together, Wish, Wishes,
};

/// Bytes of one request at most; of a file, of its shortest run.
const READ: u64 = 8 << 20;
/// Bytes read for nothing between two wanted ranges, at most, to save a request.
const MAX_GAP: u64 = 64 << 10;
/// Bytes read aside at once, unless a single slice has more.
const MAX_ASIDE: u64 = 8 * READ;

/// A part of a tensor that is wanted, and where its bytes go.
#[derive(Debug)]
pub struct Target<'a> {
    /// Which tensor of the manifest, from 0.
    pub tensor: usize,
    /// Which part of it.
    pub region: Region,
    /// As many bytes as that part has.
    pub bytes: &'a mut [u8],
}

/// A run of bytes of one shard that belongs into one piece of memory.
struct Segment<'a> {
    shard: u32,
    start: u64,
    slice: SliceId,
    target: &'a mut [u8],
}

/// Names a slice: target (or tensor) and slice of its tensor, from 0.
type SliceId = (usize, usize);

/// One ranged request and where its bytes go.
struct Read<'a> {
    shard: u32,
    range: Range<u64>,
    segments: Vec<Segment<'a>>,
}

/// The checksum of a part of a slice.
struct Part {
    slice: SliceId,
    start: u64,
    length: u64,
    crc32c: u32,
}

/// How a slice gets into a target.
enum Way {
    /// As it is, to this byte of the target.
    Direct(u64),
    /// Through memory of its own.
    Aside,
}

/// A slice that is wanted.
struct Want {
    slice: usize,
    way: Way,
}

/// Fills all `targets` on `threads` threads, the caller's among them, which is none of the runtime's.
///
/// # Errors
/// `Corrupt`, with the fact, when a shard is missing, has another size, or a slice has another checksum.
pub fn read_tensors(
    runtime: &Handle,
    bucket: &Bucket,
    manifest: &Manifest,
    targets: Vec<Target<'_>>,
    threads: usize,
) -> Result<()> {
    read_from(&Source::Store(runtime, bucket), manifest, targets, &HashSet::new(), threads)
}

/// Parts of tensors, given by the tensor's number, one after another in memory of their own; as [`read_tensors`].
pub fn read_parts(
    (runtime, bucket, manifest): (&Handle, &Bucket, &Manifest),
    parts: Vec<(usize, Region)>,
    threads: usize,
) -> Result<Vec<u8>> {
    let length = |(tensor, region): &(usize, Region)| {
        let size = Dtype::named(&manifest.tensors[*tensor].dtype)?.size;
        Ok((region.elements() * size) as usize)
    };
    let lengths: Vec<usize> = parts.iter().map(length).collect::<Result<_>>()?;
    let mut data = vec![0; lengths.iter().sum()];
    let (mut targets, mut rest) = (Vec::with_capacity(parts.len()), data.as_mut_slice());
    for ((tensor, region), length) in parts.into_iter().zip(lengths) {
        let (bytes, after) = rest.split_at_mut(length);
        targets.push(Target { tensor, region, bytes });
        rest = after;
    }
    read_tensors(runtime, bucket, manifest, targets, threads)?;
    Ok(data)
}

/// As [`read_tensors`], out of memory: `shards` holds the bytes of the manifest's, in their order, as far as they are in that
/// of this host.
///
/// # Errors
/// `Corrupt`, too, before any byte is read, where something wanted is in another host's.
pub fn read_held(
    shards: &[Option<Bytes>],
    manifest: &Manifest,
    targets: Vec<Target<'_>>,
    threads: usize,
) -> Result<()> {
    read_from(&Source::Held(shards), manifest, targets, &HashSet::new(), threads)
}

/// As [`read_tensors`], out of the copies on this host's disk, which may hang: then nothing is written into the targets
/// any more once this returned, whenever it answers.
///
/// # Errors
/// `Corrupt`, too, where a copy is gone or cannot be read; `Unavailable` when the disk gave nothing for
/// [`crate::local::PATIENCE`].
pub fn read_local(
    (runtime, local, clock): (&Handle, &Local, &Clock),
    manifest: &Manifest,
    targets: Vec<Target<'_>>,
    threads: usize,
) -> Result<()> {
    let disk = Disk::new(runtime, local.bucket(), clock);
    read_from(&Source::Disk(&disk), manifest, targets, &HashSet::new(), threads)
        .map_err(|error| told_of_disk(&disk, error))
}

fn told_of_disk(disk: &Disk<'_>, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unavailable if disk.hangs() => error,
        _ => as_damage(error),
    }
}

/// Where a step's shards are.
pub enum Shards<'a> {
    /// In the store.
    Store(&'a Handle, &'a Bucket),
    /// On this host's disk.
    Local(&'a Handle, &'a Local, &'a Clock),
    /// In memory, in the manifest's order; none for those that another host's has.
    Held(&'a [Option<Bytes>]),
}

/// Reads parts of tensors a piece at a time, for memory that cannot be read into; several threads read, and the caller's
/// gives away.
///
/// # Errors
/// As [`read_tensors`], or [`read_local`]; the first that giving away had, after which nothing more is given.
pub fn read_through(
    shards: &Shards<'_>,
    manifest: &Manifest,
    wishes: &[Wish],
    through: Through<'_>,
    threads: usize,
) -> Result<()> {
    let none = HashSet::new();
    let wishes = (wishes, &none);
    match shards {
        Shards::Store(runtime, bucket) => {
            through::read(&Source::Store(runtime, bucket), manifest, wishes, through, threads)
        }
        Shards::Held(shards) => through::read(&Source::Held(shards), manifest, wishes, through, threads),
        Shards::Local(runtime, local, clock) => {
            let disk = Disk::new(runtime, local.bucket(), clock);
            through::read(&Source::Disk(&disk), manifest, wishes, through, threads)
                .map_err(|error| told_of_disk(&disk, error))
        }
    }
}

fn read_from(
    source: &Source<'_>,
    manifest: &Manifest,
    mut targets: Vec<Target<'_>>,
    skipped: &HashSet<SliceId>,
    threads: usize,
) -> Result<()> {
    let wants: Vec<Vec<Want>> =
        targets.iter().map(|target| wanted(manifest, target, skipped)).collect::<Result<_>>()?;
    let slices = targets.iter().zip(&wants).flat_map(|(target, wants)| {
        wants.iter().map(|want| &manifest.tensors[target.tensor].slices[want.slice])
    });
    let shards: BTreeSet<u32> = slices.filter(|slice| !slice.is_empty()).map(|slice| slice.shard).collect();
    source.check(manifest, shards)?;
    for Batch { first, wants } in batches(manifest, &targets, &wants, MAX_ASIDE) {
        let targets = &mut targets[first..first + wants.len()];
        fill(source, manifest, (targets, &wants), threads)?;
    }
    Ok(())
}

/// The slices that a target needs and that are not `skipped`, in the order of their elements.
fn wanted(manifest: &Manifest, target: &Target<'_>, skipped: &HashSet<SliceId>) -> Result<Vec<Want>> {
    let tensor = manifest.tensors.get(target.tensor);
    let tensor = tensor.ok_or_else(|| Error::bug("a target for a tensor that the step has not"))?;
    let dtype = Dtype::named(&tensor.dtype)?;
    let bytes = dtype.bytes_of(&target.region.lengths).filter(|_| target.region.fits(&tensor.shape));
    if bytes != Some(target.bytes.len() as u64) {
        let (name, got) = (&tensor.name, target.bytes.len());
        return Err(Error::invalid(format!("the target of tensor `{name}` has {got} bytes, not {bytes:?}")));
    }
    ways((target.tensor, tensor), &target.region, skipped)
}

/// The slices that a part of a tensor needs, and how they get into its memory.
fn ways((number, tensor): (usize, &Tensor), part: &Region, skipped: &HashSet<SliceId>) -> Result<Vec<Want>> {
    let dtype = Dtype::named(&tensor.dtype)?;
    let mut wants = Vec::new();
    for (index, slice) in tensor.slices.iter().enumerate() {
        let region = Region::of(slice);
        if skipped.contains(&(number, index)) || !region.touches(part, &tensor.shape) {
            continue;
        }
        let Some((_, to, count)) = region.shared_with(part, &tensor.shape).next() else { continue };
        let is_direct = count == region.elements();
        let way = if is_direct { Way::Direct(to * dtype.size) } else { Way::Aside };
        wants.push(Want { slice: index, way });
    }
    Ok(wants)
}

/// What is read at once.
struct Batch<'a> {
    /// The first target.
    first: usize,
    /// What it and each of those behind it are filled with.
    wants: Vec<&'a [Want]>,
}

/// Shares out what is wanted, so that of what is read aside no more than `room` is there at once, or one slice.
fn batches<'a>(
    manifest: &Manifest,
    targets: &[Target<'_>],
    wants: &'a [Vec<Want>],
    room: u64,
) -> Vec<Batch<'a>> {
    let (mut batches, mut batch, mut aside) = (Vec::new(), Batch { first: 0, wants: Vec::new() }, 0);
    for (number, (target, wants)) in targets.iter().zip(wants).enumerate() {
        let slices = &manifest.tensors[target.tensor].slices;
        let mut from = 0;
        for (at, want) in wants.iter().enumerate() {
            let length = if matches!(want.way, Way::Aside) { slices[want.slice].len() } else { 0 };
            if length > 0 && aside > 0 && aside + length > room {
                batch.wants.push(&wants[from..at]);
                batches.push(std::mem::replace(&mut batch, Batch { first: number, wants: Vec::new() }));
                (from, aside) = (at, 0);
            }
            aside += length;
        }
        batch.wants.push(&wants[from..]);
    }
    batches.push(batch);
    batches
}

fn fill(
    source: &Source<'_>,
    manifest: &Manifest,
    (targets, wants): (&mut [Target<'_>], &[&[Want]]),
    threads: usize,
) -> Result<()> {
    let tensors: Vec<&Tensor> = targets.iter().map(|target| &manifest.tensors[target.tensor]).collect();
    let mut asides: Vec<Vec<Vec<u8>>> = Vec::new();
    for (tensor, wants) in tensors.iter().zip(wants) {
        let through = wants.iter().filter(|want| matches!(want.way, Way::Aside));
        asides.push(through.map(|want| vec![0; tensor.slices[want.slice].len() as usize]).collect());
    }
    let mut segments = Vec::new();
    for (index, (target, (wants, asides))) in
        targets.iter_mut().zip(wants.iter().zip(&mut asides)).enumerate()
    {
        segments.extend(segments_of(tensors[index], index, target.bytes, wants, asides));
    }
    let named: BTreeSet<SliceId> = segments.iter().map(|segment| segment.slice).collect();
    let most = source.most_at_once(bytes_of(&segments), threads);
    let parts = read_all(source, manifest, plan(segments, most), (threads, source.at_once()))?;
    check_slices(source, manifest, &tensors, named, parts)?;
    for ((target, tensor), (wants, asides)) in targets.iter_mut().zip(tensors).zip(wants.iter().zip(asides)) {
        let through = wants.iter().filter(|want| matches!(want.way, Way::Aside));
        for (want, bytes) in through.zip(asides) {
            scatter(tensor, &tensor.slices[want.slice], &bytes, target)?;
        }
    }
    Ok(())
}

fn bytes_of(segments: &[Segment<'_>]) -> u64 {
    segments.iter().map(|segment| segment.target.len() as u64).sum()
}

/// Where the bytes of one target's slices go.
fn segments_of<'a>(
    tensor: &Tensor,
    target: usize,
    bytes: &'a mut [u8],
    wants: &[Want],
    asides: &'a mut [Vec<u8>],
) -> Vec<Segment<'a>> {
    let segment = |index: usize, memory: &'a mut [u8]| {
        let slice = &tensor.slices[index];
        Segment { shard: slice.shard, start: slice.start, slice: (target, index), target: memory }
    };
    let mut segments = Vec::with_capacity(wants.len());
    let mut direct = Vec::new();
    let mut asides = asides.iter_mut();
    for want in wants {
        match want.way {
            Way::Direct(at) => direct.push((at, want.slice)),
            Way::Aside => segments.extend(asides.next().map(|memory| segment(want.slice, memory))),
        }
    }
    direct.sort_unstable();
    let (mut rest, mut at) = (bytes, 0);
    for (start, index) in direct {
        // No two slices hold one element, so that their places in the target do not overlap.
        let (_, after) = rest.split_at_mut((start - at) as usize);
        let (memory, after) = after.split_at_mut(tensor.slices[index].len() as usize);
        at = start + memory.len() as u64;
        segments.push(segment(index, memory));
        rest = after;
    }
    segments
}

/// Gathers neighbouring segments into requests of so many bytes at most, and cuts long ones.
fn plan(mut segments: Vec<Segment<'_>>, most: u64) -> Vec<Read<'_>> {
    segments.sort_by_key(|segment| (segment.shard, segment.start));
    let mut reads: Vec<Read<'_>> = Vec::new();
    for mut segment in segments {
        while !segment.target.is_empty() {
            // A slice that two targets want is read for each.
            let joins = reads.last().is_some_and(|read| {
                read.shard == segment.shard
                    && segment.start >= read.range.end
                    && segment.start - read.range.end <= MAX_GAP
                    && segment.start - read.range.start < most
            });
            if !joins {
                let range = segment.start..segment.start;
                reads.push(Read { shard: segment.shard, range, segments: Vec::new() });
            }
            let Some(read) = reads.last_mut() else { break };
            let room = most - (segment.start - read.range.start);
            let length = room.min(segment.target.len() as u64);
            let (now, later) = std::mem::take(&mut segment.target).split_at_mut(length as usize);
            read.range.end = segment.start + length;
            let Segment { shard, start, slice, .. } = segment;
            read.segments.push(Segment { shard, start, slice, target: now });
            segment = Segment { shard, start: start + length, slice, target: later };
        }
    }
    reads
}

/// Carries all `reads` out: each thread takes the next one, and copies and checksums what it took.
fn read_all(
    source: &Source<'_>,
    manifest: &Manifest,
    reads: Vec<Read<'_>>,
    (threads, in_flight): (usize, usize),
) -> Result<Vec<Part>> {
    source.go_on();
    let threads = threads.clamp(1, reads.len().max(1));
    let in_flight = in_flight.div_ceil(threads);
    let queue = Mutex::new(reads.into_iter());
    let work = || {
        let parts = source.read(manifest, || queue.lock().next(), in_flight);
        if parts.is_err() {
            // What is left would be read for nothing.
            queue.lock().by_ref().for_each(drop);
        }
        parts
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let bug = |_| Err(Error::bug("a reading thread panicked"));
        let others = others.into_iter().map(|thread| thread.join().unwrap_or_else(bug));
        std::iter::once(own).chain(others.collect::<Vec<_>>()).collect()
    });
    let parts: Vec<_> = outcomes.into_iter().collect::<Result<_>>()?;
    Ok(parts.into_iter().flatten().collect())
}

/// Puts the parts' checksums together and compares them with the manifest's.
fn check_slices(
    source: &Source<'_>,
    manifest: &Manifest,
    tensors: &[&Tensor],
    wanted: BTreeSet<SliceId>,
    parts: Vec<Part>,
) -> Result<()> {
    match differing(tensors, wanted, parts).next() {
        None => Ok(()),
        Some(id) => Err(damaged(source, manifest, tensors[id.0], &tensors[id.0].slices[id.1])),
    }
}

/// Those of the slices whose parts together have another checksum than the manifest says.
fn differing(
    tensors: &[&Tensor],
    wanted: BTreeSet<SliceId>,
    mut parts: Vec<Part>,
) -> impl Iterator<Item = SliceId> {
    parts.sort_by_key(|part| (part.slice, part.start));
    let mut parts = parts.into_iter().peekable();
    wanted.into_iter().filter(move |id| {
        let mut crc32c = forebay_core::crc32c(&[]);
        while let Some(part) = parts.next_if(|part| part.slice == *id) {
            crc32c = combine(crc32c, part.crc32c, part.length);
        }
        crc32c != tensors[id.0].slices[id.1].crc32c.0
    })
}

/// What is told of a slice with another checksum.
fn damaged(source: &Source<'_>, manifest: &Manifest, tensor: &Tensor, slice: &Slice) -> Error {
    let (step, name, Slice { start, end, .. }) = (manifest.step, &tensor.name, slice);
    let shard = source.name_of(&manifest.shards[slice.shard as usize]);
    let fact = format!("bytes {start}..{end} of {shard} are damaged");
    Error::corrupt(format!("step {step}: tensor `{name}`: {fact}"))
}

/// Copies what a target wants of a slice that was read aside.
fn scatter(tensor: &Tensor, slice: &Slice, bytes: &[u8], target: &mut Target<'_>) -> Result<()> {
    let size = Dtype::named(&tensor.dtype)?.size as usize;
    let Target { region, bytes: into, .. } = target;
    for (from, to, count) in Region::of(slice).shared_with(region, &tensor.shape) {
        let (from, to, length) = (from as usize * size, to as usize * size, count as usize * size);
        into[to..to + length].copy_from_slice(&bytes[from..from + length]);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
