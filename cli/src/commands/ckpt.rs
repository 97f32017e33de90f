//! `forebay ckpt`: what a bucket of checkpoints holds, and whether it is whole. What changes it is in `ckpt_keep`,
//! what compares and waits in `ckpt_compare`, what is on its way in `ckpt_ranks`, what converts in `ckpt_convert`, what
//! `show` prints in `ckpt_show`.

use std::collections::HashSet;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use forebay_ckpt::catalog::{StepInfo, StepKey, StepName, list_pins, list_steps, load_manifest};
use forebay_ckpt::manifest::Manifest;
use forebay_ckpt::{Finding, show, verify};
use forebay_core::units::format_bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::{Bucket, BucketUrl};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::ckpt_compare::{self, DiffArguments, WatchArguments};
use super::ckpt_convert::{self, ConvertArguments};
use super::ckpt_keep::{self, GcArguments, PinArguments, RmArguments};
use super::ckpt_ranks::{self, RanksArguments};
use super::ckpt_show::describe;
use crate::arguments::Global;
use crate::settings::Settings;
use crate::{print, report, run};

/// How a place is told from a step of one.
const SLASH: &str = "a place whose own name has an `@` takes a slash at its end";

/// What can be asked.
#[derive(Debug, Subcommand)]
pub(crate) enum CkptCommand {
    /// List the committed steps.
    Ls(LsArguments),
    /// Read every byte of a step, or of all, and compare it with what was saved.
    Verify(VerifyArguments),
    /// Show what a step holds.
    Show(ShowArguments),
    /// Tell what a step holds differently from another.
    Diff(DiffArguments),
    /// Bring a step to, or from, a Hugging Face directory or torch's own files.
    Convert(ConvertArguments),
    /// Print each step as it is committed.
    Watch(WatchArguments),
    /// Tell which ranks a step that is being saved waits for.
    Ranks(RanksArguments),
    /// Delete steps.
    Rm(RmArguments),
    /// Keep a step, whatever retention says.
    Pin(PinArguments),
    /// Leave a pinned step to retention again.
    Unpin(PinArguments),
    /// Delete what saves that died left behind.
    Gc(GcArguments),
}

/// The arguments of `forebay ckpt ls`.
#[derive(Debug, Args)]
pub(crate) struct LsArguments {
    /// The URL, or the directory, that was saved to.
    pub(crate) url: String,
}

/// The arguments of `forebay ckpt verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    /// URL@STEP, or a URL for all of its steps.
    pub(crate) url: String,
    /// Only this step, or STEP.START.
    #[arg(long, value_name = "N")]
    pub(crate) step: Option<StepName>,
}

/// The arguments of `forebay ckpt show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    /// URL@STEP, or a URL for its newest step.
    pub(crate) url: String,
    /// The step, or STEP.START, where the URL does not say it.
    pub(crate) step: Option<StepName>,
}

