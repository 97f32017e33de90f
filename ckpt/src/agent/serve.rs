//! The agent's life: it serves one trainer, and ends when that is done, or when it was killed, nothing is left to bring
//! home, and another one took over what is in memory, or did not come in time.
//!
//! What is in memory is held for as long as the trainer allowed, anew from each time that nobody is there who looked at it:
//! a trainer that restored from it takes it over at its first save, however long it prepares until then. A bound on all
//! of it lets go where starts restore again and again and never save. Whatever bound passed, what is not settled stays:
//! whoever looked, and hears that the agent is gone, would write into what is being uploaded.
//!
//! One thread reads requests, and afterwards receives successors; one task flushes, see `flusher`, and one writes to this
//! host's disk, see `disk`.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::net::{FdStream, Notice, Rdma};
use forebay_io::priority::Priority;
use forebay_io::task::{TaskGroup, end};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::copy::{Copy, Settled, copy};
use super::disk::{Copies, Disk};
use super::door::Door;
use super::flush::{Given, Save};
use super::flusher::{Flusher, Work, disk_hangs};
use super::holdings::Holdings;
use super::pace::Pace;
use super::protocol::{MADE_WAY, MAKES_WAY_LATER, Replication, now_us};
use super::replicas::{Keeper, Outbox, Sender, without_copies};
use super::source::Source;
use super::trainer::Trainer;
use super::{Anew, Hello, LostRanks, Reply, Request, Told, VISIT_VERSION, Visit};
use crate::arena::{Held, HeldStep, SLOTS, attempt_of};
use crate::local::PATIENCE;

/// Copies under way at most, of two slots of the present arena and two of the one before: whole ones and those that go on.
const MAX_COPIES: usize = 4 * SLOTS;
/// How often an agent that is to end, and may not yet, looks whether it may.
const GLANCE: Duration = Duration::from_millis(100);
/// How many times as long as a successor is waited for the memory is held at most, whoever looks at it meanwhile: four hours
/// where nothing else was asked for, longer than a start compiles.
const MOST_LINGERS: u32 = 24;

/// Serves the trainer at the other end of `stream` until it is gone, every sealed save is settled, and nobody is to come
/// for what is in memory. With the `priority` of this process, the trainer goes first. Once `notice` to end was given,
/// nobody is waited for beyond the last sealed save.
pub fn serve(stream: FdStream, priority: Option<Priority>, notice: Option<Notice>) -> Result<()> {
    let pace = Arc::new(Pace::new(priority));
    let of_threads = pace.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .on_thread_start(move || of_threads.join())
        .enable_all()
        .build()?;
    let served = serve_on(&runtime, stream, pace, notice);
    // What hangs does not keep the process.
    end(runtime);
    served
}

fn serve_on(runtime: &Runtime, mut stream: FdStream, pace: Arc<Pace>, notice: Option<Notice>) -> Result<()> {
    let (trainer, clock) = (Trainer::new(stream.share(), pace.clone()), Clock::system());
    let Some((frame, _)) = stream.receive()? else { return Ok(()) };
    let Request::Hello(hello) = parse(&frame)? else {
        return Err(Error::invalid("an agent is greeted first"));
    };
    // Slots bound the saves. Beside them are a few words: that a step was given up, while the store is away for long, and the
    // trainer is heard all the same.
    let (saves, queue) = mpsc::unbounded_channel();
    let tasks = TaskGroup::new("agent");
    let _context = runtime.enter();
    let (copies, work) = Copies::new(MAX_COPIES);
    let disk = Disk::new(&hello, &trainer, &copies).map(|disk| {
        let (begun, ticket) = copy(copies.health(), 0);
        let disk = tasks.spawn("disk", disk.do_all(ticket, work));
        // Before this start takes its number, which makes the copies of others stale.
        if let Settled::Hangs(patience) = runtime.block_on(begun.settled(&clock)) {
            trainer.tell(&Reply::Warning { message: disk_hangs(patience) });
        }
        disk
    });
    let copies = disk.as_ref().map(|_| copies);
    let mut desk = Desk::new(&hello, trainer.clone(), saves, copies.clone(), notice);
    if let Some(replication) = &hello.replication {
        let others = Others::new(replication, hello.place().0, &trainer, &pace);
        desk.others = others.inspect_err(|error| trainer.tell(&without_copies(error))).ok();
        trainer.tell(&Reply::Keeps(desk.others.as_ref().map(|others| others.keeper.address())));
    }
    let shelf = desk.others.as_ref().map(|others| others.keeper.shelf());
    let flusher = Flusher::new(*hello, trainer, copies).with_shelf(shelf);
    let flusher = tasks.spawn("flush", flusher.settle_all(queue));
    let served = desk.serve(&mut stream);
    let door = desk.close();
    let flushed = runtime.block_on(flusher);
    // Only now: whoever looked takes its end for the word that nothing is read any more.
    drop(door);
    flushed?;
    if let Some(disk) = disk {
        let end = async {
            tokio::select! {
                ended = disk => ended,
                () = clock.sleep(PATIENCE) => {
                    tracing::warn!("the local disk hangs; it is left to itself");
                    Ok(())
                }
            }
        };
        runtime.block_on(end)?;
    }
    served
}

