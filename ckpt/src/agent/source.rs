//! Where a sealed shard lies: in memory, or as a copy on this host's disk.
//!
//! A copy is read a piece at a time, so that a step that only the disk has is not in memory as well. Each piece is looked at as
//! it passes; that all of them are sound is known before an upload is completed, and what is read again is looked at again.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::checksum::Crc32c;
use forebay_core::{Error, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{MAX_PARTS, Upload, UploadOptions, part_size};
use forebay_io::task;

use super::Seal;
use super::inspect::{expect_no_gaps, expect_sound, slices_of};
use crate::arena::Held;
use crate::local::{LocalShard, patience};
use crate::manifest::{Identity, Slice};

/// Bytes of a copy that are read at once.
const PIECE: u64 = 1 << 20;
/// Parts of a slot that are in flight at once: they are in memory anyway.
const SLOT_PARTS: usize = 32;
/// The same of a copy: enough for most links, and little memory.
const DISK_PARTS: usize = 4;

/// A sealed shard's bytes.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// In memory.
    Slot(Bytes),
    /// On this host's disk.
    Disk(Disk),
}

impl Source {
    /// The shard's header, which is what was sealed. Its slices lie behind it one after another, and nothing else does.
    ///
    /// # Errors
    /// `Corrupt` when it changed, `Bug` when the slices do not.
    pub(super) async fn header(&self, seal: &Seal) -> Result<Bytes> {
        match self {
            Self::Slot(slot) => {
                expect_sound(seal, slot)?;
                Ok(slot.slice(..seal.header as usize))
            }
            Self::Disk(disk) => {
                expect_no_gaps(seal)?;
                let header = disk.read(0..seal.header).await?;
                if seal.has_header(&header) { Ok(header) } else { Err(damage(seal, "the shard's header")) }
            }
        }
    }

    /// How a file of so many bytes of it is uploaded. Of a copy, what is on its way is all that is in memory: its parts are
    /// as small as the store allows.
    pub(super) fn upload_options(&self, size: u64) -> UploadOptions {
        let options = UploadOptions { length: Some(size), ..UploadOptions::default() };
        match self {
            Self::Slot(_) => UploadOptions { parts_in_flight: SLOT_PARTS, ..options },
            Self::Disk(_) => {
                let part_bytes = size.div_ceil(MAX_PARTS as u64 - 1).max(part_size(0));
                UploadOptions { parts_in_flight: DISK_PARTS, part_bytes: Some(part_bytes), ..options }
            }
        }
    }
}

/// A copy on this host's disk.
#[derive(Debug, Clone)]
pub(super) struct Disk {
    shard: LocalShard,
    clock: Clock,
}

impl Disk {
    pub(super) fn new(shard: LocalShard, clock: Clock) -> Self {
        Self { shard, clock }
    }

    #[cfg(test)]
    pub(super) fn set_clock(&mut self, clock: Clock) {
        self.clock = clock;
    }

    /// Reads slices, given as [`slices_of`] counts them, in that order, and sends them on, if anywhere; gives their identities.
    /// No more than a piece is in memory, beside what the upload holds.
    ///
    /// # Errors
    /// `Corrupt` when one no longer has the checksum that it was sealed with, or cannot be read.
    pub(super) async fn read_through(
        &self,
        held: &Arc<Held>,
        order: Vec<usize>,
        mut upload: Option<&mut Upload>,
    ) -> Result<Vec<(usize, Identity)>> {
        let slices: Vec<&Slice> = slices_of(&held.seal).map(|(_, slice)| slice).collect();
        let pieces = pieces(order.iter().map(|index| slices[*index]));
        let mut watch = Watch::new(held.clone(), order.into_iter().map(|index| (index, slices[index])));
        // Not ahead: a read that nobody polls, while the upload waits for the store, would look like a disk that hangs.
        for piece in pieces {
            let bytes = self.read(piece).await?;
            let piece = bytes.clone();
            let look = move || watch.see(&piece).map(|()| watch);
            watch = task::blocking(look).await.map_err(|error| error.context("hash a shard")).flatten()?;
            if let Some(upload) = &mut upload {
                upload.write(bytes).await?;
            }
        }
        watch.finish()
    }

    async fn read(&self, range: Range<u64>) -> Result<Bytes> {
        let patience = patience(PIECE);
        tokio::select! {
            read = self.shard.read(range) => read,
            () = self.clock.sleep(patience) => {
                Err(Error::corrupt(format!("the local disk did not answer for {} s", patience.as_secs())))
            }
        }
    }
}

/// What is read at once of slices that are read in that order.
fn pieces<'a>(slices: impl Iterator<Item = &'a Slice>) -> Vec<Range<u64>> {
    let mut pieces: Vec<Range<u64>> = Vec::new();
    for slice in slices {
        let mut at = slice.start;
        // What follows the slice before it is read with its end.
        if let Some(last) = pieces.last_mut().filter(|last| last.end == at) {
            at = slice.end.min(last.start + PIECE);
            last.end = at;
        }
        while at < slice.end {
            let end = slice.end.min(at + PIECE);
            pieces.push(at..end);
            at = end;
        }
    }
    pieces
}

/// Looks at slices that pass one after another.
struct Watch {
    held: Arc<Held>,
    /// Those that did not pass yet: which one, how long, and its checksum.
    rest: VecDeque<(usize, u64, u32)>,
    /// Bytes of the first of them that passed.
    passed: u64,
    hasher: blake3::Hasher,
    crc32c: Crc32c,
    found: Vec<(usize, Identity)>,
}

