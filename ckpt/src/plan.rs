//! Who writes what: each element of each tensor exactly once, the same number of bytes on each rank that holds it.
//!
//! Data in, data out. Every rank computes the plan from the same descriptors, hence the same plan. What several ranks
//! hold alike is laid end to end and cut into as many equal shares as there are holders; a cut goes between elements
//! of a whole tensor, and between rows of a part of one.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use forebay_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::manifest::{MAX_SLICES, TextLength};
use crate::region::Region;

/// Who else has the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Nobody: each rank that has a tensor of the name has one of its own.
    Local,
    /// Whoever names it; what the lowest of these ranks has counts.
    Lead,
    /// Whoever names it has all of it alike.
    Replicated,
    /// This part of it is here; ranks that name the same part have it alike.
    Part(Region),
}

/// A tensor as one rank has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// Its name, unique on the rank.
    pub name: String,
    /// Its element type.
    pub dtype: String,
    /// Its dimensions over all ranks.
    pub shape: Vec<u64>,
    /// Who else has it.
    pub placement: Placement,
    /// What the bytes here hash to, if that was looked at: those who have the same must agree.
    pub hash: Option<String>,
}

/// What a rank writes of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Which of the rank's descriptors, from 0.
    pub tensor: usize,
    /// The tensor's name in the manifest.
    pub name: String,
    /// Which part.
    pub region: Region,
}

/// The name in the manifest of a tensor that is one rank's own.
pub fn local_name(name: &str, rank: usize) -> String {
    format!("{name}@{rank}")
}

/// What bytes hash to, to be compared between ranks: 128 bits of BLAKE3.
pub fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_owned()
}

/// A part that one or more ranks hold: rank and number of the descriptor there.
struct Held<'a> {
    tensor: &'a Descriptor,
    dtype: Dtype,
    region: Cow<'a, Region>,
    holders: Vec<(usize, usize)>,
}

/// The parts of one tensor, each found by its region: a tensor that all ranks shard has as many as there are ranks.
#[derive(Default)]
struct Parts<'a> {
    held: Vec<Held<'a>>,
    by_region: HashMap<Cow<'a, Region>, usize>,
}

/// What each rank writes, from the descriptors of all.
///
/// # Errors
/// `Invalid`, naming tensor and ranks, where two ranks disagree about a tensor that both have. Whether the parts
/// cover a tensor is checked by the manifest.
pub fn plan(ranks: &[Vec<Descriptor>]) -> Result<Vec<Vec<Share>>> {
    let mut shares: Vec<Vec<Share>> = vec![Vec::new(); ranks.len()];
    // By holders, so that each set of them shares what it has.
    let mut sets: BTreeMap<Vec<usize>, Vec<Held<'_>>> = BTreeMap::new();
    for held in held_parts(ranks)? {
        let holders = held.holders.iter().map(|(rank, _)| *rank).collect();
        sets.entry(holders).or_default().push(held);
    }
    for (holders, parts) in sets {
        share_out(&parts, holders.len() as u64, &mut shares);
    }
    for (rank, descriptors) in ranks.iter().enumerate() {
        for (tensor, descriptor) in descriptors.iter().enumerate() {
            if descriptor.placement == Placement::Local {
                let (name, region) = (local_name(&descriptor.name, rank), Region::whole(&descriptor.shape));
                shares[rank].push(Share { tensor, name, region });
            }
        }
        shares[rank].sort_by_key(|share| share.tensor);
    }
    Ok(shares)
}