fn parse(frame: &[u8]) -> Result<Request> {
    serde_json::from_slice(frame)
        .map_err(|error| Error::invalid(format!("a request does not parse: {error}")))
}

/// The agents of other hosts: what is kept for them, and what they keep.
struct Others {
    keeper: Keeper,
    outbox: Outbox,
}

impl Others {
    /// Opens the port to which they come.
    fn new(replication: &Replication, rank: u32, trainer: &Trainer, pace: &Arc<Pace>) -> Result<Self> {
        let rdma = replication.cards.parse().and_then(|cards| Rdma::open(&cards, rank as usize));
        let rdma = rdma.unwrap_or_else(|error| {
            trainer.tell(&Reply::Warning { message: format!("copies for other hosts go over TCP: {error}") });
            None
        });
        let keeper = Keeper::open(pace, rdma.clone())?;
        let outbox = Sender::begin(replication.steps, trainer, pace, rdma)?;
        Ok(Self { keeper, outbox })
    }
}

/// The thread that hears the trainer, and those that come after it.
struct Desk {
    hello: Hello,
    linger: Duration,
    trainer: Trainer,
    saves: mpsc::UnboundedSender<Work>,
    /// To this host's disk, where copies are kept there.
    copies: Option<Copies>,
    /// Where copies are kept in other hosts' memory.
    others: Option<Others>,
    holdings: Holdings,
    door: Door,
    notice: Option<Notice>,
}

impl Desk {
    fn new(
        hello: &Hello,
        trainer: Trainer,
        saves: mpsc::UnboundedSender<Work>,
        copies: Option<Copies>,
        notice: Option<Notice>,
    ) -> Self {
        let linger = hello.linger.as_ref();
        let door = Door::new(linger.map(|linger| linger.place.clone()));
        let linger = Duration::from_millis(linger.map_or(0, |linger| linger.for_ms));
        let (hello, holdings) = (hello.clone(), Holdings::default());
        Self { hello, linger, trainer, saves, copies, others: None, holdings, door, notice }
    }

    fn serve(&mut self, stream: &mut FdStream) -> Result<()> {
        let heard = self.hear(stream);
        self.trainer.set_gone();
        heard?;
        self.await_successor()
    }

    /// Takes no more work, and lets go of what is held, but for copies of steps on their way to the store; those at the door stay as
    /// long as it does.
    fn close(self) -> Door {
        let is_open =
            |step: &HeldStep| self.holdings.save_of(step).is_some_and(|save| self.trainer.is_open(save));
        self.others.iter().for_each(|others| others.keeper.retain_steps(is_open));
        self.door
    }

    /// Takes requests until the trainer is gone.
    fn hear(&mut self, stream: &mut FdStream) -> Result<()> {
        loop {
            self.door.wait_for(stream)?;
            let (frame, fd) = match stream.receive() {
                Ok(Some(request)) => request,
                Ok(None) => return Ok(()),
                // It ended without having heard everything that it was told.
                Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(()),
                Err(error) => return Err(error),
            };
            self.take(parse(&frame)?, fd)?;
        }
    }

