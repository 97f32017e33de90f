//! Who reads what of a step for others, and how it comes to them: computed by each rank alike, from what all want.
//!
//! What several ranks want has a *holder* on each host of theirs: the rank in whose lent memory it will be for a round, for
//! that host's ranks to copy. One of the holders reads it, and it goes from host to host, from each holder to the next. So a host
//! receives it once, and sends it once at most, however many they are.

use std::collections::{BTreeMap, HashMap};

use forebay_core::{Error, Result};

use super::super::SliceId;
use super::Wishes;
use crate::manifest::Manifest;
use crate::region::Region;

/// Whence the bytes of a step come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Of the store, which every rank reaches.
    Store,
    /// Of hosts' memory: that of the host with this number has the shard, in the manifest's order.
    Hosts(Vec<usize>),
}

/// A slice in the lent memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    /// Tensor and slice.
    pub slice: SliceId,
    /// Its first byte there.
    pub at: usize,
    /// The rank that it comes from; none where this one reads it.
    pub from: Option<usize>,
    /// The rank that it goes on to.
    pub to: Option<usize>,
}

/// What passes through lent memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Of each rank, of each of its rounds: what is in its memory.
    pub placed: Vec<Vec<Vec<Placed>>>,
    /// How often all ranks meet.
    pub rounds: usize,
    /// Bytes of a rank's memory in a round, at most.
    pub buffer: u64,
    /// What each slice that passes through is not copied by: the ranks of that host, which have it where it is read.
    pub shared: HashMap<SliceId, Option<usize>>,
}

/// What goes the same way.
struct Column {
    /// The rank that holds it on each host.
    holders: Vec<usize>,
    slices: Vec<SliceId>,
    /// How many of the slices have their rounds.
    done: usize,
}

/// The ranks that want a slice, ascending.
type Who = Vec<usize>;

impl Shares {
    /// From what each rank wants, and the host that each is on; with so many bytes of a rank's memory in a round, or one slice.
    ///
    /// # Errors
    /// `Invalid` when a wish is no part of a tensor of the step.
    pub(super) fn new(
        manifest: &Manifest,
        wishes: &[Wishes],
        hosts: &[usize],
        origin: &Origin,
        buffer: u64,
    ) -> Result<Self> {
        let bytes = |slice: &SliceId| manifest.tensors[slice.0].slices[slice.1].len();
        // Of the store, what one wants it reads for itself.
        let wanted = wanted(manifest, wishes, if *origin == Origin::Store { 2 } else { 1 })?;
        let (mut columns, mut shared) = (BTreeMap::new(), HashMap::new());
        for (who, slices) in &wanted {
            let total: u64 = slices.iter().map(bytes).sum();
            let mut at = 0;
            for slice in slices {
                let middle = at + bytes(slice) / 2;
                at += bytes(slice);
                // 128 bits, for a product of two sizes.
                let holder = |ranks: &[usize]| {
                    let share = u128::from(middle) * ranks.len() as u128 / u128::from(total.max(1));
                    ranks[(share as usize).min(ranks.len() - 1)]
                };
                let source = source_of(manifest, slice, origin)?;
                let Some(holders) = holders(who, hosts, source, holder) else { continue };
                shared.insert(*slice, source);
                columns.entry(holders).or_insert_with(Vec::new).push(*slice);
            }
        }
        let columns = columns.into_iter().map(|(holders, mut slices)| {
            sort(manifest, &mut slices);
            Column { holders, slices, done: 0 }
        });
        let columns: Vec<Column> = columns.collect();
        let largest = shared.keys().map(bytes).max().unwrap_or(0);
        let mut held = vec![0; hosts.len()];
        for Column { holders, slices, .. } in &columns {
            let bytes: u64 = slices.iter().map(bytes).sum();
            holders.iter().for_each(|rank| held[*rank] += bytes);
        }
        let buffer = largest.max(buffer.min(held.into_iter().max().unwrap_or(0)));
        let (placed, rounds) = in_rounds(manifest, columns, hosts.len(), (buffer, origin));
        Ok(Self { placed, rounds, buffer, shared })
    }
}

