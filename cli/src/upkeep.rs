//! Work on a volume as a whole, done by whoever has it open: the mount of this host that writes to it, or this process.

use std::path::{Path, PathBuf};

use forebay_core::{Error, Result};
use forebay_io::object::BucketUrl;
use forebay_io::task::Stop;
use forebay_volume::VolumeSettings;
use forebay_volume::control::{self, Reply, Request as Asked};
use forebay_volume::upkeep::{Report, Request, upkeep};

use crate::mounts::{self, Mount, State};
use crate::places;
use crate::settings::Settings;

/// Where a volume is open on this host.
pub(crate) enum Place {
    /// In a mount, behind its control socket.
    Mount(PathBuf),
    /// Nowhere. It can be opened with these settings.
    Nowhere(Box<VolumeSettings>),
}

/// Finds the mount of `source` that writes.
pub(crate) async fn find(source: &str, state: Option<&Path>, settings: &Settings) -> Result<Place> {
    let url: BucketUrl = source.parse()?;
    let state_directory = mounts::state_directory(state, settings);
    for Mount { socket, state } in mounts::all(&state_directory).await? {
        let State::Serving(status) = state else { continue };
        if !status.read_only && status.source.parse().is_ok_and(|mounted: BucketUrl| mounted == url) {
            return Ok(Place::Mount(socket));
        }
    }
    let mut volume = VolumeSettings { state_directory, ..settings.volume.clone() };
    // This process reads no file: nothing is cached, and nothing is looked for behind its back.
    volume.cache.directory = None;
    volume.cache.peers = Default::default();
    volume.join = Default::default();
    volume.gc.interval_ms = 0;
    places::keep_out_of_bucket(&volume, &url)?;
    Ok(Place::Nowhere(Box::new(volume)))
}

/// Has `request` carried out, by the mount of `source` or here.
///
/// # Errors
/// `Conflict`, naming the holder, when another host writes to the volume; `NotFound` where there is none.
pub(crate) async fn perform(
    source: &str,
    state: Option<&Path>,
    settings: &Settings,
    request: &Request,
) -> Result<Report> {
    let volume = match find(source, state, settings).await? {
        Place::Mount(socket) => return ask(&socket, request).await,
        Place::Nowhere(volume) => {
            forebay_volume::connect(source, VolumeSettings { must_exist: true, ..*volume }).await?
        }
    };
    let report = upkeep(&volume, request).await;
    let closed = volume.close().await;
    report.and_then(|report| closed.map(|()| report))
}

/// Has `request` carried out by the mount behind `socket`.
pub(crate) async fn ask(socket: &Path, request: &Request) -> Result<Report> {
    match control::ask(socket, &Asked::Upkeep(request.clone()), |_| {}, &Stop::new()).await? {
        Reply::Upkept(report) => Ok(*report),
        _ => Err(Error::corrupt("the mount answers something else")),
    }
}