    fn take(&mut self, request: Request, fd: Option<OwnedFd>) -> Result<()> {
        match request {
            Request::Hello(_) => return Err(Error::invalid("an agent is greeted once")),
            Request::Arena { arena, slot_bytes } => self.holdings.announce(arena, slot_bytes, fd)?,
            Request::GoOn(origin) => {
                self.hello.comes_after(&origin.attempt);
                self.pass_on(Work::GoOn(origin))?;
            }
            Request::BeginAnew(anew) => self.begin_anew(*anew)?,
            Request::Seal(told) => self.begin(*told, Given::First)?,
            Request::SealAgain(told) => self.begin(*told, Given::Again)?,
            Request::Hold(told) => drop(self.holdings.hold(*told)?),
            Request::Durable(step) => {
                self.holdings.save_of(&step).into_iter().for_each(|save| self.trainer.set_durable(save));
            }
            Request::Forget(step) => self.holdings.forget(&step),
            Request::GiveUp { step, round, reason } => self.pass_on(Work::GiveUp { step, round, reason })?,
            Request::Inherit(held) => {
                if let Some(Others { keeper, .. }) = &self.others {
                    keeper.inherit(*held, fd)?;
                }
            }
            Request::InheritPlace => {
                if let Some(fd) = fd {
                    self.door.inherit(FdStream::new(fd.into()))?;
                }
            }
            Request::ReplicateTo(address) => {
                self.others.iter().for_each(|others| others.outbox.set_address(address.clone()));
            }
            Request::Await { save } => self.trainer.await_save(save),
            Request::Bye => {
                self.holdings.clear();
                self.others.iter().for_each(|others| others.keeper.clear());
            }
        }
        Ok(())
    }

    fn begin(&mut self, told: Told, given: Given) -> Result<()> {
        let held = Arc::new(told.held.clone());
        let (save, slot) = (held.seal.save, self.holdings.hold(told)?);
        self.trainer.begin(save, &self.holdings.saves(), self.holdings.lease(save));
        // Before anybody works on it: who is told first that it is durable waits for nothing more.
        self.trainer.tell(&Reply::Sealed { save, at_us: now_us(&Clock::system()) });
        let mut local = None;
        if let Some(copies) = &self.copies {
            local = copies.save(held.clone(), slot.clone());
            if local.is_none() {
                self.trainer.tell(&Reply::NoCopy { save });
            }
        }
        let replica = self.replicate(&held);
        let sealed = Save::new(held, Source::Slot(slot), given);
        self.pass_on(Work::Save(Save { local, replica, ..sealed }))
    }

    /// Serves another start of the same trainer, which goes on from an earlier step.
    fn begin_anew(&mut self, Anew { hello, origin }: Anew) -> Result<()> {
        self.trainer.begin_anew(&self.holdings.forget_after(origin.step));
        self.others.iter().for_each(|others| others.keeper.retain_steps(|kept| kept.step <= origin.step));
        let copies = self.copies.as_ref().zip(hello.local.clone());
        let local = copies.and_then(|(copies, tier)| copies.begin(tier));
        self.hello = hello.clone();
        self.pass_on(Work::BeginAnew { hello: Box::new(hello), origin, local })
    }

    /// Has another host hold it, too, if hosts do so.
    fn replicate(&self, held: &Arc<Held>) -> Option<Copy> {
        self.hello.replication.as_ref()?;
        let save = held.seal.save;
        let copy = self.others.as_ref().and_then(|Others { keeper, outbox }| {
            keeper.retain(&self.hello.start.nonce, |step| self.holdings.save_of(step).is_some());
            outbox.copy(held.clone(), self.holdings.memory(save)?)
        });
        if copy.is_none() {
            self.trainer.tell(&Reply::NotReplicated { save });
        }
        copy
    }

    fn pass_on(&self, work: Work) -> Result<()> {
        self.saves.send(work).map_err(|_| Error::bug("the flusher is gone"))
    }

