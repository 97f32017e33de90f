//! `forebay fsck SOURCE`: check a volume against its bucket, and mend it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_core::units::format_bytes;
use forebay_core::{Error, Result};
use forebay_volume::upkeep::{Report, Request};

use crate::arguments::Global;
use crate::settings::Settings;
use crate::{print, run, upkeep};

/// The arguments of `forebay fsck`.
#[derive(Debug, Args)]
pub(crate) struct FsckArguments {
    /// The URL of the bucket, as it is mounted.
    pub(crate) source: String,
    /// Mend what can be mended; what nothing leads to comes to /lost+found, and so does a file whose bytes are gone from
    /// the bucket, with zeros for them: bring objects back before that. The volume must not be mounted.
    #[arg(long)]
    pub(crate) repair: bool,
    /// With --repair: give up all that the store says is missing, also where a tenth of all objects are, or none is seen
    /// where they were. Make sure that all of the bucket is there, and that it is the right one.
    #[arg(long, requires = "repair")]
    pub(crate) accept_loss: bool,
    /// The state directory that it is mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// The exit code of a repair after which nothing is wrong any more, but that gave bytes up.
const LOST_BYTES: u8 = 3;

/// Checks and shows what is wrong. The exit code is 0 when nothing is, or nothing any more; 3 when bytes were given up for
/// that.
pub(crate) fn run(global: &Global, arguments: &FsckArguments) -> Result<ExitCode> {
    let settings = Settings::load(global)?;
    let (source, state) = (&arguments.source, arguments.state_dir.as_deref());
    let request = Request::Fsck { repair: arguments.repair, accept_loss: arguments.accept_loss };
    let report = run::block_on(upkeep::perform(source, state, &settings, &request))?;
    let Report::Fsck(report) = report else {
        return Err(Error::corrupt("fsck was answered with something else"));
    };
    match global.json {
        true => print::json(&report)?,
        false => {
            let mut rows: Vec<Vec<String>> = report
                .findings
                .iter()
                .map(|found| {
                    let state = if found.mended { "mended" } else { "wrong" };
                    print::row([state, &found.kind, &found.subject, &found.detail])
                })
                .collect();
            let counts = format!(
                "{} inodes, {} entries, {} objects; {} objects changed outside",
                report.inodes, report.entries, report.objects, report.changed_outside
            );
            if report.lost > 0 {
                let lost = format!("{} files lost bytes and are in /lost+found", report.lost);
                rows.push(print::row(["lost", &lost]));
            }
            if report.foreign > 0 {
                rows.push(print::row(["left", &foreign(report.foreign, report.foreign_bytes)]));
            }
            rows.push(print::row([if report.is_clean() { "clean" } else { "damaged" }, &counts]));
            print::table(&rows);
        }
    }
    if report.is_clean() {
        return Ok(if report.lost > 0 { ExitCode::from(LOST_BYTES) } else { ExitCode::SUCCESS });
    }
    let wrong = report.findings.iter().filter(|found| !found.mended).count() as u64 + report.further;
    let refused = report.refused.as_ref().map(|why| {
        format!("bytes that are missing were not given up: {why} With --accept-loss they are, for good")
    });
    let hint = match (arguments.repair, &refused) {
        (true, Some(refused)) => refused,
        (true, None) => {
            "what cannot be mended is left as it is: restore files that lack bytes from a backup, and of what lies \
             below .forebay/ remove only leaked blobs that are told to have no name of Forebay's and are nobody's"
        }
        (false, _) => {
            "run `forebay fsck --repair` while it is not mounted, which gives up bytes that are gone; `forebay gc` frees \
             what leaked. In a copy of a bucket all objects are of other versions until `forebay volume adopt`"
        }
    };
    Err(Error::corrupt(format!("{wrong} things are wrong with {}", arguments.source)).with_hint(hint))
}

/// What the blobs may be that are no damage and that nobody here put.
fn foreign(blobs: u64, bytes: u64) -> String {
    format!(
        "{blobs} blobs of another tree ({}), which nothing frees: where the tree was lost, load its dump \
         (`forebay volume load`); an earlier version of Forebay may have left them, too",
        format_bytes(bytes)
    )
}
