//! What the user is told when something failed.
#![allow(clippy::print_stderr, reason = "telling the user is this file's work")]

use std::process::ExitCode;

use clap::error::ErrorKind as Usage;
use forebay_core::Error;
use serde::{Deserialize, Serialize};

/// A failure as JSON, on stderr with `--json` and between a mount's two processes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The kind's name.
    pub(crate) kind: String,
    /// The cause.
    pub(crate) error: String,
    /// What can be done.
    pub(crate) hint: Option<String>,
}

impl From<&Error> for Failure {
    fn from(failure: &Error) -> Self {
        Self {
            kind: failure.kind().to_string(),
            error: failure.to_string(),
            hint: failure.hint().map(str::to_owned),
        }
    }
}

impl Failure {
    /// Prints it.
    pub(crate) fn print(&self, json: bool) {
        match serde_json::to_string(self) {
            Ok(text) if json => eprintln!("{text}"),
            _ => {
                eprintln!("error: {}", self.error);
                if let Some(hint) = &self.hint {
                    eprintln!("hint: {hint}");
                }
            }
        }
    }
}

/// Prints a failure.
pub(crate) fn failure(failure: &Error, json: bool) {
    Failure::from(failure).print(json);
}

/// Prints a warning about something that went well.
pub(crate) fn warning(text: &str, json: bool) {
    match json {
        true => eprintln!("{}", serde_json::json!({ "warning": text })),
        false => eprintln!("warning: {text}"),
    }
}

/// Prints a line that another program wrote to its stderr.
pub(crate) fn foreign(line: &str) {
    eprintln!("{line}");
}

/// Prints what is wrong with a command line, or the help or version that was asked for.
pub(crate) fn usage(failure: &clap::Error) -> ExitCode {
    // A closed pipe is no reason to fail.
    let _ = failure.print();
    match failure.kind() {
        Usage::DisplayHelp | Usage::DisplayVersion => ExitCode::SUCCESS,
        _ => {
            eprintln!("hint: `forebay --help` and `forebay COMMAND --help` list what can be given");
            ExitCode::from(2)
        }
    }
}
