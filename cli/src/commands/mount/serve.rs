//! Serving a mount until it is unmounted, in the foreground or in the background alike.
//!
//! The end has one order whatever causes it: the kernel lets go, requests in progress finish, everything written goes
//! to the bucket, the volume is closed. Exit code 0 says that all of it is there.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_fuse::{MountOptions, MountPoint, Mounted};
use forebay_io::task::{TaskGroup, blocking};
use forebay_volume::Volume;
use forebay_volume::control::{self, Identity};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use super::options::Plan;
use crate::places;

/// How long those who still use a mount have after SIGTERM; then it ends under them.
const USERS_DEADLINE: Duration = Duration::from_secs(10);
/// How long the control socket's tasks have to end.
const CONTROL_DEADLINE: Duration = Duration::from_secs(5);

/// Serves `plan`; `ready` is called once the mount can be used.
pub(super) fn serve(plan: Plan, ready: impl FnOnce(&Plan) -> Result<()>) -> Result<ExitCode> {
    if plan.fake {
        return ready(&plan).map(|()| ExitCode::SUCCESS);
    }
    let runtime = runtime()?;
    let served = runtime.block_on(serve_mount(&plan, ready));
    // Session threads of a mount that was given up may still sit in the kernel; the process ends under them.
    runtime.shutdown_background();
    served.map(|()| ExitCode::SUCCESS)
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
        connected = forebay_volume::connect(&plan.source, plan.volume.clone()) => connected?,
        _ = signals.next() => return Ok(()),
    };
    // Before the mount can be seen: who sees it may ask it something at once.
    let tasks = TaskGroup::new("mount");
    serve_control(plan, &volume, &tasks);
    let mounted = mount(volume.clone(), plan).await;
    let failure = match mounted {
        Ok(mounted) => {
            ready(plan)?;
            until_the_end(mounted, &mut signals).await;
            None
        }
        Err(failure) => Some(failure),
    };
    tasks.shutdown(CONTROL_DEADLINE).await;
    let _ = std::fs::remove_file(places::mount_socket(&plan.volume.state_directory, std::process::id()));
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

/// Lets other commands ask this mount. A mount serves files without it, too.
fn serve_control(plan: &Plan, volume: &Arc<Volume>, tasks: &TaskGroup) {
    let path = places::mount_socket(&plan.volume.state_directory, std::process::id());
    let identity = Identity { source: plan.source.clone(), mount_point: mount_point(&plan.target) };
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(Error::from);
    if let Err(error) = made.and_then(|()| control::serve(&path, volume.clone(), identity, tasks)) {
        warn!(%error, "`forebay status` and `forebay warmup` cannot reach this mount");
    }
}

fn mount_point(target: &MountPoint) -> String {
    match target {
        MountPoint::Directory(directory) => directory.to_string_lossy().into_owned(),
        MountPoint::Device(number) => format!("/dev/fd/{number}"),
    }
}

/// Returns when the mount has ended: unmounted by anyone, or by us after a signal.
async fn until_the_end(mut mounted: Mounted, signals: &mut Signals) {
    tokio::select! {
        () = mounted.ended() => info!("unmounted"),
        name = signals.next() => {
            info!(signal = name, "unmounting");
            if let Err(error) = mounted.unmount().await {
                warn!(%error, "the mount ends with this process");
            }
            let ended = tokio::time::timeout(USERS_DEADLINE, mounted.ended());
            tokio::select! {
                ended = ended => if ended.is_err() { warn!("the mount is still in use and ends under its users") },
                _ = signals.next() => warn!("told again to end"),
            }
        }
    }
    mounted.finish().await;
}

async fn close(volume: &Volume) -> Result<()> {
    volume.close().await.map_err(|error| error.context("not everything could be written to the bucket"))
}

/// The signals that end a mount.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// The name of the next one. Cancel-safe.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hang_up.recv() => "SIGHUP",
        }
    }
}
