//! The task that flushes: a save at a time, in the order of sealing, each tried until it is settled.
//!
//! A trainer that was superseded commits nothing more. Once the trainer is dead, no step can follow the sealed ones, and
//! they are finished even so: they were promised. What cannot be, its successor on this host tells.

#[cfg(test)]
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::object::Bucket;
#[cfg(test)]
use forebay_io::object::{BucketUrl, Rate, StoreSettings};
use tokio::sync::mpsc;

use super::base::Base;
use super::copy::{Copy, Settled};
use super::disk::Copies;
use super::flush::{
    Given, MOST_BEGUN_ANEW, Outcome, Save, Stored, commit_alone, discard, find_gone, publish, store,
};
use super::heir::Standing;
use super::leave::Leave;
use super::patience::Patience;
use super::protocol::now_us;
use super::remains::Remains;
use super::replicas::Shelf;
#[cfg(test)]
use super::source::Source;
use super::sweep::Sweeper;
use super::together::Together;
use super::trainer::Trainer;
use super::{Hello, Origin, Reply, Seal};
use crate::arena::HeldStep;
#[cfg(test)]
use crate::catalog::begin_run;
use crate::catalog::{
    Alive, DELETED_HINT, KnownShards, Part, Round, Run, StepKey, deleted, put_failed, remove_part, retain,
    saved_already, superseded_by,
};
#[cfg(test)]
use crate::local::{Local, LocalTier};
use crate::manifest::Manifest;

mod anew;
mod next;
mod notes;
mod resume;

use anew::tell_abandoned;
use next::Next;

/// What the flusher is to do, in order.
pub(super) enum Work {
    Save(Save),
    /// What follows goes on from this step.
    GoOn(Origin),
    /// What follows is another start's, once the copies on this host's disk are.
    BeginAnew {
        hello: Box<Hello>,
        origin: Origin,
        local: Option<Copy>,
    },
    GiveUp {
        step: u64,
        round: Option<Round>,
        reason: String,
    },
}

impl Work {
    /// Whether it is one of the saves that this `is`.
    fn is_save(&self, is: impl Fn(u64) -> bool) -> bool {
        matches!(self, Self::Save(save) if is(save.number()))
    }
}

/// How far a save has come.
#[derive(Default)]
struct Progress {
    stored: Option<Stored>,
    /// When that was begun.
    begun: Option<Moment>,
    /// Tells that it goes on, from when it was begun until it is stored.
    alive: Option<Alive>,
    is_published: bool,
    /// Whether a commit was tried whose outcome is not known.
    may_be_committed: bool,
    /// Whether all that it refers to was seen since it was stored. Nobody is told of it before.
    is_seen: bool,
    /// How often its upload was begun anew.
    begun_anew: u32,
    /// Whether it was stored a second time, since something of the first was gone.
    is_stored_anew: bool,
    /// Whether something was noted for the first.
    had_notes: bool,
    /// Whether it was tried to store it as what changed since another step, which it notes first.
    may_be_noted: bool,
    /// How far it is with other ranks' parts.
    standing: Standing,
}

impl Progress {
    /// Changes whenever it got somewhere.
    fn milestone(&self) -> (bool, bool, usize) {
        (self.stored.is_some(), self.is_published, self.standing.stored())
    }
}

/// What flushes.
pub(super) struct Flusher {
    clock: Clock,
    hello: Hello,
    trainer: Trainer,
    /// The bucket and this start's place in it, once both are known.
    target: Option<(Bucket, Run)>,
    /// What retention knows of its steps.
    known: KnownShards,
    /// The next step refers to what did not change since this one.
    base: Option<Base>,
    /// Where to find one, unless this agent stored it itself.
    origin: Option<Origin>,
    /// To this host's disk, where copies are kept there.
    copies: Option<Copies>,
    /// What is kept for ranks of other hosts, where that is.
    shelf: Option<Shelf>,
    /// The nonce of another start, which ended, and whose saves these are.
    heir_of: Option<String>,
    /// Steps that are committed, or never will be, whose notes stay as yet.
    left: Vec<StepKey>,
    /// Steps of saves that failed whose commit may come about after all.
    in_doubt: Vec<StepKey>,
    /// Whether it was told that notes stay.
    told_of_notes: bool,
    /// What it stored of steps that are none.
    remains: Remains,
}

impl Flusher {
    pub(super) fn new(hello: Hello, trainer: Trainer, copies: Option<Copies>) -> Self {
        let clock = Clock::system();
        Self {
            clock,
            hello,
            trainer,
            target: None,
            known: KnownShards::default(),
            base: None,
            origin: None,
            copies,
            shelf: None,
            heir_of: None,
            left: Vec::new(),
            in_doubt: Vec::new(),
            told_of_notes: false,
            remains: Remains::default(),
        }
    }