/// What a manifest says of the tensors of all ranks beside those of one, whose own text is counted as its snapshot begins: the sum
/// is the same on every rank.
///
/// # Errors
/// `Invalid` for an element type that there is not, and a part that lies outside of its tensor. `TooLarge` for a tensor of more
/// slices than one may have.
pub fn text_beside(ranks: &[Vec<Descriptor>], shares: &[Vec<Share>], rank: usize) -> Result<TextLength> {
    let mut named: HashMap<&str, usize> = HashMap::new();
    let (mut all, mut own) = (TextLength::default(), TextLength::default());
    for (number, (descriptors, shares)) in ranks.iter().zip(shares).enumerate() {
        let (mut names, mut slices) = (TextLength::default(), TextLength::default());
        for Share { tensor, name, region } in shares {
            let Descriptor { dtype, shape, .. } = &descriptors[*tensor];
            if !region.fits(shape) {
                return Err(Error::invalid(format!("a part of tensor `{name}` lies outside of it")));
            }
            let size = Dtype::named(dtype)?.size;
            let pieces = region.pieces(shape, size);
            slices = slices + pieces.iter().map(Region::text).sum();
            let text = TextLength::of_tensor(name, dtype, shape);
            names = names + text;
            let count = named.entry(name).or_insert_with(|| {
                // A tensor is named once, whoever has slices of it.
                all = all + text;
                0
            });
            *count += pieces.len();
            if *count > MAX_SLICES {
                return Err(too_many(name));
            }
        }
        let part = slices + TextLength::of_files(slices.slices);
        all = all + part;
        if number == rank {
            own = names + part;
        }
    }
    Ok(all.less(own))
}

fn too_many(name: &str) -> Error {
    let fact =
        format!("tensor `{name}` lies in more than {MAX_SLICES} parts on the ranks, which no step can say");
    Error::new(ErrorKind::TooLarge, fact).with_hint("shard it over fewer ranks, or along its first dimension")
}

/// Everything that is not one rank's own, in the order of names.
fn held_parts(ranks: &[Vec<Descriptor>]) -> Result<Vec<Held<'_>>> {
    let mut named: BTreeMap<&str, Parts<'_>> = BTreeMap::new();
    for (rank, descriptors) in ranks.iter().enumerate() {
        for (index, descriptor) in descriptors.iter().enumerate() {
            let region = match &descriptor.placement {
                Placement::Local => continue,
                Placement::Lead | Placement::Replicated => Cow::Owned(Region::whole(&descriptor.shape)),
                Placement::Part(region) => Cow::Borrowed(region),
            };
            let Parts { held, by_region } = named.entry(&descriptor.name).or_default();
            if let Some(first) = held.first() {
                agree(first, descriptor, rank)?;
            }
            match by_region.get(&region).map(|same| &mut held[*same]) {
                Some(held) if descriptor.placement == Placement::Lead => {
                    debug_assert!(held.holders.iter().all(|(other, _)| *other < rank), "ranks come in order");
                }
                Some(held) => {
                    agree_on_bytes(held, descriptor, rank)?;
                    held.holders.push((rank, index));
                }
                None => {
                    let dtype = Dtype::named(&descriptor.dtype)?;
                    by_region.insert(region.clone(), held.len());
                    held.push(Held { tensor: descriptor, dtype, region, holders: vec![(rank, index)] });
                }
            }
        }
    }
    Ok(named.into_values().flat_map(|parts| parts.held).collect())
}

fn agree(first: &Held<'_>, other: &Descriptor, rank: usize) -> Result<()> {
    let one = first.tensor;
    if (&one.dtype, &one.shape) == (&other.dtype, &other.shape) {
        return Ok(());
    }
    let (name, first) = (&one.name, first.holders[0].0);
    Err(Error::invalid(format!(
        "tensor `{name}` is {} {:?} on rank {first} and {} {:?} on rank {rank}",
        one.dtype, one.shape, other.dtype, other.shape
    )))
}

fn agree_on_bytes(held: &Held<'_>, other: &Descriptor, rank: usize) -> Result<()> {
    if held.tensor.hash == other.hash {
        return Ok(());
    }
    let (name, first) = (&other.name, held.holders[0].0);
    Err(Error::invalid(format!("tensor `{name}` should be the same on ranks {first} and {rank}, and is not"))
        .with_hint("a replicated tensor must be equal wherever it is; is the model out of step?"))
}

