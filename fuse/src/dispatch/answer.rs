//! Where a request is worked on.
//!
//! A worker thread of the FUSE session takes each request as far as it goes without waiting, which for most of them
//! is to the end, and so without any switch of threads. What has to wait moves, with its reply, to a task. Tasks are
//! bounded: at the bound the worker waits, the kernel's queue grows, and callers slow down. Its last request does not wait
//! with it, so there are as many more as there are workers. So it waits, too, before it takes the bytes of one more WRITE
//! than there may wait for memory: what brings about that there is some again is under way without further requests.
//!
//! A panic ends one request only: its reply is dropped, and a dropped reply answers EIO.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use forebay_core::InodeId;
use forebay_io::task::TaskGroup;
use tokio::runtime::Handle as Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tracing::{debug, error, warn};

/// Requests in waiting. The kernel sends at most its background limit (128) plus one for each blocked thread.
const WAITING_MAX: u32 = 1024;
/// Bytes of WRITEs that may wait in any mount: those of 64 that are as large as can be.
const BODIES_LEAST: u64 = 64 << 20;
/// What one permit for them stands for.
const PERMIT_BYTES: u64 = 1 << 10;
/// Requests for locks, which wait for other programs, however long, and so in none of the places of all others.
const LOCKS_MAX: usize = 1024;
/// How long those may take to end with the mount.
const LOCKS_DEADLINE: Duration = Duration::from_secs(1);

/// Works on requests.
#[derive(Debug, Clone)]
pub(crate) struct Answerer {
    runtime: Runtime,
    tasks: TaskGroup,
    waiting: Arc<Semaphore>,
    bodies: Arc<Semaphore>,
    locking: TaskGroup,
    locks: Arc<Semaphore>,
}

/// A place for the bytes of one WRITE, given back when dropped.
pub(crate) type Body = OwnedSemaphorePermit;

impl Answerer {
    /// Waiting requests become tasks of `runtime`; those that wait to be written bring no more than the `write_bytes` that may
    /// be in memory of what is written, or 64 MiB.
    pub(crate) fn new(runtime: Runtime, write_bytes: u64) -> Self {
        let bodies = write_bytes.max(BODIES_LEAST) / PERMIT_BYTES;
        Self {
            runtime,
            tasks: TaskGroup::new("fuse"),
            waiting: Arc::new(Semaphore::new(WAITING_MAX as usize)),
            bodies: Arc::new(Semaphore::new(bodies.min(Semaphore::MAX_PERMITS as u64) as usize)),
            locking: TaskGroup::new("locks"),
            locks: Arc::new(Semaphore::new(LOCKS_MAX)),
        }
    }

    /// A place for a WRITE of so many bytes, which the worker waits for: there is none while too many wait for memory.
    pub(crate) fn body(&self, bytes: usize) -> Body {
        // A request is far smaller than the least that all may bring.
        let permits = (bytes as u64).min(BODIES_LEAST).div_ceil(PERMIT_BYTES) as u32;
        match self.bodies.clone().try_acquire_many_owned(permits) {
            Ok(body) => body,
            Err(_) => {
                debug!("as much as may wait to be written waits");
                let acquire = self.bodies.clone().acquire_many_owned(permits);
                self.runtime.block_on(acquire).expect("the semaphore is never closed")
            }
        }
    }

    /// Works on a request of kind `operation`; `work` ends with its reply.
    pub(crate) fn run<F>(&self, operation: &'static str, ino: InodeId, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let _entered = self.runtime.enter();
        if let Some(work) = begin(operation, ino, work) {
            self.hand_over(operation, ino, work);
        }
    }

    /// A place for a request for a lock, unless all are taken.
    pub(crate) fn lock_place(&self) -> Option<OwnedSemaphorePermit> {
        self.locks.clone().try_acquire_owned().ok()
    }

