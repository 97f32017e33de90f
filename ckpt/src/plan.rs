//! Who writes what: each element of each tensor exactly once, the same number of bytes on each rank that holds it.
//!
//! Data in, data out. Every rank computes the plan from the same [`Roster`], hence the same plan. What several ranks
//! hold alike is laid end to end and cut into as many equal shares as there are holders; a cut goes between elements
//! of a whole tensor, and between rows of a part of one.

use std::collections::{BTreeMap, HashMap, HashSet};

use forebay_core::{Error, ErrorKind, Result};

use crate::manifest::{MAX_SLICES, TextLength};
use crate::region::Region;
use crate::roster::{Held, Placement, Roster};

/// What a rank writes of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Which of the rank's tensors, from 0.
    pub tensor: usize,
    /// The tensor's name in the manifest.
    pub name: String,
    /// Which part.
    pub region: Region,
}

/// What one rank is to know of the plan.
#[derive(Debug, PartialEq, Eq)]
pub struct Planned {
    /// What it writes, in the order of its tensors.
    pub shares: Vec<Share>,
    /// What the manifest says of the tensors of all ranks beside those of this one, whose own text is counted as its snapshot
    /// begins: the sum is the same on every rank.
    pub beside: TextLength,
}

/// Ranks that hold tensors alike.
#[derive(Debug, PartialEq, Eq)]
pub struct Alike {
    /// These ranks, ascending.
    pub ranks: Vec<usize>,
    /// Which of the asking rank's tensors they are, in an order that is the same on all of them; of others nothing.
    pub tensors: Vec<usize>,
}

/// What bytes of a rank's tensors hash to, by their number, where that was looked at.
pub type Hashes = HashMap<usize, String>;

/// The name in the manifest of a tensor that is one rank's own.
pub fn local_name(name: &str, rank: usize) -> String {
    format!("{name}@{rank}")
}

/// What bytes hash to, to be compared between ranks: 128 bits of BLAKE3.
pub fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_owned()
}

/// Which ranks hold parts alike, and which parts of `rank`'s these are; the same list on all ranks, but for the parts. Tensors that
/// are named `again` are left out.
///
/// # Errors
/// As [`plan`].
pub fn alike(roster: &Roster, again: &HashSet<String>, rank: usize) -> Result<Vec<Alike>> {
    let mut found: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    roster.each_held(again, |held| {
        if held.holders.len() > 1 && held.region().elements() > 0 {
            let own = held.holders.iter().find(|(holder, _)| *holder == rank).map(|(_, tensor)| *tensor);
            found.entry(held.ranks()).or_default().extend(own);
        }
        Ok(())
    })?;
    Ok(found.into_iter().map(|(ranks, tensors)| Alike { ranks, tensors }).collect())
}

/// What `rank` writes. Tensors that are named `again` are those of other names; ranks that have something alike, of which they told
/// `hashes`, must agree.
///
/// # Errors
/// `Invalid`, naming tensor and ranks, where two ranks disagree about a tensor that both have. Whether the parts
/// cover a tensor is checked by the manifest. `TooLarge` for a tensor of more slices than one may have.
pub fn plan(roster: &Roster, again: &HashSet<String>, hashes: &[Hashes], rank: usize) -> Result<Planned> {
    if rank >= roster.world_size() {
        return Err(Error::invalid(format!("rank {rank} of {}", roster.world_size())));
    }
    let mut sheet = Sheet::new(roster, rank);
    // By holders, so that each set of them shares what it has.
    let mut sets: BTreeMap<Vec<usize>, Vec<Held<'_>>> = BTreeMap::new();
    roster.each_held(again, |held| {
        agree_on_bytes(&held, hashes)?;
        match held.holders[..] {
            [holder] => {
                let part = held.region();
                match part.elements() > 0 || part.is_whole(&held.tensor.shape) {
                    true => sheet.note(holder, &held.tensor.name, part),
                    false => Ok(()),
                }
            }
            // Too small to be shared: who wants it asks one rank for all of them.
            [first, ..] if held.tensor.placement == Placement::Local => {
                sheet.note(first, &held.tensor.name, held.region())
            }
            _ => {
                sets.entry(held.ranks()).or_default().push(held);
                Ok(())
            }
        }
    })?;
    for (holders, parts) in sets {
        share_out(&parts, holders.len() as u64, &mut sheet)?;
    }
    for rank in 0..roster.world_size() {
        for (tensor, named) in roster.tensors_of(rank).iter().enumerate() {
            if roster.is_own(named) {
                let name = local_name(&named.name, rank);
                sheet.add((rank, tensor), &name, Region::whole(&named.shape), None)?;
            }
        }
    }
    Ok(sheet.planned())
}