    /// Holds what there is until another trainer has it, or none came for long enough, or this process was asked to end; and
    /// in any case as long as there are sealed saves that are not in the store.
    fn await_successor(&mut self) -> Result<()> {
        let has_any = !self.holdings.is_empty() || !self.kept_steps().is_empty();
        let is_held = has_any && !self.linger.is_zero();
        if !is_held || !self.door.claim(&self.hello.start) {
            self.door.close();
            return Ok(());
        }
        let clock = Clock::system();
        let mut vigil = Vigil::new(self.linger, clock.now());
        loop {
            let left = vigil.left(clock.now());
            let was_watched = self.door.is_watched();
            let is_asked = self.notice.as_ref().map(Notice::is_given).transpose()?.unwrap_or(false);
            if (left.is_zero() || is_asked) && !self.trainer.has_open() {
                if is_asked {
                    tracing::info!("ends, as it was asked to: every sealed save is settled");
                }
                // It may still delete old steps for long.
                self.door.leave();
                return Ok(());
            }
            let next = match left.is_zero() || is_asked {
                true => self.door.next(GLANCE, None),
                false => self.door.next(left, self.notice.as_ref().map(AsFd::as_fd)),
            };
            match next? {
                Some((Visit::Look { version }, mut visitor, _)) if version == VISIT_VERSION => {
                    let start = (&self.hello.start, self.hello.after.as_slice());
                    let is_durable = |save| self.trainer.is_durable(save);
                    let kept = self.others.as_ref().map_or_else(Vec::new, |others| others.keeper.show());
                    if self.holdings.show(start, is_durable, &kept, &mut visitor).is_ok() {
                        self.door.keep(visitor);
                    }
                }
                Some((Visit::Succeed(lost), visitor, heir)) => {
                    self.door.hand_over(heir);
                    self.trainer.set_lost(lost);
                    if let Err(error) = self.trainer.hand_over(visitor) {
                        tracing::info!(%error, "the successor was killed; its agent has what was held");
                    }
                    return Ok(());
                }
                Some((Visit::MakeWay { after, lost }, visitor, _)) => {
                    if self.make_way(&after, lost, visitor) {
                        return Ok(());
                    }
                }
                Some((Visit::Look { .. }, ..)) | None => {}
            }
            if was_watched || self.door.is_watched() {
                vigil.begin_anew(clock.now());
            }
        }
    }

    /// Lets go of all memory for saves that lack it, if nothing is lost by that; whether it did.
    fn make_way(&mut self, after: &[String], lost: LostRanks, mut visitor: FdStream) -> bool {
        // Its trainers have what is held here, or went on from something else, and have no use for it.
        let is_followed = after.iter().any(|start| start == attempt_of(&self.hello.start.nonce));
        // Those are of the last of them; others had other ranks.
        if after.last().is_some_and(|start| start == attempt_of(&self.hello.start.nonce)) {
            self.trainer.set_lost(lost);
        }
        if self.trainer.has_open() || (is_followed && self.door.is_watched()) {
            visitor.send(MAKES_WAY_LATER, None).ok();
            return false;
        }
        if !is_followed && (self.door.is_watched() || !self.is_all_durable()) {
            return false;
        }
        tracing::info!("lets go of its steps in memory, which are not lost by that: saves need it");
        self.door.close();
        self.holdings.clear();
        self.others.take().iter().for_each(|others| others.keeper.clear());
        // One that left early has the memory all the same.
        visitor.send(MADE_WAY, None).ok();
        true
    }

    /// Whether all that is held can be had from the store. A step that is there has all ranks' parts.
    fn is_all_durable(&self) -> bool {
        let is_durable = |save| self.trainer.is_durable(save);
        let is_step_durable = |step: &HeldStep| self.holdings.save_of(step).is_some_and(is_durable);
        self.holdings.saves().into_iter().all(is_durable) && self.kept_steps().iter().all(is_step_durable)
    }

    /// The steps that are kept for other hosts.
    fn kept_steps(&self) -> Vec<HeldStep> {
        self.others.as_ref().map_or_else(Vec::new, |others| others.keeper.steps())
    }
}

