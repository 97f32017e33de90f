//! Reading tensors back: only the bytes wanted, in few large requests, each slice checked before it is believed.
//!
//! Where a tensor's slices are runs of its own bytes, they are read straight into place; a slice that is a box
//! inside is read aside and scattered once it is checked. Targets hold anything after an error: callers read into
//! fresh memory and hand it on only when all of it is right.

use std::collections::BTreeSet;
use std::ops::Range;

use forebay_core::checksum::combine;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::Bucket;
use futures::stream::{self, StreamExt, TryStreamExt};

use crate::dtype::Dtype;
use crate::manifest::{Manifest, Shard, Slice, SliceKind, Tensor};

/// Bytes of one request at most.
const READ: u64 = 8 << 20;
/// Requests in flight at once; with `READ`, what the reading itself holds in memory.
const PARALLEL: usize = 8;
/// Bytes read for nothing between two wanted ranges, at most, to save a request.
const MAX_GAP: u64 = 64 << 10;

/// A tensor wanted, and where its bytes go.
#[derive(Debug)]
pub struct Target<'a> {
    /// Which tensor of the manifest, from 0.
    pub tensor: usize,
    /// As many bytes as the whole tensor has.
    pub bytes: &'a mut [u8],
}

/// A run of bytes of one shard that belongs into one piece of memory.
struct Segment<'a> {
    shard: u32,
    start: u64,
    slice: SliceId,
    target: &'a mut [u8],
}

/// Names a slice: tensor and slice, from 0.
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

/// A slice that is read aside, because its bytes are not together in the tensor.
struct Aside<'a> {
    tensor: usize,
    target: &'a mut [u8],
    slices: Vec<Vec<u8>>,
}

/// Fills all `targets`.
///
/// # Errors
/// `Corrupt`, with the fact, when a shard is missing, has another size, or a slice has another checksum.
pub async fn read_tensors(bucket: &Bucket, manifest: &Manifest, targets: Vec<Target<'_>>) -> Result<()> {
    let (direct, mut asides) = sort_targets(manifest, targets)?;
    let mut segments = Vec::new();
    for target in direct {
        segments.extend(in_place(manifest, target));
    }
    for aside in &mut asides {
        let slices = manifest.tensors[aside.tensor].slices.iter().zip(&mut aside.slices).enumerate();
        segments.extend(slices.map(|(index, (slice, bytes))| Segment {
            shard: slice.shard,
            start: slice.start,
            slice: (aside.tensor, index),
            target: bytes,
        }));
    }
    segments.retain(|segment| !segment.target.is_empty());
    let wanted: BTreeSet<SliceId> = segments.iter().map(|segment| segment.slice).collect();
    check_shards(bucket, manifest, segments.iter().map(|segment| segment.shard).collect()).await?;
    let reads = plan(segments).into_iter().map(|read| fetch(bucket, manifest, read));
    let parts: Vec<Vec<Part>> = stream::iter(reads).buffer_unordered(PARALLEL).try_collect().await?;
    check_slices(manifest, wanted, parts.into_iter().flatten().collect())?;
    asides.into_iter().for_each(|aside| scatter(&manifest.tensors[aside.tensor], aside));
    Ok(())
}

/// Checks the targets' sizes and parts those that are filled in place from those that are scattered into.
fn sort_targets<'a>(
    manifest: &Manifest,
    targets: Vec<Target<'a>>,
) -> Result<(Vec<Target<'a>>, Vec<Aside<'a>>)> {
    let (mut direct, mut asides) = (Vec::new(), Vec::new());
    for target in targets {
        let tensor = manifest.tensors.get(target.tensor);
        let tensor = tensor.ok_or_else(|| Error::bug("a target for a tensor that the step has not"))?;
        let bytes = Dtype::named(&tensor.dtype)?.bytes_of(&tensor.shape);
        if bytes != Some(target.bytes.len() as u64) {
            let (name, got) = (&tensor.name, target.bytes.len());
            return Err(Error::invalid(format!(
                "the target of tensor `{name}` has {got} bytes, not {bytes:?}"
            )));
        }
        if tensor.slices.iter().all(|slice| run_start(slice, &tensor.shape).is_some()) {
            direct.push(target);
        } else {
            let slices = tensor.slices.iter().map(|slice| vec![0; slice.len() as usize]).collect();
            asides.push(Aside { tensor: target.tensor, target: target.bytes, slices });
        }
    }
    Ok((direct, asides))
}

/// Cuts a target into the runs that its slices are.
fn in_place<'a>(manifest: &Manifest, target: Target<'a>) -> Vec<Segment<'a>> {
    let tensor = &manifest.tensors[target.tensor];
    let mut order: Vec<(u64, usize)> = (0..tensor.slices.len())
        .filter(|index| !tensor.slices[*index].is_empty())
        .filter_map(|index| Some((run_start(&tensor.slices[index], &tensor.shape)?, index)))
        .collect();
    order.sort_unstable();
    let mut rest = target.bytes;
    let mut segments = Vec::with_capacity(order.len());
    for (_, index) in order {
        let slice = &tensor.slices[index];
        // Slices cover the tensor exactly once, so that runs in order follow each other without a gap.
        let (bytes, after) = std::mem::take(&mut rest).split_at_mut(slice.len() as usize);
        segments.push(Segment {
            shard: slice.shard,
            start: slice.start,
            slice: (target.tensor, index),
            target: bytes,
        });
        rest = after;
    }
    segments
}