/// The plan as it is drawn up: what one rank writes, and how much is said of what all do.
struct Sheet<'a> {
    roster: &'a Roster,
    rank: usize,
    shares: Vec<Share>,
    /// Of tensors that several ranks may write, how many slices there are.
    slices_of: HashMap<String, usize>,
    all: TextLength,
    own: TextLength,
    /// Slices of each rank.
    slices: Vec<u64>,
}

impl<'a> Sheet<'a> {
    fn new(roster: &'a Roster, rank: usize) -> Self {
        let slices = vec![0; roster.world_size()];
        let (all, own) = Default::default();
        Self { roster, rank, shares: Vec::new(), slices_of: HashMap::new(), all, own, slices }
    }

    /// Notes a share of what a rank has under that number.
    fn note(&mut self, place: (usize, usize), name: &str, region: Region) -> Result<()> {
        let known = self.slices_of.get(name).copied();
        let count = self.add(place, name, region, known)?;
        match self.slices_of.get_mut(name) {
            Some(known) => *known = count,
            None => drop(self.slices_of.insert(name.to_owned(), count)),
        }
        Ok(())
    }

    /// As [`Self::note`], where it is known of how many slices of the tensor it was told before, if of any; gives how many these are now.
    fn add(
        &mut self,
        (rank, tensor): (usize, usize),
        name: &str,
        region: Region,
        known: Option<usize>,
    ) -> Result<usize> {
        let held = &self.roster.tensors_of(rank)[tensor];
        let pieces = region.pieces(&held.shape, held.dtype.size);
        let count = known.unwrap_or(0) + pieces.len();
        if count > MAX_SLICES {
            return Err(too_many(name));
        }
        let text: TextLength = pieces.iter().map(Region::text).sum();
        let named = TextLength::of_tensor(name, held.dtype.name, &held.shape);
        self.slices[rank] += text.slices;
        self.all = self.all + text;
        if known.is_none() {
            // A tensor is named once, whoever has slices of it.
            self.all = self.all + named;
        }
        if rank == self.rank {
            self.own = self.own + text + named;
            self.shares.push(Share { tensor, name: name.to_owned(), region });
        }
        Ok(count)
    }

    fn planned(mut self) -> Planned {
        self.shares.sort_by_key(|share| share.tensor);
        let files = |slices: &u64| TextLength::of_files(*slices);
        let all = self.all + self.slices.iter().map(files).sum();
        let own = self.own + files(&self.slices[self.rank]);
        Planned { shares: self.shares, beside: all.less(own) }
    }
}

fn too_many(name: &str) -> Error {
    let fact =
        format!("tensor `{name}` lies in more than {MAX_SLICES} parts on the ranks, which no step can say");
    Error::new(ErrorKind::TooLarge, fact).with_hint("shard it over fewer ranks, or along its first dimension")
}

fn agree_on_bytes(held: &Held<'_>, hashes: &[Hashes]) -> Result<()> {
    let hash = |(rank, tensor): &(usize, usize)| hashes.get(*rank).and_then(|told| told.get(tensor));
    let Some((first, others)) = held.holders.split_first() else { return Ok(()) };
    let Some((rank, _)) = others.iter().find(|other| hash(other) != hash(first)) else { return Ok(()) };
    let (name, first) = (&held.tensor.name, first.0);
    Err(Error::invalid(format!("tensor `{name}` should be the same on ranks {first} and {rank}, and is not"))
        .with_hint("a replicated tensor must be equal wherever it is; is the model out of step?"))
}

