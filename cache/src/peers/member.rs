//! One host that shares blocks: whether it is there, and streams to it.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::net::secure::{Host, Stream};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;

use super::wire::{Answer, Heard, Request, Who, in_time};

/// Streams to one member that are kept for the next request: as many as are used at once by default.
const IDLE: usize = 64;
/// How long one is kept.
const IDLE_FOR: Duration = Duration::from_secs(60);

/// How long one that does not give what is asked of it is left alone.
const REST: Duration = Duration::from_secs(30);

/// A member, whether it is there or not.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) address: SocketAddr,
    /// Whose share of all blocks it has, once it said so.
    share: AtomicU64,
    standing: Mutex<Standing>,
    /// Until when it is left alone.
    rests: Mutex<Option<Moment>>,
    idle: Mutex<Vec<Idle>>,
    /// Whether it was told why it is away.
    is_told: AtomicBool,
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

/// What is known of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It has not answered yet, or not any more.
    Away,
    /// It answers.
    Here,
    /// It is this process.
    Own,
}

impl Member {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self {
            address,
            share: AtomicU64::new(0),
            standing: Mutex::new(Standing::Away),
            rests: Mutex::default(),
            idle: Mutex::default(),
            is_told: AtomicBool::new(false),
        }
    }

    pub(super) fn standing(&self) -> Standing {
        *self.standing.lock()
    }

    /// What its blocks follow from.
    pub(super) fn share(&self) -> u64 {
        self.share.load(Relaxed)
    }

    /// Asks who it is, and so whether it is there; `own` is who this process is.
    pub(super) async fn greet(&self, host: &Host, own: Who) -> Result<()> {
        match self.ask(host, &Request::Hello, &mut []).await? {
            Heard::Hello(who) => {
                self.share.store(who.share, Relaxed);
                self.stand(if who.process == own.process { Standing::Own } else { Standing::Here });
                self.is_told.store(false, Relaxed);
                Ok(())
            }
            other => Err(Error::corrupt(format!("{} greets with {other:?}", self.address))),
        }
    }

    /// Asks for something; a block's bytes go into `block`. It counts as away from then on where it cannot be asked.
    ///
    /// # Errors
    /// As [`Answer::hear`]: that it could not is an answer.
    pub(super) async fn ask(&self, host: &Host, request: &Request, block: &mut [u8]) -> Result<Heard> {
        let asked = self.exchange(host, &request.encode(), block).await;
        if let Err(error) = &asked
            && self.stand(Standing::Away) != Standing::Away
        {
            self.idle.lock().clear();
            tracing::warn!(peer = %self.address, %error, "a peer is away; others, or the store, are asked for its blocks");
        }
        asked.map_err(|error| error.context(format!("peer {}", self.address)))
    }

    async fn exchange(&self, host: &Host, request: &[u8], block: &mut [u8]) -> Result<Heard> {
        // One that was kept may have been closed meanwhile, as by a peer that was started again.
        let kept = self.idle.lock().pop();
        if let Some(Idle { stream, .. }) = kept {
            match self.converse(stream, request, block).await {
                Err(error) if error.kind() != io::ErrorKind::TimedOut => {}
                answered => return Ok(answered?),
            }
        }
        let stream = host.reach(self.address).await?;
        Ok(self.converse(stream, request, block).await?)
    }

    async fn converse(&self, mut stream: Stream, request: &[u8], block: &mut [u8]) -> io::Result<Heard> {
        let said = async {
            stream.write_all(request).await?;
            stream.flush().await
        };
        in_time(said).await?;
        let heard = Answer::hear(&mut stream, block).await?;
        let mut idle = self.idle.lock();
        if idle.len() < IDLE {
            idle.push(Idle { stream, since: Clock::system().now() });
        }
        Ok(heard)
    }

    /// Leaves it alone for a while: it is there, and answers late, or has no store.
    pub(super) fn rest(&self, why: &Error) {
        *self.rests.lock() = Some(Clock::system().now() + REST);
        if self.stand(Standing::Away) != Standing::Away {
            let (peer, seconds) = (self.address, REST.as_secs());
            tracing::warn!(%peer, error = %why, seconds, "a peer does not give what is asked of it, and is left alone");
        }
    }

    /// Whether it is away, and may be looked for.
    pub(super) fn is_missed(&self) -> bool {
        let is_resting = || self.rests.lock().is_some_and(|until| Clock::system().now() < until);
        self.standing() == Standing::Away && !is_resting()
    }

    /// Closes streams that nobody needed for a while.
    pub(super) fn tidy(&self) {
        let now = Clock::system().now();
        self.idle.lock().retain(|idle| now.since(idle.since) < IDLE_FOR);
    }

    /// Tells why it is not there, unless that was told since it last was.
    pub(super) fn tell_once(&self, error: &Error) {
        match self.is_told.swap(true, Relaxed) {
            true => {}
            false if error.kind() == ErrorKind::Denied => {
                tracing::warn!(peer = %self.address, %error, "a peer turns this host away");
            }
            false => tracing::info!(peer = %self.address, %error, "a peer is not there yet"),
        }
    }

    fn stand(&self, standing: Standing) -> Standing {
        std::mem::replace(&mut *self.standing.lock(), standing)
    }
}
