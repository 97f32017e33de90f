//! A trainer that comes after a killed one: it finds, reads and takes over what the agent holds.

use std::thread::JoinHandle;
use std::time::Instant;

use forebay_io::net::meet;

use super::predecessor::say;
use super::tests::{Fixture, PATIENCE, attach, save, settle, snapshot};
use super::*;
use crate::agent::{Answer, Visit};
use crate::catalog::{Note, RankKey, begin_run, list_ranks};
use crate::dtype::Dtype;
use crate::manifest::Encoding;
use crate::region::Region;
use crate::restore::{Target, assemble, read_held};

/// A session whose agent will wait at `place`.
pub(super) fn unattached(fixture: &mut Fixture, place: &str) -> Session {
    let mut session = fixture.unattached(None);
    session.set_linger(Some(Linger { place: place.to_owned(), for_ms: 60_000 }));
    session
}

fn lingering(fixture: &mut Fixture, place: &str) -> (Session, JoinHandle<Result<()>>) {
    let mut session = unattached(fixture, place);
    let agent = attach(&mut session);
    (session, agent)
}

pub(super) fn place(test: &str) -> String {
    format!("forebay-test-{test}-{}", std::process::id())
}

fn numbers(steps: &[HeldStep]) -> Vec<u64> {
    steps.iter().map(|step| step.step).collect()
}

/// The bytes of a held step's first tensor, through everything that a reader does.
fn read(agent: &Predecessor, step: &HeldStep) -> Result<Vec<u8>> {
    let (manifest, shards) = assemble(vec![agent.part(step, 0)?])?;
    let shape = &manifest.tensors[0].shape;
    let mut bytes = vec![0; shape[0] as usize];
    let targets = vec![Target { tensor: 0, region: Region::whole(shape), bytes: &mut bytes }];
    read_held(&shards, &manifest, targets, 2).map(|()| bytes)
}

fn visit(place: &str) -> Option<Predecessor> {
    Predecessor::visit(place).expect("visit")
}

/// Visits once an agent opened the door.
pub(super) fn wait_for(place: &str) -> Predecessor {
    visit(place).expect("an agent waits")
}

#[test]
fn a_killed_trainers_steps_are_read_and_taken_over() {
    let (mut fixture, place) = (Fixture::new(), place("taken-over"));
    let (mut first, agent) = lingering(&mut fixture, &place);
    for (step, length) in [(1, 3 << 20), (2, 5000)] {
        let save = save(&mut first, step, length);
        assert!(matches!(settle(&mut first, &save), Progress::Durable));
    }
    assert!(visit(&place).is_none(), "its trainer lives");
    let memory = first.arena.as_ref().expect("arena").memory().id();
    first.disconnect();
    let onlooker = visit(&place).expect("it waits");
    assert_eq!(numbers(&onlooker.held()), [2, 1]);
    assert_eq!(read(&onlooker, &onlooker.held()[1]).expect("step 1"), vec![1; 3 << 20]);
    drop(onlooker);
    let found = visit(&place).expect("one that only looked changed nothing");
    let newest = found.held()[0].clone();
    let mut second = unattached(&mut fixture, &place);
    second.adopt(found, true).expect("adopt");
    let own = attach(&mut second);
    agent.join().expect("agent").expect("served");
    assert_eq!(second.arena.as_ref().expect("arena").memory().id(), memory);
    assert_eq!(numbers(&second.held()), [2, 1]);
    second.keep(Some(newest));
    let filled = snapshot(&mut second, 100, 3);
    assert_eq!(numbers(&second.held()), [2], "the older one's slot is taken");
    assert!(!second.begin_again(), "the newer one's is not");
    let third = second.seal(filled, 3, None, 0, Vec::new()).expect("seal");
    assert!(matches!(settle(&mut second, &third), Progress::Durable));
    second.disconnect();
    let found = visit(&place).expect("its agent has the place of the one before it");
    assert_eq!(numbers(&found.held()), [3, 2]);
    assert_eq!(read(&found, &found.held()[0]).expect("step 3"), vec![3; 100]);
    assert_eq!(read(&found, &found.held()[1]).expect("step 2"), vec![2; 5000]);
    let mut last = unattached(&mut fixture, &place);
    last.adopt(found, true).expect("adopt");
    let end = attach(&mut last);
    own.join().expect("agent").expect("served");
    last.dismiss();
    end.join().expect("agent").expect("served");
    assert!(visit(&place).is_none(), "a trainer that is done leaves nothing");
}

