//! The ranks of a job, talking to each other: one operation, in which each says something and all hear everything, and
//! may lend memory to all.
//!
//! Rank 0's process holds a meeting place (see `forebay_io::net`) and a thread that collects and hands out; on one host it
//! needs neither torch's process groups nor a port. Those of other hosts come through a door, of which they were told
//! otherwise. A rank that ends, or says nothing in time, is named to all others, and the group is over. Each rank says on which
//! host it is, and memory is lent on one host only.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::codec;
use forebay_io::mem::SharedMemory;
use forebay_io::net::{Door, FdStream, Inherited, MAX_FRAME, Meeting, Received, meet, wait_readable};
use forebay_io::open_files::allow_more;
use serde::{Deserialize, Serialize};

use crate::manifest::MAX_RANKS;

/// How much longer a rank waits than the collecting thread does, which then names those it waits for.
const GRACE: Duration = Duration::from_secs(5);
/// The longest that nobody says anything before the thread looks whether its own process let it go.
const TICK: Duration = Duration::from_secs(3600);
/// How often a rank that waits asks whether it is to go on.
const BEAT: Duration = Duration::from_millis(200);
/// Bytes that the socket of whoever waits takes at once, for it is empty: that needs no thread.
const AT_ONCE: usize = 64 << 10;
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

