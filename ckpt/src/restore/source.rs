//! Where a step's shards are read from.

use std::collections::BTreeSet;
use std::ops::Range;

use bytes::Bytes;
use forebay_core::checksum::combine;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::mem::{copy_with_crc32c, expect_read};
use forebay_io::object::Bucket;
use futures::stream::{self, StreamExt, TryStreamExt};
use tokio::runtime::Handle;

use super::disk::Disk;
use super::{Part, READ, Read, Segment};
use crate::manifest::{Manifest, Shard};

/// Bytes of a file that are read at once: what most processors' caches have for a core, and enough for stores past them.
const PIECE: usize = 1 << 20;

/// Longest run of a file that one thread reads front to back. The kernel reads ahead of it then, and its page cache has what
/// it read in large pages, which are read again in half the time.
const LONGEST_RUN: u64 = 64 << 20;
/// Such runs for each thread, at least: none waits long for the others in the end.
const RUNS_OF_A_THREAD: u64 = 8;

/// Bytes of a request that is not cut to have more of them in flight.
const LEAST_READ: u64 = 1 << 20;
/// Requests to a store in flight at once, over all threads. S3 gives each 85 to 90 MB/s ("Performance design patterns for Amazon
/// S3"), and they cost no memory: what arrives is put in place.
const REQUESTS: usize = 32;
/// The same of a disk, which does no better with more. Each has pieces in memory.
const DISK_READS: usize = 8;

/// The store, this host's disk, or memory.
pub(super) enum Source<'a> {
    Store(&'a Handle, &'a Bucket),
    Disk(&'a Disk<'a>),
    /// The shards, in the manifest's order; none for those that another host's memory has.
    Held(&'a [Option<Bytes>]),
}

impl Source<'_> {
    /// A missing or cut shard is told as such before any byte is read.
    pub(super) fn check(&self, manifest: &Manifest, wanted: BTreeSet<u32>) -> Result<()> {
        match self {
            Self::Store(runtime, bucket) => runtime.block_on(check_shards(bucket, manifest, wanted)),
            Self::Disk(disk) => {
                disk.runtime.block_on(disk.wait(check_shards(disk.bucket, manifest, wanted))).flatten()
            }
            Self::Held(shards) => {
                let check = |index: u32| {
                    let shard = &manifest.shards[index as usize];
                    match shards.get(index as usize) {
                        Some(Some(bytes)) if bytes.len() as u64 == shard.size => Ok(()),
                        Some(None) => {
                            let fact = format!("what rank {} saved is in another host's memory", shard.rank);
                            Err(Error::corrupt(fact))
                        }
                        _ => Err(Error::bug("shards in memory that are not the manifest's")),
                    }
                };
                wanted.into_iter().try_for_each(check)
            }
        }
    }

    /// Reads in flight at once, over all threads.
    pub(super) fn at_once(&self) -> usize {
        match self {
            Self::Store(..) | Self::Held(_) => REQUESTS,
            Self::Disk(_) => DISK_READS,
        }
    }

    /// Bytes of one read at most, where `threads` read so many.
    pub(super) fn most_at_once(&self, bytes: u64, threads: usize) -> u64 {
        match self {
            Self::Store(_, bucket) if bucket.reads_in_place() => {
                (bytes / (RUNS_OF_A_THREAD * threads as u64).max(1)).clamp(READ, LONGEST_RUN)
            }
            _ => request_bytes(bytes, self.at_once()),
        }
    }

    /// What passed since something was read of it was no waiting for it.
    pub(super) fn go_on(&self) {
        if let Self::Disk(disk) = self {
            disk.go_on();
        }
    }

    /// What people know a shard by.
    pub(super) fn name_of(&self, shard: &Shard) -> String {
        match self {
            Self::Store(..) | Self::Disk(_) => format!("`{}`", shard.key),
            Self::Held(_) => format!("what the agent of rank {} holds", shard.rank),
        }
    }

    /// Carries out what `next` gives, `in_flight` at once where that helps.
    pub(super) fn read<'r>(
        &self,
        manifest: &Manifest,
        next: impl Fn() -> Option<Read<'r>>,
        in_flight: usize,
    ) -> Result<Vec<Part>> {
        match self {
            Self::Store(_, bucket) if bucket.reads_in_place() => read_in_place(bucket, manifest, next),
            Self::Store(runtime, bucket) => {
                let reads = stream::iter(std::iter::from_fn(next)).map(|read| fetch(bucket, manifest, read));
                let parts: Vec<Vec<Part>> =
                    runtime.block_on(reads.buffer_unordered(in_flight).try_collect())?;
                Ok(parts.into_iter().flatten().collect())
            }
            Self::Disk(disk) => {
                let reads =
                    stream::iter(std::iter::from_fn(next)).map(|read| fetch_of_disk(disk, manifest, read));
                let parts: Vec<Vec<Part>> =
                    disk.runtime.block_on(reads.buffer_unordered(in_flight).try_collect())?;
                Ok(parts.into_iter().flatten().collect())
            }
            Self::Held(shards) => {
                let copy = |read: Read<'r>| {
                    let shard = shards[read.shard as usize].as_ref();
                    shard.map(|shard| copy_out(shard, read)).ok_or_else(|| Error::bug("a shard elsewhere"))
                };
                let parts: Vec<Vec<Part>> = std::iter::from_fn(next).map(copy).collect::<Result<_>>()?;
                Ok(parts.into_iter().flatten().collect())
            }
        }
    }
}