    /// Works on a request that has a place of [`Self::lock_place`].
    pub(crate) fn run_lock<F>(
        &self,
        operation: &'static str,
        ino: InodeId,
        place: OwnedSemaphorePermit,
        work: F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let _entered = self.runtime.enter();
        let Some(work) = begin(operation, ino, work) else { return };
        let stop = self.locking.stop();
        self.locking.spawn(operation, async move {
            stop.run_until_cancelled(go_on(operation, ino, work)).await;
            drop(place);
        });
    }

    /// Gives up what waits for locks: the mount has ended, and nobody is there who waits.
    pub(crate) async fn end_waits(&self) {
        self.locking.shutdown(LOCKS_DEADLINE).await;
    }

    /// Goes on with `work` as a task; polled again there, it leaves the task's waker instead of the first one.
    fn hand_over<F>(&self, operation: &'static str, ino: InodeId, work: Pin<Box<F>>)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (give, place) = oneshot::channel();
        // First, and without a place: it may have a lock already that those wait for who have the places.
        self.tasks.spawn(operation, async move {
            go_on(operation, ino, work).await;
            drop(place);
        });
        let permit = match self.waiting.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                debug!("every place for waiting requests is taken");
                let acquire = self.waiting.clone().acquire_owned();
                self.runtime.block_on(acquire).expect("the semaphore is never closed")
            }
        };
        // Comes back by itself where the task has ended.
        drop(give.send(permit));
    }

    /// Returns when no request waits any more, or after `deadline`.
    pub(crate) async fn drain(&self, deadline: Duration) {
        if tokio::time::timeout(deadline, self.waiting.acquire_many(WAITING_MAX)).await.is_err() {
            warn!("requests still waited when the mount ended");
        }
    }
}

/// Takes work as far as it goes without waiting; what is left of it.
fn begin<F>(operation: &'static str, ino: InodeId, work: F) -> Option<Pin<Box<F>>>
where
    F: Future<Output = ()>,
{
    debug!(operation, %ino, "request");
    let mut work: Pin<Box<F>> = Box::pin(work);
    let step = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(&mut Context::from_waker(Waker::noop()))));
    match step {
        Ok(Poll::Ready(())) => None,
        Ok(Poll::Pending) => Some(work),
        Err(_) => {
            error!(operation, %ino, "a request panicked and answers EIO");
            None
        }
    }
}

