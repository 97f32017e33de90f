//! How the ranks of a job make a step of what each of them stored: they wait for each other, and one of them puts it together.

use std::cmp::Reverse;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result, Timestamp};
use forebay_io::clock::Moment;

use super::Member;
use super::flush::Outcome;
use super::heir::{Heir, Standing};
use super::leave::Leave;
use super::replicas::Shelf;
use crate::arena::HeldStep;
use crate::catalog::{
    Note, OLD, RankKey, Round, StepKey, failure_of, forget_ranks, is_commit_of, list_notes_of, list_ranks,
    merge_ranks, try_commit,
};
use crate::manifest::Manifest;

/// The first pause between two looks for the other ranks, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// How long the other ranks are waited for, from when one of them last told that it goes on.
const RANKS_PATIENCE: Duration = Duration::from_secs(600);
/// Ranks that may look once a second, each; where there are more, each looks less often.
const RANKS_A_SECOND: u32 = 8;
/// How long a rank that is to put a step together has for it before the next one takes its turn: many times what it takes.
const TURN: Duration = Duration::from_secs(5);
/// When the last one does.
const LAST_TURN: Duration = Duration::from_secs(300);

/// How the ranks of a job save a step.
pub(super) struct Together<'a> {
    pub(super) member: &'a Member,
    /// In which round they tell each other that it will not be.
    pub(super) round: Option<Round>,
    /// What is kept of other ranks' parts here.
    pub(super) shelf: Option<&'a Shelf>,
    /// What tries before this one knew of these ranks.
    pub(super) standing: &'a mut Standing,
}

impl Together<'_> {
    /// Waits until every rank stored its part, and commits the step when it is this rank's turn, unless another rank's agent
    /// was first.
    pub(super) async fn commit(self, leave: &mut Leave<'_>, part: &Manifest) -> Result<Outcome> {
        let Self { member, round, shelf, standing } = self;
        let begun = leave.clock.now();
        let name = HeldStep { start: member.run.start.nonce.clone(), step: part.step };
        let mut waiting = Waiting {
            save: member.save(part.step),
            member,
            part,
            round,
            name,
            heir: Heir::new(shelf, member, (&part.commit, round), standing, begun),
            late: None,
            was_gone: false,
            signs: Vec::new(),
            deadline: begun + RANKS_PATIENCE,
            complete: None,
        };
        let mut rest = pauses(member.world_size);
        loop {
            let was_complete = waiting.complete.is_some();
            match waiting.look(leave).await? {
                Seen::Over(outcome) => return Ok(outcome),
                Seen::News => continue,
                Seen::Nothing => {}
            }
            if !was_complete && waiting.complete.is_some() {
                // Whoever commits it does so soon.
                rest = pauses(member.world_size);
            }
            leave.clock.sleep(rest.next().unwrap_or(PAUSES[1])).await;
        }
    }
}

/// What a look for the other ranks found.
enum Seen {
    /// What became of the step.
    Over(Outcome),
    /// Something that is to be looked at again at once.
    News,
    Nothing,
}

/// A rank that waits for the others.
struct Waiting<'a> {
    member: &'a Member,
    part: &'a Manifest,
    round: Option<Round>,
    save: StepKey,
    /// The step, as agents call it.
    name: HeldStep,
    heir: Heir<'a>,
    /// A rank whose index is of another try.
    late: Option<u32>,
    /// Whether an index was gone that was there a moment before.
    was_gone: bool,
    /// Who told that it goes on.
    signs: Vec<(RankKey, Timestamp)>,
    /// Until when the others are waited for.
    deadline: Moment,
    /// Since when all of it is there.
    complete: Option<Moment>,
}

