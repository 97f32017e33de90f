//! `forebay status [PATH]`: how the mounts of this host are doing.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_cache::Counters;
use forebay_core::Result;
use forebay_core::units::format_bytes;
use forebay_fuse::OwnMount;
use forebay_volume::Sharing;
use forebay_volume::control::{Follows, Status};
use forebay_volume::staging::{self, Left, Staged};
use serde_json::{Value, json};

use crate::arguments::Global;
use crate::mounts::{self, Mount, State};
use crate::settings::Settings;
use crate::{print, report, run};

/// The arguments of `forebay status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    /// A path in a mount; every mount if none is given.
    pub(crate) path: Option<PathBuf>,
    /// The state directory that was mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

const HEAD: [&str; 13] = [
    "MOUNT POINT",
    "SOURCE",
    "STATE",
    "PID",
    "OPEN",
    "DIRTY",
    "STAGED",
    "MEMORY",
    "DISK",
    "PINNED",
    "GETS",
    "FETCHED",
    "PEERS",
];

/// Asks the mounts and shows them, those whose processes died, and what dead ones left staged. Sockets that dead processes
/// left are removed.
pub(crate) fn run(global: &Global, arguments: &StatusArguments) -> Result<ExitCode> {
    let state = mounts::state_directory(arguments.state_dir.as_deref(), &Settings::load(global)?);
    let (mut found, dead, left) = run::block_on(async {
        let Some(path) = &arguments.path else {
            let found = mounts::all(&state).await?;
            let dead = mounts::dead(&found).await?;
            return Ok((found, dead, staging::left(&state).await?));
        };
        let place = mounts::holding(path, &state).await?;
        let mount = Mount { socket: place.socket, state: State::Serving(Box::new(place.status)) };
        Ok((vec![mount], Vec::new(), Vec::new()))
    })?;
    // They tell nothing of what was mounted where, nor whether it still is: the kernel does.
    for mount in found.extract_if(.., |mount| matches!(mount.state, State::Dead)) {
        // Another look may have removed it at the same moment.
        let _ = std::fs::remove_file(&mount.socket);
    }
    match global.json {
        true => {
            let gone = dead.iter().map(|mount| Ok(dead_as_json(mount)));
            let all = found.iter().map(as_json).chain(gone).chain(left.iter().map(left_as_json));
            print::json(&json!({ "mounts": all.collect::<Result<Vec<_>>>()? }))?;
        }
        false => {
            for mount in &found {
                warn_of_staged(mount);
                warn_of_unsealed(mount);
                warn_of_lag(mount);
                warn_of_no_server(mount);
            }
            dead.iter().for_each(warn_of_dead);
            left.iter().for_each(warn_of_left);
            let rows = std::iter::once(print::row(HEAD)).chain(found.iter().map(as_row));
            let rows = rows.chain(dead.iter().map(dead_as_row));
            print::table(&rows.chain(left.iter().map(left_as_row)).collect::<Vec<_>>());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Says why staged bytes stay where they are.
fn warn_of_staged(mount: &Mount) {
    let State::Serving(status) = &mount.state else { return };
    let Staged { damaged, last_error, .. } = &status.staged;
    let at = &status.mount_point;
    if let Some(error) = last_error {
        report::warning(&format!("{at}: staged bytes are not uploaded: {error}"), false);
    }
    if *damaged > 0 {
        report::warning(
            &format!("{at}: {damaged} staged blobs are damaged on the local disk, and lost"),
            false,
        );
    }
}

/// Says that other tools see none of some files, or older bytes.
fn warn_of_unsealed(mount: &Mount) {
    let State::Serving(status) = &mount.state else { return };
    let (at, files) = (&status.mount_point, status.unsealed_files);
    if files > 0 {
        let message = format!(
            "{at}: {files} closed files are no objects at their own paths, for reasons that the mount's log tells: other \
             tools find none there, or older ones"
        );
        report::warning(&message, false);
    }
}

/// Says that the tree of the mount for writing cannot be followed.
fn warn_of_lag(mount: &Mount) {
    let State::Serving(status) = &mount.state else { return };
    let Some(Follows { behind_ms, error: Some(error) }) = &status.follows else { return };
    let at = &status.mount_point;
    let age = match behind_ms {
        Some(behind_ms) => format!("names and attributes are {} s old", behind_ms / 1000),
        None => "objects alone are shown".to_owned(),
    };
    let message = format!("{at}: {age}, since the tree of the mount for writing cannot be read: {error}");
    report::warning(&message, false);
}

/// Says that nobody serves the tree that a mount joined.
fn warn_of_no_server(mount: &Mount) {
    let State::Serving(status) = &mount.state else { return };
    if let Some(Sharing::Joins { server: None, .. }) = status.sharing {
        let at = &status.mount_point;
        let message = format!(
            "{at}: nobody serves the tree of its volume: start `forebay meta`, or a mount with --join-secret, on a host that \
             this one reaches"
        );
        report::warning(&message, false);
    }
}

/// Says what is to be done about a mount whose process is gone.
fn warn_of_dead(mount: &OwnMount) {
    let message = format!("{}: its process died: {}", mount.directory.display(), mounts::MOUNT_AGAIN);
    report::warning(&message, false);
}

fn dead_as_json(mount: &OwnMount) -> Value {
    json!({ "state": "dead", "mount_point": mount.directory.to_string_lossy(), "source": mount.source })
}

fn dead_as_row(mount: &OwnMount) -> Vec<String> {
    print::row([&mount.directory.to_string_lossy(), &mount.source, "dead"])
}

/// Says what is to be done about what a mount left.
fn warn_of_left(left: &Left) {
    let Left { folder, source, blobs, bytes } = left;
    let source = source.as_deref().unwrap_or("the volume");
    let message = format!(
        "{}: {} in {blobs} blobs are staged and nobody uploads them: mount {source} with this state directory",
        folder.display(),
        format_bytes(*bytes)
    );
    report::warning(&message, false);
}

fn left_as_json(left: &Left) -> Result<Value> {
    let mut value =
        serde_json::to_value(left).map_err(|error| forebay_core::Error::bug(error.to_string()))?;
    value["state"] = "left".into();
    Ok(value)
}

fn left_as_row(left: &Left) -> Vec<String> {
    let source = left.source.as_deref().unwrap_or("-");
    let staged = format!("{} in {} blobs", format_bytes(left.bytes), left.blobs);
    print::row(["-", source, "left", "-", "-", "-", &staged])
}

/// The status with `state` and `socket` beside it.
fn as_json(mount: &Mount) -> Result<Value> {
    let (state, mut value) = match &mount.state {
        State::Serving(status) => {
            let value = serde_json::to_value(status);
            ("serving", value.map_err(|error| forebay_core::Error::bug(error.to_string()))?)
        }
        State::Silent(error) => ("silent", json!({ "error": error.to_string() })),
        State::Dead => ("dead", json!({})),
    };
    value["state"] = state.into();
    value["socket"] = mount.socket.to_string_lossy().into();
    Ok(value)
}

fn as_row(mount: &Mount) -> Vec<String> {
    let status = match &mount.state {
        State::Serving(status) => status,
        State::Silent(error) => return gone(mount, &format!("silent: {error}")),
        State::Dead => return gone(mount, "dead"),
    };
    let cache = &status.cache;
    vec![
        status.mount_point.clone(),
        status.source.clone(),
        state(status),
        status.pid.to_string(),
        status.open_files.to_string(),
        format_bytes(status.dirty_bytes),
        staged(&status.staged),
        format_bytes(cache.memory_bytes + cache.disk_index_bytes),
        format_bytes(cache.disk_bytes),
        format_bytes(cache.pinned_bytes),
        cache.origin_requests.to_string(),
        format_bytes(cache.origin_bytes),
        peers(cache),
    ]
}

fn state(status: &Status) -> String {
    match status {
        Status { is_ending: true, .. } => "uploading".to_owned(),
        Status { read_only: true, .. } => "read-only".to_owned(),
        Status { sharing: Some(Sharing::Serves { mounts }), .. } => {
            let here = mounts.iter().filter(|mount| mount.is_here).count();
            format!("read-write, serves {here}")
        }
        Status { sharing: Some(Sharing::Joins { server: Some(server), .. }), .. } => {
            format!("read-write by {server}")
        }
        Status { sharing: Some(Sharing::Joins { server: None, .. }), .. } => "waits for a tree".to_owned(),
        _ => "read-write".to_owned(),
    }
}

/// Which of the other hosts are there, and what came from them.
fn peers(cache: &Counters) -> String {
    match cache.peers {
        0 => "-".to_owned(),
        known => format!("{} of {known}, {}", cache.peers_here, format_bytes(cache.peer_bytes)),
    }
}

/// What waits for its upload, and for how long.
fn staged(staged: &Staged) -> String {
    match staged.oldest_seconds {
        None => "-".to_owned(),
        Some(seconds) => format!("{} in {} files, {seconds} s", format_bytes(staged.bytes), staged.files),
    }
}

fn gone(mount: &Mount, state: &str) -> Vec<String> {
    print::row(["-", &mount.socket.to_string_lossy(), state])
}
