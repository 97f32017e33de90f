//! What is kept, pinned, deleted, and collected as garbage.

use forebay_core::ObjectKey;
use forebay_io::object::{Condition, Faults};
use futures::TryStreamExt;

use super::tests::{Fixture, Pair, save, settle};
use super::*;
use crate::catalog::{
    Keep, KnownShards, LEAST_AGE, Note, RankKey, Removed, StepKey, StepName, begin_run, collect_garbage,
    list_pins, list_steps, pin, put_alive, put_failed, put_intent, remove_steps, retain, unpin,
};
use crate::verify::verify;

/// A place where one start saved these steps, and ended.
fn saved(steps: std::ops::RangeInclusive<u64>) -> Fixture {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    for step in steps {
        let save = save(&mut session, step, 10);
        assert!(matches!(settle(&mut session, &save), Progress::Durable));
    }
    drop(session);
    agent.join().expect("agent").expect("served");
    fixture
}

#[test]
fn pinned_steps_and_every_so_many_stay() {
    let fixture = saved(1..=7);
    let bucket = fixture.bucket();
    let numbers = |fixture: &Fixture| fixture.steps().iter().map(|entry| entry.1).collect::<Vec<_>>();
    fixture.runtime.block_on(async {
        assert_eq!(
            pin(&bucket, StepName::from(99)).await.expect_err("no such step").kind(),
            ErrorKind::NotFound
        );
        pin(&bucket, StepName::from(2)).await.expect("pin");
        retain(&bucket, Keep { newest: Some(2), every: Some(4) }, &mut KnownShards::default())
            .await
            .expect("retain");
    });
    assert_eq!((numbers(&fixture), fixture.shards()), (vec![2, 4, 6, 7], 4));
    fixture.runtime.block_on(async {
        let error = remove_steps(&bucket, &[4, 2]).await.expect_err("pinned");
        assert!(error.message().contains("step 2 is pinned"), "{error}");
        unpin(&bucket, StepName::from(2)).await.expect("unpin");
        remove_steps(&bucket, &[4, 2]).await.expect("remove");
        assert_eq!(remove_steps(&bucket, &[4]).await.expect_err("gone").kind(), ErrorKind::NotFound);
    });
    assert_eq!((numbers(&fixture), fixture.shards()), (vec![6, 7], 2));
    let findings = fixture.runtime.block_on(verify(&bucket, None, &|_| {})).expect("verify");
    assert_eq!(findings, []);
}

#[test]
fn a_pinned_step_that_another_start_saves_again_stays_as_it_was() {
    let mut fixture = Fixture::new();
    for length in [10, 20, 30] {
        let (mut session, agent) = fixture.session(None);
        for step in [2, 3] {
            let save = save(&mut session, step, length);
            assert!(matches!(settle(&mut session, &save), Progress::Durable));
        }
        drop(session);
        agent.join().expect("agent").expect("served");
        let pinned = fixture.runtime.block_on(pin(&fixture.bucket(), "2".parse().expect("a name")));
        pinned.expect("what counts now");
        if length == 20 {
            let name = "2.2".parse().expect("a name");
            fixture.runtime.block_on(unpin(&fixture.bucket(), name)).expect("that of one start alone");
        }
    }
    let (bucket, keep) = (fixture.bucket(), Keep { newest: Some(1), every: None });
    fixture.runtime.block_on(retain(&bucket, keep, &mut KnownShards::default())).expect("retain");
    let left = vec![(1, 2, true), (3, 2, false), (3, 3, false)];
    assert_eq!((fixture.steps(), fixture.shards()), (left.clone(), 3));
    let size = |name: &str| {
        let shown = fixture.runtime.block_on(crate::verify::show(&bucket, name.parse().expect("a name")));
        shown.map(|manifest| manifest.tensors[0].shape[0]).map_err(|error| error.message().to_owned())
    };
    assert_eq!(["2", "2.1", "2.3"].map(size), [Ok(30), Ok(10), Ok(30)]);
    assert!(size("2.2").expect_err("deleted").ends_with("holds no step 2 of start 2"));
    let remove = || fixture.runtime.block_on(remove_steps(&bucket, &[2])).map_err(|error| error.to_string());
    for (pinned, name) in [(1, "2.1"), (3, "2.3")] {
        let error = remove().expect_err("pinned");
        assert!(error.contains(&format!("step 2 is pinned, as start {pinned} saved it")), "{error}");
        assert_eq!(fixture.steps(), left);
        fixture.runtime.block_on(unpin(&bucket, name.parse().expect("a name"))).expect("unpin");
    }
    assert_eq!(remove(), Ok(Removed { manifests: 2, shards: 2 }));
    assert_eq!(fixture.steps(), left[2..]);
    for none in ["", "2.", ".1", "2.1.1", "-2", "x"] {
        assert!(none.parse::<StepName>().is_err(), "{none}");
    }
}

