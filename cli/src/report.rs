//! What the user is told when something failed.
#![allow(clippy::print_stderr, reason = "telling the user is this file's work")]

use std::process::ExitCode;

use clap::error::ErrorKind as Usage;
use forebay_core::{Error, ErrorKind};
use serde::{Deserialize, Serialize};

/// Where it is told what a command line may hold.
const LISTED: &str = "`forebay --help` and `forebay COMMAND --help` list what can be given";

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
pub(crate) fn usage(failure: &clap::Error, json: bool) -> ExitCode {
    if matches!(failure.kind(), Usage::DisplayHelp | Usage::DisplayVersion) {
        // A closed pipe is no reason to fail.
        let _ = failure.print();
        return ExitCode::SUCCESS;
    }
    let text = failure.render().to_string();
    match json {
        true => misused(failure.kind(), &text).print(true),
        false => {
            // What clap says last is what the hint says.
            let text = text.split("\nFor more information, try").next().unwrap_or_default();
            eprintln!("{}\nhint: {LISTED}", text.trim_end());
        }
    }
    ExitCode::from(2)
}

/// The same as one error: the first paragraph of clap's, and its tip, without the usage.
fn misused(kind: Usage, text: &str) -> Failure {
    let on_a_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let paragraphs: Vec<_> = text.split("\n\n").map(on_a_line).collect();
    let error = match kind {
        // All that there is is the help.
        Usage::DisplayHelpOnMissingArgumentOrSubcommand => "it requires a subcommand".to_owned(),
        _ => paragraphs[0].strip_prefix("error: ").unwrap_or(&paragraphs[0]).to_owned(),
    };
    let tip = paragraphs.iter().find_map(|paragraph| paragraph.strip_prefix("tip: "));
    let hint = Some(tip.unwrap_or(LISTED).to_owned());
    Failure { kind: ErrorKind::Invalid.to_string(), error, hint }
}