impl Waiting<'_> {
    async fn look(&mut self, leave: &mut Leave<'_>) -> Result<Seen> {
        let (clock, bucket, looked) = (leave.clock, leave.bucket, leave.clock.now());
        if bucket.head(&self.save.object()).await?.is_some() {
            let is_own = is_commit_of(bucket, &self.save, &self.part.commit).await?;
            return Ok(Seen::Over(if is_own { Outcome::Durable(None) } else { Outcome::Taken }));
        }
        let notes = list_notes_of(bucket, &self.save).await?;
        let of = |note: Note| notes.iter().filter(move |(key, _)| key.note == note);
        let signs: Vec<_> = of(Note::Alive).cloned().collect();
        self.heir.hear(&signs, looked);
        if signs != self.signs {
            (self.signs, self.deadline) = (signs, clock.now() + RANKS_PATIENCE);
        }
        if let Some((failed, _)) = of(Note::Failed(self.round)).next() {
            let rank = failed.rank;
            return Ok(self.refused(&format!("rank {rank}: {}", failure_of(bucket, failed).await?)));
        }
        let stored: Vec<(u32, Timestamp)> = of(Note::Index).map(|(key, at)| (key.rank, *at)).collect();
        let lacks = |rank| !stored.iter().any(|(other, _)| *other == rank);
        // First: what is kept of others is stored in vain then.
        if let Some(lost) = leave.trainer.lost_rank(&self.name, lacks) {
            return Ok(
                self.refused(&format!("rank {lost} is gone, and left nobody who would store its part"))
            );
        }
        let late = self.late;
        if self.heir.stand_in(leave, &self.name, |rank| lacks(rank) || late == Some(rank)).await? {
            // Its index was put over.
            self.late = None;
            return Ok(Seen::News);
        }
        if stored.len() == self.member.world_size as usize {
            let since = *self.complete.get_or_insert_with(|| clock.now());
            if clock.now().since(since) < turn(&stored, |rank| self.heir.stored(rank)) {
                return Ok(Seen::Nothing);
            }
            match self.put_together(leave).await? {
                Seen::Nothing => {}
                seen => return Ok(seen),
            }
        }
        if looked > self.deadline {
            let is_late = |rank: &u32| lacks(*rank) || self.late == Some(*rank);
            let late: Vec<u32> = (0..self.member.world_size).filter(is_late).collect();
            return Ok(self.refused(&format!("ranks {late:?} did not store their parts in time")));
        }
        Ok(Seen::Nothing)
    }

    fn refused(&self, why: &str) -> Seen {
        let message = format!("step {} was not saved: {why}", self.part.step);
        Seen::Over(Outcome::Refused(Error::new(ErrorKind::Unavailable, message)))
    }

    /// Commits a step all of whose indexes were there, if they still are.
    async fn put_together(&mut self, leave: &mut Leave<'_>) -> Result<Seen> {
        let Self { member, save, part, .. } = self;
        match commit_whole(leave, member, save, &part.commit, &mut self.late).await {
            Ok(Some(outcome)) => Ok(Seen::Over(outcome)),
            Ok(None) => Ok(Seen::Nothing),
            // Another agent just committed the step and took the indexes away.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Ok(if std::mem::replace(&mut self.was_gone, true) { Seen::Nothing } else { Seen::News })
            }
            Err(error) if error.kind() == ErrorKind::Invalid => Ok(Seen::Over(Outcome::Refused(error))),
            Err(error) => Err(error),
        }
    }
}

/// Commits a step all of whose indexes are there, where they are all of the round of `commit`.
async fn commit_whole(
    leave: &mut Leave<'_>,
    member: &Member,
    save: &StepKey,
    commit: &str,
    late: &mut Option<u32>,
) -> Result<Option<Outcome>> {
    let (bucket, begun) = (leave.bucket, leave.clock.now());
    let merged = merge_ranks(bucket, save, member.world_size, commit, late).await?;
    let Some(manifest) = merged else { return Ok(None) };
    // Listed before the commit, and with what earlier steps left.
    let keys = list_ranks(bucket).await?;
    leave.renew().await?;
    // Indexes keep what they name for as long as they are there, which was seen too long ago.
    if leave.clock.now().since(begun) > OLD {
        return Ok(None);
    }
    if try_commit(bucket, &member.run, &manifest).await?.is_none() {
        return Ok(Some(Outcome::Taken));
    }
    Ok(Some(Outcome::Durable(forget_ranks(bucket, &keys, save).await.err())))
}

/// The pauses between a rank's looks for the others: short at first, and in the end as long as so many ranks allow.
pub(super) fn pauses(world_size: u32) -> impl Iterator<Item = Duration> {
    let longest = PAUSES[1] * world_size.div_ceil(RANKS_A_SECOND).max(1);
    std::iter::successors(Some(PAUSES[0]), move |pause| Some((*pause * 3 / 2).min(longest)))
}

/// How long after all of a step is there an agent puts it together, whose parts of those that are stored `is_own` tells, with when by
/// the store's clock. One is enough, and reads what all of them wrote: first the one that came last, which looks right then; the
/// others, one after another, stand in for one that died.
fn turn(stored: &[(u32, Timestamp)], is_own: impl Fn(u32) -> bool) -> Duration {
    let place = |(rank, at): &(u32, Timestamp)| (Reverse(*at), *rank);
    let own = stored.iter().filter(|(other, _)| is_own(*other)).map(place).min();
    let before = stored.iter().filter(|other| Some(place(other)) < own).count() as u32;
    TURN.min(LAST_TURN / (stored.len() as u32).max(1)) * before
}
