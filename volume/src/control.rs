//! The control socket of a mount: how commands on the same host reach the process that holds the cache.
//!
//! One connection carries one request: a line of JSON, answered by lines of JSON, the last of which is `done` or
//! `failed`. Closing the connection cancels what it asked for. The socket lies in the state directory, mode 0600.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_cache::Unpinned;
use forebay_core::units::format_bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::task::TaskGroup;
use forebay_metadata::follow::Lag;
use forebay_metadata::remote::{RemoteTree, Server};
use forebay_metadata::tree::{Cloned, LocalTree, resolve};
use futures::future::FutureExt;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::Volume;
use crate::clone::{self, clone};
use crate::content::Content;
use crate::joining::Sharing;
use crate::staging::Staged;
use crate::warmup::{Outcome, Progress, Request as WarmupRequest, unpin, warmup};
use crate::{packed, quota, trash, upkeep};

/// A request is one line; the longest names many paths.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// How long nobody is asked after connections could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a command can ask a mount.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// How it is doing.
    Status,
    /// Bring files into its cache.
    Warmup(WarmupRequest),
    /// Let what a warmup pinned be evicted again.
    Unpin {
        /// As a warmup's.
        paths: Vec<String>,
    },
    /// List a directory of the bucket again at the next look.
    Refresh {
        /// Its path in the volume.
        path: String,
    },
    /// Bring everything that was written into the bucket.
    Sync,
    /// Do something to the volume as a whole.
    Upkeep(upkeep::Request),
    /// Look into the trash, bring back, empty it.
    Trash(trash::Request),
    /// Limit what may lie below directories, or tell.
    Quota(quota::Request),
    /// Set or tell the policy of a directory; turn packed files back into plain objects.
    Packed(packed::Request),
    /// Make a copy of a file or directory that shares its bytes.
    Clone {
        /// Its path in the volume.
        from: String,
        /// The path of the copy.
        to: String,
    },
}

/// What a mount answers, one a line.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// How it is doing; the last line.
    Status(Box<Status>),
    /// A warmup, an export or a clone is under way.
    Progress(Progress),
    /// A warmup ended; the last line.
    Warmed(Box<Outcome>),
    /// So much was pinned and is not any more; the last line.
    Unpinned(Unpinned),
    /// What was asked of the volume as a whole was done; the last line.
    Upkept(Box<upkeep::Report>),
    /// What was asked of the trash; the last line.
    Trash(trash::Report),
    /// The quotas that were asked about; the last line.
    Quotas {
        /// Those.
        quotas: Vec<quota::Entry>,
    },
    /// The policy of a directory; the last line.
    Policy {
        /// That.
        policy: packed::Policy,
    },
    /// An export ended; the last line.
    Exported(Box<packed::Exported>),
    /// A clone was made; the last line.
    Cloned(Cloned),
    /// It was done; the last line.
    Done,
    /// It failed; the last line.
    Failed {
        /// The cause.
        message: String,
        /// What a person can do.
        hint: Option<String>,
    },
}

/// A mount as `forebay status` shows it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Status {
    /// The bucket.
    pub source: String,
    /// Where it is mounted.
    pub mount_point: String,
    /// The process that serves it.
    pub pid: u32,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Inodes open now.
    pub open_files: usize,
    /// Bytes written that are only in memory yet.
    pub dirty_bytes: u64,
    /// What is staged on the local disk and not in the bucket yet.
    #[serde(default)]
    pub staged: Staged,
    /// Closed files that could not become objects at their own paths since it was mounted, as far as they are still there.
    #[serde(default)]
    pub unsealed_files: usize,
    /// Whether it is unmounted, and goes on only to upload what is staged.
    #[serde(default)]
    pub is_ending: bool,
    /// How far a read-only mount is behind the tree of the mount for writing, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<Follows>,
    /// How it is shared with other mounts that write, where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// What the cache did and holds.
    pub cache: forebay_cache::Counters,
    /// What was asked of the store.
    pub store: forebay_io::object::Counters,
}

/// What a read-only mount shows of the tree of the mount for writing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Follows {
    /// Milliseconds since it was the same; nothing where it never was.
    pub behind_ms: Option<u64>,
    /// Why it could not be looked at since.
    pub error: Option<String>,
}

impl From<Lag> for Follows {
    fn from(Lag { behind, error }: Lag) -> Self {
        Self { behind_ms: behind.map(|behind| u64::try_from(behind.as_millis()).unwrap_or(u64::MAX)), error }
    }
}

