//! Trainer and agent together, the agent on a thread, the bucket in a directory.

use std::thread::JoinHandle;

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, BucketUrl, Condition, Faults, StoreSettings};
use futures::TryStreamExt;

use super::pending::AGENTS_A_SAVE;
use super::*;
use crate::agent::{Member, serve};
use crate::arena::{LACKS_MEMORY, Source};
use crate::catalog::{
    Keep, KnownShards, LEAST_AGE, Note, RankKey, Removed, Start, StepKey, StepName, begin_run,
    collect_garbage, list_pins, list_steps, load_manifest, pin, put_alive, put_failed, put_intent,
    remove_steps, retain, unpin,
};
use crate::dtype::Dtype;
use crate::manifest::{Encoding, Manifest};
use crate::region::Region;
use crate::restore::{Target, read_tensors};
use crate::verify::verify;

/// Long enough for any answer that comes at all.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Fixture {
    pub(super) directory: tempfile::TempDir,
    pub(super) runtime: tokio::runtime::Runtime,
    starts: u32,
}

impl Fixture {
    pub(super) fn new() -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("runtime");
        Self { directory: tempfile::tempdir().expect("directory"), runtime, starts: 0 }
    }

    fn url(&self) -> String {
        format!("file://{}", self.directory.path().display())
    }

    pub(super) fn bucket(&self) -> Bucket {
        let url: BucketUrl = self.url().parse().expect("url");
        self.runtime.block_on(Bucket::open(&url, &StoreSettings::default())).expect("bucket")
    }

    pub(super) fn session(&mut self, keep: Option<usize>) -> (Session, JoinHandle<Result<()>>) {
        let mut session = self.unattached(keep);
        let agent = attach(&mut session);
        (session, agent)
    }

    pub(super) fn unattached(&mut self, keep: Option<usize>) -> Session {
        self.starts += 1;
        let nonce = format!("{:08x}{:024}", self.starts, 0);
        let start = Start { nonce, host: "host".into(), pid: 7, started_ms: 0 };
        let keep = Keep { newest: keep, every: None };
        Session::new(Hello::new(self.url(), start, keep))
    }

    fn steps(&self) -> Vec<(u64, u64, bool)> {
        let steps = self.runtime.block_on(list_steps(&self.bucket())).expect("list");
        steps.into_iter().map(|info| (info.key.incarnation, info.key.step, info.superseded)).collect()
    }

    fn shards(&self) -> usize {
        self.shard_files().len()
    }

    fn shard_files(&self) -> Vec<std::path::PathBuf> {
        let listed = self.bucket().list("shards").try_collect::<Vec<_>>();
        let objects = self.runtime.block_on(listed).expect("list");
        objects.iter().map(|object| self.directory.path().join(object.key.as_str())).collect()
    }

    /// The keys of everything that is in the bucket.
    pub(super) fn objects(&self) -> Vec<String> {
        let listed = self.bucket().list("").try_collect::<Vec<_>>();
        let objects = self.runtime.block_on(listed).expect("list");
        objects.iter().map(|object| object.key.as_str().to_owned()).collect()
    }

    pub(super) fn manifest(&self, incarnation: u64, step: u64) -> Manifest {
        let bucket = self.bucket();
        let steps = self.runtime.block_on(list_steps(&bucket)).expect("list");
        let named = |info: &&crate::StepInfo| (info.key.incarnation, info.key.step) == (incarnation, step);
        let key: StepKey = steps.iter().find(named).expect("the step is listed").key.clone();
        self.runtime.block_on(load_manifest(&bucket, &key)).expect("manifest")
    }

    /// The first tensor of a step, through everything that a reader does.
    pub(super) fn load(&self, incarnation: u64, step: u64) -> Vec<u8> {
        let (bucket, manifest) = (self.bucket(), self.manifest(incarnation, step));
        let mut bytes = vec![0; manifest.tensors[0].shape[0] as usize];
        let region = Region::whole(&manifest.tensors[0].shape);
        let targets = vec![Target { tensor: 0, region, bytes: &mut bytes }];
        read_tensors(self.runtime.handle(), &bucket, &manifest, targets, 2).expect("read");
        bytes
    }
}

pub(super) fn attach(session: &mut Session) -> JoinHandle<Result<()>> {
    let (near, far) = FdStream::pair().expect("pair");
    let agent = std::thread::spawn(move || serve(far, None, None));
    session.connect(near).expect("connect");
    agent
}

