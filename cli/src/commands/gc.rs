//! `forebay gc SOURCE`: free what crashed mounts left in a bucket.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_core::units::format_bytes;
use forebay_core::{Error, Result};
use forebay_volume::upkeep::{Report, Request};

use crate::arguments::Global;
use crate::settings::Settings;
use crate::{print, run, upkeep};

/// The arguments of `forebay gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArguments {
    /// The URL of the bucket, as it is mounted.
    pub(crate) source: String,
    /// Only say what would be freed.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// The state directory that it is mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

const HEAD: [&str; 3] = ["WHAT", "NUMBER", "BYTES"];

/// Has it done by the mount, if there is one on this host, and shows what was freed.
pub(crate) fn run(global: &Global, arguments: &GcArguments) -> Result<ExitCode> {
    let settings = Settings::load(global)?;
    let (source, state) = (&arguments.source, arguments.state_dir.as_deref());
    let request = Request::Gc { dry_run: arguments.dry_run };
    let report = run::block_on(upkeep::perform(source, state, &settings, &request))?;
    let Report::Gc(report) = report else {
        return Err(Error::corrupt("gc was answered with something else"));
    };
    if global.json {
        print::json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let freed = if report.dry_run { "to be freed" } else { "freed" };
    let row = |what: String, count: u64, bytes: u64| vec![what, count.to_string(), format_bytes(bytes)];
    let mut rows = vec![print::row(HEAD)];
    rows.push(row(format!("blobs {freed}"), report.blobs, report.blob_bytes));
    rows.push(row(format!("staged files {freed}"), report.leftovers, report.leftover_bytes));
    rows.push(vec![format!("uploads {freed}"), report.uploads.to_string(), "-".into()]);
    rows.push(vec![format!("deleted files {freed}"), report.trash.to_string(), "-".into()]);
    rows.push(vec!["deleted files in the trash".into(), report.trash_waiting.to_string(), "-".into()]);
    let compacted = if report.dry_run { "to be compacted" } else { "compacted" };
    rows.push(row(format!("segments {compacted}"), report.segments, report.segment_bytes));
    rows.push(row("blobs waiting for their time".into(), report.waiting, report.waiting_bytes));
    if report.foreign > 0 {
        rows.push(row("blobs of another tree, left".into(), report.foreign, report.foreign_bytes));
    }
    print::table(&rows);
    Ok(ExitCode::SUCCESS)
}
