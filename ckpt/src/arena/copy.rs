//! Copying with a checksum: the bytes pass the processor once.
//!
//! Work is cut into chunks that threads take in order. The checksum is of the copy, so that what is sealed is what
//! was checked. What comes out of a device's memory is on its way, by the device's own engine, while threads copy what
//! is in the host's; they checksum it as it arrives. Who owns the sources may change them once they were read, before
//! all is checksummed: [`CopyWatch`].

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_core::checksum::combine;
use forebay_core::{Error, Result};
use forebay_io::device::{Arrival, Coming, DeviceBytes, fetch};
use forebay_io::mem::copy_with_crc32c;
use parking_lot::{Condvar, Mutex};

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

/// How far a copy is, for who waits for it on another thread.
#[derive(Debug, Default)]
pub struct CopyWatch {
    stage: Mutex<CopyStage>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CopyStage {
    /// Nothing is read of the sources any more, of which all was read.
    is_read: bool,
    has_ended: bool,
}

impl CopyWatch {
    /// Waits until the sources were read: they may change then. False where the copy ended without that.
    pub fn await_sources(&self) -> bool {
        let mut stage = self.stage.lock();
        self.changed.wait_while(&mut stage, |stage| !stage.is_read && !stage.has_ended);
        stage.is_read
    }

    /// Waits until the copy has ended, as [`CopyWatch::end`] tells.
    pub fn await_end(&self) {
        self.changed.wait_while(&mut self.stage.lock(), |stage| !stage.has_ended);
    }

    /// To be called once the copy has ended, well or not.
    pub fn end(&self) {
        self.stage.lock().has_ended = true;
        self.changed.notify_all();
    }

    fn sources_were_read(&self) {
        self.stage.lock().is_read = true;
        self.changed.notify_all();
    }
}

/// Sources that are still to be read: the chunks of the host's, and all of the devices' together.
struct Unread<'a> {
    count: AtomicUsize,
    watch: &'a CopyWatch,
}

impl Unread<'_> {
    fn one_was_read(&self) {
        if self.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.watch.sources_were_read();
        }
    }
}

/// Does all `jobs` on `threads` threads, the caller's among them, and one that tells `watch` when the sources were read;
/// gives the CRC-32C of each job's bytes.
///
/// # Errors
/// What a device's driver says.
///
/// # Panics
/// When a source is not as long as its target.
pub fn copy(jobs: Vec<Job<'_>>, threads: usize, watch: Option<&CopyWatch>) -> Result<Vec<u32>> {
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
        let mut arrivals: Vec<Arrival> = coming.iter().map(Coming::arrival).collect();
        arrivals.dedup();
        // The devices' count as one; it is there without any as well, so that none is told of nothing.
        let unread = watch.map(|watch| Unread { count: AtomicUsize::new(near.len() + 1), watch });
        let arriving = coming.into_iter().zip(places);
        let arriving =
            arriving.map(|(bytes, (job, part))| Chunk { job, part, content: Content::Coming(bytes) });
        let chunks = near.into_iter().chain(arriving).collect();
        std::thread::scope(|scope| {
            let far = unread.as_ref().map(|unread| scope.spawn(move || await_all(&arrivals, unread)));
            let checksums = work_off(chunks, count, threads, unread.as_ref());
            far.map_or(Ok(()), |far| {
                far.join().unwrap_or_else(|_| Err(Error::bug("a waiting thread panicked")))
            })?;
            checksums
        })
    })?
}

/// Waits for what devices copy, in its order.
fn await_all(arrivals: &[Arrival], unread: &Unread<'_>) -> Result<()> {
    arrivals.iter().try_for_each(Arrival::wait)?;
    unread.one_was_read();
    Ok(())
}

/// Has threads take the chunks in order; gives the checksums of `jobs` jobs.
fn work_off(
    chunks: Vec<Chunk<'_>>,
    jobs: usize,
    threads: usize,
    unread: Option<&Unread<'_>>,
) -> Result<Vec<u32>> {
    let mut checksums = vec![forebay_core::crc32c(&[]); jobs];
    let threads = threads.clamp(1, chunks.len().max(1));
    let queue = Mutex::new(chunks.into_iter());
    let results = Mutex::new(Vec::new());
    let work = || {
        let mut done = Vec::new();
        loop {
            let next = queue.lock().next();
            let Some(chunk) = next else { break };
            done.push(take(chunk, unread));
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

fn take(chunk: Chunk<'_>, unread: Option<&Unread<'_>>) -> Result<Part> {
    let Chunk { job, part, content } = chunk;
    let is_near = !matches!(content, Content::Coming(_));
    let (crc32c, length) = match content {
        Content::InPlace(bytes) => (forebay_core::crc32c(bytes), bytes.len()),
        Content::Copied { source, target } => (copy_with_crc32c(source, target), target.len()),
        Content::Coming(coming) => {
            let bytes = coming.wait()?;
            (forebay_core::crc32c(bytes), bytes.len())
        }
    };
    if let Some(unread) = unread.filter(|_| is_near) {
        unread.one_was_read();
    }
    Ok(Part { job, part, crc32c, length: length as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_sources_is_told_of_a_copy_that_ended_without() {
        let watch = CopyWatch::default();
        std::thread::scope(|scope| {
            let told = scope.spawn(|| watch.await_sources());
            watch.end();
            watch.await_end();
            assert!(!told.join().expect("told"), "they were never read");
        });
        watch.sources_were_read();
        assert!(watch.await_sources(), "however late somebody asks");
    }

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
            let watch = CopyWatch::default();
            assert_eq!(copy(jobs.collect(), threads, Some(&watch)).expect("copied"), expected);
            assert!(watch.await_sources(), "told before the end");
            assert_eq!(targets, sources);
            let again = targets.iter_mut().map(|target| Job { source: Source::InPlace, target });
            assert_eq!(copy(again.collect(), threads, None).expect("read"), expected);
        }
    }
}
