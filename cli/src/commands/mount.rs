//! `forebay mount SOURCE DIRECTORY`.
//!
//! By default the command starts a process that serves the mount, waits until it serves or has failed, and ends; with
//! `--foreground` it serves by itself. Plain `umount` ends either.

mod options;
mod background;
mod serve;
mod signals;
mod helper;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_core::Result;
use sd_notify::NotifyState;

use crate::arguments::Global;
use crate::settings::Settings;

pub(crate) use helper::{helper_arguments, is_helper};
use options::Plan;
pub(crate) use serve::CONTROL_DEADLINE;
pub(crate) use signals::Signals;

/// The arguments of `forebay mount`.
#[derive(Debug, Args)]
pub(crate) struct MountArguments {
    /// The bucket: s3://bucket/prefix, gs://, az:// or file:///directory.
    pub(crate) source: String,
    /// The directory to mount on, or /dev/fd/N for a FUSE device that is mounted already.
    pub(crate) directory: PathBuf,
    /// Options as mount(8) takes them, separated by commas: long options below that shape the mount, with `_` for `-`, and ro,
    /// rw, dev, suid, noexec, noatime, fsname=NAME, plain_type, threads=N, log=LEVEL. Times of access are kept with relatime
    /// or not at all.
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub(crate) options: Vec<String>,
    /// Serve in this process and log to stderr.
    #[arg(short, long)]
    pub(crate) foreground: bool,
    /// Refuse changes and write nothing to the bucket.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Read-only, and the content is taken as fixed: the kernel keeps names, attributes and pages.
    #[arg(long)]
    pub(crate) dataset: bool,
    /// Let other users look in.
    #[arg(long)]
    pub(crate) allow_other: bool,
    /// Directory on a fast local disk for cached data.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) cache_dir: Option<String>,
    /// How much the cache directory may hold, such as 500GiB.
    #[arg(long, value_name = "SIZE")]
    pub(crate) cache_size: Option<String>,
    /// Hosts that share the blocks that they have cached, this one among them: names or addresses, separated by commas
    /// (`;` within -o), with :PORT where it is another than 7400. A name stands for all of its addresses.
    #[arg(long, value_name = "HOSTS")]
    pub(crate) peers: Option<String>,
    /// A file with what all of these hosts know and nobody else does.
    #[arg(long, value_name = "FILE")]
    pub(crate) peer_secret: Option<String>,
    /// Where this host listens for the others: an address, a port behind `:`, or both; else port 7400 of all addresses.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) peer_listen: Option<String>,
    /// Keep what other hosts send on this one's disk, too, rather than its own share alone.
    #[arg(long)]
    pub(crate) peer_keep: bool,
    /// What carries blocks from host to host: tcp, or quic for long or lossy links.
    #[arg(long, value_name = "TRANSPORT")]
    pub(crate) peer_transport: Option<String>,
    /// A file with what all hosts that write to the volume know and nobody else does: the mount that holds the volume serves its
    /// tree to the others, which join.
    #[arg(long, value_name = "FILE")]
    pub(crate) join_secret: Option<String>,
    /// Where to serve the tree while this mount holds the volume: an address, a port behind `:`, or both; else port 7401 of all
    /// addresses.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) join_listen: Option<String>,
    /// Where other hosts reach it then, where that is not what this host sees.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) join_address: Option<String>,
    /// Never hold the volume: wait for a process that does, such as `forebay meta`.
    #[arg(long)]
    pub(crate) join_only: bool,
    /// The ceiling for all memory that holds file data, such as 512MiB.
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// Keep track of when files are read: once after each change, and once a day.
    #[arg(long)]
    pub(crate) relatime: bool,
    /// Keep what is deleted for so long, such as 7d: `forebay trash` brings it back.
    #[arg(long, value_name = "TIME")]
    pub(crate) trash: Option<String>,
    /// Stage what is written below the state directory and upload it behind: closing and syncing files wait for no
    /// upload, and other hosts see them later.
    #[arg(long)]
    pub(crate) writeback: bool,
    /// How much may be staged, such as 50GiB; past it, writes wait for the store.
    #[arg(long, value_name = "SIZE")]
    pub(crate) writeback_size: Option<String>,
    /// Storage class of what is written, such as STANDARD_IA or INTELLIGENT_TIERING; on Azure an access tier, such as Cool.
    #[arg(long, value_name = "CLASS")]
    pub(crate) storage_class: Option<String>,
    /// Directory for logs, control sockets, local trees and staged bytes.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<String>,
    /// Take the bucket over from a mount that holds it; that one can write nothing any more.
    #[arg(long)]
    pub(crate) take_over: bool,
    /// Owner of files found in the bucket, until somebody changes it; else who mounts.
    #[arg(long, value_name = "UID")]
    pub(crate) uid: Option<String>,
    /// Group of files found in the bucket, until somebody changes it; else that of who mounts.
    #[arg(long, value_name = "GID")]
    pub(crate) gid: Option<String>,
    /// Permissions of files found in the bucket, until somebody changes them; octal.
    #[arg(long, value_name = "MODE")]
    pub(crate) file_mode: Option<String>,
    /// Permissions of directories found in the bucket, until somebody changes them; octal.
    #[arg(long, value_name = "MODE")]
    pub(crate) dir_mode: Option<String>,
    /// How long the kernel may use names and attributes, in seconds.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) ttl: Option<String>,
    /// Serve for a command that waits for the outcome on stdout.
    #[arg(long, hide = true)]
    pub(crate) in_background: bool,
}

/// Mounts.
pub(crate) fn run(global: &Global, arguments: &MountArguments) -> Result<ExitCode> {
    if arguments.in_background {
        return background::serve(global, arguments);
    }
    let settings = Settings::load(global)?;
    let plan = Plan::new(arguments, &settings)?;
    plan.target.check_device()?;
    if arguments.foreground {
        crate::log::start(global.log.as_deref().or(plan.log.as_deref()), global.json)?;
        return serve::serve(plan, |_| {
            tell_supervisor(NotifyState::Ready);
            Ok(())
        });
    }
    background::start(&plan, global.json)
}

/// Tells systemd, where it started this process and asked to be told (`Type=notify`).
pub(crate) fn tell_supervisor(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        tracing::warn!(%error, "the supervisor could not be told how the mount is doing");
    }
}
