//! `forebay quota set|get|ls`: limit what may lie below a directory of a mount.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Args, Subcommand};
use forebay_core::units::{format_bytes, parse_bytes};
use forebay_core::{Error, Result};
use forebay_io::task::Stop;
use forebay_volume::control::{self, Reply};
use forebay_volume::quota::{Entry, Limit, Request};

use crate::arguments::Global;
use crate::settings::Settings;
use crate::{mounts, print, run};

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum QuotaCommand {
    /// Limit what may lie below a directory; the mount point stands for the volume. Counts what is there first.
    Set(SetArguments),
    /// Show the quota of a directory.
    Get(PathArguments),
    /// Show the directories at or below a path that have a quota.
    Ls(PathArguments),
}

/// The arguments of `forebay quota get` and `ls`.
#[derive(Debug, Args)]
pub(crate) struct PathArguments {
    /// A directory in a mount.
    pub(crate) path: PathBuf,
    /// The state directory that it was mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// The arguments of `forebay quota set`.
#[derive(Debug, Args)]
#[group(id = "limits", required = true, multiple = true, args = ["bytes", "inodes"])]
pub(crate) struct SetArguments {
    #[command(flatten)]
    pub(crate) place: PathArguments,
    /// Sizes of all files together, such as 10TiB, or `none`.
    #[arg(long, value_name = "SIZE")]
    pub(crate) bytes: Option<String>,
    /// Files, directories and others, or `none`.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) inodes: Option<String>,
}

/// Runs one of them.
pub(crate) fn run(global: &Global, command: &QuotaCommand) -> Result<ExitCode> {
    let (place, to_request): (_, Box<dyn FnOnce(String) -> Request>) = match command {
        QuotaCommand::Get(arguments) => (arguments, Box::new(|path| Request::Get { path })),
        QuotaCommand::Ls(arguments) => (arguments, Box::new(|path| Request::List { path })),
        QuotaCommand::Set(arguments) => {
            let bytes = limit(arguments.bytes.as_deref(), parse_bytes)?;
            let inodes = limit(arguments.inodes.as_deref(), number)?;
            (&arguments.place, Box::new(move |path| Request::Set { path, bytes, inodes }))
        }
    };
    let state = mounts::state_directory(place.state_dir.as_deref(), &Settings::load(global)?);
    let found = run::block_on(async {
        let place = mounts::holding(&place.path, &state).await?;
        let request = control::Request::Quota(to_request(place.path));
        match control::ask(&place.socket, &request, |_| {}, &Stop::new()).await? {
            Reply::Quotas { quotas } => Ok(quotas),
            other => Err(Error::corrupt(format!("the mount answers something else: {other:?}"))),
        }
    })?;
    match global.json {
        true => print::json(&found)?,
        false => show(&found),
    }
    Ok(ExitCode::SUCCESS)
}

fn limit(text: Option<&str>, parse: impl Fn(&str) -> Result<u64>) -> Result<Option<Limit>> {
    Ok(match text {
        None => None,
        Some("none") => Some(Limit::None),
        Some(text) => Some(Limit::At(parse(text)?)),
    })
}

fn number(text: &str) -> Result<u64> {
    u64::from_str(text).map_err(|_| {
        Error::invalid(format!("`{text}` is not a number of files")).with_hint("write digits only, or `none`")
    })
}

fn show(found: &[Entry]) {
    let mut rows = vec![print::row(["BYTES", "OF", "INODES", "OF", "PATH"])];
    for entry in found {
        let most_bytes = entry.most_bytes.map_or("-".to_owned(), format_bytes);
        let most_inodes = entry.most_inodes.map_or("-".to_owned(), |most| most.to_string());
        let path = entry.path.clone();
        rows.push(vec![format_bytes(entry.bytes), most_bytes, entry.inodes.to_string(), most_inodes, path]);
    }
    print::table(&rows);
}
