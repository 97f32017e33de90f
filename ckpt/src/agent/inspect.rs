//! Looking at a sealed shard before it leaves: its checksums must still hold, and its identity is taken.
//!
//! The bytes go through the processor once, in chunks that threads take in order. BLAKE3 is a tree, so that chunks
//! of a power of two are hashed apart and joined: the hash is that of the whole file.

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use bytes::Bytes;
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

/// What one chunk says of itself.
struct Chunk {
    index: usize,
    /// Has taken its bytes, at their place in the hash's tree.
    hasher: blake3::Hasher,
    /// Checksum and length of each run of it that belongs to one slice, or to the header.
    runs: Vec<(u32, u64)>,
}

/// Identity and CRC-32C of the shard in `slot`.
///
/// # Errors
/// `Corrupt` when a slice no longer has the checksum that it was sealed with.
pub(super) fn inspect(seal: &Seal, slot: &Bytes) -> Result<(Identity, u32)> {
    let shard = &slot[..seal.size as usize];
    let slices = in_order(seal)?;
    // Where the header and each slice end.
    let ends: Vec<u64> =
        std::iter::once(seal.header).chain(slices.iter().map(|(_, slice)| slice.end)).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let chunks = chunks_of(shard, &ends, threads);
    let mut runs = chunks.iter().flat_map(|chunk| chunk.runs.iter().copied());
    let empty = forebay_core::crc32c(&[]);
    let mut whole = empty;
    let (mut at, mut run) = (0, runs.next());
    for (index, end) in ends.iter().enumerate() {
        let mut crc32c = empty;
        while at < *end {
            let Some((value, length)) = run else { break };
            crc32c = combine(crc32c, value, length);
            at += length;
            run = runs.next();
        }
        let length = *end - if index == 0 { 0 } else { ends[index - 1] };
        whole = combine(whole, crc32c, length);
        let Some((name, slice)) = index.checked_sub(1).map(|index| slices[index]) else { continue };
        if crc32c != slice.crc32c.0 {
            let fact = format!("step {}: tensor `{name}` changed in memory after it was sealed", seal.step);
            return Err(Error::corrupt(fact).with_hint("nothing was uploaded; check the host's memory"));
        }
    }
    Ok((identity(&chunks), whole))
}

/// The slices as they lie in the shard, one after another.
fn in_order(seal: &Seal) -> Result<Vec<(&str, &Slice)>> {
    let named = seal
        .tensors
        .iter()
        .flat_map(|tensor| tensor.slices.iter().map(move |slice| (tensor.name.as_str(), slice)));
    let mut slices: Vec<_> = named.collect();
    slices.sort_by_key(|(_, slice)| (slice.start, slice.end));
    let mut at = seal.header;
    for (name, slice) in &slices {
        if slice.start != at || slice.end > seal.size {
            return Err(Error::bug(format!("tensor `{name}` does not follow the one before it")));
        }
        at = slice.end;
    }
    Ok(slices)
}

fn chunks_of(shard: &[u8], ends: &[u64], threads: usize) -> Vec<Chunk> {
    let count = shard.len().div_ceil(CHUNK);
    let next = Mutex::new(0..count);
    let found = Mutex::new(Vec::with_capacity(count));
    let work = || {
        loop {
            let taken = next.lock().next();
            let Some(index) = taken else { break };
            let chunk = look_at(shard, ends, index);
            found.lock().push(chunk);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            scope.spawn(work);
        }
        work();
    });
    let mut chunks = found.into_inner();
    chunks.sort_unstable_by_key(|chunk| chunk.index);
    chunks
}

fn look_at(shard: &[u8], ends: &[u64], index: usize) -> Chunk {
    let start = index * CHUNK;
    let bytes = &shard[start..shard.len().min(start + CHUNK)];
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(start as u64);
    let mut owner = ends.partition_point(|end| *end <= start as u64);
    let (mut runs, mut crc, mut length) = (Vec::new(), Crc32c::default(), 0);
    let mut at = 0;
    while at < bytes.len() {
        let mut piece = &bytes[at..bytes.len().min(at + PIECE)];
        hasher.update(piece);
        at += piece.len();
        while !piece.is_empty() {
            let position = (start + at - piece.len()) as u64;
            let left = ends.get(owner).map_or(u64::MAX, |end| *end - position);
            let taken = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            crc.update(&piece[..taken]);
            length += taken as u64;
            piece = &piece[taken..];
            if taken as u64 == left {
                runs.push((std::mem::take(&mut crc).value(), std::mem::take(&mut length)));
                // Empty slices end where the one before them does.
                owner = ends.partition_point(|end| *end <= position + left);
            }
        }
    }
    if length > 0 {
        runs.push((crc.value(), length));
    }
    Chunk { index, hasher, runs }
}

/// Joins the chunks' places in the tree.
fn identity(chunks: &[Chunk]) -> Identity {
    let hash = match chunks {
        [] => blake3::hash(&[]),
        [whole] => whole.hasher.finalize(),
        _ => {
            let (left, right) = chunks.split_at(left_of(chunks.len()));
            merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    };
    Identity(*hash.as_bytes())
}

fn subtree(chunks: &[Chunk]) -> ChainingValue {
    if let [chunk] = chunks {
        return chunk.hasher.finalize_non_root();
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
            let (offsets, lengths) = (vec![0], vec![*length as u64]);
            let slice = Slice { kind: SliceKind::Box, offsets, lengths, shard: 0, start, end, crc32c };
            let (name, dtype) = (format!("t{index}"), "uint8".to_owned());
            Tensor { name, dtype, shape: vec![*length as u64], slices: vec![slice] }
        });
        let tensors = tensors.collect();
        let (size, header) = (shard.len() as u64, header as u64);
        Seal { save: 1, arena: 1, slot: 0, size, header, step: 1, created_ms: 0, tensors, extras: vec![] }
    }

    #[test]
    fn identities_and_checksums_are_those_of_the_whole_file() {
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
            let (identity, crc32c) = inspect(&seal, &Bytes::from(shard.clone())).expect("sound");
            assert_eq!(identity.0, *blake3::hash(&shard).as_bytes(), "{lengths:?}");
            assert_eq!(crc32c, forebay_core::crc32c(&shard), "{lengths:?}");
            for position in [4096, size / 2, size - 1].into_iter().filter(|at| (4096..size).contains(at)) {
                let mut damaged = shard.clone();
                damaged[position] ^= 1;
                let error = inspect(&seal, &Bytes::from(damaged)).expect_err("a flipped bit");
                assert!(error.message().contains("changed in memory"), "{error}");
            }
        }
    }
}
