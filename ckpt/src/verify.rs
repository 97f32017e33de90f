//! Reading a step as a sceptic does: every byte of every shard, against everything that the manifest says of it, and the
//! tensors that its trees name, against those that it has.

use std::collections::{HashMap, HashSet};

use forebay_core::checksum::Crc32c;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::Bucket;
use futures::stream::{self, StreamExt};

use crate::catalog::{StepInfo, StepName, find_step, list_steps, load_manifest};
use crate::manifest::{Identity, Manifest, Shard, Slice, Tensor};
use crate::trees;

/// Bytes of one request.
const READ: u64 = 8 << 20;
/// Requests in flight.
const PARALLEL: usize = 16;
/// What is wrong with a shard that is not there.
const MISSING: &str = "is missing";

/// Something wrong with a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The step.
    pub step: u64,
    /// The object that is at fault.
    pub object: String,
    /// What is wrong with it.
    pub fact: String,
}

/// The manifest that is meant by `name`.
///
/// # Errors
/// `NotFound`, or `Corrupt` with the fact.
pub async fn show(bucket: &Bucket, name: StepName) -> Result<Manifest> {
    load_manifest(bucket, &find_step(bucket, name).await?.key).await
}

/// Checks one step, or every one that counts; nothing found means that they are whole. `progress` is told the
/// number of bytes read since it was told last. Of steps that are deleted meanwhile, as a job does that saves there, nothing
/// is found.
///
/// # Errors
/// Only what keeps it from looking: a store that cannot be reached, or a step that is not there, or not any more.
pub async fn verify(bucket: &Bucket, name: Option<StepName>, progress: &dyn Fn(u64)) -> Result<Vec<Finding>> {
    let steps: Vec<StepInfo> = match name {
        Some(name) => vec![find_step(bucket, name).await?],
        None => list_steps(bucket).await?.into_iter().filter(|info| !info.superseded).collect(),
    };
    let mut findings = Vec::new();
    let mut sound: HashMap<String, Sound> = HashMap::new();
    for info in steps {
        let found = verify_step(bucket, &info, &mut sound, progress).await?;
        if found.is_empty() {
            continue;
        }
        // Manifests are deleted first: what is missing of a step whose manifest is there was not deleted with it.
        match (bucket.head(&info.key.object()).await?, name) {
            (Some(_), _) => findings.extend(found),
            (None, None) => {}
            (None, Some(name)) => {
                let fact = format!("step {name} of {} was deleted while it was verified", bucket.url());
                return Err(Error::new(ErrorKind::NotFound, fact));
            }
        }
    }
    Ok(findings)
}

/// What is wrong with a step, that it is gone included; shards in `sound` are not read again.
async fn verify_step(
    bucket: &Bucket,
    info: &StepInfo,
    sound: &mut HashMap<String, Sound>,
    progress: &dyn Fn(u64),
) -> Result<Vec<Finding>> {
    let object = info.key.object();
    let finding = |object: &str, fact| Finding { step: info.key.step, object: object.to_owned(), fact };
    let manifest = match load_manifest(bucket, &info.key).await {
        Ok(manifest) => manifest,
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
            return Ok(vec![finding(object.as_str(), error.message().to_owned())]);
        }
        Err(error) => return Err(error),
    };
    let lacks = trees::faults(&manifest).into_iter();
    let mut findings: Vec<Finding> = lacks.map(|fact| finding(object.as_str(), fact)).collect();
    for (index, shard) in (0u32..).zip(&manifest.shards) {
        let slices = slices_of(&manifest, index);
        // The first of the steps that share a shard has most of its slices.
        let known = sound.get(&shard.key).filter(|known| known.shard == *shard);
        if known.is_some_and(|known| slices.iter().all(|slice| known.slices.contains(slice))) {
            continue;
        }
        let facts = match inspect(bucket, &manifest, index, shard, progress).await {
            Err(error) if error.kind() == ErrorKind::NotFound => vec![MISSING.to_owned()],
            facts => facts?,
        };
        if facts.is_empty() {
            let slices = slices.into_iter().collect();
            sound.insert(shard.key.clone(), Sound { shard: shard.clone(), slices });
        }
        findings.extend(facts.into_iter().map(|fact| finding(&shard.key, fact)));
    }
    Ok(findings)
}

