//! Serving a tree to other mounts.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::net::secure::{Host, Stream};
use forebay_io::task::{Stop, TaskGroup};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};

use super::conversation::{Conversation, Heard};
use super::messages::Messages;
use super::session::{Command, Commands, Session};
use super::wire::{Hello, Standing, ToGuest, ToServer, Welcome, encode};
use crate::tree::{LocalTree, OutsideChange, OutsideListener, Tree};

/// How often either side says that it lives.
pub(super) const BEAT: Duration = Duration::from_secs(2);
/// How long one may say nothing until it is taken for lost: some beats, and no longer than half of a lease.
pub(super) const SILENCE: Duration = Duration::from_secs(7);
/// Messages on their way to one mount.
pub(super) const QUEUE: usize = 1024;
/// Changes told at once.
const MOST_TOLD: usize = 512;
/// How often quotas are looked for.
const QUOTA_LOOK: Duration = Duration::from_secs(1);

/// How long a mount that ended its stream, as the kernel does for a process that dies, has to come back.
const SHORT_PATIENCE: Duration = Duration::from_secs(10);

/// A mount that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// Its host and process.
    pub name: String,
    /// Whether it is connected, or lost and waited for.
    pub is_here: bool,
}

/// A tree that is served to other mounts until it is stopped.
pub struct Server {
    shared: Arc<Shared>,
    tasks: TaskGroup,
}

struct Shared {
    tree: Arc<LocalTree>,
    /// A number of this process, and no other.
    number: u64,
    sessions: Mutex<HashMap<u64, Known>>,
    /// Connections so far.
    connections: AtomicU64,
    tasks: TaskGroup,
    patience: Duration,
    /// Nothing is answered any more.
    ending: Stop,
    commands: Arc<Commands>,
    /// Raised as connections end.
    ended: Notify,
}

/// A session and how it stands.
struct Known {
    session: Arc<Session>,
    name: String,
    /// The newest connection: an older one does not speak for it.
    connection: u64,
    /// Ends the connection that it has.
    current: Option<Stop>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("guests", &self.guests()).finish_non_exhaustive()
    }
}

impl Server {
    /// How long a mount that was lost is waited for, unless another time is given.
    pub const PATIENCE: Duration = Duration::from_secs(60);

    /// Serves `tree` at the port of `host`. `number` is this process's and no other's. Mounts that are lost, and those that a process
    /// before has served, have so much `patience` to come.
    pub fn start(
        tree: Arc<LocalTree>,
        host: Host,
        number: u64,
        patience: Duration,
        tasks: &TaskGroup,
    ) -> Self {
        let tasks = tasks.child("serve tree");
        let shared = Arc::new(Shared {
            tree,
            number,
            sessions: Mutex::default(),
            connections: AtomicU64::new(0),
            tasks: tasks.clone(),
            patience,
            ending: Stop::new(),
            commands: Arc::default(),
            ended: Notify::new(),
        });
        let (serving, of_missing) = (shared.clone(), shared.clone());
        let answering = tasks.clone();
        tasks.spawn("mounts", async move {
            let answer = move |stream: Stream| {
                let shared = serving.clone();
                async move {
                    if let Err(error) = shared.serve(stream).await {
                        tracing::debug!(%error, "the stream of a mount ended");
                    }
                }
            };
            host.serve(&answering, answer).await;
        });
        let stop = tasks.stop();
        tasks.spawn("missing mounts", async move {
            if stop.run_until_cancelled(sleep(patience)).await.is_some()
                && let Err(error) = of_missing.tree.end_missing_guests().await
            {
                tracing::warn!(%error, "what mounts left that did not come back stays until the next start");
            }
        });
        Self { shared, tasks }
    }

    /// Cuts all connections, as a network does.
    #[cfg(test)]
    pub(crate) fn cut(&self) {
        self.shared
            .sessions
            .lock()
            .values()
            .filter_map(|known| known.current.as_ref())
            .for_each(Stop::cancel);
    }

    /// Serves a mount that has come on a stream.
    #[cfg(test)]
    pub(crate) async fn serve(&self, stream: Stream) -> Result<()> {
        self.shared.serve(stream).await
    }

    /// The mounts that are served, by name.
    pub fn guests(&self) -> Vec<Guest> {
        let sessions = self.shared.sessions.lock();
        let mut guests: Vec<Guest> = sessions
            .values()
            .map(|known| Guest { name: known.name.clone(), is_here: known.current.is_some() })
            .collect();
        guests.sort_by(|a, b| a.name.cmp(&b.name));
        guests
    }

    /// Has commands of people on other hosts carried out by `command`, from the first call on.
    pub fn on_command(&self, command: Command) {
        let _ = self.shared.commands.0.set(command);
    }

