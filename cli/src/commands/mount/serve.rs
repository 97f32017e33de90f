//! Serving a mount until it is unmounted, in the foreground or in the background alike.
//!
//! The end has one order whatever causes it: the kernel lets go, requests in progress finish, everything written goes
//! to the bucket (what is staged, too, unless a further signal comes), the volume is closed. Exit code 0 says that all of it is there.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::units::format_bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_fuse::{MountOptions, MountPoint, Mounted};
use forebay_io::clock::{Clock, Moment};
use forebay_io::task::{TaskGroup, blocking, end};
use forebay_volume::Volume;
use forebay_volume::control::Identity;
use forebay_volume::staging::Staged;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::{Builder, Handle, Runtime};
use tracing::{error, info, warn};

use super::options::Plan;
use super::signals::Signals;
use crate::mounts::{self, State};

/// How long those who still use a mount have after SIGTERM; then it ends under them.
const USERS_DEADLINE: Duration = Duration::from_secs(10);
/// How long the control socket's tasks have to end.
pub(crate) const CONTROL_DEADLINE: Duration = Duration::from_secs(5);

/// How often the log tells how far the upload of staged bytes is.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Serves `plan`; `ready` is called once the mount can be used.
pub(super) fn serve(plan: Plan, ready: impl FnOnce(&Plan) -> Result<()>) -> Result<ExitCode> {
    if plan.fake {
        return ready(&plan).map(|()| ExitCode::SUCCESS);
    }
    raise_open_files();
    let runtime = runtime()?;
    let served = runtime.block_on(serve_mount(&plan, ready));
    // Session threads of a mount that was given up may still sit in the kernel; the process ends under them.
    end(runtime);
    served.map(|()| ExitCode::SUCCESS)
}

/// Sessions, connections and cached files take a descriptor each; what shells and service managers allow at first (1,024) is
/// meant for programs that use select(2).
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if raised != limit
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        warn!(%error, "the limit of open files stays as it was");
    }
}

fn runtime() -> Result<Runtime> {
    Builder::new_multi_thread()
        .enable_all()
        .thread_name("forebay")
        .build()
        .map_err(|error| Error::from(error).context("cannot start threads"))
}

async fn serve_mount(plan: &Plan, ready: impl FnOnce(&Plan) -> Result<()>) -> Result<()> {
    let mut signals = Signals::new()?;
    let volume = tokio::select! {
        connected = forebay_volume::connect(&plan.source, plan.volume.clone()) => match connected {
            Err(error) if error.kind() == ErrorKind::Conflict => return Err(name_ending(error, plan).await),
            connected => connected?,
        },
        _ = signals.next() => return Ok(()),
    };
    // Before the mount can be seen: who sees it may ask it something at once.
    let tasks = TaskGroup::new("mount");
    let identity = Identity { source: plan.source.clone(), mount_point: mount_point(&plan.target) };
    let socket = mounts::serve(&plan.volume.state_directory, &volume, identity, &tasks).await;
    let mounted = mount(volume.clone(), plan).await;
    let failure = match mounted {
        Ok(mounted) => {
            ready(plan)?;
            let (end, ended) = until_the_end(mounted, &volume, &mut signals).await;
            let brought = match end {
                // Still to be asked: `forebay status` shows what is left.
                End::Once => bring_in(&volume, &mut signals).await,
                End::AtOnce => left_staged(&volume),
            };
            if let (Err(_), Err(left)) = (&ended, &brought) {
                warn!(%left, "the mount ended, and not all of it is in the bucket");
            }
            ended.and(brought).err()
        }
        Err(failure) => Some(failure),
    };
    tasks.shutdown(CONTROL_DEADLINE).await;
    drop(socket);
    let closed = close(&volume).await;
    if let Some(failure) = failure {
        closed.unwrap_or_else(|error| warn!(%error, "closing the volume"));
        return Err(failure);
    }
    closed?;
    info!("everything is written");
    Ok(())
}

async fn mount(volume: Arc<Volume>, plan: &Plan) -> Result<Mounted> {
    let (target, runtime) = (plan.target.clone(), Handle::current());
    // What a volume can do decides over what was asked: credentials without write rights mount read-only.
    let read_only = plan.mount.read_only || volume.read_only();
    let options = MountOptions { read_only, ..plan.mount.clone() };
    blocking(move || forebay_fuse::mount(volume, &target, &options, runtime)).await?
}