impl Watch {
    fn new<'a>(held: Arc<Held>, slices: impl Iterator<Item = (usize, &'a Slice)>) -> Self {
        let rest = slices.map(|(index, slice)| (index, slice.len(), slice.crc32c.0)).collect();
        let (hasher, crc32c) = (blake3::Hasher::new(), Crc32c::default());
        Self { held, rest, passed: 0, hasher, crc32c, found: Vec::new() }
    }

    fn see(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            self.settle()?;
            let Some((_, length, _)) = self.rest.front() else {
                return Err(Error::bug("more of a copy was read than is wanted"));
            };
            let (own, later) = bytes.split_at(bytes.len().min((length - self.passed) as usize));
            self.hasher.update(own);
            self.crc32c.update(own);
            self.passed += own.len() as u64;
            bytes = later;
        }
        self.settle()
    }

    /// Says of the slices that passed whether they are sound.
    fn settle(&mut self) -> Result<()> {
        while let Some((index, _, crc32c)) = self.rest.pop_front_if(|(_, length, _)| *length == self.passed) {
            if std::mem::take(&mut self.crc32c).value() != crc32c {
                let name = slices_of(&self.held.seal).nth(index).map_or("", |(name, _)| name);
                return Err(damage(&self.held.seal, &format!("tensor `{name}`")));
            }
            self.found.push((index, Identity(*self.hasher.finalize().as_bytes())));
            self.hasher.reset();
            self.passed = 0;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<(usize, Identity)>> {
        self.settle()?;
        if self.rest.is_empty() {
            Ok(self.found)
        } else {
            Err(Error::bug("less of a copy was read than is wanted"))
        }
    }
}

fn damage(seal: &Seal, what: &str) -> Error {
    Error::corrupt(format!("step {}: {what} is damaged on the local disk", seal.step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Checksum, SliceKind, Tensor};

    #[test]
    fn pieces_are_of_slices_one_after_another() {
        let check = |slices: &[(u64, u64)], expected: &[(u64, u64)]| {
            let slice = |(start, end): &(u64, u64)| Slice {
                kind: SliceKind::Box,
                offsets: vec![0],
                lengths: vec![end - start],
                shard: 0,
                start: *start,
                end: *end,
                crc32c: Checksum(0),
                blake3: Identity::UNKNOWN,
            };
            let slices: Vec<Slice> = slices.iter().map(slice).collect();
            let found: Vec<_> = pieces(slices.iter()).iter().map(|piece| (piece.start, piece.end)).collect();
            assert_eq!(found, expected);
        };
        check(&[], &[]);
        check(&[(5, 5)], &[]);
        check(&[(5, 9), (9, 9), (9, 12)], &[(5, 12)]);
        check(&[(9, 12), (5, 9), (20, 21)], &[(9, 12), (5, 9), (20, 21)]);
        let (one, three) = (PIECE + 1, 3 * PIECE);
        check(&[(1, PIECE), (PIECE, PIECE + 5), (PIECE + 5, PIECE + 7)], &[(1, one), (one, PIECE + 7)]);
        check(&[(7, three)], &[(7, PIECE + 7), (PIECE + 7, 2 * PIECE + 7), (2 * PIECE + 7, three)]);
    }

    /// Slices of any lengths, empty ones as well, have the identities that they have in memory, however they were cut.
    #[test]
    fn what_passes_is_what_was_sealed() {
        let lengths = [0, 5000, 0, 1, 70_000, 300, 0];
        let bytes: Vec<u8> =
            (0..4096 + lengths.iter().sum::<usize>()).map(|i| (i * 31 + i / 4096) as u8).collect();
        let mut at = 4096;
        let slices = lengths.map(|length| {
            let (start, end) = (at as u64, (at + length) as u64);
            let crc32c = Checksum(forebay_core::crc32c(&bytes[at..at + length]));
            at += length;
            let (kind, offsets, lengths) = (SliceKind::Box, vec![start], vec![length as u64]);
            Slice { kind, offsets, lengths, shard: 0, start, end, crc32c, blake3: Identity::UNKNOWN }
        });
        let (dtype, shape) = ("uint8".to_owned(), vec![bytes.len() as u64]);
        let tensors = vec![Tensor { name: "t".into(), dtype, shape, slices: slices.to_vec() }];
        let held = Arc::new(Held::new("s".repeat(32), 0, 1, Seal::of_test(1, 1, &bytes, 4096, tensors)));
        let pass = |bytes: &[u8], cut: usize| {
            let mut watch = Watch::new(held.clone(), slices.iter().enumerate());
            bytes.chunks(cut).try_for_each(|piece| watch.see(piece))?;
            watch.finish()
        };
        let own = |slice: &Slice| Identity::of(&bytes[slice.start as usize..slice.end as usize]);
        let expected: Vec<_> = slices.iter().map(own).enumerate().collect();
        for cut in [1, 77, 5000, 1 << 20] {
            assert_eq!(pass(&bytes[4096..], cut).expect("sound"), expected, "cut every {cut}");
            let mut damaged = bytes[4096..].to_vec();
            damaged[5000] ^= 1;
            let error = pass(&damaged, cut).expect_err("a flipped bit");
            assert!(error.message().contains("tensor `t` is damaged"), "{error}");
        }
        assert!(pass(&bytes[4096..bytes.len() - 1], 9000).is_err() && pass(&bytes[4095..], 9000).is_err());
    }
}
