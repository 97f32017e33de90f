//! Tensors on their way to where the engine does not write, the memory of a device or strided memory: a piece at a time,
//! through one buffer, whatever their size.
//!
//! The buffer has two halves: while one is given away, the other is read into. A slice that lies in one half is checked
//! before any of it is given away; of one that goes on in the next, which any may, the pieces are given away as they come, and
//! it is checked after the last. A slice of which a part is wanted is read whole, and the part is moved together where it
//! lies.

use std::collections::{BTreeMap, HashSet};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use forebay_core::checksum::combine;
use forebay_core::{Error, Result};

use super::source::{Source, request_bytes};
use super::{Part, Segment, SliceId, Want, Way, Wish, damaged, plan, read_all, ways};
use crate::dtype::Dtype;
use crate::manifest::{Manifest, Slice, SliceKind, Tensor};
use crate::region::Region;

/// What pieces begin and end at multiples of, but for a slice's last: no element of any type is cut.
const ALIGNMENT: usize = 64;
/// Halves of a buffer.
const HALVES: usize = 2;

/// Where in a wish bytes belong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Spot {
    /// From this byte on.
    From(u64),
    /// Into a box of it, given by offsets and lengths in elements.
    Box(Vec<u64>, Vec<u64>),
}

/// Takes bytes of a wish, given by its number, for a place in it.
pub(super) type Give<'a> = dyn FnMut(usize, &Spot, &[u8]) -> Result<()> + Send + 'a;

/// Where pieces go.
pub struct Through<'a> {
    /// Read into, again and again: [`ALIGNMENT`] bytes at least.
    pub buffer: &'a mut [u8],
    /// Called with each, in order of the shards; an error ends it all.
    pub give: &'a mut Give<'a>,
}

/// A slice that a wish needs.
struct Run<'a> {
    wish: usize,
    index: usize,
    tensor: &'a Tensor,
    slice: &'a Slice,
    way: Way,
}

/// Part of a run, in a half; all of a slice of which a part is wanted.
struct Piece<'a> {
    run: &'a Run<'a>,
    /// From this byte of the slice on.
    from: u64,
    at: usize,
    length: usize,
}

impl Piece<'_> {
    fn id(&self) -> SliceId {
        (self.run.wish, self.run.index)
    }

    fn is_last(&self) -> bool {
        self.from + self.length as u64 == self.run.slice.len()
    }
}

/// What one half takes at once; a single piece may be longer, and is read into memory of its own.
type Pass<'a> = Vec<Piece<'a>>;

/// A half that was read into.
struct Filled<'a> {
    half: &'a mut [u8],
    /// In its stead, for a piece that is longer.
    own: Option<Vec<u8>>,
    parts: Vec<Part>,
}

/// What reads into one half, and where it gets that back.
type Lane<'a> = (Receiver<Result<Filled<'a>>>, SyncSender<&'a mut [u8]>);

/// Gives all `wishes` away, but for the slices that are `skipped`, given by tensor.
pub(super) fn read(
    source: &Source<'_>,
    manifest: &Manifest,
    (wishes, skipped): (&[Wish], &HashSet<SliceId>),
    through: Through<'_>,
    threads: usize,
) -> Result<()> {
    let Through { buffer, give } = through;
    let room = (buffer.len() / HALVES).max(ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    if buffer.len() < room {
        return Err(Error::bug("a buffer that is too short for an element"));
    }
    let runs = runs_of(manifest, wishes, skipped)?;
    source.check(manifest, runs.iter().map(|run| run.slice.shard).collect())?;
    let passes = &passes(&runs, room);
    let reading = &Reading { source, manifest, wishes, room, threads };
    let mut checksums = BTreeMap::new();
    std::thread::scope(|scope| {
        let halves: Vec<&mut [u8]> = buffer.chunks_exact_mut(room).take(HALVES.min(passes.len())).collect();
        let count = halves.len();
        let lane = |(first, half)| -> Lane<'_> {
            // A half is here or there, so that nobody waits to send it.
            let ((fill, filled), (free, freed)) = (sync_channel(1), sync_channel(1));
            let own = passes.iter().skip(first).step_by(count);
            scope.spawn(move || reading.fill(own, half, &fill, &freed));
            (filled, free)
        };
        let lanes: Vec<Lane<'_>> = halves.into_iter().enumerate().map(lane).collect();
        for (pass, (filled, free)) in passes.iter().zip(lanes.iter().cycle()) {
            let filled = filled.recv().map_err(|_| Error::bug("a reading thread panicked"))??;
            reading.check(pass, filled.parts, &mut checksums)?;
            reading.give(pass, filled.own.as_deref().unwrap_or(filled.half), give)?;
            // After its last it is gone.
            let _ = free.send(filled.half);
        }
        Ok(())
    })
}

