//! `forebay ckpt diff` and `watch`: what changes from step to step, and when there is a new one.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use forebay_ckpt::catalog::{StepInfo, StepName, Watch, list_steps};
use forebay_ckpt::diff::{Change, Diff, ExtraChange, Side, TensorChange, diff, settle};
use forebay_ckpt::manifest::Manifest;
use forebay_core::units::format_bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::object::Bucket;
use forebay_io::task;
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::ckpt::{bar, manifest, none_in, open, split, url_of, whole};
use crate::settings::Settings;
use crate::{print, report};

/// The arguments of `forebay ckpt diff`.
#[derive(Debug, Args)]
pub(crate) struct DiffArguments {
    /// URL@STEP, or a URL for its newest step.
    pub(crate) before: String,
    /// The same, or @STEP, or STEP, for another step of the first URL.
    pub(crate) after: String,
    /// Read the tensors that are sliced otherwise, which the manifests do not tell apart.
    #[arg(long)]
    pub(crate) read: bool,
}

/// The arguments of `forebay ckpt watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArguments {
    /// The URL, or the directory, that is saved to.
    pub(crate) url: String,
    /// End after the first time that new steps were found.
    #[arg(long)]
    pub(crate) once: bool,
    /// Fail once no step was committed for so long.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
    /// Tell steps above this one even if they are there already.
    #[arg(long, value_name = "STEP")]
    pub(crate) after: Option<u64>,
    /// Seconds between two looks at the bucket.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) interval: u64,
}

impl DiffArguments {
    /// URLs and steps of both sides.
    pub(crate) fn sides(&self) -> Result<[(&str, Option<StepName>); 2]> {
        let before = split(&self.before)?;
        if let Ok(step) = self.after.parse() {
            return Ok([before, (before.0, Some(step))]);
        }
        let (url, step) = split(&self.after)?;
        Ok([before, (if url.is_empty() { before.0 } else { url }, step)])
    }
}

/// Tells what the second step holds differently.
pub(crate) async fn compare(
    sides: [(&Bucket, Option<StepName>); 2],
    read: bool,
    json: bool,
) -> Result<ExitCode> {
    let (before, after) = (manifest(sides[0]).await?, manifest(sides[1]).await?);
    let mut found = diff(&before, &after);
    if read {
        found = read_unknown([(sides[0].0, &before), (sides[1].0, &after)], found).await?;
    }
    let steps = [&before, &after].map(|manifest| manifest.step);
    match json {
        true => print::json(&as_json(steps, &found))?,
        false => as_tables(steps, &found),
    }
    Ok(ExitCode::SUCCESS)
}

async fn read_unknown(sides: [(&Bucket, &Manifest); 2], mut found: Diff) -> Result<Diff> {
    let [(one, before), (two, after)] = sides.map(|(bucket, manifest)| (bucket.clone(), manifest.clone()));
    let (runtime, bar) = (Handle::current(), bar("compared"));
    let progress = bar.clone();
    let settled = task::blocking(move || {
        let sides = [(&one, &before), (&two, &after)];
        settle(&runtime, &mut found, sides, &|bytes| progress.inc(bytes)).map(|()| found)
    });
    let settled = settled.await?;
    bar.finish_and_clear();
    settled
}

fn as_json(steps: [u64; 2], found: &Diff) -> Value {
    let equal = found.tensors.is_empty() && found.extras.is_empty();
    json!({
        "before": steps[0],
        "after": steps[1],
        "equal": equal,
        "tensors": found.tensors,
        "extras": found.extras,
        "same": found.same,
        "same_bytes": found.same_bytes,
    })
}

