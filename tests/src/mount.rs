//! A mounted volume for the length of a test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::process::run_apart;
use crate::{Forebay, shell};

/// Longest that mounting and unmounting may take.
const DEADLINE: Duration = Duration::from_secs(60);

/// Options of a mount that has a cache on disk below its home, small enough for blocks to be thrown out.
pub const DISK_CACHE: &[&str] = &["--cache-dir", "{home}/blocks", "--cache-size", "64MiB"];

/// A configuration with which most files are uploads while they are written.
pub const EARLY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/configurations/early.toml");
/// One with which what is written back leaves at any time.
pub const SOON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/configurations/soon.toml");
/// Both.
pub const EARLY_AND_SOON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/configurations/early-and-soon.toml");

/// A `forebay mount` in the foreground, unmounted on drop.
#[derive(Debug)]
pub struct Mount {
    source: String,
    folder: PathBuf,
    home: PathBuf,
    options: Vec<String>,
    variables: Vec<(String, String)>,
    process: Option<Child>,
}

impl Mount {
    /// Mounts `source` at `folder` (made if need be) and returns when it can be used.
    ///
    /// State, cache and configuration lie below `home`; `options` are further arguments, in which `{home}` stands for it, and
    /// `variables` environment.
    #[track_caller]
    pub fn new(
        home: &Path,
        source: &str,
        folder: &Path,
        options: &[&str],
        variables: &[(String, String)],
    ) -> Self {
        std::fs::create_dir_all(folder).expect("a mount point can be made");
        std::fs::create_dir_all(home).expect("a home can be made");
        let options = options.iter().map(|option| option.to_string()).collect();
        let (home, folder) = (home.to_owned(), folder.to_owned());
        let variables = variables.to_vec();
        let mut mount = Self { source: source.to_owned(), folder, home, options, variables, process: None };
        mount.mount();
        mount
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// The serving process.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("it is mounted").id()
    }

    /// Unmounts as a user does and waits for the process to end well.
    #[track_caller]
    pub fn unmount(&mut self) {
        let folder = &self.folder;
        let ended = run_apart(Command::new("umount").arg(folder)).expect("umount starts");
        let told = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{}\n{}", told.trim_end(), self.log());
        let status = self.wait();
        assert!(status.success(), "ended with {status}\n{}", self.log());
    }

    /// Waits for the process, which was told to end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let mut process = self.process.take().expect("it is mounted");
        let started = Instant::now();
        loop {
            if let Some(status) = process.try_wait().expect("a child can be waited for") {
                return status;
            }
            assert!(started.elapsed() < DEADLINE, "still running after umount\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the process as a power cut would and frees the mount point.
    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("it is mounted");
        process.kill().expect("a child can be killed");
        process.wait().expect("a killed child can be waited for");
        detach(&self.folder);
    }

    /// Mounts again where it was, after `unmount` or `kill`, on the machine with the home `home`.
    #[track_caller]
    pub fn remount(&mut self, home: &Path) {
        assert!(self.process.is_none(), "it is still mounted");
        std::fs::create_dir_all(home).expect("a home can be made");
        self.home = home.to_owned();
        self.mount();
    }

    /// Does `work` on the mount, which is killed when that takes longer than `deadline`, so that a call that hangs fails
    /// and the test with it.
    #[track_caller]
    pub fn within<T>(&self, deadline: Duration, work: impl FnOnce() -> T) -> T {
        let (done, watched) = mpsc::channel::<()>();
        let late = &AtomicBool::new(false);
        let worked = std::thread::scope(|threads| {
            threads.spawn(move || {
                if watched.recv_timeout(deadline) == Err(mpsc::RecvTimeoutError::Timeout) {
                    late.store(true, Ordering::Relaxed);
                    eprintln!("a call took longer than {deadline:?}: the mount is killed");
                    shell(Path::new("/"), &format!("kill -KILL {}", self.pid()));
                }
            });
            // Dropped with the closure's end, also by a panic in `work`.
            let _done = done;
            work()
        });
        assert!(
            !late.load(Ordering::Relaxed),
            "a call took longer than {deadline:?}, and the mount was killed"
        );
        worked
    }

    /// What the process has printed so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.home.join("mount.log")).unwrap_or_default()
    }

    #[track_caller]
    fn mount(&mut self) {
        let (folder, home) = (self.folder.to_string_lossy(), self.home.to_string_lossy());
        let args = ["mount", "-f", &self.source, &folder].map(str::to_owned);
        let options = self.options.iter().map(|option| option.replace("{home}", &home));
        let command = Forebay::new(&self.home, args.into_iter().chain(options)).envs(&self.variables);
        let mut process = command.spawn(&self.home.join("mount.log"));
        let started = Instant::now();
        while !is_mounted(&self.folder) {
            let ended = process.try_wait().expect("a child can be waited for");
            let late = started.elapsed() > DEADLINE;
            if late && process.kill().is_ok() {
                let _ = process.wait();
            }
            assert!(ended.is_none() && !late, "mounting {folder} failed: {ended:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.process = Some(process);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        if std::thread::panicking() {
            eprintln!("--- log of the mount\n{}", self.log());
        }
        if !run("umount", &[self.folder.as_os_str()]) {
            detach(&self.folder);
        }
        let started = Instant::now();
        while !matches!(process.try_wait(), Ok(Some(_))) {
            if started.elapsed() > DEADLINE {
                let _ = process.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Whether something is mounted exactly at `folder`. Asks the kernel's table, so that a hung mount cannot hang this.
pub fn is_mounted(folder: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mounts").expect("the mount table can be read");
    let folder = folder.to_string_lossy();
    table.lines().any(|line| line.split(' ').nth(1) == Some(&folder))
}

fn detach(folder: &Path) {
    run("umount", &["-l".as_ref(), folder.as_os_str()]);
}

fn run(program: &str, args: &[&std::ffi::OsStr]) -> bool {
    run_apart(Command::new(program).args(args)).is_ok_and(|ended| ended.status.success())
}
