//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::commands::ckpt::CkptCommand;
use crate::commands::clone::CloneArguments;
use crate::commands::doctor::DoctorArguments;
use crate::commands::fsck::FsckArguments;
use crate::commands::gc::GcArguments;
use crate::commands::meta::MetaArguments;
use crate::commands::mount::MountArguments;
use crate::commands::quota::QuotaCommand;
use crate::commands::refresh::RefreshArguments;
use crate::commands::status::StatusArguments;
use crate::commands::sync::SyncArguments;
use crate::commands::trash::TrashCommand;
use crate::commands::volume::VolumeCommand;
use crate::commands::warmup::WarmupArguments;

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
    /// Configuration file [default: $XDG_CONFIG_HOME/forebay/forebay.toml if there, else /etc/forebay/forebay.toml].
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Read a bucket that anybody may read, without credentials.
    #[arg(long, global = true)]
    pub(crate) anonymous: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Mount a bucket as a directory.
    Mount(Box<MountArguments>),
    /// Hold a volume and serve its tree to mounts of other hosts that write to it.
    Meta(MetaArguments),
    /// Bring files into a cache before they are read, and prove that they are there.
    Warmup(WarmupArguments),
    /// Show how mounts are doing.
    Status(StatusArguments),
    /// List a directory of the bucket again.
    Refresh(RefreshArguments),
    /// Wait until everything that was written through a mount is in the bucket.
    Sync(SyncArguments),
    /// Free what crashed mounts left in a bucket.
    Gc(GcArguments),
    /// Check a volume against its bucket, and mend it.
    Fsck(FsckArguments),
    /// Back a volume's tree up, and bring it back.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Copy a file or a tree of a mount without moving a byte.
    Clone(CloneArguments),
    /// Bring deleted files back.
    #[command(subcommand)]
    Trash(TrashCommand),
    /// Limit what may lie below a directory, or in the volume.
    #[command(subcommand)]
    Quota(QuotaCommand),
    /// Check this host, and a bucket, for all that Forebay needs.
    Doctor(DoctorArguments),
    /// Look at checkpoints, keep, convert and delete them.
    #[command(subcommand)]
    Ckpt(CkptCommand),
    /// Show the version of this program and of the formats that it writes.
    Version,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_definition_holds_together() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_takes_its_arguments() {
        for line in [
            "forebay mount s3://b /mnt --json",
            "forebay meta s3://b/p --join-secret /k --join-listen :9 --join-address h:9 --standby",
            "forebay warmup /mnt/train --list - --pin --jobs 8",
            "forebay warmup s3://b/p --cache-dir /c --cache-size 1GiB --dry-run --json",
            "forebay status",
            "forebay status /mnt --state-dir /s",
            "forebay refresh /mnt/a",
            "forebay sync /mnt --json",
            "forebay gc s3://b/p --dry-run --json",
            "forebay fsck file:///b --repair --json",
            "forebay fsck file:///b --repair --accept-loss",
            "forebay volume dump s3://b/p tree.dump",
            "forebay volume load - s3://b/p --force --of-another-volume",
            "forebay volume load tree.dump s3://b/p --moved --json",
            "forebay volume adopt s3://b/p --json",
            "forebay clone /mnt/a /mnt/b",
            "forebay quota set /mnt/a --bytes 10TiB --inodes none",
            "forebay quota get /mnt/a --json",
            "forebay quota ls /mnt",
            "forebay trash ls /mnt --json",
            "forebay trash restore /mnt/a --id 1790000000000-42 --to /mnt/b",
            "forebay trash empty /mnt/a",
            "forebay doctor",
            "forebay doctor s3://b --read-only --json",
            "forebay ckpt ls s3://b/run",
            "forebay ckpt verify s3://b/run --step 500",
            "forebay ckpt show s3://b/run 500",
            "forebay ckpt show s3://b/run@500",
            "forebay ckpt diff s3://b/run@1 @2 --read",
            "forebay ckpt convert ./run@500 hf:/out --part model.net --max-shard-size 5GB --json",
            "forebay version",
            "forebay --anonymous warmup s3://b/p",
            "forebay mount s3://b /mnt --read-only --anonymous",
            "forebay ckpt ls s3://b/run --anonymous",
        ] {
            assert!(parse(line).is_ok(), "{line}: {:?}", parse(line).err());
        }
        for line in [
            "forebay",
            "forebay meta",
            "forebay warmup",
            "forebay warmup /mnt --jobs many",
            "forebay refresh",
            "forebay sync",
            "forebay gc",
            "forebay volume dump s3://b/p",
            "forebay clone /mnt/a",
            "forebay quota set /mnt/a",
            "forebay trash",
            "forebay trash restore",
            "forebay ckpt",
            "forebay ckpt show",
            "forebay ckpt show s3://b/run last",
            "forebay ckpt verify s3://b/run --step last",
            "forebay version now",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
