//! `forebay trash ls|restore|empty`: what was deleted, and bringing it back.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use forebay_core::units::format_bytes;
use forebay_core::{Error, FileKind, Result};
use forebay_io::task::Stop;
use forebay_volume::control::{self, Reply};
use forebay_volume::trash::{Entry, List, Report, Request, Restored};

use crate::arguments::Global;
use crate::mounts::Place;
use crate::settings::Settings;
use crate::{mounts, print, run};

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum TrashCommand {
    /// Show what was deleted at or below a path of a mount.
    Ls(PathArguments),
    /// Bring back what was deleted last at a path of a mount, with all below it.
    Restore(RestoreArguments),
    /// Free what was deleted at or below a path of a mount, before its time is over.
    Empty(PathArguments),
}

/// The arguments of `forebay trash ls` and `empty`.
#[derive(Debug, Args)]
pub(crate) struct PathArguments {
    /// A path in a mount; it need not exist any more.
    pub(crate) path: PathBuf,
    /// The state directory that it was mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// The arguments of `forebay trash restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreArguments {
    #[command(flatten)]
    pub(crate) place: PathArguments,
    /// Bring back the one with this name in the trash, whatever its path was.
    #[arg(long)]
    pub(crate) id: Option<String>,
    /// Bring it back to this path of the mount instead.
    #[arg(long, value_name = "PATH")]
    pub(crate) to: Option<PathBuf>,
}

/// Runs one of them.
pub(crate) fn run(global: &Global, command: &TrashCommand) -> Result<ExitCode> {
    let settings = Settings::load(global)?;
    match command {
        TrashCommand::Ls(arguments) => list(global, arguments, &settings),
        TrashCommand::Restore(arguments) => restore(global, arguments, &settings),
        TrashCommand::Empty(arguments) => empty(global, arguments, &settings),
    }
}

async fn find(arguments: &PathArguments, settings: &Settings) -> Result<Place> {
    let state = mounts::state_directory(arguments.state_dir.as_deref(), settings);
    mounts::once_holding(&arguments.path, &state).await
}

async fn ask(place: &Place, request: Request) -> Result<Report> {
    let request = control::Request::Trash(request);
    match control::ask(&place.socket, &request, |_| {}, &Stop::new()).await? {
        Reply::Trash(report) => Ok(report),
        other => Err(Error::corrupt(format!("the mount answers something else: {other:?}"))),
    }
}

/// Page by page, however much it is.
fn list(global: &Global, arguments: &PathArguments, settings: &Settings) -> Result<ExitCode> {
    run::block_on(async {
        let place = find(arguments, settings).await?;
        let (mut after, mut is_first) = (None, true);
        loop {
            let request = Request::List { path: place.path.clone(), after };
            let Report::List(List { entries, next }) = ask(&place, request).await? else {
                return Err(Error::corrupt("the mount answers something else"));
            };
            match global.json {
                true => entries.iter().try_for_each(print::json)?,
                false => show(&entries, is_first),
            }
            is_first = false;
            after = match next {
                Some(next) if print::is_read() => Some(next),
                _ => return Ok(ExitCode::SUCCESS),
            };
        }
    })
}

fn show(entries: &[Entry], is_first: bool) {
    let mut rows = Vec::new();
    if is_first {
        rows.push(print::row(["ID", "DELETED", "UNTIL", "SIZE", "PATH"]));
    }
    for entry in entries {
        let (size, slash) = match entry.kind {
            FileKind::File => (format_bytes(entry.size), ""),
            FileKind::Directory => ("-".to_owned(), "/"),
            _ => ("-".to_owned(), ""),
        };
        let path = format!("{}{slash}", entry.path);
        rows.push(vec![entry.id.clone(), print::utc(entry.deleted), print::utc(entry.expires), size, path]);
    }
    print::table(&rows);
}

fn restore(global: &Global, arguments: &RestoreArguments, settings: &Settings) -> Result<ExitCode> {
    let restored = run::block_on(async {
        let place = find(&arguments.place, settings).await?;
        let to = match &arguments.to {
            Some(to) => {
                let state = mounts::state_directory(arguments.place.state_dir.as_deref(), settings);
                let to = mounts::once_holding(to, &state).await?;
                if to.socket != place.socket {
                    return Err(Error::invalid("the two paths are in different mounts")
                        .with_hint("what was deleted comes back to the volume that it was in"));
                }
                Some(to.path)
            }
            None => None,
        };
        let request = Request::Restore { path: place.path.clone(), id: arguments.id.clone(), to };
        match ask(&place, request).await? {
            Report::Restored(restored) => Ok(restored),
            _ => Err(Error::corrupt("the mount answers something else")),
        }
    })?;
    let Restored { directories, files, bytes, refused, taken } = &restored;
    match global.json {
        true => print::json(&restored)?,
        false => print::table(&[
            print::row(["FILES", "DIRECTORIES", "BYTES"]),
            print::row([&files.to_string(), &directories.to_string(), &format_bytes(*bytes)]),
        ]),
    }
    match refused.first() {
        None => Ok(ExitCode::SUCCESS),
        Some(first) => Err(Error::new(
            forebay_core::ErrorKind::Exists,
            format!("{taken} not brought back: the path `{first}` is taken"),
        )
        .with_hint("name another path with --to")),
    }
}

fn empty(global: &Global, arguments: &PathArguments, settings: &Settings) -> Result<ExitCode> {
    let report = run::block_on(async {
        let place = find(arguments, settings).await?;
        ask(&place, Request::Empty { path: place.path.clone() }).await
    })?;
    let Report::Emptied { freed, busy } = &report else {
        return Err(Error::corrupt("the mount answers something else"));
    };
    match global.json {
        true => print::json(&serde_json::json!({ "freed": freed, "busy": busy }))?,
        false => print::table(&[
            print::row(["FREED", "STILL READ"]),
            print::row([&freed.to_string(), &busy.to_string()]),
        ]),
    }
    Ok(ExitCode::SUCCESS)
}
