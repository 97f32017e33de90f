//! The mounts of this host: found by their control sockets, one of which each mount keeps in the state directory.

use std::fs;
use std::io::{self, ErrorKind as Io};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_fuse::OwnMount;
use forebay_io::clock::Clock;
use forebay_io::task::{self, Stop, TaskGroup};
use forebay_volume::Volume;
use forebay_volume::control::{self, Identity, Reply, Request, Status};
use tokio::net::UnixStream;

use crate::places;
use crate::settings::Settings;

/// A mount answers at once, or not at all.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);
/// The kernel knows at once that a process is gone; a mount that lives may have to ask its store.
const DEAD_DEADLINE: Duration = Duration::from_secs(1);

/// What can be done about a mount whose process is gone.
pub(crate) const MOUNT_AGAIN: &str =
    "run the same `forebay mount` again, which brings back what was synced, or detach it with `umount -l`";

/// What is behind a control socket.
#[derive(Debug)]
pub(crate) enum State {
    /// A mount.
    Serving(Box<Status>),
    /// A process that does not answer.
    Silent(Error),
    /// Nothing: the process ended without taking its socket along.
    Dead,
}

/// One control socket.
#[derive(Debug)]
pub(crate) struct Mount {
    /// Where it lies.
    pub(crate) socket: PathBuf,
    /// What is behind it.
    pub(crate) state: State,
}

/// A path in a mount.
#[derive(Debug)]
pub(crate) struct Place {
    /// The mount's control socket.
    pub(crate) socket: PathBuf,
    /// How the mount is.
    pub(crate) status: Status,
    /// The path in its volume, names joined by `/`, empty for the root.
    pub(crate) path: String,
}

/// The state directory: as given, as configured, or the usual one.
pub(crate) fn state_directory(given: Option<&Path>, settings: &Settings) -> PathBuf {
    let configured = &settings.volume.state_directory;
    match given {
        Some(given) => given.to_owned(),
        None if !configured.as_os_str().is_empty() => configured.clone(),
        None => places::state(),
    }
}

/// Every mount of this host that keeps its socket in `state`, by socket.
pub(crate) async fn all(state: &Path) -> Result<Vec<Mount>> {
    let sockets = sockets(state)?;
    let mut found = Vec::with_capacity(sockets.len());
    for socket in sockets {
        found.push(Mount { state: look(&socket).await, socket });
    }
    Ok(found)
}

/// Those of other hosts are theirs to ask, and to remove.
fn sockets(state: &Path) -> Result<Vec<PathBuf>> {
    let directory = places::mount_sockets(state);
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == Io::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::from(error).context(directory.display())),
    };
    let mut sockets = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "sock") && places::is_of_this_kernel(&path) {
            sockets.push(path);
        }
    }
    sockets.sort();
    Ok(sockets)
}

/// Whether nobody listens there. The kernel knows, of processes of other containers as well, whose numbers mean nothing here.
async fn is_left(socket: &Path) -> bool {
    let refused = UnixStream::connect(socket).await.err();
    refused.is_some_and(|error| matches!(error.kind(), Io::ConnectionRefused | Io::NotFound))
}

/// The control socket of this process, which goes with it.
#[derive(Debug)]
pub(crate) struct Served(PathBuf);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Lets other commands ask this process about `volume` until `tasks` are shut down. It does its work without that, too: what
/// is wrong is logged. Sockets that dead processes left are removed, for containers that end and begin look at no `status`.
pub(crate) async fn serve(
    state: &Path,
    volume: &Arc<Volume>,
    identity: Identity,
    tasks: &TaskGroup,
) -> Option<Served> {
    for socket in sockets(state).unwrap_or_default() {
        if is_left(&socket).await {
            let _ = fs::remove_file(&socket);
        }
    }
    let path = places::mount_socket(state);
    let made = fs::create_dir_all(places::mount_sockets(state)).map_err(Error::from);
    match made.and_then(|()| control::serve(&path, volume.clone(), identity, tasks)) {
        Ok(()) => Some(Served(path)),
        Err(error) => {
            tracing::warn!(%error, "`forebay status` and other commands cannot reach this process");
            None
        }
    }
}

async fn look(socket: &Path) -> State {
    if is_left(socket).await {
        return State::Dead;
    }
    let stop = Stop::new();
    let late = Clock::system();
    let answer = tokio::select! {
        answer = control::ask(socket, &Request::Status, |_| {}, &stop) => answer,
        () = late.sleep(ANSWER_DEADLINE) => Err(Error::new(
            ErrorKind::Unavailable,
            format!("no answer within {} s", ANSWER_DEADLINE.as_secs()),
        )),
    };
    match answer {
        Ok(Reply::Status(status)) => State::Serving(status),
        Ok(_) => State::Silent(Error::corrupt("it answers something else")),
        Err(error) => State::Silent(error),
    }
}