/// A session that could not map what it was told of had memory with no slot to save into, for good.
#[test]
fn memory_that_cannot_be_taken_over_is_left_and_saves_go_on() {
    let (mut fixture, place) = (Fixture::new(), place("left"));
    let (mut first, agent) = lingering(&mut fixture, &place);
    for step in [1, 2] {
        let save = save(&mut first, step, 1000);
        assert!(matches!(settle(&mut first, &save), Progress::Durable));
    }
    first.disconnect();
    let mut found = visit(&place).expect("it waits");
    // The older one lies where no memory is.
    let mut held = found.held[0].read().expect("a step");
    held.seal.slot = 1000;
    found.held[0].told = serde_json::to_vec(&held.sealed_again()).expect("encodes");
    let mut second = fixture.unattached(None);
    second.adopt(found, true).expect("adopt");
    let warnings = second.take_warnings();
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("is not taken over"), "{warning}");
    assert_eq!(second.held(), []);
    let own = attach(&mut second);
    for step in 3..7 {
        let save = save(&mut second, step, 1000);
        assert!(matches!(settle(&mut second, &save), Progress::Durable));
    }
    second.dismiss();
    own.join().expect("agent").expect("served");
    let mut last = unattached(&mut fixture, &place);
    last.adopt(visit(&place).expect("it waits still"), true).expect("adopt");
    let end = attach(&mut last);
    agent.join().expect("agent").expect("served");
    last.dismiss();
    end.join().expect("agent").expect("served");
}

/// A start on this host took a number before the agent of the killed trainer could: that one's save is refused.
#[test]
fn a_sealed_step_that_its_agent_could_not_save_is_told_by_the_successor() {
    for goes_on in [true, false] {
        let (mut fixture, place) = (Fixture::new(), place(&format!("refused-{goes_on}")));
        let (mut first, agent) = lingering(&mut fixture, &place);
        let early = save(&mut first, 7, 1000);
        assert!(matches!(settle(&mut first, &early), Progress::Durable));
        first.disconnect();
        let mut second = unattached(&mut fixture, &place);
        second.adopt(visit(&place).expect("it waits"), goes_on).expect("adopt");
        let own = attach(&mut second);
        agent.join().expect("agent").expect("served");
        // As if it had not been saved, and its agent tried until now.
        let (near, mut far) = FdStream::pair().expect("pair");
        second.predecessor = Some(near);
        (second.unsaved, second.last_durable) = (vec![(early.number, 7)], 0);
        let refused = Error::new(ErrorKind::Stale, "a later start of this run took over");
        let reply = Reply::Failed { save: early.number, error: (&refused).into() };
        far.send(&serde_json::to_vec(&reply).expect("encodes"), None).expect("send");
        second.take_replies(Duration::ZERO).expect("replies");
        let warnings = second.take_warnings();
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let (fact, rest) = match goes_on {
            true => ("step 7, which a killed trainer had sealed, was not saved", "in memory alone"),
            false => ("which a killed trainer had sealed, was not saved", "does not go on from it"),
        };
        assert!(warning.contains(fact) && warning.contains(rest), "{warning}");
        assert!(warning.contains("a later start of this run took over"), "{warning}");
        assert_eq!(numbers(&second.held()).contains(&7), goes_on);
        second.dismiss();
        own.join().expect("agent").expect("served");
    }
}

