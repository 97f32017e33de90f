//! The way to the process that serves the tree: found, kept, and found again.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, InodeId, Result, VolumeId};
use forebay_io::net::secure::{Host, Stream};
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::messages::Messages;
use super::saying::{hear_answer, say, speak};
use super::serve::SILENCE;
use super::wire::{Answer, Failure, Hello, Request, Standing, ToGuest, ToServer, Twice, Welcome, encode};
use crate::tree::OutsideChange;

/// Between two looks for a process that serves the tree.
const PAUSE: Duration = Duration::from_millis(250);
/// The same when it was looked for many times.
const LONG_PAUSE: Duration = Duration::from_secs(2);
/// Who was let in for less than this looks again after a pause alone: what cut it off may do so each time.
const SHORT_STAY: Duration = Duration::from_secs(1);
/// Messages on their way: more than there are calls that wait.
const QUEUE: usize = 1 << 20;

/// Files whose opening, or closing, nobody waits for any more, and whose answers are waited for all the same.
const MOST_GIVEN_UP: usize = 4096;

/// Finds the addresses at which the tree is served now.
pub type Finder = Arc<dyn Fn() -> BoxFuture<'static, Result<Vec<SocketAddr>>> + Send + Sync>;

/// Where the tree was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reached {
    /// The address of the process that serves it.
    pub address: SocketAddr,
    /// How often it was found again.
    pub times: u64,
}

/// What the other end of a link is told of by it.
pub(super) trait Listener: Send + Sync + 'static {
    /// The link.
    fn link(&self) -> &Link;
    /// What was answered to a request, before who asked hears it. Returns the file that it opened.
    fn answered(&self, request: &Request, answer: &Answer) -> Option<InodeId>;
    /// Who asked for that file to be opened did not wait for the answer.
    fn unwanted(&self, opened: InodeId);
    /// What others changed.
    fn changed(&self, change: OutsideChange);
    /// Anything may have changed.
    fn missed(&self);
    /// What the session has open, and at whose own paths it is, for a process that does not know.
    fn standing(&self) -> Request;
    /// The answer to that.
    fn reopened(&self, answer: Answer);
    /// The process ends. Whether all that it answered is durable.
    fn ending(&self, is_synced: bool);
    /// The session goes on with a process that may have lost what was not synced.
    fn taken_over(&self);
    /// A lock is free that was waited for under this number.
    fn offered(&self, ticket: u64);
    /// The session was ended, and with it what it had locked.
    fn ended(&self);
}

/// A request that waits for its answer.
struct Waiting {
    request: Request,
    reply: oneshot::Sender<Result<Answer>>,
    /// Whether a process was asked.
    is_sent: bool,
}

impl Waiting {
    /// Whether who asked is told of its failure already, and what it opens is to be closed.
    fn is_given_up(&self) -> bool {
        self.request.opens() && self.reply.is_closed()
    }
}

/// By what an answer comes.
type Reply = oneshot::Receiver<Result<Answer>>;

#[derive(Default)]
struct Line {
    next: u64,
    waiting: BTreeMap<u64, Waiting>,
    say: Option<mpsc::Sender<Bytes>>,
}

/// Both directions of a stream to the process that serves the tree.
struct Ways {
    hearing: Messages<ReadHalf<Stream>>,
    saying: WriteHalf<Stream>,
}

/// The way to the process that serves the tree.
pub(super) struct Link {
    volume: VolumeId,
    name: String,
    host: Host,
    find: Finder,
    deadline: Duration,
    rng: Rng,
    line: Mutex<Line>,
    reached: Mutex<Option<Reached>>,
    has_quotas: AtomicBool,
    /// Why the tree cannot be had, as the last try said.
    trouble: Mutex<Option<Error>>,
    session: AtomicU64,
    came: Notify,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("reached", &*self.reached.lock()).finish_non_exhaustive()
    }
}

