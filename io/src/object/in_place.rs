//! Objects of a directory, read by a thread that may wait, straight into memory.
//!
//! The way through requests moves each byte twice more: into a buffer of its own, on another thread, and out of it.
//! Large reads from a disk of this host go through a mapping, so that bytes are copied and checksummed in one pass.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forebay_core::checksum::combine;
use forebay_core::{Error, ErrorKind, ObjectKey, Result};

use super::counters::Meter;
use super::{Bucket, OperationKind};
use crate::files::is_local;
use crate::mem::FileMapping;

/// Bytes that are read at once where they are not mapped: what fits the cache of one core.
const READ: usize = 256 << 10;
/// Reads of fewer bytes are not mapped: from the disk the kernel takes huge pages of 2 MiB then, and the one behind.
const LEAST_MAPPED: u64 = 4 << 20;
/// An object of a directory, open. What is read may be of two versions if somebody writes the file in place meanwhile:
/// callers check it.
#[derive(Debug)]
pub struct InPlace {
    file: File,
    size: u64,
    /// What is read next, where that is worth it.
    mapping: Option<FileMapping>,
    key: ObjectKey,
    meter: Arc<Meter>,
}

impl Bucket {
    /// Whether [`Bucket::open_in_place`] does: where the bucket is a directory, and no test has put anything before it.
    pub fn reads_in_place(&self) -> bool {
        self.folder().is_some()
    }

    /// Opens an object for [`InPlace::copy_at`]; counts as one GET. Blocks.
    ///
    /// # Errors
    /// `NotFound`, `Denied`; `Unsupported` where the bucket is no directory.
    pub fn open_in_place(&self, key: &ObjectKey) -> Result<InPlace> {
        let no_directory = || Error::new(ErrorKind::Unsupported, "only files are read in place");
        let root = self.folder().ok_or_else(no_directory)?;
        let path = root.join(self.path(key)?.as_ref());
        let meter = self.meter().clone();
        meter.request(OperationKind::Get);
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        match opened {
            Ok((metadata, file)) if metadata.is_file() => {
                Ok(InPlace { file, size: metadata.len(), mapping: None, key: key.clone(), meter })
            }
            refused => {
                meter.failure(OperationKind::Get);
                let error =
                    refused.err().map_or_else(|| Error::new(ErrorKind::NotFound, "no file"), Error::from);
                Err(error.context(format!("object {key}")))
            }
        }
    }
}

impl InPlace {
    /// Says that `range`, of some MiB at most, is read next, so that the disk begins with it. Returns whether it has to: large
    /// ranges have been read by then.
    pub fn expect(&mut self, range: Range<u64>) -> bool {
        self.mapping = None;
        let length = range.end.saturating_sub(range.start);
        if length >= LEAST_MAPPED && range.end <= self.size && is_local(&self.file) {
            self.mapping = FileMapping::new(&self.file, range.clone());
            if let Some(mapping) = &self.mapping {
                return !mapping.was_cached();
            }
        }
        self.announce(range);
        false
    }

    /// Says that `range` is read next by [`InPlace::read_at`].
    pub fn announce(&self, range: Range<u64>) {
        let length = std::num::NonZeroU64::new(range.end.saturating_sub(range.start));
        // Advice: where it is not taken, reading is slower.
        let _ = rustix::fs::fadvise(&self.file, range.start, length, rustix::fs::Advice::WillNeed);
    }

    /// Fills `buffer` with the bytes from `offset` on, and gives their CRC-32C. Blocks.
    ///
    /// # Errors
    /// `Invalid` when the object ends before; what the disk says.
    pub fn copy_at(&self, offset: u64, buffer: &mut [u8]) -> Result<u32> {
        let mapped = self.mapping.as_ref().and_then(|mapping| mapping.copy_with_crc32c(offset, buffer));
        if let Some(crc32c) = mapped {
            self.meter.bytes(OperationKind::Get, buffer.len() as u64);
            return Ok(crc32c);
        }
        let (mut at, mut sum) = (offset, forebay_core::crc32c(&[]));
        for piece in buffer.chunks_mut(READ) {
            self.read_at(at, piece)?;
            sum = combine(sum, forebay_core::crc32c(piece), piece.len() as u64);
            at += piece.len() as u64;
        }
        Ok(sum)
    }