/// The store failed before anybody came, and whether that trainer heard of it or not, the next one goes on from the step.
#[test]
fn a_sealed_step_that_was_given_up_before_anybody_came_is_told() {
    for trainer_lives in [true, false] {
        let (mut fixture, place) = (Fixture::new(), place(&format!("given-up-{trainer_lives}")));
        let mut first = unattached(&mut fixture, &place);
        let run =
            fixture.runtime.block_on(begin_run(&fixture.bucket(), first.hello.start.clone())).expect("run");
        first.join(Member { run: run.clone(), rank: 0, world_size: 1 });
        let agent = attach(&mut first);
        let early = save(&mut first, 6, 1000);
        assert!(matches!(settle(&mut first, &early), Progress::Durable));
        let shards = fixture.directory.path().join("shards");
        std::fs::rename(&shards, shards.with_extension("away")).expect("rename");
        std::fs::write(&shards, "in the way").expect("write");
        let late = save(&mut first, 7, 1000);
        while !late.progress().is_settled() && (trainer_lives || matches!(late.progress(), Progress::Sent)) {
            first.take_replies(PATIENCE).expect("replies");
        }
        first.disconnect();
        // Its agent tells the other ranks right before it tells whoever listens.
        let note = RankKey { save: run.save(7), rank: 0, note: Note::Failed(None) };
        let told = || fixture.runtime.block_on(list_ranks(&fixture.bucket())).expect("list").contains(&note);
        while !told() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let found = visit(&place).expect("it waits");
        assert_eq!((numbers(&found.held()), numbers(found.durable())), (vec![7, 6], vec![6]));
        let mut second = unattached(&mut fixture, &place);
        second.adopt(found, true).expect("adopt");
        let own = attach(&mut second);
        while second.predecessor.is_some() {
            second.take_replies(Duration::from_millis(50)).expect("replies");
        }
        agent.join().expect("agent").expect("served");
        let warnings = second.take_warnings();
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let fact = "step 7, which a killed trainer had sealed, was not saved by its agent: ";
        assert!(warning.starts_with(fact) && warning.contains("memory alone"), "{warning}");
        assert_eq!(numbers(&second.held()), [7, 6]);
        // Once a later one is durable, nothing is lost that anybody need hear of.
        std::fs::remove_file(&shards).expect("remove");
        std::fs::rename(shards.with_extension("away"), &shards).expect("rename");
        let next = save(&mut second, 8, 1000);
        assert!(matches!(settle(&mut second, &next), Progress::Durable));
        second.disconnect();
        let mut last = unattached(&mut fixture, &place);
        last.adopt(visit(&place).expect("it waits"), true).expect("adopt");
        let end = attach(&mut last);
        while last.predecessor.is_some() {
            last.take_replies(Duration::from_millis(50)).expect("replies");
        }
        own.join().expect("agent").expect("served");
        assert_eq!((numbers(&last.held()), last.take_warnings()), (vec![8, 7], vec![]));
        last.dismiss();
        end.join().expect("agent").expect("served");
    }
}

/// A start that restored, and compiled for longer than an agent waits, died before its first save: nobody held the step.
#[test]
fn memory_is_held_while_a_start_that_read_it_lives() {
    let (mut fixture, place) = (Fixture::new(), place("watched"));
    let mut first = fixture.unattached(None);
    let linger = Duration::from_secs(3);
    first.set_linger(Some(Linger { place: place.clone(), for_ms: linger.as_millis() as u64 }));
    let agent = attach(&mut first);
    let save = save(&mut first, 1, 5000);
    assert!(matches!(settle(&mut first, &save), Progress::Durable));
    first.disconnect();
    let starts = wait_for(&place);
    let clock = forebay_io::clock::Clock::system();
    let begun = clock.now();
    while clock.now().since(begun) < linger * 3 / 2 {
        assert!(!agent.is_finished(), "after {:?}", clock.now().since(begun));
        std::thread::sleep(Duration::from_millis(100));
    }
    // It dies, and another one comes, to which the steps are held anew.
    drop(starts);
    let found = visit(&place).expect("it waits");
    let step = found.held()[0].clone();
    assert_eq!(read(&found, &step).expect("sound"), vec![1; 5000]);
    let mut last = unattached(&mut fixture, &place);
    last.adopt(found, true).expect("adopt");
    let end = attach(&mut last);
    agent.join().expect("agent").expect("served");
    last.dismiss();
    end.join().expect("agent").expect("served");
}

