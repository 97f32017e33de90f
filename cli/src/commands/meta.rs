//! `forebay meta SOURCE`: hold a volume and serve its tree to mounts that join, without a mount of its own.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::BucketUrl;
use forebay_io::task::TaskGroup;
use forebay_volume::VolumeSettings;
use forebay_volume::control::Identity;
use sd_notify::NotifyState;
use tracing::{info, warn};

use crate::arguments::Global;
use crate::commands::mount::{CONTROL_DEADLINE, Signals, tell_supervisor};
use crate::settings::Settings;
use crate::{mounts, places, run};

/// What `forebay status` shows in the place of a mount point.
const NOWHERE: &str = "(serves the tree)";

/// The arguments of `forebay meta`.
#[derive(Debug, Args)]
pub(crate) struct MetaArguments {
    /// The bucket: s3://bucket/prefix, gs://, az:// or file:///directory.
    pub(crate) source: String,
    /// A file with what all hosts that write to the volume know and nobody else does.
    #[arg(long, value_name = "FILE")]
    pub(crate) join_secret: Option<PathBuf>,
    /// Where to serve the tree: an address, a port behind `:`, or both [default: port 7401 of all addresses].
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) join_listen: Option<String>,
    /// Where mounts reach it, where that is not what this host sees [default: this host's address].
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) join_address: Option<String>,
    /// While another process holds the volume, wait until it does not, and serve then.
    #[arg(long)]
    pub(crate) standby: bool,
    /// Take the volume over from a process that holds it; that one can write nothing any more.
    #[arg(long, conflicts_with = "standby")]
    pub(crate) take_over: bool,
    /// Directory for control sockets and local trees.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Serves until told to end.
pub(crate) fn run(global: &Global, arguments: &MetaArguments) -> Result<ExitCode> {
    let settings = Settings::load(global)?;
    crate::log::start(global.log.as_deref().or(settings.log.as_deref()), global.json)?;
    let volume = volume_settings(arguments, &settings)?;
    let url: BucketUrl = arguments.source.parse()?;
    places::keep_out_of_bucket(&volume, &url)?;
    run::block_on(serve(&arguments.source, volume, arguments.standby))?;
    Ok(ExitCode::SUCCESS)
}

fn volume_settings(arguments: &MetaArguments, settings: &Settings) -> Result<VolumeSettings> {
    let mut volume = settings.volume.clone();
    volume.state_directory = mounts::state_directory(arguments.state_dir.as_deref(), settings);
    // It reads few blocks, and what it reads is for itself.
    volume.cache.directory = None;
    volume.cache.peers = Default::default();
    volume.writeback.enabled = false;
    (volume.read_only, volume.dataset, volume.join.only) = (false, false, false);
    volume.take_over = arguments.take_over;
    if let Some(secret) = &arguments.join_secret {
        volume.join.secret = Some(std::path::absolute(secret)?);
    }
    let told = |given: &Option<String>, set: Option<String>| given.clone().or(set);
    volume.join.listen = told(&arguments.join_listen, volume.join.listen.take());
    volume.join.address = told(&arguments.join_address, volume.join.address.take());
    match volume.join.is_on() {
        true => Ok(volume),
        false => Err(Error::invalid("a tree is served to those who know a secret, and none is given")
            .with_hint(
                "give --join-secret, or `secret` of [volume.join] in the settings; mounts take the same",
            )),
    }
}

async fn serve(source: &str, settings: VolumeSettings, standby: bool) -> Result<()> {
    let mut signals = Signals::new()?;
    let volume = tokio::select! {
        held = forebay_volume::hold(source, settings.clone(), standby) => held?,
        _ = signals.next() => return Ok(()),
    };
    let tasks = TaskGroup::new("meta");
    let identity = Identity { source: source.to_owned(), mount_point: NOWHERE.to_owned() };
    let socket = mounts::serve(&settings.state_directory, &volume, identity, &tasks).await;
    tell_supervisor(NotifyState::Ready);
    let ended = tokio::select! {
        name = signals.next() => {
            info!(signal = name, "ending: mounts that joined wait for who holds the volume next");
            Ok(())
        }
        () = volume.lost() => Err(Error::new(ErrorKind::Conflict, "another process took this volume over")),
    };
    tasks.shutdown(CONTROL_DEADLINE).await;
    drop(socket);
    let closed = volume.close().await;
    match ended {
        Ok(()) => closed.map_err(|error| error.context("not everything could be written to the bucket")),
        Err(lost) => {
            closed.unwrap_or_else(|error| warn!(%error, "closing the volume"));
            Err(lost)
        }
    }
}