/// Bytes of a request at most, where so many bytes are asked for and so many requests can be in flight.
pub(super) fn request_bytes(bytes: u64, at_once: usize) -> u64 {
    bytes.div_ceil(at_once as u64).clamp(LEAST_READ, READ)
}

/// Copies one range of a shard in memory into its segments.
fn copy_out(shard: &Bytes, read: Read<'_>) -> Vec<Part> {
    expect_read(&shard[read.range.start as usize..read.range.end as usize]);
    let copy = |segment: Segment<'_>| {
        let Segment { slice, start, target, .. } = segment;
        let length = target.len() as u64;
        let crc32c = copy_with_crc32c(&shard[start as usize..][..target.len()], target);
        Part { slice, start, length, crc32c }
    };
    read.segments.into_iter().map(copy).collect()
}

/// Reads ranges of shards that are files into their segments, through memory that stays in the processor's caches: a read
/// and the copy with its checksum cost less than a read into place and the checksum of what went past the caches since.
fn read_in_place<'r>(
    bucket: &Bucket,
    manifest: &Manifest,
    next: impl Fn() -> Option<Read<'r>>,
) -> Result<Vec<Part>> {
    let (mut parts, mut memory) = (Vec::new(), vec![0; PIECE]);
    while let Some(read) = next() {
        let (shard, runs) = (&manifest.shards[read.shard as usize], runs_of(&read.segments));
        let told = |error| told(manifest, shard, error);
        let (file, mut spread) = (bucket.open_in_place(&shard.object()).map_err(told)?, Spread::new(read));
        for run in runs {
            // What lies between is left out: another read of a file costs little.
            spread.at = run.start;
            for at in run.clone().step_by(PIECE) {
                let piece = &mut memory[..PIECE.min((run.end - at) as usize)];
                file.read_at(at, piece).map_err(told)?;
                spread.take(piece);
            }
        }
        parts.extend(spread.parts().ok_or_else(|| lost(manifest, shard, "ends too early"))?);
    }
    Ok(parts)
}

/// The bytes that segments want, those that follow one another together.
fn runs_of(segments: &[Segment<'_>]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for Segment { start, target, .. } in segments {
        let end = start + target.len() as u64;
        match runs.last_mut() {
            Some(last) if last.end == *start => last.end = end,
            _ => runs.push(*start..end),
        }
    }
    runs
}

/// What an error says of a shard.
fn told(manifest: &Manifest, shard: &Shard, error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => lost(manifest, shard, "is missing"),
        ErrorKind::Invalid => lost(manifest, shard, "ends too early"),
        _ => error,
    }
}

