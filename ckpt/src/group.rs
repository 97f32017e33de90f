//! The ranks of a job, talking to each other: one operation, in which each says something and all hear everything, and
//! may lend memory to all.
//!
//! Rank 0's process holds a meeting place (see `forebay_io::net`) and a thread that collects and hands out; it needs
//! neither torch's process groups nor a port. A rank that ends, or says nothing in time, is named to all others, and
//! the group is over. Each rank says on which host it is, and memory is lent on one host only; today all ranks are on one,
//! as no meeting place reaches further.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::mem::SharedMemory;
use forebay_io::net::{FdStream, Inherited, MAX_FRAME, Meeting, meet};
use serde::{Deserialize, Serialize};

/// How much longer a rank waits than the collecting thread does, which then names those it waits for.
const GRACE: Duration = Duration::from_secs(5);
/// The longest that nobody says anything before the thread looks whether its own process let it go.
const TICK: Duration = Duration::from_secs(3600);
/// How often a rank that waits asks whether it is to go on.
const BEAT: Duration = Duration::from_millis(200);
/// The longest words of one rank, and of all together, in bytes as they are sent.
const MOST_BYTES: usize = if cfg!(test) { 1 << 20 } else { MAX_FRAME };

/// Asked some times a second while a rank waits for others; false ends the wait, and the group.
pub type GoesOn<'a> = &'a mut dyn FnMut() -> bool;

/// A rank's way to the others.
#[derive(Debug)]
pub struct Group {
    rank: usize,
    /// Each rank's host.
    hosts: Vec<String>,
    stream: Option<FdStream>,
    /// What rank 0's thread holds: the meeting place, and the other ends of all connections.
    ends: Arc<Inherited>,
}

/// A rank's first words.
#[derive(Debug, Serialize, Deserialize)]
struct Joining {
    rank: usize,
    world_size: usize,
}

/// What a rank says in a round.
#[derive(Debug, Serialize, Deserialize)]
struct Word {
    text: String,
    patience_ms: u64,
    /// Why it says nothing: it would be too long.
    #[serde(default)]
    too_long: Option<String>,
}

/// What all hear at the end of a round.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// What each rank said, and how many descriptors follow, an empty frame each.
    All(Vec<String>, usize),
    Over(String),
    /// As `Over`: what was said is too long, which it would be again.
    TooLong(String),
}

