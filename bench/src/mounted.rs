//! A volume mounted by the `forebay` binary, as users mount one.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::context::Context;
use crate::footprint::Footprint;
use crate::store::StoreProcess;

/// Longest that mounting or unmounting may take: an unmount uploads what is not uploaded yet.
const DEADLINE: Duration = Duration::from_secs(120);

/// What to mount, and how.
#[derive(Debug, Clone, Copy)]
pub struct Mounting<'a> {
    /// Names the mount point and the folder of its state; the same name finds it again.
    pub name: &'a str,
    /// Prefix in the store's bucket.
    pub prefix: &'a str,
    /// Further options of `forebay mount`.
    pub options: &'a [&'a str],
    /// Where its memory is accounted, if anywhere.
    pub footprint: Option<&'a Footprint>,
}

/// A mount in the foreground; unmounted on drop.
#[derive(Debug)]
pub struct Mounted {
    child: Child,
    point: PathBuf,
    log: PathBuf,
}

impl Mounted {
    /// Mounts, and returns when it can be used.
    pub fn new(context: &Context, store: &StoreProcess, how: Mounting<'_>) -> Result<Self> {
        let home = context.place(&format!("{}.home", how.name))?;
        let source = format!("s3://{}/{}", StoreProcess::BUCKET, how.prefix);
        let mut command = match how.footprint {
            Some(footprint) => footprint.command(&context.settings.forebay),
            None => Command::new(&context.settings.forebay),
        };
        let point = mount_point(context, how.name)?;
        command.args(["mount", "--foreground", &source]).arg(&point).args(how.options);
        command.arg("--state-dir").arg(home.join("state"));
        command.env("HOME", &home).env("XDG_CONFIG_HOME", &home).envs(store.environment());
        Self::start(command, point, home.join("mount.log"))
    }

    /// The same of any file system: `command` serves it at `point` until that is unmounted.
    pub fn start(mut command: Command, point: PathBuf, log: PathBuf) -> Result<Self> {
        let file = std::fs::File::create(&log)?;
        let child = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn()?;
        let mut mounted = Self { child, point, log };
        mounted.await_kernel()?;
        Ok(mounted)
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.point
    }

    /// The daemon.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process that serves it: another one's child where a supervisor was started.
    pub fn serving(&self) -> Result<u32> {
        let pid = self.pid();
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let children = std::fs::read_to_string(task?.path().join("children"))?;
            if let Some(child) = children.split_whitespace().next() {
                return Ok(child.parse()?);
            }
        }
        Ok(pid)
    }

    /// Unmounts as a user does and waits for the daemon's end.
    pub fn unmount(mut self) -> Result<()> {
        if !umount(&self.point, &[]) {
            bail!("umount {} failed\n{}", self.point.display(), self.told());
        }
        match self.await_end()? {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("the mount ended with {status}\n{}", self.told()),
            None => bail!("still running after umount\n{}", self.told()),
        }
    }

    /// How the daemon ended, if it did in time.
    fn await_end(&mut self) -> Result<Option<ExitStatus>> {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(None)
    }

    fn await_kernel(&mut self) -> Result<()> {
        let start = Instant::now();
        while !is_mounted(&self.point)? {
            if let Some(status) = self.child.try_wait()? {
                bail!("mounting ended with {status}\n{}", self.told());
            }
            if start.elapsed() > DEADLINE {
                bail!("mounting takes too long\n{}", self.told());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn told(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        if !umount(&self.point, &[]) || !matches!(self.await_end(), Ok(Some(_))) {
            let _ = self.child.kill();
            umount(&self.point, &["-l"]);
        }
        let _ = self.child.wait();
    }
}

/// The mount point of that name, made if need be.
pub fn mount_point(context: &Context, name: &str) -> Result<PathBuf> {
    context.place(&format!("{name}.mnt"))
}

fn is_mounted(point: &Path) -> Result<bool> {
    let table = std::fs::read_to_string("/proc/self/mounts").context("reading the mount table")?;
    let point = point.to_string_lossy();
    Ok(table.lines().any(|line| line.split(' ').nth(1) == Some(&point)))
}

fn umount(point: &Path, options: &[&str]) -> bool {
    let mut command = Command::new("umount");
    command.args(options).arg(point).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
