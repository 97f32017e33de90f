//! Memory shared between processes by a file descriptor (memfd), sealed against resizing.
//!
//! The seal means that no holder can shrink it, so that touching a mapping never raises SIGBUS. Who writes which
//! bytes when is agreed between the holders by messages; nothing here locks. A process maps a range for writing at
//! most once, and readers look at a range only after its writer said that it is done.
//!
//! Large memory has huge pages where the kernel can give them, asked for or not in its settings: whoever maps it to read
//! takes a step for every 2 MiB then, not for every 64 KiB.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use forebay_core::{Error, Result};

/// Neither shrinking nor growing; writing stays allowed.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Anonymous memory that another process can map once it was sent the descriptor.
#[derive(Debug)]
pub struct SharedMemory {
    file: File,
    length: usize,
    id: u64,
}

impl SharedMemory {
    /// Makes `length` bytes of zeros, whose pages exist only once they are touched or populated.
    pub fn create(name: &str, length: usize) -> Result<Self> {
        let name = std::ffi::CString::new(name).map_err(|_| Error::invalid("a NUL in a memory's name"))?;
        // SAFETY: `name` is a NUL-terminated string that lives across the call.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(last_error("memfd_create"));
        }
        // SAFETY: the call above just returned this descriptor, and nobody else owns it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(length as u64).map_err(|error| Error::from(error).context("size shared memory"))?;
        // SAFETY: plain fcntl on an open descriptor.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } < 0 {
            return Err(last_error("seal shared memory"));
        }
        let id = file.metadata()?.ino();
        Ok(Self { file, length, id })
    }

    /// Takes over a descriptor that another process sent.
    ///
    /// # Errors
    /// `Invalid` when it is not sealed against resizing.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        // SAFETY: plain fcntl on an open descriptor.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(Error::invalid("the descriptor is no memory sealed against resizing"));
        }
        let file = File::from(fd);
        let metadata = file.metadata()?;
        Ok(Self { file, length: metadata.len() as usize, id: metadata.ino() })
    }

    /// The kernel's number for it: the same memory has the same one, whatever descriptor it came by.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Maps `range`, whose start is a multiple of the page size, for its one writer.
    pub fn map_write(&self, range: Range<usize>) -> Result<WriteMapping> {
        Ok(WriteMapping(self.map(range, libc::PROT_READ | libc::PROT_WRITE)?))
    }

    /// Maps `range`, whose start is a multiple of the page size, for reading.
    pub fn map_read(&self, range: Range<usize>) -> Result<ReadMapping> {
        Ok(ReadMapping(self.map(range, libc::PROT_READ)?))
    }

    fn map(&self, range: Range<usize>, protection: libc::c_int) -> Result<Mapped> {
        if range.is_empty() || range.end > self.length {
            let length = self.length;
            return Err(Error::invalid(format!("map bytes {range:?} of {length} bytes of shared memory")));
        }
        let (fd, offset) = (self.file.as_raw_fd(), range.start as libc::off_t);
        let (place, flags) = match range.start.is_multiple_of(HUGE_PAGE).then(|| reserve(range.len())) {
            Some(Some(place)) => (place, libc::MAP_SHARED | libc::MAP_FIXED),
            _ => (std::ptr::null_mut(), libc::MAP_SHARED),
        };
        // SAFETY: a new mapping, over a range that was just reserved for it or at an address of the kernel's choice; it
        // aliases no Rust object.
        let address = unsafe { libc::mmap(place, range.len(), protection, flags, fd, offset) };
        if address == libc::MAP_FAILED {
            return Err(last_error("map shared memory"));
        }
        // SAFETY: the range was just mapped. Huge pages are a wish: a refusal changes nothing but speed.
        unsafe { libc::madvise(address, range.len(), libc::MADV_HUGEPAGE) };
        let start = NonNull::new(address.cast()).ok_or_else(|| Error::bug("mmap returned null"))?;
        Ok(Mapped { start, length: range.len() })
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// One mapping, unmapped on drop.
#[derive(Debug)]
struct Mapped {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapped {}
// SAFETY: through a shared reference the bytes can only be read.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for `length` bytes until drop; sealed, so never shorter. That nobody writes while a
        // reader looks is the holders' agreement, stated at the top.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; no slice of it outlives this owner.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Shared bytes that this process writes.
#[derive(Debug)]
pub struct WriteMapping(Mapped);

impl Deref for WriteMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for WriteMapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the process's only view.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.length) }
    }
}

/// Shared bytes that this process reads.
#[derive(Debug)]
pub struct ReadMapping(Mapped);