/// Brings it to its end.
async fn go_on(operation: &'static str, ino: InodeId, work: impl Future<Output = ()>) {
    if futures::FutureExt::catch_unwind(AssertUnwindSafe(work)).await.is_err() {
        error!(operation, %ino, "a request panicked and answers EIO");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const INO: InodeId = InodeId::ROOT;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("runtime")
    }

    #[test]
    fn work_that_need_not_wait_ends_on_the_calling_thread() {
        let runtime = runtime();
        let answerer = Answerer::new(runtime.handle().clone(), 0);
        let (sender, receiver) = std::sync::mpsc::channel();
        answerer.run("test", INO, async move {
            sender.send(std::thread::current().id()).expect("send");
        });
        assert_eq!(receiver.try_recv(), Ok(std::thread::current().id()));
    }

    #[test]
    fn work_that_waits_moves_to_a_task_and_drain_awaits_it() {
        let runtime = runtime();
        let answerer = Answerer::new(runtime.handle().clone(), 0);
        let done = Arc::new(AtomicUsize::new(0));
        let (go, gate) = tokio::sync::watch::channel(false);
        for _ in 0..10 {
            let (mut gate, done) = (gate.clone(), done.clone());
            answerer.run("test", INO, async move {
                gate.wait_for(|open| *open).await.expect("gate");
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        assert_eq!(done.load(Ordering::SeqCst), 0);
        go.send(true).expect("gate");
        runtime.block_on(answerer.drain(Duration::from_secs(60)));
        assert_eq!(done.load(Ordering::SeqCst), 10);
    }

    /// Work that finds all places taken may have a lock already that those who have them wait for: it waited for a place,
    /// and they for the lock.
    #[test]
    fn work_goes_on_while_its_worker_waits_for_a_place() {
        let runtime = runtime();
        let answerer = Answerer::new(runtime.handle().clone(), 0);
        let taken = answerer.waiting.clone().try_acquire_many_owned(WAITING_MAX).expect("all places");
        let (sender, ended) = std::sync::mpsc::channel();
        let own = answerer.clone();
        let worker = std::thread::spawn(move || {
            for number in 0..2 {
                let sender = sender.clone();
                own.run("test", INO, async move {
                    tokio::task::yield_now().await;
                    sender.send(number).expect("send");
                });
            }
        });
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(0), "it ends without a place");
        assert!(!worker.is_finished(), "who sends more than there are places for slows down");
        assert!(ended.try_recv().is_err());
        drop(taken);
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(1));
        worker.join().expect("the worker goes on");
        runtime.block_on(answerer.drain(Duration::from_secs(60)));
        assert_eq!(answerer.waiting.available_permits(), WAITING_MAX as usize);
    }

    /// A thousand of them held a gibibyte, whatever the mount's memory.
    #[test]
    fn what_waits_to_be_written_is_bounded_in_bytes_and_stops_nothing_else() {
        let runtime = runtime();
        let answerer = Answerer::new(runtime.handle().clone(), 0);
        let (go, gate) = tokio::sync::watch::channel(false);
        let (sender, taken) = std::sync::mpsc::channel();
        let own = answerer.clone();
        let worker = std::thread::spawn(move || {
            for number in 0..66 {
                let (body, mut gate) = (own.body(1 << 20), gate.clone());
                sender.send(number).expect("send");
                own.run("write", INO, async move {
                    gate.wait_for(|open| *open).await.expect("gate");
                    drop(body);
                });
            }
        });
        for number in 0..64 {
            assert_eq!(taken.recv_timeout(Duration::from_secs(60)), Ok(number));
        }
        assert!(taken.recv_timeout(Duration::from_millis(50)).is_err(), "the next one waits with its bytes");
        let (sender, ended) = std::sync::mpsc::channel();
        answerer.run("flush", INO, async move {
            tokio::task::yield_now().await;
            sender.send(()).expect("send");
        });
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(()), "others are worked on");
        go.send(true).expect("gate");
        for number in 64..66 {
            assert_eq!(taken.recv_timeout(Duration::from_secs(60)), Ok(number));
        }
        worker.join().expect("the worker goes on");
        runtime.block_on(answerer.drain(Duration::from_secs(60)));
        assert_eq!(answerer.bodies.available_permits() as u64, BODIES_LEAST / PERMIT_BYTES);
    }

    /// Those of other requests stay free, and what waits for locks is given up with the mount.
    #[test]
    fn locks_are_waited_for_in_places_of_their_own() {
        let runtime = runtime();
        let answerer = Answerer::new(runtime.handle().clone(), 0);
        let reply = Arc::new(());
        for _ in 0..LOCKS_MAX {
            let (place, held) = (answerer.lock_place().expect("there is one"), reply.clone());
            answerer.run_lock("test", INO, place, async move {
                let _held = held;
                std::future::pending().await
            });
        }
        assert!(answerer.lock_place().is_none());
        assert_eq!(answerer.waiting.available_permits(), WAITING_MAX as usize);
        runtime.block_on(answerer.drain(Duration::from_secs(60)));
        assert_eq!(Arc::strong_count(&reply), LOCKS_MAX + 1);
        runtime.block_on(answerer.end_waits());
        assert_eq!((Arc::strong_count(&reply), answerer.locks.available_permits()), (1, LOCKS_MAX));
    }

    /// A dropped value stands for the reply: it must be dropped, so that EIO goes out, and the next request served.
    #[test]
    fn a_panic_drops_the_reply_and_nothing_else() {
        let runtime = runtime();
        let answerer = Answerer::new(runtime.handle().clone(), 0);
        let reply = Arc::new(());
        for waits in [false, true] {
            let held = reply.clone();
            answerer.run("test", INO, async move {
                let _held = held;
                if waits {
                    tokio::task::yield_now().await;
                }
                panic!("a request that panics");
            });
        }
        runtime.block_on(answerer.drain(Duration::from_secs(60)));
        assert_eq!(Arc::strong_count(&reply), 1);
    }
}