/// How long what is in memory is held without a trainer.
struct Vigil {
    linger: Duration,
    /// Until when, unless somebody looks.
    deadline: Moment,
    /// Until when at most.
    last: Moment,
}

impl Vigil {
    fn new(linger: Duration, now: Moment) -> Self {
        Self { linger, deadline: now + linger, last: now + linger.saturating_mul(MOST_LINGERS) }
    }

    /// Somebody looked by now.
    fn begin_anew(&mut self, now: Moment) {
        self.deadline = now + self.linger;
    }

    fn left(&self, now: Moment) -> Duration {
        self.deadline.min(self.last).since(now)
    }
}

#[cfg(test)]
mod tests {
    use forebay_io::mem::SharedMemory;
    use forebay_io::net::{Meeting, meet};

    use super::*;
    use crate::agent::Linger;
    use crate::arena::{Held, Seal};
    use crate::catalog::{Keep, Start};

    /// Longer than any answer takes.
    const LONG: Duration = Duration::from_secs(30);

    fn say(stream: &mut FdStream, words: &impl serde::Serialize, memory: Option<&SharedMemory>) {
        let frame = serde_json::to_vec(words).expect("encodes");
        stream.send(&frame, memory.map(AsFd::as_fd)).expect("send");
    }

    /// From a start that comes after another one.
    fn make_way(after: &str) -> Visit {
        Visit::MakeWay { after: vec![after.to_owned()], lost: LostRanks { ranks: vec![3], kept: Vec::new() } }
    }

    /// An agent's desk, and the trainer's end of it, which has sealed a step.
    struct Sealed {
        desk: std::thread::JoinHandle<Result<Desk>>,
        trainer: Trainer,
        session: FdStream,
        /// Where the work for the flusher goes.
        _queue: mpsc::UnboundedReceiver<Work>,
    }

    impl Sealed {
        /// That of a start, told by what its nonce repeats and when it began.
        fn by(place: &str, linger_ms: u64, (nonce, started_ms): (&str, u64)) -> Self {
            let (mut session, far) = FdStream::pair().expect("pair");
            let mut stream = far.share();
            let trainer = Trainer::new(far, Arc::new(Pace::new(None)));
            let start = Start { nonce: nonce.repeat(16), host: "h".into(), pid: 1, started_ms };
            let mut hello = Hello::new("s3://unused".into(), start.clone(), Keep::default());
            hello.linger = Some(Linger { place: place.into(), for_ms: linger_ms });
            let (saves, mut queue) = mpsc::unbounded_channel();
            let replication = Replication { steps: 2, cards: "off".into() };
            let mut desk = Desk::new(&hello, trainer.clone(), saves, None, None);
            desk.others = Some(Others::new(&replication, 0, &trainer, &trainer.pace()).expect("others"));
            let desk = std::thread::spawn(move || desk.serve(&mut stream).map(|()| desk));
            let (memory, slot) =
                (SharedMemory::create("forebay-test", SLOTS * 4096).expect("memory"), [b' '; 4096]);
            let held = Held::new(start.nonce, 0, 1, Seal::of_test(1, 1, &slot, 4096, Vec::new()));
            say(&mut session, &Request::Arena { arena: 1, slot_bytes: 4096 }, Some(&memory));
            say(&mut session, &Request::Seal(Box::new(Told { arena: 1, held })), None);
            let Some(Work::Save(_)) = queue.blocking_recv() else { panic!("a save") };
            Self { desk, trainer, session, _queue: queue }
        }
    }

    /// The place was kept for as long as old steps were deleted: who came was not answered, and the next start's agent, which
    /// could not have it, showed nobody what it held.
    #[test]
    fn the_place_is_free_once_nobody_is_waited_for() {
        for is_done in [true, false] {
            let place = format!("forebay-test-free-{is_done}-{}", std::process::id());
            let Sealed { desk, trainer, mut session, .. } = Sealed::by(&place, 1, ("ab", 0));
            if is_done {
                say(&mut session, &Request::Bye, None);
            }
            session.shutdown();
            let mut looks = None;
            if !is_done {
                // What is not settled is held however long that takes.
                let mut visitor = meet(&place, LONG).expect("meet").expect("it waits");
                say(&mut visitor, &Visit::Look { version: VISIT_VERSION }, None);
                for _ in ["the answer", "the step"] {
                    visitor.receive().expect("receive").expect("a frame");
                }
                trainer.tell(&Reply::Durable { save: 1, at_us: 0 });
                looks = Some(visitor);
            }
            let door = desk.join().expect("the desk").expect("served").close();
            Meeting::hold(&place).expect("another agent has the place now");
            if let Some(visitor) = looks {
                assert!(!visitor.readable(Duration::ZERO).expect("look"), "who looked is not let go yet");
            }
            drop(door);
        }
    }

