//! Taking over what the agent of a killed trainer holds: its memory, and in the end its place.
//!
//! In this order, so that a kill at any moment leaves one agent that holds the steps: the new agent is told of all that
//! is held, then the old one is told that it may go, then slots are written. Slots whose flush the old one has not
//! finished wait for it, and none is written before the old one has said which these are: where it ends without a word,
//! the memory is only read from then on, as others may be reading it as well. What an agent before that one still brings to
//! the store, since the start between them was killed as well, is known by its lease of the slot.

use super::predecessor::{PATIENCE, Shown, parse, say};
use super::*;
use crate::agent::Visit;

/// A slot of a predecessor's memory.
#[derive(Debug)]
pub(super) struct Inherited {
    slot: Slot,
    /// Whether the predecessor reads it no more. One before it may.
    is_let_go: bool,
}

impl Inherited {
    fn new(slot: Slot) -> Self {
        Self { slot, is_let_go: false }
    }

    fn save(&self) -> Option<u64> {
        self.slot.held().map(|held| held.seal.save)
    }

    fn is_free(&self) -> bool {
        self.is_let_go && !self.slot.is_being_read()
    }
}

/// The slots of an arena, and those of earlier ones that hold a step, each with what an agent says that it holds.
///
/// # Errors
/// As [`Shown::read`], and where no memory can be mapped.
fn take_steps(held: &[Shown], mut slots: Vec<Slot>) -> Result<Vec<Slot>> {
    for shown in held {
        let step = shown.read()?;
        let is_at = |slot: &Slot| slot.index() == step.seal.slot && Arc::ptr_eq(slot.memory(), &shown.memory);
        let place = match slots.iter().position(is_at) {
            Some(place) => place,
            None => {
                slots.push(Slot::map(&shown.memory, step.seal.slot)?);
                slots.len() - 1
            }
        };
        *slots[place].held_mut() = Some(Box::new(step));
    }
    Ok(slots)
}

impl Session {
    /// Takes over what `predecessor` holds, before an agent is greeted: its newest arena becomes this session's. Its
    /// steps stay held only where this start `goes_on` from one of them; else the store may have a newer one. A session
    /// that has memory of its own already leaves it, and one that cannot read all that it is told of.
    pub fn adopt(&mut self, predecessor: Predecessor, goes_on: bool) -> Result<()> {
        for attempt in predecessor.after() {
            self.hello.comes_after(attempt);
        }
        self.hello.comes_after(attempt_of(predecessor.start()));
        let Predecessor { stream, held, durable, kept, .. } = predecessor;
        if goes_on {
            self.inherit(kept);
        }
        let Some(newest) = held.last().filter(|_| self.arena.is_none()) else { return Ok(()) };
        let adopted = Arena::adopt(newest.memory.clone())
            .and_then(|(arena, slots)| Ok((arena, take_steps(&held, slots)?)));
        let (arena, slots) = match adopted {
            Ok(adopted) => adopted,
            Err(error) => {
                self.warnings
                    .push(format!("what the agent of a killed trainer holds is not taken over: {error}"));
                return Ok(());
            }
        };
        let mut steps: Vec<&Held> = slots.iter().filter_map(Slot::held).collect();
        steps.sort_by_key(|held| held.seal.save);
        for held in steps {
            match durable.contains(&held.name()) {
                true => self.last_durable = self.last_durable.max(held.seal.save),
                false => self.unsaved.push((held.seal.save, held.seal.step)),
            }
            self.last_save = self.last_save.max(held.seal.save);
        }
        self.arena = Some(arena);
        self.inherited = slots.into_iter().map(Inherited::new).collect();
        (self.predecessor, self.goes_on, self.durable) = (Some(stream), goes_on, durable);
        Ok(())
    }

    /// Notes the ranks whose killed processes left no agent, for the agents of the others not to wait for their parts, but for those
    /// that agents have `kept`: of as many ranks as there are now, and of the start whose step was restored; said before an agent is
    /// greeted.
    pub fn set_lost(&mut self, own: Vec<u32>, followed: Vec<u32>, kept: Vec<(u32, HeldStep)>) {
        let kept = kept.into_iter().map(|(rank, step)| KeptStep { rank, step }).collect();
        self.lost = Missing { own, followed, kept };
        // Agents that are told of the latter know by that whether they are meant.
        let own = attempt_of(&self.hello.start.nonce);
        if let Some(origin) = self.origin.as_ref().filter(|origin| origin.attempt != own) {
            self.hello.comes_after(&origin.attempt);
        }
    }

