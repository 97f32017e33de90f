//! Files mapped for reading: what the page cache holds is copied and checksummed in one pass, where read(2) copies it
//! through the caches first, by one page or folio after another.
//!
//! Touching a mapping raises SIGBUS where read(2) fails. So all pages are asked for when a range is mapped, by madvise(2),
//! which tells a failure as an error; the caller then reads the file instead and learns why. What stays is the moment until
//! they were copied, so that ranges are short: a file that another program cuts off in it ends this process, and so does
//! a page that is thrown out in it and cannot be read again. See docs/decisions/0017.
#![allow(unsafe_code)]

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, Mmap, MmapOptions};
use rustix::fs::Advice::WillNeed;

use super::copy_with_crc32c;

/// What this process copied out of mappings.
static COPIED: AtomicU64 = AtomicU64::new(0);

/// Bytes that this process copied out of files' mappings so far: /proc/self/io counts those of read(2) alone.
pub fn mapped_bytes() -> u64 {
    COPIED.load(Ordering::Relaxed)
}

/// A range of a file, mapped; unmapped on drop.
#[derive(Debug)]
pub struct FileMapping {
    map: Mmap,
    /// Which bytes of the file are mapped.
    range: Range<u64>,
    was_cached: bool,
}

impl FileMapping {
    /// Maps `range` of `file`, which is copied next, and has the kernel read all of it; `None` where it does not. What is
    /// not at hand is asked for as a whole before: by the faults of a mapping a disk is asked for one huge page at a time.
    pub fn new(file: &File, range: Range<u64>) -> Option<Self> {
        let length =
            usize::try_from(range.end.checked_sub(range.start)?).ok().filter(|length| *length > 0)?;
        // SAFETY: read-only. What another program writes to the file meanwhile changes what is copied, no more; for what
        // happens when it cuts the file off see the top.
        let map = unsafe { MmapOptions::new().offset(range.start).len(length).map(file).ok()? };
        // Huge pages are a wish: a refusal changes nothing but speed.
        let _ = map.advise(Advice::HugePage);
        let was_cached = ends_are_cached(&map);
        if !was_cached {
            let _ = rustix::fs::fadvise(file, range.start, NonZeroU64::new(length as u64), WillNeed);
        }
        map.advise(Advice::PopulateRead).ok()?;
        Some(Self { map, range, was_cached })
    }

    /// Whether it seems to have been in memory before it was mapped.
    pub fn was_cached(&self) -> bool {
        self.was_cached
    }

    /// Copies the file's bytes from `offset` on to `target` and gives their CRC-32C, even where the file is written
    /// meanwhile; `None` where they are not mapped.
    pub fn copy_with_crc32c(&self, offset: u64, target: &mut [u8]) -> Option<u32> {
        let start = usize::try_from(offset.checked_sub(self.range.start)?).ok()?;
        let source = self.map.get(start..start.checked_add(target.len())?)?;
        COPIED.fetch_add(target.len() as u64, Ordering::Relaxed);
        Some(copy_with_crc32c(source, target))
    }
}

/// Whether the first page of a mapping and the last are in memory; also where the kernel does not tell.
fn ends_are_cached(map: &Mmap) -> bool {
    // SAFETY: it asks for a number that every system has.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    // A mapping begins at a page, but memmap2 gives it from where it was asked for.
    let first = map.as_ptr().map_addr(|address| address & !(page - 1));
    let last = map.as_ptr().map_addr(|address| (address + map.len() - 1) & !(page - 1));
    [first, last].into_iter().all(|start| {
        let mut is_cached = 1u8;
        // SAFETY: the page is one of the mapping's, and the kernel writes one byte for it.
        let refused = unsafe { libc::mincore(start.cast_mut().cast(), page, &mut is_cached) } != 0;
        refused || is_cached & 1 == 1
    })
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
        let range = 4097..bytes.len() as u64;
        let mapping = FileMapping::new(&file, range.clone()).expect("mapped");
        for (start, length) in [(4097, 1), (4098, 300_000), (304_098, 4_000_000), (5000, 0), (4_999_999, 2)] {
            let mut target = vec![0; length];
            let crc32c = mapping.copy_with_crc32c(start as u64, &mut target).expect("copied");
            assert!(target == bytes[start..start + length], "{length} bytes from {start}");
            assert_eq!(crc32c, forebay_core::crc32c(&target));
        }
        for (start, length) in [(0, 10), (4096, 1), (5_000_000, 2), (u64::MAX, 1)] {
            assert!(mapping.copy_with_crc32c(start, &mut vec![0; length]).is_none(), "{start} is not mapped");
        }
        assert!(FileMapping::new(&file, 4096..4096).is_none());
    }

    #[test]
    fn what_is_not_in_memory_is_known() {
        let file = tempfile::tempfile().expect("file");
        file.set_len(12 << 20).expect("grow");
        file.write_all_at(&[1; 8 << 20], 0).expect("write");
        // What was written is there, what never was is not, and then it is.
        let map = |range: Range<u64>| {
            // SAFETY: nobody cuts the file off.
            unsafe {
                MmapOptions::new().offset(range.start).len((range.end - range.start) as usize).map(&file)
            }
            .expect("mapped")
        };
        assert!(ends_are_cached(&map(0..8 << 20)) && ends_are_cached(&map(4097..4098)));
        assert!(!ends_are_cached(&map(0..12 << 20)) && !ends_are_cached(&map(9 << 20..10 << 20)));
        let is_cached = |range| FileMapping::new(&file, range).expect("mapped").was_cached();
        assert!(!is_cached(1..12 << 20) && is_cached(1..12 << 20));
        assert!(ends_are_cached(&map(0..12 << 20)) && ends_are_cached(&map(9 << 20..10 << 20)));
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
