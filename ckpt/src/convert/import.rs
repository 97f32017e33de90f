//! A directory of safetensors files as a step.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use bytes::Bytes;
use forebay_core::checksum::Crc32c;
use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::object::{Bucket, Condition, Upload, UploadOptions};
use futures::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};

use super::header::{Entry, read};
use super::tree::state;
use super::{INDEX, WHOLE};
use crate::catalog::{Run, Start, begin_run, commit};
use crate::manifest::{Checksum, Encoding, Extra, Identity, Manifest, Shard, ShardKey, Slice, Tensor};
use crate::shard::{ShardLayout, TensorSpec};

/// Pieces of tensors that are fetched at once.
const PARALLEL: usize = 4;
/// Bytes of parts that are sent at once.
const IN_FLIGHT: u64 = 64 << 20;

/// What was saved.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Imported {
    /// The step.
    pub step: u64,
    /// How many tensors it has.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A tensor of the directory, and what the step calls it.
struct Found {
    key: String,
    file: ObjectKey,
    entry: Entry,
    spec: TensorSpec,
}

/// Saves the tensors of a directory as `step`, a start of the run of its own; the state is `{part: {name: tensor}}`, keys
/// with dots between them, or the tensors themselves.
///
/// `progress` is told the bytes that were read since it was told last.
///
/// # Errors
/// `NotFound` when there is no model; `Corrupt` when it does not hold together; nothing is committed then.
pub async fn import(
    from: &Bucket,
    to: &Bucket,
    start: Start,
    step: u64,
    part: &str,
    progress: &dyn Fn(u64),
) -> Result<Imported> {
    let found = find(from, part).await?;
    let layout = ShardLayout::of(&found.iter().map(|found| found.spec.clone()).collect::<Vec<_>>())?;
    let created_ms = start.started_ms;
    let run = begin_run(to, start).await?;
    let attempt = run.attempt().to_owned();
    let key = ShardKey {
        step,
        incarnation: run.incarnation,
        attempt,
        rank: 0,
        save: 1,
        layout: ShardKey::layout_of(&layout.header),
    };
    let key = key.object();
    let options =
        UploadOptions { conditional: false, bytes_in_flight: IN_FLIGHT, ..UploadOptions::default() };
    let mut upload = to.upload_with(&key, options)?;
    let (slices, crc32c) = match send(from, &found, &layout, &mut upload, progress).await {
        Ok(sent) => sent,
        Err(error) => {
            if let Err(error) = upload.abort().await {
                tracing::warn!(%error, "an upload that is not wanted stays until garbage is collected");
            }
            return Err(error);
        }
    };
    let stored = upload.complete(Condition::Always).await?.size;
    if stored != layout.size {
        return Err(Error::corrupt(format!(
            "the store holds {stored} bytes of `{key}`, not {}",
            layout.size
        )));
    }
    let header = layout.header.len() as u64;
    let shard = Shard { key: key.as_str().into(), size: layout.size, header, crc32c, rank: 0, step };
    let manifest = describe(&run, (step, created_ms), shard, &found, slices, part);
    commit(to, &run, &manifest).await?;
    Ok(Imported { step, tensors: found.len() as u64, bytes: layout.size - header })
}

/// The tensors of all files, and what they will be called.
async fn find(from: &Bucket, part: &str) -> Result<Vec<Found>> {
    let mut named: BTreeMap<String, (ObjectKey, Entry)> = BTreeMap::new();
    for file in files(from).await? {
        let key = ObjectKey::new(&file);
        for (name, entry) in read(from, &key).await? {
            if let Some((other, _)) = named.insert(name.clone(), (key.clone(), entry)) {
                return Err(Error::invalid(format!("tensor `{name}` is in `{other}` and in `{key}`")));
            }
        }
    }
    let mut taken = HashSet::new();
    let found = named.into_iter().map(|(key, (file, entry))| {
        let name = unique(&if part.is_empty() { key.clone() } else { format!("{part}.{key}") }, &mut taken);
        let spec = TensorSpec::whole(name, entry.dtype, entry.shape.clone());
        Found { key, file, entry, spec }
    });
    Ok(found.collect())
}

