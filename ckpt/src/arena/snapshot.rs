//! One step in a slot, being filled: exactly the shard file that will be uploaded.

use forebay_core::{Error, Result};

use super::{CopyWatch, Job, Slot, Source, copy};
use crate::manifest::{Checksum, Identity, Slice, Tensor, TextLength};
use crate::region::Region;
use crate::shard::{ShardLayout, TensorSpec};

/// A slot with a shard's header and place for its tensors.
#[derive(Debug)]
pub struct Snapshot {
    slot: Slot,
    tensors: Vec<TensorSpec>,
    layout: ShardLayout,
    /// Of each tensor its own.
    pieces: Vec<Vec<Piece>>,
    text: TextLength,
}

/// Tensors, and of each the pieces that get a checksum each, in the order of their bytes.
#[derive(Debug)]
pub(crate) struct Cut {
    tensors: Vec<TensorSpec>,
    pieces: Vec<Vec<Piece>>,
    text: TextLength,
}

impl Cut {
    pub(crate) fn of(tensors: Vec<TensorSpec>) -> Self {
        let pieces = tensors.iter().map(|tensor| {
            let piece = |region: Region| {
                let bytes = region.elements() * tensor.dtype.size;
                Piece { region, bytes, crc32c: None }
            };
            tensor.region.pieces(&tensor.shape, tensor.dtype.size).into_iter().map(piece).collect()
        });
        let pieces: Vec<Vec<Piece>> = pieces.collect();
        let names: TextLength = tensors
            .iter()
            .map(|TensorSpec { name, dtype, shape, .. }| TextLength::of_tensor(name, dtype.name, shape))
            .sum();
        let slices: TextLength = pieces.iter().flatten().map(|piece| piece.region.text()).sum();
        let text = names + slices + TextLength::of_files(slices.slices);
        Self { tensors, pieces, text }
    }

    /// What a manifest says of it.
    pub(crate) fn text(&self) -> TextLength {
        self.text
    }
}

/// A part of a tensor with a checksum of its own.
#[derive(Debug)]
struct Piece {
    region: Region,
    bytes: u64,
    crc32c: Option<u32>,
}

impl Snapshot {
    /// Writes the header into `slot`, which must be large enough.
    pub(crate) fn new(mut slot: Slot, cut: Cut, layout: ShardLayout) -> Self {
        slot.bytes_mut()[..layout.header.len()].copy_from_slice(&layout.header);
        let Cut { tensors, pieces, text } = cut;
        Self { slot, tensors, layout, pieces, text }
    }

    /// What a manifest says of its tensors.
    pub(crate) fn text(&self) -> TextLength {
        self.text
    }

    /// Bytes in the shard.
    pub fn size(&self) -> u64 {
        self.layout.size
    }

    /// The place of tensor `index`, for a caller that fills it itself and then copies it [in place](Source::InPlace).
    pub fn tensor_mut(&mut self, index: usize) -> &mut [u8] {
        let range = &self.layout.ranges[index];
        self.pieces[index].iter_mut().for_each(|piece| piece.crc32c = None);
        &mut self.slot.bytes_mut()[range.start as usize..range.end as usize]
    }

    /// Copies tensors, given by index, each once and each from bytes of its own length, on `threads` threads. Those
    /// [in place](Source::InPlace) are only checksummed. `watch` is told when the sources were read.
    ///
    /// # Errors
    /// `Invalid` when a source has another length than its tensor; what a device's driver says.
    pub fn copy(
        &mut self,
        mut wanted: Vec<(usize, Source<'_>)>,
        threads: usize,
        watch: Option<&CopyWatch>,
    ) -> Result<()> {
        // By the end as well: an empty tensor lies before the one that starts where it does.
        wanted.sort_by_key(|(index, _)| (self.layout.ranges[*index].start, self.layout.ranges[*index].end));
        let mut jobs = Vec::with_capacity(wanted.len());
        let mut rest = self.slot.bytes_mut();
        let mut at = 0;
        for (index, source) in &wanted {
            let range = &self.layout.ranges[*index];
            let length = (range.end - range.start) as usize;
            if source.known_len().is_some_and(|given| given != length) {
                let name = &self.tensors[*index].name;
                return Err(Error::invalid(format!(
                    "tensor `{name}` has {length} bytes, its source has not"
                )));
            }
            let (_, mut after) = rest.split_at_mut((range.start - at) as usize);
            let mut from = source.clone();
            for piece in &self.pieces[*index] {
                let (target, behind) = after.split_at_mut(piece.bytes as usize);
                let (source, left) = from.split_at(piece.bytes as usize);
                jobs.push(Job { source, target });
                (after, from) = (behind, left);
            }
            (rest, at) = (after, range.end);
        }
        let mut checksums = copy(jobs, threads, watch)?.into_iter();
        for (index, _) in &wanted {
            self.pieces[*index].iter_mut().for_each(|piece| piece.crc32c = checksums.next());
        }
        Ok(())
    }

    /// The slot, and what the manifest will say about the tensors. Parts of one tensor that follow each other are one.
    ///
    /// # Errors
    /// `Bug` when a tensor was never filled.
    pub(crate) fn finish(self) -> Result<(Slot, SealedShard)> {
        let mut tensors: Vec<Tensor> = Vec::with_capacity(self.tensors.len());
        for ((spec, range), pieces) in self.tensors.into_iter().zip(&self.layout.ranges).zip(self.pieces) {
            let unfilled = || Error::bug(format!("tensor `{}` was never copied", spec.name));
            let mut slices = Vec::with_capacity(pieces.len());
            let mut start = range.start;
            for Piece { region: Region { kind, offsets, lengths }, bytes, crc32c } in pieces {
                let (end, crc32c) = (start + bytes, Checksum(crc32c.ok_or_else(unfilled)?));
                let blake3 = Identity::UNKNOWN;
                slices.push(Slice { kind, offsets, lengths, shard: 0, start, end, crc32c, blake3 });
                start = end;
            }
            match tensors.last_mut().filter(|last| last.name == spec.name) {
                Some(last) => last.slices.append(&mut slices),
                None => {
                    let dtype = spec.dtype.name.to_owned();
                    tensors.push(Tensor { name: spec.name, dtype, shape: spec.shape, slices });
                }
            }
        }
        let header = self.layout.header.len() as u64;
        let header_crc32c = Checksum(forebay_core::crc32c(&self.layout.header));
        Ok((self.slot, SealedShard { tensors, header, header_crc32c, size: self.layout.size }))
    }

    /// The slot, for another use: the snapshot is given up.
    pub(crate) fn into_slot(self) -> Slot {
        self.slot
    }
}

/// A shard that is whole in its slot.
#[derive(Debug)]
pub(crate) struct SealedShard {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) header: u64,
    pub(crate) header_crc32c: Checksum,
    pub(crate) size: u64,
}