    /// With what is kept for ranks of other hosts.
    pub(super) fn with_shelf(self, shelf: Option<Shelf>) -> Self {
        Self { shelf, ..self }
    }

    /// Settles every save that arrives, in order; beside them, uploads of the dead are ended.
    pub(super) async fn settle_all(self, queue: mpsc::UnboundedReceiver<Work>) {
        let (sweep, asked) = mpsc::channel(1);
        let sweeper = Sweeper::new(self.clock.clone(), self.trainer.clone());
        tokio::select! {
            () = self.settle_each(queue, sweep) => {}
            // Only when nobody can ask any more.
            () = sweeper.serve(asked) => {}
        }
    }

    async fn settle_each(
        mut self,
        mut queue: mpsc::UnboundedReceiver<Work>,
        sweep: mpsc::Sender<(Bucket, Run)>,
    ) {
        // The incarnation is taken at once, so that starts are ordered as they happened; what fails here fails again,
        // and is told, at the first save. One that died by now may have a successor, which it must not come after.
        if !self.trainer.is_gone() {
            self.open().await.ok();
        }
        let mut next = Next::new(&mut queue, self.trainer.clone());
        let others = self.others();
        next.after(self.resume(), others).await;
        while let Some(work) = next.work().await {
            match work {
                Work::GoOn(origin) => {
                    (self.base, self.origin) = (None, Some(origin));
                    continue;
                }
                Work::BeginAnew { hello, origin, local } => {
                    let begun = self.begin_anew(*hello, origin, local);
                    next.after(begun, None).await;
                    continue;
                }
                Work::GiveUp { step, round, reason } => self.give_up(step, round, &reason).await,
                Work::Save(save) => {
                    if self.target.is_none()
                        && self.hello.member.as_ref().is_some_and(|member| member.run.is_begun())
                    {
                        // The others wait for this rank. What fails here fails again below, and is told.
                        self.open().await.ok();
                    }
                    let others = self.others();
                    next.after(self.settle(save), others).await;
                }
            }
            let others = self.others();
            next.after(self.remove_remains(), others).await;
            // Of a job's agents one is enough.
            if self.hello.member.as_ref().is_none_or(|member| member.rank == 0) {
                let others = self.others();
                let is_newest = next.after(self.clean_up(), others).await;
                if let (true, Some(target)) = (is_newest, &self.target) {
                    // It may still be at it.
                    sweep.try_send(target.clone()).ok();
                }
            }
        }
    }

    async fn settle(&mut self, mut sealed: Save) {
        let begun = self.clock.now();
        let (clock, trainer) = (self.clock.clone(), self.trainer.clone());
        let (save, local) = (sealed.number(), sealed.local.take());
        let replicated = await_replica(&clock, &trainer, save, sealed.replica.take());
        let mut progress = Progress { alive: self.alive(sealed.held.seal.step), ..Progress::default() };
        let flushed = async {
            if let Some(local) = local {
                let copied = self.await_copy(save, local);
                match &mut progress.alive {
                    Some(alive) => alive.during(copied).await,
                    None => copied.await,
                }
            }
            let settled = self.flush_on(&sealed, &mut progress).await;
            (settled, progress.is_published, now_us(&self.clock))
        };
        // The slot is the trainer's again once both are done, or nothing goes on with either.
        let done = tokio::select! {
            biased;
            () = trainer.abandoned(|abandoned| abandoned == save) => None,
            done = async { tokio::join!(flushed, replicated) } => Some(done),
        };
        sealed.seen().await;
        let Some(((settled, is_published, at_us), ())) = done else {
            self.leave_notes(&sealed, &progress);
            return tell_abandoned(&trainer, sealed);
        };
        let Seal { round, step, size, .. } = sealed.held.seal;
        drop(sealed);
        self.log(step, size, self.clock.now().since(begun), &settled);
        match &settled {
            // Agents of ranks that have no trainer may make a step of it, which no later start changes.
            Err(error) if is_published && error.kind() == ErrorKind::Stale => {}
            Err(error) => self.give_up(step, round, &error.to_string()).await,
            Ok(_) => self.mark_durable(HeldStep { start: self.hello.start.nonce.clone(), step }),
        }
        self.trainer.tell(&match settled {
            Ok(_) => Reply::Durable { save, at_us },
            Err(error) => Reply::Failed { save, error: (&error).into() },
        });
    }

