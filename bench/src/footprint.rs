//! A memory control group of one daemon, and the peak of what no file backs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// How often the group is looked at. A peak that is shorter is missed.
const INTERVAL: Duration = Duration::from_millis(5);

/// A control group (version 2 or 1) that a daemon is started in; removed on drop.
#[derive(Debug)]
pub struct Footprint {
    group: PathBuf,
    /// What memory.stat calls anonymous memory: `anon` in version 2, `rss` in version 1.
    anonymous: &'static str,
}

impl Footprint {
    /// Makes a group; only root may.
    pub fn new() -> Result<Self> {
        let name = format!("forebay-bench-{}", std::process::id());
        let hierarchies = [("/sys/fs/cgroup", "anon"), ("/sys/fs/cgroup/memory", "rss")];
        for (root, anonymous) in hierarchies {
            let group = Path::new(root).join(&name);
            if std::fs::create_dir(&group).is_err() {
                continue;
            }
            let footprint = Self { group, anonymous };
            if footprint.now().is_ok() {
                return Ok(footprint);
            }
        }
        bail!("no memory control group can be made here: run as root")
    }

    /// A command that runs `program` in the group from its first instruction on.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo $$ > "$0/cgroup.procs" && exec "$@""#]).arg(&self.group).arg(program);
        command
    }

    /// Bytes of anonymous and shared memory now.
    pub fn now(&self) -> Result<u64> {
        let file = self.group.join("memory.stat");
        let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        let of = |name: &str| -> Result<u64> {
            let mut pairs = text.lines().filter_map(|line| line.split_once(' '));
            let (_, value) = pairs.find(|(found, _)| *found == name).with_context(|| format!("no {name}"))?;
            Ok(value.parse()?)
        };
        Ok(of(self.anonymous)? + of("shmem")?)
    }

    /// The highest that was seen while `work` ran, and what `work` returned.
    pub fn peak_while<T>(&self, work: impl FnOnce() -> T) -> (u64, T) {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut peak = 0;
                while !done.load(Ordering::Relaxed) {
                    peak = peak.max(self.now().unwrap_or(0));
                    std::thread::sleep(INTERVAL);
                }
                peak
            });
            let result = work();
            done.store(true, Ordering::Relaxed);
            (watch.join().unwrap_or(0), result)
        })
    }
}

impl Drop for Footprint {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.group);
    }
}
