//! A Python program that does what it is asked, a line at a time, and tells what it measured.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde::de::DeserializeOwned;

/// What it measured, by name.
pub type Values = HashMap<String, f64>;

/// One of these.
pub fn of(told: &Values, name: &str) -> Result<f64> {
    told.get(name).copied().with_context(|| format!("the Python program told no {name}"))
}

/// The process; it ends once its input does, and is killed where it is dropped before.
pub struct Helper {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts it.
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {command:?}"))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the Python program's output")?;
        Ok(Self { child, stdin, stdout: BufReader::new(stdout) })
    }

    /// Asks it for something, and waits for what it tells.
    pub fn ask(&mut self, what: &str) -> Result<Values> {
        let stdin = self.stdin.as_mut().context("the Python program's input")?;
        writeln!(stdin, "{what}")?;
        self.hear(what)
    }

    /// What it tells next, `what` it was asked for.
    pub fn hear<T: DeserializeOwned>(&mut self, what: &str) -> Result<T> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            bail!(
                "the Python program ended while it was asked to {what}: see above; does python have torch and forebay?"
            );
        }
        serde_json::from_str(&line).with_context(|| format!("the Python program told `{line}`"))
    }

    /// Ends it without a word.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop).context("waiting for a killed Python program")
    }

    /// Has it end by itself, and put away what it made.
    pub fn end(&mut self) -> Result<()> {
        self.stdin = None;
        self.child.wait().map(drop).context("waiting for a Python program")
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