/// How a rank comes to the others.
#[derive(Debug)]
pub enum Way<'a> {
    /// By a meeting place of that name, of this host: rank 0 holds it.
    Name(&'a str),
    /// So, and rank 0 opens a door for those of other hosts as well.
    Open(&'a str, Door),
    /// From another host than rank 0's, through its door.
    Came(FdStream),
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
    /// Joins a group by a `way`, and waits until all `world_size` ranks did, up to `patience`. `host` names where this rank
    /// is, for all of the same host alike.
    ///
    /// # Errors
    /// `Unavailable`, naming the ranks that are missing; `Invalid` when two ranks have one number, the ranks
    /// disagree about how many they are, or those are more than a step may have; `Exists` when another group meets there.
    /// `Unavailable` as well where rank 0's process may not have as many files open.
    pub fn join(
        way: Way<'_>,
        rank: usize,
        world_size: usize,
        host: &str,
        patience: Duration,
        goes_on: GoesOn<'_>,
    ) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::invalid(format!("rank {rank} of {world_size}")));
        }
        if world_size > MAX_RANKS as usize {
            return Err(Error::invalid(format!("{world_size} ranks, more than {MAX_RANKS}")));
        }
        let ends = Arc::new(Inherited::new());
        let stream = match (way, rank) {
            (Way::Name(name), 0) => hold(name, None, world_size, patience, ends.clone())?,
            (Way::Open(name, door), 0) => hold(name, Some(door), world_size, patience, ends.clone())?,
            (Way::Came(_), 0) => return Err(Error::invalid("rank 0 comes to its own door")),
            (Way::Name(name) | Way::Open(name, _), _) => {
                visit(name, Joining { rank, world_size }, patience, goes_on)?
            }
            (Way::Came(mut stream), _) => {
                // Where rank 0 is gone by now, that is found when the hosts are told.
                stream.send(&frame_of(&Joining { rank, world_size })?, None).ok();
                stream
            }
        };
        stream.set_patience(BEAT)?;
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
        let mut wait = Wait::new(patience + GRACE, goes_on);
        // Where the group was over already, why can still be heard.
        stream.send_while(&word, fd, &mut || wait.goes_on()).ok();
        let gone = || Error::new(ErrorKind::Unavailable, "rank 0 is gone, and the job's group with it");
        let late = || missing(&[0], "answer", patience);
        let heard = match wait.for_words(stream) {
            Ok(true) => stream.receive_while(&mut || wait.goes_on()).map_err(|error| match error.kind() {
                ErrorKind::Unavailable if wait.left().is_zero() => late(),
                // Its process ended before it answered.
                ErrorKind::Unavailable => gone(),
                _ => error,
            }),
            Ok(false) => Err(late()),
            Err(error) => Err(error),
        };
        if wait.is_ended {
            // The others hear that this rank is gone: its next words would be taken for those of this round.
            self.stream = None;
            return Err(Wait::ended());
        }
        let answer = match heard {
            Ok(Some((frame, _))) => {
                read_answer(&frame).unwrap_or_else(|error| Answer::Over(error.to_string()))
            }
            Ok(None) => Answer::Over(gone().to_string()),
            Err(error) => Answer::Over(error.to_string()),
        };
        match answer {
            Answer::All(texts, count) => {
                let fd = |_| match stream.receive_while(&mut || wait.goes_on()) {
                    Ok(Some((_, Some(fd)))) => Ok(fd),
                    Ok(Some((_, None))) => Err(lost()),
                    Ok(None) => Err(gone()),
                    Err(error) => Err(error),
                };
                let fds = (0..count).map(fd).collect::<Result<_>>();
                // What was not read yet would be taken for the next round's words.
                self.stream = self.stream.take().filter(|_| fds.is_ok());
                Ok((texts, fds?))
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
fn hold(
    name: &str,
    door: Option<Door>,
    world_size: usize,
    patience: Duration,
    ends: Arc<Inherited>,
) -> Result<FdStream> {
    allow_more(world_size as u64, "the job's other ranks")?;
    let meeting = Meeting::hold(name)?;
    let (own, other) = FdStream::pair()?;
    let serve = move || serve(&meeting, door, other, world_size, patience, &ends);
    std::thread::Builder::new().name("forebay-group".into()).spawn(serve)?;
    Ok(own)
}

/// Goes to the meeting place that rank 0 holds, or will hold in time.
fn visit(name: &str, joining: Joining, patience: Duration, goes_on: GoesOn<'_>) -> Result<FdStream> {
    let mut wait = Wait::new(patience + GRACE, goes_on);
    loop {
        if let Some(mut stream) = meet(name, wait.left().min(BEAT))? {
            stream.send(&frame_of(&joining)?, None).ok();
            return Ok(stream);
        }
        if !wait.goes_on() {
            return Err(if wait.is_ended {
                Wait::ended()
            } else {
                missing(&[0], "join the job's group", patience)
            });
        }
    }
}

/// How long a rank waits for rank 0.
struct Wait<'a> {
    clock: Clock,
    deadline: Moment,
    asked: GoesOn<'a>,
    /// Whether it is not to go on.
    is_ended: bool,
}

impl<'a> Wait<'a> {
    fn new(patience: Duration, asked: GoesOn<'a>) -> Self {
        let clock = Clock::system();
        let deadline = clock.now() + patience;
        Self { clock, deadline, asked, is_ended: false }
    }

    fn left(&self) -> Duration {
        self.deadline.since(self.clock.now())
    }

    /// Asks, and whether there is time left.
    fn goes_on(&mut self) -> bool {
        self.is_ended = self.is_ended || !(self.asked)();
        !self.is_ended && !self.left().is_zero()
    }

    /// Whether the next words came in time. A signal by itself ends no wait.
    fn for_words(&mut self, stream: &FdStream) -> Result<bool> {
        while !self.is_ended {
            if stream.readable(self.left().min(BEAT))? {
                return Ok(true);
            }
            if !self.goes_on() {
                break;
            }
        }
        Ok(false)
    }

    fn ended() -> Error {
        Error::new(ErrorKind::Unavailable, "the wait for the job's other ranks was ended here")
    }
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

fn read_answer(frame: &[u8]) -> Result<Answer> {
    match codec::is_packed(frame) {
        true => parse(&codec::unpack(frame, MOST_BYTES)?),
        false => parse(frame),
    }
}

fn missing(ranks: &[usize], doing: &str, patience: Duration) -> Error {
    let (ranks, seconds) = (list(ranks), patience.as_secs_f64());
    Error::new(ErrorKind::Unavailable, format!("{ranks} did not {doing} within {seconds} s"))
}

/// The kernel gives a frame without its descriptor to a process that may have no more of them.
fn lost() -> Error {
    Error::new(ErrorKind::Unavailable, "memory that a rank of the job lent did not arrive")
        .with_hint("the process may be out of file descriptors: see `ulimit -n`")
}

fn list(ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

/// The life of rank 0's thread: until a rank is gone or silent, and all others were told.
fn serve(
    meeting: &Meeting,
    door: Option<Door>,
    first: FdStream,
    world_size: usize,
    patience: Duration,
    ends: &Inherited,
) {
    // Those who came to a group that did not come about were told already.
    let Ok(mut ranks) = welcome_all(meeting, door.as_ref(), first, world_size, patience) else { return };
    // Nobody else is to come.
    drop(door);
    let fds = ranks.iter().map(AsFd::as_fd).chain([meeting.as_fd()]);
    // Before rank 0 hears that all are there, and until right before they are closed.
    let _noted = ends.note(fds);
    let over = loop {
        let told = collect(&mut ranks, patience).and_then(|Said { texts, fds, patience }| {
            let fds: Vec<OwnedFd> = fds.into_iter().flatten().collect();
            tell_all(&mut ranks, &Answer::All(texts, fds.len()), &fds, patience)
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
    door: Option<&Door>,
    first: FdStream,
    world_size: usize,
    patience: Duration,
) -> Result<Vec<FdStream>> {
    let clock = Clock::system();
    let deadline = clock.now() + patience;
    first.set_patience(BEAT)?;
    let others = (1..world_size).map(|_| None);
    let mut places: Vec<Option<FdStream>> = std::iter::once(Some(first)).chain(others).collect();
    let refused = loop {
        let absent: Vec<_> = (0..world_size).filter(|rank| places[*rank].is_none()).collect();
        if absent.is_empty() {
            return Ok(places.into_iter().flatten().collect());
        }
        let Some(mut visitor) = welcome(meeting, door, deadline)? else {
            break missing(&absent, "join the job's group", patience);
        };
        visitor.set_patience(BEAT)?;
        // One that is gone again, or says nothing, did not come.
        let received = visitor.receive_while(&mut || clock.now() < deadline);
        let Ok(Some((frame, _))) = received else { continue };
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

/// The next visitor of this host or another one; `None` when there was none until the deadline.
fn welcome(meeting: &Meeting, door: Option<&Door>, deadline: Moment) -> Result<Option<FdStream>> {
    let clock = Clock::system();
    let ways: Vec<_> = std::iter::once(meeting.as_fd()).chain(door.map(AsFd::as_fd)).collect();
    loop {
        let left = deadline.since(clock.now());
        wait_readable(&ways, left)?;
        let came = match meeting.welcome(Duration::ZERO)? {
            None => door.map_or(Ok(None), Door::welcome)?,
            came => came,
        };
        if came.is_some() || left.is_zero() {
            return Ok(came);
        }
    }
}

/// One word of each rank, the descriptors that came with them, and how long the first of them waits.
struct Said {
    texts: Vec<String>,
    fds: Vec<Option<OwnedFd>>,
    patience: Duration,
}

/// Hears all ranks, each piece by piece: one that stops in the middle of its word keeps nobody from being heard. `patience` is
/// for the first word alone, once it has begun; from then on its own counts.
fn collect(ranks: &mut [FdStream], patience: Duration) -> Result<Said> {
    let clock = Clock::system();
    let mut fds: Vec<Option<OwnedFd>> = ranks.iter().map(|_| None).collect();
    let mut texts: Vec<Option<String>> = ranks.iter().map(|_| None).collect();
    // Until when, and how long that is.
    let mut begun: Option<(Moment, Duration)> = None;
    let mut waiting: Option<(Moment, Duration)> = None;
    loop {
        let silent: Vec<usize> = (0..texts.len()).filter(|rank| texts[*rank].is_none()).collect();
        if silent.is_empty() {
            let patience = waiting.map_or(patience, |(_, patience)| patience);
            return Ok(Said { texts: texts.into_iter().flatten().collect(), fds, patience });
        }
        let left = waiting.or(begun).map_or(TICK, |(deadline, _)| deadline.since(clock.now()));
        if let Some((_, patience)) = waiting.or(begun).filter(|_| left.is_zero()) {
            // While nobody has said a word, only those that began one are waited for.
            let is_late = |rank: &usize| waiting.is_some() || ranks[*rank].is_amid();
            let late: Vec<usize> = silent.into_iter().filter(is_late).collect();
            return Err(missing(&late, "take part", patience));
        }
        // Those that spoke say nothing more until they are answered: what can be received from them is their end.
        let streams: Vec<&FdStream> = ranks.iter().collect();
        for rank in FdStream::readable_among(&streams, left)? {
            let received = match texts[rank] {
                None => ranks[rank].receive_more(),
                Some(_) => Ok(Received::Closed),
            };
            let (frame, fd) = match received {
                Ok(Received::Frame(frame, fd)) => (frame, fd),
                Ok(Received::Pause) => {
                    begun.get_or_insert((clock.now() + patience, patience));
                    continue;
                }
                Ok(Received::Closed) | Err(_) => {
                    let fact = format!("rank {rank} of the job is gone");
                    return Err(Error::new(ErrorKind::Unavailable, fact));
                }
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

/// Tells all at once. A rank that cannot be told is found gone in the next round. Rank 0 is told last: this thread may end
/// with it.
///
/// # Errors
/// `Unavailable`, naming the ranks, where some do not take it within `patience`; all others were told. `TooLarge` when no
/// frame takes the answer; nobody was told anything then.
fn tell_all(ranks: &mut [FdStream], answer: &Answer, fds: &[OwnedFd], patience: Duration) -> Result<()> {
    let mut frame = frame_of(answer).map_err(|error| match error.kind() {
        ErrorKind::TooLarge => {
            let fact = format!("what the ranks tell each other is too long: {}", error.message());
            Error::new(ErrorKind::TooLarge, fact)
        }
        _ => error,
    })?;
    if frame.len() > AT_ONCE {
        // All of it goes to each of them, and ranks say much the same.
        frame = codec::pack(&frame)?;
    }
    let clock = Clock::system();
    let deadline = clock.now() + patience;
    // Whether it was not taken in time.
    let is_stuck = |stream: &mut FdStream| {
        let mut in_time = || clock.now() < deadline;
        let mut told = stream.send_while(&frame, None, &mut in_time);
        for fd in fds {
            told = told.and_then(|()| stream.send_while(&[], Some(fd.as_fd()), &mut in_time));
        }
        told.is_err() && !in_time()
    };
    let Some((first, others)) = ranks.split_first_mut() else { return Ok(()) };
    let mut stuck: Vec<usize> = std::thread::scope(|scope| {
        let (is_stuck, needs_thread) = (&is_stuck, frame.len() > AT_ONCE);
        let told: Vec<_> = others
            .iter_mut()
            .map(|stream| match needs_thread {
                true => Err(scope.spawn(move || is_stuck(stream))),
                false => Ok(is_stuck(stream)),
            })
            .collect();
        let stuck = told.into_iter().map(|told| told.unwrap_or_else(|thread| thread.join().unwrap_or(true)));
        stuck.enumerate().filter(|(_, is_stuck)| *is_stuck).map(|(index, _)| index + 1).collect()
    });
    if is_stuck(first) {
        stuck.insert(0, 0);
    }
    match stuck.is_empty() {
        true => Ok(()),
        false => Err(missing(&stuck, "take the answer", patience)),
    }
}

/// Tells all why the group is over.
fn end_all(ranks: &mut [FdStream], over: &Error) {
    let message = over.message().to_owned();
    let answer = match over.kind() {
        ErrorKind::TooLarge => Answer::TooLong(message),
        _ => Answer::Over(message),
    };
    if let Err(error) = tell_all(ranks, &answer, &[], GRACE) {
        tracing::warn!(%error, "the ranks were not told why their group is over");
    }
}

#[cfg(test)]
mod tests;