    /// Makes durable what was answered, tells mounts that this process ends, and answers none any more. Their sessions stay for who
    /// serves the tree next.
    pub async fn stop(&self) {
        self.shared.ending.cancel();
        let all_told = async {
            loop {
                let ended = self.shared.ended.notified();
                if !self.shared.sessions.lock().values().any(|known| known.current.is_some()) {
                    return;
                }
                ended.await;
            }
        };
        let _ = timeout(SILENCE, all_told).await;
        let left = self.tasks.shutdown(BEAT).await;
        if !left.is_empty() {
            tracing::debug!(?left, "mounts were cut off");
        }
    }
}

impl Shared {
    async fn serve(self: &Arc<Self>, stream: Stream) -> Result<()> {
        let mut messages = Messages::new(stream, SILENCE);
        let Some(ToServer::Hello(hello)) = messages.next().await? else {
            return Err(Error::corrupt("a mount does not say who it is"));
        };
        let name = hello.name.clone();
        let (session, welcome) = match self.welcome(&hello).await {
            Ok(welcome) => welcome,
            Err(error) => {
                say(&mut messages, &ToGuest::Refused(error.duplicate().into())).await?;
                return Err(error);
            }
        };
        let standing = welcome.standing;
        let Some(session) = session else { return say(&mut messages, &ToGuest::Welcome(welcome)).await };
        // It ends with this one's group, with this connection, or with the next one of its mount.
        let tasks = self.tasks.child("mount");
        let stop = tasks.stop();
        let Some(connection) = self.connect(&session, stop.clone()) else { return Ok(()) };
        tracing::info!(
            mount = name,
            ?standing,
            "a mount of another host writes to this volume through this one"
        );
        let ended = self.converse(&session, messages, welcome, &tasks).await;
        stop.cancel();
        let patience = match &ended {
            Ok(Heard::Bye) => Duration::ZERO,
            Ok(Heard::End) => self.patience.min(SHORT_PATIENCE),
            Ok(Heard::Cut) | Err(_) => self.patience,
        };
        self.disconnect(session.number(), connection, patience);
        ended.map(drop)
    }

    /// Lets a mount in that is connected, and answers it until its stream ends.
    async fn converse(
        &self,
        session: &Arc<Session>,
        mut messages: Messages<Stream>,
        welcome: Welcome,
        tasks: &TaskGroup,
    ) -> Result<Heard> {
        let stop = tasks.stop();
        // From before it is let in: it takes what it knows for true from then on.
        let changes = self.tree.listen_as(session.number());
        say(&mut messages, &ToGuest::Welcome(welcome)).await?;
        let (answering, ending) = (self.tasks.clone(), self.ending.clone());
        let mut conversation = Conversation::new(session.clone(), messages, answering, stop.clone(), ending);
        let way = conversation.way();
        tasks.spawn("changes", tell_changes(session.clone(), changes, way.clone(), stop.clone()));
        tasks.spawn("quotas", tell_of_quotas(self.tree.clone(), way.clone(), stop.clone()));
        let offers = self.tree.listen_for_locks(session.number());
        tasks.spawn("locks", tell_of_locks(offers, way, stop));
        let heard = conversation.hold().await;
        self.end_of(session, &mut conversation, heard).await
    }

    /// Says what is still to be said.
    async fn end_of(
        &self,
        session: &Session,
        conversation: &mut Conversation,
        heard: Result<Heard>,
    ) -> Result<Heard> {
        if matches!(heard, Ok(Heard::Bye)) {
            // Before it hears of it.
            self.sessions.lock().remove(&session.number());
        }
        if heard.is_ok() {
            let _ = conversation.say_all().await;
        }
        if self.ending.is_cancelled() {
            // Nothing is answered any more, so that this is all of it.
            let is_synced = self.tree.sync().await.is_ok();
            let _ = conversation.end_with(&ToGuest::Ending(is_synced)).await;
        }
        heard
    }

    /// Lets a mount in. Without a session where its own was ended.
    async fn welcome(&self, hello: &Hello) -> Result<(Option<Arc<Session>>, Welcome)> {
        if hello.volume != self.tree.volume() {
            return Err(Error::invalid("another volume is served here"));
        }
        self.tree.expect_sure()?;
        let has_quotas = self.tree.has_quotas();
        let welcome = |standing| Welcome { server: self.number, standing, has_quotas };
        let known = self.sessions.lock().get(&hello.session).map(|known| known.session.clone());
        if let Some(session) = known {
            return Ok((Some(session), welcome(Standing::Kept)));
        }
        if !hello.is_new && !self.tree.expects(hello.session) {
            return Ok((None, welcome(Standing::Ended)));
        }
        let was_expected = self.tree.welcome(hello.session).await?;
        let session = Arc::new(Session::new(self.tree.clone(), hello.session, self.commands.clone()));
        let known = Known { session, name: hello.name.clone(), connection: 0, current: None };
        // One that came twice has one session.
        let session = self.sessions.lock().entry(hello.session).or_insert(known).session.clone();
        Ok((Some(session), welcome(if was_expected { Standing::TakenOver } else { Standing::New })))
    }

