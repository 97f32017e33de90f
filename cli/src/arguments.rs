//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::commands::mount::MountArguments;

/// Holds checkpoints and datasets just above the GPUs: object storage as fast, safe files.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, propagate_version = true, disable_help_subcommand = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command takes.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Print results and errors as JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// What to log: error, warn, info, debug, trace, or per module as in `info,forebay_fuse=debug`.
    #[arg(long, global = true, value_name = "LEVEL")]
    pub(crate) log: Option<String>,
    /// Configuration file [default: /etc/forebay/forebay.toml].
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Mount a bucket as a directory.
    Mount(MountArguments),
}