/// What a mount knows about itself beside its volume.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The bucket.
    pub source: String,
    /// Where it is mounted.
    pub mount_point: String,
}

impl Volume {
    /// How it is doing, for `forebay status`.
    pub(crate) fn status(&self, identity: &Identity) -> Status {
        let open = self.open_inodes();
        Status {
            source: identity.source.clone(),
            mount_point: identity.mount_point.clone(),
            pid: std::process::id(),
            read_only: self.read_only(),
            open_files: open.len(),
            staged: self.staged(),
            unsealed_files: self.unsealed(),
            is_ending: self.ending.load(Ordering::Relaxed),
            follows: self.tree().local().and_then(LocalTree::lag).map(Follows::from),
            sharing: self.sharing(),
            dirty_bytes: open.iter().map(|inode| inode.look(Content::dirty)).sum(),
            cache: self.blocks().counters(),
            store: self.bucket().counters(),
        }
    }
}

/// Serves the control socket at `path` in tasks of `tasks` until they are shut down.
///
/// # Errors
/// When the socket cannot be made. One left by a dead process is replaced.
pub fn serve(path: &Path, volume: Arc<Volume>, identity: Identity, tasks: &TaskGroup) -> Result<()> {
    let listener = listen(path)
        .map_err(|error| Error::from(error).context(format!("control socket {}", path.display())))?;
    let (group, stop) = (tasks.clone(), tasks.stop());
    tasks.spawn("control", async move {
        while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
            let Ok((stream, _)) = accepted else {
                // A process that may open no more files is asked again at once, and again.
                stop.run_until_cancelled(tokio::time::sleep(ACCEPT_PAUSE)).await;
                continue;
            };
            let (volume, identity, stop) = (volume.clone(), identity.clone(), stop.clone());
            group.spawn("control-request", async move {
                if let Some(Err(error)) = stop.run_until_cancelled(answer(stream, volume, identity)).await {
                    tracing::debug!(%error, "control connection ended");
                }
            });
        }
    });
    Ok(())
}

/// A socket that appears once it is listened at: one that nobody listens at is taken for what a dead process left.
fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let new = path.with_extension("new");
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&new)?;
    std::fs::set_permissions(&new, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    std::fs::rename(&new, path)?;
    Ok(listener)
}

/// Reads one request and answers it.
async fn answer(stream: UnixStream, volume: Arc<Volume>, identity: Identity) -> Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut read = BufReader::new(read.take(MAX_LINE_BYTES));
    read.read_line(&mut line).await?;
    let last = match serde_json::from_str(&line) {
        Err(error) => failed(&Error::invalid(format!("request does not parse: {error}"))),
        Ok(Request::Status) => Reply::Status(Box::new(volume.status(&identity))),
        Ok(request) => match volume.tree().remote().filter(|_| is_of_the_tree(&request)) {
            Some(tree) => reply_from_elsewhere(&volume, tree, &request, line).await,
            None => reply(&volume, request, read, &mut write).await,
        },
    };
    send(&mut write, &last).await
}

/// Whether a request is about the tree, and means the same wherever that is.
fn is_of_the_tree(request: &Request) -> bool {
    match request {
        // A dump is a file on the host of who asks.
        Request::Upkeep(request) => !matches!(request, upkeep::Request::Dump { .. }),
        Request::Trash(_) | Request::Quota(_) | Request::Packed(_) | Request::Clone { .. } => true,
        Request::Status
        | Request::Warmup(_)
        | Request::Unpin { .. }
        | Request::Refresh { .. }
        | Request::Sync => false,
    }
}

/// Has the process that serves the tree do it. What was written through this mount so far to what is cloned is part of that.
async fn reply_from_elsewhere(volume: &Volume, tree: &RemoteTree, request: &Request, line: String) -> Reply {
    let asked = async {
        if let Request::Clone { from, .. } = request {
            clone::settle(volume, from).await?;
        }
        let reply = tree.command(line.into()).await?;
        serde_json::from_slice(&reply)
            .map_err(|error| Error::corrupt(format!("a reply does not parse: {error}")))
    };
    asked.await.unwrap_or_else(|error| failed(&error))
}