fn as_tables(steps: [u64; 2], found: &Diff) {
    let bytes = |side: &Option<Side>| side.as_ref().map_or(0, |side| side.bytes);
    let summary = |name: &str, change: Change| {
        let changes = || found.tensors.iter().filter(move |tensor| tensor.change == change);
        let total = changes().map(|tensor| bytes(&tensor.before).max(bytes(&tensor.after))).sum();
        print::row([name, &changes().count().to_string(), &format_bytes(total)])
    };
    print::table(&[
        print::row([&format!("step {} to {}", steps[0], steps[1]), "TENSORS", "SIZE"]),
        summary("added", Change::Added),
        summary("removed", Change::Removed),
        summary("of another type or shape", Change::Reshaped),
        summary("changed", Change::Changed),
        summary("sliced otherwise, not read", Change::Unknown),
        print::row(["same", &found.same.to_string(), &format_bytes(found.same_bytes)]),
        Vec::new(),
    ]);
    let what = |side: &Option<Side>| match side {
        Some(Side { dtype, shape, bytes }) => format!("{dtype} {shape:?}, {}", format_bytes(*bytes)),
        None => "-".to_owned(),
    };
    let mut rows = Vec::new();
    for TensorChange { name, change, before, after } in &found.tensors {
        let after = if before == after { String::new() } else { what(after) };
        rows.push(print::row([word(*change), name, &what(before), &after]));
    }
    for ExtraChange { name, change } in &found.extras {
        rows.push(print::row([word(*change), name, "extra", ""]));
    }
    print::table(&rows);
}

fn word(change: Change) -> &'static str {
    match change {
        Change::Added => "added",
        Change::Removed => "removed",
        Change::Reshaped => "reshaped",
        Change::Changed => "changed",
        Change::Unknown => "unknown",
    }
}

/// Prints each step as it is committed.
pub(crate) async fn watch(settings: &Settings, arguments: &WatchArguments, json: bool) -> Result<ExitCode> {
    let (clock, patience) = (Clock::system(), arguments.timeout.map(Duration::from_secs));
    let interval = Duration::from_secs(arguments.interval);
    let warn_of_none =
        || report::warning(&format!("{}: the first is waited for", none_in(&arguments.url)), json);
    let Some((bucket, is_new)) = open_once_there(settings, arguments, &clock, warn_of_none).await? else {
        return Err(no_step(arguments));
    };
    if !is_new && list_steps(&bucket).await?.is_empty() {
        warn_of_none();
    }
    let mut watch = match is_new {
        true => Watch::of_new(clock, interval),
        false => Watch::begin(&bucket, clock, interval, arguments.after).await?,
    };
    let mut is_away = false;
    loop {
        let trouble = |error: &Error| {
            if !is_away {
                report::warning(&format!("{error}; looking on"), json);
            }
            is_away = true;
        };
        let steps = watch.next(&bucket, patience, trouble).await?;
        if steps.is_empty() && patience.is_some() {
            return Err(no_step(arguments));
        }
        is_away = false;
        for step in &steps {
            tell(step, json)?;
        }
        if arguments.once || !print::is_read() {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Opens what is watched, and says whether it was not there at first: the directory that the first save will make is waited
/// for, and warned of once. Nothing where it was not made in time.
async fn open_once_there(
    settings: &Settings,
    arguments: &WatchArguments,
    clock: &Clock,
    warn_of_none: impl Fn(),
) -> Result<Option<(Bucket, bool)>> {
    let start = clock.now();
    let url = whole(&arguments.url)?;
    let can_come = url_of(url)?.directory().is_some();
    let mut is_new = false;
    loop {
        match open(url, settings).await {
            Err(error) if can_come && error.kind() == ErrorKind::NotFound => {
                if !is_new {
                    warn_of_none();
                }
                is_new = true;
            }
            opened => return opened.map(|bucket| Some((bucket, is_new))),
        }
        if arguments.timeout.is_some_and(|seconds| clock.now().since(start).as_secs() >= seconds) {
            return Ok(None);
        }
        clock.sleep(Duration::from_secs(arguments.interval)).await;
    }
}

fn no_step(arguments: &WatchArguments) -> Error {
    let WatchArguments { url, timeout, .. } = arguments;
    let message = format!("no step was committed to {url} for {} s", timeout.unwrap_or_default());
    Error::new(ErrorKind::NotFound, message).with_hint("wait longer: --timeout")
}

fn tell(info: &StepInfo, json: bool) -> Result<()> {
    let committed = print::utc(info.committed);
    if json {
        return print::json(&json!({
            "step": info.key.step,
            "incarnation": info.key.incarnation,
            "committed": committed,
            "manifest": info.key.object().as_str(),
        }));
    }
    print::table(&[print::row([&info.key.step.to_string(), &committed])]);
    Ok(())
}