impl AsRef<[u8]> for ReadMapping {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// The alignment that madvise asks for.
const PAGE: usize = 4096;

/// The huge page of most machines; where they have others, only plain pages are had.
const HUGE_PAGE: usize = 2 << 20;

/// Linux 5.14 and newer; the libc crate names it only on some targets.
const MADV_POPULATE_WRITE: libc::c_int = 23;

/// Addresses for `length` bytes, from a multiple of a huge page on, without which none is mapped as such; `None` for less
/// than one, and where there is no room.
fn reserve(length: usize) -> Option<*mut libc::c_void> {
    let length = length.next_multiple_of(PAGE);
    let in_all = (length >= HUGE_PAGE).then(|| length.checked_add(HUGE_PAGE))??;
    let (null, flags) = (std::ptr::null_mut(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping at an address of the kernel's choice, which nobody can read or write.
    let address = unsafe { libc::mmap(null, in_all, libc::PROT_NONE, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return None;
    }
    let start = (address as usize).next_multiple_of(HUGE_PAGE);
    let (before, after) = (start - address as usize, address as usize + in_all - start - length);
    for (from, length) in [(address as usize, before), (start + length, after)] {
        if length > 0 {
            // SAFETY: a part of what was just mapped, which nobody knows of.
            unsafe { libc::munmap(from as *mut libc::c_void, length) };
        }
    }
    Some(start as *mut libc::c_void)
}

/// Makes the pages under `memory` exist, so that later writes do not fault; its content stays.
pub fn populate(memory: &mut [u8]) -> Result<()> {
    take_huge_pages(memory);
    let skip = memory.as_ptr().align_offset(PAGE).min(memory.len());
    let pages = &mut memory[skip..];
    // SAFETY: the range is one live exclusive slice; populating does not change what it holds.
    let result = unsafe { libc::madvise(pages.as_mut_ptr().cast(), pages.len(), MADV_POPULATE_WRITE) };
    if result == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::EINVAL) {
        return Err(Error::from(error).context("fault shared memory in"));
    }
    // An older kernel: touch every page by writing back what it holds.
    for page in pages.chunks_mut(PAGE) {
        let held = std::hint::black_box(page[0]);
        page[0] = std::hint::black_box(held);
    }
    Ok(())
}

/// Bytes of `memory`, of a mapping that is shared, that the kernel has no pages for yet, be they mapped here or not.
pub fn absent_bytes(memory: &[u8]) -> usize {
    let skip = memory.as_ptr().align_offset(PAGE).min(memory.len());
    let pages = &memory[skip..];
    let mut residence = vec![0_u8; pages.len().div_ceil(PAGE)];
    // SAFETY: the range is mapped, and there is a byte for each of its pages.
    let told =
        unsafe { libc::mincore(pages.as_ptr().cast_mut().cast(), pages.len(), residence.as_mut_ptr()) };
    if told != 0 {
        return memory.len();
    }
    PAGE * residence.iter().filter(|page| **page & 1 == 0).count()
}

/// Gives the whole pages within `memory`, of a mapping that is shared, back to the kernel: they hold zeros when they are
/// touched again. Where it fails, they stay.
pub fn give_up(memory: &mut [u8]) {
    let skip = memory.as_ptr().align_offset(PAGE).min(memory.len());
    let (pages, _) = memory[skip..].as_chunks_mut::<PAGE>();
    let pages = pages.as_flattened_mut();
    // SAFETY: the range is one live exclusive slice; zeros are bytes like any others.
    unsafe { libc::madvise(pages.as_mut_ptr().cast(), pages.len(), libc::MADV_REMOVE) };
}

/// Takes huge pages for what of `memory` has no page yet, even where the kernel gives them unasked to nobody
/// (`shmem_enabled` is `never`). Taking one costs less than the small ones that it stands for. What has pages keeps them:
/// they would be copied. Where it fails, there are small pages.
fn take_huge_pages(memory: &mut [u8]) {
    /// Linux 6.1 and newer.
    const MADV_COLLAPSE: libc::c_int = 25;
    let skip = memory.as_ptr().align_offset(HUGE_PAGE).min(memory.len());
    let (mut whole, _) = memory[skip..].as_chunks_mut::<HUGE_PAGE>();
    while let Some(first) = whole.iter().position(|page| !is_there(page)) {
        let fresh = whole[first..].iter().take_while(|page| !is_there(page)).count();
        let run = &mut whole[first..first + fresh];
        for page in run.iter_mut() {
            // One small page each: the kernel makes nothing of nothing.
            // SAFETY: the range is one live exclusive slice; populating does not change what it holds.
            if unsafe { libc::madvise(page.as_mut_ptr().cast(), PAGE, MADV_POPULATE_WRITE) } != 0 {
                return;
            }
        }
        // SAFETY: the range is one live exclusive slice; it holds the same bytes in other pages afterwards.
        if unsafe { libc::madvise(run.as_mut_ptr().cast(), run.as_flattened().len(), MADV_COLLAPSE) } != 0 {
            return;
        }
        whole = &mut whole[first + fresh..];
    }
}

/// Whether the memory of a huge page has its first page already, in this mapping or another one.
fn is_there(page: &[u8; HUGE_PAGE]) -> bool {
    let mut residence = 0u8;
    // SAFETY: one page is asked for, and there is room for its answer.
    let told = unsafe { libc::mincore(page.as_ptr().cast_mut().cast(), PAGE, &raw mut residence) };
    told != 0 || residence & 1 == 1
}

/// Maps the pages under `memory`, which is about to be read, in one go: half as dear as a fault for every few of them.
pub fn expect_read(memory: &[u8]) {
    /// Linux 5.14 and newer.
    const MADV_POPULATE_READ: libc::c_int = 22;
    let start = memory.as_ptr() as usize / PAGE * PAGE;
    let length = memory.as_ptr() as usize + memory.len() - start;
    // SAFETY: mapping pages changes nothing that they hold, and `memory` is live. Where it fails, reading faults.
    unsafe { libc::madvise(start as *mut libc::c_void, length, MADV_POPULATE_READ) };
}

fn last_error(doing: &str) -> Error {
    Error::from(std::io::Error::last_os_error()).context(doing)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_one_mapping_writes_another_reads() {
        let memory = SharedMemory::create("test", 1 << 20).expect("create");
        let mut writer = memory.map_write(4096..1 << 20).expect("map");
        populate(&mut writer).expect("populate");
        writer[..5].copy_from_slice(b"hello");
        let twin =
            SharedMemory::from_fd(memory.as_fd().try_clone_to_owned().expect("dup")).expect("take over");
        let other = SharedMemory::create("test", 4096).expect("create");
        assert!(twin.id() == memory.id() && other.id() != memory.id());
        let reader = twin.map_read(0..8192).expect("map");
        assert_eq!(&reader.as_ref()[4096..4101], b"hello");
        assert!(reader.as_ref()[..4096].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn pages_that_are_given_up_are_zeros_and_taken_no_more() {
        let memory = SharedMemory::create("test", 16 * PAGE).expect("create");
        let mut writer = memory.map_write(0..16 * PAGE).expect("map");
        writer.fill(7);
        let blocks = || memory.file.metadata().expect("told").blocks() * 512;
        assert_eq!(blocks(), 16 * PAGE as u64);
        give_up(&mut writer[PAGE + 1..6 * PAGE + 5]);
        assert_eq!(blocks(), 12 * PAGE as u64, "four whole ones");
        assert_eq!(absent_bytes(&writer), 4 * PAGE);
        // Another mapping tells the same, without having touched any.
        let other = memory.map_write(0..16 * PAGE).expect("map");
        assert_eq!((absent_bytes(&other), absent_bytes(&other[6 * PAGE..])), (4 * PAGE, 0));
        assert!(writer[..2 * PAGE].iter().chain(&writer[6 * PAGE..]).all(|byte| *byte == 7));
        assert!(writer[2 * PAGE..6 * PAGE].iter().all(|byte| *byte == 0));
    }

    /// How much of the memory called `name` each of its mappings here has in huge pages.
    fn huge_bytes(name: &str) -> Vec<usize> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let mappings = smaps.split("VmFlags:").filter(|mapping| mapping.contains(name));
        let kilobytes = |mapping: &str| {
            let line = mapping.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).expect("told");
            line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
        };
        mappings.map(kilobytes).collect()
    }

    #[test]
    fn large_memory_has_huge_pages_and_small_ones_stay() {
        let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        let enabled = enabled.unwrap_or_default();
        if !enabled.contains("[never]") {
            let why = "the kernel gives shared memory huge pages by itself, or none at all";
            let _ =
                writeln!(std::io::stderr(), "SKIPPED large_memory_has_huge_pages_and_small_ones_stay: {why}");
            return;
        }
        let (name, length) = ("test-huge-pages", 4 * HUGE_PAGE);
        let memory = SharedMemory::create(name, length + PAGE).expect("create");
        let mut writer = memory.map_write(0..length + PAGE).expect("map");
        // One that has pages already keeps them, and what they hold.
        writer[HUGE_PAGE..][..5].copy_from_slice(b"hello");
        populate(&mut writer).expect("populate");
        assert_eq!(huge_bytes(name), [3 * HUGE_PAGE]);
        writer[length] = 7;
        let reader = memory.map_read(0..length + PAGE).expect("map");
        expect_read(reader.as_ref());
        assert_eq!(huge_bytes(name), [3 * HUGE_PAGE; 2]);
        assert_eq!((&reader.as_ref()[HUGE_PAGE..][..5], reader.as_ref()[length]), (&b"hello"[..], 7));
        let zeros = |range: Range<usize>| reader.as_ref()[range].iter().all(|byte| *byte == 0);
        assert!(zeros(0..HUGE_PAGE) && zeros(HUGE_PAGE + 5..length));
        // Nothing to gain: below a huge page, or not from the beginning of one.
        let (small, shifted) = (memory.map_read(0..PAGE), memory.map_read(PAGE..length));
        assert!(small.is_ok_and(|small| small.as_ref()[0] == 0));
        assert!(shifted.is_ok_and(|shifted| &shifted.as_ref()[HUGE_PAGE - PAGE..][..5] == b"hello"));
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let file = tempfile::tempfile().expect("file");
        assert!(SharedMemory::from_fd(file.into()).is_err());
        let memory = SharedMemory::create("test", 4096).expect("create");
        assert!(memory.file.set_len(0).is_err(), "sealed against shrinking");
        assert!(memory.map_read(0..8192).is_err(), "past the end");
    }
}
