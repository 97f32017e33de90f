//! Parts of ranks that are gone, stored out of the copies that this agent keeps: a step that was sealed everywhere comes to the
//! store though the host of some ranks was lost before.
//!
//! That a rank is gone a successor tells, which found no agent of it, or its silence does: one that is at work tells so. Where it
//! lives after all, both store the same.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, Timestamp};
use forebay_io::clock::Moment;

use super::Member;
use super::flush::{Given, Save, publish, store};
use super::leave::Leave;
use super::replicas::{Replica, Shelf};
use super::source::Source;
use crate::arena::HeldStep;
use crate::catalog::{Alive, EVERY, RankKey, Round, put_failed};
use crate::manifest::Manifest;

/// How long a rank may tell nothing: it missed two times, and half of a third. Others wait for longer than that.
const SILENCE: Duration = Duration::from_secs(EVERY.as_secs() * 5 / 2);

/// Who stores what other ranks of a step left.
pub(super) struct Heir<'a> {
    shelf: Option<&'a Shelf>,
    member: &'a Member,
    /// The try of the step that all ranks are at, of which copies must be.
    commit: &'a str,
    round: Option<Round>,
    /// When that began to be waited for.
    since: Moment,
    /// When ranks that tell that they go on did so last, by the store's clock and this host's.
    heard: HashMap<u32, (Timestamp, Moment)>,
    /// The ranks whose parts it stored.
    stood_in_for: Vec<u32>,
}

impl<'a> Heir<'a> {
    pub(super) fn new(
        shelf: Option<&'a Shelf>,
        member: &'a Member,
        (commit, round): (&'a str, Option<Round>),
        since: Moment,
    ) -> Self {
        Self { shelf, member, commit, round, since, heard: HashMap::new(), stood_in_for: Vec::new() }
    }

    /// Whether this agent stored the part of a rank: its own, or of one that it stood in for.
    pub(super) fn stored(&self, rank: u32) -> bool {
        rank == self.member.rank || self.stood_in_for.contains(&rank)
    }

    /// Notes which ranks told that they go on.
    pub(super) fn hear(&mut self, signs: &[(RankKey, Timestamp)], now: Moment) {
        for (key, at) in signs {
            let heard = self.heard.entry(key.rank).or_insert((*at, now));
            if heard.0 != *at {
                *heard = (*at, now);
            }
        }
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
        let now = leave.clock.now();
        let is_gone = |rank| {
            let heard = self.heard.get(&rank).map_or(self.since, |(_, heard)| *heard);
            lacks(rank) && (leave.trainer.is_lost(rank) || now.since(heard) >= SILENCE)
        };
        let mut parts = shelf.parts(step).into_iter();
        let Some(Replica { held, memory, .. }) = parts.find(|part| is_gone(part.held.rank)) else {
            return Ok(false);
        };
        let (rank, save) = (held.rank, self.member.save(step.step));
        tracing::info!(step = step.step, rank, "stores the part of a rank that is gone, out of its copy");
        let shard = Bytes::from_owner(memory.map_read(0..held.seal.size as usize)?);
        let member = Member { rank, ..self.member.clone() };
        // It may have begun to.
        let given = Given::Again;
        let part =
            Save { held: Arc::new(held), source: Source::Slot(shard), given, local: None, replica: None };
        let (bucket, run) = (leave.bucket, leave.run);
        let mut alive = Alive::new(leave.clock.clone(), bucket.clone(), save.clone(), rank);
        alive.tell().await;
        let work = async {
            let stored = store(bucket, run, Some(&member), &part, None, std::future::ready(Ok(()))).await?;
            self.expect_same_try(&stored.part)?;
            publish(bucket, run, Some(&member), &stored.part).await
        };
        match alive.during(work).await {
            Ok(_) => self.stood_in_for.push(rank),
            Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
            Err(error) => put_failed(bucket, save, rank, self.round, &error.to_string()).await?,
        }
        Ok(true)
    }

    fn expect_same_try(&self, part: &Manifest) -> Result<()> {
        if part.commit == self.commit {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::NotFound,
            "the copy that is left of its part is of another try of the step",
        ))
    }
}