/// The first element of a slice whose elements are together in the tensor; `None` when they are not.
fn run_start(slice: &Slice, shape: &[u64]) -> Option<u64> {
    if slice.kind == SliceKind::Flat {
        return slice.offsets.first().copied();
    }
    let split = slice.lengths.iter().position(|length| *length != 1).unwrap_or(shape.len());
    let whole_below = (split + 1..shape.len()).all(|i| slice.lengths[i] == shape[i]);
    let start =
        slice.offsets.iter().zip(shape).fold(0, |start, (offset, dimension)| start * dimension + offset);
    whole_below.then_some(start)
}

/// Gathers neighbouring segments into requests and cuts long ones.
fn plan(mut segments: Vec<Segment<'_>>) -> Vec<Read<'_>> {
    segments.sort_by_key(|segment| (segment.shard, segment.start));
    let mut reads: Vec<Read<'_>> = Vec::new();
    for mut segment in segments {
        while !segment.target.is_empty() {
            let joins = reads.last().is_some_and(|read| {
                read.shard == segment.shard
                    && segment.start.saturating_sub(read.range.end) <= MAX_GAP
                    && segment.start - read.range.start < READ
            });
            if !joins {
                let range = segment.start..segment.start;
                reads.push(Read { shard: segment.shard, range, segments: Vec::new() });
            }
            let Some(read) = reads.last_mut() else { break };
            let room = READ - (segment.start - read.range.start);
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

/// A missing or cut shard is told as such before any byte is read.
async fn check_shards(bucket: &Bucket, manifest: &Manifest, wanted: BTreeSet<u32>) -> Result<()> {
    let shards = wanted.iter().map(|index| &manifest.shards[*index as usize]);
    stream::iter(shards)
        .map(|shard| async move {
            let fact = match bucket.head(&Shard::key_of(&shard.blake3)).await? {
                None => "is missing".to_owned(),
                Some(found) if found.size != shard.size => {
                    format!("has {} bytes, not {}", found.size, shard.size)
                }
                Some(_) => return Ok(()),
            };
            Err(Error::corrupt(format!("step {}: shard `{}` {fact}", manifest.step, shard.key)))
        })
        .buffer_unordered(PARALLEL)
        .try_collect()
        .await
}

async fn fetch(bucket: &Bucket, manifest: &Manifest, read: Read<'_>) -> Result<Vec<Part>> {
    let Read { shard, range, segments } = read;
    let shard = &manifest.shards[shard as usize];
    let lost = |fact: &str| Error::corrupt(format!("step {}: shard `{}` {fact}", manifest.step, shard.key));
    let data = match bucket.get(&Shard::key_of(&shard.blake3), None, range.clone()).await {
        Ok(data) => data,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(lost("is missing")),
        Err(error) => return Err(error),
    };
    if data.len() as u64 != range.end - range.start {
        return Err(lost("ends too early"));
    }
    let parts = segments.into_iter().map(|segment| {
        let from = (segment.start - range.start) as usize;
        segment.target.copy_from_slice(&data[from..from + segment.target.len()]);
        let (length, crc32c) = (segment.target.len() as u64, forebay_core::crc32c(segment.target));
        Part { slice: segment.slice, start: segment.start, length, crc32c }
    });
    Ok(parts.collect())
}

/// Puts the parts' checksums together and compares them with the manifest's.
fn check_slices(manifest: &Manifest, wanted: BTreeSet<SliceId>, mut parts: Vec<Part>) -> Result<()> {
    parts.sort_by_key(|part| (part.slice, part.start));
    let mut parts = parts.into_iter().peekable();
    for id in wanted {
        let (tensor, slice) = (&manifest.tensors[id.0], &manifest.tensors[id.0].slices[id.1]);
        let mut crc32c = forebay_core::crc32c(&[]);
        while let Some(part) = parts.next_if(|part| part.slice == id) {
            crc32c = combine(crc32c, part.crc32c, part.length);
        }
        if crc32c != slice.crc32c.0 {
            let (step, name, Slice { start, end, .. }) = (manifest.step, &tensor.name, slice);
            let shard = &manifest.shards[slice.shard as usize].key;
            let fact = format!("bytes {start}..{end} of `{shard}` are damaged");
            return Err(Error::corrupt(format!("step {step}: tensor `{name}`: {fact}")));
        }
    }
    Ok(())
}

/// Copies boxes to their places in the tensor, a run of the last dimension at a time.
fn scatter(tensor: &Tensor, aside: Aside<'_>) {
    let elements = tensor.shape.iter().product::<u64>().max(1) as usize;
    let element = aside.target.len() / elements;
    for (slice, bytes) in tensor.slices.iter().zip(&aside.slices).filter(|(slice, _)| !slice.is_empty()) {
        let rows = slice.lengths.split_last().map_or(1, |(_, rows)| rows.iter().product::<u64>());
        let row = bytes.len() / rows as usize;
        for (number, source) in bytes.chunks(row).enumerate() {
            let mut remaining = number as u64;
            let (mut start, mut stride) = (0, 1);
            for dimension in (0..tensor.shape.len()).rev() {
                let is_last = dimension + 1 == tensor.shape.len();
                let index = if is_last { 0 } else { remaining % slice.lengths[dimension] };
                remaining = if is_last { remaining } else { remaining / slice.lengths[dimension] };
                start += (slice.offsets[dimension] + index) * stride;
                stride *= tensor.shape[dimension];
            }
            let start = start as usize * element;
            aside.target[start..start + row].copy_from_slice(source);
        }
    }
}

#[cfg(test)]
mod tests;