/// Fills a snapshot with one tensor of `length` bytes of `fill`.
pub(super) fn snapshot(session: &mut Session, length: usize, fill: u8) -> Snapshot {
    let tensor = TensorSpec::whole("t", Dtype::named("uint8").expect("u8"), vec![length as u64]);
    let mut snapshot = loop {
        if let Some(snapshot) =
            session.begin(vec![tensor.clone()], TextLength::default(), 2, PATIENCE).expect("begin")
        {
            break snapshot;
        }
    };
    snapshot.copy(vec![(0, Source::Host(&vec![fill; length]))], 2).expect("copy");
    snapshot
}

pub(super) fn save(session: &mut Session, step: u64, length: usize) -> Arc<Save> {
    let snapshot = snapshot(session, length, step as u8);
    session.seal(snapshot, step, None, 0, Vec::new()).expect("seal")
}

pub(super) fn settle(session: &mut Session, save: &Save) -> Progress {
    while !save.progress().is_settled() && session.is_connected() {
        session.take_replies(PATIENCE).expect("replies");
    }
    save.progress()
}

#[test]
fn sealed_steps_are_committed_after_the_trainer_is_gone() {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    let first = save(&mut session, 10, 1000);
    let second = save(&mut session, 20, 9 << 20);
    while !matches!(second.progress(), Progress::Sealed | Progress::Durable) {
        session.take_replies(PATIENCE).expect("replies");
    }
    assert_eq!((first.step, second.step), (10, 20));
    drop(session);
    agent.join().expect("agent").expect("served");
    assert_eq!(fixture.steps(), [(1, 10, false), (1, 20, false)]);
    assert_eq!(fixture.load(1, 10), vec![10; 1000]);
    assert_eq!(fixture.load(1, 20), vec![20; 9 << 20]);
    let findings = fixture.runtime.block_on(verify(&fixture.bucket(), None, &|_| {})).expect("verify");
    assert_eq!(findings, []);
}

#[test]
fn slots_are_reused_and_larger_states_get_a_larger_arena() {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    for (step, length) in [(1, 10), (2, 3 << 20), (3, 3 << 20), (4, 20 << 20), (5, 5), (6, 6)] {
        save(&mut session, step, length);
    }
    while session.is_busy() {
        session.take_replies(PATIENCE).expect("replies");
    }
    assert_eq!(session.arenas_sent, 3);
    drop(session);
    agent.join().expect("agent").expect("served");
    assert_eq!(fixture.steps().len(), 6);
    assert_eq!(fixture.load(1, 4), vec![4; 20 << 20]);
}

#[test]
fn retention_keeps_the_newest_and_what_they_need() {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(Some(2));
    for step in 1..=5 {
        let filled = snapshot(&mut session, 100, step as u8);
        let save = session.seal(filled, step, None, 0, Vec::new()).expect("seal");
        assert!(matches!(settle(&mut session, &save), Progress::Durable));
    }
    drop(session);
    agent.join().expect("agent").expect("served");
    assert_eq!(fixture.steps(), [(1, 4, false), (1, 5, false)]);
    assert_eq!(fixture.shards(), 2);
    assert_eq!(fixture.load(1, 5), vec![5; 100]);
}

#[test]
fn a_later_start_supersedes_an_earlier_one() {
    let mut fixture = Fixture::new();
    let (mut old, old_agent) = fixture.session(None);
    let first = save(&mut old, 1, 10);
    assert!(matches!(settle(&mut old, &first), Progress::Durable));
    let (mut new, new_agent) = fixture.session(None);
    let again = save(&mut new, 1, 20);
    assert!(matches!(settle(&mut new, &again), Progress::Durable));
    let refused = save(&mut old, 2, 10);
    let Progress::Failed(error) = settle(&mut old, &refused) else { panic!("the old start was not refused") };
    assert_eq!(error.kind(), ErrorKind::Stale);
    assert!(error.message().contains("incarnation 2"), "{error}");
    drop((old, new));
    old_agent.join().expect("agent").expect("served");
    new_agent.join().expect("agent").expect("served");
    assert_eq!(fixture.steps(), [(2, 1, false)]);
    assert_eq!(fixture.load(2, 1), vec![1; 20]);
}

#[test]
fn a_step_is_saved_once_in_a_run() {
    let mut fixture = Fixture::new();
    let (mut session, _agent) = fixture.session(None);
    let first = save(&mut session, 3, 10);
    assert!(matches!(settle(&mut session, &first), Progress::Durable));
    let other = save(&mut session, 3, 11);
    let Progress::Failed(error) = settle(&mut session, &other) else { panic!("saved twice") };
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert_eq!(fixture.shards(), 1, "what was uploaded for it is deleted");
    assert_eq!(fixture.load(1, 3).len(), 10);
}

