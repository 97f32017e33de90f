//! One host that shares blocks: whether it is there, and streams to it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::net::secure::{Host, Stream};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::wire::{Answer, Heard, Landing, Request, Wanted, Who, in_time};

/// Streams to one member: so many requests are under way at once, and streams are kept for the next ones.
const STREAMS: usize = 16;
/// Streams besides for what a member is to pass on.
const STREAMS_AT_HAND: usize = 16;
/// How long one that is not needed is kept.
const IDLE_FOR: Duration = Duration::from_secs(60);
/// A member that did not give what was asked of it so many times in a row is left alone for a while.
const FAULTS: u32 = 3;
const REST: Duration = Duration::from_secs(30);

/// A member, whether it is there or not.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) address: SocketAddr,
    /// How long it may say nothing.
    silence: Duration,
    known: Mutex<Known>,
    idle: Mutex<Vec<Idle>>,
    streams: Arc<Semaphore>,
    streams_at_hand: Arc<Semaphore>,
}

/// What is known of a member.
#[derive(Debug, Clone, Copy)]
struct Known {
    standing: Standing,
    /// Who it was when it answered last.
    who: Who,
    /// How often in a row it did not give what was asked of it.
    faults: u32,
    /// Until when it is left alone.
    rests: Option<Moment>,
    /// Whether it was told why it is away.
    is_told: bool,
}

/// Whether a member is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It has not answered yet, or not any more.
    Away,
    /// It answers.
    Here,
    /// It is this process.
    Own,
}

struct Idle {
    stream: Stream,
    since: Moment,
}

impl std::fmt::Debug for Idle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a stream, since {:?}", self.since)
    }
}

impl Member {
    /// A member that nobody has looked for yet, which may say nothing for so long.
    pub(super) fn new(address: SocketAddr, silence: Duration) -> Self {
        let who = Who { share: 0, process: 0 };
        let known = Known { standing: Standing::Away, who, faults: 0, rests: None, is_told: false };
        let streams = |count| Arc::new(Semaphore::new(count));
        Self {
            address,
            silence,
            known: Mutex::new(known),
            idle: Mutex::default(),
            streams: streams(STREAMS),
            streams_at_hand: streams(STREAMS_AT_HAND),
        }
    }

    pub(super) fn standing(&self) -> Standing {
        self.known.lock().standing
    }

    /// Who it is, where it answers.
    pub(super) fn who(&self) -> Option<Who> {
        let known = self.known.lock();
        (known.standing == Standing::Here).then_some(known.who)
    }

    /// Whether it is away, and may be looked for.
    pub(super) fn is_missed(&self) -> bool {
        let known = *self.known.lock();
        let is_resting = || known.rests.is_some_and(|until| Clock::system().now() < until);
        known.standing == Standing::Away && !is_resting()
    }

    /// Finds out whether it is there, and who it is; `own` is who this process is.
    pub(super) async fn greet(&self, host: &Host, own: Who) {
        match self.connect(host, own).await {
            Ok(stream) => {
                self.keep(stream);
                tracing::info!(peer = %self.address, "a peer is there");
            }
            Err(error) => {
                let was_told = std::mem::replace(&mut self.known.lock().is_told, true);
                match (was_told, error.kind()) {
                    (true, _) => {}
                    (_, ErrorKind::Denied) => {
                        tracing::warn!(peer = %self.address, %error, "a peer turns this host away");
                    }
                    _ => tracing::info!(peer = %self.address, %error, "a peer is not there yet"),
                }
            }
        }
    }

    /// Asks for something; a block's bytes go into `block`. It counts as away from then on where it cannot be asked.
    ///
    /// # Errors
    /// As [`Answer::hear`]: that it could not is an answer.
    pub(super) async fn ask(
        self: &Arc<Self>,
        host: &Host,
        own: Who,
        request: &Request,
        block: &mut Landing<'_>,
    ) -> Result<Heard> {
        let place = self.place(request).await?;
        let (heard, line) = self.call(place, host, own, request, block).await?;
        line.end();
        Ok(heard)
    }

    /// Waits for a stream to be free for a request.
    ///
    /// # Errors
    /// `Conflict` where none is for what is to be passed on: who is passed something waits for nobody else, lest they wait for
    /// each other.
    pub(super) async fn place(&self, request: &Request) -> Result<OwnedSemaphorePermit> {
        let place = match request {
            Request::Get(_, Wanted::AtHand) => self.streams_at_hand.clone().try_acquire_owned().ok(),
            _ => self.streams.clone().acquire_owned().await.ok(),
        };
        place.ok_or_else(|| Error::new(ErrorKind::Conflict, "all streams to it are in use"))
    }

