//! That a save is under way, told for as long as it is: garbage collection, other starts and the job's other ranks go by
//! that.

use std::convert::Infallible;
use std::time::Duration;

use forebay_core::Result;
use forebay_io::clock::{Clock, Moment};
use forebay_io::object::Bucket;

use super::{StepKey, forget_notes, put_alive};

/// How often it is told: several times within what the others wait for, and many times before anything is garbage. Most
/// saves are done before the first time.
pub(crate) const EVERY: Duration = Duration::from_secs(150);

/// Who tells that a rank's part of a save goes on.
#[derive(Debug)]
pub(crate) struct Alive {
    clock: Clock,
    bucket: Bucket,
    save: StepKey,
    rank: u32,
    /// When to tell it next.
    due: Moment,
    is_told: bool,
}

impl Alive {
    /// The save begins now.
    pub(crate) fn new(clock: Clock, bucket: Bucket, save: StepKey, rank: u32) -> Self {
        let due = clock.now() + EVERY;
        Self { clock, bucket, save, rank, due, is_told: false }
    }

    /// Whether it was told: then it is to be taken back once the save is over.
    pub(crate) fn is_told(&self) -> bool {
        self.is_told
    }

    /// Does a piece of the work, and tells meanwhile that it goes on.
    pub(crate) async fn during<T>(&mut self, work: impl Future<Output = T>) -> T {
        // Many pieces that are done at once take long as well.
        if self.clock.now() >= self.due {
            self.tell().await;
        }
        let tell = async {
            loop {
                self.clock.sleep_until(self.due).await;
                self.tell().await;
            }
        };
        tokio::select! {
            done = work => done,
            never = tell => { let never: Infallible = never; match never {} }
        }
    }

    /// Takes back what was told.
    pub(crate) async fn forget(&self) -> Result<()> {
        match self.is_told {
            true => forget_notes(&self.bucket, std::slice::from_ref(&self.save), self.rank).await,
            false => Ok(()),
        }
    }

    /// Tells it now.
    pub(crate) async fn tell(&mut self) {
        self.is_told = true;
        if let Err(error) = put_alive(&self.bucket, self.save.clone(), self.rank).await {
            tracing::warn!(step = self.save.step, %error, "others were not told that a save goes on");
        }
        self.due = self.clock.now() + EVERY;
    }
}