#[test]
fn a_dead_agents_saves_go_to_the_next_one() {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    session.disconnect();
    agent.join().expect("agent").expect("served");
    let orphan = save(&mut session, 8, 5000);
    assert_eq!(session.lost().expect("lost").steps, [8]);
    let agent = attach(&mut session);
    assert!(matches!(settle(&mut session, &orphan), Progress::Durable));
    drop(session);
    agent.join().expect("agent").expect("served");
    assert_eq!(fixture.load(1, 8), vec![8; 5000]);
}

#[test]
fn a_save_that_kills_its_agents_is_given_up() {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    session.disconnect();
    agent.join().expect("agent").expect("served");
    let doomed = save(&mut session, 8, 5000);
    for _ in 1..AGENTS_A_SAVE {
        assert!(matches!(doomed.progress(), Progress::Sent));
        let (near, far) = FdStream::pair().expect("pair");
        session.connect(near).expect("connect");
        drop(far);
        session.take_replies(PATIENCE).expect("replies");
        assert!(session.lost().is_some());
    }
    let agent = attach(&mut session);
    let Progress::Failed(error) = doomed.progress() else { panic!("tried for ever") };
    assert_eq!(error.message(), "3 agents died while they saved step 8");
    let next = save(&mut session, 9, 10);
    assert!(matches!(settle(&mut session, &next), Progress::Durable));
    drop(session);
    agent.join().expect("agent").expect("served");
    assert_eq!(fixture.steps(), [(1, 9, false)]);
}

/// Saves are flushed in their order: what came after it was given up with it.
#[test]
fn a_save_behind_the_one_that_kills_agents_is_kept() {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    session.disconnect();
    agent.join().expect("agent").expect("served");
    let (doomed, behind) = (save(&mut session, 8, 5000), save(&mut session, 9, 5000));
    for _ in 1..AGENTS_A_SAVE {
        let (near, far) = FdStream::pair().expect("pair");
        session.connect(near).expect("connect");
        drop(far);
        session.take_replies(PATIENCE).expect("replies");
    }
    let agent = attach(&mut session);
    assert!(matches!(doomed.progress(), Progress::Failed(_)), "tried for ever");
    assert!(matches!(settle(&mut session, &behind), Progress::Durable), "{:?}", behind.progress());
    drop(session);
    agent.join().expect("agent").expect("served");
    assert_eq!(fixture.steps(), [(1, 9, false)]);
}

#[test]
fn bytes_that_changed_after_the_seal_are_in_no_shard() {
    // In one PUT, and in parts, some of which were sent when it was found.
    for length in [100, 20 << 20] {
        save_what_changed(length);
    }
}

fn save_what_changed(length: usize) {
    let mut fixture = Fixture::new();
    let (mut session, _agent) = fixture.session(None);
    let filled = snapshot(&mut session, length, 1);
    let (mut slot, shard) = filled.finish().expect("finish");
    slot.bytes_mut()[shard.size as usize - 1] ^= 1;
    let (index, memory) = (slot.index(), slot.memory().clone());
    let sealed = &slot.bytes_mut()[..shard.size as usize];
    let seal = Seal { slot: index, ..Seal::of_test(1, 1, sealed, shard.header as usize, shard.tensors) };
    let held = Held::new("x".into(), 0, 1, seal);
    let save =
        Arc::new(Save { step: 1, number: 1, progress: Mutex::new(Progress::Sent), times: Mutex::default() });
    session.pending.push_back(Pending { save: save.clone(), slot, is_given: true, deaths: 0 });
    session.send_held(held, &memory, Request::Seal).expect("send");
    let Progress::Failed(error) = settle(&mut session, &save) else { panic!("damage was uploaded") };
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.message().contains("tensor `t`"), "{error}");
    assert_eq!((fixture.shards(), fixture.steps().len()), (0, 0));
    let left = fixture.runtime.block_on(fixture.bucket().list_uploads("shards")).expect("list");
    assert_eq!(left, [], "no part stays");
}

#[test]
fn without_a_free_slot_a_save_waits_or_is_skipped() {
    let mut fixture = Fixture::new();
    let (mut session, _agent) = fixture.session(None);
    let first = snapshot(&mut session, 10, 1);
    let second = snapshot(&mut session, 10, 2);
    let tensor = TensorSpec::whole("t", Dtype::named("uint8").expect("u8"), vec![10]);
    assert!(!session.has_room(Duration::ZERO).expect("room"));
    assert!(session.begin(vec![tensor], TextLength::default(), 1, Duration::ZERO).expect("begin").is_none());
    session.abandon(first);
    session.abandon(second);
    let third = save(&mut session, 3, 10);
    assert!(matches!(settle(&mut session, &third), Progress::Durable));
}

