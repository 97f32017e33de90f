//! Which steps there are, and which of them is the newest.
//!
//! The newest is the highest step of the highest incarnation, not the highest number: a run that went back to an
//! earlier step and saved again means its own steps. Of one step, the highest incarnation's manifest counts.

use std::fmt;
use std::str::FromStr;

use forebay_core::{Error, ErrorKind, Result, Timestamp, Version};
use forebay_io::object::Bucket;
use futures::TryStreamExt;

use super::StepKey;
use crate::manifest::{Manifest, TextLength};

/// A committed step, as the listing tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepInfo {
    /// Its name.
    pub key: StepKey,
    /// Of its manifest; empty where the store gives none.
    pub version: Version,
    /// When it was committed, by the store's clock.
    pub committed: Timestamp,
    /// Whether a later incarnation saved the same step again, which then counts in its place.
    pub superseded: bool,
}

/// Which committed step is meant: `500`, or `500.2`, as start 2 saved it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepName {
    /// The step.
    pub step: u64,
    /// The start of the run that saved it; `None` means the highest that did.
    pub start: Option<u64>,
}

impl StepName {
    /// Whether this names, perhaps among others, the manifest.
    pub fn means(&self, key: &StepKey) -> bool {
        self.step == key.step && self.start.is_none_or(|start| start == key.incarnation)
    }
}

impl From<u64> for StepName {
    fn from(step: u64) -> Self {
        Self { step, start: None }
    }
}

impl FromStr for StepName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // As it stands behind a URL.
        let text = text.strip_prefix('@').unwrap_or(text);
        let (step, start) = text.split_once('.').map_or((text, None), |(step, start)| (step, Some(start)));
        let parsed = step.parse().ok().zip(start.map(str::parse).transpose().ok());
        let (step, start) = parsed.ok_or_else(|| {
            Error::invalid(format!("`{text}` names no step"))
                .with_hint("a number, such as 500, or 500.2 for step 500 as start 2 of the run saved it")
        })?;
        Ok(Self { step, start })
    }
}

impl fmt::Display for StepName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.start {
            None => write!(formatter, "{}", self.step),
            Some(start) => write!(formatter, "{} of start {start}", self.step),
        }
    }
}

/// Every committed step, oldest first.
pub async fn list_steps(bucket: &Bucket) -> Result<Vec<StepInfo>> {
    let objects: Vec<_> = bucket.list(StepKey::PREFIX).try_collect().await?;
    let found = objects.into_iter().filter_map(|object| {
        let key = StepKey::parse(&object.key)?;
        Some(StepInfo { key, version: object.version, committed: object.modified, superseded: false })
    });
    let mut steps: Vec<StepInfo> = found.collect();
    steps.sort_by(|a, b| a.key.cmp(&b.key));
    let mut seen = std::collections::HashSet::new();
    for info in steps.iter_mut().rev() {
        info.superseded = !seen.insert(info.key.step);
    }
    Ok(steps)
}

/// The manifest that is meant by `name`.
///
/// # Errors
/// `NotFound`, with the steps that there are as the hint.
pub async fn find_step(bucket: &Bucket, name: StepName) -> Result<StepInfo> {
    let steps = list_steps(bucket).await?;
    let found = steps.iter().rfind(|info| name.means(&info.key)).cloned();
    found.ok_or_else(|| {
        let url = bucket.url();
        let mut there: Vec<_> =
            steps.iter().filter(|info| !info.superseded).map(|info| info.key.step).collect();
        there.sort_unstable();
        let hint = match there.as_slice() {
            [] => "it holds no committed step at all".to_owned(),
            [.., last] => format!("{} steps are committed there, the last {last}", there.len()),
        };
        Error::new(ErrorKind::NotFound, format!("{url} holds no step {name}")).with_hint(hint)
    })
}

/// Reads, checks and returns a step's manifest.
///
/// # Errors
/// `Corrupt` with the fact when it is damaged or lies under another step's name.
pub async fn load_manifest(bucket: &Bucket, key: &StepKey) -> Result<Manifest> {
    let object = key.object();
    let place = || format!("step {} of {}", key.step, bucket.url());
    let read = bucket.get_whole_at_most(&object, TextLength::MOST).await;
    let (data, _) = read.map_err(|error| error.context(place()))?;
    let manifest = Manifest::decode(&data).map_err(|fault| Error::from(fault).context(place()))?;
    if (manifest.step, manifest.incarnation) != (key.step, key.incarnation) {
        let (step, incarnation) = (manifest.step, manifest.incarnation);
        let fact = format!("`{object}` holds the manifest of step {step}, incarnation {incarnation}");
        return Err(Error::corrupt(fact).context(place()));
    }
    Ok(manifest)
}