    /// What tells that a save goes on which begins now.
    fn alive(&self, step: u64) -> Option<Alive> {
        let (bucket, run) = self.target.as_ref()?;
        Some(Alive::new(self.clock.clone(), bucket.clone(), run.save(step), self.hello.place().0))
    }

    /// The disk comes first, unless it hangs.
    async fn await_copy(&self, save: u64, local: Copy) {
        let settled = local.settled(&self.clock).await;
        if let Settled::Hangs(patience) = settled {
            self.trainer.tell(&Reply::Warning { message: disk_hangs(patience) });
        }
        if settled != Settled::Done {
            self.trainer.tell(&Reply::NoCopy { save });
        }
    }

    fn mark_durable(&self, step: HeldStep) {
        if let Some(copies) = &self.copies {
            copies.mark(step);
        }
    }

    /// The agent's log has a line for each save.
    fn log(&self, step: u64, bytes: u64, took: Duration, settled: &Result<u64>) {
        let rank = self.hello.member.as_ref().map_or(0, |member| member.rank);
        let seconds = took.as_secs_f64();
        match settled {
            Ok(uploaded) => tracing::info!(step, rank, bytes, uploaded, seconds, "durable"),
            Err(error) => tracing::error!(step, rank, bytes, seconds, %error, "not saved"),
        }
    }

    /// Tells the job's other ranks that this one's part of a step will never be there. Where that fails, they find out
    /// by themselves, later.
    async fn give_up(&self, step: u64, round: Option<Round>, reason: &str) {
        let (Some(member), Some((bucket, _))) = (&self.hello.member, &self.target) else { return };
        if let Err(error) =
            put_failed(bucket, member.save(step), member.rank, self.round(round), reason).await
        {
            self.trainer.tell(&Reply::Warning { message: format!("the other ranks were not told: {error}") });
        }
    }

    /// In which round it is told, and heard, that a step will not be. What the agents of an earlier start gave up, each by
    /// itself, is nothing to its heirs, which have every rank's part again: they go by what heirs of their own start tell.
    fn round(&self, of_save: Option<Round>) -> Option<Round> {
        match self.heir_of {
            Some(_) => Some(Round::of_heirs(&self.hello.start.nonce)),
            None => of_save,
        }
    }

    /// Tries a save until it is committed, refused, or the store stayed away too long; gives the bytes uploaded.
    pub(super) async fn flush(&mut self, save: &Save) -> Result<u64> {
        self.flush_on(save, &mut Progress::default()).await
    }