/// The host whose memory a slice is in.
fn source_of(manifest: &Manifest, slice: &SliceId, origin: &Origin) -> Result<Option<usize>> {
    match origin {
        Origin::Store => Ok(None),
        Origin::Hosts(hosts) => {
            let shard = manifest.tensors[slice.0].slices[slice.1].shard;
            let host = hosts.get(shard as usize).copied();
            host.map(Some).ok_or_else(|| Error::bug("a shard that no host has"))
        }
    }
}

/// The ranks that hold a slice which those want, one of each host: of what is in a host's memory, that one's first. None where
/// each that wants it reads it for itself.
fn holders(
    who: &[usize],
    hosts: &[usize],
    source: Option<usize>,
    holder: impl Fn(&[usize]) -> usize,
) -> Option<Vec<usize>> {
    let mut of_hosts: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for rank in who {
        of_hosts.entry(hosts[*rank]).or_default().push(*rank);
    }
    let Some(source) = source else {
        return Some(of_hosts.values().map(|ranks| holder(ranks)).collect());
    };
    let near = of_hosts.remove(&source);
    let near = near.unwrap_or_else(|| (0..hosts.len()).filter(|rank| hosts[*rank] == source).collect());
    let far = of_hosts.values().map(|ranks| holder(ranks));
    (!of_hosts.is_empty()).then(|| std::iter::once(holder(&near)).chain(far).collect())
}

/// The slices that so many ranks want at `least`, by these ranks, as they lie in the shards.
fn wanted(manifest: &Manifest, wishes: &[Wishes], least: usize) -> Result<BTreeMap<Who, Vec<SliceId>>> {
    // Of each tensor the ranks that want of it, and which part.
    let mut of_tensors: Vec<Vec<(usize, &[u64])>> = vec![Vec::new(); manifest.tensors.len()];
    for (rank, wishes) in wishes.iter().enumerate() {
        for wish in wishes.each(manifest) {
            let wrong = || Error::invalid(format!("rank {rank} wants what no tensor of the step has"));
            let (tensor, place) = wish.ok_or_else(wrong)?;
            of_tensors[tensor].push((rank, place));
        }
    }
    let mut wanted: BTreeMap<Who, Vec<SliceId>> = BTreeMap::new();
    for (index, (tensor, wishes)) in manifest.tensors.iter().zip(of_tensors).enumerate() {
        let mut by_place: HashMap<&[u64], Who> = HashMap::new();
        for (rank, place) in wishes {
            by_place.entry(place).or_default().push(rank);
        }
        let wishes = InOrder::new(by_place, &tensor.shape);
        for (number, slice) in tensor.slices.iter().enumerate().filter(|(_, slice)| !slice.is_empty()) {
            let who = wishes.touching(&Region::of(slice));
            if who.len() >= least {
                wanted.entry(who).or_default().push((index, number));
            }
        }
    }
    wanted.values_mut().for_each(|slices| sort(manifest, slices));
    Ok(wanted)
}

/// The parts of a tensor that ranks want, in the order of their first elements: with a thousand ranks that want a thousandth
/// each, not every part is compared with every slice.
struct InOrder<'a> {
    shape: &'a [u64],
    /// Elements from the first to behind the last, and who wants it.
    parts: Vec<(u64, u64, Region, Who)>,
    /// The largest end up to each of them.
    ends: Vec<u64>,
}

impl<'a> InOrder<'a> {
    fn new(wishes: HashMap<&[u64], Who>, shape: &'a [u64]) -> Self {
        let wishes = wishes.into_iter().map(|(place, who)| (Region::boxed(place), who));
        let wishes = wishes.filter(|(region, _)| region.elements() > 0);
        let mut parts: Vec<_> = wishes
            .map(|(region, who)| {
                let (start, end) = region.bounds(shape);
                (start, end, region, who)
            })
            .collect();
        parts.sort_by_key(|(start, end, ..)| (*start, *end));
        let largest = |end: &mut u64, (_, other, ..): &(u64, u64, Region, Who)| {
            *end = (*end).max(*other);
            Some(*end)
        };
        let ends = parts.iter().scan(0, largest).collect();
        Self { shape, parts, ends }
    }

