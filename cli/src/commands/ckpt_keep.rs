//! `forebay ckpt rm`, `pin`, `unpin` and `gc`: what stays in a bucket of checkpoints and what goes.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use forebay_ckpt::catalog::{Garbage, StepName, collect_garbage, list_steps, pin, remove_steps, unpin};
use forebay_core::units::format_bytes;
use forebay_core::{Error, Result};
use forebay_io::object::Bucket;
use serde_json::json;

use super::ckpt::{addressed, named, none_in};
use crate::{print, report};

/// The arguments of `forebay ckpt rm`.
#[derive(Debug, Args)]
pub(crate) struct RmArguments {
    /// URL@STEP, or the URL that was saved to.
    pub(crate) url: String,
    /// The steps, where the URL does not say it.
    pub(crate) steps: Vec<StepName>,
}

impl RmArguments {
    /// The URL and the steps.
    ///
    /// # Errors
    /// `Invalid` where none is named, or what one start saved of it alone.
    pub(crate) fn named(&self) -> Result<(&str, Vec<u64>)> {
        let (url, steps) = match &self.steps[..] {
            [] => {
                let (url, step) = named(&self.url, None)?;
                (url, vec![step])
            }
            steps => (addressed(&self.url, Some(steps[0]))?.0, steps.to_vec()),
        };
        let number = |name: StepName| match name.start {
            None => Ok(name.step),
            Some(_) => Err(Error::invalid(format!("step {name}: a step is deleted as every start saved it"))
                .with_hint("what another start saved again goes with the next save, once it is not pinned")),
        };
        Ok((url, steps.into_iter().map(number).collect::<Result<_>>()?))
    }
}

/// The arguments of `forebay ckpt pin` and `unpin`.
#[derive(Debug, Args)]
pub(crate) struct PinArguments {
    /// URL@STEP, or the URL that was saved to.
    pub(crate) url: String,
    /// The step, or STEP.START, as that start of the run saved it, where the URL does not say it.
    pub(crate) step: Option<StepName>,
}

/// The arguments of `forebay ckpt gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArguments {
    /// The URL, or the directory, that was saved to.
    pub(crate) url: String,
    /// Leave what is younger: it may belong to a save under way. At least 1.
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    pub(crate) older_than: u64,
    /// Only tell what would be deleted.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Deletes steps and the shards that only they need.
pub(crate) async fn rm(bucket: &Bucket, steps: &[u64], json: bool) -> Result<ExitCode> {
    let removed = remove_steps(bucket, steps).await?;
    if json {
        print::json(&json!({ "manifests": removed.manifests, "shards": removed.shards }))?;
    } else {
        let (manifests, shards) = (removed.manifests.to_string(), removed.shards.to_string());
        print::table(&[
            print::row(["manifests deleted", &manifests]),
            print::row(["shards deleted", &shards]),
        ]);
    }
    Ok(ExitCode::SUCCESS)
}

/// Keeps a step from retention and `rm`, or leaves it to them again.
pub(crate) async fn set_pin(bucket: &Bucket, name: StepName, pinned: bool, json: bool) -> Result<ExitCode> {
    match pinned {
        true => pin(bucket, name).await?,
        false => unpin(bucket, name).await?,
    }
    if json {
        print::json(&json!({ "step": name.step, "pinned": pinned }))?;
    } else {
        let state = if pinned { "pinned" } else { "not pinned" };
        print::table(&[print::row([&format!("step {name}"), state])]);
    }
    Ok(ExitCode::SUCCESS)
}

/// Deletes what agents that died left behind.
pub(crate) async fn gc(bucket: &Bucket, arguments: &GcArguments, json: bool) -> Result<ExitCode> {
    let age = Duration::from_secs(arguments.older_than.saturating_mul(3600));
    let found = collect_garbage(bucket, age, arguments.dry_run).await?;
    let Garbage { shards, indexes, uploads, bytes } = &found;
    let is_nothing = shards.is_empty() && indexes.is_empty() && uploads.is_empty();
    if is_nothing && list_steps(bucket).await?.is_empty() {
        report::warning(&none_in(&arguments.url), json);
    }
    if json {
        let name = |key: &forebay_core::ObjectKey| key.as_str().to_owned();
        print::json(&json!({
            "deleted": !arguments.dry_run,
            "shards": shards.iter().map(name).collect::<Vec<_>>(),
            "indexes": indexes.iter().map(name).collect::<Vec<_>>(),
            "uploads": uploads.iter().map(|(key, _)| name(key)).collect::<Vec<_>>(),
            "bytes": bytes,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let what = if arguments.dry_run { "to delete" } else { "deleted" };
    print::table(&[
        print::row([&format!("shards {what}"), &format!("{}, {}", shards.len(), format_bytes(*bytes))]),
        print::row([&format!("parts of steps {what}"), &indexes.len().to_string()]),
        print::row([&format!("uploads {what}"), &uploads.len().to_string()]),
    ]);
    Ok(ExitCode::SUCCESS)
}
