//! `forebay sync PATH`: wait until everything that was written through a mount is in the bucket.

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_core::{Error, Result};
use forebay_io::task::Stop;
use forebay_volume::control::{self, Request};

use crate::arguments::Global;
use crate::settings::Settings;
use crate::{mounts, print, run};

/// The arguments of `forebay sync`.
#[derive(Debug, Args)]
pub(crate) struct SyncArguments {
    /// Anything in a mount: the whole mount is synced.
    pub(crate) path: PathBuf,
    /// The state directory that it was mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Has the kernel hand over what it holds, then asks the mount.
pub(crate) fn run(global: &Global, arguments: &SyncArguments) -> Result<ExitCode> {
    let state = mounts::state_directory(arguments.state_dir.as_deref(), &Settings::load(global)?);
    let place = run::block_on(async {
        let place = mounts::holding(&arguments.path, &state).await?;
        // Pages of mapped files; what was written otherwise is with the mount already.
        let flushed = File::open(&place.status.mount_point)
            .and_then(|root| rustix::fs::syncfs(&root).map_err(std::io::Error::from));
        flushed.map_err(|error| Error::from(error).context(&place.status.mount_point))?;
        control::ask(&place.socket, &Request::Sync, |_| {}, &Stop::new()).await?;
        Ok(place)
    })?;
    if global.json {
        print::json(&serde_json::json!({ "mount_point": place.status.mount_point }))?;
    }
    Ok(ExitCode::SUCCESS)
}