/// A start that looked, and compiled for longer than anything is held, wrote into what was still being uploaded.
#[test]
fn memory_that_is_uploaded_is_not_written_however_late_its_successor_comes() {
    let (mut fixture, place) = (Fixture::new(), place("uploaded"));
    let mut first = fixture.unattached(None);
    let linger = Duration::from_millis(10);
    first.set_linger(Some(Linger { place: place.clone(), for_ms: linger.as_millis() as u64 }));
    let agent = attach(&mut first);
    // Without its number it would be the later start of the two, which stores nothing.
    while fixture.objects().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let uploading = fixture.hold_names();
    let save = save(&mut first, 1, 1 << 20);
    while matches!(save.progress(), Progress::Sent) {
        first.take_replies(PATIENCE).expect("replies");
    }
    first.disconnect();
    let found = wait_for(&place);
    // Far longer than what is in memory is held where nobody looks, and where somebody does.
    let was_left = found.stream.readable(linger * 60).expect("readable");
    let mut second = unattached(&mut fixture, &place);
    second.adopt(found, true).expect("adopt");
    let own = attach(&mut second);
    let mut begin = || {
        let tensor = TensorSpec::whole("t", Dtype::named("uint8").expect("u8"), vec![1 << 20]);
        second.begin(vec![tensor], TextLength::default(), 1, Duration::ZERO).expect("begin")
    };
    let filled = begin().expect("the slot that nothing is in");
    assert!(begin().is_none(), "the other one is being uploaded");
    second.abandon(filled);
    assert!(!was_left, "nobody who looked is let go meanwhile");
    assert!(second.predecessor.is_some(), "it is not done yet");
    drop(uploading);
    agent.join().expect("agent").expect("served");
    assert_eq!(fixture.load(1, 1), vec![1; 1 << 20]);
    second.dismiss();
    own.join().expect("agent").expect("served");
}

#[test]
fn a_sealed_step_whose_agent_died_before_it_was_saved_is_told() {
    for goes_on in [true, false] {
        let (mut fixture, place) = (Fixture::new(), place(&format!("agent-died-{goes_on}")));
        let (mut first, agent) = lingering(&mut fixture, &place);
        for step in [6, 7] {
            let save = save(&mut first, step, 1000);
            assert!(matches!(settle(&mut first, &save), Progress::Durable));
        }
        first.disconnect();
        let mut found = visit(&place).expect("it waits");
        // As if it were still at the second one, and killed right after it was asked.
        assert_eq!(found.durable.pop().map(|step| step.step), Some(7));
        let (near, far) = FdStream::pair().expect("pair");
        let mut living = std::mem::replace(&mut found.stream, near);
        drop(far);
        let left = found.held[0].memory.id();
        let mut second = unattached(&mut fixture, &place);
        second.adopt(found, goes_on).expect("adopt");
        let own = attach(&mut second);
        while second.predecessor.is_some() {
            second.take_replies(Duration::from_millis(50)).expect("replies");
        }
        let warnings = second.take_warnings();
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let fact = "step 7, which a killed trainer had sealed, may not be saved: its agent ended before";
        let rest = if goes_on { "memory alone" } else { "does not go on from it" };
        assert!(warning.starts_with(fact) && warning.contains(rest), "{warning}");
        assert_eq!(numbers(&second.held()), if goes_on { vec![7, 6] } else { vec![] });
        // It did not say what it still reads, and nothing is written there.
        let filled = snapshot(&mut second, 1000, 8);
        assert_ne!(second.arena.as_ref().expect("arena").memory().id(), left);
        second.abandon(filled);
        predecessor::say(
            &mut living,
            &crate::agent::Visit::Succeed(crate::agent::LostRanks::default()),
            None,
        )
        .expect("say");
        agent.join().expect("agent").expect("served");
        second.dismiss();
        own.join().expect("agent").expect("served");
    }
}

