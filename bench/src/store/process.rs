//! The server in a process of its own, so that its CPU time is never counted as a client's.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Sub;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::pace::PaceSettings;
use crate::context::IN_FLIGHT;

/// What the server was asked for so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// GETs of objects.
    pub gets: u64,
    /// HEADs.
    pub heads: u64,
    /// PUTs of objects and parts.
    pub puts: u64,
    /// Pages of listings.
    pub lists: u64,
    /// Everything else: upload starts and completions, copies, deletes.
    pub others: u64,
    /// Bytes of request bodies.
    pub bytes_in: u64,
    /// Bytes of answers' bodies.
    pub bytes_out: u64,
}

impl Sub for Counts {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            gets: self.gets - earlier.gets,
            heads: self.heads - earlier.heads,
            puts: self.puts - earlier.puts,
            lists: self.lists - earlier.lists,
            others: self.others - earlier.others,
            bytes_in: self.bytes_in - earlier.bytes_in,
            bytes_out: self.bytes_out - earlier.bytes_out,
        }
    }
}

/// How the C library's allocator is to treat a store's objects (GLIBC_TUNABLES of malloc(3)): memory that was freed is used
/// again, and never given back. Taking each object's memory anew from the kernel, page by page, took the store more
/// processor time than all else, of two cores that it shares with its clients.
const MEMORY: &str = "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=33554432:\
     glibc.malloc.trim_threshold=1099511627776";

/// A running server with one bucket, `bench`; stopped on drop.
#[derive(Debug)]
pub struct StoreProcess {
    child: Child,
    address: SocketAddr,
    in_flight: usize,
}

impl StoreProcess {
    /// The bucket that is there from the start.
    pub const BUCKET: &str = "bench";

    /// Starts `PROGRAM store`, this program itself, on a free port.
    pub fn start(pace: PaceSettings) -> Result<Self> {
        Self::start_at(pace, 0)
    }

    /// As [`StoreProcess::start`] at an address of this machine, for clients that reach it there.
    pub fn start_for(pace: PaceSettings, address: &str) -> Result<Self> {
        Self::start_with(pace, 0, address)
    }

    /// As [`StoreProcess::start`] at a nice level: at 19 it takes next to nothing from those who compute beside it, as if it
    /// were on another machine.
    pub fn start_at(pace: PaceSettings, nice: u32) -> Result<Self> {
        Self::start_with(pace, nice, "127.0.0.1")
    }

    fn start_with(pace: PaceSettings, nice: u32, address: &str) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut command = Command::new("nice");
        command.args(["-n", &nice.to_string()]).arg(program);
        command.args(["store", "--bucket", Self::BUCKET, "--delay-ms", &pace.delay.as_millis().to_string()]);
        command.args(["--listen", &format!("{address}:0")]);
        if let Some(rate) = pace.rate {
            command.args(["--rate", &rate.to_string()]);
        }
        if let Some(rate) = pace.request_rate {
            command.args(["--request-rate", &rate.to_string()]);
        }
        command.env("GLIBC_TUNABLES", MEMORY);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("starting the store")?;
        let stdout = child.stdout.take().context("the store's output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let address = line.trim().parse().with_context(|| format!("the store printed `{line}`"))?;
        // Where one request has a part of the link alone, more of them are what fills it.
        let in_flight = if pace.request_rate.is_some() { 4 * IN_FLIGHT } else { IN_FLIGHT };
        Ok(Self { child, address, in_flight })
    }

    /// Requests for large pieces that keep it busy.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `http://127.0.0.1:PORT`, or where else it was started.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The environment with which any S3 client reaches it.
    pub fn environment(&self) -> Vec<(String, String)> {
        let pairs = [
            ("AWS_ENDPOINT_URL", self.endpoint()),
            ("AWS_ENDPOINT", self.endpoint()),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("AWS_REGION", "us-east-1".into()),
            ("AWS_ACCESS_KEY_ID", "bench".into()),
            ("AWS_SECRET_ACCESS_KEY", "bench".into()),
            // As over TLS, where a hash of the payload protects from nothing.
            ("AWS_UNSIGNED_PAYLOAD", "true".into()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).into()
    }

    /// What it was asked for since it started.
    pub fn counts(&self) -> Result<Counts> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.write_all(b"GET /-/counts HTTP/1.1\r\nhost: store\r\nconnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let Some((_, body)) = text.split_once("\r\n\r\n") else { bail!("the store answered `{text}`") };
        Ok(serde_json::from_str(body)?)
    }
}

impl Drop for StoreProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
