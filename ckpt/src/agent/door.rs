//! Where an agent is found once its trainer was killed, and who came there.
//!
//! An agent that is succeeded hands the place to its successor's, with those who stand there and were not answered yet: a start
//! that looks in between finds the one or the other.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_io::net::{FdStream, Meeting, meet, wait_readable};

use super::{Answer, LostRanks, VISIT_VERSION, Visit};
use crate::catalog::Start;

/// Visitors at once at most: the ranks of one host, several times over. More are turned away.
const MAX_VISITORS: usize = 256;
/// How long a visitor may hold the agent up.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest that nothing happens before the agent looks around.
const TICK: Duration = Duration::from_secs(3600);

/// With the descriptor of one who came.
const A_VISITOR: &[u8] = b"visitor";
/// With that of the place, last.
const THE_PLACE: &[u8] = b"place";

/// A meeting place and those who came, oldest first.
pub(crate) struct Door {
    place: Option<String>,
    meeting: Option<Meeting>,
    /// Where the agent that has the place hands it over.
    heir_of: Option<FdStream>,
    visitors: Vec<Visitor>,
}

struct Visitor {
    stream: FdStream,
    /// Whether it saw what is held, and may come to want it.
    has_looked: bool,
}

impl Door {
    /// One at `place` that is open.
    ///
    /// # Errors
    /// `Exists` where the place is taken.
    pub(crate) fn hold(place: &str) -> Result<Self> {
        Ok(Self { meeting: Some(Meeting::hold(place)?), ..Self::new(None) })
    }

    /// A door at `place`, not opened yet; none is never opened.
    pub(super) fn new(place: Option<String>) -> Self {
        Self { place, meeting: None, heir_of: None, visitors: Vec::new() }
    }

    /// Opens it, unless another agent still has the place, or is about to hand it over; whether it is open.
    pub(super) fn open(&mut self) -> bool {
        if let (None, None, Some(place)) = (&self.meeting, &self.heir_of, &self.place) {
            self.meeting = Meeting::hold(place).ok();
        }
        self.meeting.is_some()
    }

    /// From now on the place is awaited at the other end of this connection.
    pub(super) fn inherit(&mut self, heir_of: FdStream) -> Result<()> {
        heir_of.set_patience(PATIENCE)?;
        // Where this one has it already, the other has left.
        self.heir_of = Some(heir_of).filter(|_| self.meeting.is_none());
        Ok(())
    }

    /// Takes what the agent before this one hands over, which does so once it hears of its successor, or ends.
    fn take_place(&mut self) {
        let Some(mut heir_of) = self.heir_of.take() else { return };
        while let Ok(Some((what, Some(fd)))) = heir_of.receive() {
            match (&what[..], &self.place) {
                (A_VISITOR, Some(_)) => self.welcome(FdStream::new(fd.into())),
                (THE_PLACE, Some(place)) => {
                    let handed = Meeting::handed(place, fd);
                    self.meeting =
                        handed.inspect_err(|error| tracing::warn!(%error, "it is taken anew")).ok();
                    break;
                }
                _ => {}
            }
        }
        self.open();
    }

    /// Hands the place over to the successor's agent at the other end of `heir`, where there is one, and those who were not
    /// answered yet; closes it for ever in any case.
    pub(super) fn hand_over(&mut self, heir: Option<OwnedFd>) {
        let Self { meeting, visitors, .. } = std::mem::replace(self, Self::new(None));
        let (Some(heir), Some(meeting)) = (heir, meeting) else { return };
        let hand_over = || -> Result<()> {
            let mut heir = FdStream::new(heir.into());
            heir.set_patience(PATIENCE)?;
            for Visitor { stream, .. } in visitors.iter().filter(|visitor| !visitor.has_looked) {
                heir.send(A_VISITOR, Some(stream.as_fd()))?;
            }
            heir.send(THE_PLACE, Some(meeting.as_fd()))
        };
        if let Err(error) = hand_over() {
            tracing::warn!(%error, "the place at which a restarted trainer looks was not handed over whole");
        }
    }

    /// Opens it, where another agent has the place as well: one that was succeeded hands it over, and one of an earlier start, which
    /// was so late that its successor did not meet it, is told to leave. Whether it is open.
    pub(super) fn claim(&mut self, own: &Start) -> bool {
        let Some(place) = self.place.clone() else { return false };
        // Who was to hand it over may have left it meanwhile.
        self.meeting = self.meeting.take().or_else(|| Meeting::hold(&place).ok());
        if self.meeting.is_none() {
            self.take_place();
        }
        if self.meeting.is_some() {
            self.heir_of = None;
            return true;
        }
        match dismiss_earlier(&place, own) {
            Ok(Dismissed::Gone) => self.open(),
            Ok(Dismissed::HandsOver(heir_of)) => {
                self.heir_of = Some(heir_of);
                self.take_place();
                self.meeting.is_some()
            }
            Ok(Dismissed::Stays) => false,
            Err(error) => {
                tracing::warn!(%error, "another agent has the place at which a restarted trainer looks");
                false
            }
        }
    }

    /// Closes it for ever, so that another agent can have the place.
    pub(super) fn close(&mut self) {
        *self = Self::new(None);
    }