    /// The agent heard nobody any more once a few steps were given up while the store was away: its trainer stood still.
    #[test]
    fn however_many_steps_are_given_up_the_trainer_is_heard() {
        let place = format!("forebay-test-given-up-{}", std::process::id());
        let Sealed { desk, trainer, mut session, _queue } = Sealed::by(&place, 1, ("ef", 0));
        for step in 2..100 {
            say(&mut session, &Request::GiveUp { step, round: None, reason: "a test".to_owned() }, None);
        }
        say(&mut session, &Request::Bye, None);
        session.shutdown();
        trainer.tell(&Reply::Durable { save: 1, at_us: 0 });
        desk.join().expect("the desk").expect("served");
    }

    /// What is in the store is let go for another job's memory; the only copy of a step, and what somebody is about to take,
    /// are kept.
    #[test]
    fn only_what_is_in_the_store_makes_way() {
        let place = format!("forebay-test-way-{}", std::process::id());
        let Sealed { desk, trainer, session, .. } = Sealed::by(&place, 600_000, ("cd", 0));
        let ask = || {
            let mut visitor = meet(&place, LONG).expect("meet").expect("somebody is there");
            let words = serde_json::to_vec(&make_way("")).expect("encodes");
            // One that is turned away may have been so before it said anything.
            visitor.send(&words, None).and_then(|()| visitor.receive()).ok().flatten().map(|(frame, _)| frame)
        };
        assert_eq!(ask(), None, "its trainer lives");
        session.shutdown();
        assert_eq!(ask().as_deref(), Some(MAKES_WAY_LATER), "it is on its way to the store");
        trainer.tell(&Reply::Failed { save: 1, error: (&Error::invalid("a test has it so")).into() });
        assert_eq!(ask(), None, "it is nowhere else");
        trainer.set_durable(1);
        let mut visitor = meet(&place, LONG).expect("meet").expect("it waits");
        say(&mut visitor, &Visit::Look { version: VISIT_VERSION }, None);
        for _ in ["the answer", "the step"] {
            visitor.receive().expect("receive").expect("a frame");
        }
        assert_eq!(ask(), None, "somebody looks at it");
        drop(visitor);
        // That it left is heard after the next one came, at times.
        let made_way = std::iter::from_fn(|| Some(ask())).take(1000).find_map(|told| told);
        assert_eq!(made_way.as_deref(), Some(MADE_WAY));
        let desk = desk.join().expect("the desk").expect("served");
        assert!(desk.holdings.is_empty());
        Meeting::hold(&place).expect("another agent has the place now");
    }

