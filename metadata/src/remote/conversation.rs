//! What is said with one mount over one stream.

use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::net::secure::Stream;
use forebay_io::task::{Stop, TaskGroup};
use tokio::io::AsyncWriteExt;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Duration, Instant, Sleep, sleep, timeout};

use super::messages::Messages;
use super::serve::{BEAT, QUEUE, SILENCE};
use super::session::{Outcome, Session, panicked};
use super::wire::{Request, ToGuest, ToServer, append, encode, time_for};

/// Requests of one mount that wait for something at once; further ones wait in its stream.
const AT_ONCE: usize = 512;
/// Bytes that leave together.
const TOGETHER: usize = 64 << 10;
/// How long what is on its way may take to leave once this side ends the stream.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How a mount's stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    /// It said that it ends.
    Bye,
    /// It went away.
    End,
    /// This side ended it.
    Cut,
}

/// One task that hears a mount's requests, answers what can be answered at once, and says all that is to be said: a request that
/// waits for nothing wakes nobody.
pub(super) struct Conversation {
    session: Arc<Session>,
    messages: Messages<Stream>,
    say: mpsc::Sender<Bytes>,
    to_say: mpsc::Receiver<Bytes>,
    places: Arc<Semaphore>,
    /// Where requests go on that wait for something. They outlive the stream: what was begun is brought to its end, whether its
    /// mount hears of it now or asks again.
    answering: TaskGroup,
    /// Of the stream.
    stop: Stop,
    /// Of the server.
    ending: Stop,
    /// What is about to leave.
    leaving: Vec<u8>,
    /// Whether a part of that may have left, and the rest never will.
    is_torn: bool,
    beat: Pin<Box<Sleep>>,
}

impl Conversation {
    /// Between a session and its mount, until `stop` ends it, or `ending` the server.
    pub(super) fn new(
        session: Arc<Session>,
        messages: Messages<Stream>,
        answering: TaskGroup,
        stop: Stop,
        ending: Stop,
    ) -> Self {
        let (say, to_say) = mpsc::channel(QUEUE);
        let (places, beat) = (Arc::new(Semaphore::new(AT_ONCE)), Box::pin(sleep(BEAT)));
        let (leaving, is_torn) = (Vec::new(), false);
        Self { session, messages, say, to_say, places, answering, stop, ending, leaving, is_torn, beat }
    }

    /// By which others say something to the mount.
    pub(super) fn way(&self) -> mpsc::Sender<Bytes> {
        self.say.clone()
    }

    /// Answers the mount's requests until its stream ends.
    ///
    /// # Errors
    /// That it says nothing, or nonsense, or takes nothing.
    pub(super) async fn hold(&mut self) -> Result<Heard> {
        let (stop, ending) = (self.stop.clone(), self.ending.clone());
        let mut over = pin!(async {
            tokio::select! {
                () = stop.cancelled() => {}
                () = ending.cancelled() => {}
            }
        });
        loop {
            if let Some(ended) = self.take_all().await? {
                return Ok(ended);
            }
            if !self.leaving.is_empty() {
                if !self.speak().await? {
                    return Ok(Heard::Cut);
                }
                // More may have come meanwhile, or was left for what left now.
                continue;
            }
            let may_hear = self.places.available_permits() > 0;
            tokio::select! {
                biased;
                () = &mut over => return Ok(Heard::Cut),
                frame = self.to_say.recv() => self.leaving.extend(frame.unwrap_or_default()),
                is_more = self.messages.hear(), if may_hear => {
                    if !is_more? {
                        return Ok(Heard::End);
                    }
                }
                () = &mut self.beat => self.leaving.extend(encode(&ToGuest::Alive)?),
            }
        }
    }

    /// Says a last thing, and nothing of what is said beside it.
    pub(super) async fn end_with(&mut self, last: &ToGuest) -> Result<()> {
        self.leaving.clear();
        self.leaving.extend(encode(last)?);
        self.speak().await.map(drop)
    }

    /// Says what was to be said by now.
    pub(super) async fn say_all(&mut self) -> Result<()> {
        while let Ok(frame) = self.to_say.try_recv() {
            self.leaving.extend(frame);
        }
        self.speak().await.map(drop)
    }