#[test]
fn what_is_durable_is_told_from_one_agent_to_the_next() {
    let (mut fixture, place) = (Fixture::new(), place("durable"));
    let mut first = unattached(&mut fixture, &place);
    let agent = attach(&mut first);
    first.prepare(4 << 20, 1).expect("one arena for both");
    let early = save(&mut first, 1, 1000);
    assert!(matches!(settle(&mut first, &early), Progress::Durable));
    // Still on its way when its trainer is killed.
    let uploading = fixture.hold_names();
    let late = save(&mut first, 2, 4 << 20);
    first.disconnect();
    assert!(!late.progress().is_settled());
    let found = visit(&place).expect("it waits");
    assert_eq!(numbers(&found.held()), [2, 1]);
    assert_eq!(numbers(found.durable()), [1], "and not the other");
    let mut second = unattached(&mut fixture, &place);
    second.adopt(found, true).expect("adopt");
    let own = attach(&mut second);
    drop(uploading);
    while second.predecessor.is_some() {
        second.take_replies(Duration::from_millis(50)).expect("replies");
    }
    agent.join().expect("agent").expect("served");
    second.disconnect();
    // Its agent may be about to open the door that the one before it closed, or to store what that one left to it.
    let (mut found, begun) = (wait_for(&place), Instant::now());
    while numbers(found.durable()) != [1, 2] && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
        found = wait_for(&place);
    }
    assert_eq!((numbers(&found.held()), numbers(found.durable())), (vec![2, 1], vec![1, 2]));
    assert_eq!(found.after(), ["00000001"], "the start whose memory it took over");
    // An agent of an earlier build says nothing of it.
    let told = serde_json::json!({ "start": "s", "held": [found.held()[0]] });
    let answer: Answer = serde_json::from_value(told).expect("parses");
    assert_eq!((answer.held.len(), answer.durable, answer.after), (1, vec![], vec![]));
    let mut last = unattached(&mut fixture, &place);
    last.adopt(found, true).expect("adopt");
    let end = attach(&mut last);
    // Told to the agent that is there.
    last.go_on_from(Origin { attempt: "elsewher".into(), step: 1 });
    own.join().expect("agent").expect("served");
    last.leave();
    assert!(
        last.held().is_empty() && last.arena.is_none() && !last.is_busy(),
        "the memory is the agent's alone"
    );
    let found = wait_for(&place);
    assert_eq!(numbers(found.durable()), [1, 2]);
    assert_eq!(found.after(), ["00000001", "00000002", "elsewher"]);
    let mut done = unattached(&mut fixture, &place);
    done.adopt(found, true).expect("adopt");
    let ended = attach(&mut done);
    end.join().expect("agent").expect("served");
    done.dismiss();
    ended.join().expect("agent").expect("served");
}

#[test]
fn a_replaced_arena_stays_until_the_new_one_holds_the_step() {
    let (mut fixture, place) = (Fixture::new(), place("replaced"));
    let (mut session, agent) = lingering(&mut fixture, &place);
    let first = save(&mut session, 1, 1000);
    assert!(matches!(settle(&mut session, &first), Progress::Durable));
    session.keep(session.held().into_iter().next());
    let large = snapshot(&mut session, 20 << 20, 2);
    assert_eq!(numbers(&session.held()), [1]);
    let second = session.seal(large, 2, None, 0, Vec::new()).expect("seal");
    assert!(matches!(settle(&mut session, &second), Progress::Durable));
    assert_eq!(numbers(&session.held()), [2, 1]);
    session.keep(session.held().into_iter().next());
    let third = save(&mut session, 3, 10);
    assert!(matches!(settle(&mut session, &third), Progress::Durable));
    assert_eq!((numbers(&session.held()), session.former.len()), (vec![3, 2], 0));
    session.disconnect();
    let found = visit(&place).expect("it waits");
    assert_eq!(numbers(&found.held()), [3, 2]);
    assert_eq!(read(&found, &found.held()[1]).expect("step 2"), vec![2; 20 << 20]);
    let mut last = unattached(&mut fixture, &place);
    last.adopt(found, true).expect("adopt");
    let end = attach(&mut last);
    agent.join().expect("agent").expect("served");
    last.dismiss();
    end.join().expect("agent").expect("served");
}

#[test]
fn a_start_that_goes_on_from_elsewhere_takes_the_memory_alone() {
    let (mut fixture, place) = (Fixture::new(), place("elsewhere"));
    let (mut first, agent) = lingering(&mut fixture, &place);
    let save = save(&mut first, 1, 1000);
    assert!(matches!(settle(&mut first, &save), Progress::Durable));
    first.disconnect();
    let mut second = unattached(&mut fixture, &place);
    second.adopt(visit(&place).expect("it waits"), false).expect("adopt");
    assert_eq!(second.held(), []);
    let own = attach(&mut second);
    agent.join().expect("agent").expect("served");
    assert_eq!((second.held(), second.arena.as_mut().expect("arena").free_slots().count()), (vec![], 2));
    second.disconnect();
    own.join().expect("agent").expect("nothing to wait for");
    assert!(visit(&place).is_none());
}

