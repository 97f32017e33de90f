//! A part of a step as a directory of safetensors files.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::files::{NewFile, exists};
use forebay_io::object::Bucket;
use serde::Serialize;
use serde_json::json;
use tokio::runtime::Handle;

use super::tree::{Named, View, tensors};
use super::{INDEX, WHOLE};
use crate::dtype::{Dtype, elements};
use crate::manifest::{Manifest, Slice};
use crate::plan::local_name;
use crate::region::Region;
use crate::restore::read_parts;
use crate::shard::{ShardLayout, TensorSpec};
use crate::trees::tree;

/// Bytes that are read before they are written, unless a single piece of a tensor has more.
const BATCH: u64 = 64 << 20;
/// Runs of a tensor that are shared at most; one that lies in more is read and written.
const MAX_SHARED: usize = 1024;
/// Threads that read.
const THREADS: usize = 4;

/// What will be written of a step.
#[derive(Debug)]
pub struct Export<'a> {
    manifest: &'a Manifest,
    files: Vec<Vec<Entry>>,
    differing: Vec<String>,
}

/// A tensor that will be written.
#[derive(Debug)]
struct Entry {
    spec: TensorSpec,
    /// Which of the step's.
    tensor: usize,
    content: Content,
}

/// Whose tensor is written under a name.
#[derive(Debug)]
struct Taken {
    rank: usize,
    tensor: usize,
    view: Option<View>,
}

/// What of the step's tensor it is.
#[derive(Debug)]
enum Content {
    /// All of it, or a run of elements.
    Run(Region),
    /// Elements apart from each other: the strides of its dimensions, and the first one.
    Strided(Vec<u64>, u64),
}

/// What was written.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Exported {
    /// The files' names.
    pub files: Vec<String>,
    /// How many tensors are in them.
    pub tensors: u64,
    /// Bytes of those tensors.
    pub bytes: u64,
    /// Bytes of tensors that were shared, neither read nor checked nor written.
    pub shared_bytes: u64,
    /// Where bytes are shared: the tensors that had to be read and written all the same.
    pub streamed: Vec<String>,
    /// Tensors of which a rank had another than the one that was written, a lower rank's.
    pub differing: Vec<String>,
}

impl<'a> Export<'a> {
    /// Plans to write the tensors of one part of the state, keys with dots between them, in files of at most `file_bytes`
    /// of tensors, unless a single one has more.
    ///
    /// # Errors
    /// `Invalid` when there is no such part, or safetensors cannot hold what it has.
    pub fn plan(manifest: &'a Manifest, part: &str, file_bytes: u64) -> Result<Self> {
        let known: HashMap<&str, usize> = manifest
            .tensors
            .iter()
            .enumerate()
            .map(|(index, tensor)| (tensor.name.as_str(), index))
            .collect();
        let (mut files, mut held): (Vec<Vec<Entry>>, u64) = (Vec::new(), 0);
        let mut taken: HashMap<String, Taken> = HashMap::new();
        let mut differing = BTreeSet::new();
        for_each_tensor(manifest, part, |rank, named| {
            // A rank's own comes before what all have.
            let own = local_name(&named.tensor, rank);
            let found = known.get(own.as_str()).or(known.get(named.tensor.as_str()));
            let lost = || {
                Error::corrupt(format!("its state names tensor `{}`, which it does not hold", named.tensor))
            };
            let index = *found.ok_or_else(lost)?;
            if named.path == "__metadata__" {
                let message = "a tensor is called `__metadata__`, which safetensors has for something else";
                return Err(Error::invalid(message).with_hint("--part says which part is written"));
            }
            if let Some(earlier) = taken.get(&named.path) {
                if earlier.rank == rank {
                    return Err(Error::invalid(format!("two tensors would be called `{}`", named.path)));
                }
                let is_same = manifest.tensors[earlier.tensor].holds_what(&manifest.tensors[index]);
                if !is_same || earlier.view != named.view {
                    differing.insert(named.path);
                }
                return Ok(());
            }
            let entry = entry(manifest, index, &named)?;
            let bytes = entry.spec.dtype.bytes_of(&entry.spec.shape).unwrap_or(u64::MAX);
            match files.last_mut().filter(|_| held == 0 || held.saturating_add(bytes) <= file_bytes) {
                Some(file) => file.push(entry),
                None => {
                    files.push(vec![entry]);
                    held = 0;
                }
            }
            held = held.saturating_add(bytes);
            taken.insert(named.path, Taken { rank, tensor: index, view: named.view });
            Ok(())
        })?;
        Ok(Self { manifest, files, differing: differing.into_iter().collect() })
    }

