//! Tensors on their way to where the engine does not write, the memory of a device or strided memory: a piece at a time,
//! through one buffer, whatever their size.
//!
//! A slice that fits the buffer is checked before any of it is given away; of a longer one the pieces are, and what they
//! are together is told after the last. What of a tensor lies scattered in its slices is read aside as a whole.

use std::collections::{BTreeMap, HashSet};

use forebay_core::checksum::combine;
use forebay_core::{Error, Result};

use super::source::Source;
use super::{Segment, SliceId, Target, Want, Way, Wish, damaged, plan, read_all, read_from, ways};
use crate::dtype::Dtype;
use crate::manifest::{Manifest, Slice};

/// What pieces begin and end at multiples of, but for a slice's last: no element of any type is cut.
const ALIGNMENT: usize = 64;

/// Takes bytes of a wish, given by its number, from that byte on.
type Give<'a> = dyn FnMut(usize, u64, &[u8]) -> Result<()> + Send + 'a;

/// Where pieces go.
pub struct Through<'a> {
    /// Read into, again and again: some bytes at least.
    pub buffer: &'a mut [u8],
    /// Called with each, in order of the shards; an error ends it all.
    pub give: &'a mut Give<'a>,
}

/// A slice that is one run of a wish.
struct Run {
    wish: usize,
    slice: usize,
    /// The first byte of the wish that it holds.
    to: u64,
}

/// Part of a run, in the buffer.
struct Piece<'a> {
    run: &'a Run,
    slice: &'a Slice,
    /// From this byte of the slice on.
    from: u64,
    at: usize,
    length: usize,
}

impl Piece<'_> {
    fn id(&self) -> SliceId {
        (self.run.wish, self.run.slice)
    }

    fn is_last(&self) -> bool {
        self.from + self.length as u64 == self.slice.len()
    }
}

/// Gives all `wishes` away.
pub(super) fn read(
    source: &Source<'_>,
    manifest: &Manifest,
    wishes: &[Wish],
    through: Through<'_>,
    threads: usize,
) -> Result<()> {
    let room = through.buffer.len() / ALIGNMENT * ALIGNMENT;
    if room == 0 {
        return Err(Error::bug("a buffer of no bytes"));
    }
    let (mut runs, mut scattered) = (Vec::new(), Vec::new());
    for (number, wish) in wishes.iter().enumerate() {
        match runs_of(manifest, number, wish)? {
            Some(found) => runs.extend(found),
            None => scattered.push((number, wish)),
        }
    }
    let slice_of = |run: &Run| &manifest.tensors[wishes[run.wish].tensor].slices[run.slice];
    runs.sort_by_key(|run| (slice_of(run).shard, slice_of(run).start));
    let taken = runs.iter().filter(|run| !slice_of(run).is_empty());
    source.check(manifest, taken.map(|run| slice_of(run).shard).collect())?;
    let mut passing = Passing { source, manifest, wishes, through, checksums: BTreeMap::new(), threads };
    let (mut pieces, mut filled) = (Vec::new(), 0);
    for run in &runs {
        let (slice, mut from) = (slice_of(run), 0);
        while from < slice.len() {
            if filled == room {
                passing.pass(&std::mem::take(&mut pieces))?;
                filled = 0;
            }
            let length = (slice.len() - from).min((room - filled) as u64) as usize;
            pieces.push(Piece { run, slice, from, at: filled, length });
            from += length as u64;
            filled += length.next_multiple_of(ALIGNMENT);
        }
    }
    passing.pass(&pieces)?;
    for (number, wish) in scattered {
        passing.pass_scattered(number, wish)?;
    }
    Ok(())
}

/// The slices that a wish is made of; `None` where one of them is not one run of it.
fn runs_of(manifest: &Manifest, number: usize, wish: &Wish) -> Result<Option<Vec<Run>>> {
    let tensor = manifest.tensors.get(wish.tensor);
    let tensor = tensor.ok_or_else(|| Error::bug("a wish for a tensor that the step has not"))?;
    if !wish.region.fits(&tensor.shape) {
        return Err(Error::invalid(format!("a wish for what tensor `{}` has not", tensor.name)));
    }
    let run = |Want { slice, way }| match way {
        Way::Direct(to) => Some(Run { wish: number, slice, to }),
        Way::Aside => None,
    };
    let wants = ways((wish.tensor, tensor), &wish.region, &HashSet::new())?;
    Ok(wants.into_iter().map(run).collect())
}

/// Pieces on their way.
struct Passing<'a, 's, 't> {
    source: &'a Source<'s>,
    manifest: &'a Manifest,
    wishes: &'a [Wish],
    through: Through<'t>,
    /// Of what was read so far of slices whose ends were not.
    checksums: BTreeMap<SliceId, u32>,
    threads: usize,
}

impl Passing<'_, '_, '_> {
    /// Reads pieces into the buffer, checks the slices that end with them, and gives them away.
    fn pass(&mut self, pieces: &[Piece<'_>]) -> Result<()> {
        let (mut segments, mut rest) = (Vec::with_capacity(pieces.len()), &mut *self.through.buffer);
        for piece in pieces {
            let (memory, after) = rest.split_at_mut(piece.length.next_multiple_of(ALIGNMENT));
            let (shard, start) = (piece.slice.shard, piece.slice.start + piece.from);
            segments.push(Segment { shard, start, slice: piece.id(), target: &mut memory[..piece.length] });
            rest = after;
        }
        let mut parts = read_all(self.source, self.manifest, plan(segments), self.threads)?;
        parts.sort_by_key(|part| (part.slice, part.start));
        for part in parts {
            let crc32c = self.checksums.entry(part.slice).or_insert_with(|| forebay_core::crc32c(&[]));
            *crc32c = combine(*crc32c, part.crc32c, part.length);
        }
        for piece in pieces.iter().filter(|piece| piece.is_last()) {
            if self.checksums.remove(&piece.id()) != Some(piece.slice.crc32c.0) {
                let tensor = &self.manifest.tensors[self.wishes[piece.run.wish].tensor];
                return Err(damaged(self.source, self.manifest, tensor, piece.slice));
            }
        }
        for Piece { run, from, at, length, .. } in pieces {
            (self.through.give)(run.wish, run.to + from, &self.through.buffer[*at..at + length])?;
        }
        Ok(())
    }

    /// Gives away a wish that takes parts of slices.
    fn pass_scattered(&mut self, number: usize, Wish { tensor, region }: &Wish) -> Result<()> {
        let size = Dtype::named(&self.manifest.tensors[*tensor].dtype)?.size;
        let mut bytes = vec![0; (region.elements() * size) as usize];
        let target = Target { tensor: *tensor, region: region.clone(), bytes: &mut bytes };
        read_from(self.source, self.manifest, vec![target], &HashSet::new(), self.threads)?;
        (self.through.give)(number, 0, &bytes)
    }
}
