//! Files mapped for reading: what the page cache holds is copied and checksummed in one pass, where read(2) copies it
//! through the caches first, by one page or folio after another.
//!
//! Touching a mapping raises SIGBUS where read(2) fails. So all pages are asked for when a range is mapped, by madvise(2),
//! which tells a failure as an error; the caller then reads the file instead and learns why. What stays is the moment until
//! they were copied, so that ranges are short: a file that another program cuts off in it ends this process, and so does
//! a page that is thrown out in it and cannot be read again. See docs/decisions/0017.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::copy_with_crc32c;

/// Linux 5.14 and newer; the libc crate names it only on some targets.
const MADV_POPULATE_READ: libc::c_int = 22;
/// What a mapping's offset in its file is a multiple of.
const PAGE: u64 = 4096;
/// What this process copied out of mappings.
static COPIED: AtomicU64 = AtomicU64::new(0);

/// Bytes that this process copied out of files' mappings so far: /proc/self/io counts those of read(2) alone.
pub fn mapped_bytes() -> u64 {
    COPIED.load(Ordering::Relaxed)
}

/// A range of a file, mapped; unmapped on drop.
#[derive(Debug)]
pub struct FileMapping {
    start: NonNull<u8>,
    /// Which bytes of the file are mapped.
    range: Range<u64>,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for FileMapping {}

impl FileMapping {
    /// Maps `range` of `file`, which is copied next, and has the kernel read all of it; `None` where it does not.
    pub fn new(file: &File, range: Range<u64>) -> Option<Self> {
        let range = range.start / PAGE * PAGE..range.end;
        let length =
            usize::try_from(range.end.checked_sub(range.start)?).ok().filter(|length| *length > 0)?;
        let (fd, offset) = (file.as_raw_fd(), libc::off_t::try_from(range.start).ok()?);
        let (null, protection) = (std::ptr::null_mut(), libc::PROT_READ);
        // SAFETY: a new mapping at an address of the kernel's choice; it aliases no Rust object.
        let address = unsafe { libc::mmap(null, length, protection, libc::MAP_SHARED, fd, offset) };
        if address == libc::MAP_FAILED {
            return None;
        }
        let mapping = Self { start: NonNull::new(address.cast())?, range };
        // SAFETY: the range was just mapped; neither call changes what its pages hold. Huge pages are a wish: a refusal
        // changes nothing but speed.
        let asked = unsafe {
            libc::madvise(address, length, libc::MADV_HUGEPAGE);
            libc::madvise(address, length, MADV_POPULATE_READ)
        };
        (asked == 0).then_some(mapping)
    }

    /// Copies the file's bytes from `offset` on to `target` and gives their CRC-32C, even where the file is written
    /// meanwhile; `None` where they are not mapped.
    pub fn copy_with_crc32c(&self, offset: u64, target: &mut [u8]) -> Option<u32> {
        let end = offset.checked_add(target.len() as u64)?;
        if offset < self.range.start || end > self.range.end {
            return None;
        }
        // SAFETY: mapped until drop, and the pages were there when it was mapped: see the top. What another program writes to them
        // meanwhile changes what is copied, no more.
        let source = unsafe {
            let start = self.start.as_ptr().add((offset - self.range.start) as usize);
            std::slice::from_raw_parts(start, target.len())
        };
        COPIED.fetch_add(target.len() as u64, Ordering::Relaxed);
        Some(copy_with_crc32c(source, target))
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        let length = (self.range.end - self.range.start) as usize;
        // SAFETY: exactly the range that was mapped; no slice of it outlives this owner.
        unsafe { libc::munmap(self.start.as_ptr().cast(), length) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn bytes_and_checksums_are_those_of_the_file() {
        let file = tempfile::tempfile().expect("file");
        let bytes: Vec<u8> = (0..5_000_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        file.write_all_at(&bytes, 0).expect("write");
        let range = 8191..bytes.len() as u64;
        let mapping = FileMapping::new(&file, range.clone()).expect("mapped");
        for (start, length) in [(4096, 1), (4097, 300_000), (304_097, 4_000_000), (5000, 0), (4_999_999, 2)] {
            let mut target = vec![0; length];
            let crc32c = mapping.copy_with_crc32c(start as u64, &mut target).expect("copied");
            assert!(target == bytes[start..start + length], "{length} bytes from {start}");
            assert_eq!(crc32c, forebay_core::crc32c(&target));
        }
        for (start, length) in [(0, 10), (5_000_000, 2), (u64::MAX, 1)] {
            assert!(mapping.copy_with_crc32c(start, &mut vec![0; length]).is_none(), "{start} is not mapped");
        }
        assert!(FileMapping::new(&file, 4096..4096).is_none());
    }

    /// A file that was cut off is told: touching pages that it does not have would end the process.
    #[test]
    fn what_a_file_no_longer_has_is_an_error() {
        let file = tempfile::tempfile().expect("file");
        file.set_len(8 << 20).expect("grow");
        assert!(FileMapping::new(&file, 1 << 20..8 << 20).is_some());
        file.set_len(2 << 20).expect("cut");
        assert!(FileMapping::new(&file, 1 << 20..8 << 20).is_none());
        assert!(FileMapping::new(&file, 4 << 20..8 << 20).is_none());
        assert!(FileMapping::new(&file, 0..2 << 20).is_some());
    }
}
