//! A directory of safetensors files as a step.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version};
use forebay_io::object::Bucket;
use futures::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};

use super::header::{Entry, MAX_HEADER, read};
use super::tree::state;
use super::writer::{Piece, StepWriter};
use super::{INDEX, WHOLE};
use crate::catalog::Start;
use crate::manifest::{Encoding, Extra};
use crate::shard::TensorSpec;

/// Pieces of tensors that are fetched at once.
const PARALLEL: usize = 4;
/// Tensors that one warning names.
const SHOWN: usize = 3;

/// What was saved.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Imported {
    /// The step.
    pub step: u64,
    /// How many tensors it has.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What was read otherwise than somebody may expect of the directory.
    #[serde(skip)]
    pub warnings: Vec<String>,
}

/// The file that each tensor lies in.
type WeightMap = BTreeMap<String, String>;

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
    let mut warnings = Vec::new();
    let found = find(from, part, &mut warnings).await?;
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
    Ok(Imported { step, tensors: found.len() as u64, bytes, warnings })
}

/// Tensors by their names in the files, each with the file, its version, and where it lies there.
type Named = BTreeMap<String, (ObjectKey, Version, Entry)>;

/// The tensors of all files, and what they will be called.
async fn find(from: &Bucket, part: &str, warnings: &mut Vec<String>) -> Result<Vec<Found>> {
    let named = match index(from, warnings).await? {
        Some(weight_map) => gather(from, &weight_map, warnings).await?,
        None => {
            let key = ObjectKey::new(WHOLE);
            let (entries, version) = read(from, &key).await?;
            entries.into_iter().map(|(name, entry)| (name, (key.clone(), version.clone(), entry))).collect()
        }
    };
    let mut taken = HashSet::new();
    let found = named.into_iter().map(|(key, (file, version, entry))| {
        let name = unique(&if part.is_empty() { key.clone() } else { format!("{part}.{key}") }, &mut taken);
        let spec = TensorSpec::whole(name, entry.dtype, entry.shape.clone());
        Found { key, file, version, entry, spec }
    });
    Ok(found.collect())
}

/// The tensors of the files that an index names, each from the one that it says. One that the index does not know is taken
/// from wherever it lies: transformers 5 reads all of each file, and 4 what the index knows alone.
async fn gather(from: &Bucket, weight_map: &WeightMap, warnings: &mut Vec<String>) -> Result<Named> {
    let mut named = Named::new();
    let (mut elsewhere, mut unknown, mut twice) = (Vec::new(), Vec::new(), None);
    let files: BTreeSet<&String> = weight_map.values().collect();
    for file in files {
        let key = ObjectKey::new(file);
        let (entries, version) = read(from, &key).await?;
        for (name, entry) in entries {
            match weight_map.get(&name) {
                Some(place) if place == file => {}
                Some(_) => {
                    elsewhere.push(format!("`{name}` of `{file}`"));
                    continue;
                }
                None => unknown.push(format!("`{name}` of `{file}`")),
            }
            let placed = (key.clone(), version.clone(), entry);
            if let Some((other, ..)) = named.insert(name.clone(), placed) {
                let text = format!("tensor `{name}` is in `{other}` and in `{key}`, and `{INDEX}` lacks it");
                twice.get_or_insert(text);
            }
        }
    }
    if let Some((name, file)) = weight_map.iter().find(|(name, _)| !named.contains_key(*name)) {
        let url = from.url();
        let message = format!("`{INDEX}` of {url} has tensor `{name}` in `{file}`, which does not hold it");
        return Err(Error::corrupt(message).with_hint("copy or download the whole model anew"));
    }
    if let Some(message) = twice {
        return Err(Error::invalid(message).with_hint("name it in the index, with its file"));
    }
    if let Some(which) = some_of(&elsewhere) {
        let why = "the index has them in other files (transformers takes what the last file by name holds)";
        warnings.push(format!("left out of the step: {which}; {why}"));
    }
    if let Some(which) = some_of(&unknown) {
        let why = "the index lacks them (transformers reads them from 5.0 on, and did not before)";
        warnings.push(format!("in the step nevertheless: {which}; {why}"));
    }
    Ok(named)
}

/// The first of what may be many; `None` where there is none.
fn some_of(names: &[String]) -> Option<String> {
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => None,
        count if count > SHOWN => Some(format!("{shown} and {} more", count - SHOWN)),
        _ => Some(shown),
    }
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

/// Which file each tensor lies in; `None` where the model is one file.
async fn index(from: &Bucket, warnings: &mut Vec<String>) -> Result<Option<WeightMap>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: WeightMap,
    }
    let place = || format!("`{INDEX}` of {}", from.url());
    let data = match from.get_whole_at_most(&ObjectKey::new(INDEX), MAX_HEADER).await {
        Ok((data, _)) => data,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let Index { weight_map } =
        serde_json::from_slice(&data).map_err(|error| Error::corrupt(format!("{}: {error}", place())))?;
    let is_outside = |name: &&String| name.contains('/') || matches!(name.as_str(), "" | "." | "..");
    if let Some(name) = weight_map.values().find(is_outside) {
        return Err(Error::invalid(format!("{}: `{name}` is no file of this directory", place())));
    }
    let is_of_others = weight_map.values().any(|name| name != WHOLE);
    if (is_of_others || weight_map.is_empty()) && from.head(&ObjectKey::new(WHOLE)).await?.is_some() {
        let url = from.url();
        warnings.push(format!(
            "{url} holds `{WHOLE}` and `{INDEX}`; the first alone is read, as by transformers"
        ));
        return Ok(None);
    }
    match weight_map.is_empty() {
        true => Err(Error::corrupt(format!("{} names no tensors", place()))),
        false => Ok(Some(weight_map)),
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