impl Group {
    /// Joins the group that meets at `name`, and waits until all `world_size` ranks did, up to `patience`. `host` names where
    /// this rank is, for all of the same host alike.
    ///
    /// # Errors
    /// `Unavailable`, naming the ranks that are missing; `Invalid` when two ranks have one number or the ranks
    /// disagree about how many they are; `Exists` when another group meets there.
    pub fn join(
        name: &str,
        rank: usize,
        world_size: usize,
        host: &str,
        patience: Duration,
        goes_on: GoesOn<'_>,
    ) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::invalid(format!("rank {rank} of {world_size}")));
        }
        let ends = Arc::new(Inherited::new());
        let stream = match rank {
            0 => hold(name, world_size, patience, ends.clone())?,
            _ => visit(name, Joining { rank, world_size }, patience, goes_on)?,
        };
        let mut group = Self { rank, hosts: vec![String::new(); world_size], stream: Some(stream), ends };
        group.hosts = group.gather(host, patience, goes_on)?;
        Ok(group)
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks in all.
    pub fn world_size(&self) -> usize {
        self.hosts.len()
    }

    /// Where each rank is, in their order: what it gave [`Self::join`].
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Says `text`, and hears what each rank said, in the order of ranks. Every rank takes part in every round.
    ///
    /// # Errors
    /// `Unavailable`, naming the ranks, when one is gone or says nothing within `patience` of the first one; the
    /// group is over then. `TooLarge` when one rank, or all together, say more than one frame takes, which ends it as well.
    pub fn gather(&mut self, text: &str, patience: Duration, goes_on: GoesOn<'_>) -> Result<Vec<String>> {
        self.take_part(text, None, patience, goes_on).map(|(texts, _)| texts)
    }

    /// Lends `memory` to all ranks, as each of them does; gives what each lends, in the order of ranks.
    ///
    /// # Errors
    /// As [`Self::gather`]. `Unsupported` where they are on several hosts; nobody was told anything then.
    pub fn exchange(
        &mut self,
        memory: &SharedMemory,
        patience: Duration,
        goes_on: GoesOn<'_>,
    ) -> Result<Vec<SharedMemory>> {
        if let Some(other) = self.hosts.iter().position(|host| *host != self.hosts[0]) {
            let fact =
                format!("rank {other} is on another host than rank 0: they cannot lend each other memory");
            return Err(Error::new(ErrorKind::Unsupported, fact));
        }
        let (texts, fds) = self.take_part("lend", Some(memory.as_fd()), patience, goes_on)?;
        if texts.iter().any(|text| text != "lend") || fds.len() != self.hosts.len() {
            return Err(Error::invalid("not all ranks lend memory"));
        }
        fds.into_iter().map(SharedMemory::from_fd).collect()
    }

    fn take_part(
        &mut self,
        text: &str,
        fd: Option<BorrowedFd<'_>>,
        patience: Duration,
        goes_on: GoesOn<'_>,
    ) -> Result<(Vec<String>, Vec<OwnedFd>)> {
        let over = || Error::new(ErrorKind::Unavailable, "the job's group is over");
        let stream = self.stream.as_mut().ok_or_else(over)?;
        let patience_ms = patience.as_millis().min(u128::from(u64::MAX)) as u64;
        let word = word_of(self.rank, text, patience_ms)?;
        // Where the group was over already, why can still be heard.
        stream.send(&word, fd).ok();
        let gone = || Error::new(ErrorKind::Unavailable, "rank 0 is gone, and the job's group with it");
        let heard = match wait_for(stream, patience + GRACE, goes_on) {
            Ok(Some(true)) => stream.receive().map_err(|error| match error.kind() {
                // Its process ended before it answered.
                ErrorKind::Unavailable => gone(),
                _ => error,
            }),
            Ok(Some(false)) => Err(missing(&[0], "answer", patience)),
            Ok(None) => {
                // The others hear that this rank is gone: its next words would be taken for those of this round.
                self.stream = None;
                return Err(ended());
            }
            Err(error) => Err(error),
        };
        let answer = match heard {
            Ok(Some((frame, _))) => parse(&frame)?,
            Ok(None) => Answer::Over(gone().to_string()),
            Err(error) => Answer::Over(error.to_string()),
        };
        match answer {
            Answer::All(texts, count) => {
                let fd = |_| match stream.receive() {
                    Ok(Some((_, Some(fd)))) => Ok(fd),
                    Ok(_) => Err(gone()),
                    Err(error) => Err(error),
                };
                Ok((texts, (0..count).map(fd).collect::<Result<_>>()?))
            }
            Answer::Over(message) => {
                self.stream = None;
                Err(Error::new(ErrorKind::Unavailable, message)
                    .with_hint("all ranks must save and restore together; start the job again"))
            }
            Answer::TooLong(message) => {
                self.stream = None;
                Err(Error::new(ErrorKind::TooLarge, message)
                    .with_hint("the ranks tell each other of every tensor and every other value; save fewer"))
            }
        }
    }

    /// Forgets the connection without ending it, in a forked child that must not speak for its parent. A child of rank 0
    /// lets go of the meeting place and of the other ends as well: nobody takes it for its parent.
    pub fn forget(&mut self) {
        self.stream = None;
        self.ends.close_in_child();
    }
}

/// Holds the meeting place, and gives rank 0's own connection: it is there whoever else comes, and when.
fn hold(name: &str, world_size: usize, patience: Duration, ends: Arc<Inherited>) -> Result<FdStream> {
    let meeting = Meeting::hold(name)?;
    let (own, other) = FdStream::pair()?;
    let serve = move || serve(&meeting, other, world_size, patience, &ends);
    std::thread::Builder::new().name("forebay-group".into()).spawn(serve)?;
    Ok(own)
}

