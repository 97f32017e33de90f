//! Looking at sealed slices before a step refers to them: their checksums must still hold, and their identities are
//! taken.
//!
//! The bytes go through the processor once, in chunks that threads take in order. BLAKE3 is a tree, so that chunks
//! of a power of two are hashed apart and joined: the identity is that of the whole slice.

use std::ops::Range;

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use forebay_core::checksum::{Crc32c, combine};
use forebay_core::{Error, Result};
use parking_lot::Mutex;

use super::Seal;
use crate::manifest::{Identity, Slice};

/// Bytes that a thread takes at once: a power of two, as the hash's tree wants it.
const CHUNK: usize = 4 << 20;
/// Bytes hashed and checksummed together, so that both find them in the cache.
const PIECE: usize = 128 << 10;
/// Threads at most: from there on memory is the limit.
const MAX_THREADS: usize = 8;

/// A part of a slice, small enough for one thread.
struct Chunk {
    /// Which of the slices that are looked at.
    slice: usize,
    bytes: Range<usize>,
    /// Where it begins in its slice.
    at: usize,
    is_whole: bool,
}

/// What one chunk says of itself.
struct Seen {
    slice: usize,
    at: usize,
    length: u64,
    crc32c: u32,
    /// The hash of a whole slice, or the place of a part in its tree.
    hash: ChainingValue,
}

/// All slices of a seal, in the order of its tensors, each with its tensor's name.
pub(super) fn slices_of(seal: &Seal) -> impl Iterator<Item = (&str, &Slice)> {
    seal.tensors.iter().flat_map(|tensor| tensor.slices.iter().map(|slice| (tensor.name.as_str(), slice)))
}

/// That the shard in `slot` begins as it was sealed, and that its slices lie in it one after another, and nothing else.
///
/// # Errors
/// `Corrupt` when its header changed, `Bug` when the slices do not.
pub(super) fn expect_sound(seal: &Seal, slot: &[u8]) -> Result<()> {
    if !seal.has_header(slot) {
        let fact = format!("step {}: the shard's header changed in memory after it was sealed", seal.step);
        return Err(Error::corrupt(fact).with_hint("nothing was saved; check the host's memory"));
    }
    expect_no_gaps(seal)
}

/// That its slices lie in a shard one after another, from the header's end to its own.
///
/// # Errors
/// `Bug` when they do not.
pub(super) fn expect_no_gaps(seal: &Seal) -> Result<()> {
    let mut slices: Vec<_> = slices_of(seal).collect();
    slices.sort_by_key(|(_, slice)| (slice.start, slice.end));
    let mut at = seal.header;
    for (name, slice) in slices {
        if slice.start != at || slice.end < at {
            return Err(Error::bug(format!("tensor `{name}` does not follow the one before it")));
        }
        at = slice.end;
    }
    if at == seal.size { Ok(()) } else { Err(Error::bug("a shard that ends before its file does")) }
}

/// The identities of slices of the shard in `slot`, given as [`slices_of`] counts them.
///
/// # Errors
/// `Corrupt` when one no longer has the checksum that it was sealed with.
pub(super) fn inspect(seal: &Seal, slot: &[u8], wanted: &[usize]) -> Result<Vec<Identity>> {
    let all: Vec<_> = slices_of(seal).collect();
    let slices: Vec<_> = wanted.iter().map(|index| all[*index]).collect();
    let seen =
        look(slot, slices.iter().enumerate().flat_map(|(slice, (_, place))| cut(slice, place)).collect());
    let mut seen = seen.as_slice();
    let mut identities = Vec::with_capacity(slices.len());
    for (index, (name, slice)) in slices.into_iter().enumerate() {
        let (own, rest) = seen.split_at(seen.partition_point(|chunk| chunk.slice == index));
        seen = rest;
        let join = |crc32c, chunk: &Seen| combine(crc32c, chunk.crc32c, chunk.length);
        if own.iter().fold(forebay_core::crc32c(&[]), join) != slice.crc32c.0 {
            let fact = format!("step {}: tensor `{name}` changed in memory after it was sealed", seal.step);
            return Err(Error::corrupt(fact).with_hint("nothing was saved; check the host's memory"));
        }
        identities.push(identity(own));
    }
    Ok(identities)
}

fn cut(slice: usize, place: &Slice) -> impl Iterator<Item = Chunk> {
    let (start, length) = (place.start as usize, place.len() as usize);
    (0..length).step_by(CHUNK).map(move |at| {
        let bytes = start + at..start + length.min(at + CHUNK);
        Chunk { slice, bytes, at, is_whole: length <= CHUNK }
    })
}

/// Looks at all `chunks`; gives what they say, in their order.
fn look(slot: &[u8], chunks: Vec<Chunk>) -> Vec<Seen> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let count = chunks.len();
    let queue = Mutex::new(chunks.into_iter());
    let found = Mutex::new(Vec::with_capacity(count));
    let work = || {
        let mut seen = Vec::new();
        loop {
            let next = queue.lock().next();
            let Some(chunk) = next else { break };
            seen.push(look_at(slot, chunk));
        }
        found.lock().append(&mut seen);
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            scope.spawn(work);
        }
        work();
    });
    let mut seen = found.into_inner();
    seen.sort_unstable_by_key(|chunk| (chunk.slice, chunk.at));
    seen
}