/// What a link is made of.
pub(super) struct Ends {
    pub(super) volume: VolumeId,
    pub(super) name: String,
    pub(super) host: Host,
    pub(super) find: Finder,
    pub(super) deadline: Duration,
    pub(super) rng: Rng,
}

impl Link {
    pub(super) fn new(ends: Ends) -> Self {
        let Ends { volume, name, host, find, deadline, rng } = ends;
        let session = AtomicU64::new(rng.u64());
        Self {
            volume,
            name,
            host,
            find,
            deadline,
            rng,
            line: Mutex::default(),
            reached: Mutex::default(),
            has_quotas: AtomicBool::new(true),
            trouble: Mutex::default(),
            session,
            came: Notify::new(),
        }
    }

    /// Requests that were asked so far.
    pub(super) fn requests(&self) -> u64 {
        self.line.lock().next
    }

    pub(super) fn session(&self) -> u64 {
        self.session.load(Ordering::Relaxed)
    }

    pub(super) fn has_quotas(&self) -> bool {
        self.has_quotas.load(Ordering::Relaxed)
    }

    /// There may be quotas now: who serves the tree tells where there are none.
    pub(super) fn expect_quotas(&self) {
        self.has_quotas.store(true, Ordering::Relaxed);
    }

    /// Where the tree is served; none while that is not known.
    pub(super) fn reached(&self) -> Option<Reached> {
        let is_here = self.line.lock().say.is_some();
        self.reached.lock().filter(|_| is_here)
    }

    /// Asks, whoever serves the tree meanwhile, for no longer than the deadline.
    ///
    /// # Errors
    /// What the tree says; `Unavailable` where it cannot be had, or was lost with the process that was asked for a change of
    /// names, of which it is not known whether it was made.
    pub(super) async fn call(&self, request: Request) -> Result<Answer> {
        self.call_while_for(self.deadline, || true, request).await
    }

    /// The same if something still holds when it is about to be sent; there is nothing to do otherwise.
    pub(super) async fn call_while(&self, holds: impl Fn() -> bool, request: Request) -> Result<Answer> {
        self.call_while_for(self.deadline, holds, request).await
    }

    /// The same for as long as the answer may take.
    pub(super) async fn call_for(&self, patience: Duration, request: Request) -> Result<Answer> {
        self.call_while_for(patience, || true, request).await
    }

    async fn call_while_for(
        &self,
        patience: Duration,
        holds: impl Fn() -> bool,
        request: Request,
    ) -> Result<Answer> {
        let Some((id, answered)) = self.ask(holds, request)? else { return Ok(Answer::Done) };
        // Dropped after `answered`, so that an answer is heard, or finds that nobody hears it.
        let leaving = Leaving { link: self, id };
        let mut answered = answered;
        match timeout(patience, &mut answered).await {
            Ok(answer) => {
                // Whoever answered has taken it back.
                std::mem::forget(leaving);
                answer.unwrap_or_else(|_| Err(closed()))
            }
            Err(_) => {
                answered.close();
                // It may have come in this moment.
                answered.try_recv().unwrap_or_else(|_| Err(self.away()))
            }
        }
    }

    /// Asks for what has to be known for certain once it was asked for: that is waited for, however long. Until then no longer than
    /// who wants to know it does.
    pub(super) async fn call_surely(
        &self,
        request: Request,
        is_given_up: impl Future<Output = ()>,
    ) -> Result<Answer> {
        let Some((id, mut answered)) = self.ask(|| true, request)? else { return Ok(Answer::Done) };
        tokio::select! {
            answer = &mut answered => return answer.unwrap_or_else(|_| Err(closed())),
            () = is_given_up => {
                let mut line = self.line.lock();
                if line.waiting.get(&id).is_some_and(|waiting| !waiting.is_sent) {
                    line.waiting.remove(&id);
                    return Err(self.away());
                }
            }
        }
        answered.await.unwrap_or_else(|_| Err(closed()))
    }