/// Runs one of them.
pub(crate) fn run(global: &Global, command: &CkptCommand) -> Result<ExitCode> {
    let settings = Settings::load(global)?;
    run::block_on(async {
        match command {
            CkptCommand::Convert(arguments) => ckpt_convert::run(&settings, arguments, global.json).await,
            CkptCommand::Ls(arguments) => {
                let bucket = open(whole(&arguments.url)?, &settings).await?;
                let (steps, pins) = (list_steps(&bucket).await?, list_pins(&bucket).await?);
                if steps.is_empty() {
                    report::warning(&none_in(&arguments.url), global.json);
                }
                list(&steps, &pins, global.json)
            }
            CkptCommand::Show(arguments) => {
                let (url, step) = addressed(&arguments.url, arguments.step)?;
                describe(&manifest((&open(url, &settings).await?, step)).await?, global.json)
            }
            CkptCommand::Verify(arguments) => {
                let (url, step) = addressed(&arguments.url, arguments.step)?;
                check(&open(url, &settings).await?, step, global.json).await
            }
            CkptCommand::Diff(arguments) => {
                let [(before, old), (after, new)] = arguments.sides()?;
                let before = open(before, &settings).await?;
                let after = open(after, &settings).await?;
                let sides = [(&before, old), (&after, new)];
                ckpt_compare::compare(sides, arguments.read, global.json).await
            }
            CkptCommand::Watch(arguments) => ckpt_compare::watch(&settings, arguments, global.json).await,
            CkptCommand::Ranks(arguments) => {
                let bucket = open(whole(&arguments.url)?, &settings).await?;
                ckpt_ranks::show(&bucket, global.json).await
            }
            CkptCommand::Rm(arguments) => {
                let (url, steps) = arguments.named()?;
                ckpt_keep::rm(&open_to_change(url, &settings).await?, &steps, global.json).await
            }
            CkptCommand::Pin(arguments) => {
                let (url, step) = named(&arguments.url, arguments.step)?;
                let bucket = open_to_change(url, &settings).await?;
                ckpt_keep::set_pin(&bucket, step, true, global.json).await
            }
            CkptCommand::Unpin(arguments) => {
                let (url, step) = named(&arguments.url, arguments.step)?;
                let bucket = open_to_change(url, &settings).await?;
                ckpt_keep::set_pin(&bucket, step, false, global.json).await
            }
            CkptCommand::Gc(arguments) => {
                let bucket = open_to_change(whole(&arguments.url)?, &settings).await?;
                ckpt_keep::gc(&bucket, arguments, global.json).await
            }
        }
    })
}

pub(super) async fn open(url: &str, settings: &Settings) -> Result<Bucket> {
    Ok(open_to_change(url, settings).await?.read_only())
}

pub(super) async fn open_to_change(url: &str, settings: &Settings) -> Result<Bucket> {
    Bucket::open(&url_of(url)?, &settings.volume.store).await
}

/// A URL, or a path as the Python package takes it.
pub(super) fn url_of(text: &str) -> Result<BucketUrl> {
    if text.contains("://") {
        return text.parse();
    }
    let path = std::path::absolute(text).map_err(|error| Error::from(error).context(text))?;
    format!("file://{}", path.display()).parse()
}

/// A URL, and the step behind its last `@`, if there is one: `@500`, or `@500.2` as start 2 of the run saved it. An `@` before
/// the last slash is the URL's own.
///
/// # Errors
/// `Invalid` for what is no step behind it.
pub(super) fn split(text: &str) -> Result<(&str, Option<StepName>)> {
    match text.rsplit_once('@') {
        Some((url, step)) if !step.contains('/') => {
            let named = step.parse().map_err(|error: Error| {
                error.context(text).with_hint(format!("@500 behind the URL means one step; {SLASH}"))
            })?;
            Ok((url, Some(named)))
        }
        _ => Ok((text, None)),
    }
}

/// The same where the step may be given beside the URL instead.
///
/// # Errors
/// `Invalid` where it is given twice.
pub(super) fn addressed(text: &str, step: Option<StepName>) -> Result<(&str, Option<StepName>)> {
    match (split(text), step) {
        (split, None) => split,
        (Ok((_, Some(_))), Some(step)) => {
            let hint = format!("leave either out; {SLASH}");
            Err(Error::invalid(format!("`{text}` names a step, and {step} is another")).with_hint(hint))
        }
        (_, Some(step)) => Ok((text, Some(step))),
    }
}

/// The URL of a command that is for all steps of a run.
///
/// # Errors
/// `Invalid` where it names one.
pub(super) fn whole(text: &str) -> Result<&str> {
    match split(text) {
        Ok((url, Some(_))) => {
            let hint = format!("leave `{}` out; {SLASH}", &text[url.len()..]);
            Err(Error::invalid(format!("`{text}` names a step, and this command is for all of a run"))
                .with_hint(hint))
        }
        _ => Ok(text),
    }
}

/// What is told of a place where nothing was saved, which may be another than was meant.
pub(super) fn none_in(url: &str) -> String {
    format!("{url} holds no checkpoints")
}