/// A pin that is told to hold keeps its step, in whatever moment of a deletion it comes.
#[test]
fn a_step_that_is_pinned_in_any_moment_of_its_deletion_stays_or_the_pin_fails() {
    let mut outcomes = Vec::new();
    while let Some(outcome) = pin_beside_a_deletion(outcomes.len() as u64 + 1) {
        outcomes.push(outcome);
    }
    let gone = outcomes.iter().position(|(_, is_there)| !is_there).expect("it came late at last");
    for (at, (pinned, is_there)) in outcomes.iter().enumerate() {
        assert!(pinned.is_err() || *is_there, "before request {}: {outcomes:?}", at + 1);
    }
    assert!(outcomes[..6].iter().all(|outcome| *outcome == (Ok(()), true)), "{outcomes:?}");
    assert_eq!(outcomes[gone], (Err(ErrorKind::Conflict), false), "its deletion was under way: {outcomes:?}");
    assert!(outcomes[gone + 1..].contains(&(Err(ErrorKind::NotFound), false)), "{outcomes:?}");
}

/// Pins a step right before that request of its deletion: what came of the pin, and whether the step is there after all; none
/// where the deletion has fewer requests.
fn pin_beside_a_deletion(request: u64) -> Option<(std::result::Result<(), ErrorKind>, bool)> {
    let fixture = saved(1..=2);
    let (bucket, faults) = (fixture.bucket(), Faults::default());
    let deleter = bucket.with_faults(&faults);
    let gate = faults.gate(request);
    let pinned = fixture.runtime.block_on(async {
        let mut removing = std::pin::pin!(remove_steps(&deleter, &[1]));
        tokio::select! {
            _ = &mut removing => return None,
            () = gate.reached() => {}
        }
        let pinned = pin(&bucket, StepName::from(1)).await.map_err(|error| error.kind());
        gate.open();
        // Refused, or of no step.
        removing.await.ok();
        let left: Vec<_> = bucket.list("deleting").try_collect().await.expect("list");
        assert!(left.is_empty(), "{left:?}");
        let pins = list_pins(&bucket).await.expect("pins");
        assert_eq!(pins.len(), usize::from(pinned.is_ok()));
        Some(pinned)
    })?;
    Some((pinned, fixture.steps().iter().any(|(_, step, _)| *step == 1)))
}

/// Who was killed while it deleted a step has marked it for ever.
#[test]
fn a_mark_that_a_killed_deletion_left_does_not_count_for_long_and_goes_with_the_garbage() {
    let fixture = saved(1..=1);
    let (bucket, key) = (fixture.bucket(), fixture.runtime.block_on(list_steps(&fixture.bucket())));
    let manifest = key.expect("steps")[0].key.object();
    let mark = ObjectKey::new(manifest.as_str().replace("steps/", "deleting/").replace(".json", "/0a"));
    let pin_once = |age: u64| {
        fixture.runtime.block_on(async {
            bucket.put(&mark, Default::default(), Condition::Always).await.expect("put");
            make_old(&fixture.directory.path().join(mark.as_str()), Duration::from_secs(age));
            pin(&bucket, StepName::from(1)).await.map_err(|error| error.kind())
        })
    };
    assert_eq!(pin_once(0), Err(ErrorKind::Conflict));
    // Nor is it gone with that of another deletion, which kept the step.
    let other = ObjectKey::new(mark.as_str().replace("/0a", "/0b"));
    fixture.runtime.block_on(async {
        bucket.put(&other, Default::default(), Condition::Always).await.expect("put");
        bucket.delete(&other).await.expect("delete");
    });
    assert_eq!(pin_once(0), Err(ErrorKind::Conflict));
    assert_eq!(pin_once(3000), Ok(()));
    // One that holds is not taken away by one that comes at the wrong moment.
    assert_eq!(pin_once(0), Ok(()));
    assert_eq!(fixture.runtime.block_on(list_pins(&bucket)).expect("pins").len(), 1);
    let collect = || {
        let found = fixture.runtime.block_on(collect_garbage(&bucket, LEAST_AGE, false)).expect("collect");
        (found.indexes, found.shards)
    };
    assert_eq!(collect(), (vec![], vec![]));
    make_old(&fixture.directory.path().join(mark.as_str()), 2 * LEAST_AGE);
    assert_eq!(collect(), (vec![mark.clone()], vec![]));
    assert_eq!((fixture.steps().len(), fixture.shards()), (1, 1));
}

