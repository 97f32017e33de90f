//! `forebay version`: this program, and the formats that it writes.

use std::process::ExitCode;

use forebay_ckpt::manifest::Manifest;
use forebay_core::Result;
use forebay_metadata::schema;
use forebay_metadata::volume_file::VolumeRecord;
use serde::Serialize;

use crate::arguments::Global;
use crate::print;

/// What is printed.
#[derive(Debug, Serialize)]
struct Version {
    version: &'static str,
    /// The commit, where the build was told it.
    commit: Option<&'static str>,
    volume_format: u32,
    tree_format: u8,
    checkpoint_format: &'static str,
}

/// Prints it.
pub(crate) fn run(global: &Global) -> Result<ExitCode> {
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("FOREBAY_COMMIT"),
        volume_format: VolumeRecord::FORMAT,
        tree_format: schema::FORMAT,
        checkpoint_format: Manifest::VERSION,
    };
    if global.json {
        print::json(&version)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![print::row(["forebay", version.version])];
    rows.extend(version.commit.map(|commit| print::row(["commit", commit])));
    rows.push(print::row(["volume format", &version.volume_format.to_string()]));
    rows.push(print::row(["tree format", &version.tree_format.to_string()]));
    rows.push(print::row(["checkpoint format", version.checkpoint_format]));
    print::table(&rows);
    Ok(ExitCode::SUCCESS)
}
