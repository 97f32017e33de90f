//! A `forebay meta` for the length of a test: it holds a volume and serves its tree to mounts that join.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use crate::{Forebay, shell};

/// Longest that its end may take.
const DEADLINE: Duration = Duration::from_secs(60);

/// The secret of all hosts of a test.
pub fn join_secret(folder: &Path) -> String {
    let path = folder.join("join-secret");
    if !path.exists() {
        std::fs::write(&path, "what all hosts of this test know").expect("the scratch folder is writable");
    }
    path.display().to_string()
}

/// An address at which nobody listens now.
pub fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    listener.local_addr().expect("it has one").to_string()
}

/// The process; ended on drop.
#[derive(Debug)]
pub struct Meta {
    home: PathBuf,
    process: Option<Child>,
}

impl Meta {
    /// Starts one of a home of its own, which logs there, and returns at once.
    pub fn start(
        home: &Path,
        source: &str,
        secret: &str,
        options: &[&str],
        variables: &[(String, String)],
    ) -> Self {
        Self::start_at(&free_address(), home, source, secret, options, variables)
    }

    /// The same at an address.
    pub fn start_at(
        listen: &str,
        home: &Path,
        source: &str,
        secret: &str,
        options: &[&str],
        variables: &[(String, String)],
    ) -> Self {
        std::fs::create_dir_all(home).expect("a home can be made");
        let ours = ["meta", source, "--join-secret", secret, "--join-listen", listen];
        let arguments: Vec<&str> = ours.iter().chain(options).copied().collect();
        let process = Forebay::new(home, arguments).envs(variables).spawn(&home.join("meta.log"));
        Self { home: home.to_owned(), process: Some(process) }
    }

    /// Kills it as a power cut would.
    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("it runs");
        process.kill().expect("a child can be killed");
        process.wait().expect("a killed child can be waited for");
    }

    /// Sends it a signal, by name.
    pub fn signal(&self, name: &str) {
        let process = self.process.as_ref().expect("it runs");
        shell(Path::new("/"), &format!("kill -{name} {}", process.id())).succeeded();
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        self.await_end().expect("it runs")
    }

    /// Tells it to end, and finds that it ended well.
    #[track_caller]
    pub fn end(&mut self) {
        let ended = self.terminate().expect("it runs");
        assert!(ended.success(), "ended with {ended}\n{}", self.log());
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.home.join("meta.log")).unwrap_or_default()
    }

    fn terminate(&mut self) -> Option<ExitStatus> {
        if let Some(process) = &self.process {
            shell(Path::new("/"), &format!("kill -TERM {}", process.id()));
        }
        self.await_end()
    }

    /// How it ended, killed if it did not in time; nothing where it does not run.
    fn await_end(&mut self) -> Option<ExitStatus> {
        let mut process = self.process.take()?;
        let started = Instant::now();
        loop {
            if let Ok(Some(status)) = process.try_wait() {
                return Some(status);
            }
            if started.elapsed() > DEADLINE {
                let _ = process.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Meta {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the process that serves the tree\n{}", self.log());
        }
        self.terminate();
    }
}