    /// The same, with the line on which more is to be said.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub(super) async fn call(
        self: &Arc<Self>,
        place: OwnedSemaphorePermit,
        host: &Host,
        own: Who,
        request: &Request,
        block: &mut Landing<'_>,
    ) -> Result<(Heard, Line)> {
        let exchanged = self.exchange(host, own, &request.encode(), block).await;
        let (heard, stream) = exchanged.map_err(|error| match request {
            // It may be another one that did not send it what it was to pass on.
            Request::Get(_, Wanted::AtHand) => error,
            _ => self.lost(host, error),
        })?;
        Ok((heard, Line { member: self.clone(), stream, _place: place }))
    }

    async fn exchange(
        &self,
        host: &Host,
        own: Who,
        request: &[u8],
        block: &mut Landing<'_>,
    ) -> Result<(Heard, Stream)> {
        // One that was kept may have been closed meanwhile, as by a peer that was started again.
        let kept = self.idle.lock().pop();
        if let Some(Idle { mut stream, .. }) = kept {
            match self.converse(&mut stream, request, block).await {
                Ok(heard) => return Ok((heard, stream)),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error.into()),
                Err(_) => {}
            }
        }
        let mut stream = self.connect(host, own).await?;
        let heard = self.converse(&mut stream, request, block).await?;
        Ok((heard, stream))
    }

    /// A new stream, on which it has said who it is: a process that was started again may have another share.
    async fn connect(&self, host: &Host, own: Who) -> Result<Stream> {
        let reached = tokio::time::timeout(self.silence, host.reach(self.address)).await;
        let mut stream = reached.unwrap_or_else(|_| {
            let message = format!("{} cannot be reached", self.address);
            Err(Error::new(ErrorKind::Unavailable, message))
        })?;
        match self.converse(&mut stream, &Request::Hello(Some(own)).encode(), &mut Landing::default()).await?
        {
            Heard::Hello(who) => {
                let mut known = self.known.lock();
                known.who = who;
                known.standing = if who.process == own.process { Standing::Own } else { Standing::Here };
                known.is_told = false;
                Ok(stream)
            }
            other => Err(Error::corrupt(format!("{} greets with {other:?}", self.address))),
        }
    }

    async fn converse(
        &self,
        stream: &mut Stream,
        request: &[u8],
        block: &mut Landing<'_>,
    ) -> io::Result<Heard> {
        self.say(stream, request).await?;
        Answer::hear(stream, block, self.silence).await
    }

    async fn say(&self, stream: &mut Stream, request: &[u8]) -> io::Result<()> {
        let said = async {
            stream.write_all(request).await?;
            stream.flush().await
        };
        in_time(self.silence, said).await
    }

    fn keep(&self, stream: Stream) {
        let mut idle = self.idle.lock();
        if idle.len() < STREAMS + STREAMS_AT_HAND {
            idle.push(Idle { stream, since: Clock::system().now() });
        }
    }

    /// Closes streams that nobody needed for a while.
    pub(super) fn tidy(&self) {
        let now = Clock::system().now();
        self.idle.lock().retain(|idle| now.since(idle.since) < IDLE_FOR);
    }

    /// It gave what was asked of it.
    pub(super) fn praise(&self) {
        self.known.lock().faults = 0;
    }

    /// It did not give what was asked of it, though it answers, and the store gave it: it is left alone for a while once that
    /// was so several times in a row.
    pub(super) fn blame(&self, why: &Error) {
        let mut known = self.known.lock();
        known.faults += 1;
        if known.faults >= FAULTS && known.standing == Standing::Here {
            (known.faults, known.standing) = (0, Standing::Away);
            known.rests = Some(Clock::system().now() + REST);
            let (peer, seconds) = (self.address, REST.as_secs());
            tracing::warn!(%peer, error = %why, seconds, "a peer does not give what is asked of it, and is left alone");
        }
    }

    /// It cannot be asked, which the error that is returned says.
    fn lost(&self, host: &Host, error: Error) -> Error {
        self.lose(host, &error);
        error.context(format!("peer {}", self.address))
    }

    fn lose(&self, host: &Host, why: &Error) {
        self.idle.lock().clear();
        host.forget(self.address);
        let mut known = self.known.lock();
        // Of requests that were under way together the first one tells.
        if std::mem::replace(&mut known.standing, Standing::Away) != Standing::Away {
            known.is_told = true;
            known.faults += 1;
            if known.faults >= FAULTS {
                (known.faults, known.rests) = (0, Some(Clock::system().now() + REST));
            }
            let peer = self.address;
            tracing::warn!(%peer, error = %why, "a peer is away; others, or the store, are asked for its blocks");
        }
    }
}

/// A stream on which a member has answered, and is to be told or asked more. One that is dropped is closed.
pub(super) struct Line {
    member: Arc<Member>,
    stream: Stream,
    _place: OwnedSemaphorePermit,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a line to {}", self.member.address)
    }
}

impl Line {
    /// Asks for something else.
    ///
    /// # Errors
    /// As [`Member::ask`].
    pub(super) async fn ask(
        &mut self,
        host: &Host,
        request: &Request,
        block: &mut Landing<'_>,
    ) -> Result<Heard> {
        let heard = self.member.converse(&mut self.stream, &request.encode(), block).await;
        heard.map_err(|error| self.member.lost(host, error.into()))
    }

    /// Tells something that is not answered, and ends.
    pub(super) async fn tell(mut self, request: &Request) {
        if self.member.say(&mut self.stream, &request.encode()).await.is_ok() {
            self.end();
        }
    }

    /// Keeps the stream for others, as nothing more is to be said now; gives no line.
    pub(super) fn end(self) -> Option<Self> {
        self.member.keep(self.stream);
        None
    }
}