    /// The sealed steps that this session's memory holds, newest first.
    pub fn held(&self) -> Vec<HeldStep> {
        let mut held: Vec<&Held> = self.held_slots().filter_map(Slot::held).collect();
        held.sort_by_key(|held| std::cmp::Reverse(held.seal.save));
        held.into_iter().map(Held::name).collect()
    }

    /// From now on no save takes the slot of `step`, the newest that all ranks hold; where there is but one, the next does.
    pub fn keep(&mut self, step: Option<HeldStep>) {
        self.kept = step.filter(|_| self.slots > 1);
    }

    /// Notes that a step in memory is committed; what is in memory no more is forgotten.
    pub(super) fn note_durable(&mut self, step: HeldStep) {
        let held = self.held();
        self.durable.retain(|other| *other != step && held.contains(other));
        self.durable.push(step);
    }

    /// Passes on to this session's agent that a save of the predecessor is committed.
    fn hear_durable(&mut self, save: u64) {
        self.unsaved.retain(|(other, _)| *other != save);
        self.last_durable = self.last_durable.max(save);
        let step = self.idle_slots().filter_map(Slot::held).find(|held| held.seal.save == save);
        let Some(step) = step.map(Held::name) else { return };
        if !self.durable.contains(&step) {
            self.note_durable(step.clone());
            // A failure here is the agent's death, and the next one is told.
            self.send(&Request::Durable(step), None).ok();
        }
    }

    /// Steps that need no flush, and where they lie, those of former arenas first.
    pub(super) fn settled_steps(&self) -> Vec<(Held, Arc<SharedMemory>)> {
        let step = |slot: &Slot| Some((slot.held()?.clone(), slot.memory().clone()));
        let mut steps: Vec<_> = self.idle_slots().filter_map(step).collect();
        steps.sort_by_key(|(held, _)| held.seal.save);
        steps
    }

    /// Slots that may hold a sealed step.
    pub(super) fn held_slots(&self) -> impl Iterator<Item = &Slot> {
        self.idle_slots().chain(self.pending.iter().map(|pending| &pending.slot))
    }

    /// Slots that hold what need not be flushed by this session's agent.
    fn idle_slots(&self) -> impl Iterator<Item = &Slot> {
        let free = self.arena.iter().flat_map(Arena::slots);
        let inherited = self.inherited.iter().filter(|_| self.goes_on).map(|inherited| &inherited.slot);
        self.former.iter().chain(inherited).chain(free)
    }

    /// Lets the predecessor go, now that this session's agent holds what it held.
    pub(super) fn succeed(&mut self) -> Result<()> {
        if self.predecessor.is_none() || self.has_succeeded {
            return Ok(());
        }
        // From agent to agent: a trainer that is killed amid this is not missed there.
        let (heir_of, heir) = FdStream::pair()?;
        self.send(&Request::InheritPlace, Some(heir_of.as_fd()))?;
        drop(heir_of);
        let Some(mut stream) = self.predecessor.take() else { return Ok(()) };
        let visit = Visit::Succeed(self.lost.told(&self.lost.own));
        let said = say(&mut stream, &visit, Some(heir.as_fd()));
        if said.is_err() {
            // A child that was forked meanwhile may have it open.
            heir.shutdown();
        }
        drop(heir);
        let answer = match said.and_then(|()| stream.receive()) {
            Ok(Some((frame, _))) => parse(&frame)?,
            Ok(None) => return self.outlive(stream),
            Err(_) if stream.readable(Duration::ZERO)? => return self.outlive(stream),
            Err(_) => {
                // It may still be reading: the memory is left to it.
                (self.arena, self.announced) = (None, None);
                for mut inherited in std::mem::take(&mut self.inherited) {
                    self.release(&mut inherited.slot);
                }
                let message = format!("the agent of a killed trainer did not answer within {PATIENCE:?}");
                self.warnings.push(message);
                return Ok(());
            }
        };
        if let Reply::Unsettled { saves, durable, failed } = answer {
            durable.into_iter().for_each(|save| self.hear_durable(save));
            failed.into_iter().for_each(|(save, error)| self.warn_of_failure(save, Some(error.into())));
            self.let_go(|save| !saves.contains(&save));
        }
        (self.predecessor, self.has_succeeded) = (Some(stream), true);
        Ok(())
    }

