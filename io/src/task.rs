//! Tasks: named, owned, and joined at shutdown.
//!
//! Owns every spawn in Forebay. A group knows its tasks by name and its child groups; shutting a group down tells
//! all of them to stop through their [`Stop`], waits up to a deadline, cancels what is left and names it. A panic
//! in a task is logged and given to whoever awaits the handle, never lost.
#![allow(clippy::disallowed_methods, reason = "the one place that spawns")]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Tells a task that its group is shutting down; cheap to clone.
pub type Stop = CancellationToken;

/// How long a thread that hangs in the kernel keeps a process that has nothing else to do.
const LEAVE: Duration = Duration::from_secs(1);

/// Ends a runtime whose work is done. Threads that hang are left to themselves; all others are joined: to detach one in the
/// moment in which it ends may crash the process (glibc bug 19951, "Use after free in pthread_detach").
pub fn end(runtime: Runtime) {
    runtime.shutdown_timeout(LEAVE);
}

/// A group of tasks with one owner; clones are the same group.
#[derive(Debug, Clone)]
pub struct TaskGroup {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    stop: Stop,
    tracker: TaskTracker,
    live: Mutex<Live>,
}

#[derive(Debug, Default)]
struct Live {
    next: u64,
    /// Without a handle while it is being spawned.
    tasks: BTreeMap<u64, (Cow<'static, str>, Option<AbortHandle>)>,
    children: Vec<TaskGroup>,
}

impl TaskGroup {
    /// A group of its own, the root of a shutdown tree.
    pub fn new(name: impl Into<String>) -> Self {
        Self::with_stop(name.into(), Stop::new())
    }

    /// A group that is stopped and joined with this one.
    pub fn child(&self, name: &str) -> Self {
        let child = Self::with_stop(format!("{}/{name}", self.inner.name), self.inner.stop.child_token());
        let mut live = self.inner.live.lock();
        // Children that were shut down and dropped by everyone else are forgotten here, so the list stays bounded.
        live.children.retain(|child| Arc::strong_count(&child.inner) > 1 || !child.inner.tracker.is_empty());
        live.children.push(child.clone());
        child
    }

    fn with_stop(name: String, stop: Stop) -> Self {
        let tracker = TaskTracker::new();
        Self { inner: Arc::new(Inner { name, stop, tracker, live: Mutex::default() }) }
    }

    /// What tasks of this group watch to know that they must end.
    pub fn stop(&self) -> Stop {
        self.inner.stop.clone()
    }

    /// Runs `future` as a task of this group. Dropping the handle does not stop it.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn spawn<F>(&self, name: impl Into<Cow<'static, str>>, future: F) -> Task<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let name = name.into();
        // Listed before it runs, so that it cannot leave the list before it is in it. No lock is held over the spawn: a
        // runtime that ends drops the future right there.
        let id = {
            let mut live = self.inner.live.lock();
            let id = live.next;
            live.next += 1;
            live.tasks.insert(id, (name.clone(), None));
            id
        };
        let leave = Leave { inner: self.inner.clone(), id };
        let handle = self.inner.tracker.spawn(async move {
            let _leave = leave;
            future.await
        });
        if let Some((_, abort)) = self.inner.live.lock().tasks.get_mut(&id) {
            *abort = Some(handle.abort_handle());
        }
        Task { name, handle }
    }

    /// Runs blocking code on a thread of its own, as a task of this group that shutdown waits for but cannot cancel.
    pub fn blocking<T, F>(&self, name: impl Into<Cow<'static, str>>, work: F) -> Task<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        Task { name: name.into(), handle: self.inner.tracker.spawn_blocking(work) }
    }

    /// Names of the tasks that still run, children included.
    pub fn running(&self) -> Vec<String> {
        let live = self.inner.live.lock();
        let own = live.tasks.values().map(|(name, _)| format!("{}/{name}", self.inner.name));
        own.chain(live.children.iter().flat_map(Self::running)).collect()
    }

    /// Tells every task to stop, waits until all have ended or `deadline` has passed, and cancels the rest.
    /// Returns the names of those that had to be cancelled.
    pub async fn shutdown(&self, deadline: Duration) -> Vec<String> {
        self.inner.stop.cancel();
        if tokio::time::timeout(deadline, self.join()).await.is_ok() {
            return Vec::new();
        }
        let late = self.running();
        tracing::warn!(group = %self.inner.name, ?late, "tasks did not end before the deadline");
        self.abort();
        late
    }

