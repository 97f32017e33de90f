//! A job that goes back to an earlier step in one process: another start, with the memory of the one before.

use super::Session;
use crate::agent::{Origin, Request};
use crate::arena::{Arena, attempt_of};
use crate::catalog::Start;

impl Session {
    /// Goes on as another `start`, from the step of `origin`, once none of this one's saves is under way; `seen` is the highest
    /// number of a start that the store had when the job went back, if it told. The agent is let go; the next one is told of
    /// what is in memory up to that step, which stays until newer ones took its place. What is newer is in memory no more.
    pub fn begin_anew(&mut self, start: Start, seen: Option<u64>, origin: Origin) {
        debug_assert!(!self.is_busy(), "an agent reads what it was given");
        self.send(&Request::Bye, None).ok();
        self.disconnect();
        let former = std::mem::replace(&mut self.hello.start, start);
        // Until the new start takes its number, that of the former is the newest in the store: nobody else's.
        self.hello.comes_after(attempt_of(&former.nonce));
        (self.hello.member, self.hello.seen, self.hello.is_back) = (None, seen, true);
        // Other hosts' agents are let go as well.
        self.elsewhere.to = None;
        let free = self.arena.iter_mut().flat_map(Arena::free_slots);
        for slot in free.chain(&mut self.former) {
            slot.held_mut().take_if(|held| held.seal.step > origin.step);
        }
        self.origin = None;
        self.go_on_from(origin);
    }
}

#[cfg(test)]
mod tests {
    use super::super::adopt_tests::{place, unattached, wait_for};
    use super::super::tests::{Fixture, attach, save, settle};
    use super::*;
    use crate::session::Progress;

    /// Memory was let go of: the step that the job had gone back to was in its state alone, until the next save was sealed.
    #[test]
    fn the_step_that_a_job_goes_back_to_stays_in_memory() {
        let (mut fixture, place) = (Fixture::new(), place("anew"));
        let mut session = unattached(&mut fixture, &place);
        let former = attach(&mut session);
        for step in [1, 2] {
            let save = save(&mut session, step, 1000);
            assert!(matches!(settle(&mut session, &save), Progress::Durable));
        }
        let memory = session.arena.as_ref().expect("arena").memory().id();
        let start = fixture.unattached(None).hello.start;
        let attempt = attempt_of(&session.hello.start.nonce).to_owned();
        let kept = session.held().pop().expect("step 1");
        session.begin_anew(start, None, Origin { attempt: attempt.clone(), step: 1 });
        former.join().expect("agent").expect("served");
        assert_eq!((session.held(), &session.hello.after[..]), (vec![kept.clone()], &[attempt][..]));
        let agent = attach(&mut session);
        session.keep(Some(kept.clone()));
        let again = save(&mut session, 2, 1000);
        assert!(matches!(settle(&mut session, &again), Progress::Durable));
        assert_eq!(session.held()[1..], [kept], "the slot of what it left was taken");
        assert_eq!(session.arena.as_ref().expect("arena").memory().id(), memory);
        assert_eq!(fixture.steps(), [(1, 1, false), (1, 2, true), (2, 2, false)]);
        let held = session.held();
        session.disconnect();
        let found = wait_for(&place);
        assert_eq!(found.held(), held, "its agent has both");
        let mut next = unattached(&mut fixture, &place);
        next.adopt(found, true).expect("adopt");
        let last = attach(&mut next);
        next.dismiss();
        for agent in [agent, last] {
            agent.join().expect("agent").expect("served");
        }
    }
}
