//! One host that shares blocks: whether it is there, and streams to it.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::net::secure::{Host, Stream};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;

use super::wire::{Answer, Heard, Request, Who, in_time};

/// Streams to one member: so many requests are under way at once, and streams are kept for the next ones. A thousand hosts
/// that all want something of one stay within what it lets in.
const STREAMS: usize = 16;
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
    streams: Semaphore,
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
        let (known, streams) = (Mutex::new(known), Semaphore::new(STREAMS));
        Self { address, silence, known, idle: Mutex::default(), streams }
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
        &self,
        host: &Host,
        own: Who,
        request: &Request,
        block: &mut [u8],
    ) -> Result<Heard> {
        let asked = self.exchange(host, own, &request.encode(), block).await;
        asked.map_err(|error| {
            self.lose(host, &error);
            error.context(format!("peer {}", self.address))
        })
    }

    async fn exchange(&self, host: &Host, own: Who, request: &[u8], block: &mut [u8]) -> Result<Heard> {
        let _place = self.streams.acquire().await;
        // One that was kept may have been closed meanwhile, as by a peer that was started again.
        let kept = self.idle.lock().pop();
        if let Some(Idle { mut stream, .. }) = kept {
            match self.converse(&mut stream, request, block).await {
                Ok(heard) => {
                    self.keep(stream);
                    return Ok(heard);
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error.into()),
                Err(_) => {}
            }
        }
        let mut stream = self.connect(host, own).await?;
        let heard = self.converse(&mut stream, request, block).await?;
        self.keep(stream);
        Ok(heard)
    }

    /// A new stream, on which it has said who it is: a process that was started again may have another share.
    async fn connect(&self, host: &Host, own: Who) -> Result<Stream> {
        let reached = tokio::time::timeout(self.silence, host.reach(self.address)).await;
        let mut stream = reached.unwrap_or_else(|_| {
            let message = format!("{} cannot be reached", self.address);
            Err(Error::new(ErrorKind::Unavailable, message))
        })?;
        match self.converse(&mut stream, &Request::Hello.encode(), &mut []).await? {
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

    async fn converse(&self, stream: &mut Stream, request: &[u8], block: &mut [u8]) -> io::Result<Heard> {
        let said = async {
            stream.write_all(request).await?;
            stream.flush().await
        };
        in_time(self.silence, said).await?;
        Answer::hear(stream, block, self.silence).await
    }

    fn keep(&self, stream: Stream) {
        let mut idle = self.idle.lock();
        if idle.len() < STREAMS {
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

    /// It cannot be asked.
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