    /// Who wants elements of a slice.
    fn touching(&self, slice: &Region) -> Who {
        let (start, end) = slice.bounds(self.shape);
        let first = self.ends.partition_point(|other| *other <= start);
        let after = self.parts.partition_point(|(other, ..)| *other < end).max(first);
        let touching = self.parts[first..after].iter();
        let touching = touching.filter(|(.., region, _)| slice.touches(region, self.shape));
        let mut who: Who = touching.flat_map(|(.., who)| who).copied().collect();
        who.sort_unstable();
        who.dedup();
        who
    }
}

/// Puts slices into the order in which they lie in the shards.
fn sort(manifest: &Manifest, slices: &mut [SliceId]) {
    slices.sort_by_key(|(tensor, slice)| {
        let slice = &manifest.tensors[*tensor].slices[*slice];
        (slice.shard, slice.start)
    });
}

/// Has each slice pass in the same round through the memory of all that hold it, which has so many bytes a round. Gives
/// what is in each rank's, and how many rounds there are.
fn in_rounds(
    manifest: &Manifest,
    mut columns: Vec<Column>,
    ranks: usize,
    (buffer, origin): (u64, &Origin),
) -> (Vec<Vec<Vec<Placed>>>, usize) {
    let bytes = |slice: &SliceId| manifest.tensors[slice.0].slices[slice.1].len();
    let mut placed: Vec<Vec<Vec<Placed>>> = vec![Vec::new(); ranks];
    let mut read = vec![0; ranks];
    let mut rounds = 0;
    loop {
        columns.retain(|column| column.done < column.slices.len());
        if columns.is_empty() {
            return (placed, rounds);
        }
        rounds += 1;
        let mut used = vec![0; ranks];
        for Column { holders, slices, done } in &mut columns {
            let begun = *done;
            let fits = |used: &[u64], slice: &SliceId| {
                holders.iter().all(|rank| used[*rank] + bytes(slice) <= buffer)
            };
            let mut places = Vec::new();
            while let Some(slice) = slices.get(*done).filter(|slice| fits(&used, slice)) {
                places.push(holders.iter().map(|rank| used[*rank] as usize).collect::<Vec<_>>());
                holders.iter().for_each(|rank| used[*rank] += bytes(slice));
                *done += 1;
            }
            let taken = &slices[begun..*done];
            let total: u64 = taken.iter().map(bytes).sum();
            let (mut reader, mut run) = (None, 0);
            for (slice, places) in taken.iter().zip(places) {
                let least = (0..holders.len()).min_by_key(|index| read[holders[*index]]).unwrap_or(0);
                let first = match (origin, reader) {
                    (Origin::Hosts(_), _) => 0,
                    // Each reads a run, in few requests.
                    (Origin::Store, Some(reader)) if run < total.div_ceil(holders.len() as u64) => reader,
                    (Origin::Store, _) => {
                        run = 0;
                        least
                    }
                };
                reader = Some(first);
                run += bytes(slice);
                read[holders[first]] += bytes(slice);
                pass_on(&mut placed, rounds, (*slice, &places), (holders, first));
            }
        }
    }
}

/// Notes a slice in the memory of all that hold it: it goes around from the `first`, which reads it.
fn pass_on(
    placed: &mut [Vec<Vec<Placed>>],
    rounds: usize,
    (slice, places): (SliceId, &[usize]),
    (holders, first): (&[usize], usize),
) {
    let count = holders.len();
    let at = |number: usize| (first + number) % count;
    for number in 0..count {
        let from = (number > 0).then(|| holders[at(number - 1)]);
        let to = (number + 1 < count).then(|| holders[at(number + 1)]);
        let of_rank = &mut placed[holders[at(number)]];
        of_rank.resize_with(rounds, Vec::new);
        of_rank[rounds - 1].push(Placed { slice, at: places[at(number)], from, to });
    }
}