    /// Writes the files into `folder`, which exists; no file has its name before all are whole. Where `shared` is given,
    /// the step's shards are files below it that share bytes with new ones, and tensors are not read.
    ///
    /// Blocks: for a thread that is none of the runtime's. `progress` is told the bytes of tensors that were written since
    /// it was told last.
    ///
    /// # Errors
    /// `Invalid` when a model is there; as [`crate::restore::read_tensors`].
    pub fn write(
        &self,
        (runtime, bucket): (&Handle, &Bucket),
        folder: &Path,
        shared: Option<&Path>,
        progress: &dyn Fn(u64),
    ) -> Result<Exported> {
        if [WHOLE, INDEX].iter().any(|name| exists(&folder.join(name))) {
            return Err(Error::invalid(format!("{} holds a model already", folder.display()))
                .with_hint("write to another directory"));
        }
        let count = self.files.len();
        let name = |index: usize| format!("model-{:05}-of-{count:05}.safetensors", index + 1);
        let names: Vec<String> = if count == 1 { vec![WHOLE.into()] } else { (0..count).map(name).collect() };
        let mut exported =
            Exported { files: names.clone(), differing: self.differing.clone(), ..Exported::default() };
        let (mut files, mut weights) = (Vec::new(), BTreeMap::new());
        for (name, entries) in names.iter().zip(&self.files) {
            let source = Source { runtime, bucket, manifest: self.manifest, shared };
            let mut writer = Writer {
                source,
                file: NewFile::create(&folder.join(name))?,
                pending: Vec::new(),
                held: 0,
                progress,
            };
            writer.write(entries, &mut exported)?;
            weights.extend(entries.iter().map(|entry| (&entry.spec.name, name)));
            files.push(writer.file);
        }
        files.into_iter().try_for_each(NewFile::finish)?;
        if count > 1 {
            // Last: a directory without it is no model.
            let index = json!({"metadata": {"total_size": exported.bytes}, "weight_map": weights});
            let text = serde_json::to_string_pretty(&index).map_err(|error| Error::bug(error.to_string()))?;
            let mut file = NewFile::create(&folder.join(INDEX))?;
            file.write(format!("{text}\n").as_bytes())?;
            file.finish()?;
        }
        Ok(exported)
    }
}

