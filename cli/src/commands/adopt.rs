//! `forebay volume adopt`: take a copy of a bucket for the same volume.
#![allow(clippy::print_stderr, reason = "what cannot be read goes there, beside the counts")]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_core::{Error, Result};
use forebay_volume::backup::{self, Adopted, Why};

use crate::arguments::Global;
use crate::settings::Settings;
use crate::upkeep::{self, Place};
use crate::{print, report, run};

/// The exit code where it was adopted and some files cannot be read.
const LACKING: u8 = 3;
/// Files named without `--json`.
const SHOWN: usize = 10;

/// The arguments of `forebay volume adopt`.
#[derive(Debug, Args)]
pub(crate) struct AdoptArguments {
    /// The URL of the copy, as it will be mounted.
    pub(crate) source: String,
    /// The state directory that it will be mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Adopts, and shows what came of it. The exit code is 3 when files need what is not there.
pub(crate) fn run(global: &Global, arguments: &AdoptArguments, settings: &Settings) -> Result<ExitCode> {
    let adopted = run::block_on(async {
        match upkeep::find(&arguments.source, arguments.state_dir.as_deref(), settings).await? {
            Place::Mount(_) => Err(Error::invalid("a bucket cannot be adopted while it is mounted")
                .with_hint("unmount it, then adopt it")),
            Place::Nowhere(volume) => backup::adopt(&arguments.source, &volume).await,
        }
    })?;
    match global.json {
        true => print::json(&adopted)?,
        false => print::table(&rows(&adopted)),
    }
    Ok(tell(&adopted, global.json))
}

/// The counts as a table.
pub(crate) fn rows(adopted: &Adopted) -> Vec<Vec<String>> {
    let count = |number: u64| number.to_string();
    vec![
        print::row(["objects", &count(adopted.objects)]),
        print::row(["of other versions", &count(adopted.changed)]),
        print::row(["not what files need", &count(adopted.lacking)]),
        print::row(["files that cannot be read", &count(adopted.files)]),
    ]
}

/// Names the first files that cannot be read, and gives the exit code.
pub(crate) fn tell(adopted: &Adopted, json: bool) -> ExitCode {
    if adopted.files == 0 {
        return ExitCode::SUCCESS;
    }
    if !json {
        for file in adopted.named.iter().take(SHOWN) {
            let why = match file.why {
                Why::Missing => "is missing",
                Why::NotUploaded => "was not uploaded by the host that wrote it",
                Why::OtherSize => "has another size",
                Why::Replaced => "was replaced before it was copied",
            };
            eprintln!("cannot be read: {}: {} {why}", file.path, file.key);
        }
        let more = adopted.files.saturating_sub(adopted.named.len().min(SHOWN) as u64);
        if more > 0 {
            eprintln!("and {more} more: --json lists the first 100");
        }
    }
    let text = format!(
        "{} files need objects that are not here as they were: copy those, and run `forebay volume adopt` again before it is \
         mounted",
        adopted.files
    );
    report::warning(&text, json);
    ExitCode::from(LACKING)
}
