//! Two ranks of two hosts, each of whose agents holds what the other one sealed.

use std::os::fd::AsFd;

use forebay_io::net::{Door, wait_readable};

use super::adopt_tests::{place, wait_for};
use super::tests::{Fixture, PATIENCE, Pair, attach, settle};
use super::*;
use crate::dtype::Dtype;
use crate::region::Region;
use crate::restore::{Target, assemble, read_held};

const HALF: u64 = 1 << 19;

/// Where the agent of a rank waits.
fn place_of(test: &str, rank: u32) -> String {
    place(&format!("replicas-{test}-{rank}"))
}

fn address((port, secret): (u16, String)) -> Address {
    Address { addresses: vec!["127.0.0.1".into()], port, secret }
}

fn prepared(test: &str, rank: u32, session: &mut Session) {
    session.set_linger(Some(Linger { place: place_of(test, rank), for_ms: 60_000 }));
    session.set_replication(Replication { steps: 2, cards: "off".into() });
}

/// Two ranks that know where the other one's agent is.
fn pair(fixture: &mut Fixture, test: &str) -> Pair {
    let mut pair = Pair::of(fixture, |rank, session| prepared(test, rank, session));
    introduce(&mut pair.sessions);
    pair
}

fn introduce(sessions: &mut [Session; 2]) {
    let [first, second] = sessions;
    let tells = |session: &mut Session| address(session.keeps_at(PATIENCE).expect("told").expect("an agent"));
    let (one, other) = (tells(first), tells(second));
    first.replicate_to(other);
    second.replicate_to(one);
}

/// Saves a step on both ranks, until it is committed; whether each rank's part is with the other one.
fn saves(pair: &mut Pair, step: u64) -> [bool; 2] {
    let saves = [pair.save(0, step, 0..HALF), pair.save(1, step, HALF..1 << 20)];
    for (session, save) in pair.sessions.iter_mut().zip(&saves) {
        let progress = settle(session, save);
        assert!(matches!(progress, Progress::Durable), "{progress:?}");
    }
    saves.map(|save| save.times().replicated.is_some())
}

fn kept(agent: &Predecessor) -> Vec<(u32, u64)> {
    agent.kept().into_iter().map(|(rank, step)| (rank, step.step)).collect()
}

/// A step, as ranks have it of one agent: its own part, and what it keeps.
fn read(agent: &Predecessor, step: u64) -> Result<Vec<u8>> {
    let name = agent.held().into_iter().find(|held| held.step == step);
    let name = name.ok_or_else(|| Error::corrupt("it is not held"))?;
    let (manifest, shards) = assemble(vec![agent.part(&name, 0)?, agent.part(&name, 1)?])?;
    let tensor = manifest.tensors.iter().position(|tensor| tensor.name == "w").expect("a tensor");
    let mut bytes = vec![0; 1 << 20];
    let region = Region::whole(&manifest.tensors[tensor].shape);
    let targets = vec![Target { tensor, region, bytes: &mut bytes }];
    read_held(&shards, &manifest, targets, 2).map(|()| bytes)
}

#[test]
fn either_host_has_all_of_the_newest_steps_and_each_start_after_a_loss_goes_on_with_them() {
    let (mut fixture, test) = (Fixture::new(), "either");
    let mut pair = pair(&mut fixture, test);
    for step in 1..=3 {
        assert_eq!(saves(&mut pair, step), [true; 2]);
    }
    pair.sessions.iter_mut().for_each(Session::disconnect);
    for (rank, other) in [(0, 1), (1, 0)] {
        let agent = wait_for(&place_of(test, rank));
        assert_eq!(kept(&agent), [(other, 3), (other, 2)]);
        for step in [2, 3] {
            assert_eq!(read(&agent, step).expect("all of it"), vec![step as u8; 1 << 20]);
        }
    }
    // The host of rank 1 is lost; starts on the other one end before they save anything.
    let mut agents = Vec::from([pair.agents.remove(0)]);
    for number in 0..2 {
        let mut session = fixture.unattached(None);
        prepared(test, 0, &mut session);
        let found = wait_for(&place_of(test, 0));
        assert_eq!(kept(&found), [(1, 3), (1, 2)], "after {number} starts");
        session.adopt(found, true).expect("adopt");
        agents.push(attach(&mut session));
        agents.remove(0).join().expect("agent").expect("served");
        assert!(session.elsewhere.inherited.is_empty(), "the agent alone has them");
        session.disconnect();
    }
    let mut last = fixture.unattached(None);
    prepared(test, 0, &mut last);
    let found = wait_for(&place_of(test, 0));
    assert_eq!(read(&found, 3).expect("all of it"), vec![3; 1 << 20]);
    last.adopt(found, true).expect("adopt");
    agents.push(attach(&mut last));
    // One that saves on goes on from memory that has something newer, and lets go of what nobody can use.
    for (step, expected) in [(4, vec![(1, 3)]), (5, vec![])] {
        let save = super::tests::save(&mut last, step, 100);
        assert!(matches!(settle(&mut last, &save), Progress::Durable));
        last.disconnect();
        let found = wait_for(&place_of(test, 0));
        assert_eq!(kept(&found), expected, "once step {step} was sealed");
        last = fixture.unattached(None);
        prepared(test, 0, &mut last);
        last.adopt(found, true).expect("adopt");
        agents.push(attach(&mut last));
    }
    last.dismiss();
    agents
        .into_iter()
        .chain(pair.agents.pop())
        .take(3)
        .for_each(|agent| agent.join().expect("agent").expect("served"));
}

