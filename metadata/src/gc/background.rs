//! The rounds that a tree does by itself, slowly.

use std::time::Duration;

use forebay_io::task::TaskGroup;
use tracing::warn;

use super::Collector;
use crate::mover::Mover;

/// Starts the task that looks for what dead sessions left, now and then.
pub(crate) fn start(mover: &Mover, tasks: &TaskGroup) {
    let settings = mover.shared().settings.gc.clone();
    if settings.interval_ms == 0 || !settings.is_only_tree {
        return;
    }
    let (mover, stop) = (mover.clone(), tasks.stop());
    tasks.spawn("gc", async move {
        let mut rest = Duration::from_millis(settings.first_ms);
        loop {
            let clock = &mover.shared().clock;
            tokio::select! {
                () = stop.cancelled() => return,
                () = clock.sleep(rest) => {}
            }
            rest = Duration::from_millis(settings.interval_ms);
            let pause = Duration::from_millis(settings.pause_ms);
            let collector = Collector { mover: &mover, pause, dry_run: false };
            // A round can be cut off anywhere: what it queued is durable or found again.
            if let Some(Err(error)) = stop.run_until_cancelled(collector.collect()).await {
                warn!(%error, "gc put off");
            }
        }
    });
}