    /// How long an answer is waited for.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Asks for what nobody waits for, whoever serves the tree meanwhile, if something still holds when it is about to be sent.
    ///
    /// # Errors
    /// `Unavailable` where too much is asked at once.
    pub(super) fn tell_while(&self, holds: impl Fn() -> bool, request: Request) -> Result<()> {
        self.ask(holds, request).map(drop)
    }

    /// Asks; by what is returned the answer comes. None where there is nothing to do.
    fn ask(&self, holds: impl Fn() -> bool, request: Request) -> Result<Option<(u64, Reply)>> {
        let (reply, answered) = oneshot::channel();
        let mut line = self.line.lock();
        if !holds() {
            return Ok(None);
        }
        let id = line.next;
        line.next += 1;
        let mut waiting = Waiting { request, reply, is_sent: false };
        let oldest = line.waiting.keys().next().copied().unwrap_or(id);
        if let Some(say) = &line.say {
            send(say, id, oldest, &mut waiting)?;
        }
        line.waiting.insert(id, waiting);
        Ok(Some((id, answered)))
    }

    pub(super) fn away(&self) -> Error {
        let seconds = self.deadline.as_secs();
        let fact = format!("no process that serves the tree of this volume answered for {seconds} s");
        let error = Error::new(ErrorKind::Unavailable, fact).with_hint(
            "see that `forebay meta`, or a mount with --join-secret, runs on a host that this one reaches",
        );
        match &*self.trouble.lock() {
            Some(trouble) => error.with_source(trouble.duplicate()),
            None => error,
        }
    }

    /// Returns when the tree is served, or the reason why not when it was not by `until`, or does not pass.
    pub(super) async fn wait(&self, until: Instant) -> Result<()> {
        let lasts = |error: &mut Error| matches!(error.kind(), ErrorKind::Denied | ErrorKind::Invalid);
        loop {
            let came = self.came.notified();
            if self.line.lock().say.is_some() {
                return Ok(());
            }
            if let Some(error) = self.trouble.lock().take_if(lasts) {
                return Err(error);
            }
            if timeout_at(until, came).await.is_err() {
                return match self.line.lock().say.is_some() {
                    true => Ok(()),
                    false => Err(self.trouble.lock().take().unwrap_or_else(|| self.away())),
                };
            }
        }
    }

    /// Finds the process that serves the tree and stays with it, again and again, until `tasks` are to end.
    pub(super) async fn keep(listener: Arc<impl Listener>, tasks: TaskGroup) {
        let (this, stop) = (listener.link(), tasks.stop());
        let (mut is_new, mut server, mut misses) = (true, None, 0u32);
        let keeping = async {
            loop {
                match this.reach(&mut is_new, server, &*listener).await {
                    Ok((ways, welcome, address)) => {
                        misses = 0;
                        server = Some(welcome.server);
                        let came = Instant::now();
                        this.stay(ways, address, &*listener, &tasks).await;
                        tracing::warn!(%address, "the process that serves the tree was lost: looking for it");
                        if came.elapsed() >= SHORT_STAY {
                            continue;
                        }
                    }
                    Err(error) => {
                        misses += 1;
                        tracing::debug!(%error, "the tree is not served");
                        *this.trouble.lock() = Some(error);
                        this.came.notify_waiters();
                    }
                }
                sleep(if misses > 20 { LONG_PAUSE } else { PAUSE }).await;
            }
        };
        stop.run_until_cancelled(keeping).await;
        let mut line = this.line.lock();
        line.say = None;
        line.waiting.clear();
    }

