//! What two steps hold differently, by their manifests: data in, data out.
//!
//! Two tensors are the same when their types and shapes are, and their slices have
//! equal identities. Where they are cut otherwise, the checksums of slices are put together to one of the whole tensor,
//! so that steps of different numbers of ranks compare; slices that cut columns can only be compared one by one, and
//! where those lie otherwise in the other step the content is unknown, until [`settle`] reads it.

use std::collections::HashMap;

use forebay_core::checksum::combine;
use forebay_core::{Error, Result};
use forebay_io::object::Bucket;
use serde::Serialize;
use tokio::runtime::Handle;

use crate::dtype::Dtype;
use crate::manifest::{Manifest, Slice, Tensor};
use crate::region::Region;
use crate::restore::read_parts;

/// Bytes of a tensor that are compared at once, unless a single piece of it has more.
const BATCH: u64 = 64 << 20;
/// Threads that read.
const THREADS: usize = 4;

/// What became of a tensor or an extra from the first step to the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// Only the second has it.
    Added,
    /// Only the first has it.
    Removed,
    /// It has another type or shape.
    Reshaped,
    /// Its content differs.
    Changed,
    /// Their slices do not tell.
    Unknown,
}

/// A tensor as one of the steps has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Side {
    /// Its element type.
    pub dtype: String,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: u64,
}

/// A tensor that is not the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorChange {
    /// Its name.
    pub name: String,
    /// What became of it.
    pub change: Change,
    /// In the first step.
    pub before: Option<Side>,
    /// In the second step.
    pub after: Option<Side>,
}

/// An extra that is not the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExtraChange {
    /// Its name.
    pub name: String,
    /// What became of it.
    pub change: Change,
}

/// Everything that is not the same, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diff {
    /// The tensors.
    pub tensors: Vec<TensorChange>,
    /// The extras.
    pub extras: Vec<ExtraChange>,
    /// Tensors that are the same in both.
    pub same: usize,
    /// Their bytes.
    pub same_bytes: u64,
}

/// What `after` holds differently from `before`.
pub fn diff(before: &Manifest, after: &Manifest) -> Diff {
    let (mut tensors, mut same, mut same_bytes) = (Vec::new(), 0, 0);
    for (name, pair) in pairs(&before.tensors, &after.tensors, |tensor| &tensor.name) {
        let change = match pair {
            (Some(one), Some(two)) => change_of((before, one), (after, two)),
            (None, _) => Some(Change::Added),
            (_, None) => Some(Change::Removed),
        };
        let sides = (pair.0.map(Side::of), pair.1.map(Side::of));
        match change {
            Some(change) => {
                tensors.push(TensorChange { name: name.clone(), change, before: sides.0, after: sides.1 });
            }
            None => {
                same += 1;
                same_bytes += sides.0.map_or(0, |side| side.bytes);
            }
        }
    }
    let mut extras = Vec::new();
    for (name, pair) in pairs(&before.extras, &after.extras, |extra| &extra.name) {
        let change = match pair {
            (Some(one), Some(two)) => (one != two).then_some(Change::Changed),
            (None, _) => Some(Change::Added),
            (_, None) => Some(Change::Removed),
        };
        extras.extend(change.map(|change| ExtraChange { name: name.clone(), change }));
    }
    Diff { tensors, extras, same, same_bytes }
}

/// Reads the tensors that the manifests do not tell apart, from both sides, and leaves none unknown. Blocks: for a thread
/// that is none of the runtime's. `progress` is told the bytes that were compared since it was told last.
///
/// # Errors
/// As [`crate::restore::read_tensors`].
pub fn settle(
    runtime: &Handle,
    found: &mut Diff,
    sides: [(&Bucket, &Manifest); 2],
    progress: &dyn Fn(u64),
) -> Result<()> {
    let mut kept = Vec::with_capacity(found.tensors.len());
    for mut tensor in std::mem::take(&mut found.tensors) {
        if tensor.change == Change::Unknown {
            if is_equal(runtime, &tensor.name, sides, progress)? {
                found.same += 1;
                found.same_bytes += tensor.before.map_or(0, |side| side.bytes);
                continue;
            }
            tensor.change = Change::Changed;
        }
        kept.push(tensor);
    }
    found.tensors = kept;
    Ok(())
}

