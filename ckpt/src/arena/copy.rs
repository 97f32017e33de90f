//! Copying with a checksum: the bytes pass the processor once.
//!
//! Work is cut into chunks that threads take in order. The checksum is of the copy, so that what is sealed is what
//! was checked.

use forebay_core::checksum::combine;
use forebay_io::mem::copy_with_crc32c;
use parking_lot::Mutex;

/// Bytes that a thread takes at once: small against any state worth several threads, large against taking one.
const CHUNK: usize = 4 << 20;

/// Bytes to be copied, or only checksummed.
#[derive(Debug)]
pub struct Job<'a> {
    /// Where they come from, as long as `target`; `None` when `target` holds them already.
    pub source: Option<&'a [u8]>,
    /// Where they belong.
    pub target: &'a mut [u8],
}

/// A part of a job, small enough for one thread.
struct Chunk<'a> {
    job: usize,
    part: usize,
    source: Option<&'a [u8]>,
    target: &'a mut [u8],
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
/// # Panics
/// When a source is not as long as its target.
pub fn copy(jobs: Vec<Job<'_>>, threads: usize) -> Vec<u32> {
    let mut checksums = vec![forebay_core::crc32c(&[]); jobs.len()];
    let chunks: Vec<Chunk<'_>> =
        jobs.into_iter().enumerate().flat_map(|(job, work)| cut(job, work)).collect();
    let threads = threads.clamp(1, chunks.len().max(1));
    let queue = Mutex::new(chunks.into_iter());
    let results = Mutex::new(Vec::new());
    let work = || {
        let mut done = Vec::new();
        loop {
            let next = queue.lock().next();
            let Some(chunk) = next else { break };
            done.push(copy_chunk(chunk));
        }
        results.lock().append(&mut done);
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    let mut parts = results.into_inner();
    parts.sort_unstable_by_key(|part| (part.job, part.part));
    for part in parts {
        let so_far = &mut checksums[part.job];
        *so_far = if part.part == 0 { part.crc32c } else { combine(*so_far, part.crc32c, part.length) };
    }
    checksums
}

fn cut(job: usize, work: Job<'_>) -> Vec<Chunk<'_>> {
    if let Some(source) = work.source {
        assert_eq!(source.len(), work.target.len(), "a job copies all of its source");
    }
    let piece = |part: usize, length: usize| {
        let start = part * CHUNK;
        work.source.map(|source| &source[start..start + length])
    };
    let chunks = work.target.chunks_mut(CHUNK).enumerate();
    chunks.map(|(part, target)| Chunk { job, part, source: piece(part, target.len()), target }).collect()
}

fn copy_chunk(chunk: Chunk<'_>) -> Part {
    let length = chunk.target.len() as u64;
    let crc32c = match chunk.source {
        Some(source) => copy_with_crc32c(source, chunk.target),
        None => forebay_core::crc32c(chunk.target),
    };
    Part { job: chunk.job, part: chunk.part, crc32c, length }
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
            let jobs =
                sources.iter().zip(&mut targets).map(|(source, target)| Job { source: Some(source), target });
            assert_eq!(copy(jobs.collect(), threads), expected);
            assert_eq!(targets, sources);
            let again = targets.iter_mut().map(|target| Job { source: None, target });
            assert_eq!(copy(again.collect(), threads), expected);
        }
    }
}