/// The mount that holds `path`, which must exist.
///
/// # Errors
/// `NotFound` when there is no such path, or no mount of `state` holds it.
pub(crate) async fn holding(path: &Path, state: &Path) -> Result<Place> {
    let shown = path.display();
    let refused = |error: io::Error| match error.kind() {
        Io::NotConnected => died(path).unwrap_or_else(|| Error::from(error).context(&shown)),
        _ => Error::from(error).context(&shown).with_hint("give a path in a mount"),
    };
    let real = fs::canonicalize(path).map_err(refused)?;
    let device = fs::metadata(&real).map_err(refused)?.dev();
    let mut denied = None;
    for Mount { socket, state } in all(state).await? {
        let status = match state {
            State::Serving(status) => status,
            State::Silent(error) if error.kind() == ErrorKind::Denied => {
                denied = Some(socket);
                continue;
            }
            State::Silent(_) | State::Dead => continue,
        };
        let Ok(inner) = real.strip_prefix(&status.mount_point) else { continue };
        // The same device number tells that nothing else is mounted in between.
        if !fs::metadata(&status.mount_point).is_ok_and(|mounted| mounted.dev() == device) {
            continue;
        }
        let path = inner.to_str().map(str::to_owned).ok_or_else(|| {
            Error::invalid(format!("{shown} is not UTF-8")).with_hint("name the directory that it is in")
        })?;
        return Ok(Place { socket, status: *status, path });
    }
    // Of a root whose attributes the kernel keeps, nothing above told.
    if is_dead(&real).await
        && let Some(died) = died(&real)
    {
        return Err(died);
    }
    if let Some(socket) = denied {
        let message = format!(
            "no mount that takes commands of this user holds {shown}: {} is another's",
            socket.display()
        );
        return Err(
            Error::new(ErrorKind::Denied, message).with_hint("run this as the user who mounted, or as root")
        );
    }
    Err(Error::new(ErrorKind::NotFound, format!("no Forebay mount that answers holds {shown}")).with_hint(
        format!(
            "mounts are looked for in {}: if it was mounted with --state-dir, give the same here",
            state.display()
        ),
    ))
}

/// Says that the process of the mount that `path` lies in died, where it is one of Forebay's.
fn died(path: &Path) -> Option<Error> {
    let path = places::resolved(path);
    let mounts = forebay_fuse::own_mounts().ok()?;
    let holding = mounts.into_iter().filter(|mount| path.starts_with(&mount.directory));
    let at = holding.max_by_key(|mount| mount.directory.as_os_str().len())?.directory;
    let message = format!("the process of the mount at {} died", at.display());
    Some(Error::new(ErrorKind::Unavailable, message).with_hint(MOUNT_AGAIN))
}

/// Whether the process of the mount that `path` lies in is gone. One that does not answer hangs.
async fn is_dead(path: &Path) -> bool {
    let (path, late) = (path.to_owned(), Clock::system());
    tokio::select! {
        dead = task::blocking(move || forebay_fuse::is_dead(&path)) => dead.unwrap_or(false),
        () = late.sleep(DEAD_DEADLINE) => false,
    }
}

/// The mounts of this host whose processes are gone, and that are still there, whatever their state directories: none of
/// `served`.
pub(crate) async fn dead(served: &[Mount]) -> Result<Vec<OwnMount>> {
    let is_served = |at: &Path| {
        let serving = |mount: &Mount| matches!(&mount.state, State::Serving(status) if Path::new(&status.mount_point) == at);
        served.iter().any(serving)
    };
    let mut found = Vec::new();
    for mount in forebay_fuse::own_mounts()? {
        if !is_served(&mount.directory) && !mount.is_seen_served() && is_dead(&mount.directory).await {
            found.push(mount);
        }
    }
    Ok(found)
}

/// The same for a path whose last names need not exist.
pub(crate) async fn once_holding(path: &Path, state: &Path) -> Result<Place> {
    let path = std::path::absolute(path)?;
    let is_told = |above: &&Path| match above.symlink_metadata() {
        Ok(_) => true,
        Err(error) => error.kind() == Io::NotConnected,
    };
    let above = path.ancestors().find(is_told).unwrap_or(&path);
    let rest = path.strip_prefix(above).ok().and_then(Path::to_str);
    let rest = rest.ok_or_else(|| {
        Error::invalid(format!("{} is not UTF-8", path.display()))
            .with_hint("name the directory that it was in, and use --id")
    })?;
    let mut place = holding(above, state).await?;
    if !rest.is_empty() {
        place.path = if place.path.is_empty() { rest.to_owned() } else { format!("{}/{rest}", place.path) };
    }
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_without_a_process_is_dead_and_other_files_are_none() {
        let state = tempfile::tempdir().expect("scratch");
        assert!(all(state.path()).await.expect("no directory").is_empty());
        fs::create_dir(state.path().join("mounts")).expect("directory");
        fs::write(state.path().join("mounts/readme"), "").expect("file");
        drop(std::os::unix::net::UnixListener::bind(places::mount_socket(state.path())).expect("socket"));
        let found = all(state.path()).await.expect("mounts");
        assert!(matches!(found.as_slice(), [Mount { state: State::Dead, .. }]), "{found:?}");
        let refused = holding(state.path(), state.path()).await.expect_err("nothing is mounted");
        assert_eq!(refused.kind(), ErrorKind::NotFound);
        assert!(refused.hint().expect("a hint").contains("--state-dir"));
    }
}