    /// A job that lost a host goes on with fewer ranks, which have what it held, and whose memory it is in the way of.
    #[test]
    fn what_a_start_that_goes_on_has_restored_makes_way_for_it_alone() {
        let place = format!("forebay-test-followed-{}", std::process::id());
        let Sealed { desk, trainer, session, _queue } = Sealed::by(&place, 600_000, ("ab", 0));
        session.shutdown();
        let ask = |after: &str| {
            let mut visitor = meet(&place, LONG).expect("meet").expect("somebody is there");
            say(&mut visitor, &make_way(after), None);
            visitor.receive().ok().flatten().map(|(frame, _)| frame)
        };
        let own = "ab".repeat(4);
        let step = HeldStep { start: "s".repeat(32), step: 1 };
        // Of another start after this one, of another number of ranks.
        let mut visitor = meet(&place, LONG).expect("meet").expect("somebody is there");
        let mut words = make_way(&own);
        let Visit::MakeWay { after, .. } = &mut words else { unreachable!("as it was made") };
        after.push("cdcdcdcd".to_owned());
        say(&mut visitor, &words, None);
        let (answer, _) = visitor.receive().expect("receive").expect("an answer");
        assert_eq!(answer, MAKES_WAY_LATER, "it is on its way to the store");
        assert_eq!(trainer.lost_rank(&step, |_| true), None, "its own ranks are others");
        assert_eq!(ask(&own).as_deref(), Some(MAKES_WAY_LATER));
        assert_eq!(trainer.lost_rank(&step, |_| true), Some(3), "and needs not wait for who is gone");
        trainer.tell(&Reply::Failed { save: 1, error: (&Error::invalid("it is gone")).into() });
        assert_eq!(ask("cdcdcdcd"), None, "it is nowhere else");
        assert_eq!(ask(&own).as_deref(), Some(MADE_WAY));
        desk.join().expect("the desk").expect("served");
    }

    /// Of a step that this host has no part of it is not known here whether it is in the store.
    #[test]
    fn what_is_kept_for_other_hosts_does_not_make_way_unless_it_is_known_to_be_in_the_store() {
        for is_known in [true, false] {
            let place = format!("forebay-test-kept-{is_known}-{}", std::process::id());
            let Sealed { desk, trainer, mut session, _queue } = Sealed::by(&place, 600_000, ("ab", 0));
            let (memory, shard) = (SharedMemory::create("forebay-test", 4096).expect("memory"), [b' '; 4096]);
            let seal = Seal::of_test(1, if is_known { 1 } else { 2 }, &shard, 4096, Vec::new());
            let held = Held::new("ab".repeat(16), 1, 2, seal);
            say(&mut session, &Request::Inherit(Box::new(held)), Some(&memory));
            session.shutdown();
            trainer.tell(&Reply::Durable { save: 1, at_us: 0 });
            let mut visitor = meet(&place, LONG).expect("meet").expect("somebody is there");
            say(&mut visitor, &make_way(""), None);
            let answer = visitor.receive().ok().flatten().map(|(frame, _)| frame);
            assert_eq!(answer.as_deref(), is_known.then_some(MADE_WAY));
            let successor = (!is_known).then(|| {
                let mut visitor = meet(&place, LONG).expect("meet").expect("it waits");
                say(&mut visitor, &Visit::Succeed(LostRanks::default()), None);
                visitor
            });
            desk.join().expect("the desk").expect("served");
            drop(successor);
        }
    }

    /// A successor has it as well, and lets go of what nobody can use: the memory stayed for as long as a step was stored.
    #[test]
    fn of_what_is_kept_for_other_hosts_only_what_is_on_its_way_stays_once_a_successor_has_it() {
        let place = format!("forebay-test-stays-{}", std::process::id());
        let Sealed { desk, trainer, mut session, _queue } = Sealed::by(&place, 600_000, ("ab", 0));
        let shard = [b' '; 4096];
        let steps = [1, 2].map(|step| {
            let memory = SharedMemory::create("forebay-test", 4096).expect("memory");
            let held = Held::new("ab".repeat(16), 1, 2, Seal::of_test(step, step, &shard, 4096, Vec::new()));
            let name = held.name();
            say(&mut session, &Request::Inherit(Box::new(held)), Some(&memory));
            name
        });
        session.shutdown();
        let mut visitor = meet(&place, LONG).expect("meet").expect("it waits");
        say(&mut visitor, &Visit::Succeed(LostRanks::default()), None);
        let desk = desk.join().expect("the desk").expect("served");
        let shelf = desk.others.as_ref().expect("others").keeper.shelf();
        drop(desk.close());
        assert_eq!(steps.map(|step| shelf.parts(&step).len()), [1, 0]);
        trainer.tell(&Reply::Durable { save: 1, at_us: 0 });
    }

