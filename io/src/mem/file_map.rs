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
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, Mmap, MmapOptions};

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
}

impl FileMapping {
    /// Maps `range` of `file`, which is copied next, and has the kernel read all of it; `None` where it does not.
    pub fn new(file: &File, range: Range<u64>) -> Option<Self> {
        let length =
            usize::try_from(range.end.checked_sub(range.start)?).ok().filter(|length| *length > 0)?;
        // SAFETY: read-only. What another program writes to the file meanwhile changes what is copied, no more; for what
        // happens when it cuts the file off see the top.
        let map = unsafe { MmapOptions::new().offset(range.start).len(length).map(file).ok()? };
        // Huge pages are a wish: a refusal changes nothing but speed.
        let _ = map.advise(Advice::HugePage);
        map.advise(Advice::PopulateRead).ok()?;
        Some(Self { map, range })
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
