//! Reads that hold no thread while the disk is at them, however many there are, by io_uring(7).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use io_uring::{IoUring, Probe, opcode, types};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::ALIGNMENT;
use crate::mem::Buffer;

/// Reads that the kernel is told of at once. More may be under way.
const ENTRIES: u32 = 256;

/// The way to the kernel. Cheap to clone.
#[derive(Clone)]
pub struct Ring(Arc<Shared>);

struct Shared {
    ring: IoUring,
    /// Held while the kernel is told of a read, so that one thread at a time fills the ring.
    reads: Mutex<Reads>,
    /// Whether the kernel refused to go on: nothing is asked of it any more.
    is_dead: AtomicBool,
}

/// The reads under way, by their numbers.
#[derive(Default)]
struct Reads {
    under_way: Vec<Option<Read>>,
    free: Vec<usize>,
}

/// One read. Its file and its memory stay here until the kernel has answered, whoever still waits.
struct Read {
    file: File,
    buffer: Buffer,
    done: usize,
    told: oneshot::Sender<io::Result<(usize, Buffer)>>,
}

impl Ring {
    /// That of this process.
    ///
    /// # Errors
    /// What the kernel says where it has none that reads so (before 5.6), or forbids it, as the profiles of many container runtimes do.
    pub fn of_process() -> io::Result<Self> {
        static RING: OnceLock<Result<Ring, i32>> = OnceLock::new();
        let ring =
            RING.get_or_init(|| Self::new().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)));
        ring.clone().map_err(io::Error::from_raw_os_error)
    }

    fn new() -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let shared = Arc::new(Shared { ring, reads: Mutex::default(), is_dead: AtomicBool::new(false) });
        let own = shared.clone();
        std::thread::Builder::new().name("forebay-disk".into()).spawn(move || own.hear())?;
        Ok(Self(shared))
    }

    /// Reads a file, which is begun at once, from its beginning until it ends or `buffer` is full, and gives how many bytes came, and
    /// these: fewer where the file system stops in the middle. Where nobody waits any more the read goes on, and what came is dropped.
    ///
    /// # Errors
    /// What the kernel said; `InvalidInput` where the file system wants other memory for reads [past the page
    /// cache](super::pass_cache).
    pub fn read(
        &self,
        file: File,
        buffer: Buffer,
    ) -> impl Future<Output = io::Result<(usize, Buffer)>> + use<> {
        let (told, answer) = oneshot::channel();
        self.0.begin(Read { file, buffer, done: 0, told });
        async {
            answer.await.unwrap_or_else(|_| Err(io::Error::other("the kernel was not told of the read")))
        }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Shared {
    fn begin(&self, read: Read) {
        let mut reads = self.reads.lock();
        if self.is_dead.load(Ordering::Acquire) {
            return;
        }
        let number = reads.free.pop().unwrap_or_else(|| {
            reads.under_way.push(None);
            reads.under_way.len() - 1
        });
        reads.under_way[number] = Some(read);
        self.go_on(&mut reads, number);
    }

    /// Tells the kernel of a read, or of what is left of it.
    fn go_on(&self, reads: &mut Reads, number: usize) {
        let Some(read) = &mut reads.under_way[number] else { return };
        let left = &mut read.buffer[read.done..];
        let length = u32::try_from(left.len()).unwrap_or(u32::MAX);
        let entry = opcode::Read::new(types::Fd(read.file.as_raw_fd()), left.as_mut_ptr(), length)
            .offset(read.done as u64)
            .build()
            .user_data(number as u64);
        // SAFETY: file and memory stay in the table until the kernel has answered. The lock is held, so that nobody else fills the
        // ring, of which each entry is taken at once.
        let pushed = unsafe { self.ring.submission_shared().push(&entry) };
        if pushed.is_err() {
            // There is no room, and the kernel knows nothing of it.
            reads.under_way[number] = None;
            reads.free.push(number);
        } else if let Err(error) = self.submit() {
            self.end(reads, &error);
        }
    }

    /// Asks nothing of the kernel any more. It may answer yet: what it reads into is left to it.
    fn end(&self, reads: &mut Reads, error: &io::Error) {
        tracing::warn!(%error, "the kernel takes no reads any more: threads wait for the disk");
        self.is_dead.store(true, Ordering::Release);
        for Read { file, buffer, .. } in reads.under_way.iter_mut().filter_map(Option::take) {
            std::mem::forget((file, buffer));
        }
    }

    fn submit(&self) -> io::Result<()> {
        loop {
            match self.ring.submitter().submit() {
                Ok(_) => return Ok(()),
                Err(error) if is_passing(&error) => std::thread::yield_now(),
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes the kernel's answers for as long as this process lives.
    fn hear(&self) {
        loop {
            match self.ring.submitter().submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_passing(&error) => std::thread::yield_now(),
                Err(error) => return self.end(&mut self.reads.lock(), &error),
            }
            // SAFETY: this thread alone takes answers. All of them first: who tells the kernel of a read may be waiting for room.
            let answers: Vec<_> = unsafe { self.ring.completion_shared() }.collect();
            for answer in answers {
                self.take(answer.user_data() as usize, answer.result());
            }
        }
    }

    fn take(&self, number: usize, result: i32) {
        let mut reads = self.reads.lock();
        let Some(read) = reads.under_way.get_mut(number).and_then(Option::as_mut) else { return };
        let result = match usize::try_from(result) {
            Ok(count) => {
                read.done += count;
                let is_whole = count == 0 || read.done == read.buffer.len();
                // Past the page cache nothing goes on from elsewhere; a file mostly ends in the middle of a page, and nowhere else.
                if !is_whole && read.done.is_multiple_of(ALIGNMENT) {
                    return self.go_on(&mut reads, number);
                }
                Ok(read.done)
            }
            // The kernel gives up what a thread asked for that has ended: this one does not.
            Err(_) if [-libc::EINTR, -libc::ECANCELED].contains(&result) => {
                return self.go_on(&mut reads, number);
            }
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        let read = reads.under_way[number].take();
        reads.free.push(number);
        drop(reads);
        if let Some(Read { buffer, told, .. }) = read {
            // Whoever waited may have gone.
            told.send(result.map(|count| (count, buffer))).ok();
        }
    }
}

/// Whether to ask once more: a signal came, answers wait to be taken, or the kernel has no memory for now.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::super::pass_cache;
    use super::*;
    use crate::mem::Pool;

    /// One for a test alone.
    fn ring() -> Option<Ring> {
        let told = |error: &io::Error| {
            let _ = writeln!(io::stderr(), "SKIPPED: no io_uring here: {error}");
        };
        Ring::new().inspect_err(told).ok()
    }

    #[tokio::test]
    async fn files_are_read_to_their_end_or_the_buffers() {
        let (folder, Some(ring)) = (tempfile::tempdir().expect("scratch"), ring()) else { return };
        let pool = Pool::new(1 << 20, 4);
        for size in [0, 1, 4095, 4096, 4097, 500_000, 1 << 20, (1 << 20) + 1] {
            let bytes: Vec<u8> = (0..size).map(|at| (at / 7 % 251) as u8).collect();
            let path = folder.path().join(size.to_string());
            std::fs::write(&path, &bytes).expect("write");
            for passes in [false, true] {
                let file = File::open(&path).expect("open");
                if passes && !pass_cache(&file) {
                    continue;
                }
                let (count, buffer) = ring.read(file, pool.take(1 << 20)).await.expect("read");
                assert_eq!(count, size.min(1 << 20));
                assert!(buffer[..count] == bytes[..count], "{size}, {passes}");
            }
        }
        assert!(ring.0.reads.lock().under_way.iter().all(Option::is_none));
    }

    /// Ten thousand at once, of which half are waited for no more: each has its own bytes, and nothing is left.
    #[tokio::test]
    async fn many_at_once_have_each_their_own_bytes() {
        let (folder, Some(ring)) = (tempfile::tempdir().expect("scratch"), ring()) else { return };
        let pool = Pool::new(4096, 0);
        let paths: Vec<_> = (0..100_u8).map(|index| folder.path().join(index.to_string())).collect();
        for (index, path) in paths.iter().enumerate() {
            std::fs::write(path, vec![index as u8; 1000 + index]).expect("write");
        }
        for round in 0..20 {
            let mut waited = Vec::new();
            for number in 0..500 {
                let read = ring.read(File::open(&paths[number % 100]).expect("open"), pool.take(4096));
                if (number + round) % 2 == 0 {
                    waited.push((number % 100, read));
                }
            }
            for (index, read) in waited {
                let (count, buffer) = read.await.expect("read");
                assert_eq!(count, 1000 + index);
                assert!(buffer[..count].iter().all(|byte| *byte == index as u8));
            }
        }
        while ring.0.reads.lock().under_way.iter().any(Option::is_some) {
            tokio::task::yield_now().await;
        }
    }

    /// The kernel gives up what it was asked for by a thread that has ended.
    #[tokio::test]
    async fn who_asked_may_end_before_the_answer() {
        let (folder, Some(ring)) = (tempfile::tempdir().expect("scratch"), ring()) else { return };
        let path = folder.path().join("pipe");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        let mut pipe = File::options().read(true).write(true).open(&path).expect("open");
        let (reader, own) = (File::open(&path).expect("open"), ring.clone());
        let read = std::thread::spawn(move || own.read(reader, Pool::new(4096, 0).take(4096))).join();
        pipe.write_all(b"hello").expect("write");
        let (count, buffer) = read.expect("it was begun").await.expect("read");
        assert_eq!(&buffer[..count], b"hello");
    }

    /// Who waited for a ring that the kernel refused to go on with waited for ever.
    #[tokio::test]
    async fn a_ring_that_the_kernel_refuses_answers_that_at_once() {
        let (folder, Some(ring)) = (tempfile::tempdir().expect("scratch"), ring()) else { return };
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        let _writer = File::options().read(true).write(true).open(&pipe).expect("open");
        let begin = || ring.read(File::open(&pipe).expect("open"), Pool::new(4096, 0).take(4096));
        let under_way = begin();
        ring.0.end(&mut ring.0.reads.lock(), &io::ErrorKind::OutOfMemory.into());
        under_way.await.expect_err("nobody hears the answer");
        begin().await.expect_err("nothing is asked any more");
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_told() {
        let (folder, Some(ring)) = (tempfile::tempdir().expect("scratch"), ring()) else { return };
        let read = ring.read(File::open(folder.path()).expect("open"), Pool::new(4096, 0).take(4096));
        assert_eq!(read.await.expect_err("a directory").kind(), io::ErrorKind::IsADirectory);
    }
}