/// What is wrong with a shard.
fn lost(manifest: &Manifest, shard: &Shard, fact: &str) -> Error {
    Error::corrupt(format!("step {}: shard `{}` {fact}", manifest.step, shard.key))
}

async fn check_shards(bucket: &Bucket, manifest: &Manifest, wanted: BTreeSet<u32>) -> Result<()> {
    let shards = wanted.iter().map(|index| &manifest.shards[*index as usize]);
    stream::iter(shards)
        .map(|shard| async move {
            let fact = match bucket.head(&shard.object()).await? {
                None => "is missing".to_owned(),
                Some(found) if found.size != shard.size => {
                    format!("has {} bytes, not {}", found.size, shard.size)
                }
                Some(_) => return Ok(()),
            };
            Err(lost(manifest, shard, &fact))
        })
        .buffer_unordered(REQUESTS)
        .try_collect()
        .await
}

/// Reads one range into its segments as it arrives.
async fn fetch(bucket: &Bucket, manifest: &Manifest, read: Read<'_>) -> Result<Vec<Part>> {
    let shard = &manifest.shards[read.shard as usize];
    let mut body = bucket
        .get_stream(&shard.object(), None, read.range.clone())
        .await
        .map_err(|error| told(manifest, shard, error))?;
    let mut spread = Spread::new(read);
    while let Some(data) = body.try_next().await? {
        spread.take(&data);
    }
    spread.parts().ok_or_else(|| lost(manifest, shard, "ends too early"))
}

/// The same of a disk, which may hang.
async fn fetch_of_disk(disk: &Disk<'_>, manifest: &Manifest, read: Read<'_>) -> Result<Vec<Part>> {
    let shard = &manifest.shards[read.shard as usize];
    let told = |error: Error| told(manifest, shard, error);
    let mut body = disk.body(&shard.object(), read.range.clone()).await.map_err(told)?;
    let mut spread = Spread::new(read);
    while let Some(data) = disk.wait(body.try_next()).await?.map_err(told)? {
        spread.take(&data);
    }
    spread.parts().ok_or_else(|| lost(manifest, shard, "ends too early"))
}

/// What arrives of a range, on its way into segments.
struct Spread<'a> {
    /// Where the next bytes lie in the shard.
    at: u64,
    segments: std::vec::IntoIter<Segment<'a>>,
    /// The one that is being filled.
    open: Option<Segment<'a>>,
    parts: Vec<Part>,
}

impl<'a> Spread<'a> {
    fn new(Read { range, segments, .. }: Read<'a>) -> Self {
        let parts = Vec::with_capacity(segments.len());
        let mut spread = Self { at: range.start, segments: segments.into_iter(), open: None, parts };
        spread.open_next();
        spread
    }

    fn open_next(&mut self) {
        self.open = self.segments.next();
        if let Some(Segment { slice, start, target, .. }) = &self.open {
            let (slice, start, length) = (*slice, *start, target.len() as u64);
            self.parts.push(Part { slice, start, length, crc32c: forebay_core::crc32c(&[]) });
        }
    }

    fn take(&mut self, mut data: &[u8]) {
        while let (Some(segment), Some(part)) = (&mut self.open, self.parts.last_mut()) {
            // What lies between two segments is not wanted.
            let gap = (segment.start - self.at).min(data.len() as u64);
            (self.at, data) = (self.at + gap, &data[gap as usize..]);
            let length = segment.target.len().min(data.len());
            let (now, later) = std::mem::take(&mut segment.target).split_at_mut(length);
            let crc32c = copy_with_crc32c(&data[..length], now);
            part.crc32c = combine(part.crc32c, crc32c, length as u64);
            (segment.target, data) = (later, &data[length..]);
            self.at += length as u64;
            segment.start = self.at.max(segment.start);
            if !segment.target.is_empty() {
                return;
            }
            self.open_next();
        }
    }

    /// The parts' checksums; none where something is missing.
    fn parts(self) -> Option<Vec<Part>> {
        self.open.is_none().then_some(self.parts)
    }
}
