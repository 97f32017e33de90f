//! `forebay clone FROM TO`: copy a file or a tree of a mount without moving a byte.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use forebay_core::units::format_bytes;
use forebay_core::{Error, Result};
use forebay_io::task::Stop;
use forebay_volume::control::{self, Reply, Request};

use super::warmup::Bar;
use crate::arguments::Global;
use crate::settings::Settings;
use crate::{mounts, print, run};

/// The arguments of `forebay clone`.
#[derive(Debug, Args)]
pub(crate) struct CloneArguments {
    /// A file or directory in a mount.
    pub(crate) from: PathBuf,
    /// A path in the same mount that does not exist yet.
    pub(crate) to: PathBuf,
    /// The state directory that it was mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Asks the mount.
pub(crate) fn run(global: &Global, arguments: &CloneArguments) -> Result<ExitCode> {
    let state = mounts::state_directory(arguments.state_dir.as_deref(), &Settings::load(global)?);
    let (bar, stop) = (Bar::new(), Stop::new());
    let cloned = run::block_on(async {
        let from = mounts::holding(&arguments.from, &state).await?;
        let (above, name) = place(&arguments.to)?;
        let to = mounts::holding(above, &state).await?;
        if from.socket != to.socket {
            return Err(Error::invalid("the two paths are in different mounts")
                .with_hint("bytes are shared within one volume only: use `cp` between volumes"));
        }
        let to = format!("{}/{name}", to.path);
        let request = Request::Clone { from: from.path, to };
        let asked = control::ask(&from.socket, &request, |progress| bar.show(&progress), &stop);
        match run::until_interrupted(asked, &stop).await? {
            Reply::Cloned(cloned) => Ok(cloned),
            other => Err(Error::corrupt(format!("the mount answers something else: {other:?}"))),
        }
    });
    bar.end();
    let cloned = cloned?;
    if global.json {
        print::json(&cloned)?;
    } else {
        let (files, directories) = (cloned.files.to_string(), cloned.directories.to_string());
        print::table(&[
            print::row(["FILES", "DIRECTORIES", "SHARED"]),
            print::row([&files, &directories, &format_bytes(cloned.bytes)]),
        ]);
    }
    Ok(ExitCode::SUCCESS)
}

/// The directory that the copy is to be in, which exists, and its name.
fn place(to: &Path) -> Result<(&Path, &str)> {
    let name = to.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| {
        Error::invalid(format!("{} names no new file", to.display())).with_hint("end it with a name in UTF-8")
    })?;
    let above = to.parent().filter(|above| !above.as_os_str().is_empty());
    Ok((above.unwrap_or(Path::new(".")), name))
}