    /// Waits until every task of this group and its children has ended.
    fn join(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            let children = self.inner.live.lock().children.clone();
            for child in &children {
                child.join().await;
            }
            self.inner.tracker.close();
            self.inner.tracker.wait().await;
            self.inner.tracker.reopen();
        })
    }

    fn abort(&self) {
        let live = self.inner.live.lock();
        live.tasks.values().filter_map(|(_, handle)| handle.as_ref()).for_each(AbortHandle::abort);
        live.children.iter().for_each(Self::abort);
    }
}

/// Takes a task off its group's list when it ends, however it ends.
struct Leave {
    inner: Arc<Inner>,
    id: u64,
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.inner.live.lock().tasks.remove(&self.id);
    }
}

/// A handle on a running task; awaiting it gives its result, dropping it lets it run on.
#[derive(Debug)]
pub struct Task<T> {
    name: Cow<'static, str>,
    handle: tokio::task::JoinHandle<T>,
}

impl<T> Task<T> {
    /// Cancels the task at its next await.
    pub fn abort(&self) {
        self.handle.abort();
    }

    /// Whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T>;

    /// `Bug` when the task panicked, `Unavailable` when it was cancelled by a shutdown. Cancel-safe.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.handle).poll(context).map(|joined| {
            joined.map_err(|error| {
                let name = &self.name;
                if error.is_panic() {
                    tracing::error!(task = %name, %error, "task panicked");
                    return Error::bug(format!("task `{name}` panicked")).with_source(error);
                }
                Error::new(ErrorKind::Unavailable, format!("task `{name}` was cancelled by shutdown"))
            })
        })
    }
}

/// Whether the calling thread may wait for a disk: it runs no task, so that it is a thread of its owner's own.
pub fn may_block() -> bool {
    tokio::task::try_id().is_none()
}

/// Runs blocking code off the async workers and waits for it. Not cancel-safe: dropping the future leaves the work
/// running to its end.
pub async fn blocking<T, F>(work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    let joined = tokio::task::spawn_blocking(work).await;
    joined.map_err(|error| Error::bug("blocking work panicked").with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn shutdown_stops_and_joins_the_whole_tree() {
        let root = TaskGroup::new("root");
        let child = root.child("child");
        for group in [&root, &child] {
            let stop = group.stop();
            group.spawn("waiter", async move { stop.cancelled().await });
        }
        assert_eq!(root.running(), ["root/waiter", "root/child/waiter"]);
        assert!(root.shutdown(Duration::from_secs(5)).await.is_empty());
        assert!(root.running().is_empty());
    }

    /// Spawning from the drop of a future that a runtime drops at its end hung that runtime.
    #[test]
    fn a_runtime_that_ends_may_be_spawned_on() {
        struct Spawns(TaskGroup);
        impl Drop for Spawns {
            fn drop(&mut self) {
                self.0.spawn("late", async {});
            }
        }
        let group = TaskGroup::new("root");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        let spawns = Spawns(group.clone());
        runtime.block_on(async {
            tokio::spawn(async move {
                let _spawns = spawns;
                std::future::pending::<()>().await;
            });
            tokio::task::yield_now().await;
        });
        drop(runtime);
        assert!(group.running().is_empty());
    }

    #[tokio::test]
    async fn shutdown_cancels_and_names_what_does_not_stop() {
        let root = TaskGroup::new("root");
        let stuck = root.child("child").spawn("stuck", std::future::pending::<()>());
        assert_eq!(root.shutdown(Duration::from_millis(20)).await, ["root/child/stuck"]);
        assert_eq!(stuck.await.expect_err("cancelled").kind(), ErrorKind::Unavailable);
    }

    #[tokio::test]
    async fn a_panic_reaches_whoever_waits() {
        let group = TaskGroup::new("root");
        let error = group.spawn("bad", async { panic!("on purpose") }).await.expect_err("panic");
        assert_eq!(error.kind(), ErrorKind::Bug);
        assert!(error.message().contains("bad"), "{error}");
        assert_eq!(blocking(|| 7).await.expect("value"), 7);
    }
}