/// What was found whole.
struct Sound {
    shard: Shard,
    slices: HashSet<Place>,
}

/// A slice in a shard: start, end, checksum and identity.
type Place = (u64, u64, u32, [u8; 32]);

/// What the manifest says of a shard's slices, to be compared between steps.
fn slices_of(manifest: &Manifest, shard: u32) -> Vec<Place> {
    let slices = manifest.tensors.iter().flat_map(|tensor| &tensor.slices);
    let of_shard = slices.filter(|slice| slice.shard == shard);
    of_shard.map(|slice| (slice.start, slice.end, slice.crc32c.0, slice.blake3.0)).collect()
}

/// Reads a whole shard; gives what is wrong with it.
async fn inspect(
    bucket: &Bucket,
    manifest: &Manifest,
    index: u32,
    shard: &Shard,
    progress: &dyn Fn(u64),
) -> Result<Vec<String>> {
    let key = shard.object();
    match bucket.head(&key).await? {
        None => return Ok(vec![MISSING.into()]),
        Some(found) if found.size != shard.size => {
            return Ok(vec![format!("has {} bytes, not {}", found.size, shard.size)]);
        }
        Some(_) => {}
    }
    let starts = (0..shard.size).step_by(READ as usize);
    let reads = starts.map(|start| bucket.get(&key, None, start..shard.size.min(start + READ)));
    let mut reads = stream::iter(reads).buffered(PARALLEL);
    let mut crc = Crc32c::default();
    let mut slices = Slices::of(manifest, index);
    let mut at = 0;
    while let Some(data) = reads.next().await {
        let data = data?;
        crc.update(&data);
        slices.take(at, &data);
        at += data.len() as u64;
        progress(data.len() as u64);
    }
    let mut facts = slices.damaged();
    if crc.value() != shard.crc32c.0 && facts.is_empty() {
        facts.push(format!("has the checksum {:08x}, not {}", crc.value(), shard.crc32c));
    }
    Ok(facts)
}

/// A shard's slices, looked at as its bytes come in order.
struct Slices<'a> {
    /// Those that hold bytes, with their tensors' names, the next one last.
    left: Vec<(&'a Slice, &'a str)>,
    crc: Crc32c,
    hasher: blake3::Hasher,
    facts: Vec<String>,
}

impl<'a> Slices<'a> {
    fn of(manifest: &'a Manifest, shard: u32) -> Self {
        let named = |tensor: &'a Tensor| tensor.slices.iter().map(|slice| (slice, tensor.name.as_str()));
        let all = manifest.tensors.iter().flat_map(named);
        let mut left: Vec<_> = all.filter(|(slice, _)| slice.shard == shard && !slice.is_empty()).collect();
        left.sort_unstable_by_key(|(slice, _)| std::cmp::Reverse(slice.start));
        Self { left, crc: Crc32c::default(), hasher: blake3::Hasher::new(), facts: Vec::new() }
    }

    /// Takes the bytes from `at` on; no two slices share one.
    fn take(&mut self, at: u64, data: &[u8]) {
        let end = at + data.len() as u64;
        while let Some((slice, name)) = self.left.pop_if(|(slice, _)| slice.start < end) {
            let (from, to) = (slice.start.max(at) - at, slice.end.min(end) - at);
            self.crc.update(&data[from as usize..to as usize]);
            self.hasher.update(&data[from as usize..to as usize]);
            if slice.end > end {
                return self.left.push((slice, name));
            }
            let crc32c = std::mem::take(&mut self.crc).value();
            let identity = Identity(*self.hasher.finalize().as_bytes());
            self.hasher.reset();
            if (crc32c, identity) != (slice.crc32c.0, slice.blake3) {
                self.facts.push(damaged(slice, name));
            }
        }
    }

    /// What is wrong, once all bytes were taken.
    fn damaged(mut self) -> Vec<String> {
        self.facts.extend(self.left.iter().map(|(slice, name)| damaged(slice, name)));
        self.facts
    }
}

fn damaged(Slice { start, end, .. }: &Slice, name: &str) -> String {
    format!("bytes {start}..{end} of tensor `{name}` are damaged")
}

impl From<&Finding> for Error {
    fn from(finding: &Finding) -> Self {
        Error::corrupt(format!("step {}: `{}` {}", finding.step, finding.object, finding.fact))
    }
}

#[cfg(test)]
mod tests;