/// The slot was lost with the snapshot that it was for, and later saves waited for ever.
#[test]
fn a_snapshot_without_memory_costs_no_slot() {
    let mut fixture = Fixture::new();
    let (mut session, _agent) = fixture.session(None);
    let first = save(&mut session, 1, 10);
    assert!(matches!(settle(&mut session, &first), Progress::Durable));
    session.keep(session.held().into_iter().next());
    let tensors = || vec![TensorSpec::whole("t", Dtype::named("uint8").expect("u8"), vec![10])];
    LACKS_MEMORY.set(true);
    let refused = session.begin(tensors(), TextLength::default(), 1, Duration::ZERO).expect_err("no memory");
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    let begun = session.begin(tensors(), TextLength::default(), 1, Duration::ZERO).expect("begin");
    assert!(begun.is_some(), "in the slot without the step that is kept");
}

/// It was committed and told durable, and nobody could read it.
#[test]
fn what_no_manifest_can_say_is_refused_and_takes_no_slot() {
    let mut fixture = Fixture::new();
    let (mut session, _agent) = fixture.session(None);
    session.most_text = 1 << 20;
    for step in 1..=3 {
        let snapshot = snapshot(&mut session, 10, 1);
        let extra = Extra { name: "state".into(), encoding: Encoding::Json, data: "1".repeat(1 << 20) };
        let refused = session.seal(snapshot, step, None, 0, vec![extra]).expect_err("too long");
        assert_eq!(refused.kind(), ErrorKind::TooLarge);
    }
    let save = save(&mut session, 4, 10);
    assert!(matches!(settle(&mut session, &save), Progress::Durable));
}

#[test]
fn a_damaged_manifest_under_retention_deletes_nothing_it_may_need() {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    for step in 1..=3 {
        let save = save(&mut session, step, 10);
        assert!(matches!(settle(&mut session, &save), Progress::Durable));
    }
    drop(session);
    agent.join().expect("agent").expect("served");
    let bucket = fixture.bucket();
    fixture.runtime.block_on(async {
        let steps = list_steps(&bucket).await.expect("list");
        bucket.put(&steps[2].key.object(), "{}".into(), Condition::Always).await.expect("put");
        let error = crate::catalog::retain(
            &bucket,
            Keep { newest: Some(1), every: None },
            &mut KnownShards::default(),
        )
        .await
        .expect_err("unreadable");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    });
    assert_eq!((fixture.steps().len(), fixture.shards()), (3, 3));
}

/// Two ranks that save together: replicated bytes in two shares, and one tensor of rank 1's own.
pub(super) struct Pair {
    start: Start,
    pub(super) sessions: [Session; 2],
    agents: Vec<JoinHandle<Result<()>>>,
}

impl Pair {
    pub(super) fn new(fixture: &mut Fixture) -> Self {
        fixture.starts += 1;
        let nonce = format!("{:08x}{:024}", fixture.starts, 0);
        let start = Start { nonce, host: "host".into(), pid: 7, started_ms: 0 };
        let run = fixture.runtime.block_on(begin_run(&fixture.bucket(), start.clone())).expect("run");
        let session = |rank| {
            let member = Member { run: run.clone(), rank, world_size: 2 };
            let keep = Keep { newest: Some(1), every: None };
            let hello = Hello::new(fixture.url(), start.clone(), keep);
            let mut session = Session::new(hello);
            session.join(member);
            let agent = attach(&mut session);
            (session, agent)
        };
        let ((first, one), (second, other)) = (session(0), session(1));
        Self { start: start.clone(), sessions: [first, second], agents: vec![one, other] }
    }