/// Whether a tensor that both sides have, of one type and shape, holds the same bytes; a few MiB at a time.
fn is_equal(
    runtime: &Handle,
    name: &str,
    sides: [(&Bucket, &Manifest); 2],
    progress: &dyn Fn(u64),
) -> Result<bool> {
    let position = |manifest: &Manifest| manifest.tensors.iter().position(|tensor| tensor.name == name);
    let [one, two] = sides.map(|(_, manifest)| position(manifest));
    let (Some(one), Some(two)) = (one, two) else { return Err(Error::bug("a tensor that one side has not")) };
    let tensor = &sides[0].1.tensors[one];
    let size = Dtype::named(&tensor.dtype)?.size;
    let mut pieces = Region::whole(&tensor.shape).pieces(&tensor.shape, size).into_iter().peekable();
    while pieces.peek().is_some() {
        let (mut parts, mut bytes) = (Vec::new(), 0);
        while let Some(piece) = pieces.next_if(|piece| bytes == 0 || bytes + piece.elements() * size <= BATCH)
        {
            bytes += piece.elements() * size;
            parts.push(piece);
        }
        let read = |(bucket, manifest), index| {
            let parts = parts.iter().map(|part| (index, part.clone())).collect();
            read_parts((runtime, bucket, manifest), parts, THREADS)
        };
        if read(sides[0], one)? != read(sides[1], two)? {
            return Ok(false);
        }
        progress(bytes);
    }
    Ok(true)
}

impl Side {
    fn of(tensor: &Tensor) -> Self {
        let bytes = tensor.slices.iter().map(Slice::len).sum();
        Self { dtype: tensor.dtype.clone(), shape: tensor.shape.clone(), bytes }
    }
}

/// What two lists have under one name.
type Pair<'a, T> = (Option<&'a T>, Option<&'a T>);

/// What either list has under each name, in the order of names.
fn pairs<'a, T>(before: &'a [T], after: &'a [T], name: fn(&T) -> &String) -> Vec<(&'a String, Pair<'a, T>)> {
    let mut named: HashMap<&String, Pair<'_, T>> = HashMap::new();
    before.iter().for_each(|item| named.entry(name(item)).or_default().0 = Some(item));
    after.iter().for_each(|item| named.entry(name(item)).or_default().1 = Some(item));
    let mut pairs: Vec<_> = named.into_iter().collect();
    pairs.sort_by_key(|pair| pair.0);
    pairs
}

fn change_of(one: (&Manifest, &Tensor), two: (&Manifest, &Tensor)) -> Option<Change> {
    let (left, right) = (one.1, two.1);
    if (&left.dtype, &left.shape) != (&right.dtype, &right.shape) {
        return Some(Change::Reshaped);
    }
    let (ours, theirs) = (in_order(left), in_order(right));
    if ours.iter().map(|slice| Region::of(slice)).eq(theirs.iter().map(|slice| Region::of(slice))) {
        let differ = ours.iter().zip(&theirs).any(|(left, right)| left.blake3 != right.blake3);
        return differ.then_some(Change::Changed);
    }
    match (whole_checksum(left), whole_checksum(right)) {
        (Some(left), Some(right)) => (left != right).then_some(Change::Changed),
        _ => Some(Change::Unknown),
    }
}

/// A tensor's slices that hold anything, by where they begin.
fn in_order(tensor: &Tensor) -> Vec<&Slice> {
    let mut slices: Vec<&Slice> = tensor.slices.iter().filter(|slice| !slice.is_empty()).collect();
    slices.sort_by(|a, b| a.offsets.cmp(&b.offsets));
    slices
}