fn mount_point(target: &MountPoint) -> String {
    match target {
        MountPoint::Directory(directory) => directory.to_string_lossy().into_owned(),
        MountPoint::Device(number) => format!("/dev/fd/{number}"),
    }
}

/// How a mount is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// When all is in the bucket.
    Once,
    /// Now.
    AtOnce,
}

/// Returns when the mount has ended: unmounted by anyone, by us after a signal, or by itself, which is an error.
async fn until_the_end(mut mounted: Mounted, volume: &Volume, signals: &mut Signals) -> (End, Result<()>) {
    let (mut end, mut outcome) = (End::Once, Ok(()));
    tokio::select! {
        ended = mounted.ended() => match ended {
            Ok(()) => info!("unmounted"),
            Err(failure) => {
                error!(%failure, "the mount ends; what reached it is written");
                outcome = Err(failure);
            }
        },
        name = signals.next() => {
            info!(signal = name, "unmounting");
            if let Err(error) = mounted.unmount().await {
                warn!(%error, "the mount ends with this process");
            }
            let ended = tokio::time::timeout(USERS_DEADLINE, mounted.ended());
            tokio::select! {
                ended = ended => if ended.is_err() { warn!("the mount is still in use and ends under its users") },
                _ = signals.next() => {
                    warn!("told again to end");
                    end = End::AtOnce;
                }
            }
        }
    }
    // The next mount may be asked for already. What is staged would have it wait too long: it is told of that.
    if volume.staged().files == 0 {
        volume.say_ending().await;
    }
    mounted.finish().await;
    (end, outcome)
}

/// Waits until what is staged is in the bucket, or a signal comes.
///
/// # Errors
/// When some of it is left.
async fn bring_in(volume: &Volume, signals: &mut Signals) -> Result<()> {
    let clock = Clock::system();
    let mut told: Option<Moment> = None;
    let progress = |left: &Staged| {
        if left.files > 0 && told.is_none_or(|told| clock.now().since(told) >= TELL_EVERY) {
            told = Some(clock.now());
            info!(
                files = left.files,
                bytes = left.bytes,
                error = left.last_error,
                "uploading what is staged; SIGTERM or SIGINT ends it, and the next mount goes on"
            );
        }
    };
    tokio::select! {
        drained = volume.drain(progress) => drained,
        name = signals.next() => {
            warn!(signal = name, "told to end while staged bytes are uploaded");
            left_staged(volume)
        }
    }
}

/// Says what is left staged.
///
/// # Errors
/// `Unavailable` when there is something; `Corrupt` when all that there is was lost by the disk.
fn left_staged(volume: &Volume) -> Result<()> {
    let Staged { files, bytes, damaged, .. } = volume.staged();
    if files == 0 {
        return match damaged {
            0 => Ok(()),
            _ => {
                let message = format!("{damaged} staged blobs are damaged on the local disk, and lost");
                Err(Error::corrupt(message))
            }
        };
    }
    let message = format!("{files} files, {} of them staged, are not in the bucket yet", format_bytes(bytes));
    Err(Error::new(ErrorKind::Unavailable, message)
        .with_hint("the next mount of the volume on this host, with the same state directory, uploads them"))
}

/// Names the mount of this host that keeps others out until it has uploaded what is staged.
async fn name_ending(refused: Error, plan: &Plan) -> Error {
    let Ok(mounts) = mounts::all(&plan.volume.state_directory).await else { return refused };
    for mount in mounts {
        if let State::Serving(status) = mount.state
            && status.is_ending
            && status.source == plan.source
        {
            let (at, pid, files) = (status.mount_point, status.pid, status.staged.files);
            let left = format_bytes(status.staged.bytes);
            return refused
                .context(format!(
                    "the mount that was at {at} (process {pid}) still uploads {files} files, {left}"
                ))
                .with_hint("wait until it has ended: `forebay status` shows how far it is");
        }
    }
    refused
}

async fn close(volume: &Volume) -> Result<()> {
    volume.close().await.map_err(|error| error.context("not everything could be written to the bucket"))
}
