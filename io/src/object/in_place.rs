//! Objects of a directory, read by a thread that may wait, straight into memory.
//!
//! The way through requests moves each byte twice more: into a buffer of its own, on another thread, and out of it.

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use rustix::fs::Advice;

use super::backend::open_object;
use super::counters::Meter;
use super::{Bucket, OperationKind};

/// An object of a directory, open. What is read may be of two versions if somebody writes the file in place meanwhile:
/// callers check it.
#[derive(Debug)]
pub struct InPlace {
    file: File,
    key: ObjectKey,
    meter: Arc<Meter>,
}

impl Bucket {
    /// Whether [`Bucket::open_in_place`] does: where the bucket is a directory, and no test has put anything before it.
    pub fn reads_in_place(&self) -> bool {
        self.folder().is_some()
    }

    /// Opens an object for [`InPlace::read_at`]; counts as one GET. Blocks.
    ///
    /// # Errors
    /// `NotFound`, `Denied`; `Unsupported` where the bucket is no directory.
    pub fn open_in_place(&self, key: &ObjectKey) -> Result<InPlace> {
        let no_directory = || Error::new(ErrorKind::Unsupported, "only files are read in place");
        let root = self.folder().ok_or_else(no_directory)?;
        let path = root.join(self.path(key)?.as_ref());
        let meter = self.meter().clone();
        meter.request(OperationKind::Get);
        match open_object(&path) {
            Ok((file, _)) => Ok(InPlace { file, key: key.clone(), meter }),
            Err(error) => {
                meter.failure(OperationKind::Get);
                Err(Error::from(error).context(format!("object {key}")))
            }
        }
    }
}

impl InPlace {
    /// Says that `range` is read next, so that the disk begins with it.
    pub fn announce(&self, range: Range<u64>) {
        let length = NonZeroU64::new(range.end.saturating_sub(range.start));
        // Advice: where it is not taken, reading is slower.
        let _ = rustix::fs::fadvise(&self.file, range.start, length, Advice::WillNeed);
    }

    /// Fills `buffer` with the bytes from `offset` on. Blocks.
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
        let open = bucket.open_in_place(&key).expect("opened");
        let mut buffer = [0; 4];
        open.announce(0..10);
        open.read_at(3, &mut buffer).expect("read");
        assert_eq!(&buffer, b"3456");
        let error = open.read_at(8, &mut buffer).expect_err("too short");
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
}
