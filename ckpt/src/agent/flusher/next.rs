//! The save that waits for what an agent is at: a job's other ranks are told meanwhile that it goes on.

use std::convert::Infallible;

use forebay_io::clock::Clock;
use forebay_io::object::Bucket;
use tokio::sync::mpsc;

use super::{Flusher, Work};
use crate::catalog::{Alive, Run};

/// Who is told, of a job of several ranks.
pub(super) struct Others {
    clock: Clock,
    bucket: Bucket,
    run: Run,
    rank: u32,
}

/// What comes next, as far as it was looked for.
pub(super) struct Next<'a> {
    queue: &'a mut mpsc::UnboundedReceiver<Work>,
    taken: Option<Work>,
}

impl<'a> Next<'a> {
    pub(super) fn new(queue: &'a mut mpsc::UnboundedReceiver<Work>) -> Self {
        Self { queue, taken: None }
    }

    pub(super) async fn work(&mut self) -> Option<Work> {
        match self.taken.take() {
            Some(work) => Some(work),
            None => self.queue.recv().await,
        }
    }

    /// Does what comes before it.
    pub(super) async fn after<T>(&mut self, work: impl Future<Output = T>, others: Option<Others>) -> T {
        let Some(Others { clock, bucket, run, rank }) = others else { return work.await };
        let tells = async {
            if self.taken.is_none() {
                self.taken = self.queue.recv().await;
            }
            if let Some(Work::Save(save)) = &self.taken {
                let mut alive = Alive::new(clock, bucket, run.save(save.held.seal.step), rank);
                alive.during(std::future::pending::<()>()).await;
            }
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            done = work => done,
            never = tells => match never {},
        }
    }
}

impl Flusher {
    /// The job's other ranks, as soon as it is known where they look.
    pub(super) fn others(&self) -> Option<Others> {
        let (bucket, run) = self.target.clone()?;
        let rank = self.hello.member.as_ref()?.rank;
        Some(Others { clock: self.clock.clone(), bucket, run, rank })
    }
}