    /// Seals a rank's part of a step: elements `share` of tensor `w`, all of the step's number.
    pub(super) fn save(&mut self, rank: usize, step: u64, share: std::ops::Range<u64>) -> Arc<Save> {
        let dtype = Dtype::named("uint8").expect("u8");
        let mut tensors = vec![TensorSpec::whole("w", dtype, vec![1 << 20])];
        tensors[0].region = Region::flat(share.clone());
        if rank == 1 {
            tensors.push(TensorSpec::whole("own@1", dtype, vec![3]));
        }
        let session = &mut self.sessions[rank];
        let mut snapshot = loop {
            if let Some(snapshot) =
                session.begin(tensors.clone(), TextLength::default(), 2, PATIENCE).expect("begin")
            {
                break snapshot;
            }
        };
        let bytes = vec![step as u8; (share.end - share.start) as usize];
        let own = [rank as u8; 3];
        let sources = [(0, Source::Host(&bytes)), (1, Source::Host(&own))];
        snapshot.copy(sources[..tensors.len()].to_vec(), 2).expect("copy");
        session.seal(snapshot, step, None, 0, Vec::new()).expect("seal")
    }
}

#[test]
fn a_step_of_two_ranks_is_there_once_both_stored_their_parts() {
    let mut fixture = Fixture::new();
    let mut pair = Pair::new(&mut fixture);
    let mut shards = 0;
    for step in 1..=3 {
        let first = pair.save(0, step, 0..500_000);
        pair.sessions[0].take_replies(Duration::from_millis(50)).expect("replies");
        assert_eq!(fixture.steps().iter().filter(|entry| entry.1 == step).count(), 0, "one part is no step");
        let second = pair.save(1, step, 500_000..1 << 20);
        assert!(matches!(settle(&mut pair.sessions[0], &first), Progress::Durable));
        assert!(matches!(settle(&mut pair.sessions[1], &second), Progress::Durable));
        assert_eq!(fixture.load(1, step), vec![step as u8; 1 << 20]);
        shards = fixture.shards();
    }
    // Killed between seal and commit: both agents go on.
    let _ = (pair.save(0, 4, 0..1000), pair.save(1, 4, 1000..1 << 20));
    for (session, agent) in pair.sessions.iter_mut().zip(pair.agents) {
        session.disconnect();
        agent.join().expect("agent").expect("served");
    }
    assert_eq!(fixture.steps(), [(1, 4, false)], "the others were not to be kept");
    assert_eq!(fixture.load(1, 4), vec![4; 1 << 20]);
    assert!(shards <= 4 && fixture.shards() == 2, "{shards}");
    let left = fixture.directory.path().join("ranks");
    assert!(!left.exists() || std::fs::read_dir(left).expect("list").count() == 0, "no index is left");
    let findings = fixture.runtime.block_on(verify(&fixture.bucket(), None, &|_| {})).expect("verify");
    assert_eq!(findings, []);
}

#[test]
fn what_keeps_one_rank_from_saving_is_told_to_the_other() {
    let mut fixture = Fixture::new();
    let mut pair = Pair::new(&mut fixture);
    let first = pair.save(0, 1, 0..10);
    pair.sessions[1].give_up(1, None, "tensor `w` changed".into());
    let Progress::Failed(error) = settle(&mut pair.sessions[0], &first) else { panic!("it cannot be saved") };
    assert!(error.message().contains("rank 1: tensor `w` changed"), "{error}");
    // Two ranks that both think that an element is theirs, or that it is the other's.
    for (step, split) in [(2, 400_000), (3, 600_000)] {
        let saves = [pair.save(0, step, 0..500_000), pair.save(1, step, split..1 << 20)];
        for (rank, save) in saves.into_iter().enumerate() {
            let Progress::Failed(error) = settle(&mut pair.sessions[rank], &save) else {
                panic!("step {step} does not cover its tensor once")
            };
            assert!(error.message().contains("tensor `w`"), "{error}");
        }
    }
    let saves = [pair.save(0, 5, 0..500_000), pair.save(1, 5, 500_000..1 << 20)];
    for (rank, save) in saves.into_iter().enumerate() {
        assert!(matches!(settle(&mut pair.sessions[rank], &save), Progress::Durable), "and then it goes on");
    }
    assert_eq!(fixture.steps().len(), 1);
}

#[test]
fn pinned_steps_and_every_so_many_stay() {
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    for step in 1..=7 {
        let save = save(&mut session, step, 10);
        assert!(matches!(settle(&mut session, &save), Progress::Durable));
    }
    drop(session);
    agent.join().expect("agent").expect("served");
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
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    for step in 1..=2 {
        let save = save(&mut session, step, 10);
        assert!(matches!(settle(&mut session, &save), Progress::Durable));
    }
    drop(session);
    agent.join().expect("agent").expect("served");
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
    let mut fixture = Fixture::new();
    let (mut session, agent) = fixture.session(None);
    let save = save(&mut session, 1, 10);
    assert!(matches!(settle(&mut session, &save), Progress::Durable));
    drop(session);
    agent.join().expect("agent").expect("served");
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