    /// As [`Self::flush`], of one that has come so far.
    async fn flush_on(&mut self, save: &Save, progress: &mut Progress) -> Result<u64> {
        let mut patience = Patience::new();
        let outcome = loop {
            let (begun, milestone) = (self.clock.now(), progress.milestone());
            let error = match self.try_flush(save, progress).await {
                Ok(Outcome::Gone(shard)) => {
                    // The next save would refer to it as well.
                    let base = self.base.take();
                    self.origin = None;
                    // What is told to be stored may be written over.
                    if progress.is_published || progress.is_stored_anew {
                        break Ok(Outcome::Refused(deleted(save.held.seal.step, &shard)));
                    }
                    let message = stored_whole(save.held.seal.step, base.as_ref(), &shard);
                    self.trainer.tell(&Reply::Warning { message });
                    self.store_anew(save, progress).await;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Unavailable => error,
                Err(error) if self.may_begin_anew(&error, progress) => {
                    tracing::warn!(step = save.held.seal.step, %error, "the upload is gone, and is begun anew");
                    progress.begun_anew += 1;
                    continue;
                }
                other => break other,
            };
            progress.may_be_committed |= progress.is_published;
            // Only between tries: an upload that works is never cut.
            let (now, got_on) = (self.clock.now(), progress.milestone() != milestone);
            let Some(pause) = patience.after(now, now.since(begun), got_on) else { break Err(error) };
            let message = format!("step {}: {error}; trying again", save.held.seal.step);
            self.trainer.tell(&Reply::Warning { message });
            self.clock.sleep(pause).await;
        };
        let step = save.held.seal.step;
        match &outcome {
            Ok(Outcome::Durable(_)) => self.remains.pass(self.clock.now()),
            outcome if self.leaves_nothing(save, progress, outcome) => {
                self.discard(progress.stored.as_ref()).await;
                self.leave_notes(save, progress);
                self.take_all_back().await;
            }
            Ok(Outcome::Refused(_)) | Err(_) => {
                self.remember(progress.stored.as_ref());
                self.leave_notes(save, progress);
            }
            Ok(Outcome::Taken | Outcome::Gone(_)) => {}
        }
        let outcome = match outcome.map_err(|error| explain(error, step))? {
            Outcome::Durable(stays) => {
                let has_notes = progress.stored.as_ref().is_some_and(|stored| stored.has_notes);
                self.take_back(step, has_notes, stays).await;
                Ok(())
            }
            Outcome::Refused(error) => Err(error),
            Outcome::Gone(shard) => Err(deleted(step, &shard)),
            Outcome::Taken => {
                self.discard(progress.stored.as_ref()).await;
                Err(saved_already(step))
            }
        };
        outcome?;
        let Some(stored) = progress.stored.take() else { return Ok(0) };
        let uploaded = stored.uploaded();
        self.go_on_from(save, stored.part);
        Ok(uploaded)
    }

    /// Has a save be stored again: something of it was deleted that nobody was told of yet.
    async fn store_anew(&self, save: &Save, progress: &mut Progress) {
        progress.is_stored_anew = true;
        let Some(stored) = progress.stored.take() else { return };
        progress.had_notes |= stored.has_notes;
        if save.given == Given::First && (self.hello.member.is_none() || !progress.is_seen) {
            self.discard(Some(&Stored { has_notes: false, ..stored })).await;
        }
    }

    /// Whether what a save stored is nobody's: a rank alone was refused, and no request was sent that could have committed it,
    /// by this agent or another one.
    fn leaves_nothing(&self, save: &Save, progress: &Progress, outcome: &Result<Outcome>) -> bool {
        let is_refused = match outcome {
            Ok(outcome) => matches!(outcome, Outcome::Refused(_)),
            Err(error) => error.kind() == ErrorKind::Stale,
        };
        let is_own = save.given == Given::First && self.hello.member.is_none();
        is_refused && is_own && !progress.may_be_committed
    }

    /// Remembers what is of no step, as far as is known.
    fn remember(&mut self, stored: Option<&Stored>) {
        let (Some(Stored { part, .. }), Some((_, run))) = (stored, &self.target) else { return };
        let (save, place, shard) = (run.save(part.step), self.hello.place(), part.shards[0].object());
        self.remains.keep(Part { save, place, commit: part.commit.clone(), shard });
    }

    async fn discard(&self, stored: Option<&Stored>) {
        if let (Some(stored), Some((bucket, run))) = (stored, &self.target) {
            discard(bucket, run, self.hello.member.as_ref(), stored).await;
        }
    }

    /// Whether what failed may be an upload that somebody took for a dead agent's.
    fn may_begin_anew(&self, error: &Error, progress: &Progress) -> bool {
        let is_uploading = self.target.is_some() && progress.stored.is_none();
        is_uploading && error.kind() == ErrorKind::NotFound && progress.begun_anew < MOST_BEGUN_ANEW
    }

    /// Has the next save refer to this one.
    fn go_on_from(&mut self, save: &Save, part: Manifest) {
        let earlier = self.base.take();
        let Some((_, run)) = &self.target else { return };
        if save.given == Given::First {
            self.base = Some(Base::after(earlier, run.save(part.step), part));
        } else {
            // Which agent's shards the step names is seen there.
            self.origin = Some(Origin { attempt: run.attempt().to_owned(), step: part.step });
        }
    }

    /// Tries it once.
    ///
    /// # Errors
    /// `Unavailable` when it is to be tried again.
    async fn try_flush(&mut self, save: &Save, progress: &mut Progress) -> Result<Outcome> {
        if self.target.is_none() {
            self.open().await?;
        }
        let Some((bucket, run)) = &self.target else { return Err(Error::bug("a flush without a bucket")) };
        let (trainer, is_heir) = (&self.trainer, self.heir_of.is_some());
        let mut leave = Leave::new(&self.clock, (bucket, run), trainer, save.number(), is_heir);
        if self.heir_of.is_some() && bucket.head(&run.save(save.held.seal.step).object()).await?.is_some() {
            return Ok(Outcome::Durable(None));
        }
        let (member, round) = (self.hello.member.as_ref(), self.round(save.held.seal.round));
        let stored = match &mut progress.stored {
            Some(stored) => {
                leave.ask().await?;
                stored
            }
            stored => {
                if progress.alive.is_none() {
                    progress.alive = self.alive(save.held.seal.step);
                }
                let Some(alive) = &mut progress.alive else {
                    return Err(Error::bug("a save without a bucket"));
                };
                if let Some(origin) = &self.origin {
                    let found = alive.during(Base::find(bucket, origin, &save.held.seal)).await?;
                    (self.base, self.origin) = (found, None);
                }
                progress.begun = Some(self.clock.now());
                progress.may_be_noted |= self.base.is_some();
                let work = store(bucket, run, member, save, self.base.as_ref(), leave.ask());
                let part = alive.during(work).await?;
                let has_notes = part.has_notes || alive.is_told() || progress.had_notes;
                stored.insert(Stored { has_notes, ..part })
            }
        };
        let begun = progress.begun.unwrap_or_else(|| self.clock.now());
        if !progress.is_published {
            let gone = find_gone(&self.clock, bucket, &stored.part, begun, progress.is_seen).await?;
            if let Some(shard) = gone {
                return Ok(Outcome::Gone(shard));
            }
            progress.is_seen = true;
            if !publish(bucket, run, member, &stored.part).await? {
                return Ok(Outcome::Taken);
            }
            progress.is_published = true;
            if self.heir_of.is_none() {
                self.trainer.tell(&Reply::Stored { save: save.held.seal.save, at_us: now_us(&self.clock) });
            }
        }
        match member {
            Some(member) => {
                let (shelf, standing) = (self.shelf.as_ref(), &mut progress.standing);
                let together = Together { member, round, shelf, standing };
                together.commit(&mut leave, &stored.part).await
            }
            // What a rank alone noted stays.
            None => commit_alone(&mut leave, &stored.part, begun).await,
        }
    }

    /// Deletes what was stored of steps that came to nothing, once nobody can make a step of it any more. What fails is tried
    /// again later, and in the end left to garbage collection.
    async fn remove_remains(&mut self) {
        let Some((bucket, run)) = &self.target else { return };
        for part in self.remains.take(self.clock.now()) {
            if let Err(error) = remove_part(bucket, run, &part).await {
                tracing::warn!(key = %part.shard, %error, "what no step names stays for now");
                self.remains.put_off(part, self.clock.now());
            }
        }
    }

    /// Deletes old steps, and steps that a later incarnation saved again. A failure costs space, not data: it is told, and a
    /// later save tries again. Whether it was done: a start that was superseded leaves it to its successor.
    pub(super) async fn clean_up(&mut self) -> bool {
        let Some((bucket, run)) = &self.target else { return false };
        let retained = async {
            match superseded_by(bucket, run).await? {
                Some(_) => Ok(false),
                None => retain(bucket, self.hello.keep, &mut self.known).await.map(|_| true),
            }
        };
        retained.await.unwrap_or_else(|error| {
            self.trainer.tell(&Reply::Warning { message: format!("old steps were not deleted: {error}") });
            false
        })
    }
}

/// Waits for the copy in another host's memory, unless that host hangs.
async fn await_replica(clock: &Clock, trainer: &Trainer, save: u64, replica: Option<Copy>) {
    let Some(replica) = replica else { return };
    let settled = replica.settled(clock).await;
    if let Settled::Hangs(patience) = settled {
        let seconds = patience.as_secs();
        let message = format!(
            "another host did not take a copy within {seconds} s: saves go on without copies there until it does"
        );
        trainer.tell(&Reply::Warning { message });
    }
    if settled != Settled::Done {
        trainer.tell(&Reply::NotReplicated { save });
    }
}

/// What is told of a disk that does not answer.
pub(super) fn disk_hangs(patience: Duration) -> String {
    let seconds = patience.as_secs();
    format!("the local disk did not answer for {seconds} s: saves go on without copies there until it does")
}

/// What is told of a save of which a shard is gone: its own, or one of the step that it went on from.
fn stored_whole(step: u64, base: Option<&Base>, shard: &str) -> String {
    let base = base.filter(|base| base.manifest.shards.iter().any(|earlier| earlier.key == shard));
    let fact = match base {
        Some(base) => format!(
            "step {} is damaged, and so is every other that refers to `{shard}`, which is not there, or cut off",
            base.key.step
        ),
        None => format!("`{shard}` was deleted before its commit"),
    };
    format!("{fact}: step {step} is stored whole, and refers to no earlier one (hint: {DELETED_HINT})")
}

/// What a person can do about a save that failed.
fn explain(error: Error, step: u64) -> Error {
    if error.kind() != ErrorKind::NoSpace {
        return error;
    }
    error
        .context(format!("step {step} was not saved"))
        .with_hint("make room there, or keep fewer steps (keep=)")
}

#[cfg(test)]
mod alive_tests;
#[cfg(test)]
mod anew_tests;
#[cfg(test)]
mod commit_tests;
#[cfg(test)]
mod delta_tests;
#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod heir_tests;
#[cfg(test)]
mod lost_tests;
#[cfg(test)]
mod origin_tests;
#[cfg(test)]
mod race_tests;
#[cfg(test)]
mod remains_tests;
#[cfg(test)]
mod rounds_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod together_tests;