/// Cuts what `count` holders have alike into as many equal shares.
fn share_out(parts: &[Held<'_>], count: u64, shares: &mut [Vec<Share>]) {
    let bytes = |held: &Held<'_>| held.region.elements() * held.dtype.size;
    let total: u64 = parts.iter().map(bytes).sum();
    // The first byte of a holder's share; 128 bits, for a product of two sizes.
    let cut = |holder: u64| (u128::from(total) * u128::from(holder) / u128::from(count)) as u64;
    let mut start = 0;
    for held in parts {
        let size = bytes(held);
        let mut taken = 0;
        for (holder, (rank, tensor)) in (0..count).zip(&held.holders) {
            let is_last = holder + 1 == count;
            let until = if is_last { size } else { cut(holder + 1).clamp(start, start + size) - start };
            let (region, end) = part_of(held, taken..until, size);
            // An empty part of a tensor is no slice of it; an empty tensor has one all the same.
            let is_named = size == 0 && holder == 0 && held.region.is_whole(&held.tensor.shape);
            if end > taken || is_named {
                let name = held.tensor.name.clone();
                shares[*rank].push(Share { tensor: *tensor, name, region });
            }
            taken = end;
        }
        start += size;
    }
}

/// What lies between two bytes of a part, down to where it can be cut, and where that ends.
fn part_of(held: &Held<'_>, bytes: std::ops::Range<u64>, size: u64) -> (Region, u64) {
    let rows = held.region.lengths.first().copied().unwrap_or(1);
    let is_whole = held.region.is_whole(&held.tensor.shape);
    if bytes.start == 0 && bytes.end == size && (!is_whole || held.holders.len() == 1) {
        return (held.region.clone().into_owned(), size);
    }
    if size == 0 {
        return (held.region.clone().into_owned(), 0);
    }
    // Slices of a tensor are of one kind: whole tensors that several hold are cut as flat ranges, even into one.
    if is_whole {
        let unit = held.dtype.size;
        let (from, to) = (bytes.start / unit, bytes.end / unit);
        return (Region::flat(from..to), to * unit);
    }
    let unit = size / rows.max(1);
    let (from, to) = (bytes.start / unit, bytes.end / unit);
    let mut region = held.region.clone().into_owned();
    (region.offsets[0], region.lengths[0]) = (held.region.offsets[0] + from, to - from);
    (region, to * unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::SliceKind;

    fn tensor(name: &str, shape: &[u64], placement: Placement) -> Descriptor {
        Descriptor { name: name.into(), dtype: "float32".into(), shape: shape.into(), placement, hash: None }
    }

    fn boxed(offsets: &[u64], lengths: &[u64]) -> Region {
        Region { kind: SliceKind::Box, offsets: offsets.into(), lengths: lengths.into() }
    }

    /// Every element of every shared tensor is in exactly one share; gives the elements each rank writes.
    fn check(ranks: &[Vec<Descriptor>]) -> Vec<u64> {
        let shares = plan(ranks).expect("plan");
        let mut seen: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for (rank, shares) in shares.iter().enumerate() {
            for share in shares {
                let descriptor = &ranks[rank][share.tensor];
                let all = descriptor.shape.iter().product::<u64>() as usize;
                let counts = seen.entry(share.name.clone()).or_insert_with(|| vec![0; all]);
                for run in share.region.runs(&descriptor.shape) {
                    run.for_each(|element| counts[element as usize] += 1);
                }
            }
        }
        for (name, counts) in &seen {
            assert!(counts.iter().all(|count| *count == 1), "{name}: {counts:?}");
        }
        shares.iter().map(|shares| shares.iter().map(|share| share.region.elements()).sum()).collect()
    }

    #[test]
    fn replicated_tensors_are_written_in_equal_shares() {
        let ranks = |count: usize| {
            let sizes: [&[u64]; 6] = [&[1000, 33], &[7], &[], &[0, 3], &[129, 5], &[100]];
            let all = sizes.iter().enumerate();
            let all = all.map(|(index, shape)| tensor(&format!("t{index}"), shape, Placement::Replicated));
            vec![all.collect::<Vec<_>>(); count]
        };
        for count in [1, 2, 3, 4, 7, 16] {
            let written = check(&ranks(count));
            let (most, total) = (*written.iter().max().expect("ranks"), written.iter().sum::<u64>());
            assert_eq!(total, 33_000 + 7 + 1 + 645 + 100);
            assert!(most * count as u64 <= total + total / 100, "{count} ranks: {written:?}");
        }
    }

    #[test]
    fn parts_that_several_hold_are_shared_and_others_stay() {
        let part = |first: u64| Placement::Part(boxed(&[first, 0], &[4, 10]));
        let rank = |first| vec![tensor("w", &[8, 10], part(first)), tensor("own", &[3], Placement::Local)];
        assert_eq!(check(&[rank(0), rank(4)]), [43, 43]);
        assert_eq!(check(&[rank(0), rank(4), rank(0), rank(4)]), [23, 23, 23, 23]);
        let names = |shares: &[Share]| shares.iter().map(|share| share.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&plan(&[rank(0), rank(4)]).expect("plan")[1]), ["w", "own@1"]);
    }

    #[test]
    fn a_tensor_with_fewer_rows_than_ranks_has_slices_of_one_kind() {
        let rank = |first, rows| vec![tensor("w", &[1], Placement::Part(boxed(&[first], &[rows])))];
        let ranks = [rank(0, 1), rank(1, 0), rank(0, 1), rank(1, 0)];
        assert_eq!(check(&ranks), [0, 0, 1, 0]);
        let empty = vec![tensor("nothing", &[0, 3], Placement::Replicated)];
        assert_eq!(plan(&[empty.clone(), empty]).expect("plan")[0].len(), 1);
    }

    #[test]
    fn a_leads_tensor_is_written_by_the_lowest_rank() {
        let stage = vec![tensor("running_mean", &[5], Placement::Lead)];
        assert_eq!(check(&[vec![], stage.clone(), stage]), [0, 5, 0]);
    }

    /// Each of them counts its own beside what this gives.
    #[test]
    fn a_tensor_that_several_ranks_write_is_named_once() {
        let part = |first: u64| Placement::Part(boxed(&[first, 0], &[4, 10]));
        let ranks = [vec![tensor("w", &[8, 10], part(0))], vec![tensor("w", &[8, 10], part(4))]];
        let shares = plan(&ranks).expect("plan");
        let slice = boxed(&[4, 0], &[4, 10]).text();
        for rank in 0..2 {
            let beside = text_beside(&ranks, &shares, rank).expect("text");
            assert_eq!(beside, slice + TextLength::of_files(1));
        }
        let outside = [vec![tensor("w", &[8, 10], part(5))]];
        let error = text_beside(&outside, &plan(&outside).expect("plan"), 0).expect_err("outside");
        assert!(error.message().contains("`w` lies outside of it"), "{error}");
    }

    /// It was told after all of the step had been sent.
    #[test]
    fn a_tensor_in_more_parts_than_a_step_can_say_is_named() {
        let parts = |count: u64| {
            let part = |at| vec![tensor("w", &[2, count], Placement::Part(boxed(&[0, at], &[2, 1])))];
            let ranks: Vec<_> = (0..count).map(part).collect();
            text_beside(&ranks, &plan(&ranks).expect("plan"), 0).map(|text| text.slices)
        };
        let most = MAX_SLICES as u64;
        assert_eq!(parts(most).expect("as many as there may be"), most - 1);
        let error = parts(most + 1).expect_err("too many");
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        assert!(error.message().contains("tensor `w` lies in more than 16384 parts"), "{error}");
    }

    #[test]
    fn ranks_that_disagree_are_named() {
        let one = vec![tensor("w", &[2], Placement::Replicated)];
        let error = plan(&[one.clone(), vec![tensor("w", &[3], Placement::Replicated)]]).expect_err("shapes");
        assert!(error.message().contains("float32 [2] on rank 0 and float32 [3] on rank 1"), "{error}");
        let hashed = |hash: &str| vec![Descriptor { hash: Some(hash.into()), ..one[0].clone() }];
        plan(&[hashed("a"), hashed("a")]).expect("equal");
        let error = plan(&[hashed("a"), hashed("a"), hashed("b")]).expect_err("bytes");
        assert!(error.message().contains("the same on ranks 0 and 2"), "{error}");
    }
}
