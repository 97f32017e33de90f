//! A store's server as a process on a free port of the loopback, with a folder of its own.
//!
//! It ends with its owner even when that is killed: a shell between them waits for the pipe from the owner to close.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::RngExt;

use crate::Scratch;
use crate::process::{output, start};

/// Longest that a server may take to answer its first request. moto imports for seconds on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// Runs a server until stdin closes, then removes its folder: nobody drops what a whole test program shares. A line on
/// stdin starts it anew.
const GUARD: &str = r#"folder=$1; shift
while echo "guard: starting"; "$@" & server=$!; read -r _; do kill -KILL $server; wait; done
kill -KILL $server; wait; rm -rf "$folder""#;

/// A running server.
#[derive(Debug)]
pub(crate) struct Program {
    guard: Child,
    port: u16,
    pub(crate) scratch: Scratch,
}

impl Program {
    /// Starts `program` with what `arguments` makes of a port and a folder, and waits until it answers.
    pub(crate) fn start(
        program: &Path,
        variables: &[(&str, &str)],
        arguments: impl Fn(u16, &Path) -> Vec<String>,
    ) -> Self {
        // Another program may take the port between its choice here and the server's start: then try another one.
        for _ in 0..5 {
            let scratch = Scratch::new();
            let port = free_port();
            let log = std::fs::File::create(scratch.join("server.log")).expect("a log can be made");
            let mut guard = Command::new("bash");
            guard
                .args(["-c", GUARD, "guard"])
                .arg(scratch.path())
                .arg(program)
                .args(arguments(port, scratch.path()))
                .envs(variables.iter().copied())
                .stdin(Stdio::piped())
                .stdout(log.try_clone().expect("a file can be shared"))
                .stderr(log);
            let guard = start(&mut guard).expect("bash starts");
            let server = Self { guard, port, scratch };
            if server.answers() {
                return server;
            }
        }
        panic!("{} did not start on five ports", program.display());
    }

    /// Waits until the server answers; false when it said that it could not have its port.
    fn answers(&self) -> bool {
        let started = Instant::now();
        while started.elapsed() < START_DEADLINE {
            if self.request("GET /", "").is_ok_and(|answer| answer.starts_with("HTTP/1.1 ")) {
                return true;
            }
            if self.log().contains("in use") {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the server did not answer within {START_DEADLINE:?}:\n{}", self.log());
    }

    /// What it has printed so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.join("server.log")).unwrap_or_default()
    }

    /// One request, unsigned; `body` is JSON.
    pub(crate) fn request(&self, line: &str, body: &str) -> std::io::Result<String> {
        self.request_with(line, "", body)
    }

    /// The same with further headers, each with its end of line.
    pub(crate) fn request_with(&self, line: &str, headers: &str, body: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let head = format!(
            "{line} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
            self.port,
            body.len()
        );
        write!(stream, "{head}{headers}Connection: close\r\n\r\n{body}")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// The same as a URL.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address())
    }

    /// Kills the server and starts it again, with its folder and port: whatever it was doing ends.
    pub(crate) fn restart(&self) {
        let starts = || self.log().matches("guard: starting").count();
        let (before, started) = (starts(), Instant::now());
        let mut stdin = self.guard.stdin.as_ref().expect("it runs");
        stdin.write_all(b"again\n").expect("the guard reads");
        while starts() == before {
            assert!(started.elapsed() < START_DEADLINE, "the server was not started again");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(self.answers(), "another program has the port:\n{}", self.log());
    }

    /// Ends the server, as a crash would.
    pub(crate) fn end(&mut self) {
        drop(self.guard.stdin.take());
        // The shell ends right after the server; it cannot fail to be waited for.
        let _ = self.guard.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
    }
}

/// The Python environment of `make setup`.
pub(crate) fn venv() -> PathBuf {
    let given = std::env::var_os("FOREBAY_VENV").map(PathBuf::from);
    given.unwrap_or_else(|| crate::settings::cache().join("venv"))
}

/// Runs a program that a test depends on.
#[track_caller]
pub(crate) fn run(command: &mut Command) {
    let output = output(command).expect("the program starts");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn free_port() -> u16 {
    let mut rng = rand::rng();
    let candidates = std::iter::repeat_with(|| rng.random_range(10_000..30_000));
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    candidates.take(1000).find(is_free).expect("loopback has free ports")
}