/// A tensor's name in the step: other than in the state, two characters of it are the engine's.
fn unique(name: &str, taken: &mut HashSet<String>) -> String {
    let base = name.replace(['#', '@'], "_");
    let (mut unique, mut number) = (base.clone(), 2);
    while unique == "__metadata__" || !taken.insert(unique.clone()) {
        unique = format!("{base}~{number}");
        number += 1;
    }
    unique
}

/// The names of the directory's files.
async fn files(from: &Bucket) -> Result<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index = ObjectKey::new(INDEX);
    let place = || format!("`{INDEX}` of {}", from.url());
    let data = match from.get_whole(&index).await {
        Ok((data, _)) => data,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok([WHOLE.to_owned()].into()),
        Err(error) => return Err(error),
    };
    let index: Index =
        serde_json::from_slice(&data).map_err(|error| Error::corrupt(format!("{}: {error}", place())))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    match names.iter().find(|name| name.contains('/') || matches!(name.as_str(), "" | "." | "..")) {
        Some(name) => Err(Error::invalid(format!("{}: `{name}` is no file of this directory", place()))),
        None => Ok(names),
    }
}

/// Sends header and tensors; gives the slices of each tensor, and the checksum of the file.
async fn send(
    from: &Bucket,
    found: &[Found],
    layout: &ShardLayout,
    upload: &mut Upload,
    progress: &dyn Fn(u64),
) -> Result<(Vec<Vec<Slice>>, Checksum)> {
    let mut slices: Vec<Vec<Slice>> = found.iter().map(|_| Vec::new()).collect();
    let mut whole = Crc32c::default();
    whole.update(&layout.header);
    upload.write(Bytes::from(layout.header.clone())).await?;
    let mut order: Vec<usize> = (0..found.len()).collect();
    order.sort_by_key(|index| (layout.ranges[*index].start, layout.ranges[*index].end));
    let pieces = order.into_iter().flat_map(|index| {
        let Found { spec, entry, file, .. } = &found[index];
        let mut at = 0;
        spec.region.pieces(&spec.shape, spec.dtype.size).into_iter().map(move |piece| {
            let start = at;
            at += piece.elements() * spec.dtype.size;
            (index, piece, start..at, file, entry.range.start)
        })
    });
    let fetch = |(index, piece, range, file, first): (usize, _, std::ops::Range<u64>, &ObjectKey, u64)| {
        let file = file.clone();
        async move {
            let data = from.get(&file, None, first + range.start..first + range.end).await?;
            if data.len() as u64 != range.end - range.start {
                return Err(Error::corrupt(format!("`{file}` of {} ends too early", from.url())));
            }
            Ok((index, piece, range, data))
        }
    };
    let mut fetched = stream::iter(pieces.map(fetch)).buffered(PARALLEL);
    while let Some((index, piece, range, data)) = fetched.try_next().await? {
        let (start, end) = (layout.ranges[index].start + range.start, layout.ranges[index].start + range.end);
        let (crc32c, blake3) = (Checksum(forebay_core::crc32c(&data)), Identity::of(&data));
        whole.update(&data);
        let crate::region::Region { kind, offsets, lengths } = piece;
        slices[index].push(Slice { kind, offsets, lengths, shard: 0, start, end, crc32c, blake3 });
        progress(data.len() as u64);
        upload.write(data).await?;
    }
    Ok((slices, Checksum(whole.value())))
}

fn describe(
    run: &Run,
    (step, created_ms): (u64, u64),
    shard: Shard,
    found: &[Found],
    slices: Vec<Vec<Slice>>,
    part: &str,
) -> Manifest {
    let unique = format!("{}/1/{step}", run.start.nonce);
    let tensors = found.iter().zip(slices).map(|(found, slices)| {
        let TensorSpec { name, dtype, shape, .. } = found.spec.clone();
        Tensor { name, dtype: dtype.name.into(), shape, slices }
    });
    let named = found.iter().map(|found| (found.key.as_str(), found.spec.name.as_str()));
    let data = state(part, named).to_string();
    Manifest {
        commit: blake3::hash(unique.as_bytes()).to_hex()[..32].to_owned(),
        run: run.run.clone(),
        incarnation: run.incarnation,
        step,
        created_ms,
        world_size: 1,
        parents: Vec::new(),
        shards: vec![shard],
        tensors: tensors.collect(),
        extras: vec![Extra { name: "state".into(), encoding: Encoding::Json, data }],
    }
}
