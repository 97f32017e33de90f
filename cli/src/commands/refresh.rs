//! `forebay refresh PATH`: list a directory of the bucket again.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_core::Result;
use forebay_io::task::Stop;
use forebay_volume::control::{self, Request};

use crate::arguments::Global;
use crate::settings::Settings;
use crate::{mounts, print, run};

/// The arguments of `forebay refresh`.
#[derive(Debug, Args)]
pub(crate) struct RefreshArguments {
    /// A directory in a mount.
    pub(crate) path: PathBuf,
    /// The state directory that it was mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Asks the mount.
pub(crate) fn run(global: &Global, arguments: &RefreshArguments) -> Result<ExitCode> {
    let state = mounts::state_directory(arguments.state_dir.as_deref(), &Settings::load(global)?);
    let place = run::block_on(async {
        let place = mounts::holding(&arguments.path, &state).await?;
        let request = Request::Refresh { path: place.path.clone() };
        let asked = control::ask(&place.socket, &request, |_| {}, &Stop::new()).await;
        asked.map_err(|error| error.context(arguments.path.display()))?;
        Ok(place)
    })?;
    if global.json {
        let refreshed = serde_json::json!({ "mount_point": place.status.mount_point, "path": place.path });
        print::json(&refreshed)?;
    }
    Ok(ExitCode::SUCCESS)
}