/// Gives the tensors of one part of the state as each rank has it, rank 0 first, and whose they are. What one rank's tree
/// says is in memory at a time.
fn for_each_tensor(
    manifest: &Manifest,
    part: &str,
    mut give: impl FnMut(usize, Named) -> Result<()>,
) -> Result<()> {
    let (mut has_any, mut first) = (false, None);
    let with_own = ranks_with_own(manifest);
    // As the ranks have it that have the same tree.
    let mut common = Vec::new();
    for rank in 0..manifest.world_size as usize {
        let name = if rank == 0 { "state".to_owned() } else { local_name("state", rank) };
        let Some(extra) = manifest.extras.iter().find(|extra| extra.name == name) else {
            if with_own.contains(&rank) {
                common.iter().cloned().try_for_each(|named| give(rank, named))?;
            }
            continue;
        };
        let tree = tree(&extra.data)
            .map_err(|error| Error::corrupt(format!("step {}: its state: {error}", manifest.step)))?;
        match tensors(&tree, part) {
            Ok(there) => {
                has_any = true;
                if rank == 0 && !with_own.is_empty() {
                    common = there.clone();
                }
                there.into_iter().try_for_each(|named| give(rank, named))?;
            }
            // A rank may lack the part; what is wrong with it is told where all do.
            Err(error) if error.kind() == ErrorKind::Invalid => first = first.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    match first {
        _ if has_any => Ok(()),
        Some(error) => Err(error),
        None => Err(Error::corrupt(format!("step {} has no state", manifest.step))),
    }
}

/// The ranks that have tensors which others have otherwise under the same name.
fn ranks_with_own(manifest: &Manifest) -> HashSet<usize> {
    let rank_of = |name: &str| name.rsplit_once('@').and_then(|(_, rank)| rank.parse().ok());
    manifest.tensors.iter().filter_map(|tensor| rank_of(&tensor.name)).collect()
}

fn entry(manifest: &Manifest, index: usize, named: &Named) -> Result<Entry> {
    let tensor = &manifest.tensors[index];
    let dtype = Dtype::named(&tensor.dtype)?;
    if dtype.safetensors.is_none() {
        let (name, dtype) = (&tensor.name, &tensor.dtype);
        return Err(Error::invalid(format!("tensor `{name}` is {dtype}, which safetensors has not")));
    }
    let (shape, content) = match &named.view {
        None => (tensor.shape.clone(), Content::Run(Region::whole(&tensor.shape))),
        Some((shape, stride, offset)) => {
            let all = elements(&tensor.shape).unwrap_or(0);
            let content = view(shape, stride, *offset, all);
            let odd = || Error::corrupt(format!("`{}` is a view that its tensor cannot have", named.path));
            (shape.clone(), content.ok_or_else(odd)?)
        }
    };
    Ok(Entry { spec: TensorSpec::whole(&named.path, dtype, shape), tensor: index, content })
}

/// What a view of a tensor of so many elements is; `None` when it reaches outside of it.
fn view(shape: &[u64], stride: &[u64], offset: u64, all: u64) -> Option<Content> {
    let count = elements(shape)?;
    if shape.len() != stride.len() {
        return None;
    }
    if count == 0 {
        return Some(Content::Run(Region::flat(0..0)));
    }
    let mut last = offset;
    for (length, stride) in shape.iter().zip(stride) {
        last = last.checked_add((length - 1).checked_mul(*stride)?)?;
    }
    if last >= all {
        return None;
    }
    let mut dense = 1;
    let is_dense = shape.iter().zip(stride).rev().all(|(length, stride)| {
        let fits = *length == 1 || *stride == dense;
        dense *= length;
        fits
    });
    Some(match is_dense {
        true => Content::Run(Region::flat(offset..offset + count)),
        false => Content::Strided(stride.to_vec(), offset),
    })
}

/// Where tensors are read from.
struct Source<'a> {
    runtime: &'a Handle,
    bucket: &'a Bucket,
    manifest: &'a Manifest,
    shared: Option<&'a Path>,
}

/// A file on its way: what is pending is read and written together.
struct Writer<'a> {
    source: Source<'a>,
    file: NewFile,
    pending: Vec<(usize, Region)>,
    held: u64,
    progress: &'a dyn Fn(u64),
}