/// The same where a step is kept or deleted, of which none is meant unless it is named.
pub(super) fn named(text: &str, step: Option<StepName>) -> Result<(&str, StepName)> {
    match addressed(text, step)? {
        (url, Some(step)) => Ok((url, step)),
        (url, None) => {
            let hint = format!("{url}@500 means step 500 there");
            Err(Error::invalid(format!("`{text}` names no step")).with_hint(hint))
        }
    }
}

/// The manifest of a step, or of the newest one.
pub(super) async fn manifest((bucket, step): (&Bucket, Option<StepName>)) -> Result<Manifest> {
    if let Some(step) = step {
        return show(bucket, step).await;
    }
    let newest = list_steps(bucket).await?.pop();
    let none = || Error::new(ErrorKind::NotFound, format!("{} holds no committed step", bucket.url()));
    load_manifest(bucket, &newest.ok_or_else(none)?.key).await
}

/// Shows bytes on their way.
pub(super) fn bar(what: &str) -> ProgressBar {
    let template = format!("{{spinner}} {{binary_bytes}} {what}, {{binary_bytes_per_sec}}");
    let style = ProgressStyle::with_template(&template).expect("the template is well-formed");
    ProgressBar::no_length().with_style(style)
}

fn list(steps: &[StepInfo], pins: &HashSet<StepKey>, json: bool) -> Result<ExitCode> {
    if json {
        let steps: Vec<_> = steps
            .iter()
            .map(|info| {
                json!({
                    "step": info.key.step,
                    "incarnation": info.key.incarnation,
                    "committed": print::utc(info.committed),
                    "superseded": info.superseded,
                    "pinned": pins.contains(&info.key),
                    "manifest": info.key.object().as_str(),
                })
            })
            .collect();
        print::json(&json!({ "steps": steps }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows = steps.iter().map(|info| {
        let states = [("superseded", info.superseded), ("pinned", pins.contains(&info.key))];
        let state: Vec<_> = states.into_iter().filter_map(|(state, is)| is.then_some(state)).collect();
        let (step, start) = (info.key.step.to_string(), info.key.incarnation.to_string());
        print::row([&step, &start, &print::utc(info.committed), &state.join(", ")])
    });
    let head = print::row(["STEP", "INCARNATION", "COMMITTED", ""]);
    print::table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    Ok(ExitCode::SUCCESS)
}

async fn check(bucket: &Bucket, step: Option<StepName>, json: bool) -> Result<ExitCode> {
    let steps = list_steps(bucket).await?;
    let counted = match step {
        Some(_) => 1,
        None => steps.iter().filter(|info| !info.superseded).count(),
    };
    if counted == 0 {
        let message = format!("{} holds no committed step", bucket.url());
        let hint = "give the URL that was saved to; a step without a manifest was never committed";
        return Err(Error::new(ErrorKind::NotFound, message).with_hint(hint));
    }
    let bar = bar("read");
    let findings = verify(bucket, step, &|bytes| bar.inc(bytes)).await;
    let read = bar.position();
    bar.finish_and_clear();
    let findings = findings?;
    report(counted, read, &findings, json)?;
    match findings.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => {
            Err(Error::corrupt(format!("{} faults in the checkpoints of {}", findings.len(), bucket.url()))
                .with_hint("restore another step; a damaged one cannot be mended"))
        }
    }
}

fn report(steps: usize, read: u64, findings: &[Finding], json: bool) -> Result<()> {
    if json {
        let findings: Vec<_> = findings
            .iter()
            .map(|Finding { step, object, fact }| json!({ "step": step, "object": object, "fact": fact }))
            .collect();
        return print::json(&json!({ "steps": steps, "read_bytes": read, "findings": findings }));
    }
    print::table(&[
        print::row(["steps checked", &steps.to_string()]),
        print::row(["read", &format_bytes(read)]),
        print::row(["faults", &findings.len().to_string()]),
    ]);
    let rows = findings
        .iter()
        .map(|finding| print::row([&format!("step {}", finding.step), &finding.object, &finding.fact]));
    print::table(&rows.collect::<Vec<_>>());
    Ok(())
}
