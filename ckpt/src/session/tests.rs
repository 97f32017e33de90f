//! Trainer and agent together, the agent on a thread, the bucket in a directory.

use std::thread::JoinHandle;

use forebay_io::object::{Bucket, BucketUrl, Condition, StoreSettings};
use futures::TryStreamExt;

use super::pending::AGENTS_A_SAVE;
use super::*;
use crate::agent::{Member, serve};
use crate::arena::{LACKS_MEMORY, Source};
use crate::catalog::{Keep, KnownShards, Start, StepKey, begin_run, list_steps, load_manifest};
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

    /// Holds back whoever gives anything in the bucket its name, until what this returns is dropped: nothing is durable.
    pub(super) fn hold_names(&self) -> std::fs::File {
        let staging = self.directory.path().join(".forebay/staging");
        std::fs::create_dir_all(&staging).expect("a folder");
        let lock = std::fs::File::create(staging.join("lock")).expect("the lock");
        lock.lock().expect("locked");
        lock
    }

    pub(super) fn session(&mut self, keep: Option<usize>) -> (Session, JoinHandle<Result<()>>) {
        let mut session = self.unattached(keep);
        let agent = attach(&mut session);
        (session, agent)
    }

    pub(super) fn unattached(&mut self, keep: Option<usize>) -> Session {
        self.starts += 1;
        let nonce = format!("{:08x}{:024}", self.starts, 0);
        let start = Start { nonce, host: "host".into(), pid: 7, started_ms: self.starts.into() };
        let keep = Keep { newest: keep, every: None };
        Session::new(Hello::new(self.url(), start, keep))
    }

    pub(super) fn steps(&self) -> Vec<(u64, u64, bool)> {
        let steps = self.runtime.block_on(list_steps(&self.bucket())).expect("list");
        steps.into_iter().map(|info| (info.key.incarnation, info.key.step, info.superseded)).collect()
    }

    pub(super) fn shards(&self) -> usize {
        self.shard_files().len()
    }

    pub(super) fn shard_files(&self) -> Vec<std::path::PathBuf> {
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
    snapshot.copy(vec![(0, Source::Host(&vec![fill; length]))], 2, None).expect("copy");
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

/// Where a state had outgrown its memory, the former one stayed taken until a save had succeeded, for which there was no room then: on a
/// host that has little more than that, none ever did.
#[test]
fn former_memory_is_given_back_before_more_is_taken() {
    for slots in [1, 2] {
        let mut fixture = Fixture::new();
        let (mut session, agent) = fixture.session(None);
        if slots == 1 {
            session.keep_one_snapshot();
        }
        let first = save(&mut session, 1, 20 << 20);
        assert!(matches!(settle(&mut session, &first), Progress::Durable));
        let former = session.announced.clone().expect("the agent knows it");
        let resident = |memory: &SharedMemory| {
            let file = std::fs::File::from(memory.as_fd().try_clone_to_owned().expect("a descriptor"));
            std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("its size")) * 512
        };
        assert!(resident(&former) >= 20 << 20);
        let tensor = TensorSpec::whole("t", Dtype::named("uint8").expect("u8"), vec![40 << 20]);
        let larger = session.begin(vec![tensor], TextLength::default(), 1, PATIENCE).expect("begin");
        assert_eq!(resident(&former), 0, "{slots} slots");
        drop(larger);
        drop(session);
        agent.join().expect("agent").expect("served");
        assert_eq!(fixture.load(1, 1), vec![1; 20 << 20]);
    }
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
    session.pending.push_back(Pending {
        save: save.clone(),
        slot,
        is_given: true,
        is_replicated: true,
        deaths: 0,
    });
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
    pub(super) start: Start,
    pub(super) sessions: [Session; 2],
    pub(super) agents: Vec<JoinHandle<Result<()>>>,
}

impl Pair {
    pub(super) fn new(fixture: &mut Fixture) -> Self {
        Self::of(fixture, |_, _| {})
    }

    /// One whose sessions are made so before their agents are greeted.
    pub(super) fn of(fixture: &mut Fixture, made: impl Fn(u32, &mut Session)) -> Self {
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
            made(rank, &mut session);
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
        snapshot.copy(sources[..tensors.len()].to_vec(), 2, None).expect("copy");
        session.seal(snapshot, step, None, 0, Vec::new()).expect("seal")
    }
}

/// It may have no time left when it has heard what the agent said before.
#[test]
fn the_agent_is_told_of_a_wait_that_finds_a_reply() {
    let mut fixture = Fixture::new();
    let mut session = fixture.unattached(None);
    let (near, mut far) = FdStream::pair().expect("pair");
    session.connect(near).expect("connect");
    let save = save(&mut session, 1, 10);
    let sealed = serde_json::to_vec(&Reply::Sealed { save: save.number, at_us: 1 }).expect("json");
    far.send(&sealed, None).expect("reply");
    session.take_replies(Duration::from_millis(1)).expect("replies");
    assert!(matches!(save.progress(), Progress::Sealed));
    let mut told = Vec::new();
    while far.readable(Duration::ZERO).expect("readable") {
        let (frame, _) = far.receive().expect("request").expect("connected");
        told.push(serde_json::from_slice::<Request>(&frame).expect("request"));
    }
    assert!(matches!(told.last(), Some(Request::Await { save: 1 })), "{told:?}");
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

/// They waited ten minutes for a part that nobody was at any more.
#[test]
fn a_save_that_kills_one_ranks_agents_is_told_to_the_other() {
    let mut fixture = Fixture::new();
    let mut pair = Pair::new(&mut fixture);
    pair.sessions[1].disconnect();
    pair.agents.pop().expect("an agent").join().expect("agent").expect("served");
    let (first, doomed) = (pair.save(0, 1, 0..500_000), pair.save(1, 1, 500_000..1 << 20));
    for _ in 1..AGENTS_A_SAVE {
        let (near, far) = FdStream::pair().expect("pair");
        pair.sessions[1].connect(near).expect("connect");
        drop(far);
        pair.sessions[1].take_replies(PATIENCE).expect("replies");
    }
    let _agent = attach(&mut pair.sessions[1]);
    assert!(matches!(doomed.progress(), Progress::Failed(_)));
    for _ in 0..PATIENCE.as_secs() {
        if !first.progress().is_settled() {
            pair.sessions[0].take_replies(Duration::from_secs(1)).expect("replies");
        }
    }
    let Progress::Failed(error) = first.progress() else { panic!("it waits for the other: {first:?}") };
    assert!(error.message().contains("rank 1: 3 agents died while they saved step 1"), "{error}");
    let saves = [pair.save(0, 2, 0..500_000), pair.save(1, 2, 500_000..1 << 20)];
    for (rank, save) in saves.into_iter().enumerate() {
        assert!(matches!(settle(&mut pair.sessions[rank], &save), Progress::Durable), "and then it goes on");
    }
}

/// Ranks that are lost are those of the start whose step was restored: its agents know it by coming last.
#[test]
fn the_start_whose_step_was_restored_comes_last() {
    let mut fixture = Fixture::new();
    let mut session = fixture.unattached(None);
    session.go_on_from(Origin { attempt: "aaaaaaaa".to_owned(), step: 1 });
    // This rank's own agent was of another one.
    session.hello.comes_after("bbbbbbbb");
    session.set_lost(Vec::new(), vec![1], Vec::new());
    assert_eq!(session.hello.after, ["bbbbbbbb", "aaaaaaaa"]);
}