    /// Lets go of the place for ever; those that have looked stay.
    pub(super) fn leave(&mut self) {
        (self.place, self.meeting, self.heir_of) = (None, None, None);
        self.visitors.retain(|visitor| visitor.has_looked);
    }

    /// Waits until the trainer says something, or has ended; whoever comes meanwhile is turned away.
    pub(super) fn wait_for(&mut self, trainer: &FdStream) -> Result<()> {
        loop {
            self.open();
            let place = self.meeting.as_ref().map(AsFd::as_fd).or(self.heir_of.as_ref().map(AsFd::as_fd));
            let fds: Vec<BorrowedFd<'_>> = std::iter::once(trainer.as_fd()).chain(place).collect();
            let ready = wait_readable(&fds, TICK)?;
            // What the trainer said, even its end, comes before any visitor.
            if ready.contains(&0) {
                return Ok(());
            }
            if self.heir_of.is_some() && !ready.is_empty() {
                self.take_place();
                // Its trainer lives.
                self.visitors.clear();
            } else if let Some(meeting) = self.meeting.as_ref().filter(|_| !ready.is_empty()) {
                drop(meeting.welcome(Duration::ZERO)?);
            }
        }
    }

    /// The next visitor, what it wants, and the descriptor that came with that; `None` when `patience` passed first, `notice` can be
    /// read from, or for no reason.
    pub(crate) fn next(
        &mut self,
        patience: Duration,
        notice: Option<BorrowedFd<'_>>,
    ) -> Result<Option<(Visit, FdStream, Option<OwnedFd>)>> {
        let Some(meeting) = &self.meeting else { return Ok(None) };
        let visitors = self.visitors.iter().map(|visitor| visitor.stream.as_fd());
        let fds: Vec<BorrowedFd<'_>> =
            std::iter::once(meeting.as_fd()).chain(visitors).chain(notice).collect();
        let ready = wait_readable(&fds, patience)?;
        match ready.first() {
            None => Ok(None),
            Some(index) if *index > self.visitors.len() => Ok(None),
            Some(0) => {
                let visitor = meeting.welcome(Duration::ZERO)?;
                visitor.into_iter().for_each(|visitor| self.welcome(visitor));
                Ok(None)
            }
            Some(index) => {
                // In the order in which they came: one that takes over comes before those that look afterwards.
                let mut visitor = self.visitors.remove(index - 1).stream;
                // One that left, or says what this build does not know, is let go.
                let Ok(Some((frame, fd))) = visitor.receive() else { return Ok(None) };
                Ok(serde_json::from_slice(&frame).ok().map(|visit| (visit, visitor, fd)))
            }
        }
    }

    fn welcome(&mut self, visitor: FdStream) {
        if self.visitors.len() < MAX_VISITORS && visitor.set_patience(PATIENCE).is_ok() {
            self.visitors.push(Visitor { stream: visitor, has_looked: false });
        }
    }

    /// Has a visitor stay that has looked, for what it may want later.
    pub(super) fn keep(&mut self, visitor: FdStream) {
        self.visitors.push(Visitor { stream: visitor, has_looked: true });
    }

    /// Whether one that has looked is still there.
    pub(super) fn is_watched(&self) -> bool {
        self.visitors.iter().any(|visitor| visitor.has_looked)
    }
}

/// What became of the agent that had the place.
enum Dismissed {
    Gone,
    /// It served an earlier start, and hands the place over at the other end of this connection.
    HandsOver(FdStream),
    /// It served a later one, or its trainer lives.
    Stays,
}

/// Has the agent at `place` leave it if the start that it served is an earlier one.
fn dismiss_earlier(place: &str, own: &Start) -> Result<Dismissed> {
    let Some(mut stream) = meet(place, Duration::ZERO)? else { return Ok(Dismissed::Gone) };
    stream.set_patience(PATIENCE)?;
    stream.send(&words(&Visit::Look { version: VISIT_VERSION })?, None)?;
    // One whose trainer lives turns all away.
    let Some((frame, _)) = stream.receive()? else { return Ok(Dismissed::Stays) };
    let answer: Answer = serde_json::from_slice(&frame)
        .map_err(|error| Error::invalid(format!("an agent's answer does not parse: {error}")))?;
    if (answer.started_ms, &answer.start) >= (own.started_ms, &own.nonce) {
        return Ok(Dismissed::Stays);
    }
    for _ in 0..answer.held.len() + answer.kept.len() {
        stream.receive()?;
    }
    let (heir_of, heir) = FdStream::pair()?;
    heir_of.set_patience(PATIENCE)?;
    stream.send(&words(&Visit::Succeed(LostRanks::default()))?, Some(heir.as_fd()))?;
    drop(heir);
    // It has left the place when it says what becomes of its saves, which its own start told of.
    stream.receive()?;
    tracing::info!(
        start = answer.start,
        "the agent of an earlier start left the place at which a restarted trainer looks"
    );
    Ok(Dismissed::HandsOver(heir_of))
}

fn words(visit: &Visit) -> Result<Vec<u8>> {
    serde_json::to_vec(visit).map_err(|error| Error::bug(format!("encode a visit: {error}")))
}
