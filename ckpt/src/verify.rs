//! Reading a step as a sceptic does: every byte of every shard, against everything that the manifest says of it.

use std::collections::{HashMap, HashSet};

use forebay_core::checksum::Crc32c;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::Bucket;
use futures::stream::{self, StreamExt};

use crate::catalog::{StepInfo, find_step, list_steps, load_manifest};
use crate::manifest::{Identity, Manifest, Shard};

/// Bytes of one request.
const READ: u64 = 8 << 20;
/// Requests in flight.
const PARALLEL: usize = 4;

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

/// The manifest that counts for `step`.
///
/// # Errors
/// `NotFound`, or `Corrupt` with the fact.
pub async fn show(bucket: &Bucket, step: u64) -> Result<Manifest> {
    load_manifest(bucket, &find_step(bucket, step).await?.key).await
}

/// Checks one step, or every one that counts; nothing found means that they are whole. `progress` is told the
/// number of bytes read since it was told last.
///
/// # Errors
/// Only what keeps it from looking: a store that cannot be reached, or a `step` that is not there.
pub async fn verify(bucket: &Bucket, step: Option<u64>, progress: &dyn Fn(u64)) -> Result<Vec<Finding>> {
    let steps: Vec<StepInfo> = match step {
        Some(step) => vec![find_step(bucket, step).await?],
        None => list_steps(bucket).await?.into_iter().filter(|info| !info.superseded).collect(),
    };
    let mut findings = Vec::new();
    let mut sound = HashSet::new();
    for info in steps {
        let step = info.key.step;
        let manifest = match load_manifest(bucket, &info.key).await {
            Ok(manifest) => manifest,
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
                let object = info.key.object().as_str().to_owned();
                findings.push(Finding { step, object, fact: error.message().to_owned() });
                continue;
            }
            Err(error) => return Err(error),
        };
        for (index, shard) in (0u32..).zip(&manifest.shards) {
            // A shard that two steps share has the same slices in both, or the manifest's checks would differ.
            if sound.contains(&(shard.key.clone(), slices_of(&manifest, index))) {
                continue;
            }
            let facts = inspect(bucket, &manifest, index, shard, progress).await?;
            if facts.is_empty() {
                sound.insert((shard.key.clone(), slices_of(&manifest, index)));
            }
            let object = &shard.key;
            findings.extend(facts.into_iter().map(|fact| Finding { step, object: object.clone(), fact }));
        }
    }
    Ok(findings)
}

/// What the manifest says of a shard's slices, to be compared between steps.
fn slices_of(manifest: &Manifest, shard: u32) -> Vec<(u64, u64, u32)> {
    let slices = manifest.tensors.iter().flat_map(|tensor| &tensor.slices);
    let of_shard = slices.filter(|slice| slice.shard == shard);
    let mut ranges: Vec<_> = of_shard.map(|slice| (slice.start, slice.end, slice.crc32c.0)).collect();
    ranges.sort_unstable();
    ranges
}

/// Reads a whole shard; gives what is wrong with it.
async fn inspect(
    bucket: &Bucket,
    manifest: &Manifest,
    index: u32,
    shard: &Shard,
    progress: &dyn Fn(u64),
) -> Result<Vec<String>> {
    let key = Shard::key_of(&shard.blake3);
    match bucket.head(&key).await? {
        None => return Ok(vec!["is missing".into()]),
        Some(found) if found.size != shard.size => {
            return Ok(vec![format!("has {} bytes, not {}", found.size, shard.size)]);
        }
        Some(_) => {}
    }
    let starts = (0..shard.size).step_by(READ as usize);
    let reads = starts.map(|start| bucket.get(&key, None, start..shard.size.min(start + READ)));
    let mut reads = stream::iter(reads).buffered(PARALLEL);
    let (mut hasher, mut crc) = (blake3::Hasher::new(), Crc32c::default());
    let mut slices = Slices::of(manifest, index);
    let mut at = 0;
    while let Some(data) = reads.next().await {
        let data = data?;
        hasher.update(&data);
        crc.update(&data);
        slices.take(at, &data);
        at += data.len() as u64;
        progress(data.len() as u64);
    }
    let mut facts = slices.damaged();
    if crc.value() != shard.crc32c.0 && facts.is_empty() {
        facts.push(format!("has the checksum {:08x}, not {}", crc.value(), shard.crc32c));
    }
    let identity = Identity(*hasher.finalize().as_bytes());
    if identity != shard.blake3 && facts.is_empty() {
        facts.push(format!("hashes to {identity}"));
    }
    Ok(facts)
}

/// The checksums of a shard's slices, from its bytes in order.
struct Slices<'a> {
    /// Start, end, expected checksum and tensor of each slice that holds bytes, by start.
    slices: Vec<(u64, u64, u32, &'a str)>,
    checksums: HashMap<usize, Crc32c>,
    first_open: usize,
}

impl<'a> Slices<'a> {
    fn of(manifest: &'a Manifest, shard: u32) -> Self {
        let named = |tensor: &'a crate::manifest::Tensor| {
            tensor.slices.iter().map(move |slice| (slice, tensor.name.as_str()))
        };
        let all = manifest.tensors.iter().flat_map(named);
        let of_shard = all.filter(|(slice, _)| slice.shard == shard && !slice.is_empty());
        let mut slices: Vec<_> =
            of_shard.map(|(slice, name)| (slice.start, slice.end, slice.crc32c.0, name)).collect();
        slices.sort_unstable();
        Self { slices, checksums: HashMap::new(), first_open: 0 }
    }

    fn take(&mut self, at: u64, data: &[u8]) {
        let end = at + data.len() as u64;
        for (index, slice) in self.slices.iter().enumerate().skip(self.first_open) {
            if slice.0 >= end {
                break;
            }
            let (from, to) = (slice.0.max(at) - at, slice.1.min(end) - at);
            self.checksums.entry(index).or_default().update(&data[from as usize..to as usize]);
            if slice.1 <= end {
                self.first_open = index + 1;
            }
        }
    }

    fn damaged(self) -> Vec<String> {
        let value = |index| self.checksums.get(&index).cloned().unwrap_or_default().value();
        let wrong = self.slices.iter().enumerate().filter(|(index, slice)| value(*index) != slice.2);
        wrong
            .map(|(_, (start, end, _, name))| format!("bytes {start}..{end} of tensor `{name}` are damaged"))
            .collect()
    }
}

impl From<&Finding> for Error {
    fn from(finding: &Finding) -> Self {
        Error::corrupt(format!("step {}: `{}` {}", finding.step, finding.object, finding.fact))
    }
}
