//! How the body of a request gets on, told by who sends it to who waits for the answer.
//!
//! Between the two lies object_store, which passes nothing on: the way is the task that both run in.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::Notify;

tokio::task_local! {
    static WATCHER: Progress;
}

/// Tells of each piece of a body that was taken; clones tell the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress(Arc<Notify>);

impl Progress {
    /// Runs `call`, which finds this as [`Progress::of_call`].
    pub(super) async fn watch<T>(&self, call: impl Future<Output = T>) -> T {
        WATCHER.scope(self.clone(), call).await
    }

    /// That of the call which this runs in, if somebody watches it.
    pub(super) fn of_call() -> Option<Self> {
        WATCHER.try_with(Self::clone).ok()
    }

    /// One more piece was taken.
    pub(super) fn tell(&self) {
        self.0.notify_one();
    }

    /// Waits until one was, since this was asked last.
    pub(super) async fn made(&self) {
        self.0.notified().await;
    }
}
