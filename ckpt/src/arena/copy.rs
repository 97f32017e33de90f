//! Copying with a checksum: the bytes pass the processor once.
//!
//! Work is cut into chunks that threads take in order. The checksum is of the copy, so that what is sealed is what
//! was checked. What comes out of a device's memory is on its way, by the device's own engine, while threads copy what
//! is in the host's; they checksum it as it arrives.

use std::ops::Range;

use forebay_core::Result;
use forebay_core::checksum::combine;
use forebay_io::device::{Coming, DeviceBytes, fetch};
use forebay_io::mem::copy_with_crc32c;
use parking_lot::Mutex;

/// Bytes that a thread takes at once: small against any state worth several threads, large against taking one.
const CHUNK: usize = 4 << 20;

/// Where bytes come from.
#[derive(Debug, Clone)]
pub enum Source<'a> {
    /// They are in their place already, and only checksummed.
    InPlace,
    /// Memory of this process.
    Host(&'a [u8]),
    /// Memory of a device.
    Device(DeviceBytes),
}

impl Source<'_> {
    /// How many, where that is known without their place.
    pub fn known_len(&self) -> Option<usize> {
        match self {
            Self::InPlace => None,
            Self::Host(bytes) => Some(bytes.len()),
            Self::Device(bytes) => Some(bytes.len()),
        }
    }

    /// A part of them.
    fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::InPlace => Self::InPlace,
            Self::Host(bytes) => Self::Host(&bytes[range]),
            Self::Device(bytes) => Self::Device(bytes.slice(range)),
        }
    }

    /// The first `length` and the rest.
    pub fn split_at(&self, length: usize) -> (Self, Self) {
        (self.slice(0..length), self.slice(length..self.known_len().unwrap_or(length)))
    }
}

/// Bytes to be copied, or only checksummed.
#[derive(Debug)]
pub struct Job<'a> {
    /// Where they come from, as long as `target`.
    pub source: Source<'a>,
    /// Where they belong.
    pub target: &'a mut [u8],
}

/// A part of a job, small enough for one thread.
struct Chunk<'a> {
    job: usize,
    part: usize,
    content: Content<'a>,
}

/// How a thread gets a chunk's bytes.
enum Content<'a> {
    InPlace(&'a mut [u8]),
    Copied { source: &'a [u8], target: &'a mut [u8] },
    Coming(Coming<'a>),
}

/// The checksum of one chunk.
struct Part {
    job: usize,
    part: usize,
    crc32c: u32,
    length: u64,
}

/// Does all `jobs` on `threads` threads, the caller's among them; gives the CRC-32C of each job's bytes.
///
/// # Errors
/// What a device's driver says.
///
/// # Panics
/// When a source is not as long as its target.
pub fn copy(jobs: Vec<Job<'_>>, threads: usize) -> Result<Vec<u32>> {
    let count = jobs.len();
    let (mut near, mut far, mut places) = (Vec::new(), Vec::new(), Vec::new());
    for (job, part, source, target) in jobs.into_iter().enumerate().flat_map(|(job, work)| cut(job, work)) {
        match source {
            Source::InPlace => near.push(Chunk { job, part, content: Content::InPlace(target) }),
            Source::Host(source) => {
                near.push(Chunk { job, part, content: Content::Copied { source, target } })
            }
            Source::Device(source) => {
                far.push((source, target));
                places.push((job, part));
            }
        }
    }
    fetch(far, |coming| {
        let arriving = coming.into_iter().zip(places);
        let arriving =
            arriving.map(|(bytes, (job, part))| Chunk { job, part, content: Content::Coming(bytes) });
        work_off(near.into_iter().chain(arriving).collect(), count, threads)
    })?
}

/// Has threads take the chunks in order; gives the checksums of `jobs` jobs.
fn work_off(chunks: Vec<Chunk<'_>>, jobs: usize, threads: usize) -> Result<Vec<u32>> {
    let mut checksums = vec![forebay_core::crc32c(&[]); jobs];
    let threads = threads.clamp(1, chunks.len().max(1));
    let queue = Mutex::new(chunks.into_iter());
    let results = Mutex::new(Vec::new());
    let work = || {
        let mut done = Vec::new();
        loop {
            let next = queue.lock().next();
            let Some(chunk) = next else { break };
            done.push(take(chunk));
        }
        results.lock().append(&mut done);
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    let mut parts = results.into_inner().into_iter().collect::<Result<Vec<_>>>()?;
    parts.sort_unstable_by_key(|part| (part.job, part.part));
    for part in parts {
        let so_far = &mut checksums[part.job];
        *so_far = if part.part == 0 { part.crc32c } else { combine(*so_far, part.crc32c, part.length) };
    }
    Ok(checksums)
}

/// A job's chunks: their number, source and target.
fn cut<'a>(job: usize, work: Job<'a>) -> impl Iterator<Item = (usize, usize, Source<'a>, &'a mut [u8])> {
    let Job { source, target } = work;
    assert!(source.known_len().is_none_or(|length| length == target.len()), "a job copies all of its source");
    target.chunks_mut(CHUNK).enumerate().map(move |(part, target)| {
        let start = part * CHUNK;
        (job, part, source.slice(start..start + target.len()), target)
    })
}

fn take(chunk: Chunk<'_>) -> Result<Part> {
    let Chunk { job, part, content } = chunk;
    let (crc32c, length) = match content {
        Content::InPlace(bytes) => (forebay_core::crc32c(bytes), bytes.len()),
        Content::Copied { source, target } => (copy_with_crc32c(source, target), target.len()),
        Content::Coming(coming) => {
            let bytes = coming.wait()?;
            (forebay_core::crc32c(bytes), bytes.len())
        }
    };
    Ok(Part { job, part, crc32c, length: length as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_checksums_whatever_the_threads() {
        let sizes = [0, 1, 100_000, CHUNK, CHUNK + 1, 3 * CHUNK + 12_345];
        let sources: Vec<Vec<u8>> =
            sizes.iter().map(|size| (0..*size).map(|i| (i * 31 + size) as u8).collect()).collect();
        let expected: Vec<u32> = sources.iter().map(|source| forebay_core::crc32c(source)).collect();
        for threads in [0, 1, 3] {
            let mut targets: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size]).collect();
            let jobs = sources
                .iter()
                .zip(&mut targets)
                .map(|(source, target)| Job { source: Source::Host(source), target });
            assert_eq!(copy(jobs.collect(), threads).expect("copied"), expected);
            assert_eq!(targets, sources);
            let again = targets.iter_mut().map(|target| Job { source: Source::InPlace, target });
            assert_eq!(copy(again.collect(), threads).expect("read"), expected);
        }
    }
}
