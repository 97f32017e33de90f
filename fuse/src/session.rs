//! One mount from its start to its end.
//!
//! Owns the options that reach the kernel, the worker threads, and the order of the end: the kernel lets go, requests
//! in progress finish, files still open are written. Closing the volume is the caller's, after that.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay_core::{Appearance, Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::task::TaskGroup;
use forebay_metadata::tree::ImportSettings;
use forebay_volume::Volume;
use fuser::{Config, MountOption, SessionACL};
use tokio::runtime::Handle as Runtime;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::dispatch::{Answerer, Dispatch};
use crate::fs::{FileSystem, Policy};
use crate::mountpoint::{self, MountPoint};
use crate::notify;
use crate::sign::Sign;
use crate::transport::{self, Running};

/// Largest READ in bytes, as the kernel's page limit has it by default.
const READ_BYTES_MAX: u32 = 1 << 20;
/// What the kernel reads ahead of a sequential reader, in KiB: four READs of 1 MiB, so that one is always under way
/// on another worker thread. The kernel's own 128 KiB makes READs too small.
const READ_AHEAD_KIB: u32 = 4096;
/// How long requests in progress may take when the mount has ended.
const DRAIN_DEADLINE: Duration = Duration::from_secs(60);

/// How long a notification under way may take then: the kernel has let go, and refuses it.
const NOTICES_DEADLINE: Duration = Duration::from_secs(5);

/// What a mount is told besides its volume.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// Shown as the source in the mount table.
    pub source: String,
    /// The type in the mount table is exactly `fuse` instead of `fuse.forebay`.
    pub plain_type: bool,
    /// Users other than the one who mounts may look in.
    pub allow_other: bool,
    /// The kernel refuses changes.
    pub read_only: bool,
    /// The content is taken as fixed; see [`Policy::dataset`].
    pub dataset: bool,
    /// How long the kernel may use names and attributes; by default as [`Policy`] says for the kind of mount.
    pub ttl: Option<Duration>,
    /// Worker threads; by default one a core, at least 8 and at most 32: some of them may wait for a disk.
    pub threads: Option<usize>,
    /// Device nodes work.
    pub devices: bool,
    /// Set-id bits work.
    pub set_id: bool,
    /// Programs can be executed.
    pub executables: bool,
    /// Files remember when they were read, see [`Policy::relatime`].
    pub relatime: bool,
    /// Owner, group and mode of what nobody gave any.
    pub appearance: Appearance,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            source: "forebay".into(),
            plain_type: false,
            allow_other: false,
            read_only: false,
            dataset: false,
            ttl: None,
            threads: None,
            devices: false,
            set_id: false,
            executables: true,
            relatime: false,
            appearance: ImportSettings::default().appearance(),
        }
    }
}

impl MountOptions {
    fn policy(&self) -> Policy {
        let ttl = if self.dataset { Policy::DATASET_TTL } else { Policy::LIVE_TTL };
        let relatime = self.relatime && !self.read_only && !self.dataset;
        let (ttl, appearance) = (self.ttl.unwrap_or(ttl), self.appearance);
        Policy { dataset: self.dataset, ttl, relatime, appearance }
    }

    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        self.threads.unwrap_or(cores.clamp(8, 32)).max(1)
    }

    /// The library's form of these. Type and largest read go as plain text: the library keeps the first to itself
    /// and does not know the second.
    fn config(&self, target: &MountPoint) -> Config {
        let mut options = vec![
            MountOption::FSName(self.source.clone()),
            MountOption::DefaultPermissions,
            MountOption::NoAtime,
            MountOption::CUSTOM(format!("max_read={READ_BYTES_MAX}")),
        ];
        let chosen = [
            (!self.plain_type, MountOption::CUSTOM("subtype=forebay".into())),
            (self.read_only || self.dataset, MountOption::RO),
            (self.devices, MountOption::Dev),
            (self.set_id, MountOption::Suid),
            (!self.executables, MountOption::NoExec),
        ];
        options.extend(chosen.into_iter().filter(|(wanted, _)| *wanted).map(|(_, option)| option));
        let mut config = Config::default();
        config.mount_options = options;
        config.acl = if self.allow_other { SessionACL::All } else { SessionACL::Owner };
        config.n_threads = Some(self.threads());
        // A further descriptor needs /dev/fuse itself, which a process that was handed its device may lack.
        config.clone_fd = matches!(target, MountPoint::Directory(_));
        config
    }
}

/// A volume that is mounted. Dropping it leaves the mount in place and unserved: use [`Mounted::unmount`].
#[derive(Debug)]
pub struct Mounted {
    fs: Arc<FileSystem>,
    answers: Answerer,
    ended: watch::Receiver<bool>,
    place: Option<Place>,
    sign: Option<Sign>,
    notices: TaskGroup,
    session: Running,
}

/// A mounted directory and the device number by which our mount is told from a later one.
#[derive(Debug, Clone)]
struct Place {
    directory: PathBuf,
    device: String,
}

impl Place {
    /// Whether our mount is still the one on top at the directory.
    fn holds(&self) -> bool {
        mountpoint::device_number(&self.directory).is_ok_and(|device| device.as_deref() == Some(&self.device))
    }

    fn unmount(&self, lazily: bool) -> Result<()> {
        if self.holds() { transport::unmount(&self.directory, lazily) } else { Ok(()) }
    }

    /// After a session that ended by itself. Whoever comes next shall find a directory, not a dead end.
    fn leave(&self) {
        if let Err(failure) = self.unmount(true) {
            warn!(%failure, "cannot detach a mount whose session has ended");
        }
    }
}

