//! `forebay doctor [SOURCE]`: checks this host and, with a source, its bucket, for all that Forebay needs.
//!
//! Every check ends in one line: fine, or what is wrong, what follows from it and what to do. The bucket is probed
//! as a read-write mount does it: with some 60 small objects below `.forebay/probe/`, which are removed again.

mod host;
mod bucket;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use forebay_core::units::parse_bytes;
use forebay_core::{Error, Result};
use serde::Serialize;

use crate::arguments::Global;
use crate::settings::Settings;
use crate::{mounts, print, run};

/// The arguments of `forebay doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// The bucket to be mounted.
    pub(crate) source: Option<String>,
    /// Write nothing to the bucket: what it honours is then not found out.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Directory for cached data.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// How much the cache directory may hold, such as 500GiB.
    #[arg(long, value_name = "SIZE")]
    pub(crate) cache_size: Option<String>,
    /// Directory for logs, control sockets and local trees.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Forebay works, with less.
    Warn,
    /// It does not work.
    Fail,
}

/// One check.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    /// What was found.
    fact: String,
    /// What to do, where something is wrong.
    hint: Option<String>,
}

impl Check {
    fn ok(name: &'static str, fact: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Ok, fact: fact.into(), hint: None }
    }

    fn warn(name: &'static str, fact: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Warn, fact: fact.into(), hint: Some(hint.into()) }
    }

    fn fail(name: &'static str, fact: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Fail, fact: fact.into(), hint: Some(hint.into()) }
    }

    /// A check that ended in an error.
    fn failed(name: &'static str, error: &Error) -> Self {
        Self { name, verdict: Verdict::Fail, fact: error.to_string(), hint: error.hint().map(str::to_owned) }
    }
}

/// Checks and shows.
pub(crate) fn run(global: &Global, arguments: &DoctorArguments) -> Result<ExitCode> {
    let settings = Settings::load(global)?;
    let mut cache = settings.volume.cache.clone();
    cache.directory = arguments.cache_dir.clone().or(cache.directory);
    if let Some(size) = &arguments.cache_size {
        cache.disk_bytes = Some(parse_bytes(size)?);
    }
    let state = mounts::state_directory(arguments.state_dir.as_deref(), &settings);
    let mut checks = host::checks(&state, cache.directory.as_deref(), cache.disk_ceiling());
    if let Some(source) = &arguments.source {
        let store = &settings.volume.store;
        checks.extend(run::block_on(async { Ok(bucket::checks(source, store, arguments.read_only).await) })?);
    }
    let sound = checks.iter().all(|check| check.verdict != Verdict::Fail);
    match global.json {
        true => print::json(&serde_json::json!({ "ok": sound, "checks": checks }))?,
        false => print::table(&checks.iter().flat_map(rows).collect::<Vec<_>>()),
    }
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn rows(check: &Check) -> Vec<Vec<String>> {
    let word = match check.verdict {
        Verdict::Ok => "ok",
        Verdict::Warn => "warn",
        Verdict::Fail => "FAIL",
    };
    let mut rows = vec![print::row([word, check.name, &check.fact])];
    rows.extend(check.hint.iter().map(|hint| print::row(["", "", &format!("hint: {hint}")])));
    rows
}