/// Cuts what `count` holders have alike into as many equal shares.
fn share_out(parts: &[Held<'_>], count: u64, sheet: &mut Sheet<'_>) -> Result<()> {
    let bytes = |held: &Held<'_>| held.region().elements() * held.tensor.dtype.size;
    let total: u64 = parts.iter().map(bytes).sum();
    // The first byte of a holder's share; 128 bits, for a product of two sizes.
    let cut = |holder: u64| (u128::from(total) * u128::from(holder) / u128::from(count)) as u64;
    let mut start = 0;
    for held in parts {
        let (size, whole) = (bytes(held), held.region());
        let mut taken = 0;
        for (holder, place) in (0..count).zip(&held.holders) {
            let is_last = holder + 1 == count;
            let until = if is_last { size } else { cut(holder + 1).clamp(start, start + size) - start };
            let (region, end) = part_of(held, &whole, taken..until, size);
            // An empty part of a tensor is no slice of it; an empty tensor has one all the same.
            let is_named = size == 0 && holder == 0 && whole.is_whole(&held.tensor.shape);
            if end > taken || is_named {
                sheet.note(*place, &held.tensor.name, region)?;
            }
            taken = end;
        }
        start += size;
    }
    Ok(())
}

/// What lies between two bytes of a part, down to where it can be cut, and where that ends.
fn part_of(held: &Held<'_>, part: &Region, bytes: std::ops::Range<u64>, size: u64) -> (Region, u64) {
    let is_whole = part.is_whole(&held.tensor.shape);
    if size == 0 || (bytes.start == 0 && bytes.end == size && !is_whole) {
        return (part.clone(), size);
    }
    // Slices of a tensor are of one kind: whole tensors that several hold are cut as flat ranges, even into one.
    if is_whole {
        let unit = held.tensor.dtype.size;
        let (from, to) = (bytes.start / unit, bytes.end / unit);
        return (Region::flat(from..to), to * unit);
    }
    let rows = part.lengths.first().copied().unwrap_or(1);
    let unit = size / rows.max(1);
    let (from, to) = (bytes.start / unit, bytes.end / unit);
    let mut region = part.clone();
    (region.offsets[0], region.lengths[0]) = (part.offsets[0] + from, to - from);
    (region, to * unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::SliceKind;
    use crate::roster::tests::{Tensor, roster, said};

    fn tensor(name: &str, shape: &[u64], placement: Placement) -> Tensor {
        (name.into(), "float32", shape.into(), placement, None)
    }

    fn part(name: &str, shape: &[u64], part: Region) -> Tensor {
        (name.into(), "float32", shape.into(), Placement::Part, Some(part))
    }

    fn planned(ranks: &[Vec<Tensor>], hashes: &[Hashes]) -> Result<Vec<Planned>> {
        let (roster, again) = (roster(ranks)?, HashSet::new());
        (0..ranks.len()).map(|rank| plan(&roster, &again, hashes, rank)).collect()
    }

    fn shares(ranks: &[Vec<Tensor>]) -> Vec<Vec<Share>> {
        planned(ranks, &[]).expect("plan").into_iter().map(|planned| planned.shares).collect()
    }

    fn boxed(offsets: &[u64], lengths: &[u64]) -> Region {
        Region { kind: SliceKind::Box, offsets: offsets.into(), lengths: lengths.into() }
    }

    /// Every element of every shared tensor is in exactly one share; gives the elements each rank writes.
    fn check(ranks: &[Vec<Tensor>]) -> Vec<u64> {
        let shares = shares(ranks);
        let mut seen: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for (rank, shares) in shares.iter().enumerate() {
            for share in shares {
                let shape = &ranks[rank][share.tensor].2;
                let all = shape.iter().product::<u64>() as usize;
                let counts = seen.entry(share.name.clone()).or_insert_with(|| vec![0; all]);
                for run in share.region.runs(shape) {
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
        let rows = |first: u64| part("w", &[8, 10], boxed(&[first, 0], &[4, 10]));
        let rank = |first| vec![rows(first), tensor("own", &[3], Placement::Local)];
        assert_eq!(check(&[rank(0), rank(4)]), [43, 43]);
        assert_eq!(check(&[rank(0), rank(4), rank(0), rank(4)]), [23, 23, 23, 23]);
        let names = |shares: &[Share]| shares.iter().map(|share| share.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&shares(&[rank(0), rank(4)])[1]), ["w", "own@1"]);
    }

    #[test]
    fn a_tensor_with_fewer_rows_than_ranks_has_slices_of_one_kind() {
        let rank = |first, rows| vec![part("w", &[1], boxed(&[first], &[rows]))];
        let ranks = [rank(0, 1), rank(1, 0), rank(0, 1), rank(1, 0)];
        assert_eq!(check(&ranks), [0, 0, 1, 0]);
        let empty = vec![tensor("nothing", &[0, 3], Placement::Replicated)];
        assert_eq!(shares(&[empty.clone(), empty])[0].len(), 1);
    }

    #[test]
    fn a_leads_tensor_is_written_by_the_lowest_rank() {
        let stage = vec![tensor("running_mean", &[5], Placement::Lead)];
        assert_eq!(check(&[vec![], stage.clone(), stage]), [0, 5, 0]);
    }

    /// Each of them counts its own beside what this gives.
    #[test]
    fn a_tensor_that_several_ranks_write_is_named_once() {
        let rank = |first: u64| vec![part("w", &[8, 10], boxed(&[first, 0], &[4, 10]))];
        let slice = boxed(&[4, 0], &[4, 10]).text();
        for planned in planned(&[rank(0), rank(4)], &[]).expect("plan") {
            assert_eq!(planned.beside, slice + TextLength::of_files(1));
        }
    }

    /// It was told after all of the step had been sent.
    #[test]
    fn a_tensor_in_more_parts_than_a_step_can_say_is_named() {
        let parts = |count: u64| {
            let column = |at| vec![part("w", &[2, count], boxed(&[0, at], &[2, 1]))];
            let ranks: Vec<_> = (0..count).map(column).collect();
            plan(&roster(&ranks)?, &HashSet::new(), &[], 0).map(|planned| planned.beside.slices)
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
        let error =
            planned(&[one.clone(), vec![tensor("w", &[3], Placement::Replicated)]], &[]).expect_err("shapes");
        assert!(error.message().contains("float32 [2] on rank 0 and float32 [3] on rank 1"), "{error}");
        let hashed = |told: &[&str]| {
            let hashes: Vec<_> = told.iter().map(|hash| Hashes::from([(0, (*hash).to_owned())])).collect();
            planned(&vec![one.clone(); told.len()], &hashes)
        };
        hashed(&["a", "a"]).expect("equal");
        let error = hashed(&["a", "a", "b"]).expect_err("bytes");
        assert!(error.message().contains("the same on ranks 0 and 2"), "{error}");
    }

    #[test]
    fn who_holds_what_alike_is_told_alike() {
        let rows = |first: u64| part("w", &[8, 10], boxed(&[first, 0], &[4, 10]));
        let rank = |first| {
            let lead = tensor("mean", &[5], Placement::Lead);
            vec![
                tensor("own", &[3], Placement::Local),
                rows(first),
                tensor("all", &[2], Placement::Replicated),
                lead,
            ]
        };
        let (roster, w) = (roster(&[rank(0), rank(4), rank(0)]).expect("told"), HashSet::from(["w".into()]));
        let found = |again: &HashSet<String>, rank| {
            let sets = alike(&roster, again, rank).expect("told");
            sets.into_iter().map(|Alike { ranks, tensors }| (ranks, tensors)).collect::<Vec<_>>()
        };
        let none = HashSet::new();
        assert_eq!(found(&none, 0), [(vec![0, 1, 2], vec![2]), (vec![0, 2], vec![1])]);
        assert_eq!(found(&none, 1), [(vec![0, 1, 2], vec![2]), (vec![0, 2], vec![])]);
        assert_eq!(found(&w, 2), [(vec![0, 1, 2], vec![2])]);
        let shares = plan(&roster, &w, &[], 0).expect("plan").shares;
        assert!(shares.iter().all(|share| share.name != "w"), "it is another's name");
    }

    /// Optimizers count their steps in a tensor for each parameter: a thousand ranks would name a million.
    #[test]
    fn what_ranks_have_alike_for_themselves_is_written_by_one() {
        let rank = || {
            let steps = (0..8).map(|number| tensor(&format!("step{number}"), &[], Placement::Local));
            steps.chain([tensor("place", &[], Placement::Local)]).collect::<Vec<_>>()
        };
        let (outlines, mut words) = said(&vec![rank(); 4]);
        let told: Vec<_> = (0..8).map(|number| (number, "00000000")).collect();
        words.iter_mut().for_each(|word| word.bytes = serde_json::to_string(&told).expect("json"));
        let (roster, none) = (Roster::read(&outlines, &words).expect("told"), HashSet::new());
        for rank in 0..4 {
            let Planned { shares, beside } = plan(&roster, &none, &[], rank).expect("plan");
            let names: Vec<_> = shares.iter().map(|share| share.name.clone()).collect();
            let steps = (0..8).filter(|_| rank == 0).map(|number| format!("step{number}"));
            let own: Vec<_> = steps.chain([format!("place@{rank}")]).collect();
            assert_eq!(beside.slices + names.len() as u64, 12);
            assert_eq!(names, own);
            let found = alike(&roster, &none, rank).expect("told");
            assert_eq!(
                found,
                [Alike { ranks: vec![0, 1, 2, 3], tensors: (0..8).collect() }],
                "they are watched"
            );
        }
    }
}