    /// Takes what has come, and what others said, as far as it leaves together.
    async fn take_all(&mut self) -> Result<Option<Heard>> {
        while self.leaving.len() < TOGETHER
            && self.places.available_permits() > 0
            && let Some(message) = self.messages.next_now()?
        {
            let ended = match message {
                ToServer::Alive => None,
                ToServer::Hello(_) => return Err(Error::corrupt("a mount says twice who it is")),
                ToServer::Ask { id, oldest, request: Request::Bye } => {
                    Some(self.take_leave(id, oldest).await?)
                }
                ToServer::Ask { id, oldest, request } => self.take(id, oldest, request)?,
            };
            if ended.is_some() {
                return Ok(ended);
            }
        }
        while self.leaving.len() < TOGETHER
            && let Ok(frame) = self.to_say.try_recv()
        {
            self.leaving.extend(frame);
        }
        Ok(None)
    }

    /// Answers a request, at once if that waits for nothing.
    fn take(&mut self, id: u64, oldest: u64, request: Request) -> Result<Option<Heard>> {
        // Who asks is told of a panic, and the others of its requests go on.
        let at_hand = std::panic::catch_unwind(AssertUnwindSafe(|| self.session.answer_now(&request)));
        if let Some(outcome) = at_hand.unwrap_or_else(|panic| Some(Err(panicked(panic).into()))) {
            answer(id, outcome, &mut self.leaving)?;
            return Ok(None);
        }
        let session = self.session.clone();
        let mut answering = Box::pin(async move { session.answer(id, oldest, request).await });
        let mut here = std::task::Context::from_waker(std::task::Waker::noop());
        match answering.as_mut().poll(&mut here) {
            Poll::Ready(Some(outcome)) => answer(id, outcome, &mut self.leaving)?,
            // Another process may have the tree: its mount is to look for that, and asks again where none has.
            Poll::Ready(None) => return Ok(Some(Heard::Cut)),
            Poll::Pending => {
                let place = self.places.clone().try_acquire_owned();
                let place = place.map_err(|_| Error::bug("a request is taken without a place for it"))?;
                let (say, stop, ending) = (self.say.clone(), self.stop.clone(), self.ending.clone());
                self.answering.spawn("answer", async move {
                    let Some(outcome) = answering.await else { return stop.cancel() };
                    drop(place);
                    let mut frame = Vec::new();
                    if answer(id, outcome, &mut frame).is_ok() && !ending.is_cancelled() {
                        // Nobody hears it any more, or will ask again.
                        let _ = say.send(frame.into()).await;
                    }
                });
            }
        }
        Ok(None)
    }

    /// Ends the session, and says so.
    async fn take_leave(&mut self, id: u64, oldest: u64) -> Result<Heard> {
        let session = self.session.clone();
        let leaving =
            self.answering.spawn("leave", async move { session.answer(id, oldest, Request::Bye).await });
        let Some(outcome) = leaving.await? else { return Ok(Heard::Cut) };
        let heard = if outcome.is_ok() { Heard::Bye } else { Heard::End };
        answer(id, outcome, &mut self.leaving)?;
        Ok(heard)
    }

    /// Has leave what is to. False where this side ends the stream meanwhile, or nothing would be understood any more.
    async fn speak(&mut self) -> Result<bool> {
        if self.is_torn || self.leaving.is_empty() {
            return Ok(!self.is_torn);
        }
        self.is_torn = true;
        let patience = SILENCE + time_for(self.leaving.len());
        let stream = self.messages.stream();
        let speaking = async {
            stream.write_all(&self.leaving).await?;
            stream.flush().await
        };
        let mut speaking = pin!(timeout(patience, speaking));
        let (said, goes_on) = tokio::select! {
            biased;
            said = &mut speaking => (said, true),
            () = self.stop.cancelled() => match timeout(LAST_WORDS, speaking).await {
                Ok(said) => (said, false),
                Err(_) => return Ok(false),
            },
        };
        said.map_err(|_| Error::new(ErrorKind::Unavailable, "it takes nothing"))??;
        self.is_torn = false;
        self.leaving.clear();
        if self.leaving.capacity() > 2 * TOGETHER {
            self.leaving = Vec::new();
        }
        self.beat.as_mut().reset(Instant::now() + BEAT);
        Ok(goes_on)
    }
}

/// Has an answer leave; the reason where it is too long for that.
fn answer(id: u64, outcome: Outcome, leaving: &mut Vec<u8>) -> Result<()> {
    append(&ToGuest::Answer { id, outcome }, leaving)
        .or_else(|error| append(&ToGuest::Answer { id, outcome: Err(error.into()) }, leaving))
}
