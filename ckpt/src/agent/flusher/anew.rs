//! A start's place in the bucket, and that of another one of the same trainer, once the job went back to an earlier step: what was
//! sealed up to there is brought to the bucket as that start's, in its turn, and what came after it is let go of at once.

use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::{Bucket, BucketUrl, Rate, StoreSettings};

use super::Flusher;
use crate::agent::copy::{Copy, Settled};
use crate::agent::flush::Save;
use crate::agent::remains::Remains;
use crate::agent::together::pauses;
use crate::agent::trainer::Trainer;
use crate::agent::{Hello, Member, Origin, Reply};
use crate::catalog::{KnownShards, Run, Start, begin_run_unless, find_run, find_run_of_job};

/// How long other ranks wait for rank 0 before a person is told.
const QUIET: Duration = Duration::from_secs(60);

impl Flusher {
    /// Opens the bucket and takes an incarnation.
    pub(super) async fn open(&mut self) -> Result<()> {
        let url: BucketUrl = self.hello.url.parse()?;
        let mut bucket = Bucket::open(&url, &StoreSettings::default()).await?;
        if let Some(bytes_per_second) = self.hello.flush_rate {
            bucket = bucket.with_rate(&Rate::new(bytes_per_second, self.clock.clone()));
        }
        let run = match (&self.heir_of, &self.hello.member) {
            (Some(start), _) => {
                let absent = || Error::new(ErrorKind::NotFound, format!("{url} never heard of its start"));
                find_run(&bucket, start).await?.ok_or_else(absent)?
            }
            (None, Some(Member { run, .. })) if run.is_begun() => run.clone(),
            (None, member) => {
                // A trainer that died, or went back a while ago, may have a successor, here or elsewhere.
                let (hello, trainer) = (&self.hello, &self.trainer);
                let is_late = || trainer.is_gone() || hello.is_back;
                let is_over = |newest: &Run| is_late() && hello.is_outrun_by(newest);
                let (start, seen) = (hello.start.clone(), hello.seen.unwrap_or(0));
                match member {
                    Some(member) if member.rank > 0 => {
                        self.await_run_of_job(&bucket, member.world_size, &start, seen, is_over).await?
                    }
                    _ => begin_run_unless(&bucket, start, Some(seen), is_over).await?,
                }
            }
        };
        self.hello.member.iter_mut().for_each(|member| member.run = run.clone());
        if !run.conditional {
            let message = format!("{url} ignores conditional puts: make sure that only one job saves there");
            self.trainer.tell(&Reply::Warning { message });
        }
        self.target = Some((bucket, run));
        Ok(())
    }

    /// Waits for what rank 0's agent records once the saves before it are settled there.
    async fn await_run_of_job(
        &self,
        bucket: &Bucket,
        world_size: u32,
        start: &Start,
        seen: u64,
        is_over: impl Fn(&Run) -> bool,
    ) -> Result<Run> {
        let (begun, mut rests) = (self.clock.now(), pauses(world_size));
        loop {
            if let Some(run) = find_run_of_job(bucket, start, seen, &is_over).await? {
                return Ok(run);
            }
            if self.clock.now().since(begun) > QUIET {
                return Err(Error::new(ErrorKind::Unavailable, "rank 0 did not begin in the store yet"));
            }
            self.clock.sleep(rests.next().unwrap_or(QUIET)).await;
        }
    }

    /// Goes on as another start, from an earlier step of this one's; every save of this one is settled.
    pub(super) async fn begin_anew(&mut self, hello: Hello, origin: Origin, local: Option<Copy>) {
        // Before it takes its number, which makes the copies of others stale.
        if let Some(local) = local
            && let Settled::Hangs(patience) = local.settled(&self.clock).await
        {
            self.trainer.tell(&Reply::Warning { message: super::disk_hangs(patience) });
        }
        self.hello = hello;
        (self.target, self.base, self.origin) = (None, None, Some(origin));
        // What the former one stored of steps that are none is left to garbage collection, as by an agent that ends.
        (self.known, self.remains) = (KnownShards::default(), Remains::default());
        // What fails here fails again, and is told, at the first save.
        self.open().await.ok();
    }
}

/// Tells that nothing goes on with a save which nobody wants any more, once that is so.
pub(super) fn tell_abandoned(trainer: &Trainer, abandoned: Save) {
    let (save, step) = (abandoned.number(), abandoned.held.seal.step);
    drop(abandoned);
    let message = format!("step {step} was not saved: the job went back to an earlier step before");
    tracing::info!(step, "not saved: the job went back to an earlier step");
    let error = Error::new(ErrorKind::Unavailable, message);
    trainer.tell(&Reply::Failed { save, error: (&error).into() });
}