#[test]
fn what_is_damaged_or_of_two_saves_is_refused() {
    let (mut fixture, place) = (Fixture::new(), place("refused"));
    let (mut session, agent) = lingering(&mut fixture, &place);
    let save = save(&mut session, 1, 5000);
    assert!(matches!(settle(&mut session, &save), Progress::Durable));
    session.disconnect();
    let mut found = visit(&place).expect("it waits");
    let step = found.held()[0].clone();
    let changes: [fn(&mut Held); 8] = [
        |held| held.seal.header_crc32c.0 ^= 1,
        |held| held.seal.slot = 7,
        |held| held.seal.size = 1 << 40,
        |held| held.seal.tensors[0].slices[0].crc32c.0 ^= 1,
        |held| held.seal.tensors[0].slices[0].end += 1,
        |held| held.world_size = 2,
        |held| held.rank = 1,
        |held| held.seal.step = 2,
    ];
    let sound = found.held[0].told.clone();
    let damaged = changes.into_iter().map(|change| {
        let mut held = found.held[0].read().expect("sound");
        change(&mut held);
        serde_json::to_vec(&held.sealed_again()).expect("encode")
    });
    for (number, told) in damaged.chain([sound[1..].to_vec()]).collect::<Vec<_>>().into_iter().enumerate() {
        found.held[0].told = told;
        let error = read(&found, &step).expect_err("damaged");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{number}: {error}");
    }
    found.held[0].told = sound[1..].to_vec();
    let mut other = unattached(&mut fixture, &place);
    other.adopt(found, true).expect("left");
    assert_eq!(
        (other.held(), other.take_warnings().len()),
        (vec![], 1),
        "what cannot be read is left, and told"
    );
    let found = visit(&place).expect("it still waits");
    assert_eq!(read(&found, &step).expect("sound"), vec![1; 5000]);
    let mut last = unattached(&mut fixture, &place);
    last.adopt(found, true).expect("adopt");
    let end = attach(&mut last);
    agent.join().expect("agent").expect("served");
    last.dismiss();
    end.join().expect("agent").expect("served");
}

impl Session {
    /// Whether another snapshot could be begun.
    fn begin_again(&mut self) -> bool {
        self.begin(Vec::new(), TextLength::default(), 1, PATIENCE.min(Duration::from_millis(50)))
            .expect("begin")
            .is_some()
    }
}

/// Every number, text and truth of a document, each changed once, and left out once; with the path to it.
fn changed_once(whole: &serde_json::Value) -> Vec<(String, serde_json::Value)> {
    use serde_json::Value;
    let without = |path: &String| {
        let mut other = whole.clone();
        let (parent, name) = path.rsplit_once('/')?;
        let parent = other.pointer_mut(parent).and_then(Value::as_object_mut)?;
        parent.remove(name)?;
        Some((format!("without {path}"), other))
    };
    fn paths(value: &Value, path: String, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                fields.iter().for_each(|(name, value)| paths(value, format!("{path}/{name}"), found))
            }
            Value::Array(parts) => parts
                .iter()
                .enumerate()
                .for_each(|(index, part)| paths(part, format!("{path}/{index}"), found)),
            _ => found.push(path),
        }
    }
    let mut found = Vec::new();
    paths(whole, String::new(), &mut found);
    let change = |path: String| {
        let mut other = whole.clone();
        let place = other.pointer_mut(&path).expect("it is there");
        *place = match &*place {
            Value::Number(number) => Value::from(number.as_u64().expect("whole") ^ 1),
            Value::String(text) => {
                let mut bytes = text.clone().into_bytes();
                if let Some(last) = bytes.last_mut() {
                    *last ^= 1;
                }
                Value::from(String::from_utf8_lossy(&bytes).into_owned())
            }
            other => Value::from(!other.as_bool().unwrap_or(false)),
        };
        (path, other)
    };
    let without: Vec<_> = found.iter().filter_map(without).collect();
    found.into_iter().map(change).chain(without).collect()
}