/// Goes to the meeting place that rank 0 holds, or will hold in time.
fn visit(name: &str, joining: Joining, patience: Duration, goes_on: GoesOn<'_>) -> Result<FdStream> {
    let clock = Clock::system();
    let deadline = clock.now() + patience + GRACE;
    loop {
        let left = deadline.since(clock.now());
        if let Some(mut stream) = meet(name, left.min(BEAT))? {
            stream.send(&frame_of(&joining)?, None).ok();
            return Ok(stream);
        }
        if left.is_zero() {
            return Err(missing(&[0], "join the job's group", patience));
        }
        if !goes_on() {
            return Err(ended());
        }
    }
}

/// Whether the next words came in time; none where the wait is not to go on. A signal by itself does not end it.
fn wait_for(stream: &FdStream, patience: Duration, goes_on: GoesOn<'_>) -> Result<Option<bool>> {
    let clock = Clock::system();
    let deadline = clock.now() + patience;
    loop {
        let left = deadline.since(clock.now());
        if stream.readable(left.min(BEAT))? {
            return Ok(Some(true));
        }
        if left.is_zero() {
            return Ok(Some(false));
        }
        if !goes_on() {
            return Ok(None);
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Unavailable, "the wait for the job's other ranks was ended here")
}

/// # Errors
/// `TooLarge` when no frame takes it.
fn frame_of(value: &impl Serialize) -> Result<Vec<u8>> {
    let frame =
        serde_json::to_vec(value).map_err(|error| Error::bug(format!("encode a group's words: {error}")))?;
    match frame.len() {
        0..=MOST_BYTES => Ok(frame),
        bytes => Err(Error::new(ErrorKind::TooLarge, format!("{bytes} bytes, of {MOST_BYTES} at most"))),
    }
}

/// What a rank says; where that is too long, why it does not: the others are not to wait for it.
fn word_of(rank: usize, text: &str, patience_ms: u64) -> Result<Vec<u8>> {
    match frame_of(&Word { text: text.to_owned(), patience_ms, too_long: None }) {
        Err(error) if error.kind() == ErrorKind::TooLarge => {
            let why = format!("what rank {rank} tells the others is too long: {}", error.message());
            frame_of(&Word { text: String::new(), patience_ms, too_long: Some(why) })
        }
        framed => framed,
    }
}

fn parse<T: for<'a> Deserialize<'a>>(frame: &[u8]) -> Result<T> {
    serde_json::from_slice(frame)
        .map_err(|error| Error::invalid(format!("a group's words do not parse: {error}")))
}

fn missing(ranks: &[usize], doing: &str, patience: Duration) -> Error {
    let (ranks, seconds) = (list(ranks), patience.as_secs_f64());
    Error::new(ErrorKind::Unavailable, format!("{ranks} did not {doing} within {seconds} s"))
}

fn list(ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

/// The life of rank 0's thread: until a rank is gone or silent, and all others were told.
fn serve(meeting: &Meeting, first: FdStream, world_size: usize, patience: Duration, ends: &Inherited) {
    // Those who came to a group that did not come about were told already.
    let Ok(mut ranks) = welcome_all(meeting, first, world_size, patience) else { return };
    let fds = ranks.iter().map(AsFd::as_fd).chain([meeting.as_fd()]);
    // Before rank 0 hears that all are there, and until right before they are closed.
    let _noted = ends.note(fds);
    let over = loop {
        let told = collect(&mut ranks).and_then(|(texts, fds)| {
            let fds: Vec<OwnedFd> = fds.into_iter().flatten().collect();
            tell_all(&mut ranks, &Answer::All(texts, fds.len()), &fds)
        });
        if let Err(error) = told {
            break error;
        }
    };
    end_all(&mut ranks, &over);
}

/// The connections of all ranks, in order, `first` that of rank 0. Where some are missing, those that came are told.
fn welcome_all(
    meeting: &Meeting,
    first: FdStream,
    world_size: usize,
    patience: Duration,
) -> Result<Vec<FdStream>> {
    let clock = Clock::system();
    let deadline = clock.now() + patience;
    let others = (1..world_size).map(|_| None);
    let mut places: Vec<Option<FdStream>> = std::iter::once(Some(first)).chain(others).collect();
    let refused = loop {
        let absent: Vec<_> = (0..world_size).filter(|rank| places[*rank].is_none()).collect();
        if absent.is_empty() {
            return Ok(places.into_iter().flatten().collect());
        }
        let Some(mut visitor) = meeting.welcome(deadline.since(clock.now()))? else {
            break missing(&absent, "join the job's group", patience);
        };
        // One that is gone again did not come.
        let Ok(Some((frame, _))) = visitor.receive() else { continue };
        let joining: Joining = parse(&frame)?;
        if joining.world_size != world_size {
            let Joining { rank, world_size: other } = joining;
            let fact = format!("rank 0 has {world_size} ranks in its job, rank {rank} has {other}");
            places.push(Some(visitor));
            break Error::invalid(fact);
        }
        let rank = joining.rank;
        let is_new = places.get(rank).is_some_and(Option::is_none);
        if !is_new {
            places.push(Some(visitor));
            break Error::invalid(format!("two processes say that they are rank {rank}"));
        }
        places[rank] = Some(visitor);
    };
    let mut came: Vec<FdStream> = places.into_iter().flatten().collect();
    end_all(&mut came, &refused);
    Err(refused)
}

/// One word of each rank, and the descriptors that came with them.
fn collect(ranks: &mut [FdStream]) -> Result<(Vec<String>, Vec<Option<OwnedFd>>)> {
    let clock = Clock::system();
    let mut fds: Vec<Option<OwnedFd>> = ranks.iter().map(|_| None).collect();
    let mut texts: Vec<Option<String>> = ranks.iter().map(|_| None).collect();
    // From the first word on.
    let mut waiting: Option<(Moment, Duration)> = None;
    loop {
        let silent: Vec<usize> = (0..texts.len()).filter(|rank| texts[*rank].is_none()).collect();
        if silent.is_empty() {
            return Ok((texts.into_iter().flatten().collect(), fds));
        }
        let left = waiting.map_or(TICK, |(deadline, _)| deadline.since(clock.now()));
        if let Some((_, patience)) = waiting.filter(|_| left.is_zero()) {
            return Err(missing(&silent, "take part", patience));
        }
        // Those that spoke say nothing more until they are answered: what can be received from them is their end.
        let streams: Vec<&FdStream> = ranks.iter().collect();
        for rank in FdStream::readable_among(&streams, left)? {
            let received = if texts[rank].is_none() { ranks[rank].receive() } else { Ok(None) };
            let Ok(Some((frame, fd))) = received else {
                return Err(Error::new(ErrorKind::Unavailable, format!("rank {rank} of the job is gone")));
            };
            fds[rank] = fd;
            let Word { text, patience_ms, too_long } = parse(&frame)?;
            if let Some(why) = too_long {
                return Err(Error::new(ErrorKind::TooLarge, why));
            }
            let patience = Duration::from_millis(patience_ms);
            waiting.get_or_insert((clock.now() + patience, patience));
            texts[rank] = Some(text);
        }
    }
}

/// A rank that cannot be told is found gone in the next round. Rank 0 is told last: this thread may end with it.
///
/// # Errors
/// `TooLarge` when no frame takes the answer; nobody was told anything then.
fn tell_all(ranks: &mut [FdStream], answer: &Answer, fds: &[OwnedFd]) -> Result<()> {
    let frame = frame_of(answer).map_err(|error| match error.kind() {
        ErrorKind::TooLarge => {
            let fact = format!("what the ranks tell each other is too long: {}", error.message());
            Error::new(ErrorKind::TooLarge, fact)
        }
        _ => error,
    })?;
    for stream in ranks.iter_mut().rev() {
        stream.send(&frame, None).ok();
        fds.iter().for_each(|fd| drop(stream.send(&[], Some(fd.as_fd()))));
    }
    Ok(())
}

/// Tells all why the group is over.
fn end_all(ranks: &mut [FdStream], over: &Error) {
    let message = over.message().to_owned();
    let answer = match over.kind() {
        ErrorKind::TooLarge => Answer::TooLong(message),
        _ => Answer::Over(message),
    };
    if let Err(error) = tell_all(ranks, &answer, &[]) {
        tracing::warn!(%error, "the ranks were not told why their group is over");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn name(test: &str) -> String {
        format!("forebay-test-{test}-{}", std::process::id())
    }

    /// Runs `work` on each rank of a group, each on a thread of its own.
    fn on_ranks<T: Send>(test: &str, count: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
        let run =
            |rank| work(Group::join(&name(test), rank, count, "here", PATIENCE, &mut || true).expect("join"));
        let run = &run;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..count).map(|rank| scope.spawn(move || run(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("rank")).collect()
        })
    }

    #[test]
    fn all_hear_all_in_order() {
        let heard = on_ranks("all", 4, |mut group| {
            let say = |group: &mut Group, round| {
                let text = format!("{} in {round}", group.rank());
                group.gather(&text, PATIENCE, &mut || true).expect("gather")
            };
            (say(&mut group, 1), say(&mut group, 2))
        });
        for (first, second) in heard {
            assert_eq!(first, ["0 in 1", "1 in 1", "2 in 1", "3 in 1"]);
            assert_eq!(second, ["0 in 2", "1 in 2", "2 in 2", "3 in 2"]);
        }
    }

    #[test]
    fn all_see_the_memory_of_all() {
        let seen = on_ranks("memory", 3, |mut group| {
            let memory = SharedMemory::create("test", 4096).expect("memory");
            memory.map_write(0..4096).expect("map")[7] = 10 + group.rank() as u8;
            let lent = group.exchange(&memory, PATIENCE, &mut || true).expect("exchange");
            let seen: Vec<u8> =
                lent.iter().map(|memory| memory.map_read(0..4096).expect("map").as_ref()[7]).collect();
            (seen, group.gather("and on", PATIENCE, &mut || true).expect("gather").len())
        });
        assert_eq!(seen, vec![(vec![10, 11, 12], 3); 3]);
        let refused = on_ranks("miser", 2, |mut group| match group.rank() {
            0 => group
                .exchange(&SharedMemory::create("test", 4096).expect("memory"), PATIENCE, &mut || true)
                .is_err(),
            _ => group.gather("nothing to lend", PATIENCE, &mut || true).is_ok(),
        });
        assert_eq!(refused, [true, true]);
    }

    #[test]
    fn all_know_where_all_are_and_lend_memory_on_one_host_only() {
        let name = name("hosts");
        let heard: Vec<_> = std::thread::scope(|scope| {
            let join = |(rank, host)| {
                let mut group = Group::join(&name, rank, 3, host, PATIENCE, &mut || true).expect("join");
                let memory = SharedMemory::create("test", 4096).expect("memory");
                let refused = group.exchange(&memory, PATIENCE, &mut || true).expect_err("two hosts");
                // And goes on.
                let heard = group.gather("on", PATIENCE, &mut || true).expect("gather").concat();
                (group.hosts().to_vec(), refused.to_string(), heard)
            };
            let ranks: Vec<_> = [(0, "one"), (1, "one"), (2, "other")]
                .map(|place| scope.spawn(move || join(place)))
                .into_iter()
                .collect();
            ranks.into_iter().map(|rank| rank.join().expect("rank")).collect()
        });
        for (hosts, refused, said) in heard {
            assert_eq!((hosts, said.as_str()), (vec!["one".into(), "one".into(), "other".into()], "ononon"));
            assert!(refused.contains("rank 2 is on another host than rank 0"), "{refused}");
        }
    }

    #[test]
    fn a_rank_that_is_gone_or_silent_is_named() {
        let errors = on_ranks("gone", 3, |mut group| match group.rank() {
            2 => None,
            _ => Some(group.gather("", PATIENCE, &mut || true).expect_err("rank 2 is gone")),
        });
        for error in errors.into_iter().flatten() {
            assert!(error.message().contains("rank 2 of the job is gone"), "{error}");
        }
        let told = std::sync::Barrier::new(3);
        let errors = on_ranks("silent", 3, |mut group| {
            if group.rank() == 0 {
                let error =
                    group.gather("", Duration::from_millis(50), &mut || true).expect_err("others are silent");
                assert!(error.message().contains("ranks 1, 2 did not take part within 0.05 s"), "{error}");
            }
            told.wait();
            group.gather("", PATIENCE, &mut || true).expect_err("it is over")
        });
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::Unavailable));
    }

    #[test]
    fn a_wait_is_ended_where_it_is_not_to_go_on_and_the_others_hear_so() {
        let errors = on_ranks("ended", 3, |mut group| match group.rank() {
            // It says nothing until it is told that the group is over.
            2 => vec![heard_of_the_end(&mut group)],
            1 => {
                let mut asked = 0;
                let mut twice = || {
                    asked += 1;
                    asked < 2
                };
                let error = group.gather("", PATIENCE, &mut twice).expect_err("ended");
                vec![error, group.gather("", PATIENCE, &mut || true).expect_err("it is over")]
            }
            _ => vec![group.gather("", PATIENCE, &mut || true).expect_err("rank 1 is gone")],
        });
        let messages: Vec<Vec<_>> =
            errors.iter().map(|errors| errors.iter().map(Error::message).collect()).collect();
        let gone = "rank 1 of the job is gone";
        let own = ["the wait for the job's other ranks was ended here", "the job's group is over"];
        assert_eq!(messages, [vec![gone], own.to_vec(), vec![gone]]);
        let error = Group::join(&name("nobody"), 1, 2, "here", PATIENCE, &mut || false)
            .expect_err("rank 0 never comes");
        assert_eq!(error.message(), own[0]);
    }

    fn heard_of_the_end(group: &mut Group) -> Error {
        assert!(group.stream.as_ref().expect("a stream").readable(PATIENCE).expect("readable"));
        group.gather("", PATIENCE, &mut || true).expect_err("it is over")
    }

    /// The ranks waited for each other, and heard in the end that rank 0 did not answer.
    #[test]
    fn ranks_that_say_too_much_hear_so_at_once() {
        // Each alone fits; and one that does not fit alone, while the others wait for it.
        for (test, lengths, fact) in [
            ("much", [MOST_BYTES * 2 / 3; 2], "what the ranks tell each other is too long: 139"),
            ("more", [1, MOST_BYTES + 1], "what rank 1 tells the others is too long: 104"),
        ] {
            let errors = on_ranks(test, 2, |mut group| {
                let text = "x".repeat(lengths[group.rank()]);
                let error = group.gather(&text, PATIENCE, &mut || true).expect_err("too long");
                (error, group.gather("", PATIENCE, &mut || true).expect_err("it is over"))
            });
            for (error, after) in errors {
                assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
                assert!(error.message().contains(fact), "{error}");
                assert!(after.message().contains("is over"), "{after}");
            }
        }
        let longest = on_ranks("longest", 2, |mut group| {
            let text = "x".repeat(MOST_BYTES / 2 - 100);
            group.gather(&text, PATIENCE, &mut || true).expect("it fits").concat().len()
        });
        assert_eq!(longest, [MOST_BYTES - 200; 2]);
    }

    #[test]
    fn ranks_that_do_not_come_are_named_and_twins_are_refused() {
        // Rank 0 is there even where nobody is waited for.
        let error =
            Group::join(&name("alone"), 0, 3, "here", Duration::ZERO, &mut || true).expect_err("alone");
        assert!(error.message().contains("ranks 1, 2 did not join"), "{error}");
        // Many times, since the twins may be there before rank 0 looks, or after.
        for round in 0..20 {
            let name = name(&format!("twins-{round}"));
            std::thread::scope(|scope| {
                let join = |rank| {
                    let error =
                        Group::join(&name, rank, 3, "here", PATIENCE, &mut || true).expect_err("twins");
                    assert!(error.message().contains("two processes say that they are rank 1"), "{error}");
                };
                [0, 1, 1].into_iter().for_each(|rank| drop(scope.spawn(move || join(rank))));
            });
        }
    }
}
