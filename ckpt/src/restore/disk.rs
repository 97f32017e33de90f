//! Copies on this host's disk, which may hang: then they are left, for a tier that answers.
//!
//! What a thread reads that hangs in the kernel cannot be called back. Each piece is therefore read into memory of the
//! thread that reads it, and copied from there once it has arrived; what arrives too late goes with its thread.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::object::Bucket;
use forebay_io::task;
use futures::stream::{self, BoxStream, StreamExt};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::local::PATIENCE;

/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;
/// Pieces of a request that are read ahead of what is copied.
const AHEAD: usize = 2;

/// A disk with copies, as one restore reads it.
pub(super) struct Disk<'a> {
    pub(super) runtime: &'a Handle,
    pub(super) bucket: &'a Bucket,
    clock: &'a Clock,
    /// When it last gave something.
    answered: Mutex<Moment>,
    hangs: AtomicBool,
    /// Memory of pieces that were copied.
    free: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl<'a> Disk<'a> {
    /// A disk that has just answered.
    pub(super) fn new(runtime: &'a Handle, bucket: &'a Bucket, clock: &'a Clock) -> Self {
        let answered = Mutex::new(clock.now());
        Self { runtime, bucket, clock, answered, hangs: AtomicBool::new(false), free: Arc::default() }
    }

    /// Whether it was given up.
    pub(super) fn hangs(&self) -> bool {
        self.hangs.load(Ordering::SeqCst)
    }

    /// It is asked for something again, after a time when it was not.
    pub(super) fn go_on(&self) {
        *self.answered.lock() = self.clock.now();
    }

    /// Waits for something of the disk, as long as it gives anything to anyone of this restore: pieces are small, so that a
    /// large state is a reason to wait for more of them, not to wait longer for one.
    ///
    /// # Errors
    /// `Unavailable` where it hangs.
    pub(super) async fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let mut work = pin!(work);
        loop {
            let until = *self.answered.lock() + PATIENCE;
            tokio::select! {
                biased;
                done = &mut work => {
                    *self.answered.lock() = self.clock.now();
                    return Ok(done);
                }
                () = self.clock.sleep_until(until) => {
                    if *self.answered.lock() + PATIENCE <= self.clock.now() {
                        self.hangs.store(true, Ordering::SeqCst);
                        let seconds = PATIENCE.as_secs();
                        let message = format!("the local disk did not answer for {seconds} s");
                        return Err(Error::new(ErrorKind::Unavailable, message));
                    }
                }
            }
        }
    }

    /// The bytes of a range of an object, in order.
    pub(super) async fn body(
        &self,
        key: &ObjectKey,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes>>> {
        if !self.bucket.reads_in_place() {
            return self.wait(self.bucket.get_stream(key, None, range)).await?;
        }
        let (bucket, key, free) = (self.bucket.clone(), key.clone(), self.free.clone());
        let Range { start, end } = range;
        let open = task::blocking(move || {
            let file = bucket.open_in_place(&key)?;
            file.announce(start..end);
            Ok(Arc::new(file))
        });
        let file = self.wait(open).await?.flatten()?;
        let read = move |at: u64| {
            let (file, free) = (file.clone(), free.clone());
            let read = move || {
                let mut data = free.lock().pop().unwrap_or_default();
                data.resize(PIECE.min(end - at) as usize, 0);
                let mut memory = Memory { data, free };
                file.read_at(at, &mut memory.data).map(|()| Bytes::from_owner(memory))
            };
            async move { task::blocking(read).await.flatten() }
        };
        Ok(stream::iter((start..end).step_by(PIECE as usize).map(read)).buffered(AHEAD).boxed())
    }
}

/// A piece, whose memory is used again.
struct Memory {
    data: Vec<u8>,
    free: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.free.lock().push(std::mem::take(&mut self.data));
    }
}

#[cfg(test)]
mod tests;
