//! Real S3 servers for tests: moto for semantics, and a fast one for volume.
//!
//! A server belongs to the test that started it, or to the whole test program through [`Server::shared`]. It ends
//! with its owner even when that is killed: a shell between them waits for the pipe from the owner to close.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use forebay_io::object::{Bucket, BucketUrl, StoreSettings};

use crate::Scratch;

/// Longest that a server may take to answer its first request. moto imports for seconds on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// Runs a server until stdin closes, then removes its folder: nobody drops what a whole test program shares.
const GUARD: &str =
    r#"folder=$1; shift; "$@" & server=$!; read -r _; kill -KILL $server; wait; rm -rf "$folder""#;
/// The credentials of every server.
const KEY: &str = "forebay-test-key";
const SECRET: &str = "forebay-test-secret";

/// A running S3 server.
#[derive(Debug)]
pub struct Server {
    guard: Child,
    port: u16,
    scratch: Scratch,
    kind: Kind,
    buckets: AtomicU32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Moto,
    Fast,
}

impl Server {
    /// Starts moto: every semantic of S3 that Forebay uses, slow for volume, checks no credentials.
    ///
    /// # Panics
    /// When moto is not installed: `make setup` installs it.
    pub fn start() -> Self {
        let program = venv().join("bin/moto_server");
        assert!(program.exists(), "{} is missing: run `make setup`", program.display());
        Self::launch(Kind::Moto, &program, |port, _| {
            ["-H", "127.0.0.1", "-p", &port.to_string()].map(str::to_owned).to_vec()
        })
    }

    /// Starts versitygw: fast, checks credentials, keeps objects as files. `None`, and says so, where it is not
    /// installed.
    pub fn fast() -> Option<Self> {
        let program = crate::settings::tool("versitygw", "s3::Server::fast")?;
        Some(Self::launch(Kind::Fast, &program, |port, scratch| {
            let data = scratch.join("data");
            std::fs::create_dir_all(&data).expect("a folder can be made");
            let listen = format!("127.0.0.1:{port}");
            let data = data.display().to_string();
            ["--port", &listen, "--keep-alive", "--quiet", "posix", &data].map(str::to_owned).to_vec()
        }))
    }

    /// Starts the fast server where it is installed, else moto: for what needs S3 and moves much data.
    pub fn for_volume() -> Self {
        Self::fast().unwrap_or_else(Self::start)
    }

    /// The moto server of this test program, started on first use.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    fn launch(kind: Kind, program: &Path, arguments: impl Fn(u16, &Path) -> Vec<String>) -> Self {
        // Another program may take the port between its choice here and the server's start: then try another one.
        for _ in 0..5 {
            let scratch = Scratch::new();
            let port = free_port();
            let log = std::fs::File::create(scratch.join("server.log")).expect("a log can be made");
            let guard = Command::new("bash")
                .args(["-c", GUARD, "guard"])
                .arg(scratch.path())
                .arg(program)
                .args(arguments(port, scratch.path()))
                .env("ROOT_ACCESS_KEY", KEY)
                .env("ROOT_SECRET_KEY", SECRET)
                .stdin(Stdio::piped())
                .stdout(log.try_clone().expect("a file can be shared"))
                .stderr(log)
                .spawn()
                .expect("bash starts");
            let server = Self { guard, port, scratch, kind, buckets: AtomicU32::new(0) };
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
            if self.request("GET /").is_ok_and(|answer| answer.starts_with("HTTP/1.1 ")) {
                return true;
            }
            if self.log().contains("in use") {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the server did not answer within {START_DEADLINE:?}:\n{}", self.log());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.join("server.log")).unwrap_or_default()
    }

    /// One request without a body, unsigned.
    fn request(&self, line: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let host = format!("127.0.0.1:{}", self.port);
        write!(stream, "{line} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// Where it listens, as a URL.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Creates a bucket of its own for a test and returns its name.
    pub fn create_bucket(&self) -> String {
        let name = format!("test-{}", self.buckets.fetch_add(1, Ordering::Relaxed));
        match self.kind {
            Kind::Moto => {
                let answer = self.request(&format!("PUT /{name}")).expect("the server answers");
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            }
            // A directory is a bucket.
            Kind::Fast => drop(self.scratch.folder(&format!("data/{name}"))),
        }
        name
    }

    /// Puts an empty object at `/BUCKET/KEY`, URL-encoded, whatever the key. moto only.
    pub fn put_raw(&self, path: &str) {
        let answer = self.request(&format!("PUT /{path}")).expect("the server answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }

    /// The settings with which `Bucket::open` reaches it.
    pub fn settings(&self) -> StoreSettings {
        let options = [
            ("aws_endpoint", self.endpoint()),
            ("aws_region", "us-east-1".to_owned()),
            ("aws_access_key_id", KEY.to_owned()),
            ("aws_secret_access_key", SECRET.to_owned()),
        ];
        let options = options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        StoreSettings { options, ..StoreSettings::default() }
    }

    /// The environment with which a `forebay` process reaches it.
    pub fn envs(&self) -> Vec<(String, String)> {
        self.envs_at(self.endpoint())
    }

    /// The same, by way of `endpoint`: that of a door in front of it.
    pub fn envs_at(&self, endpoint: String) -> Vec<(String, String)> {
        let variables = [
            ("AWS_ENDPOINT_URL", endpoint),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
        ];
        variables.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }

    /// A handle on a new bucket, below `prefix` in it.
    pub async fn bucket(&self, prefix: &str) -> Bucket {
        let url: BucketUrl = format!("s3://{}/{prefix}", self.create_bucket()).parse().expect("a valid URL");
        Bucket::open(&url, &self.settings()).await.unwrap_or_else(|error| panic!("{error}\n{}", self.log()))
    }

    /// Ends the server, as a crash would.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        drop(self.guard.stdin.take());
        // The shell ends right after the server; it cannot fail to be waited for.
        let _ = self.guard.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// The Python environment of `make setup`.
fn venv() -> PathBuf {
    let given = std::env::var_os("FOREBAY_VENV").map(PathBuf::from);
    given.unwrap_or_else(|| crate::settings::cache().join("venv"))
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("loopback has free ports");
    listener.local_addr().expect("a bound socket has an address").port()
}