/// The slices that wishes are made of, as they lie in the shards.
fn runs_of<'a>(manifest: &'a Manifest, wishes: &[Wish], skipped: &HashSet<SliceId>) -> Result<Vec<Run<'a>>> {
    let mut runs = Vec::new();
    for (number, wish) in wishes.iter().enumerate() {
        let tensor = manifest.tensors.get(wish.tensor);
        let tensor = tensor.ok_or_else(|| Error::bug("a wish for a tensor that the step has not"))?;
        if !wish.region.fits(&tensor.shape) {
            return Err(Error::invalid(format!("a wish for what tensor `{}` has not", tensor.name)));
        }
        let run = |Want { slice: index, way }| {
            let slice = &tensor.slices[index];
            Run { wish: number, index, tensor, slice, way }
        };
        let wants = ways((wish.tensor, tensor), &wish.region, skipped)?;
        runs.extend(wants.into_iter().map(run).filter(|run| !run.slice.is_empty()));
    }
    runs.sort_by_key(|run| (run.slice.shard, run.slice.start));
    Ok(runs)
}

/// Shares slices out over halves of `room` bytes.
fn passes<'a>(runs: &'a [Run<'a>], room: usize) -> Vec<Pass<'a>> {
    let (mut passes, mut pass, mut filled) = (Vec::new(), Vec::new(), 0);
    for run in runs {
        let (length, mut from) = (run.slice.len(), 0);
        while from < length {
            // What is moved together lies in one piece.
            let least = if matches!(run.way, Way::Aside) { length } else { 1 };
            if filled > 0 && least > (room - filled) as u64 {
                passes.push(std::mem::take(&mut pass));
                filled = 0;
            }
            let most = least.max((room - filled) as u64);
            let length = (length - from).min(most) as usize;
            pass.push(Piece { run, from, at: filled, length });
            from += length as u64;
            filled = (filled + length.next_multiple_of(ALIGNMENT)).min(room);
        }
    }
    passes.extend((!pass.is_empty()).then_some(pass));
    passes
}

/// What is read, and what of.
struct Reading<'a, 's> {
    source: &'a Source<'s>,
    manifest: &'a Manifest,
    wishes: &'a [Wish],
    room: usize,
    threads: usize,
}

impl Reading<'_, '_> {
    /// Reads passes into a half, each once it got that back.
    fn fill<'h, 'p>(
        &self,
        passes: impl Iterator<Item = &'p Pass<'p>>,
        mut half: &'h mut [u8],
        fill: &SyncSender<Result<Filled<'h>>>,
        freed: &Receiver<&'h mut [u8]>,
    ) {
        for pass in passes {
            let mut own = match pass.as_slice() {
                [piece] if piece.length > half.len() => Some(vec![0; piece.length]),
                _ => None,
            };
            let parts = self.read(pass, own.as_deref_mut().unwrap_or(half));
            if fill.send(parts.map(|parts| Filled { half, own, parts })).is_err() {
                return;
            }
            match freed.recv() {
                Ok(back) => half = back,
                // Something failed, which the other side tells.
                Err(_) => return,
            }
        }
    }

    /// Reads pieces into memory, and moves together what is wanted of each.
    fn read(&self, pass: &Pass<'_>, memory: &mut [u8]) -> Result<Vec<Part>> {
        let (mut segments, mut rest) = (Vec::with_capacity(pass.len()), &mut *memory);
        let mut at = 0;
        for piece in pass {
            let (target, after) = rest[piece.at - at..].split_at_mut(piece.length);
            at = piece.at + piece.length;
            let (shard, start) = (piece.run.slice.shard, piece.run.slice.start + piece.from);
            segments.push(Segment { shard, start, slice: piece.id(), target });
            rest = after;
        }
        // Both halves together have as many requests in flight as a restore that reads into place.
        let in_flight = self.source.at_once().div_ceil(HALVES);
        let most = request_bytes(self.room as u64, in_flight);
        let threads = self.threads.div_ceil(HALVES);
        let parts = read_all(self.source, self.manifest, plan(segments, most), (threads, in_flight))?;
        for Piece { run, at, length, .. } in pass.iter().filter(|piece| matches!(piece.run.way, Way::Aside)) {
            gather(run.tensor, run.slice, &self.wishes[run.wish].region, &mut memory[*at..at + length])?;
        }
        Ok(parts)
    }

    /// Checks the slices that end with a pass; `checksums` are of what was read so far of others.
    fn check(
        &self,
        pass: &Pass<'_>,
        mut parts: Vec<Part>,
        checksums: &mut BTreeMap<SliceId, u32>,
    ) -> Result<()> {
        parts.sort_by_key(|part| (part.slice, part.start));
        for part in parts {
            let crc32c = checksums.entry(part.slice).or_insert_with(|| forebay_core::crc32c(&[]));
            *crc32c = combine(*crc32c, part.crc32c, part.length);
        }
        for piece in pass.iter().filter(|piece| piece.is_last()) {
            let Run { tensor, slice, .. } = piece.run;
            if checksums.remove(&piece.id()) != Some(slice.crc32c.0) {
                return Err(damaged(self.source, self.manifest, tensor, slice));
            }
        }
        Ok(())
    }

    fn give(&self, pass: &Pass<'_>, memory: &[u8], give: &mut Give<'_>) -> Result<()> {
        for Piece { run, from, at, length } in pass {
            let memory = &memory[*at..at + length];
            match run.way {
                Way::Direct(to) => give(run.wish, &Spot::From(to + from), memory)?,
                Way::Aside => {
                    let region = &self.wishes[run.wish].region;
                    give_gathered(run.tensor, run.slice, (run.wish, region), memory, give)?;
                }
            }
        }
        Ok(())
    }
}

/// Moves what a part of a tensor takes of a slice to the front of that; says how many bytes that are.
fn gather(tensor: &Tensor, slice: &Slice, part: &Region, bytes: &mut [u8]) -> Result<usize> {
    let size = Dtype::named(&tensor.dtype)?.size as usize;
    let mut end = 0;
    for (from, _, count) in Region::of(slice).shared_with(part, &tensor.shape) {
        let (from, length) = (from as usize * size, count as usize * size);
        if from > end {
            bytes.copy_within(from..from + length, end);
        }
        end += length;
    }
    Ok(end)
}

/// Gives away what a wish takes of a slice, the front of `bytes`.
fn give_gathered(
    tensor: &Tensor,
    slice: &Slice,
    (wish, part): (usize, &Region),
    bytes: &[u8],
    give: &mut Give<'_>,
) -> Result<()> {
    let size = Dtype::named(&tensor.dtype)?.size;
    let whole = Region::of(slice);
    if (slice.kind, part.kind) == (SliceKind::Box, SliceKind::Box) {
        let (mut offsets, mut lengths) = (Vec::new(), Vec::new());
        for (axis, start) in part.offsets.iter().enumerate() {
            let end = (start + part.lengths[axis]).min(whole.offsets[axis] + whole.lengths[axis]);
            let from = whole.offsets[axis].max(*start);
            offsets.push(from - start);
            lengths.push(end.saturating_sub(from));
        }
        let length = lengths.iter().product::<u64>() * size;
        return give(wish, &Spot::Box(offsets, lengths), &bytes[..length as usize]);
    }
    let mut runs = whole.shared_with(part, &tensor.shape).map(|(_, to, count)| (to, count)).peekable();
    let mut rest = bytes;
    while let Some((to, mut count)) = runs.next() {
        while let Some((_, more)) = runs.next_if(|(next, _)| *next == to + count) {
            count += more;
        }
        let (now, later) = rest.split_at((count * size) as usize);
        give(wish, &Spot::From(to * size), now)?;
        rest = later;
    }
    Ok(())
}

/// Gives a wish what it takes of a slice that lies in memory that is not to be changed.
pub(super) fn give_slice(
    tensor: &Tensor,
    slice: &Slice,
    (wish, part): (usize, &Region),
    bytes: &[u8],
    give: &mut Give<'_>,
) -> Result<()> {
    let runs = Region::of(slice).shared_with(part, &tensor.shape);
    let wanted = runs.map(|(_, _, count)| count).sum::<u64>() * Dtype::named(&tensor.dtype)?.size;
    match wanted {
        0 => Ok(()),
        _ if wanted == bytes.len() as u64 => give_gathered(tensor, slice, (wish, part), bytes, give),
        _ => {
            let mut own = bytes.to_vec();
            gather(tensor, slice, part, &mut own)?;
            give_gathered(tensor, slice, (wish, part), &own, give)
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
