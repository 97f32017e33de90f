//! Whether a start may still commit: no later one took over from it. Uploads and waits take hours, so that what was heard when
//! they began is asked again before the commit.

use std::time::Duration;

use forebay_core::Result;
use forebay_io::clock::{Clock, Moment};
use forebay_io::object::Bucket;

use super::trainer::Trainer;
use crate::catalog::{Run, refuse_if_superseded};

/// For how long an answer holds. Most saves over a link take less, and wait for no second one; in others two requests are
/// a small part.
const FRESH: Duration = Duration::from_secs(5);

/// One try's leave to save.
pub(super) struct Leave<'a> {
    pub(super) clock: &'a Clock,
    pub(super) bucket: &'a Bucket,
    pub(super) run: &'a Run,
    /// Where it is dead, what it sealed was promised: no step can follow.
    pub(super) trainer: &'a Trainer,
    /// The save, which may be one that its own trainer left for another start.
    save: u64,
    /// Of a start that is over anyway.
    is_heir: bool,
    asked: Option<Moment>,
}

impl<'a> Leave<'a> {
    pub(super) fn new(
        clock: &'a Clock,
        (bucket, run): (&'a Bucket, &'a Run),
        trainer: &'a Trainer,
        save: u64,
        is_heir: bool,
    ) -> Self {
        Self { clock, bucket, run, trainer, save, is_heir, asked: None }
    }

    /// Asks whether the start may commit.
    ///
    /// # Errors
    /// `Stale` when a later one took over.
    pub(super) async fn ask(&mut self) -> Result<()> {
        if self.is_heir || self.trainer.is_gone() || self.trainer.has_left(self.save) {
            return Ok(());
        }
        let asked = self.clock.now();
        refuse_if_superseded(self.bucket, self.run).await?;
        self.asked = Some(asked);
        Ok(())
    }

    /// Asks again, where that was long ago.
    pub(super) async fn renew(&mut self) -> Result<()> {
        match self.asked {
            Some(asked) if self.clock.now().since(asked) <= FRESH => Ok(()),
            _ => self.ask().await,
        }
    }
}