    /// Finds the process and is let in.
    async fn reach(
        &self,
        is_new: &mut bool,
        before: Option<u64>,
        listener: &dyn Listener,
    ) -> Result<(Ways, Welcome, SocketAddr)> {
        let mut last = Error::new(ErrorKind::Unavailable, "nobody serves the tree of this volume");
        for address in (self.find)().await? {
            let stream = match self.host.reach(address).await {
                Ok(stream) => stream,
                Err(error) => {
                    self.host.forget(address);
                    last = error;
                    continue;
                }
            };
            match self.enter(stream, is_new, before, listener).await {
                Ok((ways, welcome)) => return Ok((ways, welcome, address)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn enter(
        &self,
        stream: Stream,
        is_new: &mut bool,
        before: Option<u64>,
        listener: &dyn Listener,
    ) -> Result<(Ways, Welcome)> {
        let (hearing, mut saying) = tokio::io::split(stream);
        let mut hearing = Messages::new(hearing, SILENCE);
        let hello =
            Hello { volume: self.volume, session: self.session(), is_new: *is_new, name: self.name.clone() };
        say(&mut saying, &ToServer::Hello(hello)).await?;
        let welcome = match hearing.next().await? {
            Some(ToGuest::Welcome(welcome)) => welcome,
            Some(ToGuest::Refused(failure)) => return Err(failure.into()),
            _ => {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "it did not say whether it lets this mount in",
                ));
            }
        };
        if welcome.standing == Standing::Ended {
            tracing::warn!("this mount was cut off for too long: what it was writing then is lost");
            self.session.store(self.rng.u64(), Ordering::Relaxed);
            *is_new = true;
            listener.ended();
            return Err(Error::new(ErrorKind::Unavailable, "the session of this mount was ended"));
        }
        *is_new = false;
        self.has_quotas.store(welcome.has_quotas, Ordering::Relaxed);
        if welcome.standing == Standing::Kept && before == Some(welcome.server) {
            return Ok((Ways { hearing, saying }, welcome));
        }
        // In this order: what is closed after what is open was noted is told to this process.
        let standing = listener.standing();
        // What was asked of the process before is not known to this one.
        self.give_up_changes();
        listener.taken_over();
        // With a number of its own: this process keeps the answers of this session from here on.
        let id = {
            let mut line = self.line.lock();
            line.next += 1;
            line.next - 1
        };
        say(&mut saying, &ToServer::Ask { id, oldest: 0, request: standing }).await?;
        listener.reopened(hear_answer(&mut hearing, &mut saying, id).await?);
        Ok((Ways { hearing, saying }, welcome))
    }

    /// Fails the changes that were asked of a process that is gone, where it would matter whether it made them. What was closed is not
    /// told as open to the next one.
    fn give_up_changes(&self) {
        let mut line = self.line.lock();
        line.waiting.retain(|_, waiting| !waiting.is_given_up());
        let is_lost = |waiting: &Waiting| waiting.is_sent && waiting.request.twice() == Twice::Differs;
        let closed = |waiting: &Waiting| matches!(waiting.request, Request::Closed(_));
        for (_, waiting) in line.waiting.extract_if(.., |_, waiting| closed(waiting)) {
            let _ = waiting.reply.send(Ok(Answer::Done));
        }
        let lost: Vec<u64> =
            line.waiting.iter().filter(|(_, waiting)| is_lost(waiting)).map(|(id, _)| *id).collect();
        for id in lost {
            if let Some(waiting) = line.waiting.remove(&id) {
                let fact = "the process that serves the tree was lost while it was asked: it is not known whether the change was made";
                let _ = waiting.reply.send(Err(Error::new(ErrorKind::Unavailable, fact)));
            }
        }
    }

    /// Asks and hears until the stream ends.
    async fn stay(&self, ways: Ways, address: SocketAddr, listener: &dyn Listener, tasks: &TaskGroup) {
        let Ways { mut hearing, saying } = ways;
        let tasks = tasks.child("link");
        let (say, queue) = mpsc::channel(QUEUE);
        let stop = tasks.stop();
        let spoken = tasks.spawn("say", speak(saying, queue, stop.clone()));
        if let Err(error) = self.take_up(say, address).await {
            tracing::debug!(%error, "what was asked before is not asked again");
        }
        // Whatever was told meanwhile went to nobody.
        listener.missed();
        let mut listening = pin!(self.hear_all(&mut hearing, listener));
        let ended = stop.run_until_cancelled(&mut listening).await;
        if let Some(Err(error)) = ended {
            tracing::debug!(%error, "the stream to the process that serves the tree ended");
        }
        self.line.lock().say = None;
        stop.cancel();
        let _ = timeout(SILENCE, spoken).await;
    }

    /// From here on requests are sent; first those that wait.
    async fn take_up(&self, say: mpsc::Sender<Bytes>, address: SocketAddr) -> Result<()> {
        let mut outcome = Ok(());
        let mut line = self.line.lock();
        // Who was told that it failed is not to find it done later.
        let is_made_later = |waiting: &Waiting| waiting.is_given_up() && waiting.request.changes();
        line.waiting.retain(|_, waiting| !is_made_later(waiting));
        let oldest = line.waiting.keys().next().copied().unwrap_or(line.next);
        for (id, waiting) in &mut line.waiting {
            outcome = outcome.and(send(&say, *id, oldest, waiting));
        }
        line.say = Some(say);
        drop(line);
        let mut reached = self.reached.lock();
        let times = reached.map_or(0, |reached| reached.times + 1);
        *reached = Some(Reached { address, times });
        *self.trouble.lock() = None;
        self.came.notify_waiters();
        outcome
    }

    async fn hear_all(
        &self,
        hearing: &mut Messages<ReadHalf<Stream>>,
        listener: &dyn Listener,
    ) -> Result<()> {
        loop {
            match hearing.next().await? {
                None => return Ok(()),
                Some(ToGuest::Ending(is_synced)) => {
                    listener.ending(is_synced);
                    return Ok(());
                }
                Some(ToGuest::Alive) => {}
                Some(ToGuest::Answer { id, outcome }) => self.answered(id, outcome, listener),
                Some(ToGuest::Changed(changes)) => {
                    changes.into_iter().for_each(|change| listener.changed(change))
                }
                Some(ToGuest::Missed) => listener.missed(),
                Some(ToGuest::Offered(ticket)) => listener.offered(ticket),
                Some(ToGuest::Quotas(has)) => self.has_quotas.store(has, Ordering::Relaxed),
                Some(ToGuest::Welcome(_) | ToGuest::Refused(_)) => {
                    return Err(Error::corrupt("it lets this mount in twice"));
                }
            }
        }
    }

    fn answered(&self, id: u64, outcome: Result<Answer, Failure>, listener: &dyn Listener) {
        let Some(waiting) = self.line.lock().waiting.remove(&id) else { return };
        let answered = |answer| listener.answered(&waiting.request, answer);
        let opened = outcome.as_ref().ok().and_then(answered);
        if let (Err(_), Some(ino)) = (waiting.reply.send(outcome.map_err(Error::from)), opened) {
            listener.unwanted(ino);
        }
    }
}

/// Takes a request back of which nobody waits for the answer any more, but for one that closes a file, or opens one where it is asked
/// already, which is closed again once it has: it would stay open there.
struct Leaving<'a> {
    link: &'a Link,
    id: u64,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut line = self.link.line.lock();
        let given_up = line.waiting.values().filter(|waiting| waiting.reply.is_closed()).count();
        let opens = |waiting: &Waiting| waiting.is_sent && waiting.request.opens();
        let stays = |waiting: &Waiting| opens(waiting) || matches!(waiting.request, Request::Closed(_));
        if given_up > MOST_GIVEN_UP || !line.waiting.get(&self.id).is_some_and(stays) {
            line.waiting.remove(&self.id);
        }
    }
}

fn send(say: &mpsc::Sender<Bytes>, id: u64, oldest: u64, waiting: &mut Waiting) -> Result<()> {
    let frame = encode(&ToServer::Ask { id, oldest, request: waiting.request.clone() })?;
    match say.try_send(frame) {
        Ok(()) => waiting.is_sent = true,
        Err(mpsc::error::TrySendError::Full(_)) => {
            return Err(Error::new(ErrorKind::Unavailable, "too much is asked of the tree at once"));
        }
        // Sent to whom is found next.
        Err(mpsc::error::TrySendError::Closed(_)) => {}
    }
    Ok(())
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "the tree is closed")
}