fn look_at(slot: &[u8], Chunk { slice, bytes, at, is_whole }: Chunk) -> Seen {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(at as u64);
    let mut crc32c = Crc32c::default();
    let length = bytes.len() as u64;
    for piece in slot[bytes].chunks(PIECE) {
        hasher.update(piece);
        crc32c.update(piece);
    }
    let hash = if is_whole { *hasher.finalize().as_bytes() } else { hasher.finalize_non_root() };
    Seen { slice, at, length, crc32c: crc32c.value(), hash }
}

/// Joins the places of a slice's chunks in its tree.
fn identity(chunks: &[Seen]) -> Identity {
    match chunks {
        [] => Identity::of(&[]),
        [whole] => Identity(whole.hash),
        _ => {
            let (left, right) = chunks.split_at(left_of(chunks.len()));
            Identity(*merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash).as_bytes())
        }
    }
}

fn subtree(chunks: &[Seen]) -> ChainingValue {
    if let [chunk] = chunks {
        return chunk.hash;
    }
    let (left, right) = chunks.split_at(left_of(chunks.len()));
    merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
}

/// Of so many chunks, two at least, those on the left: the largest power of two that leaves one.
fn left_of(count: usize) -> usize {
    count.next_power_of_two() / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Checksum, SliceKind, Tensor};

    fn seal_of(shard: &[u8], header: usize, lengths: &[usize]) -> Seal {
        let mut at = header;
        let tensors = lengths.iter().enumerate().map(|(index, length)| {
            let bytes = &shard[at..at + length];
            let (start, end) = (at as u64, (at + length) as u64);
            at += length;
            let crc32c = Checksum(forebay_core::crc32c(bytes));
            let (offsets, lengths, blake3) = (vec![0], vec![*length as u64], Identity::UNKNOWN);
            let slice =
                Slice { kind: SliceKind::Box, offsets, lengths, shard: 0, start, end, crc32c, blake3 };
            let (name, dtype) = (format!("t{index}"), "uint8".to_owned());
            Tensor { name, dtype, shape: vec![*length as u64], slices: vec![slice] }
        });
        let tensors = tensors.collect();
        Seal::of_test(1, 1, shard, header, tensors)
    }

    #[test]
    fn identities_are_those_of_the_slices_and_damage_is_found() {
        let cases: [&[usize]; 5] = [
            &[],
            &[1, 0, 5000],
            &[CHUNK - 4096, 0, 1],
            &[CHUNK, 3 * CHUNK + 7, 0, 100],
            &[5 * CHUNK - 4096, 12_345, 0],
        ];
        for lengths in cases {
            let size = 4096 + lengths.iter().sum::<usize>();
            let shard: Vec<u8> = (0..size).map(|i| (i * 31 + i / 4096) as u8).collect();
            let seal = seal_of(&shard, 4096, lengths);
            expect_sound(&seal, &shard).expect("as it was sealed");
            let mut damaged = shard.clone();
            damaged[4095] ^= 1;
            let error = expect_sound(&seal, &damaged).expect_err("a flipped bit in the header");
            assert!(error.message().contains("header changed in memory"), "{error}");
            let all: Vec<usize> = (0..lengths.len()).collect();
            let place = |index: &usize| &seal.tensors[*index].slices[0];
            let whole =
                |index: &usize| Identity::of(&shard[place(index).start as usize..place(index).end as usize]);
            let expected: Vec<_> = all.iter().map(whole).collect();
            assert_eq!(inspect(&seal, &shard, &all).expect("sound"), expected, "{lengths:?}");
            let some: Vec<usize> = all.iter().copied().filter(|index| index % 2 == 1).collect();
            let expected: Vec<_> = some.iter().map(whole).collect();
            assert_eq!(inspect(&seal, &shard, &some).expect("sound"), expected, "{lengths:?}");
            for position in [4096, size / 2, size - 1].into_iter().filter(|at| (4096..size).contains(at)) {
                let mut damaged = shard.clone();
                damaged[position] ^= 1;
                let error = inspect(&seal, &damaged, &all).expect_err("a flipped bit");
                assert!(error.message().contains("changed in memory"), "{error}");
            }
        }
    }

    #[test]
    fn gaps_and_overlaps_are_refused() {
        let shard = [0; 5000];
        let mut seal = seal_of(&shard, 4096, &[100, 804]);
        expect_no_gaps(&seal).expect("one after another");
        for (start, end) in [(4195, 5000), (4197, 5000), (4196, 4999), (4196, 100)] {
            (seal.tensors[1].slices[0].start, seal.tensors[1].slices[0].end) = (start, end);
            expect_no_gaps(&seal).expect_err("a gap or an overlap");
        }
    }
}