    /// Fills `buffer` with the bytes from `offset` on, by read(2). Blocks.
    ///
    /// # Errors
    /// `Invalid` when the object ends before; what the disk says.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|error| {
            self.meter.failure(OperationKind::Get);
            match error.kind() {
                std::io::ErrorKind::UnexpectedEof => Error::invalid(format!(
                    "{} ends {} bytes after {offset} or before",
                    self.key,
                    buffer.len()
                )),
                _ => Error::from(error).context(format!("reading object {}", self.key)),
            }
        })?;
        self.meter.bytes(OperationKind::Get, buffer.len() as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::object::{BucketUrl, Condition, Faults, StoreSettings};

    #[tokio::test]
    async fn objects_of_a_directory_are_read_in_place_and_counted() {
        let directory = tempfile::tempdir().expect("directory");
        let url: BucketUrl = format!("file://{}", directory.path().display()).parse().expect("url");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
        let key = ObjectKey::new("a/b");
        bucket.put(&key, Bytes::from_static(b"0123456789"), Condition::Always).await.expect("put");
        let before = bucket.counters();
        let mut open = bucket.open_in_place(&key).expect("opened");
        let mut buffer = [0; 4];
        open.expect(0..10);
        assert_eq!(open.copy_at(3, &mut buffer).expect("read"), forebay_core::crc32c(b"3456"));
        assert_eq!(&buffer, b"3456");
        let error = open.copy_at(8, &mut buffer).expect_err("too short");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let missing = bucket.open_in_place(&ObjectKey::new("a/c")).expect_err("missing");
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        let folder = bucket.open_in_place(&ObjectKey::new("a")).expect_err("a folder is no object");
        assert_eq!(folder.kind(), ErrorKind::NotFound);
        let gets = bucket.counters().since(&before).of(OperationKind::Get);
        assert_eq!((gets.requests, gets.failures, gets.bytes), (3, 3, 4));
        let troubled = bucket.with_faults(&Faults::default());
        assert!(bucket.reads_in_place() && !troubled.reads_in_place(), "faults lie on the way of requests");
        assert!(!Bucket::in_memory().reads_in_place());
        let unsupported = troubled.open_in_place(&key).expect_err("by requests only");
        assert_eq!(unsupported.kind(), ErrorKind::Unsupported);
    }

    /// Whether it is mapped or read makes no difference to what is found; a file that was cut off is told.
    #[tokio::test]
    async fn large_reads_are_mapped_and_give_the_same() {
        let directory = tempfile::tempdir().expect("directory");
        let url: BucketUrl = format!("file://{}", directory.path().display()).parse().expect("url");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
        let key = ObjectKey::new("large");
        let bytes: Vec<u8> = (0..9_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        bucket.put(&key, Bytes::from(bytes.clone()), Condition::Always).await.expect("put");
        let before = bucket.counters();
        let mut open = bucket.open_in_place(&key).expect("opened");
        open.expect(4097..9_000_000);
        assert_eq!(open.mapping.is_some(), is_local(&open.file), "mapped where that is safe");
        assert!(!open.expect(4097..9_000_000), "it is in memory");
        let mut buffer = vec![0; 5_000_000];
        // The last one is not what was expected.
        for start in [4097, 3_999_999, 5] {
            let crc32c = open.copy_at(start as u64, &mut buffer).expect("read");
            assert!(buffer == bytes[start..start + buffer.len()], "from {start}");
            assert_eq!(crc32c, forebay_core::crc32c(&buffer));
        }
        let gets = bucket.counters().since(&before).of(OperationKind::Get);
        assert_eq!((gets.requests, gets.bytes), (1, 15_000_000));
        let path = directory.path().join("large");
        File::options().write(true).open(path).and_then(|file| file.set_len(5_000_000)).expect("cut");
        open.expect(0..9_000_000);
        let error = open.copy_at(4_000_000, &mut buffer).expect_err("cut off");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}
