//! A directory of safetensors files as a step.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version};
use forebay_io::object::Bucket;
use futures::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};

use super::header::{Entry, read};
use super::tree::state;
use super::writer::{Piece, StepWriter};
use super::{INDEX, WHOLE};
use crate::catalog::Start;
use crate::manifest::{Encoding, Extra};
use crate::shard::TensorSpec;

/// Pieces of tensors that are fetched at once.
const PARALLEL: usize = 4;

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
    /// That of the file whose header was read.
    version: Version,
    entry: Entry,
    spec: TensorSpec,
}

/// Saves the tensors of a directory as `step`, a start of the run of its own; the state is `{part: {name: tensor}}`, keys
/// with dots between them, or the tensors themselves.
///
/// `progress` is told the bytes that were read since it was told last.
///
/// # Errors
/// `NotFound` when there is no model; `Corrupt` when it does not hold together, `Stale` when a file is replaced meanwhile;
/// nothing is committed then.
pub async fn import(
    from: &Bucket,
    to: &Bucket,
    start: Start,
    step: u64,
    part: &str,
    progress: &dyn Fn(u64),
) -> Result<Imported> {
    let found = find(from, part).await?;
    let specs: Vec<TensorSpec> = found.iter().map(|found| found.spec.clone()).collect();
    let mut writer = StepWriter::begin(to, start, step, &specs).await?;
    let bytes = writer.tensor_bytes();
    if let Err(error) = send(from, &found, &mut writer, progress).await {
        writer.abort().await;
        return Err(error);
    }
    let named = found.iter().map(|found| (found.key.as_str(), found.spec.name.as_str()));
    let data = state(part, named).to_string();
    writer.commit(vec![Extra { name: "state".into(), encoding: Encoding::Json, data }]).await?;
    Ok(Imported { step, tensors: found.len() as u64, bytes })
}

/// The tensors of all files, and what they will be called.
async fn find(from: &Bucket, part: &str) -> Result<Vec<Found>> {
    let mut named: BTreeMap<String, (ObjectKey, Version, Entry)> = BTreeMap::new();
    for file in files(from).await? {
        let key = ObjectKey::new(&file);
        let (entries, version) = read(from, &key).await?;
        for (name, entry) in entries {
            if let Some((other, ..)) = named.insert(name.clone(), (key.clone(), version.clone(), entry)) {
                return Err(Error::invalid(format!("tensor `{name}` is in `{other}` and in `{key}`")));
            }
        }
    }
    let mut taken = HashSet::new();
    let found = named.into_iter().map(|(key, (file, version, entry))| {
        let name = unique(&if part.is_empty() { key.clone() } else { format!("{part}.{key}") }, &mut taken);
        let spec = TensorSpec::whole(name, entry.dtype, entry.shape.clone());
        Found { key, file, version, entry, spec }
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

/// Sends the tensors.
async fn send(from: &Bucket, found: &[Found], writer: &mut StepWriter, progress: &dyn Fn(u64)) -> Result<()> {
    let fetch = |piece: Piece| async move {
        let Found { entry, file, version, .. } = &found[piece.tensor];
        let start = entry.range.start + piece.start;
        let data = from.get(file, Some(version), start..start + piece.length).await?;
        if data.len() as u64 != piece.length {
            return Err(Error::corrupt(format!("`{file}` of {} ends too early", from.url())));
        }
        Ok(data)
    };
    let pieces: Vec<Piece> = writer.pieces().collect();
    let mut fetched = stream::iter(pieces.into_iter().map(fetch)).buffered(PARALLEL);
    while let Some(data) = fetched.try_next().await? {
        progress(data.len() as u64);
        writer.write(data).await?;
    }
    Ok(())
}