/// Has commands on hosts whose mounts joined carried out by this one, which serves the tree. How far they are is not told.
pub(crate) fn serve_elsewhere(volume: &Arc<Volume>, server: &Server) {
    let volume = Arc::downgrade(volume);
    server.on_command(Box::new(move |line| {
        let volume = volume.upgrade();
        async move {
            let reply = match (volume, serde_json::from_slice(&line)) {
                (Some(volume), Ok(request)) if is_of_the_tree(&request) => {
                    // Nobody hangs up, and nobody reads what is told on the way.
                    let (_open, read) = tokio::io::duplex(1);
                    reply(&volume, request, read, &mut tokio::io::sink()).await
                }
                _ => {
                    failed(&Error::new(ErrorKind::Unsupported, "this is not done for mounts of other hosts"))
                }
            };
            serde_json::to_vec(&reply).unwrap_or_default().into()
        }
        .boxed()
    }));
}

async fn reply(
    volume: &Arc<Volume>,
    request: Request,
    read: impl AsyncReadExt + Unpin,
    write: &mut (impl AsyncWriteExt + Unpin),
) -> Reply {
    match request {
        Request::Status => failed(&Error::bug("how it is doing is told by itself")),
        Request::Refresh { path } => done(refresh(volume, &path).await),
        Request::Sync => done(sync(volume).await),
        Request::Upkeep(upkeep::Request::Fsck { repair: true, .. }) => failed(
            &Error::invalid("a volume cannot be repaired while it is mounted")
                .with_hint("unmount it, then run `forebay fsck --repair` again"),
        ),
        Request::Upkeep(request) => match upkeep::upkeep(volume, &request).await {
            Ok(report) => Reply::Upkept(Box::new(report)),
            Err(error) => failed(&error),
        },
        Request::Trash(request) => {
            trash::trash(volume, &request).await.map_or_else(|error| failed(&error), Reply::Trash)
        }
        Request::Quota(request) => match quota::quota(volume, &request).await {
            Ok(quotas) => Reply::Quotas { quotas },
            Err(error) => failed(&error),
        },
        Request::Clone { from, to } => serve_clone(volume, (&from, &to), read, write).await,
        Request::Packed(packed::Request::Policy { path, set }) => {
            let policy = packed::policy(volume, &path, set).await;
            policy.map_or_else(|error| failed(&error), |policy| Reply::Policy { policy })
        }
        Request::Packed(packed::Request::Export { path, plain }) => {
            serve_export(volume, (&path, plain), read, write).await
        }
        Request::Unpin { paths } => {
            unpin(volume, &paths).await.map_or_else(|error| failed(&error), Reply::Unpinned)
        }
        Request::Warmup(request) => serve_warmup(volume, &request, read, write).await,
    }
}

async fn refresh(volume: &Volume, path: &str) -> Result<()> {
    // First, for it may be what makes the path.
    let followed = match volume.tree().local() {
        Some(tree) => tree.catch_up().await,
        None => Ok(()),
    };
    let directory = resolve(&**volume.tree(), path).await?;
    volume.tree().refresh(directory.ino).await.map_err(|error| match error.kind() {
        ErrorKind::NotDirectory => Error::new(error.kind(), "it is no directory")
            .with_hint("refresh the directory that it is in: names are what is listed again"),
        _ => error,
    })?;
    volume.tree().outside().heard().await;
    followed.map_err(|error| error.context("objects were listed; the tree of the mount for writing"))
}

async fn sync(volume: &Volume) -> Result<()> {
    match volume.read_only() {
        true => Ok(()),
        false => volume.sync_all().await,
    }
}

async fn serve_warmup(
    volume: &Volume,
    request: &WarmupRequest,
    read: impl AsyncReadExt + Unpin,
    write: &mut (impl AsyncWriteExt + Unpin),
) -> Reply {
    let (cancel, (tell, told)) = (CancellationToken::new(), watch::channel(Progress::default()));
    let work = warmup(volume, request, |progress| _ = tell.send_replace(*progress), &cancel);
    let outcome = follow(("warmup", work), (told, &cancel), read, write).await;
    outcome.map_or_else(|error| failed(&error), |outcome| Reply::Warmed(Box::new(outcome)))
}

async fn serve_export(
    volume: &Arc<Volume>,
    what: (&str, bool),
    read: impl AsyncReadExt + Unpin,
    write: &mut (impl AsyncWriteExt + Unpin),
) -> Reply {
    let (cancel, (tell, told)) = (CancellationToken::new(), watch::channel(Progress::default()));
    let work = packed::export(volume, what, |progress| _ = tell.send_replace(*progress), &cancel);
    let outcome = follow(("export", work), (told, &cancel), read, write).await;
    outcome.map_or_else(|error| failed(&error), |outcome| Reply::Exported(Box::new(outcome)))
}