/// Else a host that is lost while the next step is written takes both: no step would have the parts of all ranks.
#[test]
fn the_step_before_stays_until_the_newest_one_has_its_copy_or_will_have_none() {
    let mut fixture = Fixture::new();
    let mut session = fixture.unattached(None);
    prepared("stays", 0, &mut session);
    let agent = attach(&mut session);
    let door = Door::open("secret".to_owned()).expect("a port");
    session.replicate_to(address((door.port().expect("port"), "secret".to_owned())));
    let first = super::tests::save(&mut session, 1, 1000);
    wait_readable(&[door.as_fd()], PATIENCE).expect("wait");
    let visitor = door.welcome().expect("look").expect("the agent comes");
    while first.times().stored.is_none() {
        session.take_replies(PATIENCE).expect("replies");
    }
    let begin = |session: &mut Session, patience| {
        let tensor = TensorSpec::whole("t", Dtype::named("uint8").expect("u8"), vec![1000]);
        session.begin(vec![tensor], TextLength::default(), 1, patience).expect("begin")
    };
    assert!(begin(&mut session, Duration::ZERO).is_none() && !first.progress().is_settled());
    drop(visitor);
    assert!(matches!(settle(&mut session, &first), Progress::Durable));
    let snapshot = begin(&mut session, Duration::ZERO).expect("there is room");
    session.abandon(snapshot);
    assert_eq!((session.replicas_missed(), first.times().replicated), (1, None));
    let warnings = session.take_warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("without copies in another host's memory"),
        "{warnings:?}"
    );
    session.dismiss();
    agent.join().expect("agent").expect("served");
}

/// An agent that another one took the place of holds nothing of others, and brings what is under way to its host.
#[test]
fn a_new_agent_goes_on_with_copies() {
    let mut fixture = Fixture::new();
    let mut pair = pair(&mut fixture, "new");
    assert_eq!(saves(&mut pair, 1), [true; 2]);
    pair.sessions[0].disconnect();
    pair.agents.push(attach(&mut pair.sessions[0]));
    introduce(&mut pair.sessions);
    assert_eq!(saves(&mut pair, 2), [true; 2]);
    pair.sessions.iter_mut().for_each(Session::dismiss);
    // The first agent took the end of its trainer's connection for a kill.
    let mut session = fixture.unattached(None);
    session.adopt(wait_for(&place_of("new", 0)), false).expect("adopt");
    pair.agents.push(attach(&mut session));
    session.dismiss();
    pair.agents.into_iter().for_each(|agent| agent.join().expect("agent").expect("served"));
}

/// The agents that are left waited ten minutes for its parts, and their starts for the memory that they read meanwhile.
#[test]
fn nobody_waits_for_a_rank_that_was_lost_before_it_stored_its_part() {
    let (mut fixture, test) = (Fixture::new(), "lost");
    let mut pair = Pair::of(&mut fixture, |rank, session| prepared(test, rank, session));
    assert_eq!(saves(&mut pair, 1), [false; 2], "nobody knows where to");
    let sealed = [2, 3].map(|step| pair.save(1, step, HALF..1 << 20));
    while matches!(sealed[1].progress(), Progress::Sent) {
        pair.sessions[1].take_replies(PATIENCE).expect("replies");
    }
    pair.sessions[1].disconnect();
    let mut next = fixture.unattached(None);
    prepared(test, 1, &mut next);
    next.adopt(wait_for(&place_of(test, 1)), true).expect("adopt");
    next.set_lost(vec![0], Vec::new(), Vec::new());
    let own = attach(&mut next);
    pair.agents.pop().expect("rank 1's").join().expect("agent").expect("served");
    let mut warnings = Vec::new();
    while warnings.len() < 2 {
        next.take_replies(Duration::from_millis(10)).expect("replies");
        warnings.extend(next.take_warnings());
    }
    for (step, warning) in [2, 3].iter().zip(&warnings) {
        let fact = format!(
            "step {step}, which a killed trainer had sealed, was not saved by its agent: step {step} was not"
        );
        assert!(warning.contains(&fact) && warning.contains("rank 0 is gone, and left nobody"), "{warning}");
    }
    next.dismiss();
    pair.sessions[0].dismiss();
    own.join().expect("agent").expect("served");
    assert_eq!(fixture.steps(), [(1, 1, false)]);
}

#[test]
fn a_copy_that_was_damaged_is_not_passed_on_and_that_is_told() {
    let (mut fixture, test) = (Fixture::new(), "damaged");
    let mut pair = pair(&mut fixture, test);
    assert_eq!(saves(&mut pair, 1), [true; 2]);
    pair.sessions.iter_mut().for_each(Session::disconnect);
    let mut found = wait_for(&place_of(test, 0));
    let mut held = found.kept[0].shown.read().expect("as it was sealed");
    held.seal.created_ms += 1;
    found.kept[0].shown.told = serde_json::to_vec(&held).expect("encodes");
    let mut next = fixture.unattached(None);
    prepared(test, 0, &mut next);
    next.adopt(found, true).expect("adopt");
    assert!(next.elsewhere.inherited.is_empty());
    let warnings = next.take_warnings();
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("a copy of what rank 1 sealed is not kept on"), "{warning}");
    pair.agents.push(attach(&mut next));
    next.dismiss();
    let mut other = fixture.unattached(None);
    other.adopt(wait_for(&place_of(test, 1)), false).expect("adopt");
    pair.agents.push(attach(&mut other));
    other.dismiss();
    pair.agents.into_iter().for_each(|agent| agent.join().expect("agent").expect("served"));
}