    /// Goes on after a predecessor whose `stream` ended without a word: it may have handed over to another trainer, or be
    /// about to end. What it held is held until newer steps are, in other memory.
    fn outlive(&mut self, stream: FdStream) -> Result<()> {
        self.arena = None;
        let inherited = std::mem::take(&mut self.inherited).into_iter().map(|inherited| inherited.slot);
        self.former.extend(inherited.filter(|slot| self.goes_on && slot.held().is_some()));
        (self.predecessor, self.has_succeeded) = (Some(stream), true);
        Ok(())
    }

    /// Takes what the predecessor says, without waiting.
    pub(super) fn hear_predecessor(&mut self) {
        self.free_inherited();
        while let Some(stream) = &mut self.predecessor {
            // Before it was let go it has nothing to say, and its end is noticed then.
            if !self.has_succeeded || !stream.readable(Duration::ZERO).unwrap_or(true) {
                return;
            }
            let reply = match stream.receive() {
                Ok(Some((frame, _))) => parse(&frame).ok(),
                Ok(None) | Err(_) => None,
            };
            match reply {
                Some(Reply::Stored { save, .. }) => self.let_go(|other| other == save),
                Some(Reply::Failed { save, error }) => {
                    self.warn_of_failure(save, Some(error.into()));
                    self.let_go(|other| other == save);
                }
                Some(Reply::Durable { save, .. }) => self.hear_durable(save),
                Some(Reply::Warning { message }) if self.warnings.len() < MAX_WARNINGS => {
                    self.warnings.push(message);
                }
                Some(_) => {}
                None => {
                    self.predecessor = None;
                    // It tells what became of every save before it ends, unless it is killed, too; not of what is on its
                    // way from an agent before it.
                    let is_under_way = |save| {
                        let mut slots = self.inherited.iter();
                        slots.any(|slot| slot.save() == Some(save) && slot.slot.is_being_read())
                    };
                    self.unsaved.retain(|(save, _)| !is_under_way(*save));
                    self.unsaved.clone().into_iter().for_each(|(save, _)| self.warn_of_failure(save, None));
                    self.let_go(|_| true);
                }
            }
        }
    }

    /// A step that was sealed, and so promised, is not going to be in the store, for this cause where one was told: nobody
    /// else hears of it. Nothing is lost where a later one is there.
    fn warn_of_failure(&mut self, save: u64, error: Option<Error>) {
        let Some(place) = self.unsaved.iter().position(|(other, _)| *other == save) else { return };
        let (_, step) = self.unsaved.remove(place);
        if self.warnings.len() >= MAX_WARNINGS || save < self.last_durable {
            return;
        }
        let fate = match &error {
            Some(error) => format!("was not saved by its agent: {error}"),
            None => "may not be saved: its agent ended before it told that it was".to_owned(),
        };
        let rest = match self.goes_on {
            true => {
                "it is in memory alone until the next step is committed (hint: `save_now` saves one at once)"
            }
            false => "this start does not go on from it",
        };
        self.warnings.push(format!("step {step}, which a killed trainer had sealed, {fate}; {rest}"));
    }

    /// Notes that the predecessor reads those slots no more that hold nothing, or a step that was saved under such a number.
    fn let_go(&mut self, is_let_go: impl Fn(u64) -> bool) {
        for inherited in &mut self.inherited {
            inherited.is_let_go |= inherited.save().is_none_or(&is_let_go);
        }
        self.free_inherited();
    }

    /// Gives back the inherited slots that no agent of a former start reads any more.
    fn free_inherited(&mut self) {
        let (free, stays): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.inherited).into_iter().partition(Inherited::is_free);
        self.inherited = stays;
        for Inherited { mut slot, .. } in free {
            if !self.goes_on {
                *slot.held_mut() = None;
            }
            self.give_back(slot);
        }
    }
}
