//! A job that goes back to an earlier step in one process: another start, with the agent and the memory of the one before.

use forebay_core::{Error, ErrorKind};

use super::Session;
use crate::agent::{Anew, Origin, Request};
use crate::arena::{Arena, attempt_of};
use crate::catalog::{Run, Start};

impl Session {
    /// Goes on as another `start`, from the step of `origin`; `seen` is the highest number of a start that the store had when
    /// the job went back, if it told. What is newer than that step is in memory no more, and not saved unless it is committed
    /// already: the agent lets go of it at once, and tells. What is not goes on, as the former start's.
    pub fn begin_anew(&mut self, start: Start, seen: Option<u64>, origin: Origin) {
        let former = std::mem::replace(&mut self.hello.start, start);
        // Until the new start takes its number, that of the former is the newest in the store: nobody else's.
        self.hello.comes_after(attempt_of(&former.nonce));
        self.hello.comes_after(&origin.attempt);
        (self.hello.seen, self.hello.is_back) = (seen, true);
        // Of several ranks, rank 0's agent takes it for all.
        let start = &self.hello.start;
        self.hello.member.iter_mut().for_each(|member| member.run = Run::unbegun(start.clone()));
        let free = self.arena.iter_mut().flat_map(Arena::free_slots);
        let pending = self.pending.iter_mut().map(|pending| &mut pending.slot);
        for slot in free.chain(&mut self.former).chain(pending) {
            slot.held_mut().take_if(|held| held.seal.step > origin.step);
        }
        self.origin = Some(origin.clone());
        let anew = Anew { hello: self.hello.clone(), origin };
        // A failure here is the agent's death, and the next one is told.
        self.send(&Request::BeginAnew(Box::new(anew)), None).ok();
    }

    /// Whether the agent has not let go yet of all that the job went back from.
    pub fn is_letting_go(&self) -> bool {
        self.pending.iter().any(|pending| pending.slot.held().is_none())
    }

    /// Gives up what an agent that died had of starts before this one: another agent saves this one's.
    pub(super) fn give_up_former(&mut self) {
        let own = &self.hello.start.nonce;
        let is_former = |pending: &&super::Pending| pending.slot.held().is_none_or(|held| held.start != *own);
        let former: Vec<_> =
            self.pending.iter().filter(is_former).map(|pending| pending.save.clone()).collect();
        for save in former {
            let message = format!("step {} was not saved: its agent died after the job went back", save.step);
            self.settle_number(save.number, Err(Error::new(ErrorKind::Unavailable, message)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::adopt_tests::{place, unattached, wait_for};
    use super::super::tests::{Fixture, PATIENCE, Pair, attach, save, settle};
    use super::*;
    use crate::session::Progress;

    fn start(number: u32) -> Start {
        let nonce = format!("{number:08x}{:024}", 9);
        Start { nonce, host: "host".into(), pid: 7, started_ms: number.into() }
    }

    /// To a step of the start that goes on.
    fn go_back(session: &mut Session, number: u32, step: u64) {
        let attempt = attempt_of(&session.hello.start.nonce).to_owned();
        session.begin_anew(start(number), None, Origin { attempt, step });
        while session.is_letting_go() {
            session.take_replies(PATIENCE).expect("replies");
        }
    }

    /// Memory was let go of: the step that the job had gone back to was in its state alone, until the next save was sealed.
    #[test]
    fn the_step_that_a_job_goes_back_to_stays_in_memory() {
        let (mut fixture, place) = (Fixture::new(), place("anew"));
        let mut session = unattached(&mut fixture, &place);
        let agent = attach(&mut session);
        for step in [1, 2] {
            let save = save(&mut session, step, 1000);
            assert!(matches!(settle(&mut session, &save), Progress::Durable));
        }
        let memory = session.arena.as_ref().expect("arena").memory().id();
        let attempt = attempt_of(&session.hello.start.nonce).to_owned();
        let kept = session.held().pop().expect("step 1");
        go_back(&mut session, 0x99, 1);
        assert_eq!((session.held(), &session.hello.after[..]), (vec![kept.clone()], &[attempt][..]));
        session.keep(Some(kept.clone()));
        let again = save(&mut session, 2, 1000);
        assert!(matches!(settle(&mut session, &again), Progress::Durable));
        assert_eq!(session.held()[1..], [kept], "the slot of what it left was taken");
        assert_eq!(session.arena.as_ref().expect("arena").memory().id(), memory);
        // What the former start saved of it goes soon after, by retention.
        let steps = fixture.steps();
        let valid: Vec<_> = steps.iter().filter(|(.., is_superseded)| !is_superseded).collect();
        assert_eq!(valid, [&(1, 1, false), &(2, 2, false)]);
        let held = session.held();
        session.disconnect();
        let found = wait_for(&place);
        assert_eq!((found.held(), found.start()), (held, &start(0x99).nonce[..]), "its agent has both");
        let mut next = unattached(&mut fixture, &place);
        next.adopt(found, true).expect("adopt");
        let last = attach(&mut next);
        next.dismiss();
        for agent in [agent, last] {
            agent.join().expect("agent").expect("served");
        }
    }

    /// An agent that took the place of one that died would bring them there as the start's that left them.
    #[test]
    fn a_save_of_a_former_start_goes_to_no_other_agent() {
        let mut fixture = Fixture::new();
        let (mut session, agent) = fixture.session(None);
        session.disconnect();
        agent.join().expect("agent").expect("served");
        let saves = [1, 2].map(|step| save(&mut session, step, 1000));
        let attempt = attempt_of(&session.hello.start.nonce).to_owned();
        session.begin_anew(start(0x99), None, Origin { attempt, step: 1 });
        let agent = attach(&mut session);
        for save in saves {
            let Progress::Failed(error) = save.progress() else { panic!("{:?}", save.progress()) };
            assert!(error.message().contains("after the job went back"), "{error}");
        }
        let again = save(&mut session, 2, 1000);
        assert!(matches!(settle(&mut session, &again), Progress::Durable));
        assert_eq!(session.held().iter().map(|held| held.step).collect::<Vec<_>>(), [2, 1]);
        drop(session);
        agent.join().expect("agent").expect("served");
        assert_eq!(fixture.steps(), [(1, 2, false)]);
    }

    /// Rank 0's agent takes the number, and the other one's may look for it before.
    #[test]
    fn ranks_go_back_together() {
        let mut fixture = Fixture::new();
        let mut pair = Pair::new(&mut fixture);
        for number in 0..2 {
            let saves = [pair.save(0, 1 + number, 0..1 << 19), pair.save(1, 1 + number, 1 << 19..1 << 20)];
            for (session, save) in pair.sessions.iter_mut().zip(&saves) {
                assert!(matches!(settle(session, save), Progress::Durable), "{:?}", save.progress());
            }
            go_back(&mut pair.sessions[1], 0x90 + number as u32, 1 + number);
            go_back(&mut pair.sessions[0], 0x90 + number as u32, 1 + number);
        }
        let saves = [pair.save(1, 3, 1 << 19..1 << 20), pair.save(0, 3, 0..1 << 19)];
        for (session, save) in pair.sessions.iter_mut().rev().zip(&saves) {
            assert!(matches!(settle(session, save), Progress::Durable), "{:?}", save.progress());
        }
        pair.sessions.iter_mut().for_each(Session::dismiss);
        pair.agents.into_iter().for_each(|agent| agent.join().expect("agent").expect("served"));
        assert_eq!(fixture.load(3, 3), vec![3; 1 << 20]);
    }
}
