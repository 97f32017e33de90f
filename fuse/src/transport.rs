//! The session with the kernel: a mount made by the FUSE library, or a device that someone else has mounted.
//!
//! Unmounting is ours: the library (fuser 0.18) takes a file system that was unmounted from outside for mounted and
//! unmounts the path once more at its end, and with it whatever has been mounted there since.
#![allow(unsafe_code)]

use std::fmt::Display;
use std::io;
use std::mem::{self, ManuallyDrop};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use fuser::{BackgroundSession, Config, Notifier, Session, SessionACL};
use rustix::mount::UnmountFlags;

use crate::dispatch::Dispatch;
use crate::mountpoint::{self, MountPoint};

/// Dead mounts of ours, one on top of the other, that are cleared away: a supervisor leaves one at most.
const DEAD_MOUNTS_MAX: usize = 16;

/// How long the threads of a session may take to begin before it is taken to be slow, and well.
const BEGINNING: Duration = Duration::from_secs(10);
/// How often it is looked at until then.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A running session. Dropping it leaves the mount as it is.
#[derive(Debug)]
pub(crate) struct Running {
    /// What ends with the session's threads, or because they could not be started.
    thread: Option<JoinHandle<io::Result<()>>>,
    session: ManuallyDrop<BackgroundSession>,
}

impl Running {
    pub(crate) fn notifier(&self) -> Notifier {
        self.session.notifier()
    }

    /// Why the session ended, if the library says it. To be asked once it has: its thread is about to be over then.
    pub(crate) fn cause(&mut self) -> Option<String> {
        match self.thread.take()?.join() {
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("its thread panicked".into()),
            Ok(Ok(())) => None,
        }
    }

    /// Returns when all `threads` of the session run, or are slow to begin, or it has ended. Asks the mount nothing: it could not
    /// be unmounted meanwhile.
    pub(crate) fn await_threads(&self, threads: usize, ended: impl Fn() -> bool) {
        // As the library names the last one that it starts.
        let last = format!("fuser-{}", threads.saturating_sub(1));
        for _ in 0..BEGINNING.as_millis() / LOOK_EVERY.as_millis() {
            if ended() || has_thread(&last) {
                return;
            }
            thread::park_timeout(LOOK_EVERY);
        }
    }
}

/// Whether this process has a thread of that name.
fn has_thread(name: &str) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.any(|found| found.trim_end() == name)
}

/// That a session ended though its mount was still there.
pub(crate) fn ended_by_itself(place: &dyn Display, cause: Option<String>) -> Error {
    // As one that is aborted.
    let cause = cause.unwrap_or_else(|| "the kernel ended it".into());
    let fact = format!("the kernel's session of {place} ended though nobody unmounted it: {cause}");
    Error::new(ErrorKind::Unavailable, fact).with_hint(
        "mount it again; each of its threads (-o threads=N) takes a descriptor and a process of what `ulimit -n` and \
         `ulimit -u` allow",
    )
}

fn no_threads(error: io::Error) -> Error {
    Error::from(error)
        .context("cannot start the session's threads")
        .with_hint("allow more processes (`ulimit -u`, a container's pids limit)")
}

/// Starts serving `dispatch` at `target`. Returns when the kernel has agreed on the protocol.
pub(crate) fn start(dispatch: Dispatch, target: &MountPoint, config: Config) -> Result<Running> {
    let session = match target {
        MountPoint::Directory(directory) => {
            Session::new(dispatch, directory, &config).map_err(|error| mount_failed(directory, error))?
        }
        MountPoint::Device(number) => {
            let device = adopt(*number)?;
            Session::from_fd(dispatch, device, SessionACL::All, config).map_err(|error| {
                Error::invalid(format!("descriptor {number} is not a FUSE device to serve: {error}"))
                    .with_hint("pass a descriptor of /dev/fuse that has been mounted and not served yet")
            })?
        }
    };
    // The library gives its thread to who drops the session, and with it the mount. Until it runs, that unmounts.
    let none = thread::Builder::new().spawn(|| Ok(())).map_err(no_threads)?;
    let mut session = ManuallyDrop::new(session.spawn().map_err(no_threads)?);
    let thread = Some(mem::replace(&mut session.guard, none));
    Ok(Running { thread, session })
}

/// Takes over a descriptor that this process was started with.
fn adopt(number: RawFd) -> Result<OwnedFd> {
    // The three standard streams belong to the process, whatever lies behind them.
    let open = number > 2 && Path::new(&format!("/proc/self/fd/{number}")).exists();
    if !open {
        return Err(Error::invalid(format!("descriptor {number} is not open"))
            .with_hint("the mount point `/dev/fd/N` names a descriptor that the caller leaves open"));
    }
    // SAFETY: the descriptor is open (checked above) and was given to this process by its caller for this use alone;
    // nothing in this process opened it, so nobody else owns it. The command line is read once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn mount_failed(directory: &Path, error: io::Error) -> Error {
    let denied = error.kind() == io::ErrorKind::PermissionDenied
        || error.to_string().contains("Operation not permitted")
        || error.to_string().contains("EPERM");
    let hint = match denied {
        true => {
            "mounting needs root, or `fusermount3` installed set-uid; `allow_other` also needs \
                 `user_allow_other` in /etc/fuse.conf"
        }
        false => "see the cause above; `dmesg` may say more",
    };
    let kind = if denied { ErrorKind::Denied } else { ErrorKind::Unavailable };
    Error::new(kind, format!("cannot mount on {}: {error}", directory.display())).with_hint(hint)
}

/// Detaches what a mount of ours left at `directory` when its process was killed, so that whoever mounts again after a
/// crash (a supervisor, a pod that restarts) needs no other step.
pub(crate) fn clear(directory: &Path) -> Result<()> {
    for _ in 0..DEAD_MOUNTS_MAX {
        if mountpoint::dead_mount(directory)?.is_none() {
            break;
        }
        unmount(directory, true)?;
        tracing::warn!(directory = %directory.display(), "detached a mount whose process had died");
    }
    Ok(())
}

/// Unmounts `directory`; `lazily` detaches it at once and lets those who still use it finish.
pub(crate) fn unmount(directory: &Path, lazily: bool) -> Result<()> {
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(directory, flags) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) => unmount_by_helper(directory, lazily),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

/// What users without privileges mounted is unmounted by the helper that mounted it.
fn unmount_by_helper(directory: &Path, lazily: bool) -> Result<()> {
    let flags = if lazily { "-uz" } else { "-u" };
    let output = Command::new("fusermount3").arg(flags).arg("--").arg(directory).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::new(ErrorKind::Unavailable, format!("cannot unmount {}: {said}", directory.display())))
}
