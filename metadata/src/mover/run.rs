//! The mover's task and what its parts share.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::object::Bucket;
use forebay_io::rng::Rng;
use forebay_io::task::{Stop, TaskGroup};
use futures::future::FutureExt;
use tokio::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::time::Instant;
use tracing::{debug, error, warn};

use super::doubts::Doubts;
use crate::commit::{Committer, Txn};
use crate::import::Importer;
use crate::kv::Durability;
use crate::records::{Change, Look, Pages, Shared, is_about_a_record, owned_key};

/// Records looked at under one turn.
pub(super) const PAGE: usize = 256;
/// Objects moved or deleted at once.
pub(super) const AT_ONCE: usize = 16;
/// How long the mover rests when nobody wakes it: what failed is tried again then.
const REST: Duration = Duration::from_secs(30);
/// Passes of one drain. Each does all there is, so more only serves what waits for something else.
const MOST_PASSES: usize = 16;

/// Works the queues off; cheap to clone.
#[derive(Clone)]
pub(crate) struct Mover(Arc<Inner>);

struct Inner {
    /// Changes nothing while another host may have the volume: copies and deletions have no condition that would keep them
    /// from what that one writes. The last moment at which one is sent, or sent again, is the end of the lease as this
    /// host knows it, and half a second later none is waited for. Others take the volume a tenth of a lease, 1.5 s, later.
    bucket: Bucket,
    committer: Committer,
    shared: Arc<Shared>,
    importer: Importer,
    rng: Rng,
    tasks: TaskGroup,
    stop: Stop,
    /// Whoever looks at a plain object and then changes it holds this meanwhile: copies, which claim what they write, side
    /// by side, all others alone.
    turn: Arc<RwLock<()>>,
    /// Held by whoever plans copies and makes them.
    moving: Mutex<()>,
    doubts: Doubts,
    /// Whether the store has refused to copy in parts, or to check a condition for them.
    lacks_part_copy: AtomicBool,
}

/// What a pass came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Records that are gone, or make way for others.
    pub(crate) done: usize,
    /// Records whose work failed.
    pub(crate) failed: usize,
}

impl Tally {
    /// Counts the outcome of some work: how many records are gone.
    pub(super) fn add(&mut self, outcome: Result<usize>) {
        match outcome {
            Ok(done) => self.done += done,
            Err(error) => {
                self.failed += 1;
                warn!(%error, "put off");
            }
        }
    }

    /// Counts in what was counted elsewhere.
    pub(super) fn join(&mut self, other: Self) {
        self.done += other.done;
        self.failed += other.failed;
    }

    /// The same, where the others go on unless it failed for more than what its record says.
    pub(super) fn pass_over(&mut self, outcome: Result<usize>) -> Result<()> {
        match outcome {
            Err(error) if !is_about_a_record(&error) => return Err(error),
            outcome => self.add(outcome),
        }
        Ok(())
    }
}

/// The stages of a pass, of which each goes on where another failed for what it alone met.
#[derive(Debug, Default)]
struct Pass {
    tally: Tally,
    /// Why the first stage failed that did.
    failed: Option<Error>,
}

impl Pass {
    /// Counts a stage.
    ///
    /// # Errors
    /// Where the next ones would wait in vain.
    fn add(&mut self, stage: Result<Tally>) -> Result<()> {
        match stage {
            Ok(tally) => self.tally.join(tally),
            Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
            Err(error) => {
                self.failed.get_or_insert(error);
            }
        }
        Ok(())
    }
}

impl Mover {
    pub(crate) fn new(
        bucket: Bucket,
        committer: Committer,
        shared: Arc<Shared>,
        importer: Importer,
        rng: Rng,
        tasks: TaskGroup,
    ) -> Self {
        let (stop, turn, moving) = (tasks.stop(), Arc::default(), Mutex::default());
        let sure = committer.clone();
        let bucket = bucket.guarded(move || sure.expect_sure());
        let (doubts, lacks_part_copy) = (Doubts::default(), AtomicBool::new(false));
        Self(Arc::new(Inner {
            bucket,
            committer,
            shared,
            importer,
            rng,
            tasks,
            stop,
            turn,
            moving,
            doubts,
            lacks_part_copy,
        }))
    }

    /// Starts the task that works whenever there is something to do.
    pub(crate) fn start(&self) {
        let mover = self.clone();
        self.0.tasks.spawn("mover", async move {
            let mut has_panicked = false;
            loop {
                // Stops between pages; a page ends by itself, when the store has had its time for it.
                // It is woken from within a transaction, and the next one runs once that is applied.
                let applied = mover.transact(Durability::Buffered, |_| Ok(())).await;
                let passed = mover.pass_unless_panic(&mut has_panicked).await;
                if let Err(error) = applied.and(passed) {
                    warn!(%error, "the mover rests");
                }
                let shared = mover.shared();
                tokio::select! {
                    () = mover.0.stop.cancelled() => return,
                    () = shared.work.notified() => {}
                    () = shared.clock.sleep(REST) => {}
                }
            }
        });
    }

    /// Works until nothing is left that can be done now.
    pub(crate) async fn drain(&self) -> Result<()> {
        for _ in 0..MOST_PASSES {
            let tally = self.pass().await?;
            debug!(done = tally.done, failed = tally.failed, "drained");
            if tally.done == 0 {
                break;
            }
        }
        Ok(())
    }

