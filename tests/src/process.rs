//! Running the built `forebay` binary and other programs, with a deadline.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub use crate::starting::{apart, start};

/// Longest that a program may run before it is killed and the test fails.
const DEADLINE: Duration = Duration::from_secs(180);

/// Runs a program to its end; what it prints is caught.
pub fn output(command: &mut Command) -> io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    start(command)?.wait_with_output()
}

/// Unmounts what is mounted at `folder`, as a user does.
#[track_caller]
pub fn unmount(folder: &Path) {
    let mut command = Command::new("umount");
    let ended = run_apart(command.arg(folder)).expect("umount starts");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr).trim_end());
}

/// Runs a program to its end while no other one is being started.
#[expect(clippy::disallowed_methods, reason = "nothing can be started meanwhile")]
pub fn run_apart(command: &mut Command) -> io::Result<Output> {
    apart(|| command.stdin(Stdio::null()).output())
}

/// A run of `forebay` being prepared.
#[derive(Debug)]
pub struct Forebay(Command);

impl Forebay {
    /// `forebay ARGS`, with its state and configuration below `home` instead of the user's own.
    pub fn new<A: AsRef<OsStr>>(home: &Path, args: impl IntoIterator<Item = A>) -> Self {
        let mut command = Command::new(Self::binary());
        command.args(args).env("HOME", home).env("XDG_STATE_HOME", home.join("state"));
        command.env("XDG_CACHE_HOME", home.join("cache")).env("XDG_CONFIG_HOME", home.join("config"));
        Self(command)
    }

    /// Sets environment variables, such as a store's endpoint and credentials.
    pub fn envs(mut self, variables: &[(String, String)]) -> Self {
        self.0.envs(variables.iter().map(|(name, value)| (name, value)));
        self
    }

    /// Runs to the end.
    pub fn run(mut self) -> Outcome {
        run(&mut self.0)
    }

    /// Starts it and leaves it running, its output going to the file `log`.
    pub fn spawn(mut self, log: &Path) -> Child {
        let file = std::fs::File::create(log).expect("a log can be made");
        let errors = file.try_clone().expect("a file can be shared");
        self.0.stdin(Stdio::null()).stdout(file).stderr(errors);
        start(&mut self.0).expect("forebay starts")
    }

    /// The binary beside this test, which `make build` and `make test` build.
    pub fn binary() -> PathBuf {
        let test = std::env::current_exe().expect("a test knows its own path");
        let folder = test.ancestors().nth(2).expect("tests lie in PROFILE/deps");
        let binary = folder.join("forebay");
        assert!(binary.exists(), "{} is missing: run `make build`", binary.display());
        binary
    }
}

/// How a program ended.
#[derive(Debug)]
pub struct Outcome {
    /// The command, for messages.
    pub command: String,
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
}

impl Outcome {
    /// Fails the test unless the exit code is 0; returns stdout.
    #[track_caller]
    pub fn succeeded(self) -> String {
        assert_eq!(self.code, Some(0), "{self}");
        self.stdout
    }

    /// Fails the test unless it failed as bad input must: an exit code, an `error:` line that holds `cause`, and a
    /// `hint:` line that holds `hint`.
    #[track_caller]
    pub fn failed_with(&self, cause: &str, hint: &str) {
        assert!(self.code.is_some_and(|code| code != 0), "no exit code that says failure: {self}");
        let line = |prefix: &str, words: &str| {
            let mut lines = self.stderr.lines().filter(|line| line.starts_with(prefix));
            assert!(
                lines.any(|line| line.to_lowercase().contains(&words.to_lowercase())),
                "no `{prefix}` line with `{words}`: {self}"
            );
        };
        line("error:", cause);
        line("hint:", hint);
        assert!(!self.stderr.contains("panicked"), "it panicked: {self}");
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { command, code, stdout, stderr } = self;
        write!(f, "{command}\nexit code {code:?}\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
    }
}

/// Runs a line of bash in `folder`, with `set -euo pipefail`; for walks with real programs.
pub fn shell(folder: &Path, script: &str) -> Outcome {
    let mut command = Command::new("bash");
    run(command.args(["-euo", "pipefail", "-c", script]).current_dir(folder).env("LC_ALL", "C.UTF-8"))
}

fn run(command: &mut Command) -> Outcome {
    let name = format!("{command:?}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = start(command).unwrap_or_else(|error| panic!("{name}: {error}"));
    let stdout = drain(child.stdout.take().expect("stdout is piped"));
    let stderr = drain(child.stderr.take().expect("stderr is piped"));
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break status;
        }
        if started.elapsed() > DEADLINE {
            child.kill().expect("a child can be killed");
            panic!("{name} ran past {DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let text = |thread: std::thread::JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&thread.join().expect("reading a pipe does not panic")).into_owned()
    };
    Outcome { command: name, code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

/// Reads a pipe on its own thread, so that a full one never stops the program.
fn drain(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
        bytes
    })
}
