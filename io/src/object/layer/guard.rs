//! Sends changes only while this process may make them, which is asked right before each attempt.
//!
//! Below the retries and the wait for a place, so that neither sends anything later than that. An attempt that is under way
//! when the right goes is given up within [`LOOK`]: its connection is not waited for any longer. What the store has by then
//! it may still carry out.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use object_store::Result;

use crate::object::error::Fault;
use crate::object::request::{Reply, Request, Service, Shared};

/// Between two questions while an attempt is under way. Less than the tenth of a lease, 1.5 s, that passes between its end
/// and the moment at which another may take the volume.
const LOOK: Duration = Duration::from_millis(500);

/// Says whether changes may be made at this moment; asked often, so it must not wait.
#[derive(Clone)]
pub(in crate::object) struct Guard(
    pub(in crate::object) Arc<dyn Fn() -> forebay_core::Result<()> + Send + Sync>,
);

impl fmt::Debug for Guard {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("Guard")
    }
}

#[derive(Debug)]
pub(in crate::object) struct Guarded {
    pub(in crate::object) next: Shared,
    pub(in crate::object) guard: Guard,
}

#[async_trait]
impl Service for Guarded {
    async fn call(&self, request: Request) -> Result<Reply> {
        if !request.is_write() {
            return self.next.call(request).await;
        }
        if let Err(cause) = (self.guard.0)() {
            return Err(Fault::Withheld { cause: cause.to_string() }.into());
        }
        let begun = tokio::time::Instant::now();
        let mut call = pin!(self.next.call(request));
        loop {
            tokio::select! {
                biased;
                reply = &mut call => return reply,
                () = tokio::time::sleep(LOOK) => {}
            }
            if (self.guard.0)().is_err() {
                // Tried again, it is withheld, unless the right is back.
                return Err(Fault::Stalled { waited_ms: begun.elapsed().as_millis() as u64 }.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use bytes::Bytes;
    use forebay_core::{Error, ErrorKind, ObjectKey};
    use tokio::time::Instant;

    use crate::object::{Bucket, Condition, FaultMode, Faults, OperationKind, is_withheld};

    use super::*;

    /// A bucket with an object, the same behind faults and a right that can be taken away, and that right.
    async fn guarded(faults: &Faults) -> (Bucket, Bucket, ObjectKey, Arc<AtomicBool>) {
        let (bucket, key) = (Bucket::in_memory(), ObjectKey::new("k"));
        bucket.put(&key, Bytes::from_static(b"1"), Condition::Always).await.expect("put");
        let may = Arc::new(AtomicBool::new(true));
        let asked = may.clone();
        let guarded = bucket.with_faults(faults).guarded(move || match asked.load(Relaxed) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Unavailable, "the lease has lapsed")),
        });
        (bucket, guarded, key, may)
    }

    /// A deletion that waited for the store was sent when it answered again: another host had the volume by then.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_sent_again_once_it_may_not_be() {
        let faults = Faults::new();
        let (bucket, guarded, key, may) = guarded(&faults).await;
        faults.set_down(true);
        let lapse = async {
            tokio::time::sleep(Duration::from_secs(10)).await;
            may.store(false, Relaxed);
            tokio::time::sleep(Duration::from_secs(1)).await;
            faults.set_down(false);
        };
        let (deleted, ()) = tokio::join!(guarded.delete(&key), lapse);
        let error = deleted.expect_err("withheld");
        assert!(error.kind() == ErrorKind::Unavailable && !is_withheld(&error), "it was sent: {error}");
        assert!(bucket.head(&key).await.expect("head").is_some(), "it is there");
        let error = guarded.delete(&key).await.expect_err("withheld");
        assert!(error.kind() == ErrorKind::Unavailable && is_withheld(&error), "{error}");
        assert!(error.to_string().contains("the lease has lapsed"), "{error}");
        assert!(guarded.head(&key).await.expect("reads go on").is_some());
        may.store(true, Relaxed);
        guarded.delete(&key).await.expect("deleted");
        assert!(bucket.head(&key).await.expect("head").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_for_an_answer_is_given_up_once_it_may_not_be_made() {
        let faults = Faults::new();
        let (_, guarded, key, may) = guarded(&faults).await;
        faults.script(OperationKind::Delete, 1, FaultMode::Hang);
        let begun = Instant::now();
        let lapse = async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            may.store(false, Relaxed);
        };
        let (deleted, ()) = tokio::join!(guarded.delete(&key), lapse);
        assert!(!is_withheld(&deleted.expect_err("given up")));
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }
}