/// Mounts `volume` and serves it on threads of its own. Blocks for some milliseconds; requests that wait run on
/// `runtime`, which must outlive the mount.
///
/// # Errors
/// With a hint: no FUSE on this machine, no permission, a device that is none.
pub fn mount(
    volume: Arc<Volume>,
    target: &MountPoint,
    options: &MountOptions,
    runtime: Runtime,
) -> Result<Mounted> {
    target.check_device()?;
    if let MountPoint::Directory(directory) = target {
        transport::clear(directory)?;
    }
    let answers = Answerer::new(runtime.clone(), volume.write_bytes());
    let fs = Arc::new(FileSystem::new(volume, options.policy(), Clock::system()));
    let (end, ended) = watch::channel(false);
    let kernel = Arc::new(OnceLock::new());
    let dispatch = Dispatch::new(fs.clone(), answers.clone(), end, kernel.clone());
    let notices = TaskGroup::new("notices");
    let mut session = transport::start(dispatch, target, options.config(target))?;
    let _ = kernel.set(session.notifier());
    let place = match target {
        MountPoint::Directory(directory) => Some(find_place(directory)?),
        MountPoint::Device(_) => None,
    };
    if let Some(place) = &place {
        raise_read_ahead(&place.device);
        session.await_threads(options.threads(), || *ended.borrow());
        if *ended.borrow() && place.holds() {
            place.leave();
            return Err(transport::ended_by_itself(&place.directory.display(), session.cause()));
        }
    }
    notify::start(fs.clone(), session.notifier(), &runtime, &notices);
    info!(source = %options.source, ?target, dataset = options.dataset, "mounted");
    let _entered = runtime.enter();
    let sign = place.as_ref().map(|place| Sign::show(&place.device, &Clock::system(), &notices));
    Ok(Mounted { fs, answers, ended, place, sign, notices, session })
}

fn find_place(directory: &std::path::Path) -> Result<Place> {
    let device = mountpoint::device_number(directory)?
        .ok_or_else(|| Error::new(ErrorKind::Unavailable, "unmounted again at once"))?;
    Ok(Place { directory: directory.to_owned(), device })
}

/// Best effort: only root may, and a mount works without.
fn raise_read_ahead(device: &str) {
    let path = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if let Err(error) = std::fs::write(&path, READ_AHEAD_KIB.to_string()) {
        info!(path, %error, "the kernel keeps its own readahead; sequential reads are slower");
    }
}

impl Mounted {
    /// The file system, for counts.
    pub fn file_system(&self) -> &Arc<FileSystem> {
        &self.fs
    }

    /// Returns when the kernel has let go: after `umount` by anyone. Cancel-safe.
    ///
    /// # Errors
    /// `Unavailable` when the session ended while its mount was still there.
    pub async fn ended(&mut self) -> Result<()> {
        // An error means that the sender is gone, and with it the session.
        let _ = self.ended.wait_for(|ended| *ended).await;
        // The number may be another mount's now, however long this process has to upload.
        self.sign = None;
        match self.place.as_ref() {
            Some(place) if place.holds() => {
                Err(transport::ended_by_itself(&place.directory.display(), self.session.cause()))
            }
            Some(_) => Ok(()),
            None => match self.session.cause() {
                Some(cause) => Err(transport::ended_by_itself(&"the device", Some(cause))),
                None => Ok(()),
            },
        }
    }

    /// Unmounts. A mount that is in use is detached: out of sight at once, ended when its last user is done.
    ///
    /// # Errors
    /// `Unsupported` for a device that someone else mounted.
    pub async fn unmount(&self) -> Result<()> {
        let Some(place) = self.place.clone() else {
            return Err(Error::new(ErrorKind::Unsupported, "only who mounted this device can unmount it"));
        };
        // Off the async threads: the kernel may write pages back before it answers.
        forebay_io::task::blocking(move || {
            place.unmount(false).or_else(|failure| {
                warn!(%failure, "the mount is in use and is detached");
                place.unmount(true)
            })
        })
        .await?
    }

    /// After the end: waits for requests in progress and writes what is still open.
    pub async fn finish(self) {
        if let Some(place) = &self.place {
            place.leave();
        }
        self.answers.end_waits().await;
        self.answers.drain(DRAIN_DEADLINE).await;
        self.notices.shutdown(NOTICES_DEADLINE).await;
        self.fs.release_all().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options_of(options: &MountOptions) -> Vec<MountOption> {
        options.config(&MountPoint::Directory("/mnt".into())).mount_options
    }

    #[test]
    fn the_kernel_is_told_what_the_options_say() {
        let plain = MountOptions { plain_type: true, read_only: true, ..MountOptions::default() };
        let subtype = MountOption::CUSTOM("subtype=forebay".into());
        assert!(options_of(&MountOptions::default()).contains(&subtype));
        assert!(!options_of(&plain).contains(&subtype));
        assert!(options_of(&plain).contains(&MountOption::RO));
        assert!(!options_of(&MountOptions::default()).contains(&MountOption::RO));
    }

    #[test]
    fn datasets_are_read_only_and_kept_long() {
        let dataset = MountOptions { dataset: true, ..MountOptions::default() };
        assert!(options_of(&dataset).contains(&MountOption::RO));
        assert_eq!(dataset.policy().ttl, Policy::DATASET_TTL);
        assert_eq!(MountOptions::default().policy().ttl, Policy::LIVE_TTL);
        let own = MountOptions { ttl: Some(Duration::from_secs(5)), ..dataset };
        assert_eq!(own.policy().ttl, Duration::from_secs(5));
    }

    #[test]
    fn a_handed_over_device_is_not_opened_again() {
        let options = MountOptions::default();
        assert!(!options.config(&MountPoint::Device(7)).clone_fd);
        assert!(options.config(&MountPoint::Directory("/mnt".into())).clone_fd);
    }
}