    /// Notes that a session's mount is connected, and ends its connection of before.
    fn connect(&self, session: &Session, stop: Stop) -> Option<u64> {
        let mut sessions = self.sessions.lock();
        let connection = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
        // It ended in this moment: its mount comes again, and is told so.
        let known = sessions.get_mut(&session.number())?;
        known.connection = connection;
        if let Some(before) = known.current.replace(stop) {
            before.cancel();
        }
        Some(connection)
    }

    /// Notes that a connection is over; its session ends unless it comes back in time.
    fn disconnect(self: &Arc<Self>, session: u64, connection: u64, patience: Duration) {
        {
            let mut sessions = self.sessions.lock();
            match sessions.get_mut(&session) {
                Some(known) if known.connection == connection => known.current = None,
                _ => return self.ended.notify_waiters(),
            }
            self.ended.notify_waiters();
        }
        let (shared, stop) = (self.clone(), self.tasks.stop());
        self.tasks.spawn("lost mount", async move {
            if stop.run_until_cancelled(sleep(patience)).await.is_some() {
                shared.end(session, connection).await;
            }
        });
    }

    async fn end(&self, session: u64, connection: u64) {
        let name = {
            let mut sessions = self.sessions.lock();
            match sessions.get(&session) {
                Some(known) if known.connection == connection && known.current.is_none() => {}
                _ => return,
            }
            // Should it come in this moment, it is told that it has ended.
            self.tree.forget_guest(session);
            sessions.remove(&session).map(|known| known.name).unwrap_or_default()
        };
        tracing::warn!(mount = name, "a mount was lost: what it was writing is given up");
        if let Err(error) = self.tree.end_guest(session).await {
            tracing::warn!(mount = name, %error, "what a lost mount left stays until the next start");
        }
    }
}

async fn say(messages: &mut Messages<Stream>, message: &ToGuest) -> Result<()> {
    let frame = encode(message)?;
    let saying = async {
        messages.stream().write_all(&frame).await?;
        messages.stream().flush().await
    };
    let said = timeout(SILENCE, saying).await;
    Ok(said.map_err(|_| Error::new(ErrorKind::Unavailable, "it takes nothing"))??)
}

/// Tells a mount what others change of what it may know.
async fn tell_changes(
    session: Arc<Session>,
    mut changes: OutsideListener,
    say: mpsc::Sender<Bytes>,
    stop: Stop,
) {
    let telling = async {
        loop {
            let mut told: Vec<OutsideChange> = Vec::new();
            let mut is_lost = false;
            match changes.next().await {
                Ok(change) if session.hears_of(&change) => told.push(change),
                Ok(_) => {}
                Err(RecvError::Lagged(_)) => is_lost = true,
                Err(RecvError::Closed) => return,
            }
            while !is_lost && told.len() < MOST_TOLD {
                match changes.next_now() {
                    Some(Ok(change)) if told.contains(&change) || !session.hears_of(&change) => {}
                    Some(Ok(change)) => told.push(change),
                    Some(Err(_)) => is_lost = true,
                    None => break,
                }
            }
            if told.is_empty() && !is_lost {
                continue;
            }
            let message = if is_lost { ToGuest::Missed } else { ToGuest::Changed(told) };
            let Ok(frame) = encode(&message) else { continue };
            if say.send(frame).await.is_err() {
                return;
            }
        }
    };
    stop.run_until_cancelled(telling).await;
}

/// Tells a mount which of its waits for locks may be over.
async fn tell_of_locks(mut offers: mpsc::Receiver<u64>, say: mpsc::Sender<Bytes>, stop: Stop) {
    let telling = async {
        while let Some(ticket) = offers.recv().await {
            let Ok(frame) = encode(&ToGuest::Offered(ticket)) else { return };
            if say.send(frame).await.is_err() {
                return;
            }
        }
    };
    stop.run_until_cancelled(telling).await;
}

/// Tells a mount whether files have to ask for room before they grow.
async fn tell_of_quotas(tree: Arc<LocalTree>, say: mpsc::Sender<Bytes>, stop: Stop) {
    let telling = async {
        let mut told = tree.has_quotas();
        loop {
            sleep(QUOTA_LOOK).await;
            let now = tree.has_quotas();
            if now != told {
                let Ok(frame) = encode(&ToGuest::Quotas(now)) else { return };
                if say.send(frame).await.is_err() {
                    return;
                }
                told = now;
            }
        }
    };
    stop.run_until_cancelled(telling).await;
}