/// Names of tensors, values that are no tensors, and numbers were taken as they were told.
#[test]
fn every_field_of_a_seal_in_memory_is_looked_at() {
    let (mut fixture, place) = (Fixture::new(), place("fields"));
    let (mut session, agent) = lingering(&mut fixture, &place);
    let extra = |name: &str| Extra { name: name.into(), encoding: Encoding::Json, data: "[1]".into() };
    let filled = snapshot(&mut session, 5000, 1);
    let (round, extras) = (Some(Round::new(5)), vec![extra("state"), extra("rng")]);
    let save = session.seal(filled, 1, round, 1_700_000_000_000, extras).expect("seal");
    assert!(matches!(settle(&mut session, &save), Progress::Durable));
    session.disconnect();
    let mut found = visit(&place).expect("it waits");
    let step = found.held()[0].clone();
    let sound = found.held[0].told.clone();
    let changes = changed_once(&serde_json::from_slice(&sound).expect("JSON"));
    for field in
        ["/crc32c", "/seal/created_ms", "/seal/extras/1/data", "/seal/tensors/0/name", "without /seal/round"]
    {
        assert!(changes.iter().any(|(path, _)| path == field), "{field}");
    }
    for (path, told) in changes {
        found.held[0].told = serde_json::to_vec(&told).expect("encode");
        let error = found.part(&step, 0).map(drop).expect_err(&path);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{path}: {error}");
    }
    let mut unchecked: Held = serde_json::from_slice(&sound).expect("parses");
    unchecked.crc32c = None;
    found.held[0].told = serde_json::to_vec(&unchecked).expect("encode");
    let mut other = unattached(&mut fixture, &place);
    other.adopt(found, true).expect("left");
    let warnings = other.take_warnings();
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("another version of Forebay sealed it"), "{warning}");
    let found = visit(&place).expect("it still waits");
    assert_eq!(read(&found, &step).expect("sound"), vec![1; 5000]);
    let mut last = unattached(&mut fixture, &place);
    last.adopt(found, true).expect("adopt");
    let end = attach(&mut last);
    agent.join().expect("agent").expect("served");
    last.dismiss();
    end.join().expect("agent").expect("served");
}

/// A trainer that lived could not read its own sealed steps until they were in the store, which may be away for long.
#[test]
fn what_a_living_trainers_memory_holds_is_open_to_its_job_while_it_is_shown() {
    let (mut fixture, place) = (Fixture::new(), place("open"));
    let (mut session, agent) = fixture.session(None);
    let saves = [(1, 3 << 20), (2, 5000)].map(|(step, length)| save(&mut session, step, length));
    assert!(matches!(settle(&mut session, &saves[0]), Progress::Durable));
    // The second one may be under way still, as it is where the store is away.
    let opened = session.open_memory(&place).expect("open");
    let taken = session.open_memory(&place).expect_err("it is open");
    assert_eq!(taken.kind(), ErrorKind::Exists);
    let visitors = [(); 3].map(|()| visit(&place).expect("it is open"));
    let mut successor = meet(&place, Duration::ZERO).expect("meet").expect("it is open");
    say(&mut successor, &Visit::Succeed(crate::agent::LostRanks::default()), None).expect("say");
    assert!(!matches!(successor.receive(), Ok(Some(_))), "nobody takes over what is in use");
    // As a child that was forked meanwhile has it.
    let elsewhere = opened.stop.as_ref().expect("open").share();
    drop(opened);
    assert!(visit(&place).is_none(), "it is shown no more");
    drop(elsewhere);
    for found in &visitors {
        assert_eq!((found.start(), numbers(&found.held())), (session.hello.start.nonce.as_str(), vec![2, 1]));
        assert!(numbers(found.durable()).contains(&1));
        assert_eq!(read(found, &found.held()[1]).expect("step 1"), vec![1; 3 << 20]);
        assert_eq!(read(found, &found.held()[0]).expect("step 2"), vec![2; 5000]);
    }
    // Saves go on as if nobody had looked.
    let third = save(&mut session, 3, 100);
    assert!(matches!(settle(&mut session, &third), Progress::Durable));
    session.dismiss();
    agent.join().expect("agent").expect("served");
}
