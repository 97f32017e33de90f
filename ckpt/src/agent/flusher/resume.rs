//! What an earlier start left on this host's disk alone, on its way to the store.

use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};

use super::{Flusher, disk_hangs};
use crate::agent::flush::{Given, Save};
use crate::agent::patience::GIVE_UP_AFTER;
use crate::agent::source::{Disk, Source};
use crate::agent::{Origin, Reply};
use crate::arena::{HeldStep, attempt_of};
use crate::local::{Local, LocalTier};

impl Flusher {
    /// Brings a step of an earlier start to the bucket, out of the copy on this host's disk: its own agents ended before
    /// they could. It is committed as that start's, as they would have.
    pub(super) async fn resume(&mut self) {
        let Some((tier, step)) =
            self.hello.local.as_ref().and_then(|tier| Some((tier, tier.resumes.clone()?)))
        else {
            return;
        };
        match self.try_to_resume(tier, &step).await {
            Ok(uploaded) => {
                tracing::info!(step = step.step, uploaded, "durable, out of the local disk");
                self.mark_durable(step);
            }
            Err(error) => {
                let message = format!("step {} stays on the local disk alone: {error}", step.step);
                self.trainer.tell(&Reply::Warning { message });
            }
        }
        if let Some(copies) = &self.copies {
            copies.resumed();
        }
        self.trainer.tell(&Reply::Resumed);
    }

    async fn try_to_resume(&self, tier: &LocalTier, step: &HeldStep) -> Result<u64> {
        let mut heir = Self::new(self.hello.clone(), self.trainer.clone(), None);
        (heir.clock, heir.heir_of) = (self.clock.clone(), Some(step.start.clone()));
        heir.origin = Some(Origin { attempt: attempt_of(&step.start).to_owned(), step: step.step });
        let (rank, world_size) = self.hello.place();
        let read = async { Local::open(&tier.directory).await?.part(step, rank, world_size).await };
        let part = tokio::select! {
            part = read => part,
            () = self.clock.sleep(GIVE_UP_AFTER) => Err(Error::new(ErrorKind::Unavailable, disk_hangs(GIVE_UP_AFTER))),
        };
        let flushed = match part {
            Ok((held, shard)) => {
                let source = Source::Disk(Disk::new(shard, self.clock.clone()));
                heir.flush(&Save::new(Arc::new(held), source, Given::Left)).await
            }
            Err(error) => heir.open().await.and(Err(error)),
        };
        if let Err(error) = &flushed {
            heir.give_up(step.step, None, &error.to_string()).await;
        }
        flushed
    }
}