impl Writer<'_> {
    fn write(&mut self, entries: &[Entry], exported: &mut Exported) -> Result<()> {
        let specs: Vec<TensorSpec> = entries.iter().map(|entry| entry.spec.clone()).collect();
        let layout = ShardLayout::of(&specs)?;
        self.file.write(&layout.header)?;
        let mut order: Vec<usize> = (0..entries.len()).collect();
        // An empty tensor lies before the one that begins where it does.
        order.sort_by_key(|index| (layout.ranges[*index].start, layout.ranges[*index].end));
        for entry in order.into_iter().map(|index| &entries[index]) {
            let bytes = entry.spec.dtype.bytes_of(&entry.spec.shape).unwrap_or(0);
            exported.tensors += 1;
            exported.bytes += bytes;
            if let Some(root) = self.source.shared {
                if let Some(runs) = self.source.runs(entry).filter(|runs| runs.len() <= MAX_SHARED) {
                    self.flush()?;
                    for (key, range) in runs {
                        self.file.share(&root.join(key), range)?;
                    }
                    exported.shared_bytes += bytes;
                    (self.progress)(bytes);
                    continue;
                }
                exported.streamed.push(entry.spec.name.clone());
            }
            self.stream(entry)?;
        }
        self.flush()
    }

    fn stream(&mut self, entry: &Entry) -> Result<()> {
        let size = entry.spec.dtype.size;
        let shape = &self.source.manifest.tensors[entry.tensor].shape;
        let pieces = match &entry.content {
            Content::Run(region) => region.pieces(shape, size),
            Content::Strided(stride, offset) => {
                self.flush()?;
                return self.gather(entry, stride, *offset);
            }
        };
        for piece in pieces {
            let bytes = piece.elements() * size;
            if self.held > 0 && self.held + bytes > BATCH {
                self.flush()?;
            }
            self.held += bytes;
            self.pending.push((entry.tensor, piece));
        }
        Ok(())
    }

    /// Reads what is pending, and writes it.
    fn flush(&mut self) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        let data = self.source.read(pending)?;
        self.file.write(&data)?;
        (self.progress)(data.len() as u64);
        self.held = 0;
        Ok(())
    }

    /// Writes a view whose elements lie apart. Memory: the tensor that it is a view of, and a row.
    fn gather(&mut self, entry: &Entry, stride: &[u64], offset: u64) -> Result<()> {
        let (tensor, size) = (&self.source.manifest.tensors[entry.tensor], entry.spec.dtype.size);
        let data = self.source.read(vec![(entry.tensor, Region::whole(&tensor.shape))])?;
        let mut out = Vec::new();
        let shape = &entry.spec.shape;
        for number in 0..elements(shape).unwrap_or(0) {
            let (mut rest, mut at) = (number, offset);
            for dimension in (0..shape.len()).rev() {
                at += rest % shape[dimension] * stride[dimension];
                rest /= shape[dimension];
            }
            out.extend_from_slice(&data[(at * size) as usize..][..size as usize]);
            if out.len() as u64 >= BATCH {
                self.file.write(&out)?;
                (self.progress)(out.len() as u64);
                out.clear();
            }
        }
        (self.progress)(out.len() as u64);
        self.file.write(&out)
    }
}

impl<'a> Source<'a> {
    /// Parts of tensors, one after another, each checked.
    fn read(&self, parts: Vec<(usize, Region)>) -> Result<Vec<u8>> {
        read_parts((self.runtime, self.bucket, self.manifest), parts, THREADS)
    }

    /// Where the bytes of an entry lie, in their order: keys of shards and ranges; `None` where they lie apart.
    fn runs(&self, entry: &Entry) -> Option<Vec<(&'a str, Range<u64>)>> {
        let Content::Run(region) = &entry.content else { return None };
        let (manifest, size) = (self.manifest, entry.spec.dtype.size);
        let tensor = &manifest.tensors[entry.tensor];
        let mut found: Vec<(u64, &Slice, Range<u64>)> = Vec::new();
        for slice in &tensor.slices {
            for (from, to, count) in Region::of(slice).shared_with(region, &tensor.shape) {
                let start = slice.start + from * size;
                found.push((to, slice, start..start + count * size));
            }
        }
        found.sort_by_key(|(to, _, _)| *to);
        let mut runs: Vec<(&'a str, Range<u64>)> = Vec::new();
        for (_, slice, range) in found {
            let key = manifest.shards[slice.shard as usize].key.as_str();
            match runs.last_mut().filter(|(last, run)| *last == key && run.end == range.start) {
                Some((_, run)) => run.end = range.end,
                None => runs.push((key, range)),
            }
        }
        Some(runs)
    }
}
