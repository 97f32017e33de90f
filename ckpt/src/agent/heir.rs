//! Parts of ranks that are gone, stored out of the copies that this agent keeps: a step that was sealed everywhere comes to the
//! store though the host of some ranks was lost before.
//!
//! That a rank is gone a successor tells, which found no agent of it, or its silence does: one that is at work tells so. Where it
//! lives after all, both store the same, and what it has begun of it goes on.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{ErrorKind, Result, Timestamp};
use forebay_io::clock::Moment;

use super::Member;
use super::flush::{Given, MOST_BEGUN_ANEW, Save, commit_of, publish, store};
use super::leave::Leave;
use super::replicas::{Replica, Shelf};
use super::source::Source;
use crate::arena::{Held, HeldStep};
use crate::catalog::{Alive, EVERY, RankKey, Round, put_failed};

/// How long a rank may tell nothing: it missed two times, and half of a third. Others wait for longer than that.
const SILENCE: Duration = Duration::from_secs(EVERY.as_secs() * 5 / 2);

/// What an heir knows and did, which a store that is away for a while changes nothing of.
#[derive(Default)]
pub(super) struct Standing {
    /// How long ranks were listened to: not while the store was away, which nobody can tell anything then.
    listened: Duration,
    /// When ranks that tell that they go on did so last, by the store's clock, and how long they were listened to by then.
    heard: HashMap<u32, (Timestamp, Duration)>,
    /// The ranks whose parts it stored.
    stood_in_for: Vec<u32>,
    /// Silent ones whose copies make no step.
    useless: Vec<u32>,
    /// How often uploads of theirs were begun anew.
    begun_anew: u32,
}

impl Standing {
    /// Ranks whose parts were stored.
    pub(super) fn stored(&self) -> usize {
        self.stood_in_for.len()
    }

    /// Notes which ranks told that they go on.
    fn hear(&mut self, signs: &[(RankKey, Timestamp)], since_last: Duration) {
        self.listened += since_last;
        for (key, at) in signs {
            let heard = self.heard.entry(key.rank).or_insert((*at, self.listened));
            if heard.0 != *at {
                *heard = (*at, self.listened);
            }
        }
    }

    fn is_silent(&self, rank: u32) -> bool {
        let heard = self.heard.get(&rank).map_or(Duration::ZERO, |(_, heard)| *heard);
        self.listened - heard >= SILENCE
    }
}

/// Who stores what other ranks of a step left.
pub(super) struct Heir<'a> {
    shelf: Option<&'a Shelf>,
    member: &'a Member,
    /// The try of the step that all ranks are at, of which copies must be.
    commit: &'a str,
    round: Option<Round>,
    standing: &'a mut Standing,
    /// When the ranks were heard last, since the store was away.
    looked: Moment,
}

impl<'a> Heir<'a> {
    pub(super) fn new(
        shelf: Option<&'a Shelf>,
        member: &'a Member,
        (commit, round): (&'a str, Option<Round>),
        standing: &'a mut Standing,
        now: Moment,
    ) -> Self {
        Self { shelf, member, commit, round, standing, looked: now }
    }

    /// Whether this agent stored the part of a rank: its own, or of one that it stood in for.
    pub(super) fn stored(&self, rank: u32) -> bool {
        rank == self.member.rank || self.standing.stood_in_for.contains(&rank)
    }

    /// Notes which ranks told that they go on.
    pub(super) fn hear(&mut self, signs: &[(RankKey, Timestamp)], now: Moment) {
        self.standing.hear(signs, now.since(self.looked));
        self.looked = now;
    }

    /// Stores the part of a rank that is gone, one of those that `lacks` it; whether there was one. What is wrong with the copy is
    /// told to the other ranks.
    ///
    /// # Errors
    /// `Unavailable` when it is to be tried again.
    pub(super) async fn stand_in(
        &mut self,
        leave: &Leave<'_>,
        step: &HeldStep,
        lacks: impl Fn(u32) -> bool,
    ) -> Result<bool> {
        // While a trainer lives, its job does: another agent may come in the place of one that died.
        let Some(shelf) = self.shelf.filter(|_| leave.trainer.is_gone()) else { return Ok(false) };
        let (bucket, run) = (leave.bucket, leave.run);
        let is_of_try = |held: &Held| commit_of(run, Some(self.member), &held.seal) == self.commit;
        let is_left = |held: &Held| {
            // One that tells nothing may come yet, and is not refused for a copy that makes no step.
            let is_of_use = || is_of_try(held) && !self.standing.useless.contains(&held.rank);
            let is_gone =
                leave.trainer.is_lost(held.rank) || (self.standing.is_silent(held.rank) && is_of_use());
            lacks(held.rank) && is_gone
        };
        let mut parts = shelf.parts(step).into_iter();
        let Some(Replica { held, memory, .. }) = parts.find(|part| is_left(&part.held)) else {
            return Ok(false);
        };
        let (rank, save) = (held.rank, self.member.save(step.step));
        tracing::info!(step = step.step, rank, "stores the part of a rank that is gone, out of its copy");
        let member = Member { rank, ..self.member.clone() };
        if !is_of_try(&held) {
            let reason = "the copy that is left of its part is of another try of the step";
            put_failed(bucket, save, rank, self.round, reason).await?;
            return Ok(true);
        }
        let shard = Bytes::from_owner(memory.map_read(0..held.seal.size as usize)?);
        let part = Save::new(Arc::new(held), Source::Slot(shard), Given::Left);
        let mut alive = Alive::new(leave.clock.clone(), bucket.clone(), save.clone(), rank);
        alive.tell().await;
        let work = async {
            let stored = store(bucket, run, Some(&member), &part, None, std::future::ready(Ok(()))).await?;
            publish(bucket, run, Some(&member), &stored.part).await
        };
        match alive.during(work).await {
            Ok(_) => self.standing.stood_in_for.push(rank),
            Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
            Err(error)
                if error.kind() == ErrorKind::NotFound && self.standing.begun_anew < MOST_BEGUN_ANEW =>
            {
                tracing::warn!(step = step.step, rank, %error, "the upload is gone, and is begun anew");
                self.standing.begun_anew += 1;
            }
            Err(error) if !leave.trainer.is_lost(rank) => {
                tracing::warn!(step = step.step, rank, %error, "its copy is of no use: it is waited for itself");
                self.standing.useless.push(rank);
            }
            Err(error) => put_failed(bucket, save, rank, self.round, &error.to_string()).await?,
        }
        Ok(true)
    }
}
