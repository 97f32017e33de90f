//! Bounds the bytes sent a second, by all handles that share the bound.
//!
//! Bodies start one after another, each as long after the one before as that one takes at the rate. So over any time no more
//! is sent than the rate allows, and one body. What is sent again counts again.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use object_store::Result;
use parking_lot::Mutex;

use crate::clock::{Clock, Moment};
use crate::object::request::{Reply, Request, Service, Shared};

/// A bound on the bytes sent a second; clones share it.
#[derive(Debug, Clone)]
pub struct Rate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    bytes_per_second: NonZeroU64,
    clock: Clock,
    /// When the next body may start.
    next: Mutex<Moment>,
}

impl Rate {
    /// So many bytes a second, as `clock` counts.
    pub fn new(bytes_per_second: NonZeroU64, clock: Clock) -> Self {
        let next = Mutex::new(clock.now());
        Self(Arc::new(Inner { bytes_per_second, clock, next }))
    }

    /// Waits until a body of so many bytes may be sent.
    async fn pass(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let Inner { bytes_per_second, clock, next } = &*self.0;
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second.get());
        let takes = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let start = {
            let mut next = next.lock();
            let start = clock.now().max(*next);
            *next = start + takes;
            start
        };
        clock.sleep_until(start).await;
    }
}

#[derive(Debug)]
pub(in crate::object) struct Rated {
    pub(in crate::object) next: Shared,
    pub(in crate::object) rate: Rate,
}

#[async_trait]
impl Service for Rated {
    async fn call(&self, request: Request) -> Result<Reply> {
        self.rate.pass(request.sent_bytes()).await;
        self.next.call(request).await
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use forebay_core::ObjectKey;

    use super::*;
    use crate::object::{Bucket, Condition, OperationKind, UploadOptions};

    const MIB: u64 = 1 << 20;

    /// Lets everything run that is not waiting for the clock.
    async fn settle() {
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn parts_side_by_side_and_other_handles_share_one_rate() {
        let (plain, clock) = (Bucket::in_memory(), Clock::manual());
        let rate = Rate::new(NonZeroU64::new(2 * MIB).expect("more than none"), clock.clone());
        let (one, other) = (plain.with_rate(&rate), plain.with_rate(&rate));
        let upload = async {
            let options = UploadOptions { part_bytes: Some(6 * MIB), ..UploadOptions::default() };
            let mut upload = one.upload_with(&ObjectKey::new("large"), options).expect("upload");
            upload.write(Bytes::from(vec![7; 24 << 20])).await.expect("write");
            upload.complete(Condition::Always).await.expect("complete")
        };
        let put = async {
            other.put(&ObjectKey::new("small"), Bytes::from(vec![1; 2 << 20]), Condition::Always).await
        };
        let sent = || {
            let counters = plain.counters();
            counters.of(OperationKind::Part).bytes + counters.of(OperationKind::Put).bytes
        };
        let work = async { tokio::join!(upload, put) };
        tokio::pin!(work);
        let mut done = None;
        for second in 0..=12 {
            tokio::select! {
                biased;
                (stored, put) = &mut work => {
                    assert_eq!((stored.size, put.expect("put").size), (24 * MIB, 2 * MIB));
                    done = Some(second);
                    break;
                }
                () = settle() => {}
            }
            assert!(sent() <= second * 2 * MIB + 6 * MIB, "{} bytes after {second} s", sent());
            clock.advance(Duration::from_secs(1));
        }
        assert_eq!(sent(), 26 * MIB);
        assert!(
            done.is_some_and(|second| second >= 10),
            "no sooner and no later than the rate has it: {done:?}"
        );
        // What only reads or has no body does not wait.
        assert_eq!(one.get_whole(&ObjectKey::new("large")).await.expect("get").0.len(), 24 << 20);
        one.delete(&ObjectKey::new("small")).await.expect("delete");
    }
}