    /// The same as [`Self::pass`] where a panic does not end the task: else nothing would be moved, deleted or freed any more.
    /// What a pass holds is let go of as it unwinds, and the next one begins with what the records say. Told once.
    async fn pass_unless_panic(&self, has_panicked: &mut bool) -> Result<Tally> {
        match AssertUnwindSafe(self.pass()).catch_unwind().await {
            Ok(passed) => {
                *has_panicked = false;
                passed
            }
            Err(panic) => {
                if !std::mem::replace(has_panicked, true) {
                    let said = panic_text(&*panic);
                    error!(said, "a pass of the mover panicked; it is tried again whenever it has rested");
                }
                self.doubt_copies().await.map(|()| Tally::default())
            }
        }
    }

    /// Looks at everything once. Files are moved in turns, between which all else has its own: what lies below a large directory may
    /// take hours.
    async fn pass(&self) -> Result<Tally> {
        let (mut pass, mut walked, mut next) = (Pass::default(), None, None);
        loop {
            pass.add(self.settle_doubts().await)?;
            pass.add(self.settle_abandoned().await)?;
            pass.add(self.free_unfinished().await)?;
            pass.add(self.purge_trash().await)?;
            pass.add(self.delete_due().await)?;
            // One that cannot be listed now has all others walked once more, which is much for each turn.
            let renames = self.shared().subtree_moves.load(Ordering::SeqCst);
            if walked.replace(renames) != Some(renames) {
                pass.add(self.walk_subtrees().await)?;
            }
            let moved = self.move_files(next.take()).await;
            pass.add(moved.map(|(tally, left)| {
                next = left;
                tally
            }))?;
            pass.tally.add(self.bucket().end_unanswered().await);
            if next.is_none() {
                return pass.failed.map_or(Ok(pass.tally), Err);
            }
        }
    }

    /// Whether the tree is being closed: what is left is done after the next start.
    pub(crate) fn is_stopping(&self) -> bool {
        self.0.stop.is_cancelled()
    }

    pub(crate) fn bucket(&self) -> &Bucket {
        &self.0.bucket
    }

    pub(crate) fn committer(&self) -> &Committer {
        &self.0.committer
    }

    pub(super) fn shared_arc(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0.shared
    }

    /// A way through the records, resting `pause` after each page.
    pub(crate) fn pages(&self, pause: Duration) -> Pages<'_> {
        let shared = &self.0.shared;
        Pages { committer: &self.0.committer, keys: shared.keys, clock: &shared.clock, pause }
    }

    pub(super) fn importer(&self) -> &Importer {
        &self.0.importer
    }

    /// A key for a new owned blob.
    pub(crate) fn fresh_key(&self) -> ObjectKey {
        owned_key(self.0.shared.session, &self.0.rng.name())
    }

    /// The turn of one who is alone then. An async guard, so it may be held over requests to the store.
    pub(super) async fn turn(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.turn.write().await
    }

    /// The turn of one who copies. Not to be taken again by one who has it.
    pub(super) async fn copying_turn(&self) -> RwLockReadGuard<'_, ()> {
        self.0.turn.read().await
    }

    /// The right to plan copies.
    pub(super) async fn moving(&self) -> MutexGuard<'_, ()> {
        self.0.moving.lock().await
    }

    pub(super) fn doubts(&self) -> &Doubts {
        &self.0.doubts
    }

    pub(super) fn lacks_part_copy(&self) -> &AtomicBool {
        &self.0.lacks_part_copy
    }

    /// Does `work` alone. It goes on by itself when it has not come to its end `until` then: `None`. Nothing is done if the
    /// turn has not come by then.
    pub(super) async fn alone_until<T: Send + 'static>(
        &self,
        until: Instant,
        name: &'static str,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<Option<T>> {
        let turn = tokio::time::timeout_at(until, self.0.turn.clone().write_owned()).await;
        let Ok(turn) = turn else { return Ok(None) };
        let task = self.0.tasks.spawn(name, async move {
            let _turn = turn;
            work.await
        });
        match tokio::time::timeout_at(until, task).await {
            Ok(done) => done?.map(Some),
            Err(_) => Ok(None),
        }
    }

    pub(crate) async fn look<T>(&self, mut work: impl FnMut(&Look<'_, '_>) -> Result<T> + Send) -> Result<T> {
        self.0.committer.read(|view| work(&Look::new(view, &self.0.shared))).await
    }

    pub(crate) async fn transact<T: Send + 'static>(
        &self,
        durability: Durability,
        mut work: impl FnMut(&mut Change<'_, '_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let shared = self.0.shared.clone();
        let closure = move |txn: &mut Txn<'_>| {
            let mut change = Change::new(txn, &shared);
            let value = work(&mut change)?;
            Ok((value, std::mem::take(&mut change.outside)))
        };
        let (value, told) = self.0.committer.transact(durability, closure).await?;
        // Nobody asked for it, this process's own mount neither.
        told.into_iter().for_each(|change| self.0.shared.outside.tell(change));
        Ok(value)
    }
}

/// What a panic said.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("nothing")
}