#[test]
fn what_a_save_noted_that_it_refers_to_stays_until_the_note_is_old() {
    let fixture = Fixture::new();
    let bucket = fixture.bucket();
    let key = format!("shards/{:020}/0000000001-00000001/000000-000001-00000000.safetensors", 1);
    let save = StepKey { incarnation: 1, step: 2, attempt: "00000001".into() };
    fixture.runtime.block_on(async {
        bucket.put(&ObjectKey::new(&key), "bytes".into(), Condition::Always).await.expect("put");
        put_intent(&bucket, &RankKey { save, rank: 0, note: Note::Intent }, vec![key.clone()])
            .await
            .expect("put");
    });
    age(&fixture.directory.path().join(&key));
    let gc = || fixture.runtime.block_on(collect_garbage(&bucket, LEAST_AGE, false)).expect("gc");
    assert_eq!(gc(), Default::default());
    age(&fixture.directory.path().join(format!("ranks/{:020}/0000000001-00000001/000000.intent", 2)));
    let found = gc();
    assert_eq!((found.shards, found.indexes.len()), (vec![ObjectKey::new(&key)], 1));
    // What belongs to a save is spared as long as any of its ranks goes on.
    let save = StepKey { incarnation: 1, step: 1, attempt: "00000001".into() };
    fixture.runtime.block_on(async {
        bucket.put(&ObjectKey::new(&key), "bytes".into(), Condition::Always).await.expect("put");
        put_failed(&bucket, save.clone(), 2, None, "a note of another rank").await.expect("put");
        put_alive(&bucket, save, 1).await.expect("put");
    });
    let note = |name| fixture.directory.path().join(format!("ranks/{:020}/0000000001-00000001/{name}", 1));
    age(&fixture.directory.path().join(&key));
    age(&note("000002.failed"));
    assert_eq!(gc(), Default::default());
    age(&note("000001.alive"));
    let found = gc();
    assert_eq!((found.shards.len(), found.indexes.len()), (1, 2));
    // A note that cannot be read: it is unknown what it needs.
    let damaged = ObjectKey::new(format!("ranks/{:020}/0000000001-00000001/000000.intent", 3));
    let put = bucket.put(&damaged, "{}".into(), Condition::Always);
    fixture.runtime.block_on(put).expect("put");
    let error = fixture.runtime.block_on(collect_garbage(&bucket, LEAST_AGE, false)).expect_err("damaged");
    assert!(error.kind() == ErrorKind::Corrupt && error.message().contains("000000.intent"), "{error}");
}

/// Has a file be two hours old.
fn age(path: &std::path::Path) {
    make_old(path, Duration::from_secs(7200));
}

fn make_old(path: &std::path::Path, age: Duration) {
    let past = std::time::SystemTime::now() - age;
    std::fs::File::open(path).and_then(|file| file.set_modified(past)).expect("age");
}

#[test]
fn what_dead_agents_left_goes_and_nothing_that_a_save_may_need() {
    let mut fixture = Fixture::new();
    let mut pair = Pair::new(&mut fixture);
    let saves = [pair.save(0, 1, 0..10), pair.save(1, 1, 10..1 << 20)];
    for (rank, save) in saves.iter().enumerate() {
        assert!(matches!(settle(&mut pair.sessions[rank], save), Progress::Durable));
    }
    // Rank 1 never stores its part of step 2.
    pair.save(0, 2, 0..10);
    let index = fixture.directory.path().join(format!("ranks/{:020}", 2));
    while !index.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let bucket = fixture.bucket();
    let run = fixture.runtime.block_on(begin_run(&bucket, pair.start.clone())).expect("the same");
    let failed = StepKey { incarnation: run.incarnation, step: 2, attempt: run.attempt().to_owned() };
    let gc =
        |only_look| fixture.runtime.block_on(collect_garbage(&bucket, LEAST_AGE, only_look)).expect("gc");
    assert_eq!(gc(false), Default::default(), "all of it is young");
    let too_young = fixture.runtime.block_on(collect_garbage(&bucket, Duration::ZERO, true));
    assert_eq!(too_young.expect_err("refused").kind(), ErrorKind::Invalid);
    // Two hours later.
    fixture.shard_files().iter().for_each(|file| age(file));
    assert_eq!(gc(true).shards.len(), 0, "an index that is young names the third");
    for start in std::fs::read_dir(&index).expect("list") {
        let files = std::fs::read_dir(start.expect("entry").path()).expect("list");
        files.for_each(|entry| age(&entry.expect("entry").path()));
    }
    let found = gc(true);
    assert_eq!((found.shards.len(), found.indexes.len(), fixture.shards()), (1, 1, 3), "only looked for");
    assert_eq!(gc(false), found);
    assert_eq!(fixture.shards(), 2);
    assert_eq!(fixture.load(1, 1), vec![1; 1 << 20]);
    fixture.runtime.block_on(put_failed(&bucket, failed, 1, None, "the test ends")).expect("put");
    for (session, agent) in pair.sessions.iter_mut().zip(pair.agents) {
        session.disconnect();
        agent.join().expect("agent").expect("served");
    }
    let findings = fixture.runtime.block_on(verify(&bucket, None, &|_| {})).expect("verify");
    assert_eq!(findings, []);
}