/// The checksum of all of a tensor's bytes in row-major order; `None` where a slice is no run of them.
fn whole_checksum(tensor: &Tensor) -> Option<u32> {
    let mut checksum = forebay_core::crc32c(&[]);
    for slice in in_order(tensor) {
        if Region::of(slice).runs(&tensor.shape).nth(1).is_some() {
            return None;
        }
        checksum = combine(checksum, slice.crc32c.0, slice.len());
    }
    Some(checksum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Checksum, Encoding, Extra, Identity, SliceKind};

    fn slice(kind: SliceKind, offsets: &[u64], lengths: &[u64], bytes: &[u8]) -> Slice {
        let (crc32c, blake3) = (Checksum(forebay_core::crc32c(bytes)), Identity::of(bytes));
        let (offsets, lengths) = (offsets.into(), lengths.into());
        Slice { kind, offsets, lengths, shard: 0, start: 0, end: bytes.len() as u64, crc32c, blake3 }
    }

    fn tensor(name: &str, shape: &[u64], slices: Vec<Slice>) -> Tensor {
        Tensor { name: name.into(), dtype: "uint8".into(), shape: shape.into(), slices }
    }

    fn whole(name: &str, bytes: &[u8]) -> Tensor {
        let length = bytes.len() as u64;
        tensor(name, &[length], vec![slice(SliceKind::Box, &[0], &[length], bytes)])
    }

    fn manifest(tensors: Vec<Tensor>, extras: &[(&str, &str)]) -> Manifest {
        let extra = |(name, data): &(&str, &str)| Extra {
            name: (*name).into(),
            encoding: Encoding::Json,
            data: (*data).into(),
        };
        Manifest {
            commit: String::new(),
            run: String::new(),
            incarnation: 1,
            step: 1,
            created_ms: 0,
            world_size: 1,
            parents: Vec::new(),
            shards: Vec::new(),
            tensors,
            extras: extras.iter().map(extra).collect(),
        }
    }

    fn changes(before: Vec<Tensor>, after: Vec<Tensor>) -> Vec<(String, Change)> {
        let found = diff(&manifest(before, &[]), &manifest(after, &[]));
        found.tensors.into_iter().map(|change| (change.name, change.change)).collect()
    }

    #[test]
    fn what_was_added_removed_and_changed_is_told() {
        let before = manifest(
            vec![whole("gone", b"123"), whole("other", b"123"), whole("same", b"12345"), whole("size", b"1")],
            &[("state", "{}"), ("rng", "1")],
        );
        let after = manifest(
            vec![whole("same", b"12345"), whole("new", b"1"), whole("size", b"12"), whole("other", b"124")],
            &[("state", "{}"), ("rng", "2"), ("state@1", "{}")],
        );
        let found = diff(&before, &after);
        let tensors: Vec<_> =
            found.tensors.iter().map(|change| (change.name.as_str(), change.change)).collect();
        let expected = [
            ("gone", Change::Removed),
            ("new", Change::Added),
            ("other", Change::Changed),
            ("size", Change::Reshaped),
        ];
        assert_eq!(tensors, expected);
        let extras: Vec<_> =
            found.extras.iter().map(|change| (change.name.as_str(), change.change)).collect();
        assert_eq!(extras, [("rng", Change::Changed), ("state@1", Change::Added)]);
        assert_eq!((found.same, found.same_bytes), (1, 5));
        let size = &found.tensors[3];
        assert_eq!(size.before.as_ref().map(|side| side.bytes), Some(1));
        assert_eq!(size.after.as_ref().map(|side| side.shape.clone()), Some(vec![2]));
        assert_eq!(diff(&before, &before).tensors, []);
    }

    #[test]
    fn tensors_that_are_sliced_otherwise_are_compared() {
        let one = tensor("w", &[4, 2], vec![slice(SliceKind::Box, &[0, 0], &[4, 2], b"abcdefgh")]);
        let rows = tensor(
            "w",
            &[4, 2],
            vec![
                slice(SliceKind::Box, &[3, 0], &[1, 2], b"gh"),
                slice(SliceKind::Box, &[0, 0], &[3, 2], b"abcdef"),
            ],
        );
        let flat = tensor(
            "w",
            &[4, 2],
            vec![slice(SliceKind::Flat, &[0], &[5], b"abcde"), slice(SliceKind::Flat, &[5], &[3], b"fgX")],
        );
        let columns = |last: &[u8]| {
            let left = slice(SliceKind::Box, &[0, 0], &[4, 1], b"aceg");
            tensor("w", &[4, 2], vec![left, slice(SliceKind::Box, &[0, 1], &[4, 1], last)])
        };
        assert_eq!(changes(vec![one.clone()], vec![rows.clone()]), []);
        assert_eq!(changes(vec![rows], vec![flat]), [("w".into(), Change::Changed)]);
        assert_eq!(changes(vec![columns(b"bdfh")], vec![columns(b"bdfh")]), []);
        assert_eq!(changes(vec![columns(b"bdfh")], vec![columns(b"bdfX")]), [("w".into(), Change::Changed)]);
        assert_eq!(changes(vec![one], vec![columns(b"bdfh")]), [("w".into(), Change::Unknown)]);
    }
}