async fn serve_clone(
    volume: &Volume,
    paths: (&str, &str),
    read: impl AsyncReadExt + Unpin,
    write: &mut (impl AsyncWriteExt + Unpin),
) -> Reply {
    let (cancel, (tell, told)) = (CancellationToken::new(), watch::channel(Progress::default()));
    let work = clone(volume, paths, |progress| _ = tell.send_replace(progress), &cancel);
    let outcome = follow(("clone", work), (told, &cancel), read, write).await;
    outcome.map_or_else(|error| failed(&error), Reply::Cloned)
}

/// Waits for long work, telling its progress as fast as the other side reads; its hanging up cancels. The work never
/// waits for who does not read: readers of the mount wait for what it has on its way.
async fn follow<T>(
    (what, work): (&str, impl Future<Output = T>),
    (mut told, cancel): (watch::Receiver<Progress>, &CancellationToken),
    mut read: impl AsyncReadExt + Unpin,
    write: &mut (impl AsyncWriteExt + Unpin),
) -> T {
    let over = CancellationToken::new();
    let working = async {
        let outcome = work.await;
        over.cancel();
        outcome
    };
    // A line that is begun is ended, whatever follows it.
    let telling = async {
        while let Some(Ok(())) = over.run_until_cancelled(told.changed()).await {
            let progress = *told.borrow_and_update();
            if send(write, &Reply::Progress(progress)).await.is_err() {
                return cancel.cancel();
            }
        }
    };
    let mut byte = [0];
    let hearing = async {
        if over.run_until_cancelled(read.read(&mut byte)).await.is_some() {
            cancel.cancel();
            tracing::info!("{what} cancelled; what is on its way ends first");
        }
    };
    tokio::join!(working, telling, hearing).0
}

fn done(outcome: Result<()>) -> Reply {
    outcome.map_or_else(|error| failed(&error), |()| Reply::Done)
}

fn failed(error: &Error) -> Reply {
    Reply::Failed { message: error.to_string(), hint: error.hint().map(str::to_owned) }
}

async fn send(write: &mut (impl AsyncWriteExt + Unpin), reply: &Reply) -> Result<()> {
    let mut line = serde_json::to_vec(reply).map_err(|error| Error::bug(error.to_string()))?;
    line.push(b'\n');
    Ok(write.write_all(&line).await?)
}

/// Asks the mount behind `socket` and returns its last reply; `progress` hears the ones before. `cancel` tells the
/// mount to stop what it was asked for, whose outcome so far is then the last reply.
///
/// # Errors
/// `Denied` where the mount is another user's; `Unavailable` when nothing serves the socket or it ended without a last reply; `TooLarge` for a request that no
/// mount would read; what the mount says failed, as `Invalid` with the mount's own words.
pub async fn ask(
    socket: &Path,
    request: &Request,
    mut progress: impl FnMut(Progress),
    cancel: &CancellationToken,
) -> Result<Reply> {
    let gone = || Error::new(ErrorKind::Unavailable, format!("no mount answers at {}", socket.display()));
    let mut line = serde_json::to_vec(request).map_err(|error| Error::bug(error.to_string()))?;
    line.push(b'\n');
    if line.len() as u64 > MAX_LINE_BYTES {
        let message = format!("a request of {} is too long for a mount", format_bytes(line.len() as u64));
        return Err(Error::new(ErrorKind::TooLarge, message).with_hint("name fewer paths at once"));
    }
    let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::PermissionDenied => Error::from(error).context(socket.display()),
        _ => gone().with_source(error),
    })?;
    let (read, mut write) = stream.into_split();
    write.write_all(&line).await?;
    let mut replies = BufReader::new(read).lines();
    let mut told = false;
    loop {
        let line = tokio::select! {
            line = replies.next_line() => line?,
            () = cancel.cancelled(), if !told => {
                told = true;
                // A mount that has ended meanwhile has stopped, too.
                let _ = write.shutdown().await;
                continue;
            }
        };
        let Some(line) = line else { return Err(gone()) };
        match serde_json::from_str(&line) {
            Ok(Reply::Progress(at)) => progress(at),
            Ok(Reply::Failed { message, hint }) => {
                let error = Error::invalid(message);
                return Err(match hint {
                    Some(hint) => error.with_hint(hint),
                    None => error,
                });
            }
            Ok(last) => return Ok(last),
            Err(error) => return Err(Error::corrupt(format!("reply does not parse: {error}"))),
        }
    }
}
