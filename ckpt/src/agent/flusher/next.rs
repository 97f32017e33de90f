//! The saves that wait for what an agent is at: a job's other ranks are told meanwhile that they go on, and the trainer what is
//! wanted no more.

use std::collections::VecDeque;
use std::convert::Infallible;

use forebay_io::clock::Clock;
use forebay_io::object::Bucket;
use tokio::sync::mpsc;

use super::anew::tell_abandoned;
use super::{Flusher, Save, Trainer, Work};
use crate::catalog::{Alive, Run};

/// Who is told, of a job of several ranks.
pub(super) struct Others {
    clock: Clock,
    bucket: Bucket,
    run: Run,
    rank: u32,
}

impl Others {
    /// Tells them that a save goes on.
    fn tell(&self, save: &Save) -> Alive {
        let Self { clock, bucket, run, rank } = self;
        Alive::new(clock.clone(), bucket.clone(), run.save(save.held.seal.step), *rank)
    }
}

/// What comes next, as far as it was looked for.
pub(super) struct Next<'a> {
    queue: &'a mut mpsc::UnboundedReceiver<Work>,
    trainer: Trainer,
    taken: VecDeque<Work>,
}

impl<'a> Next<'a> {
    pub(super) fn new(queue: &'a mut mpsc::UnboundedReceiver<Work>, trainer: Trainer) -> Self {
        Self { queue, trainer, taken: VecDeque::new() }
    }

    pub(super) async fn work(&mut self) -> Option<Work> {
        loop {
            self.let_go();
            match self.taken.pop_front() {
                Some(work) => return Some(work),
                None => self.taken.push_back(self.queue.recv().await?),
            }
        }
    }

    /// Does what comes before it.
    pub(super) async fn after<T>(&mut self, work: impl Future<Output = T>, others: Option<Others>) -> T {
        tokio::select! {
            done = work => done,
            never = self.look_ahead(others) => match never {},
        }
    }

    async fn look_ahead(&mut self, others: Option<Others>) -> Infallible {
        let mut alive: Option<Alive> = None;
        loop {
            if self.let_go() {
                alive = None;
            }
            if let (None, Some(others), Some(Work::Save(save))) = (&alive, &others, self.taken.front()) {
                alive = Some(others.tell(save));
            }
            let waits = async {
                match &mut alive {
                    Some(alive) => alive.during(std::future::pending()).await,
                    None => std::future::pending().await,
                }
            };
            let taken = &self.taken;
            let is_taken = |save| taken.iter().any(|work| work.is_save(|taken| taken == save));
            tokio::select! {
                () = self.trainer.abandoned(is_taken) => {}
                Some(work) = self.queue.recv() => self.taken.push_back(work),
                never = waits => match never {},
            }
        }
    }

    /// Tells of each save that nobody wants any more that it will not be; whether there was one.
    fn let_go(&mut self) -> bool {
        let Self { taken, trainer, .. } = self;
        let (goes, stays): (VecDeque<Work>, VecDeque<Work>) = std::mem::take(taken)
            .into_iter()
            .partition(|work| work.is_save(|save| trainer.is_abandoned(save)));
        *taken = stays;
        let is_any = !goes.is_empty();
        for work in goes {
            if let Work::Save(save) = work {
                tell_abandoned(trainer, save);
            }
        }
        is_any
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
