//! Where an agent is found once its trainer was killed, and who came there.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_io::net::{FdStream, Meeting, meet, wait_readable};

use super::{Answer, VISIT_VERSION, Visit};
use crate::catalog::Start;

/// Visitors at once at most: the ranks of one host, several times over. More are turned away.
const MAX_VISITORS: usize = 256;
/// How long a visitor may hold the agent up.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest that nothing happens before the agent looks around.
const TICK: Duration = Duration::from_secs(3600);

/// A meeting place and those who came.
pub(crate) struct Door {
    place: Option<String>,
    meeting: Option<Meeting>,
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
        Ok(Self { place: None, meeting: Some(Meeting::hold(place)?), visitors: Vec::new() })
    }

    /// A door at `place`, not opened yet; none is never opened.
    pub(super) fn new(place: Option<String>) -> Self {
        Self { place, meeting: None, visitors: Vec::new() }
    }

    /// Opens it, unless another agent still has the place; whether it is open.
    pub(super) fn open(&mut self) -> bool {
        if let (None, Some(place)) = (&self.meeting, &self.place) {
            self.meeting = Meeting::hold(place).ok();
        }
        self.meeting.is_some()
    }

    /// Opens it where the agent of an earlier start has the place, too: that one was late, so that its successor did not meet it,
    /// and is told to leave.
    pub(super) fn take_over(&mut self, own: &Start) -> bool {
        let Some(place) = self.place.clone() else { return false };
        match dismiss_earlier(&place, own) {
            Ok(true) => self.open(),
            Ok(false) => false,
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
        (self.place, self.meeting) = (None, None);
        self.visitors.retain(|visitor| visitor.has_looked);
    }

    /// Waits until the trainer says something, or has ended; whoever comes meanwhile is turned away.
    pub(super) fn wait_for(&mut self, trainer: &FdStream) -> Result<()> {
        loop {
            self.open();
            let fds: Vec<BorrowedFd<'_>> =
                std::iter::once(trainer.as_fd()).chain(self.meeting.as_ref().map(AsFd::as_fd)).collect();
            let ready = wait_readable(&fds, TICK)?;
            // What the trainer said, even its end, comes before any visitor.
            if ready.contains(&0) {
                return Ok(());
            }
            if let Some(meeting) = self.meeting.as_ref().filter(|_| !ready.is_empty()) {
                drop(meeting.welcome(Duration::ZERO)?);
            }
        }
    }

    /// The next visitor and what it wants; `None` when `patience` passed first, `notice` can be read from, or for no reason.
    pub(crate) fn next(
        &mut self,
        patience: Duration,
        notice: Option<BorrowedFd<'_>>,
    ) -> Result<Option<(Visit, FdStream)>> {
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
                if let Some(visitor) = visitor.filter(|_| self.visitors.len() < MAX_VISITORS) {
                    visitor.set_patience(PATIENCE)?;
                    self.visitors.push(Visitor { stream: visitor, has_looked: false });
                }
                Ok(None)
            }
            Some(index) => {
                let mut visitor = self.visitors.swap_remove(index - 1).stream;
                // One that left, or says what this build does not know, is let go.
                let Ok(Some((frame, _))) = visitor.receive() else { return Ok(None) };
                Ok(serde_json::from_slice(&frame).ok().map(|visit| (visit, visitor)))
            }
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

/// Has the agent at `place` leave it if the start that it served is an earlier one; whether the place is free now.
fn dismiss_earlier(place: &str, own: &Start) -> Result<bool> {
    let Some(mut stream) = meet(place, Duration::ZERO)? else { return Ok(true) };
    stream.set_patience(PATIENCE)?;
    stream.send(&words(&Visit::Look { version: VISIT_VERSION })?, None)?;
    // One whose trainer lives turns all away.
    let Some((frame, _)) = stream.receive()? else { return Ok(false) };
    let answer: Answer = serde_json::from_slice(&frame)
        .map_err(|error| Error::invalid(format!("an agent's answer does not parse: {error}")))?;
    if (answer.started_ms, &answer.start) >= (own.started_ms, &own.nonce) {
        return Ok(false);
    }
    for _ in 0..answer.held.len() + answer.kept.len() {
        stream.receive()?;
    }
    stream.send(&words(&Visit::Succeed { lost: Vec::new() })?, None)?;
    // It has left the place when it says what becomes of its saves, which its own start told of.
    stream.receive()?;
    tracing::info!(
        start = answer.start,
        "the agent of an earlier start left the place at which a restarted trainer looks"
    );
    Ok(true)
}

fn words(visit: &Visit) -> Result<Vec<u8>> {
    serde_json::to_vec(visit).map_err(|error| Error::bug(format!("encode a visit: {error}")))
}
