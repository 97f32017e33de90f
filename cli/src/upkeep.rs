//! Work on a volume as a whole, done by whoever has it open: the mount of this host that writes to it, or this process.

use std::path::Path;
use std::sync::Arc;

use forebay_core::{Error, Result};
use forebay_io::object::BucketUrl;
use forebay_io::task::Stop;
use forebay_volume::control::{self, Reply, Request as Asked};
use forebay_volume::upkeep::{Report, Request, upkeep};
use forebay_volume::{Volume, VolumeSettings};

use crate::mounts::{self, Mount, State};
use crate::settings::Settings;

/// Where a volume is open.
pub(crate) enum Open {
    /// By a mount of this host, behind its control socket.
    ByMount(std::path::PathBuf),
    /// By this process. To be closed.
    Here(Arc<Volume>),
}

/// Finds the mount of `source` that writes, or opens the volume.
///
/// # Errors
/// `Conflict`, naming the holder, when another host writes to it.
pub(crate) async fn open(source: &str, state: Option<&Path>, settings: &Settings) -> Result<Open> {
    let url: BucketUrl = source.parse()?;
    let state = mounts::state_directory(state, settings);
    for Mount { socket, state } in mounts::all(&state).await? {
        let State::Serving(status) = state else { continue };
        if !status.read_only && status.source.parse().is_ok_and(|mounted: BucketUrl| mounted == url) {
            return Ok(Open::ByMount(socket));
        }
    }
    let mut volume = VolumeSettings { state_directory: state, ..settings.volume.clone() };
    // This process reads no file: nothing is cached, and nothing is looked for behind its back.
    volume.cache.directory = None;
    volume.gc.interval_ms = 0;
    forebay_volume::connect(source, volume).await.map(Open::Here)
}

/// Has `request` carried out.
pub(crate) async fn perform(open: Open, request: &Request) -> Result<Report> {
    match open {
        Open::ByMount(socket) => {
            let asked = Asked::Upkeep(request.clone());
            match control::ask(&socket, &asked, |_| {}, &Stop::new()).await? {
                Reply::Upkept(report) => Ok(*report),
                _ => Err(Error::corrupt("the mount answers something else")),
            }
        }
        Open::Here(volume) => {
            let report = upkeep(&volume, request).await;
            let closed = volume.close().await;
            report.and_then(|report| closed.map(|()| report))
        }
    }
}