    /// An agent that was so late that its successor's trainer did not meet it had the place when that one was killed as well, and
    /// the newer memory was shown to nobody.
    #[test]
    fn the_agent_of_a_later_start_has_the_place() {
        for earlier_is_first in [true, false] {
            let place = format!("forebay-test-later-{earlier_is_first}-{}", std::process::id());
            let begin = |start| {
                let Sealed { desk, trainer, session, .. } = Sealed::by(&place, 100, start);
                session.shutdown();
                (desk, trainer)
            };
            let who_is_there = || {
                let mut visitor = meet(&place, LONG).expect("meet").expect("somebody is there");
                say(&mut visitor, &Visit::Look { version: VISIT_VERSION }, None);
                let (frame, _) = visitor.receive().expect("receive").expect("an answer");
                serde_json::from_slice::<crate::agent::Answer>(&frame).expect("an answer").start
            };
            let order = if earlier_is_first { [("aa", 1), ("bb", 2)] } else { [("bb", 2), ("aa", 1)] };
            let (first, first_trainer) = begin(order[0]);
            assert_eq!(who_is_there(), order[0].0.repeat(16));
            let (second, second_trainer) = begin(order[1]);
            // Whichever is not to have it is over.
            let over = if earlier_is_first { first } else { second };
            assert!(over.join().expect("the desk").is_ok());
            assert_eq!(who_is_there(), "bb".repeat(16));
            for trainer in [first_trainer, second_trainer] {
                trainer.tell(&Reply::Durable { save: 1, at_us: 0 });
            }
        }
    }

    /// A start that looked once its predecessor's trainer was killed, and before that one's agent had the place, found nobody and
    /// took an older step from the store.
    #[test]
    fn the_place_is_handed_over_and_who_stands_there_is_answered() {
        for is_said in [true, false] {
            let place = format!("forebay-test-handed-{is_said}-{}", std::process::id());
            let Sealed { desk: first, session, .. } = Sealed::by(&place, 600_000, ("aa", 1));
            session.shutdown();
            let come = || meet(&place, LONG).expect("meet").expect("somebody has the place");
            let look = |mut visitor: FdStream| {
                say(&mut visitor, &Visit::Look { version: VISIT_VERSION }, None);
                let (frame, _) = visitor.receive().expect("receive").expect("an answer");
                visitor.receive().expect("receive").expect("the step");
                (serde_json::from_slice::<crate::agent::Answer>(&frame).expect("an answer").start, visitor)
            };
            let (_, mut successor) = look(come());
            let Sealed { desk: second, trainer, session: mut own, .. } = Sealed::by(&place, 100, ("bb", 2));
            let (heir_of, heir) = FdStream::pair().expect("pair");
            let inherit = serde_json::to_vec(&Request::InheritPlace).expect("encodes");
            own.send(&inherit, Some(heir_of.as_fd())).expect("send");
            drop(heir_of);
            // The trainer is killed, and its last words are heard once the next start looks.
            own.shutdown();
            let mut standing = Vec::new();
            if is_said {
                standing.push(come());
                let words = serde_json::to_vec(&Visit::Succeed(LostRanks::default())).expect("encodes");
                successor.send(&words, Some(heir.as_fd())).expect("send");
                standing.push(come());
            }
            drop((heir, successor));
            first.join().expect("the desk").expect("served");
            standing.push(come());
            for visitor in standing {
                assert_eq!(look(visitor).0, "bb".repeat(16));
            }
            trainer.tell(&Reply::Durable { save: 1, at_us: 0 });
            second.join().expect("the desk").expect("served");
        }
    }

    #[test]
    fn memory_is_held_anew_from_the_last_look_and_not_for_ever() {
        let (clock, linger) = (Clock::manual(), Duration::from_secs(10));
        let mut vigil = Vigil::new(linger, clock.now());
        clock.advance(linger - Duration::from_secs(1));
        assert_eq!(vigil.left(clock.now()), Duration::from_secs(1));
        let mut held = linger - Duration::from_secs(1);
        while !vigil.left(clock.now()).is_zero() {
            vigil.begin_anew(clock.now());
            assert!(vigil.left(clock.now()) <= linger);
            clock.advance(Duration::from_secs(3));
            held += Duration::from_secs(3);
        }
        assert_eq!(held, MOST_LINGERS * linger, "and no longer, though somebody is always there");
    }
}
