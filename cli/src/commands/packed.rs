//! `forebay volume policy|export`: which directories pack small files, and their files turned back into plain objects.
#![allow(clippy::print_stderr, reason = "what failed is told beside the result")]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use forebay_core::units::format_bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::task::Stop;
use forebay_volume::control::{self, Reply};
use forebay_volume::packed::{Exported, Policy, Request};

use super::warmup::Bar;
use crate::arguments::Global;
use crate::settings::Settings;
use crate::{mounts, print, run};

/// Files that could not be exported, shown to a person; JSON has more.
const SHOWN: usize = 20;

/// How small files of a directory are stored.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Chosen {
    /// Each as an object at its own path.
    Plain,
    /// Many in one object.
    Packed,
}

/// The arguments of `forebay volume policy`.
#[derive(Debug, Args)]
pub(crate) struct PolicyArguments {
    /// A directory in a mount.
    pub(crate) directory: PathBuf,
    /// What it is to be from now on; without it, the policy is shown.
    pub(crate) policy: Option<Chosen>,
    /// The state directory that it was mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// The arguments of `forebay volume export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// A file or directory in a mount.
    #[arg(default_value = ".")]
    pub(crate) path: PathBuf,
    /// Make the directory and all below it plain first, so that nothing is packed there again.
    #[arg(long)]
    pub(crate) plain: bool,
    /// The state directory that it was mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Sets or shows the policy of a directory.
pub(crate) fn policy(global: &Global, arguments: &PolicyArguments) -> Result<ExitCode> {
    let state = mounts::state_directory(arguments.state_dir.as_deref(), &Settings::load(global)?);
    let set = arguments.policy.map(|chosen| match chosen {
        Chosen::Plain => Policy::Plain,
        Chosen::Packed => Policy::Packed,
    });
    let found = run::block_on(async {
        let place = mounts::holding(&arguments.directory, &state).await?;
        let request = control::Request::Packed(Request::Policy { path: place.path, set });
        match control::ask(&place.socket, &request, |_| {}, &Stop::new()).await? {
            Reply::Policy { policy } => Ok(policy),
            other => Err(Error::corrupt(format!("the mount answers something else: {other:?}"))),
        }
    })?;
    match global.json {
        true => print::json(&serde_json::json!({ "policy": found }))?,
        false => print::table(&[print::row([match found {
            Policy::Plain => "plain",
            Policy::Packed => "packed",
        }])]),
    }
    Ok(ExitCode::SUCCESS)
}

/// Has the mount export, and shows what came of it.
pub(crate) fn export(global: &Global, arguments: &ExportArguments) -> Result<ExitCode> {
    let state = mounts::state_directory(arguments.state_dir.as_deref(), &Settings::load(global)?);
    let (bar, stop) = (Bar::new(), Stop::new());
    let exported = run::block_on(async {
        let place = mounts::holding(&arguments.path, &state).await?;
        let request = Request::Export { path: place.path, plain: arguments.plain };
        let request = control::Request::Packed(request);
        let asked = control::ask(&place.socket, &request, |progress| bar.show(&progress), &stop);
        match run::until_interrupted(asked, &stop).await? {
            Reply::Exported(exported) => Ok(*exported),
            other => Err(Error::corrupt(format!("the mount answers something else: {other:?}"))),
        }
    });
    bar.end();
    let exported = exported?;
    show(&exported, global.json)?;
    match failure(&exported) {
        Some(failure) => Err(failure),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn show(exported: &Exported, json: bool) -> Result<()> {
    if json {
        let value = serde_json::to_value(exported).map_err(|error| Error::bug(error.to_string()));
        let mut value = value?;
        value["complete"] = exported.is_complete().into();
        return print::json(&value);
    }
    let count = |number: u64| number.to_string();
    print::table(&[
        vec!["files".to_owned(), count(exported.progress.files), format_bytes(exported.progress.bytes)],
        vec!["exported".to_owned(), count(exported.exported), format_bytes(exported.exported_bytes)],
        vec!["directories made plain".to_owned(), count(exported.directories)],
        vec!["failed".to_owned(), count(exported.failed)],
    ]);
    for line in exported.failures.iter().take(SHOWN) {
        eprintln!("failed: {line}");
    }
    let more = exported.failed.saturating_sub(SHOWN as u64);
    if more > 0 {
        eprintln!("and {more} more: --json lists them");
    }
    Ok(())
}

/// Why the command fails, if it does.
fn failure(exported: &Exported) -> Option<Error> {
    let message = match exported {
        exported if exported.is_complete() => return None,
        Exported { cancelled: true, .. } => format!("cancelled after {} files", exported.exported),
        _ => format!("{} files could not be exported", exported.failed),
    };
    let hint = "run it again: what is exported stays, and only the others are looked at";
    Some(Error::new(ErrorKind::Unavailable, message).with_hint(hint))
}
